"""The mailbox and its turns: starts, claims, terminals, cancels; see `mailbox`. Pure."""

from __future__ import annotations

from typing import Literal

from callboard.actors.session.mailbox_inputs import (
    cancel_input,
    claimable,
    is_runnable,
    names_of,
    put_done,
    put_refused,
    receipt_for,
    reply_all,
    take_in,
    take_permit,
    unstage,
    with_staged,
)
from callboard.actors.session.mailbox_types import (
    QUIET,
    Answer,
    Append,
    AppendDone,
    AppendRefused,
    CancelRequested,
    CancelTurn,
    Drain,
    Drained,
    DrainOrSeal,
    Effect,
    Ended,
    Entry,
    Figures,
    Finish,
    Frame,
    Gone,
    Mailbox,
    Reply,
    ReturnPermit,
    Start,
    Started,
    Step,
    Terminal,
    Token,
    Turn,
    TurnBegins,
    TurnEnded,
    WakeLater,
)
from callboard.errors import (
    CallboardError,
    NotTurnOwner,
    Overloaded,
    TurnActive,
    TurnIdReused,
    TurnSealed,
)
from callboard.limits import FOLLOW_UP_TURNS_MAX, STORAGE_FULL_PROBE_MS, TURN_INPUT_IDS_MAX
from callboard.messages import CancelResult, InboxItem

# --- starts ---------------------------------------------------------------------------------


def start(state: Mailbox, fresh: str) -> Step:
    """Have a turn's start written, in one frame with the first put that waits for one."""
    at = next((i for i, staged in enumerate(state.staged) if not staged.flight), None)
    flight = state.flights + 1
    turn = _turn_for(state, fresh, None if at is None else state.staged[at].entry)
    put: InboxItem | None = None
    tokens: tuple[Token, ...] = ()
    if at is not None:
        staged = state.staged[at]
        put, tokens = staged.entry.item, staged.tokens
        state = with_staged(state, at, staged._replace(flight=flight))
    state = state._replace(in_flight="start", next_turn=turn, flight=flight, flights=flight)
    return state, (Append(flight, Frame(put=put, start=turn), tokens),)


def _turn_for(state: Mailbox, fresh: str, prompt: Entry | None) -> Turn:
    """Make the turn that a start begins: direct, or pending behind older input (MBX-7)."""
    waiting = [entry for entry in state.pending if not entry.leaving]
    if prompt is None:
        return _pending_turn(waiting, fresh, 0)
    staged = [one.entry for one in state.staged if one.flight]
    if waiting or staged:
        turn = _pending_turn([*waiting, *staged, prompt], fresh, 0)
        unsure = {entry.id for entry in staged}  # may be refused yet
        return turn._replace(input_ids=tuple(i for i in turn.input_ids if i not in unsure))
    item = prompt.item
    pins = (item.principal, item.sender, item.schema_digest)
    return Turn(fresh, "user", *pins, 0, (item.message_id,))


def _pending_turn(waiting: list[Entry], fresh: str, chain_index: int) -> Turn:
    """Make a turn that claims nothing yet and pins the oldest input's authority (MBX-12a)."""
    oldest = waiting[0].item
    turn = Turn(fresh, "pending", oldest.principal, oldest.sender, None, chain_index, ())
    return turn._replace(input_ids=tuple(entry.id for entry in claimable(turn, waiting)))


def continuation(state: Mailbox, command: Start) -> Step:
    """Start a turn that a host hook asked for; a turn id is used once (MBX-18)."""
    turn = state.next_turn or state.turn
    if turn is not None and turn.turn_id != command.turn_id:
        return state, (Reply(command.token, TurnActive(turn_id=turn.turn_id)),)
    if turn is not None and state.in_flight == "start":
        return state._replace(starters=(*state.starters, command.token)), QUIET
    if turn is not None:
        return state, (Reply(command.token, Started(turn.turn_id)),)
    if command.turn_id <= state.last_turn_id:
        return state, (Reply(command.token, TurnIdReused(turn_id=command.turn_id)),)
    state = take_permit(state, command.permit)
    if state.permit != "held" or state.closing:
        return state, (Reply(command.token, Overloaded(resource="pending_count")),)
    flight = state.flights + 1
    turn = Turn(command.turn_id, "continuation", command.principal, command.sender, None, 0, ())
    state = state._replace(
        in_flight="start",
        next_turn=turn,
        starters=(command.token,),
        flight=flight,
        flights=flight,
    )
    return state, (Append(flight, Frame(start=turn), (command.token,)),)


