"""A session with more records than a frame holds is there at once, or not at all."""

from __future__ import annotations

import errno
import itertools
import random
from contextlib import suppress

import pytest

from callboard import messages as m
from callboard.errors import (
    CallboardError,
    Conflict,
    Overloaded,
    PayloadTooLarge,
    RecordInvalid,
    SeqConflict,
    SessionExists,
    StaleEpoch,
    StorageFull,
    TurnNotActive,
)
from callboard.limits import FRAME_BYTES_MAX, STAGED_OPERATIONS_MAX
from callboard.storage.beside import Job
from callboard.storage.disk import Poisoned
from tests.storage.memory_disk import Crash, Draw, KeepAll, LoseAll
from tests.storage.second_reader import read_home
from tests.storage.world import World, creation, message, part, ref, started, terminal

OP = "5" * 32


class PowerCut(BaseException):
    """The machine stops here."""


def turn(world: World, number: int, words: str = "hi") -> list[m.NewRecord]:
    name = f"turn_{number:026d}"
    return [
        started(name, 0, [], world),
        message(name, f"msg_{number}", "assistant", world),
        part(name, f"msg_{number}", words, world),
        terminal(name, [], world),
    ]


def pieces(
    world: World, count: int = 3, session_id: str = "big", op: str = OP, words: str = "hi"
) -> list[m.StageRecords]:
    """Make a creation in so many pieces; each but the first is a whole turn."""
    first = creation(session_id, world.gateway, op).record
    records = [[first], *(turn(world, n, words) for n in range(1, count))]
    return [
        m.StageRecords(
            gateway_epoch=world.gateway,
            session=ref(session_id),
            op=op,
            index=index,
            records=made,
            last=index == count - 1,
        )
        for index, made in enumerate(records)
    ]


def ask(world: World, body: m.StageRecords) -> m.Body | CallboardError:
    before = len(world.replies)
    world.engine.stage("stage", body)
    (reply,) = world.replies[before:]
    return reply.body


def ask_all(world: World, body: list[m.StageRecords]) -> list[m.Body | CallboardError]:
    return [ask(world, one) for one in body]


def ready() -> World:
    world = World()
    world.create("other")
    return world


