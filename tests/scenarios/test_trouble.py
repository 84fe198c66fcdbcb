"""Plays with a storage that is away, full or another's, and processes that die at every step."""

from __future__ import annotations

import pytest

from callboard.actors.session.core import SessionBroken
from callboard.agents import Turn
from callboard.errors import (
    CallboardError,
    SessionDamaged,
    SessionQuarantined,
    StorageUnavailable,
    TurnActive,
)
from callboard.messages import Append, Body, KnownInput, PendingItem
from callboard.records import TurnAborted, TurnCompleted, TurnStarted
from tests.scenarios.conftest import Open
from tests.scenarios.stage import Stage, cast_agent, item


@cast_agent("busy")
async def busy(turn: Turn) -> str:
    async for message in turn:
        await turn.say(f"heard {message.text}")
        await turn.tool("sleep", seconds=0)
    return "done"


# --- storage away -----------------------------------------------------------------------------


@pytest.mark.rule("RUN-13", "TLP-4", "MBX-2")
def test_while_storage_is_away_everything_waits_and_goes_on(stage_for: Open) -> None:
    stage = stage_for("busy")
    stage.storage_away = True
    first = stage.send("a", permit=True)
    second = stage.send("b")
    stage.advance(60_000)
    assert stage.replies == {}
    assert stage.storage.frames == []
    stage.storage_away = False
    stage.run()
    assert stage.receipt(first).mode == "direct"
    assert stage.receipt(second).delivery == "current_turn"
    assert stage.storage.of(TurnCompleted)[0].claimed_input_ids == ["a", "b"]
    stage.storage.check()


@pytest.mark.rule("RUN-13", "DUR-6", "INB-6", "R47", "RUN-3")
def test_requests_that_storage_gets_twice_change_nothing(stage_for: Open) -> None:
    """A dealer sends every unanswered request again when its router is back."""
    stage = stage_for("busy")
    seen: list[object] = []
    real = stage.storage.handle

    def twice(body: Body) -> Body | CallboardError:
        first = real(body)
        if isinstance(body, Append):
            again = real(body)
            seen.append((first, again))
            if body.records:
                assert first == again, "the same content, the same answer (DUR-6)"
            return again
        return first

    stage.storage_says = twice
    receipts = [stage.receipt(stage.send(name, permit=name == "a")) for name in "ab"]
    assert [one.duplicate for one in receipts] == [False, False]
    assert len(seen) > 5
    types = stage.storage.types()
    assert types.count("turn_started") == types.count("turn_completed") == 2, "one a turn"
    assert types[-2:] == ["inbox_acknowledged", "turn_completed"]
    assert stage.storage.heard() == ["a", "b"]
    assert stage.storage.inbox == {}
    stage.storage.check()


@pytest.mark.rule("RUN-13", "MBX-14", "R113")
def test_a_terminal_waits_for_room_and_is_written_once(stage_for: Open) -> None:
    stage = stage_for("busy")
    full = [True]
    stage.storage.full_for = lambda body: (
        full[0]
        and any(one.type.startswith("turn_") and one.type != "turn_started" for one in body.records)
    )
    stage.send("a", permit=True)
    stage.advance(5_000)
    assert stage.storage.of(TurnCompleted) == []
    assert stage.permit == "held", "no permit goes back before the terminal (ADM-5)"
    assert stage.session.box.turn is not None
    full[0] = False
    stage.advance(1_000)
    assert len(stage.storage.of(TurnCompleted)) == 1
    assert stage.storage.story()[-1] == "assistant: done"
    assert stage.permit == "none"
    stage.storage.check()


@pytest.mark.rule("RUN-13", "R113")
def test_a_full_disk_refuses_a_put_to_its_sender(stage_for: Open) -> None:
    stage = stage_for("busy")
    stage.storage.full_for = lambda body: bool(body.inbox) and not body.records
    stage.storage_slow = True
    stage.send("a", permit=True, run=False)
    second = stage.send("b", run=False)
    stage.storage_slow = False
    stage.run()
    assert stage.refusal(second).code == "storage_full"
    assert stage.storage.heard() == ["a"]
    stage.storage.full_for = lambda _: False
    assert stage.receipt(stage.send("b", permit=True)).accepted