def started(state: Mailbox, command: AppendDone) -> Step:
    """Open the turn whose start is durable."""
    turn = state.next_turn
    assert turn is not None
    state, staged = unstage(state, command.flight)
    state = state._replace(in_flight="", next_turn=None)
    if command.known is not None and staged is not None:
        # Nothing was written: what the frame should have put is there already.
        state = state._replace(staged=(staged, *state.staged))
        return put_done(state, command)
    if staged is not None:
        state = take_in(state, staged, command)
    if turn.kind == "user":
        turn = turn._replace(claimed=turn.input_ids)
    state = state._replace(
        phase="open", turn=turn, last_turn_id=turn.turn_id, delayed=False, permit="held"
    )
    claimed = tuple(entry for entry in state.pending if entry.id in turn.claimed)
    starters, state = state.starters, state._replace(starters=())
    effects: tuple[Effect, ...] = (
        *reply_all(starters, Started(turn.turn_id)),
        TurnBegins(turn, claimed),
    )
    if staged is not None:
        mode: Literal["direct", "pending"] = "direct" if turn.kind == "user" else "pending"
        receipt = receipt_for(state, staged.entry.id, mode=mode)
        effects = reply_all(staged.tokens, receipt) + effects
    return state, effects


def start_refused(state: Mailbox, command: AppendRefused) -> Step:
    """Stay idle, nothing stored; what is pending tries again later."""
    starters = state.starters
    state = state._replace(in_flight="", next_turn=None, starters=())
    state, effects = put_refused(state, command)
    effects += reply_all(starters, command.error)
    return later(state, STORAGE_FULL_PROBE_MS, effects)


def later(state: Mailbox, after_ms: int, effects: tuple[Effect, ...]) -> Step:
    """Let no turn start by itself for a while, if there is anything to start one."""
    if not is_runnable(state):
        return state, effects
    return state._replace(delayed=True), (*effects, WakeLater(after_ms))


# --- the turn's owner -----------------------------------------------------------------------


def drain(state: Mailbox, command: Drain | DrainOrSeal) -> Step:
    """Claim what the turn may take; `DrainOrSeal` seals it if that is nothing (MBX-9 to 11)."""
    turn = state.turn
    if turn is None or turn.turn_id != command.turn_id:
        return state, (Reply(command.token, _owner(state)),)
    if state.mode != "open":
        return state, (Reply(command.token, TurnSealed(turn_id=turn.turn_id)),)
    limit = TURN_INPUT_IDS_MAX if command.limit is None else command.limit
    entries = tuple(claimable(turn, state.pending, limit))
    if entries:
        claimed = (*turn.claimed, *(entry.id for entry in entries))
        schemas = (entry.item.schema_digest for entry in entries)
        schema = turn.schema_digest or next((one for one in schemas if one), None)
        state = state._replace(turn=turn._replace(claimed=claimed, schema_digest=schema))
    sealed = not entries and isinstance(command, DrainOrSeal)
    if sealed:
        state = state._replace(phase="sealed")
    return state, (Reply(command.token, Drained(entries, sealed)),)


def finish(state: Mailbox, command: Finish) -> Step:
    """Have the turn's terminal written, chained to the next start if asked (MBX-15)."""
    turn = state.turn
    if turn is None or turn.turn_id != command.turn_id:
        stored = state.ended is not None and state.ended.turn_id == command.turn_id
        answer: Answer = state.ended if stored and state.ended else _owner(state)
        return state, (Reply(command.token, answer),)
    if state.in_flight:
        return state, (Reply(command.token, TurnActive(turn_id=turn.turn_id)),)
    terminal = _terminal(state, turn, command)
    flight = state.flights + 1
    following = _following(state, turn, terminal, command) if command.continue_pending else None
    state = state._replace(
        in_flight="finish", next_turn=following, flight=flight, flights=flight, finish=command
    )
    frame = Frame(terminal=terminal, start=following)
    return state, (Append(flight, frame, (command.token,)),)


def _owner(state: Mailbox) -> CallboardError:
    return NotTurnOwner(turn_id=state.turn.turn_id) if state.turn else NotTurnOwner()


