"""What went wrong elsewhere, tried on a home: each test bears the id of the report it is after.

The ids are those of a log of public bug reports on programs like this one; titles are in our words.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import apsw
import pytest

from callboard.home import Home, boot_id, pid_namespace
from callboard.storage.catalog import CatalogQuery, list_sessions
from callboard.storage.doctor import repair
from callboard.storage.lines import Gap
from callboard.storage.readers import open_home
from callboard.storage.verify import verify
from tests.storage.readers.homes import (
    Book,
    Entry,
    HomeMaker,
    said,
    turn_completed,
    turn_started,
    updated,
)
from tests.storage.small_home import (
    flip,
    found_in,
    kinds,
    lines,
    offset_of,
    small_home,
    snapshot,
    the,
    write,
)
from tests.storage.test_verify import lease

pytestmark = pytest.mark.damages_home("damage is what these reports are about")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return small_home(tmp_path / "home")


@pytest.fixture
def maker(base: Path) -> HomeMaker:
    return HomeMaker(base / "home")


def of_titles(maker: HomeMaker, count: int) -> Book:
    """A session of so many records, in its file and in no frame."""
    book = maker.new("s", "/u/a")
    add(maker, book, [updated(title=f"t{n}") for n in range(count - 1)])
    return book


def add(maker: HomeMaker, book: Book, entries: list[Entry]) -> None:
    """Append records to a session's file, some at a time, since a book copies what it holds."""
    with maker.home.transcript(book.ref).open("ab") as file:
        for at in range(0, len(entries), 100):
            book.transcript = b""
            file.write(book.lines(1, entries[at : at + 100]))


def repaired(home: Home) -> list[str]:
    return [done.action.what for done in repair(home.root)]


def test_b001_records_behind_a_line_that_was_cut_are_kept(maker: HomeMaker) -> None:
    book = of_titles(maker, 7_000)
    path = maker.home.transcript(book.ref)
    found = lines(path)
    found[2_999] = found[2_999][:80]
    path.write_bytes(b"".join(one + b"\n" for one in found))
    maker.books.clear()
    maker.stop()
    (finding,) = found_in(maker.home)
    assert (finding.kind, finding.line) == ("bad_line", 3_000)
    assert open_home(maker.path).fold(book.ref).title == "t6998"
    assert repaired(maker.home) == ["salvage"]
    (new,) = (one for one in open_home(maker.path).refs() if one != book.ref)
    assert open_home(maker.path).fold(new).title == "t6998"
    assert len(lines(maker.home.transcript(new))) == 6_999


def test_b003_list_and_content_agree_behind_a_run_of_nuls(maker: HomeMaker) -> None:
    book = of_titles(maker, 40)
    path = maker.home.transcript(book.ref)
    found = lines(path)
    found.insert(20, bytes(500))
    path.write_bytes(b"".join(one + b"\n" for one in found))
    maker.books.clear()
    maker.stop()
    (finding,) = found_in(maker.home)
    assert (finding.kind, finding.line) == ("bad_line", 21)
    (row,) = list_sessions(maker.home, CatalogQuery()).rows
    assert row.title == open_home(maker.path).fold(book.ref).title == "t38"


def test_b005_a_torn_tail_never_fuses_with_what_comes_next(home: Home) -> None:
    path = home.transcript(the("done"))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"v":1,"seq":22,"id"')
    assert kinds(home) == {"torn_tail"}
    assert repaired(home) == ["restore"]
    assert path.read_bytes() == whole


def test_b008_a_missing_file_hides_nothing_else(home: Home) -> None:
    home.transcript(the("done")).unlink()
    found = {one.kind: one.session for one in found_in(home)}
    assert found["transcript_missing"] == str(the("done"))
    assert len(list(open_home(home.root).transcript(the("waits")))) == 2


def test_b012_a_file_that_was_half_rewritten_comes_back(home: Home) -> None:
    path = home.transcript(the("done"))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert repaired(home) == ["restore"]
    assert path.read_bytes() == whole


@pytest.mark.parametrize("report", ["b015", "b018"])
def test_b015_b018_separators_of_other_tools_are_text(maker: HomeMaker, report: str) -> None:
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg"
    book = maker.new("s", "/u/a")
    maker.commit((book, [turn_started("t"), *said("m", text + report), turn_completed("t")]))
    maker.stop()
    assert "\u2028".encode() in maker.home.transcript(book.ref).read_bytes()
    assert kinds(maker.home) == set()
    assert not any(isinstance(one, Gap) for one in open_home(maker.path).transcript(book.ref))


