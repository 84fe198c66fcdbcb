"""From bytes to checked records: what every reader of a transcript or an inbox goes through.

Pure: takes pieces of bytes, wherever they come from, and holds one line at a time (REC-1). Damage
in a transcript becomes a visible gap and reading goes on (REC-3a); an inbox fails closed (INB-3).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from callboard.errors import (
    Damage,
    InboxCorrupt,
    InboxCorruptReason,
    InvalidRequest,
    SessionDamaged,
)
from callboard.ids import SessionRef, parse_ref, workspace_key
from callboard.limits import (
    IDEMPOTENCY_KEYS_PER_SESSION_MAX,
    INBOX_BYTES_MAX,
    INBOX_FILE_BYTES_MAX,
    RECORD_FORMAT,
)
from callboard.messages import InboxItem
from callboard.records import (
    InboxHeader,
    InboxOp,
    LineDamage,
    Record,
    SessionCreated,
    first_chain,
    link,
    read_op,
    read_record,
    split_chain,
)

NEVER: Final = (1 << 64) - 1
"""An as_of above every commit: read all there is."""


# --- lines ------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One line of a file."""

    number: int
    """From 1."""
    data: bytes
    """Without its LF; empty if it cannot be one of ours."""
    size: int
    """Bytes that it takes, with its LF."""
    ended: bool
    """Whether it has its LF."""
    damage: Damage | None = None
    """What is wrong with it, if that is known before it is read."""


class Hole(NamedTuple):
    """Bytes that should be there and are not, or that nobody wrote."""

    size: int
    damage: Damage


def split(pieces: Iterable[bytes | Hole], limit: int, *, before: int = 0) -> Iterator[Line]:
    """Split bytes into lines, at byte 0x0A and nowhere else (FLT-57).

    Args:
        pieces: the bytes, in pieces of any size.
        limit: the most bytes of a line without its LF; what is longer is counted, not kept.
        before: how many lines stand before these bytes.

    """
    number = before
    kept: list[bytes] = []
    size = 0

    def line(end: bytes, lf: int) -> Line:
        data = b"" if size > limit else b"".join((*kept, end))
        return Line(number, data, size + lf, lf == 1, "bad_line" if size > limit else None)

    for piece in pieces:
        if isinstance(piece, Hole):
            number += 1
            yield Line(number, b"", size + piece.size, True, piece.damage)
            kept.clear()
            size = 0
            continue
        *ends, tail = piece.split(b"\n")
        for end in ends:
            number += 1
            size += len(end)
            yield line(end, 1)
            kept.clear()
            size = 0
        size += len(tail)
        if size > limit:
            kept.clear()
        elif tail:
            kept.append(tail)
    if size:
        number += 1
        yield line(b"", 0)


# --- transcripts --------------------------------------------------------------------------------


class Gap(NamedTuple):
    """A place in a transcript where something is wrong; never what stands there."""

    line: int
    """From 1."""
    bytes: int
    """How many the bad line takes; 0 where lines are missing or what is wrong has no length."""
    damage: Damage

    def refusal(self) -> SessionDamaged:
        """Give the error that writes, activation and the context answer with (REC-3b)."""
        return SessionDamaged(damage=self.damage, line=self.line)


class Sound(NamedTuple):
    """A line of a transcript that holds, and what it says."""

    record: Record
    data: bytes
    """As it is stored, with its LF."""


class Mark(NamedTuple):
    """A place in an undamaged transcript: behind so many lines, the last with this chain."""

    seq: int
    chain: str


def check_transcript(
    lines: Iterable[Line], ref: SessionRef, *, as_of: int = NEVER, behind: Mark | None = None
) -> Iterator[Sound | Gap]:
    """Check the lines of a transcript, one after the other.

    Args:
        lines: of the whole file, or of what stands behind `behind`.
        ref: whose transcript it must be.
        as_of: records of later commits are not read.
        behind: where `lines` begin, if not at the start.

    Yields:
        Each sound record, and in place of everything else a gap.

    Raises:
        SessionDamaged: it cannot be told whose transcript it is, or it is another one's (IDN-4).
        FormatUnsupported: a record that this version does not know (REC-3c).

    """
    return _Transcript(ref, as_of, behind).check(lines)


