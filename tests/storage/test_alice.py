"""Crash states of the engine on real files, from the calls that it really made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from callboard.home import What
from callboard.ids import fresh_id
from callboard.storage.disk import RealDisk
from callboard.storage.recovery import recover
from tests.faults.alice import explore
from tests.storage.second_reader import read_home


class Counted(RealDisk):
    """Knows which descriptors are open: recovery leaves those of the journal to its writer."""

    def __init__(self) -> None:
        self.fds: set[int] = set()

    def open(self, path: str, what: What = "home") -> int:
        fd = super().open(path, what)
        self.fds.add(fd)
        return fd

    def create(self, path: str) -> int:
        fd = super().create(path)
        self.fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.fds.discard(fd)
        super().close(fd)


def check(folder: Path, promised: list[int]) -> None:
    """What was promised is there once the home was recovered, and no law is broken."""
    home = folder / "deep" / "home"
    if not home.exists():
        assert not promised
        return
    disk = Counted()
    recover(disk, str(home), fresh_id, 64)
    for fd in list(disk.fds):
        disk.close(fd)
    files = {
        f"/home/{path.relative_to(home)}": path.read_bytes()
        for path in home.rglob("*")
        if path.is_file()
    }
    found = read_home(files)
    have = {name for seen in found.values() for name in [*seen.live, *seen.discarded]}
    assert {f"m{number}" for number in promised} <= have


@pytest.mark.rule("FLT-15", "FLT-17", "FLT-10", "F33")
def test_no_state_that_a_power_cut_may_leave_breaks_a_promise(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.storage_program", str(tmp_path / "root")]
    states, promises = explore(tmp_path / "root", command, check, tmp_path, drawn=1, seed=1)
    assert promises == 15
    assert states > 400
