"""The tools that are built in. A tool says what it does outside (SFX-1) before it is called."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from callboard.errors import InvalidRequest
from callboard.fold import Effect
from callboard.limits import JSON_DEPTH_MAX

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


TOOLS: Final[Mapping[str, Tool]] = MappingProxyType(
    {"sleep": Tool("readonly", _check_sleep, _sleep)}
)


def tool(name: str) -> Tool:
    """Find a tool.

    Raises:
        InvalidRequest: there is none of this name.

    """
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
