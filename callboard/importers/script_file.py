"""A script for the `replay` agent, and the file form of one (the format `callboard-script`).

A file is JSON lines: a header, then one line a turn.

    {"format":"callboard-script","version":1,"name":"tour","source":"hand","turns":2}
    {"user":"Hello","steps":[{"say":"Hi!","delay_ms":20}]}
    {"user":"List it","steps":[{"tool":"shell","input":{"command":"ls"},"output":"a","error":null,
     "delay_ms":35}]}

(One line each; `error` and `delay_ms` may be left out.) The file is ours, so the reader is strict:
anything unexpected is `ImportMalformed` with its line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, BinaryIO, Final, TypeAlias

from callboard.errors import ImportMalformed
from callboard.importers.lines import BadLine, head_objects, json_lines
from callboard.importers.port import (
    ImportHeader,
    ImportItem,
    ImportLimits,
    ImportMessage,
    ImportToolCall,
    ImportToolResult,
    ImportTurn,
    JsonObject,
    JsonValue,
    TextPart,
    counted,
)

SCRIPT_FORMAT: Final = "callboard-script"
SCRIPT_VERSION: Final = 1

SCRIPT_TEXT_BYTES_MAX: Final = 262_144
"""A prompt, a say, a tool's input and its output each, in bytes of JSON as a record holds them
(without the quotes), marker included. A record is at most 1 MiB, whatever is escaped in it."""

SCRIPT_DELAY_MS_MAX: Final = 5_000
SCRIPT_DELAY_MS_DEFAULT: Final = 20
SCRIPT_TOOL_NAME_CHARS_MAX: Final = 200
"""As a `tool_call` part allows."""

_LIMITS: Final = ImportLimits()


@dataclass(frozen=True, slots=True)
class SayStep:
    """The agent says something, after so long."""

    text: str
    delay_ms: int = SCRIPT_DELAY_MS_DEFAULT


@dataclass(frozen=True, slots=True)
class ToolStep:
    """The agent calls a tool, which gives its result after so long; `error` None is success."""

    name: str
    input: JsonValue
    output: str
    error: str | None = None
    delay_ms: int = SCRIPT_DELAY_MS_DEFAULT


ScriptStep: TypeAlias = SayStep | ToolStep


@dataclass(frozen=True, slots=True)
class ScriptTurn:
    """What a user said, never blank, and what the agent did."""

    user: str
    steps: tuple[ScriptStep, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """A recorded session to play: its name, the format it was read from, its turns."""

    name: str
    source: str
    turns: tuple[ScriptTurn, ...]


def json_bytes(value: JsonValue) -> int:
    """Measure a value as compact JSON; a text without its quotes."""
    size = len(_json(value).encode("utf-8"))
    return size - 2 if isinstance(value, str) else size


def dump_script(script: Script, stream: IO[bytes]) -> None:
    """Write a script's file form; `load_script` gives an equal script back."""
    header: JsonObject = {
        "format": SCRIPT_FORMAT,
        "version": SCRIPT_VERSION,
        "name": script.name,
        "source": script.source,
        "turns": len(script.turns),
    }
    stream.write(_json(header).encode("utf-8") + b"\n")
    for turn in script.turns:
        line: JsonObject = {"user": turn.user, "steps": [_step_line(step) for step in turn.steps]}
        stream.write(_json(line).encode("utf-8") + b"\n")


def load_script(stream: IO[bytes], limits: ImportLimits = _LIMITS) -> Script:
    """Read a script's file form.

    Raises:
        ImportMalformed: not every line is as it should be, or turns are missing.
        ImportTooLarge: the file or a line is above its limit.

    """
    lines = _objects(stream, limits)
    number, header = next(lines, (1, None))
    if header is None:
        raise _wrong(number, "no header")
    name, source, count = _header(number, header)
    turns: list[ScriptTurn] = []
    for number, fields in lines:
        turns.append(_turn(number, fields))
    if len(turns) != count:
        raise _wrong(number, f"{count} turns announced, {len(turns)} found")
    return Script(name, source, tuple(turns))


class ScriptImporter:
    """The `callboard-script` format as a transcript: a script has neither times nor ids."""

    name: str = SCRIPT_FORMAT

    def sniff(self, head: bytes, file_name: str) -> int:
        """Look at the first record; see `TranscriptImporter.sniff`."""
        del file_name
        first = next(head_objects(head.split(b"\n", 1)[0]), None)
        return 100 if first and first.get("format") == SCRIPT_FORMAT else 0

    def read(self, stream: BinaryIO, limits: ImportLimits) -> Iterator[ImportItem]:
        """Read a script file; see `TranscriptImporter.read`.

        Raises:
            ImportMalformed: see `load_script`; a script is ours, nothing of it is skipped.

        """
        return counted(_items(load_script(stream, limits)), limits)


