"""A storage in memory, for tests: it passes the same suite as the durable one, and keeps nothing.

It is written apart from the local storage, over the contract alone (records, fold, inbox, errors),
so that the two check each other, and so that it shows what an adapter has to do.

    storage = MemoryStorage()
    epoch = storage.hello_gateway(GatewayHello(nonce=fresh_id())).epoch
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, NoReturn, Protocol

from pydantic_core import from_json

from callboard import messages as m
from callboard.errors import (
    DISCARD_REASONS,
    AlreadyClaimed,
    IdempotencyConflict,
    InvalidRequest,
    NotFound,
    OwnerUnprovable,
    PayloadTooLarge,
    RecordInvalid,
    RequestConflict,
    SeqConflict,
    SessionArchived,
    SessionExists,
    SessionInUse,
    SessionQuarantined,
    StaleEpoch,
    StorageUnavailable,
)
from callboard.fold import TURN_REASONS, SessionFold
from callboard.home import Identity, Verdict
from callboard.ids import SessionRef, check_message_id, fresh_id, parse_ref, workspace_key
from callboard.inbox import Budget, put_data, remove_data
from callboard.limits import (
    FRAME_BYTES_MAX,
    IDEMPOTENCY_KEYS_PER_SESSION_MAX,
    RECORD_BYTES_MAX,
    STORAGE_FULL_PROBE_MS,
)
from callboard.port import PAGE_LINES_MAX, Capability, Page, Subscription, Tell
from callboard.records import (
    InboxAcknowledged,
    RecordData,
    SessionCreated,
    TurnAborted,
    TurnCompleted,
    check_data,
    compact,
    first_chain,
    stamp_inbox_header,
    stamp_op,
    stamp_record,
    timestamp,
)

_TURN_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}\Z", re.ASCII)
_TASK_ENDED: Final = frozenset({"completed", "failed", "cancelled", "interrupted"})


class Owners(Protocol):
    """Knows which processes live."""

    def judge(self, owner: Identity) -> Verdict:
        """Tell whether an owner is alive."""
        ...

    def end(self, owner: Identity) -> bool:
        """End a live owner of an earlier plane; false if it cannot be shown gone."""
        ...


class Processes:
    """Processes that nobody started: each lives until it is said to have ended.

    Attributes:
        ended: nonces of those that are dead.
        doubtful: nonces of those of which nothing can be proven.

    """

    def __init__(self) -> None:
        self.ended: set[str] = set()
        self.doubtful: set[str] = set()

    def start(self, plane_id: str = "plane") -> m.ProcessIdentity:
        """Make up a process.

        Args:
            plane_id: of the plane that it belongs to.

        """
        return m.ProcessIdentity(
            pid=4_242, start_time=1, boot_id="boot", pid_ns=1, nonce=fresh_id(), plane_id=plane_id
        )

    def judge(self, owner: Identity) -> Verdict:
        """See Owners."""
        if owner.nonce in self.doubtful:
            return "unknown"
        return "dead" if owner.nonce in self.ended else "alive"

    def end(self, owner: Identity) -> bool:
        """See Owners."""
        self.ended.add(owner.nonce)
        return True


class _Lease(NamedTuple):
    owner: m.ProcessIdentity
    epoch: int
    held: bool


class _Item(NamedTuple):
    n: int
    size: int
    epoch: int
    commit: int
    item: m.InboxItem


class _Ending(NamedTuple):
    state: Literal["acknowledged", "discarded", "held"]
    turn_id: str | None
    outcome: str | None
    reason: str | None
    seq: int


class _Settled(NamedTuple):
    digest: str
    ending: _Ending


class _Key(NamedTuple):
    commit: int
    first: int
    last: int
    digest: str


@dataclass
class _Session:
    """A session; a frame is made on a copy, which takes its place."""

    ref: SessionRef
    fold: SessionFold = field(default_factory=SessionFold)
    lines: list[bytes] = field(default_factory=list[bytes])
    """Shared by all copies: only a frame that is written adds to it."""
    chain: str = ""
    last_n: int = 0
    op_chain: str = ""
    ts: str = ""
    epoch: int = 0
    lease: _Lease | None = None
    items: dict[str, _Item] = field(default_factory=dict[str, _Item])
    settled: dict[str, _Settled] = field(default_factory=dict[str, _Settled])
    held_by: dict[str, _Ending] = field(default_factory=dict[str, _Ending])
    keys: dict[str, _Key] = field(default_factory=dict[str, _Key])

    def copy(self) -> _Session:
        return replace(
            self,
            fold=self.fold.clone(),
            items=dict(self.items),
            settled=dict(self.settled),
            held_by=dict(self.held_by),
            keys=dict(self.keys),
        )

    def claimed_by(self, message_id: str) -> str | None:
        turn = self.fold.turn
        if turn is not None and message_id in (*turn.input_ids, *turn.applied):
            return turn.turn_id
        return None

    def known(self, message_id: str, digest: str) -> m.KnownInput | None:
        """Tell what became of a message id (INB-6)."""
        settled = self.settled.get(message_id)
        if settled is not None:
            if settled.digest != digest:
                raise RequestConflict
            ending = settled.ending
            if ending.state == "acknowledged":
                return m.KnownInput(item_state="acknowledged", turn_id=ending.turn_id)
            return m.KnownInput(item_state="discarded", turn_id=ending.turn_id)
        live = self.items.get(message_id)
        if live is None:
            return None
        if live.item.digest != digest:
            raise RequestConflict
        turn_id = self.claimed_by(message_id)
        return m.KnownInput(item_state="claimed" if turn_id else "pending", turn_id=turn_id)

    def runnable(self) -> bool:
        fold = self.fold
        if fold.quarantine or fold.archived_at or fold.paused_at:
            return False
        return fold.task_status not in _TASK_ENDED and any(
            one.item.wake and name not in fold.held and name not in self.settled
            for name, one in self.items.items()
        )


class MemoryStorage:
    """A storage that forgets everything when it is dropped (`callboard.port.Storage`).

    Args:
        owners: knows which processes live; without one all live until `owners.end`.
        now: gives microseconds since the epoch.
        plane_id: of the plane whose owners count as present.

    """

    def __init__(
        self,
        owners: Owners | None = None,
        now: Callable[[], int] = lambda: time.time_ns() // 1_000,
        plane_id: str = "plane",
    ) -> None:
        self.owners: Owners = owners or Processes()
        self._now, self._plane_id = now, plane_id
        self._sessions: dict[str, _Session] = {}
        self._commit = 0
        self._gateway = self._plane = 0
        self._gateway_nonce = ""
        self._plane_of = ""
        self._followers: dict[str, dict[_Follower, None]] = {}
        self._artifacts: dict[str, dict[str, bytes]] = {}
        self._open = True

    @property
    def capabilities(self) -> frozenset[Capability]:
        """See Storage."""
        return frozenset(("artifacts",))

    def close(self) -> None:
        """See Storage."""
        self._open = False

    # --- what all of them check ---------------------------------------------------------------

    def _check_open(self) -> None:
        if not self._open:
            raise StorageUnavailable(retry_after_ms=STORAGE_FULL_PROBE_MS)

    def _check_gateway(self, epoch: int) -> None:
        self._check_open()
        if epoch != self._gateway:
            raise StaleEpoch

    def _find(self, text: str) -> _Session:
        self._check_open()
        parse_ref(text)
        found = self._sessions.get(text)
        if found is None:
            raise NotFound
        return found

    def _startable(self, text: str) -> _Session:
        found = self._find(text)
        if found.fold.archived_at is not None:
            raise SessionArchived(session=text)
        if found.fold.quarantine is not None:
            raise SessionQuarantined(reason=found.fold.quarantine.reason)
        return found

    def _standing(self, lease: _Lease | None, nonce: str = "") -> Literal["free", "mine", "held"]:
        """Judge a lease (table 3.2 of the runtime page)."""
        if lease is None or not lease.held:
            return "free"
        if lease.owner.nonce == nonce:
            return "mine"
        owner = Identity(**lease.owner.model_dump())
        verdict = self.owners.judge(owner)
        if verdict == "alive" and lease.owner.plane_id == self._plane_id:
            return "held"
        if verdict == "dead" or (verdict == "alive" and self.owners.end(owner)):
            return "free"
        raise OwnerUnprovable(pid=lease.owner.pid, epoch=lease.epoch)

    # --- epochs of the plane ------------------------------------------------------------------

    def hello_gateway(self, asked: m.GatewayHello) -> m.GatewayEpoch:
        """See Storage."""
        self._check_open()
        if asked.nonce != self._gateway_nonce:
            self._commit += 1
            self._gateway += 1
            self._gateway_nonce = asked.nonce
        found = {text: one for text, one in self._sessions.items() if self._wakeable(one)}
        turns = [text for text, one in found.items() if one.fold.turn is not None]
        inputs = [t for t, one in found.items() if one.fold.turn is None and one.runnable()]
        return m.GatewayEpoch(epoch=self._gateway, waiting=turns + inputs)

    def _wakeable(self, one: _Session) -> bool:
        if one.fold.quarantine is not None or one.fold.archived_at is not None:
            return False
        try:
            return self._standing(one.lease) == "free"
        except OwnerUnprovable:
            return False

    def hello_plane(self, asked: m.PlaneHello) -> m.PlaneEpoch:
        """See Storage."""
        self._check_open()
        if asked.plane_id != self._plane_of:
            self._commit += 1
            self._plane, self._plane_of = self._plane + 1, asked.plane_id
        return m.PlaneEpoch(epoch=self._plane)

    # --- leases -------------------------------------------------------------------------------

    def acquire(self, asked: m.Acquire) -> m.LeaseGranted:
        """See Storage."""
        session = self._startable(asked.session)
        standing = self._standing(session.lease, asked.owner.nonce)
        if standing == "held":
            assert session.lease is not None
            raise SessionInUse(pid=session.lease.owner.pid, epoch=session.lease.epoch)
        if standing == "free":
            self._commit += 1
            epoch = session.epoch + 1
            session = replace(session, epoch=epoch, lease=_Lease(asked.owner, epoch, True))
            self._sessions[asked.session] = session
        return _grant(asked.session, session)

    def release(self, asked: m.Release) -> m.Ok:
        """See Storage."""
        session = self._find(asked.session)
        lease = session.lease
        if lease is None or (lease.epoch, lease.owner.nonce) != (asked.epoch, asked.nonce):
            raise StaleEpoch
        if lease.held:
            self._commit += 1
            self._sessions[asked.session] = replace(session, lease=lease._replace(held=False))
        return m.Ok()

    # --- writing ------------------------------------------------------------------------------

    def create(self, asked: m.Create) -> m.Created:
        """See Storage."""
        self._check_gateway(asked.gateway_epoch)
        ref, record = parse_ref(asked.session), asked.record
        found = self._sessions.get(asked.session)
        if found is not None:
            if record.id not in found.keys:
                raise SessionExists
            if not _same_creation(check_data(record.type, record.data), found.fold.created):
                raise IdempotencyConflict
            return m.Created(session=asked.session, fresh=False)
        data = check_data(record.type, record.data)
        if not isinstance(data, SessionCreated):
            raise RecordInvalid(type=record.type, field="type")
        if data.session_id != ref.session_id:
            raise RecordInvalid(type=data.type, field="session_id")
        if workspace_key(data.workspace) != ref.workspace_key:
            raise RecordInvalid(type=data.type, field="workspace")
        if any(_twins(ref, one.ref) for one in self._sessions.values()):
            raise SessionExists
        frame = self._frame(_Session(ref, chain=first_chain(asked.session)))
        frame.add_records([record])
        self._write(frame, record.id, [record])
        return m.Created(session=asked.session, fresh=True)

    def append(self, asked: m.Append) -> m.Appended:
        """See Storage."""
        session = self._find(asked.session)
        lease = session.lease
        if lease is None or not lease.held or lease.epoch != asked.epoch:
            raise StaleEpoch
        puts = [op.item for op in asked.inbox if isinstance(op, m.PutOp)]
        removes = [op.message_id for op in asked.inbox if isinstance(op, m.RemoveOp)]
        _check_key(asked, puts, removes)
        if (again := _repeated(session, asked, puts, removes)) is not None:
            return again
        first = session.fold.seq + 1
        if asked.first_seq not in (None, first):
            raise SeqConflict(expected=first)
        frame = self._frame(session)
        live = [frame.put(item) for item in puts]
        settles = frame.add_records(asked.records)
        _check_removes(session, removes, settles)
        frame.remove(removes)
        commit = self._write(frame, asked.key, asked.records)
        return m.Appended(
            commit=commit,
            first_seq=first,
            last_seq=frame.session.fold.seq,
            n=[one.n for one in live],
            sizes=[one.size for one in live],
        )

    def accept(self, asked: m.Accept) -> m.Accepted | m.LeaseHeld:
        """See Storage."""
        self._check_gateway(asked.gateway_epoch)
        check_message_id(asked.item.message_id)
        session = self._startable(asked.session)
        if self._standing(session.lease) == "held":
            assert session.lease is not None
            return m.LeaseHeld(owner=session.lease.owner, epoch=session.lease.epoch)
        known = session.known(asked.item.message_id, asked.item.digest)
        if known is not None:
            return m.Accepted(
                duplicate=True,
                item_state=known.item_state,
                turn_id=known.turn_id,
                queued=len(session.items),
                runnable=session.fold.turn is not None or session.runnable(),
            )
        frame = self._frame(session)
        frame.put(asked.item)
        self._write(frame)
        return m.Accepted(
            duplicate=False,
            item_state="pending",
            queued=len(frame.session.items),
            runnable=asked.item.wake and session.fold.paused_at is None,
        )

    def discard(self, asked: m.DiscardInput) -> m.CancelResult:
        """See Storage."""
        self._check_gateway(asked.gateway_epoch)
        session = self._find(asked.session)
        if self._standing(session.lease) == "held":
            raise SessionInUse
        live = session.items.get(asked.message_id)
        if live is None:
            settled = session.settled.get(asked.message_id)
            if settled is None:
                return m.CancelResult(status="not_found")
            told = {"turn_id": settled.ending.turn_id, "outcome": settled.ending.outcome}
            return m.CancelResult.model_validate({"status": "already_terminal", **told})
        if session.claimed_by(asked.message_id) is not None:
            raise AlreadyClaimed
        items = [{"message_id": asked.message_id, "digest": live.item.digest}]
        frame = self._frame(session)
        frame.add_records([_record("inbox_acknowledged", reason=asked.reason, items=items)])
        frame.remove([asked.message_id])
        self._write(frame)
        return m.CancelResult(status="cancelled")

    def quarantine(self, asked: m.Quarantine) -> m.Ok:
        """See Storage."""
        self._check_open()
        if asked.plane_epoch != self._plane:
            raise StaleEpoch
        session = self._find(asked.session)
        if session.fold.quarantine is None:
            since = {"reason": asked.reason, "since_at": self._now()}
            self._update(session, quarantine=since)
        return m.Ok()

    def unquarantine(self, asked: m.Unquarantine) -> m.Ok:
        """See Storage."""
        self._check_gateway(asked.gateway_epoch)
        session = self._find(asked.session)
        if session.fold.quarantine is not None:
            self._update(session, quarantine=None)
        return m.Ok()

    def _update(self, session: _Session, **data: object) -> None:
        frame = self._frame(session)
        frame.add_records([_record("session_updated", **data, updated_at=self._now())])
        self._write(frame)

    def _frame(self, session: _Session) -> _Frame:
        return _Frame(session.copy(), self._commit + 1, timestamp(self._now()))

    def _write(
        self, frame: _Frame, key: str | None = None, records: Iterable[m.NewRecord] = ()
    ) -> int:
        """Commit a frame: from here on it is there."""
        if frame.bytes > FRAME_BYTES_MAX:
            raise PayloadTooLarge(limit="FRAME_BYTES_MAX", maximum=FRAME_BYTES_MAX)
        session, first = frame.session, frame.first_seq
        self._commit = frame.commit
        session.lines.extend(frame.lines)
        if frame.lines and key is not None:
            session.keys[key] = _Key(frame.commit, first, session.fold.seq, _digest(records))
            while len(session.keys) > IDEMPOTENCY_KEYS_PER_SESSION_MAX:
                del session.keys[next(iter(session.keys))]
        self._sessions[str(session.ref)] = session
        for follower in list(self._followers.get(str(session.ref), ())):
            follower.give(first, frame.lines)
        return frame.commit

    # --- reading ------------------------------------------------------------------------------

    def lookup(self, asked: m.Lookup) -> m.LookedUp:
        """See Storage."""
        session = self._find(asked.session)
        return m.LookedUp(known=session.known(check_message_id(asked.message_id), asked.digest))

    def outcome(self, asked: m.AwaitInput) -> m.WaitOutcome | None:
        """See Storage."""
        session = self._find(asked.session)
        settled = session.settled.get(asked.message_id)
        if settled is not None:
            return _outcome(asked.message_id, settled.ending)
        if asked.message_id not in session.items:
            raise NotFound
        held = session.held_by.get(asked.message_id)
        if held is None or asked.message_id not in session.fold.held or session.fold.turn:
            return None
        return _outcome(asked.message_id, held)

    def read(self, session: str, from_seq: int = 1, lines_max: int = PAGE_LINES_MAX) -> Page:
        """See Storage."""
        self._check_open()
        if from_seq < 1:
            raise InvalidRequest(field="from_seq", reason="out_of_range")
        if not 1 <= lines_max <= PAGE_LINES_MAX:
            raise InvalidRequest(field="lines_max", reason="out_of_range")
        stored = self._find(session).lines
        lines = tuple(stored[from_seq - 1 : from_seq - 1 + lines_max])
        behind = from_seq + len(lines)
        return Page(from_seq, lines, (), behind, behind > len(stored))

    def subscribe(self, asked: m.Subscribe, tell: Tell) -> Subscription:
        """See Storage."""
        stored = self._find(asked.session).lines
        followers = self._followers.setdefault(asked.session, {})
        follower = _Follower(asked.session, asked.from_seq, tell, followers)
        followers[follower] = None
        follower.give(1, stored)
        return follower

    # --- optional: artifacts ------------------------------------------------------------------

    def store_artifact(self, session: str, gateway_epoch: int, content: bytes) -> str:
        """See ArtifactStorage."""
        self._check_gateway(gateway_epoch)
        self._find(session)
        name = hashlib.sha256(content).hexdigest()
        self._artifacts.setdefault(session, {})[name] = bytes(content)
        return name

    def fetch_artifact(self, session: str, name: str) -> bytes:
        """See ArtifactStorage."""
        self._find(session)
        found = self._artifacts.get(session, {}).get(name)
        if found is None:
            raise NotFound
        return found


class _Follower:
    """Somebody who follows a session: everything it wants from `next_seq` on is still to come."""

    def __init__(self, text: str, next_seq: int, tell: Tell, others: dict[_Follower, None]) -> None:
        self.text, self.next_seq, self.tell, self.others = text, next_seq, tell, others

    def give(self, first: int, lines: Iterable[bytes]) -> None:
        wanted = list(lines)[max(0, self.next_seq - first) :]
        if wanted:
            first = self.next_seq
            self.next_seq += len(wanted)
            told = m.Records(
                session=self.text, first_seq=first, last_seq=self.next_seq - 1, lines=wanted
            )
            self.tell(told)

    def close(self) -> None:
        """See Subscription."""
        self.others.pop(self, None)


class _Frame:
    """One commit in the making, on a copy of its session."""

    def __init__(self, session: _Session, commit: int, ts: str) -> None:
        self.session, self.commit = session, commit
        session.ts = self.ts = max(ts, session.ts)
        self.first_seq = session.fold.seq + 1
        self.lines: list[bytes] = []
        self.bytes = 0
        self._settles: set[str] = set()

    # --- records

    def add_records(self, records: Iterable[m.NewRecord]) -> frozenset[str]:
        """Check and stamp records; gives the ids of the inputs that they settle."""
        acked: InboxAcknowledged | None = None
        applied = frozenset[str]()
        for record in records:
            data = _checked(record)
            if acked is not None:
                _check_terminal(acked, data, applied)
            before, acked = acked, None
            if isinstance(data, InboxAcknowledged):
                self._check_acknowledged(data)
                if data.reason in TURN_REASONS:
                    acked, applied = data, self._applied()
            self.session.fold.admit(record.turn_id, data, commit=self.commit)
            self._stamp(record)
            self._settle(before, data)
        if acked is not None:
            _invalid(acked, "turn_id")
        return frozenset(self._settles)

    def _applied(self) -> frozenset[str]:
        fold = self.session.fold
        return frozenset((*fold.applied, *(fold.turn.applied if fold.turn else ())))

    def _check_acknowledged(self, data: InboxAcknowledged) -> None:
        if data.reason not in TURN_REASONS and data.reason not in DISCARD_REASONS:
            _invalid(data, "reason")
        names = [one.message_id for one in data.items]
        for one in data.items:
            live = self.session.items.get(one.message_id)
            if live is None or live.item.digest != one.digest:
                _invalid(data, "items")
        if len(set(names)) != len(names) or any(name in self.session.settled for name in names):
            _invalid(data, "items")

    def _stamp(self, record: m.NewRecord) -> None:
        session = self.session
        line, session.chain = stamp_record(
            session.ref,
            seq=session.fold.seq,
            record_id=record.id,
            commit=self.commit,
            epoch=session.epoch,
            ts=self.ts,
            kind=record.type,
            turn_id=record.turn_id,
            data=record.data,
            before=session.chain,
        )
        if len(line) > RECORD_BYTES_MAX:
            raise PayloadTooLarge(limit="RECORD_BYTES_MAX", maximum=RECORD_BYTES_MAX)
        self.lines.append(line)
        self.bytes += len(line)

    def _settle(self, acked: InboxAcknowledged | None, data: RecordData) -> None:
        session, seq = self.session, self.session.fold.seq
        if isinstance(data, InboxAcknowledged):
            if data.reason in DISCARD_REASONS:
                self._end(data, _Ending("discarded", data.turn_id, None, data.reason, seq))
        elif isinstance(data, TurnCompleted | TurnAborted):
            ending = _Ending("acknowledged", data.turn_id, data.outcome, _reason(data), seq)
            if acked is not None:
                self._end(acked, ending)
            for name in data.claimed_input_ids:
                if name in session.fold.held:
                    session.held_by[name] = ending._replace(state="held")

    def _end(self, acked: InboxAcknowledged, ending: _Ending) -> None:
        for one in acked.items:
            self.session.settled[one.message_id] = _Settled(one.digest, ending)
            self._settles.add(one.message_id)

    # --- inbox

    def put(self, item: m.InboxItem) -> _Item:
        """Put an input, if it fits (INB-7)."""
        session = self.session
        check_message_id(item.message_id)
        try:
            data = put_data(item)
        except (ValueError, RecursionError):
            raise InvalidRequest(field="metadata", reason="encoding") from None
        if not session.op_chain:
            header, session.op_chain = stamp_inbox_header(
                session.ref, generation="0" * 36, next_n=session.last_n + 1
            )
            self.bytes += len(header)
        size = len(self._op("put", data))
        live = Budget((one.item.origin, one.size) for one in session.items.values())
        refusal = live.refuse(item.origin, size)
        if refusal is not None:
            raise refusal
        found = _Item(session.last_n, size, session.epoch, self.commit, item)
        session.items[item.message_id] = found
        return found

    def remove(self, names: Iterable[str]) -> None:
        """Take inputs out."""
        for name in names:
            del self.session.items[name]
            self.session.held_by.pop(name, None)
            self._op("remove", remove_data(name))

    def _op(self, op: str, data: bytes) -> bytes:
        session = self.session
        session.last_n += 1
        line, session.op_chain = stamp_op(
            session.ref,
            n=session.last_n,
            commit=self.commit,
            epoch=session.epoch,
            ts=self.ts,
            op=op,
            data=data,
            before=session.op_chain,
        )
        self.bytes += len(line)
        return line


# --- rules of a frame --------------------------------------------------------------------------


def _checked(record: m.NewRecord) -> RecordData:
    """Check a new record by itself (DUR-4)."""
    if record.turn_id is not None and not _TURN_ID.match(record.turn_id):
        raise RecordInvalid(type=record.type, field="turn_id")
    data = check_data(record.type, record.data)
    try:
        from_json(record.data, allow_inf_nan=False)
    except ValueError:
        raise RecordInvalid(type=record.type, field="data") from None
    if b"\n" in record.data:
        raise RecordInvalid(type=record.type, field="data")
    return data


def _check_terminal(acked: InboxAcknowledged, data: RecordData, applied: frozenset[str]) -> None:
    """Check that a turn's acknowledgement is directly before its terminal (RUN-4, INB-4)."""
    if not isinstance(data, TurnCompleted | TurnAborted):
        _invalid(acked, "turn_id")
    ids = {one.message_id for one in acked.items}
    allowed = set(data.claimed_input_ids)
    if isinstance(data, TurnAborted):
        allowed &= applied
    reason = "completed" if isinstance(data, TurnCompleted) else "aborted"
    if acked.turn_id not in (None, data.turn_id) or acked.reason != reason or ids - allowed:
        _invalid(acked, "items")


