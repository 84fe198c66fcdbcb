"""What a failure is called: a code of a closed list with its fixed sentence (FLR-1 to FLR-3).

Nothing that an agent, a provider or a peer said is kept: no text, address, path or key.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

from callboard.errors import CallboardError
from callboard.limits import FAILURE_TEXT_CHARS_MAX
from callboard.records import Failure

Code: TypeAlias = Literal[
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
Resource: TypeAlias = Literal["pending_count", "pending_bytes", "resident_sessions"]


class Kind(NamedTuple):
    """A row of FLR-1."""

    sentence: str
    retryable: bool
    typed: tuple[str, ...] = ()
    """Callboard's own codes."""
    statuses: tuple[int, ...] = ()
    """Of HTTP."""
    errnos: tuple[int, ...] = ()
    classes: tuple[type[BaseException], ...] = ()
    texts: tuple[str, ...] = ()
    """Parts of a lower-cased text; ` & ` stands between parts that must both be there."""


KINDS: Final[Mapping[Code, Kind]] = MappingProxyType(
    {
        "authentication": Kind(
            "Provider credentials were rejected.",
            False,
            statuses=(401,),
            texts=("unauthorized", "invalid api key", "authentication"),
        ),
        "permission": Kind(
            "The provider denied permission.",
            False,
            statuses=(403,),
            texts=("forbidden", "permission denied"),
        ),
        "rate_limit": Kind(
            "The provider is limiting requests.",
            True,
            statuses=(429,),
            texts=("rate limit", "too many requests"),
        ),
        "timeout": Kind(
            "The operation timed out.",
            True,
            typed=("deadline_exceeded",),
            statuses=(408, 504),
            errnos=(errno.ETIMEDOUT,),
            classes=(TimeoutError,),
            texts=("timed out", "timeout"),
        ),
        "network": Kind(
            "The network connection failed.",
            True,
            errnos=(errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.EHOSTUNREACH),
            classes=(ConnectionError, socket.gaierror),
            texts=("connection", "network"),
        ),
        "model_unavailable": Kind(
            "The model is not available.",
            True,
            statuses=(503, 529),
            texts=("model & not found", "model & unavailable", "model & overloaded"),
        ),
        "context_limit": Kind(
            "The request exceeds the model's context.",
            False,
            typed=("context_overflow",),
            statuses=(413,),
            texts=("context length", "maximum context", "too many tokens"),
        ),
        "unsupported_input": Kind(
            "The input is not supported.",
            False,
            typed=("artifact_invalid", "artifact_store_unsafe"),
            statuses=(415, 422),
            texts=("unsupported",),
        ),
        "capacity": Kind(
            "There is no capacity at the moment.",
            True,
            typed=("overloaded", "inbox_full", "storage_full"),
        ),
        "runtime": Kind("The agent run failed.", True),
    }
)
_RESOURCES: Final[tuple[Resource, ...]] = ("pending_count", "pending_bytes", "resident_sessions")


def failure(code: Code, *, error: str | None = None, resource: Resource | None = None) -> Failure:
    """Make a failure of one code, with its own sentence."""
    kind = KINDS[code]
    return Failure(
        code=code,
        message=kind.sentence,
        retryable=kind.retryable,
        resource=resource if code == "capacity" else None,
        error=error,
    )


def classify(problem: object) -> Failure:
    """Name what went wrong; the first match wins, and whatever cannot be looked at is `runtime`.

    Args:
        problem: an exception, a text, or a failure, which comes back as it is (FLR-2).

    """
    if isinstance(problem, Failure):
        return problem
    try:
        if isinstance(problem, CallboardError):
            return _of_ours(problem)
        code = _by_status(problem) or _by_class(problem) or _by_text(problem)
    except Exception:  # an object whose inspection raises
        return failure("runtime")
    return failure(code or "runtime")


def unusable(problem: object) -> Failure:
    """Name why an agent's function was not found: trying again would change nothing (FLR-3)."""
    cause = classify(problem)
    return failure("runtime", error=cause.error or "not_found").model_copy(
        update={"retryable": False}
    )


def read_failure(value: object) -> Failure:
    """Read a stored failure; one that breaks the list's rules reads as `runtime` (FLR-2)."""
    try:
        stored = Failure.model_validate(value)
    except ValueError:
        return failure("runtime")
    kind = KINDS[stored.code]
    fits = stored.resource is None or stored.code == "capacity"
    return stored if fits and stored.message == kind.sentence else failure("runtime")


def _of_ours(error: CallboardError) -> Failure:
    for code, kind in KINDS.items():
        if error.code in kind.typed:
            resource = error.carried.get("resource")
            named: list[Resource] = [one for one in _RESOURCES if one == resource]
            return failure(code, error=error.code, resource=named[0] if named else None)
    return failure("runtime", error=error.code)


def _by_status(problem: object) -> Code | None:
    status = _status(problem)
    if status is None:
        return None
    if status == 404 and "model" in _text(problem):
        return "model_unavailable"
    return next((code for code, kind in KINDS.items() if status in kind.statuses), None)


def _status(problem: object) -> int | None:
    """Find an HTTP status where client libraries keep it."""
    for holder in (problem, getattr(problem, "response", None)):
        for name in ("status_code", "status"):
            value = getattr(holder, name, None)
            if type(value) is int:
                return value
    return None


def _by_class(problem: object) -> Code | None:
    number = problem.errno if isinstance(problem, OSError) else None
    for code, kind in KINDS.items():
        if isinstance(problem, kind.classes) or (number is not None and number in kind.errnos):
            return code
    return None


def _by_text(problem: object) -> Code | None:
    text = _text(problem)
    for code, kind in KINDS.items():
        if any(all(part in text for part in parts.split(" & ")) for parts in kind.texts):
            return code
    return None


def _text(problem: object) -> str:
    return str(problem)[:FAILURE_TEXT_CHARS_MAX].lower()
