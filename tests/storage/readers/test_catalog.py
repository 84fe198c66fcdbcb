"""The catalog: order, pages, cursors, damage, and the same answer from index and files."""

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callboard.errors import (
    CursorInvalid,
    CursorScopeMismatch,
    InvalidRequest,
    NotFound,
    SessionDamaged,
    StorageUnreadable,
)
from callboard.home import Home, boot_id, pid_namespace, runtime_of, start_time
from callboard.ids import SessionRef, workspace_key
from callboard.storage import catalog, source
from callboard.storage.catalog import (
    CatalogPage,
    CatalogQuery,
    find_session,
    list_sessions,
    liveness,
)
from callboard.storage.cursor import Cursor, encode, scope_digest
from callboard.storage.index import CatalogRow, IndexWriter
from callboard.storage.readers import open_home
from tests.storage.readers.homes import (
    CURSOR_KEY,
    T0,
    Book,
    HomeMaker,
    created,
    flip,
    line_start,
    message,
    part,
    said,
    tree,
    turn_completed,
    turn_started,
    updated,
)

WORKSPACE = "/u/my-app"
Way = Literal["index", "scan"]
both = pytest.mark.parametrize("way", ["index", "scan"])


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process of its own, as far as the index is concerned."""
    monkeypatch.setattr(catalog, "indexes_off", catalog.IndexesOff())


def index(maker: HomeMaker, way: Way = "index") -> None:
    """Make the index anew, or remove it."""
    for path in maker.path.glob("index.sqlite3*"):
        path.unlink()
    if way == "index":
        writer = IndexWriter.open(maker.home, maker.last)
        assert writer.on
        writer.close()


def page(maker: HomeMaker, way: Way, **query: Any) -> CatalogPage:  # noqa: ANN401
    found = list_sessions(maker.home, CatalogQuery(**query))
    assert found.source == way
    return found


def names(found: CatalogPage) -> list[str]:
    return [row.ref.session_id for row in found.rows]


def walk(maker: HomeMaker, way: Way, **query: Any) -> list[list[str]]:  # noqa: ANN401
    """The ids of each page."""
    pages = [page(maker, way, **query)]
    while cursor := pages[-1].next_cursor:
        pages.append(page(maker, way, cursor=cursor, **query))
    assert {one.as_of for one in pages} == {pages[0].as_of}
    return [names(one) for one in pages]


def plain(found: CatalogPage) -> dict[str, object]:
    """What both paths must agree on (IDX-1)."""
    shown = found.to_json()
    for name in ("source", "warnings", "warnings_total"):
        del shown[name]
    return dict(json.loads(json.dumps(shown)))


def talk(maker: HomeMaker, book: Book, at: int, message_id: str | None = None) -> None:
    """Let a session have a message at an instant."""
    name = message_id or f"m{book.seq}"
    turn = f"turn_{book.seq:06}"
    maker.commit((book, [turn_started(turn), *said(name, "hi", at=at), turn_completed(turn)]))


# --- order and pages ------------------------------------------------------------------------------


@both
@pytest.mark.rule("CAT-2", "CAT-3", "CAT-5", "A19")
def test_order_and_pages(maker: HomeMaker, way: Way) -> None:
    parent = maker.new("oldest", WORKSPACE, T0)
    maker.new("same-b", WORKSPACE, T0 + 5)
    maker.new("newest", WORKSPACE, T0 + 9)
    maker.new("same-a", WORKSPACE, T0 + 5)
    maker.new("kid", WORKSPACE, T0 + 20, relation="child", parent=str(parent.ref))
    maker.stop()
    index(maker, way)
    assert walk(maker, way, limit=2) == [["newest", "same-a"], ["same-b", "oldest"]]
    assert walk(maker, way, limit=2, include_children=True)[0] == ["kid", "newest"]
    assert walk(maker, way, limit=4) == [["newest", "same-a", "same-b", "oldest"]]


@both
@pytest.mark.rule("CAT-2")
def test_equal_times_are_ordered_by_workspace_then_id(maker: HomeMaker, way: Way) -> None:
    spaces = ["/u/b", "/u/a", "/u/c"]
    refs = [maker.new(name, space).ref for space in spaces for name in ("B", "a", "_", "-")]
    maker.stop()
    index(maker, way)
    assert [row.ref for row in page(maker, way).rows] == sorted(refs)


@both
@pytest.mark.rule("CAT-2", "CAT-5", "A18")
def test_two_hundred_of_one_instant_are_walked_once_each(maker: HomeMaker, way: Way) -> None:
    ids = [f"s{n:03}" for n in range(200)]
    for name in ids:
        book = maker.book(name, WORKSPACE)
        maker.write(maker.home.transcript(book.ref), book.lines(1, [created(book.ref, WORKSPACE)]))
    maker.last = 1
    maker.stop()
    index(maker, way)
    pages = walk(maker, way, limit=20)
    assert [len(one) for one in pages] == [20] * 10
    assert [name for one in pages for name in one] == ids


@both
@pytest.mark.rule("PRJ-9", "A17")
def test_only_messages_change_the_order(maker: HomeMaker, way: Way) -> None:
    books = [maker.new(f"s{n}", WORKSPACE, T0 + n) for n in range(3)]
    before = [books[2], books[1], books[0]]
    changes: list[dict[str, object]] = [
        {"title": "new"},
        {"archived_at": T0},
        {"archived_at": None},
        {"settings": {}},
    ]
    for change in changes:
        maker.commit((books[0], [updated(T0 + 100, **change)]))
    maker.stop()
    index(maker, way)
    found = page(maker, way)
    assert names(found) == [book.ref.session_id for book in before]
    assert found.rows[2].last_activity_at == T0
    assert found.rows[2].updated_at == T0 + 100
    assert found.rows[2].title == "new"


@both
@pytest.mark.rule("CAT-3")
def test_archived_sessions_are_listed_apart(maker: HomeMaker, way: Way) -> None:
    one, two = maker.new("one", WORKSPACE), maker.new("two", WORKSPACE)
    maker.commit((one, [updated(archived_at=T0 + 1)]))
    maker.stop()
    index(maker, way)
    assert names(page(maker, way)) == ["two"]
    assert names(page(maker, way, archived=True)) == ["one"]
    assert page(maker, way, archived=True).rows[0].archived_at == T0 + 1
    assert two.ref.session_id == "two"


@both
@pytest.mark.rule("IDN-3", "A3")
def test_a_workspace_by_any_spelling(maker: HomeMaker, short_path: Path, way: Way) -> None:
    real = short_path / "demo"
    real.mkdir()
    (short_path / "link").symlink_to(real)
    maker.new("mine", os.path.realpath(real))
    maker.new("other", WORKSPACE)
    maker.stop()
    index(maker, way)
    for spelling in (real, short_path / "link", f"{short_path}/link/."):
        assert names(page(maker, way, workspace=str(spelling))) == ["mine"]


@both
@pytest.mark.rule("IDN-3")
def test_equal_ids_in_two_workspaces_are_two_sessions(maker: HomeMaker, way: Way) -> None:
    for space, title in (("/u/my-app", "one"), ("/u/my/app", "two")):
        book = maker.new("s1", space)
        maker.commit((book, [updated(title=title)]))
    maker.stop()
    index(maker, way)
    assert [row.title for row in page(maker, way, workspace="/u/my-app").rows] == ["one"]
    assert len(page(maker, way).rows) == 2


@pytest.mark.rule("CAT-1", "A20")
@pytest.mark.parametrize("limit", [0, 101, -1, 2.5, True, False, "50", None, float("nan")])
def test_limits_that_do_not_fit(maker: HomeMaker, limit: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidRequest) as refused:
        list_sessions(maker.home, CatalogQuery(limit=limit))
    assert refused.value.carried["field"] == "limit"


@pytest.mark.rule("CAT-1", "A20")
@pytest.mark.parametrize("workspace", ["relative/x", "~", "", "/a\0b", "/" + "a" * 4_097])
def test_workspaces_that_do_not_fit(maker: HomeMaker, workspace: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        list_sessions(maker.home, CatalogQuery(workspace=workspace))
    assert refused.value.carried["field"] == "workspace"


def test_what_is_listed_by_default(maker: HomeMaker) -> None:
    for n in range(51):
        maker.new(f"s{n}", WORKSPACE, T0 + n)
    maker.stop()
    assert len(page(maker, "scan").rows) == 50


# --- walking while things change ------------------------------------------------------------------


@both
@pytest.mark.rule("CAT-4", "A21", "A22")
def test_a_walk_is_of_its_first_moment(maker: HomeMaker, way: Way) -> None:
    books = [maker.new(f"s{n:02}", WORKSPACE, T0 + n) for n in range(10)]
    maker.stop()
    index(maker, way)
    first = page(maker, way, limit=3)
    assert names(first) == ["s09", "s08", "s07"]
    talk(maker, books[0], T0 + 1_000)
    maker.commit((books[5], [updated(title="renamed")]))
    maker.commit((books[2], [updated(archived_at=T0 + 1)]))
    maker.new("s10", WORKSPACE, T0 + 2_000)
    index(maker, way)
    found, cursor = list(first.rows), first.next_cursor
    while cursor:
        more = page(maker, way, limit=3, cursor=cursor)
        assert more.as_of == first.as_of
        found += more.rows
        cursor = more.next_cursor
    assert [row.ref.session_id for row in found] == [f"s{n:02}" for n in reversed(range(10))]
    assert found[4].title == "renamed"
    assert found[7].archived_at == T0 + 1
    assert found[9].last_activity_at == T0 + 1_000
    again = walk(maker, way, limit=100)
    assert len(again[0]) == 10
    assert again[0][:2] == ["s10", "s00"]


class Steps:
    """Operations on a home that a test draws; sessions by number."""

    def __init__(self, maker: HomeMaker) -> None:
        self.maker = maker
        self.books: list[Book] = []
        self.at = T0

    def create(self, n: int) -> None:
        if len(self.books) < 12:
            space = f"/u/{'ab'[n % 2]}"
            more = {"relation": "child", "parent": "x"} if n % 5 == 4 else {}
            self.books.append(self.maker.new(f"s{len(self.books)}", space, self.at + n % 3, **more))

    def talk(self, n: int) -> None:
        if self.books:
            talk(self.maker, self.books[n % len(self.books)], self.at + n % 4)

    def rename(self, n: int) -> None:
        if self.books:
            self.maker.commit((self.books[n % len(self.books)], [updated(title=f"t{n}")]))

    def archive(self, n: int) -> None:
        if self.books:
            value = None if n % 2 else self.at
            self.maker.commit((self.books[n % len(self.books)], [updated(archived_at=value)]))

    def damage(self, n: int) -> None:
        if self.books:
            path = self.maker.home.transcript(self.books[n % len(self.books)].ref)
            if path.read_bytes().count(b"\n") > 1:
                flip(path, line_start(path, 2) + 40)

    def run(self, steps: list[tuple[str, int]]) -> None:
        for name, n in steps:
            self.at += 1
            getattr(self, name)(n)


STEP = st.tuples(st.sampled_from(["create", "create", "talk", "talk", "rename"]), st.integers(0, 9))


@pytest.mark.rule("CAT-4", "CAT-5")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(STEP, max_size=20),
    st.lists(st.lists(STEP, max_size=4), min_size=1, max_size=4),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([None, "/u/a"]),
)
def test_walking_finds_each_session_once_whatever_happens(
    short_path: Path,
    before: list[tuple[str, int]],
    between: list[list[tuple[str, int]]],
    limit: int,
    children: bool,
    workspace: str | None,
) -> None:
    """Both paths: the same pages, each member of the first moment once, in its order then."""
    shutil.rmtree(short_path / "home", ignore_errors=True)
    maker = HomeMaker(short_path / "home")
    steps = Steps(maker)
    steps.run(before)
    maker.stop()
    query = CatalogQuery(workspace, include_children=children, limit=limit)
    index(maker)
    expected = list_sessions(maker.home, replace(query, limit=100))
    found: list[SessionRef] = []
    cursor: str | None = None
    for number in range(30):
        if 0 < number <= len(between):
            steps.run(between[number - 1])
            maker.stop()
            index(maker)
        by_index = list_sessions(maker.home, replace(query, cursor=cursor))
        hidden = maker.home.index.rename(maker.path / "hidden")
        by_scan = list_sessions(maker.home, replace(query, cursor=cursor))
        hidden.rename(maker.home.index)
        assert (by_index.source, by_scan.source) == ("index", "scan")
        assert plain(by_index) == plain(by_scan)
        found += [row.ref for row in by_index.rows]
        cursor = by_index.next_cursor
        if cursor is None:
            break
    assert found == [row.ref for row in expected.rows]


@pytest.mark.damages_home("transcripts are damaged, and the index is hidden beside itself")
@pytest.mark.rule("CAT-4")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["create", "create", "talk", "rename", "archive", "damage"]),
            st.integers(0, 9),
        ),
        max_size=25,
    ),
    st.integers(0, 25),
    st.booleans(),
    st.sampled_from(["stop", "crash", "stale"]),
)
def test_both_paths_agree_however_old_the_index_is(
    short_path: Path,
    operations: list[tuple[str, int]],
    indexed: int,
    archived: bool,
    ending: Literal["stop", "crash", "stale"],
) -> None:
    """The index is of an earlier commit; what came later is in the journal, or it is not used."""
    shutil.rmtree(short_path / "home", ignore_errors=True)
    maker = HomeMaker(short_path / "home")
    before = operations[:indexed]
    if ending == "crash":
        # A start writes files anew from the journal before it feeds an index: no index is ever
        # made of a file whose damage the journal still covers. What is damaged later stays in.
        before = [one for one in before if one[0] != "damage"]
    steps = Steps(maker)
    steps.run(before)
    index(maker)
    steps.run(operations[indexed:])
    if ending == "stop":
        maker.stop()
    elif ending == "stale":
        maker.checkpoint()
    query = CatalogQuery(archived=archived, include_children=True, limit=100)
    first = list_sessions(maker.home, query)
    maker.home.index.rename(maker.path / "hidden")
    second = list_sessions(maker.home, query)
    assert second.source == "scan"
    if ending == "crash" or indexed >= len(operations):
        assert first.source == "index"
    assert plain(first)["rows"] == plain(second)["rows"]


# --- cursors --------------------------------------------------------------------------------------


@pytest.mark.rule("CUR-2", "A28")
def test_a_cursor_goes_on_with_its_own_query_only(maker: HomeMaker) -> None:
    for n in range(4):
        maker.new(f"s{n}", "/u/a", T0 + n)
    maker.stop()
    cursor = list_sessions(maker.home, CatalogQuery("/u/a", limit=2)).next_cursor
    for other in (
        CatalogQuery("/u/b", limit=2, cursor=cursor),
        CatalogQuery(None, limit=2, cursor=cursor),
        CatalogQuery("/u/a", archived=True, limit=2, cursor=cursor),
        CatalogQuery("/u/a", include_children=True, limit=2, cursor=cursor),
    ):
        with pytest.raises(CursorScopeMismatch):
            list_sessions(maker.home, other)
    assert len(list_sessions(maker.home, CatalogQuery("/u/a", limit=1, cursor=cursor)).rows) == 1


@pytest.mark.damages_home("the index is a folder")
@pytest.mark.rule("CUR-3", "CUR-5", "A29", "A30")
def test_a_bad_cursor_is_refused_before_the_index_is_touched(
    maker: HomeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker.new("s1", WORKSPACE)
    maker.stop()
    index(maker)

    def touched(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("callboard.storage.index.IndexReader.__init__", touched)
    monkeypatch.setattr(source, "refs_in", touched)
    ref = SessionRef(workspace_key(WORKSPACE), "s1")
    scope = scope_digest({"kind": "catalog"})
    above = encode(Cursor("catalog", scope, maker.last + 1, 0, ref), bytes.fromhex(CURSOR_KEY))
    for cursor in ("", "***", "x" * 1_025, above):
        with pytest.raises(CursorInvalid):
            list_sessions(maker.home, CatalogQuery(cursor=cursor))


@pytest.mark.rule("CAT-4")
def test_a_cursor_is_still_good_after_years(maker: HomeMaker) -> None:
    books = [maker.new(f"s{n}", WORKSPACE, T0 + n) for n in range(4)]
    maker.stop()
    cursor = list_sessions(maker.home, CatalogQuery(limit=2)).next_cursor
    for n in range(50):
        talk(maker, books[n % 4], T0 + 100 + n)
    maker.stop()
    assert names(list_sessions(maker.home, CatalogQuery(cursor=cursor))) == ["s1", "s0"]


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.damages_home("one transcript is damaged")
@both
@pytest.mark.rule("A25")
def test_a_damaged_session_is_a_row_and_hides_nothing(maker: HomeMaker, way: Way) -> None:
    books: list[Book] = []
    for n in range(101):
        book = maker.book(f"s{n:03}", WORKSPACE)
        entries = [created(book.ref, WORKSPACE, T0 + n), updated(title="a"), updated(title="b")]
        maker.write(maker.home.transcript(book.ref), book.lines(1, entries))
        books.append(book)
    maker.last = 1
    maker.stop()
    index(maker, way)
    path = maker.home.transcript(books[50].ref)
    flip(path, line_start(path, 3) + 40)
    rows = [row for found in _pages(maker, way) for row in found.rows]
    assert len(rows) == 101
    assert [(row.ref.session_id, row.damage) for row in rows if row.state == "damaged"] == [
        ("s050", ("bad_line", 3))
    ]
    assert rows[50].title == "a"
    first = _pages(maker, way)[0]
    assert (first.warnings_total, first.warnings) == (1, (("s050", "bad_line"),))
    flip(path, 40)
    pages = _pages(maker, way)
    assert [len(found.rows) for found in pages] == [100]
    assert (pages[0].warnings_total, pages[0].next_cursor) == (1, None)
    if way == "index":  # the index learns of it when storage looks again
        index(maker, way)
        assert plain(_pages(maker, way)[0]) == plain(pages[0])
        assert _pages(maker, way)[0].warnings == (("s050", "bad_line"),)


def _pages(maker: HomeMaker, way: Way) -> list[CatalogPage]:
    pages = [page(maker, way, limit=100)]
    while cursor := pages[-1].next_cursor:
        pages.append(page(maker, way, limit=100, cursor=cursor))
    return pages


@pytest.mark.damages_home("a folder is copied")
@both
@pytest.mark.rule("IDN-4", "A5")
def test_a_copied_folder_is_listed_under_no_name(maker: HomeMaker, way: Way) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.stop()
    copy = SessionRef(book.ref.workspace_key, "s2")
    shutil.copytree(maker.home.session(book.ref), maker.home.session(copy))
    index(maker, way)
    found = page(maker, way)
    assert names(found) == ["s1"]
    assert found.warnings == (("s2", "identity_mismatch"),)
    with pytest.raises(SessionDamaged):
        find_session(open_home(maker.path), copy)
    assert find_session(open_home(maker.path), book.ref) == found.rows[0]


@pytest.mark.damages_home("a record is of a version to come")
@both
@pytest.mark.rule("REC-3")
def test_a_session_of_a_later_version_is_a_warning(maker: HomeMaker, way: Way) -> None:
    book, other = maker.new("s1", WORKSPACE), maker.new("s2", WORKSPACE)
    maker.commit((book, [("from_later", {})]))
    maker.stop()
    index(maker, way)
    found = page(maker, way)
    assert names(found) == [other.ref.session_id]
    assert found.warnings == (("s1", "format_unsupported"),)


@pytest.mark.damages_home("transcripts are damaged")
def test_warnings_are_bounded_and_counted(maker: HomeMaker) -> None:
    for n in range(25):
        book = maker.new(f"s{n:02}", WORKSPACE)
        flip(maker.home.transcript(book.ref), 40)
    maker.stop()
    for way in ("scan", "index"):
        if way == "index":
            index(maker)
        found = list_sessions(maker.home, CatalogQuery())
        assert (len(found.warnings), found.warnings_total, found.source) == (20, 25, way)


# --- what can go wrong with a home ----------------------------------------------------------------


@pytest.mark.rule("A27")
def test_no_home_is_an_empty_page(short_path: Path, maker: HomeMaker) -> None:
    nothing = open_home(short_path / "nothing")
    for home in (nothing, open_home(maker.path)):
        found = list_sessions(home, CatalogQuery())
        assert (found.rows, found.next_cursor, found.warnings_total) == ((), None, 0)


def _listed_by_somebody_else(path: Path) -> str:
    """List in a child under another uid; a fork, since another user may not start our Python."""
    there, here = os.pipe()
    pid = os.fork()
    if not pid:
        answer = b"failed"
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            list_sessions(Home(path), CatalogQuery())
            answer = b"listed"
        except StorageUnreadable:
            answer = b"unreadable"
        finally:
            os.write(here, answer)
            os._exit(0)
    os.close(here)
    with os.fdopen(there, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer.decode()


@pytest.mark.damages_home("everything is given to another user")
@pytest.mark.rule("A27")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become somebody else")
def test_an_unreadable_folder_is_said(maker: HomeMaker, short_path: Path) -> None:
    """Root may read everything, so somebody else tries."""
    book = maker.new("s1", WORKSPACE)
    maker.new("s2", "/u/other")
    maker.stop()
    subprocess.run(["chown", "-R", "65534:65534", str(short_path)], check=True)
    for path in (maker.home.session(book.ref).parent, maker.home.transcript(book.ref)):
        path.chmod(0)
        assert _listed_by_somebody_else(maker.path) == "unreadable"
        path.chmod(0o700)


@pytest.mark.damages_home("a transcript is taken away")
def test_a_session_that_vanishes_while_it_is_listed_is_skipped(
    maker: HomeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, kept = maker.new("s1", WORKSPACE), maker.new("s2", WORKSPACE)
    maker.stop()
    index(maker)
    shutil.rmtree(maker.home.session(gone.ref))
    assert names(page(maker, "index")) == ["s2"]
    maker.home.index.unlink()

    def listed(*_: object) -> Iterator[SessionRef]:
        return iter([gone.ref, kept.ref])

    monkeypatch.setattr("callboard.storage.readers.refs_in", listed)
    assert names(page(maker, "scan")) == ["s2"]


def break_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def break_zeros(path: Path) -> None:
    path.write_bytes(bytes(8_192))


def break_noise(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + os.urandom(8_000))


def break_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5_000])


def break_empty(path: Path) -> None:
    path.write_bytes(b"")


def break_schema(path: Path) -> None:
    _sqlite(path, "UPDATE state SET schema_version = 99")


def break_fold(path: Path) -> None:
    _sqlite(path, "UPDATE state SET fold_version = 99")


def break_home(path: Path) -> None:
    _sqlite(path, "UPDATE state SET home_id = 'another'")


def break_tables(path: Path) -> None:
    _sqlite(path, "DROP TABLE sessions")


def break_state(path: Path) -> None:
    _sqlite(path, "DROP TABLE state; CREATE TABLE state (a)")


def break_ahead(path: Path) -> None:
    _sqlite(path, "UPDATE state SET applied_commit = 1000000")


def _sqlite(path: Path, text: str) -> None:
    code = "import sqlite3,sys; d=sqlite3.connect(sys.argv[1]); d.executescript(sys.argv[2])"
    subprocess.run([sys.executable, "-c", code, str(path), text], check=True)


BREAKS = [value for name, value in list(globals().items()) if name.startswith("break_")]


@pytest.mark.damages_home("the index is broken")
@pytest.mark.rule("A27")
@pytest.mark.parametrize("damage", BREAKS)
def test_an_index_that_cannot_be_used(
    maker: HomeMaker,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same page from the files, and one line in the log; storage makes it anew."""
    for n in range(5):
        maker.new(f"s{n}", WORKSPACE, T0 + n)
    maker.stop()
    index(maker)
    expected = page(maker, "index", limit=3)
    damage(maker.home.index)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert plain(page(maker, "scan", limit=3)) == plain(expected)
    assert len([line for line in caplog.records if "index_off" in line.message]) == 1
    assert str(maker.path) not in caplog.text
    if damage is break_directory:
        return
    writer = IndexWriter.open(maker.home, maker.last)
    assert writer.on
    writer.close()
    monkeypatch.setattr(catalog, "indexes_off", catalog.IndexesOff())
    if damage is break_ahead:
        return  # a commit never goes back
    assert plain(page(maker, "index", limit=3)) == plain(expected)


