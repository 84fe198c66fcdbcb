"""The public objects of a program that uses callboard: Plane, connect(), Client, Session.

    with callboard.Plane() as plane:                    # a plane of this program's own
        session = plane.create_session(agent="echo", workspace=".")
        receipt = session.send("hello")                 # returns when durable
        outcome = session.wait(receipt, timeout=30)

Every object may be used from any thread. What is written goes through the door; what is read
(histories, listings, the text of an answer) is read from the home's files, with the plane up or
down. `callboard.aio` has the same names for async programs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeVar

from callboard import messages
from callboard.artifacts import check_text
from callboard.door import Feed, cancel_body, create_body, scalars, seconds_left, send_body
from callboard.errors import CallboardError, DeadlineExceeded, Overloaded
from callboard.ids import SessionRef, check_message_id, check_session_id, fresh_id, fresh_ulid
from callboard.limits import SHUTDOWN_HARD_MS
from callboard.link import Link
from callboard.messages import CancelResult, PlaneStatus, Receipt
from callboard.reads import (
    RecordReader,
    check_from_seq,
    existing_workspace,
    last_try,
    read_artifact,
    read_catalog,
    read_history,
    resolve,
    settings_of,
    turn_end,
)
from callboard.records import Failure, Record

if TYPE_CHECKING:
    from typing import Self

    from callboard.config import Settings
    from callboard.storage.catalog import CatalogPage
    from callboard.storage.metadata import SessionMetadata
    from callboard.storage.views import HistoryPage
    from callboard.supervisor.launch import Launched

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

BusyMode = Literal["steer", "queue", "interrupt"]
TIMEOUT = 30.0
"""Seconds that a caller waits who does not say how long."""
CONNECT_TIMEOUT = 10.0
STOP_TIMEOUT = 2 * SHUTDOWN_HARD_MS / 1000
"""Seconds that a plane has to stop in order."""
_B = TypeVar("_B", bound=messages.Body)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an input ended.

    `outcome`, `turn_id` and `text`, the last assistant message, are those of its turn, or of the
    last turn that took it before it was discarded; none if no turn did. `failure` says what went
    wrong in a turn that failed, `reason` why an input was discarded.
    """

    message_id: str
    input_disposition: Literal["acknowledged", "held", "discarded"]
    outcome: str | None
    text: str
    turn_id: str | None
    failure: Failure | None
    reason: str | None

    @property
    def ok(self) -> bool:
        """Tell whether the turn ended well."""
        return self.outcome in ("completed", "needs_user")


