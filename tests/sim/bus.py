"""The simulated bus: dealers and routers, connections that break, who is bound and who is gone.

A connection keeps its order, as ZeroMQ's and every stream do; a message is lost only together with
its connection, which comes back after a while (SIM-5, ADR 0060).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from callboard.peer import Credentials
from callboard.wire import Header
from tests.sim.kernel import MS, Kernel, Pipe, Process, Rates

Payload = object
"""A body as bytes, as a message, or an error: what the two ends agree on."""


class Arrived(NamedTuple):
    """A message."""

    link: str
    peer: Credentials
    header: Header
    body: Payload


class Connected(NamedTuple):
    """A dealer's connection is there."""

    link: str


class Disconnected(NamedTuple):
    """A dealer's connection has ended."""

    link: str


class Unreachable(NamedTuple):
    """A router's message found nobody."""

    to: str
    header: Header


_LINGER: Final = 50 * MS
"""For at most so long a router does not know that a peer has gone."""


class Link:
    """A dealer's connection to a router, through all its breaks."""

    def __init__(self, bus: Bus, dealer: Process, role: str, peer: Credentials) -> None:
        self.bus, self.dealer, self.role, self.peer = bus, dealer, role, peer
        self.up = False
        self.server: Process | None = None
        kernel = bus.kernel
        self._luck = kernel.stream(f"link {dealer.name} {role}")
        self._there: Pipe[tuple[Header, Payload]] = Pipe(
            kernel, self._luck, bus.rates, self._at_server
        )
        self._back: Pipe[tuple[Header, Payload]] = Pipe(
            kernel, self._luck, bus.rates, self._at_dealer
        )

    def send(self, header: Header, body: Payload) -> None:
        """Send to the router."""
        self._send(self._there, header, body)

    def reply(self, header: Header, body: Payload) -> None:
        """Send to the dealer."""
        self._send(self._back, header, body)

    def _send(self, pipe: Pipe[tuple[Header, Payload]], header: Header, body: Payload) -> None:
        if not self.up:
            return
        luck, rates = self._luck.random(), self.bus.rates
        if luck < rates.loss:
            self.bus.lost += 1
            self.break_()
            return
        pipe.send((header, body))
        if header.id and luck > 1 - rates.double:  # a request, which may be said again
            self.bus.doubled += 1
            pipe.send((header, body))

    def _at_server(self, item: tuple[Header, Payload]) -> None:
        if self.server is not None and self.server.alive:
            self.bus.kernel.log(self.peer.role, self.dealer.name, "->", self.server.name, *item[0])
            self.server.post(Arrived(self.role, self.peer, *item))

    def _at_dealer(self, item: tuple[Header, Payload]) -> None:
        if self.dealer.alive:
            self.bus.kernel.log(self.role, "->", self.dealer.name, *item[0])
            self.dealer.post(Arrived(self.role, self.peer, *item))

    def stall(self, us: int) -> None:
        """Let what the dealer sends from now on come late, whatever becomes of the dealer."""
        self._there.stall(us)

    def break_(self) -> None:
        """Lose the connection and what is under way on it."""
        if self.up:
            self.down()
            self.bus.kernel.at(self._luck.randint(10, 300) * MS, self.connect)

    def down(self) -> None:
        """Note that there is no connection; what the dealer sent before it died may still come."""
        self.up = False
        self._back.cut()
        if self.dealer.alive:
            self._there.cut()
            self.dealer.post(Disconnected(self.role))

    def connect(self) -> None:
        """Connect, if both ends are there."""
        server = self.bus.servers.get(self.role)
        if self.up or server is None or not server.alive or not self.dealer.alive:
            return
        if server.plane_id != self.dealer.plane_id:
            return  # its token is of another plane (FLT-44b)
        self.up, self.server = True, server
        self.bus.kernel.log(self.dealer.name, "connects to", server.name)
        self.dealer.post(Connected(self.role))


class Bus:
    """All connections between the processes of a plane."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.rates = Rates()
        self.servers: dict[str, Process] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.lost = self.doubled = 0
        self._luck = kernel.stream("bus")

    def dealer(self, process: Process, role: str, peer: Credentials) -> Link:
        """Give a process a connection to a router, now or when that is there."""
        link = self.links[role, peer.routing_id] = Link(self, process, role, peer)
        self.kernel.at(self._luck.randint(1, 5) * MS, link.connect)
        return link

    def bind(self, role: str, process: Process) -> None:
        """Let a process be the router of its role."""
        self.servers[role] = process
        for (name, _), link in list(self.links.items()):
            if name == role:
                self.kernel.at(self._luck.randint(1, 20) * MS, link.connect)

    def send(self, role: str, to: str, header: Header, body: Payload) -> None:
        """Send from a router to one of its peers."""
        link = self.links.get((role, to))
        if link is None or (not link.up and link.dealer.alive):
            self.servers[role].post(Unreachable(to, header))
        else:
            link.reply(header, body)

    def ended(self, process: Process) -> None:
        """Note that a process has ended."""
        for role, server in list(self.servers.items()):
            if server is process:
                del self.servers[role]
        for key, link in list(self.links.items()):
            if link.server is process and link.up:
                link.down()
            elif link.dealer is process:
                link.down()
                self.kernel.at(self._luck.randint(0, _LINGER), self._forget, key, link)

    def _forget(self, key: tuple[str, str], link: Link) -> None:
        if self.links.get(key) is link:
            del self.links[key]

    def break_any(self, role: str) -> None:
        """Break one of a router's connections."""
        up = [link for (name, _), link in self.links.items() if name == role and link.up]
        if up:
            self._luck.choice(up).break_()
