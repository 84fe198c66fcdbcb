"""Crash states of a real program, from one strace recording, under an abstract disk.

For docs/spec/reliability.md RLB-2, FLT-15 and FLT-17; taken over from the fault kit's alice_lite.
After every traced call that changes something, folders are built as a crash could leave them:

    data    every write since that file's last fsync or fdatasync is kept, lost, or torn at a
            512-byte boundary, each by itself; a lost write under a later kept one reads as zeros
    names   what was created, renamed or removed in a folder survives up to the last fsync of that
            folder, plus an ordered part of what came later

It finds what a real file system hides, and needs no root, mount or device. Promises are `ACK n`
lines that the program writes to its standard output when it has promised n. One process tree; no
mmap stores, no io_uring.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import pytest

CALLS: Final = (
    "openat,open,close,write,pwrite64,ftruncate,rename,renameat,renameat2,unlink,unlinkat,"
    "mkdir,mkdirat,rmdir,fsync,fdatasync"
)
_STRING: Final = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(?:\.\.\.)?')
_CALL: Final = re.compile(r"^(\w+)\((.*)\)\s+= (-?\d+|0x[0-9a-f]+)")
SECTOR: Final = 512


class Change(NamedTuple):
    """A write, or a cut without bytes."""

    offset: int
    data: bytes | None


@dataclass
class File:
    """Bytes on the disk, changes not yet synced, and the size that the program sees."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list[Change])

    def sync(self) -> None:
        for change in self.pending:
            apply(self.durable, change)
        self.pending = []


FOLDER: Final = File()


class Name(NamedTuple):
    """A change of a name; `file` is none where it goes away."""

    path: str
    file: File | None
    old: str = ""


def apply(data: bytearray, change: Change) -> None:
    """Apply a change to a file's bytes."""
    if change.data is None and len(data) > change.offset:
        del data[change.offset :]
    if len(data) < change.offset:
        data.extend(bytes(change.offset - len(data)))
    if change.data is not None:
        data[change.offset : change.offset + len(change.data)] = change.data


def apply_name(names: dict[str, File], change: Name) -> None:
    """Apply a change to the names."""
    if change.old:
        names.pop(change.old, None)
    if change.file is None:
        names.pop(change.path, None)
    else:
        names[change.path] = change.file


def record(command: Sequence[str], trace: Path) -> int:
    """Run a program under strace with every string in full; skips the test without strace."""
    if shutil.which("strace") is None:
        pytest.skip("no strace")
    options = ["-f", "-xx", "-s", "100000000", "-e", f"trace={CALLS}", "-e", "signal=none"]
    done = subprocess.run(
        ["strace", *options, "-o", str(trace), *command], stdout=subprocess.DEVNULL
    )
    return done.returncode


def calls(trace: Path) -> Iterator[tuple[int, str, str, int]]:
    """Yield (pid, call, arguments, result) in the order in which the calls returned."""
    unfinished: dict[int, str] = {}
    with trace.open(encoding="latin1") as file:
        for row in file:
            pid_text, _, rest = row.rstrip("\n").partition(" ")
            if not pid_text.isdigit():
                continue
            pid, rest = int(pid_text), rest.lstrip()
            if rest.endswith("<unfinished ...>"):
                unfinished[pid] = rest.removesuffix("<unfinished ...>").rstrip()
                continue
            if resumed := re.match(r"^<\.\.\. \w+ resumed>(.*)$", rest):
                rest = unfinished.pop(pid, "") + resumed[1]
            if found := _CALL.match(rest):
                yield pid, found[1], found[2], int(found[3], 0)


