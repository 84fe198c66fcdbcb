"""A disk in memory that remembers what was synced and what was not: the strict model of a crash.

After docs/spec/reliability.md, SIM-4: each write since a file's last sync is kept, lost or torn at
512 bytes by itself; of the names of a folder, those before its last sync survive, and a prefix of
the later ones.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from callboard.errors import HomeUnsafe
from callboard.home import What
from callboard.storage.disk import Found

SECTOR = 512


@dataclass
class Inode:
    """A file: what the program sees, what is on the disk, and the writes between the two."""

    seen: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[str, int, bytes]] = field(default_factory=list[tuple[str, int, bytes]])
    unsafe: bool = False

    def settle(self) -> None:
        """Make what is pending durable, and no more: what a failed sync dropped stays lost."""
        for op in self.pending:
            apply(self.durable, op)
        self.pending.clear()


def apply(data: bytearray, op: tuple[str, int, bytes]) -> None:
    kind, offset, new = op
    if kind == "cut" and len(data) > offset:
        del data[offset:]
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    if kind == "write":
        data[offset : offset + len(new)] = new


class Crash:
    """What survives a power cut, as drawn."""

    def writes(self, pending: list[tuple[str, int, bytes]]) -> Iterable[tuple[str, int, bytes]]:
        raise NotImplementedError

    def names(self, count: int) -> int:
        raise NotImplementedError


class LoseAll(Crash):
    """Nothing that was not synced."""

    def writes(self, pending: list[tuple[str, int, bytes]]) -> Iterable[tuple[str, int, bytes]]:
        return []

    def names(self, count: int) -> int:
        return 0


class KeepAll(Crash):
    """Everything: a killed process, a living kernel."""

    def writes(self, pending: list[tuple[str, int, bytes]]) -> Iterable[tuple[str, int, bytes]]:
        return pending

    def names(self, count: int) -> int:
        return count


class Draw(Crash):
    """Each write by itself, torn at sectors; a prefix of the names."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def writes(self, pending: list[tuple[str, int, bytes]]) -> Iterable[tuple[str, int, bytes]]:
        for kind, offset, data in pending:
            luck = self.rng.random()
            if luck < 0.4:
                yield kind, offset, data
            elif luck < 0.6 and kind == "write":
                first = offset + (-offset % SECTOR) or SECTOR
                cuts = [cut for cut in range(first, offset + len(data), SECTOR) if cut > offset]
                if cuts:
                    cut = self.rng.choice(cuts) - offset
                    keep_head = self.rng.random() < 0.5
                    yield (
                        (kind, offset, data[:cut])
                        if keep_head
                        else (
                            kind,
                            offset + cut,
                            data[cut:],
                        )
                    )

    def names(self, count: int) -> int:
        return self.rng.randint(0, count)


DIRECTORY = Inode()


