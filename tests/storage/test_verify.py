"""verify: each kind of damage is found, in its file and at its place; nothing else ever is."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import apsw
import pytest

from callboard import testing
from callboard.home import Home, boot_id
from callboard.ids import SessionRef
from callboard.messages import InboxItem, Text
from callboard.records import PartCreated, Record, first_chain, link, split_chain
from callboard.storage.catalog import CatalogQuery, list_sessions
from callboard.storage.check import Expected, TranscriptCheck, against
from callboard.storage.findings import MEANINGS, Finding, Kind, first_of_each_file
from callboard.storage.frames import frames
from callboard.storage.verify import verify
from tests.storage.memory_disk import Draw
from tests.storage.readers.homes import (
    Entry,
    HomeMaker,
    acknowledged,
    put,
    said,
    turn_completed,
    turn_started,
    updated,
)
from tests.storage.small_home import (
    ARTIFACT,
    Ending,
    flip,
    found_in,
    kinds,
    lease_of,
    lines,
    offset_of,
    only,
    small_home,
    snapshot,
    the,
    totals,
    write,
)
from tests.storage.world import World

pytestmark = pytest.mark.damages_home("it is what these tests are about")
Damage = Callable[[Home], object]
KEY = the("done").workspace_key
DONE = f"sessions/{KEY}/done"
WAITS = f"sessions/{KEY}/waits"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Ending, Path]:
    """One home of each ending, to be copied."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "stop": small_home(folder / "stop", "stop").root,
        "kill": small_home(folder / "kill", "kill").root,
    }


@pytest.fixture
def home(models: dict[Ending, Path], tmp_path: Path) -> Home:
    return copy(models["stop"], tmp_path / "home")


def copy(model: Path, path: Path) -> Home:
    """Copy a home with its times, which the index compares; inodes are new, so rows are made so."""
    shutil.copytree(model, path, symlinks=True)
    with apsw.Connection(str(path / "index.sqlite3")) as db:
        for file in path.glob("sessions/*/*/transcript.jsonl"):
            db.execute(  # pyright: ignore[reportUnknownMemberType]
                "UPDATE sessions SET inode = ?, mtime_ns = ? WHERE session_id = ?",
                (file.stat().st_ino, file.stat().st_mtime_ns, file.parent.name),
            )
    return Home(path)


def as_it_was(path: Path, change: Callable[[], None]) -> None:
    """Change a file and give it its times back: what no stat shows (IDX-6b)."""
    before = path.stat()
    change()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# --- nothing wrong ------------------------------------------------------------------------------


@pytest.mark.rule("REC-7")
@pytest.mark.parametrize("ending", get_args(Ending))
def test_a_sound_home_has_no_finding_and_is_not_changed(
    models: dict[Ending, Path], tmp_path: Path, ending: Ending
) -> None:
    home = copy(models[ending], tmp_path / "home")
    before = snapshot(home)
    counted = totals(home)
    assert (counted.sessions, counted.records, counted.artifacts) == (3, 24, 1)
    assert not counted.plane_up
    assert snapshot(home) == before


def test_a_home_that_is_not_there_has_nothing_wrong(tmp_path: Path) -> None:
    assert list(verify(tmp_path / "none")) == []
    assert not (tmp_path / "none").exists()


# --- each damage --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plant:
    """A damage, and what has to be said of it."""

    name: str
    damage: Damage
    kind: Kind
    file: str
    line: int | None = None
    offset: Callable[[Home], int] | None = None


def transcript(home: Home) -> Path:
    return home.transcript(the("done"))


def start_of(line: int, file: Callable[[Home], Path] = transcript) -> Callable[[Home], int]:
    return lambda home: offset_of(file(home), line)


def edit_lines(path: Path, change: Callable[[list[bytes]], object]) -> None:
    found = lines(path)
    change(found)
    path.write_bytes(b"".join(one + b"\n" for one in found))


def swap(found: list[bytes]) -> None:
    found[3], found[4] = found[4], found[3]


def forge(path: Path, name: str, line: int, old: bytes, new: bytes) -> None:
    """Change a line and compute every check from there on again, as an attacker would."""
    found = lines(path)
    assert old in found[line - 1]
    chain = first_chain(name)
    out: list[bytes] = []
    for number, one in enumerate(found, 1):
        head, _ = split_chain(one)
        if number == line:
            head = head.replace(old, new)
        chain = link(chain, head)
        out.append(b'%b,"chain":"%b"}\n' % (head, chain.encode()))
    path.write_bytes(b"".join(out))


