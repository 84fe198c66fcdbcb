"""Every record of a transcript and every operation of an inbox, and the bytes they are kept as.

Pure. A line is `{envelope…,"data":{…},"chain":"…"}` and LF; `chain` is the SHA-256 over the chain
of the line before and this line's bytes before `,"chain":`, and the line's one check (lifecycle
page, section 1). The caller's data bytes are never encoded again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from callboard.errors import FormatUnsupported, RecordInvalid
from callboard.ids import SessionRef
from callboard.limits import (
    CALL_ID_CHARS_MAX,
    FINAL_TOOL_CALLS_MAX,
    MESSAGE_ID_CHARS_MAX,
    RECORD_FORMAT,
    TURN_INPUT_IDS_MAX,
)
from callboard.messages import InboxItem

RewindClass = Literal["conversation", "durable", "marker"]
ForkClass = Literal["copy", "strip", "drop", "replace"]
Instant = Annotated[int, Field(ge=0)]
"""Microseconds since the epoch."""
InputId = Annotated[str, Field(min_length=1, max_length=MESSAGE_ID_CHARS_MAX)]
TurnInputs = Annotated[list[InputId], Field(max_length=TURN_INPUT_IDS_MAX)]
CallId = Annotated[str, Field(min_length=1, max_length=CALL_ID_CHARS_MAX, pattern=r"^[^\x00]*$")]


class RecordData(BaseModel):
    """The `data` of one record type. A subclass without both classes cannot be defined (REC-5)."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    type: ClassVar[str]
    rewind: ClassVar[RewindClass]
    fork: ClassVar[ForkClass]
    watched: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Refuse a record type that does not say what rewind and fork do with it."""
        super().__init_subclass__()
        for name in ("type", "rewind", "fork"):
            if name not in cls.__dict__:
                raise TypeError(f"record type {cls.__name__} declares no `{name}`")


class Owner(BaseModel):
    """Who owns a session (host page 1.2); in this slice always the operator."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    kind: Literal["operator"]
    principal_id: str
    created_at: Instant


class Failure(BaseModel):
    """A TaskFailure: a code with its fixed sentence, and nothing that was said (FLR-1)."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    code: Literal[
        "authentication",
        "permission",
        "rate_limit",
        "timeout",
        "network",
        "model_unavailable",
        "context_limit",
        "unsupported_input",
        "capacity",
        "runtime",
    ]
    message: str
    retryable: bool
    resource: Literal["pending_count", "pending_bytes", "resident_sessions"] | None = None
    error: str | None = None


class QuarantineState(BaseModel):
    """Why a session is not started (FLT-32b)."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    reason: Literal["crash_loop"]
    since_at: Instant


class SessionCreated(RecordData):
    """The first record of every transcript."""

    type = "session_created"
    rewind = "durable"
    fork = "replace"

    workspace: str
    session_id: str
    root: str
    parent: str | None = None
    relation: Literal["fork", "child", "import", "salvage"] | None = None
    title: str | None = None
    agent: str
    model: str | None = None
    permission_mode: Literal["default", "accept_edits", "plan", "full_access"] = "default"
    settings: dict[str, str] = Field(default_factory=dict)
    extra: dict[str, object] = Field(default_factory=dict)
    git_branch: str | None = None
    created_at: Instant
    code_history_from_seq: int = Field(default=1, ge=1)
    owner: Owner


class SessionUpdated(RecordData):
    """A subset of the metadata; a key with null clears (PRJ-2)."""

    type = "session_updated"
    rewind = "durable"
    fork = "strip"

    title: str | None = None
    agent: str | None = None
    model: str | None = None
    permission_mode: Literal["default", "accept_edits", "plan", "full_access"] | None = None
    settings: dict[str, str] | None = None
    extra: dict[str, object] | None = None
    quarantine: QuarantineState | None = None
    paused_at: Instant | None = None
    archived_at: Instant | None = None
    task_status: (
        Literal["queued", "running", "completed", "failed", "cancelled", "interrupted"] | None
    ) = None
    task_failure: Failure | None = None
    updated_at: Instant


