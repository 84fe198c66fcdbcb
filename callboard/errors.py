"""Every error that callboard answers with: one base, a stable code, whose fault it is.

This is the closed list of the architecture page, section 11, one class per row and in its order.
The code is the class name in snake case. What goes over a wire is `{code, ...carries}`: never the
message, never a path, content or id beyond the carries that the row allows. The message is for the
person in front of the process that raised or received it; its default is the first paragraph of
the class's docstring.

Two carries have names that Python keeps for itself: `from_` and `for_` are `from` and `for` on the
wire.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar, Final, Literal, TypeGuard, get_args

Fault = Literal["caller", "load", "agent", "plane", "operator"]
"""Who can put it right: the caller (another request), nobody but time (load), the author of the
agent or of its provider, the plane itself (a bug, a dead process), who runs it (disk, modes)."""

# ---- Values that stand inside an error, a record or a row; closed, and no codes of their own ----

SessionBusyReason = Literal[
    "turn", "pending_input", "interaction", "background_process", "child", "rewind"
]
ArchiveConflictReason = Literal[SessionBusyReason, "damage", "task"]
Damage = Literal[
    "bad_line",
    "missing_records",
    "duplicate_record",
    "identity_mismatch",
    "rewind_target_missing",
    "truncated",
    "foreign_tail",
]
InboxCorruptReason = Literal[
    "too_large",
    "not_json",
    "bad_header",
    "wrong_session",
    "unknown_format",
    "gap",
    "bad_item",
    "duplicate_id",
    "bad_schema",
]
OverloadedResource = Literal[
    "pending_count",
    "pending_bytes",
    "resident_sessions",
    "memory",
    "connections",
    "descriptors",
    "processes",
    "approvals",
    "watchers",
    "routes",
    "socket",
]
OverloadedScope = Literal["session", "plane"]
TerminalReason = Literal["completed", "aborted"]
DiscardReason = Literal[
    "discarded",
    "cancelled",
    "stopped",
    "session_replaced",
    "attempts_spent",
    "deadline_exceeded",
    "yielded",
    "origin_invalid",
    "superseded",
    "merged",
    "dropped",
]
ApprovalDeniedReason = Literal[
    "policy",
    "user",
    "approval_closed",
    "approval_stale",
    "approval_expired",
    "approval_correlation_mismatch",
    "invalid_approval_decision",
    "invalid_approval_input",
    "no_interactive_route",
    "non_interactive",
    "turn_ended",
    "stopped",
]
CodeHistoryReason = Literal[
    "before_fork",
    "evicted",
    "missing",
    "too_large",
    "remote",
    "outside",
    "conflicted",
    "no_edit",
]
RewindFileReason = Literal["changed_since", "changed_between"]
InvalidRequestReason = Literal[
    "missing",
    "unknown",
    "type",
    "format",
    "out_of_range",
    "empty",
    "too_long",
    "nul",
    "encoding",
    "duplicate",
    "not_active",
    "not_allowed",
]
DoorReason = Literal[
    "malformed",
    "kind",
    "field",
    "too_deep",
    "duplicate_key",
    "not_finite",
    "int_range",
    "framing",
    "deadline",
    "descriptors",
]
HomeUnsafeReason = Literal[
    "owner",
    "symlink",
    "not_directory",
    "not_regular",
    "network_filesystem",
    "path_too_long",
    "foreign",
]
QuarantineReason = Literal["crash_loop"]
SideFailedReason = Literal["tool_call", "blank", "too_long"]
ContextOverflowReason = Literal[
    "definitions_too_large",
    "current_input_too_large",
    "compaction_busy",
    "compaction_failed",
    "protected_context_too_large",
]
ContextOverflowAdvice = Literal["reduce_tools", "shorten_input", "retry_later", "larger_model"]
DeliveryLastError = Literal["slot_failed", "delivery_cancelled", "no_interactive_route"]
TaskFailureCode = Literal["blocked_timeout"]
WrittenToolError = Literal["interrupted_by_fork", "imported_unfinished"]

SESSION_BUSY_REASONS: Final[frozenset[str]] = frozenset(get_args(SessionBusyReason))
ARCHIVE_CONFLICT_REASONS: Final[frozenset[str]] = frozenset(get_args(ArchiveConflictReason))
DAMAGES: Final[frozenset[str]] = frozenset(get_args(Damage))
INBOX_CORRUPT_REASONS: Final[frozenset[str]] = frozenset(get_args(InboxCorruptReason))
OVERLOADED_RESOURCES: Final[frozenset[str]] = frozenset(get_args(OverloadedResource))
OVERLOADED_SCOPES: Final[frozenset[str]] = frozenset(get_args(OverloadedScope))
# `inbox_acknowledged.reason`: with a terminal, and without one; the code of a refused admission
# may stand there too.
TERMINAL_REASONS: Final[frozenset[str]] = frozenset(get_args(TerminalReason))
DISCARD_REASONS: Final[frozenset[str]] = frozenset(get_args(DiscardReason))
APPROVAL_DENIED_REASONS: Final[frozenset[str]] = frozenset(get_args(ApprovalDeniedReason))
CODE_HISTORY_REASONS: Final[frozenset[str]] = frozenset(get_args(CodeHistoryReason))
REWIND_FILE_REASONS: Final[frozenset[str]] = frozenset(get_args(RewindFileReason))
DOOR_REASONS: Final[frozenset[str]] = frozenset(get_args(DoorReason))
INVALID_REQUEST_REASONS: Final[frozenset[str]] = (
    frozenset(get_args(InvalidRequestReason)) | DOOR_REASONS
)
HOME_UNSAFE_REASONS: Final[frozenset[str]] = frozenset(get_args(HomeUnsafeReason))
QUARANTINE_REASONS: Final[frozenset[str]] = frozenset(get_args(QuarantineReason))
SIDE_FAILED_REASONS: Final[frozenset[str]] = frozenset(get_args(SideFailedReason))
CONTEXT_OVERFLOW_REASONS: Final[frozenset[str]] = frozenset(get_args(ContextOverflowReason))
CONTEXT_OVERFLOW_ADVICE: Final[frozenset[str]] = frozenset(get_args(ContextOverflowAdvice))
DELIVERY_LAST_ERRORS: Final[frozenset[str]] = frozenset(get_args(DeliveryLastError))
TASK_FAILURE_CODES: Final[frozenset[str]] = frozenset(get_args(TaskFailureCode))
WRITTEN_TOOL_ERRORS: Final[frozenset[str]] = frozenset(get_args(WrittenToolError))

# ---- The base ----

_NOTHING: Final[Mapping[str, frozenset[str]]] = MappingProxyType({})
_WORD_START: Final = re.compile(r"(?<!^)(?=[A-Z])")
_codes: Final[dict[str, "type[CallboardError]"]] = {}


class CallboardError(Exception):
    """Something callboard refuses or could not do.

    The class of each code gives its HTTP status (None: it never crosses HTTP), the exit status of
    the command line, what it may carry, whose fault it is, and the way out for a person.
    """

    code: ClassVar[str]
    http: ClassVar[int | None]
    cli: ClassVar[int]
    carries: ClassVar[tuple[str, ...]]
    operator_only: ClassVar[tuple[str, ...]]
    closed: ClassVar[Mapping[str, frozenset[str]]]
    fixed: ClassVar[Mapping[str, object]]
    fault: ClassVar[Fault]
    way_out: ClassVar[str | None] = None

    carried: dict[str, object]

    def __init_subclass__(
        cls,
        *,
        http: int | None,
        cli: int = 1,
        carries: tuple[str, ...] = (),
        operator_only: tuple[str, ...] = (),
        closed: Mapping[str, frozenset[str]] = _NOTHING,
        fixed: Mapping[str, object] = _NOTHING,
        fault: Fault = "caller",
    ) -> None:
        """Enter one row of the table.

        Args:
            http: status on an HTTP surface, None where the table has a dash.
            cli: exit status of the command line.
            carries: the fields that may go beside the code.
            operator_only: those of them that only an operator sees.
            closed: for a carry, the only values it may have (of a list: each of its items).
            fixed: a carry whose one value is always the same and goes along unasked.
            fault: who can put it right.

        """
        super().__init_subclass__()
        cls.code = _WORD_START.sub("_", cls.__name__).lower()
        if cls.code in _codes:
            raise TypeError(f"two classes for the error code {cls.code}")
        cls.http, cls.cli, cls.fault = http, cli, fault
        cls.carries, cls.operator_only = carries, operator_only
        cls.closed, cls.fixed = closed, fixed
        _codes[cls.code] = cls

    def __init__(self, message: str | None = None, **carries: object) -> None:
        """Make one; what it carries is checked against its row.

        Args:
            message: for a person, in one line; never sent. Default: the docstring's beginning.
            **carries: values of the fields named in `carries`.

        Raises:
            TypeError: a field its row does not name, or a value of another kind than str, int,
                bool, None, a list or tuple of str or int, or a dict of these.
            ValueError: a value outside its closed set.

        """
        super().__init__(message or _first_paragraph(type(self)))
        for name, value in carries.items():
            self._check(name, value)
        self.carried = {**self.fixed, **carries}

    @property
    def message(self) -> str:
        """The text for a person, without what is carried."""
        return str(self.args[0])

    def __str__(self) -> str:
        text = _one_line(self.message)
        shown = [f"{_wire_name(n)}={_shown(v)}" for n, v in self.carried.items() if v is not None]
        if shown:
            text = f"{text.removesuffix('.')} ({', '.join(shown)})"
        return f"{text} — {self.way_out}" if self.way_out else text

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.carried.items())
        return f"{type(self).__name__}({fields})"

    def to_wire(self, *, operator: bool = True) -> dict[str, object]:
        """Give what may leave the process: the code and its carries, never the message.

        Args:
            operator: whether the receiver is an operator; others get no `operator_only` carry.

        """
        hidden = () if operator else self.operator_only
        return {"code": self.code} | {
            _wire_name(name): value for name, value in self.carried.items() if name not in hidden
        }

    @staticmethod
    def from_wire(answer: Mapping[str, object]) -> "CallboardError":
        """Read what a peer sent; never fails, whatever it is.

        An unknown code becomes `Internal`. A carry its row does not name, or whose value does not
        fit, is dropped: a peer of another version may know more than this one.
        """
        code = answer.get("code")
        cls = _codes.get(code, Internal) if isinstance(code, str) else Internal
        if cls.code != code:
            return cls()
        fields = {n: answer[_wire_name(n)] for n in cls.carries if _wire_name(n) in answer}
        return cls(
            None, **{name: value for name, value in fields.items() if cls._fits(name, value)}
        )

    @classmethod
    def _fits(cls, name: str, value: object) -> bool:
        try:
            cls._check(name, value)
        except (TypeError, ValueError):
            return False
        return True

    @classmethod
    def _check(cls, name: str, value: object) -> None:
        if name not in cls.carries:
            raise TypeError(f"{cls.code} does not carry {name}")
        if not _is_plain(value):
            raise TypeError(f"{cls.code}.{name} cannot be a {type(value).__name__}")
        if name in cls.fixed and value != cls.fixed[name]:
            raise ValueError(f"{cls.code}.{name} is always {cls.fixed[name]!r}")
        if name in cls.closed and value is not None:
            outside = set(_items(value)) - cls.closed[name]
            if outside:
                raise ValueError(f"{cls.code}.{name} cannot be {min(outside, key=str)!r}")


def _first_paragraph(cls: type[CallboardError]) -> str:
    return _one_line((cls.__doc__ or cls.code).partition("\n\n")[0])


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))


def _wire_name(carry: str) -> str:
    return carry.removesuffix("_")


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value if value and value.isprintable() else repr(value)
    if _is_list(value):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return repr(value)


def _is_plain(value: object) -> bool:
    if _is_dict(value):
        return all(isinstance(k, str) and (v is None or _is_flat(v)) for k, v in value.items())
    return value is None or _is_flat(value)


def _is_flat(value: object) -> bool:
    return all(isinstance(item, str | int) for item in _items(value))


def _items(value: object) -> Iterable[object]:
    """Give the items of a list, of anything else the value itself."""
    return value if _is_list(value) else (value,)


def _is_list(value: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    return isinstance(value, list | tuple)


def _is_dict(value: object) -> TypeGuard[dict[object, object]]:
    return isinstance(value, dict)


# ---- Request and scope ----


class InvalidRequest(
    CallboardError,
    http=400,
    carries=("field", "reason"),
    closed={"reason": INVALID_REQUEST_REASONS},
):
    """A field of the request is missing, unknown or has a value that is not allowed."""

    way_out = "correct this field and try again"


class ProtocolUnsupported(CallboardError, http=400, carries=("min", "max")):
    """The two sides speak different versions of callboard's protocol."""

    way_out = "use the same callboard version for the plane and its client"


