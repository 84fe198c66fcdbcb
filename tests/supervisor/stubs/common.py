"""What the stub children of a supervisor share."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from callboard import messages
from callboard.home import Order, Runtime
from callboard.messages import URGENT_KINDS
from callboard.peer import Arrived, BusActor, Event, Io, become_child
from callboard.wire import Header, encode_body


def begin() -> tuple[Order, socket.socket]:
    os.umask(0o077)
    channel = socket.socket(fileno=int(sys.argv[1]))
    data = b""
    while piece := channel.recv(65536):
        data += piece
    order = Order.from_json(data)
    become_child(order.parent_pid)
    return order, channel


def note(home: str, **facts: object) -> None:
    """Append a line to a file beside the home, in one write."""
    fd = os.open(f"{home}.notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, json.dumps({**facts, "pid": os.getpid()}).encode() + b"\n")
    os.close(fd)


def asked_to(home: str, what: str) -> bool:
    """Tell whether a test wants something special of a stub: a file `<home>.<what>` exists."""
    return Path(f"{home}.{what}").exists()


Answering = Callable[[Arrived], messages.Body | None]


class Stub(BusActor):
    """A router that answers by a function."""

    def __init__(
        self, io: Io, link: str, answer: Callable[[Arrived], messages.Body | None]
    ) -> None:
        super().__init__(io)
        self._link, self._answer = link, answer

    def handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Arrived) and event.peer is not None:
                body = self._answer(event)
                if body is not None:
                    header = Header(body.kind, cid=event.header.id)
                    self.io.send(self._link, header, encode_body(body), event.peer.routing_id)


def serve(
    order: Order,
    link: str,
    answer: Answering,
    prepare: Callable[[Io], None] = lambda _io: None,
) -> int:
    runtime = Runtime(Path(order.runtime))
    io = Io(urgent=URGENT_KINDS, log=lambda action, facts: note(order.home, action=action, **facts))
    path = runtime.storage if link == "storage" else runtime.gateway
    io.bind_router(link, path, bytes.fromhex(order.plane_secret), runtime.bind_lock)
    ear, mouth = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(mouth)

    def wake_only(_number: int, _frame: object) -> None: ...

    signal.signal(signal.SIGTERM, wake_only)

    def stop(_mask: int) -> None:
        note(order.home, event="stopping", role=order.role)
        io.stop(0)

    io.add_fd(ear, stop)
    io.add_fd(order.liveness_fd, lambda _mask: os._exit(0))
    prepare(io)
    return io.run(lambda io: Stub.start(io, link, answer))
