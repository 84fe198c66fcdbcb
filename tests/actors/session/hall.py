"""A real session process between two sockets that a test holds.

Storage and gateway are plain ZeroMQ routers with `FakeStorage` behind the one; the session is
`callboard.actors.session.main` in a process of its own, as the fork process would run it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import zmq

from callboard.config import load_settings
from callboard.errors import CallboardError
from callboard.home import Home, Order, Runtime, prepare_home, prepare_runtime
from callboard.ids import fresh_id
from callboard.messages import (
    BODIES,
    Beat,
    Body,
    CancelTurn,
    Deliver,
    InboxItem,
    Permit,
    PermitAsk,
    PermitReturn,
    Receipt,
    Register,
    Registered,
)
from callboard.wire import (
    Header,
    decode_body,
    decode_header,
    encode_body,
    encode_header,
    error_body,
)
from tests.scenarios.stage import REF, FakeStorage, item

ROOT = Path(__file__).parents[3]
CHILD = """
import sys
from callboard.home import Order
from callboard.actors.session import main
sys.exit(main(Order.from_json(sys.stdin.buffer.readline())))
"""
Found = TypeVar("Found")


class Hall:
    """The sockets, what came over them, and the session's process."""

    def __init__(self, folder: Path, agent: str, settings: dict[str, str] | None = None) -> None:
        self.home = prepare_home(folder / "home")
        self.runtime = Runtime(folder / "run")
        prepare_runtime(self.runtime)
        (self.home.root / "logs").mkdir(exist_ok=True)
        self.storage = FakeStorage(agent, settings or {})
        self.answers: dict[str, Body | CallboardError] = {}
        self.told: list[Body] = []
        self.permits = 0
        self.received = 0
        self.storage_frames = 0
        self._requests = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peer = b""
        self._liveness = -1
        self.store = self._bind(self.runtime.storage)
        self.gateway = self._bind(self.runtime.gateway)
        self._poller = zmq.Poller()
        self._poller.register(self.store, zmq.POLLIN)
        self._poller.register(self.gateway, zmq.POLLIN)
        self.process: subprocess.Popen[bytes] | None = None

    def _bind(self, path: Path) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.bind(f"ipc://{path}")
        return socket

    def start(self, **settings: object) -> None:
        """Start the session's process and wait until it is ready."""
        if self._liveness >= 0:
            os.close(self._liveness)
        nonce = fresh_id()
        self._peer = nonce.encode()
        reader, self._liveness = os.pipe()
        os.set_inheritable(reader, True)
        order = Order(
            role="session",
            home=str(self.home.root),
            runtime=str(self.runtime.root),
            plane_id="p" * 26,
            plane_secret="",
            plane_epoch=1,
            nonce=nonce,
            token=f"session|{REF}|0",
            parent_pid=os.getpid(),
            liveness_fd=reader,
            settings=load_settings({"home": str(self.home.root), **settings}).model_dump_json(),
            session=str(REF),
        )
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD],
            stdin=subprocess.PIPE,
            pass_fds=[reader],
            env=environ,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(order.to_json())
        self.process.stdin.close()
        os.close(reader)
        self.told.clear()
        self.wait(lambda: any(isinstance(one, Beat) for one in self.told))

    def end_supervisor(self) -> None:
        """Close the write end of the liveness pipe."""
        os.close(self._liveness)
        self._liveness = -1

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self._liveness >= 0:
            os.close(self._liveness)
        self.store.close(0)
        self.gateway.close(0)
        self._context.term()

    def restart_storage(self) -> None:
        """Close storage's socket and bind it anew: what was on its way is lost."""
        self._poller.unregister(self.store)
        self.store.close(0)
        self.runtime.storage.unlink(missing_ok=True)
        self.store = self._bind(self.runtime.storage)
        self._poller.register(self.store, zmq.POLLIN)

    # Talking.

    def wait(self, condition: Callable[[], Found], seconds: float = 10.0) -> Found:
        """Serve until something is so."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, "it does not come true"
            self.serve(50)
        return found

    def serve(self, ms: int = 0) -> None:
        """Answer what has come."""
        for socket, _ in self._poller.poll(ms):
            while True:
                try:
                    peer, *frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                for head, body in zip(frames[::2], frames[1::2], strict=True):
                    header = decode_header(head)
                    if peer == self._peer and header.kind in BODIES:  # others are the links' own
                        self._take(socket is self.store, header, decode_body(header.kind, body))

    def _take(self, storage: bool, header: Header, body: Body) -> None:
        self.received += 1
        if storage:
            self.storage_frames += 1
            self._send(self.store, header.id, self.storage.handle(body))
        elif header.cid:
            assert header.cid not in self.answers
            self.answers[header.cid] = body
        else:
            self.told.append(body)
            if isinstance(body, Register):
                self._send(self.gateway, "", Registered(gateway_epoch=1))
            elif isinstance(body, PermitAsk):
                self.permits += 1
                self._send(self.gateway, header.id, Permit(state="granted"))
            elif isinstance(body, PermitReturn):
                self.permits -= 1

    def _send(self, socket: zmq.Socket[bytes], cid: str, answer: Body | CallboardError) -> None:
        if isinstance(answer, CallboardError):
            kind, body = "error", error_body(answer)
        else:
            kind, body = answer.kind, encode_body(answer)
        socket.send_multipart([self._peer, encode_header(Header(kind, cid=cid)), body])

    def request(self, body: Body) -> str:
        """Send the session a request of the gateway."""
        self._requests += 1
        name = f"g{self._requests}"
        header = encode_header(Header(body.kind, name))
        self.gateway.send_multipart([self._peer, header, encode_body(body)])
        return name

    def send(self, message: InboxItem | str, *, permit: bool = False) -> str:
        """Deliver an input."""
        self.permits += permit
        one = item(message) if isinstance(message, str) else message
        return self.request(Deliver(item=one, permit=permit))

    def cancel(self) -> str:
        """Cancel the turn."""
        body = CancelTurn(turn_id=None, message_id=None, keep_input=False, principal="p")
        return self.request(body)

    def answer(self, request: str, seconds: float = 10.0) -> Body | CallboardError:
        """Wait for a request's answer."""
        self.wait(lambda: request in self.answers, seconds)
        return self.answers[request]

    def receipt(self, request: str) -> Receipt:
        """Wait for a request's receipt."""
        answer = self.answer(request)
        assert isinstance(answer, Receipt), answer
        return answer

    def exit_status(self, seconds: float = 10.0) -> int:
        """Wait for the session's process to end."""
        process = self.process
        assert process is not None
        self.wait(lambda: process.poll() is not None, seconds)
        return process.wait()

    def log(self) -> list[dict[str, Any]]:
        """Read the session's log."""
        lines = [f.read_text(encoding="ascii") for f in Home(self.home.root).logs.glob("session-*")]
        return [json.loads(line) for text in lines for line in text.splitlines()]


@contextmanager
def hall(folder: Path, agent: str, settings: dict[str, str] | None = None) -> Generator[Hall]:
    """Set up a hall and take it down again."""
    made = Hall(folder, agent, settings)
    try:
        yield made
    finally:
        made.close()