class MessageCreated(RecordData):
    """A message; its content comes as parts."""

    type = "message_created"
    rewind = "conversation"
    fork = "strip"

    message_id: InputId
    role: Literal["user", "assistant", "system", "tool"]
    parent_message_id: InputId | None = None
    inbox_message_id: InputId | None = None
    checkpoint: bool = False
    hidden: bool = False
    created_at: Instant
    model: str | None = None
    usage: dict[str, object] | None = None
    metadata: dict[str, object] | None = None


class TextPayload(BaseModel):
    """Text of a message, or what the model thought.

    With `prompt_artifact` it is the excerpt of a longer text: see `callboard.artifacts`.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    text: str
    prompt_artifact: dict[str, object] | None = None


class ToolCallPayload(BaseModel):
    """A tool call, durable before the tool runs."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    call_id: CallId
    name: str = Field(min_length=1, max_length=200)
    input: object
    effect: Literal["readonly", "keyed", "unsafe"] = "unsafe"


class ToolResultPayload(BaseModel):
    """A tool's result; `error` is null for success and absent for nothing known (R49)."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    call_id: CallId
    name: str = Field(min_length=1, max_length=200)
    output: object = None
    error: str | None = None
    metadata: dict[str, object] = Field(default_factory=dict)


class SummaryPayload(BaseModel):
    """A summary, where the model's context begins (CTX-1)."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    text: str
    checkpoint_version: int
    replacements: list[dict[str, object]] = Field(default_factory=list[dict[str, object]])
    pre_tokens: int | None = None
    post_tokens: int | None = None


PartType = Literal["text", "reasoning", "tool_call", "tool_result", "summary"]
PAYLOADS: Mapping[str, type[BaseModel]] = MappingProxyType(
    {
        "text": TextPayload,
        "reasoning": TextPayload,
        "tool_call": ToolCallPayload,
        "tool_result": ToolResultPayload,
        "summary": SummaryPayload,
    }
)


class PartCreated(RecordData):
    """A part of a message."""

    type = "part_created"
    rewind = "conversation"
    fork = "copy"

    part_id: InputId
    message_id: InputId
    part_type: PartType
    payload: dict[str, object]
    created_at: Instant


class PartUpdated(RecordData):
    """A part's new payload, at the part's first place (PRJ-3b)."""

    type = "part_updated"
    rewind = "conversation"
    fork = "copy"

    part_id: InputId
    message_id: InputId
    part_type: PartType
    payload: dict[str, object]
    created_at: Instant


class TurnStarted(RecordData):
    """A turn begins; everything it pins."""

    type = "turn_started"
    rewind = "conversation"
    fork = "strip"

    turn_id: InputId
    epoch: int = Field(ge=0)
    kind: Literal["user", "pending", "continuation"]
    input_ids: TurnInputs
    chain_index: int = Field(ge=0)
    started_at: Instant
    trigger: Literal["message", "background_task", "schedule", "delegate"] = "message"
    agent_id: str
    principal: str
    sender: str | None = None
    schema_digest: str | None = None
    trace_id: str


class TurnEnd(BaseModel):
    """What both terminals carry."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    turn_id: InputId
    claimed_input_ids: TurnInputs
    turns_count: int = Field(ge=0)
    tool_calls_count: int = Field(ge=0, le=FINAL_TOOL_CALLS_MAX)
    duration_ms: int = Field(ge=0)
    outcome: Literal["completed", "needs_user", "failed", "cancelled", "lost", "indeterminate"]
    input_disposition: Literal["acknowledged", "pending", "held"]
    output_message_ids: list[InputId] = Field(default_factory=list)


class TurnCompleted(TurnEnd, RecordData):
    """The turn ended well."""

    type = "turn_completed"
    rewind = "conversation"
    fork = "strip"

    needs_user: bool = False
    completed_at: Instant


class TurnAborted(TurnEnd, RecordData):
    """The turn ended otherwise."""

    type = "turn_aborted"
    rewind = "conversation"
    fork = "strip"

    cause: Literal["failed", "cancelled", "interrupted", "process_restart", "forked", "imported"]
    failure: Failure | None = None
    aborted_at: Instant


class Acknowledged(BaseModel):
    """An input that leaves the inbox."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    message_id: InputId
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")


