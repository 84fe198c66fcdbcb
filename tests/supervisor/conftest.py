"""Planes of stub children: the real supervisor and fork process, real processes, no storage."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from callboard.config import load_settings
from callboard.home import Home, Runtime, runtime_of
from callboard.supervisor.launch import Launched, launch

MODULES = {role: f"tests.supervisor.stubs.{role}" for role in ("storage", "gateway", "session")}
Note = dict[str, Any]
PATIENCE_S = 20.0


def ref(name: str) -> str:
    return f"w-{'0' * 32}/{name}"


def until(found: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Wait until something is there, and give it."""
    end = time.monotonic() + PATIENCE_S
    while not (value := found()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
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


class StubPlane:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.home = Home(base / "h")
        self.launched: list[Launched] = []
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._count = 0

    def close(self) -> None:
        self._control.close()
        for launched in self.launched:
            if launched.pidfd >= 0:
                if launched.wait(0) is None:
                    launched.kill()
                    launched.wait()
                launched.close()

    @property
    def runtime(self) -> Runtime:
        return runtime_of(self.home.root)

    def want(self, what: str) -> None:
        """Have a stub do something special, see stubs/common.py."""
        Path(f"{self.home.root}.{what}").touch()

    def up(
        self,
        *,
        embedded: bool = True,
        cwd: str | None = None,
        session: str = MODULES["session"],
        timeout_s: float = PATIENCE_S,
        **flags: object,
    ) -> Launched:
        settings = load_settings({"home": str(self.home.root), **flags}, {}, _no_file(self))
        before = os.getcwd()
        if cwd is not None:
            os.chdir(cwd)
        try:
            launched = launch(
                self.home.root,
                settings,
                detach=False,
                embedded=embedded,
                timeout_s=timeout_s,
                modules={**MODULES, "session": session},
            )
        finally:
            os.chdir(before)
        self.launched.append(launched)
        return launched

    def notes(self, **facts: object) -> list[Note]:
        try:
            text = Path(f"{self.home.root}.notes").read_text()
        except FileNotFoundError:
            return []
        lines = [json.loads(line) for line in text.splitlines()]
        return [n for n in lines if all(n.get(key) == value for key, value in facts.items())]

    def note(self, **facts: object) -> Note:
        """Wait for a note and give the last such."""
        found: list[Note] = until(lambda: self.notes(**facts))
        return found[-1]

    def ask(self, kind: str, **body: object) -> str:
        """Have the stub gateway ask the supervisor something."""
        self._count += 1
        name = f"t{self._count}"
        packet = json.dumps({"kind": kind, "id": name, "body": body}).encode()
        self._control.sendto(packet, f"{self.home.root}.ctl")
        return name

    def answer(self, kind: str, **body: object) -> Note:
        name = self.ask(kind, **body)
        return self.note(role="gateway", cid=name)

    def activate(self, name: str, evict: list[str] | None = None) -> Note:
        return self.answer("activate", session=ref(name), evict=[ref(one) for one in evict or []])

    def tree(self) -> Note:
        body: Note = self.answer("supervisor_status")["body"]
        return body

    def pid(self, role: str) -> int:
        found: int = next(p["pid"] for p in self.tree()["processes"] if p["role"] == role)
        return found

    def pids(self) -> list[int]:
        return [p["pid"] for p in self.tree()["processes"] if p["pid"]]

    def log(self) -> list[Note]:
        path = self.home.logs / "supervisor.log"
        return [json.loads(line) for line in path.read_text().splitlines()]


def _no_file(plane: StubPlane) -> Path:
    file = plane.base / "config.toml"
    file.touch(mode=0o600)
    return file


@pytest.fixture
def plane(base: Path) -> Iterator[StubPlane]:
    made = StubPlane(base)
    yield made
    made.close()
