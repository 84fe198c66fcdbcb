"""A gateway without a door: it passes on what a test writes to `<home>.ctl`, and notes answers."""

import json
import os
import signal
import socket
import sys

from callboard import messages
from callboard.peer import Arrived, Io
from callboard.wire import Header, decode_body, encode_body, validate_body
from tests.supervisor.stubs.common import asked_to, begin, note, serve


def main() -> int:
    order, _channel = begin()
    note(order.home, event="started", role="gateway")
    if asked_to(order.home, "gateway-dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    path = f"{order.home}.ctl"
    if os.path.exists(path):
        os.unlink(path)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    control.bind(path)
    supervisor = ""

    def answer(arrived: Arrived) -> messages.Body | None:
        nonlocal supervisor
        body = decode_body(arrived.header.kind, arrived.body)
        facts = {"event": body.kind, "cid": arrived.header.cid, "body": body.model_dump()}
        note(order.home, role="gateway", **facts)
        match body:
            case messages.SupervisorHello():
                assert arrived.peer is not None
                supervisor = arrived.peer.routing_id
                return messages.Ok()
            case messages.Closing():
                return messages.Ok()
            case _:
                return None

    def prepare(io: Io) -> None:
        def hear(_mask: int) -> None:
            told = json.loads(control.recv(65536))
            body = validate_body(told["kind"], told["body"])
            io.send("gateway", Header(body.kind, told["id"]), encode_body(body), supervisor)

        io.add_fd(control.fileno(), hear)

    return serve(order, "gateway", answer, prepare)


if __name__ == "__main__":
    sys.exit(main())
