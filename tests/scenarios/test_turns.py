"""Plays of turns: what is written, in which order, and what the agent sees."""

from __future__ import annotations

import asyncio

import pytest

from callboard.agents import Turn
from callboard.messages import Beat, Register
from callboard.records import (
    InboxAcknowledged,
    MessageCreated,
    TurnAborted,
    TurnCompleted,
    TurnStarted,
)
from tests.scenarios.conftest import Open
from tests.scenarios.stage import cast_agent, item


@cast_agent("plain")
async def plain(turn: Turn) -> str:
    """Answer the first message and leave the others."""
    async for message in turn:
        return f"answer to {message.text}"
    return "nothing to do"


@cast_agent("slow")
async def slow(turn: Turn) -> str:
    heard: list[str] = []
    async for message in turn:
        heard.append(message.text)
        await turn.tool("sleep", seconds=1)
    return "heard " + ", ".join(heard)


@cast_agent("deaf")
async def deaf(_: Turn) -> str:
    return "I never listen"


@pytest.mark.rule("RUN-4", "TLP-1", "TLP-2", "MBX-6", "INB-5")
def test_a_first_send_is_three_frames_and_a_word(stage_for: Open) -> None:
    stage = stage_for("plain")
    receipt = stage.receipt(stage.send("hello", permit=True))
    assert (receipt.mode, receipt.delivery) == ("direct", "current_turn")
    assert stage.storage.frames == [
        (["turn_started"], ["put"]),
        (["message_created", "part_created"], []),
        (["message_created", "part_created", "inbox_acknowledged", "turn_completed"], ["remove"]),
    ]
    assert stage.storage.story() == ["user: hello", "assistant: answer to hello"]
    (ended,) = stage.storage.of(TurnCompleted)
    (acknowledged,) = stage.storage.of(InboxAcknowledged)
    assert ended.claimed_input_ids == ["hello"]
    assert (ended.outcome, ended.turns_count, ended.input_disposition) == (
        "completed",
        1,
        "acknowledged",
    )
    assert [one.message_id for one in acknowledged.items] == ["hello"]
    assert acknowledged.turn_id == ended.turn_id
    assert ended.output_message_ids == [stage.storage.of(MessageCreated)[-1].message_id]
    assert stage.permit == "none"
    stage.storage.check()


@pytest.mark.rule("R3", "R63", "TLP-2", "TLP-3", "ACC-1")
def test_steering_joins_the_open_turn_with_one_frame_before_its_receipt(stage_for: Open) -> None:
    stage = stage_for("slow")
    stage.send("one", permit=True)
    frames = len(stage.storage.frames)
    receipt = stage.receipt(stage.send("two"))
    assert receipt.delivery == "current_turn"
    assert stage.storage.frames[frames:] == [([], ["put"])]
    stage.send("three")
    stage.advance(3_000)
    assert stage.storage.story()[0] == "user: one"
    assert stage.storage.heard() == ["one", "two", "three"]
    assert stage.storage.story()[-1] == "assistant: heard one, two, three"
    assert len(stage.storage.of(TurnStarted)) == 1
    stage.storage.check()


@pytest.mark.rule("TLP-2", "TLP-4", "DUR-7")
def test_the_agent_sees_an_input_only_when_it_is_a_durable_message(stage_for: Open) -> None:
    seen: list[str] = []

    @cast_agent("watcher")
    async def watcher(turn: Turn) -> None:
        async for message in turn:
            seen.append(message.id)

    stage = stage_for("watcher")
    stage.storage_slow = True
    stage.send("a", permit=True)
    stage.storage_answers()  # put + turn_started
    stage.run()
    assert seen == []
    assert len(stage.to_storage) == 1
    stage.storage_answers()
    stage.run()
    assert seen == ["a"]


@pytest.mark.rule("TLP-4", "R66", "ADM-4")
def test_a_tool_runs_between_its_durable_call_and_its_durable_result(stage_for: Open) -> None:
    stage = stage_for("slow")
    stage.send("one", permit=True)
    assert stage.storage.story()[-1] == "call sleep"
    assert stage.storage.fold.calls != {}
    stage.storage_slow = True
    stage.advance(1_000)
    assert stage.storage.story()[-1] == "call sleep", "the result is on its way"
    stage.storage_slow = False
    stage.run()
    assert stage.storage.story()[-2] == "result sleep None"