class HostRefused(CallboardError, http=421):
    """The request names a host that this door does not answer for."""


class OriginRefused(CallboardError, http=403):
    """The request comes from a page of another origin."""


class MediaTypeUnsupported(CallboardError, http=415):
    """The body's media type is not JSON."""


class MethodNotAllowed(CallboardError, http=405):
    """The address does not take this method."""


class HeaderTooLarge(CallboardError, http=431, carries=("limit",)):
    """The request's headers are too large or too many."""


class PayloadTooLarge(CallboardError, http=413, carries=("limit", "maximum")):
    """One value of the request is larger than its limit."""

    way_out = "send less at once, or put it into a file and name the file"


class CursorInvalid(CallboardError, http=400):
    """The cursor is not one that this plane gave out."""

    way_out = "start again from the first page"


class CursorScopeMismatch(CallboardError, http=400):
    """The cursor belongs to another query."""

    way_out = "use a cursor only with the query that gave it"


class PathOutsideWorkspace(CallboardError, http=400, carries=("path",)):
    """The path leads out of the session's workspace."""


class NotFound(CallboardError, http=404):
    """There is no such thing, or it is not yours."""

    way_out = "callboard ls lists the sessions you can reach"


class NotAuthenticated(CallboardError, http=401):
    """The request bears no valid credential of this plane."""

    way_out = "connect again: a token ends with its plane"


