"""Codex: the rollout files of its sessions, and the stream of `codex exec --json`.

A rollout tells most facts twice: once as the model sees them (`response_item`), once as the screen
does (`event_msg`). Text, calls and results are read from the first, the limits of turns from the
second; the other copy stays as opaque items. What Codex puts before the prompt under the user's
name (environment, AGENTS.md, skills) is hidden.

A forked session's file repeats its parent's lines, header included: only the first header counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Final

from callboard.importers.codex_exec import ExecReader, is_exec_record
from callboard.importers.codex_items import image_or_text, model_item
from callboard.importers.lines import BadLine, head_objects, json_lines
from callboard.importers.port import (
    UNNAMED,
    ImportHeader,
    ImportItem,
    ImportLimits,
    ImportMessage,
    ImportOpaque,
    ImportSkipped,
    ImportSummary,
    JsonObject,
    JsonValue,
    TextPart,
    counted,
)
from callboard.importers.turns import Turns
from callboard.importers.values import (
    blocks_of,
    instant_of,
    kind_of,
    list_of,
    object_of,
    text_of,
)

_RECORDS: Final = frozenset(
    {"session_meta", "turn_context", "response_item", "event_msg", "compacted"}
)
_INJECTED: Final = (
    "<environment_context>",
    "<user_instructions>",
    "<permissions instructions>",
    "<collaboration_mode>",
    "<turn_aborted>",
    "<user_shell_command>",
    "<subagent_notification>",
    "<skill>",
    "# AGENTS.md instructions",
)
_TURN_STARTED: Final = frozenset({"task_started", "turn_started"})
_TURN_COMPLETED: Final = frozenset({"task_complete", "turn_complete"})


class CodexImporter:
    """The `codex` format."""

    name: str = "codex"

    def sniff(self, head: bytes, file_name: str) -> int:
        """Score the strongest record of the head; see `TranscriptImporter.sniff`."""
        cut = 60 if file_name.startswith("rollout-") and b'"payload":' in head else 0
        return max(map(_score, head_objects(head)), default=cut or _score_of_cut(head))

    def read(self, stream: BinaryIO, limits: ImportLimits) -> Iterator[ImportItem]:
        """Read a rollout or an exec stream; see `TranscriptImporter.read`."""
        return counted(_Reader().items(stream, limits), limits)


def _score(record: JsonObject) -> int:
    if isinstance(record.get("payload"), dict) and kind_of(record) in _RECORDS:
        return 95
    return 85 if is_exec_record(record) else 0


def _score_of_cut(head: bytes) -> int:
    """Score a head that holds no whole record: its first line is longer than the head."""
    start = head[:256]
    return 60 if b'"type":"session_meta"' in start and b'"payload":' in start else 0


class _Reader:
    """One reading of one file."""

    def __init__(self) -> None:
        self._session = ""
        self._turns = Turns("")
        self._exec = ExecReader()

    def items(self, stream: BinaryIO, limits: ImportLimits) -> Iterator[ImportItem]:
        for line, found in json_lines(stream, limits):
            if isinstance(found, BadLine):
                yield ImportSkipped(self._session, line, found.reason)
            elif isinstance(found.value, dict):
                yield from self._record(found.value)
            else:
                yield ImportOpaque(self._session, "bare_value", found.value)
        yield from self._turns.source_ended()

    def _record(self, record: JsonObject) -> Iterator[ImportItem]:
        kind = kind_of(record)
        payload = object_of(record.get("payload"))
        at = instant_of(record.get("timestamp"))
        if is_exec_record(record):
            if not self._session:
                thread = text_of(record.get("thread_id")) or UNNAMED
                yield self._begin(ImportHeader(thread, thread))
            yield from self._exec.record(self._session, self._turns, record)
        elif kind == "session_meta" and payload and not self._session:
            yield self._begin(_header(payload, at))
            yield self._opaque(kind, record, at)
        elif kind not in _RECORDS or not payload:
            yield self._opaque(kind, record, at)
        else:
            if not self._session:
                yield self._begin(ImportHeader(UNNAMED, UNNAMED, created_at=at))
            yield from self._payload(kind, payload, record, at)

    def _payload(
        self, kind: str, payload: JsonObject, record: JsonObject, at: int | None
    ) -> Iterator[ImportItem]:
        if kind == "event_msg":
            yield from self._event(payload, record, at)
        elif kind == "response_item" and kind_of(payload) == "message":
            yield from self._message(payload, at)
        elif kind == "response_item":
            yield from model_item(self._session, self._turns, payload, at)
        elif kind == "compacted":
            text = payload.get("message")
            history = tuple(list_of(payload.get("replacement_history")))
            text = text if isinstance(text, str) else ""
            yield ImportSummary(self._session, text, history, at)
        else:
            yield self._opaque(kind, record, at)

    def _event(
        self, payload: JsonObject, record: JsonObject, at: int | None
    ) -> Iterator[ImportItem]:
        event = kind_of(payload)
        ended: ImportItem | None = None
        if event in _TURN_STARTED:
            yield from self._turns.start(at, explicit=True)
            return
        if event in _TURN_COMPLETED:
            ended = self._turns.finish(at)
        elif event == "turn_aborted":
            ended = self._turns.finish(at, text_of(payload.get("reason")) or "aborted")
        yield ended or self._opaque(f"event_msg/{event}", record, at)

    def _message(self, payload: JsonObject, at: int | None) -> Iterator[ImportItem]:
        blocks = blocks_of(payload.get("content"))
        parts = tuple(part for block in blocks if (part := image_or_text(block)))
        foreign_id = text_of(payload.get("id"))
        if not blocks:
            yield self._opaque("response_item/message", payload, at)
        if not parts:
            pass
        elif payload.get("role") == "assistant":
            yield from self._turns.work(at, reply=True)
            yield ImportMessage(self._session, "assistant", parts, foreign_id, at)
        else:
            hidden = payload.get("role") != "user" or all(
                isinstance(part, TextPart) and part.text.lstrip().startswith(_INJECTED)
                for part in parts
            )
            if not hidden:
                yield from self._turns.prompt(at)
            yield ImportMessage(self._session, "user", parts, foreign_id, at, hidden)
        for block in blocks:
            if image_or_text(block) is None:
                yield self._opaque(f"block/{kind_of(object_of(block))}", block, at)

    def _begin(self, header: ImportHeader) -> ImportHeader:
        self._session = header.session
        self._turns = Turns(header.session)
        return header

    def _opaque(self, kind: str, raw: JsonValue, at: int | None) -> ImportOpaque:
        return ImportOpaque(self._session, kind, raw, at)


def _header(payload: JsonObject, at: int | None) -> ImportHeader:
    name = text_of(payload.get("id")) or text_of(payload.get("session_id")) or UNNAMED
    forked_from = text_of(payload.get("forked_from_id"))
    subagent = object_of(object_of(payload.get("source")).get("subagent"))
    spawned_by = text_of(object_of(subagent.get("thread_spawn")).get("parent_thread_id"))
    created_at = instant_of(payload.get("timestamp"))
    return ImportHeader(
        session=name,
        foreign_id=name,
        created_at=at if created_at is None else created_at,
        workspace_hint=text_of(payload.get("cwd")),
        relation="child" if spawned_by else "fork" if forked_from else "import",
        parent=spawned_by or forked_from,
    )
