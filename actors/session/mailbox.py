"""The mailbox: what a session does with inputs and turns, as one pure machine (MBX-1 to MBX-18).

`step(state, command)` gives the next state and what is to be done. Nothing here does anything: no
I/O, no clock, no randomness. Every result of a deed comes back as a command. `TRANSITIONS` is the
whole machine: for each mode and command the handler, and the modes it may lead to.

An order of things holds throughout: frames are sent in the order of their `Append` effects, and
storage answers them in that order; so `staged` and then `pending` are one FIFO by `n`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from callboard.actors.session.mailbox_inputs import (
    committed,
    discard,
    enqueue,
    is_runnable,
    looked_up,
    not_taken_out,
    prepare,
    put_done,
    put_refused,
    refuse_unless_known,
    send_waiting,
    submit,
    taken_out,
)
from callboard.actors.session.mailbox_turns import (
    cancel,
    continuation,
    drain,
    finish,
    finished,
    later,
    start,
    start_refused,
    started,
    try_again,
)
from callboard.actors.session.mailbox_types import (
    QUIET,
    AppendDone,
    AppendRefused,
    AskPermit,
    CancelRequested,
    Command,
    Committed,
    Discard,
    Drain,
    DrainOrSeal,
    Effect,
    Enqueue,
    Finish,
    LookupDone,
    Mailbox,
    Mode,
    PermitGranted,
    PermitQueued,
    PermitRefused,
    Prepare,
    ReturnPermit,
    Start,
    Step,
    Stop,
    Submit,
    Wake,
)


class UnexpectedCommand(Exception):
    """A command that the machine's present mode does not know: a bug of the shell."""


class ForbiddenMode(Exception):
    """A handler led to a mode that the table does not name: a bug of the machine."""


# --- permits, wakes and the stop ------------------------------------------------------------


def _granted(state: Mailbox, _: PermitGranted) -> Step:
    return state._replace(permit="held"), QUIET


def _queued(state: Mailbox, _: PermitQueued) -> Step:
    """Accept what waited; its turn starts when the permit comes (MBX-6b, d)."""
    return send_waiting(state._replace(permit="queued"))


def _permit_refused(state: Mailbox, command: PermitRefused) -> Step:
    """Store nothing of what waited (MBX-6c); what is stored already tries again later (ADM-4b)."""
    waiting = [staged for staged in state.staged if not staged.flight]
    sent = tuple(staged for staged in state.staged if staged.flight)
    state = state._replace(permit="none", staged=sent)
    effects: tuple[Effect, ...] = ()
    for staged in waiting:
        for token in staged.tokens:
            state, more = refuse_unless_known(state, token, staged.entry.item, command.error)
            effects += more
    return later(state, command.retry_ms, effects)


def _wake(state: Mailbox, _: Wake) -> Step:
    return state._replace(delayed=False), QUIET


def _stop(state: Mailbox, _: Stop) -> Step:
    """Start nothing more. What is not sent yet is the gateway's to dispatch again."""
    sent = tuple(staged for staged in state.staged if staged.flight)
    asked = state.permit != "none" and not state.has_owner
    state = state._replace(closing=True, staged=sent, permit="none" if asked else state.permit)
    return state, (ReturnPermit(),) if asked else QUIET


# --- what storage answers -------------------------------------------------------------------


def _append_done(state: Mailbox, command: AppendDone) -> Step:
    if command.flight == state.flight and state.in_flight:
        done = finished if state.in_flight == "finish" else started
    elif any(leaving.flight == command.flight for leaving in state.discards):
        done = taken_out
    else:
        done = put_done
    return done(state, command)


def _append_refused(state: Mailbox, command: AppendRefused) -> Step:
    if command.flight == state.flight and state.in_flight:
        refused = try_again if state.in_flight == "finish" else start_refused
    elif any(leaving.flight == command.flight for leaving in state.discards):
        refused = not_taken_out
    else:
        refused = put_refused
    return refused(state, command)


# --- the table --------------------------------------------------------------------------------


class Transition(NamedTuple):
    """What a command does in a mode, and the modes it may lead to."""

    handler: Callable[[Mailbox, Any], Step]
    to: frozenset[Mode]


_IDLE: Final[tuple[Mode, ...]] = ("idle", "asking")
_BUSY: Final[tuple[Mode, ...]] = ("starting", "open", "sealed", "finishing")
_SETTLED: Final[tuple[Mode, ...]] = ("idle", "asking", "starting")
"""Where an idle mailbox may get to by itself: `_settle`."""

