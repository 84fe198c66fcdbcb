"""callboard for async programs: the names of `callboard.client`, as coroutines.

    async with callboard.aio.Plane() as plane:
        session = await plane.create_session(agent="echo", workspace=".")
        receipt = await session.send("hello")
        outcome = await session.wait(receipt, timeout=30)

Everything of one client belongs to the event loop that it was opened in. Files are read, and a
plane is started and stopped, on a worker thread, so that the loop goes on.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from callboard import messages
from callboard.artifacts import check_text
from callboard.client import (
    CONNECT_TIMEOUT,
    TIMEOUT,
    BusyMode,
    CancelResult,
    Embedded,
    Outcome,
    PlaneStatus,
    Receipt,
    client_name,
    is_slow_watcher,
    outcome_of,
)
from callboard.door import (
    Event,
    Feed,
    cancel_body,
    create_body,
    scalars,
    seconds_left,
    send_body,
)
from callboard.errors import CallboardError, Cancelled, DeadlineExceeded
from callboard.ids import SessionRef, check_message_id, check_session_id, fresh_id, fresh_ulid
from callboard.link import Shell, Sink
from callboard.reads import (
    RecordReader,
    check_from_seq,
    existing_workspace,
    read_artifact,
    read_catalog,
    read_history,
    resolve,
    settings_of,
)
from callboard.records import Record

if TYPE_CHECKING:
    from typing import Self

    from callboard.config import Settings
    from callboard.storage.catalog import CatalogPage
    from callboard.storage.metadata import SessionMetadata
    from callboard.storage.views import HistoryPage

__all__ = [
    "BusyMode",
    "CancelResult",
    "Client",
    "Outcome",
    "Plane",
    "PlaneStatus",
    "Receipt",
    "Session",
    "connect",
]

_B = TypeVar("_B", bound=messages.Body)


class Link(Shell):
    """The connection of an async client."""

    def __init__(self, home: Path, name: str = "") -> None:
        super().__init__(home, name)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._flushing = False

    async def open(self, timeout: float | None) -> messages.Welcome:
        """Be let in; see `callboard.link.Link.open`."""
        if self._door.is_open and self._door.welcome is not None:
            return self._door.welcome
        answer = await self.call("hello", messages.Ok(), timeout)
        assert isinstance(answer, messages.Welcome)
        return answer

    async def call(self, kind: str, body: messages.Body, timeout: float | None) -> messages.Body:
        """Ask, and wait for the answer; see `callboard.link.Link.call`."""
        call = _Call(self._loop.create_future())
        request = self.start(kind, body, timeout, call)
        try:
            return await call.future
        finally:
            if not call.future.done() or call.future.cancelled():
                self.drop(request)

    def start(self, kind: str, body: messages.Body, timeout: float | None, sink: Sink) -> str:
        """Ask, and have the answer put into a sink; see `callboard.link.Link.start`."""
        now = self._loop.time()
        request = self._begin(kind, body, now, seconds_left(timeout, now), sink)
        self._soon()
        return request

    def drop(self, request: str) -> None:
        """Forget a request that nobody waits for any more."""
        self._forget(request)
        self._soon()

    def close(self) -> None:
        """End the connection; whatever has no answer yet is refused with `cancelled`."""
        if self._closed:
            return
        self._closed = True
        events = self._give_up(Cancelled("This client was closed.", reason="closed"))
        self._hang_up()
        if self._timer is not None:
            self._timer.cancel()
        self._hand_out(events)

    # ---- The loop's side ----

    def _soon(self) -> None:
        """Write once for all that is asked for in one step of the loop."""
        if not self._flushing and not self._closed:
            self._flushing = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._flushing = False
        if not self._closed:
            self._settle(self._tend(self._loop.time()))

    def _readable(self) -> None:
        events = self._read(self._loop.time())
        self._flush()  # what was let in, or has room now
        self._settle(events)

    def _settle(self, events: list[Event]) -> None:
        """Hand out what came, and look up again when something is due."""
        self._hand_out(events)
        if self._closed:
            return
        if events:
            self._soon()
        at = self._next_at()
        if self._timer is not None and at != self._timer.when():
            self._timer.cancel()
            self._timer = None
        if self._timer is None and at is not None:
            self._timer = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._step()

    def _attend(self, door: socket.socket) -> None:
        self._loop.add_reader(door, self._readable)

    def _leave(self, door: socket.socket) -> None:
        self._loop.remove_reader(door)
        self._loop.remove_writer(door)

    def _await_room(self, wanted: bool) -> None:
        assert self._socket is not None
        if wanted:
            self._loop.add_writer(self._socket, self._flush)
        else:
            self._loop.remove_writer(self._socket)


class _Call:
    """A sink that is a future of the loop."""

    def __init__(self, future: asyncio.Future[messages.Body]) -> None:
        self.future = future

    def answer(self, body: messages.Body) -> None:
        if not self.future.done():
            self.future.set_result(body)

    def refuse(self, error: CallboardError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def stream(self, records: messages.Records) -> None:
        """Take nothing: a call is no watch."""


class Client:
    """A connection to a plane that is running; `connect()` makes one."""

    def __init__(self, home: Path, link: Link) -> None:
        self.home = home
        self._link = link

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection. Nothing that was accepted is discarded by it."""
        self._link.close()

    async def create_session(
        self,
        agent: str,
        workspace: str | os.PathLike[str] = ".",
        title: str | None = None,
        model: str | None = None,
        settings: Mapping[str, str] | None = None,
        session_id: str | None = None,
        prompt: str | None = None,
        timeout: float = TIMEOUT,
    ) -> Session:
        """Create a session; see `callboard.client.Client.create_session`."""
        place = existing_workspace(workspace)
        body = create_body(
            key=fresh_id(),
            workspace=place,
            session_id=fresh_ulid() if session_id is None else check_session_id(session_id),
            agent=agent,
            title=title,
            model=model,
            settings=settings,
        )
        if prompt is not None:
            check_text(scalars(prompt))  # refused before there is a session
        created = await self._call("create_session", body, messages.Created, timeout)
        session = Session(self, resolve(self.home, created.session))
        if prompt is not None:
            await session.send(prompt, timeout=timeout)
        return session

    async def session(self, name: str | SessionRef) -> Session:
        """Give the session of a reference or id; see `callboard.client.Client.session`."""
        return Session(self, await asyncio.to_thread(resolve, self.home, name))

    async def sessions(
        self, workspace: str | os.PathLike[str] | None = None
    ) -> AsyncIterator[SessionMetadata]:
        """Go through all sessions; see `callboard.client.Client.sessions`."""
        cursor: str | None = None
        while True:
            page = await self.catalog(workspace, cursor=cursor)
            for row in page.rows:
                yield row
            cursor = page.next_cursor
            if cursor is None:
                return

    async def catalog(
        self,
        workspace: str | os.PathLike[str] | None = None,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> CatalogPage:
        """Give one page of the sessions; see `callboard.client.Client.catalog`."""
        return await asyncio.to_thread(
            read_catalog, self.home, workspace, limit=limit, cursor=cursor
        )

    async def status(self, timeout: float = TIMEOUT) -> PlaneStatus:
        """Ask how the plane is; see `callboard.client.Client.status`."""
        return await self._call("status", messages.Status(), PlaneStatus, timeout)

    async def down(self, reason: str = "asked", timeout: float = TIMEOUT) -> None:
        """Stop the plane in order; see `callboard.client.Client.down`."""
        await self._call("down", messages.Down(reason=reason), messages.Ok, timeout)

    async def _call(
        self, kind: str, body: messages.Body, answer: type[_B], timeout: float | None
    ) -> _B:
        found = await self._link.call(kind, body, timeout)
        assert isinstance(found, answer)
        return found


class Session:
    """A session, as an async client sees it."""

    def __init__(self, client: Client, ref: SessionRef) -> None:
        self.ref = ref
        self._client = client
        self._link = client._link  # pyright: ignore[reportPrivateUsage]

    def __str__(self) -> str:
        return str(self.ref)

    def __repr__(self) -> str:
        return f"Session({str(self.ref)!r})"

    @property
    def id(self) -> str:
        """The session's id; unique in its workspace."""
        return self.ref.session_id

    async def send(
        self,
        text: str,
        *,
        message_id: str | None = None,
        busy_mode: BusyMode = "steer",
        metadata: Mapping[str, object] | None = None,
        timeout: float = TIMEOUT,
    ) -> Receipt:
        """Put an input into the session; see `callboard.client.Session.send`."""
        return await self.send_nowait(
            text, message_id=message_id, busy_mode=busy_mode, metadata=metadata, timeout=timeout
        )

    def send_nowait(
        self,
        text: str,
        *,
        message_id: str | None = None,
        busy_mode: BusyMode = "steer",
        metadata: Mapping[str, object] | None = None,
        timeout: float = TIMEOUT,
    ) -> asyncio.Future[Receipt]:
        """Do as `send`, without waiting: many inputs may be under way at once.

        Returns:
            A future of the receipt. Cancelling it forgets the request; the input may be accepted.

        """
        named = fresh_ulid() if message_id is None else check_message_id(message_id)
        body = send_body(str(self.ref), text, named, busy_mode, metadata)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = self._link.start("send", body, timeout, _Call(future))
        future.add_done_callback(
            lambda done: self._link.drop(request) if done.cancelled() else None
        )
        return future

    async def wait(self, message: Receipt | str, timeout: float = TIMEOUT) -> Outcome:
        """Wait until an input is settled; see `callboard.client.Session.wait`."""
        named = message.message_id if isinstance(message, Receipt) else check_message_id(message)
        body = messages.Wait(session=str(self.ref), message_id=named)
        settled = await self._link.call("wait", body, timeout)
        assert isinstance(settled, messages.WaitOutcome)
        return await asyncio.to_thread(outcome_of, self._client.home, self.ref, settled)

    async def watch(self, from_seq: int = 1, timeout: float | None = None) -> AsyncIterator[Record]:
        """Follow the transcript; see `callboard.client.Session.watch`."""
        reading = RecordReader(self.ref, from_seq)
        async for line in self.watch_lines(from_seq, timeout):
            yield reading.read(line)

    async def watch_lines(
        self, from_seq: int = 1, timeout: float | None = None
    ) -> AsyncIterator[bytes]:
        """Do as `watch`; give the lines as they are stored, without their LF."""
        watcher = _Watcher(self._link, str(self.ref), check_from_seq(from_seq))
        try:
            while True:
                yield await watcher.next_line(timeout)
        finally:
            watcher.close()

    async def cancel(
        self,
        turn_id: str | None = None,
        message_id: str | None = None,
        keep_input: bool = False,
        timeout: float = TIMEOUT,
    ) -> CancelResult:
        """Cancel the running turn, or a waiting input; see `callboard.client.Session.cancel`."""
        body = cancel_body(str(self.ref), turn_id, message_id, keep_input)
        result = await self._link.call("cancel", body, timeout)
        assert isinstance(result, CancelResult)
        return result

    async def artifact(self, artifact_id: str) -> str:
        """Read the full text of a long message; see `callboard.client.Session.artifact`."""
        return await asyncio.to_thread(read_artifact, self._client.home, self.ref, artifact_id)

    async def history(self, from_seq: int = 1, limit: int | None = None) -> HistoryPage:
        """Read a page of the session's messages; see `callboard.client.Session.history`."""
        return await asyncio.to_thread(read_history, self._client.home, self.ref, from_seq, limit)


class _Watcher:
    """A watch that goes on over lost connections and over a reader that was too slow."""

    def __init__(self, link: Link, session: str, from_seq: int) -> None:
        self._link, self._session = link, session
        self._feed = Feed(from_seq)
        self._news = asyncio.Event()
        self._error: CallboardError | None = None
        self._begin()

    def _begin(self) -> None:
        """Ask for what has not come; what an earlier request still gives is not heard any more."""
        self._feed.lapsed, self._error = False, None
        body = messages.Watch(session=self._session, from_seq=self._feed.next_seq)
        self._request = self._link.start("watch", body, None, self)

    async def next_line(self, timeout: float | None) -> bytes:
        loop = asyncio.get_running_loop()
        until = seconds_left(timeout, loop.time())
        while (line := self._feed.take()) is None:
            if self._feed.lapsed or (self._error and is_slow_watcher(self._error)):
                self._link.drop(self._request)
                self._begin()
            elif self._error is not None:
                raise self._error
            self._news.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._news.wait()
            except TimeoutError:
                raise DeadlineExceeded(scope="watch") from None
        return line

    def close(self) -> None:
        self._link.drop(self._request)

    def answer(self, body: messages.Body) -> None:
        """Take nothing: a watch is answered by pieces."""

    def refuse(self, error: CallboardError) -> None:
        self._error = error
        self._news.set()

    def stream(self, records: messages.Records) -> None:
        self._feed.add(records)
        self._news.set()


class Plane(Client):
    """A plane of this program's own; see `callboard.client.Plane`."""

    def __init__(
        self,
        home: str | os.PathLike[str] | None = None,
        settings: Settings | Mapping[str, object] | None = None,
        start_timeout: float | None = None,
    ) -> None:
        self.settings = settings_of(home, settings)
        super().__init__(self.settings.home, Link(self.settings.home, client_name()))
        self._plane = Embedded(self.settings, start_timeout)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        """Start the plane; it is up when this returns."""
        await asyncio.to_thread(self._plane.start)
        try:
            await self._link.open(CONNECT_TIMEOUT)
        except BaseException:
            await self.close()
            raise

    @property
    def pid(self) -> int:
        """The supervisor's process id, 0 if the plane was not started."""
        return self._plane.pid

    @property
    def alive(self) -> bool:
        """Tell whether the supervisor runs."""
        return self._plane.alive

    async def close(self) -> None:
        """Stop the plane in order and wait for its end; end it if it does not come."""
        await super().close()
        await asyncio.to_thread(self._plane.stop)


async def connect(
    home: str | os.PathLike[str] | None = None, timeout: float = CONNECT_TIMEOUT
) -> Client:
    """Connect to the plane that runs on a home; see `callboard.client.connect`."""
    path = settings_of(home).home
    link = Link(path, client_name())
    try:
        await link.open(timeout)
    except BaseException:
        link.close()
        raise
    return Client(path, link)
