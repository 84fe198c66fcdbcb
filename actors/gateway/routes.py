"""Where each session is, as far as the gateway knows, and which one could make room.

Pure. A session is passive (on disk only), activating (its process was started) or live (it has
registered). A session that nothing is known of or waited for has no entry.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from callboard.actors.gateway.requests import Request

State = Literal["passive", "activating", "live"]

DEAD_MAX: Final = 4_096
"""How many ended incarnations are remembered, so that late words of theirs mean nothing."""


@dataclass(slots=True, eq=False)
class Session:
    """One session's entry."""

    ref: str
    state: State = "passive"
    routing_id: str = ""
    """Of the process that activates or lives."""
    announced: bool = False
    """The supervisor has told of that process; one that has registered may be ahead of its word."""
    wanted: bool = False
    """It was accepted for, or has work from before: its process is to be started (ACC-2c)."""
    placed: bool = False
    """Its wake has a place in the activation queue."""
    asked: bool = False
    """The supervisor was asked to start it and has not answered."""
    retiring: bool = False
    """It was named to make room; nothing new is handed to it until that is settled."""
    evictable: bool = False
    said_evictable: bool = False
    """What it said last; `evictable` is less while something is under way to it."""
    phase: Literal["idle", "open", "sealed", "draining"] = "idle"
    used: int = 0
    """When it was last used: a count that rises."""
    in_flight: dict[str, Request] = field(default_factory=dict[str, Request])
    """Requests that were handed to it and are not answered."""
    held: dict[str, Request] = field(default_factory=dict[str, Request])
    """Requests that wait until it is live (ADM-1b), in order."""
    owed: dict[str, str] = field(default_factory=dict[str, str])
    """Answers that did not reach it: kinds by the ids of its requests."""

    @property
    def takes_input(self) -> bool:
        """Tell whether a request can be handed to it now."""
        return self.state == "live" and not self.retiring

    @property
    def is_expected(self) -> bool:
        """Tell whether it will be live, or known to be gone, without anybody asking."""
        return self.state == "activating" or self.asked or self.retiring


class Routes:
    """All entries.

    Args:
        slots: how many sessions may have a process (RESIDENT_SESSIONS_MAX).

    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._sessions: dict[str, Session] = {}
        self._resident: set[str] = set()
        self._coming: dict[str, None] = {}
        self._dead: OrderedDict[str, None] = OrderedDict()
        self._uses = 0

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def get(self, ref: str) -> Session | None:
        """Find an entry."""
        return self._sessions.get(ref)

    def entry(self, ref: str) -> Session:
        """Find or make an entry."""
        found = self._sessions.get(ref)
        if found is None:
            found = self._sessions[ref] = Session(ref)
        return found

    def forget_if_idle(self, session: Session) -> None:
        """Drop an entry that says nothing."""
        if not (
            session.state != "passive"
            or session.wanted
            or session.asked
            or session.held
            or session.in_flight
        ):
            self._sessions.pop(session.ref, None)
            self._coming.pop(session.ref, None)

    def used(self, session: Session) -> None:
        """Note that somebody used a session just now."""
        self._uses += 1
        session.used = self._uses

    def settle(self, session: Session) -> None:
        """Note what a change of state means for the slots; call it after each."""
        if session.state != "passive" or session.asked:
            self._resident.add(session.ref)
            self._coming.pop(session.ref, None)
        else:
            self._resident.discard(session.ref)
            if session.wanted:
                self._coming[session.ref] = None
            else:
                self._coming.pop(session.ref, None)

    @property
    def resident(self) -> int:
        """Count the sessions that have a slot, or are about to."""
        return len(self._resident)

    def bury(self, routing_id: str) -> None:
        """Remember that an incarnation has ended."""
        self._dead[routing_id] = None
        if len(self._dead) > DEAD_MAX:
            self._dead.popitem(last=False)

    def is_dead(self, routing_id: str) -> bool:
        """Tell whether an incarnation is known to have ended."""
        return routing_id in self._dead

    def candidate(self, has_turn: Callable[[str], bool]) -> Session | None:
        """Find the least recently used session that could make room (RES-1a, RES-2).

        Args:
            has_turn: tells whether a session runs a turn or waits to.

        """
        idle = (
            session
            for ref in self._resident
            if (session := self._sessions[ref]).state == "live"
            and session.evictable
            and not (session.retiring or session.in_flight or session.held)
            and not has_turn(ref)
        )
        return min(idle, key=lambda session: session.used, default=None)

    def has_room(self, has_turn: Callable[[str], bool]) -> bool:
        """Tell whether one more session could have a process now (RES-1b)."""
        if len(self._resident) + len(self._coming) < self.slots:
            return True
        return self.candidate(has_turn) is not None

    def starved(self) -> list[Session]:
        """Give the sessions that are to be started and for which nobody was asked, in order."""
        return [self._sessions[ref] for ref in self._coming]

    def counts(self) -> Counter[str]:
        """Count the sessions by state, for people."""
        found: Counter[str] = Counter()
        for session in self._sessions.values():
            if session.state == "activating":
                found["activating"] += 1
            elif session.state == "live":
                draining = session.retiring or session.phase == "draining"
                found["draining" if draining else _SHOWN[session.phase]] += 1
        return found


_SHOWN: Final = {"idle": "live", "open": "turn", "sealed": "turn", "draining": "draining"}
