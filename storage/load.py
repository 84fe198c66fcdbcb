"""From a session's files to its state: one streaming fold, one record in memory at a time (REC-1).

Pure over pieces of bytes. What is wrong with a file becomes the state's `damage`, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from pydantic_core import from_json

from callboard.errors import (
    DISCARD_REASONS,
    FormatUnsupported,
    InboxCorrupt,
    OwnerUnprovable,
    SessionDamaged,
)
from callboard.fold import TURN_REASONS
from callboard.ids import SessionRef
from callboard.limits import (
    IDEMPOTENCY_KEYS_PER_SESSION_MAX,
    INBOX_BYTES_MAX,
    INBOX_FILE_BYTES_MAX,
    RECORD_BYTES_MAX,
)
from callboard.records import InboxAcknowledged, Record, TurnAborted, TurnCompleted, split_chain
from callboard.storage.leases import read_lease
from callboard.storage.lines import Gap, Line, check_transcript, read_inbox, split
from callboard.storage.state import (
    End,
    Ending,
    Inbox,
    Item,
    Key,
    SessionState,
    Settled,
    add_digest,
    applied_ids,
    discard_ending,
    ending_of,
    hold,
    may_acknowledge,
    new_state,
    pack_key,
)

_OP_HEAD: Final = re.compile(
    rb'\{"v":\d+,"n":(\d+),"commit":(\d+),"epoch":(\d+),"ts":"([^"]*)"', re.ASCII
)
_DATA: Final = b'"data":'


class Loaded(NamedTuple):
    """A session's state and what its files owe."""

    state: SessionState
    torn: bool
    """Bytes of an unfinished line stand behind the transcript's end: they are to be cut."""
    highest_commit: int
    """The highest commit in the files (FLT-14)."""


def load(
    ref: SessionRef,
    transcript: Iterable[bytes],
    inbox: Iterable[bytes] | None,
    lease: bytes | None,
) -> Loaded | None:
    """Fold a session's files.

    Args:
        ref: whose they must be.
        transcript: pieces of `transcript.jsonl`.
        inbox: pieces of `inbox.jsonl`, or none if there is no such file.
        lease: the lease as last granted or released, or none.

    Returns:
        None if no record was ever written: there is no such session.

    """
    loader = _Loader(ref)
    loader.read_transcript(transcript)
    state = loader.state
    if not state.fold.exists and state.damage is None:
        return None
    if inbox is not None and state.damage is None:
        loader.read_inbox(inbox)
    if lease is not None:
        loader.take_lease(lease)
    return Loaded(state, loader.torn, loader.highest)


