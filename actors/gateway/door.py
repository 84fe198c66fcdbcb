"""The clients' door: a Unix stream socket with an acceptor of our own (FLT-41, FLT-46, FLT-59).

Everything here runs on the I/O thread, but for what is marked. It knows connections and frames, and
no meaning: `Came` hands whole messages to the actor, which answers through `finish` and decides when
a connection ends.

Nothing a client does grows without limit: reading stops while the actor has READ_AHEAD of a
connection before it, and what a slow reader leaves unread is bounded by CLIENT_OUTPUT_BYTES_MAX,
after which the connection is dropped.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import stat
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

from callboard.errors import (
    CallboardError,
    HomeInUse,
    HomeUnsafe,
    NotAuthenticated,
    Overloaded,
    PayloadTooLarge,
)
from callboard.home import open_state, remove_file
from callboard.limits import (
    CLIENT_MESSAGE_BYTES_MAX,
    CLIENT_OUTPUT_BYTES_MAX,
    DOOR_BACKLOG_MAX,
    RUNTIME_PATH_BYTES_MAX,
)
from callboard.peer import Io
from callboard.wire import Header, Unframer, door_frame, error_body

READ_BYTES: Final = 65_536
READ_AHEAD_MESSAGES: Final = 64
READ_AHEAD_BYTES: Final = 262_144
HELLO_BYTES_MAX: Final = 16_384
"""More than any hello; a stranger gets no buffer of CLIENT_MESSAGE_BYTES_MAX."""
PIECES_MAX: Final = 256
"""Messages that go out in one call."""
PAUSE_MS: Final = 100
LAST_WORDS_S: Final = 1.0
"""How long a dropped connection has to read why."""
_PEER: Final = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LOG_EVERY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A client has connected."""

    conn: int


@dataclass(frozen=True, slots=True)
class Came:
    """Whole messages of a client, in order. `refused` ended its input: nothing more is read."""

    conn: int
    payloads: list[bytes]
    refused: CallboardError | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """A client's connection has ended."""

    conn: int


@dataclass(frozen=True, slots=True)
class Paused:
    """The system has no room for another connection; call `resume` in PAUSE_MS."""


@dataclass(slots=True)
class Done:
    """What the actor has done about connections, in the order in which it takes effect."""

    handled: list[tuple[int, list[bytes]]] = field(default_factory=list[tuple[int, list[bytes]]])
    """Messages of a `Came` that were dealt with, so that more is read."""
    messages: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    """Framed messages to send, in order."""
    closed: list[int] = field(default_factory=list[int])
    """Connections that end after what was sent."""

    def __bool__(self) -> bool:
        return bool(self.handled or self.messages or self.closed)


@dataclass(slots=True, eq=False)
class _Connection:
    number: int
    socket: socket.socket
    unframer: Unframer
    greeted: bool = False
    ahead_messages: int = 0
    """Handed to the actor and not handled yet."""
    ahead_bytes: int = 0
    out: deque[bytes] = field(default_factory=deque[bytes])
    out_bytes: int = 0
    started: bool = False
    """A part of the first piece has been written."""
    reading: bool = True
    writing: bool = False
    closing: bool = False
    """Nothing more is taken; it ends when `out` is written, or at `ends_at`."""
    ends_at: float = 0.0


