"""Every message that crosses a process, grouped by direction, in one closed union.

A message is a header (wire.Header) and a body from this file. A request gets exactly one answer:
the kind named at its class, or `error`. Texts of session references are `<workspace_key>/<id>`. The
protocol number is `limits.PROTOCOL`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from callboard.limits import (
    CALL_ID_CHARS_MAX,
    EXTRA_BYTES_MAX,
    FREE_DEPTH_MAX,
    ITEM_METADATA_BYTES_MAX,
    MESSAGE_ID_CHARS_MAX,
    MODEL_ID_CHARS_MAX,
    OPERATOR_REASON_CHARS_MAX,
    SETTINGS_ENTRIES_MAX,
    TITLE_CHARS_MAX,
    WORKSPACE_PATH_BYTES_MAX,
)

SEND_PARTS_MAX = 4_096
"""Parts that are looked at; beyond ARTIFACT_LAYOUT_PARTS_MAX they are refused by name (ART-4)."""
RefText = Annotated[str, Field(min_length=3, max_length=512)]
MessageId = Annotated[str, Field(min_length=1, max_length=MESSAGE_ID_CHARS_MAX)]
TurnId = Annotated[str, Field(min_length=1, max_length=64)]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
Instant = Annotated[int, Field(ge=0)]
"""Microseconds since the epoch."""
BusyMode = Literal["steer", "queue", "interrupt"]


def _is_shallow(value: Mapping[str, object] | list[object], levels: int) -> bool:
    """Tell whether containers nest no deeper; a TypeError if a key is no text."""
    inner: Iterable[object] = value
    if isinstance(value, Mapping):
        "".join(value)
        inner = value.values()
    for one in inner:
        if isinstance(one, dict | list):
            held = cast("dict[str, object] | list[object]", one)
            if levels == 1 or not _is_shallow(held, levels - 1):
                return False
    return True


def _bounded(value: dict[str, object]) -> dict[str, object]:
    """Refuse a free field that nests too deep; what has fields of its own cannot."""
    if value:
        try:
            shallow = _is_shallow(value, FREE_DEPTH_MAX)
        except TypeError:
            raise PydanticCustomError("malformed", "a key is no text") from None
        if not shallow:
            raise PydanticCustomError("too_deep", "it nests too deep")
    return value


Free = Annotated[dict[str, object], AfterValidator(_bounded)]
"""A map that is nobody's but its user's."""
ItemState = Literal["pending", "claimed", "acknowledged", "discarded"]
Delivery = Literal["current_turn", "next_turn", "history"]
Outcome = Literal["completed", "needs_user", "failed", "cancelled", "lost", "indeterminate"]

__all__ = ["BODIES", "Body"]  # the classes below are reached as attributes of this module


class Body(BaseModel):
    """The body of a message: strict, frozen, nothing unknown in it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    kind: ClassVar[str] = ""


class Text(Body):
    """A text part of an input.

    `prompt_artifact` is there if `text` is the excerpt of a longer one, which lies in a file
    (ART-1): an ArtifactRef as it came, read with `artifacts.read_ref` wherever it is used.
    """

    type: Literal["text"]
    text: str
    prompt_artifact: Free | None = None


# --- client -> gateway (the door) ------------------------------------------------------------


class Hello(Body):
    """The first message of a connection (RTE-7c). Answer: welcome."""

    kind: ClassVar[str] = "hello"
    protocol: int
    token: str = Field(max_length=512)
    client: str = Field(default="", max_length=200)


class CreateSession(Body):
    """Create a session, once however often it is sent (MET-1, IDN-8). Answer: created.

    The caller names the id, so that a retry names the same session; `key` is the idempotency key.
    """

    kind: ClassVar[str] = "create_session"
    key: Hex32
    workspace: str = Field(min_length=1, max_length=WORKSPACE_PATH_BYTES_MAX)
    session_id: str = Field(min_length=1, max_length=200)
    agent: str = Field(min_length=1, max_length=500)
    title: str | None = Field(default=None, max_length=TITLE_CHARS_MAX)
    model: str | None = Field(default=None, max_length=MODEL_ID_CHARS_MAX)
    settings: dict[str, str] = Field(default_factory=dict, max_length=SETTINGS_ENTRIES_MAX)
    extra: Free = Field(default_factory=dict)


