"""The broker of turn permits: how many turns run at once, and who is next (ADM-4, ADM-5, ADM-7).

Pure. A session holds at most one permit and has at most one request for one, so round-robin over
sessions and first come first served are the same queue. After a gateway's start nothing is granted
until those who hold permits have said so.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Grant(NamedTuple):
    """A permit that became free goes to a session that has waited."""

    session: str
    request: str
    """The id of its request."""


class Permits:
    """Permits of one kind.

    Args:
        limit: how many may be held at once (ACTIVE_TURNS_MAX).
        queue_max: how many sessions may wait (TURN_QUEUE_MAX).

    """

    def __init__(self, limit: int, queue_max: int) -> None:
        self._limit = limit
        self.queue_max = queue_max
        self._held: set[str] = set()
        self._waiting: dict[str, str] = {}
        self.frozen = True
        """Nothing is granted: not all that are held may be known yet (ADM-7a)."""
        self.closed = False
        """Nothing is granted any more: the plane stops, and who ended made no room (SHD-1)."""

    @property
    def held(self) -> int:
        """Count the permits that are held."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """Count the sessions that wait for one."""
        return len(self._waiting)

    def holds(self, session: str) -> bool:
        """Tell whether a session holds a permit."""
        return session in self._held

    def knows(self, session: str) -> bool:
        """Tell whether a session holds a permit or waits for one: it runs a turn, or will."""
        return session in self._held or session in self._waiting

    def _free(self) -> bool:
        return not (self.frozen or self.closed) and len(self._held) < self._limit

    def reserve(self, session: str) -> bool:
        """Give a session a permit that it has not asked for, to ride along with an input.

        False if it holds one, has asked for one, or none is free; who waits comes first.
        """
        if session in self._held or self._waiting or not self._free():
            return False
        self._held.add(session)
        return True

    def ask(self, session: str, request: str) -> int | Literal["full"]:
        """Ask for a permit.

        Args:
            session: who asks; asking again replaces its earlier request and keeps its place.
            request: the id of the request.

        Returns:
            0 if it is granted, else the place in the queue from 1, or "full".

        """
        if session in self._held:
            return 0
        if session in self._waiting:
            self._waiting[session] = request
            return self._place(session)
        if not self._waiting and self._free():
            self._held.add(session)
            return 0
        if len(self._waiting) >= self.queue_max:
            return "full"
        self._waiting[session] = request
        return len(self._waiting)

    def _place(self, session: str) -> int:
        return next(n for n, name in enumerate(self._waiting, 1) if name == session)

    def give_back(self, session: str) -> list[Grant]:
        """Take back what a session holds and has asked for, however its turn ended (ADM-5)."""
        self._held.discard(session)
        self._waiting.pop(session, None)
        return self._grant()

    def register(self, session: str, *, holds: bool) -> list[Grant]:
        """Note what a session says that it holds (ADM-7a); that may be more than the limit."""
        if not holds:
            return self.give_back(session)
        self._waiting.pop(session, None)
        self._held.add(session)
        return []

    def thaw(self) -> list[Grant]:
        """Begin to grant: whoever holds a permit has said so."""
        self.frozen = False
        return self._grant()

    def _grant(self) -> list[Grant]:
        granted: list[Grant] = []
        while self._waiting and self._free():
            session = next(iter(self._waiting))
            granted.append(Grant(session, self._waiting.pop(session)))
            self._held.add(session)
        return granted
