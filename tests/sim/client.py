"""Clients: the real sans-I/O door, a plan of work, and what they were promised (O1)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from callboard import messages as m
from callboard.door import (
    Answered,
    Door,
    Refused,
    Shut,
    Streamed,
    cancel_body,
    create_body,
    retry_delay,
    send_body,
)
from callboard.ids import SessionRef, workspace_key
from callboard.messages import BusyMode
from tests.sim.gateway import Connection, Data, Lost
from tests.sim.kernel import MS, SECOND, Process, Violation

if TYPE_CHECKING:
    from tests.sim.world import World

WORKSPACE: Final = "/u/project"
KEY: Final = workspace_key(WORKSPACE)
_WRONG: Final = frozenset(
    {
        "session_damaged",
        "inbox_corrupt",
        "request_conflict",
        "invalid_request",
        "not_found",
        "internal",
        "session_exists",
        "idempotency_conflict",
        "owner_unprovable",
    }
)
"""No client of this world may ever get one of these."""


def ref(session_id: str) -> str:
    """Give a session's reference."""
    return str(SessionRef(KEY, session_id))


class Begin(NamedTuple):
    """The client starts."""


class Act(NamedTuple):
    """It is time for a piece of work."""

    work: Work


class Tick(NamedTuple):
    """A deadline may have come."""


class Connect(NamedTuple):
    """It is time to try to connect."""


@dataclass(eq=False)
class Work:
    """One thing that a client wants, until it has it."""

    kind: str
    session: str
    message_id: str = ""
    text: str = ""
    mode: BusyMode = "steer"
    again: int = 0
    """How often it is sent once more after its receipt."""
    done: bool = False
    tries: int = 0


@dataclass
class Promised:
    """A receipt, kept outside of the disk under test."""

    session: str
    message_id: str
    text: str
    settled: str = ""
    """What a wait said, if one was answered."""


@dataclass
class Watched:
    """What a watch has shown."""

    lines: dict[int, bytes] = field(default_factory=dict[int, bytes])
    next_seq: int = 1


