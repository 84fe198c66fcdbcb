"""The mailbox machine, rule by rule: table 3.1 of the runtime page and its scenarios."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from callboard.actors.session import mailbox
from callboard.actors.session.mailbox import TRANSITIONS, Transition, UnexpectedCommand, step
from callboard.actors.session.mailbox_types import (
    Append,
    AppendDone,
    AppendRefused,
    AskPermit,
    CancelRequested,
    CancelTurn,
    Command,
    Committed,
    Discard,
    Discarded,
    Drain,
    Drained,
    DrainOrSeal,
    Effect,
    Ended,
    Enqueue,
    Entry,
    Figures,
    Finish,
    Lookup,
    LookupDone,
    Mailbox,
    Mode,
    PermitGranted,
    PermitQueued,
    PermitRefused,
    Prepare,
    Reply,
    ReturnPermit,
    Start,
    Started,
    Stop,
    Submit,
    TurnBegins,
    TurnEnded,
    Wake,
    WakeLater,
)
from callboard.errors import CallboardError, Overloaded, StorageFull
from callboard.limits import (
    FOLLOW_UP_TURNS_MAX,
    INBOX_BACKGROUND_ITEMS_MAX,
    INBOX_ITEMS_MAX,
    INBOX_PEER_ITEMS_MAX,
    INBOX_RECOVERY_ITEMS_MAX,
    INBOX_SHELL_ITEMS_MAX,
    INBOX_USER_ITEMS_MAX,
    TURN_INPUT_IDS_MAX,
)
from callboard.messages import CancelResult, InboxItem, KnownInput, Receipt
from tests.scenarios.stage import ALICE, item

DONE = Figures(cause="", outcome="completed")
FAILED = Figures(cause="failed", outcome="failed")


class Box:
    """A mailbox whose effects a test looks at; it plays storage and the broker of permits."""

    def __init__(self, *, permit: bool = True, **state: Any) -> None:  # noqa: ANN401
        self.state = Mailbox(**state)
        self.gives_permit = permit
        self.frames: deque[Append] = deque()
        self.lookups: deque[Lookup] = deque()
        self.written: list[Append] = []
        self.answers: dict[str, Any] = {}
        self.others: list[Effect] = []
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"turn_{self.count:04}"

    def do(self, command: Command) -> tuple[Effect, ...]:
        self.state, effects = step(self.state, command)
        for effect in effects:
            if isinstance(effect, Append):
                self.frames.append(effect)
            elif isinstance(effect, Lookup):
                self.lookups.append(effect)
            elif isinstance(effect, Reply):
                assert effect.token not in self.answers
                self.answers[effect.token] = effect.answer
            else:
                self.others.append(effect)
        if self.gives_permit and any(isinstance(one, AskPermit) for one in effects):
            self.do(PermitGranted(self.fresh()))
        return effects

    def commit(self, count: int = 1_000) -> None:
        """Let storage write what was asked for, in order."""
        while count and self.frames:
            frame = self.frames.popleft()
            self.written.append(frame)
            self.do(AppendDone(frame.flight, self.fresh(), len(self.written), 100))
            count -= 1
        while self.lookups:
            self.do(LookupDone(self.lookups.popleft().token))

    def refuse(self, error: CallboardError | None = None) -> None:
        """Let storage refuse the next frame."""
        frame = self.frames.popleft()
        problem = error or StorageFull(retry_after_ms=1_000)
        self.do(AppendRefused(frame.flight, problem, self.fresh()))

    def submit(self, one: InboxItem | str, *, commit: bool = True, permit: bool = False) -> Any:  # noqa: ANN401
        return self._put(Submit, one, commit, permit=permit)

    def prepare(self, one: InboxItem | str, *, commit: bool = True) -> Any:  # noqa: ANN401
        return self._put(Prepare, one, commit)

    def enqueue(self, one: InboxItem | str, *, commit: bool = True, before: bool = False) -> Any:  # noqa: ANN401
        token = f"q{self.count}"
        self.count += 1
        self.do(Enqueue(token, _item(one), 100, allow_before_turn=before))
        if commit:
            self.commit()
        return self.answers.get(token, token)

    def _put(self, kind: Any, one: InboxItem | str, commit: bool, **more: bool) -> Any:  # noqa: ANN401
        token = f"s{self.count}"
        self.do(kind(token, _item(one), 100, self.fresh(), **more))
        if commit:
            self.commit()
        return self.answers.get(token, token)

    @property
    def turn_id(self) -> str:
        assert self.state.turn is not None
        return self.state.turn.turn_id

    def drain(self, *, seal: bool = False, turn_id: str = "", limit: int | None = None) -> Any:  # noqa: ANN401
        kind = DrainOrSeal if seal else Drain
        token = f"d{self.count}"
        self.count += 1
        self.do(kind(token, turn_id or self.turn_id, limit))
        answer = self.answers[token]
        if isinstance(answer, Drained):
            return [entry.id for entry in answer.entries], answer.sealed
        return answer

    def finish(
        self,
        figures: Figures | None = DONE,
        *,
        commit: bool = True,
        turn_id: str = "",
        **more: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        token = f"f{self.count}"
        self.do(Finish(token, turn_id or self.turn_id, self.fresh(), figures, **more))
        if commit:
            self.commit()
        return self.answers.get(token)

    @property
    def mode(self) -> str:
        return self.state.mode

    @property
    def pending(self) -> list[str]:
        return [entry.id for entry in self.state.pending]

    @property
    def claimed(self) -> list[str]:
        return list(self.state.turn.claimed) if self.state.turn else []

    def open(self) -> Box:
        """Start a turn for an input `first`."""
        self.submit("first")
        assert self.mode == "open"
        return self

    def saw(self, kind: type) -> list[Any]:
        return [one for one in self.others if isinstance(one, kind)]


def _item(one: InboxItem | str) -> InboxItem:
    return item(one) if isinstance(one, str) else one


def code(answer: Any) -> str:  # noqa: ANN401
    assert isinstance(answer, CallboardError), answer
    return answer.code


# --- the machine ------------------------------------------------------------------------------


@pytest.mark.rule("MBX-1")
def test_a_command_that_the_mode_does_not_know_is_a_named_error() -> None:
    with pytest.raises(UnexpectedCommand, match="PermitQueued in mode open"):
        step(Box().open().state, PermitQueued())


def _seal(state: Mailbox, _: Wake) -> tuple[Mailbox, tuple[Effect, ...]]:
    return state._replace(phase="sealed"), ()


@pytest.mark.rule("MBX-1")
def test_a_handler_that_leaves_the_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = dict(TRANSITIONS)
    table["idle", Wake] = Transition(_seal, frozenset())
    monkeypatch.setattr(mailbox, "TRANSITIONS", table)
    with pytest.raises(mailbox.ForbiddenMode):
        step(Mailbox(), Wake("turn_1"))


@pytest.mark.rule("MBX-1")
def test_states_and_effects_are_values() -> None:
    before = Box().open().state
    command = Submit("t", item("x"), 100, "turn_9")
    assert step(before, command) == step(before, command)
    assert step(before, command)[0] != before


@pytest.mark.rule("R1", "INB-7")
def test_the_limits_of_origins_sum_up() -> None:
    limits = (
        INBOX_USER_ITEMS_MAX,
        INBOX_PEER_ITEMS_MAX,
        INBOX_BACKGROUND_ITEMS_MAX,
        INBOX_SHELL_ITEMS_MAX,
        INBOX_RECOVERY_ITEMS_MAX,
    )
    assert limits == (20, 20, 100, 10, 10)
    assert sum(limits) == INBOX_ITEMS_MAX == 160
    assert TURN_INPUT_IDS_MAX == 120


# --- puts and receipts ------------------------------------------------------------------------


@pytest.mark.rule("MBX-2", "MBX-3")
def test_nothing_is_answered_or_seen_before_storage_has_answered() -> None:
    box = Box().open()
    token = box.submit("a", commit=False)
    assert token not in box.answers
    assert box.drain() == ([], False)
    assert box.frames[0].releases == (token,)
    box.do(DrainOrSeal("seal", box.turn_id))
    box.commit()
    assert box.answers[token].delivery == "next_turn", "judged when the reply is handled"


@pytest.mark.rule("MBX-2", "RUN-13")
def test_a_refused_put_leaves_nothing_and_is_told_to_its_sender() -> None:
    box = Box().open()
    before = box.state
    token = box.submit("a", commit=False)
    box.refuse()
    assert code(box.answers[token]) == "storage_full"
    assert box.state.staged == ()
    assert box.state.pending == before.pending


@pytest.mark.rule("MBX-2")
def test_what_another_writer_has_put_joins_the_same_line() -> None:
    box = Box().open()
    box.do(Committed(item("c", origin="background"), 7, 100, box.fresh()))
    box.do(Committed(item("c", origin="background"), 7, 100, box.fresh()))
    assert box.drain() == (["c"], False)


@pytest.mark.rule("MBX-2", "MBX-16")
def test_what_another_writer_has_put_starts_a_turn() -> None:
    box = Box()
    box.do(Committed(item("c", origin="background"), 7, 100, box.fresh()))
    box.commit()
    assert box.mode == "open"


@pytest.mark.rule("MBX-4")
def test_two_predicates_that_never_agree_in_between() -> None:
    box = Box()
    assert (box.state.is_active, box.state.has_owner) == (False, False)
    box.submit("a", commit=False)
    assert (box.state.is_active, box.state.has_owner) == (False, True)
    box.commit()
    assert (box.state.is_active, box.state.has_owner) == (True, True)
    box.drain(seal=True)
    assert (box.state.is_active, box.state.has_owner) == (False, True)
    box.finish(commit=False)
    assert (box.state.is_active, box.state.has_owner) == (False, True)
    box.commit()
    assert (box.state.is_active, box.state.has_owner) == (False, False)


@pytest.mark.rule("R2")
def test_without_a_turn_an_enqueue_is_refused() -> None:
    box = Box()
    assert code(box.enqueue("a")) == "no_active_turn"
    assert box.written == []
    assert box.enqueue("a", before=True).delivery == "next_turn"


@pytest.mark.rule("R3", "MBX-9", "MBX-13")
def test_inputs_of_an_open_turn_are_drained_once_in_order() -> None:
    box = Box().open()
    box.finish()
    box.do(Start("c", "turn_c", ALICE, permit=True))
    box.commit()
    receipts = [box.enqueue("second"), box.enqueue("third")]
    assert [one.queued for one in receipts] == [1, 2]
    assert {one.delivery for one in receipts} == {"current_turn"}
    assert box.drain() == (["second", "third"], False)
    assert box.drain() == ([], False)
    assert box.pending == ["second", "third"]
    box.finish()
    assert box.pending == []


@pytest.mark.rule("R4", "MBX-10")
def test_input_staged_before_the_turn_is_drained_by_it() -> None:
    box = Box()
    receipt = box.enqueue(item("a", wake=False), before=True)
    assert receipt.delivery == "next_turn"
    assert box.mode == "idle", "it wakes nothing"
    box.do(Start("c", "turn_c", ALICE, permit=True))
    box.commit()
    assert box.answers["c"] == Started("turn_c")
    assert box.drain() == (["a"], False)
    assert box.drain(seal=True) == ([], True)


@pytest.mark.rule("R5", "MBX-11", "MBX-15")
def test_input_behind_the_seal_is_chained() -> None:
    box = Box().open()
    box.drain(seal=True)
    receipt = box.submit("a")
    assert (receipt.delivery, receipt.turn_id) == ("next_turn", box.turn_id)
    box.do(Start("s", "turn_zz", ALICE))
    assert code(box.answers["s"]) == "turn_active"
    first = box.turn_id
    box.finish(continue_pending=True)
    frame = box.written[-1].frame
    assert frame.terminal is not None
    assert frame.start is not None
    assert frame.terminal.turn.turn_id == first
    assert frame.start.chain_index == 1
    assert box.turn_id == frame.start.turn_id
    assert box.saw(ReturnPermit) == [], "one permit for the chain (TLP-9)"
    assert box.drain() == (["a"], False)


@pytest.mark.rule("R6", "MBX-6")
def test_a_first_prompt_is_claimed_with_the_start_of_its_turn() -> None:
    box = Box()
    receipt = box.submit("a", permit=True)
    (frame,) = box.written
    assert frame.frame.put is not None
    assert frame.frame.start is not None
    assert (receipt.mode, receipt.queued, receipt.item_state) == ("direct", 1, "claimed")
    assert receipt.turn_id == frame.frame.start.turn_id
    assert box.saw(AskPermit) == [], "the permit came with it"
    assert box.drain() == ([], False)
    assert (box.pending, box.claimed) == (["a"], ["a"])
    (begins,) = box.saw(TurnBegins)
    assert [entry.id for entry in begins.claimed] == ["a"]


@pytest.mark.rule("R7", "MBX-7")
def test_a_prompt_never_overtakes_older_input() -> None:
    box = Box(pending=(Entry(item("old"), 100, 1, held=True, recovered=True),))
    receipt = box.submit("new")
    assert (receipt.mode, receipt.queued) == ("pending", 2)
    assert box.claimed == []
    assert box.state.turn is not None
    assert box.state.turn.input_ids == ("old", "new")
    assert box.drain() == (["old", "new"], False)


@pytest.mark.rule("MBX-7")
def test_a_prompt_waits_behind_one_that_is_staged() -> None:
    box = Box()
    box.enqueue("a", before=True, commit=False)
    token = box.submit("b", commit=False, permit=True)
    box.commit()
    assert box.answers[token].mode == "pending"
    assert box.drain() == (["a", "b"], False)


@pytest.mark.rule("R8", "MBX-5")
def test_of_two_first_prompts_both_are_taken_and_one_starts() -> None:
    box = Box()
    first = box.prepare("a", commit=False)
    second = box.prepare("b", commit=False)
    box.commit()
    assert box.answers[first].mode == "direct"
    assert code(box.answers[second]) == "turn_active"
    assert box.pending == ["a"]

    box = Box()
    first = box.submit("a", commit=False)
    second = box.submit("b", commit=False)
    box.commit()
    assert len([one for one in box.written if one.frame.start]) == 1
    assert box.answers[second].delivery == "current_turn"
    assert box.pending == ["a", "b"]


@pytest.mark.rule("R9", "INB-7")
def test_the_twenty_first_user_input_is_refused() -> None:
    box = Box().open()
    for number in range(19):
        assert box.submit(f"m{number}").accepted
    refused = box.submit("m20")
    assert code(refused) == "inbox_full"
    assert refused.carried == {"limit": "INBOX_USER_ITEMS_MAX", "current": 20, "maximum": 20}
    assert len(box.pending) == 20


@pytest.mark.rule("R9", "INB-7")
def test_staged_inputs_count() -> None:
    box = Box()
    box.do(Start("c", "turn_c", ALICE, permit=True))
    box.commit()
    tokens = [box.enqueue(f"m{number}", commit=False) for number in range(25)]
    box.commit()
    answers = [box.answers[token] for token in tokens]
    assert [isinstance(one, Receipt) for one in answers] == [True] * 20 + [False] * 5


@pytest.mark.rule("R20", "INB-6", "INB-7", "INB-8")
def test_every_origin_has_its_own_room() -> None:
    box = Box().open()
    for number in range(100):
        assert box.enqueue(item(f"b{number}", origin="background")).accepted
    again = box.enqueue(item("b7", origin="background"))
    assert (again.duplicate, again.queued) == (True, 101)
    full = box.enqueue(item("b100", origin="background"))
    assert full.carried["limit"] == "INBOX_BACKGROUND_ITEMS_MAX"
    for number in range(19):
        assert box.submit(f"u{number}").accepted


@pytest.mark.rule("INB-8")
def test_bytes_are_counted_by_what_storage_says() -> None:
    box = Box().open()
    box.do(Submit("big", item("big"), 6_242_000, box.fresh()))
    box.commit()  # storage says 100 bytes
    box.do(Submit("again", item("again"), 6_242_000, box.fresh()))
    box.do(Submit("third", item("third"), 1_000, box.fresh()))
    box.commit()
    assert box.answers["again"].accepted
    assert box.answers["third"].carried["limit"] == "INBOX_USER_BYTES_MAX"


@pytest.mark.rule("R10", "MBX-11")
def test_a_sealed_turn_claims_nothing_more() -> None:
    box = Box().open()
    box.drain(seal=True)
    box.submit("a")
    for seal in (False, True):
        assert code(box.drain(seal=seal)) == "turn_sealed"
    assert box.claimed == ["first"]
    box.finish(continue_pending=True)
    assert box.drain() == (["a"], False)


# --- ids --------------------------------------------------------------------------------------


@pytest.mark.rule("INB-6", "R21")
def test_a_known_id_is_a_duplicate_whatever_has_become_of_it() -> None:
    box = Box().open()
    again = box.submit("first")
    assert (again.duplicate, again.item_state) == (True, "claimed")
    assert code(box.submit(item("first", "other text"))) == "request_conflict"
    box.finish()
    token = box.submit("first", commit=False)
    assert box.frames[0].frame.put is not None, "only storage knows it now"
    known = KnownInput(item_state="acknowledged", turn_id="turn_0001")
    box.do(AppendDone(box.frames.popleft().flight, box.fresh(), known=known))
    answer = box.answers[token]
    assert (answer.duplicate, answer.item_state) == (True, "acknowledged")
    assert (answer.delivery, answer.turn_id) == ("history", "turn_0001")
    assert box.mode == "idle"
    assert box.state.permit == "none", "the permit that was taken for it is given back"


@pytest.mark.rule("INB-6", "MBX-2")
def test_copies_share_the_answer_of_the_first() -> None:
    box = Box().open()
    first = box.submit("a", commit=False)
    copy = box.submit("a", commit=False)
    assert code(box.submit(item("a", "other"), commit=False)) == "request_conflict"
    assert len(box.frames) == 1
    box.commit()
    assert not box.answers[first].duplicate
    assert box.answers[copy].duplicate
    assert box.answers[copy].delivery == box.answers[first].delivery
    third = box.submit("b", commit=False)
    fourth = box.submit("b", commit=False)
    box.refuse()
    assert code(box.answers[third]) == code(box.answers[fourth]) == "storage_full"


@pytest.mark.rule("INB-6", "R116")
def test_a_known_id_is_never_refused_for_want_of_room() -> None:
    box = Box().open()
    for number in range(19):
        box.submit(f"m{number}")
    token = box.submit("known", commit=False)
    (asked,) = box.lookups
    assert (asked.message_id, asked.token) == ("known", token)
    box.do(LookupDone(token, KnownInput(item_state="discarded")))
    assert box.answers[token].item_state == "discarded"
    box.lookups.clear()
    token = box.submit("new", commit=False)
    box.do(LookupDone(token))
    assert code(box.answers[token]) == "inbox_full"
    box.lookups.clear()
    token = box.submit("odd", commit=False)
    box.do(LookupDone(token, error=StorageFull()))
    assert code(box.answers[token]) == "storage_full"
    box.do(LookupDone("nobody"))


@pytest.mark.rule("INB-6")
def test_an_own_put_that_is_sent_again_is_no_duplicate() -> None:
    """Storage restarted between the put's frame and its answer."""
    box = Box().open()
    token = box.submit("a", commit=False)
    known = KnownInput(item_state="pending")
    box.do(AppendDone(box.frames.popleft().flight, box.fresh(), known=known))
    assert not box.answers[token].duplicate
    assert box.pending == ["first", "a"]


