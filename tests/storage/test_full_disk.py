"""No room, and errors that end the writer (FLT-3, FLT-20)."""

from __future__ import annotations

import errno

import pytest

from callboard import messages as m
from callboard.errors import CallboardError, StorageFull
from callboard.storage.disk import Poisoned
from tests.storage.memory_disk import KeepAll, LoseAll
from tests.storage.second_reader import read_home
from tests.storage.world import World, appending, item, started

SEGMENT = "/home/journal/0001.log"


def codes(answers: list[m.Body | CallboardError]) -> list[str]:
    return [one.code if isinstance(one, CallboardError) else one.kind for one in answers]


@pytest.mark.rule("FLT-20", "F14", "FLT-3")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_of_a_batch_that_does_not_fit_each_frame_is_tried_by_itself(number: int) -> None:
    world = World()
    texts = [world.create(f"s{n}") for n in range(3)]
    limit = len(world.disk.content(SEGMENT)) + 64 * 1024

    def fault(name: str, path: str) -> None:
        pass

    real = world.disk.pwrite

    def pwrite(fd: int, data: bytes | memoryview, offset: int) -> int:
        path = world.disk.fds[fd][0]
        if path == SEGMENT and offset + len(data) > limit:
            if offset < limit:
                real(fd, bytes(data)[: limit - offset], offset)  # a part of it got there
            raise OSError(number, path)
        return real(fd, data, offset)

    world.disk.pwrite = pwrite  # type: ignore[method-assign]
    world.disk.fault = fault
    before = world.engine.journal.last_commit
    answers = world.batch(
        [
            world.acceptance(texts[0], "a", "x" * 100),
            world.acceptance(texts[1], "b", "x" * 300_000),
            world.acceptance(texts[2], "c", "x" * 100),
        ]
    )
    assert codes(answers) == ["accepted", "storage_full", "accepted"]
    refusal = answers[1]
    assert isinstance(refusal, StorageFull)
    assert refusal.carried == {"retry_after_ms": 1_000}
    assert world.engine.journal.last_commit == before + 2  # gapless
    log = [call for call, path in world.disk.log if path == SEGMENT]
    assert log.count("truncate") == 2  # the batch, and the frame that did not fit
    del world.disk.pwrite
    world.crash(LoseAll())
    seen = read_home(world.disk.home())
    assert [list(seen[text].live) for text in texts] == [["a"], [], ["c"]]
    assert codes(world.batch([world.acceptance(texts[1], "b", "x" * 300_000)])) == ["accepted"]


@pytest.mark.rule("FLT-20", "R113")
def test_a_full_disk_refuses_and_works_again_once_there_is_room() -> None:
    world = World()
    text = world.create()
    world.disk.capacity = world.disk.used() + 200
    before = world.disk.content(SEGMENT)
    for n in range(3):
        assert codes(world.batch([world.acceptance(text, f"m{n}")])) == ["storage_full"]
    assert world.disk.content(SEGMENT) == before
    assert world.engine.sessions.get(text) is not None
    world.disk.capacity = None
    assert codes(world.batch([world.acceptance(text, f"m{n}") for n in range(3)])) == (
        ["accepted"] * 3
    )
    world.crash(LoseAll())
    assert list(read_home(world.disk.home())[text].live) == ["m0", "m1", "m2"]


@pytest.mark.rule("FLT-20")
def test_a_refused_frame_leaves_no_trace_in_what_is_known() -> None:
    world = World()
    text = world.create()
    epoch = world.acquire(text).epoch
    body = appending(text, epoch, [started("turn_1", epoch, ["m1"], world)], [item("m1")])
    world.disk.capacity = world.disk.used()
    assert codes(world.batch([body, body])) == ["storage_full"] * 2
    state = world.engine.sessions.get(text)
    assert state is not None
    assert state.fold.turn is None
    assert state.inbox.items == {}
    assert body.key not in state.keys
    creation = world.creation("s2")
    hello = m.GatewayHello(nonce="2" * 32)
    assert codes(world.batch([creation, hello])) == ["storage_full"] * 2
    assert world.engine.sessions.get(creation.session) is None
    assert world.engine.journal.epochs.gateway == world.gateway
    world.disk.capacity = None
    assert codes(world.batch([body, creation])) == ["appended", "created"]


