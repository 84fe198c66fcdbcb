"""The mailbox and its inputs: puts, receipts, refusals, discards; see `mailbox`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from callboard.actors.session.mailbox_types import (
    QUIET,
    Answer,
    Append,
    AppendDone,
    AppendRefused,
    AskPermit,
    CancelRequested,
    CancelTurn,
    Committed,
    Discard,
    Discarded,
    Effect,
    Enqueue,
    Entry,
    Frame,
    Gone,
    Leaving,
    Lookup,
    LookupDone,
    Mailbox,
    Prepare,
    Refusing,
    Reply,
    Staged,
    Step,
    Submit,
    Token,
    Turn,
)
from callboard.errors import (
    AlreadyClaimed,
    CallboardError,
    NoActiveTurn,
    NotFound,
    RequestConflict,
    TurnActive,
)
from callboard.inbox import Budget
from callboard.limits import TURN_INPUT_IDS_MAX
from callboard.messages import CancelResult, InboxItem, KnownInput, Receipt

# --- questions about a state ----------------------------------------------------------------


def claimable(turn: Turn, pending: Iterable[Entry], limit: int = TURN_INPUT_IDS_MAX) -> list[Entry]:
    """Tell what a turn may claim now, in order: up to a barrier or a bound (MBX-9, MBX-12)."""
    taken: list[Entry] = []
    room = min(limit, TURN_INPUT_IDS_MAX - len(turn.claimed))
    schema, first = turn.schema_digest, not turn.claimed
    for entry in pending:
        if entry.leaving or entry.id in turn.claimed:
            continue
        if len(taken) >= room or _is_barrier(turn, schema, entry.item, first=first):
            break
        taken.append(entry)
        schema, first = schema or entry.item.schema_digest, False
    return taken


def _is_barrier(turn: Turn, schema: str | None, item: InboxItem, *, first: bool) -> bool:
    if item.principal != turn.principal or item.sender != turn.sender:
        return True  # of the first claimed as well: no input runs under another's authority
    if first:
        return False
    if item.schema_digest is not None and item.schema_digest != schema is not None:
        return True
    return item.busy_mode != "steer"


def is_runnable(state: Mailbox) -> bool:
    """Tell whether a turn may start by itself (MBX-16)."""
    if state.paused or state.delayed or state.closing:
        return False
    return any(e.item.wake and not e.held and not e.leaving for e in state.pending)


def _find(entries: Iterable[Entry], message_id: str) -> Entry | None:
    return next((entry for entry in entries if entry.item.message_id == message_id), None)


def _live(state: Mailbox) -> Iterator[Entry]:
    yield from state.pending
    yield from (staged.entry for staged in state.staged)


def _refusal(state: Mailbox, item: InboxItem, size: int) -> CallboardError | None:
    """Tell why an input does not fit, staged ones counted (INB-7)."""
    live = Budget((entry.item.origin, entry.size) for entry in _live(state))
    return live.refuse(item.origin, size)


# --- receipts -------------------------------------------------------------------------------


def receipt_for(
    state: Mailbox,
    message_id: str,
    *,
    duplicate: bool = False,
    mode: Literal["direct", "pending"] | None = None,
) -> Receipt:
    """Say what became of a live input, from this state and no earlier one (MBX-3)."""
    turn = state.turn
    claimed = turn is not None and message_id in turn.claimed
    joins = claimed or (
        turn is not None
        and state.is_active
        and any(e.id == message_id for e in claimable(turn, state.pending))
    )
    return Receipt(
        accepted=True,
        message_id=message_id,
        duplicate=duplicate,
        item_state="claimed" if claimed else "pending",
        delivery="current_turn" if joins else "next_turn",
        turn_id=turn.turn_id if turn else None,
        queued=len(state.pending),
        mode=mode,
        waiting_for=_waiting_for(state),
    )


def _waiting_for(state: Mailbox) -> Literal["turn_permit", "pause"] | None:
    if state.has_owner:
        return None
    if state.paused:
        return "pause"
    return "turn_permit" if state.permit in ("asked", "queued") else None


def _is_live(known: KnownInput) -> bool:
    return known.item_state in ("pending", "claimed")


def _known(state: Mailbox, message_id: str, known: KnownInput) -> Receipt:
    """Say what storage knows of an input that is not live here (INB-6a)."""
    return Receipt(
        accepted=True,
        message_id=message_id,
        duplicate=True,
        item_state=known.item_state,
        delivery="next_turn" if _is_live(known) else "history",
        turn_id=known.turn_id,
        queued=len(state.pending),
    )


def reply_all(tokens: Iterable[Token], answer: Answer) -> tuple[Effect, ...]:
    """Answer the first sender, and the senders of copies as duplicates (INB-6c)."""
    first, *others = (*tokens,) or ("",)
    if not first:
        return QUIET
    if not others:
        return (Reply(first, answer),)
    copy = answer.model_copy(update={"duplicate": True}) if isinstance(answer, Receipt) else answer
    return (Reply(first, answer), *(Reply(token, copy) for token in others))


# --- puts -----------------------------------------------------------------------------------


def submit(state: Mailbox, command: Submit) -> Step:
    """Decide in one step (MBX-5): known, into the turn, or a turn of its own."""
    if state.closing:
        return state, QUIET
    state = take_permit(state, command.permit)
    if (known := _same_id(state, command)) is not None:
        return known
    if (full := _refusal(state, command.item, command.size)) is not None:
        return refuse_unless_known(state, command.token, command.item, full)
    return _put(state, command) if state.has_owner else _prepare_fitting(state, command)


def prepare(state: Mailbox, command: Prepare) -> Step:
    """Start a turn with an input, or refuse it: it joins no turn that is there."""
    if state.closing:
        return state, QUIET
    state = take_permit(state, command.permit)
    if (known := _same_id(state, command)) is not None:
        return known
    if state.has_owner or any(not staged.flight for staged in state.staged):
        return refuse_unless_known(state, command.token, command.item, _turn_active(state))
    if (full := _refusal(state, command.item, command.size)) is not None:
        return refuse_unless_known(state, command.token, command.item, full)
    return _prepare_fitting(state, command)


def enqueue(state: Mailbox, command: Enqueue) -> Step:
    """Put an input; it starts nothing by this command."""
    if (known := _same_id(state, command)) is not None:
        return known
    if not state.has_owner and not command.allow_before_turn:
        return refuse_unless_known(state, command.token, command.item, NoActiveTurn())
    if (full := _refusal(state, command.item, command.size)) is not None:
        return refuse_unless_known(state, command.token, command.item, full)
    return _put(state, command)


def committed(state: Mailbox, command: Committed) -> Step:
    """Take over what another entitled writer has put (MBX-2c)."""
    if _find(_live(state), command.item.message_id) is not None:
        return state, QUIET
    entry = Entry(command.item, command.size, command.n)
    return state._replace(pending=(*state.pending, entry)), QUIET


def _same_id(state: Mailbox, command: Submit | Prepare | Enqueue) -> Step | None:
    """Answer a known id, before turn state and before capacity (INB-6)."""
    item, token = command.item, command.token
    if (entry := _find(state.pending, item.message_id)) is not None:
        if entry.item.digest != item.digest:
            return state, (Reply(token, RequestConflict()),)
        return state, (Reply(token, receipt_for(state, item.message_id, duplicate=True)),)
    for at, staged in enumerate(state.staged):
        if staged.entry.id == item.message_id:
            if staged.entry.item.digest != item.digest:
                return state, (Reply(token, RequestConflict()),)
            shared = staged._replace(tokens=(*staged.tokens, token))
            return with_staged(state, at, shared), QUIET
    return None


def take_permit(state: Mailbox, came: bool) -> Mailbox:
    """Keep a permit that came with an input; a session holds one or none, however told."""
    return state._replace(permit="held") if came and not state.has_owner else state


def _prepare_fitting(state: Mailbox, command: Submit | Prepare) -> Step:
    """Let an input wait for its turn's start, or have it written if none can start now (MBX-6)."""
    if state.paused or state.permit == "queued":
        return _put(state, command)
    state = _stage(state, command, 0)  # `_settle` starts its turn if the permit is held
    if state.permit == "none":
        return state._replace(permit="asked"), (AskPermit(),)
    return state, QUIET