class InboxAcknowledged(RecordData):
    """Inputs leave the inbox: directly before their turn's terminal, or by a recorded discard."""

    type = "inbox_acknowledged"
    rewind = "durable"
    fork = "drop"

    reason: str = Field(min_length=1, max_length=64)
    turn_id: InputId | None = None
    by: str | None = None
    items: list[Acknowledged] = Field(min_length=1)


class TurnCancelRequested(RecordData):
    """Somebody entitled asked for the turn's end (TEX-14)."""

    type = "turn_cancel_requested"
    rewind = "conversation"
    fork = "drop"

    turn_id: InputId
    principal_id: str
    sender_id: str | None = None
    keep_input: bool
    requested_at: Instant


RECORDS: Mapping[str, type[RecordData]] = MappingProxyType(
    {
        c.type: c
        for c in (
            SessionCreated,
            SessionUpdated,
            MessageCreated,
            PartCreated,
            PartUpdated,
            TurnStarted,
            TurnCompleted,
            TurnAborted,
            InboxAcknowledged,
            TurnCancelRequested,
        )
    }
)
"""The closed registry of this version, by type."""


class Record(NamedTuple):
    """One record of a transcript, checked."""

    seq: int
    id: str
    commit: int
    epoch: int
    ts: str
    type: str
    turn_id: str | None
    data: RecordData
    chain: str


class LineDamage(Exception):
    """A line that is no record of its transcript.

    Attributes:
        code: bad_line, missing_records, duplicate_record or identity_mismatch.

    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def compact(value: object) -> bytes:
    """Spell a JSON value compactly, keys in their order, as UTF-8."""
    return to_json(value)


def canonical(value: object) -> bytes:
    """Spell a JSON value canonically: sorted keys, compact, UTF-8, no NaN."""
    return _spell(value).encode()


_spell: Final = json.JSONEncoder(
    ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
).encode


def digest(value: object) -> str:
    """Compute the digest of a JSON value: SHA-256 of its canonical spelling, in hex."""
    return hashlib.sha256(canonical(value)).hexdigest()


def item_digest(
    content: list[dict[str, object]],
    metadata: Mapping[str, object],
    output_schema: Mapping[str, object] | None = None,
) -> str:
    """Compute what makes two inputs of one message id equal (INB-6)."""
    return digest({"content": content, "metadata": dict(metadata), "schema": output_schema})


def check_data(kind: str, data: bytes) -> RecordData:
    """Check the data of a new record against its type.

    Raises:
        RecordInvalid: the type is unknown or the data does not fit it (DUR-4).

    """
    model = RECORDS.get(kind)
    if model is None:
        raise RecordInvalid(type=kind, field="type")
    try:
        return _with_payload(model.__pydantic_validator__.validate_json(data))
    except ValidationError as error:
        where = error.errors(include_url=False, include_input=False)[0]["loc"]
        raise RecordInvalid(type=kind, field=".".join(map(str, where))) from None


def _with_payload(record: RecordData) -> RecordData:
    kind = type(record)
    if kind is PartCreated or kind is PartUpdated:
        assert isinstance(record, (PartCreated, PartUpdated))
        payload = record.payload
        if record.part_type == "text" and len(payload) == 1 and type(payload.get("text")) is str:
            return record  # what TextPayload would say, at a tenth of the cost
        PAYLOADS[record.part_type].__pydantic_validator__.validate_python(payload)
    return record


def first_chain(name: str) -> str:
    """Compute the chain that stands before a stream's first line.

    Args:
        name: the session's reference as text, or outside sessions the stream's name.

    """
    return hashlib.sha256(name.encode()).hexdigest()


def link(before: str, head: bytes) -> str:
    """Compute a line's chain from the chain before it and its bytes before `,"chain":`."""
    return hashlib.sha256(before.encode() + head).hexdigest()


def _close(head: bytes, before: str) -> tuple[bytes, str]:
    chain = hashlib.sha256(before.encode() + head).hexdigest()
    return head + f',"chain":"{chain}"}}\n'.encode(), chain