@pytest.mark.rule("REC-7")
def test_listing_changes_nothing(maker: HomeMaker) -> None:
    for n in range(5):
        talk(maker, maker.new(f"s{n}", WORKSPACE, T0 + n), T0 + n)
    maker.stop()
    index(maker)
    before = tree(maker.path)
    page(maker, "index", limit=2)
    assert tree(maker.path) == before
    assert all(path.stat().st_mode & 0o077 == 0 for path in maker.path.glob("index.sqlite3*"))


# --- what a row says ------------------------------------------------------------------------------


@pytest.mark.damages_home("records bear an epoch that no lease gave")
@both
@pytest.mark.rule("A33", "A106")
def test_what_a_row_says(maker: HomeMaker, way: Way) -> None:
    book = maker.new("s1", WORKSPACE, T0, title="t", git_branch="main", settings={"a": "b"})
    book.epoch = 1
    maker.commit(
        (
            book,
            [
                turn_started("turn_1"),
                *said("m1", "hi", at=T0 + 3),
                message("m2", "assistant", T0 + 4),
                part("p1", "m2", "tool_call", call_id="c", name="n", input=1),
                part("p2", "m2", "tool_result", call_id="c", name="n", error="no"),
                *said("m3", "psst", at=T0 + 99, hidden=True),
                updated(T0 + 7, quarantine={"reason": "crash_loop", "since_at": T0 + 7}),
            ],
        )
    )
    maker.stop()
    index(maker, way)
    (row,) = page(maker, way).rows
    assert row == find_session(open_home(maker.path), book.ref)
    shown = json.loads(json.dumps(row.to_json()))
    assert shown == {
        "ref": str(book.ref),
        "workspace": WORKSPACE,
        "root": str(book.ref),
        "parent": None,
        "relation": None,
        "title": "t",
        "agent": "echo",
        "model": None,
        "permission_mode": "default",
        "settings": {"a": "b"},
        "extra": {},
        "created_at": T0,
        "first_message_at": T0 + 3,
        "last_message_at": T0 + 4,
        "last_activity_at": T0 + 4,
        "updated_at": T0 + 7,
        "message_count": 2,
        "has_errors": True,
        "turn_state": "active",
        "archived_at": None,
        "paused_at": None,
        "quarantine": {"reason": "crash_loop", "since_at": T0 + 7},
        "git_branch": "main",
        "state": "ok",
        "damage": None,
        "last_seq": 10,
        "last_commit": 2,
        "code_history_from_seq": 1,
    }


