"""Materialising: what the journal holds gets into the streams' files, off the ack path (FLT-9).

Parts are written at the offsets that their frames name. A full disk is not fatal here: what does
not fit waits, bounded by the engine, which refuses new input meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from callboard.errors import Damage, HomeUnsafe
from callboard.storage.disk import (
    FULL,
    Disk,
    DiskFull,
    poison,
    publish,
    sync_dir,
    write_all,
)
from callboard.storage.frames import Part

_OPEN_MAX: Final = 512
"""Descriptors kept open between batches, if nobody says otherwise."""


NEVER: Final = (1 << 64) - 1
"""A commit above all others."""


class Waiting(NamedTuple):
    """A part that is not in its file yet."""

    commit: int
    part: Part


class Replacement(NamedTuple):
    """The content of a file that takes the place of another one."""

    first: Part
    made_of: int
    """How many waiting parts it holds."""
    data: bytes


class Lost(NamedTuple):
    """A file that is not what it was when it was last written; its parts stay in the journal."""

    file: str
    damage: Damage


class Files:
    """The streams' files, as far as they are behind the journal or not synced.

    Attributes:
        waiting_bytes: of the parts that are not written yet.
        touched: files written since the last checkpoint, with true for new ones.
        folders: directories with names that are not durable yet.
        full: whether the last write found no room.

    """

    def __init__(self, disk: Disk, root: str, open_max: int = _OPEN_MAX) -> None:
        self.disk, self.root = disk, root
        self.waiting_bytes = 0
        self.touched: dict[str, bool] = {}
        self.folders: set[str] = set()
        self.full = False
        self._waiting: dict[str, list[Waiting]] = {}
        self._replaced: set[str] = set()
        self._fds: OrderedDict[str, int] = OrderedDict()
        self._open_max = open_max

    def path(self, file: str) -> str:
        """Give the path of a file named in a frame."""
        return f"{self.root}/{file}"

    def add(
        self, commit: int, parts: Iterable[Part], *, replaces: bool = False, same: bool = False
    ) -> None:
        """Take the parts of a synced frame; `flush` writes them.

        Args:
            commit: the frame's number.
            parts: its parts.
            replaces: whether the one that begins at 0 starts a file in place of the present one.
            same: whether that one says no more than the present one, so that no reader misses it.

        """
        for part in parts:
            since = commit
            if replaces and part.offset == 0:
                since = NEVER if same else commit
                if old := self._waiting.get(part.file):  # the new file holds what these say
                    since = old[0].commit
                    self._done(part.file, len(old))
                self._replaced.add(part.file)
            self._waiting.setdefault(part.file, []).append(Waiting(since, part))
            self.waiting_bytes += len(part.data)

    def written(self, last_commit: int) -> int:
        """Give the last commit whose parts, and all before them, stand in the files."""
        if not self._waiting:
            return last_commit
        first = min(one.commit for waiting in self._waiting.values() for one in waiting)
        return min(first - 1, last_commit)

    def is_behind(self, file: str) -> bool:
        """Tell whether a file misses something that the journal holds."""
        return file in self._waiting

    def flush(self) -> list[Lost]:
        """Write what waits, file by file.

        Returns:
            Files that are not ours any more; what waited for them is dropped here.

        Raises:
            Poisoned: an error that is not a full disk.

        """
        lost: list[Lost] = []
        self.full = False
        for file in [file for file in self._waiting if file not in self._replaced]:
            try:
                damage = self._write_file(file, self._waiting[file])
            except OSError as error:
                if error.errno not in FULL:
                    poison("write_file", error)
                self.full = True
                continue
            if damage is not None:
                lost.append(Lost(file, damage))
            self._done(file, len(self._waiting[file]))
        return lost

    def _done(self, file: str, count: int) -> None:
        waiting = self._waiting[file]
        self.waiting_bytes -= sum(len(one.part.data) for one in waiting[:count])
        del waiting[:count]
        if not waiting:
            del self._waiting[file]

    def _write_file(self, file: str, waiting: list[Waiting]) -> Damage | None:
        first = waiting[0].part
        data = first.data if len(waiting) == 1 else b"".join(one.part.data for one in waiting)
        fd = self._fds.get(file)
        if fd is None:
            opened = self._open(file, first.offset, len(data))
            if isinstance(opened, str):
                return opened
            fd = opened
        else:
            self._fds.move_to_end(file)
        write_all(self.disk, fd, data, first.offset)
        self.touched.setdefault(file, False)
        return None

    def _open(self, file: str, offset: int, size: int) -> int | Damage:
        path = self.path(file)
        try:
            fd = self.disk.open(path)
        except HomeUnsafe:
            return "identity_mismatch"
        except FileNotFoundError:
            if offset:
                return "truncated"
            fd = self._create(file)
        have = self.disk.size(fd)
        if have < offset or have > offset + size:
            self.disk.close(fd)
            return "truncated" if have < offset else "foreign_tail"
        self._fds[file] = fd
        if len(self._fds) > self._open_max:
            self.disk.close(self._fds.popitem(last=False)[1])
        return fd

    def _create(self, file: str) -> int:
        path = self.path(file)
        folder = path.rpartition("/")[0]
        missing = folder
        while self.disk.stat(missing) is None:
            missing = missing.rpartition("/")[0]
            self.folders.add(missing)  # FLT-15b; noted first, since making may stop half way
        if missing != folder:
            self.disk.mkdir(folder)
        fd = self.disk.create(path)
        self.folders.add(folder)
        self.touched[file] = True
        return fd

    def forget(self, file: str) -> None:
        """Close a file and drop what waits for it."""
        if (fd := self._fds.pop(file, None)) is not None:
            self.disk.close(fd)
        if file in self._waiting:
            self._done(file, len(self._waiting[file]))
        self._replaced.discard(file)

    # --- checkpoint ---------------------------------------------------------------------------

    def take_replacements(self) -> dict[str, Replacement]:
        """Give the new content of each file that a new one replaces; later parts wait for it."""
        found: dict[str, Replacement] = {}
        for file in self._replaced:
            waiting = self._waiting[file]
            data = b"".join(one.part.data for one in waiting)
            found[file] = Replacement(waiting[0].part, len(waiting), data)
        return found

    def replaced(self, published: Mapping[str, Replacement]) -> None:
        """Go on with files that were published anew, as `take_replacements` gave them."""
        for file, one in published.items():
            waiting = self._waiting.get(file)
            if waiting is None or waiting[0].part is not one.first:
                continue  # replaced once more meanwhile
            if (fd := self._fds.pop(file, None)) is not None:
                self.disk.close(fd)
            self._replaced.discard(file)
            self._done(file, one.made_of)

    def take_touched(self) -> tuple[dict[str, bool], set[str]]:
        """Give what a checkpoint must sync, files and folders, and begin anew."""
        files, folders = self.touched, self.folders
        self.touched, self.folders = {}, set()
        return files, folders

    def give_back(self, files: Mapping[str, bool], folders: set[str]) -> None:
        """Take back what a checkpoint did not get done."""
        for file, new in files.items():
            self.touched[file] = new or self.touched.get(file, False)
        self.folders |= folders


@dataclass(slots=True)
class SyncJob:
    """A checkpoint's slow half: it may run beside the engine, which goes on meanwhile.

    Attributes:
        replacements: whole new contents of files, by path.
        files: paths to sync, with true for new ones.
        folders: directories to sync.
        done: whether all of it is durable; false when the disk was full.

    """

    disk: Disk
    suffix: str
    replacements: dict[str, bytes] = field(default_factory=dict[str, bytes])
    files: dict[str, bool] = field(default_factory=dict[str, bool])
    folders: set[str] = field(default_factory=set[str])
    done: bool = False

    def run(self) -> None:
        """Publish, sync the files, then the names.

        Raises:
            Poisoned: anything but a full disk.

        """
        try:
            for path, content in self.replacements.items():
                self._publish(path, content)
        except DiskFull:
            return
        for path, new in self.files.items():
            self._sync_file(path, new)
        for folder in sorted(self.folders):
            if self.disk.stat(folder) is not None:
                sync_dir(self.disk, folder)
        self.done = True

    def _publish(self, path: str, content: bytes) -> None:
        folder = path.rpartition("/")[0]
        if self.disk.stat(folder) is None:
            return  # taken away by hand; what is missing shows when the session is read
        publish(self.disk, path, content, self.suffix)
        self.folders.add(folder)

    def _sync_file(self, path: str, new: bool) -> None:
        try:
            fd = self.disk.open(path)
        except (FileNotFoundError, HomeUnsafe):
            return
        except OSError as error:
            poison("open_file", error)
        try:
            if new:
                self.disk.sync(fd)
            else:
                self.disk.datasync(fd)
        except OSError as error:
            poison("sync_file", error)
        finally:
            self.disk.close(fd)