class Send(Body):
    """Put an input into a session (ACC-1). Answer: receipt, after the sync."""

    kind: ClassVar[str] = "send"
    session: RefText
    message_id: MessageId
    content: list[Text] = Field(min_length=1, max_length=SEND_PARTS_MAX)
    busy_mode: BusyMode = "steer"
    metadata: Free = Field(default_factory=dict)


class Wait(Body):
    """Wait until an input is settled. Answer: outcome."""

    kind: ClassVar[str] = "wait"
    session: RefText
    message_id: MessageId


class Watch(Body):
    """Follow a transcript (WCH-1). Answers: many `records`, then `error` or nothing more."""

    kind: ClassVar[str] = "watch"
    session: RefText
    from_seq: int = Field(ge=1)


class Unwatch(Body):
    """End a watch, named by the id of its request. Answer: ok."""

    kind: ClassVar[str] = "unwatch"
    watch: str = Field(min_length=1, max_length=64)


class Cancel(Body):
    """Cancel a session's turn, or an input that waits (TEX-13 to TEX-15). Answer: cancel_result."""

    kind: ClassVar[str] = "cancel"
    session: RefText
    turn_id: TurnId | None = None
    message_id: MessageId | None = None
    keep_input: bool = False


class Status(Body):
    """Ask how the plane is. Answer: plane_status."""

    kind: ClassVar[str] = "status"


class Down(Body):
    """Stop the plane in order (SHD-1). Answer: ok, before the plane ends."""

    kind: ClassVar[str] = "down"
    reason: str = Field(default="asked", max_length=OPERATOR_REASON_CHARS_MAX)


class ReleaseSession(Body):
    """Clear a session's quarantine (RUN-1). Answer: ok."""

    kind: ClassVar[str] = "release_session"
    session: RefText


# --- gateway -> client ------------------------------------------------------------------------


class Welcome(Body):
    """The door is open for this connection."""

    kind: ClassVar[str] = "welcome"
    protocol: int
    plane_id: str
    gateway_epoch: int


class Created(Body):
    """A session exists; `fresh` is false for a repeated request."""

    kind: ClassVar[str] = "created"
    session: RefText
    fresh: bool


class Receipt(Body):
    """What became of a send, computed when its frame was durable (MBX-3)."""

    kind: ClassVar[str] = "receipt"
    accepted: bool
    message_id: MessageId
    duplicate: bool
    item_state: ItemState
    delivery: Delivery
    turn_id: TurnId | None = None
    queued: Count
    mode: Literal["direct", "pending"] | None = None
    waiting_for: Literal["turn_permit", "interaction", "pause", "debounce"] | None = None


class WaitOutcome(Body):
    """How an input was settled.

    `input_disposition` is held when the turn failed and nothing will run it again by itself.
    """

    kind: ClassVar[str] = "outcome"
    message_id: MessageId
    item_state: ItemState
    input_disposition: Literal["acknowledged", "held", "discarded"]
    turn_id: TurnId | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    terminal_seq: Count


class Records(Body):
    """A piece of a watched transcript: whole lines, as they are stored."""

    kind: ClassVar[str] = "records"
    session: RefText
    first_seq: Count
    last_seq: Count
    lines: list[bytes]


class CancelResult(Body):
    """What a cancel did (TEX-13, TEX-14)."""

    kind: ClassVar[str] = "cancel_result"
    status: Literal["cancelled", "cancelling", "already_terminal", "not_found"]
    turn_id: TurnId | None = None
    outcome: Outcome | None = None


class ProcessView(Body):
    """One process of the plane, for operators."""

    role: Literal["supervisor", "fork", "storage", "gateway", "session"]
    pid: int
    state: str
    session: RefText | None = None
    restarts: Count = 0


