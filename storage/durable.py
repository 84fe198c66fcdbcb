"""run/durable: the two commits that readers beside the writer look at (FLT-12a)."""

from __future__ import annotations

import struct
from typing import Final, Protocol

from callboard.storage.disk import Disk, poison

_NUMBER: Final = struct.Struct("<Q")


class Durable(Protocol):
    """Where the two numbers go."""

    def synced(self, commit: int) -> None:
        """Say up to which commit frames are synced."""
        ...

    def written(self, commit: int) -> None:
        """Say up to which commit lines stand in the streams' files."""
        ...


class DurableFile:
    """The file in the runtime directory: two u64, little-endian, each written whole."""

    def __init__(self, disk: Disk, path: str) -> None:
        """Make the file anew; `forget` has removed an earlier plane's.

        Raises:
            Poisoned: it cannot be made.

        """
        self._disk = disk
        try:
            self._fd = disk.create(path)
            disk.pwrite(self._fd, bytes(16), 0)
        except OSError as error:
            poison("durable", error)
        self._written = -1

    def synced(self, commit: int) -> None:
        """See Durable."""
        self._put(commit, 0)

    def written(self, commit: int) -> None:
        """See Durable."""
        if commit != self._written:
            self._put(commit, 8)
            self._written = commit

    def _put(self, commit: int, offset: int) -> None:
        try:
            self._disk.pwrite(self._fd, _NUMBER.pack(commit), offset)
        except OSError as error:
            poison("durable", error)


class NoDurable:
    """Tells nobody: for tests without readers."""

    def synced(self, commit: int) -> None:
        """See Durable."""

    def written(self, commit: int) -> None:
        """See Durable."""


def forget(disk: Disk, path: str) -> None:
    """Remove what an earlier plane said, before any file is touched.

    Raises:
        Poisoned: it cannot be removed.

    """
    if disk.stat(path) is None:
        return
    try:
        disk.unlink(path)
    except OSError as error:
        poison("durable", error)