@pytest.mark.rule("INB-6", "MBX-16")
def test_an_own_put_with_a_start_that_is_sent_again_starts_its_turn() -> None:
    box = Box()
    token = box.submit("a", commit=False)
    known = KnownInput(item_state="pending")
    box.do(AppendDone(box.frames.popleft().flight, box.fresh(), known=known))
    assert box.answers[token].accepted
    box.commit()
    assert box.mode == "open"
    assert box.drain() == (["a"], False)


# --- permits ----------------------------------------------------------------------------------


@pytest.mark.rule("MBX-6", "ADM-4")
def test_a_queued_permit_lets_input_in_and_its_turn_wait() -> None:
    box = Box(permit=False)
    token = box.submit("a", commit=False)
    assert box.mode == "asking"
    assert list(box.frames) == [], "nothing is stored before the answer"
    later = box.submit("b", commit=False)
    assert len(box.saw(AskPermit)) == 1, "one request per session (ADM-4b)"
    box.do(PermitQueued())
    box.commit()
    for name in (token, later):
        receipt = box.answers[name]
        assert (receipt.delivery, receipt.waiting_for) == ("next_turn", "turn_permit")
    assert box.submit("c").waiting_for == "turn_permit"
    box.do(PermitGranted(box.fresh()))
    box.commit()
    assert box.drain() == (["a", "b", "c"], False)


