"""Filling the holes in this process's memory before others are forked from it.

CPython takes small objects from pools of one size, and a new object goes into a hole of an old
pool first. In a forked process that writes to a page it shared with its parent and siblings. With
the holes filled a child's objects lie close together on pages of its own (ADR 0045).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Final

_CLASS: Final = re.compile(
    r"^ *\d+ +(?P<size>\d+) +\d+ +\d+ +(?P<holes>\d+) *$", re.MULTILINE | re.ASCII
)
_REPORT_BYTES_MAX: Final = 262_144
_BYTES_HEAD: Final = sys.getsizeof(b"")

_fillers: list[object] = []


def fill_holes() -> int:
    """Put an object into each hole, for the rest of this process's life.

    Returns:
        How many there were; 0 where the interpreter keeps its memory in another way.

    """
    before = len(_fillers)
    for size, holes in holes_by_size(_report()):
        make = _maker(size)
        _fillers.extend(make() for _ in range(holes))
    return len(_fillers) - before


def holes_by_size(report: str) -> Iterator[tuple[int, int]]:
    """Read (size of an object in bytes, free places) out of the allocator's report."""
    for found in _CLASS.finditer(report):
        yield int(found["size"]), int(found["holes"])


def _maker(size: int) -> Callable[[], object]:
    """Give what makes an object that takes a place of this size."""
    if size <= sys.getsizeof(object()):
        return object
    if size < _BYTES_HEAD:
        return lambda: float("0.5")
    return lambda: bytes(size - _BYTES_HEAD)


def _report() -> str:
    """Let the interpreter describe its memory; it only ever prints that, to descriptor 2."""
    describe = getattr(sys, "_debugmallocstats", None)
    if describe is None:
        return ""
    kept, file = os.dup(2), os.memfd_create("report", os.MFD_CLOEXEC)
    try:
        os.dup2(file, 2)
        describe()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        text = os.pread(file, _REPORT_BYTES_MAX, 0)
        os.close(file)
    return text.decode("ascii", "replace")
