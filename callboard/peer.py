"""A process's end of its sockets: connect, receive in batches, send; no meaning.

Every actor of the plane is one process, and its main thread does both: it alone touches the ZeroMQ
sockets (FLT-33), and it alone touches the actor's state. The actor, a `BusActor`, is an actor of
pykka whose inbox is the loop of `Io` (ADR 0090): asked for the next message, it receives until
there is one. So the actor's loop is the main loop; when it ends the process ends (FLT-26).

    inbox.get() -> Io: sockets, timers, descriptors  --one WAKE per batch-->  actor.handle(events)
    actor -> io.send -> sockets

Other threads (an agent's, a sync's) reach the actor with `actor_ref.tell` or `Io.call_io`, which
wake the loop. Nothing is made at import: an `Io` made after a fork owns a ZeroMQ context of its
own.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import hmac
import os
import resource
import select
import signal
import socket as unix
import stat
import struct
import sys
import time
import traceback
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, NoReturn, TypeVar, cast

import pykka
import zmq

from callboard.errors import CallboardError, HomeInUse, HomeUnsafe, Overloaded
from callboard.home import open_state, remove_file
from callboard.limits import (
    BUS_HANDSHAKE_MS,
    BUS_MESSAGE_BYTES_MAX,
    BUS_QUEUE_MESSAGES_MAX,
    RUNTIME_PATH_BYTES_MAX,
    SHUTDOWN_EXIT_DELAY_MS,
    STORAGE_QUEUE_BYTES_MAX,
)
from callboard.wire import Header, decode_header, encode_header

LogHook = Callable[[str, Mapping[str, object]], None]
"""Takes an action's name and its facts; called on any thread, must not block or raise."""

MAIN_LOOP_ENDED: Final = 70
"""Exit status of a process whose main loop or actor ended unasked (FLT-26)."""


def no_log(action: str, facts: Mapping[str, object]) -> None:
    """Write nothing: the default log."""


# ---- Credentials ----


class Credentials(NamedTuple):
    """Who a peer is, as its token proves: `scope` is a session reference or empty."""

    role: str
    scope: str
    routing_id: str


def mint_token(secret: bytes, role: str, scope: str, routing_id: str) -> str:
    """Make the token that binds a role and a scope to one routing id (FLT-44b).

    Args:
        secret: the plane's secret, new for each of its starts.
        role: supervisor, gateway or session.
        scope: the text of a SessionRef for sessions, else empty.
        routing_id: the fresh nonce of one incarnation.

    """
    mac = hmac.digest(secret, f"{role}\0{scope}\0{routing_id}".encode(), "sha256").hex()
    return f"{role}|{scope}|{mac}"


def check_token(secret: bytes, token: str, routing_id: str) -> Credentials | None:
    """Tell what a token proves for this routing id, in time that does not depend on the MAC."""
    role, first, rest = token.partition("|")
    scope, second, _ = rest.rpartition("|")
    if not (first and second and token.isascii() and routing_id.isascii()):
        return None
    if not hmac.compare_digest(mint_token(secret, role, scope, routing_id), token):
        return None
    return Credentials(role, scope, routing_id)


# ---- Events ----


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message came. `peer` is set on routers alone: there the sender is authenticated."""

    link: str
    peer: Credentials | None
    header: Header
    body: bytes


@dataclass(frozen=True, slots=True)
class Connected:
    """A dealer's handshake succeeded, the first time or again."""

    link: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A dealer lost its router; it connects again by itself."""

    link: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A message was not delivered: the peer is gone or a queue is full.

    `to` is the routing id, empty for a dealer, whose own queue was full.
    """

    link: str
    to: str
    header: Header


@dataclass(frozen=True, slots=True)
class Timer:
    """The time of `Io.after` has passed."""

    name: str


@dataclass(frozen=True, slots=True)
class Posted:
    """A value that a handler of the loop gave to `Io.post`."""

    value: object


Event = Arrived | Connected | Disconnected | Unreachable | Timer | Posted

# ---- The process ----