def _check_key(asked: m.Append, puts: list[m.InboxItem], removes: list[str]) -> None:
    names = [one.message_id for one in puts]
    ids = [one.id for one in asked.records]
    expected = next(iter(ids or names or removes), None)
    if asked.key != expected:
        raise InvalidRequest(field="key", reason="format")
    if len(set(ids)) != len(ids):
        raise RecordInvalid(type=asked.records[0].type, field="id")
    if len(set(names)) != len(names):
        raise InvalidRequest(field="message_id", reason="duplicate")


def _check_removes(session: _Session, removes: list[str], settles: frozenset[str]) -> None:
    """Check that what leaves is what this frame settles, or what an earlier one has (INB-5)."""
    gone = set(removes)
    late = all(name in session.items and name in session.settled for name in gone - settles)
    if len(gone) != len(removes) or settles - gone or not late:
        raise RecordInvalid(type="remove", field="message_id")


def _repeated(
    session: _Session, asked: m.Append, puts: list[m.InboxItem], removes: list[str]
) -> m.Appended | None:
    """Answer a frame, or an input, that is there already (DUR-6, INB-6)."""
    fold = session.fold
    key = session.keys.get(asked.key) if asked.records else None
    if key is not None and key.digest != _digest(asked.records):
        raise IdempotencyConflict
    known = [session.known(item.message_id, item.digest) for item in puts]
    if key is not None:
        return _again(session, puts, key.commit, key.first, key.last)
    if not puts:
        done = all(name in session.settled and name not in session.items for name in removes)
        if asked.records or not done:
            return None
        return _again(session, puts, fold.commit, fold.seq + 1, fold.seq)
    first = next((one for one in known if one is not None), None)
    if first is None:
        return None
    live = [session.items.get(item.message_id) for item in puts]
    if not asked.records and all(one is not None and one.epoch == asked.epoch for one in live):
        commit = live[0].commit if live[0] else 0
        return _again(session, puts, commit, fold.seq + 1, fold.seq)
    found = _again(session, [], fold.commit, fold.seq + 1, fold.seq)
    return found.model_copy(update={"known": first})


