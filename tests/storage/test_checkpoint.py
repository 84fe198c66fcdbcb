"""Checkpoints, segments that go, inboxes that begin anew, and what a start does with the files."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from callboard import messages as m
from callboard.errors import SessionDamaged
from callboard.limits import INBOX_DEAD_BYTES_MAX, INBOX_FILE_BYTES_MAX, JOURNAL_SEGMENTS_MAX
from callboard.storage.checkpoint import COMPACTIONS_MAX
from callboard.storage.files import SyncJob
from callboard.storage.frames import Checkpoint, scan, unpack
from tests.storage.memory_disk import KeepAll, LoseAll
from tests.storage.second_reader import read_home
from tests.storage.world import World, appending, ending, item, ref, started


def transcript(text: str) -> str:
    return f"/home/sessions/{text}/transcript.jsonl"


def inbox(text: str) -> str:
    return f"/home/sessions/{text}/inbox.jsonl"


def busy(world: World, turns: int = 6, session_id: str = "s1") -> tuple[str, int]:
    text = world.create(session_id)
    epoch = world.acquire(text).epoch
    for n in range(turns):
        world.turn(text, epoch, f"m{n}", f"turn_{n:02d}")
    return text, epoch


@pytest.mark.rule("FLT-10")
def test_a_checkpoint_syncs_files_then_names_then_its_frame_then_drops() -> None:
    world = World(segment_bytes=4_000)
    text, _ = busy(world)
    assert len(world.engine.journal.numbers) > 2
    start = len(world.disk.log)
    assert world.engine.checkpoints.now()
    log = world.disk.log[start:]
    calls = [call for call, _ in log]
    folder = transcript(text).rpartition("/")[0]
    synced = log.index(("sync", transcript(text)))
    folders = [path for call, path in log if call == "sync_dir"]
    assert folders[:-1] == sorted({folder, *_parents(folder)})
    assert folders[-1] == "/home/journal"
    frame = max(n for n, call in enumerate(calls) if call == "datasync")
    assert synced < log.index(("sync_dir", folder)) < frame < calls.index("unlink")
    number = world.engine.journal.number
    assert world.engine.journal.numbers == [number]
    assert world.engine.journal.first == number
    found = scan(world.disk.content(f"/home/journal/{number:04d}.log"))
    payloads = [unpack(frame.payload) for frame in found.frames]
    (checkpoint,) = [one for one in payloads if isinstance(one, Checkpoint)]
    marks = {mark.file: mark for mark in checkpoint.files}
    mark = marks[f"sessions/{text}/transcript.jsonl"]
    data = world.disk.content(transcript(text))
    last = json.loads(data.splitlines()[-1])
    assert (mark.length, mark.last, mark.chain) == (len(data), last["seq"], last["chain"])


def _parents(folder: str) -> list[str]:
    found: list[str] = []
    while folder != "/home":
        folder = folder.rpartition("/")[0]
        found.append(folder)
    return found


@pytest.mark.rule("FLT-10", "FLT-9")
def test_frames_behind_a_checkpoint_are_replayed_though_they_stand_before_its_frame() -> None:
    """The slow half runs beside the engine: what was committed meanwhile is not in its syncs."""
    jobs: list[SyncJob] = []

    class Later:
        def start(self, job: SyncJob) -> None:
            jobs.append(job)

        def join(self) -> None:
            pass

    world = World(runner=Later)
    text, epoch = busy(world)
    world.engine.checkpoints.begin()
    world.turn(text, epoch, "late", "turn_late")
    jobs[0].run()
    world.engine.checkpoints.ended(jobs[0])
    assert world.engine.counters.checkpoints == 1
    world.turn(text, epoch, "later", "turn_later")
    expected = world.disk.content(transcript(text))
    world.crash(LoseAll())
    assert world.disk.content(transcript(text)) == expected
    assert "late" in read_home(world.disk.home())[text].acknowledged


@pytest.mark.rule("FLT-10")
def test_a_checkpoint_is_due_by_bytes_or_by_time() -> None:
    world = World(checkpoint_bytes=5_000)

    def due() -> bool:
        return world.engine.checkpoints.due

    text = world.create()
    assert not due()
    world.clock.pass_ms(30_000)
    assert due()
    world.engine.checkpoints.now()
    assert not world.engine.checkpoints.pending
    world.clock.pass_ms(60_000)
    assert not due()
    world.accept(text, "m1", "x" * 6_000)
    assert due()


@pytest.mark.rule("FLT-10")
def test_too_many_segments_bring_a_checkpoint_before_the_next_frame() -> None:
    world = World(segment_bytes=600)
    text = world.create()
    epoch = world.acquire(text).epoch
    for n in range(2 * JOURNAL_SEGMENTS_MAX):
        world.turn(text, epoch, f"m{n}", f"turn_{n:03d}")
        assert len(world.engine.journal.numbers) <= JOURNAL_SEGMENTS_MAX
    assert world.engine.counters.checkpoints > 1
    world.crash(LoseAll())
    assert len(read_home(world.disk.home())[text].acknowledged) == 2 * JOURNAL_SEGMENTS_MAX


@pytest.mark.rule("FLT-10", "INB-2")
def test_a_checkpoint_that_is_forced_while_another_runs_begins_no_inbox_anew() -> None:
    """It comes in the middle of a batch, whose frames were planned for the inbox as it was.

    Found by the simulator: the first of the two gave segments free, so the second one believed
    that nobody had forced it.
    """

    class Slow:
        def __init__(self) -> None:
            self.jobs: list[SyncJob] = []

        def start(self, job: SyncJob) -> None:
            self.jobs.append(job)

        def join(self) -> None:
            while self.jobs:
                self.jobs.pop().run()

    world = World(segment_bytes=600, runner=Slow)
    text, epoch = busy(world, 1)
    turns = 2 * JOURNAL_SEGMENTS_MAX
    for n in range(turns):
        if not world.engine.checkpoints.running:
            world.engine.checkpoints.begin()
        world.turn(text, epoch, f"n{n}", f"turn_{n + 10:03d}")
        assert not world.engine.sessions.damaged
    assert world.engine.counters.checkpoints > 1
    expected = world.disk.content(inbox(text)), world.disk.content(transcript(text))
    world.crash(LoseAll())
    assert (world.disk.content(inbox(text)), world.disk.content(transcript(text))) == expected
    assert len(read_home(world.disk.home())[text].acknowledged) == turns + 1


@pytest.mark.rule("FLT-6")
def test_a_frame_larger_than_a_segment_has_one_of_its_own() -> None:
    world = World(segment_bytes=4_096)
    text = world.create()
    world.accept(text, "big", "x" * 100_000)
    world.accept(text, "small")
    world.crash(LoseAll())
    assert list(read_home(world.disk.home())[text].live) == ["big", "small"]


@pytest.mark.rule("FLT-8", "FLT-5")
def test_a_clean_stop_leaves_nothing_to_recover_and_its_place_to_the_next_frame() -> None:
    world = World()
    text, _ = busy(world)
    assert world.engine.stop()
    data = world.disk.content("/home/journal/0001.log")
    home = {path: data for path, data in world.disk.home().items() if "journal" not in path}
    world.crash(LoseAll())
    assert world.engine.journal.number == 1
    assert {path: data for path, data in world.disk.home().items() if "journal" not in path} == home
    assert len(world.disk.content("/home/journal/0001.log")) < len(data)
    world.accept(text, "m9")
    world.crash(LoseAll())
    assert world.engine.journal.number == 2
    assert list(read_home(world.disk.home())[text].live) == ["m9"]


@pytest.mark.rule("FLT-5")
def test_a_clean_stop_whose_sync_was_lost_spoils_nothing_that_follows() -> None:
    """Its pages may say one thing and the disk another: the next frame is written over them."""
    world = World()
    text = world.create()
    world.accept(text, "m1")
    world.engine.checkpoints.now()
    size = len(world.disk.content("/home/journal/0001.log"))
    world.engine.stop()
    inode = world.disk.names["/home/journal/0001.log"]
    world.crash(KeepAll())
    after = world.disk.names["/home/journal/0001.log"]
    assert len(inode.seen) > size >= len(after.seen) - 32
    after.durable[size:] = b"\xff" * 100  # what a lost write left there
    world.accept(text, "m2")
    world.crash(LoseAll())
    assert list(read_home(world.disk.home())[text].live) == ["m1", "m2"]


@pytest.mark.rule("FLT-9", "F4")
def test_files_get_exactly_what_the_journal_holds() -> None:
    world = World()
    texts = [busy(world, 3, f"s{n}")[0] for n in range(3)]
    expected = {path: data for path, data in world.disk.home().items() if "jsonl" in path}
    for size in (0, 100, 700):
        disk = world.disk.crash(KeepAll())
        for text in texts:
            del disk.names[transcript(text)].seen[size:]
        world.disk = disk
        world.open()
        found = {path: data for path, data in world.disk.home().items() if "jsonl" in path}
        assert found == expected


@pytest.mark.rule("FLT-9", "R120")
@pytest.mark.parametrize("damage", ["truncated", "foreign_tail", "unsafe", "gone"])
def test_a_file_that_is_not_ours_any_more_damages_its_session_alone(damage: str) -> None:
    world = World()
    text, epoch = busy(world)
    other, _ = busy(world, 2, "other")
    world.engine.checkpoints.now()
    world.append(text, epoch, [started("turn_99", epoch, [], world)])
    disk = world.disk.crash(KeepAll())
    file = disk.names[transcript(text)]
    if damage == "truncated":
        del file.seen[500:]
    elif damage == "foreign_tail":
        file.seen += b'{"not":"ours"}\n'
    elif damage == "unsafe":
        file.unsafe = True
    else:
        del disk.names[transcript(text)]
    before = bytes(file.seen)
    world.disk = disk
    world.open()
    code = {"unsafe": "identity_mismatch", "gone": "truncated"}.get(damage, damage)
    for _ in range(2):  # it is still damaged after an orderly stop
        with pytest.raises(SessionDamaged) as caught:
            world.acquire(text)
        assert caught.value.carried["damage"] == code
        assert bytes(file.seen) == before
        world.acquire(other)
        assert world.engine.stop()
        world.crash()


@pytest.mark.rule("FLT-9", "REC-2")
def test_an_unterminated_tail_is_cut() -> None:
    world = World()
    text, epoch = busy(world)
    world.engine.checkpoints.now()
    world.append(text, epoch, [started("turn_99", epoch, [], world)])
    expected = world.disk.content(transcript(text))
    disk = world.disk.crash(KeepAll())
    disk.names[transcript(text)].seen += b'{"v":1,"se'
    world.disk = disk
    world.open()
    assert world.disk.content(transcript(text)) == expected


@pytest.mark.rule("FLT-11")
def test_a_segments_descriptor_stays_open_from_creation_to_removal() -> None:
    world = World(segment_bytes=3_000)
    busy(world)
    numbers = world.engine.journal.numbers
    assert len(numbers) > 2

    def open_segments() -> list[str]:
        return sorted(path for path, _ in world.disk.fds.values() if path.endswith(".log"))

    assert open_segments() == [f"/home/journal/{number:04d}.log" for number in numbers]
    syncs = {call for call, path in world.disk.log if path.endswith(".log")}
    assert syncs == {"create", "write", "sync", "datasync"}  # new ones whole, appends fdatasync
    world.engine.checkpoints.now()
    assert open_segments() == [f"/home/journal/{world.engine.journal.number:04d}.log"]


@pytest.mark.rule("FLT-15")
def test_storage_makes_names_through_one_module_only() -> None:
    """FLT-15c: `callboard.home` creates, links, renames and removes; storage asks it to."""
    banned = {"rename", "replace", "link", "symlink", "unlink", "remove", "mkdir", "makedirs"}
    banned |= {"rmdir", "removedirs", "open", "mkfifo"}
    folder = Path(__file__).parents[2] / "storage"
    for file in ("disk", "files", "segments", "recovery", "durable", "sessions", "engine", "actor"):
        for node in ast.walk(ast.parse((folder / f"{file}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                named = f"{node.value.id}.{node.attr}"
                assert node.value.id != "os" or node.attr not in banned, (file, named)


@pytest.mark.rule("FLT-16")
def test_a_new_home_says_what_it_is_only_when_that_is_durable() -> None:
    world = World()
    log = [call for call, path in world.disk.log if "format.json" in path or path == "/home"]
    assert log[:5] == ["create", "write", "sync", "rename", "sync_dir"]


# --- compaction -----------------------------------------------------------------------------------


@pytest.mark.rule("INB-2", "FLT-16")
def test_an_empty_inbox_begins_anew_at_a_checkpoint() -> None:
    world = World()
    text, epoch = busy(world)
    first = world.disk.content(inbox(text))
    start = len(world.disk.log)
    world.engine.checkpoints.now()
    data = world.disk.content(inbox(text))
    header = json.loads(data)
    assert data.count(b"\n") == 1
    assert header["next_n"] == 13  # six puts, six removes
    assert header["generation"] != json.loads(first.splitlines()[0])["generation"]
    log = [
        call for call, path in world.disk.log[start:] if "/.inbox" in path or path == inbox(text)
    ]
    assert log == ["create", "write", "sync", "rename"]
    folder = inbox(text).rpartition("/")[0]
    assert ("sync_dir", folder) in world.disk.log[start:]
    world.turn(text, epoch, "m10", "turn_10")
    world.crash(LoseAll())
    seen = read_home(world.disk.home())[text]
    assert len(seen.acknowledged) == 7
    assert isinstance(world.engine.sessions.get(text), object)


@pytest.mark.rule("INB-2", "INB-6")
def test_content_order_numbers_and_identity_survive_compaction() -> None:
    world = World()
    text = world.create()
    epoch = world.acquire(text).epoch
    big = "x" * (INBOX_DEAD_BYTES_MAX // 4)
    for n in range(6):
        name, turn = f"big{n}", f"turn_{n:02d}"
        world.append(text, epoch, [started(turn, epoch, [name], world)], [item(name, big)])
        if n == 3:
            world.append(text, epoch, puts=[item("stays"), item("also")])
        world.append(text, epoch, *ending(turn, [name], world, big))
    state = world.engine.sessions.get(text)
    assert state is not None
    before = dict(state.inbox.items)
    assert world.engine.checkpoints.due  # so many dead bytes do not wait
    world.engine.checkpoints.now()
    data = world.disk.content(inbox(text))
    assert len(data) < 5_000
    world.crash(LoseAll())
    after = world.engine.sessions.get(text)
    assert after is not None
    assert list(after.inbox.items.items()) == list(before.items())
    granted = world.acquire(text)
    assert [one.item.message_id for one in granted.pending] == ["stays", "also"]
    world.append(text, granted.epoch, puts=[item("next")])
    assert list(read_home(world.disk.home())[text].live) == ["stays", "also", "next"]


@pytest.mark.rule("INB-2", "INB-3")
def test_an_inbox_file_never_outgrows_what_opens() -> None:
    """More dead bytes between two checkpoints than a file may have: it begins anew with a put."""
    world = World()
    text = world.create()
    epoch = world.acquire(text).epoch
    big = "x" * 3_000_000
    for n in range(9):
        name, turn = f"big{n}", f"turn_{n:02d}"
        world.append(text, epoch, [started(turn, epoch, [name], world)], [item(name, big)])
        world.append(text, epoch, *ending(turn, [name], world, big))
        state = world.engine.sessions.get(text)
        assert state is not None
        assert state.inbox.end.bytes <= INBOX_FILE_BYTES_MAX
        assert len(world.disk.content(inbox(text))) <= INBOX_FILE_BYTES_MAX
    world.crash(LoseAll())
    seen = read_home(world.disk.home())[text]
    assert len(seen.acknowledged) == 9
    assert not seen.live


@pytest.mark.rule("INB-2", "FLT-9")
def test_a_put_behind_a_compaction_that_is_not_published_yet_waits_for_it() -> None:
    jobs: list[SyncJob] = []

    class Later:
        def start(self, job: SyncJob) -> None:
            jobs.append(job)

        def join(self) -> None:
            pass

    world = World(runner=Later)
    text, epoch = busy(world)
    old = world.disk.content(inbox(text))
    world.engine.checkpoints.begin()
    numbers = world.disk.content("/run/durable")
    assert numbers[:8] == numbers[8:]  # the old file says the same: no reader has to wait
    world.append(text, epoch, puts=[item("late")])
    assert world.disk.content(inbox(text)) == old
    numbers = world.disk.content("/run/durable")
    assert numbers[:8] > numbers[8:]
    jobs[0].run()
    world.engine.checkpoints.ended(jobs[0])
    assert list(read_home(world.disk.home())[text].live) == ["late"]
    numbers = world.disk.content("/run/durable")
    assert numbers[:8] == numbers[8:]


@pytest.mark.rule("INB-2", "R22")
def test_inbox_bytes_grow_with_what_is_put_and_not_with_the_square_of_it() -> None:
    world = World()
    text = world.create()
    epoch = world.acquire(text).epoch
    puts = 0
    written = 0

    def fault(name: str, path: str) -> None:
        pass

    world.disk.fault = fault
    real = world.disk.pwrite

    def pwrite(fd: int, data: bytes | memoryview, offset: int) -> int:
        nonlocal written
        if "inbox.jsonl" in world.disk.fds[fd][0]:
            written += len(data)
        return real(fd, data, offset)

    world.disk.pwrite = pwrite  # type: ignore[method-assign]
    for n in range(100):
        world.append(
            text, epoch, [started(f"turn_{n:03d}", epoch, [f"m{n}"], world)], [item(f"m{n}")]
        )
        state = world.engine.sessions.get(text)
        assert state is not None
        puts += state.inbox.live_bytes
        world.append(text, epoch, *ending(f"turn_{n:03d}", [f"m{n}"], world))
        if n % 10 == 9:
            world.engine.checkpoints.now()
    assert written <= 3 * puts + 10 * 300


@pytest.mark.rule("INB-2")
def test_one_checkpoint_compacts_a_bounded_number() -> None:
    world = World()
    for n in range(COMPACTIONS_MAX + 5):
        text = world.create(f"s{n}")
        epoch = world.acquire(text).epoch
        world.append(text, epoch, [started("turn_1", epoch, ["m"], world)], [item("m")])
        world.append(text, epoch, *ending("turn_1", ["m"], world))
    world.engine.checkpoints.now()
    sizes = [len(world.disk.content(inbox(ref(f"s{n}")))) for n in range(COMPACTIONS_MAX + 5)]
    assert sum(size > 400 for size in sizes) == 5
    world.turn(ref("s0"), 1, "again", "turn_2")
    world.engine.checkpoints.now()
    sizes = [len(world.disk.content(inbox(ref(f"s{n}")))) for n in range(COMPACTIONS_MAX + 5)]
    assert not [size for size in sizes if size > 400]


@pytest.mark.rule("FLT-18")
def test_temporary_files_go_when_their_session_is_looked_at() -> None:
    world = World()
    text = world.create()
    stray = f"/home/sessions/{text}/.inbox.jsonl.abc.tmp"
    world.crash()
    world.disk.put(stray, b"half")
    world.acquire(text)
    assert world.disk.stat(stray) is None


@pytest.mark.rule("LSE-1")
def test_leases_get_into_their_files_at_checkpoints() -> None:
    world = World()
    text = world.create()
    epoch = world.acquire(text, "a" * 32).epoch
    path = f"/home/sessions/{text}/lease.json"
    assert world.disk.stat(path) is None
    world.engine.checkpoints.now()
    lease = json.loads(world.disk.content(path))
    assert (lease["epoch"], lease["nonce"], lease["released_at"]) == (epoch, "a" * 32, None)
    world.call(m.Release(session=text, epoch=epoch, nonce="a" * 32))
    world.engine.stop()
    assert json.loads(world.disk.content(path))["released_at"] is not None
    world.crash(LoseAll())
    assert world.acquire(text).epoch == epoch + 1


def test_appending_is_a_helper_that_names_its_key() -> None:
    assert appending("w/s", 1, puts=[item("m1")]).key == "m1"


@pytest.mark.rule("FLT-6", "FLT-13")
@pytest.mark.parametrize("torn", [b"", bytes(512)])
def test_starts_that_were_cut_short_in_a_row_leave_a_home_that_starts(torn: bytes) -> None:
    """Each leaves a segment's name, and of its bytes what a power cut left. By the simulator."""
    world = World()
    text, _ = busy(world)
    number, expected = world.engine.journal.number, world.disk.content(transcript(text))
    for more in (1, 2, 3):
        world.disk.put(f"/home/journal/{number + more:04d}.log", torn)
    world.open()
    assert world.disk.content(transcript(text)) == expected
    assert not world.engine.sessions.damaged