class Level(Body):
    """How full something is that refuses when it is full (FLT-22)."""

    name: str
    value: Count
    limit: Count
    """Where it refuses; of free space, below which it alarms."""
    alarm: bool


class PlaneStatus(Body):
    """The plane as supervisor and gateway see it."""

    kind: ClassVar[str] = "plane_status"
    plane_id: str
    plane_epoch: Count
    gateway_epoch: Count
    started_at: Instant
    processes: list[ProcessView]
    sessions: dict[str, int]
    """Number of sessions by state: activating, live, turn, draining, quarantined."""
    counters: dict[str, int]
    """Monotonic counters: inputs accepted, receipts, restarts by role, refusals."""
    levels: list[Level] = Field(default_factory=list[Level])
    """Free space, descriptors, queues: of storage as it last said, of the gateway as they are."""
    detail: str | None = None
    """What stands still and why, in one line (FLT-4)."""


class Ok(Body):
    """Done."""

    kind: ClassVar[str] = "ok"


class Refusal(Body):
    """A typed refusal: `code` and what that code carries. Any request can get it."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    kind: ClassVar[str] = "error"
    code: str = Field(min_length=1, max_length=64)

    @model_validator(mode="after")
    def _bound_what_is_carried(self) -> Self:
        _bounded(self.model_extra or {})
        return self


# --- session -> storage -----------------------------------------------------------------------


class ProcessIdentity(Body):
    """What proves a process (FLT-35)."""

    pid: int = Field(ge=2)
    start_time: int
    boot_id: str
    pid_ns: int
    nonce: Hex32
    plane_id: str


class Acquire(Body):
    """Take the lease of a session (LSE-2). Answer: lease_granted."""

    kind: ClassVar[str] = "acquire"
    session: RefText
    owner: ProcessIdentity


class InboxItem(Body):
    """An input as it is kept in the inbox, but for its number `n` (runtime page, section 1)."""

    message_id: MessageId
    origin: Literal["user", "peer", "background", "shell", "recovery"]
    content: list[Text]
    queued_at: Instant
    digest: Hex64
    stored: bool = False
    wake: bool = True
    busy_mode: BusyMode = "steer"
    principal: str = Field(min_length=1, max_length=512)
    sender: str | None = None
    hidden: bool = False
    metadata: Free = Field(default_factory=dict)
    output_schema: Free | None = None
    schema_digest: Hex64 | None = None


class PendingItem(Body):
    """A live inbox item as storage hands it to a new owner."""

    item: InboxItem
    n: int = Field(ge=1)
    size_bytes: int = Field(ge=1)
    attempts: Count = 0
    held: bool = False


class OpenCall(Body):
    """A tool call without a result."""

    call_id: str = Field(min_length=1, max_length=CALL_ID_CHARS_MAX)
    name: str
    effect: Literal["readonly", "keyed", "unsafe"]
    message_id: str


class OpenTurn(Body):
    """A turn without a terminal record, as folded at activation (runtime 5.2)."""

    turn_id: TurnId
    kind_: Literal["user", "pending", "continuation"]
    epoch: Count
    input_ids: list[str]
    applied_ids: list[str]
    chain_index: Count
    started_at: Instant
    turns_count: Count
    tool_calls_count: Count
    wrote_output: bool
    cancel_requested: bool
    keep_input: bool


class LeaseGranted(Body):
    """The lease, and all that its owner needs to go on (runtime 5.1)."""

    kind: ClassVar[str] = "lease_granted"
    session: RefText
    epoch: int = Field(ge=1)
    last_seq: int = Field(ge=1)
    workspace: str
    agent: str
    model: str | None
    settings: dict[str, str]
    paused: bool
    turns: Count
    """Turns started so far; the next one is number turns + 1."""
    last_turn_id: str
    """The highest turn id so far, or the empty text."""
    last_message_id: str | None
    """The last message of the parent_message_id chain."""
    open_turn: OpenTurn | None
    open_calls: list[OpenCall]
    """Calls without a result, of the open turn and of ended ones."""
    pending: list[PendingItem]
    """In FIFO order."""
    applied_ids: list[str]
    """Ids of live items that an ended turn applied and nobody acknowledged (RUN-5a)."""
    acknowledged_ids: list[str] = Field(default_factory=list)
    """Ids of live items that a valid inbox_acknowledged names: the transcript wins (INB-4)."""


class NewRecord(Body):
    """A record to append: `data` is compact JSON, kept byte for byte."""

    id: Hex32
    type: str = Field(min_length=1, max_length=64)
    turn_id: TurnId | None = None
    data: bytes


class PutOp(Body):
    """Put an item into the inbox."""

    op: Literal["put"]
    item: InboxItem


class RemoveOp(Body):
    """Take an item out of the inbox, beside the record that acknowledges it."""

    op: Literal["remove"]
    message_id: MessageId


class Append(Body):
    """One atomic frame of one session (DUR-1). Answer: appended.

    `key` names the request for retries (DUR-6): the id of the first record, and without records
    the message id of the put.
    """

    kind: ClassVar[str] = "append"
    session: RefText
    epoch: int = Field(ge=1)
    key: str = Field(min_length=1, max_length=128)
    first_seq: int | None = Field(default=None, ge=1)
    records: list[NewRecord] = Field(max_length=4096)
    inbox: list[Annotated[PutOp | RemoveOp, Field(discriminator="op")]] = Field(max_length=4096)


class Appended(Body):
    """The frame is durable.

    `known` is set, and nothing was written, when the put's message id had been used before with
    equal content (INB-6a).
    """

    kind: ClassVar[str] = "appended"
    commit: Count
    first_seq: Count
    last_seq: Count
    n: list[int]
    """Inbox numbers given to the puts, in order."""
    sizes: list[int]
    """size_bytes of the puts, in order."""
    known: KnownInput | None = None


class KnownInput(Body):
    """What storage knows of a message id for ever (INB-6)."""

    item_state: ItemState
    turn_id: TurnId | None = None


class Lookup(Body):
    """Ask whether a message id was used before. Answer: looked_up, or request_conflict."""

    kind: ClassVar[str] = "lookup"
    session: RefText
    message_id: MessageId
    digest: Hex64


class LookedUp(Body):
    """`known` is none for a new message id."""

    kind: ClassVar[str] = "looked_up"
    known: KnownInput | None


class Release(Body):
    """Give the lease back (LSE-8). Answer: ok."""

    kind: ClassVar[str] = "release"
    session: RefText
    epoch: int = Field(ge=1)
    nonce: Hex32


# --- gateway -> storage -----------------------------------------------------------------------


class GatewayHello(Body):
    """A gateway asks for its epoch. Answer: gateway_epoch."""

    kind: ClassVar[str] = "gateway_hello"
    nonce: Hex32


class GatewayEpoch(Body):
    """The epoch under which a gateway writes."""

    kind: ClassVar[str] = "gateway_epoch"
    epoch: int = Field(ge=1)
    waiting: list[RefText]
    """Passive sessions with an open turn or waiting input, to be woken (host page, section 5)."""


class StorageLevels(Body):
    """How full storage is. Sent by storage unasked; answer: none."""

    kind: ClassVar[str] = "storage_levels"
    levels: list[Level]


class Accept(Body):
    """Put an input into a passive session (ACC-2). Answer: accepted or lease_held."""

    kind: ClassVar[str] = "accept"
    session: RefText
    gateway_epoch: int = Field(ge=1)
    item: InboxItem


class Accepted(Body):
    """The item is durable in a passive session's inbox, or was known already."""

    kind: ClassVar[str] = "accepted"
    duplicate: bool
    item_state: ItemState
    turn_id: TurnId | None = None
    queued: Count
    runnable: bool
    """Whether the session has input that a turn should take."""


