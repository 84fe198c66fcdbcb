"""The storage engine's door to files: each call that can fail, be short or be lost.

`RealDisk` is the operating system; tests and the simulator put their own in its place. Paths are
absolute. Nothing here retries, loops or syncs on its own, but for `write_all`.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import Final, NamedTuple, NoReturn, Protocol

from callboard import home

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write that mean: no room; anything else poisons (FLT-3)."""
_COPY: Final = 1 << 20


class Found(NamedTuple):
    """What a name stands for."""

    regular: bool
    directory: bool
    size: int


class Disk(Protocol):
    """What the engine does to files. Errors are OSError, and HomeUnsafe from `open`."""

    def listdir(self, path: str) -> list[str]:
        """List the names in a directory, sorted; FileNotFoundError if there is none."""
        ...

    def stat(self, path: str) -> Found | None:
        """Look at a name without following it; none if it is absent."""
        ...

    def open(self, path: str, what: home.What = "home") -> int:
        """Open a state file for reading and writing by the rules of FLT-50."""
        ...

    def open_shared(self, path: str) -> int:
        """Open a file that may have several names, for reading; HomeUnsafe if it is not ours alone.

        A looser mode is not tightened here but refused (ART-8).
        """
        ...

    def check_folder(self, path: str) -> None:
        """Refuse, as HomeUnsafe, a folder that is not a real one of our own, 0700 (ART-8)."""
        ...

    def create(self, path: str) -> int:
        """Create a file that must not exist, 0600, open for reading and writing."""
        ...

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        ...

    def size(self, fd: int) -> int:
        """Give a file's length in bytes."""
        ...

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """Read up to `size` bytes; empty at the end."""
        ...

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write some of the bytes, at least one; returns how many."""
        ...

    def truncate(self, fd: int, size: int) -> None:
        """Cut a file, or lengthen it with zeros."""
        ...

    def allocate(self, fd: int, size: int) -> None:
        """Give a file blocks for so many bytes from its beginning; OSError if there are none."""
        ...

    def free(self, path: str) -> int:
        """Count the bytes that this user may still write where a folder lies."""
        ...

    def datasync(self, fd: int) -> None:
        """Make a file's bytes and its length durable."""
        ...

    def sync(self, fd: int) -> None:
        """Make a new file durable; its name is not."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""
        ...

    def mkdir(self, path: str) -> list[str]:
        """Create a directory, 0700, and its missing parents; returns those made, outermost first.

        Their names are durable after `sync_dir` of their parents.
        """
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in place of what had it."""
        ...

    def link(self, old: str, new: str) -> None:
        """Give a file one more name, which nothing may have: FileExistsError."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a name."""
        ...


class RealDisk:
    """The operating system's files."""

    def listdir(self, path: str) -> list[str]:
        """See Disk."""
        return sorted(os.listdir(path))

    def stat(self, path: str) -> Found | None:
        """See Disk."""
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        kind = found.st_mode
        return Found(stat.S_ISREG(kind), stat.S_ISDIR(kind), found.st_size)

    def open(self, path: str, what: home.What = "home") -> int:
        """See Disk."""
        return home.open_state(Path(path), os.O_RDWR, what=what)

    def open_shared(self, path: str) -> int:
        """See Disk."""
        return home.open_shared(Path(path))

    def check_folder(self, path: str) -> None:
        """See Disk."""
        home.check_private(Path(path))

    def create(self, path: str) -> int:
        """See Disk."""
        return home.create_file(Path(path))

    def close(self, fd: int) -> None:
        """See Disk."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """See Disk."""
        return os.fstat(fd).st_size

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """See Disk."""
        return os.pread(fd, size, offset)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """See Disk."""
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        """See Disk."""
        os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        """See Disk."""
        os.posix_fallocate(fd, 0, size)

    def free(self, path: str) -> int:
        """See Disk."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def datasync(self, fd: int) -> None:
        """See Disk."""
        os.fdatasync(fd)

    def sync(self, fd: int) -> None:
        """See Disk."""
        os.fsync(fd)

    def sync_dir(self, path: str) -> None:
        """See Disk."""
        home.sync_directory(Path(path))

    def mkdir(self, path: str) -> list[str]:
        """See Disk."""
        return [str(one) for one in home.make_directories(Path(path), durable=False)]

    def rename(self, old: str, new: str) -> None:
        """See Disk."""
        home.replace_file(Path(old), Path(new))

    def link(self, old: str, new: str) -> None:
        """See Disk."""
        home.link_file(Path(old), Path(new))

    def unlink(self, path: str) -> None:
        """See Disk."""
        home.remove_file(Path(path))


