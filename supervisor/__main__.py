"""The supervisor's process: `python -P -m callboard.supervisor FD`.

Its start order comes over that descriptor, see launch.py; its status line goes back over it.
Exit status: 0 stopped as asked, 70 it cannot go on, 75 the home is in use, 78 the start was
refused (reliability page, section 6).
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from contextlib import suppress

from callboard.config import Settings
from callboard.errors import CallboardError, HomeInUse, Internal
from callboard.logs import open_log
from callboard.messages import URGENT_KINDS
from callboard.peer import Io, mint_token
from callboard.supervisor.actor import ProgramGone, Setup, Supervisor
from callboard.supervisor.keeper import PACKET_BYTES_MAX, Keeper
from callboard.supervisor.launch import StartOrder
from callboard.supervisor.residence import Residence, reside
from callboard.supervisor.signals import attend, trace_crashes
from callboard.supervisor.tree import LOCK_HELD, REFUSES


def main(fd: int) -> int:
    """Run a plane until it ends.

    Args:
        fd: our end of the pair that the start order comes over.

    Returns:
        The exit status.

    """
    starter = socket.socket(fileno=fd)
    starter.set_inheritable(False)
    order = StartOrder.from_json(starter.recv(PACKET_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        settings = Settings.model_validate_json(order.settings)
        with reside(settings) as residence:
            return _run(residence, starter, order)
    except CallboardError as error:
        _refuse(starter, error)
        return LOCK_HELD if isinstance(error, HomeInUse) else REFUSES
    except OSError as error:  # a disk that is full or read-only, a folder that is not ours
        _refuse(starter, Internal(f"The home cannot be used: {os.strerror(error.errno or 0)}."))
        return REFUSES


def _refuse(starter: socket.socket, error: CallboardError) -> None:
    """Tell whoever starts the plane why not, unless it is gone."""
    with suppress(OSError):
        answer = {"error": error.to_wire(), "message": error.message}
        starter.send(json.dumps(answer).encode())


def _run(residence: Residence, starter: socket.socket, order: StartOrder) -> int:
    trace_crashes(residence.home.logs / "supervisor.trace")
    log = open_log(residence.home.logs / "supervisor.log", residence.settings.log_level)
    io = Io(urgent=URGENT_KINDS, log=log)
    attend(io)
    token = mint_token(residence.secret, "supervisor", "", residence.nonce)
    for link, path in (
        ("storage", residence.runtime.storage),
        ("gateway", residence.runtime.gateway),
    ):
        io.connect_dealer(link, path, residence.nonce, token)
    if order.embedded:
        _watch_program(io, starter)
    lifeline, _ours = os.pipe2(os.O_CLOEXEC)  # open until this process is gone
    setup = Setup(starter, order.modules, lifeline, os.getpid())
    keeper = Keeper(io)
    return io.run(lambda io: Supervisor.start(io, keeper, residence, setup))


def _watch_program(io: Io, channel: socket.socket) -> None:
    """Post `ProgramGone` when the program that embeds this plane has ended."""

    def hear(_mask: int) -> None:
        with suppress(OSError):
            if channel.recv(PACKET_BYTES_MAX):
                return
        io.remove_fd(channel.fileno())
        io.post(ProgramGone())

    io.add_fd(channel.fileno(), hear)


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main(int(sys.argv[1])))