def forge_done(line: int, old: bytes, new: bytes) -> Damage:
    return lambda home: forge(transcript(home), str(the("done")), line, old, new)


def inbox(home: Home) -> Path:
    return home.inbox(the("waits"))


def edit_lease(session_id: str, **fields: object) -> Damage:
    def change(home: Home) -> None:
        found = lease_of(home, session_id) | fields
        text = json.dumps(found, separators=(",", ":"))
        home.lease(the(session_id)).write_text(text)

    return change


def drop_frames(home: Home) -> None:
    """Leave the lease to be judged by itself: the journal does not tell of it."""
    shutil.rmtree(home.journal)


def sql(home: Home, text: str) -> None:
    with apsw.Connection(str(home.index)) as db:
        db.execute(text)  # pyright: ignore[reportUnknownMemberType]


def artifact(home: Home) -> Path:
    return next((home.session(the("done")) / "artifacts").iterdir())


def segment(home: Home) -> Path:
    return home.journal / "0001.log"


def frame_of(path: Path, offset: int) -> int:
    """Where the frame begins that holds a byte which was changed."""
    return max(f.end for f in frames(memoryview(path.read_bytes())) if f.end <= offset)


def put_symlink(home: Home) -> None:
    path = transcript(home)
    elsewhere = home.root.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def put_fifo(home: Home) -> None:
    inbox(home).unlink()
    os.mkfifo(inbox(home), 0o600)


def rename_session(home: Home) -> None:
    home.session(the("new")).rename(home.session(the("other")))
    sql(home, "DELETE FROM sessions WHERE session_id = 'new'")


def cut_to_line(path: Path, line: int) -> None:
    os.truncate(path, offset_of(path, line))


