"""Reading a home: with the plane down or beside it, and around damage."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from callboard.errors import (
    FormatUnsupported,
    HomeUnsafe,
    InboxCorrupt,
    InvalidRequest,
    JournalDamaged,
    NotFound,
    SessionAmbiguous,
    SessionDamaged,
    StorageUnreadable,
)
from callboard.home import runtime_of
from callboard.ids import SessionRef, workspace_key
from callboard.limits import READ_RETRIES_MAX
from callboard.storage import source
from callboard.storage.frames import Damaged
from callboard.storage.lines import Gap
from callboard.storage.readers import HomeReader, open_home
from callboard.storage.views import history
from tests.storage.readers.homes import (
    Book,
    HomeMaker,
    created,
    flip,
    line_start,
    no_permission_checks,
    put,
    remove,
    said,
    tree,
    turn_completed,
    turn_started,
    types,
    updated,
)

WORKSPACE = "/u/my-app"
NOBODY = SessionRef(workspace_key(WORKSPACE), "nobody")


def turn(n: int, text: str) -> list[tuple[str, dict[str, object]]]:
    entries = [turn_started(f"turn_{n}"), *said(f"m{n}", text), turn_completed(f"turn_{n}")]
    return [(kind, dict(data)) for kind, data in entries]


def titles(reader: HomeReader, book: Book) -> str | None:
    return reader.fold(book.ref).title


def texts(reader: HomeReader, book: Book) -> list[str]:
    items = history(reader.transcript(book.ref)).items
    return ["gap" if isinstance(item, Gap) else item.content for item in items]


# --- absent things --------------------------------------------------------------------------------


@pytest.mark.rule("CAT-8")
def test_a_home_that_does_not_exist_is_empty(short_path: Path) -> None:
    reader = open_home(short_path / "nothing")
    assert (reader.as_of, reader.plane_up, list(reader.refs())) == (0, False, [])
    for read in (reader.transcript, reader.lines, reader.inbox, reader.fold):
        with pytest.raises(NotFound):
            read(NOBODY)
    assert not (short_path / "nothing").exists()


@pytest.mark.rule("IDN-5")
def test_an_absent_session_is_refused_at_once(maker: HomeMaker) -> None:
    maker.new("s1", WORKSPACE)
    maker.stop()
    reader = open_home(maker.path)
    elsewhere = SessionRef(workspace_key("/u/other"), "s1")
    for read in (reader.transcript, reader.lines, reader.inbox, reader.fold, reader.project):
        for absent in (NOBODY, elsewhere):
            with pytest.raises(NotFound) as refused:
                read(absent)
            assert refused.value.to_wire() == {"code": "not_found"}


# --- after an orderly stop ------------------------------------------------------------------------


@pytest.mark.rule("REC-1", "REC-7")
def test_files_are_read_as_they_are_and_nothing_is_changed(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.commit((book, turn(1, "hello")), ops=[(book, [put("i1"), put("i2")])])
    maker.commit(ops=[(book, [remove("i1")])])
    maker.stop()
    before = tree(maker.path)
    reader = open_home(str(maker.path))
    assert (reader.as_of, reader.plane_up) == (3, False)
    assert types(reader, book) == [
        *("session_created", "turn_started", "message_created", "part_created"),
        "turn_completed",
    ]
    assert b"".join(x for x in reader.lines(book.ref) if isinstance(x, bytes)) == book.transcript
    assert [live.item.message_id for live in reader.inbox(book.ref)] == ["i2"]
    assert reader.fold(book.ref).turns == 1
    assert tree(maker.path) == before


@pytest.mark.damages_home("a line is damaged")
def test_reading_begins_where_it_is_asked_to(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    for n in range(5):
        maker.commit((book, [updated(title=str(n))]))
    maker.stop()
    flip(maker.home.transcript(book.ref), line_start(maker.home.transcript(book.ref), 3) + 40)
    reader = open_home(maker.path)
    seqs = [x if isinstance(x, Gap) else x.seq for x in reader.transcript(book.ref, 3)]
    size = len(book.transcript.split(b"\n")[2]) + 1
    assert seqs == [Gap(3, size, "bad_line"), 4, 5, 6]
    assert [x.seq for x in reader.transcript(book.ref, 5) if not isinstance(x, Gap)] == [5, 6]
    assert list(reader.lines(book.ref, 6)) == [book.transcript.splitlines(keepends=True)[5]]
    assert list(reader.lines(book.ref, 7)) == []


def test_a_session_without_an_inbox_has_an_empty_one(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.stop()
    assert open_home(maker.path).inbox(book.ref) == []


# --- with the plane down, after a crash -----------------------------------------------------------


@pytest.mark.rule("REC-6", "A11")
def test_what_stands_in_the_journal_alone_is_shown(maker: HomeMaker) -> None:
    old = maker.new("old", WORKSPACE)
    maker.checkpoint()
    maker.commit((old, turn(1, "needle-77")), files=False)
    fresh = maker.book("fresh", "/u/other")
    maker.commit(
        (fresh, [created(fresh.ref, "/u/other"), *turn(1, "needle-78")]),
        ops=[(fresh, [put("i1")])],
        files=False,
    )
    before = tree(maker.path)
    reader = open_home(maker.path)
    assert reader.as_of == 3
    assert texts(reader, old) == ["needle-77"]
    assert texts(reader, fresh) == ["needle-78"]
    assert [live.item.message_id for live in reader.inbox(fresh.ref)] == ["i1"]
    assert list(reader.refs()) == sorted([old.ref, fresh.ref])
    assert reader.find("fresh") == fresh.ref
    assert tree(maker.path) == before


@pytest.mark.rule("REC-6", "A11")
@pytest.mark.parametrize("cut", [0, 1, 50, 400])
def test_unsynced_bytes_of_a_file_do_not_matter(maker: HomeMaker, cut: int) -> None:
    """Below the first journaled offset the file counts, from there on the journal does."""
    book = maker.new("s1", WORKSPACE)
    maker.checkpoint()
    known = len(book.transcript)
    maker.commit((book, turn(1, "hello")))
    maker.commit((book, [updated(title="new")]))
    path = maker.home.transcript(book.ref)
    written = path.read_bytes()
    whole = list(open_home(maker.path).transcript(book.ref))
    for damaged in (written[: known + cut], written[:known] + b"\0" * (len(written) - known)):
        path.write_bytes(damaged)
        assert list(open_home(maker.path).transcript(book.ref)) == whole


@pytest.mark.rule("REC-6")
def test_a_torn_frame_at_the_journals_end_is_not_shown(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.commit((book, [updated(title="kept")]))
    kept = len(maker.journal.data)
    maker.commit((book, [updated(title="torn")]), files=False)
    segment = maker.home.journal / "0001.log"
    whole = segment.read_bytes()
    for cut in (kept, kept + 8, kept + 40, len(whole) - 8):
        segment.write_bytes(whole[:cut])
        reader = open_home(maker.path)
        assert (reader.as_of, titles(reader, book)) == (2, "kept")
    segment.write_bytes(whole)
    assert titles(open_home(maker.path), book) == "torn"


@pytest.mark.damages_home("the journal is damaged")
def test_damage_in_the_journal_is_said_and_never_read_around(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.commit((book, [updated(title="x")]))
    maker.mark()
    flip(maker.home.journal / "0001.log", len(maker.journal.data) - 100)
    with pytest.raises(JournalDamaged):
        open_home(maker.path)


@pytest.mark.damages_home("the journal is another home's")
def test_a_journal_of_another_home_is_refused(maker: HomeMaker) -> None:
    maker.new("s1", WORKSPACE)
    text = maker.home.format.read_text().replace("a" * 32, "b" * 32)
    maker.home.format.write_text(text)
    with pytest.raises(HomeUnsafe):
        open_home(maker.path)


@pytest.mark.rule("REC-6")
def test_a_compacted_inbox_in_the_journal_replaces_the_file(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.commit(ops=[(book, [put("i1"), put("i2"), remove("i1")])])
    maker.checkpoint()
    book.inbox = b""
    book.header(next_n=book.n + 1)
    book.op(*put("i2"), n=2)
    compacted, book.inbox = book.inbox, b""
    generation, chain = book.generation, book.inbox_chain
    maker.last += 1
    from callboard.storage.frames import Commit, Part

    name = maker.name(book, "inbox")
    maker.journal.add(maker.last, Commit((Part(name, generation, 0, compacted),)))
    book.inbox, book.inbox_chain = compacted, chain
    maker.commit(ops=[(book, [put("i3")])], files=False)
    found = open_home(maker.path).inbox(book.ref)
    assert [(live.n, live.item.message_id) for live in found] == [(2, "i2"), (4, "i3")]
    maker.home.inbox(book.ref).unlink()
    assert len(open_home(maker.path).inbox(book.ref)) == 2


@pytest.mark.damages_home("a transcript is cut")
@pytest.mark.rule("FLT-9")
def test_a_file_that_lost_what_the_checkpoint_promised_has_a_gap(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.commit((book, [updated(title="a"), updated(title="b")]))
    maker.checkpoint()
    known = len(book.transcript)
    maker.commit((book, [updated(title="c")]), files=False)
    path = maker.home.transcript(book.ref)
    path.write_bytes(book.transcript[: known - 30])
    found = list(open_home(maker.path).transcript(book.ref))
    last = len(book.transcript[:known].splitlines(keepends=True)[-1])
    assert [x if isinstance(x, Gap) else x.seq for x in found] == [
        1,
        2,
        Gap(3, last, "truncated"),
        4,
    ]


@pytest.mark.rule("FLT-9")
def test_lines_that_nobody_journaled_are_foreign(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.checkpoint()
    maker.commit((book, [updated(title="a")]))
    path = maker.home.transcript(book.ref)
    path.write_bytes(book.transcript + b"not ours\n")
    assert types(open_home(maker.path), book)[-1] == "gap:foreign_tail@3"
    path.write_bytes(book.transcript + b"torn")
    assert types(open_home(maker.path), book) == ["session_created", "session_updated"]


@pytest.mark.damages_home("a session is marked as damaged")
def test_damage_that_recovery_found_is_remembered(maker: HomeMaker) -> None:
    book, other = maker.new("s1", WORKSPACE), maker.new("s2", WORKSPACE)
    maker.stop(damaged=[Damaged(str(book.ref), "truncated", 2)])
    reader = open_home(maker.path)
    assert types(reader, book) == ["session_created", "gap:truncated@2"]
    assert types(reader, other) == ["session_created"]


# --- beside a plane -------------------------------------------------------------------------------


@pytest.mark.rule("REC-6")
def test_beside_a_plane_nothing_unsynced_is_shown(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.commit((book, [updated(title="synced")]), ops=[(book, [put("i1")])])
    maker.commit((book, [updated(title="not yet")]), ops=[(book, [put("i2")])])
    late = maker.new("late", WORKSPACE)
    with maker.plane(synced=2):
        reader = open_home(maker.path)
        assert (reader.as_of, reader.plane_up) == (2, True)
        assert titles(reader, book) == "synced"
        assert [live.item.message_id for live in reader.inbox(book.ref)] == ["i1"]
        with pytest.raises(NotFound):
            reader.transcript(late.ref)


@pytest.mark.rule("REC-6")
def test_beside_a_plane_the_files_may_be_late(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.checkpoint()
    maker.commit((book, [updated(title="synced")]), ops=[(book, [put("i1")])], files=False)
    maker.commit((book, [updated(title="not yet")]), files=False)
    with maker.plane(synced=2, written=1):
        started = time.monotonic()
        reader = open_home(maker.path)
        assert time.monotonic() - started >= 0.19
        assert (reader.as_of, titles(reader, book)) == (2, "synced")
        assert [live.item.message_id for live in reader.inbox(book.ref)] == ["i1"]
        assert reader.changed_since(1) == frozenset({book.ref})


@pytest.mark.rule("REC-6")
def test_a_reader_waits_a_little_for_the_files(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.commit((book, [updated(title="here")]))
    with maker.plane(synced=2, written=1):
        timer = threading.Timer(0.03, maker.durable, (5, 5))
        timer.start()
        reader = open_home(maker.path)
        timer.join()
        assert (reader.as_of, titles(reader, book)) == (2, "here")
        assert reader.changed_since(2) == frozenset()


@pytest.mark.rule("REC-6")
def test_while_the_plane_starts_the_journal_decides(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.commit((book, [updated(title="journaled")]), files=False)
    with maker.plane():
        runtime_of(maker.path).durable.unlink()
        reader = open_home(maker.path)
        assert (reader.as_of, reader.plane_up, titles(reader, book)) == (2, True, "journaled")


@pytest.mark.rule("REC-6")
def test_when_the_writer_ends_reading_goes_on_from_the_journal(maker: HomeMaker) -> None:
    """The writer dies and its successor cuts the file, in the middle of a reader's work."""
    book = maker.new("s1", WORKSPACE)
    maker.checkpoint()
    known = len(book.transcript)
    maker.commit((book, turn(1, "hello")))
    maker.commit((book, turn(2, "again")))
    with maker.plane():
        reader = open_home(maker.path)
        records = reader.transcript(book.ref)
        first = next(records)
        assert not isinstance(first, Gap)
    os.truncate(maker.home.transcript(book.ref), known)  # as a recovery does before it rewrites
    seqs = [x.seq for x in records if not isinstance(x, Gap)]
    assert seqs == list(range(2, 10))
    assert texts(reader, book) == ["hello", "again"]
    assert not reader.plane_up


