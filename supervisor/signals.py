"""What signals mean to the supervisor (reliability page, section 9, "signals")."""

from __future__ import annotations

import faulthandler
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from callboard.home import open_state
from callboard.peer import Io

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_READ_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Signalled:
    """Somebody asked this process to stop."""

    number: int


def attend(io: Io) -> None:
    """Post `Signalled` for each signal that asks to stop; call it on the main thread.

    The handlers do nothing: the interpreter writes the signal's number to the wake-up descriptor,
    so that the loop hears of it whatever it is doing.
    """
    ear, mouth = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, _nothing)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def hear(_mask: int) -> None:
        for number in os.read(ear, _READ_BYTES):
            if number in STOP_SIGNALS:
                io.post(Signalled(number))

    io.add_fd(ear, hear)


def _nothing(_number: int, _frame: object) -> None:
    """Do nothing."""


def trace_crashes(path: Path) -> None:
    """Leave a trace without data when this process crashes, or gets SIGUSR1 (FLT-34)."""
    fd = open_state(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(fd)
    faulthandler.register(signal.SIGUSR1, fd)
