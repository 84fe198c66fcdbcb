"""What a request writes: a plan in the making, on a clone of its session's state. Pure.

A plan is taken over whole or not at all. What breaks a rule of records or of the inbox is refused
while it is drafted (DUR-4, INB-5, INB-7, INB-8, RUN-4).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, NoReturn

from pydantic_core import from_json

from callboard.errors import (
    DISCARD_REASONS,
    InvalidRequest,
    PayloadTooLarge,
    RecordInvalid,
)
from callboard.fold import TURN_REASONS, SessionFold
from callboard.ids import check_message_id
from callboard.inbox import put_data, remove_data
from callboard.limits import FRAME_BYTES_MAX, INBOX_FILE_BYTES_MAX, RECORD_BYTES_MAX
from callboard.messages import Body, InboxItem, NewRecord
from callboard.records import (
    InboxAcknowledged,
    RecordData,
    TurnAborted,
    TurnCompleted,
    check_data,
    stamp_inbox_header,
    stamp_op,
    stamp_record,
)
from callboard.storage.frames import Epochs, Part
from callboard.storage.leases import Lease
from callboard.storage.load import settled_by
from callboard.storage.state import (
    End,
    Inbox,
    Item,
    SessionState,
    Settled,
    applied_ids,
    discard_ending,
    ending_of,
    hold,
    may_acknowledge,
)

_ENDINGS: Final = frozenset(
    {"turn_completed", "turn_aborted", "turn_cancel_requested", "inbox_acknowledged"}
)
"""With one of these a frame of an open turn ends it, asks for its end, or discards input."""
_TURN_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}\Z", re.ASCII)
_SETTLING: Final = frozenset((InboxAcknowledged, TurnCompleted, TurnAborted))
"""What an input may be settled, or held, by."""
_FILE_ROOM: Final = 1_048_576
"""Kept free in an inbox file for the removes of all its items."""


class Moment(NamedTuple):
    """What a frame is stamped with."""

    commit: int
    now_us: int
    ts: str
    """`now_us` as records spell it."""
    fresh: Callable[[], str]
    """Makes ids of 32 hex digits."""


class Plan(NamedTuple):
    """What a request comes to: nothing of it holds before its frame is synced."""

    reply: Body
    state: SessionState | None = None
    """The session's next state; none if nothing changes."""
    parts: tuple[Part, ...] = ()
    replaces: bool = False
    """The inbox part starts a new file in place of the old one."""
    lease: Lease | None = None
    settled: dict[str, Settled] | None = None
    key: tuple[str, bytes] | None = None
    first_seq: int = 0
    lines: tuple[bytes, ...] = ()
    """New lines of the transcript."""
    puts: bool = False
    """It brings input or a session in: refused while the files are behind a full disk."""
    epochs: Epochs | None = None
    ends: bool = True
    """It ends something, or is about who may write: written from the reserve, too (FLT-21)."""
    commit: int = 0
    """Stamped on what it writes; 0 where nothing is stamped."""

    @property
    def writes(self) -> bool:
        """Tell whether there is anything to write."""
        return bool(self.parts or self.lease or self.epochs)


