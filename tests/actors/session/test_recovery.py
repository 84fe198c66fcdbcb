"""What a new owner writes about the turn that its predecessor left open (runtime 5.2 to 5.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from callboard.actors.session.mailbox_types import Figures, Frame, Terminal, Turn
from callboard.actors.session.recovery import Recovery, fold_of, mailbox_of, recover
from callboard.actors.session.scribe import Draft, Scribe, encode
from callboard.limits import INPUT_ATTEMPTS_MAX, TURN_INPUT_IDS_MAX
from callboard.messages import Append, Appended, LeaseGranted, PutOp, RemoveOp
from callboard.records import InboxAcknowledged, PartCreated, TurnAborted, check_data
from tests.scenarios.stage import ALICE, REF, FakeStorage, item

NOW = 5_000_000


@dataclass
class Past:
    """A session's storage, and a hand that writes into it as a session actor would."""

    storage: FakeStorage
    scribe: Scribe
    turn: Turn | None = None
    turns: int = 0

    def write(self, drafts: list[Draft], puts: list[str] | None = None, removes: Any = ()) -> None:  # noqa: ANN401
        records = encode(drafts)
        body = Append(
            session=str(REF),
            epoch=self.storage.epoch,
            key=records[0].id if records else "k",
            records=records,
            inbox=[
                *(PutOp(op="put", item=item(name)) for name in puts or []),
                *(RemoveOp(op="remove", message_id=name) for name in removes),
            ],
        )
        assert isinstance(self.storage.handle(body), Appended)

    def put(self, *names: str) -> None:
        for name in names:
            self.write([], [name])

    def start(self, *names: str) -> None:
        self.turns += 1
        self.turn = Turn(f"turn_{self.turns:04}", "user", ALICE, None, None, 0, names)
        self.write(self.scribe.of_frame(Frame(start=self.turn)))

    def hear(self, name: str) -> None:
        assert self.turn is not None
        self.write(self.scribe.heard(self.turn.turn_id, item(name)))

    def say(self) -> None:
        assert self.turn is not None
        self.write(self.scribe.said(self.turn.turn_id, "said"))

    def call(self, call_id: str, effect: Any = "unsafe") -> None:  # noqa: ANN401
        assert self.turn is not None
        self.write(self.scribe.called(self.turn.turn_id, call_id, "shell", {}, effect))

    def result(self, call_id: str) -> None:
        assert self.turn is not None
        call = self.storage.fold.calls[call_id]
        draft = self.scribe.returned(self.turn.turn_id, call.message_id, call_id, "shell", 1, None)
        self.write([draft])

    def cancel(self, *, keep_input: bool = False) -> None:
        assert self.turn is not None
        self.write([self.scribe.cancelling(self.turn.turn_id, ALICE, keep_input=keep_input)])

    def abort(self, *claimed: str) -> None:
        assert self.turn is not None
        turn = self.turn._replace(claimed=claimed)
        figures = Figures("failed", "failed")
        terminal = Terminal(turn, figures, "pending", None, None)
        self.write(self.scribe.of_frame(Frame(terminal=terminal)))
        self.turn = None

    def lease(self) -> LeaseGranted:
        self.storage.epoch += 1
        return self.storage.lease()

    def recover(self) -> Recovery:
        """Take the session over and write what there is to recover."""
        lease = self.lease()
        recovery = recover(lease, lambda: NOW)
        if recovery.drafts or recovery.removes:
            self.write(list(recovery.drafts), removes=recovery.removes)
        return recovery


@pytest.fixture
def past() -> Past:
    return make_past()


def make_past() -> Past:
    storage = FakeStorage()
    storage.epoch = 1
    return Past(storage, Scribe(1, "echo", None, lambda: 1_000_000))


def terminal(recovery: Recovery) -> TurnAborted:
    (found,) = [one.data for one in recovery.drafts if isinstance(one.data, TurnAborted)]
    return found


def results(recovery: Recovery) -> list[PartCreated]:
    return [one.data for one in recovery.drafts if isinstance(one.data, PartCreated)]


@pytest.mark.rule("RUN-5")
def test_a_session_in_order_has_nothing_to_recover(past: Past) -> None:
    past.put("a")
    assert past.recover() == Recovery((), ())


@pytest.mark.rule("RUN-3", "RUN-9", "RTY-4")
def test_a_dead_turn_is_lost_and_its_input_pending(past: Past) -> None:
    past.put("a")
    past.start("a")
    recovery = past.recover()
    ended = terminal(recovery)
    assert (ended.cause, ended.outcome) == ("process_restart", "lost")
    assert (ended.claimed_input_ids, ended.input_disposition) == (["a"], "pending")
    assert ended.duration_ms == 4_000
    lease = past.lease()
    assert lease.applied_ids == []
    assert [(one.attempts, one.held) for one in lease.pending] == [(1, False)]


