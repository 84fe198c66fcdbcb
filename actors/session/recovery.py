"""What a new owner writes before anything else: the end of a turn that its predecessor left open.

One pure decision from what storage granted (runtime 5.1 to 5.3): no tool runs again, no answer is
asked for again, no uncertain effect is called successful. Deciding again about what the frame
leaves gives nothing to write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from callboard.actors.session.mailbox_types import Entry, Gone, Mailbox
from callboard.actors.session.retry import spent_of
from callboard.actors.session.scribe import Draft, Scribe, acknowledging
from callboard.fold import Call, SessionFold, TurnState
from callboard.ids import fresh_ulid
from callboard.limits import FINAL_TOOL_CALLS_MAX, TURN_INPUT_IDS_MAX
from callboard.messages import LeaseGranted, OpenCall, OpenTurn, PendingItem
from callboard.records import TurnAborted


class Recovery(NamedTuple):
    """The recovery frame; empty if there is nothing to recover."""

    drafts: tuple[Draft, ...]
    removes: tuple[str, ...]
    """Inputs that leave the inbox in it."""


def recover(
    lease: LeaseGranted, now: Callable[[], int], new_id: Callable[[], str] = fresh_ulid
) -> Recovery:
    """Decide what the recovery frame holds.

    Args:
        lease: what storage granted.
        now: microseconds since the epoch.
        new_id: makes ULIDs.

    """
    scribe = Scribe(lease.epoch, lease.agent, lease.last_message_id, now, new_id)
    turn = lease.open_turn
    turn_id = turn.turn_id if turn else None
    drafts = [_result(scribe, turn_id, call) for call in lease.open_calls]
    # The transcript wins over the inbox (INB-4): what it acknowledged is taken out.
    removes = [name for name in lease.acknowledged_ids if _live(lease, name)]
    if turn is not None:
        items = [one for one in lease.pending if one.item.message_id not in removes]
        ending, gone = _end(scribe, turn, lease.open_calls, items)
        drafts += ending
        removes += gone
    return Recovery(tuple(drafts), tuple(removes))


def _live(lease: LeaseGranted, message_id: str) -> bool:
    return any(one.item.message_id == message_id for one in lease.pending)


# --- open calls (5.3) -------------------------------------------------------------------------


def _result(scribe: Scribe, turn_id: str | None, call: OpenCall) -> Draft:
    """Close a call by what its tool had declared of its effect; the tool does not run (SFX-1)."""
    error, output, metadata = _verdict(turn_id, call)
    facts = {"restart_recovery": True, **metadata}
    return scribe.returned(turn_id, call.message_id, call.call_id, call.name, output, error, facts)


def _verdict(turn_id: str | None, call: OpenCall) -> tuple[str, str, Mapping[str, object]]:
    if call.effect == "readonly":
        facts: dict[str, object] = {"reason": "process_restart", "side_effects_uncertain": False}
        return "cancelled", "interrupted by a restart; nothing was changed", facts
    if call.effect == "keyed":
        key = f"{turn_id}:{call.call_id}" if turn_id else call.call_id
        text = "interrupted, may have happened; may be repeated with this key"
        return "indeterminate", text, {"key": key, "side_effects_uncertain": True}
    text = "interrupted, may have partly happened, inspect before repeating"
    return "indeterminate", text, {"side_effects_uncertain": True}


# --- the interrupted turn (5.2) ---------------------------------------------------------------


def _end(
    scribe: Scribe, turn: OpenTurn, calls: list[OpenCall], pending: list[PendingItem]
) -> tuple[list[Draft], list[str]]:
    """Abort the turn that died; what it leaves in the inbox is counted, and held or tried again."""
    claimed = list(dict.fromkeys([*turn.input_ids, *turn.applied_ids]))[:TURN_INPUT_IDS_MAX]
    live = {one.item.message_id: one for one in pending}
    left = [live[name] for name in claimed if name in live]
    acknowledged = _acknowledged(turn, left)
    left = [one for one in left if one not in acknowledged]
    spent_ids = spent_of({one.item.message_id: one.attempts + 1 for one in left})
    spent = [one for one in left if one.item.message_id in spent_ids]
    drafts: list[Draft] = []
    if acknowledged:
        going = Gone("aborted", _names(acknowledged))
        drafts.append(Draft(turn.turn_id, acknowledging(going, turn.turn_id)))
    aborted = _aborted(scribe, turn, calls, claimed, stays=len(left) > len(spent))
    drafts.append(Draft(turn.turn_id, aborted))
    if spent:
        drafts.append(Draft(None, acknowledging(Gone("attempts_spent", _names(spent)), None)))
    return drafts, [one.item.message_id for one in (*acknowledged, *spent)]


def _acknowledged(turn: OpenTurn, left: list[PendingItem]) -> list[PendingItem]:
    """Name what a recorded cancel takes out: applied inputs, completions excepted (RUN-5d)."""
    if not turn.cancel_requested or turn.keep_input:
        return []
    return [
        one
        for one in left
        if one.item.message_id in turn.applied_ids and one.item.origin != "background"
    ]


def _names(items: list[PendingItem]) -> tuple[tuple[str, str], ...]:
    return tuple((one.item.message_id, one.item.digest) for one in items)


def _aborted(
    scribe: Scribe, turn: OpenTurn, calls: list[OpenCall], claimed: list[str], *, stays: bool
) -> TurnAborted:
    at = scribe.now()
    uncertain = any(call.effect != "readonly" for call in calls)
    kept: Literal["held", "pending"] = "held" if turn.cancel_requested else "pending"
    return TurnAborted(
        turn_id=turn.turn_id,
        claimed_input_ids=claimed,
        turns_count=turn.turns_count,
        tool_calls_count=min(turn.tool_calls_count, FINAL_TOOL_CALLS_MAX),
        duration_ms=max(0, at - turn.started_at) // 1_000,
        outcome=(
            "indeterminate" if uncertain else "cancelled" if turn.cancel_requested else "lost"
        ),
        input_disposition=kept if stays else "acknowledged",
        cause="process_restart",
        aborted_at=at,
    )


# --- the state that follows -------------------------------------------------------------------


def fold_of(lease: LeaseGranted) -> SessionFold:
    """Make the fold that storage has of the session, as far as it was granted."""
    turn = lease.open_turn
    open_turn = turn.turn_id if turn else ""
    return SessionFold(
        seq=lease.last_seq,
        agent=lease.agent,
        model=lease.model,
        settings=lease.settings,
        last_message_id=lease.last_message_id,
        turn=_turn_state(turn) if turn else None,
        turns=lease.turns,
        last_turn_id=lease.last_turn_id,
        calls={
            one.call_id: Call(one.call_id, one.name, one.effect, one.message_id, open_turn)
            for one in lease.open_calls
        },
        attempts={one.item.message_id: one.attempts for one in lease.pending if one.attempts},
        held=frozenset(one.item.message_id for one in lease.pending if one.held),
        applied=dict.fromkeys([*lease.applied_ids, *(turn.applied_ids if turn else ())], open_turn),
    )


def _turn_state(turn: OpenTurn) -> TurnState:
    return TurnState(
        turn.turn_id,
        turn.kind_,
        turn.epoch,
        tuple(turn.input_ids),
        turn.chain_index,
        turn.started_at,
        applied=tuple(turn.applied_ids),
        steps=turn.turns_count,
        tool_calls=turn.tool_calls_count,
        cancel="" if not turn.cancel_requested else "keep" if turn.keep_input else "drop",
    )


def mailbox_of(lease: LeaseGranted, recovery: Recovery, fold: SessionFold) -> Mailbox:
    """Make the mailbox that goes on from a recovered session.

    Args:
        lease: what storage granted.
        recovery: what was written about it.
        fold: the session's fold behind that.

    """
    return Mailbox(
        pending=tuple(
            Entry(
                one.item,
                one.size_bytes,
                one.n,
                held=one.item.message_id in fold.held,
                recovered=True,
            )
            for one in lease.pending
            if one.item.message_id not in recovery.removes
        ),
        paused=lease.paused,
        last_turn_id=lease.last_turn_id,
        epoch=lease.epoch,
    )
