"""The actors' logs: one JSON object a line, bounded, escaped, rotated (FLT-60, DUR-8).

A line holds ids, codes, sizes and times, never content or secrets: the caller sees to that. This
module sees to it that whatever it is given makes one line of ASCII and ends no process.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from callboard.home import open_state, replace_file
from callboard.limits import LOG_FILE_BYTES_MAX, LOG_FILES_KEPT_MAX, LOG_LINE_CHARS_MAX

Log = Callable[[str, Mapping[str, object]], None]
"""Takes a stable action name and its facts."""
Level = Literal["debug", "info", "warning", "error"]

_RANK: Final = {"debug": 0, "info": 1, "warning": 2, "error": 3}
_VALUE_CHARS_MAX: Final = 512


def open_log(path: Path, level: Level = "info") -> Log:
    """Open an actor's log for appending.

    Args:
        path: the file, in the folder `logs` of a home; its older ones are `<path>.1` and so on.
        level: lines whose facts have a lower `level` are left out; without one a line is `info`.

    Returns:
        A function that writes one line; it may be called from any thread, and a full or broken
        disk makes it drop lines, never raise.

    """
    return _LogFile(path, _RANK[level]).write


class _LogFile:
    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._lock = threading.Lock()
        self._fd = -1
        self._size = 0
        self._pid = os.getpid()

    def write(self, action: str, facts: Mapping[str, object]) -> None:
        if _RANK.get(str(facts.get("level", "info")), 1) < self._rank:
            return
        line = log_line(time.time_ns() // 1_000, self._pid, action, facts)
        with self._lock:
            try:
                self._append(line)
            except Exception:  # a log never ends its process (FLT-3 is for durable state)
                self._close()

    def _append(self, line: bytes) -> None:
        if self._fd < 0:
            self._open()
        if self._size + len(line) > LOG_FILE_BYTES_MAX:
            self._rotate()
        self._size += os.write(self._fd, line)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._fd = open_state(self._path, flags)
        self._size = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        self._close()
        names = [self._path, *(_older(self._path, n) for n in range(1, LOG_FILES_KEPT_MAX))]
        for newer, older in reversed(list(pairwise(names))):
            if newer.exists():
                replace_file(newer, older)
        self._open()

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _older(path: Path, n: int) -> Path:
    return path.with_name(f"{path.name}.{n}")


def log_line(at: int, pid: int, action: str, facts: Mapping[str, object]) -> bytes:
    """Spell one line, at most LOG_LINE_CHARS_MAX characters of ASCII and its LF.

    Args:
        at: microseconds since the epoch.
        pid: the process that writes it.
        action: a stable name.
        facts: what belongs to it; what is no JSON value is named by its type.

    """
    head: dict[str, object] = {"at": at, "pid": pid, "action": action[:_VALUE_CHARS_MAX]}
    fields = {**facts, **head}
    text = _spell({**head, **{str(k): v for k, v in fields.items()}})
    if len(text) >= LOG_LINE_CHARS_MAX:
        text = _spell({**head, **{str(k)[:64]: _short(v) for k, v in list(facts.items())[:24]}})
    if len(text) >= LOG_LINE_CHARS_MAX:
        text = _spell({**head, "action": action[:64], "cut": True})
    return text.encode("ascii") + b"\n"


def _spell(fields: Mapping[str, object]) -> str:
    try:
        text = json.dumps(fields, separators=(",", ":"), default=_type_name, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        known = {"at": fields["at"], "pid": fields["pid"], "action": fields["action"]}
        text = json.dumps({**known, "cut": True}, separators=(",", ":"))
    return text.replace("\x7f", "\\u007f")


def _short(value: object) -> object:
    if isinstance(value, bool | int | float) or value is None:
        return value if len(repr(value)) <= 32 else _type_name(value)
    return str(value)[:80] if isinstance(value, str) else _type_name(value)


def _type_name(value: object) -> str:
    return f"<{type(value).__name__}>"
