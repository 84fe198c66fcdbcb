"""The mailbox machine against a model in plain Python, with slow and refusing storage (R15).

The model knows nothing of the machine's state. It keeps what storage would keep, judges every
frame when it is emitted and every answer when it is given, and says what must be true meanwhile.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from callboard.actors.session import mailbox, mailbox_inputs, mailbox_turns
from callboard.actors.session.mailbox import Transition
from callboard.actors.session.mailbox_types import (
    Append,
    AppendDone,
    AppendRefused,
    AskPermit,
    CancelRequested,
    CancelTurn,
    Committed,
    Discard,
    Discarded,
    Drain,
    Drained,
    DrainOrSeal,
    Ended,
    Enqueue,
    Entry,
    Figures,
    Finish,
    Lookup,
    LookupDone,
    Mailbox,
    PermitGranted,
    PermitQueued,
    PermitRefused,
    Prepare,
    Reply,
    ReturnPermit,
    Submit,
    TurnBegins,
    TurnEnded,
    Wake,
    WakeLater,
)
from callboard.errors import CallboardError, Overloaded, RequestConflict, StorageFull
from callboard.limits import TURN_INPUT_IDS_MAX
from callboard.messages import CancelResult, InboxItem, KnownInput, Receipt
from tests.scenarios.stage import item

LIMITS = {"user": 20, "shell": 10}


@dataclass
class Known:
    """An input that the model has seen accepted."""

    item: InboxItem
    state: str = "pending"


@dataclass
class ModelTurn:
    turn_id: str
    kind: str
    principal: str
    schema: str | None
    claimed: list[str] = field(default_factory=list[str])
    sealed: bool = False


class Model:
    """A session's inbox and turn, told in lists."""

    def __init__(self) -> None:
        self.live: list[str] = []
        self.known: dict[str, Known] = {}
        self.held: set[str] = set()
        self.leaving: set[str] = set()
        self.turn: ModelTurn | None = None
        self.finishing = False
        self.turn_ids: list[str] = []

    def may_claim(self, limit: int = TURN_INPUT_IDS_MAX) -> list[str]:
        """Walk the inbox in order and stop at the first input that must not join."""
        turn = self.turn
        assert turn is not None
        found: list[str] = []
        schema = turn.schema
        for name in self.live:
            if name in turn.claimed or name in self.leaving:
                continue
            one = self.known[name].item
            is_first = not turn.claimed and not found
            if len(found) == limit or len(turn.claimed) + len(found) == TURN_INPUT_IDS_MAX:
                break
            if one.principal != turn.principal:
                break
            if not is_first and one.busy_mode != "steer":
                break
            if not is_first and schema and one.schema_digest not in (None, schema):
                break
            found.append(name)
            schema = schema or one.schema_digest
        return found

    def runnable(self) -> bool:
        """Is there an input that may start a turn by itself?"""
        return any(
            self.known[name].item.wake and name not in self.held | self.leaving
            for name in self.live
        )


class MailboxAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.box = Mailbox()
        self.model = Model()
        self.queue: deque[Append | Lookup] = deque()  # storage's, answered in order
        self.asked: dict[str, Any] = {}  # requests by token, until they are answered
        self.staged: dict[int, tuple[InboxItem, list[str]]] = {}
        self.digests: dict[str, set[str]] = {}  # all that was ever sent under an id
        self.permit = "none"
        self.delayed = False
        self.begun: list[str] = []
        self.count = 0

    # Driving.

    def fresh(self) -> str:
        self.count += 1
        return f"turn_{self.count:06}"

    def token(self, command_of: Any) -> str:  # noqa: ANN401
        self.count += 1
        name = f"t{self.count}"
        self.asked[name] = command_of
        return name

    def do(self, command: Any) -> list[Any]:  # noqa: ANN401
        before = self.box
        self.box, effects = mailbox.step(self.box, command)
        if self.box != before:
            assert self.box.changes == before.changes + 1
        for effect in effects:
            self.perform(effect)
        return list(effects)

    def perform(self, effect: Any) -> None:  # noqa: ANN401
        if isinstance(effect, Append):
            self.emitted(effect)
        elif isinstance(effect, Lookup):
            assert effect.message_id not in self.model.live, "a live id needs no look-up"
            self.queue.append(effect)
        elif isinstance(effect, Reply):
            self.replied(effect)
        elif isinstance(effect, AskPermit):
            assert self.permit == "none", "asked twice (ADM-4b)"
            assert self.model.turn is None
            self.permit = "asked"
        elif isinstance(effect, ReturnPermit):
            assert self.permit != "none", "returned twice (ADM-5)"
            assert self.model.turn is None, "returned under a turn"
            self.permit = "none"
        elif isinstance(effect, TurnBegins):
            self.begun.append(effect.turn.turn_id)
        elif isinstance(effect, WakeLater):
            self.delayed = True
        else:
            assert isinstance(effect, TurnEnded | CancelTurn)
            if isinstance(effect, CancelTurn):
                assert self.model.turn is not None
                assert effect.turn_id == self.model.turn.turn_id
                self.model.turn.sealed = True
                self.asked.pop(effect.token)  # the shell's to answer, with the terminal

    # Judging frames when they are emitted.

    def emitted(self, effect: Append) -> None:
        frame, model = effect.frame, self.model
        if frame.put is not None:
            name = frame.put.message_id
            assert name not in model.live, "a live id is put again"
            assert all(one.message_id != name for one, _ in self.staged.values())
            tokens = [t for t in effect.releases if t in self.asked]
            assert tokens, "a put that releases nothing"
            self.staged[effect.flight] = (frame.put, tokens)
        if frame.start is not None and frame.terminal is None:
            assert model.turn is None, "two owners"
            assert self.permit == "held", "a start without a permit"
            self.judge_start(effect)
        if frame.terminal is not None:
            assert model.turn is not None
            assert frame.terminal.turn.turn_id == model.turn.turn_id
            assert list(frame.terminal.turn.claimed) == model.turn.claimed
            model.finishing = True
        if frame.discard is not None:
            names = {name for name, _ in frame.discard.items}
            assert not names & set(model.turn.claimed if model.turn else ()), "a claim leaves"
            model.leaving |= names
        self.queue.append(effect)

    def judge_start(self, effect: Append) -> None:
        frame, model = effect.frame, self.model
        start = frame.start
        assert start is not None
        assert start.turn_id not in model.turn_ids, "a turn id is used once"
        older = [n for n in model.live if n not in model.leaving]
        in_flight = [f for f in self.staged if f != effect.flight]
        if frame.put is not None and not older and not in_flight:
            assert start.kind == "user"
            assert start.input_ids == (frame.put.message_id,)
            assert start.principal == frame.put.principal
        else:
            assert start.kind == "pending", "a prompt overtakes older input (MBX-7)"
            if older:
                assert start.principal == model.known[older[0]].item.principal
        if frame.put is None:
            assert model.runnable(), "started for nothing runnable"

    # Judging answers when they are given.

    def replied(self, effect: Reply) -> None:
        command = self.asked.pop(effect.token)  # KeyError: answered twice, or never asked
        answer = effect.answer
        if isinstance(command, InboxItem):
            self.judge_receipt(command, answer)
        elif isinstance(command, Drain | DrainOrSeal):
            self.judge_drained(command, answer)
        elif isinstance(command, Finish):
            assert isinstance(answer, Ended | CallboardError)
        elif isinstance(command, Discard):
            self.judge_discarded(command, answer)
        else:
            assert isinstance(answer, CancelResult | CallboardError)

    def judge_receipt(self, sent: InboxItem, answer: Any) -> None:  # noqa: ANN401
        model, name = self.model, sent.message_id
        known = model.known.get(name)
        if isinstance(answer, CallboardError):
            if answer.code == "request_conflict":
                assert self.digests[name] - {sent.digest}, "nothing else has this id"
            else:
                assert known is None, f"a known id was refused: {answer.code} (INB-6d)"
            return
        assert isinstance(answer, Receipt)
        assert known is not None, "a receipt before the put is durable (MBX-2)"
        assert known.item.digest == sent.digest
        assert answer.item_state == known.state
        if known.state in ("acknowledged", "discarded"):
            assert answer.duplicate
            assert answer.delivery == "history"
            return
        assert answer.queued == len(model.live)
        turn = model.turn
        joins = turn is not None and (
            name in turn.claimed
            or (not turn.sealed and not model.finishing and name in model.may_claim())
        )
        assert answer.delivery == ("current_turn" if joins else "next_turn")
        assert answer.turn_id == (turn.turn_id if turn else None)

    def judge_drained(self, command: Drain | DrainOrSeal, answer: Any) -> None:  # noqa: ANN401
        turn = self.model.turn
        if turn is None or command.turn_id != turn.turn_id:
            assert isinstance(answer, CallboardError)
            assert answer.code == "not_turn_owner"
        elif turn.sealed or self.model.finishing:
            assert isinstance(answer, CallboardError), "a sealed turn claims nothing (MBX-11)"
            assert answer.code == "turn_sealed"
        else:
            assert isinstance(answer, Drained)
            limit = TURN_INPUT_IDS_MAX if command.limit is None else command.limit
            expected = self.model.may_claim(limit)
            assert [entry.id for entry in answer.entries] == expected
            for name in expected:
                schema = self.model.known[name].item.schema_digest
                turn.claimed.append(name)
                turn.schema = turn.schema or schema
                self.model.known[name].state = "claimed"
            assert answer.sealed == (not expected and isinstance(command, DrainOrSeal))
            turn.sealed |= answer.sealed

    def judge_discarded(self, command: Discard, answer: Any) -> None:  # noqa: ANN401
        if isinstance(answer, Discarded) and command.ids:
            assert answer.number == len(set(command.ids))

    # What storage does.

    def written(self, effect: Append) -> None:
        frame, model = effect.frame, self.model
        if frame.put is not None:
            self.staged.pop(effect.flight)
            model.live.append(frame.put.message_id)
            model.known[frame.put.message_id] = Known(frame.put)
            if frame.put.wake:
                self.delayed = False
        if frame.terminal is not None:
            self.ended(effect)
        if frame.discard is not None:
            for name, _ in frame.discard.items:
                model.live.remove(name)
                model.leaving.discard(name)
                model.known[name].state = "discarded"
        if frame.start is not None:
            start = frame.start
            model.turn = ModelTurn(start.turn_id, start.kind, start.principal, start.schema_digest)
            model.turn_ids.append(start.turn_id)
            self.delayed = False
            if start.kind == "user":
                model.turn.claimed = list(start.input_ids)
                for name in start.input_ids:
                    model.known[name].state = "claimed"

    def ended(self, effect: Append) -> None:
        model, terminal = self.model, effect.frame.terminal
        assert terminal is not None
        turn = model.turn
        assert turn is not None
        gone = list(terminal.acknowledged.items) if terminal.acknowledged else []
        names = [name for name, _ in gone]
        if not terminal.figures.cause:
            assert names == [n for n in model.live if n in turn.claimed], "all claimed, in order"
        assert set(names) <= set(turn.claimed), "only claimed inputs are acknowledged"
        for name in names:
            model.live.remove(name)
            model.known[name].state = "acknowledged"
        for name in turn.claimed:
            if name in model.live:
                model.known[name].state = "pending"
                model.held.discard(name)
                if terminal.disposition == "held":
                    model.held.add(name)
        model.turn, model.finishing = None, False

    # Rules.

    @rule(
        number=st.integers(0, 24),
        principal=st.sampled_from(["A", "A", "A", "B"]),
        mode=st.sampled_from(["steer", "steer", "steer", "queue"]),
        schema=st.sampled_from([None, None, "1" * 64, "2" * 64]),
        wake=st.sampled_from([True, True, True, False]),
        origin=st.sampled_from(["user", "shell", "shell"]),
        text=st.sampled_from(["", "", "", "other"]),
        permit=st.booleans(),
        kind=st.sampled_from([Submit, Submit, Submit, Submit, Prepare, Enqueue, Committed]),
    )
    def input(
        self,
        number: int,
        principal: str,
        mode: Any,  # noqa: ANN401
        schema: str | None,
        wake: bool,
        origin: str,
        text: str,
        permit: bool,
        kind: Any,  # noqa: ANN401
    ) -> None:
        one = item(
            f"m{number}",
            text,
            principal=principal,
            busy_mode=mode,
            schema=schema,
            wake=wake,
            origin=origin,
        )
        known = self.model.known.get(one.message_id)
        if known is not None and known.item.digest == one.digest:
            one = known.item
        if kind is Committed:
            self.other_writer(one)
            return
        self.digests.setdefault(one.message_id, set()).add(one.digest)
        token = self.token(one)
        if kind is Enqueue:
            self.do(Enqueue(token, one, 100, allow_before_turn=True))
            return
        came = permit and self.permit != "held" and not self.box.has_owner
        if came:
            self.permit = "held"
        self.do(kind(token, one, 100, self.fresh(), permit=came))

    def other_writer(self, one: InboxItem) -> None:
        """Let a completion in, behind what storage has written so far."""
        one = one.model_copy(update={"message_id": f"task{self.count}", "origin": "background"})
        self.model.live.append(one.message_id)
        self.model.known[one.message_id] = Known(one)
        self.do(Committed(one, 1, 100, self.fresh()))

    @precondition(lambda self: self.queue)
    @rule(
        refused=st.sampled_from([False, False, False, True]),
        count=st.sampled_from([1, 1, 2, 8]),
    )
    def storage(self, refused: bool, count: int) -> None:
        for _ in range(min(count, len(self.queue))):
            self.answer_one(refused)

    def answer_one(self, refused: bool) -> None:
        request = self.queue.popleft()
        if isinstance(request, Lookup):
            self.looked_up(request)
        elif self.was_known(request):
            pass
        elif refused:
            self.staged.pop(request.flight, None)
            if request.frame.discard is not None:
                self.model.leaving -= {name for name, _ in request.frame.discard.items}
            error = StorageFull(retry_after_ms=1)
            self.do(AppendRefused(request.flight, error, self.fresh()))
        else:
            self.written(request)
            self.do(AppendDone(request.flight, self.fresh(), 1, 120))

    def was_known(self, request: Append) -> bool:
        """Write nothing of a frame whose put's id was used before (INB-6)."""
        put = request.frame.put
        known = self.model.known.get(put.message_id) if put else None
        if put is None or known is None:
            return False
        self.staged.pop(request.flight)
        if known.item.digest != put.digest:
            self.do(AppendRefused(request.flight, RequestConflict(), self.fresh()))
        else:
            state: Any = known.state
            known_input = KnownInput(item_state=state)
            self.do(AppendDone(request.flight, self.fresh(), known=known_input))
        return True

    def looked_up(self, request: Lookup) -> None:
        known = self.model.known.get(request.message_id)
        if known is None:
            self.do(LookupDone(request.token))
        elif known.item.digest != request.digest:
            self.do(LookupDone(request.token, error=RequestConflict()))
        else:
            state: Any = known.state
            self.do(LookupDone(request.token, KnownInput(item_state=state)))

    @precondition(lambda self: self.permit == "asked")
    @rule(answer=st.sampled_from(["granted", "queued", "refused"]))
    def permit_answer(self, answer: str) -> None:
        if answer == "granted":
            self.permit = "held"
            self.do(PermitGranted(self.fresh()))
        elif answer == "queued":
            self.permit = "queued"
            self.do(PermitQueued())
        else:
            self.permit = "none"
            self.do(PermitRefused(Overloaded(resource="pending_count", limit=1), 100))

    @precondition(lambda self: self.permit == "queued")
    @rule()
    def queued_permit_comes(self) -> None:
        self.permit = "held"
        self.do(PermitGranted(self.fresh()))

    @rule()
    def wake(self) -> None:
        self.delayed = False
        self.do(Wake(self.fresh()))

    @precondition(lambda self: self.model.turn is not None)
    @rule(
        right=st.sampled_from([True, True, True, False]),
        seal=st.booleans(),
        limit=st.sampled_from([None, None, 1, 2]),
    )
    def drain(self, right: bool, seal: bool, limit: int | None) -> None:
        assert self.model.turn is not None
        turn_id = self.model.turn.turn_id if right else "turn_other"
        kind = DrainOrSeal if seal else Drain
        command = kind("", turn_id, limit)
        before = self.box
        self.do(replace(command, token=self.token(command)))
        if not right:
            assert self.box == before, "a stranger changes nothing (MBX-17)"

    @precondition(lambda self: self.model.turn is not None and not self.model.finishing)
    @rule(
        cause=st.sampled_from(["", "", "failed", "cancelled", "interrupted"]),
        chain=st.booleans(),
        acknowledge=st.booleans(),
        hold=st.booleans(),
        retry=st.booleans(),
    )
    def finish(
        self,
        cause: Any,  # noqa: ANN401
        chain: bool,
        acknowledge: bool,
        hold: bool,
        retry: bool,
    ) -> None:
        assert self.model.turn is not None
        turn = self.model.turn
        outcome: Any = {"": "completed", "failed": "failed"}.get(cause, "cancelled")
        command = Finish(
            "",
            turn.turn_id,
            self.fresh(),
            Figures(cause, outcome),
            acknowledge_input=acknowledge,
            applied=frozenset(turn.claimed[::2]),
            hold=hold,
            retry_ms=1 if retry and cause == "failed" and not hold else None,
            continue_pending=chain,
        )
        self.do(replace(command, token=self.token(command)))

    @rule(number=st.integers(0, 24), everything=st.booleans())
    def discard(self, number: int, everything: bool) -> None:
        names = () if everything else (f"m{number}",)
        command = Discard("", names, "discarded", "A")
        self.do(replace(command, token=self.token(command)))

    @rule(number=st.integers(0, 24), turn=st.booleans())
    def cancel(self, number: int, turn: bool) -> None:
        name = None if turn else f"m{number}"
        command = CancelRequested("", None, name, False, "A")
        self.do(replace(command, token=self.token(command)))

    # What always holds.

    @invariant()
    def each_accepted_id_is_in_one_place(self) -> None:
        box = self.box
        pending = [entry.id for entry in box.pending]
        claimed = list(box.turn.claimed) if box.turn else []
        assert pending == self.model.live, "FIFO by put, nothing lost, nothing doubled"
        assert set(claimed) <= set(pending)
        states = {n: k.state for n, k in self.model.known.items()}
        assert {n for n, s in states.items() if s in ("pending", "claimed")} == set(pending)
        assert {n for n, s in states.items() if s == "claimed"} == set(claimed)
        assert len(claimed) == len(set(claimed))

    @invariant()
    def at_most_one_owner(self) -> None:
        turn = self.model.turn
        assert (self.box.turn is None) == (turn is None)
        if turn is not None:
            assert self.box.turn is not None
            assert self.box.turn.turn_id == turn.turn_id
            assert self.box.phase == ("sealed" if turn.sealed else "open")
            assert self.box.is_active == (not turn.sealed and not self.model.finishing)
        assert self.begun == self.model.turn_ids, "every started turn begins, once"

    @invariant()
    def nothing_runnable_is_forgotten(self) -> None:
        idle = self.model.turn is None and self.permit == "none" and not self.box.in_flight
        if idle and self.model.runnable() and not self.delayed:
            raise AssertionError("input waits and nobody has asked for a permit (MBX-16)")

    @invariant()
    def limits_hold(self) -> None:
        waiting = [staged.entry for staged in self.box.staged]
        for origin, most in LIMITS.items():
            count = sum(e.item.origin == origin for e in (*self.box.pending, *waiting))
            assert count <= most

    def teardown(self) -> None:
        """Let storage answer everything: then everybody has been answered."""
        for _ in range(500):
            if self.permit == "asked":
                self.permit_answer("queued")
            elif self.queue:
                self.answer_one(False)
            else:
                break
        left = [c for c in self.asked.values() if not isinstance(c, Finish)]
        assert not left, "a request without an answer"