class Door:
    """The listening socket and its connections.

    Args:
        io: the loop they live on.
        path: where to bind, in a folder of mode 0700.
        lock: `bind.lock`; the door's byte of it is held until the process ends.
        connections_max: CLIENT_CONNECTIONS_MAX.

    """

    def __init__(self, io: Io, path: Path, lock: Path, connections_max: int) -> None:
        self._io = io
        self._path = path
        self._lock = lock
        self._max = connections_max
        self._listener: socket.socket | None = None
        self._lock_fd = -1
        self._accepting = False
        self._connections: dict[int, _Connection] = {}
        self._number = 0
        self._said: dict[str, float] = {}
        self.refused = 0
        """Connections that were turned away."""

    # ---- Opening ----

    def open(self) -> None:
        """Bind and listen (FLT-43); before `Io.run`, or on its thread.

        Raises:
            HomeInUse: another process holds the lock.
            HomeUnsafe: the path is too long, is no socket, or a stranger listens there.

        """
        if len(os.fsencode(self._path)) > RUNTIME_PATH_BYTES_MAX:
            raise HomeUnsafe(what="runtime", reason="path_too_long")
        self._hold_lock()
        _clear_stale(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(os.fspath(self._path))
        os.chmod(self._path, 0o600)
        listener.listen(DOOR_BACKLOG_MAX)
        self._listener = listener
        self.resume()

    def _hold_lock(self) -> None:
        """Take the door's byte of the lock; its descriptor is never closed (FLT-28b)."""
        self._lock_fd = open_state(self._lock, os.O_RDWR | os.O_CREAT, what="runtime")
        byte = zlib.crc32(self._path.name.encode())
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            raise HomeInUse from None

    def resume(self) -> None:
        """Accept connections, from now on or again."""
        if self._listener is not None and not self._accepting:
            self._accepting = True
            self._io.add_fd(self._listener.fileno(), self._on_accept)

    def shut(self) -> None:
        """Take no more connections, and remove the name, so that clients know."""
        if self._listener is None:
            return
        if self._accepting:
            self._io.remove_fd(self._listener.fileno())
        self._listener.close()
        self._listener = None
        with suppress(FileNotFoundError):
            remove_file(self._path)

    # ---- Accepting: one at a time ----

    def _on_accept(self, _mask: int) -> None:
        if self._listener is None:
            return
        try:
            made, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._pause(error.errno)
            return
        made.setblocking(False)
        refusal = self._judge(made)
        if refusal is not None:
            self.refused += 1
            _say_and_close(made, refusal)
            return
        self._number += 1
        connection = _Connection(self._number, made, Unframer(CLIENT_MESSAGE_BYTES_MAX))
        self._connections[self._number] = connection
        self._io.add_fd(made.fileno(), partial(self._on_ready, connection))
        self._io.post(Opened(self._number))

    def _judge(self, made: socket.socket) -> CallboardError | None:
        """Look at who comes before anything is read."""
        packed = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        _, uid, _ = _PEER.unpack(packed)
        if uid != os.getuid():
            self._log("door_foreign_user", {"uid": uid})
            return NotAuthenticated()
        if len(self._connections) >= self._max:
            self._log("door_full", {"limit": self._max})
            return Overloaded(resource="connections", limit=self._max)
        return None

    def _pause(self, number: int) -> None:
        """Neither spin nor end (FLT-46)."""
        assert self._listener is not None
        self._accepting = False
        self._io.remove_fd(self._listener.fileno())
        self._log("door_paused", {"errno": errno.errorcode.get(number, str(number))})
        self._io.post(Paused())

    def _log(self, action: str, facts: dict[str, object]) -> None:
        """Write one line per cause and minute."""
        now = time.monotonic()
        if now - self._said.get(action, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._said[action] = now
            self._io.log(action, facts)

    # ---- Reading ----

    def _on_ready(self, connection: _Connection, mask: int) -> None:
        if mask & select.EPOLLOUT:
            self._write(connection)
        if connection.number in self._connections and mask & ~select.EPOLLOUT:
            self._read(connection)

    def _read(self, connection: _Connection) -> None:
        if not connection.reading:
            self._end(connection)  # only an error or its end is told while nothing is read
            return
        try:
            data = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(connection)
        elif not connection.closing:
            self._take(connection, data)

    def _take(self, connection: _Connection, data: bytes) -> None:
        refused: CallboardError | None = None
        try:
            payloads = connection.unframer.feed(data)
        except PayloadTooLarge as error:
            payloads, refused = connection.unframer.whole, error
        if not connection.greeted and connection.unframer.pending > HELLO_BYTES_MAX:
            self._end(connection)  # no hello is that long
            return
        if refused is not None:
            self._stop_reading(connection)
        if payloads or refused is not None:
            connection.greeted = True
            connection.ahead_messages += len(payloads)
            connection.ahead_bytes += sum(map(len, payloads))
            self._io.post(Came(connection.number, payloads, refused))
            self._watch(connection)

    def _stop_reading(self, connection: _Connection) -> None:
        connection.ahead_messages += READ_AHEAD_MESSAGES  # never handled: never read again

    def _watch(self, connection: _Connection) -> None:
        """Read only as far ahead as the actor may fall behind; write only when there is a need."""
        behind = (
            connection.ahead_messages >= READ_AHEAD_MESSAGES
            or connection.ahead_bytes >= READ_AHEAD_BYTES
        )
        reading, writing = not behind, bool(connection.out)
        if (reading, writing) != (connection.reading, connection.writing):
            connection.reading, connection.writing = reading, writing
            self._io.modify_fd(connection.socket.fileno(), write=writing, read=reading)

    # ---- Writing ----

    def _write(self, connection: _Connection) -> None:
        out = connection.out
        try:
            while out and _sent_all(connection):
                pass
        except BlockingIOError:
            pass
        except OSError:
            self._end(connection)
            return
        if connection.closing and not out:
            self._end(connection)
        else:
            self._watch(connection)

    def _end(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is not None:
            self._io.remove_fd(connection.socket.fileno())
            connection.socket.close()
            self._io.post(Gone(connection.number))

    def _add(self, connection: _Connection, data: bytes) -> None:
        """Keep data for a connection, or drop it for reading too slowly (FLT-59b)."""
        if connection.closing:
            return
        if connection.out_bytes + len(data) <= CLIENT_OUTPUT_BYTES_MAX:
            connection.out.append(data)
            connection.out_bytes += len(data)
            return
        self._log("door_slow_reader", {"bytes": connection.out_bytes})
        refusal = Overloaded(resource="socket", limit=CLIENT_OUTPUT_BYTES_MAX)
        self._last_words(connection, door_frame(Header("error"), error_body(refusal)))

    def _last_words(self, connection: _Connection, data: bytes) -> None:
        """Let a connection end with these words instead of what waits behind the present piece."""
        begun = [connection.out[0]] if connection.started else []
        connection.out = deque([*begun, data])
        connection.out_bytes = sum(map(len, connection.out))
        connection.closing = True
        connection.ends_at = time.monotonic() + LAST_WORDS_S
        self._stop_reading(connection)

    def _do_send(self, batch: Iterable[tuple[int, bytes]]) -> None:
        touched: dict[int, _Connection] = {}
        for number, data in batch:
            connection = self._connections.get(number)
            if connection is not None:
                self._add(connection, data)
                touched[number] = connection
        for connection in touched.values():
            self._write(connection)

    def _do_handled(self, conn: int, count: int, size: int) -> None:
        connection = self._connections.get(conn)
        if connection is not None:
            connection.ahead_messages -= count
            connection.ahead_bytes -= size
            self._watch(connection)

    def _do_close(self, conn: int) -> None:
        connection = self._connections.get(conn)
        if connection is None:
            return
        if not connection.out:
            self._end(connection)
            return
        connection.closing = True
        connection.ends_at = time.monotonic() + LAST_WORDS_S
        self._stop_reading(connection)
        self._write(connection)

    def _do_finish(self, done: Done) -> None:
        for conn, payloads in done.handled:
            self._do_handled(conn, len(payloads), sum(map(len, payloads)))
        self._do_send(done.messages)
        for conn in done.closed:
            self._do_close(conn)

    def _do_sweep(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.closing and connection.ends_at <= now:
                self._end(connection)

    # ---- From any thread ----

    def finish(self, done: Done) -> None:
        """Do what a batch of the actor's came to; to a connection that is gone: nothing."""
        self._io.call_io(lambda: self._do_finish(done))

    def sweep(self) -> None:
        """End connections whose last words were not read; to be called now and then."""
        self._io.call_io(self._do_sweep)

    def backlog(self, conn: int) -> int:
        """Count the bytes that wait for a client to read; a moment old."""
        connection = self._connections.get(conn)
        return connection.out_bytes if connection is not None else 0

    @property
    def connections(self) -> int:
        """Count the connections; a moment old."""
        return len(self._connections)


def _sent_all(connection: _Connection) -> bool:
    """Write some pieces in one call; false if they did not go whole."""
    out = connection.out
    sent = connection.socket.sendmsg(islice(out, PIECES_MAX))
    connection.out_bytes -= sent
    while out and sent >= len(out[0]):
        sent -= len(out.popleft())
        connection.started = False
    if sent:
        out[0] = out[0][sent:]
        connection.started = True
    return not sent


def _say_and_close(made: socket.socket, refusal: CallboardError) -> None:
    """Turn a connection away in one step."""
    with suppress(OSError):
        made.send(door_frame(Header("error"), error_body(refusal)))
    made.close()


def _clear_stale(path: Path) -> None:
    """Remove a socket that nobody listens on; only under the lock (FLT-43)."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or _answers(path):
        raise HomeUnsafe(what="runtime", reason="foreign")
    remove_file(path)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fspath(path)) not in (errno.ECONNREFUSED, errno.ENOENT)