class Model:
    """The disk as the traced calls left it, and what was promised so far."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.names: dict[str, File] = {root: FOLDER}
        self.durable: dict[str, File] = {root: FOLDER}
        self.pending: list[Name] = []
        self.fds: dict[int, tuple[str, File]] = {}
        self.offsets: dict[int, int] = {}
        self.promised: list[int] = []

    def feed(self, call: str, arguments: str, result: int) -> bool:
        """Take one call; true when a crash right after it can look different."""
        if result < 0:
            return False
        strings = [bytes.fromhex(text.replace("\\x", "")) for text in _STRING.findall(arguments)]
        numbers = _STRING.sub("S", arguments).split(", ")
        paths = [os.path.normpath(os.fsdecode(one)) for one in strings]
        match call:
            case "open" | "openat":
                return self._open(result, paths[0], arguments)
            case "mkdir" | "mkdirat":
                return self._change(Name(paths[0], FOLDER))
            case "rename" | "renameat" | "renameat2":
                file = self.names.get(paths[0])
                return file is not None and self._change(Name(paths[1], file, paths[0]))
            case "unlink" | "unlinkat" | "rmdir":
                return self._change(Name(paths[0], None))
            case _:
                return self._descriptor(call, int(numbers[0]), numbers, strings, result)

    def _change(self, change: Name) -> bool:
        if not change.path.startswith(self.root + "/"):
            return False
        apply_name(self.names, change)
        self.pending.append(change)
        return True

    def _open(self, fd: int, path: str, flags: str) -> bool:
        self.fds.pop(fd, None)
        if not (path == self.root or path.startswith(self.root + "/")):
            return False
        changed = False
        if path not in self.names:
            assert "O_CREAT" in flags, path
            changed = self._change(Name(path, File()))
        assert "O_APPEND" not in flags or path.endswith(".log")
        self.fds[fd] = path, self.names[path]
        self.offsets[fd] = 0
        return changed

    def _descriptor(
        self, call: str, fd: int, numbers: list[str], strings: list[bytes], result: int
    ) -> bool:
        if call == "write" and fd == 1:
            words = b"".join(strings).split()
            self.promised += [int(word) for word in words if word.isdigit()]
            return True
        if call == "close":
            self.fds.pop(fd, None)
            return False
        if fd not in self.fds:
            return False
        path, file = self.fds[fd]
        if call in ("write", "pwrite64"):
            offset = int(numbers[-1]) if call == "pwrite64" else self.offsets[fd]
            file.pending.append(Change(offset, b"".join(strings)[:result]))
            self.offsets[fd] = offset + result
        elif call == "ftruncate":
            file.pending.append(Change(int(numbers[1]), None))
        elif file is FOLDER:
            for change in [one for one in self.pending if path in _folders(one)]:
                apply_name(self.durable, change)
                self.pending.remove(change)
        else:
            file.sync()
        return True

    def crash(self, target: Path, how: str, rng: random.Random) -> None:
        """Build one state: none of what is unsynced, all of it, or a drawn part."""
        names = dict(self.durable)
        count = {"none": 0, "all": len(self.pending)}.get(how)
        for change in self.pending[: rng.randint(0, len(self.pending)) if count is None else count]:
            apply_name(names, change)
        for path in sorted(names):
            place = target / path[len(self.root) + 1 :]
            if not place.parent.is_dir() or path == self.root:
                continue  # the folder's own name was lost
            if names[path] is FOLDER:
                place.mkdir(0o700, exist_ok=True)
            else:
                place.write_bytes(_survivors(names[path], how, rng))
                place.chmod(0o600)


def _folders(change: Name) -> set[str]:
    return {os.path.dirname(path) for path in (change.path, change.old) if path}


def _survivors(file: File, how: str, rng: random.Random) -> bytes:
    data = bytearray(file.durable)
    for change in file.pending:
        if how == "none" or (how == "drawn" and rng.random() < 0.5):
            continue
        kept = change
        if how == "drawn" and change.data is not None and rng.random() < 0.3:
            size = -change.offset % SECTOR + SECTOR * rng.randint(0, len(change.data) // SECTOR)
            kept = Change(change.offset, change.data[: max(1, min(size, len(change.data)))])
        apply(data, kept)
    return bytes(data)


def explore(
    root: Path,
    command: Sequence[str],
    check: Callable[[Path, list[int]], None],
    work: Path,
    *,
    drawn: int,
    seed: int,
) -> tuple[int, int]:
    """Record a program once and judge its crash states.

    Args:
        root: the folder that it writes; it must not exist.
        command: the program.
        check: gets a folder as a crash left it and what was promised; raises if that is wrong.
        work: a folder for the states.
        drawn: how many states with drawn survivors there are for each call, beside none and all.
        seed: of what is drawn.

    Returns:
        How many states there were, and how many promises.

    """
    root.mkdir(parents=True)
    assert record(command, work / "trace") == 0
    model, rng, states = Model(os.path.realpath(root)), random.Random(seed), 0
    for number, (_, call, arguments, result) in enumerate(calls(work / "trace")):
        if not model.feed(call, arguments, result):
            continue
        for how in ["none", "all", *["drawn"] * drawn]:
            state = work / "state"
            shutil.rmtree(state, ignore_errors=True)
            state.mkdir(0o700)
            model.crash(state, how, rng)
            states += 1
            try:
                check(state, list(model.promised))
            except Exception as error:
                error.add_note(f"after call {number}, {call}, {how} of what was unsynced")
                raise
    return states, len(model.promised)