LONG = settings(
    max_examples=250 if os.environ.get("CI") else 60,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.rule(
    "MBX-1",
    "MBX-2",
    "MBX-3",
    "MBX-5",
    "MBX-7",
    "MBX-8",
    "MBX-9",
    "MBX-10",
    "MBX-11",
    "MBX-12",
    "MBX-13",
    "MBX-14",
    "MBX-15",
    "MBX-16",
    "MBX-17",
    "INB-6",
    "INB-7",
    "INB-9",
    "ADM-5",
    "R15",
)
def test_the_machine_does_what_the_model_says() -> None:
    run_state_machine_as_test(MailboxAgainstModel, settings=LONG)


# --- mutants ----------------------------------------------------------------------------------


def _everything(turn: Any, pending: Any, limit: int = 120) -> list[Entry]:  # noqa: ANN401
    return [e for e in pending if e.id not in turn.claimed and not e.leaving][:limit]


def _front(state: Mailbox, staged: Any, command: Any) -> Mailbox:  # noqa: ANN401
    entry = staged.entry._replace(n=command.n, size=command.size)
    delayed = state.delayed and not entry.item.wake
    return state._replace(pending=(entry, *state.pending), delayed=delayed)


def _draining_when_sealed(state: Mailbox, command: Any) -> Any:  # noqa: ANN401
    return mailbox_turns.drain(state._replace(phase="open", in_flight=""), command)


def _answering_early(state: Mailbox, command: Any) -> Any:  # noqa: ANN401
    state, effects = mailbox_inputs.submit(state, command)
    if state.staged and command.token in state.staged[-1].tokens:
        receipt = mailbox_inputs.receipt_for(state, command.item.message_id)
        effects = (*effects, Reply(command.token, receipt))
    return state, effects


def _forgetting_claims(state: Mailbox, command: Any) -> Any:  # noqa: ANN401
    state, effects = mailbox_turns.drain(state, command)
    if state.turn is not None and state.turn.claimed:
        state = state._replace(turn=state.turn._replace(claimed=state.turn.claimed[:-1]))
    return state, effects


def _table(monkeypatch: pytest.MonkeyPatch, modes: list[str], kind: type, handler: Any) -> None:  # noqa: ANN401
    table: dict[Any, Transition] = dict(mailbox.TRANSITIONS)
    for mode in modes:
        table[mode, kind] = Transition(handler, frozenset({"open", "sealed", "starting"}))
    monkeypatch.setattr(mailbox, "TRANSITIONS", table)


def _mutate(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "claims across barriers":
        for module in (mailbox_turns, mailbox_inputs):
            monkeypatch.setattr(module, "claimable", _everything)
    elif name == "newest first":
        for module in (mailbox_turns, mailbox_inputs):
            monkeypatch.setattr(module, "take_in", _front)
    elif name == "claims when sealed":
        _table(monkeypatch, ["sealed"], Drain, _draining_when_sealed)
    elif name == "answers before the put is durable":
        _table(monkeypatch, ["open", "sealed"], Submit, _answering_early)
    else:
        assert name == "forgets a claim"
        _table(monkeypatch, ["open"], Drain, _forgetting_claims)


@pytest.mark.rule("R15")
@pytest.mark.parametrize(
    "mutant",
    [
        "claims across barriers",
        "newest first",
        "claims when sealed",
        "answers before the put is durable",
        "forgets a claim",
    ],
)
def test_the_model_notices_a_wrong_machine(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _mutate(monkeypatch, mutant)
    hunt = settings(
        LONG, max_examples=300, database=None, derandomize=True, phases=(Phase.generate,)
    )
    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        run_state_machine_as_test(MailboxAgainstModel, settings=hunt)