def stamp_record(
    ref: SessionRef,
    *,
    seq: int,
    record_id: str,
    commit: int,
    epoch: int,
    ts: str,
    kind: str,
    turn_id: str | None,
    data: bytes,
    before: str,
    origin: bytes | None = None,
) -> tuple[bytes, str]:
    """Put the envelope around a record's data.

    Args:
        ref: whose transcript it goes to.
        seq: its position, from 1.
        record_id: 32 hex digits.
        commit: the number of the frame that holds it.
        epoch: the session's epoch in force.
        ts: RFC 3339, as `records.timestamp` spells it.
        kind: the record type.
        turn_id: the turn it belongs to, or none.
        data: compact JSON of an object, kept byte for byte.
        before: the chain of the line before it.
        origin: compact JSON {session_id, seq, id} of the record that this one was copied from.

    Returns:
        The line with its LF, and its chain.

    """
    turn = "null" if turn_id is None else f'"{turn_id}"'
    head = (
        f'{{"v":{RECORD_FORMAT},"seq":{seq},"id":"{record_id}","commit":{commit},"epoch":{epoch},'
        f'"ts":"{ts}","workspace_key":"{ref.workspace_key}","session_id":"{ref.session_id}",'
        f'"type":"{kind}","turn_id":{turn},"data":'
    ).encode()
    tail = b"" if origin is None else b',"origin":' + origin
    return _close(head + data + tail, before)


def stamp_op(
    ref: SessionRef,
    *,
    n: int,
    commit: int,
    epoch: int,
    ts: str,
    op: str,
    data: bytes,
    before: str,
) -> tuple[bytes, str]:
    """Put the envelope around an inbox operation; see `stamp_record`."""
    head = (
        f'{{"v":{RECORD_FORMAT},"n":{n},"commit":{commit},"epoch":{epoch},"ts":"{ts}",'
        f'"workspace_key":"{ref.workspace_key}","session_id":"{ref.session_id}",'
        f'"type":"{op}","data":'
    ).encode()
    return _close(head + data, before)


def stamp_inbox_header(ref: SessionRef, *, generation: str, next_n: int) -> tuple[bytes, str]:
    """Make the first line of an inbox file (INB-1a)."""
    head = (
        f'{{"format":{RECORD_FORMAT},"session_id":"{ref.session_id}",'
        f'"workspace_key":"{ref.workspace_key}","generation":"{generation}","next_n":{next_n}'
    ).encode()
    return _close(head, first_chain(str(ref)))


_CHAIN_AT = -76
"""Where `,"chain":"` begins, counted from the LF at a line's end: 10 + 64 + 2 bytes before it."""


def split_chain(line: bytes) -> tuple[bytes, str]:
    """Split a line without its LF into the bytes that are checked and the chain written in it.

    Raises:
        LineDamage: the line does not end in a chain.

    """
    head, tail = line[:_CHAIN_AT], line[_CHAIN_AT:]
    if len(tail) != -_CHAIN_AT or not tail.startswith(b',"chain":"') or not tail.endswith(b'"}'):
        raise LineDamage("bad_line")
    try:
        return head, tail[10:74].decode("ascii")
    except UnicodeDecodeError:
        raise LineDamage("bad_line") from None


def checked(line: bytes, before: str | None) -> tuple[dict[str, object], str]:
    """Check a line's chain and read it as a JSON object.

    Args:
        line: the bytes without LF.
        before: the chain of the line before, or none where a gap stands before it (REC-2c).

    Raises:
        LineDamage: wrong chain, or no JSON object.

    """
    head, chain = split_chain(line)
    if before is not None and link(before, head) != chain:
        raise LineDamage("bad_line")
    try:
        value: object = from_json(line, allow_inf_nan=False)
    except ValueError:
        raise LineDamage("bad_line") from None
    if not isinstance(value, dict):
        raise LineDamage("bad_line")
    return cast("dict[str, object]", value), chain


