"""The index's writing end: fed from a thread, off when it breaks, and cheap to read."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import apsw
import pytest

from callboard.ids import SessionRef
from callboard.storage import index as index_module
from callboard.storage import readers, source
from callboard.storage.catalog import CatalogQuery, list_sessions
from callboard.storage.index import CatalogRow, IndexFeed, IndexReader, IndexWriter
from callboard.storage.lines import NEVER
from callboard.storage.metadata import FileState, Scope
from callboard.storage.readers import open_home
from callboard.storage.sql import load
from tests.storage.readers.homes import T0, Book, HomeMaker, created, updated

WORKSPACE = "/u/my-app"


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, object]] = []

    def __call__(self, action: str, facts: Mapping[str, object]) -> None:
        self.lines.append((action, facts["cause"]))


def row_of(maker: HomeMaker, book: Book) -> CatalogRow:
    """The row as storage makes it of its own fold."""
    fold = open_home(maker.path).fold(book.ref)
    return CatalogRow.of(book.ref, fold, maker.home.transcript(book.ref).stat(), book.chain)


def titles(maker: HomeMaker) -> dict[str, str | None]:
    """What the table says, without a look at the files."""
    with IndexReader(maker.home, "a" * 32) as reader:
        rows = reader.page(Scope(None, True, False), None, NEVER >> 1)
        return {row.ref.session_id: row.metadata.title for row in rows}


def applied(maker: HomeMaker) -> int:
    with IndexReader(maker.home, "a" * 32) as reader:
        return reader.applied


def test_a_row_is_kept_as_it_is(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE, title="é\0'\"", extra={"a": [1, None]}, relation="fork")
    row = row_of(maker, book)
    assert CatalogRow.from_values(row.values()) == row
    writer = IndexWriter.open(maker.home, 0)
    writer.apply([row], 1)
    with IndexReader(maker.home, "a" * 32) as reader:
        assert reader.row(book.ref) == row
        assert reader.row(SessionRef("x", "y")) is None
    writer.close()


def test_the_feed_writes_what_it_is_given(maker: HomeMaker) -> None:
    books = [maker.new(f"s{n}", WORKSPACE) for n in range(3)]
    feed = IndexFeed.start(maker.home, maker.last)
    for n in range(20):
        for book in books:
            maker.commit((book, [updated(title=f"{book.ref.session_id} {n}")]))
        feed.apply([row_of(maker, book) for book in books], maker.last)
    feed.close()
    assert titles(maker) == {f"s{n}": f"s{n} 19" for n in range(3)}
    assert applied(maker) == maker.last
    feed.apply([row_of(maker, books[0])], maker.last)  # after its end nothing happens
    feed.close()


def test_the_feed_never_waits(maker: HomeMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the index is rebuilt, rows wait with one place for each session."""
    book = maker.new("s1", WORKSPACE)
    going, slow = threading.Event(), threading.Event()

    class Slow(IndexWriter):
        @classmethod
        def open(cls, *args: object, **_: object) -> IndexWriter:
            going.set()
            slow.wait(10)
            return IndexWriter.open(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(index_module, "IndexWriter", Slow)
    feed = IndexFeed.start(maker.home, maker.last)
    going.wait(10)
    for n in range(50):
        maker.commit((book, [updated(title=str(n))]))
        feed.apply([row_of(maker, book)], maker.last)
    slow.set()
    feed.close()
    assert titles(maker) == {"s1": "49"}


@pytest.mark.damages_home("the index is broken")
def test_a_broken_index_is_no_error_of_a_write(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.home.index.mkdir()
    log = Log()
    feed = IndexFeed.start(maker.home, maker.last, log)
    for _ in range(5):
        feed.apply([row_of(maker, book)], maker.last)
    feed.close()
    assert log.lines == [("index_off", "home_unsafe")]


def test_an_index_that_broke_comes_back_with_what_it_missed(
    maker: HomeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = maker.new("one", WORKSPACE), maker.new("two", WORKSPACE)
    log = Log()
    writer = IndexWriter.open(maker.home, maker.last, log)

    def broken(*_: object) -> None:
        raise apsw.FullError

    with monkeypatch.context() as patch:
        patch.setattr(index_module, "_put", broken)
        maker.commit((one, [updated(title="missed")]))
        writer.apply([row_of(maker, one)], maker.last)
    assert log.lines == [("index_off", "FullError")]
    maker.commit((two, [updated(title="seen")]))
    writer.apply([row_of(maker, two)], maker.last)
    assert [writer.on] == [False]  # not at once
    monkeypatch.setattr(index_module, "INDEX_RETRY_MS", 0)
    writer._off(apsw.FullError())  # pyright: ignore[reportPrivateUsage]
    writer.apply([row_of(maker, two)], maker.last)
    assert [writer.on, len(log.lines)] == [True, 1]
    assert titles(maker) == {"one": "missed", "two": "seen"}
    assert applied(maker) == maker.last
    writer.close()


def test_a_start_looks_again_at_what_has_changed(maker: HomeMaker) -> None:
    one, two = maker.new("one", WORKSPACE), maker.new("two", WORKSPACE)
    gone = maker.new("gone", WORKSPACE)
    IndexWriter.open(maker.home, maker.last).close()
    maker.commit((one, [updated(title="changed")]))
    maker.new("new", WORKSPACE)
    maker.home.transcript(gone.ref).unlink()
    read: list[str] = []
    real = source.read_from

    def read_from(path: Path) -> Iterator[bytes]:
        read.append(path.parent.name)
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "read_from", read_from)
        IndexWriter.open(maker.home, maker.last).close()
    assert sorted(read) == ["new", "one"]
    assert titles(maker) == {"one": "changed", "two": None, "new": None}
    assert two.ref.session_id == "two"


@pytest.mark.damages_home("the index is told of commits that the journal does not have")
def test_the_applied_commit_never_falls(maker: HomeMaker) -> None:
    maker.new("s1", WORKSPACE)
    writer = IndexWriter.open(maker.home, 7)
    writer.apply([], 5)
    assert applied(maker) == 7
    writer.apply([], 9)
    writer.close()
    IndexWriter.open(maker.home, 3).close()
    assert applied(maker) == 9


def test_every_file_of_it_is_its_owners_alone(maker: HomeMaker) -> None:
    maker.new("s1", WORKSPACE)
    before = os.umask(0)
    try:
        writer = IndexWriter.open(maker.home, maker.last)
        writer.apply([], maker.last)
        modes = {path.name: path.stat().st_mode & 0o777 for path in maker.path.glob("index*")}
        writer.close()
    finally:
        os.umask(before)
    assert modes == {
        "index.sqlite3": 0o600,
        "index.sqlite3-wal": 0o600,
        "index.sqlite3-shm": 0o600,
    }
    maker.home.index.chmod(0o644)
    IndexWriter.open(maker.home, maker.last).close()
    assert maker.home.index.stat().st_mode & 0o777 == 0o600


def test_how_it_is_kept(maker: HomeMaker) -> None:
    writer = IndexWriter.open(maker.home, 0)
    db = writer._db  # pyright: ignore[reportPrivateUsage]
    assert db is not None

    def pragma(name: str) -> object:
        return next(db._run(f"PRAGMA {name}", ()))[0]  # pyright: ignore

    assert pragma("journal_mode") == "wal"
    assert pragma("synchronous") == 1  # NORMAL
    assert pragma("page_size") == 4_096
    assert pragma("busy_timeout") == 5_000
    assert pragma("foreign_keys") == 1
    writer.close()


def test_a_small_block_on_a_full_disk_means_no_index(
    maker: HomeMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    maker.new("s1", WORKSPACE)
    maker.stop()
    IndexWriter.open(maker.home, maker.last).close()
    real = os.statvfs(maker.path)
    full = os.statvfs_result((1_024, 1_024, 10, 10, 10, *tuple(real)[5:]))

    def statvfs(_: Path) -> os.statvfs_result:
        return full

    monkeypatch.setattr(os, "statvfs", statvfs)
    log = Log()
    assert not IndexWriter.open(maker.home, maker.last, log).on
    assert log.lines == [("index_off", "disk")]
    with caplog.at_level(logging.WARNING):
        assert list_sessions(maker.home, CatalogQuery()).source == "scan"
    assert "disk" in caplog.text


def test_a_page_reads_the_index_and_little_else(
    maker: HomeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No scan of the table, no sorting, as many stats as rows, no transcript opened."""
    for n in range(300):
        book = maker.book(f"s{n:03}", f"/u/{n % 3}")
        entries = [created(book.ref, book.workspace, T0 + n * 7 % 50)]
        maker.write(maker.home.transcript(book.ref), book.lines(1, entries))
    maker.last = 1
    maker.stop()
    IndexWriter.open(maker.home, maker.last).close()
    plans = {
        name: _plan(maker.home.index, load("index")[name].text)
        for name in ("page", "page_of_workspace", "moved", "row", "damaged")
    }
    assert "sessions_by_recency" in plans["page"]
    assert "sessions_of_workspace" in plans["page_of_workspace"]
    assert "sessions_by_commit" in plans["moved"]
    assert "sessions_damaged" in plans["damaged"]
    for plan in plans.values():
        assert "TEMP B-TREE" not in plan
    for name in ("page_of_workspace", "moved", "row"):
        assert "SCAN" not in plans[name]

    stats: list[SessionRef] = []
    real = readers.HomeReader.file

    def file(self: readers.HomeReader, ref: SessionRef) -> FileState | None:
        stats.append(ref)
        return real(self, ref)

    def opened(path: Path, start: int = 0, most: int = NEVER) -> Iterator[bytes]:
        assert path.name != "transcript.jsonl"
        return read_from(path, start, most)

    read_from = source.read_from
    monkeypatch.setattr(source, "read_from", opened)
    monkeypatch.setattr(readers.HomeReader, "file", file)
    found = list_sessions(maker.home, CatalogQuery(limit=50))
    assert (found.source, len(found.rows), len(stats)) == ("index", 50, 50)
    more = list_sessions(maker.home, CatalogQuery("/u/1", limit=50))
    assert (more.source, len(more.rows), len(stats)) == ("index", 50, 100)


def _plan(path: Path, text: str) -> str:
    code = (
        "import json,sys,apsw; db = apsw.Connection(sys.argv[1]); "
        "print(json.dumps([r[3] for r in db.execute('EXPLAIN QUERY PLAN ' + sys.argv[2], "
        "dict.fromkeys(['recency','key','session_id','as_of','archived','children',"
        "'workspace'], 1) if ':' in sys.argv[2] else (1, 1))]))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, str(path), text], capture_output=True, text=True, check=True
    )
    return " | ".join(json.loads(child.stdout))