@pytest.mark.rule("R48", "R57", "RUN-3")
def test_recovering_twice_writes_nothing_more(past: Past) -> None:
    past.put("a")
    past.start("a")
    past.hear("a")
    past.call("c1")
    past.result("c1")
    past.call("c2")
    past.recover()
    records = len(past.storage.records)
    assert past.lease().applied_ids == ["a"]
    assert past.recover() == Recovery((), ())
    assert len(past.storage.records) == records
    assert past.storage.types().count("turn_aborted") == 1


@pytest.mark.rule("RUN-9", "R57")
@pytest.mark.parametrize(
    ("effect", "error", "uncertain", "outcome"),
    [
        ("readonly", "cancelled", False, "lost"),
        ("keyed", "indeterminate", True, "indeterminate"),
        ("unsafe", "indeterminate", True, "indeterminate"),
    ],
)
def test_an_open_call_is_closed_by_its_declared_effect(
    past: Past, effect: str, error: str, uncertain: bool, outcome: str
) -> None:
    past.put("a")
    past.start("a")
    past.call("c1", effect)
    recovery = past.recover()
    (result,) = results(recovery)
    metadata = result.payload["metadata"]
    assert isinstance(metadata, dict)
    assert result.payload["error"] == error
    assert metadata["restart_recovery"] is True
    assert metadata["side_effects_uncertain"] is uncertain
    assert ("key" in metadata) == (effect == "keyed")
    assert terminal(recovery).outcome == outcome
    assert recovery.drafts[0].data is result, "results stand before the terminal (RUN-4)"


@pytest.mark.rule("R57", "RUN-3")
def test_calls_of_an_ended_turn_get_results_and_no_second_terminal() -> None:
    past = make_past()
    lease = past.lease().model_copy(
        update={
            "open_calls": [
                _open_call("c1", "unsafe"),
                _open_call("c2", "readonly"),
            ]
        }
    )
    recovery = recover(lease, lambda: NOW)
    assert [one.payload["call_id"] for one in results(recovery)] == ["c1", "c2"]
    assert len(recovery.drafts) == 2
    fold = fold_of(lease)
    for draft in recovery.drafts:
        fold.apply(fold.seq + 1, 0, draft.data)
    assert fold.calls == {}


def _open_call(call_id: str, effect: Any) -> Any:  # noqa: ANN401
    from callboard.messages import OpenCall

    return OpenCall(call_id=call_id, name="shell", effect=effect, message_id="msg_1")


@pytest.mark.rule("RUN-5", "RTY-4", "RTY-5", "RUN-9")
def test_a_recorded_cancel_acknowledges_what_was_applied_and_holds_the_rest(past: Past) -> None:
    past.put("a", "b")
    past.start("a", "b")
    past.hear("a")
    past.cancel()
    recovery = past.recover()
    ended = terminal(recovery)
    assert ended.outcome == "cancelled"
    assert ended.input_disposition == "held"
    assert recovery.removes == ("a",)
    before = recovery.drafts[-2].data
    assert isinstance(before, InboxAcknowledged)
    assert (before.reason, before.turn_id) == ("aborted", ended.turn_id)
    lease = past.lease()
    assert [(one.item.message_id, one.held) for one in lease.pending] == [("b", True)]


@pytest.mark.rule("RTY-5", "R29")
def test_a_recorded_cancel_that_keeps_the_input_holds_all_of_it(past: Past) -> None:
    past.put("a")
    past.start("a")
    past.hear("a")
    past.cancel(keep_input=True)
    recovery = past.recover()
    assert recovery.removes == ()
    assert terminal(recovery).input_disposition == "held"
    lease = past.lease()
    box = mailbox_of(lease, Recovery((), ()), fold_of(lease))
    assert [(entry.held, entry.recovered) for entry in box.pending] == [(True, True)]
    assert box.is_evictable


@pytest.mark.rule("RTY-1")
def test_the_last_attempt_is_spent_by_the_turn_that_died(past: Past) -> None:
    past.put("a", "b")
    for _ in range(INPUT_ATTEMPTS_MAX - 1):
        past.start("a")
        past.abort("a")
    past.start("a", "b")
    recovery = past.recover()
    last = recovery.drafts[-1].data
    assert isinstance(last, InboxAcknowledged)
    assert (last.reason, [one.message_id for one in last.items]) == ("attempts_spent", ["a"])
    assert recovery.removes == ("a",)
    assert [one.item.message_id for one in past.lease().pending] == ["b"]


@pytest.mark.rule("INB-4")
def test_the_transcript_wins_over_the_inbox(past: Past) -> None:
    past.put("a", "b")
    lease = past.lease().model_copy(update={"acknowledged_ids": ["a", "gone"]})
    recovery = recover(lease, lambda: NOW)
    assert recovery == Recovery((), ("a",))
    box = mailbox_of(lease, recovery, fold_of(lease))
    assert [entry.id for entry in box.pending] == ["b"]


