"""Plays of turns that end early: cancels, failures, retries, stops."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import pytest

from callboard.actors.session.gate import Gate
from callboard.agents import Turn
from callboard.limits import INPUT_ATTEMPTS_MAX
from callboard.records import (
    InboxAcknowledged,
    TurnAborted,
    TurnCancelRequested,
    TurnCompleted,
    TurnStarted,
)
from tests.scenarios.conftest import Open
from tests.scenarios.stage import ALICE, Stage, cast_agent, item, payload


@cast_agent("sleeper")
async def sleeper(turn: Turn) -> str:
    async for message in turn:
        await turn.say(f"working on {message.text}")
        await turn.tool("sleep", seconds=60)
    return "rested"


@cast_agent("stubborn")
async def stubborn(turn: Turn) -> None:
    async for _ in turn:
        pass
    for _ in range(5):  # cancels that it does not care for
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1_000_000)


def aborted(stage: Stage) -> TurnAborted:
    (found,) = stage.storage.of(TurnAborted)
    assert isinstance(found, TurnAborted)
    return found


# --- cancels ----------------------------------------------------------------------------------


@pytest.mark.rule("TEX-14", "TLP-8", "RUN-9", "RUN-4", "TLP-5", "RUN-5")
def test_a_cancel_is_recorded_then_told_then_ended(stage_for: Open) -> None:
    stage = stage_for("sleeper")
    stage.send("a", permit=True)
    frames = len(stage.storage.frames)
    result = stage.cancel_result(stage.cancel())
    assert (result.status, result.outcome) == ("cancelled", "cancelled")
    assert stage.storage.frames[frames:] == [
        (["turn_cancel_requested"], []),
        (["part_created", "inbox_acknowledged", "turn_aborted"], ["remove"]),
    ]
    (request,) = stage.storage.of(TurnCancelRequested)
    assert (request.principal_id, request.keep_input) == (ALICE, False)
    ended = aborted(stage)
    assert (ended.cause, ended.outcome, ended.input_disposition) == (
        "cancelled",
        "cancelled",
        "acknowledged",
    )
    assert stage.storage.story()[-1] == "result sleep cancelled"
    assert stage.permit == "none"
    again = stage.cancel_result(stage.cancel(turn_id=ended.turn_id))
    assert (again.status, again.outcome) == ("cancelled", "cancelled"), "no new record (TEX-13b)"
    assert len(stage.storage.of(TurnCancelRequested)) == 1


@pytest.mark.rule("TEX-14", "RTY-5", "R29", "MBX-16")
def test_a_cancel_that_keeps_the_input_holds_it(stage_for: Open) -> None:
    stage = stage_for("sleeper")
    stage.send("a", permit=True)
    stage.cancel(keep_input=True)
    assert aborted(stage).input_disposition == "held"
    assert [entry.held for entry in stage.session.box.pending] == [True]
    stage.advance(100_000)
    assert len(stage.storage.of(TurnStarted)) == 1
    stage.restart()
    stage.advance(100_000)
    assert len(stage.storage.of(TurnStarted)) == 1, "activation starts no held input"
    stage.send("b", permit=True)
    stage.advance(300_000)
    assert stage.storage.heard() == ["a", "b"], "and its message stands there once (R64)"
    assert stage.storage.of(TurnCompleted)[0].claimed_input_ids == ["a", "b"]
    stage.storage.check()


@pytest.mark.rule("TEX-14")
def test_the_next_input_is_admitted_at_once_after_a_cancel(stage_for: Open) -> None:
    stage = stage_for("sleeper")
    stage.send("a", permit=True)
    stage.send(item("b", busy_mode="queue"))
    stage.cancel()
    assert stage.storage.types()[-4:] == [
        "message_created",
        "part_created",
        "message_created",
        "part_created",
    ]
    starts = stage.storage.of(TurnStarted)
    assert [one.chain_index for one in starts] == [0, 1]
    assert stage.storage.heard() == ["a", "b"]


@pytest.mark.rule("TEX-14", "FLT-26")
def test_an_agent_that_does_not_yield_costs_its_process(stage_for: Open) -> None:
    stage = stage_for("stubborn")
    stage.send("a", permit=True)
    first = stage.cancel()
    second = stage.cancel()
    stage.advance(4_999)
    assert first not in stage.replies
    stage.advance(1)
    assert stage.cancel_result(first).status == "cancelling"
    assert stage.cancel_result(second).status == "cancelling"
    assert stage.status == 70
    assert stage.storage.of(TurnAborted) == []
    stage.restart()
    ended = aborted(stage)
    assert (ended.cause, ended.outcome) == ("process_restart", "cancelled")
    assert stage.storage.inbox == {}


@pytest.mark.rule("TEX-15", "INB-9")
def test_a_waiting_input_is_cancelled_and_no_turn_starts(stage_for: Open) -> None:
    stage = stage_for("sleeper")
    stage.permit_answer = "queue"
    stage.send("a")
    result = stage.cancel_result(stage.cancel(message_id="a"))
    assert result.status == "cancelled"
    (gone,) = stage.storage.of(InboxAcknowledged)
    assert (gone.reason, gone.by, gone.turn_id) == ("cancelled", ALICE, None)
    assert stage.storage.of(TurnStarted) == []
    assert stage.permit == "none"
    assert stage.cancel_result(stage.cancel(message_id="a")).status == "not_found"


@pytest.mark.rule("TEX-14", "TEX-15")
def test_a_cancel_by_message_reaches_the_turn_that_claimed_it(stage_for: Open) -> None:
    stage = stage_for("sleeper")
    stage.send("a", permit=True)
    result = stage.cancel_result(stage.cancel(message_id="a"))
    assert (result.status, result.turn_id) == ("cancelled", aborted(stage).turn_id)


@pytest.mark.rule("TEX-14", "RUN-13")
def test_a_cancel_that_cannot_be_recorded_is_refused(stage_for: Open) -> None:
    stage = stage_for("sleeper")
    stage.send("a", permit=True)
    stage.storage.full_for = lambda body: any(
        one.type == "turn_cancel_requested" for one in body.records
    )
    assert stage.refusal(stage.cancel()).code == "storage_full"
    assert aborted(stage).cause == "failed", "a turn's frame that is refused fails the turn"


@pytest.mark.rule("TEX-14", "TAD-10")
def test_an_interrupt_ends_the_turn_and_runs_next(stage_for: Open) -> None:
    stage = stage_for("sleeper")
    stage.send("a", permit=True)
    stage.send(item("now", busy_mode="interrupt"))
    assert aborted(stage).cause == "cancelled"
    assert stage.storage.story()[-2:] == ["assistant: working on now", "call sleep"]


@pytest.mark.rule("TEX-14", "TEX-13")
def test_a_turn_that_ends_by_itself_wins_over_its_cancel(stage_for: Open) -> None:
    stage = stage_for("echo")
    stage.storage_slow = True
    stage.send("a", permit=True)
    for _ in range(3):
        stage.storage_answers()
        stage.run()
    request = stage.cancel()
    stage.storage_slow = False
    stage.run()
    result = stage.cancel_result(request)
    assert (result.status, result.outcome) == ("already_terminal", "completed")


@pytest.mark.rule("TEX-14")
@pytest.mark.parametrize("frames", range(7))
def test_a_cancel_works_at_every_stage(stage_for: Open, frames: int) -> None:
    stage = stage_for("sleeper")
    stage.storage_slow = True
    stage.send("a", permit=True)
    for _ in range(frames):
        if stage.to_storage:
            stage.storage_answers()
            stage.run()
    request = stage.cancel()
    stage.storage_slow = False
    stage.run()
    assert stage.cancel_result(request).status == "cancelled"
    assert len(stage.storage.of(TurnAborted)) == 1
    assert stage.permit == "none"
    assert stage.session.turn is None
    stage.storage.check()


# --- failures and retries ---------------------------------------------------------------------


def failing(times: int, *, output: bool = False) -> None:
    left = [times]

    @cast_agent("failing")
    async def fail(turn: Turn) -> str:
        async for _ in turn:
            if left[0]:
                left[0] -= 1
                if output:
                    await turn.tool("sleep", seconds=0)
                raise ConnectionError("down")
        return "up again"


@pytest.mark.rule("R28", "RTY-1", "RTY-2", "RTY-3", "FLR-1")
def test_a_failure_before_any_output_is_tried_again_and_spent(stage_for: Open) -> None:
    failing(100)
    stage = stage_for("failing")
    stage.send("a", permit=True)
    starts: list[int] = []
    for second in range(60):
        if len(stage.storage.of(TurnStarted)) > len(starts):
            starts.append(second)
        stage.advance(1_000)
    assert len(starts) == INPUT_ATTEMPTS_MAX
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    for gap, base in zip(gaps, (1, 2, 4, 8), strict=True):
        assert base * 0.8 - 1 <= gap <= base * 1.2 + 1
    assert stage.storage.frames[-1] == (["turn_aborted", "inbox_acknowledged"], ["remove"])
    assert stage.storage.of(InboxAcknowledged)[-1].reason == "attempts_spent"
    assert stage.storage.heard() == ["a"], "its text stands there once"
    assert stage.storage.inbox == {}
    assert {one.failure.code for one in stage.storage.of(TurnAborted)} == {"network"}
    stage.storage.check()


@pytest.mark.rule("RTY-1", "RTY-2", "R64", "TLP-2")
def test_a_retry_that_succeeds_acknowledges_the_input(stage_for: Open) -> None:
    failing(2)
    stage = stage_for("failing")
    stage.send("a", permit=True)
    stage.advance(10_000)
    assert len(stage.storage.of(TurnAborted)) == 2
    (ended,) = stage.storage.of(TurnCompleted)
    assert ended.claimed_input_ids == ["a"]
    assert stage.storage.story() == ["user: a", "assistant: up again"]


@pytest.mark.rule("R29", "RTY-2", "RTY-5")
def test_a_failure_after_a_tool_call_holds_the_input(stage_for: Open) -> None:
    failing(1, output=True)
    stage = stage_for("failing")
    stage.send("a", permit=True)
    stage.advance(100_000)
    assert aborted(stage).input_disposition == "held"
    assert len(stage.storage.of(TurnStarted)) == 1
    stage.send("b", permit=True)
    assert stage.storage.of(TurnCompleted)[0].claimed_input_ids == ["a", "b"]
    assert stage.storage.heard() == ["a", "b"]


@pytest.mark.rule("RTY-5", "RTY-3")
def test_a_new_submit_does_not_wait_for_the_retry(stage_for: Open) -> None:
    failing(1)
    stage = stage_for("failing")
    stage.send("a", permit=True)
    stage.send("b", permit=True)
    assert stage.storage.of(TurnCompleted)[0].claimed_input_ids == ["a", "b"]


@pytest.mark.rule("RTY-1", "RTY-4")
def test_attempts_are_counted_over_restarts(stage_for: Open) -> None:
    failing(100)
    stage = stage_for("failing")
    stage.send("a", permit=True)
    for _ in range(INPUT_ATTEMPTS_MAX):
        stage.restart()
    stage.advance(60_000)
    assert len(stage.storage.of(TurnStarted)) == INPUT_ATTEMPTS_MAX
    assert stage.storage.inbox == {}


# --- stops ------------------------------------------------------------------------------------


@pytest.mark.rule("R111", "SHD-1", "TLP-8", "TEX-16", "LSE-8", "RUN-12", "RTY-4")
def test_a_stop_aborts_the_turn_and_gives_the_lease_back(stage_for: Open) -> None:
    stage = stage_for("sleeper")
    stage.send("a", permit=True)
    stage.stop()
    ended = aborted(stage)
    assert (ended.cause, ended.outcome, ended.input_disposition) == (
        "interrupted",
        "cancelled",
        "pending",
    )
    assert stage.storage.released
    assert stage.status == 0
    assert stage.ms < 5_000
    stage.activate()
    assert len(stage.storage.of(TurnStarted)) == 2, "it goes on by itself, uncounted"
    assert stage.storage.fold.attempts == {}


@pytest.mark.rule("SHD-1", "RUN-12")
def test_a_stop_while_idle_is_short(stage_for: Open) -> None:
    stage = stage_for("echo")
    stage.stop()
    stage.stop()
    assert stage.storage.released
    assert stage.status == 0


@pytest.mark.rule("SHD-1", "GTE-3", "RUN-9")
def test_a_stop_does_not_wait_for_a_stubborn_agent(stage_for: Open) -> None:
    stage = stage_for("stubborn")
    stage.send("a", permit=True)
    stage.stop()
    stage.advance(3_999)
    assert stage.status is None
    stage.advance(1)
    assert aborted(stage).outcome == "indeterminate", "nothing says that it has ended"
    assert [stage.status] == [0]
    assert stage.storage.released


@pytest.mark.rule("SHD-1", "RUN-13")
def test_a_stop_without_storage_ends_all_the_same(stage_for: Open) -> None:
    stage = stage_for("sleeper")
    stage.send("a", permit=True)
    stage.storage_away = True
    stage.stop()
    stage.advance(4_999)
    assert stage.status == 0
    assert stage.storage.of(TurnAborted) == []


@pytest.mark.rule("SHD-1", "MBX-2")
def test_a_stop_answers_what_becomes_durable_and_leaves_the_rest(stage_for: Open) -> None:
    stage = stage_for("sleeper")
    stage.send("a", permit=True)
    stage.storage_slow = True
    sent = stage.send("b")
    stage.session.stop()
    late = stage.send("c")
    stage.storage_slow = False
    stage.run()
    assert stage.receipt(sent).accepted
    assert late not in stage.replies
    assert set(stage.storage.inbox) == {"a", "b"}
    assert stage.status == 0


@pytest.mark.rule("SHD-1")
def test_a_stop_during_the_start_runs_no_agent(stage_for: Open) -> None:
    stage = stage_for("sleeper")
    stage.storage_slow = True
    stage.send("a", permit=True)
    stage.session.stop()
    stage.storage_slow = False
    stage.run()
    assert aborted(stage).cause == "interrupted"
    assert stage.storage.story() == []
    assert stage.status == 0


@pytest.mark.rule("SHD-1", "TEX-14")
def test_a_stop_overtakes_a_cancel(stage_for: Open) -> None:
    stage = stage_for("stubborn")
    stage.send("a", permit=True)
    request = stage.cancel()
    stage.stop()
    stage.advance(4_000)
    assert (aborted(stage).cause, stage.status) == ("cancelled", 0)
    assert stage.cancel_result(request).outcome == "indeterminate"


@pytest.mark.rule("TLP-5", "RUN-9")
def test_a_call_whose_tool_did_not_begin_says_so(stage_for: Open) -> None:
    stage = stage_for("sleeper")
    stage.storage_slow = True
    stage.send("a", permit=True)
    for _ in range(3):
        stage.storage_answers()
        stage.run()
    request = stage.cancel()  # the call's frame is on its way
    stage.storage_slow = False
    stage.run()
    assert stage.cancel_result(request).status == "cancelled"
    results: list[Any] = [
        payload(data) for data in stage.storage.of(_part()) if data.part_type == "tool_result"
    ]
    assert [one["error"] for one in results] in (["cancelled"], ["not_run"], [])


def _part() -> type:
    from callboard.records import PartCreated

    return PartCreated


@pytest.mark.rule("GTE-4", "GTE-2", "RUN-12")
def test_agent_and_tools_run_under_the_sessions_gate(stage_for: Open) -> None:
    stage = stage_for("sleeper")
    stage.send("a", permit=True)
    gate = _gate(stage)
    assert [one.label for one in gate.stats.holders] == ["agent", "tool sleep"]
    stage.storage_slow = True
    stage.stop()
    assert gate.stats.accepting is False
    assert gate.stats.active == 0, "empty before the terminal is written"
    assert not stage.storage.released, "the lease goes last"
    stage.storage_slow = False
    stage.run()
    assert [stage.storage.released] == [True]


def _gate(stage: Stage) -> Gate:
    async def look() -> Gate:
        return stage.host.gate

    return stage.loop.run_until_complete(look())