class Draft:
    """A plan in the making: a clone of the state, and the lines that lead to it."""

    def __init__(self, state: SessionState, moment: Moment) -> None:
        self.state, self.moment = state.clone(), moment
        self.ts = moment.ts if moment.ts > state.last_ts else state.last_ts
        self.state.last_ts = self.ts
        self.settled: dict[str, Settled] = {}
        self.lines: list[bytes] = []
        self.lease: Lease | None = None
        self._first_seq = state.fold.seq + 1
        self._offset = state.transcript.bytes
        self._lf = b"\n" if state.owed_lf else b""
        self.puts = False
        self.begins = False
        """It puts, or goes on with a turn that it does not end."""
        self._ops: list[bytes] = []
        self._ops_at = -1
        self._replaces = False

    # --- records ------------------------------------------------------------------------------

    def add_records(self, records: Sequence[NewRecord]) -> frozenset[str]:
        """Check records against the fold and stamp them.

        Returns:
            The ids of the inputs that they settle.

        Raises:
            RecordInvalid, TurnActive, TurnTerminal, …: a record breaks a rule.
            PayloadTooLarge: a record is larger than RECORD_BYTES_MAX.

        """
        open_before = self.state.fold.turn is not None
        fold = self.state.fold = self.state.fold.clone()
        acked: tuple[InboxAcknowledged, frozenset[str]] | None = None
        commit = self.moment.commit
        for record in records:
            data = _checked(record)
            kind = type(data)
            before = acked
            if acked is not None:
                self._check_behind(acked, data)
                acked = None
            if kind is InboxAcknowledged:
                assert isinstance(data, InboxAcknowledged)
                self._check_acknowledged(data)
                if data.reason in TURN_REASONS:
                    acked = data, applied_ids(fold)
            fold.admit(record.turn_id, data, commit=commit)
            self._stamp(record)
            if kind in _SETTLING:
                self._settle(before, data, fold)
        if acked is not None:
            _invalid(acked[0], "turn_id")
        kinds = {record.type for record in records}
        self.begins = not kinds & _ENDINGS and (open_before or fold.turn is not None)
        return frozenset(self.settled)

    def _check_behind(
        self, acked: tuple[InboxAcknowledged, frozenset[str]], data: RecordData
    ) -> None:
        """Check that a turn's acknowledgement is directly before its terminal (RUN-4)."""
        if not isinstance(data, TurnCompleted | TurnAborted):
            _invalid(acked[0], "turn_id")
        if not may_acknowledge(acked[0], data, acked[1]):
            _invalid(acked[0], "items")

    def _check_acknowledged(self, data: InboxAcknowledged) -> None:
        if data.reason not in TURN_REASONS and data.reason not in DISCARD_REASONS:
            _invalid(data, "reason")
        for one in data.items:
            live = self.state.inbox.items.get(one.message_id)
            gone = one.message_id in self.settled or one.message_id in self.state.settled
            if live is None or live.item.digest != one.digest or gone:
                _invalid(data, "items")
        if len({one.message_id for one in data.items}) != len(data.items):
            _invalid(data, "items")

    def _settle(
        self,
        acked: tuple[InboxAcknowledged, frozenset[str]] | None,
        data: RecordData,
        fold: SessionFold,
    ) -> None:
        if isinstance(data, InboxAcknowledged):
            if data.reason in DISCARD_REASONS:
                self.settled.update(settled_by(data, discard_ending(data, fold.seq)))
        elif isinstance(data, TurnCompleted | TurnAborted):
            if acked is not None:
                ending = ending_of(data, fold.seq, "acknowledged")
                self.settled.update(settled_by(acked[0], ending))
            self.state.held_by = hold(self.state.held_by, fold, data, fold.seq)

    def _stamp(self, record: NewRecord) -> None:
        state = self.state
        end = state.transcript
        line, chain = stamp_record(
            state.ref,
            seq=end.last + 1,
            record_id=record.id,
            commit=self.moment.commit,
            epoch=state.epoch,
            ts=self.ts,
            kind=record.type,
            turn_id=record.turn_id,
            data=record.data,
            before=end.chain,
        )
        if len(line) > RECORD_BYTES_MAX:
            raise PayloadTooLarge(limit="RECORD_BYTES_MAX", maximum=RECORD_BYTES_MAX)
        self.lines.append(line)
        state.transcript = End(end.bytes + len(line), end.last + 1, chain)

    # --- inbox --------------------------------------------------------------------------------

    def put(self, item: InboxItem) -> Item:
        """Put an item into the inbox, if it fits (INB-7, INB-8).

        Raises:
            InboxFull: it does not.
            InvalidRequest: it cannot be kept as it is.

        """
        check_message_id(item.message_id)
        try:
            data = put_data(item)
        except (ValueError, RecursionError):  # pydantic's serialisation errors are ValueErrors
            raise InvalidRequest(field="metadata", reason="encoding") from None
        inbox = self._own_inbox()
        line = self._op("put", data)
        budget = inbox.budget()
        refusal = budget.refuse(item.origin, len(line))
        if refusal is not None:
            raise refusal
        room = INBOX_FILE_BYTES_MAX - _FILE_ROOM - len(line)
        if not inbox.generation or inbox.end.bytes > room:
            self._start_file(inbox)
            line = self._op("put", data)
        self._write_op(line)
        self.puts = True
        n = inbox.end.last
        live = Item(n, len(line), self.state.epoch, self.moment.commit, self.ts, item)
        inbox.items = {**inbox.items, item.message_id: live}
        inbox.tally = budget = budget.copy()
        budget.add(item.origin, len(line))
        inbox.live_bytes += len(line)
        return live

    def remove(self, message_ids: Sequence[str]) -> None:
        """Take live items out of the inbox."""
        inbox = self._own_inbox()
        items = dict(inbox.items)
        inbox.tally = None
        for message_id in message_ids:
            inbox.live_bytes -= items.pop(message_id).size_bytes
            self._write_op(self._op("remove", remove_data(message_id)))
        inbox.items = items
        if self.state.held_by:
            gone = frozenset(message_ids)
            held = self.state.held_by
            self.state.held_by = {name: held[name] for name in held if name not in gone}

    def compact(self) -> None:
        """Begin a new inbox file with what is live (INB-2)."""
        self._start_file(self._own_inbox())

    def _own_inbox(self) -> Inbox:
        if self._ops_at < 0:
            old = self.state.inbox
            self._ops_at = old.end.bytes
            self.state.inbox = Inbox(
                old.generation, old.end, old.items, old.live_bytes, old.header_bytes, old.tally
            )
        return self.state.inbox

    def _op(self, op: str, data: bytes) -> bytes:
        """Stamp the next operation without taking it over."""
        end = self.state.inbox.end
        line, _ = stamp_op(
            self.state.ref,
            n=end.last + 1,
            commit=self.moment.commit,
            epoch=self.state.epoch,
            ts=self.ts,
            op=op,
            data=data,
            before=end.chain,
        )
        return line

    def _write_op(self, line: bytes) -> None:
        end = self.state.inbox.end
        self._ops.append(line)
        self.state.inbox.end = End(end.bytes + len(line), end.last + 1, _chain_of(line))

    def _start_file(self, inbox: Inbox) -> None:
        """Begin a file: a header, and the live items as they were, in a new chain."""
        self._replaces = bool(inbox.generation)
        inbox.generation = _uuid(self.moment.fresh())
        header, chain = stamp_inbox_header(
            self.state.ref, generation=inbox.generation, next_n=inbox.end.last + 1
        )
        lines = [header]
        for live in inbox.items.values():
            line, chain = stamp_op(
                self.state.ref,
                n=live.n,
                commit=live.commit,
                epoch=live.epoch,
                ts=live.ts,
                op="put",
                data=put_data(live.item),
                before=chain,
            )
            lines.append(line)
        self._ops, self._ops_at = lines, 0
        inbox.header_bytes = len(header)
        inbox.end = End(sum(map(len, lines)), inbox.end.last, chain)

    # --- lease --------------------------------------------------------------------------------

    def set_lease(self, lease: Lease) -> None:
        """Grant or give back the session's lease (LSE-1)."""
        self.state.lease = self.lease = lease

    # --- the end ------------------------------------------------------------------------------

    def plan(self, reply: Body, key: tuple[str, bytes] | None = None) -> Plan:
        """Finish.

        Raises:
            PayloadTooLarge: the frame would be larger than FRAME_BYTES_MAX.

        """
        state, parts, size = self.state, list[Part](), 0
        if self.lines:
            file = f"sessions/{state.text}/transcript.jsonl"
            lines = self.lines if not self._lf else [self._lf, *self.lines]
            data = lines[0] if len(lines) == 1 else b"".join(lines)
            size = len(data)
            parts.append(Part(file, "", self._offset, data))
            if self._lf:
                state.owed_lf = False
                end = state.transcript
                state.transcript = End(end.bytes + 1, end.last, end.chain)
        if self._ops:
            file = f"sessions/{state.text}/inbox.jsonl"
            ops = b"".join(self._ops)
            size += len(ops)
            parts.append(Part(file, state.inbox.generation, self._ops_at, ops))
        if size > FRAME_BYTES_MAX and not self._replaces:
            raise PayloadTooLarge(limit="FRAME_BYTES_MAX", maximum=FRAME_BYTES_MAX)
        return Plan(
            reply,
            state,
            tuple(parts),
            self._replaces,
            self.lease,
            self.settled or None,
            key,
            self._first_seq,
            tuple(self.lines),
            self.puts,
            ends=not (self.puts or self.begins),
            commit=self.moment.commit,
        )


def _chain_of(line: bytes) -> str:
    return line[-67:-3].decode("ascii")


def _uuid(digits: str) -> str:
    cut = (0, 8, 12, 16, 20, 32)
    return "-".join(digits[a:b] for a, b in pairwise(cut))


def _invalid(data: RecordData, field: str) -> NoReturn:
    raise RecordInvalid(type=data.type, field=field)


def _checked(record: NewRecord) -> RecordData:
    """Check a new record; what passes reads back as the same record (DUR-4)."""
    if record.turn_id is not None and not _TURN_ID.match(record.turn_id):
        raise RecordInvalid(type=record.type, field="turn_id")
    data = record.data
    found = check_data(record.type, data)
    if b"\n" in data or b"NaN" in data or b"Infinity" in data:
        try:
            from_json(data, allow_inf_nan=False)
        except ValueError:
            raise RecordInvalid(type=record.type, field="data") from None
        if b"\n" in data:
            raise RecordInvalid(type=record.type, field="data")
    return found
