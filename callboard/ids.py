"""Names of things: sessions, workspaces, records, turns, messages.

Pure but for `fresh_id`, which draws its randomness from the operating system. Shapes are those of
the lifecycle page, section 1, and of the runtime page's "ids" row.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from typing import Final, NamedTuple

from callboard.errors import InvalidRequest
from callboard.limits import (
    MESSAGE_ID_CHARS_MAX,
    WORKSPACE_PATH_BYTES_MAX,
    WORKSPACE_SLUG_CHARS_MAX,
)

_SESSION_ID: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\Z")
_WORKSPACE_KEY: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?-[0-9a-f]{32}\Z")
_MESSAGE_ID: Final = re.compile(rf"[A-Za-z0-9._:@-]{{1,{MESSAGE_ID_CHARS_MAX}}}\Z")
_HEX32: Final = re.compile(r"[0-9a-f]{32}\Z")
_CROCKFORD: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS: Final = tuple(first + second for first in _CROCKFORD for second in _CROCKFORD)


class SessionRef(NamedTuple):
    """The only identity of a session: a bare session id is a search term, never an identity."""

    workspace_key: str
    session_id: str

    def __str__(self) -> str:
        """Give the text form `<workspace_key>/<session_id>`, used on the wire and in logs."""
        return f"{self.workspace_key}/{self.session_id}"


def parse_ref(text: str) -> SessionRef:
    """Read the text form of a SessionRef.

    Raises:
        InvalidRequest: the key or the id does not fit its grammar (IDN-2); no I/O is done.

    """
    key, slash, session_id = text.partition("/")
    if not slash or not _WORKSPACE_KEY.match(key):
        raise InvalidRequest(field="workspace", reason="format")
    return SessionRef(key, check_session_id(session_id))


def check_session_id(text: str) -> str:
    """Return a session id that fits the grammar, or refuse it (IDN-2)."""
    if not _SESSION_ID.match(text) or text in (".", ".."):
        raise InvalidRequest(field="session_id", reason="format" if text else "empty")
    return text


def check_message_id(text: str) -> str:
    """Return a message id that fits the grammar, or refuse it (runtime page, section 9)."""
    if not _MESSAGE_ID.match(text):
        raise InvalidRequest(field="message_id", reason="format" if text else "empty")
    return text


def is_record_id(text: str) -> bool:
    """Tell whether a text is a record id: 32 lower-case hex digits."""
    return bool(_HEX32.match(text))


def canonical_workspace(path: str) -> str:
    """Return the canonical absolute path of a workspace that may no longer exist.

    Symlinks are resolved, `.` and `..` removed; of a missing path the deepest existing ancestor
    is resolved and the rest kept as it is.

    Raises:
        InvalidRequest: the path is not absolute, holds NUL, or is too long (IDN-2).

    """
    if "\0" in path:
        raise InvalidRequest(field="workspace", reason="nul")
    if not os.path.isabs(path):
        raise InvalidRequest(field="workspace", reason="format")
    if len(os.fsencode(path)) > WORKSPACE_PATH_BYTES_MAX:
        raise InvalidRequest(field="workspace", reason="too_long")
    return os.path.realpath(path)


def workspace_key(path: str) -> str:
    """Compute the key of a canonical workspace path: a readable slug and a hash (IDN-3).

    Args:
        path: a canonical absolute path, as `canonical_workspace` returns it.

    """
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    tail = path.rstrip("/").rpartition("/")[2]
    lowered = "".join(c.lower() if c.isascii() else c for c in tail)
    slug = re.sub(r"[^a-z0-9]+", "-", lowered).strip("-")
    slug = slug[:WORKSPACE_SLUG_CHARS_MAX].strip("-")
    return f"{slug or 'ws'}-{digest}"


def ulid(milliseconds: int, randomness: bytes) -> str:
    """Spell a 26-character lower-case ULID.

    Args:
        milliseconds: time since the epoch, 48 bits.
        randomness: 10 bytes.

    """
    return _spell((milliseconds & (1 << 48) - 1) << 80 | int.from_bytes(randomness, "big"))


def _spell(number: int) -> str:
    """Spell 130 bits, two characters at a time."""
    return "".join([_PAIRS[number >> shift & 1023] for shift in range(120, -10, -10)])


def fresh_ulid() -> str:
    """Make a new ULID from the wall clock and the operating system's randomness."""
    return ulid(time.time_ns() // 1_000_000, os.urandom(10))


def next_ulid(after: str) -> str:
    """Make a new ULID that sorts above `after`, whatever the clock says.

    Turn ids of a session rise strictly, so that "this turn has ended" needs no list of turns.

    Args:
        after: a ULID, or the empty text for none.

    """
    made = fresh_ulid()
    if made > after:
        return made
    number = 0
    for char in after:
        number = number << 5 | _CROCKFORD.index(char)
    return _spell(number + 1)


def fresh_id() -> str:
    """Make a new record id, nonce or request id: 128 random bits as 32 hex digits."""
    return os.urandom(16).hex()


def derived_id(key: str, index: int = 0) -> str:
    """Derive a record id from an idempotency key, so that a retry carries the same ids.

    Args:
        key: any text that names the operation.
        index: the position of the record in its frame.

    """
    return hashlib.sha256(f"{key}\0{index}".encode()).hexdigest()[:32]
