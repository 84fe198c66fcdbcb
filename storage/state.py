"""What storage knows of one session: where its streams end, its fold, its inbox, its lease.

A state is never changed in part: a request is planned on a clone, which takes the place of the
state when its frame is written, or is thrown away (DUR-1). Two tables only grow, `settled` and
`keys`; they are shared by all clones, and what a plan adds to them is said beside it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from callboard.errors import CallboardError, RequestConflict
from callboard.fold import SessionFold
from callboard.ids import SessionRef
from callboard.inbox import Budget
from callboard.messages import (
    InboxItem,
    ItemState,
    KnownInput,
    LeaseGranted,
    NewRecord,
    PendingItem,
    WaitOutcome,
)
from callboard.records import (
    InboxAcknowledged,
    TurnAborted,
    TurnCompleted,
    first_chain,
)
from callboard.storage.leases import Lease

TASK_ENDED: Final = frozenset({"completed", "failed", "cancelled", "interrupted"})
"""Task states in which leftover input starts nothing (RTY-5c)."""


class End(NamedTuple):
    """Where a stream ends."""

    bytes: int
    """Where its next line goes."""
    last: int
    """Last seq or n; 0 for none."""
    chain: str


NOTHING: Final = End(0, 0, "")


class Item(NamedTuple):
    """A live item of an inbox."""

    n: int
    size_bytes: int
    epoch: int
    """In force when it was put."""
    commit: int
    ts: str
    item: InboxItem


class Ending(NamedTuple):
    """How an input was settled, or held, and where."""

    state: Literal["acknowledged", "discarded", "held"]
    turn_id: str | None
    outcome: str | None
    reason: str | None
    seq: int
    """Of the terminal, or of the recorded discard."""


class Settled(NamedTuple):
    """What is known for ever of an input that left (INB-6a)."""

    digest: bytes
    ending: Ending


class Key(NamedTuple):
    """A frame that was written before, by the id of its first record (DUR-6)."""

    commit: int
    first_seq: int
    last_seq: int
    digest: int
    """Of this process: see `add_digest`."""


_KEY: Final = struct.Struct("<QQQq")


def pack_key(key: Key) -> bytes:
    """Spell a key's answer in 32 bytes: there may be 4,096 in each session."""
    return _KEY.pack(*key)


def unpack_key(data: bytes) -> Key:
    """Read what `pack_key` spelled."""
    return Key(*_KEY.unpack(data))


def add_digest(before: int, record_id: str, kind: str, turn_id: str | None, data: bytes) -> int:
    """Digest what a frame's records say, one after the other, so that a repeat is told (DUR-6).

    It is Python's own keyed hash, 64 bits: a digest never leaves the process, since a start folds
    the transcript again, and is compared with one other only, that of the same key (ADR 0081).

    Args:
        before: the digest of the records before it; 0 for the first.
        record_id: the record's id.
        kind: its type.
        turn_id: its turn, or none.
        data: its data, byte for byte.

    """
    return hash((before, record_id, kind, turn_id, data))


def digest_of(records: Iterable[NewRecord]) -> int:
    """Digest the records of a request."""
    found = 0
    for one in records:
        found = add_digest(found, one.id, one.type, one.turn_id, one.data)
    return found


@dataclass(slots=True)
class Inbox:
    """The inbox of a session. `items` is replaced, never changed in place."""

    generation: str = ""
    end: End = NOTHING
    items: dict[str, Item] = field(default_factory=dict[str, Item])
    """Live items by message id, in FIFO order."""
    live_bytes: int = 0
    header_bytes: int = 0
    tally: Budget | None = field(default=None, compare=False)
    """`items` by origin, once somebody has asked; as they, never changed in place."""

    @property
    def dead_bytes(self) -> int:
        """Bytes of the file that say nothing any more."""
        return self.end.bytes - self.header_bytes - self.live_bytes

    def budget(self) -> Budget:
        """Count the live items by origin."""
        if self.tally is None:
            self.tally = Budget((one.item.origin, one.size_bytes) for one in self.items.values())
        return self.tally