@pytest.mark.rule("MBX-6")
def test_what_waits_for_the_permits_answer_keeps_its_place() -> None:
    box = Box(permit=False)
    first = box.submit("a", commit=False)
    second = box.enqueue("b", commit=False, before=True)
    assert list(box.frames) == []
    box.do(PermitGranted(box.fresh()))
    assert [one.frame.put.message_id for one in box.frames if one.frame.put] == ["a", "b"]
    box.commit()
    assert box.answers[first].mode == "direct"
    assert box.answers[second].delivery == "current_turn"


@pytest.mark.rule("MBX-6", "ADM-4")
def test_a_refused_permit_stores_nothing() -> None:
    box = Box(permit=False)
    token = box.submit("a", commit=False)
    box.do(PermitRefused(Overloaded(resource="pending_count", limit=1), 500))
    box.commit()
    assert code(box.answers[token]) == "overloaded"
    assert box.written == []
    assert box.state == Mailbox(changes=box.state.changes)


@pytest.mark.rule("ADM-4", "MBX-16")
def test_a_refused_start_of_pending_input_asks_again_later() -> None:
    box = Box(permit=False, pending=(Entry(item("a"), 100),))
    box.do(Wake(box.fresh()))
    box.do(PermitRefused(Overloaded(resource="pending_count", limit=1), 500))
    assert box.saw(WakeLater) == [WakeLater(500)]
    assert box.state.permit == "none"
    box.do(Wake(box.fresh()))
    assert len(box.saw(AskPermit)) == 2


