"""Starts processes, signals them and waits for them; nothing else in this folder may (habit 7).

A process is known by a pidfd that was opened before anyone could reap it, so a signal never meets a
stranger who got the number (FLT-37). Primitives only: who is started when is decided in policy.py,
and who is who is kept in keeper.py.
"""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import site
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import callboard

_TRACE_BYTES_MAX: Final = 65_536
_TRACE_STEP: Final = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+)')
_TRACE_ERROR: Final = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(:|$)")


class Spawned(NamedTuple):
    """A process that was started."""

    pid: int
    pidfd: int
    channel: socket.socket
    """Our end of the unnamed pair; the other one is the child's only argument."""
    stderr: int
    """A file without a name that holds what it printed; see `last_words`."""


class Program(NamedTuple):
    """What is started, and what it gets."""

    module: str
    order: bytes
    """Written to its channel before it runs."""
    two_way: bool = False
    """More than the order will be written to its channel, in whole packets."""
    inherited: tuple[int, ...] = ()


def spawn(program: Program) -> Spawned:
    """Start `python -P -m module fd` with nothing of ours but one end of a socket pair (FLT-31).

    The child reads its order from that descriptor and may write lines of JSON to it. Nothing in a
    working directory can take the place of a module: it runs in `/`, with `-P`, and relative
    entries of PYTHONPATH are left out.

    Call it on the main thread: the kernel sends the parent-death signal when the thread that
    started the process ends (FLT-29).

    Raises:
        OSError: the system has no room for it.

    """
    kind = socket.SOCK_SEQPACKET if program.two_way else socket.SOCK_STREAM
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
    try:
        ours.sendall(program.order)
        if not program.two_way:
            ours.shutdown(socket.SHUT_WR)  # the child may read its order to the end
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", program.module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=(theirs.fileno(), *program.inherited),
            cwd="/",
            env=child_environment(),
            umask=0o077,
            start_new_session=True,
        )
        process.returncode = 0  # its end is seen through the pidfd, never by this object
        pidfd = os.pidfd_open(process.pid)
    except BaseException:
        ours.close()
        os.close(stderr)
        raise
    finally:
        theirs.close()
    return Spawned(process.pid, pidfd, ours, stderr)


def child_environment() -> dict[str, str]:
    """Give the environment of a process of the plane: ours, but for what names modules."""
    environment = dict(os.environ)
    path = [entry for entry in environment.pop("PYTHONPATH", "").split(":") if entry[:1] == "/"]
    root = str(Path(callboard.__file__).resolve().parents[1])
    if root not in path and not _is_installed(root):
        path.append(root)
    if path:
        environment["PYTHONPATH"] = ":".join(path)
    return environment


def _is_installed(root: str) -> bool:
    """Tell whether a new interpreter finds what lies in this folder without being told.

    A folder of installed packages must not go into PYTHONPATH: there it would come before the
    standard library.
    """
    places = [*site.getsitepackages(), site.getusersitepackages()]
    return root in {os.path.realpath(place) for place in places}


def last_words(stderr: int) -> str:
    """Say why a process died before it could keep a log: the kind of error and where, no data."""
    size = os.fstat(stderr).st_size
    text = os.pread(stderr, _TRACE_BYTES_MAX, max(0, size - _TRACE_BYTES_MAX))
    lines = text.decode("utf-8", "replace").splitlines()
    steps = [found for line in lines if (found := _TRACE_STEP.match(line))]
    errors = [found["name"] for line in lines if (found := _TRACE_ERROR.match(line))]
    if not steps or not errors:
        return ""
    file = "/".join(Path(steps[-1]["file"]).parts[-3:])
    return f"{errors[-1]} at {file}:{steps[-1]['line']}"


def fork_child() -> tuple[int, int]:
    """Fork this single-threaded process.

    Returns:
        (pid, pidfd) in the parent, where nobody has reaped yet; (0, -1) in the child.

    Raises:
        OSError: the system has no room for it.

    """
    pid = os.fork()
    if pid == 0:
        return 0, -1
    try:
        return pid, os.pidfd_open(pid)
    except OSError:  # nobody could ever signal it: it must not live
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def reap_forked() -> list[tuple[int, int]]:
    """Take the exits of all forked children that have ended: (pid, status), -N for signal N."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return ended
        if found is None:
            return ended
        ended.append((found.si_pid, _status(found)))


def reap(pidfd: int) -> int | None:
    """Take the exit of one child of ours that has ended; none if it was taken elsewhere."""
    try:
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    return None if found is None else _status(found)


def _status(found: os.waitid_result) -> int:
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def has_ended(pidfd: int, timeout_s: float | None = 0.0) -> bool:
    """Wait until a process has ended, child or not; false if it has not in time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """Signal a process; one that has ended already is no error."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def no_room(error: OSError) -> bool:
    """Tell whether the system refused a process for want of something (FLT-53a)."""
    return error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
