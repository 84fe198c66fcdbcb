"""Every home that a test leaves behind is whole: `callboard verify` finds nothing in it (O5)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from callboard.storage.verify import verify

_DEPTH = 3


def homes_in(folder: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Every home at most so deep in a folder."""
    if (folder / "format.json").is_file():
        yield folder
        return
    if not depth or folder.is_symlink():
        return
    with os.scandir(folder) as entries:
        inside = sorted(Path(one.path) for one in entries if one.is_dir(follow_symlinks=False))
    for one in inside:
        yield from homes_in(one, depth - 1)


def complaints(folder: Path) -> list[str]:
    """What is wrong with the homes in a folder."""
    if not folder.is_dir():
        return []
    return [f"{home}: {one.text()}" for home in homes_in(folder) for one in verify(home)]


def judge(folder: Path) -> None:
    """Fail if anything is wrong with a home in a folder."""
    found = complaints(folder)
    if found:
        raise AssertionError("\n".join(("verify finds:", *found)))


@contextmanager
def short_folder(*, whole: bool = True) -> Generator[Path]:
    """A folder whose path is short enough for sockets; the homes in it must be whole at its end.

    Args:
        whole: false for a test that damages its home.

    """
    folder = Path(tempfile.mkdtemp(prefix="cb", dir="/tmp"))
    try:
        yield folder
        if whole:
            judge(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
