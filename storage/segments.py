"""The journal's writing end: frame goes behind frame, segment behind segment (FLT-2, FLT-6).

Every method either does what it says, refuses with `DiskFull` and leaves the journal as it was, or
raises `Poisoned`, after which nothing may be touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from callboard.storage.disk import (
    FULL,
    Disk,
    DiskFull,
    poison,
    remove,
    sync_dir,
    write_all,
)
from callboard.storage.frames import (
    CleanStop,
    Epochs,
    Payload,
    SegmentHeader,
    encode,
    pack,
    pieces,
)
from callboard.storage.journal import segment_name


class Before(NamedTuple):
    """What the header of a new segment says of its predecessor."""

    number: int = 0
    bytes: int = 0
    crc: int = 0


class JournalWriter:
    """The segment that is written now, and the descriptors of those before it.

    Descriptors stay open from creation to removal: an error of an earlier write is reported per
    descriptor, once (FLT-11).

    Attributes:
        number: of the present segment.
        size: its bytes.
        durable: those of them that are known to be on the disk.
        start: those that its creation wrote.
        last_commit: the last one written.
        epochs: repeated in each header.
        first: lowest segment that is still needed.
        numbers: segments that are there, in order.

    """

    def __init__(self, disk: Disk, folder: str, home_id: str) -> None:
        self.disk, self.folder, self.home_id = disk, folder, home_id
        self.number = 0
        self.size = self.durable = self.start = 0
        self.last_commit = 0
        self.epochs = Epochs()
        self.first = 1
        self.numbers: list[int] = []
        self._fds: dict[int, int] = {}
        self._crc = self._durable_crc = 0

    def path(self, number: int) -> str:
        """Give the path of a segment."""
        return f"{self.folder}/{segment_name(number)}"

    # --- segments -----------------------------------------------------------------------------

    def create(self, number: int, before: Before, copied: Sequence[tuple[int, bytes]] = ()) -> None:
        """Make a new segment, sync it and its name, and write to it from now on.

        Args:
            number: the new segment's.
            before: its predecessor; nothing for the first segment of a home.
            copied: commits and payloads to repeat behind the header (FLT-5a).

        Raises:
            DiskFull: no room; the segment is gone again.
            Poisoned: anything else.

        """
        header = SegmentHeader(
            self.home_id,
            number,
            before.number,
            before.bytes,
            before.crc,
            len(copied),
            self.first,
            self.epochs,
        )
        frames = [encode(self.last_commit, 0, pack(header))]
        frames += [encode(commit, 0, payload) for commit, payload in copied]
        path, content = self.path(number), b"".join(frames)
        try:
            fd = self.disk.create(path)
        except OSError as error:
            if error.errno in FULL:
                raise DiskFull from error
            poison("create_segment", error)
        self._fill(fd, path, content)
        sync_dir(self.disk, self.folder)
        self.number, self._fds[number] = number, fd
        self.numbers.append(number)
        self.size = self.durable = self.start = len(content)
        self._crc = self._durable_crc = _crc_of(frames[-1])

    def _fill(self, fd: int, path: str, content: bytes) -> None:
        try:
            write_all(self.disk, fd, content, 0)
        except OSError as error:
            if error.errno not in FULL:
                poison("write_segment", error)
            self.disk.close(fd)
            remove(self.disk, path)
            raise DiskFull from error
        try:
            self.disk.sync(fd)
        except OSError as error:
            poison("sync_segment", error)

    def rotate(self) -> None:
        """Go on in a new segment. What is in the present one must be synced, marks excepted."""
        self.create(self.number + 1, Before(self.number, self.durable, self._durable_crc))

    def resume(self, number: int, durable: int, crc: int) -> None:
        """Go on in the segment of an orderly stop, behind what is known to be on the disk.

        The clean_stop is cut off: whether it is on the disk nobody knows, so the next frame takes
        its place (see ADR 0010).

        Args:
            number: the segment's.
            durable: where its last frame before marks and clean_stop ends.
            crc: of that frame.

        """
        try:
            fd = self.disk.open(self.path(number), "journal")
            self.disk.truncate(fd, durable)
        except OSError as error:
            poison("resume_segment", error)
        self.number, self._fds[number] = number, fd
        self.size = self.durable = durable
        self._crc = self._durable_crc = crc

    def drop(self, numbers: Sequence[int]) -> None:
        """Remove segments, lowest first, and sync the folder."""
        for number in sorted(numbers):
            remove(self.disk, self.path(number))
            if (fd := self._fds.pop(number, None)) is not None:
                self.disk.close(fd)
        if numbers:
            sync_dir(self.disk, self.folder)
        self.numbers = [one for one in self.numbers if one not in numbers]

    # --- frames -------------------------------------------------------------------------------

    def append(self, frames: Sequence[tuple[int, bytes]]) -> None:
        """Write frames behind the last one; they are not durable before `sync`.

        Args:
            frames: commits and packed payloads.

        Raises:
            DiskFull: no room; the segment is cut back to where it was (FLT-20a).
            Poisoned: any other error, or the cut-back failed (FLT-20c).

        """
        durable = self.durable
        found = [pieces(commit, durable, payload) for commit, payload in frames]
        content = b"".join(chain.from_iterable(found))
        try:
            write_all(self.disk, self._fds[self.number], content, self.size)
        except OSError as error:
            if error.errno not in FULL:
                poison("write_journal", error)
            self._cut_back()
            raise DiskFull from error
        self.size += len(content)
        self._crc = _crc_of(found[-1][0])
        self.last_commit = frames[-1][0]

    def _cut_back(self) -> None:
        try:
            self.disk.truncate(self._fds[self.number], self.size)
        except OSError as error:
            poison("cut_back", error)

    def sync(self) -> None:
        """Make everything written durable.

        Raises:
            Poisoned: the sync failed; it is never tried again (FLT-3d).

        """
        try:
            self.disk.datasync(self._fds[self.number])
        except OSError as error:
            poison("sync_journal", error)
        self.durable, self._durable_crc = self.size, self._crc

    def mark(self) -> None:
        """Write a closing mark: it tells what is on the disk and needs no sync (FLT-8)."""
        try:
            self.append([(self.last_commit, b"")])
        except DiskFull:
            return  # the next batch, or the next start, says the same

    def note(self, payload: Payload) -> None:
        """Write and sync a frame that takes no commit: a checkpoint or a clean_stop."""
        self.append([(self.last_commit, pack(payload))])
        self.sync()

    def stop(self) -> None:
        """End in order."""
        self.note(CleanStop(self.epochs))

    def room_for(self, size: int, limit: int) -> bool:
        """Tell whether frames fit the present segment; those that come first in it always do.

        Args:
            size: their bytes, as `size_of` counts them.
            limit: the most bytes of a segment.

        """
        return self.size == self.start or self.size + size <= limit


def _crc_of(frame: bytes) -> int:
    """Read the CRC in a frame, or in its head."""
    return int.from_bytes(frame[8:12], "little")