def _terminal(state: Mailbox, turn: Turn, command: Finish) -> Terminal:
    """Decide which inputs leave with the turn and what becomes of the others (INB-5)."""
    figures = command.figures or Figures()
    claimed = [entry for entry in state.pending if entry.id in turn.claimed]
    if not figures.cause:
        going = claimed
    elif command.acknowledge_input:
        going = [e for e in claimed if e.id in command.applied and e.item.origin != "background"]
    else:
        going = []
    gone = {entry.id for entry in going}
    spent = [entry for entry in claimed if entry.id in command.spent and entry.id not in gone]
    stays = len(claimed) > len(going) + len(spent)
    aborted: Literal["held", "pending"] = "held" if command.hold else "pending"
    reason = "aborted" if figures.cause else "completed"
    return Terminal(
        turn,
        figures,
        aborted if stays and figures.cause else "acknowledged",
        Gone(reason, names_of(going)) if going else None,
        Gone("attempts_spent", names_of(spent)) if spent else None,
    )


def _leaving_ids(terminal: Terminal) -> frozenset[str]:
    gone = (terminal.acknowledged, terminal.spent)
    return frozenset(name for part in gone if part for name, _ in part.items)


def _following(state: Mailbox, turn: Turn, terminal: Terminal, command: Finish) -> Turn | None:
    """Make the turn that chains to this one, on the same permit (TLP-9)."""
    leaving = _leaving_ids(terminal)
    waiting = [e for e in state.pending if e.id not in leaving and not e.leaving]
    fresh_input = any(e.item.wake and not e.held and e.id not in turn.claimed for e in waiting)
    if not fresh_input or turn.chain_index >= FOLLOW_UP_TURNS_MAX:
        return None
    if state.paused or state.closing:
        return None
    return _pending_turn(waiting, command.fresh, turn.chain_index + 1)


def finished(state: Mailbox, command: AppendDone) -> Step:
    """End every claim with the reply to the terminal, and begin the chained turn (MBX-14)."""
    turn, finish = state.turn, state.finish
    assert turn is not None
    assert finish is not None
    terminal = _terminal(state, turn, finish)
    ended = Ended(turn.turn_id, terminal.figures.outcome)
    leaving = _leaving_ids(terminal)
    held = terminal.disposition == "held"
    pending = tuple(
        entry._replace(held=held) if entry.id in turn.claimed else entry
        for entry in state.pending
        if entry.id not in leaving
    )
    effects: tuple[Effect, ...] = (
        Reply(finish.token, ended),
        TurnEnded(ended.turn_id, ended.outcome),
    )
    state = state._replace(pending=pending, in_flight="", finish=None, ended=ended)
    following = state.next_turn
    if following is not None:
        state = state._replace(
            phase="open", turn=following, next_turn=None, last_turn_id=following.turn_id
        )
        return state, (*effects, TurnBegins(following, ()))
    state = state._replace(phase="idle", turn=None, permit="none")
    effects = (*effects, ReturnPermit())
    if finish.retry_ms is not None and not held:
        return later(state, finish.retry_ms, effects)
    return state, effects


def try_again(state: Mailbox, command: AppendRefused) -> Step:
    """Keep phase, owner and claims; the terminal is tried again, alone (MBX-14b, RUN-13c)."""
    turn, finish = state.turn, state.finish
    assert turn is not None
    assert finish is not None
    frame = Frame(terminal=_terminal(state, turn, finish))
    again = Append(command.flight, frame, (finish.token,), STORAGE_FULL_PROBE_MS)
    return state._replace(next_turn=None), (again,)


# --- cancels --------------------------------------------------------------------------------


def cancel(state: Mailbox, command: CancelRequested) -> Step:
    """Find out what a cancel is about: the turn, an input that waits, or nothing."""
    turn = state.next_turn if state.mode == "starting" else state.turn
    if turn is not None and _means(command, turn):
        if state.mode == "starting":
            return state._replace(postponed=(*state.postponed, command)), QUIET
        cancel = CancelTurn(command.token, turn.turn_id, command.keep_input, command.principal)
        return state._replace(phase="sealed"), (cancel,)
    if command.message_id is not None:
        return cancel_input(state, command, command.message_id)
    ended = state.ended
    if command.turn_id is None or command.turn_id > state.last_turn_id:
        result = CancelResult(status="not_found")
    elif ended is not None and ended.turn_id == command.turn_id:
        again = ended.outcome == "cancelled"
        result = CancelResult(
            status="cancelled" if again else "already_terminal",
            turn_id=ended.turn_id,
            outcome=ended.outcome,
        )
    else:
        result = CancelResult(status="already_terminal", turn_id=command.turn_id)
    return state, (Reply(command.token, result),)


def _means(command: CancelRequested, turn: Turn) -> bool:
    if command.message_id is not None:
        return command.message_id in turn.claimed or (
            turn.kind == "user" and command.message_id in turn.input_ids
        )
    return command.turn_id in (None, turn.turn_id)
