"""The fork process: `python -P -m callboard.supervisor.fork FD`.

It has imported all that a session needs and forks one whenever it is told to, so that a session
costs milliseconds and its memory is shared until it is written to (FLT-30). One thread, one
socket pair without a name, packets of JSON lines both ways:

    in    {"session": module, "preload": […]}, order   once
          {"fork": run}, order
    out   {"ready": true}
          {"forked": run, "pid"} + pidfd           before anyone could reap
          {"refused": run, "errno"}
          {"exited": run, "status"}

It runs no session's code itself, and its death ends its sessions (FLT-29b).
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Final, NoReturn, cast

from callboard.home import Home, Order
from callboard.limits import OOM_SCORE_SESSION
from callboard.peer import become_child
from callboard.supervisor import children, pools
from callboard.supervisor.signals import trace_crashes
from callboard.supervisor.tree import MAIN_LOOP_ENDED, STOPPED

PRELOAD: Final = ("callboard.importers",)
"""Parts of callboard that sessions use beside their own module."""

_PACKET_BYTES_MAX: Final = 65_536
_OOM_SCORE: Final = Path("/proc/self/oom_score_adj")
_OOM_SCORE_MAX: Final = 1_000

SessionMain = Callable[[Order], int]


class _ForkProcess:
    """The loop, and what it knows of its children: the run of each."""

    def __init__(self, channel: socket.socket, order: Order, session: str) -> None:
        self._channel = channel
        self._order = order
        self._session = session
        self._pid = os.getpid()
        self._runs: dict[int, int] = {}
        self._wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._inherited = (channel.fileno(), self._wake, wake)
        self._stop = False
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _nothing)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_stop)

    def _on_stop(self, _number: int, _frame: object) -> None:
        self._stop = True

    def serve(self) -> int:
        poll = select.poll()
        for fd in (self._channel.fileno(), self._wake, self._order.liveness_fd):
            poll.register(fd, select.POLLIN)
        self._say({"ready": True})
        while not self._stop:
            ready = {fd for fd, _ in poll.poll()}
            if self._order.liveness_fd in ready:
                break  # the supervisor is gone
            if self._wake in ready:
                os.read(self._wake, 4_096)
            self._report_exits()
            if self._channel.fileno() in ready and not self._take_order():
                break
        return STOPPED

    def _say(self, fields: dict[str, object], fds: tuple[int, ...] = ()) -> None:
        packet = json.dumps(fields).encode()
        socket.send_fds(self._channel, [packet], list(fds))

    def _report_exits(self) -> None:
        for pid, status in children.reap_forked():
            run = self._runs.pop(pid, None)
            if run is not None:
                self._say({"exited": run, "status": status})

    def _take_order(self) -> bool:
        packet = self._channel.recv(_PACKET_BYTES_MAX)
        if not packet:
            return False
        head, order = _read(packet)
        self._fork(cast("int", head["fork"]), order)
        return True

    def _fork(self, run: int, order: Order) -> None:
        try:
            pid, pidfd = children.fork_child()
        except OSError as error:
            self._say({"refused": run, "errno": error.errno})
            return
        if pid == 0:
            self._become_session(order)
        self._runs[pid] = run
        self._say({"forked": run, "pid": pid}, (pidfd,))
        os.close(pidfd)

    def _become_session(self, order: Order) -> NoReturn:
        """Be a session from here on; nothing of the loop above is ever returned to."""
        status = MAIN_LOOP_ENDED
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, _nothing)  # it wakes the session, as SIGTERM does
            if self._stop:  # meant for the session, before it had a handler of its own
                os._exit(STOPPED)
            become_child(self._pid)
            os.setsid()
            for fd in self._inherited:
                os.close(fd)
            os.dup2(1, 2)  # what agents print goes nowhere
            gc.enable()
            main = cast("SessionMain", import_module(self._session).main)
            lifeline = self._order.liveness_fd
            status = main(replace(order, parent_pid=self._pid, liveness_fd=lifeline))
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else MAIN_LOOP_ENDED
        finally:
            os._exit(status)


def _read(packet: bytes) -> tuple[dict[str, object], Order]:
    head, _, order = packet.partition(b"\n")
    return cast("dict[str, object]", json.loads(head)), Order.from_json(order)


def _nothing(_number: int, _frame: object) -> None:
    """Do nothing: the wake-up descriptor tells."""


def raise_oom_score() -> bool:
    """Make this process and its sessions the first to go when memory ends (FLT-52).

    Returns:
        Whether the kernel took it; a buffered write would hide that it did not.

    """
    wanted = min(int(_OOM_SCORE.read_text()) + OOM_SCORE_SESSION, _OOM_SCORE_MAX)
    fd = os.open(_OOM_SCORE, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(wanted).encode())
    except OSError:
        return False
    finally:
        os.close(fd)
    return int(_OOM_SCORE.read_text()) == wanted


def _rehearse(session: str) -> None:
    """Let the session module play some turns to nobody: what it writes to is shared (ADR 0034)."""
    module = import_module(session)
    rehearse = getattr(module, "rehearse", None)
    if rehearse is not None:
        rehearse()
        rehearse("replay", 1, {"replay.speed": "max"})
    gc.collect()


def main(fd: int) -> int:
    """Serve until told to stop, or until the supervisor is gone.

    Returns:
        The exit status; 70 whenever the loop ends otherwise (FLT-26a).

    """
    try:
        return _main(fd)
    except Exception:
        traceback.print_exc()  # the supervisor reads where, and what kind
        return MAIN_LOOP_ENDED


def _main(fd: int) -> int:
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    head, order = _read(channel.recv(_PACKET_BYTES_MAX))
    become_child(order.parent_pid)
    os.set_inheritable(order.liveness_fd, False)
    raise_oom_score()
    trace_crashes(Home(Path(order.home)).logs / "fork.trace")  # of the sessions as well
    session = cast("str", head["session"])
    for name in (*PRELOAD, session, *cast("list[str]", head["preload"])):
        import_module(name)
    _rehearse(session)
    gc.disable()  # a collection would write to every object's page
    pools.fill_holes()
    gc.freeze()
    return _ForkProcess(channel, order, session).serve()


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main(int(sys.argv[1])))
