"""The gate that runs of agents and tools pass, and that disposal closes and waits for (GTE).

Of one event loop: everything here is called on the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

from callboard.errors import GateClosed
from callboard.limits import GATE_LABEL_CHARS_MAX


class Signal:
    """Says once that something shall end, and why."""

    __slots__ = ("_listeners", "reason")

    def __init__(self) -> None:
        self.reason: str | None = None
        self._listeners: list[Callable[[str], None]] = []

    @property
    def aborted(self) -> bool:
        """Whether it was said."""
        return self.reason is not None

    def abort(self, reason: str) -> None:
        """Say it; the first reason stands for good."""
        if self.reason is not None:
            return
        self.reason = reason
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(reason)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call a function with the reason, at once if it was said before."""
        if self.reason is None:
            self._listeners.append(listener)
        else:
            listener(self.reason)

    def unlisten(self, listener: Callable[[str], None]) -> None:
        """Forget a listener; an unknown one is none."""
        if listener in self._listeners:
            self._listeners.remove(listener)


class Holder(NamedTuple):
    """A ticket that is not released yet."""

    label: str
    held_ms: int


class Stats(NamedTuple):
    """A gate at this moment."""

    accepting: bool
    active: int
    holders: list[Holder]


class Shut(NamedTuple):
    """How a shutdown ended."""

    drained: bool
    reason: str
    holders: list[Holder]


class Ticket:
    """The right to run, until `release`; as a context manager it releases by itself."""

    __slots__ = ("_caller", "_gate", "entered", "label", "signal")

    def __init__(self, gate: Gate, label: str, caller: Signal | None, entered: float) -> None:
        self.label = label
        self.signal = Signal()
        self.entered = entered
        self._gate: Gate | None = gate
        self._caller = caller
        if caller is not None:
            caller.listen(self.signal.abort)

    def release(self) -> None:
        """Give the right back, once however often it is called."""
        gate, self._gate = self._gate, None
        if gate is None:
            return
        if self._caller is not None:
            self._caller.unlisten(self.signal.abort)
        gate.leave(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Gate:
    """Counts who is inside. Closing aborts everybody; only a release counts as gone.

    Args:
        clock: monotonic seconds.

    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._inside: dict[Ticket, None] = {}
        self._reason: str | None = None
        self._shut: asyncio.Future[Shut] | None = None
        self._empty: asyncio.Event | None = None
        self._draining: asyncio.Task[None] | None = None

    def enter(self, label: str, signal: Signal | None = None) -> Ticket:
        """Take a ticket (GTE-1).

        Args:
            label: what runs, for people; cut at GATE_LABEL_CHARS_MAX.
            signal: the caller's own; its abort reaches this ticket alone.

        Raises:
            GateClosed: the gate was closed.

        """
        if self._reason is not None:
            raise GateClosed
        ticket = Ticket(self, label[:GATE_LABEL_CHARS_MAX], signal, self._clock())
        self._inside[ticket] = None
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Count a ticket out; `Ticket.release` calls it."""
        self._inside.pop(ticket, None)
        if not self._inside and self._empty is not None:
            self._empty.set()

    def close(self, reason: str) -> None:
        """Let nobody in any more and abort every ticket, once; the first reason stands (GTE-2)."""
        if self._reason is not None:
            return
        self._reason = reason
        for ticket in list(self._inside):
            ticket.signal.abort(reason)

    @property
    def stats(self) -> Stats:
        """The gate at this moment."""
        return Stats(self._reason is None, len(self._inside), self._holders())

    def _holders(self) -> list[Holder]:
        now = self._clock()
        return [Holder(one.label, round((now - one.entered) * 1000)) for one in self._inside]

    async def shutdown(self, reason: str, deadline_ms: int) -> Shut:
        """Close, and wait until everybody is gone or the deadline is over (GTE-3).

        All callers share the first one's reason, deadline and result.
        """
        if self._shut is None:
            loop = asyncio.get_running_loop()
            self._shut = loop.create_future()
            self._empty = asyncio.Event()
            self.close(reason)
            self._draining = loop.create_task(self._drain(self._shut, self._empty, deadline_ms))
        return await asyncio.shield(self._shut)

    async def _drain(self, shut: asyncio.Future[Shut], empty: asyncio.Event, ms: int) -> None:
        if self._inside:
            with suppress(TimeoutError):
                await asyncio.wait_for(empty.wait(), ms / 1000)
        shut.set_result(Shut(not self._inside, self._reason or "", self._holders()))