def _items(script: Script) -> Iterator[ImportItem]:
    session, calls = script.name, 0
    yield ImportHeader(session, session, title=script.name)
    for turn in script.turns:
        yield ImportTurn(session, "started")
        yield ImportMessage(session, "user", (TextPart(turn.user),))
        for step in turn.steps:
            if isinstance(step, SayStep):
                yield ImportMessage(session, "assistant", (TextPart(step.text),))
            else:
                calls += 1
                yield ImportToolCall(session, f"call_{calls}", step.name, step.input)
                yield ImportToolResult(session, f"call_{calls}", step.output, step.error)
        yield ImportTurn(session, "completed")


def _json(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _wrong(line: int, reason: str) -> ImportMalformed:
    return ImportMalformed(line=line, reason=reason)


def _objects(stream: IO[bytes], limits: ImportLimits) -> Iterator[tuple[int, JsonObject]]:
    for number, found in json_lines(stream, limits):
        if isinstance(found, BadLine):
            raise _wrong(number, found.reason)
        if not isinstance(found.value, dict):
            raise _wrong(number, "not an object")
        yield number, found.value


def _header(line: int, fields: JsonObject) -> tuple[str, str, int]:
    if fields.get("format") != SCRIPT_FORMAT:
        raise _wrong(line, f"not a {SCRIPT_FORMAT}")
    if fields.get("version") != SCRIPT_VERSION:
        raise _wrong(line, f"not version {SCRIPT_VERSION}")
    _only(line, fields, "format", "version", "name", "source", "turns")
    turns = fields.get("turns")
    if not isinstance(turns, int) or isinstance(turns, bool):
        raise _wrong(line, "turns is no integer")
    return _text(line, fields, "name"), _text(line, fields, "source"), turns


def _turn(line: int, fields: JsonObject) -> ScriptTurn:
    _only(line, fields, "user", "steps")
    user, steps = _text(line, fields, "user"), fields.get("steps")
    if not user.strip():
        raise _wrong(line, "user is blank")
    if not isinstance(steps, list):
        raise _wrong(line, "steps is no list")
    return ScriptTurn(user, tuple(_step(line, step) for step in steps))


def _step(line: int, fields: JsonValue) -> ScriptStep:
    if not isinstance(fields, dict):
        raise _wrong(line, "a step is no object")
    delay_ms = fields.get("delay_ms", SCRIPT_DELAY_MS_DEFAULT)
    if not isinstance(delay_ms, int) or isinstance(delay_ms, bool):
        raise _wrong(line, "delay_ms is no integer")
    if not 0 <= delay_ms <= SCRIPT_DELAY_MS_MAX:
        raise _wrong(line, f"delay_ms is not in 0..{SCRIPT_DELAY_MS_MAX}")
    if "say" in fields:
        _only(line, fields, "say", "delay_ms")
        return SayStep(_text(line, fields, "say"), delay_ms)
    return _tool(line, fields, delay_ms)


def _tool(line: int, fields: JsonObject, delay_ms: int) -> ToolStep:
    _only(line, fields, "tool", "input", "output", "error", "delay_ms")
    name = _text(line, fields, "tool")
    if not 1 <= len(name) <= SCRIPT_TOOL_NAME_CHARS_MAX:
        raise _wrong(line, f"tool is not of 1..{SCRIPT_TOOL_NAME_CHARS_MAX} characters")
    if json_bytes(fields.get("input")) > SCRIPT_TEXT_BYTES_MAX:
        raise _wrong(line, f"input is above {SCRIPT_TEXT_BYTES_MAX} bytes")
    error = None if fields.get("error") is None else _text(line, fields, "error")
    return ToolStep(name, fields.get("input"), _text(line, fields, "output"), error, delay_ms)


def _step_line(step: ScriptStep) -> JsonObject:
    if isinstance(step, SayStep):
        return {"say": step.text, "delay_ms": step.delay_ms}
    return {
        "tool": step.name,
        "input": step.input,
        "output": step.output,
        "error": step.error,
        "delay_ms": step.delay_ms,
    }


def _only(line: int, fields: JsonObject, *names: str) -> None:
    if unknown := fields.keys() - set(names):
        raise _wrong(line, f"unknown member {min(unknown)[:40]!r}")


def _text(line: int, fields: JsonObject, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise _wrong(line, f"{name} is no text")
    if json_bytes(value) > SCRIPT_TEXT_BYTES_MAX:
        raise _wrong(line, f"{name} is above {SCRIPT_TEXT_BYTES_MAX} bytes")
    return value