@pytest.mark.rule("RUN-13", "TLP-4", "TLP-2", "R66", "R113", "FLR-3")
@pytest.mark.parametrize(
    ("what", "story"),
    [
        ("message_created user", []),
        ("message_created assistant", ["user: a"]),
        ("tool_call", ["user: a", "assistant: heard a"]),
        ("tool_result", ["user: a", "assistant: heard a", "call sleep", "result sleep cancelled"]),
    ],
)
def test_a_refused_frame_of_a_turn_fails_it(stage_for: Open, what: str, story: list[str]) -> None:
    stage = stage_for("busy")
    full = [True]

    def refuses(body: Append) -> bool:
        types = [one.type for one in body.records]
        if "turn_aborted" in types:
            return False
        if not full[0] or not types:
            return False
        data = b" ".join(one.data for one in body.records)
        marks = {
            "message_created user": b'"role":"user"',
            "message_created assistant": b"heard a",
            "tool_call": b'"part_type":"tool_call"',
            "tool_result": b'"part_type":"tool_result"',
        }
        return marks[what] in data

    stage.storage.full_for = refuses
    stage.send("a", permit=True)
    (ended,) = stage.storage.of(TurnAborted)
    assert ended.failure is not None
    assert (ended.failure.code, ended.failure.error) == ("runtime", "persistence_failed")
    assert stage.storage.story() == story
    assert ended.input_disposition == ("held" if len(story) > 1 else "pending")
    full[0] = False
    stage.advance(5_000)
    if len(story) <= 1:
        assert stage.storage.of(TurnCompleted) != []
    stage.storage.check()


@pytest.mark.rule("RUN-13", "MBX-16")
def test_pending_input_starts_when_there_is_room_again(stage_for: Open) -> None:
    stage = stage_for("busy")
    stage.permit_answer = "queue"
    stage.send("a")
    full = [True]
    stage.storage.full_for = lambda body: (
        full[0] and any(one.type == "turn_started" for one in body.records)
    )
    stage.permit_answer = "grant"
    stage.grant()
    stage.advance(3_500)
    assert stage.storage.of(TurnStarted) == []
    full[0] = False
    stage.advance(1_000)
    assert len(stage.storage.of(TurnCompleted)) == 1


# --- another owner, contradictions ------------------------------------------------------------


@pytest.mark.rule("LSE-6", "LSE-5", "TAD-1")
def test_a_fenced_session_stops_at_once(stage_for: Open) -> None:
    stage = stage_for("busy")
    stage.send("a", permit=True)
    stage.storage.epoch += 1  # another owner
    frames = len(stage.storage.frames)
    request = stage.send("b", permit=True)
    assert stage.status == 0
    assert request not in stage.replies
    stage.advance(10_000)
    assert len(stage.storage.frames) == frames


@pytest.mark.rule("LSE-8", "RUN-1")
def test_a_refused_session_ends_for_good(stage_for: Open) -> None:
    stage = stage_for("busy")
    stage.storage_says = lambda _: SessionQuarantined(reason="crash_loop")
    stage.restart()
    assert stage.status == 78


@pytest.mark.rule("RUN-13")
def test_an_activation_waits_for_storage(stage_for: Open) -> None:
    stage = stage_for("busy")
    answers = [StorageUnavailable(), StorageUnavailable()]
    stage.storage_says = lambda b: answers.pop() if answers else stage.storage.handle(b)
    stage.restart()
    assert len(answers) == 1
    stage.advance(2_000)
    assert stage.session.is_ready


@pytest.mark.rule("R34")
def test_an_activation_that_fails_is_done_again_by_the_next(stage_for: Open) -> None:
    stage = stage_for("busy")
    stage.storage_slow = True
    stage.send("a", permit=True)
    stage.storage_answers(2)
    stage.storage_slow = False

    def damaged(body: Body) -> Body | CallboardError:
        return SessionDamaged() if isinstance(body, Append) else stage.storage.handle(body)

    stage.storage_says = damaged
    with pytest.raises(SessionBroken):
        stage.restart()
    stage.storage_says = None
    stage.restart()
    stage.advance(1_000)
    assert len(stage.storage.of(TurnAborted)) == 1
    assert len(stage.storage.of(TurnCompleted)) == 1
    assert stage.storage.epoch == 3


