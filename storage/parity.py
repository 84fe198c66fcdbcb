"""The index against the files: every row says what its transcript does (IDX-1, IDX-6b).

A row whose file has changed since is no finding: readers notice that and derive it (IDX-6a).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from callboard.home import Home
from callboard.ids import SessionRef
from callboard.storage.check import Seen
from callboard.storage.findings import Finding
from callboard.storage.index import IndexReader, cause_of
from callboard.storage.metadata import CatalogRow, FileState, metadata_of
from callboard.storage.readers import HomeReader

_ROWS_MAX: Final = 256
"""Asked of one transaction: a reader keeps none for long (IDX-4)."""
_FILE: Final = "index.sqlite3"


class IndexBook:
    """The index, opened anew every so many rows; without one nothing is compared."""

    def __init__(self, home: Home, home_id: str) -> None:
        self._home, self._home_id = home, home_id
        self._reader: IndexReader | None = None
        self._asked = 0
        self._cause = "" if os.path.lexists(home.index) else "missing"

    def again(self) -> IndexBook:
        """Give another one of the same index, as it is now."""
        return IndexBook(self._home, self._home_id)

    def close(self) -> None:
        """End its transaction."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _open(self) -> IndexReader | None:
        """Give the reader; none if the index cannot be used."""
        if self._cause:
            return None
        self._asked += 1
        if self._asked % _ROWS_MAX == 0:
            self.close()
        if self._reader is None:
            try:
                self._reader = IndexReader(self._home, self._home_id)
            except IndexReader.ERRORS as error:
                self._cause = cause_of(error)
        return self._reader

    def _fail(self, error: Exception) -> None:
        self._cause = cause_of(error)
        self.close()

    # --- one session

    def compare(
        self, ref: SessionRef, seen: Seen, file: FileState | None, alone: bool
    ) -> Iterator[Finding]:
        """Compare a session's row with what its transcript told.

        Args:
            ref: the session.
            seen: what its transcript told.
            file: what the file was like before and after it was read; none if it changed.
            alone: whether nobody writes.

        """
        reader = self._open()
        if reader is None:
            return
        try:
            row, unlisted = reader.row(ref), reader.is_unlisted(ref)
        except IndexReader.ERRORS as error:
            self._fail(error)
            return
        wrong = self._judge(ref, seen, file, alone, row, unlisted)
        if wrong is not None:
            yield Finding("index_differs", _FILE, session=str(ref), detail=wrong)

    def _judge(
        self,
        ref: SessionRef,
        seen: Seen,
        file: FileState | None,
        alone: bool,
        row: CatalogRow | None,
        unlisted: bool,
    ) -> str | None:
        assert self._reader is not None
        if row is None:
            late = seen.fold.created_commit > self._reader.applied
            return None if late or unlisted else "no row"
        if alone and row.metadata.last_seq > seen.fold.seq:
            return f"{row.metadata.last_seq} records where the file has {seen.fold.seq}"
        if row.file != file or row.file.size != seen.bytes:
            return None
        open_turn = seen.fold.turn.turn_id if seen.fold.turn else None
        told = metadata_of(ref, seen.fold), seen.fold.created_commit, open_turn
        if told != (row.metadata, row.created_commit, row.open_turn):
            return "another state"
        return None if row.chain in ("", seen.chain) else "another chain"

    # --- all of it

    def end(self, home: HomeReader, *, alone: bool) -> Iterator[Finding]:
        """Judge the index itself, and its rows of sessions that there are not.

        Args:
            home: reads the home's files.
            alone: whether nobody writes.

        """
        self.close()
        reader = self._open()
        try:
            if reader is not None:
                yield from self._whole(reader, home, alone=alone)
        except IndexReader.ERRORS as error:
            self._fail(error)
        if self._cause and self._cause != "missing":
            yield Finding("index_unusable", _FILE, detail=self._cause)

    def _whole(self, reader: IndexReader, home: HomeReader, *, alone: bool) -> Iterator[Finding]:
        said = reader.integrity()
        if said != "ok":
            self._cause = "structure"
            return
        if alone and reader.applied > home.as_of:
            detail = f"commit {reader.applied} where the journal has {home.as_of}"
            yield Finding("index_differs", _FILE, detail=detail)
        for ref in reader.known():
            if not home.exists(ref):
                yield Finding("index_differs", _FILE, session=str(ref), detail="no such session")