class Client:
    """A connection to a plane that is running; `connect()` makes one."""

    def __init__(self, home: Path, link: Link) -> None:
        self.home = home
        self._link = link

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection. Nothing that was accepted is discarded by it."""
        self._link.close()

    def create_session(
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
        """Create a session; it is durable when this returns, and so is its first prompt.

        Args:
            agent: `module:function`, or the short name of a registered agent.
            workspace: an existing folder; a relative one is taken from the working directory.
            title: at most TITLE_CHARS_MAX characters.
            model: for the agent to read.
            settings: for the agent to read; texts by name.
            session_id: its id within the workspace; default: a new one.
            prompt: its first input, of any length that `Session.send` takes; a refused one leaves
                the session without.
            timeout: seconds, for each of the two.

        Raises:
            InvalidRequest: a field does not fit, or there is no such folder.
            SessionExists: the id is taken.

        """
        place = existing_workspace(workspace)
        named = fresh_ulid() if session_id is None else check_session_id(session_id)
        body = create_body(
            key=fresh_id(),
            workspace=place,
            session_id=named,
            agent=agent,
            title=title,
            model=model,
            settings=settings,
        )
        if prompt is not None:
            check_text(scalars(prompt))  # refused before there is a session
        created = self._call("create_session", body, messages.Created, timeout)
        session = self.session(created.session)
        if prompt is not None:
            session.send(prompt, timeout=timeout)
        return session

    def session(self, name: str | SessionRef) -> Session:
        """Give the session of a full reference, or of an id that only one session has (IDN-1).

        Args:
            name: `<workspace key>/<session id>`, or the id alone. Nothing is asked for a full
                reference: whether there is such a session shows at its first use.

        Raises:
            InvalidRequest: neither a reference nor an id (IDN-2).
            NotFound: no session has this id.
            SessionAmbiguous: several have it, in the workspaces that it carries.

        """
        return Session(self, resolve(self.home, name))

    def sessions(
        self, workspace: str | os.PathLike[str] | None = None
    ) -> Iterator[SessionMetadata]:
        """Go through all sessions, those with the latest message first.

        Args:
            workspace: only those of this folder.

        Raises:
            StorageUnreadable: the home cannot be read.

        """
        cursor: str | None = None
        while True:
            page = self.catalog(workspace, cursor=cursor)
            yield from page.rows
            cursor = page.next_cursor
            if cursor is None:
                return

    def catalog(
        self,
        workspace: str | os.PathLike[str] | None = None,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> CatalogPage:
        """Give one page of the sessions (CAT); see `sessions`.

        Args:
            workspace: only those of this folder.
            limit: rows, 1 to CATALOG_PAGE_ROWS_MAX.
            cursor: `next_cursor` of the page before.

        """
        return read_catalog(self.home, workspace, limit=limit, cursor=cursor)

    def status(self, timeout: float = TIMEOUT) -> PlaneStatus:
        """Ask how the plane is: its processes, sessions by state, counters."""
        return self._call("status", messages.Status(), PlaneStatus, timeout)

    def down(self, reason: str = "asked", timeout: float = TIMEOUT) -> None:
        """Stop the plane in order; it has taken the order when this returns."""
        self._call("down", messages.Down(reason=reason), messages.Ok, timeout)

    def _call(self, kind: str, body: messages.Body, answer: type[_B], timeout: float | None) -> _B:
        found = self._link.call(kind, body, timeout)
        assert isinstance(found, answer)
        return found


class Session:
    """A session, as a client sees it."""

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

    def send(
        self,
        text: str,
        *,
        message_id: str | None = None,
        busy_mode: BusyMode = "steer",
        metadata: Mapping[str, object] | None = None,
        timeout: float = TIMEOUT,
    ) -> Receipt:
        """Put an input into the session. It is durable when this returns.

        Args:
            text: the input; a lone surrogate becomes U+FFFD. One of more than
                ARTIFACT_INLINE_BYTES_MAX bytes is kept in a file of the session, and the agent is
                given an excerpt that says how to read it (`artifact`).
            message_id: its identity: the same id with the same content is the same message, however
                often it is sent (INB-6). Default: a new one, kept over every retry of this call.
            busy_mode: `steer` joins a running turn, `queue` waits for the next.
            metadata: JSON, kept with the input.
            timeout: seconds. After `deadline_exceeded` the input may or may not be durable; sending
                it again with the same message_id is safe.

        Raises:
            RequestConflict: the id was used for another content.
            PayloadTooLarge: longer than any text may be (ART-4).
            ArtifactQuota: the session holds as many long texts as it may.
            InboxFull, Overloaded, StorageFull: refused; nothing was stored.
            CallboardError: any other refusal.

        """
        named = fresh_ulid() if message_id is None else check_message_id(message_id)
        body = send_body(str(self.ref), text, named, busy_mode, metadata)
        receipt = self._link.call("send", body, timeout)
        assert isinstance(receipt, Receipt)
        return receipt

    def send_nowait(
        self,
        text: str,
        *,
        message_id: str | None = None,
        busy_mode: BusyMode = "steer",
        metadata: Mapping[str, object] | None = None,
        timeout: float = TIMEOUT,
    ) -> Future[Receipt]:
        """Do as `send`, without waiting: many inputs may be under way at once.

        Returns:
            A future of the receipt. It cannot be cancelled; its callbacks run on the client's own
            thread and should be short.

        """
        named = fresh_ulid() if message_id is None else check_message_id(message_id)
        body = send_body(str(self.ref), text, named, busy_mode, metadata)
        promise = _Promise()
        self._link.work_in_background()
        self._link.start("send", body, timeout, promise)
        return promise.future

    def wait(self, message: Receipt | str, timeout: float = TIMEOUT) -> Outcome:
        """Wait until an input is settled: acknowledged, held or discarded.

        Args:
            message: its receipt or message id.
            timeout: seconds.

        Raises:
            DeadlineExceeded: it is not settled yet; wait again.
            NotFound: the session knows no such input.

        """
        named = message.message_id if isinstance(message, Receipt) else check_message_id(message)
        body = messages.Wait(session=str(self.ref), message_id=named)
        settled = self._link.call("wait", body, timeout)
        assert isinstance(settled, messages.WaitOutcome)
        return outcome_of(self._client.home, self.ref, settled)

    def watch(self, from_seq: int = 1, timeout: float | None = None) -> Iterator[Record]:
        """Follow the transcript: what is stored from a place on, then what comes, without a gap.

        Args:
            from_seq: the first record wanted.
            timeout: seconds without anything new after which `deadline_exceeded` is raised.

        """
        reading = RecordReader(self.ref, from_seq)
        for line in self.watch_lines(from_seq, timeout):
            yield reading.read(line)

    def watch_lines(self, from_seq: int = 1, timeout: float | None = None) -> Iterator[bytes]:
        """Do as `watch`; give the lines as they are stored, without their LF."""
        watcher = _Watcher(self._link, str(self.ref), check_from_seq(from_seq))
        try:
            while True:
                yield watcher.next_line(timeout)
        finally:
            watcher.close()

    def cancel(
        self,
        turn_id: str | None = None,
        message_id: str | None = None,
        keep_input: bool = False,
        timeout: float = TIMEOUT,
    ) -> CancelResult:
        """Cancel the running turn, or an input that still waits.

        Args:
            turn_id: this turn and no other; default: whichever runs.
            message_id: this input, or the turn that has taken it.
            keep_input: leave the turn's inputs in the inbox, held until the next send.
            timeout: seconds.

        """
        body = cancel_body(str(self.ref), turn_id, message_id, keep_input)
        result = self._link.call("cancel", body, timeout)
        assert isinstance(result, CancelResult)
        return result

    def artifact(self, artifact_id: str) -> str:
        """Read the full text of a long message from the session's files, with the plane up or down.

        Args:
            artifact_id: 64 lower-case hex digits, as the message's excerpt says.

        Raises:
            InvalidRequest: no artifact id.
            ArtifactInvalid: there is none of this id, or it is not what its name says.
            ArtifactStoreUnsafe: the folder that holds it is not safely ours.

        """
        return read_artifact(self._client.home, self.ref, artifact_id)

    def history(self, from_seq: int = 1, limit: int | None = None) -> HistoryPage:
        """Read a page of the session's messages from its transcript (HIS-1).

        Args:
            from_seq: `next_seq` of the page before.
            limit: messages, 1 to HISTORY_PAGE_MESSAGES_MAX.

        """
        return read_history(self._client.home, self.ref, from_seq, limit)


def is_slow_watcher(error: CallboardError) -> bool:
    """Tell whether a watch ended because its lines were not read fast enough (WCH-1c)."""
    return isinstance(error, Overloaded) and error.carried.get("resource") == "socket"


def outcome_of(home: Path, ref: SessionRef, settled: messages.WaitOutcome) -> Outcome:
    """Complete what the plane says of an input by what its transcript says of the turn."""
    if settled.turn_id is not None:
        end = turn_end(home, ref, settled.turn_id)
    else:
        end = last_try(home, ref, settled.message_id)
    return Outcome(
        settled.message_id,
        settled.input_disposition,
        settled.outcome or (end.outcome if end else None),
        end.text if end else "",
        end.turn_id if end else settled.turn_id,
        end.failure if end else None,
        settled.reason,
    )


class _Promise:
    """A sink that is a future of a receipt."""

    def __init__(self) -> None:
        self.future: Future[Receipt] = Future()
        self.future.set_running_or_notify_cancel()

    def answer(self, body: messages.Body) -> None:
        assert isinstance(body, Receipt)
        self.future.set_result(body)

    def refuse(self, error: CallboardError) -> None:
        self.future.set_exception(error)

    def stream(self, records: messages.Records) -> None:
        """Take nothing: a send is no watch."""


class _Watcher:
    """A watch that goes on over lost connections and over a reader that was too slow."""

    def __init__(self, link: Link, session: str, from_seq: int) -> None:
        self._link, self._session = link, session
        self._feed = Feed(from_seq)
        self._news = Condition()
        self._error: CallboardError | None = None
        link.work_in_background()
        self._begin()

    def _begin(self) -> None:
        """Ask for what has not come; what an earlier request still gives is not heard any more."""
        self._feed.lapsed, self._error = False, None
        body = messages.Watch(session=self._session, from_seq=self._feed.next_seq)
        self._ear = _Ear(self)
        self._request = self._link.start("watch", body, None, self._ear)

    def next_line(self, timeout: float | None) -> bytes:
        until = seconds_left(timeout, monotonic())
        with self._news:
            while (line := self._feed.take()) is None:
                if self._feed.lapsed or (self._error and is_slow_watcher(self._error)):
                    self._link.drop(self._request)
                    self._begin()
                elif self._error is not None:
                    raise self._error
                elif not self._news.wait(None if until is None else until - monotonic()):
                    raise DeadlineExceeded(scope="watch")
        return line

    def close(self) -> None:
        self._link.drop(self._request)

    def hear(self, ear: _Ear, records: messages.Records | CallboardError) -> None:
        with self._news:
            if ear is not self._ear:
                return
            if isinstance(records, CallboardError):
                self._error = records
            else:
                self._feed.add(records)
            self._news.notify()


class _Ear:
    """A sink of one request of a watch."""

    def __init__(self, watcher: _Watcher) -> None:
        self._watcher = watcher

    def answer(self, body: messages.Body) -> None:
        """Take nothing: a watch is answered by pieces."""

    def refuse(self, error: CallboardError) -> None:
        self._watcher.hear(self, error)

    def stream(self, records: messages.Records) -> None:
        self._watcher.hear(self, records)


class Embedded:
    """The process of a plane that lives and ends with this program."""

    def __init__(self, settings: Settings, start_timeout: float | None) -> None:
        self._settings, self._start_timeout = settings, start_timeout
        self._launched: Launched | None = None

    def start(self) -> None:
        """Start the plane; it is up when this returns."""
        from callboard.supervisor.launch import launch

        self._launched = launch(
            self._settings.home,
            self._settings,
            detach=False,
            embedded=True,
            timeout_s=self._start_timeout,
        )

    @property
    def pid(self) -> int:
        """The supervisor's process id, 0 if the plane was not started."""
        return self._launched.pid if self._launched is not None else 0

    @property
    def alive(self) -> bool:
        """Tell whether the supervisor runs."""
        return self._launched is not None and self._launched.wait(0) is None

    def stop(self) -> None:
        """Stop the plane in order and wait for its end; end it if it does not come."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        if launched.wait(0) is None:
            launched.terminate()
            if launched.wait(STOP_TIMEOUT) is None:
                launched.kill()
                launched.wait()
        launched.close()


class Plane(Client):
    """A plane of this program's own: it starts with the block and stops in order with it.

    Args:
        home: default: as configured (CALLBOARD_HOME, the configuration file, the platform's place).
        settings: what the plane runs with: all of it, or some of it by name.
        start_timeout: seconds to wait until it is up; default: as long as recovery takes.

    Raises:
        HomeInUse: at the start of the block: another plane has this home.
        HomeUnsafe, FormatUnsupported, JournalDamaged: at the start of the block: see `launch`.

    """

    def __init__(
        self,
        home: str | os.PathLike[str] | None = None,
        settings: Settings | Mapping[str, object] | None = None,
        start_timeout: float | None = None,
    ) -> None:
        self.settings = settings_of(home, settings)
        super().__init__(self.settings.home, Link(self.settings.home, client_name()))
        self._plane = Embedded(self.settings, start_timeout)

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start the plane; it is up when this returns."""
        self._plane.start()
        try:
            self._link.open(CONNECT_TIMEOUT)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The supervisor's process id, 0 if the plane was not started."""
        return self._plane.pid

    @property
    def alive(self) -> bool:
        """Tell whether the supervisor runs."""
        return self._plane.alive

    def close(self) -> None:
        """Stop the plane in order and wait for its end; end it if it does not come."""
        super().close()
        self._plane.stop()


def connect(home: str | os.PathLike[str] | None = None, timeout: float = CONNECT_TIMEOUT) -> Client:
    """Connect to the plane that runs on a home.

    Args:
        home: default: as configured (CALLBOARD_HOME, the configuration file, the platform's place).
        timeout: seconds to be let in.

    Raises:
        PlaneNotRunning: there is none.
        Overloaded: it has as many clients as it takes.
        CallboardError: it does not let us in.

    """
    path = settings_of(home).home
    link = Link(path, client_name())
    try:
        link.open(timeout)
    except BaseException:
        link.close()
        raise
    return Client(path, link)


def client_name() -> str:
    """Say who connects, for the plane's logs."""
    return f"python {os.getpid()}"