def become_child(parent_pid: int) -> None:
    """Tie this process to its parent: call it first thing, on the main thread (FLT-29, 34, 48).

    The kernel sends the signal when the parent's *thread* that forked ends, so fork from a main
    thread. Exits with 0 when the parent is gone already.
    """
    os.umask(0o077)
    _die_with_parent()
    if os.getppid() != parent_pid:
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _die_with_parent() -> None:
    import ctypes  # only here: 1 MiB that a preloaded process has anyway

    if sys.platform != "linux":  # the liveness pipe serves everywhere
        return
    set_death_signal = 1  # PR_SET_PDEATHSIG
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(set_death_signal, int(signal.SIGKILL), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _end_process(log: LogHook, action: str, error: BaseException | None) -> NoReturn:
    """End a process whose main loop or actor ended, whatever else runs in it (FLT-26a)."""
    try:
        facts: dict[str, object] = {}
        if error is not None:  # a trace without data: where, and what kind, never what it says
            steps = traceback.extract_tb(error.__traceback__)
            at = [f"{step.filename}:{step.lineno} {step.name}" for step in steps[-_TRACE_STEPS:]]
            facts = {"error": type(error).__name__, "at": at}
            if isinstance(error, CallboardError):
                facts["code"] = error.code
        log(action, facts)
    finally:
        os._exit(MAIN_LOOP_ENDED)


_TRACE_STEPS: Final = 16

# ---- What the loop is made of ----

_NOBLOCK: Final = int(zmq.NOBLOCK)  # plain integers: combining zmq's enums costs 1 µs
GC_THRESHOLDS: Final = (10_000, 20, 50)
"""Messages are trees and die by themselves; Python's own thresholds cost an eighth of the time."""
_MORE: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)
_UID_FILTER: Final = 59  # ZMQ_IPC_FILTER_UID
_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_ZAP_DOMAIN: Final = b"callboard"
_RECONNECT_MS: Final = 15
_RECONNECT_MS_MAX: Final = 200
_BACKLOG_MAX: Final = 1_024  # a restarted router meets all its dealers at once
_CREDENTIALS_MAX: Final = 65_536
_INTRODUCTION: Final = "introduction"  # a dealer's first message; its router looks at the token
_NEWCOMERS_MAX: Final = 1_024
_NEWCOMERS: Final = "\0newcomers"  # the one timer that is not the actor's
_LOG_EVERY_S: Final = 60.0
_LOG_CAUSES_MAX: Final = 256
GROUP_MESSAGES_MAX: Final = 64
"""Messages of one actor's batch to one peer that travel together."""
GROUP_BYTES_MAX: Final = 262_144
"""Of their bodies; a larger one travels alone."""


class _Outgoing(NamedTuple):
    """A message on its way from `Io.send` to its socket."""

    link: str
    header: Header
    body: bytes
    to: str


class _RateLimitedLog:
    """One line per cause and minute (FLT-46), with the number of those left out."""

    def __init__(self, write: LogHook) -> None:
        self._write = write
        self._causes: dict[tuple[str, str], list[float]] = {}  # [time of the last line, left out]

    def line(self, action: str, link: str, facts: Mapping[str, object]) -> None:
        now = time.monotonic()
        last = self._causes.get((action, link))
        if last is not None and now - last[0] < _LOG_EVERY_S:
            last[1] += 1
            return
        if len(self._causes) >= _LOG_CAUSES_MAX:
            self._causes.clear()
        self._causes[action, link] = [now, 0]
        left_out = int(last[1]) if last is not None else 0
        self._write(action, {"link": link, **facts, "left_out": left_out})


def _fingerprint(data: bytes) -> dict[str, object]:
    """Describe refused bytes without showing them (FLT-54b)."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()[:16]}


class _Timers:
    """Named one-shot timers; a name set again replaces its earlier time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._due: dict[str, float] = {}

    def set(self, at: float, name: str) -> None:
        self._due[name] = at
        heappush(self._heap, (at, name))
        if len(self._heap) > 2 * len(self._due) + 64:  # forget replaced ones
            self._heap = sorted((at, name) for name, at in self._due.items())

    def is_set(self, name: str) -> bool:
        return name in self._due

    def next(self) -> float | None:
        """Give the time of the first one."""
        heap = self._heap
        while heap and self._due.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def take_due(self, now: float) -> list[str]:
        names: list[str] = []
        while (at := self.next()) is not None and at <= now:
            _, name = heappop(self._heap)
            del self._due[name]
            names.append(name)
        return names


class _Newcomers:
    """Processes that were let in and have not yet sent a message with a valid token.

    A dealer of ours introduces itself at once. A peer that claims a living routing id cannot: its
    connection stands, and ROUTER never reads from it (FLT-44), so silence is all there is to see.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def let_in(self, address: str, now: float) -> None:
        """Begin to wait for a process, `localhost:uid:gid:pid`."""
        if len(self._since) >= _NEWCOMERS_MAX:
            del self._since[next(iter(self._since))]
        self._since[address] = now

    def proved(self, address: str) -> None:
        """Stop waiting."""
        self._since.pop(address, None)

    def take_silent(self, now: float) -> tuple[list[str], float | None]:
        """Give those who kept silent too long, once, and when to look again."""
        patience = BUS_HANDSHAKE_MS / 1000
        silent = [address for address, since in self._since.items() if since + patience <= now]
        for address in silent:
            del self._since[address]
        return silent, min(self._since.values(), default=None)


class _Inlet:
    """What has arrived in this turn of the loop and is the actor's next batch.

    It is never refused for want of room: a loop whose batch is full stops receiving, and what
    comes meanwhile waits in ZeroMQ's queues, whose ends are told at the sender.

    Args:
        urgent: kinds that come before all others of their batch.
        count_max: messages of one batch.
        bytes_max: of their bodies together.

    """

    def __init__(self, urgent: frozenset[str], count_max: int, bytes_max: int) -> None:
        self._kinds = urgent
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._urgent: list[Event] = []
        self._events: list[Event] = []
        self._count = 0
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._events or self._urgent)

    @property
    def is_full(self) -> bool:
        """Whether the actor comes first."""
        return self._count >= self._count_max or self._bytes >= self._bytes_max

    def message(self, event: Arrived) -> None:
        """Add a message."""
        self._count += 1
        self._bytes += len(event.body)
        (self._urgent if event.header.kind in self._kinds else self._events).append(event)

    def add(self, event: Event) -> None:
        """Add what is no message."""
        self._events.append(event)

    def take(self) -> list[Event]:
        """Take all, urgent ones first."""
        urgent, events = self._urgent, self._events
        self._urgent, self._events = [], []
        self._count = self._bytes = 0
        return urgent + events if urgent else events


# ---- Links ----


def _state(socket: zmq.Socket[bytes]) -> int:
    """Ask ZeroMQ for _POLLIN and _POLLOUT; it also takes note of what its own thread did."""
    return cast("int", socket.getsockopt(_EVENTS))


def _fd(socket: zmq.Socket[bytes]) -> int:
    """Give what signals, once, that the socket's state may have changed."""
    return cast("int", socket.getsockopt(zmq.FD))