class LeaseHeld(Body):
    """Nothing was written: a live owner admits input itself (ACC-3)."""

    kind: ClassVar[str] = "lease_held"
    owner: ProcessIdentity
    epoch: int


class Create(Body):
    """Write a session's first record under the gateway's epoch. Answer: created."""

    kind: ClassVar[str] = "create"
    gateway_epoch: int = Field(ge=1)
    session: RefText
    record: NewRecord


class StageRecords(Body):
    """A piece of a session that is created with more records than a frame holds.

    Answer: ok, and to the last piece created, when the session is there. `op` is the id of its
    first record; pieces are numbered from 0, and one that is repeated is answered again.
    """

    kind: ClassVar[str] = "stage_records"
    gateway_epoch: int = Field(ge=1)
    session: RefText
    op: Hex32
    index: Count
    records: list[NewRecord] = Field(min_length=1, max_length=4096)
    last: bool


class StoreArtifact(Body):
    """Keep the text of a long message before the message is admitted (ART-2). Answer: ok.

    Without data the file must be there already, and is checked. `message_id` and `digest` are those
    of the input that will name it, so that a repeat and a conflict are told before anything is
    written (INB-6d).
    """

    kind: ClassVar[str] = "store_artifact"
    session: RefText
    gateway_epoch: int = Field(ge=1)
    message_id: MessageId
    digest: Hex64
    artifact: Free
    data: bytes | None = None


