"""What a Codex model sees besides messages: reasoning, calls and their outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

from callboard.importers.lines import parse_json
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
from callboard.importers.values import image_of_uri, kind_of, list_of, object_of, text_of

_EXIT: Final = re.compile(r"^(?:Exit code: |Process exited with code )(-?\d{1,10})$", re.MULTILINE)
_TEXTS: Final = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})

HEADING_CHARS_MAX: Final = 400
"""Where the exit code of a plain-text output may stand: above the output itself."""


def model_item(
    session: str, turns: Turns, payload: JsonObject, at: int | None
) -> Iterator[ImportItem]:
    """Read one `response_item` that is no message."""
    kind = kind_of(payload)
    call_id = text_of(payload.get("call_id"))
    if thought := _reasoning(payload) if kind == "reasoning" else "":
        yield from turns.work(at)
        foreign_id = text_of(payload.get("id"))
        yield ImportMessage(session, "assistant", (ReasoningPart(thought),), foreign_id, at)
    elif kind.endswith("_call") and (call_id or "action" in payload):
        yield from turns.work(at)
        yield from _call(session, kind, payload, at)
    elif kind.endswith("_output") and call_id:
        turns.returned(at)
        yield from _output(session, call_id, payload, at)
    else:
        yield ImportOpaque(session, f"response_item/{kind}", payload, at)


def image_or_text(block: JsonValue) -> ImportPart | None:
    """Read a content block; None for an image that is not inline and for any other kind."""
    fields = object_of(block)
    if isinstance(block, str) or kind_of(fields) in _TEXTS:
        text = text_of(block if isinstance(block, str) else fields.get("text"))
        return TextPart(text) if text else None
    return image_of_uri(fields.get("image_url")) if kind_of(fields) == "input_image" else None


def texts_of(blocks: JsonValue) -> str:
    """Join the texts among content blocks, one below the other."""
    parts = [image_or_text(block) for block in list_of(blocks)]
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))


def _reasoning(payload: JsonObject) -> str:
    """Return what can be read of a reasoning item; most hold encrypted content only."""
    told = (texts_of(payload.get("summary")), texts_of(payload.get("content")))
    return "\n".join(text for text in told if text)


def _call(session: str, kind: str, payload: JsonObject, at: int | None) -> Iterator[ImportItem]:
    """Give a call; one that Codex's provider ran itself comes with its result."""
    call_id = text_of(payload.get("call_id"))
    arguments = payload.get("arguments", payload.get("input", payload.get("action")))
    if kind == "function_call" and isinstance(arguments, str):
        arguments = _arguments(arguments)
    name = text_of(payload.get("name")) or kind.removesuffix("_call")
    shown = call_id or text_of(payload.get("id")) or f"{kind}@{at or 0}"
    yield ImportToolCall(session, shown, name, arguments, at)
    if call_id is None:
        status = text_of(payload.get("status")) or ""
        error = None if status in ("", "completed") else status
        yield ImportToolResult(session, shown, status, error, at)


def _arguments(text: str) -> JsonValue:
    try:
        return parse_json(text)
    except ValueError:
        return text


def _output(
    session: str, call_id: str, payload: JsonObject, at: int | None
) -> Iterator[ImportItem]:
    output = payload.get("output", payload.get("tools"))
    text, error = _plain(output)
    yield ImportToolResult(session, call_id, text, error, at)
    for block in list_of(output):
        if not isinstance(image_or_text(block), TextPart):
            yield ImportOpaque(session, f"tool_result/{kind_of(object_of(block))}", block, at)


def _plain(output: JsonValue) -> tuple[str, str | None]:
    """Return the text of an output in any of its forms, and a word if the tool failed."""
    if isinstance(output, str) and output.startswith("{"):
        output = _wrapped(output)
    if isinstance(output, dict):
        inner = output.get("output", output.get("content"))
        text = inner if isinstance(inner, str) else texts_of(inner) or _as_json(output)
        code = object_of(output.get("metadata")).get("exit_code")
        failed = "failed" if output.get("success") is False else None
        return text, _error(code) or failed
    if isinstance(output, list):
        return texts_of(output), None
    if not isinstance(output, str):
        return "" if output is None else _as_json(output), None
    exits = _EXIT.search(output, 0, HEADING_CHARS_MAX)
    return output, _error(int(exits[1])) if exits else None


def _wrapped(text: str) -> JsonValue:
    """Unwrap old shell output, a JSON text `{"output", "metadata"}`; anything else stays."""
    fields = object_of(_arguments(text))
    return fields if isinstance(fields.get("output"), str) and "metadata" in fields else text


def _as_json(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False)


def _error(code: JsonValue) -> str | None:
    return f"exit_{code}" if isinstance(code, int) and code != 0 else None