class _Transcript:
    """The state between two lines: what the next one must fit to."""

    def __init__(self, ref: SessionRef, as_of: int, behind: Mark | None) -> None:
        self.ref, self.as_of = ref, as_of
        self.seq = behind.seq if behind else 0
        self.chain: str | None = behind.chain if behind else first_chain(str(ref))
        self.seen: OrderedDict[str, None] = OrderedDict()

    def check(self, lines: Iterable[Line]) -> Iterator[Sound | Gap]:
        for line in lines:
            try:
                record = self._read(line)
            except LineDamage as damage:
                if not line.ended:
                    return  # a torn tail; storage cuts it (REC-2a)
                yield self._gap(line, damage.code)
                continue
            if record.commit > self.as_of:
                return
            if record.seq > self.seq + 1 and self.chain is not None:
                yield Gap(line.number, 0, "missing_records")
            self.seq, self.chain = record.seq, record.chain
            yield Sound(record, line.data + b"\n")

    def _read(self, line: Line) -> Record:
        if line.damage is not None:
            raise LineDamage(line.damage)
        try:
            record = read_record(line.data, self.chain, self.ref, None)
        except LineDamage:
            if line.ended and _is_foreign(line.data, self.chain, self.ref):
                raise LineDamage("identity_mismatch") from None
            raise
        if record.commit > self.as_of:
            return record
        if record.seq <= self.seq:
            raise LineDamage("bad_line")
        self._check_creation(record)
        self._check_id(record)
        return record

    def _check_creation(self, record: Record) -> None:
        """Judge the first record, which says whose transcript it is; there is no second such."""
        if self.seq:
            if isinstance(record.data, SessionCreated):
                raise LineDamage("bad_line")
            return
        created = record.data
        if (
            not isinstance(created, SessionCreated)
            or created.session_id != self.ref.session_id
            or workspace_key(created.workspace) != self.ref.workspace_key
        ):
            raise LineDamage("identity_mismatch")

    def _check_id(self, record: Record) -> None:
        """Notice a record that stands there twice, within a window that memory can bear."""
        if record.id in self.seen:
            raise LineDamage("duplicate_record")
        self.seen[record.id] = None
        if len(self.seen) > IDEMPOTENCY_KEYS_PER_SESSION_MAX:
            self.seen.popitem(last=False)

    def _gap(self, line: Line, code: str) -> Gap:
        gap = Gap(line.number, line.size, _as_damage(code))
        if self.seq == 0 or gap.damage == "identity_mismatch":
            raise gap.refusal()
        self.chain = None
        return gap


def _as_damage(code: str) -> Damage:
    match code:
        case (
            "missing_records"
            | "duplicate_record"
            | "identity_mismatch"
            | "truncated"
            | "foreign_tail"
        ):
            return code
        case _:
            return "bad_line"


def _is_foreign(line: bytes, before: str | None, ref: SessionRef) -> bool:
    """Tell a line of another session from a line of this one with a damaged name.

    With the right name put back, a line of this session fits its chain again.
    """
    try:
        head, chain = split_chain(line)
        other = _named_in(line)
    except (LineDamage, ValueError, InvalidRequest):
        return False
    if other == ref or before is None:
        return other != ref
    return link(before, head.replace(_name(other), _name(ref), 1)) != chain


def _named_in(line: bytes) -> SessionRef:
    named = _Named.model_validate_json(line)
    return parse_ref(f"{named.workspace_key}/{named.session_id}")


