"""Looks at every name below a home: who makes files of this name, whose it is, and its mode.

Opens nothing and follows nothing; the names of one folder are in memory at a time.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from callboard.storage.findings import Finding
from callboard.storage.source import is_ref

Sort = Literal["file", "folder", "shared", "any"]
"""`shared` is a file that may have several names; `any` is not looked into (sockets among them)."""
FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
_TEMPORARY: Final = r"\..+\.tmp"


class Rule(NamedTuple):
    """Which names a folder may hold."""

    pattern: re.Pattern[str]
    sort: Sort
    inside: str = ""
    """The folder's own place in `PLACES`; empty where nothing inside is judged by its name."""


def _rules(*rules: tuple[str, Sort, str]) -> tuple[Rule, ...]:
    return tuple(
        Rule(re.compile(rf"(?:{text})\Z", re.DOTALL), sort, to) for text, sort, to in rules
    )


_ARTIFACTS: Final = _rules(
    (r"[0-9a-f]{64}", "shared", ""), (r"\.[0-9a-f]{64}\..*\.tmp", "file", "")
)
PLACES: Final[Mapping[str, tuple[Rule, ...]]] = MappingProxyType(
    {
        "home": _rules(
            (r"format\.json|home\.lock", "file", ""),
            (r"index\.sqlite3(?:-wal|-shm|-journal)?|index\.new\.sqlite3(?:-journal)?", "file", ""),
            (r"index\.bad-\d+", "folder", "anything"),
            ("journal", "folder", "journal"),
            ("sessions", "folder", "sessions"),
            ("plane", "folder", "plane"),
            ("trash", "folder", "trash"),
            ("aside", "folder", "anything"),
            ("logs", "folder", "logs"),
            ("run", "folder", "run"),
            (_TEMPORARY, "file", ""),
        ),
        "journal": _rules((r"\d{4,}\.log|reserve|writer\.lock", "file", "")),
        "sessions": _rules((r".+", "folder", "workspace")),
        "workspace": _rules(
            (r"tombstones\.jsonl", "file", ""),
            (r"\.(?:staged|trash)-.+", "folder", "anything"),
            (r".+", "folder", "session"),
        ),
        "session": _rules(
            (r"(?:transcript|inbox|outbox|tasks)\.jsonl|lease\.json", "file", ""),
            ("artifacts|snapshots", "folder", "artifacts"),
            (_TEMPORARY, "file", ""),
        ),
        "artifacts": _ARTIFACTS,
        "plane": _rules(
            (r"(?:plane|audit)\.jsonl(?:\.\d+)?", "file", ""), ("artifacts", "folder", "artifacts")
        ),
        "trash": _rules((r".+\.tar\.zst", "file", ""), (_TEMPORARY, "file", "")),
        "logs": _rules((r".+\.(?:log|trace)(?:\.\d+)?", "file", "")),
        "run": _rules(
            (r"door\.sock|door\.lock", "any", ""),
            (r"durable|operator\.token", "file", ""),
            ("bus|actors", "folder", "sockets"),
            (_TEMPORARY, "file", ""),
        ),
        "sockets": _rules((r".+", "any", "")),
        "anything": _rules((r".+", "any", "anything")),
    }
)


def look_around(root: str, uid: int, place: str = "home", name: str = "") -> Iterator[Finding]:
    """Judge every name below a folder, and the folder itself.

    Args:
        root: the folder's path.
        uid: who must own everything.
        place: which rules hold in it.
        name: what findings call it; empty for a home.

    """
    try:
        found = os.lstat(root)
    except FileNotFoundError:
        return
    finding = _judge(found, name or ".", "folder", uid)
    if finding is not None:
        yield finding
    if finding is None or finding.kind == "wrong_mode":
        yield from _inside(root, uid, place, f"{name}/" if name else "", _TOP)


_TOP: Final = 8
"""Folders of a home lie no deeper than this; what is set aside may, and is not looked into."""


def _inside(root: str, uid: int, place: str, prefix: str, depth: int) -> Iterator[Finding]:
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return
    except OSError as error:
        yield Finding("unreadable", prefix.rstrip("/") or ".", detail=type(error).__name__)
        return
    if place == "workspace":
        yield from _twins(names, prefix)
    for name in names:
        yield from _one(f"{root}/{name}", name, uid, place, prefix, depth)


def _one(path: str, name: str, uid: int, place: str, prefix: str, depth: int) -> Iterator[Finding]:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return  # it was renamed or removed by its writer meanwhile
    shown = prefix + name
    rule = next((rule for rule in PLACES[place] if rule.pattern.match(name)), None)
    if rule is None or not _fits(place, prefix, name):
        yield Finding("foreign_file", shown)
        return
    finding = _judge(found, shown, rule.sort, uid)
    if finding is not None:
        yield finding
    is_folder = stat.S_ISDIR(found.st_mode)
    if is_folder and depth and rule.inside and (finding is None or finding.kind == "wrong_mode"):
        yield from _inside(path, uid, rule.inside, f"{shown}/", depth - 1)


_FITS: Final[Mapping[str, Callable[[str, str], bool]]] = MappingProxyType(
    {
        "sessions": lambda _, name: is_ref(name, "x"),
        "workspace": lambda prefix, name: (
            name.startswith(".")
            or name == "tombstones.jsonl"
            or is_ref(prefix.rstrip("/").rpartition("/")[2], name)
        ),
    }
)


def _fits(place: str, prefix: str, name: str) -> bool:
    fits = _FITS.get(place)
    return fits is None or fits(prefix, name)


def _judge(found: os.stat_result, shown: str, sort: Sort, uid: int) -> Finding | None:
    kind = found.st_mode
    if found.st_uid != uid:
        return Finding("not_ours", shown, detail="owner")
    if sort == "any":
        mode = FOLDER_MODE if stat.S_ISDIR(kind) else FILE_MODE
        loose = not stat.S_ISLNK(kind) and kind & 0o077
        return Finding("wrong_mode", shown, detail=_modes(kind, mode)) if loose else None
    if sort == "folder":
        if not stat.S_ISDIR(kind):
            return Finding("not_ours", shown, detail="not_directory")
        return _judge_mode(kind, shown, FOLDER_MODE)
    if not stat.S_ISREG(kind):
        return Finding("not_ours", shown, detail="not_regular")
    if sort == "file" and found.st_nlink > 1:
        return Finding("not_ours", shown, detail="links")
    return _judge_mode(kind, shown, FILE_MODE)


def _judge_mode(kind: int, shown: str, mode: int) -> Finding | None:
    if stat.S_IMODE(kind) == mode:
        return None
    return Finding("wrong_mode", shown, detail=_modes(kind, mode))


def _modes(kind: int, mode: int) -> str:
    return f"{stat.S_IMODE(kind):04o} where {mode:04o} should be"


def _twins(names: list[str], prefix: str) -> Iterator[Finding]:
    """Notice sessions whose ids differ in case only (IDN-6)."""
    seen: dict[str, str] = {}
    for name in names:
        if seen.setdefault(name.casefold(), name) != name:
            yield Finding("case_twin", prefix + name, detail=seen[name.casefold()])