@pytest.mark.rule("RUN-5")
def test_a_turn_names_no_more_inputs_than_a_record_may(past: Past) -> None:
    lease = past.lease()
    past.put("a")
    past.start("a")
    lease = past.lease()
    assert lease.open_turn is not None
    many = [f"m{n}" for n in range(TURN_INPUT_IDS_MAX)]
    turn = lease.open_turn.model_copy(update={"input_ids": many, "applied_ids": ["x"]})
    recovery = recover(lease.model_copy(update={"open_turn": turn}), lambda: 0)
    assert terminal(recovery).claimed_input_ids == many
    assert terminal(recovery).duration_ms == 0, "a clock that went back (5.2)"


STEPS = st.lists(
    st.sampled_from(
        [
            "put",
            "start",
            "hear",
            "say",
            "call",
            "keyed",
            "readonly",
            "result",
            "cancel",
            "keep",
            "fail",
        ]
    ),
    max_size=25,
)


@pytest.mark.rule("RUN-3", "RUN-5", "RUN-9", "R48", "R57")
@given(STEPS)
def test_whatever_was_left_open_is_closed_once(steps: list[str]) -> None:
    past = make_past()
    for number, step in enumerate(steps):
        _do(past, step, number)
    lease = past.lease()
    before = past.storage.fold.clone()
    recovery = recover(lease, lambda: NOW)
    for draft in recovery.drafts:
        (record,) = encode([draft])
        check_data(record.type, record.data)
    if recovery.drafts or recovery.removes:
        past.write(list(recovery.drafts), removes=recovery.removes)
    fold = past.storage.fold
    assert fold.turn is None
    assert fold.calls == {}
    assert recover(past.lease(), lambda: NOW) == Recovery((), ())
    assert set(past.storage.inbox) == {one.item.message_id for one in lease.pending} - set(
        recovery.removes
    )
    assert (fold.turns, fold.last_turn_id) == (before.turns, before.last_turn_id)
    _folds_agree(past, lease, recovery)


def _folds_agree(past: Past, lease: LeaseGranted, recovery: Recovery) -> None:
    """A running session's picture is the one that a restarted session gets (RUN-5)."""
    running = fold_of(lease)
    for draft in recovery.drafts:
        running.apply(running.seq + 1, 0, draft.data)
    restarted = fold_of(past.lease())
    assert running.attempts == restarted.attempts
    assert running.held == restarted.held
    assert set(running.applied) == set(restarted.applied)
    assert running.last_message_id == restarted.last_message_id
    ours = mailbox_of(lease, recovery, running).pending
    theirs = mailbox_of(past.lease(), Recovery((), ()), restarted).pending
    assert [(e.id, e.held) for e in ours] == [(e.id, e.held) for e in theirs]


def _do(past: Past, step: str, number: int) -> None:
    fold = past.storage.fold
    if step == "put":
        past.put(f"m{number}")
    elif step == "start":
        if fold.turn is None and past.storage.inbox:
            past.start(*past.storage.inbox)
    elif fold.turn is None:
        return
    elif step == "hear":
        for name in past.storage.inbox:
            if name not in fold.applied:
                past.hear(name)
                break
    elif step == "say":
        past.say()
    elif step in ("call", "keyed", "readonly"):
        past.call(f"c{number}", "unsafe" if step == "call" else step)
    elif step == "result" and fold.calls:
        past.result(next(iter(fold.calls)))
    elif step in ("cancel", "keep") and not fold.turn.cancel:
        past.cancel(keep_input=step == "keep")
    elif step == "fail" and not fold.calls:
        past.abort(*[name for name in fold.turn.input_ids if name in past.storage.inbox])


@pytest.mark.rule("R49", "RUN-5")
@pytest.mark.parametrize(
    ("payload", "successful"),
    [({"error": None}, True), ({}, False), ({"error": "boom"}, False)],
)
def test_a_result_is_a_success_only_if_it_says_so(
    past: Past, payload: dict[str, object], successful: bool
) -> None:
    past.put("a")
    past.start("a")
    past.call("c1")
    assert past.turn is not None
    call = past.storage.fold.calls["c1"]
    draft = past.scribe.returned(past.turn.turn_id, call.message_id, "c1", "shell", 1, None)
    assert isinstance(draft.data, PartCreated)
    kept = {k: v for k, v in draft.data.payload.items() if k != "error"} | payload
    past.write([draft._replace(data=draft.data.model_copy(update={"payload": kept}))])
    assert past.storage.fold.turn is not None
    assert past.storage.fold.turn.had_successful_tool_result is successful