def _put(state: Mailbox, command: Submit | Prepare | Enqueue) -> Step:
    """Stage an input and have it written (MBX-2), never ahead of one that waits (MBX-6d)."""
    if any(not staged.flight for staged in state.staged):
        return _stage(state, command, 0), QUIET
    flight = state.flights + 1
    state = _stage(state, command, flight)._replace(flights=flight)
    put = state.staged[-1]
    return state, (Append(flight, Frame(put=put.entry.item), put.tokens),)


def _stage(state: Mailbox, command: Submit | Prepare | Enqueue, flight: int) -> Mailbox:
    item, interrupts = command.item, command.item.busy_mode == "interrupt"
    if interrupts:  # kept as `queue`: it waits for the turn after the one that it ends
        item = item.model_copy(update={"busy_mode": "queue"})
    staged = Staged(Entry(item, command.size), (command.token,), flight, interrupts)
    return state._replace(staged=(*state.staged, staged))


def with_staged(state: Mailbox, at: int, staged: Staged) -> Mailbox:
    """Replace one staged input."""
    return state._replace(staged=(*state.staged[:at], staged, *state.staged[at + 1 :]))


def send_waiting(state: Mailbox) -> Step:
    """Have everything written that waited behind the question for a permit."""
    effects: list[Effect] = []
    for at, staged in enumerate(state.staged):
        if not staged.flight:
            flight = state.flights + 1
            sent = staged._replace(flight=flight)
            state = with_staged(state, at, sent)._replace(flights=flight)
            effects.append(Append(flight, Frame(put=staged.entry.item), staged.tokens))
    return state, tuple(effects)


