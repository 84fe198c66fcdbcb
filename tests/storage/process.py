"""A real storage process, and a plain client of its socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import TypeVar, cast

import zmq

from callboard import home
from callboard import messages as m
from callboard.config import Settings
from callboard.errors import CallboardError
from callboard.ids import fresh_id
from callboard.peer import mint_token
from callboard.wire import Header, decode_body, decode_header, encode_body, encode_header

ROOT = Path(__file__).parents[2]
SECRET = bytes(range(32))
B = TypeVar("B", bound=m.Body)


class StorageProcess:
    """One storage process after the other on a home; the caller plays supervisor."""

    def __init__(self, folder: Path) -> None:
        self.home = home.prepare_home(folder / "home")
        self.runtime = home.Runtime(folder / "run")
        home.prepare_runtime(self.runtime)
        self.settings = Settings(home=self.home.root)
        self.plane_id = fresh_id()
        self._ear, self._mouth = os.pipe()
        self.process: subprocess.Popen[bytes] | None = None
        self.said = b""

    def start(self, **environment: str) -> StorageProcess:
        ours, theirs = socket.socketpair()
        order = home.Order(
            role="storage",
            home=str(self.home.root),
            runtime=str(self.runtime.root),
            plane_id=self.plane_id,
            plane_secret=SECRET.hex(),
            plane_epoch=1,
            nonce=fresh_id(),
            token="",
            parent_pid=os.getpid(),
            liveness_fd=self._ear,
            settings=self.settings.model_dump_json(),
        )
        with ours:
            ours.sendall(order.to_json())
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "callboard.storage", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(), self._ear),
                    env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                )
            ours.settimeout(0.001)
            self._channel = ours.dup()
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def hang_up(self) -> None:
        """Let go of the channel that a refused start is told over."""
        self._channel.close()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    def wait(self, timeout: float = 20.0) -> int:
        assert self.process is not None
        status = self.process.wait(timeout)
        self._channel.settimeout(0.2)
        try:
            self.said = self._channel.recv(65_536)
        except OSError:
            self.said = b""
        self._channel.close()
        self.process = None
        return status

    def refusal(self) -> dict[str, object]:
        return cast("dict[str, object]", json.loads(self.said)["error"])

    def close(self) -> None:
        if self.process is not None:
            self.kill()
        os.close(self._ear)
        os.close(self._mouth)


class Client:
    """A peer on the storage socket: blocking, one request at a time, or many in flight."""

    def __init__(self, runtime: home.Runtime, role: str, scope: str = "") -> None:
        self.nonce = fresh_id()
        self.token = mint_token(SECRET, role, scope, self.nonce)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTING_ID, self.nonce.encode())
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 50)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(f"ipc://{runtime.storage}")
        self._count = 0
        self._arrived: deque[list[bytes]] = deque()

    def send(self, body: m.Body, request: str = "") -> str:
        self._count += 1
        name = request or f"r{self._count}"
        header = encode_header(Header(body.kind, name, token=self.token))
        self.socket.send_multipart([header, encode_body(body)])
        return name

    def receive(self, timeout_ms: int = 20_000) -> tuple[str, m.Body]:
        if not self._arrived and not self.socket.poll(timeout_ms):
            raise TimeoutError
        header, body = self._next()
        head = decode_header(header)
        return head.cid, decode_body(head.kind, body)

    def _next(self) -> list[bytes]:
        """Give the next message; several may arrive as a group."""
        if not self._arrived:
            frames = self.socket.recv_multipart()
            self._arrived.extend(frames[at : at + 2] for at in range(0, len(frames), 2))
        return self._arrived.popleft()

    def call(self, body: m.Body, timeout_ms: int = 20_000, again_ms: int = 0) -> m.Body:
        """Ask, and ask again with the same id if no answer comes in time."""
        name = self.send(body)
        end = time.monotonic() + timeout_ms / 1_000
        while True:
            try:
                cid, answer = self.receive(again_ms or timeout_ms)
            except TimeoutError:
                if time.monotonic() > end or not again_ms:
                    raise
                self.send(body, name)
                continue
            if cid == name:
                if isinstance(answer, m.Refusal):
                    raise CallboardError.from_wire(answer.model_dump())
                return answer

    def ask(self, kind: type[B], body: m.Body, **more: int) -> B:
        answer = self.call(body, **more)
        assert isinstance(answer, kind), answer
        return answer

    def close(self) -> None:
        self._context.destroy(0)