@pytest.mark.rule("MBX-15", "TLP-9", "MBX-9")
def test_what_an_agent_does_not_ask_for_is_answered_by_the_next_turn(stage_for: Open) -> None:
    stage = stage_for("plain")
    stage.storage_slow = True
    stage.send("a", permit=True, run=False)
    for name in ("b", "c"):
        stage.send(name, run=False)
    stage.storage_slow = False
    stage.run()
    answers = [line for line in stage.storage.story() if line.startswith("assistant")]
    assert answers == [f"assistant: answer to {name}" for name in "abc"]
    kinds = [(one.kind, one.chain_index) for one in stage.storage.of(TurnStarted)]
    assert kinds == [("user", 0), ("pending", 1), ("pending", 2)]
    chained = [types for types, _ in stage.storage.frames if types[-1:] == ["turn_started"]]
    assert [types[-2:] for types in chained[1:]] == [["turn_completed", "turn_started"]] * 2
    stage.storage.check()


@pytest.mark.rule("MBX-15", "MBX-16")
def test_an_agent_that_never_listens_comes_to_an_end_all_the_same(stage_for: Open) -> None:
    stage = stage_for("deaf")
    stage.storage_slow = True
    for name in "abcde":
        stage.send(name, permit=name == "a", run=False)
    stage.storage_slow = False
    stage.run()
    assert stage.storage.inbox == {}
    assert stage.storage.heard() == list("abcde"), "each became a message all the same"
    assert len(stage.storage.of(TurnStarted)) == 5
    stage.storage.check()


@pytest.mark.rule("R5", "R10", "MBX-11")
def test_input_behind_the_seal_gets_the_next_turn(stage_for: Open) -> None:
    @cast_agent("lingering")
    async def lingering(turn: Turn) -> None:
        async for message in turn:
            await turn.say(message.text)
        await asyncio.sleep(1)

    stage = stage_for("lingering")
    stage.send("a", permit=True)
    receipt = stage.receipt(stage.send("b"))
    assert receipt.delivery == "next_turn"
    stage.advance(3_000)
    assert stage.storage.story() == ["user: a", "assistant: a", "user: b", "assistant: b"]


@pytest.mark.rule("MBX-12", "R117")
def test_two_principals_never_share_a_turn(stage_for: Open) -> None:
    stage = stage_for("slow")
    stage.send("a1", permit=True)
    stage.send(item("b", principal="bob"))
    stage.send("a2")
    stage.advance(5_000)
    starts = stage.storage.of(TurnStarted)
    assert [one.principal for one in starts] == [
        "principal:operator:local",
        "bob",
        "principal:operator:local",
    ]
    ends = stage.storage.of(TurnCompleted)
    assert [one.claimed_input_ids for one in ends] == [["a1"], ["b"], ["a2"]]


@pytest.mark.rule("INB-6", "R21", "ACC-1")
def test_a_resent_input_is_one_message_for_ever(stage_for: Open) -> None:
    stage = stage_for("echo")
    stage.send("a", permit=True)
    frames = len(stage.storage.frames)
    again = stage.receipt(stage.send("a"))
    assert (again.duplicate, again.item_state, again.delivery) == (True, "acknowledged", "history")
    assert len(stage.storage.frames) == frames
    assert stage.refusal(stage.send(item("a", "other"))).code == "request_conflict"
    stage.restart()
    assert stage.receipt(stage.send("a")).item_state == "acknowledged"
    assert stage.permit == "none"
    stage.storage.check()


@pytest.mark.rule("R102", "ADM-4", "MBX-6")
def test_no_turn_starts_before_its_permit(stage_for: Open) -> None:
    stage = stage_for("echo")
    stage.permit_answer = "queue"
    receipt = stage.receipt(stage.send("a"))
    assert (receipt.delivery, receipt.waiting_for) == ("next_turn", "turn_permit")
    assert stage.storage.of(TurnStarted) == []
    stage.grant()
    assert len(stage.storage.of(TurnCompleted)) == 1