class _Link:
    """One ZeroMQ socket of an `Io` and what belongs to it."""

    def __init__(self, io: Io, name: str, socket: zmq.Socket[bytes]) -> None:
        self.io = io
        self.name = name
        self.socket = socket
        self.waiting: deque[_Outgoing] = deque()
        """What could not go yet; only a dealer keeps any."""
        self.up = True
        """Whether there is someone to send to; only a dealer knows."""

    def look(self, count_max: int) -> bool:
        """Receive, and send what waited, until there is nothing of either.

        Every call into ZeroMQ may use up the one signal for both directions, so the last thing
        done before sleeping is to ask for both.

        Args:
            count_max: groups of messages to receive.

        Returns:
            False if more may be there: the count is reached, or the actor's batch is full.

        """
        inlet = self.io.inlet
        for _ in range(count_max):
            state = _state(self.socket)
            if self.waiting and self.up and state & _POLLOUT:
                self.flush()
            elif not state & _POLLIN:
                return True
            elif inlet.is_full:
                return False
            else:
                self.receive()
        return False

    def receive(self) -> None:
        """Receive the messages of one group."""
        raise NotImplementedError

    def send(self, messages: list[_Outgoing]) -> None:
        """Send messages to one peer, in order; report as `Unreachable` what cannot go or wait."""
        raise NotImplementedError

    def flush(self) -> None:
        """Send what had to wait, if it can go now."""

    def unreachable(self, message: _Outgoing) -> None:
        """Tell the actor that a message did not go."""
        self.io.inlet.add(Unreachable(self.name, message.to, message.header))

    def frames(self) -> list[zmq.Frame] | None:
        """Read the rest of a group, heads and bodies in turn; None if they are no pairs."""
        receive = self.socket.recv
        frames = [receive(_NOBLOCK, copy=False)]
        while frames[-1].more:
            frames.append(receive(_NOBLOCK, copy=False))
            if len(frames) > 2 * GROUP_MESSAGES_MAX:
                while receive(_NOBLOCK, copy=False).more:
                    pass
                break
        if len(frames) % 2 or len(frames) > 2 * GROUP_MESSAGES_MAX:
            self.drop("bus_malformed", frames[0].bytes)
            return None
        return frames

    def arrived(self, peer: Credentials | None, header: Header, body: zmq.Frame) -> None:
        """Hand a message to the actor."""
        self.io.inlet.message(Arrived(self.name, peer, header, body.bytes))

    def drop(self, action: str, data: bytes) -> None:
        """Note that something was thrown away."""
        self.io.lines.line(action, self.name, _fingerprint(data))


def _header_of(frame: zmq.Frame) -> Header | None:
    try:
        return decode_header(frame.bytes)
    except CallboardError:
        return None


def _groups(messages: list[_Outgoing]) -> Iterator[list[_Outgoing]]:
    """Part messages to one peer into what goes out together."""
    if len(messages) == 1:
        yield messages
        return
    group: list[_Outgoing] = []
    size = 0
    for message in messages:
        size += len(message.body)
        if group and (size > GROUP_BYTES_MAX or len(group) == GROUP_MESSAGES_MAX):
            yield group
            group, size = [], len(message.body)
        group.append(message)
    yield group