class PrincipalRequired(CallboardError, http=401):
    """The request must say on whose behalf it comes."""


class CapabilityDenied(CallboardError, http=403, carries=("capability", "for_")):
    """The agent's revision does not have this capability."""


class ScopeInvalid(CallboardError, http=403):
    """The scope of the request is not one that can be granted."""


class ScopeNotValidated(CallboardError, http=403):
    """The scope of the request was not validated before it was used."""


class AuthorityRevoked(CallboardError, http=403):
    """The authority behind this request was revoked."""


class AuthorityRefused(CallboardError, http=403):
    """The authority asked for cannot be given."""


class AuthorityActive(CallboardError, http=409):
    """The authority is still in use."""


class OwnerRepairRequired(CallboardError, http=409, fault="operator"):
    """The record of who owns this is damaged and must be repaired first."""


class ContextMismatch(
    CallboardError,
    http=409,
    carries=("execution_started",),
    fixed={"execution_started": False},
    fault="plane",
):
    """The turn's context is not the one it was admitted with; nothing was executed."""


class UnsupportedOperation(CallboardError, http=501):
    """Neither this plane nor this session can do that."""


class Internal(CallboardError, http=500, carries=("correlation_id",), fault="plane"):
    """Something unexpected went wrong inside callboard."""

    way_out = "look for the correlation id in the logs of the home, and report it"