def test_a_session_that_is_not_there_is_not_found(maker: HomeMaker) -> None:
    maker.stop()
    with pytest.raises(NotFound):
        find_session(open_home(maker.path), SessionRef(workspace_key(WORKSPACE), "s1"))


# --- beside a plane -------------------------------------------------------------------------------


def test_beside_a_plane_a_late_index_is_made_up_for(maker: HomeMaker) -> None:
    """The index lags; what it misses comes from the journal's frames and the files."""
    one, two = maker.new("one", WORKSPACE, T0), maker.new("two", WORKSPACE, T0 + 1)
    index(maker)
    talk(maker, one, T0 + 50)
    maker.new("three", WORKSPACE, T0 + 40)
    maker.commit((two, [updated(title="unsynced")]))
    with maker.plane(synced=maker.last - 1):
        found = page(maker, "index")
        assert names(found) == ["one", "three", "two"]
        assert found.as_of == maker.last - 1
        assert found.rows[2].title is None


def test_beside_a_plane_the_index_may_be_ahead_of_a_reader(maker: HomeMaker) -> None:
    one = maker.new("one", WORKSPACE, T0)
    with maker.plane():
        reader = open_home(maker.path)
        maker.new("two", WORKSPACE, T0 + 1)
        index(maker)
        maker.durable(maker.last, maker.last)
        found = list_sessions(reader, CatalogQuery(limit=1))
        assert (found.source, found.as_of, names(found)) == ("index", 2, ["two"])
        more = list_sessions(reader, CatalogQuery(limit=1, cursor=found.next_cursor))
        assert names(more) == ["one"]
        assert one.ref == more.rows[0].ref


