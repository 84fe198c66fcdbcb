"""From a transcript to a script for the `replay` agent: what was typed, said and called.

A turn of a script is one thing that a user typed, steering included, and what followed it until
the next. Subagents are left out: what they did shows as the result of the call that started them;
only in a source that holds nothing else are they played themselves. Reasoning is left out too, as
an agent has no verb for it; the time that it took is kept.

The delay of a step is the time from the end of the step before to its own end, a call's end being
its result, so that the delays of a turn add up to what it took; each is at most
SCRIPT_DELAY_MS_MAX, for a transcript also tells how long people were away.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from os import PathLike, fsencode, fspath
from pathlib import PurePath
from typing import Final

from callboard.errors import ImportMalformed
from callboard.importers.port import (
    ImportHeader,
    ImportItem,
    ImportLimits,
    ImportMessage,
    ImportPart,
    ImportToolCall,
    ImportToolResult,
    JsonValue,
    TextPart,
    read_items,
)
from callboard.importers.registry import choose
from callboard.importers.script_file import (
    SCRIPT_DELAY_MS_DEFAULT,
    SCRIPT_DELAY_MS_MAX,
    SCRIPT_FORMAT,
    SCRIPT_TEXT_BYTES_MAX,
    SCRIPT_TOOL_NAME_CHARS_MAX,
    SayStep,
    Script,
    ScriptStep,
    ScriptTurn,
    ToolStep,
    dump_script,
    json_bytes,
    load_script,
)
from callboard.limits import IMPORT_SNIFF_BYTES

__all__ = [
    "CUT_MARKER",
    "PROMPT_ABSENT",
    "SCRIPT_DELAY_MS_DEFAULT",
    "SCRIPT_DELAY_MS_MAX",
    "SCRIPT_TEXT_BYTES_MAX",
    "UNFINISHED_CALL",
    "SayStep",
    "Script",
    "ScriptStep",
    "ScriptTurn",
    "ToolStep",
    "dump_script",
    "load_script",
    "load_shipped",
    "read_transcript",
    "script_of",
]

CUT_MARKER: Final = "… [cut: {} bytes in all]"
"""Stands at the end of a text that was cut; the figure is the whole text's UTF-8 size."""

PROMPT_ABSENT: Final = "[prompt not recorded]"
"""What the user says where a source begins in the middle of a turn, or keeps no prompts."""

IMAGE_ONLY: Final = "[image]"
BLANK: Final = "[blank]"

UNFINISHED_CALL: Final = "imported_unfinished"
"""The error of a call whose result the source does not hold (as IMP-7 names it)."""

TOUR: Final = "tour.jsonl"


def script_of(items: Iterable[ImportItem], *, name: str = "", source: str = "") -> Script:
    """Make a script of what an importer read; a script without turns is possible.

    Args:
        items: from a `TranscriptImporter`; read once, one at a time.
        name: the script's name; default: the first session's.
        source: the format's name.

    """
    builder = _Builder()
    for item in items:
        builder.take(item)
    return Script(name or builder.name, source, builder.turns())


def read_transcript(path: str | PathLike[str], format_name: str | None = None) -> Script:
    """Read a transcript or script file as a script with at least one turn.

    Args:
        path: the file; its name without suffix becomes the script's name.
        format_name: its format, if sniffing should not decide.

    Raises:
        ImportFormatUnknown: see `registry.choose`.
        ImportMalformed: nothing in it can be played, or it is a script file with a bad line.
        ImportTooLarge: the file, a line or the number of items is above its limit.
        OSError: the file cannot be opened or read.

    """
    file = PurePath(fsencode(fspath(path)).decode("utf-8", "replace"))
    limits = ImportLimits()
    with open(path, "rb") as stream:
        importer = choose(stream.read(IMPORT_SNIFF_BYTES), file.name, format_name)
        stream.seek(0)
        if importer.name == SCRIPT_FORMAT:
            script = load_script(stream, limits)
        else:
            items = read_items(importer, stream, limits)
            script = script_of(items, name=file.stem, source=importer.name)
    if not script.turns:
        message = (
            f"{file.name} holds no turn that could be played; give a {importer.name} file with at "
            "least one prompt or reply in it"
        )
        raise ImportMalformed(message, line=0, reason="no_turns")
    return script


def load_shipped() -> Script:
    """Load the transcript that comes with callboard."""
    from importlib.resources import files  # costs more to import than all the rest of this

    with files("callboard").joinpath("data", TOUR).open("rb") as stream:
        return load_script(stream)


