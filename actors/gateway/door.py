"""The clients' door: a Unix stream socket with an acceptor of our own (FLT-41, FLT-46).

It knows connections and frames, and no meaning: `Came` hands whole messages to the actor, which
answers through `finish` and decides when a connection ends.
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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from callboard.actors.gateway.connection import Connection
from callboard.errors import (
    CallboardError,
    HomeInUse,
    HomeUnsafe,
    NotAuthenticated,
    Overloaded,
)
from callboard.home import open_state, remove_file
from callboard.limits import (
    DOOR_BACKLOG_MAX,
    RUNTIME_PATH_BYTES_MAX,
)
from callboard.peer import Io
from callboard.wire import Header, door_frame, error_body

READ_BYTES: Final = 65_536
PAUSE_MS: Final = 100
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
    messages: dict[int, list[bytes]] = field(default_factory=dict[int, list[bytes]])
    """Framed messages to send, in order, by connection."""
    closed: list[int] = field(default_factory=list[int])
    """Connections that end after what was sent."""

    def send(self, conn: int, piece: bytes) -> None:
        """Add a framed message."""
        self.messages.setdefault(conn, []).append(piece)

    def __bool__(self) -> bool:
        return bool(self.handled or self.messages or self.closed)


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
        self._connections: dict[int, Connection] = {}
        self._number = 0
        self._said: dict[str, float] = {}
        self.refused = 0
        """Connections that were turned away."""

    # ---- Opening ----

    def open(self) -> None:
        """Bind and listen (FLT-43); before `Io.run`, or in its loop.

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
        """End every connection, take no more, and remove the name, so that clients know."""
        for connection in list(self._connections.values()):
            connection.flush()
            self._end(connection)
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
        connection = Connection(self._number, made)
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

    # ---- Reading and writing ----

    def _on_ready(self, connection: Connection, mask: int) -> None:
        if mask & select.EPOLLOUT:
            self._go_on(connection)
        if connection.number in self._connections and mask & ~select.EPOLLOUT:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        if not connection.is_read:
            self._end(connection)  # only an error or its end is told while nothing is read
            return
        try:
            data = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        taken = connection.feed(data) if data else None
        if taken is None:
            self._end(connection)
        elif taken.payloads or taken.refused is not None:
            self._io.post(Came(connection.number, taken.payloads, taken.refused))
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Read only as far ahead as the actor may fall behind; write only when there is a need."""
        wanted = connection.wanted()
        if wanted is not None:
            reading, writing = wanted
            self._io.modify_fd(connection.socket.fileno(), write=writing, read=reading)

    def _go_on(self, connection: Connection) -> None:
        """Write what waits; end what is done with."""
        if connection.flush():
            self._watch(connection)
        else:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        if self._connections.pop(connection.number, None) is not None:
            self._io.remove_fd(connection.socket.fileno())
            connection.end()
            self._io.post(Gone(connection.number))

    def _attend(self, touched: set[int], closed: list[int]) -> None:
        """Go on where the actor could not."""
        for number in closed:
            if (connection := self._connections.get(number)) is not None:
                connection.begin_closing()
                touched.add(number)
        for number in touched:
            if (connection := self._connections.get(number)) is not None:
                self._go_on(connection)

    def sweep(self) -> None:
        """End connections whose last words were not read; to be called now and then."""
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.is_overdue(now):
                self._end(connection)

    # ---- What the actor says ----

    def finish(self, done: Done) -> None:
        """Do what a batch of the actor's came to; to a connection that is gone: nothing."""
        touched: set[int] = set()
        for number, payloads in done.handled:
            connection = self._connections.get(number)
            if connection is not None and connection.handled(payloads):
                touched.add(number)
        for number, pieces in done.messages.items():
            connection = self._connections.get(number)
            if connection is not None and connection.write(pieces):
                touched.add(number)
        if touched or done.closed:
            self._attend(touched, done.closed)

    def backlog(self, conn: int) -> int:
        """Count the bytes that wait for a client to read."""
        connection = self._connections.get(conn)
        return connection.out_bytes if connection is not None else 0

    @property
    def connections(self) -> int:
        """Count the connections."""
        return len(self._connections)


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
