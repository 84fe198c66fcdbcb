"""How long it takes until a steer is durable, and how many a plane takes in a second.

    python -m bench.steer [--json FILE] [--seconds 5] [--sessions 50] [--home DIR]

one     one client steers one session with an open turn, each input after the receipt of the one
        before; beside it a bare write + fdatasync of as many bytes, and a bare ZeroMQ round trip
many    one client process steers many sessions at once, a few inputs of each under way; beside it
        how many inputs a second the bare loop would sync one by one
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypedDict

import zmq

from callboard import Plane, Receipt, Session
from callboard.errors import CallboardError, InboxFull
from callboard.limits import INBOX_USER_ITEMS_MAX

ROOT: Final = Path(__file__).resolve().parents[1]
TEXT: Final = "look at the failing test first, please"
FRAME_BYTES: Final = 600
"""What a steer adds to the journal, about."""
WARM_UP: Final = 100
IN_FLIGHT: Final = 4
"""Inputs of one session under way at the same time."""
_FULL_SECONDS: Final = 0.002


class Figure(TypedDict):
    """One figure beside its raw limit, which was measured in the same run."""

    value: float
    unit: str
    limit: float | None
    ratio: float | None


# ---- Raw limits ----


def bare_syncs(folder: Path, seconds: float) -> list[float]:
    """Time appends of one frame's size, each with its fdatasync."""
    taken: list[float] = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        fd, data = file.fileno(), bytes(FRAME_BYTES)
        until = time.perf_counter() + seconds
        while (begun := time.perf_counter()) < until:
            os.write(fd, data)
            os.fdatasync(fd)
            taken.append(time.perf_counter() - begun)
    return taken


def bare_round_trips(folder: Path, seconds: float) -> list[float]:
    """Time questions and answers of ZeroMQ between two processes."""
    path = folder / "bare.sock"
    server = os.fork()
    if not server:
        _answer(path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"ipc://{path}")
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < until:
        dealer.send(bytes(FRAME_BYTES))
        dealer.recv()
        taken.append(time.perf_counter() - begun)
    dealer.send(b"")
    os.waitpid(server, 0)
    context.destroy(linger=0)
    return taken[WARM_UP:]


def _answer(path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{path}")
    while (message := router.recv_multipart())[1]:
        router.send_multipart(message)
    os._exit(0)


# ---- A plane ----


def one_after_the_other(session: Session, seconds: float) -> tuple[list[float], Counter[str]]:
    """Steer one session, each input after the receipt of the one before.

    Returns:
        The times of those that joined an open turn, and where all of them went.

    """
    taken: list[float] = []
    where: Counter[str] = Counter()
    until = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < until:
        try:
            receipt = session.send(TEXT)
        except InboxFull:
            where["inbox_full"] += 1
            time.sleep(_FULL_SECONDS)
            continue
        place = receipt.mode or receipt.delivery
        where[place] += 1
        if place == "current_turn":
            taken.append(time.perf_counter() - begun)
    return taken[WARM_UP:], where


class AllAtOnce:
    """Steers many sessions from one process, each with a few inputs under way."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.receipts = 0
        self.refused: Counter[str] = Counter()
        self._sessions = sessions
        self._stopping = False

    def run(self, seconds: float) -> float:
        """Steer for a while.

        Returns:
            Durable receipts a second.

        """
        for session in self._sessions:
            for _ in range(IN_FLIGHT):
                self._send(session)
        time.sleep(seconds / 5)
        before, begun = self.receipts, time.perf_counter()
        time.sleep(seconds)
        rate = (self.receipts - before) / (time.perf_counter() - begun)
        self._stopping = True
        return rate

    def _send(self, session: Session) -> None:
        if self._stopping:
            return
        try:
            future = session.send_nowait(TEXT)
        except CallboardError as error:
            self.refused[error.code] += 1
            return
        future.add_done_callback(self._next(session))

    def _next(self, session: Session) -> Callable[[Future[Receipt]], None]:
        def done(future: Future[Receipt]) -> None:
            error = future.exception()
            if error is None:
                self.receipts += 1
                self._send(session)
                return
            self.refused[getattr(error, "code", type(error).__name__)] += 1
            timer = threading.Timer(_FULL_SECONDS, self._send, (session,))
            timer.daemon = True
            timer.start()

        return done


def measure(folder: Path, seconds: float, many: int) -> tuple[dict[str, Figure], list[str]]:
    """Measure everything.

    Args:
        folder: on the file system that is asked about.
        seconds: of each part.
        many: sessions that are steered at once.

    Returns:
        The figures, and remarks.

    """
    syncs = bare_syncs(folder, seconds / 2)
    trips = bare_round_trips(folder, seconds / 2)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with Plane(folder / "home") as plane:
        session = _session(plane, folder, poll_ms=2)
        taken, where = one_after_the_other(session, seconds)
    with Plane(folder / "home2") as plane:
        sessions = [_session(plane, folder, poll_ms=10) for _ in range(many)]
        for each in sessions:
            each.send(TEXT)
        steering = AllAtOnce(sessions)
        rate = steering.run(seconds)
    syncs += bare_syncs(folder, seconds / 2)
    sync, trip = statistics.median(syncs) * 1e3, statistics.median(trips) * 1e3
    median, p99 = statistics.median(taken) * 1e3, statistics.quantiles(taken, n=100)[98] * 1e3
    sync_p99 = statistics.quantiles(syncs, n=100)[98] * 1e3
    figures = {
        "one_p50": _figure(median, "ms", sync),
        "one_p99": _figure(p99, "ms", sync_p99),
        "one_p50_to_round_trip": _figure(median, "ms", trip),
        "bare_sync_p50": _figure(sync, "ms", None),
        "bare_round_trip_p50": _figure(trip, "ms", None),
        "many_rate": _figure(rate, "receipts/s", 1e3 / sync),
    }
    remarks = [f"one: {dict(where)}", f"many: {many} sessions, refused {dict(steering.refused)}"]
    return figures, remarks


def _session(plane: Plane, folder: Path, *, poll_ms: int) -> Session:
    settings: Mapping[str, str] = {"bench.poll_ms": str(poll_ms)}
    return plane.create_session("bench.agents:steered", folder, settings=settings)


def _figure(value: float, unit: str, limit: float | None) -> Figure:
    ratio = None if limit is None else round(value / limit, 3)
    return {"value": round(value, 4), "unit": unit, "limit": limit and round(limit, 4), "ratio": ratio}


def report(question: str, figures: Mapping[str, Figure], json_path: Path | None) -> None:
    import json

    print(question)
    for name, figure in figures.items():
        print(name, figure)
    if json_path:
        json_path.write_text(json.dumps({"question": question, "figures": figures}))


def main() -> None:
    """Measure, print a table, write JSON if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.steer", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each part")
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--home", type=Path, help="a folder on the disk that is asked about")
    options = parser.parse_args()
    assert IN_FLIGHT < INBOX_USER_ITEMS_MAX
    with tempfile.TemporaryDirectory(prefix="cb", dir=options.home) as name:
        figures, remarks = measure(Path(name), options.seconds, options.sessions)
    report("How long until a steer is durable, and how many a second?", figures, options.json)
    for remark in remarks:
        print(remark)


if __name__ == "__main__":
    main()
