"""A session's process: what a freshly forked child runs until its session is given back."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import pykka

from callboard.actors.session.actor import GATEWAY, STORAGE, TERMINATE, SessionActor
from callboard.artifact_files import ArtifactReader
from callboard.config import Settings
from callboard.home import Home, Order, Runtime, hold_nonce, this_process
from callboard.ids import SessionRef, parse_ref
from callboard.limits import BUS_QUEUE_MESSAGES_MAX
from callboard.logs import open_log
from callboard.messages import URGENT_KINDS
from callboard.peer import Io, become_child

_INLET_MAX: Final = BUS_QUEUE_MESSAGES_MAX
_LOG_NAME_CHARS: Final = 100


def main(order: Order) -> int:
    """Own a session until it is stopped, idle for long, or another's.

    Args:
        order: what the supervisor wants; its descriptor is inherited.

    Returns:
        The process's exit status.

    """
    become_child(order.parent_pid)
    runtime = Runtime(Path(order.runtime))
    hold_nonce(runtime, order.nonce)  # open for life: its lock proves this process
    settings = Settings.model_validate_json(order.settings)
    ref = parse_ref(order.session)
    log = open_log(_log_path(Home(Path(order.home)), ref), settings.log_level)
    identity = this_process(order.nonce, order.plane_id)
    artifacts = ArtifactReader(Home(Path(order.home)).session(ref))

    def start_actor(io: Io) -> pykka.ActorRef[Any]:
        return SessionActor.start(io, ref, identity, settings.resident_idle_ms, artifacts)

    io = Io(urgent=URGENT_KINDS, inlet_max=_INLET_MAX, log=log)
    _end_with_the_supervisor(io, order.liveness_fd)
    _stop_on_sigterm(io)
    io.connect_dealer(STORAGE, runtime.storage, order.nonce, order.token)
    io.connect_dealer(GATEWAY, runtime.gateway, order.nonce, order.token)
    return io.run(start_actor)


def _log_path(home: Home, ref: SessionRef) -> Path:
    """Name a session's log so that people find it and no two sessions share one."""
    mark = hashlib.sha256(str(ref).encode()).hexdigest()[:8]
    return home.logs / f"session-{ref.session_id[:_LOG_NAME_CHARS]}-{mark}.log"


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Let SIGTERM be heard on the wakeup descriptor and do nothing else."""


def _end_with_the_supervisor(io: Io, liveness_fd: int) -> None:
    """End at once when the supervisor is gone (FLT-29a)."""

    def gone(_: int) -> NoReturn:
        os._exit(0)

    os.set_blocking(liveness_fd, False)
    io.add_fd(liveness_fd, gone)


def _stop_on_sigterm(io: Io) -> None:
    """Hand SIGTERM to the actor; Ctrl-C is the supervisor's, for every process of the plane."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def heard(_: int) -> None:
        os.read(reader, 4_096)
        io.post(TERMINATE)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _do_nothing)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    io.add_fd(reader, heard)
