"""What a hop on the bus costs: a bare ZeroMQ round trip beside one through Io and an actor.

    python -m bench.hops [--rounds 20000] [--json FILE]

Each row is one client process that asks one server process, one request at a time (latency), then
with 64 requests in flight (throughput; CPU is that of both processes together). The messages are
those of the product: a header with a token, a small body.

bare        DEALER to ROUTER, blocking calls, no decoding: what ZeroMQ costs by itself
actor       the same DEALER to a router in `Io`, whose `BusActor` answers
both        a dealer in `Io`, whose `BusActor` asks with `Asked`, to that router
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import zmq

from callboard import messages
from callboard.peer import Arrived, Asked, BusActor, Connected, Event, Io, mint_token
from callboard.wire import Header, encode_body, encode_header

SECRET: Final = bytes(32)
ROUTING_ID: Final = "0" * 32
TOKEN: Final = mint_token(SECRET, "session", "demo-" + "0" * 32 + "/s1", ROUTING_ID)
BODY: Final = encode_body(messages.Beat(phase="open", evictable=False, pending=1))
IN_FLIGHT: Final = 64
WARM_UP: Final = 500


class Row(NamedTuple):
    """What one pair of processes needed."""

    name: str
    p50_us: float
    p99_us: float
    per_second: float
    cpu_us: float
    """Processor time of client and server together, per round trip, with 64 in flight."""


class Task(NamedTuple):
    """What a client is to do."""

    path: Path
    rounds: int
    server: int
    """The server's pid, for its processor time."""

    def cpu_s(self) -> float:
        """Give the processor time that both have used so far."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime + cpu_of(self.server)


class Measured(NamedTuple):
    """What a client saw: each latency, then how long the many in flight took and cost."""

    latencies_s: list[float]
    many_s: float
    many_cpu_s: float


# ---- Servers ----


def serve_bare(path: Path) -> None:
    """Answer every message with itself."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{path}")
    while True:
        router.send_multipart(router.recv_multipart())


class Answering(BusActor):
    """Answers every request."""

    def handle(self, events: list[Event]) -> None:
        """Answer each one of a batch."""
        for event in events:
            if isinstance(event, Arrived) and event.peer:
                answer = Header("ok", cid=event.header.id)
                self.io.send(event.link, answer, event.body, event.peer.routing_id)


def serve_actor(path: Path) -> None:
    """Answer through Io and an actor."""
    io = Io()
    io.bind_router("bench", path, SECRET, path.with_name("bind.lock"))
    io.run(Answering.start)


# ---- Clients ----


def ask_bare(task: Task) -> Measured:
    """Ask with a plain DEALER."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.ROUTING_ID, ROUTING_ID.encode())
    dealer.connect(f"ipc://{task.path}")
    message = [encode_header(Header("beat", "1", token=TOKEN)), BODY]
    latencies: list[float] = []
    for _ in range(WARM_UP + task.rounds):
        started = time.perf_counter()
        dealer.send_multipart(message)
        dealer.recv_multipart()
        latencies.append(time.perf_counter() - started)
    started, before = time.perf_counter(), task.cpu_s()
    for number in range(task.rounds + IN_FLIGHT):
        if number < task.rounds:
            dealer.send_multipart(message)
        if number >= IN_FLIGHT:
            dealer.recv_multipart()
    return Measured(latencies, time.perf_counter() - started, task.cpu_s() - before)


class Asking(BusActor):
    """Asks one at a time, then many at once, and stops its process's Io."""

    def __init__(self, io: Io, task: Task, done: Callable[[Measured], None]) -> None:
        super().__init__(io)
        self.asked: Asked[float] = Asked(io, "bench")
        self.task = task
        self.done = done
        self.alone = WARM_UP + task.rounds
        self.left = task.rounds
        self.latencies: list[float] = []
        self.started = self.before = 0.0

    def ask(self) -> None:
        """Send one more request."""
        self.asked.ask("beat", BODY, time.perf_counter())

    def handle(self, events: list[Event]) -> None:
        """Take answers, ask again."""
        for event in events:
            if isinstance(event, Connected):
                self.asked.resend()
                self.ask()
            elif isinstance(event, Arrived):
                asked_at = self.asked.answer(event.header.cid)
                if asked_at is not None:
                    self.answered(asked_at)

    def answered(self, asked_at: float) -> None:
        """Count an answer and go on."""
        if not self.started:
            self.latencies.append(time.perf_counter() - asked_at)
            if len(self.latencies) < self.alone:
                self.ask()
            else:
                self.ask_many()
            return
        self.left -= 1
        if self.left >= IN_FLIGHT:
            self.ask()
        elif not self.left:
            self.finish()

    def ask_many(self) -> None:
        """Begin the second part."""
        self.started, self.before = time.perf_counter(), self.task.cpu_s()
        for _ in range(IN_FLIGHT):
            self.ask()

    def finish(self) -> None:
        """Report and stop."""
        took, spent = time.perf_counter() - self.started, self.task.cpu_s() - self.before
        self.done(Measured(self.latencies, took, spent))
        self.io.stop(0)


def ask_actor(task: Task) -> Measured:
    """Ask through Io and an actor."""
    found: list[Measured] = []
    io = Io()
    io.connect_dealer("bench", task.path, ROUTING_ID, TOKEN)
    io.run(lambda io: Asking.start(io, task, found.append))
    return found[0]


# ---- The table ----


def cpu_of(pid: int) -> float:
    """Give another process's processor time in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def forked(work: Callable[[], object]) -> int:
    """Run work in a child; no ZeroMQ context may exist here yet."""
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            work()
        os._exit(1)
    return pid


def measure(
    name: str, serve: Callable[[Path], None], ask: Callable[[Task], Measured], rounds: int
) -> Row:
    """Run one pair; the client, too, is a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path, report = Path(folder) / "s", Path(folder) / "report.json"
        server = forked(partial(serve, path))
        while not path.exists():
            time.sleep(0.01)
        task = Task(path, rounds, server)
        client = forked(lambda: report.write_text(json.dumps(ask(task))))
        os.waitpid(client, 0)
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        seen = Measured(*json.loads(report.read_text()))
    latencies = sorted(seen.latencies_s[WARM_UP:])
    middle, late = latencies[rounds // 2], latencies[rounds * 99 // 100]
    return Row(name, middle * 1e6, late * 1e6, rounds / seen.many_s, seen.many_cpu_s / rounds * 1e6)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [
        measure("bare", serve_bare, ask_bare, options.rounds),
        measure("actor", serve_actor, ask_bare, options.rounds),
        measure("both", serve_actor, ask_actor, options.rounds),
    ]
    print(f"{'':8}{'p50 µs':>10}{'p99 µs':>10}{'round trips/s':>16}{'CPU µs each':>14}")
    for row in rows:
        print(
            f"{row.name:8}{row.p50_us:10.1f}{row.p99_us:10.1f}"
            f"{row.per_second:16,.0f}{row.cpu_us:14.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