@pytest.mark.rule("MBX-6", "ADM-4")
def test_a_silent_broker_counts_as_queued(stage_for: Open) -> None:
    stage = stage_for("echo")
    stage.permit_answer = "silence"
    request = stage.send("a")
    assert request not in stage.replies
    stage.advance(249)
    assert request not in stage.replies
    stage.advance(1)
    assert stage.receipt(request).waiting_for == "turn_permit"
    stage.grant()
    assert len(stage.storage.of(TurnCompleted)) == 1


@pytest.mark.rule("MBX-6", "ADM-4")
def test_a_refused_permit_stores_nothing(stage_for: Open) -> None:
    stage = stage_for("echo")
    stage.permit_answer = "refuse"
    assert stage.refusal(stage.send("a")).code == "overloaded"
    assert stage.storage.frames == []


@pytest.mark.rule("TLP-8", "FLR-1", "FLR-3", "RUN-9", "RTY-5")
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("raises", "runtime"),
        ("exits", "runtime"),
        ("times out", "timeout"),
        ("returns a number", "runtime"),
        ("leaves a task that exits", "completed"),
        ("no_such_agent", "runtime"),
        ("no.such.module:agent", "runtime"),
        ("tests.scenarios.stage:ALICE", "runtime"),
        ("tests.scenarios.broken_agent:agent", "runtime"),
    ],
)
def test_whatever_agent_code_does_ends_its_turn_alone(
    stage_for: Open, name: str, code: str
) -> None:
    @cast_agent(name.split(":")[0] if name in _BAD else "unused")
    async def bad(turn: Turn) -> str:
        await turn.say("so far so good")
        return await _BAD[name]()

    stage = stage_for(name)
    stage.send("a", permit=True)
    stage.advance(2_000)
    if code == "completed":
        assert len(stage.storage.of(TurnCompleted)) == 1
    else:
        ended = stage.storage.of(TurnAborted)[0]
        assert (ended.cause, ended.outcome) == ("failed", "failed")
        assert ended.failure.code == code
        assert "secret" not in ended.model_dump_json()
    assert stage.status is None
    assert stage.permit == "none"
    assert "secret" not in repr(stage.logs)
    assert len(stage.replies) == 1


async def _raise() -> str:
    raise ValueError("my secret")


async def _exit() -> str:
    raise SystemExit(3)


async def _time_out() -> str:
    raise TimeoutError("secret")


async def _number() -> str:
    return 5  # type: ignore[return-value]


async def _leave_task() -> str:
    async def leave() -> None:
        await asyncio.sleep(100)

    task = asyncio.create_task(leave())
    await asyncio.sleep(0)
    return "done" if not task.done() else "?"


_BAD = {
    "raises": _raise,
    "exits": _exit,
    "times out": _time_out,
    "returns a number": _number,
    "leaves a task that exits": _leave_task,
}


@pytest.mark.rule("TEX-8", "RUN-3")
def test_code_that_was_left_behind_writes_nothing_after_the_end(stage_for: Open) -> None:
    errors: list[str] = []

    @cast_agent("haunted")
    async def haunted(turn: Turn) -> None:
        async def ghost() -> None:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                try:
                    await turn.say("boo")
                except Exception as error:
                    errors.append(type(error).__name__)

        asyncio.get_running_loop().create_task(ghost())
        await asyncio.sleep(0)

    stage = stage_for("haunted")
    stage.send("a", permit=True)
    stage.run()
    assert errors == ["TurnTerminal"]
    assert stage.storage.story() == ["user: a"]
    assert len(stage.storage.of(TurnCompleted)) == 1


@pytest.mark.rule("MBX-9", "TLP-2")
def test_a_wait_for_input_that_was_given_up_loses_nothing(stage_for: Open) -> None:
    seen: list[str] = []

    @cast_agent("impatient")
    async def impatient(turn: Turn) -> None:
        inputs = aiter(turn)
        for _ in range(20):
            try:
                message = await asyncio.wait_for(anext(inputs), 0.1)
            except TimeoutError:
                continue
            except StopAsyncIteration:
                return
            seen.append(message.id)

    stage = stage_for("impatient")
    stage.storage_slow = True
    stage.send("a", permit=True)
    stage.storage_answers()
    stage.advance(550)
    assert seen == []
    stage.storage_slow = False
    stage.advance(2_000)
    assert seen == ["a"]


