"""The gateway's actor: sockets to desk and border, and their words back to the sockets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from callboard.actors.gateway.border import Border
from callboard.actors.gateway.desk import Desk
from callboard.actors.gateway.door import PAUSE_MS, Came, Done, Door, Gone, Opened, Paused
from callboard.config import Settings
from callboard.errors import CallboardError
from callboard.home import Order, open_descriptors
from callboard.levels import descriptors
from callboard.limits import CLIENT_HANDSHAKE_MS
from callboard.messages import Level
from callboard.peer import (
    Arrived,
    BusActor,
    Connected,
    Disconnected,
    Event,
    Io,
    Posted,
    Timer,
    Unreachable,
)
from callboard.wire import Header, door_frame

STORAGE: Final = "storage"
BUS: Final = "gateway"
SWEEP_MS: Final = 500
FENCED: Final = 70
"""Exit status of a gateway that another one has replaced: it must not go on."""


class StopAsked:
    """Somebody asked this process to stop."""


class Gateway(BusActor):
    """The door's and the routers' state.

    Args:
        io: with the router `gateway`, the dealer `storage` and the door on it.
        order: what the supervisor said.
        door: the clients' door, open.
        on_ready: called once, when clients can be welcomed.

    """

    def __init__(self, io: Io, order: Order, door: Door, on_ready: Callable[[], None]) -> None:
        super().__init__(io)
        self._door = door
        self._tell_ready = on_ready
        self._done = Done()
        self._due: int | None = None
        settings = Settings.model_validate_json(order.settings)
        self._desk = Desk(self, order.nonce, settings)
        self._desk.on_ready = self._ready
        self._desk.own_levels = self._own_levels
        self._border = Border(self._desk, self, order.operator_token, order.plane_id)

    def on_start(self) -> None:
        """Ask storage for an epoch."""
        self._desk.now = _now()
        self._desk.begin()
        self.io.after(SWEEP_MS, "sweep")

    # ---- What the desk and the border send ----

    def client(self, conn: int, header: Header, body: bytes) -> None:
        """Send to a client, at the end of the batch."""
        try:
            self._done.send(conn, door_frame(header, body))
        except CallboardError as error:  # larger than a client takes
            self.io.log("answer_too_large", {"kind": header.kind, "code": error.code})
            self._done.closed.append(conn)

    def close(self, conn: int) -> None:
        """End a client's connection after what was sent."""
        self._done.closed.append(conn)

    def backlog(self, conn: int) -> int:
        """Count the bytes that a client has not read yet."""
        return self._door.backlog(conn)

    def peer(self, routing_id: str, header: Header, body: bytes) -> None:
        """Send to a session or to the supervisor."""
        self.io.send(BUS, header, body, routing_id)

    def storage(self, header: Header, body: bytes) -> None:
        """Send to storage."""
        self.io.send(STORAGE, header, body)

    # ---- What arrives ----

    def handle(self, events: list[Event]) -> None:
        """Deal with a batch."""
        self._desk.now = _now()
        for event in events:
            match event:
                case Posted(value):
                    self._posted(value)
                case Arrived(link="gateway", peer=peer) if peer is not None:
                    self._from_peer(event)
                case Arrived():
                    self._from_storage(event)
                case Timer(name):
                    self._timer(name)
                case Connected():
                    self._desk.storage_up()
                case Disconnected():
                    self._desk.storage_lost()
                case Unreachable(link="gateway"):
                    self._desk.unreachable(event.to, event.header)
                case Unreachable():
                    self._desk.storage_refused(event.header)
        self._border.handle()
        self._flush()
        if self._desk.is_fenced:
            self.io.log("gateway_fenced", {"epoch": self._desk.epoch})
            self.io.stop(FENCED)
        self._set_timer()

    def _flush(self) -> None:
        if self._done:
            done, self._done = self._done, Done()
            self._door.finish(done)

    def _set_timer(self) -> None:
        due = self._desk.next_due()
        if due is not None and due != self._due:
            self._due = due
            self.io.after(max(1, due - _now()), "tick")

    def _posted(self, value: object) -> None:
        match value:
            case Came(conn, payloads, refused):
                taken = self._border.came(conn, payloads)
                self._done.handled.append((conn, taken))
                if refused is not None:
                    self._border.handle()  # what came before it is answered before it
                    self._border.refused(conn, refused)
            case Opened(conn):
                self._border.opened(conn)
                self.io.after(CLIENT_HANDSHAKE_MS, f"hello {conn}")
            case Gone(conn):
                self._border.gone(conn)
            case Paused():
                self.io.after(PAUSE_MS, "door")
            case StopAsked():
                self._shut()
            case _:
                pass

    def _timer(self, name: str) -> None:
        kind, _, number = name.partition(" ")
        match kind:
            case "tick":
                self._due = None
                self._desk.tick()
            case "hello":
                self._border.handshake_over(int(number))
            case "door":
                self._door.resume()
            case "sweep":
                self._door.sweep()
                self.io.after(SWEEP_MS, "sweep")
            case _:
                pass

    def _from_peer(self, event: Arrived) -> None:
        assert event.peer is not None
        try:
            self._desk.from_peer(event.peer, event.header, event.body)
        except CallboardError as error:  # of a process of our own: a bug, not an attack
            self.io.log("peer_unreadable", {"kind": event.header.kind, "code": error.code})

    def _from_storage(self, event: Arrived) -> None:
        try:
            self._desk.from_storage(event.header, event.body)
        except CallboardError as error:
            self.io.log("storage_unreadable", {"kind": event.header.kind, "code": error.code})

    def _own_levels(self) -> list[Level]:
        """Say how full this process is (FLT-22)."""
        return [descriptors("gateway_descriptors", *open_descriptors())]

    # ---- Beginning and end ----

    def _ready(self) -> None:
        self.io.log("gateway_ready", {"epoch": self._desk.epoch})
        self._done.handled += self._border.welcome_all()
        self._tell_ready()

    def _shut(self) -> None:
        """Answer what is left and end (SHD-1)."""
        self._border.handle()
        self._desk.shut()
        self._flush()
        self._door.shut()
        self.io.stop(0)


def _now() -> int:
    return time.monotonic_ns() // 1_000_000