@pytest.mark.parametrize("how", [LoseAll(), KeepAll(), Draw(random.Random(3))])
def test_after_a_cut_at_any_call_it_is_there_whole_or_absent(how: Crash) -> None:
    for calls in itertools.count():
        world = ready()
        world.engine.checkpoints.now()
        body = pieces(world)
        left = calls

        def fault(name: str, path: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise PowerCut

        answers: list[m.Body | CallboardError] = []
        world.disk.fault = fault
        with suppress(PowerCut):
            answers += [ask(world, one) for one in body]
        world.disk.fault = None
        world.crash(how)
        world.hello("2" * 32)
        state = world.engine.sessions.get(ref("big"))
        if len(answers) == 3:
            assert state is not None
        if state is not None:
            assert state.damage is None
            assert state.fold.seq == 9
            assert state.fold.turns == 2
        path = f"/home/sessions/{ref('big')}"
        assert not [name for name in world.disk.names if name.startswith(f"{path}/.")]
        again = [ask(world, one.model_copy(update={"gateway_epoch": 2})) for one in body]
        last = again[-1]
        assert isinstance(last, m.Created), again
        assert last.fresh == (state is None)
        seen = read_home(world.disk.home())
        assert len(seen[ref("big")].started) == 2
        if len(answers) == 3:
            return
    raise AssertionError


def test_it_is_seen_by_nobody_before_its_last_piece_and_used_like_any_other_after() -> None:
    world = ready()
    body = pieces(world, 4)
    for one in body[:-1]:
        assert isinstance(ask(world, one), m.Ok)
        assert world.engine.sessions.get(ref("big")) is None
        assert ref("big") not in read_home(world.disk.home())
    created = ask(world, body[-1])
    assert created == m.Created(session=ref("big"), fresh=True)
    assert [one.text for one in world.engine.take_news()] == [ref("big")]
    epoch = world.acquire(ref("big")).epoch
    world.turn(ref("big"), epoch, "m1", "turn_9" + "0" * 25)
    world.crash(LoseAll())
    assert len(read_home(world.disk.home())[ref("big")].started) == 4


def test_more_than_a_frame_holds_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ready()
    count = FRAME_BYTES_MAX // 900_000 + 3
    for one in pieces(world, count, words="x" * 900_000):
        answer = ask(world, one)
        assert not isinstance(answer, CallboardError)
    path = f"/home/sessions/{ref('big')}/transcript.jsonl"
    assert len(world.disk.content(path)) > FRAME_BYTES_MAX
    monkeypatch.setattr("callboard.storage.staging.STAGED_BYTES_MAX", 2_000_000)
    answers = [ask(world, one) for one in pieces(world, 4, "huge", "6" * 32, "x" * 900_000)]
    assert isinstance(answers[3], PayloadTooLarge)
    assert not [name for name in world.disk.names if ".transcript" in name]


def test_frames_beside_it_take_their_numbers_and_none_is_used_twice() -> None:
    world = ready()
    body = pieces(world)
    ask(world, body[0])
    world.accept(ref("other"), "m1")
    ask(world, body[1])
    world.accept(ref("other"), "m2")
    ask(world, body[2])
    world.accept(ref("other"), "m3")
    state = world.engine.sessions.get(ref("big"))
    other = world.engine.sessions.get(ref("other"))
    assert state is not None
    assert other is not None
    commits = [one.commit for one in other.inbox.items.values()]
    assert state.fold.commit not in commits
    assert commits == sorted(set(commits))
    assert world.engine.journal.last_commit > state.fold.commit
    world.crash(LoseAll())
    assert world.engine.sessions.get(ref("big")) is not None


def test_a_repeated_piece_is_answered_again_and_a_gap_is_refused() -> None:
    world = ready()
    body = pieces(world)
    assert isinstance(ask(world, body[1]), SeqConflict)
    assert isinstance(ask(world, body[0]), m.Ok)
    assert isinstance(ask(world, body[0]), m.Ok)
    answer = ask(world, body[2])
    assert isinstance(answer, SeqConflict)
    assert answer.carried == {"expected": 1}
    ask(world, body[1])
    assert isinstance(ask(world, body[2]), m.Created)
    assert ask(world, body[2]) == m.Created(session=ref("big"), fresh=False)
    assert isinstance(ask(world, pieces(world, op="7" * 32)[0]), SessionExists)


def test_who_may_and_what_it_may_hold() -> None:
    world = ready()
    body = pieces(world)
    stale = body[0].model_copy(update={"gateway_epoch": 99})
    assert isinstance(ask(world, stale), StaleEpoch)
    assert isinstance(ask(world, pieces(world, session_id="other")[0]), SessionExists)
    foreign = creation("else", world.gateway, OP).record
    wrong = body[0].model_copy(update={"records": [foreign]})
    assert isinstance(ask(world, wrong), RecordInvalid)
    assert isinstance(ask(world, body[0]), m.Ok)
    assert isinstance(ask(world, pieces(world, op="8" * 32)[0]), SessionExists)
    bad = body[1].model_copy(update={"records": turn(world, 1)[1:]})
    assert isinstance(ask(world, bad), RecordInvalid | TurnNotActive)
    assert not [name for name in world.disk.names if ".transcript" in name]
    assert isinstance(ask(world, body[1]), SeqConflict)  # the whole operation is gone


def test_how_many_are_under_way_is_bounded_and_a_busy_one_takes_no_second_piece() -> None:
    world = ready()
    held: list[object] = []

    class Held:
        def start(self, job: Job, ended: object) -> None:
            held.append(job)

    world.engine.staging.runner = Held()
    for n in range(STAGED_OPERATIONS_MAX):
        world.engine.stage("x", pieces(world, session_id=f"s{n}", op=f"{n:032x}")[0])
    assert len(held) == STAGED_OPERATIONS_MAX
    assert isinstance(ask(world, pieces(world)[0]), Overloaded)
    again = pieces(world, session_id="s0", op=f"{0:032x}")[0]
    assert isinstance(ask(world, again), Conflict)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("step", ["mkdir", "create", "write", "sync", "sync_dir", "rename"])
def test_each_step_may_fail(step: str, number: int) -> None:
    world = ready()
    world.engine.checkpoints.now()
    body = pieces(world)
    failing = True

    def fault(name: str, path: str) -> None:
        if failing and name == step and ref("big") in path:
            raise OSError(number, path)

    world.disk.fault = fault
    refused = number == errno.ENOSPC and step in ("mkdir", "create", "write")
    if refused:
        assert isinstance(ask(world, body[0]), StorageFull)
        failing = False
    else:
        with pytest.raises(Poisoned):
            ask_all(world, body)
        failing = False
        world.crash(KeepAll())
    world.hello("2" * 32)
    answers = [ask(world, one.model_copy(update={"gateway_epoch": 2})) for one in body]
    assert isinstance(answers[-1], m.Created)


def test_what_came_to_nothing_does_not_keep_a_name() -> None:
    world = ready()
    ask(world, pieces(world, session_id="Big")[0])
    world.crash(KeepAll())
    world.hello("2" * 32)
    assert not [name for name in world.disk.names if ".transcript" in name]
    assert world.create("big")  # the folder of Big is no session (IDN-6)