class _Loader:
    def __init__(self, ref: SessionRef) -> None:
        self.state = new_state(ref)
        self.torn = False
        self.highest = 0
        self._acked: tuple[InboxAcknowledged, frozenset[str]] | None = None
        self._frame: tuple[Record, int] | None = None
        self._read = 0
        self._ended = True

    # --- transcript ---------------------------------------------------------------------------

    def read_transcript(self, pieces: Iterable[bytes]) -> None:
        state, size = self.state, 0
        chain = state.transcript.chain
        lines = self._tapped(split(pieces, RECORD_BYTES_MAX))
        try:
            for found in check_transcript(lines, state.ref):
                if isinstance(found, Gap):
                    raise found.refusal()
                self._take(found.record, found.data)
                size += len(found.data)
                chain = found.record.chain
        except (SessionDamaged, FormatUnsupported) as error:
            state.damage = error
        self._end_frame(state.fold.seq)
        if not self._ended:  # a sound last line without LF counts, another one is torn (REC-2a)
            state.owed_lf = size == self._read + 1
            self.torn = not state.owed_lf
        state.transcript = End(size - state.owed_lf, state.fold.seq, chain)

    def _tapped(self, lines: Iterable[Line]) -> Iterator[Line]:
        for line in lines:
            self._read += line.size
            self._ended = line.ended
            yield line

    def _take(self, record: Record, line: bytes) -> None:
        state = self.state
        self.highest = max(self.highest, record.commit)
        state.epoch = max(state.epoch, record.epoch)
        state.last_ts = max(state.last_ts, record.ts)
        if self._frame is not None and self._frame[0].commit != record.commit:
            self._end_frame(record.seq - 1)
        first, digest = self._frame or (record, 0)
        data = data_bytes(line)
        self._frame = first, add_digest(digest, record.id, record.type, record.turn_id, data)
        self._settle(record)

    def _end_frame(self, last_seq: int) -> None:
        if self._frame is None:
            return
        first, digest = self._frame
        self._frame = None
        key = Key(first.commit, first.seq, last_seq, digest)
        self.state.keys[first.id] = pack_key(key)
        trim_keys(self.state.keys)

    def _settle(self, record: Record) -> None:
        """Apply a record and take note of the inputs that it settles (INB-4b)."""
        state, data = self.state, record.data
        applied = applied_ids(state.fold)
        state.fold.apply(record.seq, record.commit, data)
        acked, self._acked = self._acked, None
        if isinstance(data, InboxAcknowledged):
            if data.reason in TURN_REASONS:
                self._acked = (data, applied)
            elif data.reason in DISCARD_REASONS:
                ending = discard_ending(data, record.seq)
                state.settled.update(settled_by(data, ending))
        elif isinstance(data, TurnCompleted | TurnAborted):
            if acked is not None and may_acknowledge(acked[0], data, acked[1]):
                ending = ending_of(data, record.seq, "acknowledged")
                state.settled.update(settled_by(acked[0], ending))
            state.held_by = hold(state.held_by, state.fold, data, record.seq)

    # --- inbox --------------------------------------------------------------------------------

    def read_inbox(self, pieces: Iterable[bytes]) -> None:
        heads: dict[int, tuple[int, int, str]] = {}
        header, size, last = b"", 0, b""

        def tapped() -> Iterator[Line]:
            nonlocal header, size, last
            for line in split(pieces, INBOX_BYTES_MAX):
                size += line.size
                if size > INBOX_FILE_BYTES_MAX:
                    raise InboxCorrupt(reason="too_large")
                header, last = header or line.data, line.data
                if found := _OP_HEAD.match(line.data):
                    n, commit, epoch = (int(found[group]) for group in (1, 2, 3))
                    heads[n] = commit, epoch, found[4].decode("ascii", "replace")
                yield line

        try:
            fold = read_inbox(tapped(), self.state.ref)
        except InboxCorrupt as error:
            self.state.damage = error
            return
        self._take_heads(heads)
        items = {
            name: Item(live.n, live.size_bytes, *_head(heads[live.n]), live.item)
            for name, live in fold.items.items()
        }
        value = from_json(header)
        self.state.inbox = Inbox(
            str(value["generation"]),
            End(size, fold.next_n - 1, split_chain(last)[1]),
            items,
            sum(one.size_bytes for one in items.values()),
            len(header) + 1,
        )

    def _take_heads(self, heads: dict[int, tuple[int, int, str]]) -> None:
        state = self.state
        for commit, epoch, ts in heads.values():
            self.highest = max(self.highest, commit)
            state.epoch = max(state.epoch, epoch)
            state.last_ts = max(state.last_ts, ts)

    # --- lease --------------------------------------------------------------------------------

    def take_lease(self, data: bytes) -> None:
        try:
            lease = read_lease(data, self.state.ref)
        except OwnerUnprovable as error:
            self.state.lease_error = error
            return
        self.state.lease = lease
        self.state.epoch = max(self.state.epoch, lease.epoch)


def _head(head: tuple[int, int, str]) -> tuple[int, int, str]:
    commit, epoch, ts = head
    return epoch, commit, ts


def data_bytes(line: bytes) -> bytes:
    """Cut the data of a record out of its line, byte for byte as it was sent."""
    head, _ = split_chain(line[:-1])
    return head[head.index(_DATA) + len(_DATA) :]


def settled_by(acked: InboxAcknowledged, ending: Ending) -> dict[str, Settled]:
    """Name the inputs that an acknowledgement settles."""
    return {one.message_id: Settled(bytes.fromhex(one.digest), ending) for one in acked.items}


def trim_keys(keys: dict[str, bytes]) -> None:
    """Forget the oldest keys beyond IDEMPOTENCY_KEYS_PER_SESSION_MAX (DUR-6)."""
    while len(keys) > IDEMPOTENCY_KEYS_PER_SESSION_MAX:
        del keys[next(iter(keys))]
