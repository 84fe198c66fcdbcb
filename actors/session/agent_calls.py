"""What the agent's thread and the session's actor say to each other. Frozen values.

The actor begins a turn and aborts it; the agent's side calls with what the agent wants, and ends
with `Over`. Each call carries a ticket, which the actor gives back with the answer and never looks
into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from callboard.fold import Effect
from callboard.records import Failure

Ticket: TypeAlias = object


class Input(NamedTuple):
    """An input as an agent sees it (`callboard.agents.Message`)."""

    id: str
    text: str
    artifact_id: str | None = None
    parts: Sequence[Mapping[str, object]] = ()
    """Its parts as they are kept, if one of them is an excerpt (ART-1)."""


class TurnView(NamedTuple):
    """What a turn's agent may know of it."""

    session: str
    turn_id: str
    number: int
    workspace: str
    settings: Mapping[str, str]
    agent: str


@dataclass(frozen=True, slots=True)
class Next:
    """The next input, durable as a message; none once the turn is sealed."""

    turn_id: str
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Steered:
    """All inputs that are there, as a list, maybe empty; seals nothing."""

    turn_id: str
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Say:
    """An assistant message; answered when durable."""

    turn_id: str
    ticket: Ticket
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool is about to be called; answered when the call is durable (rule 5)."""

    turn_id: str
    ticket: Ticket
    call_id: str
    name: str
    arguments: object
    effect: Effect


@dataclass(frozen=True, slots=True)
class Result:
    """A tool has settled; answered when the result is durable."""

    turn_id: str
    ticket: Ticket
    call_id: str
    output: object
    error: str | None


@dataclass(frozen=True, slots=True)
class Over:
    """The agent's code has ended, whatever way."""

    turn_id: str
    text: str | None = None
    """What it returned."""
    failure: Failure | None = None
    aborted: bool = False
    """It was told to end before it ended."""
    confirmed: bool = True
    """Nothing of it runs any more."""
    launched: frozenset[str] = frozenset()
    """Calls whose tool has begun."""


AgentCall: TypeAlias = Next | Steered | Say | Call | Result | Over


class AgentSide(Protocol):
    """The agent's side as the actor sees it; every method returns at once."""

    def begin(self, view: TurnView) -> None:
        """Run the agent for a turn."""
        ...

    def abort(self, turn_id: str, reason: str) -> None:
        """Tell a turn's agent to end."""
        ...

    def close(self, reason: str) -> None:
        """Tell everything that runs to end, and let nothing begin any more (GTE-2)."""
        ...

    def answer(self, ticket: Ticket, value: object) -> None:
        """Answer a call; an exception is raised where the agent waits."""
        ...