@pytest.mark.rule("REC-6")
def test_a_reader_of_a_corrupt_inbox_looks_again_when_the_writer_has_gone(
    maker: HomeMaker,
) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.commit(ops=[(book, [put("i1"), put("i2")])])
    with maker.plane():
        reader = open_home(maker.path)
    path = maker.home.inbox(book.ref)
    path.write_bytes(path.read_bytes()[:-200] + b"\n")
    assert len(reader.inbox(book.ref)) == 2


@pytest.mark.rule("REC-6")
def test_a_segment_that_vanishes_makes_a_reader_start_over(
    maker: HomeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = maker.new("s1", WORKSPACE)
    looks: list[int] = []
    vanish = READ_RETRIES_MAX
    real = source.names_in

    def names(path: Path) -> list[str]:
        looks.append(1)
        if len(looks) <= vanish:
            return [*real(path), "0002.log"]  # listed, and gone before it is read
        return real(path)

    monkeypatch.setattr(source, "names_in", names)
    assert types(open_home(maker.path), book) == ["session_created"]
    assert len(looks) == READ_RETRIES_MAX + 1
    looks.clear()
    vanish += 1
    with pytest.raises(StorageUnreadable):
        open_home(maker.path)


def test_a_reader_takes_no_lock(maker: HomeMaker) -> None:
    maker.new("s1", WORKSPACE)
    maker.home.writer_lock.touch(mode=0o600)
    open_home(maker.path)
    code = "import fcntl,os,sys; fcntl.lockf(os.open(sys.argv[1], os.O_RDWR), 6)"
    taken = subprocess.run([sys.executable, "-c", code, str(maker.home.writer_lock)], check=False)
    assert taken.returncode == 0


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.damages_home("a byte is flipped")
@pytest.mark.rule("REC-3", "A9")
def test_reads_go_on_around_a_flipped_byte(maker: HomeMaker) -> None:
    book, other = maker.new("s1", WORKSPACE), maker.new("s2", WORKSPACE)
    maker.commit((book, [updated(title="private text")]))
    maker.commit((book, [updated(title="after")]))
    maker.stop()
    path = maker.home.transcript(book.ref)
    flip(path, path.read_bytes().index(b"private"))
    before = tree(maker.path)
    reader = open_home(maker.path)
    assert types(reader, book) == ["session_created", "gap:bad_line@2", "session_updated"]
    assert "private" not in repr(list(reader.transcript(book.ref))[1])
    assert titles(reader, book) == "after"
    assert types(reader, other) == ["session_created"]
    assert tree(maker.path) == before


@pytest.mark.damages_home("a folder is copied")
@pytest.mark.rule("IDN-4", "A5")
def test_a_copied_folder_is_not_its_name(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.stop()
    copy = SessionRef(book.ref.workspace_key, "s2")
    shutil.copytree(maker.home.session(book.ref), maker.home.session(copy))
    reader = open_home(maker.path)
    with pytest.raises(SessionDamaged) as refused:
        reader.transcript(copy)
    assert refused.value.carried == {"damage": "identity_mismatch", "line": 1}
    assert types(reader, book) == ["session_created"]


@pytest.mark.damages_home("transcripts are cut at each byte")
@pytest.mark.rule("REC-2", "A8")
def test_a_torn_last_line_is_not_there(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.commit((book, [updated(title="a"), updated(title="b")]))
    maker.stop()
    path = maker.home.transcript(book.ref)
    path.write_bytes(book.transcript + b'{"v":1,"se')
    assert [
        x.seq for x in open_home(maker.path).transcript(book.ref) if not isinstance(x, Gap)
    ] == [
        1,
        2,
        3,
    ]
    path.write_bytes(book.transcript[:10])
    with pytest.raises(NotFound):
        open_home(maker.path).transcript(book.ref)


@pytest.mark.damages_home("an inbox is damaged")
@pytest.mark.rule("INB-3")
def test_a_corrupt_inbox_is_said(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.commit(ops=[(book, [put("i1")])])
    maker.stop()
    flip(maker.home.inbox(book.ref), -30)
    with pytest.raises(InboxCorrupt):
        open_home(maker.path).inbox(book.ref)


# --- files that are none of ours ------------------------------------------------------------------


def replace_by(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    aside = path.with_name("aside")
    path.rename(aside)
    if kind == "symlink":
        path.symlink_to(aside)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.link(aside, path)


KINDS = ["symlink", "fifo", "folder", "link"]


@pytest.mark.damages_home("files are replaced by what is no file")
@pytest.mark.parametrize("kind", KINDS)
def test_a_transcript_or_an_inbox_that_is_no_plain_file(maker: HomeMaker, kind: str) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.commit(ops=[(book, [put("i1")])])
    maker.stop()
    replace_by(maker.home.inbox(book.ref), kind)
    with pytest.raises(InboxCorrupt):
        open_home(maker.path).inbox(book.ref)
    (maker.home.session(book.ref) / "aside").unlink()
    replace_by(maker.home.transcript(book.ref), kind)
    with pytest.raises(SessionDamaged):
        open_home(maker.path).transcript(book.ref)


@pytest.mark.damages_home("files are replaced by what is no file")
@pytest.mark.parametrize("kind", KINDS)
def test_a_journal_or_a_format_that_is_no_plain_file(maker: HomeMaker, kind: str) -> None:
    maker.new("s1", WORKSPACE)
    replace_by(maker.home.journal / "0001.log", kind)
    with pytest.raises(HomeUnsafe) as refused:
        open_home(maker.path)
    assert refused.value.carried["what"] == "journal"
    replace_by(maker.home.format, kind)
    with pytest.raises(HomeUnsafe) as refused:
        open_home(maker.path)
    assert refused.value.carried["what"] == "format"


@pytest.mark.damages_home("format.json is replaced")
@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('{"format": 2, "home_id": "a", "cursor_key": "%s"}' % ("0" * 64), FormatUnsupported),
        ('{"format": 1, "home_id": "a", "cursor_key": "short"}', HomeUnsafe),
        ("", HomeUnsafe),
        ("[]", HomeUnsafe),
    ],
)
def test_a_format_that_is_none_of_ours(
    maker: HomeMaker, content: str, error: type[Exception]
) -> None:
    maker.home.format.write_text(content)
    with pytest.raises(error):
        open_home(maker.path)


@pytest.mark.rule("CAT-8", "A27")
@pytest.mark.skipif(no_permission_checks(), reason="root may read everything")
def test_what_may_not_be_read_is_said(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.stop()
    maker.home.transcript(book.ref).chmod(0)
    with pytest.raises(StorageUnreadable):
        open_home(maker.path).transcript(book.ref)


@pytest.mark.damages_home("a folder is replaced by a file")
@pytest.mark.rule("CAT-8")
def test_a_folder_of_sessions_that_is_a_file_cannot_be_read(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.stop()
    shutil.rmtree(maker.home.sessions)
    maker.home.sessions.touch()
    with pytest.raises(StorageUnreadable):
        list(open_home(maker.path).refs())
    with pytest.raises(NotFound):
        open_home(maker.path).transcript(book.ref)


# --- finding --------------------------------------------------------------------------------------


@pytest.mark.rule("IDN-1")
def test_an_id_must_be_unique(maker: HomeMaker) -> None:
    one = maker.new("dup", "/u/a")
    two = maker.new("dup", "/u/b")
    maker.commit((two, [updated(archived_at=5)]))
    maker.new("alone", "/u/a", relation="child", parent=str(one.ref))
    maker.stop()
    reader = open_home(maker.path)
    with pytest.raises(SessionAmbiguous) as refused:
        reader.find("dup")
    assert refused.value.carried == {"workspaces": ["/u/a", "/u/b"]}
    for book in (one, two):
        assert reader.find(str(book.ref)) == book.ref
        assert reader.find("dup", book.workspace) == book.ref
    assert reader.find("alone").workspace_key == one.ref.workspace_key


@pytest.mark.rule("IDN-1", "IDN-2")
def test_what_is_not_there_is_not_found_and_what_is_no_name_is_refused(maker: HomeMaker) -> None:
    maker.new("s1", WORKSPACE)
    reader = open_home(maker.path)
    for text in ("nobody", str(NOBODY)):
        with pytest.raises(NotFound):
            reader.find(text)
    with pytest.raises(NotFound):
        reader.find("s1", "/u/other")
    for text in ("", "..", "a b", "x/s1", "../s1", f"{NOBODY.workspace_key}/../s1"):
        with pytest.raises(InvalidRequest):
            reader.find(text)
    with pytest.raises(InvalidRequest):
        reader.find("s1", "relative")


@pytest.mark.damages_home("foreign names are planted")
def test_folders_of_other_names_are_no_sessions(maker: HomeMaker) -> None:
    book = maker.new("s1", WORKSPACE)
    maker.stop()
    folder = maker.home.session(book.ref).parent
    (folder / ".staged-1").mkdir()
    (folder / "tombstones.jsonl").touch()
    (folder / "link").symlink_to(maker.home.session(book.ref))
    (maker.home.sessions / "stranger").mkdir()
    (maker.home.sessions / NOBODY.workspace_key.replace("my", "no")).touch()
    reader = open_home(maker.path)
    assert list(reader.refs()) == [book.ref]
    with pytest.raises(NotFound):
        reader.transcript(SessionRef(book.ref.workspace_key, "tombstones.jsonl"))
