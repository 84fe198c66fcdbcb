"""Reading the artifacts of a session: by whoever may read its home, and never a wrong byte.

Storage alone writes them (`storage/artifacts.py`). Whatever is not as it must be is a typed
refusal, which names no path (ART-13).
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from callboard import home
from callboard.artifacts import (
    ARTIFACT_ID,
    ArtifactRef,
    Part,
    Piece,
    check_artifact_id,
    check_window,
    decode,
    piece,
    refs_of,
    restore,
)
from callboard.errors import ArtifactInvalid, ArtifactStoreUnsafe, HomeUnsafe
from callboard.limits import ARTIFACT_BYTES_MAX

FOLDER: Final = "artifacts"
RETRYABLE: Final = frozenset({errno.EBUSY, errno.EAGAIN, errno.EMFILE, errno.ENFILE})
"""What may go by itself (ART-13a)."""


class _Seen(NamedTuple):
    """A file as it was when it was hashed (ART-9b)."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def is_artifact_name(name: str) -> bool:
    """Tell a name that may stand in an artifact folder: of an artifact, whole or being made."""
    if ARTIFACT_ID.match(name):
        return True
    stem = name.removeprefix(".").removesuffix(".tmp")
    return name == f".{stem}.tmp" and ARTIFACT_ID.match(stem.partition(".")[0]) is not None


class ArtifactReader:
    """The artifacts of one session.

    A file is hashed once while it stays the same file; what failed is tried anew each time
    (ART-13b).

    Args:
        session: the session's folder; it need not be there.

    """

    def __init__(self, session: Path) -> None:
        self._folder = session / FOLDER
        self._hashed: dict[str, _Seen] = {}

    def read(self, artifact_id: str, offset: int = 0, limit: int | None = None) -> Piece:
        """Read a piece of an artifact (ART-9).

        Args:
            artifact_id: 64 lower-case hex digits.
            offset: 0 to the artifact's size in bytes.
            limit: 4 to 65,536 bytes; default: ARTIFACT_READ_BYTES_DEFAULT.

        Raises:
            InvalidRequest: an argument is out of range; nothing was opened.
            ArtifactInvalid: there is no such artifact, or it is not what its name says.
            ArtifactStoreUnsafe: the folder holds what is not ours (ART-8).

        """
        check_artifact_id(artifact_id)
        check_window(offset, limit)
        return piece(self.data(artifact_id), offset, limit)

    def text(self, ref: ArtifactRef) -> str:
        """Give the whole text that a reference names, checked against it (ART-11).

        Raises:
            ArtifactInvalid, ArtifactStoreUnsafe: see `read`.

        """
        return decode(ref, self.data(ref.artifact_id))

    def restore(self, parts: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
        """Give a message's original parts back, whether it was cut or not.

        Raises:
            ArtifactInvalid, ArtifactStoreUnsafe: see `read`.

        """
        refs = refs_of(parts)
        return restore(parts, self.data(refs[0].artifact_id) if refs else b"")

    def verify(self, parts: Sequence[Part]) -> None:
        """Check every artifact that a message names: existence, mode, hash, size, chars, layout.

        Raises:
            ArtifactInvalid, ArtifactStoreUnsafe: see `read`.

        """
        if refs_of(parts):
            self.restore(parts)

    def data(self, artifact_id: str) -> bytes:
        """Read an artifact whole, at most ARTIFACT_BYTES_MAX bytes.

        Raises:
            ArtifactInvalid, ArtifactStoreUnsafe: see `read`.

        """
        try:
            self._check_folder()
            return self._data(artifact_id)
        except HomeUnsafe:
            raise ArtifactStoreUnsafe from None
        except OSError as error:
            retryable = error.errno in RETRYABLE
            raise ArtifactInvalid(artifact_id=artifact_id, retryable=retryable) from None

    def _check_folder(self) -> None:
        """Refuse a folder that is not ours alone, or holds a foreign name (ART-8)."""
        home.check_private(self._folder)
        if not all(map(is_artifact_name, os.listdir(self._folder))):
            raise ArtifactStoreUnsafe

    def _data(self, artifact_id: str) -> bytes:
        fd = home.open_shared(self._folder / artifact_id)
        try:
            return self._checked(fd, artifact_id, os.fstat(fd))
        finally:
            os.close(fd)

    def _checked(self, fd: int, artifact_id: str, found: os.stat_result) -> bytes:
        if found.st_size > ARTIFACT_BYTES_MAX:
            raise ArtifactInvalid(artifact_id=artifact_id, retryable=False)
        seen = _Seen(
            found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        )
        data = b""
        while len(data) < found.st_size and (more := os.pread(fd, found.st_size, len(data))):
            data += more
        if len(data) != found.st_size:  # it changed while it was read
            raise ArtifactInvalid(artifact_id=artifact_id, retryable=False)
        if self._hashed.get(artifact_id) != seen:
            if hashlib.sha256(data).hexdigest() != artifact_id:
                raise ArtifactInvalid(artifact_id=artifact_id, retryable=False)
            self._hashed[artifact_id] = seen
        return data
