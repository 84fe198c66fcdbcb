"""How long a session that has no process takes until it works.

    python -m bench.activate [--quick] [--json FILE] [--sessions 50] [--folder DIR]

cold    an input for a session without a process, until its turn has ended: it is accepted, a
        process is forked, takes the lease, recovers, registers, and runs one turn of `echo`
warm    the same for a session that has one; what lies between the two is the activation
fork    the fork process alone: an order until the child speaks; beside it multiprocessing's
        forkserver with the same imports, and a new interpreter. The raw limit of all of them is a
        bare fork: os.fork of a small process until its child has written one byte
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.common import Figure, arguments, percentile, report
from callboard import Plane
from callboard.home import Home, Order, Runtime, make_directories, prepare_runtime
from callboard.supervisor import children, fork

ROOT: Final = Path(__file__).resolve().parents[1]
SESSION: Final = "callboard.actors.session"
HELLO: Final = "bench.hello"
_PACKET: Final = 65_536


# ---- Raw limit ----


def bare_forks(rounds: int) -> list[float]:
    """Fork a small process and wait for its child's first byte."""
    code = (
        "import os, sys, time\n"
        f"for _ in range({rounds}):\n"
        "    r, w = os.pipe()\n"
        "    begun = time.perf_counter()\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        os.write(w, b'x'); os._exit(0)\n"
        "    os.read(r, 1); print(time.perf_counter() - begun)\n"
        "    os.waitpid(pid, 0); os.close(r); os.close(w)\n"
    )
    done = subprocess.run(
        [sys.executable, "-ISc", code], capture_output=True, text=True, check=True
    )
    return [float(line) for line in done.stdout.split()]


# ---- Ways to a process ----


class Ear:
    """Hears the first word of a process: a datagram with its pid."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ear"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(os.fspath(self.path))
        self._socket.settimeout(30)

    def wait(self) -> None:
        """Wait for one."""
        self._socket.recv(64)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        self.path.unlink()


class OurForkProcess:
    """The product's fork process, with a session that says hello and ends."""

    def __init__(self, folder: Path, ear: Ear) -> None:
        runtime = Runtime(folder / "run")
        prepare_runtime(runtime)
        home = Home(folder / "home")
        if not home.logs.exists():
            make_directories(home.logs, durable=False)  # where the fork process leaves its traces
        lifeline, self._ours = os.pipe2(os.O_CLOEXEC)
        self._order = Order(
            role="fork",
            home=str(home.root),
            runtime=str(runtime.root),
            plane_id="bench",
            plane_secret="",
            plane_epoch=1,
            nonce="0" * 32,
            token="",
            parent_pid=os.getpid(),
            liveness_fd=lifeline,
            settings="{}",
            session=str(ear.path),
        )
        head = json.dumps({"session": HELLO, "preload": [SESSION]}).encode()
        text = head + b"\n" + self._order.to_json()
        program = children.Program(fork.__name__, text, two_way=True, inherited=(lifeline,))
        self._spawned = children.spawn(program)
        os.close(lifeline)
        self._spawned.channel.recv(_PACKET)  # ready
        self._run = 0

    def start(self) -> None:
        """Order a process."""
        self._run += 1
        order = replace(self._order, role="session")
        self._spawned.channel.send(b'{"fork":%d}\n' % self._run + order.to_json())

    def settle(self) -> None:
        """Take its birth and its end."""
        for _ in range(2):
            _, fds, _, _ = socket.recv_fds(self._spawned.channel, _PACKET, 1)
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """End the fork process."""
        self._spawned.channel.close()
        children.has_ended(self._spawned.pidfd, None)
        children.reap(self._spawned.pidfd)
        for fd in (self._spawned.pidfd, self._spawned.stderr, self._ours):
            os.close(fd)


def our_forks(folder: Path, rounds: int) -> list[float]:
    """Time the product's fork process."""
    ear = Ear(folder)
    made = OurForkProcess(folder, ear)
    taken = [_timed(made.start, ear, made.settle) for _ in range(rounds)]
    made.close()
    ear.close()
    return taken