@pytest.mark.rule("RUN-13")
def test_a_recovery_frame_waits_for_room(stage_for: Open) -> None:
    stage = stage_for("busy")
    stage.storage_slow = True
    stage.send("a", permit=True)
    stage.storage_answers(2)
    full = [True]
    stage.storage.full_for = lambda body: full[0]
    stage.storage_slow = False
    stage.restart()
    stage.advance(3_000)
    assert not stage.session.is_ready
    full[0] = False
    stage.advance(1_000)
    assert [stage.session.is_ready] == [True]
    assert len(stage.storage.of(TurnAborted)) == 1


@pytest.mark.rule("RUN-3")
def test_a_contradiction_ends_the_process(stage_for: Open) -> None:
    stage = stage_for("busy")
    stage.storage_says = lambda _: TurnActive(turn_id="turn_x")
    with pytest.raises(SessionBroken, match="turn_active"):
        stage.send("a", permit=True)
    stage.to_storage.clear()


# --- deaths (5.4) -----------------------------------------------------------------------------


def play(stage: Stage, frames: int, *, answered: bool) -> str:
    """Send an input and die when storage has written so many frames."""
    stage.storage_slow = True
    request = stage.send("a", permit=True)
    for _ in range(frames):
        if not stage.to_storage:
            break
        stage.storage_answers()
        stage.run()
    if stage.to_storage and not answered:
        body, _ = stage.to_storage.popleft()
        stage.storage.handle(body)  # written; the answer is lost with the process
    stage.storage_slow = False
    stage.restart()
    return request


@pytest.mark.rule("R16", "R48", "RTY-4", "RUN-3", "RUN-5", "R64")
@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("frames", range(8))
def test_a_death_at_any_step_loses_and_doubles_nothing(
    stage_for: Open, frames: int, answered: bool
) -> None:
    stage = stage_for("busy")
    request = play(stage, frames, answered=answered)
    if not stage.storage.known:
        assert request not in stage.replies
        stage.send("a", permit=True)
    again = stage.receipt(stage.send("a"))
    stage.advance(10_000)
    assert again.duplicate
    assert stage.storage.inbox == {}
    assert stage.storage.heard() == ["a"]
    (ended,) = stage.storage.of(TurnCompleted)
    assert ended.claimed_input_ids == ["a"]
    starts = stage.storage.of(TurnStarted)
    assert len(starts) == 1 + len(stage.storage.of(TurnAborted))
    for one in stage.storage.of(TurnAborted):
        assert (one.cause, one.outcome) == ("process_restart", "lost")
    stage.storage.check()


@pytest.mark.rule("RTY-1", "RTY-4")
def test_a_turn_that_kills_its_process_spends_its_input(stage_for: Open) -> None:
    stage = stage_for("busy")
    stage.storage_slow = True
    stage.send("a", permit=True, run=False)
    for _ in range(5):
        stage.storage_answers()
        stage.storage_slow = True
        stage.kill()
        stage.activate()
        while stage.to_storage and not stage.session.is_ready:
            stage.storage_answers()
        stage.run()
        if not stage.to_storage:
            break
    stage.storage_slow = False
    stage.run()
    assert stage.storage.inbox == {}
    assert stage.storage.heard() == []
    assert len(stage.storage.of(TurnAborted)) == 5


@pytest.mark.rule("R112", "ACC-2", "MBX-16", "R16")
def test_input_that_came_while_passive_starts_exactly_one_turn(stage_for: Open) -> None:
    stage = stage_for("busy")
    stage.stop()
    storage = stage.storage
    for name in ("a", "b"):
        storage.n += 1
        one = item(name)
        storage.inbox[name] = PendingItem(item=one, n=storage.n, size_bytes=100)
        storage.known[name] = (one.digest, KnownInput(item_state="pending"))
    stage.activate()
    assert all(entry.recovered for entry in stage.session.box.pending)
    stage.advance(1_000)
    (start,) = storage.of(TurnStarted)
    assert (start.kind, start.input_ids) == ("pending", ["a", "b"])
    assert storage.of(TurnCompleted)[0].claimed_input_ids == ["a", "b"]


@pytest.mark.rule("R69", "TLP-8", "TEX-16")
def test_nobody_listening_ends_nothing(stage_for: Open) -> None:
    stage = stage_for("busy")
    stage.storage_slow = True
    stage.send("a", permit=True)
    stage.session.gateway_lost()  # with every client behind it
    stage.storage_slow = False
    stage.run()
    assert len(stage.storage.of(TurnCompleted)) == 1
