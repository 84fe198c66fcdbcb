"""The stream of `codex exec --json`: no times, no prompt, and items that begin and complete."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

from callboard.importers.codex_items import texts_of
from callboard.importers.port import (
    ImportItem,
    ImportMessage,
    ImportOpaque,
    ImportPart,
    ImportToolCall,
    ImportToolResult,
    JsonObject,
    JsonValue,
    ReasoningPart,
    TextPart,
)
from callboard.importers.turns import Turns
from callboard.importers.values import Recent, kind_of, object_of, text_of

OPEN_ITEMS_MAX: Final = 4_096
"""Items remembered as begun; Codex runs a handful at once."""

_ITEMS: Final = frozenset({"item.started", "item.updated", "item.completed"})
_TURN_ENDS: Final = MappingProxyType({"turn.completed": None, "turn.failed": "failed"})

_NO_INPUT: Final = frozenset({"id", "type", "status", "aggregated_output", "exit_code", "result"})
_TOOLS: Final = frozenset({"command_execution", "file_change", "mcp_tool_call", "web_search"})


def is_exec_record(record: JsonObject) -> bool:
    """Tell whether a record belongs to an exec stream."""
    kind = kind_of(record)
    if kind == "thread.started":
        return text_of(record.get("thread_id")) is not None
    if kind in _ITEMS:
        return isinstance(record.get("item"), dict)
    return kind == "turn.started" or kind in _TURN_ENDS


class ExecReader:
    """One reading of one stream."""

    def __init__(self) -> None:
        """Begin with no item begun."""
        self._begun: Recent[str, bool] = Recent(OPEN_ITEMS_MAX)

    def record(self, session: str, turns: Turns, record: JsonObject) -> Iterator[ImportItem]:
        """Read one record."""
        kind = kind_of(record)
        item = object_of(record.get("item"))
        if kind == "turn.started":
            yield from turns.start(None, explicit=True)
        elif kind in ("item.started", "item.completed") and kind_of(item) in _TOOLS:
            yield from turns.work(None)
            yield from self._tool(session, item, done=kind == "item.completed")
        elif kind == "item.completed" and (part := _part(item)):
            yield from turns.work(None, reply=isinstance(part, TextPart))
            yield ImportMessage(session, "assistant", (part,), text_of(item.get("id")))
        else:
            yield ImportOpaque(session, kind, record)
            if kind in _TURN_ENDS and (ended := turns.finish(None, _TURN_ENDS[kind])):
                yield ended

    def _tool(self, session: str, item: JsonObject, *, done: bool) -> Iterator[ImportItem]:
        call_id = text_of(item.get("id")) or "item"
        begun = self._begun.pop(call_id) is not None
        if not begun:
            name = text_of(item.get("tool")) or kind_of(item)
            yield ImportToolCall(session, call_id, name, _input(item))
        if done:
            yield ImportToolResult(session, call_id, _output(item), _error(item))
            return
        self._begun.put(call_id, True)
        if begun:
            yield ImportOpaque(session, "item.started", item)


def _part(item: JsonObject) -> ImportPart | None:
    text = text_of(item.get("text"))
    if text is None or kind_of(item) not in ("agent_message", "reasoning"):
        return None
    return TextPart(text) if kind_of(item) == "agent_message" else ReasoningPart(text)


def _input(item: JsonObject) -> JsonValue:
    return {name: value for name, value in item.items() if name not in _NO_INPUT}


def _output(item: JsonObject) -> str:
    output = item.get("aggregated_output")
    if isinstance(output, str):
        return output
    told = texts_of(object_of(item.get("result")).get("content"))
    return told or text_of(item.get("status")) or ""


def _error(item: JsonObject) -> str | None:
    code = item.get("exit_code")
    if isinstance(code, int) and code != 0:
        return f"exit_{code}"
    return "failed" if item.get("status") == "failed" else None