class _Router(_Link):
    """The bound end: it authenticates every message by the token of its routing id (FLT-44)."""

    def __init__(self, io: Io, name: str, socket: zmq.Socket[bytes], secret: bytes) -> None:
        super().__init__(io, name, socket)
        self._secret = secret
        self._known: OrderedDict[bytes, tuple[str, Credentials]] = OrderedDict()

    def receive(self) -> None:
        routing_id = self.socket.recv(_NOBLOCK)
        frames = self.frames()
        if frames is None:
            return
        header = _header_of(frames[0])
        peer = header and self._authenticate(routing_id, header.token, frames[0])
        if header is None:
            self.drop("bus_malformed", frames[0].bytes)
        elif peer is None:
            self.drop("bus_not_authenticated", frames[0].bytes)
        elif header.kind != _INTRODUCTION:
            self.arrived(peer, header, frames[1])
            for head, body in zip(frames[2::2], frames[3::2], strict=True):
                header = _header_of(head)
                if header is None:
                    self.drop("bus_malformed", head.bytes)
                else:
                    self.arrived(peer, header, body)

    def _authenticate(self, routing_id: bytes, token: str, head: zmq.Frame) -> Credentials | None:
        known = self._known.get(routing_id)
        if known is not None and token.isascii() and hmac.compare_digest(known[0], token):
            self._known.move_to_end(routing_id)
            return known[1]
        peer = check_token(self._secret, token, routing_id.decode("latin-1"))
        if peer is not None:
            self.io.newcomers.proved(str(head.get("Peer-Address")))
            self._known[routing_id] = (token, peer)
            if len(self._known) > _CREDENTIALS_MAX:
                self._known.popitem(last=False)
        return peer

    def send(self, messages: list[_Outgoing]) -> None:
        """Send; only the first frame can be refused, so a group goes whole or not at all."""
        send = self.socket.send
        to = messages[0].to.encode("ascii", "replace")
        for group in _groups(messages):
            if not self._address(to):
                for message in group:
                    self.unreachable(message)
                continue
            last = len(group) - 1
            for at, message in enumerate(group):
                send(encode_header(message.header), _MORE)
                send(message.body, _NOBLOCK if at == last else _MORE)

    def _address(self, routing_id: bytes) -> bool:
        """Send the first frame, which says to whom; false if that peer is gone or full."""
        try:
            self.socket.send(routing_id, _MORE)
        except zmq.ZMQError:
            _state(self.socket)  # ZeroMQ rarely looks at what the peer has taken; now it does
            try:
                self.socket.send(routing_id, _MORE)
            except zmq.ZMQError:
                return False
        return True


class _Dealer(_Link):
    """The connecting end. While its router is away or slow, messages wait here, in order."""

    def __init__(
        self,
        io: Io,
        name: str,
        socket: zmq.Socket[bytes],
        token: str,
        monitor: zmq.Socket[bytes],
    ) -> None:
        super().__init__(io, name, socket)
        self.monitor = monitor
        self._token = token
        self.up = False

    def receive(self) -> None:
        frames = self.frames()
        for head, body in zip(frames[::2], frames[1::2], strict=True) if frames else ():
            header = _header_of(head)
            if header is None:
                self.drop("bus_malformed", head.bytes)
            else:
                self.arrived(None, header, body)

    def send(self, messages: list[_Outgoing]) -> None:
        """Send or keep; what waits already stays, so the newest is the one with no room."""
        for group in _groups(messages):
            if self.up and not self.waiting and self._try(group):
                continue
            for message in group:
                if len(self.waiting) < BUS_QUEUE_MESSAGES_MAX:
                    self.waiting.append(message)
                else:
                    self.unreachable(message)

    def flush(self) -> None:
        waiting = self.waiting
        while self.up and waiting:
            group = next(_groups(list(islice(waiting, GROUP_MESSAGES_MAX))))
            if not self._try(group):
                return
            for _ in group:
                waiting.popleft()

    def _try(self, group: Sequence[_Outgoing]) -> bool:
        """Send a group; only its first frame can be refused."""
        send, last = self.socket.send, len(group) - 1
        head = encode_header(group[0].header, self._token)  # one token for all of them
        for _ in range(2):
            try:
                send(head, _MORE)
            except zmq.Again:  # the queue looks full until ZeroMQ sees what was taken from it
                if not _state(self.socket) & _POLLOUT:
                    return False
            else:
                break
        else:
            return False
        for at, message in enumerate(group):
            if at:
                send(encode_header(message.header), _MORE)
            send(message.body, _NOBLOCK if at == last else _MORE)
        return True

    def watch(self) -> None:
        """Read the monitor: what became of the connection."""
        while _state(self.monitor) & _POLLIN:
            number = struct.unpack_from("=H", self.monitor.recv_multipart(_NOBLOCK)[0])[0]
            up = number == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if up != self.up:
                self.up = up
                if up:
                    self._try([_Outgoing(self.name, Header(_INTRODUCTION), b"", "")])
                else:  # what came before the end is told before the end
                    self.look(BUS_QUEUE_MESSAGES_MAX)
                self.io.inlet.add(Connected(self.name) if up else Disconnected(self.name))


# ---- Io ----