@pytest.mark.rule("TLP-4")
def test_words_said_side_by_side_keep_their_order(stage_for: Open) -> None:
    @cast_agent("choir")
    async def choir(turn: Turn) -> None:
        await asyncio.gather(*[turn.say(f"voice {n}") for n in range(5)])

    stage = stage_for("choir")
    stage.send("a", permit=True)
    assert stage.storage.story()[1:] == [f"assistant: voice {n}" for n in range(5)]
    stage.storage.check()


@pytest.mark.rule("RES-2", "FLT-26")
def test_the_gateway_hears_whether_the_session_may_go(stage_for: Open) -> None:
    stage = stage_for("slow")
    registers = [one for one in stage.told if isinstance(one, Register)]
    assert [(one.permit, one.evictable) for one in registers] == [(False, True)]
    stage.send("a", permit=True)
    stage.advance(10_000)
    beats = [(one.phase, one.evictable) for one in stage.told if isinstance(one, Beat)]
    assert beats[0] == ("idle", True)
    assert ("open", False) in beats
    assert beats[-1] == ("idle", True)
    stage.told.clear()
    stage.advance(120_000)
    assert len([one for one in stage.told if isinstance(one, Beat)]) == 2, "every 60 s when idle"


@pytest.mark.rule("ADM-7")
def test_a_permit_that_crossed_a_registration_is_told_again(
    stage_for: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway took it back when it heard that none was held. Found by the simulator."""
    stage = stage_for("slow")
    stage.session.gateway_lost()
    stage.told.clear()
    with monkeypatch.context() as patch:
        patch.setattr(stage, "tell", stage.told.append)
        stage.session.gateway_up()
        stage.send("a", permit=True)
        stage.session.registered()
        stage.session.registered()
    registers = [one for one in stage.told if isinstance(one, Register)]
    assert [one.permit for one in registers] == [False, True]
    stage.advance(5_000)


@pytest.mark.rule("ADM-7", "FLT-26")
def test_a_new_gateway_hears_what_the_session_holds(stage_for: Open) -> None:
    stage = stage_for("slow")
    stage.send("a", permit=True)
    stage.session.gateway_lost()
    stage.told.clear()
    stage.session.gateway_up()
    stage.session.batch_done()
    register = stage.told[0]
    assert isinstance(register, Register)
    assert (register.permit, register.evictable) == (True, False)
    stage.advance(5_000)
    assert len(stage.storage.of(TurnStarted)) == 1, "work went on"


@pytest.mark.rule("RES-2", "LSE-8")
def test_an_idle_session_gives_its_process_up(stage_for: Open) -> None:
    stage = stage_for("echo")
    stage.send("a", permit=True)
    stage.advance(299_000)
    stage.send("b", permit=True)
    stage.advance(299_000)
    assert stage.status is None
    stage.advance(2_000)
    assert [stage.status] == [0]
    assert stage.storage.released


@pytest.mark.rule("TLP-2")
def test_a_long_input_becomes_parts_that_fit_into_records(stage_for: Open) -> None:
    stage = stage_for("echo")
    text = "ä" * 300_000
    stage.send(item("long", text), permit=True)
    parts = [line for line in stage.storage.story() if line.startswith("user")]
    assert "".join(line.removeprefix("user: ") for line in parts) == text
    assert len(parts) == 3
    assert len(stage.storage.of(TurnCompleted)) == 1


@pytest.mark.rule("TLP-4")
def test_what_no_record_can_hold_is_refused_to_the_agent(stage_for: Open) -> None:
    refused: list[str] = []

    @cast_agent("wordy")
    async def wordy(turn: Turn) -> str:
        for call in (turn.say("x" * 9_000_000), turn.say(""), turn.tool("hammer")):
            try:
                await call
            except Exception as error:
                refused.append(type(error).__name__)
        try:
            await turn.tool("sleep", seconds=float("nan"))
        except Exception as error:
            refused.append(type(error).__name__)
        await turn.say("lone \ud800 surrogate")
        return "y" * 9_000_000

    stage = stage_for("wordy")
    stage.send("a", permit=True)
    assert refused == ["PayloadTooLarge", "InvalidRequest", "InvalidRequest", "InvalidRequest"]
    assert stage.storage.story() == ["user: a", "assistant: lone \ufffd surrogate"]
    (ended,) = stage.storage.of(TurnAborted)
    assert ended.failure.error == "payload_too_large"
    stage.storage.check()