def forkserver_forks(folder: Path, rounds: int) -> list[float]:
    """Time multiprocessing's forkserver with the same imports.

    In a program of its own without a main module, which each child would import again.
    """
    code = f"from bench.activate import tell_forkserver; tell_forkserver({str(folder)!r}, {rounds})"
    done = subprocess.run(
        [sys.executable, "-Pc", code],
        capture_output=True,
        text=True,
        check=True,
        env=children.child_environment(),
    )
    return [float(line) for line in done.stdout.split()]


def tell_forkserver(folder: str, rounds: int) -> None:
    """Print the seconds of each start."""
    print(*_forkserver_forks(Path(folder), rounds), sep="\n")


def _forkserver_forks(folder: Path, rounds: int) -> list[float]:
    from bench.hello import speak

    ear = Ear(folder)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([SESSION, HELLO])
    taken: list[float] = []
    for n in range(rounds + 1):
        child = context.Process(target=speak, args=(str(ear.path),))
        seconds = _timed(child.start, ear, child.join)
        taken += [seconds] * (n > 0)  # the first one starts the server
    ear.close()
    return taken


def interpreters(folder: Path, rounds: int) -> list[float]:
    """Time a new interpreter that imports the same."""
    ear = Ear(folder)
    code = f"import {SESSION}; from bench.hello import speak; speak({str(ear.path)!r})"
    environment = children.child_environment()
    taken: list[float] = []
    for _ in range(rounds):
        started: list[subprocess.Popen[bytes]] = []

        def start(made: list[subprocess.Popen[bytes]] = started) -> None:
            made.append(subprocess.Popen([sys.executable, "-Pc", code], env=environment))

        taken.append(_timed(start, ear, lambda made=started: made[0].wait()))  # type: ignore[misc]
    ear.close()
    return taken


def _timed(start: Callable[[], object], ear: Ear, settle: Callable[[], object]) -> float:
    begun = time.perf_counter()
    start()
    ear.wait()
    seconds = time.perf_counter() - begun
    settle()
    return seconds


# ---- A plane ----


def activations(folder: Path, count: int) -> tuple[list[float], list[float]]:
    """Time sessions' first turns, without and with a process.

    Returns:
        Seconds from an input to the end of its turn: cold, warm.

    """
    cold: list[float] = []
    warm: list[float] = []
    with Plane(folder / "home") as plane:
        for _ in range(count):
            session = plane.create_session("echo", folder)
            for taken in (cold, warm, warm):
                begun = time.perf_counter()
                session.wait(session.send("hello"), timeout=30)
                taken.append(time.perf_counter() - begun)
    return cold, warm


def measure(folder: Path, count: int) -> dict[str, Figure]:
    """Measure everything.

    Args:
        folder: on the disk in question.
        count: sessions, and processes of each way.

    """
    bare = bare_forks(count) + bare_forks(count)
    limit, limit_99 = percentile(bare, 50) * 1e6, percentile(bare, 99) * 1e6
    cold, warm = activations(folder, count)
    middle = percentile(warm, 50)
    times = {
        "cold input, median": percentile(cold, 50),
        "warm input, median": middle,
        "activation, median": percentile(cold, 50) - middle,
        "fork process, median": percentile(our_forks(folder, count), 50),
        "forkserver, median": percentile(forkserver_forks(folder, count), 50),
        "new interpreter, median": percentile(interpreters(folder, max(5, count // 10)), 50),
    }
    figures = {name: Figure(seconds * 1e6, "us", limit) for name, seconds in times.items()}
    figures["activation, 99 %"] = Figure((percentile(cold, 99) - middle) * 1e6, "us", limit_99)
    return figures


def main() -> None:
    """Measure, print a table, write JSON if asked to."""
    parser = arguments("How long a session that has no process takes until it works.")
    parser.add_argument("--sessions", type=int, default=50, help="how many are activated")
    parser.add_argument("--folder", type=Path, help="where to put the home; default: temporary")
    options = parser.parse_args()
    count = max(5, options.sessions // 10) if options.quick else options.sessions
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="cb") as name:
        figures = measure(Path(name), count)
    report("How long does a passive session take until it works?", figures, options.json)


if __name__ == "__main__":
    main()