@dataclass(slots=True)
class SessionState:
    """The ledger of one session."""

    ref: SessionRef
    text: str
    fold: SessionFold
    transcript: End
    inbox: Inbox = field(default_factory=Inbox)
    owed_lf: bool = False
    """The last line is sound but has no LF yet (REC-2a): the next part brings it."""
    last_ts: str = ""
    epoch: int = 0
    lease: Lease | None = None
    lease_error: CallboardError | None = None
    """The stored lease cannot be read (LSE-4a)."""
    damage: CallboardError | None = None
    """Why nothing is written to this session: session_damaged, inbox_corrupt or its format."""
    held_by: dict[str, Ending] = field(default_factory=dict[str, Ending])
    """Of live items: the turn that left them held."""
    settled: dict[str, Settled] = field(default_factory=dict[str, Settled])
    keys: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """`pack_key` by the id of a frame's first record, oldest first."""

    def clone(self) -> SessionState:
        """Copy what a plan may change; the fold is cloned by who changes it."""
        return SessionState(
            self.ref,
            self.text,
            self.fold,
            self.transcript,
            self.inbox,
            self.owed_lf,
            self.last_ts,
            self.epoch,
            self.lease,
            self.lease_error,
            self.damage,
            self.held_by,
            self.settled,
            self.keys,
        )

    @property
    def weight(self) -> int:
        """About how many bytes it takes in memory."""
        return 4_096 + self.inbox.live_bytes + 250 * len(self.keys) + 350 * len(self.settled)

    # --- what is asked ------------------------------------------------------------------------

    def known(self, message_id: str, digest: str) -> KnownInput | None:
        """Tell what became of a message id (INB-6).

        Raises:
            RequestConflict: it was used for another content.

        """
        live = self.inbox.items.get(message_id)
        if live is not None and message_id not in self.settled:
            if live.item.digest != digest:
                raise RequestConflict
            turn_id = self.claimed_by(message_id)
            return KnownInput(item_state="claimed" if turn_id else "pending", turn_id=turn_id)
        settled = self.settled.get(message_id)
        if settled is None:
            return None
        if settled.digest != bytes.fromhex(digest):
            raise RequestConflict
        left: ItemState = "discarded"
        if settled.ending.state == "acknowledged":
            left = "acknowledged"
        return KnownInput(item_state=left, turn_id=settled.ending.turn_id)

    def claimed_by(self, message_id: str) -> str | None:
        """Give the open turn that has taken an input, as far as records tell."""
        turn = self.fold.turn
        if turn is None or message_id not in turn.input_ids + turn.applied:
            return None
        return turn.turn_id

    def runnable(self) -> bool:
        """Tell whether input waits that a wake starts a turn for (MBX-16)."""
        fold = self.fold
        if fold.quarantine or fold.archived_at or fold.paused_at:
            return False
        if fold.task_status in TASK_ENDED:
            return False
        return any(
            one.item.wake and name not in fold.held and name not in self.settled
            for name, one in self.inbox.items.items()
        )

    def outcome(self, message_id: str) -> WaitOutcome | None:
        """Tell how an input was settled, or none while it is not (and is not held for good)."""
        settled = self.settled.get(message_id)
        if settled is not None:
            return _outcome(message_id, settled.ending)
        held = self.held_by.get(message_id)
        if held is None or message_id not in self.inbox.items:
            return None  # a turn may have claimed what never was put
        if message_id not in self.fold.held or self.fold.turn is not None:
            return None
        return _outcome(message_id, held)

    def grant_body(self) -> LeaseGranted:
        """Say all that a new owner needs (runtime 5.1)."""
        fold, created = self.fold, self.fold.created
        assert created is not None
        turn = fold.turn
        open_id = turn.turn_id if turn else ""
        return LeaseGranted(
            session=self.text,
            epoch=self.epoch,
            last_seq=fold.seq,
            workspace=created.workspace,
            agent=fold.agent,
            model=fold.model,
            settings=fold.settings,
            paused=fold.paused_at is not None,
            turns=fold.turns,
            last_turn_id=fold.last_turn_id,
            last_message_id=fold.last_message_id,
            open_turn=fold.open_turn(),
            open_calls=fold.open_calls(),
            pending=[
                PendingItem(
                    item=one.item,
                    n=one.n,
                    size_bytes=one.size_bytes,
                    attempts=fold.attempts.get(name, 0),
                    held=name in fold.held,
                )
                for name, one in self.inbox.items.items()
            ],
            applied_ids=[
                name
                for name, turn_id in fold.applied.items()
                if name in self.inbox.items and turn_id != open_id
            ],
            acknowledged_ids=[name for name in self.inbox.items if name in self.settled],
        )