class Clock(Protocol):
    """Time, as far as the engine needs it."""

    def now_us(self) -> int:
        """Give the wall clock in microseconds since the epoch; it stamps and orders nothing."""
        ...

    def monotonic(self) -> float:
        """Give seconds that only rise."""
        ...


class RealClock:
    """The operating system's clocks."""

    def now_us(self) -> int:
        """See Clock."""
        return time.time_ns() // 1_000

    def monotonic(self) -> float:
        """See Clock."""
        return time.monotonic()


class Poisoned(Exception):
    """A write failed for good, or a sync failed: nothing more is answered or touched (FLT-3)."""


class DiskFull(Exception):
    """A write found no room; what it left is cut back (FLT-20)."""


def poison(action: str, error: OSError) -> NoReturn:
    """End all work on this home.

    Raises:
        Poisoned: always.

    """
    name = errno.errorcode.get(error.errno or 0, "unknown")
    raise Poisoned(f"{action}: {name}") from error


def write_all(disk: Disk, fd: int, data: bytes, offset: int) -> None:
    """Write at an offset until everything is written (FLT-3a).

    Raises:
        OSError: of the call that failed; a part may be written.

    """
    done = disk.pwrite(fd, data, offset)
    view = memoryview(data)
    while done < len(data):
        wrote = disk.pwrite(fd, view[done:], offset + done)
        if wrote <= 0:
            raise OSError(errno.EIO, "nothing was written")
        done += wrote


def read_all(disk: Disk, path: str, what: home.What = "home") -> bytes:
    """Read a state file whole.

    Raises:
        FileNotFoundError: no such file.
        HomeUnsafe: FLT-50.

    """
    fd = disk.open(path, what)
    try:
        pieces: list[bytes] = []
        offset = 0
        while piece := disk.pread(fd, _COPY, offset):
            pieces.append(piece)
            offset += len(piece)
        return b"".join(pieces)
    finally:
        disk.close(fd)


def write_new(disk: Disk, path: str, content: bytes) -> None:
    """Create a file with this content and sync it; its name is not durable yet.

    Raises:
        DiskFull: no room; the file is removed again.
        Poisoned: any other error.

    """
    try:
        fd = disk.create(path)
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull from error
        poison("create", error)
    try:
        write_all(disk, fd, content, 0)
    except OSError as error:
        disk.close(fd)
        if error.errno not in FULL:
            poison("write", error)
        remove(disk, path)
        raise DiskFull from error
    try:
        disk.sync(fd)
    except OSError as error:
        poison("sync", error)
    disk.close(fd)


def remove(disk: Disk, path: str) -> None:
    """Remove a name.

    Raises:
        Poisoned: it cannot be removed.

    """
    try:
        disk.unlink(path)
    except OSError as error:
        poison("unlink", error)


def sync_dir(disk: Disk, path: str) -> None:
    """Make the names in a directory durable.

    Raises:
        Poisoned: the sync failed.

    """
    try:
        disk.sync_dir(path)
    except OSError as error:
        poison("sync_dir", error)


def publish(disk: Disk, path: str, content: bytes, suffix: str) -> None:
    """Put new content under a name, whole or not at all (FLT-16); the caller syncs the directory.

    Args:
        disk: the disk.
        path: the name.
        content: what it shall hold.
        suffix: makes the temporary name unique.

    Raises:
        DiskFull: no room; nothing changed.
        Poisoned: any other error.

    """
    folder, _, name = path.rpartition("/")
    temporary = f"{folder}/.{name}.{suffix}.tmp"
    write_new(disk, temporary, content)
    try:
        disk.rename(temporary, path)
    except OSError as error:
        poison("rename", error)


def is_temporary(name: str) -> bool:
    """Tell a name that `publish` made and did not finish with."""
    return name.startswith(".") and name.endswith(".tmp")