# ---- Load, time, plane ----


class Overloaded(
    CallboardError,
    http=429,
    cli=4,
    carries=("resource", "scope", "limit", "retry_after_ms"),
    closed={"resource": OVERLOADED_RESOURCES, "scope": OVERLOADED_SCOPES},
    fault="load",
):
    """The plane has as much to do as it may take on."""

    way_out = "try again in a moment"


class InboxFull(CallboardError, http=429, carries=("limit", "current", "maximum"), fault="load"):
    """The session's inbox is full."""

    way_out = "wait until the session has worked some of it off, or discard inputs"


class OutboxFull(CallboardError, http=429, carries=("limit",), fault="load"):
    """Too many deliveries wait on this route."""


class TaskQuota(CallboardError, http=429, carries=("limit",), fault="load"):
    """The session runs as many tasks as it may."""


class ArtifactQuota(
    CallboardError, http=429, carries=("limit", "current", "maximum"), fault="load"
):
    """The session holds as many artifacts as it may."""


class LimitExceeded(CallboardError, http=409, carries=("limit", "maximum")):
    """The operation would touch more than its limit allows."""


class DeadlineExceeded(CallboardError, http=504, cli=4, carries=("scope", "scanned"), fault="load"):
    """The time for this request ran out."""

    way_out = "what was accepted is kept; ask again, or allow more time"