@pytest.mark.rule("ADM-5", "R104")
def test_the_permit_goes_back_with_the_terminal_and_once() -> None:
    box = Box().open()
    box.finish(commit=False)
    assert box.saw(ReturnPermit) == []
    box.refuse()
    assert box.saw(ReturnPermit) == []
    box.commit()
    assert len(box.saw(ReturnPermit)) == 1


@pytest.mark.rule("ADM-5")
def test_a_permit_that_is_not_needed_goes_back() -> None:
    box = Box(permit=False)
    box.submit("a", commit=False)
    box.do(PermitQueued())
    box.commit()
    box.do(Discard("d", ("a",), "discarded", ALICE))
    box.commit()
    assert box.saw(ReturnPermit) == [ReturnPermit()], "the request is taken back"
    assert box.submit("a", permit=True, commit=False)


@pytest.mark.rule("TLP-9")
def test_a_long_chain_queues_for_a_permit_again() -> None:
    box = Box().open()
    for number in range(FOLLOW_UP_TURNS_MAX):
        box.submit(item(f"m{number}", busy_mode="queue"))
        box.finish(continue_pending=True)
        box.drain(limit=1)
        assert box.state.turn is not None
        assert box.state.turn.chain_index == number + 1
    assert box.saw(ReturnPermit) == []
    box.submit("last")
    box.finish(continue_pending=True)
    assert len(box.saw(ReturnPermit)) == 1
    assert len(box.saw(AskPermit)) == 2
    assert box.state.turn is not None
    assert box.state.turn.chain_index == 0
    assert box.drain() == (["last"], False)


