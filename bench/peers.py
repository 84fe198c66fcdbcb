"""How many durable steps a second others write, and callboard, in one run on one disk.

    pip install -e '.[bench-peers]'
    python -m bench.peers [--quick] [--json FILE]

A step is a text of 200 characters that is there after a crash. Each program is used as its own
documentation says, with its defaults, by one writer that waits for each step; a rate is that of the
median step. What a program syncs is asked of SQLite, as its own connections have it: none of them
sets `synchronous`. The raw limit is a bare write and fdatasync right behind it.

callboard, one step a sync    `callboard.storage.local`, in this process, one append after the other
callboard, 256 a sync         the engine, as it is when many sessions write at once
langgraph                     `SqliteSaver.put` of one thread
openai-agents                 `SQLiteSession.add_items` of one session
dbos                          the steps of one workflow, on SQLite
"""

from __future__ import annotations

import asyncio
import importlib
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.append import IN_FLIGHT, bench_engine, creation, opening, owner, part, session_ref
from bench.common import Figure, arguments, bare_fdatasync, percentile, report
from callboard import messages as m
from callboard.ids import fresh_id
from callboard.storage.local import open_local

QUESTION: Final = "How many durable steps a second?"
WORDS: Final = "x" * 200
STEP_BYTES: Final = 720
SYNCHRONOUS: Final = ("OFF", "NORMAL", "FULL", "EXTRA")


class Steps(NamedTuple):
    """What one program did."""

    seconds: list[float]
    """Of each step."""
    synced: str
    """What is on the disk when a step is done."""


class Peer(NamedTuple):
    """Another program."""

    package: str
    run: Callable[[Path, int], Steps]


def callboard(folder: Path, rounds: int) -> Steps:
    """Append to one session, one step after the other."""
    storage = open_local(folder / "home")
    try:
        gateway = storage.hello_gateway(m.GatewayHello(nonce=fresh_id())).epoch
        storage.create(creation(0, gateway))
        session = session_ref(0)
        epoch = storage.acquire(m.Acquire(session=session, owner=owner("bench"))).epoch
        storage.append(opening(session, epoch))
        seconds = [timed(lambda: storage.append(part(session, epoch))) for _ in range(rounds)]
    finally:
        storage.close()
    return Steps(seconds, "fdatasync of the journal for each step")


def langgraph(folder: Path, rounds: int) -> Steps:
    """Put one checkpoint after the other."""
    base: Any = importlib.import_module("langgraph.checkpoint.base")
    sqlite: Any = importlib.import_module("langgraph.checkpoint.sqlite")
    with closing(sqlite3.connect(folder / "langgraph.db", check_same_thread=False)) as connection:
        saver = sqlite.SqliteSaver(connection)
        saver.setup()
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        seconds: list[float] = []
        for step in range(rounds):
            began = time.perf_counter()
            checkpoint = base.empty_checkpoint()
            checkpoint["channel_values"] = {"text": WORDS}
            metadata: dict[str, object] = {"source": "loop", "step": step, "parents": {}}
            config = saver.put(config, checkpoint, metadata, {})
            seconds.append(time.perf_counter() - began)
        return Steps(seconds, pragmas(connection))


def openai_agents(folder: Path, rounds: int) -> Steps:
    """Add one item after the other."""
    agents: Any = importlib.import_module("agents")
    path = folder / "agents.db"
    session = agents.SQLiteSession("s", path)

    seconds: list[float] = []

    async def add() -> None:
        for _ in range(rounds):
            began = time.perf_counter()
            await session.add_items([{"role": "user", "content": WORDS}])
            seconds.append(time.perf_counter() - began)

    asyncio.run(add())
    session.close()
    with closing(sqlite3.connect(path)) as connection:
        return Steps(seconds, pragmas(connection))


def dbos(folder: Path, rounds: int) -> Steps:
    """Run a workflow of so many steps."""
    found: Any = importlib.import_module("dbos")
    path = folder / "dbos.db"
    found.DBOS(
        config={
            "name": "bench",
            "system_database_url": f"sqlite:///{path}",
            "log_level": "ERROR",
            "executor_id": "bench",
            "application_version": "1",
        }
    )

    @found.DBOS.step()  # type: ignore[untyped-decorator]
    def step() -> str:
        return WORDS

    @found.DBOS.workflow()  # type: ignore[untyped-decorator]
    def workflow(count: int) -> list[float]:
        return [timed(step) for _ in range(count)]

    found.DBOS.launch()
    try:
        seconds = workflow(rounds)
    finally:
        found.DBOS.destroy()
    with closing(sqlite3.connect(path)) as connection:
        return Steps(seconds, pragmas(connection))


def timed(run: Callable[[], object]) -> float:
    """Run something; gives the seconds that it took."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def pragmas(connection: sqlite3.Connection) -> str:
    """Say how a database is written: its journal's mode, and the default sync of a connection."""
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    (level,) = connection.execute("PRAGMA synchronous").fetchone()
    when = {0: "nothing is synced", 1: "synced at checkpoints only"}.get(level, "synced a commit")
    if mode != "wal" and level == 1:
        when = "synced a commit"
    return f"SQLite, journal {mode}, synchronous {SYNCHRONOUS[level]}: {when}"


PEERS: Final = (
    Peer("langgraph-checkpoint-sqlite", langgraph),
    Peer("openai-agents", openai_agents),
    Peer("dbos", dbos),
)


def measure(folder: Path, quick: bool) -> dict[str, Figure]:
    """Take all figures; says of each program what it syncs, or why it was left out."""
    rounds = 100 if quick else 1_000

    def figure(found: Steps) -> Figure:
        """Compare medians: what others do to the disk meanwhile then shows in both, or in none."""
        bare = bare_fdatasync(folder, STEP_BYTES, rounds)
        return Figure(1 / percentile(found.seconds, 50), "steps/s", 1 / percentile(bare, 50))

    own = callboard(folder, rounds)
    print(f"callboard: {own.synced}")
    figures = {"callboard, one step a sync": figure(own)}
    (folder / "engine-bench").mkdir()
    engine = bench_engine(folder / "engine-bench", rounds)
    name = f"callboard, {IN_FLIGHT} a sync"
    figures[name] = Figure(engine.rate, "steps/s", 1 / percentile(engine.bare, 50))
    for peer in PEERS:
        try:
            told = f"{peer.package} {version(peer.package)}"
        except PackageNotFoundError:
            print(f"{peer.package}: left out, not installed (pip install 'callboard[bench-peers]')")
            continue
        found = peer.run(folder, rounds)
        print(f"{told}: {found.synced}")
        figures[told] = figure(found)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench."""
    asked = arguments(QUESTION).parse_args(argv)
    place = Path.home() / ".cache"  # on a real disk: the temporary folder may be memory
    place.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="peers-", dir=place) as folder:
        figures = measure(Path(folder), asked.quick)
    report(QUESTION, figures, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