class Cancelled(CallboardError, http=409, carries=("reason",)):
    """The request was cancelled while it waited."""


class GateClosed(CallboardError, http=503, fault="load"):
    """The session takes no new work while it shuts down."""

    way_out = "try again in a moment"


class PlaneClosing(CallboardError, http=503, carries=("retry_after_ms",), fault="load"):
    """The plane is shutting down."""

    way_out = "start it again with: callboard up"


class PlaneNotRunning(CallboardError, http=None, cli=3, fault="operator"):
    """No plane is running on this home."""

    way_out = "start one with: callboard up"


class HomeInUse(
    CallboardError, http=None, carries=("pid",), operator_only=("pid",), fault="operator"
):
    """Another plane is already running on this home."""

    way_out = "use that one, stop it with: callboard down, or give another --home"


class HomeUnsafe(
    CallboardError,
    http=None,
    carries=("what", "reason"),
    closed={"reason": HOME_UNSAFE_REASONS},
    fault="operator",
):
    """A file or folder the plane depends on is not safely yours."""

    way_out = "correct its owner or kind, or name another one"


class BindRefused(CallboardError, http=None, fault="operator"):
    """The plane does not listen on this address."""


# ---- Session ----


class SessionBusy(
    CallboardError, http=409, carries=("reason",), closed={"reason": SESSION_BUSY_REASONS}
):
    """The session is busy."""

    way_out = "wait for it with: callboard watch, or stop its turn with: callboard cancel"


class SessionAmbiguous(CallboardError, http=409, carries=("workspaces",)):
    """Several workspaces have a session of this id."""

    way_out = "name the session with its workspace"


class SessionExists(CallboardError, http=409):
    """The session id is taken."""

    way_out = "choose another id, or leave it out"


class SessionIsChild(CallboardError, http=409):
    """The session belongs to another one, and cannot do that by itself."""


class SessionArchived(CallboardError, http=409, carries=("session", "archived_by")):
    """The session is archived."""

    way_out = "bring it back with: callboard unarchive"


class SessionQuarantined(
    CallboardError,
    http=409,
    carries=("reason",),
    closed={"reason": QUARANTINE_REASONS},
    fault="agent",
):
    """The session crashed again and again and was set aside; the others go on."""

    way_out = "callboard show tells why it crashed"