# --- barriers ---------------------------------------------------------------------------------


@pytest.mark.rule("R12", "MBX-12", "TAD-10")
@pytest.mark.parametrize(
    "barrier",
    [
        item("b", principal="bob"),
        item("b", sender="someone"),
        item("b", busy_mode="queue"),
        item("b", schema="2" * 64),
    ],
    ids=["principal", "sender", "queue", "schema"],
)
def test_a_barrier_stops_the_turn_and_all_behind_it(barrier: InboxItem) -> None:
    box = Box()
    box.submit(item("a", schema="1" * 64))
    receipts = [box.submit(barrier), box.submit("c")]
    assert [one.delivery for one in receipts] == ["next_turn", "next_turn"]
    assert box.drain(seal=True) == ([], True)
    box.finish(continue_pending=True)
    drained = box.drain()
    assert drained[0][0] == "b"
    assert box.state.turn is not None
    assert box.state.turn.principal == barrier.principal


@pytest.mark.rule("R12", "MBX-12")
def test_inputs_of_two_schemas_take_two_turns() -> None:
    one, two = "1" * 64, "2" * 64
    box = Box(pending=(Entry(item("p", wake=False), 100),))
    box.enqueue(item("a", schema=one), before=True)
    box.do(Start("c", "turn_zz", ALICE, permit=True))
    box.commit()
    box.enqueue("plain")
    box.enqueue(item("b", schema=two))
    assert box.drain() == (["p", "a", "plain"], False)
    assert box.drain(seal=True) == ([], True)


@pytest.mark.rule("R117", "MBX-12", "TAD-10")
def test_input_of_another_principal_never_joins() -> None:
    box = Box().open()
    first = box.turn_id
    receipts = [box.submit(item("b", principal="bob")), box.submit("a")]
    assert [one.delivery for one in receipts] == ["next_turn", "next_turn"]
    box.drain(seal=True)
    box.finish(continue_pending=True)
    assert box.drain() == (["b"], False)
    box.finish(continue_pending=True)
    assert box.drain() == (["a"], False)
    terminals = [one.frame.terminal for one in box.written if one.frame.terminal]
    assert terminals[0].turn.turn_id == first
    assert terminals[0].turn.claimed == ("first",)