def _again(
    session: _Session, puts: list[m.InboxItem], commit: int, first: int, last: int
) -> m.Appended:
    live = [session.items.get(item.message_id) for item in puts]
    return m.Appended(
        commit=commit,
        first_seq=first,
        last_seq=last,
        n=[one.n if one else 0 for one in live],
        sizes=[one.size if one else 0 for one in live],
    )


def _digest(records: Iterable[m.NewRecord]) -> str:
    return repr([(one.id, one.type, one.turn_id, one.data) for one in records])


def _same_creation(again: RecordData, first: SessionCreated | None) -> bool:
    """Tell whether a creation asks for what is there; when it was asked does not count (IDN-8)."""
    if first is None or not isinstance(again, SessionCreated):
        return False
    owner = again.owner.model_copy(update={"created_at": first.owner.created_at})
    return again.model_copy(update={"created_at": first.created_at, "owner": owner}) == first


def _twins(one: SessionRef, other: SessionRef) -> bool:
    """Tell two ids of a workspace that differ in case only (IDN-6)."""
    return (
        one.workspace_key == other.workspace_key
        and one.session_id != other.session_id
        and one.session_id.casefold() == other.session_id.casefold()
    )


def _record(kind: str, **data: object) -> m.NewRecord:
    return m.NewRecord(id=fresh_id(), type=kind, data=compact(data))