class Io:
    """Owns every socket of a process; `run` is its main loop.

    Args:
        urgent: kinds that the actor gets before all others of a batch.
        inlet_max: messages of one batch; a batch also ends with STORAGE_QUEUE_BYTES_MAX of
            bodies. What comes meanwhile waits in ZeroMQ's queues, which are limited too, and
            what finds those full is told at the sender.
        log: gets one line per cause and minute of what was dropped, and why the process ended.

    """

    def __init__(
        self,
        *,
        urgent: frozenset[str] = frozenset(),
        inlet_max: int = BUS_QUEUE_MESSAGES_MAX * 10,
        log: LogHook = no_log,
    ) -> None:
        self.log = log
        self.lines = _RateLimitedLog(log)
        self.inlet = _Inlet(urgent, inlet_max, STORAGE_QUEUE_BYTES_MAX)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._links: dict[str, _Link] = {}
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._pending: dict[str, _Link] = {}  # links that must be looked at before blocking
        self._locks: dict[Path, int] = {}
        self._zap: zmq.Socket[bytes] | None = None
        self._timers = _Timers()
        self.newcomers = _Newcomers()
        self._outgoing: dict[tuple[str, str], list[_Outgoing]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._status: int | None = None
        self._asleep = False
        self.is_called: Callable[[], int] = int
        """Whether something was told to the actor that is not in `inlet`; the actor sets it."""
        self._actor: pykka.ActorRef[Any] | None = None
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN | select.EPOLLET)  # so it is never read

    # Before run(), or from the loop's thread only: the actor and what handles descriptors.

    def bind_router(self, link: str, path: Path, secret: bytes, lock: Path) -> None:
        """Bind a router that serves this plane's own actors only (FLT-42 to FLT-44).

        Each socket has its own byte of the one lock file, chosen by its name, because storage and
        gateway bind in the same folder, each for life. The lock is the process's: it ends with
        it, and nothing else in the process may open and close that file.

        Args:
            link: the name under which events and `send` know it.
            path: the socket, in a folder of mode 0700.
            secret: what `check_token` is asked with.
            lock: `bind.lock` of that folder; the lock is held until the process ends.

        Raises:
            HomeInUse: another process holds the lock.
            HomeUnsafe: the path is too long, is no socket, or a stranger listens there.

        """
        _check_path(path)
        self._hold(lock, path.name)
        _clear_stale(path)
        self._serve_zap()
        socket = self._context.socket(zmq.ROUTER)
        _set_limits(socket)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.BACKLOG, _BACKLOG_MAX)
        _demand_zap(socket)
        _demand_own_uid(socket)
        socket.bind(f"ipc://{path}")
        self._adopt(_Router(self, link, socket, secret))

    def connect_dealer(self, link: str, path: Path, routing_id: str, token: str) -> None:
        """Connect a dealer; it keeps trying, and connects again whenever its router comes back.

        Args:
            link: the name under which events and `send` know it.
            path: the router's socket.
            routing_id: this incarnation's nonce.
            token: goes along with every message.

        Raises:
            HomeUnsafe: the path is too long.

        """
        _check_path(path)
        socket = self._context.socket(zmq.DEALER)
        _set_limits(socket)
        socket.setsockopt(zmq.ROUTING_ID, routing_id.encode("ascii"))
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS_MAX)
        # Not IMMEDIATE: with it libzmq throws away what has arrived when a router goes.
        watched = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        monitor = socket.get_monitor_socket(watched)
        dealer = _Dealer(self, link, socket, token, monitor)
        self._adopt(dealer)
        self.add_fd(_fd(monitor), lambda _: self._watch(dealer))
        socket.connect(f"ipc://{path}")
        dealer.watch()  # its descriptor signals only after it was looked at once

    def add_fd(self, fd: int, handler: Callable[[int], None], *, write: bool = False) -> None:
        """Watch a descriptor; its handler runs in the loop with the mask of select.epoll.

        Args:
            fd: not blocking, level-triggered.
            handler: may call `post`, `send`, and these three; must not block.
            write: also tell when it can be written.

        """
        self._epoll.register(fd, _interest(True, write))
        self._handlers[fd] = handler

    def modify_fd(self, fd: int, *, write: bool, read: bool = True) -> None:
        """Change what of a descriptor is watched; errors and its end always are."""
        self._epoll.modify(fd, _interest(read, write))

    def remove_fd(self, fd: int) -> None:
        """Watch a descriptor no more; call it before closing."""
        self._epoll.unregister(fd)
        del self._handlers[fd]

    def post(self, value: object) -> None:
        """Hand a value to the actor: `Posted(value)` joins the current batch."""
        self.inlet.add(Posted(value))

    def send(self, link: str, header: Header, body: bytes, to: str = "") -> None:
        """Send a message with the others of this batch, or at the next `flush`; never blocks.

        Messages to one peer keep their order and travel in groups, so that whoever gets them
        wakes once. What cannot go comes back as `Unreachable`: to a router's peer that is gone or
        does not read, or when a dealer has BUS_QUEUE_MESSAGES_MAX messages waiting (those stay,
        the new one is refused).

        Args:
            link: a router or a dealer of this `Io`.
            header: a dealer's own token is put in here.
            body: as `wire.encode_body` gives it, at most BUS_MESSAGE_BYTES_MAX.
            to: on a router the peer's routing id.

        Raises:
            KeyError: no such link, and not stopping.
            ValueError: the body is larger than any peer takes.

        """
        if link not in self._links:
            if self.stopping:
                return
            raise KeyError(link)
        if len(body) > BUS_MESSAGE_BYTES_MAX:
            raise ValueError("the body is larger than BUS_MESSAGE_BYTES_MAX")
        messages = self._outgoing.setdefault((link, to), [])
        messages.append(_Outgoing(link, header, body, to))
        if len(messages) == GROUP_MESSAGES_MAX:
            self._send(link, self._outgoing.pop((link, to)))

    def flush(self) -> None:
        """Send now what was given to `send`: for an actor that has more to do after that."""
        outgoing, self._outgoing = self._outgoing, {}
        for (link, _), messages in outgoing.items():
            self._send(link, messages)

    def _send(self, name: str, messages: list[_Outgoing]) -> None:
        link = self._links[name]
        link.send(messages)
        self._pending[name] = link  # sending may have used up the socket's signal

    def after(self, ms: int, name: str) -> None:
        """Hand `Timer(name)` to the actor once, after `ms` milliseconds; a same name replaces."""
        self._timers.set(time.monotonic() + ms / 1000, name)

    # From any thread.

    def call_io(self, function: Callable[[], None]) -> None:
        """Run a function in the loop soon."""
        self._calls.append(function)
        self.ring()

    def ring(self) -> None:
        """Wake the loop if it sleeps: there is something for it to do."""
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._bell, 1)

    def stop(self, status: int) -> None:
        """End `run` with this status, after what was sent so far is on its way."""
        self._status = status
        if self._actor is not None:
            self._actor.stop(block=False)

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._status is not None

    # The main loop.

    def run(self, start_actor: Callable[[Io], pykka.ActorRef[Any]]) -> int:
        """Serve until `stop`; an exception, or the actor's end, ends the process with 70.

        Args:
            start_actor: starts the `BusActor` of this process, which lives until `stop`.

        Returns:
            The status given to `stop`.

        """
        gc.freeze()  # what is loaded stays loaded
        gc.set_threshold(*GC_THRESHOLDS)
        try:
            start_actor(self)
            self._close()
        except BaseException as error:
            _end_process(self.log, "main_loop_ended", error)
        assert self._status is not None  # an actor that ends by itself has ended the process
        return self._status

    def belongs_to(self, actor: pykka.ActorRef[Any]) -> None:
        """Note whose loop this is; its thread is the one that calls."""
        self._actor = actor
        if self._status is not None:  # stopped before it began
            actor.stop(block=False)

    def turn(self) -> bool:
        """Do all there is to do; if that is nothing for the actor, sleep until there is more.

        Returns:
            Whether `inlet` holds a batch for the actor.

        """
        if self._calls:
            self._do_calls()
        if self._outgoing:
            self.flush()
        if self._pending:
            self._look_at_links()
        self._do_timers()
        if self.inlet and not self._pending:
            return True
        self._asleep = not self.inlet
        ready = self._epoll.poll(self._timeout() if self._asleep else 0)
        self._asleep = False
        for fd, mask in ready:
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(mask)
        return bool(self.inlet)

    def _do_calls(self) -> None:
        for _ in range(len(self._calls)):
            self._calls.popleft()()

    def _look_at_links(self) -> None:
        """Receive from every link that may have signalled without being heard."""
        links, self._pending = self._pending, {}
        for link in links.values():
            self._look(link)

    def _do_timers(self) -> None:
        if self._timers.next() is None:
            return
        for name in self._timers.take_due(time.monotonic()):
            if name == _NEWCOMERS:
                self._look_at_newcomers()
            else:
                self.inlet.add(Timer(name))

    def _timeout(self) -> float:
        """Give how long to sleep, in seconds, -1 for as long as nothing happens.

        `_asleep` is set before this looks: who adds something later rings the bell.
        """
        if self._calls or self._pending or self.is_called():
            return 0
        at = self._timers.next()
        return -1 if at is None else max(0.0, at - time.monotonic())

    # Sockets.

    def _adopt(self, link: _Link) -> None:
        self._links[link.name] = link
        self.add_fd(_fd(link.socket), lambda _: self._look(link))
        self._pending[link.name] = link

    def _look(self, link: _Link) -> None:
        """Receive from a link that has signalled."""
        if not link.look(BUS_QUEUE_MESSAGES_MAX):
            self._pending[link.name] = link

    def _watch(self, dealer: _Dealer) -> None:
        dealer.watch()
        self._pending[dealer.name] = dealer  # what waited for the connection can go

    def _hold(self, lock: Path, name: str) -> None:
        fd = self._locks.get(lock)
        if fd is None:
            fd = self._locks[lock] = open_state(lock, os.O_RDWR | os.O_CREAT, what="runtime")
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, zlib.crc32(name.encode()))
        except (BlockingIOError, PermissionError):
            raise HomeInUse from None

    def _serve_zap(self) -> None:
        """Answer ZeroMQ's question, for each new connection, whether it is our own user."""
        if self._zap is not None:
            return
        socket = self._context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ZAP_ADDRESS)
        self._zap = socket
        self.add_fd(_fd(socket), lambda _: self._answer_zap(socket))

    def _answer_zap(self, socket: zmq.Socket[bytes]) -> None:
        """Answer every waiting question; the address is `localhost:uid:gid:pid`."""
        while _state(socket) & _POLLIN:
            version, request, domain, address, *_ = socket.recv_multipart(_NOBLOCK)
            own = address.split(b":")[1:2] == [str(os.getuid()).encode()]
            if own and domain == _ZAP_DOMAIN:
                socket.send_multipart([version, request, b"200", b"", b"", b""])
                self._let_in(address.decode("ascii"))
            else:
                socket.send_multipart([version, request, b"400", b"", b"", b""])
                self.lines.line("bus_foreign_user", "zap", _fingerprint(address))

    def _let_in(self, address: str) -> None:
        now = time.monotonic()
        self.newcomers.let_in(address, now)
        if not self._timers.is_set(_NEWCOMERS):
            self._timers.set(now + BUS_HANDSHAKE_MS / 1000, _NEWCOMERS)

    def _look_at_newcomers(self) -> None:
        silent, oldest = self.newcomers.take_silent(time.monotonic())
        for address in silent:
            self.lines.line("bus_peer_silent", "zap", {"peer": address})
        if oldest is not None:
            self._timers.set(oldest + BUS_HANDSHAKE_MS / 1000, _NEWCOMERS)

    def _close(self) -> None:
        """Send what is queued, close every socket and end the context.

        ZeroMQ cannot tell when it has written everything, so closing gives its thread up to
        SHUTDOWN_EXIT_DELAY_MS for that; a peer that reads costs none of it.
        """
        self._do_calls()
        self.flush()
        for link in self._links.values():
            link.flush()
        self._context.destroy(SHUTDOWN_EXIT_DELAY_MS)  # before a socket loses its last name
        self._links.clear()
        self._handlers.clear()
        self._epoll.close()


