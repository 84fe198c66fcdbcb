"""A door with a gateway behind it that does as a test says; what it accepted, it keeps."""

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from callboard import messages
from callboard.errors import CallboardError, NotAuthenticated
from callboard.home import Home, runtime_of
from callboard.limits import CLIENT_MESSAGE_BYTES_MAX, PROTOCOL
from callboard.wire import Header, Unframer, decode_door, door_frame, encode_body, error_body

REF = "demo-" + "0" * 32 + "/s1"
Answer = messages.Body | CallboardError | None
Handler = Callable[[Header, Mapping[str, object]], Answer | list[messages.Body]]


class FakeGateway:
    """Serves one home's door. `accepted` outlives its deaths; so does the lock of the home."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.home.mkdir(mode=0o700, exist_ok=True)
        self.runtime = runtime_of(self.home)
        self.runtime.root.mkdir(mode=0o700, exist_ok=True)
        self.token = "t" * 64
        self.accepted: dict[str, object] = {}
        self.order: list[str] = []
        self.asked: list[tuple[Header, Mapping[str, object]]] = []
        self.handlers: dict[str, Handler] = {}
        self.connections: list[socket.socket] = []
        self.refuse_hello: CallboardError | None = None
        self.drop_after: int | None = None
        """Close the connection without an answer after so many more requests."""
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._lock_fd = -1

    # --- its life

    def __enter__(self) -> "FakeGateway":
        self.hold_home()
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self.release_home()
        for thread in self._threads:
            thread.join(5)

    def hold_home(self) -> None:
        self._lock_fd = os.open(Home(self.home).lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)

    def release_home(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def up(self, *, backlog: int = 64, serve: bool = True) -> None:
        self.write_token(self.token)
        self.runtime.door.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.runtime.door))
        self._listener.listen(backlog)
        if serve:
            self._go(self._accept, self._listener)

    def write_token(self, token: str) -> None:
        self.token = token
        self.runtime.operator_token.write_text(token)
        self.runtime.operator_token.chmod(0o600)

    def serve(self) -> None:
        assert self._listener is not None
        self._go(self._accept, self._listener)

    def die(self) -> None:
        """End as by SIGKILL: the socket's name stays, nobody is behind it."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for connection in self.connections:
            with_shutdown(connection)
        self.connections.clear()

    def _go(self, target: Callable[[socket.socket], None], sock: socket.socket) -> None:
        thread = threading.Thread(target=target, args=(sock,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            self._go(self._serve, connection)

    # --- one connection

    def _serve(self, connection: socket.socket) -> None:
        unframer = Unframer(CLIENT_MESSAGE_BYTES_MAX)
        with connection:
            while True:
                try:
                    data = connection.recv(65536)
                    if not data:
                        return
                    for payload in unframer.feed(data):
                        if not self._message(connection, payload):
                            return
                except OSError:
                    return

    def _message(self, connection: socket.socket, payload: bytes) -> bool:
        header, body = decode_door(payload)
        if header.kind == "hello":
            refusal = self.refuse_hello
            if refusal is None and body["token"] != self.token:
                refusal = NotAuthenticated()
            welcome = messages.Welcome(protocol=PROTOCOL, plane_id="p", gateway_epoch=1)
            self.say(connection, header.id, refusal or welcome)
            return refusal is None
        self.asked.append((header, body))
        answer = self.answer(header, body)
        if self.drop_after is not None:
            self.drop_after -= 1
            if self.drop_after < 0:
                self.drop_after = None
                return False
        for each in answer if isinstance(answer, list) else [answer]:
            if each is not None:
                self.say(connection, header.id, each)
        return True

    def answer(self, header: Header, body: Mapping[str, object]) -> Answer | list[messages.Body]:
        handler = self.handlers.get(header.kind)
        if handler is not None:
            return handler(header, body)
        if header.kind == "send":
            return self.accept(body)
        if header.kind == "create_session":
            return messages.Created(session=REF, fresh=True)
        return messages.Ok()

    def accept(self, body: Mapping[str, object]) -> messages.Receipt:
        """Do as storage: the same message id twice is one message."""
        message_id = str(body["message_id"])
        known = message_id in self.accepted
        if not known:
            self.accepted[message_id] = body["content"]
            self.order.append(message_id)
        return messages.Receipt(
            accepted=True,
            message_id=message_id,
            duplicate=known,
            item_state="claimed",
            delivery="current_turn",
            turn_id="turn_1",
            queued=1,
        )

    def say(
        self, connection: socket.socket, cid: str, what: messages.Body | CallboardError
    ) -> None:
        if isinstance(what, CallboardError):
            frame = door_frame(Header("error", cid=cid), error_body(what))
        else:
            frame = door_frame(Header(what.kind, cid=cid), encode_body(what))
        with contextlib.suppress(OSError):
            connection.sendall(frame)

    def say_all(self, cid: str, what: messages.Body | CallboardError) -> None:
        for connection in list(self.connections):
            self.say(connection, cid, what)


def with_shutdown(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
