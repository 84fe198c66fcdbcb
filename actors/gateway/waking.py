"""Waking sessions: who is to be started, and who makes room for it (flow 3; ADM-1, ACC-4, RES-1).

Pure. The supervisor decides on slots and processes; here is known what is wanted, and of whom it
was asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from callboard import messages
from callboard.actors.gateway.permits import Permits
from callboard.actors.gateway.places import Places
from callboard.actors.gateway.requests import Asks, Deadlines, Request
from callboard.actors.gateway.routes import Routes, Session
from callboard.wire import encode_body

AGAIN_MS: Final = 100
"""After which something that found its peer neither there nor gone is tried again."""
FULL_AGAIN_MS: Final = 1_000
"""After which the supervisor is asked again when it had no room."""


@dataclass(frozen=True, slots=True)
class Activation:
    """What was asked of the supervisor for a session, and who is to make room for it."""

    session: str
    evicted: str = ""


class Waking:
    """Sessions that are to be started.

    Args:
        routes: where they are.
        permits: tells who runs a turn.
        places: each session to be woken has a place in the activation queue.
        supervisor: is asked.
        again: remembers what to try again, and when.

    """

    def __init__(
        self,
        routes: Routes,
        permits: Permits,
        places: Places,
        supervisor: Asks[Request | Activation],
        again: Deadlines,
    ) -> None:
        self._routes = routes
        self._permits = permits
        self._places = places
        self._supervisor = supervisor
        self._again = again
        self.is_closing: Callable[[], bool] = _no

    def wake(self, session: Session) -> None:
        """See to it that a passive session is started, now or when there is room (ACC-4b)."""
        if session.state == "passive" and not session.wanted:
            session.wanted = session.placed = True
            self._places.force(0)
            self._routes.settle(session)
        self.activate(session)

    def unwant(self, session: Session) -> None:
        """Give a session's place back: it is there, or will not be."""
        if session.placed:
            session.placed = False
            self._places.leave(0)
        session.wanted = False
        self._routes.settle(session)

    def has_room(self, ref: str) -> bool:
        """Tell whether a passive session could be started now, without asking (RES-1b)."""
        session = self._routes.get(ref)
        if session is not None and (session.wanted or session.asked):
            return True
        return self._routes.has_room(self._permits.knows)

    def activate(self, session: Session) -> None:
        """Ask for a session's process if it is wanted, nobody has asked, and there is room."""
        if session.state != "passive" or session.asked or not session.wanted:
            return
        if not self._supervisor.is_up or self.is_closing():
            return
        evicted = ""
        if self._routes.resident >= self._routes.slots:
            candidate = self._routes.candidate(self._permits.knows)
            if candidate is None:
                return  # it waits; see `use_room`
            candidate.retiring = True
            evicted = candidate.ref
        session.asked = True
        self._routes.settle(session)
        body = messages.Activate(session=session.ref, evict=[evicted] if evicted else [])
        self._supervisor.ask(body.kind, encode_body(body), Activation(session.ref, evicted))

    def use_room(self) -> None:
        """Start sessions that wait for a slot, as far as there is room."""
        for session in self._routes.starved():
            self.activate(session)
            if not session.asked:
                return

    def refused(self, session: Session, code: str, now: int) -> bool:
        """Note that the supervisor starts no process; false if nothing of the kind will do."""
        if code == "overloaded":
            self._again.add(session.ref, now + FULL_AGAIN_MS)
            return True
        self.unwant(session)
        return code == "session_quarantined"  # storage says so itself, and to whom it matters


def _no() -> bool:
    return False
