"""Cursors: where a walk over a listing goes on, as a token that only its home can have made.

Pure. A token is base64url without padding of 16 tag bytes and a payload (CUR-1). It is a position
and never an authority: every page is scoped by its own caller (CUR-5).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from callboard.errors import CursorInvalid, CursorScopeMismatch, InvalidRequest
from callboard.ids import SessionRef, parse_ref
from callboard.limits import CURSOR_CHARS_MAX
from callboard.records import canonical, digest

Kind = Literal["catalog", "search"]

VERSION: Final = 2
_TAG_BYTES: Final = 16
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]+\Z")


class Cursor(NamedTuple):
    """The last row that a page returned, and the walk that it belongs to."""

    kind: Kind
    scope: str
    """What is walked: `scope_digest` of the query."""
    as_of: int
    """The commit that fixes membership and order."""
    activity_at: int
    """The row's last activity at `as_of`, in µs."""
    ref: SessionRef


class _Payload(BaseModel):
    """What a token says, each field by its one letter (CUR-1a)."""

    model_config = ConfigDict(strict=True, extra="forbid")
    a: Annotated[int, Field(ge=0)]
    as_of: Annotated[int, Field(ge=0)]
    k: Kind
    q: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    s: str
    v: Literal[2]
    w: str


def scope_digest(scope: Mapping[str, object]) -> str:
    """Digest what a walk ranges over, so that a cursor of another walk is noticed (CUR-2)."""
    return digest(dict(scope))[:16]


def encode(cursor: Cursor, key: bytes) -> str:
    """Spell a cursor as a token.

    Args:
        cursor: the position.
        key: the 32 bytes `cursor_key` of the home.

    """
    payload = canonical(
        {
            "a": cursor.activity_at,
            "as_of": cursor.as_of,
            "k": cursor.kind,
            "q": cursor.scope,
            "s": cursor.ref.session_id,
            "v": VERSION,
            "w": cursor.ref.workspace_key,
        }
    )
    return base64.urlsafe_b64encode(_tag(key, payload) + payload).rstrip(b"=").decode()


def decode(token: str, key: bytes, *, kind: Kind, scope: str, last_commit: int) -> Cursor:
    """Read a token that a caller hands back.

    Args:
        token: anything.
        key: the 32 bytes `cursor_key` of the home.
        kind: what is being walked.
        scope: `scope_digest` of the query that goes on.
        last_commit: the greatest commit of the home.

    Raises:
        CursorInvalid: it is no token of this home (CUR-3).
        CursorScopeMismatch: it belongs to another query (CUR-2).

    """
    cursor = _read(_open(token, key))
    if cursor.as_of > last_commit or encode(cursor, key) != token:
        raise CursorInvalid
    if (cursor.kind, cursor.scope) != (kind, scope):
        raise CursorScopeMismatch
    return cursor


def _tag(key: bytes, payload: bytes) -> bytes:
    return hmac.new(key, payload, hashlib.sha256).digest()[:_TAG_BYTES]


def _open(token: str, key: bytes) -> bytes:
    """Give the payload of a token whose tag is right."""
    if len(token) > CURSOR_CHARS_MAX or not _TOKEN.match(token) or len(token) % 4 == 1:
        raise CursorInvalid
    data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    tag, payload = data[:_TAG_BYTES], data[_TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(key, payload)):
        raise CursorInvalid
    return payload


def _read(payload: bytes) -> Cursor:
    try:
        value = _Payload.model_validate_json(payload)
        ref = parse_ref(f"{value.w}/{value.s}")
    except (ValidationError, InvalidRequest):
        raise CursorInvalid from None
    return Cursor(value.k, value.q, value.as_of, value.a, ref)
