"""doctor: what it would do, what it does, and that nothing is destroyed (REC-4, LSE-4b)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from callboard import home as names
from callboard import messages as m
from callboard.errors import HomeInUse, PersistenceFailed
from callboard.home import Home
from callboard.ids import SessionRef, parse_ref
from callboard.records import stamp_record
from callboard.storage.doctor import Done, Examined, examine, repair
from callboard.storage.lines import Gap
from callboard.storage.readers import open_home
from callboard.storage.verify import verify
from tests.storage.process import Client, StorageProcess
from tests.storage.readers.homes import HomeMaker, updated
from tests.storage.small_home import (
    flip,
    found_in,
    kinds,
    lease_of,
    lines,
    offset_of,
    small_home,
    snapshot,
    the,
    write,
)
from tests.storage.test_verify import lease
from tests.storage.world import item

pytestmark = pytest.mark.damages_home("it is what these tests are about")
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def with_frames(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped home whose journal still has every frame."""
    return small_home(tmp_path_factory.mktemp("m") / "home").root


@pytest.fixture(scope="module")
def without_frames(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped home whose journal has the last frames only."""
    return small_home(tmp_path_factory.mktemp("m") / "home", segment_bytes=8_192).root


def copy(model: Path, path: Path) -> Home:
    shutil.copytree(model, path)
    os.unlink(path / "index.sqlite3")  # its rows name the inodes of another copy
    return Home(path)


@pytest.fixture
def home(with_frames: Path, tmp_path: Path) -> Home:
    return copy(with_frames, tmp_path / "home")


@pytest.fixture
def bare(without_frames: Path, tmp_path: Path) -> Home:
    return copy(without_frames, tmp_path / "home")


def transcript(home: Home) -> Path:
    return home.transcript(the("done"))


def planned(home: Home) -> list[str]:
    """What a dry run says; it must not change a byte."""
    before = snapshot(home)
    found = examine(home.root)
    assert snapshot(home) == before
    return [one.what for one in found.actions]


def repaired(home: Home) -> list[Done]:
    return list(repair(home.root))


def aside(home: Home, file: Path) -> bytes:
    (kept,) = home.root.glob(f"aside/*/{file.relative_to(home.sessions)}")
    return kept.read_bytes()


def starts(home: Home) -> None:
    """A storage actor takes the home, is sent to, and leaves it whole."""
    with_actor(home, lambda _client, _epoch: None)


def with_actor(home: Home, act: Callable[[Client, int], None]) -> None:
    storage = StorageProcess(home.root.parent)
    client = None
    try:
        storage.start()
        client = Client(storage.runtime, "gateway")
        hello = m.GatewayHello(nonce=client.nonce)
        act(client, client.ask(m.GatewayEpoch, hello, again_ms=100).epoch)
        assert storage.stop() == 0
    finally:
        if client is not None:
            client.close()
        storage.close()


# --- transcripts --------------------------------------------------------------------------------


TRANSCRIPT_DAMAGES: dict[str, Change] = {
    "bit": lambda path: flip(path, offset_of(path, 2) + 30),
    "last line end": lambda path: flip(path, path.stat().st_size - 1),
    "cut": lambda path: os.truncate(path, offset_of(path, 9)),
    "foreign line": lambda path: path.write_bytes(path.read_bytes() + b'{"no":"record"}\n'),
    "NULs": lambda path: path.write_bytes(
        path.read_bytes()[: offset_of(path, 3)] + bytes(700) + b"\n"
    ),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.rule("REC-4", "A10")
@pytest.mark.parametrize("damage", TRANSCRIPT_DAMAGES.values(), ids=TRANSCRIPT_DAMAGES)
def test_a_transcript_is_put_back_from_the_journal(
    home: Home, damage: Callable[[Path], object]
) -> None:
    path = transcript(home)
    before = path.read_bytes()
    damage(path)
    damaged = path.read_bytes()
    assert planned(home) == ["restore"]
    (done,) = repaired(home)
    assert done.result.startswith("kept as aside/")
    assert path.read_bytes() == before
    assert aside(home, path) == damaged
    assert kinds(home) == set()
    assert repaired(home) == []
    starts(home)
    assert kinds(home) == set()


@pytest.mark.rule("REC-4")
def test_a_transcript_that_is_gone_is_put_back(home: Home) -> None:
    before = transcript(home).read_bytes()
    transcript(home).unlink()
    assert planned(home) == ["restore"]
    assert [done.result for done in repaired(home)] == ["it was gone"]
    assert transcript(home).read_bytes() == before
    assert kinds(home) == set()


@pytest.mark.rule("REC-4", "A10")
def test_without_frames_what_is_sound_goes_into_a_new_session(bare: Home) -> None:
    path, ref = transcript(bare), the("done")
    good = lines(path)
    flip(path, offset_of(path, 5) + 30)
    damaged = path.read_bytes()
    assert planned(bare) == ["salvage"]
    (done,) = repaired(bare)
    assert path.read_bytes() == damaged
    new = salvaged(bare, ref)
    assert str(new) in done.result
    records = [json.loads(line) for line in lines(bare.transcript(new))]
    assert [one["seq"] for one in records] == list(range(1, len(good)))
    assert records[0]["data"]["parent"] == str(ref)
    assert records[0]["data"]["relation"] == "salvage"
    rest = [json.loads(line) for number, line in enumerate(good, 1) if number not in (1, 5)]
    for was, now in zip(rest, records[1:], strict=True):
        assert now["origin"] == {"session_id": "done", "seq": was["seq"], "id": was["id"]}
        assert [now[key] for key in ("type", "turn_id", "data")] == [
            was[key] for key in ("type", "turn_id", "data")
        ]
    (finding,) = found_in(bare)
    assert (finding.kind, finding.line, finding.salvaged_as) == ("bad_line", 5, str(new))
    assert repaired(bare) == []


@pytest.mark.rule("REC-4")
def test_a_salvaged_session_goes_on(bare: Home) -> None:
    flip(transcript(bare), offset_of(transcript(bare), 5) + 30)
    repaired(bare)
    new = salvaged(bare, the("done"))

    def send(client: Client, epoch: int) -> None:
        answer = client.call(m.Accept(session=str(new), gateway_epoch=epoch, item=item("next")))
        assert isinstance(answer, m.Accepted)

    with_actor(bare, send)
    assert [live.item.message_id for live in open_home(bare.root).inbox(new)] == ["next"]
    assert [one.is_open for one in found_in(bare)] == [False]


def test_what_was_salvaged_once_keeps_its_first_origin(bare: Home) -> None:
    flip(transcript(bare), offset_of(transcript(bare), 5) + 30)
    repaired(bare)
    first = salvaged(bare, the("done"))
    flip(bare.transcript(first), offset_of(bare.transcript(first), 7) + 30)
    repaired(bare)
    second = salvaged(bare, first)
    records = [json.loads(line) for line in lines(bare.transcript(second))]
    assert {one["origin"]["session_id"] for one in records[1:]} == {"done"}
    assert [one.is_open for one in found_in(bare)] == [False, False]


def test_artifacts_come_along(bare: Home) -> None:
    flip(transcript(bare), offset_of(transcript(bare), 5) + 30)
    repaired(bare)
    (artifact,) = (bare.session(the("done")) / "artifacts").iterdir()
    copied = bare.session(salvaged(bare, the("done"))) / "artifacts" / artifact.name
    assert copied.read_bytes() == artifact.read_bytes()


@pytest.mark.rule("REC-4")
def test_damage_that_a_start_has_found_before_is_salvaged(tmp_path: Path) -> None:
    home = small_home(tmp_path / "home", "kill")
    path = transcript(home)
    os.truncate(path, offset_of(path, 9))
    starts(home)
    (found,) = found_in(home)
    assert (found.kind, found.detail) == ("truncated", "found by an earlier start")
    short = path.read_bytes()
    assert [done.action.what for done in repaired(home)] == ["salvage"]
    assert path.read_bytes() == short
    assert [one.is_open for one in found_in(home)] == [False]
    starts(home)
    assert [one.is_open for one in found_in(home)] == [False]


def test_whose_transcript_nobody_knows_is_left_alone(bare: Home) -> None:
    flip(transcript(bare), 30)
    before = transcript(bare).read_bytes()
    assert planned(bare) == []
    assert repaired(bare) == []
    assert transcript(bare).read_bytes() == before
    assert kinds(bare) == {"bad_line"}


def test_a_torn_tail_is_cut_and_kept(bare: Home) -> None:
    path = bare.transcript(the("new"))
    before = path.read_bytes()
    path.write_bytes(before + b'{"v":1,"se')
    assert planned(bare) == ["cut_tail"]
    repaired(bare)
    assert path.read_bytes() == before
    assert aside(bare, path) == before + b'{"v":1,"se'
    assert kinds(bare) == set()


def salvaged(home: Home, ref: SessionRef) -> SessionRef:
    reader = open_home(home.root)
    for one in reader.refs():
        first = next(iter(reader.transcript(one)))
        if not isinstance(first, Gap) and getattr(first.data, "parent", None) == str(ref):
            return one
    raise AssertionError("nothing was salvaged")


# --- inboxes ------------------------------------------------------------------------------------


def test_an_inbox_is_put_back_from_the_journal(home: Home) -> None:
    path = home.inbox(the("waits"))
    before = path.read_bytes()
    flip(path, offset_of(path, 2) + 30)
    damaged = path.read_bytes()
    assert planned(home) == ["restore"]
    repaired(home)
    assert path.read_bytes() == before
    assert aside(home, path) == damaged
    assert kinds(home) == set()


def test_an_inbox_without_frames_is_named_and_left_alone(bare: Home) -> None:
    path = bare.inbox(the("waits"))
    flip(path, offset_of(path, 2) + 30)
    before = path.read_bytes()
    assert planned(bare) == []
    assert repaired(bare) == []
    assert path.read_bytes() == before
    assert kinds(bare) == {"inbox_corrupt"}


# --- leases -------------------------------------------------------------------------------------


LEASE_DAMAGES: dict[str, Change] = {
    "malformed": lambda path: path.write_bytes(b"{"),
    "gone": lambda path: path.unlink(),
    "another": lambda path: path.write_bytes(path.read_bytes().replace(b'"epoch":1', b'"epoch":9')),
}


@pytest.mark.rule("LSE-4")
@pytest.mark.parametrize("damage", LEASE_DAMAGES.values(), ids=LEASE_DAMAGES)
def test_a_lease_is_given_back_above_every_epoch(
    home: Home, damage: Callable[[Path], object]
) -> None:
    path = home.lease(the("done"))
    damage(path)
    assert planned(home) == ["release_lease"]
    (done,) = repaired(home)
    found = lease_of(home, "done")
    assert found["released_at"] is not None
    assert found["epoch"] == int(done.result.removeprefix("epoch "))
    assert int(str(found["epoch"])) > 1
    assert kinds(home) == set()


@pytest.mark.rule("LSE-4")
def test_an_owner_that_cannot_be_proven_loses_its_lease(tmp_path: Path) -> None:
    maker = HomeMaker(tmp_path / "home")
    book = maker.new("s", "/u/a")
    maker.commit((book, [updated()]), leases=[(str(book.ref), lease(book.ref, epoch=4))])
    assert kinds(maker.home) == {"owner_unprovable"}
    assert [done.result for done in repaired(maker.home)] == ["epoch 5"]
    found = json.loads(maker.home.lease(book.ref).read_bytes())
    assert (found["epoch"], found["nonce"]) == (5, "a" * 32)
    assert kinds(maker.home) == set()


# --- modes, index, and what nobody can put right ------------------------------------------------


def test_modes_are_put_right(home: Home) -> None:
    transcript(home).chmod(0o644)
    home.sessions.chmod(0o755)
    assert planned(home) == ["set_mode", "set_mode"]
    assert [done.result for done in repaired(home)] == ["0700", "0600"]
    assert kinds(home) == set()


def test_the_index_is_made_anew(home: Home) -> None:
    home.index.write_bytes(bytes(4_096))
    home.index.chmod(0o600)
    assert planned(home) == ["rebuild_index"]
    assert [done.result for done in repaired(home)] == ["kept as index.bad-1"]
    assert (home.root / "index.bad-1" / "index.sqlite3").read_bytes() == bytes(4_096)
    assert kinds(home) == set()
    home.index.write_bytes(bytes(4_096))
    assert [done.result for done in repaired(home)] == ["kept as index.bad-2"]


def test_a_damaged_journal_is_named_and_not_touched(home: Home) -> None:
    flip(home.journal / "0001.log", 4_000)
    flip(transcript(home), offset_of(transcript(home), 2) + 30)
    before = snapshot(home)
    found = examine(home.root)
    assert found.actions == ()
    assert {"journal_damaged", "bad_line"} == {one.kind for one in found.findings}
    (named,) = (one for one in found.findings if one.kind == "journal_damaged")
    assert named.offset is not None
    assert "backup" in named.meaning.way_out
    assert repaired(home) == []
    assert snapshot(home) == before


def test_one_session_alone(home: Home) -> None:
    transcript(home).chmod(0o644)
    flip(transcript(home), offset_of(transcript(home), 2) + 30)
    flip(home.inbox(the("waits")), 40)
    found = examine(home.root, str(the("waits")))
    assert isinstance(found, Examined)
    assert {one.session for one in found.findings} == {str(the("waits"))}
    list(repair(home.root, str(the("waits"))))
    assert kinds(home) == {"bad_line", "wrong_mode"}


def test_a_storage_actor_at_work_is_not_disturbed(home: Home) -> None:
    storage = StorageProcess(home.root.parent)
    try:
        storage.start()
        client = Client(storage.runtime, "gateway")
        client.ask(m.GatewayEpoch, m.GatewayHello(nonce=client.nonce), again_ms=100)
        client.close()
        flip(transcript(home), offset_of(transcript(home), 2) + 30)
        damaged = transcript(home).read_bytes()
        with pytest.raises(HomeInUse):
            repaired(home)
        assert transcript(home).read_bytes() == damaged
        assert examine(home.root).actions
        assert storage.stop() == 0
    finally:
        storage.close()


# --- interrupted --------------------------------------------------------------------------------


class Interrupted(BaseException):
    """The process ends here."""


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Have the n-th call that changes something on the disk not happen, nor any later one."""
    count = limit = 0

    def at(n: int) -> None:
        nonlocal count, limit
        count, limit = 0, n

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            nonlocal count
            count += 1
            if limit and count >= limit:
                raise Interrupted
            return real(*args, **more)

        return call

    for name in ("fsync", "fdatasync", "rename", "ftruncate", "pwrite", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(names, "write_all", counted(names.write_all))
    yield at
    monkeypatch.undo()


@pytest.mark.rule("REC-4")
@pytest.mark.parametrize("frames", [True, False])
def test_a_repair_may_be_interrupted_anywhere(
    with_frames: Path,
    without_frames: Path,
    tmp_path: Path,
    interrupt: Callable[[int], None],
    *,
    frames: bool,
) -> None:
    model = with_frames if frames else without_frames
    interrupt(0)
    before = (model / transcript(Home(model)).relative_to(model)).read_bytes()
    for n in range(1, 200):
        home = copy(model, tmp_path / f"home-{n}")
        flip(transcript(home), offset_of(transcript(home), 5) + 30)
        home.lease(the("done")).write_bytes(b"{")
        damaged = transcript(home).read_bytes()
        interrupt(n)
        try:
            repaired(home)
        except Interrupted:
            interrupt(0)
        else:
            break
        assert transcript(home).read_bytes() in (before, damaged)
        repaired(home)
        repaired(home)  # a lease of a session that was damaged a moment ago
        assert [one.text() for one in verify(home.root) if one.is_open and frames] == []
        assert transcript(home).read_bytes() == (before if frames else damaged)
    else:
        raise AssertionError("it was interrupted every time")
    assert n > 10


def test_a_disk_that_fails_is_said(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.lease(the("done")).write_bytes(b"{")

    def failing(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(PersistenceFailed):
        repaired(home)


def test_an_origin_stands_between_data_and_chain() -> None:
    ref = parse_ref(f"{the('s').workspace_key}/s")
    line, _ = stamp_record(
        ref, seq=1, record_id="0" * 32, commit=1, epoch=0, ts="t", kind="k", turn_id=None,
        data=b'{"a":1}', before="c", origin=b'{"seq":1}',
    )  # fmt: skip
    assert b'"data":{"a":1},"origin":{"seq":1},"chain":"' in line


def test_a_foreign_file_is_named_and_left(home: Home) -> None:
    write(home.root / "notes.txt", b"mine")
    assert planned(home) == []
    assert repaired(home) == []
    assert kinds(home) == {"foreign_file"}