class Client(Process):
    """One program that uses the plane; it never dies, its connections do."""

    role = "client"

    def __init__(self, world: World, name: str, works: Sequence[tuple[int, Work]]) -> None:
        super().__init__(world.kernel, name, world.ended)
        self.world, self.works = world, works
        self.door = Door(name)
        self.promises: dict[tuple[str, str], Promised] = {}
        self.watched: dict[str, Watched] = {}
        self.open = [work for _, work in works]
        self._connection: Connection | None = None
        self._attempts = 0
        self._count = 0
        self._asked: dict[str, Work] = {}
        self._ticks_at = -1
        self.post(Begin())

    @property
    def is_done(self) -> bool:
        """Tell whether it has all that it wants."""
        return all(work.done or work.kind == "watch" for work in self.open)

    def now(self) -> float:
        """Give the time in seconds, as the door has it."""
        return self.kernel.now / SECOND

    # --- events ---

    def handle(self, events: Sequence[object]) -> None:
        for event in events:
            match event:
                case Begin():
                    self._connect()
                    for at, work in self.works:
                        self.later(at, Act(work))
                case Act(work):
                    self._do(work)
                case Connect():
                    self._connect()
                case Tick():
                    self._ticks_at = -1
                    self._hear(self.door.expire(self.now()))
                case Data(conn, data):
                    if self._is(conn):
                        self._hear(self.door.receive(data, self.now()))
                case Lost(conn):
                    if self._is(conn):
                        self._lose()
                case _:
                    pass
        self._flush()

    def _is(self, conn: int) -> bool:
        return self._connection is not None and self._connection.conn == conn

    def _connect(self) -> None:
        if self._connection is not None:
            return
        self._connection = self.world.connect(self)
        if self._connection is None:
            self._retry()
        else:
            self.door.connected(self.world.token)

    def _retry(self) -> None:
        self._attempts += 1
        delay = retry_delay(self._attempts, self._luck.random())
        self.later(max(1, int(delay * 1_000)), Connect())

    def _lose(self) -> None:
        self._connection = None
        self.door.lost()
        self._retry()

    def _flush(self) -> None:
        if self._connection is not None:
            self._connection.to_gateway(self.door.output())
        due = self.door.due()
        if due is not None:
            at = int(due * SECOND)
            if self._ticks_at < self.kernel.now or at < self._ticks_at:
                self._ticks_at = max(at, self.kernel.now)
                self.kernel.at(max(0, at - self.kernel.now) + MS, self.post, Tick())

    # --- work ---

    def _do(self, work: Work) -> None:
        if work.done:
            return
        if work.kind != "create_session" and work.session not in self.world.sessions:
            self.later(100, Act(work))
            return
        if work.kind == "wait" and (work.session, work.message_id) not in self.promises:
            self.later(100, Act(work))
            return
        self._count += 1
        request = f"{self.name}-{self._count}"
        self._asked[request] = work
        body: m.Body
        seconds: float | None = self._luck.choice((2.0, 5.0, 10.0))
        match work.kind:
            case "create_session":
                key = self.world.key_of(work.session)
                body = create_body(
                    key=key,
                    workspace=WORKSPACE,
                    session_id=work.session,
                    agent="sim",
                    title=None,
                    model=None,
                    settings=None,
                )
            case "send":
                body = send_body(ref(work.session), work.text, work.message_id, work.mode, None)
            case "wait":
                body, seconds = m.Wait(session=ref(work.session), message_id=work.message_id), 30.0
            case "watch":
                watched = self.watched.setdefault(work.session, Watched())
                body, seconds = m.Watch(session=ref(work.session), from_seq=watched.next_seq), None
            case "cancel":
                body = cancel_body(ref(work.session), None, None, keep_input=work.text == "keep")
            case _:
                body = m.ReleaseSession(session=ref(work.session))
        deadline = None if seconds is None else self.now() + seconds
        self.door.ask(request, work.kind, body, self.now(), deadline)

    def want(self, work: Work) -> None:
        """Take on something more."""
        self.open.append(work)
        self.post(Act(work))

    def _hear(self, events: Sequence[object]) -> None:
        for event in events:
            match event:
                case Answered(request, body):
                    work = self._asked.pop(request, None)
                    if work is not None:
                        self._answered(work, body)
                case Refused(request, error):
                    work = self._asked.pop(request, None)
                    if work is not None:
                        self.kernel.log(self.name, work.kind, work.message_id, error.code)
                        self._refused(work, error.code, str(error.to_wire()))
                case Streamed(request, records):
                    work = self._asked.get(request)
                    if work is not None:
                        self.take_records(work, records)
                case Shut():
                    if self._connection is not None:
                        self._connection.close()
                case _:
                    pass
        if self.door.is_open:
            self._attempts = 0

    def _refused(self, work: Work, code: str, what: str) -> None:
        if code in _WRONG:
            raise Violation("client", f"{work.kind} {work.session} {work.message_id} got {what}")
        if work.kind == "cancel":
            work.done = True
            return
        work.tries += 1
        if code == "session_quarantined":
            self.want(Work("release_session", work.session))
        self.later(self._luck.randint(1, 20) * 50, Act(work))

    def _answered(self, work: Work, body: m.Body) -> None:
        match body:
            case m.Receipt():
                self.take_receipt(work, body)
            case m.WaitOutcome():
                promised = self.promises[work.session, work.message_id]
                if body.message_id != work.message_id:
                    raise Violation("client", f"a wait for {work.message_id} got {body}")
                promised.settled = body.input_disposition
                work.done = True
            case m.Created():
                work.done = True
                self.world.created(work.session)
            case _:
                work.done = True

    def take_receipt(self, work: Work, receipt: m.Receipt) -> None:
        """Keep a receipt, or find that it cannot be."""
        key = work.session, work.message_id
        self.kernel.log(self.name, "receipt", work.message_id, receipt.duplicate)
        if not receipt.accepted or receipt.message_id != work.message_id:
            raise Violation("receipts", f"{work.message_id} got {receipt}")
        if key not in self.promises:
            self.promises[key] = Promised(work.session, work.message_id, work.text)
            self.world.count("receipts")
        elif not receipt.duplicate:
            raise Violation("receipts", f"{work.message_id} is new for the second time")
        if work.again:
            work.again -= 1
            self.later(self._luck.randint(0, 3_000), Act(work))
        else:
            work.done = True

    def take_records(self, work: Work, records: m.Records) -> None:
        """Keep lines of a watch: without a gap, and never another line of the same number."""
        watched = self.watched[work.session]
        if records.first_seq > watched.next_seq:
            raise Violation("watch", f"{work.session}: {records.first_seq} after a gap")
        for seq, line in enumerate(records.lines, records.first_seq):
            if watched.lines.setdefault(seq, line) != line:
                raise Violation("watch", f"{work.session}: line {seq} is another one")
            json.loads(line)
        watched.next_seq = max(watched.next_seq, records.last_seq + 1)
