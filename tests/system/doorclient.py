"""A client of the door that shares no code with the product: a length, one msgpack map."""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

import msgpack

Body = dict[str, Any]
PROTOCOL = 1
PATIENCE_S = 20.0


class Closed(Exception):
    """The other end closed the connection."""


class Wire:
    """A connection, and frames on it."""

    def __init__(self, path: Path, timeout_s: float = PATIENCE_S) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(timeout_s)
        try:
            self.socket.connect(os.fspath(path))
        except BaseException:
            self.socket.close()
            raise
        self._buffer = b""

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Any:  # noqa: ANN401
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send_raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_payload(self, payload: bytes) -> None:
        self.send_raw(struct.pack("<I", len(payload)) + payload)

    def send(self, kind: str, body: Body, request: str, **header: object) -> None:
        self.send_payload(message(kind, body, request, **header))

    def receive(self) -> Body:
        """Read one message.

        Raises:
            Closed: the connection ended instead.

        """
        while True:
            if len(self._buffer) >= 4:
                (size,) = struct.unpack_from("<I", self._buffer)
                if len(self._buffer) >= 4 + size:
                    payload = self._buffer[4 : 4 + size]
                    self._buffer = self._buffer[4 + size :]
                    found: Body = msgpack.unpackb(payload)
                    return found
            try:
                data = self.socket.recv(262_144)
            except ConnectionResetError:
                data = b""
            if not data:
                raise Closed
            self._buffer += data

    def is_closed(self) -> bool:
        """Read on until the end; false if a message comes instead."""
        try:
            self.receive()
        except Closed:
            return True
        return False


def message(kind: str, body: object, request: str = "", **header: object) -> bytes:
    fields: Body = {"v": PROTOCOL, "kind": kind, "id": request, **header, "body": body}
    packed: bytes = msgpack.packb(fields)
    return packed


class DoorClient(Wire):
    """A connection that has said hello."""

    def __init__(self, path: Path, token: str, timeout_s: float = PATIENCE_S) -> None:
        super().__init__(path, timeout_s)
        self._count = 0
        self._early: dict[str, list[Body]] = {}
        try:
            self.send("hello", {"protocol": PROTOCOL, "token": token, "client": "test"}, "hello")
            self.welcome = self.receive()
        except BaseException:
            self.close()
            raise
        assert self.welcome["kind"] == "welcome", self.welcome

    def ask(self, kind: str, request: str = "", deadline: int = 0, **body: object) -> str:
        """Send a request and give its id."""
        return self.request(kind, body, request, deadline)

    def request(
        self, kind: str, body: dict[str, object], request: str = "", deadline: int = 0
    ) -> str:
        """Send a request with a body as it stands and give its id."""
        if not request:
            self._count += 1
            request = f"r{self._count}"
        header = {"deadline": deadline} if deadline else {}
        self.send(kind, body, request, **header)
        return request

    def answer(self, request: str) -> Body:
        """Wait for a message that answers a request."""
        while True:
            if early := self._early.get(request):
                return early.pop(0)
            found = self.receive()
            self._early.setdefault(found.get("cid", ""), []).append(found)

    def call(self, kind: str, **body: object) -> Body:
        return self.answer(self.request(kind, body))

    def send_text(self, session: str, message_id: str, text: str = "hi", **more: object) -> str:
        content = [{"type": "text", "text": text}]
        body = {"session": session, "message_id": message_id, "content": content, **more}
        return self.request("send", body)


def connect(path: Path, token_path: Path, within_s: float = PATIENCE_S) -> DoorClient:
    """Connect to a door that may be coming back."""
    end = time.monotonic() + within_s
    while True:
        try:
            return DoorClient(path, token_path.read_text(), within_s)
        except (OSError, Closed):
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