class SessionDamaged(
    CallboardError,
    http=409,
    carries=("damage", "line"),
    closed={"damage": DAMAGES},
    fault="operator",
):
    """The session's transcript is damaged: it can be read, not written."""

    way_out = "callboard doctor says what can be saved"


class SessionInUse(
    CallboardError,
    http=409,
    carries=("pid", "epoch"),
    operator_only=("pid", "epoch"),
    fault="operator",
):
    """Another process owns this session."""

    way_out = "stop that process, or wait for it to end"


class OwnerUnprovable(
    CallboardError,
    http=409,
    carries=("pid", "epoch"),
    operator_only=("pid", "epoch"),
    fault="operator",
):
    """It cannot be proven whether the session's last owner still lives."""

    way_out = "make sure that process is gone, then see callboard doctor"


class StaleEpoch(CallboardError, http=409, fault="plane"):
    """The writer is no longer the owner; a newer one has taken over."""


class InboxCorrupt(
    CallboardError,
    http=409,
    carries=("reason", "line"),
    closed={"reason": INBOX_CORRUPT_REASONS},
    fault="operator",
):
    """The session's inbox is damaged; nothing was changed, and the session does not start."""

    way_out = "callboard doctor says what can be saved"


class FormatUnsupported(CallboardError, http=409, carries=("version", "type"), fault="operator"):
    """It was written by a version of callboard that this one does not know."""

    way_out = "use the callboard version that wrote it, or a newer one"


class ArchiveConflict(
    CallboardError,
    http=409,
    carries=("session", "reason", "archived_by"),
    closed={"reason": ARCHIVE_CONFLICT_REASONS},
):
    """A member of the session's family cannot be archived or brought back now."""


class StatusTransitionInvalid(CallboardError, http=409, carries=("from_", "to")):
    """The status cannot change like that."""


class ForkWorkspaceMismatch(CallboardError, http=409):
    """A fork stays in the workspace of its origin."""


class LineageTooDeep(CallboardError, http=409, carries=("limit",)):
    """The session has as many ancestors as are allowed."""


class RewindConflict(
    CallboardError,
    http=409,
    carries=("files", "reasons"),
    closed={"reasons": REWIND_FILE_REASONS},
):
    """Files were changed by others since; nothing was rewound."""


class RewindFailed(CallboardError, http=500, carries=("files", "reasons"), fault="operator"):
    """Some files could not be rewound."""


class CodeHistoryUnavailable(
    CallboardError,
    http=409,
    carries=("reason", "files"),
    closed={"reason": CODE_HISTORY_REASONS},
):
    """The contents of these files at that point are not there."""


class SnapshotFailed(CallboardError, http=500, carries=("path",), fault="operator"):
    """The content of a file could not be kept before its edit; it was not edited."""


# ---- Storage ----


class SeqConflict(CallboardError, http=409, carries=("expected",), fault="plane"):
    """The write does not continue where the stream ends; nothing was written."""


class Conflict(CallboardError, http=409):
    """The state changed in the meantime; nothing was done."""

    way_out = "read it again, then decide"


class RequestConflict(CallboardError, http=409):
    """The message id was used before, with another content."""

    way_out = "give each message an id of its own, or none"


class IdempotencyConflict(CallboardError, http=409):
    """The idempotency key was used before, for another operation."""


class RecordInvalid(CallboardError, http=422, carries=("type", "field"), fault="plane"):
    """A record breaks a rule of its type; nothing was written."""


class ArtifactInvalid(CallboardError, http=422, carries=("artifact_id", "retryable")):
    """The artifact is missing, or is not what its name says."""


class ArtifactStoreUnsafe(CallboardError, http=500, fault="operator"):
    """The session's artifact folder is not safely yours."""

    way_out = "correct its owner and modes; callboard doctor names it"


