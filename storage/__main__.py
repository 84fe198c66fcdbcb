"""The storage actor's process: `python -P -m callboard.storage FD`.

Its order comes over that descriptor, one line of JSON; a refused start says why over it. Exit
status: 0 stopped as asked, 70 it cannot go on, 74 poisoned by an I/O error, 75 the writer's lock is
held elsewhere, 78 the start was refused (reliability page, section 6).
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from callboard import home
from callboard.config import Settings
from callboard.errors import CallboardError, HomeInUse, StorageUnreadable
from callboard.ids import fresh_id
from callboard.limits import FD_RESERVE, RESERVE_BYTES
from callboard.logs import Log, open_log
from callboard.peer import Io, become_child
from callboard.storage.actor import LINK, POISONED, STOP, StorageActor, ThreadRunner
from callboard.storage.disk import Poisoned, RealClock, RealDisk
from callboard.storage.durable import DurableFile, forget
from callboard.storage.engine import Engine, Options, Reply
from callboard.storage.indexing import Catalog
from callboard.storage.leases import RealOwners
from callboard.storage.local import lock_writer
from callboard.storage.recovery import recover

LOCK_HELD: Final = 75
REFUSES: Final = 78
_ORDER_BYTES_MAX: Final = 65_536
_FILES_MAX: Final = 4_096
_FILES_MIN: Final = 64


def main(fd: int) -> int:
    """Serve a home until it is told to stop.

    Args:
        fd: our end of the pair that the order comes over.

    Returns:
        The exit status.

    """
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    order = home.Order.from_json(_read(channel))
    become_child(order.parent_pid)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a limit is a full disk: EFBIG (FLT-20)
    settings = Settings.model_validate_json(order.settings)
    place = home.Home(Path(order.home))
    home.make_directories(place.logs)
    log = open_log(place.logs / "storage.log", settings.log_level)
    try:
        return _serve(order, settings, place, log)
    except HomeInUse:
        log("lock_held", {"level": "error"})
        return LOCK_HELD
    except CallboardError as error:
        log("start_refused", {"level": "error", **error.to_wire()})
        with suppress(OSError):
            channel.sendall(json.dumps({"error": error.to_wire()}).encode() + b"\n")
        return REFUSES
    except Poisoned as poisoned:
        log("poisoned", {"level": "error", "cause": str(poisoned)})
        return POISONED


def _read(channel: socket.socket) -> bytes:
    data = b""
    while b"\n" not in data and len(data) < _ORDER_BYTES_MAX:
        piece = channel.recv(_ORDER_BYTES_MAX)
        if not piece:
            break
        data += piece
    return data


def _serve(order: home.Order, settings: Settings, place: home.Home, log: Log) -> int:
    runtime = home.Runtime(Path(order.runtime))
    home.hold_nonce(runtime, order.nonce)  # open for life: its lock proves this process
    faulthandler.enable(_trace(place.logs / "storage.trace"))
    faulthandler.register(signal.SIGUSR1, _trace(place.logs / "storage.trace"))
    lock = lock_writer(place)
    io = Io(log=log)
    _end_with_the_supervisor(io, order.liveness_fd)
    _stop_on_signals(io)
    engine = _open(order, settings, place, runtime, io, log)
    io.bind_router(LINK, runtime.storage, bytes.fromhex(order.plane_secret), runtime.bind_lock)
    catalog = Catalog(place.root, engine.handed, log)
    status = io.run(lambda io: StorageActor.start(io, engine, catalog, log))
    os.close(lock)
    return status


def _open(
    order: home.Order,
    settings: Settings,
    place: home.Home,
    runtime: home.Runtime,
    io: Io,
    log: Log,
) -> Engine:
    disk = RealDisk()
    forget(disk, str(runtime.durable))
    try:
        recovered = recover(disk, str(place.root), fresh_id, _files_max())
    except OSError:
        raise StorageUnreadable from None
    log(
        "recovered",
        {
            "clean": recovered.clean,
            "commit": recovered.journal.last_commit,
            "segment": recovered.journal.number,
            "files": len(recovered.marks),
            "damaged": len(recovered.sessions.damaged),
        },
    )
    return Engine(
        disk,
        RealClock(),
        recovered,
        RealOwners(runtime),
        DurableFile(disk, str(runtime.durable)),
        Options(
            order.plane_id,
            settings.journal_segment_bytes,
            settings.checkpoint_bytes,
            settings.checkpoint_ms,
            RESERVE_BYTES,
        ),
        _nobody,
        ThreadRunner(io),
        log=log,
    )


def _nobody(replies: Sequence[Reply]) -> None:
    """Take no reply: the actor puts its own function in this one's place."""


def _files_max() -> int:
    """Raise the limit of descriptors (FLT-45a); half of what is left may be streams' files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _FILES_MAX
    return max(_FILES_MIN, min(_FILES_MAX, (soft - FD_RESERVE) // 2))


def _trace(path: Path) -> int:
    return home.open_state(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _end_with_the_supervisor(io: Io, liveness_fd: int) -> None:
    """End at once when the supervisor is gone (FLT-29a)."""

    def gone(_: int) -> NoReturn:
        os._exit(0)

    os.set_blocking(liveness_fd, False)
    io.add_fd(liveness_fd, gone)


def _stop_on_signals(io: Io) -> None:
    """Hand SIGTERM and SIGHUP to the actor; Ctrl-C is the supervisor's for every process."""
    ear, mouth = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _nothing)

    def heard(_: int) -> None:
        os.read(ear, 4_096)
        io.post(STOP)

    io.add_fd(ear, heard)


def _nothing(_number: int, _frame: object) -> None:
    """Do nothing: the wake-up descriptor says that a signal came."""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