@pytest.mark.rule("R13", "MBX-9", "MBX-8")
def test_a_turn_takes_one_hundred_and_twenty_inputs() -> None:
    names = [f"u{n}" for n in range(20)] + [f"p{n}" for n in range(20)]
    names += [f"b{n}" for n in range(90)]
    origins = {"u": "user", "p": "peer", "b": "background"}
    pending = tuple(Entry(item(name, origin=origins[name[0]]), 100) for name in names)
    box = Box(pending=pending)
    box.do(Wake(box.fresh()))
    box.commit()
    assert box.state.turn is not None
    assert len(box.state.turn.input_ids) == 120
    assert box.drain() == (names[:120], False)
    late = box.submit(item("late", origin="shell"))
    assert late.delivery == "next_turn", "beyond what the turn takes"
    assert box.drain(seal=True) == ([], True)
    box.finish(continue_pending=True)
    assert box.pending == [*names[120:], "late"]
    assert box.drain() == ([*names[120:], "late"], False)


@pytest.mark.rule("TAD-10")
def test_an_interrupt_is_kept_as_queue_and_ends_the_turn() -> None:
    box = Box().open()
    receipt = box.submit(item("now", busy_mode="interrupt"))
    assert receipt.delivery == "next_turn"
    assert box.state.pending[-1].item.busy_mode == "queue"
    assert box.saw(CancelTurn) == [CancelTurn("", box.turn_id, False, ALICE)]
    assert box.state.phase == "sealed"


# --- the end of a turn ------------------------------------------------------------------------


@pytest.mark.rule("R14", "MBX-17")
def test_a_stranger_changes_nothing() -> None:
    box = Box().open()
    before = box.state
    for seal in (False, True):
        assert code(box.drain(seal=seal, turn_id="turn_other")) == "not_turn_owner"
    assert code(box.finish(turn_id="turn_other")) == "not_turn_owner"
    assert box.state == before
    idle = Box()
    assert code(idle.drain(turn_id="turn_1")) == "not_turn_owner"
    assert code(idle.finish(turn_id="turn_1")) == "not_turn_owner"


@pytest.mark.rule("MBX-17", "RUN-9")
def test_a_finish_without_an_outcome_is_interrupted() -> None:
    box = Box().open()
    box.finish(None)
    terminal = next(one.frame.terminal for one in box.written if one.frame.terminal)
    assert terminal.figures == Figures("interrupted", "cancelled")
    assert (terminal.disposition, terminal.acknowledged) == ("pending", None)


@pytest.mark.rule("MBX-14", "RUN-4", "INB-5")
def test_claims_end_with_the_reply_to_the_terminal() -> None:
    box = Box().open()
    box.submit("a")
    box.drain()
    box.finish(commit=False)
    assert box.claimed == ["first", "a"]
    assert box.submit("late", commit=False)
    box.refuse()  # the terminal
    assert (box.mode, box.claimed) == ("finishing", ["first", "a"])
    late, again = box.frames
    assert again.after_ms > 0
    assert again.frame.terminal is not None
    assert [n for n, _ in again.frame.terminal.acknowledged.items] == ["first", "a"]  # type: ignore[union-attr]
    assert late.frame.put is not None
    box.commit()
    assert box.pending == ["late"]
    assert [one.outcome for one in box.saw(TurnEnded)] == ["completed"]


@pytest.mark.rule("MBX-15", "RUN-13")
def test_a_refused_terminal_is_tried_again_without_its_chain() -> None:
    box = Box().open()
    box.submit(item("a", busy_mode="queue"))
    box.finish(commit=False, continue_pending=True)
    assert [one.frame.start is None for one in box.frames] == [False]
    box.refuse()
    assert [one.frame.start is None for one in box.frames] == [True]
    box.commit()
    assert box.mode == "open", "picked up when idle is reached (MBX-16)"
    assert box.drain() == (["a"], False)


@pytest.mark.rule("MBX-15", "MBX-16")
def test_input_still_staged_at_the_finish_starts_the_next_turn() -> None:
    box = Box().open()
    box.drain(seal=True)
    box.submit("a", commit=False)
    box.finish(commit=False, continue_pending=True)
    assert box.frames[-1].frame.start is None
    box.commit()
    assert box.mode == "open"
    assert box.drain() == (["a"], False)


@pytest.mark.rule("R51", "RUN-5", "INB-5")
def test_an_abort_acknowledges_what_was_claimed_and_applied() -> None:
    box = Box().open()
    box.submit("a")
    box.submit(item("c", origin="background"))
    box.drain()
    box.finish(
        Figures("cancelled", "cancelled"),
        acknowledge_input=True,
        applied=frozenset({"first", "c", "stranger"}),
        hold=True,
    )
    terminal = box.written[-1].frame.terminal
    assert terminal is not None
    assert terminal.acknowledged is not None
    assert [name for name, _ in terminal.acknowledged.items] == ["first"]
    assert terminal.disposition == "held"
    assert [(entry.id, entry.held) for entry in box.state.pending] == [("a", True), ("c", True)]
    assert box.mode == "idle", "held inputs start nothing (RTY-5)"
    box.submit("b")
    assert box.drain() == (["a", "c", "b"], False)


