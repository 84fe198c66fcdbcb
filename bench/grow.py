"""Whether an append costs more when the transcript is long (DUR-5).

    python -m bench.grow [--quick] [--json FILE]

Two sessions of one engine, one with few records and one with many, take single durable appends in
turns, so that a busy disk is busy for both. The figure of the long one stands beside that of the
short one, where other benches show the raw limit: the ratio is the growth, which DUR-5 bounds.

synced      on the disk, each append with its fdatasync
computed    the same with syncs that do nothing: what of the cost is ours
read        folding the whole session again, as the first touch after a start does, per record
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.append import creation, frame, owner, part, record, session_ref
from bench.common import Figure, arguments, report
from callboard import home
from callboard import messages as m
from callboard.ids import fresh_id
from callboard.storage.disk import RealClock, RealDisk
from callboard.storage.durable import DurableFile
from callboard.storage.engine import Engine, Options, Reply, Request
from callboard.storage.leases import RealOwners
from callboard.storage.recovery import recover

QUESTION: Final = "Does an append cost more when the transcript is long?"
SHORT, LONG = 1_000, 100_000
LONG_QUICK: Final = 10_000
ROUNDS, ROUNDS_QUICK = 1_000, 200
PARTS: Final = 20
"""Records of a turn, but for its start, its message and its end."""


class Unsynced(RealDisk):
    """A disk whose syncs of files do nothing: what is left is the cost of our own work."""

    def datasync(self, fd: int) -> None:
        """Sync nothing."""

    def sync(self, fd: int) -> None:
        """Sync nothing."""


class Store:
    """An engine on a new home.

    Args:
        folder: where the home shall lie.
        disk: its files.

    """

    def __init__(self, folder: Path, disk: RealDisk) -> None:
        root, runtime = folder / "home", home.Runtime(folder / "run")
        home.prepare_home(root)
        home.prepare_runtime(runtime)
        self.replies: list[Reply] = []
        self.engine = Engine(
            disk,
            RealClock(),
            recover(disk, str(root), fresh_id, 512),
            RealOwners(runtime),
            DurableFile(disk, str(runtime.durable)),
            Options("bench", 1 << 26, 1 << 25, 1 << 30),
            self.replies.extend,
        )
        gateway = self.call("gateway", m.GatewayHello(nonce=fresh_id()))
        assert isinstance(gateway, m.GatewayEpoch)
        self.gateway = gateway.epoch
        self._turns = 0

    def call(self, role: str, body: m.Body) -> m.Body:
        """Ask one thing."""
        scope = getattr(body, "session", "") if role == "session" else ""
        self.engine.run([Request(None, role, scope, body)])
        answer = self.replies.pop().body
        assert isinstance(answer, m.Body), answer
        return answer

    def session(self, number: int, records: int) -> str:
        """Make a session whose transcript has about so many records, and a turn that runs."""
        text = session_ref(number)
        self.call("gateway", creation(number, self.gateway))
        self.call("session", m.Acquire(session=text, owner=owner("bench")))
        while self.records(text) < records:
            self.call("session", self._turn(text, ended=True))
            if self.engine.checkpoints.due:
                self.engine.checkpoints.now()
        self.call("session", self._turn(text, ended=False))
        return text

    def records(self, text: str) -> int:
        """Count a session's records."""
        state = self.engine.sessions.get(text)
        assert state is not None
        return state.fold.seq

    def _turn(self, text: str, *, ended: bool) -> m.Append:
        """Make a whole turn, or the beginning of one, as one frame."""
        self._turns += 1
        turn = f"turn_{self._turns:026d}"
        start: dict[str, object] = {
            "turn_id": turn,
            "epoch": 1,
            "kind": "continuation",
            "input_ids": [],
            "chain_index": 0,
            "started_at": 1,
            "agent_id": "echo",
            "principal": "principal:operator:local",
            "trace_id": "t",
        }
        message = {"message_id": "msg", "role": "assistant", "created_at": 1}
        made = [
            record("turn_started", start, turn),
            record("message_created", {**message, "message_id": f"msg_{self._turns}"}, turn),
        ]
        if not ended:
            made[1] = record("message_created", message, turn)
            return frame(text, 1, *made)
        made += [
            record(
                "part_created",
                {
                    "part_id": fresh_id(),
                    "message_id": f"msg_{self._turns}",
                    "part_type": "text",
                    "payload": {"text": "x" * 200},
                    "created_at": 1,
                },
                turn,
            )
            for _ in range(PARTS)
        ]
        end: dict[str, object] = {
            "turn_id": turn,
            "claimed_input_ids": [],
            "turns_count": 1,
            "tool_calls_count": 0,
            "duration_ms": 1,
            "outcome": "completed",
            "input_disposition": "acknowledged",
            "completed_at": 1,
        }
        return frame(text, 1, *made, record("turn_completed", end, turn))

    def append(self, text: str) -> float:
        """Append one record to the turn that runs; gives the seconds that it took."""
        state = self.engine.sessions.get(text)
        assert state is not None
        assert state.fold.turn is not None
        body = part(text, 1)
        records = [body.records[0].model_copy(update={"turn_id": state.fold.turn.turn_id})]
        request = Request(None, "session", text, body.model_copy(update={"records": records}))
        began = time.perf_counter()
        self.engine.run([request])
        took = time.perf_counter() - began
        answer = self.replies.pop().body
        assert isinstance(answer, m.Appended), answer
        return took

    def read(self, text: str) -> float:
        """Fold a session anew from its files; gives the seconds for each record."""
        self.engine.materialise()
        self.engine.sessions.set(text, None)
        began = time.perf_counter()
        records = self.records(text)
        return (time.perf_counter() - began) / records


def measure(
    folder: Path, disk: RealDisk, long: int, rounds: int
) -> tuple[float, float, float, float]:
    """Give the mean seconds of an append to a long and to a short session, and of a fold's record.

    Args:
        folder: an empty one.
        disk: its files.
        long: records of the long session; the short one has SHORT.
        rounds: appends to each.

    """
    folder.mkdir()
    store = Store(folder, disk)
    short_one, long_one = store.session(0, SHORT), store.session(1, long)
    store.engine.checkpoints.now()
    for text in (short_one, long_one):
        store.append(text)
    seconds: dict[str, list[float]] = {short_one: [], long_one: []}
    for _ in range(rounds):
        for text, found in seconds.items():
            found.append(store.append(text))
    means = {text: sum(found) / len(found) for text, found in seconds.items()}
    return means[long_one], means[short_one], store.read(long_one), store.read(short_one)


def main(words: list[str] | None = None) -> int:
    """Measure and report; 1 if an append grows by more than half."""
    asked = arguments(QUESTION).parse_args(words)
    long, rounds = (LONG_QUICK, ROUNDS_QUICK) if asked.quick else (LONG, ROUNDS)
    figures: dict[str, Figure] = {}
    fold_many = fold_few = 0.0
    with tempfile.TemporaryDirectory(prefix="cb-grow-", dir=".") as name:
        for kind, disk in (("synced", RealDisk()), ("computed", Unsynced())):
            many, few, fold_many, fold_few = measure(Path(name) / kind, disk, long, rounds)
            figures[f"append {kind}, {long:,} records"] = Figure(many * 1e6, "us", few * 1e6)
        figures["read, per record"] = Figure(fold_many * 1e6, "us", fold_few * 1e6)
    report(f"{QUESTION} (the limit is at {SHORT:,} records)", figures, asked.json)
    grown = [figure.ratio for at, figure in figures.items() if at.startswith("append")]
    return int(max(grown) > 1.5)


if __name__ == "__main__":
    sys.exit(main())