PLANTS: tuple[Plant, ...] = (
    Plant("a bit of a transcript", lambda h: flip(transcript(h), offset_of(transcript(h), 5) + 40),
          "bad_line", f"{DONE}/transcript.jsonl", 5, start_of(5)),
    Plant("two lines swapped", lambda h: edit_lines(transcript(h), swap),
          "bad_line", f"{DONE}/transcript.jsonl", 4, start_of(4)),
    Plant("a line taken out", lambda h: edit_lines(transcript(h), lambda f: f.pop(6)),
          "bad_line", f"{DONE}/transcript.jsonl", 7, start_of(7)),
    Plant("a line doubled", lambda h: edit_lines(transcript(h), lambda f: f.insert(6, f[6])),
          "bad_line", f"{DONE}/transcript.jsonl", 8, start_of(8)),
    Plant("a seq doubled", forge_done(4, b'"seq":4', b'"seq":3'),
          "bad_line", f"{DONE}/transcript.jsonl", 4, start_of(4)),
    Plant("a seq jumped", forge_done(4, b'"seq":4', b'"seq":40'),
          "missing_records", f"{DONE}/transcript.jsonl", 4, start_of(4)),
    Plant("a run of NULs", lambda h: edit_lines(transcript(h), lambda f: f.insert(6, bytes(512))),
          "bad_line", f"{DONE}/transcript.jsonl", 7, start_of(7)),
    Plant("the last line end", lambda h: flip(transcript(h), transcript(h).stat().st_size - 1),
          "truncated", f"{DONE}/transcript.jsonl", 21, lambda h: offset_of(transcript(h), 21)),
    Plant("the last line end of a file that no checkpoint names",
          lambda h: flip(h.transcript(the("new")), h.transcript(the("new")).stat().st_size - 1),
          "torn_tail", f"sessions/{KEY}/new/transcript.jsonl", 1, lambda h: 0),
    Plant("a tail cut", lambda h: cut_to_line(transcript(h), 15),
          "truncated", f"{DONE}/transcript.jsonl", 15, lambda h: transcript(h).stat().st_size),
    Plant("a foreign line behind", lambda h: transcript(h).write_bytes(
        transcript(h).read_bytes() + b"{}\n"), "bad_line", f"{DONE}/transcript.jsonl", 22,
        start_of(22)),
    Plant("a tail that nobody ended", lambda h: transcript(h).write_bytes(
        transcript(h).read_bytes() + b'{"v":1,"se'), "torn_tail", f"{DONE}/transcript.jsonl", 22,
        lambda h: transcript(h).stat().st_size - 10),
    Plant("content and every check behind it changed", forge_done(4, b'"hi"', b'"ho"'),
          "unlike_checkpoint", f"{DONE}/transcript.jsonl", 21, start_of(21)),
    Plant("a record of a version to come", forge_done(6, b'{"v":1', b'{"v":2'),
          "format_unsupported", f"{DONE}/transcript.jsonl", 6, start_of(6)),
    Plant("a turn that ends twice", forge_done(6, b"turn_completed", b"turn_completes"),
          "format_unsupported", f"{DONE}/transcript.jsonl", 6, start_of(6)),
    Plant("a transcript gone", lambda h: transcript(h).unlink(),
          "transcript_missing", f"{DONE}/transcript.jsonl"),
    Plant("another session's transcript", lambda h: shutil.copyfile(
        h.transcript(the("waits")), transcript(h)), "identity_mismatch",
        f"{DONE}/transcript.jsonl", 1, start_of(1)),
    Plant("a folder renamed", rename_session, "identity_mismatch",
          f"sessions/{KEY}/other/transcript.jsonl", 1, lambda h: 0),
    Plant("a bit of an inbox", lambda h: flip(inbox(h), offset_of(inbox(h), 2) + 60),
          "inbox_corrupt", f"{WAITS}/inbox.jsonl", 2, start_of(2, inbox)),
    Plant("the last line end of an inbox", lambda h: flip(inbox(h), inbox(h).stat().st_size - 1),
          "inbox_corrupt", f"{WAITS}/inbox.jsonl", 3, start_of(3, inbox)),
    Plant("an inbox header of a format to come", lambda h: forge(
        inbox(h), str(the("waits")), 1, b'"format":1', b'"format":2'),
        "inbox_corrupt", f"{WAITS}/inbox.jsonl", 1, start_of(1, inbox)),
    Plant("an artifact altered", lambda h: flip(artifact(h), 5), "artifact_altered",
          f"{DONE}/artifacts/dab4532ecb8222defb0d83ab09826473e673a28275781632adc00af5d37106b3"),
    Plant("a lease cut", lambda h: os.truncate(h.lease(the("done")), 20),
          "lease_invalid", f"{DONE}/lease.json"),
    Plant("a lease of nobody", edit_lease("done", owner_pid="nobody"),
          "lease_invalid", f"{DONE}/lease.json"),
    Plant("another session's lease", lambda h: shutil.copyfile(
        h.lease(the("waits")), h.lease(the("done"))), "lease_invalid", f"{DONE}/lease.json"),
    Plant("a lease whose owner is no process", edit_lease("waits", owner_pid=0),
          "lease_invalid", f"{WAITS}/lease.json"),
    Plant("a lease gone", lambda h: h.lease(the("done")).unlink(),
          "lease_missing", f"{DONE}/lease.json"),
    Plant("a lease of another epoch", edit_lease("done", epoch=7),
          "lease_differs", f"{DONE}/lease.json"),
    Plant("a bit of a journal frame", lambda h: flip(segment(h), 4_000),
          "journal_damaged", "journal/0001.log", None, lambda h: frame_of(segment(h), 4_000)),
    Plant("a journal that is gone", drop_frames, "beyond_journal",
          f"{DONE}/transcript.jsonl", 1, start_of(1)),
    Plant("a row that says something else", lambda h: sql(
        h, "UPDATE sessions SET message_count = 99 WHERE session_id = 'done'"),
        "index_differs", "index.sqlite3"),
    Plant("a row too many", lambda h: sql(
        h, "UPDATE sessions SET session_id = 'gone' WHERE session_id = 'new'"),
        "index_differs", "index.sqlite3"),
    Plant("an index ahead of its journal", lambda h: sql(
        h, "UPDATE state SET applied_commit = 1000"), "index_differs", "index.sqlite3"),
    Plant("an index of a version to come", lambda h: sql(
        h, "UPDATE state SET schema_version = 1000"), "index_unusable", "index.sqlite3"),
    Plant("an index of zeros", lambda h: h.index.write_bytes(bytes(8_192)),
          "index_unusable", "index.sqlite3"),
    Plant("a home format to come", lambda h: h.format.write_bytes(
        h.format.read_bytes().replace(b'"format": 1', b'"format": 2')),
        "format_unsupported", "format.json"),
    Plant("no home format", lambda h: h.format.unlink(), "format_invalid", "format.json"),
    Plant("a home format of nonsense", lambda h: h.format.write_bytes(b"{}"),
          "format_invalid", "format.json"),
    Plant("another home's id", lambda h: h.format.write_bytes(h.format.read_bytes().replace(
        b'"home_id": "', b'"home_id": "f')), "journal_foreign", "journal"),
    Plant("a foreign file", lambda h: write(h.root / "notes.txt", b"mine"),
          "foreign_file", "notes.txt"),
    Plant("a foreign file in a session", lambda h: write(h.session(the("done")) / "x", b""),
          "foreign_file", f"{DONE}/x"),
    Plant("a name that is no artifact's", lambda h: write(
        h.session(the("done")) / "artifacts" / ("A" * 64), ARTIFACT),
        "foreign_file", f"{DONE}/artifacts/{'A' * 64}"),
    Plant("a folder that is no session", lambda h: write(h.sessions / KEY / "a b" / "x", b""),
          "foreign_file", f"sessions/{KEY}/a b"),
    Plant("a twin", lambda h: h.session(the("DONE")).mkdir(mode=0o700),
          "case_twin", f"sessions/{KEY}/done"),
    Plant("a loose file", lambda h: transcript(h).chmod(0o644),
          "wrong_mode", f"{DONE}/transcript.jsonl"),
    Plant("a loose folder", lambda h: h.sessions.chmod(0o755), "wrong_mode", "sessions"),
    Plant("a loose index", lambda h: h.index.chmod(0o640), "wrong_mode", "index.sqlite3"),
    Plant("a link in place of a file", put_symlink, "not_ours", f"{DONE}/transcript.jsonl"),
    Plant("a second name", lambda h: os.link(inbox(h), h.root.with_name("second")),
          "not_ours", f"{WAITS}/inbox.jsonl"),
    Plant("a FIFO", put_fifo,
          "not_ours", f"{WAITS}/inbox.jsonl"),
)  # fmt: skip


