"""The simulated disk: the strict model of a crash, phantoms of failed syncs, calls that fail.

It is the storage tests' disk in memory with three things more (SIM-4): a failed sync leaves what it
should have written readable and lost; a call can fail or be the last one of its process; and each
incarnation of storage works through a handle of its own, which is dead when the process is.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Final

from callboard.home import What
from callboard.storage.disk import Found
from tests.sim.kernel import Killed
from tests.storage.memory_disk import SECTOR, Crash, Draw, MemoryDisk

WRITES: Final = frozenset({"write", "create", "mkdir", "rename", "unlink", "truncate"})
SYNCS: Final = frozenset({"datasync", "sync", "sync_dir"})
MARK_BYTES: Final = 32
"""Of a frame without payload: a closing mark, which needs no sync (FLT-8)."""


class SimDisk(MemoryDisk):
    """One disk through all its crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_sync = False
        """The sync that runs now fails, and what it had to write becomes a phantom."""

    def _sync(self, name: str, fd: int) -> None:
        _, inode = self.fds[fd]
        self._call(name, self.fds[fd][0])
        if self.fails_sync:
            self.fails_sync = False
            inode.pending.clear()
            raise OSError(errno.EIO, name)
        inode.settle()

    def cut_power(self, luck: random.Random, how: Crash | None = None) -> None:
        """Lose what a power cut loses; every name and byte that is left is durable.

        A file that was being appended to may come back longer than it ever was, with NULs up to the
        end of its sector: its length and its bytes get to the disk by themselves.
        """
        written = [path for path, inode in self.names.items() if inode.pending]
        after = self.crash(how or Draw(luck))
        for path in written:
            inode = after.names.get(path)
            if inode is not None and path.endswith(".jsonl") and luck.random() < 0.3:
                inode.seen.extend(bytes(-len(inode.seen) % SECTOR))
                inode.durable[:] = inode.seen
        self.names, self.durable_names = after.names, after.durable_names
        for path in [path for path in self.names if path.startswith("/run/")]:
            del self.names[path]  # the runtime directory does not outlive its boot
            self.durable_names.pop(path, None)
        self.pending_names.clear()
        self.fds.clear()

    def is_owed(self, path: str) -> bool:
        """Tell whether a journal segment holds more than marks that no sync has covered."""
        inode = self.names.get(path)
        owed: list[int] = []
        for kind, offset, data in inode.pending if inode is not None else ():
            if kind == "cut":
                owed = [at for at in owed if at < offset]
            elif len(data) != MARK_BYTES:
                owed.append(offset)
        return bool(owed)


class Faults:
    """Which calls of storage fail, and which is the last one of its process."""

    def __init__(self, disk: SimDisk, luck: random.Random) -> None:
        self.disk, self.luck = disk, luck
        self.kill_in: int | None = None
        """Calls until the process ends."""
        self.error_in: int | None = None
        """Calls of `kinds` until one fails with `error`."""
        self.kinds: frozenset[str] = SYNCS
        self.error = errno.EIO
        self.injected = 0

    def calm(self) -> None:
        """Let every call succeed."""
        self.kill_in = self.error_in = None
        self.disk.capacity = None

    def before(self, name: str, path: str) -> None:
        """Decide about one call, before it does anything.

        Raises:
            Killed: the process ends here.
            OSError: the call fails.

        """
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in <= 0:
                self.kill_in = None
                self.injected += 1
                raise Killed
        if self.error_in is None or name not in self.kinds or path.startswith("/run/"):
            return
        self.error_in -= 1
        if self.error_in > 0:
            return
        self.error_in = None
        self.injected += 1
        if name in ("datasync", "sync"):
            self.disk.fails_sync = True
            return
        raise OSError(self.error, name)


class Handle:
    """What one incarnation of storage has of the disk; dead with its process."""

    def __init__(self, disk: SimDisk, faults: Faults, is_alive: Callable[[], bool]) -> None:
        self._disk, self._faults, self._is_alive = disk, faults, is_alive
        self.calls = 0
        self.failed_journal = False
        """A sync of a journal segment failed under this process (FLT-3c)."""

    def _begin(self, name: str, path: str) -> None:
        if not self._is_alive():
            raise Killed
        self.calls += 1
        self._faults.before(name, path)

    def _path(self, fd: int) -> str:
        return self._disk.fds[fd][0]

    def listdir(self, path: str) -> list[str]:
        return self._disk.listdir(path)

    def stat(self, path: str) -> Found | None:
        return self._disk.stat(path)

    def open(self, path: str, what: What = "home") -> int:
        self._begin("open", path)
        return self._disk.open(path, what)

    def open_shared(self, path: str) -> int:
        self._begin("open", path)
        return self._disk.open_shared(path)

    def check_folder(self, path: str) -> None:
        self._disk.check_folder(path)

    def create(self, path: str) -> int:
        self._begin("create", path)
        if self._disk.capacity is not None and self._disk.used() >= self._disk.capacity:
            raise OSError(errno.ENOSPC, path)
        return self._disk.create(path)

    def close(self, fd: int) -> None:
        if self._is_alive() and fd in self._disk.fds:
            self._disk.close(fd)

    def size(self, fd: int) -> int:
        return self._disk.size(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return self._disk.pread(fd, size, offset)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        try:
            self._begin("write", self._path(fd))
        except (Killed, OSError):
            if self._is_alive() and len(data) > 1:  # some of it gets there
                part = self._faults.luck.randrange(len(data))
                if part:
                    self._disk.pwrite(fd, data[:part], offset)
            raise
        return self._disk.pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._begin("truncate", self._path(fd))
        self._disk.truncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        self._begin("allocate", self._path(fd))
        self._disk.allocate(fd, size)

    def free(self, path: str) -> int:
        return self._disk.free(path)

    def datasync(self, fd: int) -> None:
        self._begin("datasync", self._path(fd))
        self._synced(self._disk.datasync, fd)

    def sync(self, fd: int) -> None:
        self._begin("sync", self._path(fd))
        self._synced(self._disk.sync, fd)

    def _synced(self, sync: Callable[[int], None], fd: int) -> None:
        try:
            sync(fd)
        except OSError:
            self.failed_journal |= self._path(fd).startswith("/home/journal/")
            raise

    def sync_dir(self, path: str) -> None:
        self._begin("sync_dir", path)
        self._disk.sync_dir(path)

    def mkdir(self, path: str) -> list[str]:
        self._begin("mkdir", path)
        return self._disk.mkdir(path)

    def rename(self, old: str, new: str) -> None:
        self._begin("rename", new)
        self._disk.rename(old, new)

    def link(self, old: str, new: str) -> None:
        self._begin("link", new)
        self._disk.link(old, new)

    def unlink(self, path: str) -> None:
        self._begin("unlink", path)
        self._disk.unlink(path)
