"""Which function an agent's name means, and the two agents that are built in.

A name is `module:function`, imported when the session's first turn runs, or a short name under
which an imported module has registered its function. Modules are found where the plane's own
Python finds them (its environment and PYTHONPATH); a session's workspace is never searched, for
what lies there is data and not code.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Awaitable, Mapping
from functools import cache
from typing import Final, Protocol, cast

from callboard.agents import AgentFunction, Message, Turn, agent, registered
from callboard.errors import InvalidRequest
from callboard.importers.script import (
    SayStep,
    Script,
    ScriptStep,
    load_shipped,
    read_transcript,
)

SCRIPT_SETTING: Final = "replay.script"
"""A transcript or script file that `replay` plays; without it, the one that is shipped."""
SPEED_SETTING: Final = "replay.speed"
"""How many times faster than recorded, 1 if not given; `max` or 0 for no pauses at all."""


def resolve(name: str) -> AgentFunction:
    """Find an agent's function.

    Raises:
        NotFound: no imported module has registered this short name.
        InvalidRequest: the name leads to something that cannot be called.
        BaseException: whatever importing the module raises.

    """
    module, colon, path = name.partition(":")
    if not colon:
        return registered(name)
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise InvalidRequest(field="agent", reason="type")
    return cast("AgentFunction", found)


@agent("echo")
async def echo(turn: Turn) -> None:
    """Say every message back."""
    async for message in turn:
        await turn.say(await turn.full_text(message) or " ")


# --- replay -----------------------------------------------------------------------------------


class Stage(Protocol):
    """What `replay` needs of a turn beyond what every agent gets."""

    async def steered(self) -> list[Message]:
        """Take what was steered in, without sealing the turn."""
        ...

    async def play(
        self, name: str, arguments: object, output: object, error: str | None, seconds: float
    ) -> None:
        """Record a tool call and, after a while, its result; no tool runs."""
        ...

    async def pause(self, seconds: float) -> None:
        """Let time pass."""
        ...


@agent("replay")
async def replay(turn: Turn) -> None:
    """Play one recorded turn: what was said and called, each in its time.

    Turn n of the session plays turn n of the script, which begins anew when it is at its end. At
    every step it takes what was steered in; the turn is sealed behind the last one.
    """
    stage = cast("Stage", turn)
    turns = script_for(turn.settings).turns
    factor = _pause_factor(turn.settings.get(SPEED_SETTING, "1"))
    for step in turns[(turn.number - 1) % len(turns)].steps:
        await stage.steered()
        await _play(stage, turn, step, step.delay_ms * factor)
    async for _ in turn:
        pass


async def _play(stage: Stage, turn: Turn, step: ScriptStep, seconds: float) -> None:
    if isinstance(step, SayStep):
        await stage.pause(seconds)
        await turn.say(step.text or " ")
    else:
        await stage.play(step.name, step.input, step.output, step.error, seconds)


def script_for(settings: Mapping[str, str]) -> Script:
    """Load the script that a session's settings name, once for a process."""
    path = settings.get(SCRIPT_SETTING)
    return _read(path) if path else _shipped()


@cache
def _shipped() -> Script:
    return load_shipped()


@cache
def _read(path: str) -> Script:
    return read_transcript(path)


def _pause_factor(speed: str) -> float:
    """Turn a speed into seconds for each recorded millisecond."""
    if speed == "max":
        return 0.0
    try:
        value = float(speed)
    except ValueError:
        value = -1.0
    if not math.isfinite(value) or value < 0:
        raise InvalidRequest(field=SPEED_SETTING, reason="out_of_range")
    return 0.001 / value if value else 0.0


def as_awaitable(value: object) -> Awaitable[object]:
    """Check that an agent's function gave something to wait for.

    Raises:
        InvalidRequest: it is no async function.

    """
    if not isinstance(value, Awaitable):
        raise InvalidRequest(field="agent", reason="type")
    return cast("Awaitable[object]", value)