def test_a_row_that_grew_is_read_from_where_it_ended(maker: HomeMaker) -> None:
    """Of a transcript that only grew, what stands before is not read again."""
    book = maker.new("s1", WORKSPACE)
    for n in range(5):
        talk(maker, book, T0 + n)
    index(maker)
    known = len(book.transcript)
    talk(maker, book, T0 + 100)
    maker.commit((book, [turn_started("turn_9"), updated(title="end")]))
    whole = page(maker, "index").rows[0]
    path = maker.home.transcript(book.ref)
    inode = path.stat().st_ino
    with path.open("r+b") as file:
        file.write(b"\0" * known)
    assert path.stat().st_ino == inode
    reader = open_home(maker.path)
    offsets: list[int] = []
    real = source.read_from

    def read_from(path: Path, start: int = 0, most: int = 1 << 60) -> object:
        if path.name == "transcript.jsonl":
            offsets.append(start)
        return real(path, start, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "read_from", read_from)
        row = list_sessions(reader, CatalogQuery()).rows[0]
    assert row.message_count == whole.message_count == 6
    assert (row.title, row.turn_state, row.last_activity_at) == ("end", "active", T0 + 100)


@pytest.mark.damages_home("a transcript is replaced")
def test_a_row_that_only_seems_to_have_grown_is_read_whole(maker: HomeMaker) -> None:
    """Same file, longer, but not what the index knew: the transcript itself is the judge."""
    book = maker.new("s1", WORKSPACE)
    index(maker)
    path = maker.home.transcript(book.ref)
    changed = Book(book.ref, WORKSPACE)
    data = changed.lines(1, [created(book.ref, WORKSPACE, title="another"), updated(agent="a")])
    with path.open("r+b") as file:
        file.write(data)
    maker.stop()
    row = page(maker, "index").rows[0]
    assert (row.state, row.title, row.last_seq) == ("ok", "another", 2)