def new_state(ref: SessionRef) -> SessionState:
    """Begin with nothing."""
    text = str(ref)
    return SessionState(ref, text, SessionFold(), End(0, 0, first_chain(text)))


def _outcome(message_id: str, ending: Ending) -> WaitOutcome:
    return WaitOutcome.model_validate(
        {
            "message_id": message_id,
            "item_state": "pending" if ending.state == "held" else ending.state,
            "input_disposition": ending.state,
            "turn_id": ending.turn_id,
            "outcome": ending.outcome,
            "reason": ending.reason,
            "terminal_seq": ending.seq,
        }
    )


# --- acknowledgements -----------------------------------------------------------------------------


def ending_of(
    data: TurnCompleted | TurnAborted, seq: int, state: Literal["acknowledged", "held"]
) -> Ending:
    """Say how a turn's inputs ended.

    Args:
        data: the terminal.
        seq: its position.
        state: whether they left or stay.

    """
    reason = None
    if isinstance(data, TurnAborted):
        reason = data.failure.code if data.failure is not None else data.cause
    return Ending(state, data.turn_id, data.outcome, reason, seq)


def discard_ending(data: InboxAcknowledged, seq: int) -> Ending:
    """Say how inputs were discarded."""
    return Ending("discarded", data.turn_id, None, data.reason, seq)


def may_acknowledge(
    acked: InboxAcknowledged, data: TurnCompleted | TurnAborted, applied: frozenset[str]
) -> bool:
    """Tell whether an acknowledgement and the terminal behind it belong together (INB-4b).

    Args:
        acked: the record directly before the terminal.
        data: the terminal.
        applied: unacknowledged ids that this or an earlier turn had applied, before `acked`.

    """
    if acked.turn_id is not None and acked.turn_id != data.turn_id:
        return False
    if acked.reason != ("completed" if isinstance(data, TurnCompleted) else "aborted"):
        return False
    ids = {one.message_id for one in acked.items}
    allowed = set(data.claimed_input_ids)
    if isinstance(data, TurnAborted):
        allowed &= applied
    return ids <= allowed


def applied_ids(fold: SessionFold) -> frozenset[str]:
    """Give the unacknowledged inputs that any turn has applied."""
    return frozenset(fold.applied) | frozenset(fold.turn.applied if fold.turn else ())


def hold(
    held_by: dict[str, Ending], fold: SessionFold, data: TurnCompleted | TurnAborted, seq: int
) -> dict[str, Ending]:
    """Note which inputs a terminal left held (RTY-5).

    Args:
        held_by: as it was; not changed.
        fold: the session's, behind the terminal.
        data: the terminal.
        seq: its position.

    """
    names = [name for name in data.claimed_input_ids if name in fold.held]
    if not names:
        return held_by
    ending = ending_of(data, seq, "held")
    return {**held_by, **dict.fromkeys(names, ending)}


def shallow(inbox: Inbox) -> Inbox:
    """Copy an inbox to change it; its items are still shared."""
    return copy(inbox)
