"""A session on a screen: its metadata, its history, and single records as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from callboard.cli.output import leave_logs_aside, say, say_json, say_lines
from callboard.cli.text import block, escape, instant, shorten
from callboard.records import (
    InboxAcknowledged,
    MessageCreated,
    PartCreated,
    PartUpdated,
    Record,
    SessionCreated,
    SessionUpdated,
    TurnAborted,
    TurnCancelRequested,
    TurnCompleted,
    TurnStarted,
)

if TYPE_CHECKING:
    from callboard.storage.gather import Message
    from callboard.storage.metadata import SessionMetadata

_LINE_CHARS: Final = 160
_GUTTER: Final = "  │ "
_FIELDS: Final = (
    ("title", "title"),
    ("workspace", "workspace"),
    ("agent", "agent"),
    ("model", "model"),
    ("turn", "turn_state"),
    ("state", "state"),
    ("messages", "message_count"),
)


def show_session(home: Path, name: str, *, json_too: bool, full: bool = False) -> None:
    """Print a session's metadata and its whole history, gaps in their places.

    Args:
        home: the home.
        name: its reference or id.
        json_too: one JSON object: `session` and `history`.
        full: show the full text of long messages in place of their excerpts.

    Raises:
        ArtifactInvalid, ArtifactStoreUnsafe: the full text of a message cannot be read.
        NotFound, SessionAmbiguous, InvalidRequest: see `callboard.reads.resolve`.

    """
    from callboard.reads import read_artifact
    from callboard.storage.catalog import find_session
    from callboard.storage.gather import Message
    from callboard.storage.readers import open_home
    from callboard.storage.views import history

    leave_logs_aside()
    reader = open_home(home)
    ref = reader.find(name)
    found = find_session(reader, ref)
    items: list[dict[str, object]] = []
    if not json_too:
        _say_metadata(found)
    from_seq: int | None = 1
    while from_seq is not None:
        page = history(reader.transcript(ref), from_seq=from_seq)
        for found_item in page.items:
            item = found_item
            if full and isinstance(item, Message) and item.artifact_id is not None:
                item = replace(item, content=read_artifact(home, ref, item.artifact_id))
            if json_too:
                items.append(
                    item.to_json() if isinstance(item, Message) else {"gap": item._asdict()}
                )
            elif isinstance(item, Message):
                say_lines(_message(item))
            else:
                say(f"--- line {item.line}: damaged ({item.damage}), {item.bytes} bytes ---")
        from_seq = page.next_seq
    if json_too:
        say_json({"session": found.to_json(), "history": items})


def _say_metadata(found: SessionMetadata) -> None:
    say(f"{'session':<10}{found.ref}")
    for label, name in _FIELDS:
        value: object = getattr(found, name)
        if value is not None:
            say(f"{label:<10}{value}")
    say(f"{'created':<10}{instant(found.created_at)}")
    print()


def _message(message: Message) -> Iterator[str]:
    """Give the lines of a message; none of them can be taken for a line of ours."""
    mark = " (hidden)" if message.hidden else " (failed)" if message.error else ""
    name = f" {escape(message.name)}" if message.name else ""
    yield f"{message.role}{name}{mark}, {instant(message.created_at)}"
    if message.content:
        yield from (_GUTTER + line for line in block(message.content))
    for call in message.tool_calls:
        yield f"  → {escape(call.name)} {shorten(_spell(call.input), _LINE_CHARS)}"


def _spell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def record_line(record: Record) -> str:
    """Give one record as one line for a person."""
    time = record.ts[11:23]
    return f"{record.seq:>6}  {time}  {record.type:<18}  {shorten(_said(record), _LINE_CHARS)}"


def _said(record: Record) -> str:
    data = record.data
    if isinstance(data, PartCreated | PartUpdated):
        return _part(data.part_type, data.payload)
    if isinstance(data, MessageCreated):
        return (
            data.role if data.inbox_message_id is None else f"{data.role} {data.inbox_message_id}"
        )
    if isinstance(data, TurnStarted):
        return f"{data.turn_id} {data.kind}"
    if isinstance(data, TurnCompleted):
        return f"{data.turn_id} {data.outcome}, {data.duration_ms} ms"
    if isinstance(data, TurnAborted):
        why = data.cause if data.failure is None else f"{data.cause}: {data.failure.message}"
        return f"{data.turn_id} {data.outcome}, {why}"
    if isinstance(data, InboxAcknowledged):
        return f"{data.reason}: {', '.join(item.message_id for item in data.items)}"
    if isinstance(data, TurnCancelRequested):
        return data.turn_id
    if isinstance(data, SessionCreated):
        return f"{data.agent} in {data.workspace}"
    if isinstance(data, SessionUpdated):
        return ", ".join(sorted(data.model_fields_set - {"updated_at"}))
    return ""


def _part(kind: str, payload: dict[str, object]) -> str:
    if kind == "tool_call":
        return f"→ {payload['name']} {_spell(payload.get('input'))}"
    if kind == "tool_result":
        error = payload.get("error")
        outcome = _spell(payload.get("output")) if error is None else f"error: {error}"
        return f"← {payload['name']} {outcome}"
    return cast("str", payload.get("text", ""))