class PersistenceFailed(CallboardError, http=500, fault="operator"):
    """The disk did not take what had to be durable."""

    way_out = "check the disk; callboard doctor tells more"


class StorageFull(CallboardError, http=507, carries=("retry_after_ms",), fault="operator"):
    """The disk is full; nothing was changed."""

    way_out = "make room on the disk of the home, then try again"


class StorageUnavailable(CallboardError, http=503, carries=("retry_after_ms",), fault="plane"):
    """The storage actor is not running."""

    way_out = "it is started again by itself; callboard status names the cause if not"


class StorageUnreadable(CallboardError, http=503, fault="operator"):
    """The files could not be read."""

    way_out = "check the disk and the modes of the home"


class JournalDamaged(CallboardError, http=None, carries=("segment", "offset"), fault="operator"):
    """The journal is damaged; the plane does not start, and no byte was changed."""

    way_out = "callboard doctor says what can be saved"


# ---- Turn and mailbox ----


class TurnActive(CallboardError, http=409, carries=("turn_id",)):
    """A turn is running in this session."""

    way_out = "steer it, wait for it, or stop it with: callboard cancel"


class NoActiveTurn(CallboardError, http=409):
    """No turn is running in this session."""


class TurnSealed(CallboardError, http=409, carries=("turn_id",)):
    """The turn takes no more input; the next one will."""


class NotTurnOwner(CallboardError, http=409, carries=("turn_id",)):
    """Another turn is the running one."""


class TurnIdReused(CallboardError, http=409, carries=("turn_id",)):
    """A turn of this id has been before."""


class TurnTerminal(CallboardError, http=409, carries=("turn_id",)):
    """The turn has ended."""


class TurnNotActive(CallboardError, http=409, carries=("turn_id",)):
    """The turn never started."""


class AlreadyTerminal(CallboardError, http=409, carries=("outcome", "id")):
    """It has ended already."""


class TurnInfrastructure(
    CallboardError,
    http=503,
    carries=("request_id", "result_ref", "outcome"),
    fixed={"outcome": "indeterminate"},
    fault="plane",
):
    """The turn was lost sight of; whether it did its work is not known."""


class AlreadyClaimed(CallboardError, http=409):
    """A turn has taken this input already."""


class ImmutableOrigin(CallboardError, http=409):
    """Input of this origin cannot be edited or moved."""


class ImmutableBoundary(CallboardError, http=409):
    """An input cannot be moved across this one."""


class InvalidMutation(CallboardError, http=409):
    """The queue cannot be changed like that."""


class RevisionConflict(CallboardError, http=409, carries=("revision",)):
    """It was changed in the meantime; nothing was done."""

    way_out = "read it again, then decide"


class InteractionPending(CallboardError, http=409, carries=("interaction_id",)):
    """The session waits for an answer."""

    way_out = "answer it with: callboard answer"


class InteractionClosed(CallboardError, http=409):
    """The question was answered or has ended."""


class ToolCallNotDurable(CallboardError, http=409, fault="plane"):
    """The tool call was not durable, and so was not run."""


class ApprovalDenied(
    CallboardError, http=403, carries=("reason",), closed={"reason": APPROVAL_DENIED_REASONS}
):
    """The call was not approved, and not run."""


class ShellBusy(CallboardError, http=409):
    """A command of this session's shell is running."""


class SideFailed(
    CallboardError,
    http=502,
    carries=("reason",),
    closed={"reason": SIDE_FAILED_REASONS},
    fault="agent",
):
    """The side question got no usable answer; the session is untouched."""


class ReapFailed(CallboardError, http=500, carries=("process_id",), fault="operator"):
    """A process could not be ended."""

    way_out = "end it by hand; callboard doctor names it"


