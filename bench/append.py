"""What a durable append costs, from inside the writer and through its process.

    python -m bench.append [--quick] [--json FILE]

The raw limit is a bare write and fdatasync of as many bytes, in the same run on the same disk.
Rates are compared with what that loop does: above 1, group commit shares a sync among requests.

engine      the engine alone, in this process, collecting garbage as an actor does: one append a
            batch, then batches of 256; and of these the processor's time alone
sequential  one client process of the real storage process, one request at a time
pipelined   the same, with 256 requests in flight
clients     200 client processes, each one request at a time
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from bench.common import Bare, Figure, arguments, percentile, report
from callboard import home
from callboard import messages as m
from callboard.ids import SessionRef, fresh_id, workspace_key
from callboard.peer import GC_THRESHOLDS
from callboard.storage.disk import RealClock, RealDisk
from callboard.storage.durable import DurableFile
from callboard.storage.engine import Engine, Options, Release, Reply, Request
from callboard.storage.leases import RealOwners
from callboard.storage.recovery import recover
from tests.storage.process import Client, StorageProcess

QUESTION: Final = "What does a durable append cost?"
WORKSPACE: Final = "/bench"
IN_FLIGHT: Final = 256
CLIENTS: Final = 200
MOST_EACH: Final = 150
"""Appends a second that one client process prepares for."""
WORDS: Final = "x" * 200
APPEND_BYTES: Final = 720
"""Of a frame with such a record, about."""
TURN: Final = "turn_00000000000000000000000001"


def session_ref(number: int) -> str:
    """Name a session."""
    return str(SessionRef(workspace_key(WORKSPACE), f"s{number}"))


def record(kind: str, data: object, turn_id: str | None = None) -> m.NewRecord:
    """Make a record."""
    spelled = json.dumps(data, separators=(",", ":")).encode()
    return m.NewRecord(id=fresh_id(), type=kind, turn_id=turn_id, data=spelled)


def frame(session: str, epoch: int, *records: m.NewRecord) -> m.Append:
    """Make an append."""
    return m.Append(
        session=session, epoch=epoch, key=records[0].id, records=list(records), inbox=[]
    )


def creation(number: int, epoch: int) -> m.Create:
    """Make a session."""
    principal = "principal:operator:local"
    data = {
        "workspace": WORKSPACE,
        "session_id": f"s{number}",
        "root": session_ref(number),
        "agent": "echo",
        "created_at": 1,
        "owner": {"kind": "operator", "principal_id": principal, "created_at": 1},
    }
    record_ = record("session_created", data)
    return m.Create(gateway_epoch=epoch, session=session_ref(number), record=record_)


def owner(plane_id: str) -> m.ProcessIdentity:
    """Describe this process as an owner."""
    return m.ProcessIdentity(
        pid=os.getpid(),
        start_time=home.start_time(os.getpid()) or 0,
        boot_id=home.boot_id(),
        pid_ns=home.pid_namespace(),
        nonce=fresh_id(),
        plane_id=plane_id,
    )


def opening(session: str, epoch: int) -> m.Append:
    """Begin a turn with a message, so that parts can be appended."""
    start: dict[str, object] = {
        "turn_id": TURN,
        "epoch": epoch,
        "kind": "continuation",
        "input_ids": [],
        "chain_index": 0,
        "started_at": 1,
        "agent_id": "echo",
        "principal": "principal:operator:local",
        "trace_id": "t",
    }
    message = {"message_id": "msg", "role": "assistant", "created_at": 1}
    return frame(
        session,
        epoch,
        record("turn_started", start, TURN),
        record("message_created", message, TURN),
    )


def part(session: str, epoch: int) -> m.Append:
    """Append a piece of text: what a running turn does most."""
    data = {
        "part_id": fresh_id(),
        "message_id": "msg",
        "part_type": "text",
        "payload": {"text": WORDS},
        "created_at": 1,
    }
    return frame(session, epoch, record("part_created", data, TURN))


# --- the engine alone -----------------------------------------------------------------------------


class EngineFigures(NamedTuple):
    """What an engine does without a process around it."""

    single: list[float]
    """Seconds of appends that had a batch of their own."""
    rate: float
    """Appends a second in batches of IN_FLIGHT."""
    cpu: float
    """Seconds of processor time that one of these took, of the median batch."""
    bare: list[float]
    """Seconds of bare appends beside the single ones."""


def bench_engine(folder: Path, rounds: int) -> EngineFigures:
    """Drive an engine."""
    gc.set_threshold(*GC_THRESHOLDS)
    root, runtime = folder / "engine", home.Runtime(folder / "engine-run")
    home.prepare_home(root)
    home.prepare_runtime(runtime)
    replies: list[Reply] = []
    disk = RealDisk()
    engine = Engine(
        disk,
        RealClock(),
        recover(disk, str(root), fresh_id, 512),
        RealOwners(runtime),
        DurableFile(disk, str(runtime.durable)),
        Options("bench", 1 << 26, 1 << 30, 1 << 30),
        _keep(replies),
    )

    def call(role: str, body: m.Body) -> m.Body:
        scope = getattr(body, "session", "") if role == "session" else ""
        engine.run([Request(None, role, scope, body)])
        answer = replies.pop().body
        assert isinstance(answer, m.Body), answer
        return answer

    gateway = call("gateway", m.GatewayHello(nonce=fresh_id()))
    assert isinstance(gateway, m.GatewayEpoch)
    for number in range(CLIENTS):
        call("gateway", creation(number, gateway.epoch))
        session = session_ref(number)
        call("session", m.Acquire(session=session, owner=owner("bench")))
        call("session", opening(session, 1))
    single: list[float] = []
    bare = Bare(folder)
    for number in range(rounds):  # turn by turn, so that a busy disk is busy for both
        session = session_ref(number % CLIENTS)
        request = Request(None, "session", session, part(session, 1))
        size = engine.journal.size
        began = time.perf_counter()
        engine.run([request])
        single.append(time.perf_counter() - began)
        bare.append(engine.journal.size - size)
    took, used = 0.0, list[float]()
    for number in range(max(4, rounds // 40)):
        first = number * IN_FLIGHT
        batch = [
            Request(None, "session", session, part(session, 1))
            for session in (session_ref((first + at) % CLIENTS) for at in range(IN_FLIGHT))
        ]
        began, ran = time.perf_counter(), time.process_time()
        engine.run(batch)
        used.append((time.process_time() - ran) / IN_FLIGHT)
        took += time.perf_counter() - began
        replies.clear()
    return EngineFigures(single, len(used) * IN_FLIGHT / took, percentile(used, 50), bare.close())


def _keep(replies: list[Reply]) -> Release:
    def release(more: Sequence[Reply]) -> None:
        replies.extend(more)

    return release


# --- the real process -----------------------------------------------------------------------------


def prepare(storage: StorageProcess) -> None:
    """Create sessions with a running turn each, all owned by this process."""
    gateway = Client(storage.runtime, "gateway")
    epoch = gateway.ask(m.GatewayEpoch, m.GatewayHello(nonce=gateway.nonce)).epoch
    for number in range(CLIENTS):
        gateway.call(creation(number, epoch))
        session = session_ref(number)
        client = Client(storage.runtime, "session", session)
        client.call(m.Acquire(session=session, owner=owner(storage.plane_id)))
        client.call(opening(session, 1))
        client.close()
    gateway.close()


def sequential(
    storage: StorageProcess, folder: Path, rounds: int
) -> tuple[list[float], list[float]]:
    """One request at a time: seconds of each, and of a bare append beside each."""
    session = session_ref(0)
    client = Client(storage.runtime, "session", session)
    bare = Bare(folder)
    found: list[float] = []
    for _ in range(rounds):
        body = part(session, 1)
        began = time.perf_counter()
        client.call(body)
        found.append(time.perf_counter() - began)
        bare.append(APPEND_BYTES)
    client.close()
    return found, bare.close()


def pipelined(storage: StorageProcess, rounds: int) -> float:
    """Keep many requests in flight: appends a second."""
    session = session_ref(1)
    client = Client(storage.runtime, "session", session)
    bodies = [part(session, 1) for _ in range(rounds)]
    began = time.perf_counter()
    sent = 0
    for received in range(rounds):
        while sent < rounds and sent - received < IN_FLIGHT:
            client.send(bodies[sent])
            sent += 1
        client.receive()
    rate = rounds / (time.perf_counter() - began)
    client.close()
    return rate


def many(storage: StorageProcess, seconds: float) -> tuple[float, list[float]]:
    """200 processes, each one request at a time: appends a second, and seconds of each."""
    wait_end, go_end = os.pipe()
    ends: list[tuple[int, int]] = []
    for number in range(CLIENTS):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(go_end)
            _client(storage.runtime, number, seconds, wait_end, write_end)
        os.close(write_end)
        ends.append((pid, read_end))
    for _, read_end in ends:
        os.read(read_end, 1)  # it is ready
    os.close(go_end)  # all of them go on
    latencies: list[float] = []
    for pid, read_end in ends:
        with os.fdopen(read_end) as pipe:
            latencies += json.load(pipe)
        os.waitpid(pid, 0)
    os.close(wait_end)
    return len(latencies) / seconds, latencies


def _client(runtime: home.Runtime, number: int, seconds: float, wait: int, told: int) -> NoReturn:
    """Be one client process."""
    session = session_ref(number)
    client = Client(runtime, "session", session)
    bodies = [part(session, 1) for _ in range(int(seconds * MOST_EACH))]
    client.call(bodies.pop())
    os.write(told, b" ")
    os.read(wait, 1)
    end = time.monotonic() + seconds
    found: list[float] = []
    for body in bodies:
        began = time.monotonic()
        if began >= end:
            break
        client.call(body)
        found.append(round(time.monotonic() - began, 7))
    with os.fdopen(told, "w") as pipe:
        json.dump(found, pipe)
    os._exit(0)


def measure(folder: Path, quick: bool) -> dict[str, Figure]:
    """Take all figures."""
    rounds = 300 if quick else 3_000
    single, batched, cpu, bare = bench_engine(folder, rounds)
    limit, slowest = percentile(bare, 50) * 1e6, percentile(bare, 99) * 1e6
    rate = 1e6 / limit
    figures = {
        "engine, one append, median": Figure(percentile(single, 50) * 1e6, "us", limit),
        "engine, one append, p99": Figure(percentile(single, 99) * 1e6, "us", slowest),
        "engine, batches of 256": Figure(batched, "appends/s", rate),
        "engine, batches of 256, processor": Figure(cpu * 1e6, "us an append", limit),
    }
    storage = StorageProcess(folder)
    storage.start()
    try:
        prepare(storage)
        found, bare = sequential(storage, folder, rounds)
        limit, slowest = percentile(bare, 50) * 1e6, percentile(bare, 99) * 1e6
        rate = 1e6 / limit
        figures["one client, sequential, median"] = Figure(percentile(found, 50) * 1e6, "us", limit)
        figures["one client, sequential, p99"] = Figure(percentile(found, 99) * 1e6, "us", slowest)
        figures["one client, pipelined"] = Figure(pipelined(storage, rounds * 5), "appends/s", rate)
        total, latencies = many(storage, 1.0 if quick else 4.0)
        figures["200 client processes"] = Figure(total, "appends/s", rate)
        figures["200 client processes, median"] = Figure(
            percentile(latencies, 50) * 1e6, "us", limit
        )
        figures["200 client processes, p99"] = Figure(
            percentile(latencies, 99) * 1e6, "us", slowest
        )
        storage.stop()
    finally:
        storage.close()
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench."""
    asked = arguments(QUESTION).parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="append-", dir=_here()) as folder:
        figures = measure(Path(folder), asked.quick)
    report(QUESTION, figures, asked.json)
    return 0


def _here() -> Path:
    """Pick a place on a real disk: the temporary folder may be memory."""
    place = Path.home() / ".cache"
    place.mkdir(exist_ok=True)
    return place


if __name__ == "__main__":
    sys.exit(main())