@pytest.mark.rule("T-16")
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_damage_is_found_in_its_place(home: Home, plant: Plant) -> None:
    plant.damage(home)
    before = snapshot(home)
    found = found_in(home)
    assert snapshot(home) == before
    hits = [one for one in found if (one.kind, one.file) == (plant.kind, plant.file)]
    assert hits, [one.text() for one in found]
    assert hits[0].line == plant.line
    if plant.offset is not None:
        assert hits[0].offset == plant.offset(home)
    assert hits[0].meaning.way_out
    of = plant.file.split("/")
    if (
        of[0] == "sessions"
        and len(of) == 4
        and plant.name not in ("a journal that is gone", "a folder renamed")
    ):
        assert {one.session for one in found} <= {f"{of[1]}/{of[2]}", None}


def test_the_plants_are_every_kind_but_those_of_tests_of_their_own() -> None:
    elsewhere = {
        "artifact_missing", "duplicate_record", "durable_invalid", "foreign_tail",
        "input_acknowledged", "input_missing", "law_broken", "lease_behind", "more_findings",
        "owner_unprovable", "unreadable",
    }  # fmt: skip
    assert {plant.kind for plant in PLANTS} | elsewhere == set(get_args(Kind))
    assert set(MEANINGS) == set(get_args(Kind))


# --- kinds that need a home made by hand ---------------------------------------------------------


@pytest.fixture
def maker(base: Path) -> HomeMaker:
    return HomeMaker(base / "home")


def test_a_record_with_an_id_that_was_is_named(home: Home) -> None:
    third = json.loads(lines(transcript(home))[2])["id"].encode()
    fourth = json.loads(lines(transcript(home))[3])["id"].encode()
    forge(transcript(home), str(the("done")), 4, fourth, third)
    found = only(home)
    assert (found.kind, found.line) == ("duplicate_record", 4)


def test_whole_lines_behind_the_journaled_end_are_foreign(
    models: dict[Ending, Path], tmp_path: Path
) -> None:
    home = copy(models["kill"], tmp_path / "home")
    end = transcript(home).stat().st_size
    with transcript(home).open("ab") as file:
        file.write(b"{}\n")
    found = only(home)
    assert (found.kind, found.line, found.offset) == ("foreign_tail", 22, end)


def test_an_input_that_waits_and_is_done_is_named(maker: HomeMaker) -> None:
    book = maker.new("s", "/u/a")
    maker.commit(ops=[(book, [put("i1")])])
    entries = [turn_started("t1", ["i1"]), acknowledged("t1", ["i1"]), turn_completed("t1", ["i1"])]
    maker.commit((book, entries))
    maker.stop()
    found = only(maker.home)
    assert (found.kind, found.detail) == ("input_acknowledged", "i1")
    assert found.file.endswith("/inbox.jsonl")