class DiscardInput(Body):
    """Discard an input of a passive session (INB-9, TEX-15). Answer: cancel_result."""

    kind: ClassVar[str] = "discard_input"
    session: RefText
    gateway_epoch: int = Field(ge=1)
    message_id: MessageId
    reason: Literal["cancelled", "discarded"]


class AwaitInput(Body):
    """Wait until an input is settled. Answer: outcome, whenever that is."""

    kind: ClassVar[str] = "await_input"
    session: RefText
    message_id: MessageId


class Subscribe(Body):
    """Follow a transcript. Answers: many `records` with this request's id."""

    kind: ClassVar[str] = "subscribe"
    session: RefText
    from_seq: int = Field(ge=1)


class Forget(Body):
    """End a subscription or a waiting await_input. Answer: none."""

    kind: ClassVar[str] = "forget"
    request: str


class Unquarantine(Body):
    """Clear a quarantine under the gateway's epoch. Answer: ok."""

    kind: ClassVar[str] = "unquarantine"
    session: RefText
    gateway_epoch: int = Field(ge=1)


# --- supervisor -> storage --------------------------------------------------------------------


class PlaneHello(Body):
    """A supervisor registers its plane. Answer: plane_epoch."""

    kind: ClassVar[str] = "plane_hello"
    plane_id: str


class PlaneEpoch(Body):
    """The epoch under which a supervisor writes."""

    kind: ClassVar[str] = "plane_epoch"
    epoch: int = Field(ge=1)


class Quarantine(Body):
    """Stop a session that crashes too often, durably (FLT-32b). Answer: ok."""

    kind: ClassVar[str] = "quarantine"
    session: RefText
    plane_epoch: int = Field(ge=1)
    reason: Literal["crash_loop"]


# --- session -> gateway -----------------------------------------------------------------------


class Register(Body):
    """A session is ready, or is there again after the gateway's restart. Answer: registered."""

    kind: ClassVar[str] = "register"
    session: RefText
    epoch: int = Field(ge=1)
    permit: bool
    """It holds a turn permit."""
    evictable: bool


class Registered(Body):
    """The gateway routes to this session from now on."""

    kind: ClassVar[str] = "registered"
    gateway_epoch: int


class PermitAsk(Body):
    """Ask for a turn permit (ADM-4). Answer: permit."""

    kind: ClassVar[str] = "permit_ask"


class Permit(Body):
    """A permit is granted, or queued at `position`; a queued one comes later with the same cid."""

    kind: ClassVar[str] = "permit"
    state: Literal["granted", "queued"]
    position: Count = 0


class PermitReturn(Body):
    """A permit, or a queued request for one, is given back (ADM-5). Answer: none."""

    kind: ClassVar[str] = "permit_return"


class Beat(Body):
    """The main loop lives (FLT-26), and what the session is doing. Answer: none."""

    kind: ClassVar[str] = "beat"
    phase: Literal["idle", "open", "sealed", "draining"]
    evictable: bool
    pending: Count