class MemoryDisk:
    """A Disk. `log` has every call that changes or syncs something, in order."""

    def __init__(self) -> None:
        self.names: dict[str, Inode] = {"/home": DIRECTORY, "/run": DIRECTORY}
        self.durable_names = dict(self.names)
        self.pending_names: dict[str, list[tuple[str, str, Inode]]] = {}
        self.fds: dict[int, tuple[str, Inode]] = {}
        self.log: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], None] | None = None
        """Called before each call with its name and path; raises what the call shall raise."""
        self.short: random.Random | None = None
        self.capacity: int | None = None
        self._next = 3

    # --- calls --------------------------------------------------------------------------------

    def _call(self, name: str, path: str) -> None:
        self.log.append((name, path))
        if self.fault is not None:
            self.fault(name, path)

    def listdir(self, path: str) -> list[str]:
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, path)
        head = path + "/"
        return sorted(
            {name[len(head) :] for name in self.names if name.startswith(head)}
            - {name[len(head) :] for name in self.names if "/" in name[len(head) :]}
        )

    def stat(self, path: str) -> Found | None:
        inode = self.names.get(path)
        if inode is None:
            return None
        is_dir = inode is DIRECTORY
        return Found(not is_dir, is_dir, len(inode.seen))

    def _fd(self, path: str, inode: Inode) -> int:
        self._next += 1
        self.fds[self._next] = (path, inode)
        return self._next

    def open(self, path: str, what: What = "home") -> int:
        if self.fault is not None:
            self.fault("open", path)
        inode = self.names.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, path)
        if inode is DIRECTORY or inode.unsafe:
            raise HomeUnsafe(what=what, reason="not_regular")
        return self._fd(path, inode)

    def open_shared(self, path: str) -> int:
        return self.open(path)

    def check_folder(self, path: str) -> None:
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, path)
        if self.names[path] is not DIRECTORY:
            raise HomeUnsafe(what="home", reason="not_directory")

    def create(self, path: str) -> int:
        self._call("create", path)
        if path in self.names:
            raise FileExistsError(errno.EEXIST, path)
        if os.path.dirname(path) not in self.names:
            raise FileNotFoundError(errno.ENOENT, path)
        inode = self.names[path] = Inode()
        self._pend(os.path.dirname(path), ("link", path, inode))
        return self._fd(path, inode)

    def close(self, fd: int) -> None:
        del self.fds[fd]

    def size(self, fd: int) -> int:
        return len(self.fds[fd][1].seen)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return bytes(self.fds[fd][1].seen[offset : offset + size])

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        path, inode = self.fds[fd]
        self._call("write", path)
        taken = bytes(data)
        if self.short is not None and len(taken) > 1:
            taken = taken[: self.short.randint(1, len(taken))]
        if self.capacity is not None:
            grows = max(0, offset + len(taken) - len(inode.seen))
            free = self.capacity - self.used()
            if grows > free:
                taken = taken[: len(taken) - (grows - max(free, 0))]
                if not taken:
                    raise OSError(errno.ENOSPC, path)
        op = ("write", offset, taken)
        apply(inode.seen, op)
        inode.pending.append(op)
        return len(taken)

    def used(self) -> int:
        return sum(len(inode.seen) for inode in set_of(self.names.values()))

    def truncate(self, fd: int, size: int) -> None:
        path, inode = self.fds[fd]
        self._call("truncate", path)
        op = ("cut", size, b"")
        apply(inode.seen, op)
        inode.pending.append(op)

    def allocate(self, fd: int, size: int) -> None:
        path, inode = self.fds[fd]
        self._call("allocate", path)
        if size - len(inode.seen) > self.free(path):
            raise OSError(errno.ENOSPC, path)
        self.truncate(fd, max(size, len(inode.seen)))

    def free(self, path: str) -> int:
        return 1 << 40 if self.capacity is None else max(0, self.capacity - self.used())

    def _sync(self, name: str, fd: int) -> None:
        path, inode = self.fds[fd]
        self._call(name, path)
        inode.settle()

    def datasync(self, fd: int) -> None:
        self._sync("datasync", fd)

    def sync(self, fd: int) -> None:
        self._sync("sync", fd)

    def sync_dir(self, path: str) -> None:
        self._call("sync_dir", path)
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, path)
        for op in self.pending_names.pop(path, []):
            self._apply_name(self.durable_names, op)

    def mkdir(self, path: str) -> list[str]:
        made: list[str] = []
        missing = path
        while missing not in self.names:
            made.insert(0, missing)
            missing = os.path.dirname(missing)
        for one in made:
            self._call("mkdir", one)
            self.names[one] = DIRECTORY
            self._pend(os.path.dirname(one), ("link", one, DIRECTORY))
        return made

    def rename(self, old: str, new: str) -> None:
        self._call("rename", new)
        inode = self.names.pop(old)
        self.names[new] = inode
        self._pend(os.path.dirname(new), (f"rename {old}", new, inode))

    def link(self, old: str, new: str) -> None:
        self._call("link", new)
        if new in self.names:
            raise FileExistsError(errno.EEXIST, new)
        inode = self.names[old]
        self.names[new] = inode
        self._pend(os.path.dirname(new), ("link", new, inode))

    def unlink(self, path: str) -> None:
        self._call("unlink", path)
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, path)
        inode = self.names.pop(path)
        self._pend(os.path.dirname(path), ("unlink", path, inode))

    def _pend(self, folder: str, op: tuple[str, str, Inode]) -> None:
        self.pending_names.setdefault(folder, []).append(op)

    @staticmethod
    def _apply_name(names: dict[str, Inode], op: tuple[str, str, Inode]) -> None:
        kind, path, inode = op
        if kind == "unlink":
            names.pop(path, None)
            return
        if kind.startswith("rename "):
            names.pop(kind[7:], None)
        names[path] = inode

    # --- what tests do to it ------------------------------------------------------------------

    def crash(self, how: Crash) -> MemoryDisk:
        """Give the disk that the next start finds."""
        names = dict(self.durable_names)
        for ops in self.pending_names.values():
            for op in ops[: how.names(len(ops))]:
                self._apply_name(names, op)
        after = MemoryDisk()
        inodes: dict[int, Inode] = {id(DIRECTORY): DIRECTORY}
        for path, inode in names.items():
            if not self._reachable(path, names):
                continue
            if id(inode) not in inodes:
                data = bytearray(inode.durable)
                for write in how.writes(list(inode.pending)):
                    apply(data, write)
                inodes[id(inode)] = Inode(data, bytearray(data), [], inode.unsafe)
            after.names[path] = inodes[id(inode)]
        after.durable_names = dict(after.names)
        return after

    @staticmethod
    def _reachable(path: str, names: dict[str, Inode]) -> bool:
        parent = os.path.dirname(path)
        while parent != "/":
            if names.get(parent) is not DIRECTORY:
                return False
            parent = os.path.dirname(parent)
        return True

    def content(self, path: str) -> bytes:
        return bytes(self.names[path].seen)

    def put(self, path: str, data: bytes) -> None:
        """Plant a file, durable."""
        self.mkdir(os.path.dirname(path))
        inode = self.names.get(path) or Inode()
        inode.seen[:] = inode.durable[:] = data
        inode.pending.clear()
        self.names[path] = inode
        self.durable_names = dict(self.names)
        self.pending_names.clear()

    def home(self) -> dict[str, bytes]:
        """Give every file below the home, for comparing."""
        return {
            path: bytes(inode.seen)
            for path, inode in sorted(self.names.items())
            if inode is not DIRECTORY and path.startswith("/home/")
        }


def set_of(inodes: Iterable[Inode]) -> list[Inode]:
    found: dict[int, Inode] = {id(inode): inode for inode in inodes}
    return list(found.values())