def test_an_input_that_a_turn_took_and_nobody_has_is_named(maker: HomeMaker) -> None:
    book = maker.new("s", "/u/a")
    maker.commit(ops=[(book, [put("i2")])])
    maker.commit((book, [turn_started("t1", ["i1"]), *said("m1", "x", inbox_message_id="i1")]))
    maker.stop()
    found = only(maker.home)
    assert (found.kind, found.detail) == ("input_missing", "i1")


ORDER = "a turn begins out of order"
ALONE = "an acknowledgement without its terminal"
BEGUN, ENDED = turn_started("t1"), turn_completed("t1")
LAWS: tuple[tuple[str, list[Entry]], ...] = (
    (ORDER, [BEGUN, turn_started("t2")]),
    (ORDER, [turn_started("t2"), turn_completed("t2"), BEGUN]),
    ("a turn ends that does not run", [BEGUN, ENDED, ENDED]),
    (ALONE, [BEGUN, acknowledged("t1", ["i"]), updated()]),
    (ALONE, [BEGUN, acknowledged("t1", ["i"])]),
    (ALONE, [BEGUN, acknowledged("t1", ["i"]), turn_completed("t1", ["other"])]),
)


@pytest.mark.parametrize(("law", "entries"), LAWS)
def test_a_record_that_breaks_a_law_is_named(
    maker: HomeMaker, law: str, entries: list[Entry]
) -> None:
    book = maker.new("s", "/u/a")
    maker.commit((book, entries))
    maker.stop()
    found = only(maker.home)
    assert (found.kind, found.detail) == ("law_broken", law)
    assert (found.line or 0) > 2


def test_numbers_that_fall_are_named(maker: HomeMaker) -> None:
    book = maker.new("s", "/u/a")
    book.epoch = 2
    maker.commit((book, [updated()]))
    book.epoch = 1
    maker.commit(
        (book, [updated()]), leases=[(str(book.ref), lease(book.ref, epoch=2, released_at=3))]
    )
    book.lines(1, [updated()])
    maker.write(maker.home.transcript(book.ref), book.transcript)
    maker.write(maker.home.lease(book.ref), lease(book.ref, epoch=2, released_at=3))
    maker.stop()
    details = [one.detail for one in found_in(maker.home)]
    assert details == ["its epoch falls", "its commit falls", "its epoch falls", "its time falls"]


def lease(ref: SessionRef, **fields: object) -> bytes:
    known: dict[str, object] = {
        "workspace_key": ref.workspace_key, "session_id": ref.session_id, "epoch": 1,
        "owner_pid": 2, "start_time": 1, "boot_id": boot_id(), "pid_ns": 1, "nonce": "a" * 32,
        "plane_id": "p", "acquired_at": 1, "released_at": None,
    }  # fmt: skip
    return json.dumps(known | fields, separators=(",", ":")).encode()


def test_an_owner_that_cannot_be_proven_is_named(maker: HomeMaker) -> None:
    book = maker.new("s", "/u/a")
    maker.commit((book, [updated()]), leases=[(str(book.ref), lease(book.ref))])
    found = only(maker.home)
    assert (found.kind, found.detail) == ("owner_unprovable", "epoch 1")
    assert "doctor" in found.meaning.way_out


def test_a_lease_below_its_records_is_named(maker: HomeMaker) -> None:
    book = maker.new("s", "/u/a")
    book.epoch = 3
    maker.commit((book, [updated()]))
    maker.write(maker.home.lease(book.ref), lease(book.ref, epoch=2, released_at=3))
    maker.stop()
    found = only(maker.home)
    assert (found.kind, found.detail) == ("lease_behind", "epoch 2 where 3 was")


def test_a_mark_that_does_not_fit_the_journal_is_named(maker: HomeMaker) -> None:
    maker.new("s", "/u/a")
    maker.mark()
    for synced, written in ((9, 1), (1, 2)):
        with maker.plane(synced, written):
            assert kinds(maker.home) == {"durable_invalid"}
    with maker.plane():
        assert kinds(maker.home) == set()