# --- gateway -> session -----------------------------------------------------------------------


class Deliver(Body):
    """An input for a live session. Answer: receipt.

    `permit` says that a turn permit comes with it: the session uses it or returns it.
    """

    kind: ClassVar[str] = "deliver"
    item: InboxItem
    permit: bool


class CancelTurn(Body):
    """Cancel the turn, or the input that waits. Answer: cancel_result. Urgent."""

    kind: ClassVar[str] = "cancel_turn"
    turn_id: TurnId | None
    message_id: MessageId | None
    keep_input: bool
    principal: str


# --- supervisor <-> gateway -------------------------------------------------------------------


class LiveSession(Body):
    """A session process that the supervisor runs."""

    session: RefText
    routing_id: Hex32
    pid: int


class SupervisorHello(Body):
    """The supervisor is there; what it runs. Answer: ok."""

    kind: ClassVar[str] = "supervisor_hello"
    plane_epoch: Count
    live: list[LiveSession]


class Activate(Body):
    """Gateway asks for a session's process. Answer: activating, or overloaded.

    `evict` names idle sessions, least recently used first, that may make room (RES-1a).
    """

    kind: ClassVar[str] = "activate"
    session: RefText
    evict: list[RefText] = Field(max_length=16)


class Activating(Body):
    """A process was started (or runs already) for the session."""

    kind: ClassVar[str] = "activating"
    session: RefText
    routing_id: Hex32
    pid: int


class SessionDown(Body):
    """A session's process has ended. Sent by the supervisor; answer: none."""

    kind: ClassVar[str] = "session_down"
    session: RefText
    routing_id: Hex32
    cause: Literal["stopped", "crashed", "parent_lost", "refused", "killed"]
    status: int
    quarantined: bool
    restarting: bool
    """The supervisor starts it again by itself."""


class SessionUp(Body):
    """The supervisor started a session's process by itself. Answer: none."""

    kind: ClassVar[str] = "session_up"
    session: RefText
    routing_id: Hex32
    pid: int


class StorageGivenUp(Body):
    """Storage ended too often and is not started again (FLT-4). Answer: none.

    The gateway answers what needs storage with storage_unavailable.
    """

    kind: ClassVar[str] = "storage_given_up"
    detail: str


class SupervisorStatus(Body):
    """Gateway asks for the process tree. Answer: process_tree."""

    kind: ClassVar[str] = "supervisor_status"


class ProcessTree(Body):
    """The supervisor's view."""

    kind: ClassVar[str] = "process_tree"
    plane_id: str
    plane_epoch: Count
    started_at: Instant
    processes: list[ProcessView]
    quarantined: list[RefText]
    counters: dict[str, int]
    detail: str | None


class StopPlane(Body):
    """Gateway passes on `down`. Answer: ok."""

    kind: ClassVar[str] = "stop_plane"
    reason: str


class Closing(Body):
    """The plane stops: refuse new work with plane_closing. Sent by the supervisor; answer: ok."""

    kind: ClassVar[str] = "closing"


def _all_bodies(base: type[Body]) -> dict[str, type[Body]]:
    return {c.kind: c for c in base.__subclasses__() if c.kind}


BODIES: Mapping[str, type[Body]] = MappingProxyType(_all_bodies(Body))
"""The closed union, by kind."""

CLIENT_KINDS: frozenset[str] = frozenset(
    c.kind
    for c in (
        Hello,
        CreateSession,
        Send,
        Wait,
        Watch,
        Unwatch,
        Cancel,
        Status,
        Down,
        ReleaseSession,
    )
)
"""What a client may send."""

URGENT_KINDS: frozenset[str] = frozenset({"cancel", "cancel_turn", "down", "stop_plane", "closing"})
"""What never queues behind work (MBX-1b)."""

SIZED_FIELDS: Mapping[str, int] = MappingProxyType(
    {"metadata": ITEM_METADATA_BYTES_MAX, "extra": EXTRA_BYTES_MAX}
)
"""Free-form fields of the door and the bytes they may take as compact JSON."""