def read_record(line: bytes, before: str | None, ref: SessionRef, seq: int | None) -> Record:
    """Read one line of a transcript.

    Args:
        line: the bytes without LF.
        before: the chain of the line before, or none behind a gap.
        ref: whose transcript it is.
        seq: the seq it must have, or none behind a gap.

    Raises:
        LineDamage: the line is no record of this transcript.
        FormatUnsupported: a record version or type that this version does not know.

    """
    value, chain = checked(line, before)
    if value.get("workspace_key") != ref.workspace_key or value.get("session_id") != ref.session_id:
        raise LineDamage("identity_mismatch")
    version, kind = value.get("v"), value.get("type")
    model = RECORDS.get(kind) if isinstance(kind, str) else None
    if before is None and (model is None or version != RECORD_FORMAT):
        raise LineDamage("bad_line")  # behind a gap no chain says that this is what was written
    if version != RECORD_FORMAT:
        raise FormatUnsupported(version=str(version))
    if not isinstance(kind, str):
        raise LineDamage("bad_line")
    if model is None:
        raise FormatUnsupported(type=kind)
    try:
        envelope = _Envelope.model_validate(value)
        data = _with_payload(model.model_validate(envelope.data))
    except ValidationError:
        raise LineDamage("bad_line") from None
    if seq is not None and envelope.seq != seq:
        raise LineDamage("missing_records" if envelope.seq > seq else "bad_line")
    return Record(
        envelope.seq,
        envelope.id,
        envelope.commit,
        envelope.epoch,
        envelope.ts,
        kind,
        envelope.turn_id,
        data,
        chain,
    )


class _Envelope(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    v: int
    seq: int = Field(ge=1)
    id: str = Field(pattern=r"^[0-9a-f]{32}$")
    commit: int = Field(ge=1)
    epoch: int = Field(ge=0)
    ts: str
    workspace_key: str
    session_id: str
    type: str
    turn_id: str | None
    data: dict[str, object]
    origin: dict[str, object] | None = None
    chain: str


class InboxHeader(BaseModel):
    """The first line of an inbox file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    format: int
    session_id: str
    workspace_key: str
    generation: str
    next_n: int = Field(ge=1)
    chain: str


class InboxOp(NamedTuple):
    """One operation of an inbox, checked."""

    n: int
    commit: int
    epoch: int
    ts: str
    op: str
    item: InboxItem | None
    """Of put and replace."""
    message_id: str
    """Of every operation."""
    behind: str | None
    """Of move: the item it goes behind, or none for the front."""
    chain: str


class PutData(BaseModel):
    """The data of a put or a replace."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    item: InboxItem


class RemoveData(BaseModel):
    """The data of a remove."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    message_id: InputId


class MoveData(BaseModel):
    """The data of a move."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    message_id: InputId
    behind: InputId | None


class _OpEnvelope(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    v: int
    n: int = Field(ge=1)
    commit: int = Field(ge=1)
    epoch: int = Field(ge=0)
    ts: str
    workspace_key: str
    session_id: str
    type: Literal["put", "replace", "move", "remove"]
    data: dict[str, object]
    chain: str


def read_op(line: bytes, before: str) -> InboxOp:
    """Read one operation of an inbox.

    Args:
        line: the bytes without LF.
        before: the chain of the line before.

    Raises:
        LineDamage: wrong chain, no JSON object, or not an operation.

    """
    value, chain = checked(line, before)
    try:
        envelope = _OpEnvelope.model_validate(value)
        if envelope.type in ("put", "replace"):
            item = PutData.model_validate(envelope.data).item
            name, behind = item.message_id, None
        elif envelope.type == "move":
            move = MoveData.model_validate(envelope.data)
            item, name, behind = None, move.message_id, move.behind
        else:
            item, behind = None, None
            name = RemoveData.model_validate(envelope.data).message_id
    except ValidationError:
        raise LineDamage("bad_line") from None
    return InboxOp(
        envelope.n,
        envelope.commit,
        envelope.epoch,
        envelope.ts,
        envelope.type,
        item,
        name,
        behind,
        chain,
    )


_EPOCH = datetime(1970, 1, 1)


def timestamp(microseconds: int) -> str:
    """Spell an instant as RFC 3339 UTC with exactly six fraction digits and Z.

    Args:
        microseconds: since the epoch, from 0 to the end of the year 9999.

    """
    return (_EPOCH + timedelta(microseconds=microseconds)).isoformat(timespec="microseconds") + "Z"