def test_an_artifact_that_a_message_names_must_be_there() -> None:
    ref, name = the("s"), "a" * 64
    named = {"artifact_id": name}
    payload = {"text": "excerpt", "prompt_artifact": named}
    check = TranscriptCheck(ref, "f", Expected(9), artifacts=frozenset())
    data = PartCreated.model_construct(part_type="text", payload=payload, message_id="m")
    record = Record(2, "", 1, 0, "", "part_created", None, data, "")
    list(check.take(record))
    (found,) = against(ref, "t", "i", check.seen, None)
    assert (found.kind, found.file, found.detail) == ("artifact_missing", "t", name)
    check = TranscriptCheck(ref, "f", Expected(9), artifacts=frozenset({name}))
    list(check.take(record))
    assert list(against(ref, "t", "i", check.seen, None)) == []


def test_an_artifact_that_an_input_names_must_be_there(maker: HomeMaker) -> None:
    book, name = maker.new("s", "/u/a"), "a" * 64
    op, data = put("i1")
    waiting = InboxItem.model_validate(data["item"])
    named: dict[str, object] = {"artifact_id": name}
    part = Text(type="text", text="excerpt", prompt_artifact=named)
    item = waiting.model_copy(update={"content": [part]})
    maker.commit(ops=[(book, [(op, {"item": item.model_dump(exclude_none=True)})])])
    maker.stop()
    found = only(maker.home)
    assert (found.kind, found.detail) == ("artifact_missing", name)
    assert found.file.endswith("/inbox.jsonl")


def test_an_artifact_of_a_real_message_that_is_taken_away_is_named(base: Path) -> None:
    with testing.plane(base) as plane:
        session = plane.create_session("echo", base)
        assert session.wait(session.send("word " * 20_000), timeout=30).ok
        home = Home(plane.home)
    assert kinds(home) == set()
    (artifact,) = home.sessions.glob("*/*/artifacts/*")
    artifact.unlink()
    found = only(home)
    assert (found.kind, found.detail) == ("artifact_missing", artifact.name)
    assert found.line is not None


def test_many_findings_of_one_file_are_cut_short(home: Home) -> None:
    edit_lines(transcript(home), lambda f: f.extend([b"x"] * 100))
    found = [one for one in found_in(home) if one.file == f"{DONE}/transcript.jsonl"]
    assert [one.kind for one in found] == ["bad_line"] * 20 + ["more_findings"]
    other = [Finding("bad_line", "a")] * 30 + [Finding("bad_line", "b")] * 2
    assert [one.file for one in first_of_each_file(other)] == ["a"] * 21 + ["b"] * 2


def test_what_cannot_be_read_is_named(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread
    inode = inbox(home).stat().st_ino

    def failing(fd: int, size: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == inode:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, size, offset)

    monkeypatch.setattr(os, "pread", failing)
    found = only(home)
    assert (found.kind, found.file) == ("unreadable", f"{WAITS}/inbox.jsonl")


def test_a_row_is_compared_when_no_stat_shows_a_change(home: Home) -> None:
    path = home.transcript(the("new"))
    as_it_was(path, lambda: forge(path, str(the("new")), 1, b'"agent":"echo"', b'"agent":"ohce"'))
    found = only(home)
    assert (found.kind, found.detail) == ("index_differs", "another state")


@pytest.mark.parametrize("seed", range(60))
def test_no_legal_crash_state_is_a_finding(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    world = World(segment_bytes=rng.choice([4_096, 1 << 20]), seed=seed)
    text = world.create()
    epoch = world.acquire(text).epoch
    for n in range(rng.randint(1, 8)):
        world.clock.pass_ms(5)
        world.turn(text, epoch, f"i{n}", f"turn_{n}")
        if rng.random() < 0.3:
            world.create(f"other-{n}")
        if rng.random() < 0.3:
            assert world.engine.checkpoints.now()
    world.disk = world.disk.crash(Draw(rng))
    home = Home(tmp_path / "home")
    for name, data in world.disk.home().items():
        if name.startswith("/home/"):
            write(home.root / name.removeprefix("/home/"), data)
    assert [one.text() for one in verify(home.root)] == []


@pytest.mark.rule("A86")
def test_a_transcript_that_was_cut_from_outside_is_named_and_listed_as_it_is(home: Home) -> None:
    os.truncate(transcript(home), offset_of(transcript(home), 15))
    page = list_sessions(home, CatalogQuery(include_children=True))
    home.index.rename(home.index.with_name("index.sqlite3-away"))
    scan = list_sessions(home, CatalogQuery(include_children=True))
    home.index.with_name("index.sqlite3-away").rename(home.index)
    assert (page.source, scan.source) == ("index", "scan")
    assert [row.to_json() for row in page.rows] == [row.to_json() for row in scan.rows]
    assert {one.session for one in found_in(home)} == {str(the("done"))}
