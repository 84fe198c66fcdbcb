"""The shells around `door.Door`: what both clients do to a socket, and the sync client's threads.

In the sync shell whoever waits for an answer does the reading himself, so that a program that sends
one thing after another pays for no second thread. As soon as two threads wait, or something is to
be told without anybody waiting (a future, a watch), one background thread reads from then on.

    _lock     guards the machine, the sinks and what is left to write; never held while waiting
    _driving  is held by the thread that reads; only it opens and closes the socket
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket
from collections.abc import Callable
from pathlib import Path
from threading import Lock, Thread, get_ident
from time import monotonic
from typing import Protocol

from callboard import messages
from callboard.door import (
    Answered,
    Door,
    Event,
    Refused,
    Shut,
    Streamed,
    is_final,
    retry_delay,
    seconds_left,
)
from callboard.errors import (
    CallboardError,
    Cancelled,
    Internal,
    NotAuthenticated,
    Overloaded,
    PlaneNotRunning,
)
from callboard.home import Home, Runtime, open_state, runtime_of
from callboard.ids import fresh_id

_READ_BYTES = 262_144
_TOKEN_BYTES_MAX = 4_096
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def read_token(runtime: Runtime) -> str:
    """Read the operator's token of the plane as it runs now.

    Raises:
        FileNotFoundError: there is none.
        HomeUnsafe: it is not the user's own file.

    """
    fd = open_state(runtime.operator_token, os.O_RDONLY, what="token")
    try:
        return os.read(fd, _TOKEN_BYTES_MAX).decode("ascii", "replace").strip()
    finally:
        os.close(fd)


def knock(runtime: Runtime) -> tuple[socket.socket, str]:
    """Connect to the door once, without waiting.

    Returns:
        The connected socket, non-blocking, and the token to say hello with.

    Raises:
        FileNotFoundError, ConnectionRefusedError: nobody is behind the door (FLT-47).
        BlockingIOError: too many wait before it (EAGAIN, which Linux gives at once).
        PermissionError: it is not ours.
        HomeUnsafe: see `read_token`.

    """
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        door.connect(os.fspath(runtime.door))
        return door, read_token(runtime)
    except BaseException:
        door.close()
        raise


def supervisor_lives(home: Home) -> bool:
    """Tell whether some process holds the lock of a home, without taking it (FLT-28b).

    While it does, a door that nobody opens is a gateway that is being started again. A lock that
    only looks like it costs a client its patience until its deadline, and nothing else.
    """
    try:
        mark = f":{os.stat(home.lock).st_ino}"
        table = Path("/proc/locks").read_text(encoding="ascii")
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not known: the deadline decides
    return any(
        field.endswith(mark)
        for line in table.splitlines()
        if "->" not in line  # one that waits for it
        for field in line.split()
    )


class Sink(Protocol):
    """Where the answer to a request goes; called on whichever thread reads."""

    def answer(self, body: messages.Body) -> None:
        """Take the answer."""
        ...

    def refuse(self, error: CallboardError) -> None:
        """Take the refusal."""
        ...

    def stream(self, records: messages.Records) -> None:
        """Take a piece of what is watched."""
        ...


class Shell:
    """A client's connection, made when it is needed and made again when it broke.

    What a subclass adds is who waits for the socket, and how: the methods that raise
    NotImplementedError here.

    Args:
        home: whose plane it is for.
        name: what this client says that it is.

    """

    def __init__(self, home: Path, name: str) -> None:
        self._home = Home(home)
        self._runtime = runtime_of(home)
        self._door = Door(name)
        self._sinks: dict[str, Sink] = {}
        self._socket: socket.socket | None = None
        self._unsent = b""
        self._token = ""
        self._was_open = False
        self._failed = 0
        self._retry_at = 0.0
        self._closed = False

    def _attend(self, door: socket.socket) -> None:
        """Begin to wait for what this socket brings."""
        raise NotImplementedError

    def _leave(self, door: socket.socket) -> None:
        """Stop waiting for this socket; it is closed next."""
        raise NotImplementedError

    def _await_room(self, wanted: bool) -> None:
        """Begin or stop waiting until the socket takes more."""
        raise NotImplementedError

    # ---- Requests ----

    def _begin(
        self, kind: str, body: messages.Body, now: float, deadline: float | None, sink: Sink
    ) -> str:
        if self._closed:
            raise Cancelled("This client is closed.", reason="closed")
        request = fresh_id()
        self._door.ask(request, kind, body, now, deadline)
        self._sinks[request] = sink
        return request

    def _forget(self, request: str) -> None:
        self._sinks.pop(request, None)
        self._door.drop(request)

    def _give_up(self, error: CallboardError) -> list[Event]:
        return self._door.give_up(error)

    def _hand_out(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Streamed):
                sink = self._sinks.get(event.request)
                if sink is not None:
                    sink.stream(event.records)
            elif isinstance(event, Answered | Refused):
                sink = self._sinks.pop(event.request, None)
                if sink is None:
                    continue
                if isinstance(event, Answered):
                    sink.answer(event.body)
                else:
                    sink.refuse(event.error)

    # ---- Time ----

    def _tend(self, now: float) -> list[Event]:
        """Do what is due: refuse what is too late, connect, write."""
        events = self._door.expire(now)
        if self._socket is None and self._door.wants_connection and now >= self._retry_at:
            events += self._connect(now)
        self._flush()
        return events

    def _next_at(self) -> float | None:
        """Give the time at which something is due again, none for never."""
        times = [self._door.due()]
        if self._socket is None and self._door.wants_connection:
            times.append(self._retry_at)
        return min((at for at in times if at is not None), default=None)

    # ---- The socket ----

    def _connect(self, now: float) -> list[Event]:
        try:
            door, self._token = knock(self._runtime)
        except (FileNotFoundError, ConnectionRefusedError):
            if not self._was_open or not supervisor_lives(self._home):
                return self._door.give_up(PlaneNotRunning())
            self._later(now)
            return []
        except BlockingIOError:
            self._door.hindered(Overloaded(resource="connections"))
            self._later(now)
            return []
        except PermissionError:
            return self._door.give_up(NotAuthenticated())
        except OSError as error:
            if error.errno not in _NO_ROOM:
                return self._door.give_up(PlaneNotRunning())
            self._door.hindered(Overloaded(resource="descriptors"))
            self._later(now)
            return []
        except CallboardError as error:
            return self._door.give_up(error)
        self._socket = door
        self._attend(door)
        self._door.connected(self._token)
        return []

    def _later(self, now: float) -> None:
        self._failed += 1
        self._retry_at = now + retry_delay(self._failed, random.random())

    def _read(self, now: float) -> list[Event]:
        """Read what is there, and give what it means."""
        if self._socket is None:
            return []
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            data = b""
        events: list[Event] = self._door.receive(data, now) if data else [Shut(None)]
        if self._door.is_open:
            self._was_open, self._failed = True, 0
        for event in events:
            if isinstance(event, Shut):
                return events + self._broken(event.error, now)
        return events

    def _broken(self, error: CallboardError | None, now: float) -> list[Event]:
        """Close a connection that is of no use; say what becomes of the requests."""
        self._hang_up()
        self._later(now)
        if isinstance(error, NotAuthenticated):
            try:
                token = read_token(self._runtime)
            except (OSError, CallboardError):
                token = ""
            if is_final(error, token, self._token):
                return self._door.give_up(error)
        return []

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._leave(self._socket)
            self._socket.close()
            self._socket = None
        self._unsent = b""
        self._door.lost()

    def _flush(self) -> None:
        """Write what there is to write, as far as the socket takes it.

        An error is left to the reader: what the gateway said before it hung up is still to be read.
        """
        if self._socket is None:
            return
        data = self._unsent + self._door.output() if self._unsent else self._door.output()
        if not data:
            return
        try:
            written = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            written = 0
        except OSError:
            written = len(data)
        waited, self._unsent = bool(self._unsent), data[written:]
        if bool(self._unsent) != waited:
            self._await_room(not waited)


class Call:
    """A request that one thread waits for."""

    __slots__ = ("_body", "_error", "_gate", "done")

    def __init__(self) -> None:
        self.done = False
        self._body: messages.Body | None = None
        self._error: CallboardError | None = None
        self._gate = Lock()
        self._gate.acquire()

    def answer(self, body: messages.Body) -> None:
        """Take the answer."""
        self._body = body
        self._settle()

    def refuse(self, error: CallboardError) -> None:
        """Take the refusal."""
        self._error = error
        self._settle()

    def stream(self, records: messages.Records) -> None:
        """Take nothing: a call is no watch."""

    def _settle(self) -> None:
        self.done = True
        self._gate.release()

    def wait(self) -> None:
        """Wait until another thread has settled this."""
        self._gate.acquire()

    def result(self) -> messages.Body:
        """Give the answer, or raise the refusal."""
        if self._error is not None:
            raise self._error
        assert self._body is not None
        return self._body


class Link(Shell):
    """The connection of a sync client, for any number of threads."""

    def __init__(self, home: Path, name: str = "") -> None:
        super().__init__(home, name)
        self._lock = Lock()
        self._driving = Lock()
        self._driver = 0
        self._thread: Thread | None = None
        self._poller = select.poll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._bell, select.POLLIN)
        self._wakes_at = 0.0
        """When the thread that reads looks up by itself; 0 while it does not sleep."""

    # ---- Asking, from any thread ----

    def open(self, timeout: float | None) -> messages.Welcome:
        """Be let in.

        Args:
            timeout: seconds.

        Raises:
            PlaneNotRunning: nobody is behind the door, and nobody was before.
            Overloaded, DeadlineExceeded: nobody let us in within the timeout.
            ProtocolUnsupported, NotAuthenticated: nobody will.

        """
        if self._door.is_open and self._door.welcome is not None:
            return self._door.welcome
        answer = self.call("hello", messages.Ok(), timeout)
        assert isinstance(answer, messages.Welcome)
        return answer

    def call(self, kind: str, body: messages.Body, timeout: float | None) -> messages.Body:
        """Ask, and wait for the answer.

        Args:
            kind: the request's kind.
            body: its body.
            timeout: seconds.

        Raises:
            CallboardError: the plane's refusal, or why there was no answer.

        """
        call = Call()
        request = self.start(kind, body, timeout, call)
        try:
            self._until(call)
        except BaseException:
            self.drop(request)
            raise
        return call.result()

    def start(self, kind: str, body: messages.Body, timeout: float | None, sink: Sink) -> str:
        """Ask, and have the answer put into a sink.

        Returns:
            The request's id, for `drop`.

        Raises:
            Cancelled: this client was closed.
            InvalidRequest, PayloadTooLarge, Overloaded: the request was not even taken on.

        """
        now = monotonic()
        deadline = seconds_left(timeout, now)
        with self._lock:
            request = self._begin(kind, body, now, deadline, sink)
            self._written_by_anyone(deadline)
        return request

    def drop(self, request: str) -> None:
        """Forget a request that nobody waits for any more."""
        with self._lock:
            self._forget(request)
            self._written_by_anyone(None)

    def _written_by_anyone(self, deadline: float | None) -> None:
        """Write, unless this is the thread that reads: it writes once for a whole batch."""
        if self._driver == get_ident() or self._closed:
            return
        self._flush()
        sooner = deadline is not None and deadline < self._wakes_at
        if self._wakes_at and (self._socket is None or self._unsent or sooner):
            os.eventfd_write(self._bell, 1)

    def work_in_background(self) -> None:
        """Have a thread read from now on, whoever waits."""
        with self._lock:
            if self._thread is not None or self._closed:
                return
            self._thread = Thread(target=self._run, name="callboard-client", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the connection; whatever has no answer yet is refused with `cancelled`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            events = self._give_up(Cancelled("This client was closed.", reason="closed"))
            os.eventfd_write(self._bell, 1)
        self._hand_out(events)
        if self._driver != get_ident():  # else this is a callback, and its thread ends by itself
            with self._driving:
                self._end()

    def _end(self) -> None:
        self._hang_up()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1

    # ---- Reading, by one thread at a time ----

    def _until(self, call: Call) -> None:
        while not call.done:
            if self._driver == get_ident():  # asked from within a callback
                self._drive(lambda: call.done)
            elif self._thread is None and self._driving.acquire(blocking=False):
                try:
                    self._read_until(lambda: call.done)
                finally:
                    self._driving.release()
            else:
                self.work_in_background()
                call.wait()

    def _run(self) -> None:
        with self._driving:
            self._read_until(lambda: self._closed)

    def _read_until(self, done: Callable[[], bool]) -> None:
        self._driver = get_ident()
        try:
            self._drive(done)
        except Exception:
            with self._lock:
                self._closed = True
                events = self._give_up(Internal("The client itself has failed."))
            self._hand_out(events)
            raise
        finally:
            self._driver = 0
            if self._closed:
                self._end()

    def _drive(self, done: Callable[[], bool]) -> None:
        while not done():
            with self._lock:
                now = monotonic()
                events = self._tend(now)
                next_at = self._next_at()
                self._wakes_at = float("inf") if next_at is None else next_at
            if events:
                self._wakes_at = 0.0
                self._hand_out(events)
            else:
                self._sleep(None if next_at is None else max(next_at - now, 0))

    def _sleep(self, pause: float | None) -> None:
        ready = self._poller.poll(None if pause is None else pause * 1000 + 0.5)
        self._wakes_at = 0.0
        for fd, mask in ready:
            if fd == self._bell:
                os.eventfd_read(self._bell)
            elif mask & ~select.POLLOUT:
                with self._lock:
                    events = self._read(monotonic())
                self._hand_out(events)

    def _attend(self, door: socket.socket) -> None:
        self._poller.register(door, select.POLLIN)

    def _leave(self, door: socket.socket) -> None:
        self._poller.unregister(door)

    def _await_room(self, wanted: bool) -> None:
        assert self._socket is not None
        self._poller.modify(self._socket, select.POLLIN | (select.POLLOUT if wanted else 0))