# --- liveness -------------------------------------------------------------------------------------


def lease(book: Book, pid: int, **more: object) -> bytes:
    fields = {
        "workspace_key": book.ref.workspace_key,
        "session_id": book.ref.session_id,
        "epoch": 1,
        "owner_pid": pid,
        "start_time": start_time(pid) or 1,
        "boot_id": boot_id(),
        "pid_ns": pid_namespace(),
        "nonce": "0" * 32,
        "plane_id": "p",
        "acquired_at": T0,
        "released_at": None,
    }
    return json.dumps(fields | more).encode()


@pytest.mark.damages_home("a lease is made unreadable")
def test_liveness_is_judged_when_it_is_asked_for(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    path = maker.home.lease(book.ref)

    def asked() -> str:
        return liveness(open_home(maker.path), book.ref)

    assert asked() == "passive"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    maker.write(path, lease(book, child.pid))
    assert asked() == "live"
    maker.write(path, lease(book, child.pid, pid_ns=1))
    assert asked() == "unknown"
    maker.write(path, lease(book, child.pid, released_at=T0))
    assert asked() == "passive"
    maker.write(path, lease(book, child.pid))
    child.communicate(b"\n")
    assert asked() == "lost"
    maker.write(path, lease(book, child.pid, boot_id="another"))
    assert asked() == "lost"
    maker.write(path, b"{}")
    assert asked() == "unknown"
    maker.commit(leases=[(str(book.ref), lease(book, child.pid, released_at=T0))])
    assert asked() == "passive"
    maker.stop()
    assert asked() == "unknown"  # the file again


def test_liveness_asks_for_the_lock_of_the_owner(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    actors = runtime_of(maker.path).actors
    maker.write(actors / ("0" * 32), b"")
    maker.write(maker.home.lease(book.ref), lease(book, 1 + os.getpid()))
    assert liveness(open_home(maker.path), book.ref) == "lost"


# --- the index's writing end ----------------------------------------------------------------------


def rows_of(maker: HomeMaker, *books: Book) -> list[CatalogRow]:
    reader = open_home(maker.path)
    return [
        CatalogRow.of(
            book.ref,
            reader.fold(book.ref),
            maker.home.transcript(book.ref).stat(),
            book.chain,
        )
        for book in books
    ]


def test_storage_feeds_the_index(maker: HomeMaker) -> None:
    one, two = maker.new("one", WORKSPACE, T0), maker.new("two", WORKSPACE, T0 + 1)
    writer = IndexWriter.open(maker.home, maker.last)
    talk(maker, one, T0 + 9)
    writer.apply(rows_of(maker, one, two), maker.last)
    maker.commit(ops=[])
    writer.apply([], maker.last)
    found = page(maker, "index")  # beside the writer
    assert names(found) == ["one", "two"]
    writer.close()
    assert sorted(path.name for path in maker.path.glob("index*")) == ["index.sqlite3"]
    assert plain(page(maker, "index")) == plain(found)
    with contextlib.suppress(FileNotFoundError):
        maker.home.index.unlink()
    assert plain(page(maker, "scan")) == plain(found)


def test_unreadable_is_no_index_matter(maker: HomeMaker) -> None:
    maker.new("one", WORKSPACE)
    maker.stop()
    index(maker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "lstat", _fail)
        with pytest.raises(StorageUnreadable):
            page(maker, "index")


def _fail(*_: object, **__: object) -> os.stat_result:
    raise OSError(5, "I/O error")