# --- what storage answers to a put ----------------------------------------------------------


def put_done(state: Mailbox, command: AppendDone) -> Step:
    """Take a put into the inbox and answer its senders (MBX-2, MBX-3).

    This machine knows every live input. One that only storage knows as live is an own put, sent
    again after storage's restart, whose first answer was lost.
    """
    state, staged = unstage(state, command.flight)
    if staged is None:
        return state, QUIET
    if command.known is not None and not _is_live(command.known):
        answer = _known(state, staged.entry.id, command.known)
        return state, tuple(Reply(token, answer) for token in staged.tokens)
    state = take_in(state, staged, command)
    replies = reply_all(staged.tokens, receipt_for(state, staged.entry.id))
    if staged.interrupts and state.turn is not None and not state.in_flight:
        cancel = CancelTurn("", state.turn.turn_id, False, staged.entry.item.principal)
        return state._replace(phase="sealed"), (*replies, cancel)
    return state, replies


def put_refused(state: Mailbox, command: AppendRefused) -> Step:
    """Unstage what was refused (MBX-2b)."""
    state, staged = unstage(state, command.flight)
    return state, reply_all(staged.tokens if staged else (), command.error)


def unstage(state: Mailbox, flight: int) -> tuple[Mailbox, Staged | None]:
    """Take the put of a frame out of what is staged."""
    for at, staged in enumerate(state.staged):
        if staged.flight == flight:
            rest = (*state.staged[:at], *state.staged[at + 1 :])
            return state._replace(staged=rest), staged
    return state, None


def take_in(state: Mailbox, staged: Staged, command: AppendDone) -> Mailbox:
    """Add a durable input behind the others."""
    size = command.size or staged.entry.size
    entry = staged.entry._replace(n=command.n, size=size)
    delayed = state.delayed and not entry.item.wake  # a new submit ends a wait (RTY-5)
    return state._replace(pending=(*state.pending, entry), delayed=delayed)


# --- refusals -------------------------------------------------------------------------------


def refuse_unless_known(
    state: Mailbox, token: Token, item: InboxItem, error: CallboardError
) -> Step:
    """Refuse an input, once storage has said that its id is new (INB-6d)."""
    refusing = (*state.refusing, Refusing(token, error, item))
    return state._replace(refusing=refusing), (Lookup(token, item.message_id, item.digest),)


def _turn_active(state: Mailbox) -> CallboardError:
    """Name the turn that is there, or say that one is about to start."""
    return TurnActive(turn_id=state.turn.turn_id) if state.turn else TurnActive()