@pytest.mark.rule("RTY-1", "INB-5")
def test_spent_inputs_leave_behind_the_terminal() -> None:
    box = Box().open()
    box.submit("a")
    box.drain()
    box.finish(FAILED, spent=frozenset({"first"}), hold=True)
    terminal = box.written[-1].frame.terminal
    assert terminal is not None
    assert terminal.spent is not None
    assert terminal.spent.reason == "attempts_spent"
    assert [name for name, _ in terminal.spent.items] == ["first"]
    assert box.pending == ["a"]


@pytest.mark.rule("RTY-3", "MBX-16")
def test_a_retry_waits_for_its_time_or_for_a_new_submit() -> None:
    box = Box().open()
    box.finish(FAILED, retry_ms=1_000)
    assert box.saw(WakeLater) == [WakeLater(1_000)]
    assert box.mode == "idle"
    box.do(Wake(box.fresh()))
    box.commit()
    assert box.drain() == (["first"], False)
    box.finish(FAILED, retry_ms=1_000)
    box.submit("b")
    assert box.drain() == (["first", "b"], False)


@pytest.mark.rule("MBX-16", "RUN-13")
def test_a_refused_start_is_no_busy_loop() -> None:
    box = Box(pending=(Entry(item("a"), 100),))
    box.do(Wake(box.fresh()))
    box.refuse()
    assert box.mode == "idle"
    assert list(box.frames) == []
    assert len(box.saw(WakeLater)) == 1
    assert box.state.permit == "none"
    box.do(Wake(box.fresh()))
    box.commit()
    assert box.mode == "open"


@pytest.mark.rule("MBX-16", "MBX-6")
def test_a_refused_first_prompt_is_told_and_leaves_the_session_idle() -> None:
    box = Box()
    token = box.submit("a", commit=False)
    box.refuse()
    assert code(box.answers[token]) == "storage_full"
    assert box.mode == "idle"
    assert box.state.permit == "none"


@pytest.mark.rule("MBX-16")
def test_many_wakes_start_one_turn() -> None:
    box = Box(pending=(Entry(item("a"), 100), Entry(item("b"), 100)))
    for _ in range(5):
        box.do(Wake(box.fresh()))
    box.commit()
    for _ in range(5):
        box.do(Wake(box.fresh()))
    assert len([one for one in box.written if one.frame.start]) == 1


@pytest.mark.rule("MBX-16", "POL-6")
def test_a_paused_session_takes_input_and_starts_nothing() -> None:
    box = Box(paused=True)
    receipt = box.submit("a", permit=True)
    assert (receipt.delivery, receipt.waiting_for) == ("next_turn", "pause")
    assert box.mode == "idle"
    assert box.state.permit == "none"


@pytest.mark.rule("MBX-18", "R58", "R47")
def test_a_turn_id_is_used_once() -> None:
    box = Box()
    box.do(Start("a", "turn_5", ALICE))
    assert code(box.answers["a"]) == "overloaded", "no permit"
    box.do(Start("b", "turn_5", ALICE, permit=True))
    box.do(Start("c", "turn_5", ALICE, permit=True))
    box.commit()
    box.do(Start("d", "turn_5", ALICE))
    assert box.answers["b"] == box.answers["c"] == box.answers["d"] == Started("turn_5")
    assert len(box.written) == 1
    box.finish(FAILED)
    box.do(Start("e", "turn_5", ALICE, permit=True))
    assert code(box.answers["e"]) == "turn_id_reused"
    assert box.finish(turn_id="turn_5") == Ended("turn_5", "failed"), "the stored outcome"
    assert len([one for one in box.written if one.frame.terminal]) == 1


@pytest.mark.rule("MBX-17")
def test_a_second_finish_of_a_turn_that_ends_is_refused() -> None:
    box = Box().open()
    box.finish(commit=False)
    assert code(box.finish(commit=False)) == "turn_active"


# --- discards and cancels ---------------------------------------------------------------------


@pytest.mark.rule("R23", "INB-9")
def test_discard_all_takes_unclaimed_user_input_alone() -> None:
    box = Box().open()
    for one in ("u", "v"):
        box.submit(one)
    box.submit(item("b", origin="background"))
    box.submit(item("p", origin="peer"))
    box.do(Discard("d", (), "discarded", ALICE))
    (frame,) = box.frames
    assert frame.frame.discard is not None
    assert frame.frame.discard.items == (("u", item("u").digest), ("v", item("v").digest))
    assert box.drain() == (["b", "p"], False), "what leaves is claimed by nobody"
    box.commit()
    assert box.answers["d"] == Discarded(2)
    assert box.pending == ["first", "b", "p"]


@pytest.mark.rule("INB-9")
def test_a_discard_names_what_it_cannot_take() -> None:
    box = Box().open()
    for names, expected in ((("first",), "already_claimed"), (("nothing",), "not_found")):
        box.do(Discard(expected, names, "discarded", ALICE))
        assert code(box.answers[expected]) == expected
    box.do(Discard("none", (), "discarded", ALICE))
    assert box.answers["none"] == Discarded(0)


