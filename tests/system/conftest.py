"""Whole planes of real processes, and clients that keep their own books."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from callboard.config import load_settings
from callboard.home import Home, Runtime, runtime_of
from callboard.supervisor.launch import Launched, launch
from tests.system.doorclient import PATIENCE_S, Body, Closed, DoorClient, connect

SNAP = {"checkpoint_ms": 200}


def until(found: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:  # noqa: ANN401
    """Wait until something is there, and give it."""
    end = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
    return value


def ended(pids: list[int], within_s: float) -> list[int]:
    """Give those of these processes that have not ended in time."""
    end = time.monotonic() + within_s
    left: list[int] = []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            left.append(pid)
        os.close(fd)
    return left


class RealPlane:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.home = Home(base / "h")
        self.launched: Launched | None = None
        self._clients: list[DoorClient] = []

    @property
    def runtime(self) -> Runtime:
        return runtime_of(self.home.root)

    def up(self, **flags: object) -> Launched:
        file = self.base / "config.toml"
        file.touch(mode=0o600)
        settings = load_settings({"home": str(self.home.root), **SNAP, **flags}, {}, file)
        self.launched = launch(self.home.root, settings, detach=False, embedded=True, timeout_s=60)
        return self.launched

    def down(self) -> int | None:
        """Stop in order."""
        assert self.launched is not None
        self.launched.terminate()
        status = self.launched.wait(30)
        self.launched.close()
        self.launched = None
        return status

    def kill(self) -> None:
        """SIGKILL the supervisor."""
        assert self.launched is not None
        self.launched.kill()
        assert self.launched.wait(10) == -9
        self.launched.close()
        self.launched = None

    def close(self) -> None:
        for client in self._clients:
            client.close()
        if self.launched is not None:
            self.launched.kill()
            self.launched.wait(10)
            self.launched.close()

    def connect(self) -> DoorClient:
        client = connect(self.runtime.door, self.runtime.operator_token)
        self._clients.append(client)
        return client

    # ---- What operators see ----

    def status(self) -> Body:
        client = connect(self.runtime.door, self.runtime.operator_token)
        with client:
            body: Body = client.call("status")["body"]
            return body

    def processes(self, role: str) -> list[Body]:
        return [p for p in self.status()["processes"] if p["role"] == role and p["pid"]]

    def pid(self, role: str) -> int:
        found: int = self.processes(role)[0]["pid"]
        return found

    def pids(self) -> list[int]:
        return [p["pid"] for p in self.status()["processes"] if p["pid"]]

    # ---- Sessions ----

    def create(self, client: DoorClient, name: str, agent: str = "echo") -> str:
        answer = client.call(
            "create_session",
            key=hashlib.sha256(name.encode()).hexdigest()[:32],
            workspace=str(self.base),
            session_id=name,
            agent=agent,
        )
        assert answer["kind"] == "created", answer
        session: str = answer["body"]["session"]
        return session

    def records(self, session: str) -> list[Body]:
        path = self.home.sessions / session / "transcript.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def applied(self, session: str) -> list[str]:
        """Give the ids of the inputs that turns took, in order."""
        return [
            record["data"]["inbox_message_id"]
            for record in self.records(session)
            if record["type"] == "message_created" and record["data"].get("inbox_message_id")
        ]

    def snapshot(self) -> dict[str, tuple[int, str]]:
        """Give mode and digest of every file of the home but logs and runtime (O6)."""
        return {
            str(path.relative_to(self.home.root)): (
                path.stat().st_mode,
                hashlib.sha256(path.read_bytes()).hexdigest(),
            )
            for path in sorted(self.home.root.rglob("*"))
            if path.is_file() and path.relative_to(self.home.root).parts[0] not in ("logs", "run")
        }


class Oracle:
    """Clients that send until they have a receipt, and write down what they were promised (O1)."""

    def __init__(self, plane: RealPlane, sessions: list[str], inputs: int) -> None:
        self.plane = plane
        self.sessions = sessions
        self.inputs = inputs
        self.promised: dict[str, list[str]] = {session: [] for session in sessions}
        self.refused: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._work, args=(session,)) for session in sessions
        ]

    def start(self) -> Oracle:
        for thread in self._threads:
            thread.start()
        return self

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a client is stuck"
        assert self.failures == []

    @property
    def done(self) -> int:
        return sum(map(len, self.promised.values()))

    def _work(self, session: str) -> None:
        try:
            client: DoorClient | None = None
            for n in range(self.inputs):
                message_id = f"{n:05d}"
                while True:
                    try:
                        if client is None:
                            client = connect(
                                self.plane.runtime.door, self.plane.runtime.operator_token, 60
                            )
                        answer = client.answer(client.send_text(session, message_id, message_id))
                    except (Closed, OSError):
                        if client is not None:
                            client.close()
                        client = None
                        time.sleep(0.01)
                        continue
                    if answer["kind"] == "receipt":
                        self.promised[session].append(message_id)
                        break
                    self.refused[answer["body"]["code"]] += 1
                    time.sleep(0.02)
            if client is not None:
                client.close()
        except BaseException as error:
            self.failures.append(error)

    def judge(self) -> None:
        """Compare what was promised with what the transcripts say: once each, in order."""
        for session in self.sessions:
            promised = self.promised[session]
            assert len(promised) == self.inputs
            until(lambda s=session: len(set(self.plane.applied(s))) >= self.inputs, 60)  # type: ignore[misc]
            applied = self.plane.applied(session)
            counts = Counter(applied)
            assert set(counts) == set(promised), "lost, or never asked for"
            first = list(dict.fromkeys(applied))
            assert first == sorted(first), "out of order"


def fold_laws(records: list[Body]) -> None:
    """Check what holds in every transcript (O3)."""
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
    epochs = [record["epoch"] for record in records]
    assert epochs == sorted(epochs)
    started = [r["turn_id"] for r in records if r["type"] == "turn_started"]
    terminals = [r["turn_id"] for r in records if r["type"] in ("turn_completed", "turn_aborted")]
    assert len(started) == len(set(started))
    assert len(terminals) == len(set(terminals))
    assert set(terminals) <= set(started)
    acknowledged = [
        item["message_id"]
        for r in records
        if r["type"] == "inbox_acknowledged"
        for item in r["data"]["items"]
    ]
    assert len(acknowledged) == len(set(acknowledged)), "acknowledged twice"


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal a process that may have ended meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@pytest.fixture
def plane(base: Path) -> Iterator[RealPlane]:
    made = RealPlane(base)
    yield made
    made.close()