@pytest.mark.rule("FLT-20")
def test_files_that_do_not_fit_wait_and_input_is_refused_meanwhile() -> None:
    world = World()
    text = world.create()
    epoch = world.acquire(text).epoch
    full = True

    def fault(name: str, path: str) -> None:
        if full and name == "write" and path.endswith(".jsonl"):
            raise OSError(errno.ENOSPC, path)

    world.disk.fault = fault
    world.append(text, epoch, [started("turn_1", epoch, [], world)])
    assert world.engine.files.full
    assert codes(world.batch([appending(text, epoch, puts=[item("m1")])])) == ["storage_full"]
    assert codes(world.batch([world.creation("s2")])) == ["storage_full"]
    release = m.Release(session=text, epoch=epoch, nonce="0" * 32)
    assert codes(world.batch([release])) == ["stale_epoch"]
    synced = world.disk.content("/run/durable")
    assert synced[:8] > synced[8:]
    assert not world.engine.checkpoints.now()
    assert not world.engine.stop()
    full = False
    world.engine.materialise()
    assert world.disk.content("/run/durable")[:8] == world.disk.content("/run/durable")[8:]
    assert codes(world.batch([appending(text, epoch, puts=[item("m1")])])) == ["appended"]
    assert read_home(world.disk.home())[text].started == ["turn_1"]


@pytest.mark.rule("FLT-9", "FLT-20")
def test_what_waits_for_room_is_not_lost_with_the_process() -> None:
    world = World()
    text = world.create()
    epoch = world.acquire(text).epoch

    def fault(name: str, path: str) -> None:
        if name == "write" and path.endswith(".jsonl"):
            raise OSError(errno.ENOSPC, path)

    world.disk.fault = fault
    world.append(text, epoch, [started("turn_1", epoch, [], world)])
    world.disk.fault = None
    world.crash(LoseAll())
    assert read_home(world.disk.home())[text].started == ["turn_1"]


@pytest.mark.rule("FLT-3", "F1")
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_sync_answers_nothing_and_is_never_tried_again(number: int) -> None:
    world = World()
    text = world.create()
    world.accept(text, "m0")
    failing = True

    def fault(name: str, path: str) -> None:
        if failing and name == "datasync" and path == SEGMENT:
            raise OSError(number, path)

    world.disk.fault = fault
    before, replies = len(world.disk.log), len(world.replies)
    with pytest.raises(Poisoned):
        world.batch([world.acceptance(text, "m1"), world.acceptance(text, "m0")])
    assert len(world.replies) == replies
    log = world.disk.log[before:]
    assert [call for call, _ in log] == ["write", "datasync"]
    failing = False
    world.crash(KeepAll())
    log = world.disk.log
    assert not [call for call, path in log if path == SEGMENT and call != "unlink"]
    assert ("sync", "/home/journal/0002.log") in log
    world.crash(LoseAll())
    live = read_home(world.disk.home())[text].live
    assert "m0" in live


@pytest.mark.rule("FLT-3")
@pytest.mark.parametrize("call", ["write", "truncate"])
def test_other_errors_of_a_write_and_a_failed_cut_back_poison(call: str) -> None:
    world = World()
    text = world.create()

    def fault(name: str, path: str) -> None:
        if path != SEGMENT:
            return
        if name == "write":
            raise OSError(errno.EIO if call == "write" else errno.ENOSPC, path)
        if name == "truncate":
            raise OSError(errno.EIO, path)

    world.disk.fault = fault
    replies = len(world.replies)
    with pytest.raises(Poisoned):
        world.batch([world.acceptance(text, "m1")])
    assert len(world.replies) == replies


@pytest.mark.rule("FLT-10", "FLT-3", "F2", "FLT-9")
def test_a_failed_sync_of_a_checkpoint_drops_no_segment_and_poisons() -> None:
    world = World(segment_bytes=3_000)
    text = world.create()
    epoch = world.acquire(text).epoch
    for n in range(8):
        world.turn(text, epoch, f"m{n}", f"turn_{n:02d}")
    path = f"/home/sessions/{text}/transcript.jsonl"
    before = world.disk.content(path)
    failing = True

    def fault(name: str, where: str) -> None:
        if failing and name in ("sync", "datasync") and where == path:
            raise OSError(errno.EIO, where)

    world.disk.fault = fault
    with pytest.raises(Poisoned):
        world.engine.checkpoints.now()
    assert not [where for call, where in world.disk.log if call == "unlink"]
    failing = False
    world.crash(KeepAll())
    log = world.disk.log
    assert ("truncate", path) in log
    assert world.disk.content(path) == before
    world.crash(LoseAll())
    assert world.disk.content(path) == before


@pytest.mark.rule("FLT-20", "FLT-6")
def test_no_room_for_a_new_segment_is_a_refusal_too() -> None:
    world = World(segment_bytes=2_000)
    text = world.create()
    full = True

    def fault(name: str, path: str) -> None:
        if full and name == "write" and path.endswith("0002.log"):
            raise OSError(errno.ENOSPC, path)

    world.disk.fault = fault
    answers = codes(
        [answer for n in range(4) for answer in world.batch([world.acceptance(text, f"m{n}")])]
    )
    assert answers[0] == "accepted"
    assert "storage_full" in answers
    assert world.disk.stat("/home/journal/0002.log") is None
    full = False
    assert codes(world.batch([world.acceptance(text, "last")])) == ["accepted"]
    assert world.engine.journal.number == 2
    world.crash(LoseAll())
    assert "last" in read_home(world.disk.home())[text].live
