"""A storage actor that stores nothing."""

import os
import signal
import sys
import time

from callboard import messages
from callboard.errors import JournalDamaged
from callboard.peer import Arrived
from callboard.wire import decode_body
from tests.supervisor.stubs.common import asked_to, begin, note, serve


def main() -> int:
    order, channel = begin()
    note(order.home, event="started", role="storage")
    if asked_to(order.home, "damaged"):
        import json

        error = JournalDamaged(segment=3, offset=4096).to_wire()
        channel.sendall(json.dumps({"error": error}).encode() + b"\n")
        return 78
    if asked_to(order.home, "storage-hangs"):
        time.sleep(600)
    if asked_to(order.home, "storage-dies"):
        os.kill(os.getpid(), signal.SIGKILL)

    def answer(arrived: Arrived) -> messages.Body | None:
        body = decode_body(arrived.header.kind, arrived.body)
        note(order.home, event=body.kind, role="storage", body=body.model_dump())
        match body:
            case messages.PlaneHello():
                return messages.PlaneEpoch(epoch=1)
            case messages.Quarantine():
                return messages.Ok()
            case _:
                return None

    return serve(order, "storage", answer)


if __name__ == "__main__":
    sys.exit(main())
