"""The tools that are built in. A tool says what it does outside (SFX-1) before it is called."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from callboard.agents import ToolError
from callboard.artifact_files import ArtifactReader
from callboard.errors import ArtifactInvalid, CallboardError, InvalidRequest
from callboard.fold import Effect
from callboard.limits import ERRNO_RETRIES_MAX, ERRNO_RETRY_DELAY_MS, JSON_DEPTH_MAX

SLEEP_SECONDS_MAX: Final = 86_400.0


class Tool(NamedTuple):
    """A tool: what it declares, what it checks before its call is written, what it does."""

    effect: Effect
    check: Callable[[Mapping[str, Any]], None]
    run: Callable[[Mapping[str, Any]], Awaitable[object]]


def _check_sleep(arguments: Mapping[str, Any]) -> None:
    seconds = arguments.get("seconds")
    if set(arguments) != {"seconds"} or isinstance(seconds, bool):
        raise InvalidRequest(field="seconds", reason="missing" if seconds is None else "unknown")
    if not isinstance(seconds, int | float):
        raise InvalidRequest(field="seconds", reason="type")
    if not math.isfinite(seconds) or not 0 <= seconds <= SLEEP_SECONDS_MAX:
        raise InvalidRequest(field="seconds", reason="out_of_range")


async def _sleep(arguments: Mapping[str, Any]) -> None:
    await asyncio.sleep(float(arguments["seconds"]))


# --- read_prompt_artifact (ART-10) ----------------------------------------------------------------

READ_PROMPT_ARTIFACT: Final = "read_prompt_artifact"
READ_FAILED: Final = "The artifact could not be read."
"""All that an agent is told of a read that failed, whatever the reason."""
Artifacts = Callable[[str | None], ArtifactReader]
"""Gives the session's artifacts; raises if there are none."""


def _check_nothing(arguments: Mapping[str, Any]) -> None:
    """Let every call be written: what is wrong with it is told as its result."""


async def _read(artifacts: Artifacts, arguments: Mapping[str, Any]) -> str:
    """Read a piece of an artifact of this session, and say where the next one begins."""
    for attempt in range(1, ERRNO_RETRIES_MAX + 2):
        try:
            return _piece(artifacts, **arguments)
        except ArtifactInvalid as error:
            if not error.carried.get("retryable") or attempt > ERRNO_RETRIES_MAX:
                break
            await asyncio.sleep(attempt * ERRNO_RETRY_DELAY_MS / 1_000)
        except (CallboardError, TypeError):  # unknown, missing or unusable arguments too
            break
    raise ToolError(READ_FAILED)


def _piece(
    artifacts: Artifacts, artifact_id: object, offset: object = 0, limit: object = None
) -> str:
    whole = isinstance(offset, int) and isinstance(limit, int | None)
    if not isinstance(artifact_id, str) or not whole or bool in (type(offset), type(limit)):
        raise InvalidRequest(field="arguments", reason="type")
    found = artifacts(artifact_id).read(artifact_id, cast("int", offset), cast("int | None", limit))
    rest = "end" if found.next_offset is None else f"continue at {found.next_offset}"
    return f"{found.text}\n[{rest}]"


TOOLS: Final[Mapping[str, Tool]] = MappingProxyType(
    {"sleep": Tool("readonly", _check_sleep, _sleep)}
)
"""Those that need nothing of their session."""


def tool(name: str, artifacts: Artifacts) -> Tool:
    """Find a tool.

    Args:
        name: its name.
        artifacts: gives the artifacts of the session that calls it.

    Raises:
        InvalidRequest: there is none of this name.

    """
    if name == READ_PROMPT_ARTIFACT:
        return Tool("readonly", _check_nothing, partial(_read, artifacts))
    found = TOOLS.get(name)
    if found is None:
        raise InvalidRequest(field="name", reason="unknown")
    return found


def as_json(value: object) -> object:
    """Give a value as it will be read back: JSON of it, without NaN and lone surrogates.

    Raises:
        InvalidRequest: JSON cannot hold it, or it is nested too deeply.

    """
    try:
        return _cleaned(json.loads(json.dumps(value, allow_nan=False)), JSON_DEPTH_MAX)
    except RecursionError:
        raise InvalidRequest(field="arguments", reason="out_of_range") from None
    except (TypeError, ValueError):
        raise InvalidRequest(field="arguments", reason="type") from None


def _cleaned(value: object, levels: int) -> object:
    if isinstance(value, str):
        return clean(value)
    if not levels:
        raise RecursionError
    if isinstance(value, list):
        return [_cleaned(one, levels - 1) for one in cast("list[object]", value)]
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        return {clean(key): _cleaned(one, levels - 1) for key, one in pairs}
    return value


def clean(text: str) -> str:
    """Replace lone surrogates, which no UTF-8 can hold, by U+FFFD (runtime page, section 9)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
