"""How long it takes until a steer is durable, and how many a plane takes in a second.

    python -m bench.steer [--quick] [--json FILE] [--sessions 50] [--folder DIR]

one     one client steers one session with an open turn, each input after the receipt of the one
        before; beside it a bare write + fdatasync of as many bytes, and a bare ZeroMQ round trip
many    one client process steers many sessions at once, a few inputs of each under way; beside it
        how many inputs a second the bare loop would sync one by one
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import zmq

from bench.common import Figure, arguments, bare_fdatasync, percentile, report
from callboard import Plane, Receipt, Session
from callboard.errors import CallboardError, InboxFull

ROOT: Final = Path(__file__).resolve().parents[1]
TEXT: Final = "look at the failing test first, please"
FRAME_BYTES: Final = 600
"""What a steer adds to the journal, about."""
SECONDS: Final = 5.0
"""Of each part."""
WARM_UP: Final = 100
IN_FLIGHT: Final = 10
"""Inputs of one session under way at the same time."""
ONE_POLL_MS: Final = 5
MANY_POLL_MS: Final = 50
"""How often an agent takes what was steered in: as often as the inbox needs it."""
_FULL_SECONDS: Final = 0.002
_REST_SECONDS: Final = 0.02


# ---- Raw limits ----


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
    while (begun := time.perf_counter()) < until or len(taken) < 2 * WARM_UP:
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
    while (begun := time.perf_counter()) < until or len(taken) < 2 * WARM_UP:
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
    """Steers many sessions from one process, each with a few inputs under way.

    A session whose inbox is full is left alone for a moment, as a client with manners does.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.receipts = 0
        self.refused: Counter[str] = Counter()
        self._sessions = sessions
        self._resting: deque[tuple[float, Session]] = deque()
        self._stopping = False

    def run(self, seconds: float) -> float:
        """Steer for a while.

        Returns:
            Durable receipts a second.

        """
        for session in self._sessions:
            for _ in range(IN_FLIGHT):
                self._send(session)
        self._look_after(seconds / 5)
        before, begun = self.receipts, time.perf_counter()
        self._look_after(seconds)
        rate = (self.receipts - before) / (time.perf_counter() - begun)
        self._stopping = True
        return rate

    def _look_after(self, seconds: float) -> None:
        """Let time pass, and go on with the sessions that have rested."""
        until = time.perf_counter() + seconds
        while (now := time.perf_counter()) < until:
            while self._resting and self._resting[0][0] <= now:
                self._send(self._resting.popleft()[1])
            time.sleep(_REST_SECONDS / 4)

    def _send(self, session: Session) -> None:
        if self._stopping:
            return
        try:
            future = session.send_nowait(TEXT)
        except CallboardError as error:
            self._refused(session, error)
            return
        future.add_done_callback(self._next(session))

    def _refused(self, session: Session, error: BaseException) -> None:
        self.refused[getattr(error, "code", type(error).__name__)] += 1
        self._resting.append((time.perf_counter() + _REST_SECONDS, session))

    def _next(self, session: Session) -> Callable[[Future[Receipt]], None]:
        def done(future: Future[Receipt]) -> None:
            error = future.exception()
            if error is None:
                self.receipts += 1
                self._send(session)
            else:
                self._refused(session, error)

        return done


def measure(folder: Path, seconds: float, many: int) -> tuple[dict[str, Figure], list[str]]:
    """Measure everything; the raw limits before and after, since a machine is not always as busy.

    Args:
        folder: on the disk in question.
        seconds: of each part.
        many: sessions that are steered at once.

    Returns:
        The figures, and remarks.

    """
    rounds = int(seconds * 200)
    syncs = bare_fdatasync(folder, FRAME_BYTES, rounds)
    trips = bare_round_trips(folder, seconds / 5)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with Plane(folder / "one") as plane:
        session = _session(plane, folder, poll_ms=ONE_POLL_MS)
        taken, where = one_after_the_other(session, seconds)
        syncs += bare_fdatasync(folder, FRAME_BYTES, rounds)
    with Plane(folder / "many") as plane:
        sessions = [_session(plane, folder, poll_ms=MANY_POLL_MS) for _ in range(many)]
        for each in sessions:
            each.send(TEXT)
        steering = AllAtOnce(sessions)
        rate = steering.run(seconds)
        syncs += bare_fdatasync(folder, FRAME_BYTES, rounds)
    sync, sync_99 = percentile(syncs, 50) * 1e6, percentile(syncs, 99) * 1e6
    median, p99 = percentile(taken, 50) * 1e6, percentile(taken, 99) * 1e6
    figures = {
        "one, median, to fdatasync": Figure(median, "us", sync),
        "one, 99 %, to fdatasync": Figure(p99, "us", sync_99),
        "one, median, to a ZeroMQ round trip": Figure(median, "us", percentile(trips, 50) * 1e6),
        f"{many} at once": Figure(rate, "receipts/s", 1e6 / sync),
    }
    refused = ", ".join(f"{n} {code}" for code, n in steering.refused.items()) or "nothing"
    went = ", ".join(f"{n} {place}" for place, n in where.items())
    return figures, [f"one session: {went}", f"{many} sessions: {refused} refused"]


def _session(plane: Plane, folder: Path, *, poll_ms: int) -> Session:
    settings = {"bench.poll_ms": str(poll_ms)}
    return plane.create_session("bench.agents:steered", folder, settings=settings)


def main() -> None:
    """Measure, print a table, write JSON if asked to."""
    parser = arguments(
        "How long it takes until a steer is durable, and how many there are a second."
    )
    parser.add_argument("--sessions", type=int, default=50, help="steered at once")
    parser.add_argument(
        "--folder", type=Path, help="on the disk in question; default: the temporary one"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cb", dir=options.folder) as name:
        seconds = SECONDS / 10 if options.quick else SECONDS
        figures, remarks = measure(Path(name), seconds, options.sessions)
    report("How long until a steer is durable, and how many a second?", figures, options.json)
    for remark in remarks:
        print(remark)


if __name__ == "__main__":
    main()