def cut_text(text: str, bytes_max: int = SCRIPT_TEXT_BYTES_MAX) -> str:
    """Cut a text to a size in bytes of JSON, between code points, with a visible marker."""
    if len(text) * 6 <= bytes_max or json_bytes(text) <= bytes_max:  # 6: `\\u0000`
        return text
    marker = CUT_MARKER.format(len(text.encode("utf-8")))
    left = bytes_max - json_bytes(marker)
    low, high = 0, min(len(text), left)
    while low < high:
        middle = (low + high + 1) // 2
        if json_bytes(text[:middle]) <= left:
            low = middle
        else:
            high = middle - 1
    return text[:low] + marker


class _Step:
    """A step in the making; a call's result may come much later."""

    __slots__ = ("ended_at", "error", "input", "name", "output", "text")

    def __init__(self, ended_at: int | None, text: str) -> None:
        self.ended_at = ended_at
        self.text = text
        self.name: str | None = None
        self.input: JsonValue = None
        self.output = ""
        self.error: str | None = UNFINISHED_CALL

    def made(self, delay_ms: int) -> ScriptStep:
        if self.name is None:
            return SayStep(self.text, delay_ms)
        return ToolStep(self.name, self.input, self.output, self.error, delay_ms)


class _Turn:
    """A turn in the making."""

    __slots__ = ("at", "session", "steps", "user")

    def __init__(self, session: str, user: str, at: int | None) -> None:
        self.session, self.user, self.at = session, user, at
        self.steps: list[_Step] = []

    def made(self) -> ScriptTurn:
        clock, steps = self.at, list[ScriptStep]()
        for step in self.steps:
            steps.append(step.made(_delay(clock, step.ended_at)))
            if step.ended_at is not None:
                clock = step.ended_at if clock is None else max(clock, step.ended_at)
        return ScriptTurn(self.user, tuple(steps))


def _delay(begun_at: int | None, ended_at: int | None) -> int:
    if begun_at is None or ended_at is None:
        return SCRIPT_DELAY_MS_DEFAULT
    return min(max(ended_at - begun_at, 0) // 1_000, SCRIPT_DELAY_MS_MAX)


class _Builder:
    """Turns of one source, in the order in which they began, whatever session they are of."""

    def __init__(self) -> None:
        self.name = ""
        self._turns: list[_Turn] = []
        self._open: dict[str, _Turn] = {}
        self._calls: dict[tuple[str, str], _Step] = {}
        self._children: set[str] = set()

    def take(self, item: ImportItem) -> None:
        if isinstance(item, ImportHeader):
            self.name = self.name or item.foreign_id
            if item.relation == "child":
                self._children.add(item.session)
        elif isinstance(item, ImportMessage):
            if item.role == "user" and not item.hidden:
                self._begin(item.session, _typed(item.parts), item.created_at)
            elif item.role == "assistant":
                self._said(item)
        elif isinstance(item, ImportToolCall):
            self._called(item)
        elif isinstance(item, ImportToolResult):
            self._returned(item)

    def turns(self) -> tuple[ScriptTurn, ...]:
        main = [turn for turn in self._turns if turn.session not in self._children]
        return tuple(turn.made() for turn in main or self._turns)

    def _begin(self, session: str, user: str, at: int | None) -> _Turn:
        turn = _Turn(session, cut_text(user), at)
        self._open[session] = turn
        self._turns.append(turn)
        return turn

    def _turn(self, session: str, at: int | None) -> _Turn:
        return self._open.get(session) or self._begin(session, PROMPT_ABSENT, at)

    def _said(self, item: ImportMessage) -> None:
        for part in item.parts:
            if isinstance(part, TextPart):
                step = _Step(item.created_at, cut_text(part.text))
                self._turn(item.session, item.created_at).steps.append(step)

    def _called(self, item: ImportToolCall) -> None:
        step = _Step(item.created_at, "")
        step.name = item.name[:SCRIPT_TOOL_NAME_CHARS_MAX]
        step.input = _cut_input(item.input)
        self._calls[item.session, item.call_id] = step
        self._turn(item.session, item.created_at).steps.append(step)

    def _returned(self, item: ImportToolResult) -> None:
        step = self._calls.pop((item.session, item.call_id), None)
        if step is None:
            return  # its call is not in this source
        step.output = cut_text(item.output)
        step.error = item.error and cut_text(item.error)
        step.ended_at = step.ended_at if item.created_at is None else item.created_at


def _typed(parts: tuple[ImportPart, ...]) -> str:
    text = "\n".join(part.text for part in parts if isinstance(part, TextPart))
    if text.strip():
        return text
    return BLANK if text else IMAGE_ONLY


def _cut_input(value: JsonValue) -> JsonValue:
    """Keep an input that fits into a record; of a larger one keep its JSON text, cut."""
    if isinstance(value, str):
        return cut_text(value)
    return value if json_bytes(value) <= SCRIPT_TEXT_BYTES_MAX else cut_text(_as_json(value))


def _as_json(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