def _invalid(data: RecordData, name: str) -> NoReturn:
    raise RecordInvalid(type=data.type, field=name)


def _reason(data: TurnCompleted | TurnAborted) -> str | None:
    if isinstance(data, TurnCompleted):
        return None
    return data.failure.code if data.failure is not None else data.cause


# --- answers --------------------------------------------------------------------------


def _outcome(message_id: str, ending: _Ending) -> m.WaitOutcome:
    return m.WaitOutcome.model_validate(
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


def _grant(text: str, session: _Session) -> m.LeaseGranted:
    """Say all that a new owner needs (runtime page, 5.1)."""
    fold = session.fold
    if fold.created is None:
        raise NotFound
    turn, live = fold.turn, session.items
    return m.LeaseGranted(
        session=text,
        epoch=session.epoch,
        last_seq=fold.seq,
        workspace=fold.created.workspace,
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
            m.PendingItem(
                item=one.item,
                n=one.n,
                size_bytes=one.size,
                attempts=fold.attempts.get(name, 0),
                held=name in fold.held,
            )
            for name, one in live.items()
        ],
        applied_ids=[
            name
            for name, turn_id in fold.applied.items()
            if name in live and turn_id != (turn.turn_id if turn else "")
        ],
        acknowledged_ids=[name for name in live if name in session.settled],
    )


__all__ = ["MemoryStorage", "Owners", "Processes"]