def test_b024_b032_size_alone_is_never_damage(maker: HomeMaker) -> None:
    book = maker.new("s", "/u/a")
    first = [turn_started("t"), *said("m", "x" * 219_000), turn_completed("t")]
    add(maker, book, [*first, *(updated(title="y" * 2_000) for _ in range(8_000))])
    assert maker.home.transcript(book.ref).stat().st_size > 18_000_000
    maker.books.clear()
    maker.stop()
    assert kinds(maker.home) == set()


def test_b033_b036_two_histories_in_one_file_are_told_apart(maker: HomeMaker) -> None:
    book = of_titles(maker, 10)
    other = Book(book.ref, book.workspace, chain=book.chain, seq=book.seq)
    mine = book.lines(1, [updated(title="mine")])
    theirs = other.lines(1, [updated(title="theirs")])
    with maker.home.transcript(book.ref).open("ab") as file:
        file.write(mine + theirs)
    assert json.loads(mine)["seq"] == json.loads(theirs)["seq"]
    maker.books.clear()
    maker.stop()
    (finding,) = found_in(maker.home)
    assert (finding.kind, finding.line) == ("bad_line", 12)
    assert open_home(maker.path).fold(book.ref).title == "mine"


def test_b038_b116_a_torn_index_is_named_and_made_anew(home: Home) -> None:
    rows = [row.to_json() for row in list_sessions(home, CatalogQuery()).rows]
    with home.index.open("r+b") as file:
        file.seek(4_096)
        file.write(os.urandom(8_192))
    assert kinds(home) == {"index_unusable"}
    assert [row.to_json() for row in list_sessions(home, CatalogQuery()).rows] == rows
    assert repaired(home) == ["rebuild_index"]
    assert kinds(home) == set()
    assert [row.to_json() for row in list_sessions(home, CatalogQuery()).rows] == rows


def test_b041_bytes_of_two_writers_in_one_another_are_named(home: Home) -> None:
    path = home.transcript(the("done"))
    found = lines(path)
    found[7] = found[7][:100] + found[8][:100] + found[7][100:]
    path.write_bytes(b"".join(one + b"\n" for one in found))
    (finding,) = found_in(home)
    assert (finding.kind, finding.line, finding.offset) == ("bad_line", 8, offset_of(path, 8))


def test_b048_an_empty_folder_beside_it_costs_no_session(home: Home) -> None:
    write(home.session(the("empty")) / "transcript.jsonl", b"")
    before = snapshot(home)
    assert kinds(home) == set()
    assert repaired(home) == []
    assert snapshot(home) == before


@pytest.mark.parametrize("pid", [2, os.getpid()])
def test_b085_b087_a_pid_that_another_has_now_proves_nothing(maker: HomeMaker, pid: int) -> None:
    book = maker.new("s", "/u/a")
    of_before = lease(
        book.ref, owner_pid=pid, start_time=1, boot_id=boot_id(), pid_ns=pid_namespace()
    )
    maker.commit((book, [updated()]), leases=[(str(book.ref), of_before)])
    assert kinds(maker.home) == set()


def test_b089_empty_locks_of_a_start_that_died_are_in_nobodys_way(home: Home) -> None:
    write(home.lock, b"")
    home.lease(the("done")).write_bytes(b"")
    assert kinds(home) == {"lease_invalid"}
    assert repaired(home) == ["release_lease"]
    assert kinds(home) == set()


def test_b114_the_index_is_checked_by_its_own_means_too(home: Home) -> None:
    with apsw.Connection(str(home.index)) as db:
        db.pragma("writable_schema", True)  # pyright: ignore[reportUnknownMemberType]
        db.execute("UPDATE sqlite_schema SET sql = replace(sql, 'recency,', 'created_at,')")  # pyright: ignore[reportUnknownMemberType]
    assert kinds(home) == {"index_unusable"}


def test_b141_b143_loose_modes_are_named_and_tightened(home: Home) -> None:
    for path in home.root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    found = list(verify(home.root))
    assert {one.kind for one in found} == {"wrong_mode"}
    assert set(repaired(home)) == {"set_mode"}
    assert kinds(home) == set()


def test_b009_reading_goes_on_where_writing_is_refused(home: Home) -> None:
    flip(home.transcript(the("done")), offset_of(home.transcript(the("done")), 5) + 20)
    assert len(list(open_home(home.root).transcript(the("done")))) == 21
    (finding,) = found_in(home)
    assert "doctor" in finding.meaning.way_out
