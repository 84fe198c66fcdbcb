"""The reserve: room that is kept for frames that end something, on a disk that is full (FLT-21).

`journal/reserve` holds nothing; its blocks are what matters. When a frame that must be written
finds no room, the file is given up, and from then on only such frames are written until the file
could be made again.
"""

from __future__ import annotations

from callboard.storage.disk import FULL, Disk, poison, remove, sync_dir


class Reserve:
    """The reserve of a journal.

    Args:
        disk: all files.
        folder: the journal's.
        size: its bytes; 0 for none, which is whole as long as the disk has room.

    """

    def __init__(self, disk: Disk, folder: str, size: int) -> None:
        self.disk, self.folder, self.size = disk, folder, size
        self._path = f"{folder}/reserve"
        self.whole = size == 0
        """Whether its room is there. While it is not, nothing is begun."""

    def restore(self) -> bool:
        """Make it whole if there is room.

        Raises:
            Poisoned: an error that is not a full disk.

        """
        if not self.whole:
            self.whole = self._allocate()
        return self.whole

    def _allocate(self) -> bool:
        try:
            new = self.disk.stat(self._path) is None
            fd = self.disk.create(self._path) if new else self.disk.open(self._path, "journal")
        except OSError as error:
            if error.errno in FULL:
                return False
            poison("open_reserve", error)
        try:
            self.disk.allocate(fd, self.size)
            self.disk.sync(fd)
        except OSError as error:
            if error.errno not in FULL:
                poison("allocate_reserve", error)
            remove(self.disk, self._path)
            return False
        finally:
            self.disk.close(fd)
        if new:
            sync_dir(self.disk, self.folder)
        return True

    def give_up(self) -> bool:
        """Give its room to a frame that must be written; false if it was given up before.

        Raises:
            Poisoned: it cannot be removed.

        """
        if not self.size or self.disk.stat(self._path) is None:
            return False
        self.whole = False
        remove(self.disk, self._path)
        sync_dir(self.disk, self.folder)  # some file systems give the blocks back only then
        return True