class ContextOverflow(
    CallboardError,
    http=413,
    carries=("reason", "estimated_input", "hard_budget", "advice"),
    closed={"reason": CONTEXT_OVERFLOW_REASONS, "advice": CONTEXT_OVERFLOW_ADVICE},
):
    """The turn's input does not fit the model's context."""


class CompactionSkipped(CallboardError, http=409):
    """There was nothing worth compacting."""


class CompactionBusy(CallboardError, http=409, fault="load"):
    """A compaction is running already."""


class CompactionFailed(CallboardError, http=502, fault="agent"):
    """The compaction got no usable summary; the context is unchanged."""


# ---- Agents, tasks, delivery, schedules ----


class AgentRevisionMismatch(CallboardError, http=409, carries=("agent_id", "revision")):
    """The agent is there in another revision only."""


class PromoteConflict(CallboardError, http=409, carries=("expected", "current")):
    """Another revision was promoted in the meantime."""


class ManifestInvalid(CallboardError, http=422, carries=("path", "reason"), fault="agent"):
    """The agent's manifest is not valid."""


class SlotTimeout(CallboardError, http=504, carries=("slot_id",), fault="agent"):
    """A slot of the agent did not answer in time."""


class SlotWriteRefused(CallboardError, http=409, carries=("slot_id", "reason"), fault="agent"):
    """A slot of the agent wrote what it may not."""


class EffectNameCollision(CallboardError, http=409, carries=("name", "provenances"), fault="agent"):
    """Two effects of the agent have the same name."""


class StaleClaim(CallboardError, http=409, carries=("id",), fault="plane"):
    """The claim was taken over by another."""


class RouteSessionMismatch(CallboardError, http=409):
    """The route belongs to another session."""


class TaskNotBlocked(CallboardError, http=409, carries=("state",)):
    """The task does not wait for an answer."""


class WriteScopeConflict(CallboardError, http=409, carries=("write_scope",)):
    """Another running task may write there."""


class DelegationDepth(CallboardError, http=409, carries=("max_depth",)):
    """Agents cannot delegate any deeper."""


class StateConflict(CallboardError, http=409, carries=("expected", "current")):
    """The stored value was changed in the meantime."""


# ---- Export and import ----


class ExportEmpty(CallboardError, http=409):
    """There is nothing to export."""


class ExportTooLarge(CallboardError, http=413, carries=("bytes", "parts", "seq")):
    """The export would be larger than its limit."""


class ExportInlineTooLarge(CallboardError, http=413, carries=("bytes",)):
    """The export is too large to be given inline."""

    way_out = "export it to a file"


class ExportTargetExists(CallboardError, http=409, carries=("path",)):
    """The export's target exists already."""

    way_out = "choose another path, or remove it first"


class ExportTargetInvalid(CallboardError, http=400, carries=("path",)):
    """The export's target is not a place to write to."""


class ExportPathRefused(CallboardError, http=400):
    """The surface does not write to paths."""


class ImportFormatUnknown(CallboardError, http=400, carries=("candidates",)):
    """The file is in none of the known transcript formats, or could be in several."""

    way_out = "name its format"


class ImportMalformed(CallboardError, http=400, carries=("line", "reason")):
    """The file breaks off or breaks the rules of its format."""


class ImportTooLarge(CallboardError, http=413, carries=("limit",)):
    """The file is larger than an import may be."""


class ImportDiverged(CallboardError, http=409, carries=("ref",)):
    """The session imported from this file has gone its own way since."""


# ---- Only in tool results, beside any code above: they never reach HTTP or an exit status ----


class ToolBatchFull(CallboardError, http=None, fault="agent"):
    """The response asked for more tool calls than one may."""


class NotRun(CallboardError, http=None, fault="agent"):
    """The tool call was not run."""


class Indeterminate(CallboardError, http=None, fault="plane"):
    """Whether the tool call had its effect is not known."""


CODES: Final[Mapping[str, type[CallboardError]]] = MappingProxyType(_codes)
"""The class of each code, in the order of the table."""
