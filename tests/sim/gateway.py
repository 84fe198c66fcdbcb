"""The gateway as a simulated process: the real border and desk, and connections of clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from callboard.actors.gateway.border import Border
from callboard.actors.gateway.desk import Desk
from callboard.errors import CallboardError
from callboard.limits import CLIENT_HANDSHAKE_MS, CLIENT_MESSAGE_BYTES_MAX
from callboard.peer import Credentials
from callboard.wire import Header, Unframer, door_frame
from tests.sim.bus import Arrived, Connected, Disconnected, Link, Unreachable
from tests.sim.kernel import MS, Kernel, Pipe, Process, Rates
from tests.sim.storage import Boot, Term

if TYPE_CHECKING:
    from tests.sim.world import World

FENCED = 70


class Opened(NamedTuple):
    """A client has connected."""

    connection: Connection


class Came(NamedTuple):
    """Messages of a client."""

    conn: int
    payloads: list[bytes]


class Gone(NamedTuple):
    """A client's connection has ended."""

    conn: int


class Timer(NamedTuple):
    """A time has come."""

    name: str


class Data(NamedTuple):
    """Bytes for a client."""

    conn: int
    data: bytes


class Lost(NamedTuple):
    """A client's connection has ended, as the client sees it."""

    conn: int


class Connection:
    """A stream between a client and the gateway."""

    def __init__(
        self, kernel: Kernel, rates: Rates, conn: int, client: Process, gateway: Gateway
    ) -> None:
        self.conn, self.client, self.gateway = conn, client, gateway
        self.rates = rates
        self._luck = kernel.stream(f"connection {conn}")
        self._unframer = Unframer(CLIENT_MESSAGE_BYTES_MAX)
        self._there: Pipe[bytes] = Pipe(kernel, self._luck, rates, self._at_gateway)
        self._back: Pipe[bytes] = Pipe(kernel, self._luck, rates, self._at_client)
        self.up = True
        gateway.backlog_of.append(self)
        gateway.post(Opened(self))

    def to_gateway(self, data: bytes) -> None:
        """Send as the client."""
        self._send(self._there, data)

    def to_client(self, data: bytes) -> None:
        """Send as the gateway."""
        self._send(self._back, data)

    def _send(self, pipe: Pipe[bytes], data: bytes) -> None:
        if not self.up or not data:
            return
        if self._luck.random() < self.rates.loss / 2:
            self.close()
        else:
            pipe.send(data)

    def _at_gateway(self, data: bytes) -> None:
        payloads = self._unframer.feed(data)
        if payloads:
            self.gateway.post(Came(self.conn, payloads))

    def _at_client(self, data: bytes) -> None:
        self.client.post(Data(self.conn, data))

    def close(self) -> None:
        """End it for both; what is under way is lost."""
        if self.up:
            self.up = False
            self._there.cut()
            self._back.cut()
            self.gateway.post(Gone(self.conn))
            self.client.post(Lost(self.conn))


class Gateway(Process):
    """The door's process."""

    role = "gateway"

    def __init__(self, world: World, name: str, run: int, nonce: str, plane_id: str) -> None:
        super().__init__(world.kernel, name, world.ended)
        self.world, self.run, self.nonce, self.plane_id = world, run, nonce, plane_id
        self.desk = Desk(self, nonce, world.settings)
        self.desk.on_ready = self._ready
        self.border = Border(self.desk, self, world.token, plane_id)
        self._storage: Link = world.bus.dealer(self, "storage", Credentials("gateway", "", nonce))
        self._connections: dict[int, Connection] = {}
        self.backlog_of: list[Connection] = []
        """Every connection that was ever made, accepted or not: they end with the process."""
        self._due: int | None = None
        self.is_open = False
        self.post(Boot())

    def handle(self, events: Sequence[object]) -> None:
        self.desk.now = self.kernel.now // MS
        for event in events:
            self._take(event)
        if any(isinstance(event, Term) for event in events):
            self.border.handle()
            self.desk.shut()
            self.end(0)
            return
        self.border.handle()
        if self.desk.is_fenced:
            self.end(FENCED)
            return
        due = self.desk.next_due()
        if due is not None and due != self._due:
            self._due = due
            self.later(max(1, due - self.desk.now), Timer("tick"))
        self.world.check_gateway(self)

    def _take(self, event: object) -> None:
        match event:
            case Boot():
                other = self.world.bus.servers.get("gateway")
                if other is not None and other.alive:
                    self.later(50, Boot())  # it holds bind.lock (FLT-43)
                    return
                self.desk.begin()
                self.is_open = True
                self.world.bus.bind("gateway", self)
            case Opened(connection):
                self._connections[connection.conn] = connection
                self.border.opened(connection.conn)
                self.later(CLIENT_HANDSHAKE_MS, Timer(f"hello {connection.conn}"))
            case Came(conn, payloads):
                self.border.came(conn, payloads)
            case Gone(conn):
                self._connections.pop(conn, None)
                self.border.gone(conn)
            case Timer("tick"):
                self._due = None
                self.desk.tick()
            case Timer(name):
                self.border.handshake_over(int(name.partition(" ")[2]))
            case Arrived(link="gateway", peer=peer, header=header, body=bytes(body)):
                self.desk.from_peer(peer, header, body)
            case Arrived(header=header, body=bytes(body)):
                self.desk.from_storage(header, body)
            case Connected():
                self.desk.storage_up()
            case Disconnected():
                self.desk.storage_lost()
            case Unreachable(to, header):
                self.desk.unreachable(to, header)
            case _:
                pass

    def _ready(self) -> None:
        self.border.welcome_all()

    def end(self, status: int) -> None:
        super().end(status)
        for connection in self.backlog_of:
            connection.close()

    # --- ports ---

    def client(self, conn: int, header: Header, body: bytes) -> None:
        connection = self._connections.get(conn)
        if connection is None:
            return
        try:
            connection.to_client(door_frame(header, body))
        except CallboardError:
            connection.close()

    def close(self, conn: int) -> None:
        connection = self._connections.get(conn)
        if connection is not None:
            connection.close()

    def backlog(self, conn: int) -> int:
        return 0

    def peer(self, routing_id: str, header: Header, body: bytes) -> None:
        self.world.bus.send("gateway", routing_id, header, body)

    def storage(self, header: Header, body: bytes) -> None:
        self._storage.send(header, body)
