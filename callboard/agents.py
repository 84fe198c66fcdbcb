"""What an agent's author sees: the `Turn` interface and the `agent` decorator (architecture 6).

An agent is an async function of a turn. It is named `module:function`, or by the short name that it
was registered under when its module was imported.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Protocol

from callboard.errors import InvalidRequest, NotFound


class Message(Protocol):
    """An input as the agent sees it."""

    @property
    def id(self) -> str:
        """The message id that its sender gave it."""
        ...

    @property
    def text(self) -> str:
        """Its text parts, joined by line feeds; of a long message an excerpt (`artifact_id`)."""
        ...

    @property
    def artifact_id(self) -> str | None:
        """The artifact that holds its full text, if `text` is an excerpt; else none.

        `Turn.full_text` gives that text, and the tool `read_prompt_artifact` a piece of it.
        """
        ...


class Turn(Protocol):
    """One turn of a session, from its first input until its terminal record."""

    @property
    def session(self) -> str:
        """The session's reference, `<workspace_key>/<session_id>`."""
        ...

    @property
    def turn_id(self) -> str:
        """The turn's id."""
        ...

    @property
    def number(self) -> int:
        """The turn's ordinal in its session, from 1."""
        ...

    @property
    def workspace(self) -> str:
        """The session's workspace, a canonical absolute path."""
        ...

    @property
    def settings(self) -> Mapping[str, str]:
        """The session's settings, frozen when its process was activated."""
        ...

    @property
    def cancelled(self) -> bool:
        """Tell whether somebody cancelled this turn; every await raises CancelledError then."""
        ...

    def __aiter__(self) -> AsyncIterator[Message]:
        """Give the prompt, then whatever is steered in; end when the turn is sealed."""
        ...

    async def full_text(self, message: Message) -> str:
        """Give a message's text as it was sent, however long: its text parts, joined by line feeds.

        Args:
            message: one that this turn has given.

        Raises:
            ArtifactInvalid, ArtifactStoreUnsafe: the file that holds it is not as it must be.

        """
        ...

    async def say(self, text: str) -> None:
        """Write an assistant message; returns when it is durable.

        Args:
            text: 1 character or more.

        """
        ...

    async def tool(self, name: str, /, **arguments: object) -> object:
        """Run a built-in tool; its call is durable before it runs, its result before it is seen.

        Args:
            name: `sleep` (seconds: float), or `read_prompt_artifact` (artifact_id: str; offset: int
                and limit: int in bytes), which gives a piece of a long message's text.
            arguments: the tool's own.

        Returns:
            What the tool gave back.

        Raises:
            ToolError: the tool failed; the failure is durable.

        """
        ...


AgentFunction = Callable[[Turn], Awaitable[str | None]]


class ToolError(Exception):
    """A tool's failure, as its durable result says it."""


_registered: dict[str, AgentFunction] = {}


def agent(name: str) -> Callable[[AgentFunction], AgentFunction]:
    """Register an async function as an agent under a short name.

    Args:
        name: letters, digits, `_`, `.` and `-`, without a colon.

    Raises:
        InvalidRequest: the name is empty or holds a colon.

    """
    if not name or ":" in name:
        raise InvalidRequest(field="agent", reason="format")

    def register(function: AgentFunction) -> AgentFunction:
        _registered[name] = function
        return function

    return register


def registered(name: str) -> AgentFunction:
    """Return the agent that was registered under a short name.

    Raises:
        NotFound: no module that was imported registered it.

    """
    found = _registered.get(name)
    if found is None:
        raise NotFound
    return found
