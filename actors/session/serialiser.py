"""One operation at a time for each key, in the order they came; keys never wait for each other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class _Line:
    """The operations of one key: one that runs, and those that wait."""

    __slots__ = ("count", "waiting")

    def __init__(self) -> None:
        self.count = 0
        self.waiting: deque[asyncio.Future[None]] = deque()


class Serialiser(Generic[Key]):
    """FIFO per key, parallel across keys (KEY-1); of one event loop.

    A key's entry is made and counted before anything waits, and goes when nothing is left of it,
    however its operations ended: there are no timers and no leftovers.
    """

    def __init__(self) -> None:
        self._lines: dict[Key, _Line] = {}

    @property
    def keys(self) -> int:
        """How many keys have an operation."""
        return len(self._lines)

    @property
    def operations(self) -> int:
        """How many operations run or wait."""
        return sum(line.count for line in self._lines.values())

    @asynccontextmanager
    async def turn(self, key: Key) -> AsyncGenerator[None]:
        """Wait for this key's turn, hold it for the length of the block, and give it on."""
        line = self._lines.setdefault(key, _Line())
        line.count += 1
        try:
            if line.count > 1:
                await self._wait(line)
            try:
                yield
            finally:
                _give_on(line)
        finally:
            line.count -= 1
            if not line.count:
                del self._lines[key]

    async def _wait(self, line: _Line) -> None:
        mine = asyncio.get_running_loop().create_future()
        line.waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                _give_on(line)  # it was given the turn and will not use it
            raise


def _give_on(line: _Line) -> None:
    while line.waiting:
        following = line.waiting.popleft()
        if not following.done():
            following.set_result(None)
            return
