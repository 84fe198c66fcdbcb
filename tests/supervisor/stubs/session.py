"""A session that does what its name says."""

import os
import resource
import signal
import sys
import time
from pathlib import Path

from callboard.home import Order, Runtime, hold_nonce
from tests.supervisor.stubs.common import note


def main(order: Order) -> int:
    name = order.session.partition("/")[2]
    fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
    hold_nonce(Runtime(Path(order.runtime)), order.nonce)
    stopped: list[int] = []
    ignore = name.startswith("deaf")

    def stop(_number: int, _frame: object) -> None:
        stopped.append(1)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore else stop)
    child = os.fork() if name.startswith("parent") else 0
    if child == 0 and name.startswith("parent"):
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
        note(order.home, event="grandchild", session=order.session)
        time.sleep(600)
    note(
        order.home,
        event="session",
        session=order.session,
        fds=fds,
        secret=order.plane_secret,
        token=order.token,
        core=resource.getrlimit(resource.RLIMIT_CORE)[0],
        oom=int(Path("/proc/self/oom_score_adj").read_text()),
        sid=os.getsid(0),
        cwd=os.getcwd(),
        umask=os.umask(0o077),
        queue=getattr(sys.modules.get("queue"), "__file__", ""),
    )
    if name.startswith("crash"):
        return 1
    if name.startswith("refuse"):
        return 78
    if name.startswith("brief"):
        return 0
    while not stopped:
        time.sleep(0.01)
    return 0