@pytest.mark.rule("INB-9", "RUN-13")
def test_a_refused_discard_leaves_the_input_claimable() -> None:
    box = Box().open()
    box.submit("a")
    box.do(Discard("d", ("a",), "discarded", ALICE))
    box.refuse()
    assert code(box.answers["d"]) == "storage_full"
    assert box.drain() == (["a"], False)


@pytest.mark.rule("INB-9", "TEX-15", "MBX-2")
def test_a_discard_of_a_staged_input_waits_for_its_put() -> None:
    box = Box().open()
    token = box.submit("a", commit=False)
    box.do(Discard("d", ("a",), "discarded", ALICE))
    box.do(CancelRequested("c", None, "a", False, ALICE))
    assert "d" not in box.answers
    box.commit()
    assert box.answers[token].accepted
    assert box.answers["d"] == Discarded(1)
    assert box.answers["c"] == CancelResult(status="not_found"), "the discard came first"
    assert box.pending == ["first"]


@pytest.mark.rule("TEX-15")
def test_a_waiting_input_is_cancelled_without_a_turn() -> None:
    box = Box(permit=False)
    box.submit("a", commit=False)
    box.do(PermitQueued())
    box.commit()
    box.do(CancelRequested("c", None, "a", False, ALICE))
    frame = box.frames[-1].frame
    assert frame.discard is not None
    assert (frame.discard.reason, frame.discard.by) == ("cancelled", ALICE)
    box.commit()
    assert box.answers["c"] == CancelResult(status="cancelled")
    assert box.saw(TurnBegins) == []


@pytest.mark.rule("TEX-14", "TEX-15")
@pytest.mark.parametrize("name", ["turn", "message", "neither"])
def test_a_cancel_of_the_turn_seals_it(name: str) -> None:
    box = Box().open()
    turn_id = box.turn_id if name == "turn" else None
    message_id = "first" if name == "message" else None
    box.do(CancelRequested("c", turn_id, message_id, True, ALICE))
    assert box.saw(CancelTurn) == [CancelTurn("c", box.turn_id, True, ALICE)]
    assert box.submit("late").delivery == "next_turn"


@pytest.mark.rule("TEX-14")
def test_a_cancel_waits_for_a_start_in_flight() -> None:
    box = Box()
    box.submit("a", commit=False)
    box.do(CancelRequested("c", None, "a", False, ALICE))
    assert box.saw(CancelTurn) == []
    box.commit()
    assert [one.token for one in box.saw(CancelTurn)] == ["c"]
    assert box.mode == "sealed"


@pytest.mark.rule("TEX-13")
def test_a_cancel_of_what_has_ended_says_so() -> None:
    box = Box().open()
    first = box.turn_id
    box.finish(
        Figures("cancelled", "cancelled"), acknowledge_input=True, applied=frozenset({"first"})
    )
    box.do(CancelRequested("same", first, None, False, ALICE))
    assert box.answers["same"] == CancelResult(
        status="cancelled", turn_id=first, outcome="cancelled"
    )
    box.submit("b")
    box.finish()
    second = box.saw(TurnEnded)[-1].turn_id
    box.do(CancelRequested("other", second, None, False, ALICE))
    assert box.answers["other"].status == "already_terminal"
    assert box.answers["other"].outcome == "completed"
    box.do(CancelRequested("old", first, None, False, ALICE))
    assert box.answers["old"].status == "already_terminal"
    for token, turn_id, message_id in (
        ("n1", "turn_zz", None),
        ("n2", None, None),
        ("n3", None, "x"),
    ):
        box.do(CancelRequested(token, turn_id, message_id, False, ALICE))
        assert box.answers[token].status == "not_found"


# --- the stop ---------------------------------------------------------------------------------


@pytest.mark.rule("SHD-1", "RUN-12")
def test_a_stopping_session_starts_nothing_and_answers_what_is_durable() -> None:
    box = Box().open()
    token = box.submit("a", commit=False)
    box.do(Stop())
    unanswered = box.submit("b")
    assert unanswered not in box.answers, "the gateway dispatches it again"
    box.commit()
    assert box.answers[token].accepted
    box.finish(None, continue_pending=True)
    assert box.mode == "idle"
    assert box.pending == ["first", "a"]
    assert box.prepare("c") not in box.answers


@pytest.mark.rule("SHD-1", "ADM-5")
def test_a_stop_gives_back_the_request_for_a_permit() -> None:
    box = Box(permit=False)
    token = box.submit("a", commit=False)
    box.do(Stop())
    assert box.saw(ReturnPermit) == [ReturnPermit()]
    assert token not in box.answers
    assert list(box.frames) == []


# --- the table --------------------------------------------------------------------------------


@pytest.mark.rule("MBX-1")
def test_the_table_names_every_mode_and_command() -> None:
    modes: set[Mode] = {"idle", "asking", "starting", "open", "sealed", "finishing"}
    assert {mode for mode, _ in TRANSITIONS} == modes
    commands = {command for _, command in TRANSITIONS}
    assert len(commands) == 18
    missing = {(m, c.__name__) for m in modes for c in commands if (m, c) not in TRANSITIONS}
    assert {name for _, name in missing} == {"PermitGranted", "PermitQueued", "PermitRefused"}
