"""What the gateway remembers of a request until it is answered, and where its messages go.

Pure. `Ports` is all that the desk can do to the world; the actor gives it sockets, a test a list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from callboard.messages import Body, InboxItem
from callboard.wire import Header

Where = Literal["here", "held", "session", "storage", "supervisor"]
BUCKET_MS = 50
"""Deadlines are kept this coarse: none is missed, and none costs more than a set entry."""


class LongText(NamedTuple):
    """Text of a send that goes into an artifact before the send is admitted (ART-2)."""

    artifact: dict[str, object]
    """Its reference, as it stands in the inbox item."""
    data: bytes | None
    """None if the client sent an excerpt with its reference."""


class Ports(Protocol):
    """What can be sent. None of it blocks or fails."""

    def client(self, conn: int, header: Header, body: bytes) -> None:
        """Send to a client."""
        ...

    def close(self, conn: int) -> None:
        """End a client's connection after what was sent."""
        ...

    def backlog(self, conn: int) -> int:
        """Count the bytes that a client has not read yet."""
        ...

    def peer(self, routing_id: str, header: Header, body: bytes) -> None:
        """Send to a session or to the supervisor."""
        ...

    def storage(self, header: Header, body: bytes) -> None:
        """Send to storage."""
        ...


@dataclass(slots=True, eq=False)
class Client:
    """A connection to the door."""

    conn: int
    state: Literal["new", "greeted", "open", "closed"] = "new"
    """greeted: its hello was good, and the welcome waits for the gateway's epoch."""
    hello: str = ""
    pending: dict[str, Request] = field(default_factory=dict[str, "Request"])
    """Its unanswered requests, by the ids that it gave them."""
    early: list[bytes] = field(default_factory=list[bytes])
    """Messages behind a hello that waits."""
    bad: deque[int] = field(default_factory=deque[int])
    """When its last refusals were."""


@dataclass(slots=True, eq=False)
class Request:
    """A client's request."""

    id: str
    client: Client | None
    """None once the client is gone: it is carried out, and answered to nobody (TEX-16)."""
    name: str
    """The id that the client gave it."""
    body: Body
    weight: int
    """Its encoded bytes (ADM-3)."""
    deadline: int
    """Monotonic milliseconds; 0 for none, which only a watch has."""
    session: str = ""
    where: Where = "here"
    asked: str = ""
    """The id of its question to storage."""
    placed: bool = False
    """It has a place in the activation queue."""
    item: InboxItem | None = None
    """Of a send: the inbox item."""
    long_text: LongText | None = None
    """Of a send: what storage has not made durable yet."""
    permit: bool = False
    """Of a send: a turn permit went along with it."""
    next_seq: int = 0
    """Of a watch: the first record that has not come."""


class Deadlines:
    """Names and the times at which they are due."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[str, None]] = {}
        self._heap: list[int] = []

    def add(self, name: str, at: int) -> None:
        """Remember a name until a time in milliseconds."""
        key = -(-at // BUCKET_MS)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = {}
            heappush(self._heap, key)
        bucket[name] = None

    def remove(self, name: str, at: int) -> None:
        """Forget a name that was added with this time."""
        key = -(-at // BUCKET_MS)
        bucket = self._buckets.get(key)
        if bucket is not None:
            bucket.pop(name, None)
            if not bucket:
                del self._buckets[key]

    def next(self) -> int | None:
        """Give the first time at which something is due."""
        while self._heap and self._heap[0] not in self._buckets:
            heappop(self._heap)
        return self._heap[0] * BUCKET_MS if self._heap else None

    def take(self, now: int) -> list[str]:
        """Take what is due."""
        due: list[str] = []
        while (at := self.next()) is not None and at <= now:
            due.extend(self._buckets.pop(heappop(self._heap)))
        return due


Context = TypeVar("Context")


class Asks(Generic[Context]):
    """Questions to a peer without an answer yet, in order; said again when it is there again.

    Args:
        prefix: makes the ids differ from those of every other incarnation.
        send: sends one.

    """

    def __init__(self, prefix: str, send: Callable[[Header, bytes], None]) -> None:
        self._prefix = prefix
        self._send = send
        self._pending: dict[str, tuple[Header, bytes, Context]] = {}
        self._unsent: dict[str, None] = {}
        self._count = 0
        self.is_up = False

    def __len__(self) -> int:
        return len(self._pending)

    def ask(self, kind: str, body: bytes, context: Context) -> str:
        """Ask something.

        Returns:
            The question's id, which is the `cid` of its answer.

        """
        self._count += 1
        header = Header(kind, f"{self._prefix}{self._count:x}")
        self._pending[header.id] = (header, body, context)
        if self.is_up:
            self._send(header, body)
        return header.id

    def answer(self, cid: str) -> Context | None:
        """Take out what was answered; none if it was before, or was dropped."""
        found = self._pending.pop(cid, None)
        return found[2] if found is not None else None

    def peek(self, cid: str) -> Context | None:
        """Look at what gets further answers."""
        found = self._pending.get(cid)
        return found[2] if found is not None else None

    def drop(self, cid: str) -> None:
        """Forget a question; its answer will find nothing."""
        self._pending.pop(cid, None)

    def contexts(self) -> Iterator[Context]:
        """Give what is asked about, in order."""
        return (context for _, _, context in list(self._pending.values()))

    def up(self) -> None:
        """Say everything again, in order: the peer is there."""
        self.is_up = True
        self._unsent.clear()
        for header, body, _ in list(self._pending.values()):
            self._send(header, body)

    def lost(self) -> None:
        """Keep what is asked from now on until the peer is there again."""
        self.is_up = False

    def refused(self, cid: str) -> None:
        """Note that a question found no room on its way."""
        if cid in self._pending:
            self._unsent[cid] = None

    @property
    def has_unsent(self) -> bool:
        """Tell whether `retry` has something to do."""
        return bool(self._unsent)

    def retry(self) -> None:
        """Say again what found no room."""
        unsent, self._unsent = self._unsent, {}
        for cid in unsent:
            if self.is_up and (found := self._pending.get(cid)) is not None:
                self._send(found[0], found[1])