def _interest(read: bool, write: bool) -> int:
    return (select.EPOLLIN if read else 0) | (select.EPOLLOUT if write else 0)


def _set_limits(socket: zmq.Socket[bytes]) -> None:
    """FLT-42b: on every socket."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, BUS_QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, BUS_QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, BUS_MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.HANDSHAKE_IVL, BUS_HANDSHAKE_MS)


def _demand_own_uid(socket: zmq.Socket[bytes]) -> None:
    """One layer: libzmq drops whom the kernel shows as another user, before any byte."""
    socket.setsockopt(_UID_FILTER, os.getuid())


def _demand_zap(socket: zmq.Socket[bytes]) -> None:
    """One layer: a handshake needs the handler's yes, and without a handler there is none."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _check_path(path: Path) -> None:
    if len(os.fsencode(path)) > RUNTIME_PATH_BYTES_MAX:
        raise HomeUnsafe(what="runtime", reason="path_too_long")


def _clear_stale(path: Path) -> None:
    """Remove a socket that nobody listens on; ZeroMQ would take over a live one (FLT-43).

    Raises:
        HomeUnsafe: no socket, or a live one, which is a stranger's since we hold the lock.

    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or _answers(path):
        raise HomeUnsafe(what="runtime", reason="foreign")
    remove_file(path)


def _answers(path: Path) -> bool:
    with unix.socket(unix.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fspath(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


# ---- The actor ----

WAKE: Final = object()
"""Tells a `BusActor` that something has arrived."""


class _LoopInbox:
    """An actor's inbox that is the loop of its process.

    Whoever takes from it does, while there is nothing in it, all that the loop has to do. When
    other threads tell the actor something and batches arrive, they take turns.
    """

    def __init__(self) -> None:
        self._told: deque[Any] = deque()
        self._io: Io | None = None
        self._wake: Any = None
        self._batch_first = False

    def serve(self, io: Io) -> None:
        """Begin to be a loop; the one message told so far is given whenever there is a batch.

        Args:
            io: what to do while nobody tells the actor anything.

        """
        self._wake = self._told.pop()
        self._io = io
        io.is_called = self._told.__len__

    def put(self, envelope: Any, /) -> None:  # noqa: ANN401 - pykka's own envelope is private
        """Add a message, from any thread."""
        self._told.append(envelope)
        if self._io is not None:
            self._io.ring()

    def get(self) -> Any:  # noqa: ANN401 - see put
        """Give the next message; the order to stop before all others.

        Another thread that stops the loop is heard before its order is here: it is waited for.
        """
        io, told = self._io, self._told
        while io is not None and not (io.stopping and told):
            if told and not self._batch_first:
                self._batch_first = True
                return told.popleft()
            self._batch_first = False
            if io.turn():
                return self._wake
        return told.pop()

    def empty(self) -> bool:
        """Tell whether nothing was told."""
        return not self._told


_PYKKAS_OWN: Final = frozenset(name for name in vars(pykka.Actor) if name.startswith("_"))


class BusActor(pykka.Actor):
    """The owner of an actor process's state; its loop is the process's main loop.

    `start` returns when the actor has ended. Its end, however it comes, ends the process unless
    `io.stop` was called (FLT-26a).

    Args:
        io: the process's sockets.

    """

    def __init_subclass__(cls) -> None:
        """Refuse names that pykka uses for itself; overridden by accident, no loop would end."""
        super().__init_subclass__()
        taken = [name for name in vars(cls) if not name.endswith("__") and name in _PYKKAS_OWN]
        if taken:
            raise TypeError(f"{cls.__name__} overrides {', '.join(taken)} of pykka")

    def __init__(self, io: Io) -> None:
        super().__init__()
        self.io = io

    def handle(self, events: list[Event]) -> None:
        """Do what a batch of events asks for; to be overridden."""
        raise NotImplementedError

    def on_receive(self, message: object) -> None:
        """Hand over all that has arrived since the last time."""
        if message is WAKE:
            self.handle(self.io.inlet.take())

    def on_failure(
        self,
        exception_type: type[BaseException] | None,
        exception_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the process: no actor goes on after an exception."""
        _end_process(self.io.log, "actor_failed", exception_value)

    # pykka's own hooks leave out a failed on_start and an actor that simply stops. These replace
    # its inner steps; on_failure stands behind them should pykka rename one.

    def _handle_failure(
        self,
        exception_type: type[BaseException] | None,
        exception_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _end_process(self.io.log, "actor_failed", exception_value)

    def _start_actor_loop(self) -> None:
        self.actor_ref.tell(WAKE)
        cast("_LoopInbox", self.actor_inbox).serve(self.io)
        self.io.belongs_to(self.actor_ref)
        self._actor_loop()
        if not self.io.stopping:
            _end_process(self.io.log, "actor_ended", None)

    @staticmethod
    def _create_actor_inbox() -> _LoopInbox:
        return _LoopInbox()

    @staticmethod
    def _create_future() -> pykka.Future[Any]:
        return pykka.ThreadingFuture()


# ---- Requests without an answer yet ----

Context = TypeVar("Context")


class Asked(Generic[Context]):
    """The unanswered requests of one dealer link; the actor's own.

    A request asked while the link is down waits here and goes out with `resend`. So make it
    before the link's first `Connected` is handled, call `resend` on each `Connected`, and `lost`
    on each `Disconnected`. A request may reach the router twice, with the same id: what it asks
    for must be safe to repeat.

    Args:
        io: sends them.
        link: a dealer.
        pending_max: requests that may be unanswered at once.

    """

    def __init__(self, io: Io, link: str, pending_max: int = BUS_QUEUE_MESSAGES_MAX) -> None:
        self._io = io
        self._link = link
        self._pending_max = pending_max
        self._pending: dict[str, tuple[Header, bytes, Context]] = {}
        self._prefix = os.urandom(8).hex()
        self._count = 0
        self._up = False

    def __len__(self) -> int:
        return len(self._pending)

    def ask(self, kind: str, body: bytes, context: Context, *, deadline: int = 0) -> str:
        """Send a request and remember it.

        Args:
            kind: the request's kind.
            body: as `wire.encode_body` gives it.
            context: what `answer` gives back.
            deadline: milliseconds left for it, 0 for no end.

        Returns:
            The request's id, which is the `cid` of its answer.

        Raises:
            Overloaded: as many are unanswered as may be.

        """
        if len(self._pending) >= self._pending_max:
            raise Overloaded(resource="pending_count", limit=self._pending_max)
        self._count += 1
        header = Header(kind, f"{self._prefix}-{self._count:x}", deadline=deadline)
        self._pending[header.id] = (header, body, context)
        if self._up:
            self._io.send(self._link, header, body)
        return header.id

    def answer(self, cid: str) -> Context | None:
        """Take out the request that was answered; None if it was answered or dropped before."""
        found = self._pending.pop(cid, None)
        return found[2] if found else None

    def peek(self, cid: str) -> Context | None:
        """Look at a request that gets further answers, without taking it out."""
        found = self._pending.get(cid)
        return found[2] if found else None

    def drop(self, request_id: str) -> None:
        """Forget a request; its answer will find nothing."""
        self._pending.pop(request_id, None)

    def resend(self) -> None:
        """Send every unanswered request again, in order: the link is up."""
        self._up = True
        for header, body, _ in self._pending.values():
            self._io.send(self._link, header, body)

    def lost(self) -> None:
        """Keep what is asked from now on until the link is up again."""
        self._up = False
