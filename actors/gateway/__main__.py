"""The gateway's process: `python -P -m callboard.actors.gateway FD`.

Its order comes over that descriptor; a line of JSON goes back over it when clients can be welcomed,
or with the error that keeps it from starting. Exit status as reliability page, section 6.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Final

from callboard.actors.gateway.actor import BUS, STORAGE, Gateway, StopAsked
from callboard.actors.gateway.door import Door
from callboard.config import Settings
from callboard.errors import CallboardError, HomeInUse
from callboard.home import Home, Order, Runtime, hold_nonce, open_state
from callboard.logs import open_log
from callboard.messages import URGENT_KINDS
from callboard.peer import MAIN_LOOP_ENDED, Io, become_child

REFUSES: Final = 78
LOCK_HELD: Final = 75
_READ_BYTES: Final = 65_536


def main(fd: int) -> int:
    """Run the gateway until it is told to stop.

    Args:
        fd: our end of the pair that the order comes over.

    Returns:
        The exit status.

    """
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    order = Order.from_json(_read_all(channel))
    become_child(order.parent_pid)
    os.set_inheritable(order.liveness_fd, False)
    try:
        return _run(order, channel)
    except CallboardError as error:
        _say(channel, {"error": error.to_wire()})
        return LOCK_HELD if isinstance(error, HomeInUse) else REFUSES
    except Exception:  # before the loop, which sees to itself (FLT-26a)
        traceback.print_exc()
        return MAIN_LOOP_ENDED


def _read_all(channel: socket.socket) -> bytes:
    pieces: list[bytes] = []
    while piece := channel.recv(_READ_BYTES):
        pieces.append(piece)
    return b"".join(pieces)


def _say(channel: socket.socket, fields: dict[str, object]) -> None:
    with suppress(OSError):  # nobody listens any more
        channel.sendall(json.dumps(fields).encode() + b"\n")


def _run(order: Order, channel: socket.socket) -> int:
    settings = Settings.model_validate_json(order.settings)
    runtime, logs = Runtime(Path(order.runtime)), Home(Path(order.home)).logs
    _trace_crashes(logs / "gateway.trace")
    hold_nonce(runtime, order.nonce)
    io = Io(urgent=URGENT_KINDS, log=open_log(logs / "gateway.log", settings.log_level))
    _attend_signals(io)
    io.add_fd(order.liveness_fd, lambda _: os._exit(0))  # the supervisor is gone (FLT-29a)
    io.bind_router(BUS, runtime.gateway, bytes.fromhex(order.plane_secret), runtime.bind_lock)
    io.connect_dealer(STORAGE, runtime.storage, order.nonce, order.token)
    door = Door(io, runtime.door, runtime.bind_lock, settings.client_connections)
    door.open()
    return io.run(lambda io: Gateway.start(io, order, door, lambda: _say(channel, {"ready": True})))


def _trace_crashes(path: Path) -> None:
    """Leave a trace without data when this process crashes, or gets SIGUSR1 (FLT-34)."""
    fd = open_state(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(fd)
    faulthandler.register(signal.SIGUSR1, fd)


def _attend_signals(io: Io) -> None:
    """SIGTERM and SIGHUP stop it; Ctrl-C is the supervisor's, for every process of the plane."""
    ear, mouth = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _nothing)
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)

    def hear(_mask: int) -> None:
        os.read(ear, _READ_BYTES)
        io.post(StopAsked())

    io.add_fd(ear, hear)


def _nothing(_number: int, _frame: object) -> None:
    """Do nothing: the wake-up descriptor tells."""


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main(int(sys.argv[1])))