_Row: TypeAlias = tuple[tuple[Mode, ...], type[Any], Callable[[Mailbox, Any], Step], Iterable[Mode]]
_SAME: Final[tuple[Mode, ...]] = ()
_ROWS: Final[tuple[_Row, ...]] = (
    # modes, command, handler, what they lead to; _SAME: each to itself
    (_IDLE, Submit, submit, _SETTLED),
    (_BUSY, Submit, submit, _SAME),
    (_IDLE, Prepare, prepare, _SETTLED),
    (_BUSY, Prepare, prepare, _SAME),
    (_IDLE + _BUSY, Enqueue, enqueue, _SAME),
    (_IDLE, Committed, committed, _SETTLED),
    (_BUSY, Committed, committed, _SAME),
    (("idle",), Start, continuation, ("idle", "starting")),
    (("asking",), Start, continuation, ("idle", "asking", "starting")),
    (_BUSY, Start, continuation, _SAME),
    (_IDLE, Wake, _wake, _SETTLED),
    (_BUSY, Wake, _wake, _SAME),
    (_IDLE, PermitGranted, _granted, ("idle", "starting")),
    (("asking",), PermitQueued, _queued, ("idle",)),
    (_IDLE, PermitRefused, _permit_refused, ("idle",)),
    (("idle", "asking", "starting", "sealed", "finishing"), Drain, drain, _SAME),
    (("idle", "asking", "starting", "sealed", "finishing"), DrainOrSeal, drain, _SAME),
    (("open",), Drain, drain, ("open",)),
    (("open",), DrainOrSeal, drain, ("open", "sealed")),
    (("idle", "asking", "starting", "finishing"), Finish, finish, _SAME),
    (("open",), Finish, finish, ("open", "finishing")),
    (("sealed",), Finish, finish, ("sealed", "finishing")),
    (_IDLE + _BUSY, Discard, discard, _SAME),
    (("idle", "asking", "starting", "sealed", "finishing"), CancelRequested, cancel, _SAME),
    (("open",), CancelRequested, cancel, ("open", "sealed")),
    (_IDLE, Stop, _stop, ("idle",)),
    (_BUSY, Stop, _stop, _SAME),
    (_IDLE, AppendDone, _append_done, _SETTLED),
    (("starting",), AppendDone, _append_done, ("starting", "open", "sealed", "idle", "asking")),
    (("open",), AppendDone, _append_done, ("open", "sealed")),
    (("sealed",), AppendDone, _append_done, ("sealed",)),
    (("finishing",), AppendDone, _append_done, ("finishing", "open", "idle", "asking")),
    (_IDLE, AppendRefused, _append_refused, _SETTLED),
    (("starting",), AppendRefused, _append_refused, ("starting", "idle", "asking")),
    (("open", "sealed", "finishing"), AppendRefused, _append_refused, _SAME),
    (_IDLE + _BUSY, LookupDone, looked_up, _SAME),
)


def _table() -> Iterator[tuple[tuple[Mode, type[Any]], Transition]]:
    for modes, command, handler, to in _ROWS:
        for mode in modes:
            yield (mode, command), Transition(handler, frozenset(to or (mode,)))


TRANSITIONS: Final[Mapping[tuple[Mode, type[Any]], Transition]] = MappingProxyType(dict(_table()))


def step(state: Mailbox, command: Command) -> Step:
    """Take one command.

    Args:
        state: from the step before, or a `Mailbox` made from what storage granted.
        command: what happened or is wanted.

    Returns:
        The next state, and what is to be done, in order.

    Raises:
        UnexpectedCommand: the state's mode does not know this command.

    """
    mode = state.mode
    transition = TRANSITIONS.get((mode, type(command)))
    if transition is None:
        raise UnexpectedCommand(f"{type(command).__name__} in mode {mode}")
    after, effects = transition.handler(state, command)
    if after.postponed and isinstance(command, AppendDone | AppendRefused):
        after, more = _judge_postponed(after)
        effects += more
    fresh = getattr(command, "fresh", None)
    if fresh is not None:
        after, more = _settle(after, fresh)
        effects += more
    if after.mode not in transition.to:
        raise ForbiddenMode(f"{type(command).__name__} led from {mode} to {after.mode}")
    if after != state:
        after = after._replace(changes=after.changes + 1)
    return after, effects


def _judge_postponed(state: Mailbox) -> Step:
    """Take up again what waited for a frame; it may have to wait for another one."""
    waiting, effects = state.postponed, QUIET
    state = state._replace(postponed=())
    for command in waiting:
        if isinstance(command, Discard):
            state, more = discard(state, command)
        else:
            state, more = cancel(state, command)
        effects += more
    return state, effects


def _settle(state: Mailbox, fresh: str) -> Step:
    """Make the most of being idle: start, ask for the permit, or give it back (MBX-16)."""
    if state.has_owner or state.closing:
        return state, QUIET
    waiting = any(not staged.flight for staged in state.staged)
    runnable = is_runnable(state)
    if state.permit == "held" and (waiting or runnable):
        state, effects = start(state, fresh)
        state, more = send_waiting(state)
        return state, effects + more
    if state.permit == "none" and runnable:
        return state._replace(permit="asked"), (AskPermit(),)
    if state.permit != "none" and not (state.staged or runnable):
        return state._replace(permit="none"), (ReturnPermit(),)
    return state, QUIET
