"""The simulated machine: an event heap, a clock that only events move, pipes and processes.

Nothing here knows the product. All order and all luck come from the seed: each concern draws from a
stream of its own, so that leaving out a fault late in a run changes nothing that came before it.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Final, Generic, TypeVar

MS: Final = 1_000
"""Microseconds; all times of the simulator are in these."""
SECOND: Final = 1_000 * MS
KILLED: Final = -9
MAIN_LOOP_ENDED: Final = 70
START_US: Final = 1_700_000_000 * SECOND
T = TypeVar("T")


class Violation(Exception):
    """A promise is broken: which one, and how."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant, self.what = invariant, what


class Killed(BaseException):
    """The process that runs has ended in the middle of what it did; nothing may catch this."""


class Kernel:
    """Time and order (SIM-2).

    Args:
        seed: draws everything.
        keep: whether the trace is kept as text, beside its hash.

    """

    def __init__(self, seed: int, *, keep: bool = False) -> None:
        self.seed = seed
        self.now = 0
        self.wall_offset = 0
        """What clock jumps have come to, in microseconds."""
        self.keep = keep
        self.trace: list[str] = []
        self.events = 0
        self._hash = hashlib.sha256()
        self._heap: list[tuple[int, float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = count()
        self._luck = self.stream("schedule").random

    def stream(self, name: str) -> random.Random:
        """Make the luck of one concern."""
        return random.Random(f"{self.seed}:{name}")

    def wall(self) -> int:
        """Give the wall clock in microseconds since the epoch."""
        return START_US + self.now + self.wall_offset

    def at(self, delay: int, act: Callable[..., None], *args: object) -> None:
        """Do something later; among what is due at one time the seed draws."""
        heappush(self._heap, (self.now + delay, self._luck(), next(self._count), act, args))

    def log(self, *parts: object) -> None:
        """Add a line to the trace."""
        line = f"{self.now} " + " ".join(map(str, parts))
        self._hash.update(line.encode())
        self._hash.update(b"\n")
        if self.keep:
            self.trace.append(line)

    def digest(self) -> str:
        """Give the SHA-256 of the trace so far."""
        return self._hash.hexdigest()

    @property
    def is_idle(self) -> bool:
        """Tell whether nothing is runnable and nothing is due."""
        return not self._heap

    def step(self) -> None:
        """Let the next thing happen."""
        at, _, _, act, args = heappop(self._heap)
        self.now = max(self.now, at)
        self.events += 1
        act(*args)


class Pipe(Generic[T]):
    """One direction of one connection: in order, late at times; lost with the connection."""

    def __init__(
        self, kernel: Kernel, luck: random.Random, rates: Rates, deliver: Callable[[T], None]
    ) -> None:
        self.kernel, self.luck, self.rates, self.deliver = kernel, luck, rates, deliver
        self._queue: deque[T] = deque()
        self._last = 0
        self._life = 0

    def send(self, item: T) -> None:
        """Put something in; it comes out at the other end, or is cut off."""
        delay = self.luck.randint(1, 20) * 100
        if self.luck.random() < self.rates.late:
            delay *= 100
        self._last = max(self._last, self.kernel.now + delay)
        self._queue.append(item)
        self.kernel.at(self._last - self.kernel.now, self._pump, self._life)

    def stall(self, us: int) -> None:
        """Let what is sent from now on wait somewhere on its way."""
        self._last = max(self._last, self.kernel.now + us)

    def cut(self) -> None:
        """Lose what is under way."""
        self._life += 1
        self._queue.clear()
        self._last = 0

    def _pump(self, life: int) -> None:
        if life == self._life and self._queue:
            self.deliver(self._queue.popleft())


class Rates:
    """Shares of messages that are lost with their connection, doubled, and late (SIM-5)."""

    def __init__(self) -> None:
        self.loss = self.double = self.late = 0.02

    def calm(self) -> None:
        """End all trouble."""
        self.loss = self.double = self.late = 0.0


class Process:
    """One incarnation of an actor: what arrives waits until it is woken, then comes as a batch.

    A killed process is never woken again; a paused one gets everything when it goes on (SIM-3).
    """

    role = ""
    plane_id = ""
    """Processes of different planes have different secrets: they do not hear each other."""
    deaf = False
    """Its main loop has ended and the process stays, which FLT-26 forbids; a mutant does this."""

    def __init__(self, kernel: Kernel, name: str, on_exit: Callable[[Process, int], None]) -> None:
        self.kernel, self.name, self._on_exit = kernel, name, on_exit
        self.alive = True
        self.paused = False
        self.inbox: list[object] = []
        self.raises = False
        """The next batch ends its main loop: an injected fault."""
        self._woken = False
        self._luck = kernel.stream(f"process {name}")

    def post(self, event: object) -> None:
        """Let something arrive."""
        if not self.alive:
            return
        self.inbox.append(event)
        if not self._woken and not self.paused:
            self._woken = True
            self.kernel.at(self._luck.randint(0, 5) * 100 + self.busy(), self._wake)

    def later(self, ms: int, event: object) -> None:
        """Let something arrive later."""
        self.kernel.at(ms * MS, self.post, event)

    def busy(self) -> int:
        """Give how long it is busy yet, in microseconds."""
        return 0

    def _wake(self) -> None:
        self._woken = False
        if not self.alive or self.paused or self.deaf:
            return
        events, self.inbox = self.inbox, []
        try:
            if self.raises:
                self.raises = False
                self.kernel.log(self.name, "main loop raises")
                self.main_loop_ended()
                return
            self.handle(events)
        except Killed:
            self.end(KILLED)

    def main_loop_ended(self) -> None:
        """End the process with its main loop (FLT-26)."""
        self.end(MAIN_LOOP_ENDED)

    def handle(self, events: Sequence[object]) -> None:
        """Deal with a batch."""
        raise NotImplementedError

    def end(self, status: int) -> None:
        """End, however that came about; no clean-up runs."""
        if self.alive:
            self.alive = False
            self.inbox = []
            self.kernel.log(self.name, "ends", status)
            self._on_exit(self, status)

    def pause(self, us: int) -> None:
        """Stop for a time, like SIGSTOP."""
        if self.alive and not self.paused:
            self.paused = True
            self.kernel.log(self.name, "paused", us)
            self.kernel.at(us, self.resume)

    def resume(self) -> None:
        """Go on."""
        if self.alive and self.paused:
            self.paused = False
            self.kernel.log(self.name, "goes on")
            if self.inbox and not self._woken:
                self._woken = True
                self.kernel.at(self.busy(), self._wake)
