"""The ledger: requests that are not answered, their deadlines, and their places in the queue.

Pure. A request is opened once and closed once; closing it is what answering it begins with, so that
no second answer can follow (habit 6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from callboard import messages
from callboard.actors.gateway.places import Places
from callboard.actors.gateway.requests import Client, Deadlines, Ports, Request
from callboard.errors import CallboardError, DeadlineExceeded
from callboard.limits import TURN_DEADLINE_MS_MAX
from callboard.wire import Header, encode_body, error_body

REQUEST_MS: Final = 30_000
"""The deadline of a request that names none; a wait's is TURN_DEADLINE_MS_MAX."""


class Ledger:
    """The unanswered requests of all clients.

    Args:
        ports: where answers go.
        prefix: of the requests' own ids.
        places: the activation queue.
        on_closed: told of each request that leaves the ledger, before it is answered.

    """

    def __init__(
        self, ports: Ports, prefix: str, places: Places, on_closed: Callable[[Request], None]
    ) -> None:
        self._ports = ports
        self._prefix = prefix
        self.places = places
        self._on_closed = on_closed
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines()
        self._count = 0
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def all(self) -> list[Request]:
        """Give every request that is not answered."""
        return list(self._requests.values())

    def get(self, request_id: str) -> Request | None:
        """Find a request that is not answered, by our own id."""
        return self._requests.get(request_id)

    def open(
        self, client: Client, header: Header, body: messages.Body, weight: int, now: int
    ) -> Request:
        """Enter a request.

        Args:
            client: who asks.
            header: its id, and the time that is left for it.
            body: what is asked.
            weight: its encoded bytes.
            now: monotonic milliseconds.

        """
        self._count += 1
        deadline = 0
        if not isinstance(body, messages.Watch):
            longest = TURN_DEADLINE_MS_MAX if isinstance(body, messages.Wait) else REQUEST_MS
            deadline = now + (header.deadline or longest)
        name = f"{self._prefix}{self._count:x}"
        request = Request(name, client, header.id, body, weight, deadline)
        self._requests[name] = request
        client.pending[header.id] = request
        if deadline:
            self._deadlines.add(name, deadline)
        return request

    def close(self, request: Request) -> bool:
        """Take a request out; false if it was answered before."""
        if self._requests.pop(request.id, None) is None:
            return False
        if request.deadline:
            self._deadlines.remove(request.id, request.deadline)
        self.leave_place(request)
        self._on_closed(request)
        return True

    def forward(self, request: Request, kind: str, body: bytes) -> None:
        """Give a request its one answer, encoded already."""
        if not self.close(request):
            return
        if kind == "error":
            self.counters["refusals"] += 1
        client = request.client
        if client is not None:
            client.pending.pop(request.name, None)
            self._ports.client(client.conn, Header(kind, cid=request.name), body)

    def answer(self, request: Request, body: messages.Body) -> None:
        """Answer a request with a body of our own."""
        self.forward(request, body.kind, encode_body(body))

    def refuse(self, request: Request, error: CallboardError) -> None:
        """Answer a request with an error."""
        self.forward(request, "error", error_body(error))

    # ---- Places ----

    def take_place(self, request: Request) -> None:
        """Take a place in the activation queue (ADM-1a, ACC-4a).

        Raises:
            Overloaded: there is none.

        """
        if not request.placed:
            full = self.places.enter(request.weight)
            if full is not None:
                raise full
            request.placed = True

    def keep_place(self, request: Request) -> None:
        """Give a place to a request that was taken on before and is not refused for want of one."""
        if not request.placed:
            self.places.force(request.weight)
            request.placed = True

    def leave_place(self, request: Request) -> None:
        """Give a place back, before the request goes on (ADM-2)."""
        if request.placed:
            request.placed = False
            self.places.leave(request.weight)

    # ---- Time ----

    def next_due(self) -> int | None:
        """Give the first deadline."""
        return self._deadlines.next()

    def expire(self, now: int) -> None:
        """Refuse what has waited until its deadline (ACC-3c)."""
        for name in self._deadlines.take(now):
            request = self._requests.get(name)
            if request is not None:
                self.refuse(request, DeadlineExceeded(scope=request.body.kind))