class _Named(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    workspace_key: str
    session_id: str


def _name(ref: SessionRef) -> bytes:
    return f'"workspace_key":"{ref.workspace_key}","session_id":"{ref.session_id}"'.encode()


# --- inboxes ------------------------------------------------------------------------------------


class LiveItem(NamedTuple):
    """An input that waits in an inbox, or that a turn has taken and nobody acknowledged yet."""

    n: int
    size_bytes: int
    """Bytes of its line, its LF included."""
    item: InboxItem


class InboxFold:
    """The live items of an inbox after some of its operations, in FIFO order."""

    def __init__(self, next_n: int) -> None:
        """Begin behind a header.

        Args:
            next_n: the header's; puts below it were kept by a compaction.

        """
        self.kept_below = next_n
        self.next_n = next_n
        self.items: dict[str, LiveItem] = {}
        self.bytes = 0

    def expects(self, n: int, op: str) -> bool:
        """Tell whether an operation of this number may come next."""
        if n >= self.kept_below:
            return n == self.next_n
        return op == "put" and self.next_n == self.kept_below

    def apply(self, op: InboxOp, size: int) -> InboxCorruptReason | None:
        """Apply an operation, or say why it cannot be one of this inbox.

        Args:
            op: the operation.
            size: bytes of its line, its LF included.

        """
        if op.n >= self.kept_below:
            self.next_n = op.n + 1
        if op.item is not None and op.op == "put":
            if op.message_id in self.items:
                return "duplicate_id"
            self._set(LiveItem(op.n, size, op.item))
        elif op.message_id not in self.items:
            return "bad_item"
        elif op.item is not None:
            self._set(LiveItem(self.items[op.message_id].n, size, op.item))
        elif op.op == "remove":
            self.bytes -= self.items.pop(op.message_id).size_bytes
        elif not self._move(op.message_id, op.behind):
            return "bad_item"
        return "too_large" if self.bytes > INBOX_BYTES_MAX else None

    def _set(self, live: LiveItem) -> None:
        old = self.items.get(live.item.message_id)
        self.bytes += live.size_bytes - (old.size_bytes if old else 0)
        self.items[live.item.message_id] = live

    def _move(self, message_id: str, behind: str | None) -> bool:
        if behind is not None and (behind == message_id or behind not in self.items):
            return False
        moved = self.items.pop(message_id)
        order = list(self.items)
        order.insert(order.index(behind) + 1 if behind is not None else 0, message_id)
        self.items[message_id] = moved
        self.items = {name: self.items[name] for name in order}
        return True


def read_inbox(
    lines: Iterable[Line], ref: SessionRef, *, as_of: int = NEVER, growing: bool = False
) -> InboxFold:
    """Open an inbox (INB-3).

    Args:
        lines: of the whole file.
        ref: whose inbox it must be.
        as_of: operations of later commits are not applied.
        growing: whether a writer may be in the middle of a line above `as_of`.

    Raises:
        InboxCorrupt: anything at all is wrong.

    """
    fold: InboxFold | None = None
    chain = ""
    read = 0
    for line in lines:
        read += line.size
        if read > INBOX_FILE_BYTES_MAX:
            _refuse("too_large")
        if not line.ended and growing:
            break
        value = _object(line)
        if fold is None:
            header = _header(value, line, ref)
            fold, chain = InboxFold(header.next_n), header.chain
            continue
        op = _operation(value, line, ref, fold, chain)
        if op.commit > as_of:
            break
        chain = op.chain
        if reason := fold.apply(op, line.size):
            _refuse(reason, line.number)
    if fold is None:
        if not growing:
            _refuse("bad_header", 1)
        return InboxFold(1)
    return fold


def _refuse(reason: InboxCorruptReason, line: int | None = None) -> NoReturn:
    raise InboxCorrupt(reason=reason, line=line)


def _object(line: Line) -> dict[str, object]:
    if line.damage is not None:
        _refuse("too_large" if line.damage == "bad_line" else "gap", line.number)
    if not line.ended:
        _refuse("not_json", line.number)
    try:
        value: object = from_json(line.data, allow_inf_nan=False)
    except ValueError:
        _refuse("not_json", line.number)
    if not isinstance(value, dict):
        _refuse("not_json", line.number)
    return value  # pyright: ignore[reportUnknownVariableType]


def _header(value: dict[str, object], line: Line, ref: SessionRef) -> InboxHeader:
    if "format" not in value:
        _refuse("bad_header", 1)
    if value["format"] != RECORD_FORMAT:
        _refuse("unknown_format", 1)
    if (value.get("workspace_key"), value.get("session_id")) != ref:
        _refuse("wrong_session", 1)
    try:
        head, chain = split_chain(line.data)
        header = InboxHeader.model_validate(value)
    except (LineDamage, ValidationError):
        _refuse("bad_header", 1)
    if link(first_chain(str(ref)), head) != chain:
        _refuse("bad_header", 1)
    return header


def _operation(
    value: dict[str, object], line: Line, ref: SessionRef, fold: InboxFold, chain: str
) -> InboxOp:
    n = value.get("n")
    if not isinstance(n, int) or not fold.expects(n, str(value.get("type"))):
        _refuse("gap" if isinstance(n, int) else "bad_item", line.number)
    if (value.get("workspace_key"), value.get("session_id")) != ref:
        _refuse("bad_item", line.number)
    try:
        return read_op(line.data, chain)
    except LineDamage:
        _refuse("bad_item", line.number)
