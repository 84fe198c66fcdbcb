"""What a client was promised, kept outside the home that promised it: `<home>.oracle.jsonl`.

One line a receipt, written by one call, before the client does anything else. So whatever is killed
afterwards, the file holds what had been promised until then, in the order of the promises.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from callboard.errors import InvalidRequest
from callboard.home import create_file, write_all


class Entry(NamedTuple):
    """One receipt."""

    session: str
    """The session's reference as text."""
    n: int
    """Its number among the receipts of its session, from 1."""
    message_id: str
    digest: str
    """Of what was sent, computed by the sender (INB-6)."""
    at: int
    """When the receipt came, microseconds since the epoch."""


def beside(home: Path, suffix: str) -> Path:
    """Name a file beside a home."""
    return home.with_name(home.name + suffix)


def oracle_of(home: Path) -> Path:
    """Name the oracle file of a home."""
    return beside(home, ".oracle.jsonl")


class OracleFile:
    """The oracle file while it is being written; it must not exist before."""

    def __init__(self, path: Path) -> None:
        self._fd = create_file(path)
        self._numbers: dict[str, int] = {}

    def write(self, session: str, message_id: str, digest: str, at: int) -> None:
        """Add a receipt."""
        n = self._numbers[session] = self._numbers.get(session, 0) + 1
        entry = Entry(session, n, message_id, digest, at)
        write_all(self._fd, json.dumps(entry._asdict(), separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """End it."""
        os.close(self._fd)


def read_oracle(path: Path) -> list[Entry]:
    """Read an oracle file. A last line that was cut off is no promise: its writer died in it.

    Raises:
        InvalidRequest: there is none, or a line of it is none of ours.

    """
    try:
        *lines, _cut = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidRequest(
            f"There is no {path.name} beside this home, so nothing to compare it with.",
            field="verify_home",
            reason="missing",
        ) from None
    try:
        return [_entry(line) for line in lines]
    except (ValueError, TypeError, KeyError):
        raise InvalidRequest(
            f"{path.name} is no oracle file of the demo.", field="verify_home", reason="format"
        ) from None


def _entry(line: bytes) -> Entry:
    entry = Entry(**json.loads(line))
    kinds = (str, int, str, str, int)
    if not all(type(value) is kind for value, kind in zip(entry, kinds, strict=True)):
        raise TypeError
    return entry
