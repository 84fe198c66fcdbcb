"""Requests that wait for a batch: each session has its share, and none waits behind a flood. Pure.

Requests of one session keep their order; between sessions there is none that anybody was promised.
A batch takes from every session in turn. While several wait, it ends at COMMIT_SHARED_BYTES_MAX
beyond what each is given first, so that a session that floods makes the others wait for one short
sync and not for all that it has sent; a session that is alone gets whole batches.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from callboard.limits import (
    COMMIT_BATCH_BYTES_MAX,
    COMMIT_BATCH_FRAMES_MAX,
    COMMIT_SHARED_BYTES_MAX,
)


class Waiting(Protocol):
    """A request, as far as its place in a batch depends on it."""

    @property
    def lane(self) -> str:
        """The session that it is about; empty for what is about none and goes first."""
        ...

    @property
    def weight(self) -> int:
        """About how many bytes it will write."""
        ...


R = TypeVar("R", bound=Waiting)


class Backlog(Generic[R]):
    """What was received and is in no batch yet."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, deque[R]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, requests: Iterable[R]) -> None:
        """Take requests in, in the order in which they came."""
        for one in requests:
            lane = self._lanes.get(one.lane)
            if lane is None:
                lane = self._lanes[one.lane] = deque()
            lane.append(one)
            self._count += 1

    def take(self) -> list[R]:
        """Take the next batch: something of every session, as far as the limits go.

        Returns:
            Nothing only if nothing waits.

        """
        shared = len(self._lanes) - ("" in self._lanes) > 1
        taken = list(self._lanes.pop("", ()))
        size = sum(one.weight for one in taken)
        room = COMMIT_BATCH_BYTES_MAX
        while self._lanes:
            for name in list(self._lanes):
                one = self._lanes[name][0]
                if taken and (len(taken) >= COMMIT_BATCH_FRAMES_MAX or size + one.weight > room):
                    return self._done(taken)
                self._pop(name)
                taken.append(one)
                size += one.weight
            if shared:  # each has had its turn: what is added now makes all of them wait
                room, shared = min(room, size + COMMIT_SHARED_BYTES_MAX), False
        return self._done(taken)

    def _pop(self, name: str) -> None:
        """Take the first of a session, which stands behind all others from now on."""
        lane = self._lanes[name]
        lane.popleft()
        if lane:
            self._lanes.move_to_end(name)
        else:
            del self._lanes[name]

    def _done(self, taken: list[R]) -> list[R]:
        self._count -= len(taken)
        return taken