def looked_up(state: Mailbox, command: LookupDone) -> Step:
    """Refuse an input whose id is new; answer one that was accepted before (INB-6d)."""
    found = next((one for one in state.refusing if one.token == command.token), None)
    if found is None:
        return state, QUIET
    state = state._replace(refusing=tuple(one for one in state.refusing if one is not found))
    answer: Answer = command.error or found.error
    if command.known is not None:
        live = _find(state.pending, found.item.message_id)
        if live is not None:
            answer = receipt_for(state, live.id, duplicate=True)
        else:
            answer = _known(state, found.item.message_id, command.known)
    return state, (Reply(found.token, answer),)


# --- discards -------------------------------------------------------------------------------


def discard(state: Mailbox, command: Discard) -> Step:
    """Have unclaimed inputs taken out (INB-9)."""
    if any(staged.entry.id in command.ids for staged in state.staged):
        return state._replace(postponed=(*state.postponed, command)), QUIET
    claimed = state.turn.claimed if state.turn else ()
    if command.ids:
        entries = [entry for entry in state.pending if entry.id in command.ids]
    else:
        entries = [e for e in state.pending if e.item.origin == "user" and e.id not in claimed]
    entries = [entry for entry in entries if not entry.leaving]
    if any(entry.id in claimed for entry in entries):
        return state, (Reply(command.token, AlreadyClaimed()),)
    if command.ids and len(entries) < len(set(command.ids)):
        return state, (Reply(command.token, NotFound()),)
    if not entries:
        return state, (Reply(command.token, Discarded(0)),)
    return _take_out(state, command, entries, Discarded(len(entries)))


def cancel_input(state: Mailbox, command: CancelRequested, message_id: str) -> Step:
    """Discard an input that no turn has claimed: no turn will ever start for it (TEX-15)."""
    if any(staged.entry.id == message_id for staged in state.staged):
        return state._replace(postponed=(*state.postponed, command)), QUIET
    entry = _find(state.pending, message_id)
    if entry is None or entry.leaving:
        return state, (Reply(command.token, CancelResult(status="not_found")),)
    return _take_out(state, command, [entry], CancelResult(status="cancelled"))


def _take_out(
    state: Mailbox,
    command: Discard | CancelRequested,
    entries: list[Entry],
    answer: Discarded | CancelResult,
) -> Step:
    """Have a recorded discard written; meanwhile no turn takes these inputs."""
    if isinstance(command, CancelRequested):
        reason, by = "cancelled", command.principal
    else:
        reason, by = command.reason, command.by
    flight, ids = state.flights + 1, frozenset(entry.id for entry in entries)
    state = _mark_leaving(state, ids, leaving=True)
    leaving = (*state.discards, Leaving(flight, ids, command.token, answer))
    frame = Frame(discard=Gone(reason, names_of(entries), by))
    state = state._replace(flights=flight, discards=leaving)
    return state, (Append(flight, frame, (command.token,)),)


def names_of(entries: Iterable[Entry]) -> tuple[tuple[str, str], ...]:
    """Name inputs with their digests, as a record does."""
    return tuple((entry.id, entry.item.digest) for entry in entries)


def _mark_leaving(state: Mailbox, ids: frozenset[str], *, leaving: bool) -> Mailbox:
    marked = (e._replace(leaving=leaving) if e.id in ids else e for e in state.pending)
    return state._replace(pending=tuple(marked))


def taken_out(state: Mailbox, command: AppendDone) -> Step:
    """Forget what a durable discard names."""
    leaving = next(one for one in state.discards if one.flight == command.flight)
    pending = tuple(entry for entry in state.pending if entry.id not in leaving.ids)
    rest = tuple(one for one in state.discards if one is not leaving)
    state = state._replace(pending=pending, discards=rest)
    return state, (Reply(leaving.token, leaving.answer),)


def not_taken_out(state: Mailbox, command: AppendRefused) -> Step:
    """Keep what could not be discarded."""
    leaving = next(one for one in state.discards if one.flight == command.flight)
    rest = tuple(one for one in state.discards if one is not leaving)
    state = _mark_leaving(state, leaving.ids, leaving=False)._replace(discards=rest)
    return state, (Reply(leaving.token, command.error),)
