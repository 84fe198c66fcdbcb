"""The catalog's index: disposable, off the ack path, read with the plane up or down.

Nothing is promised on its strength (FLT-23). The storage actor feeds it through `IndexFeed`; every
error of it sets it off with one log line and never reaches a write. Readers take `IndexReader` and
go without one when anything about it is wrong (IDX-5). A connection belongs to one thread (FLT-25).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, cast

import apsw

from callboard.errors import CallboardError, NotFound
from callboard.fold import FOLD_VERSION
from callboard.home import Home, create_file, open_state, remove_file
from callboard.ids import SessionRef
from callboard.limits import (
    INDEX_BUSY_TIMEOUT_MS,
    INDEX_FREE_FLOOR_BYTES,
    INDEX_RETRY_MS,
    INDEX_SCHEMA_VERSION,
    INDEX_WAL_BYTES_MAX,
    RECORD_BYTES_MAX,
)
from callboard.storage.lines import Gap, Sound, check_transcript, split
from callboard.storage.metadata import CatalogRow, Derived, FileState, Scope, Unlisted, derive
from callboard.storage.source import read_format, read_from, refs_in
from callboard.storage.sql import Database, Value, load

__all__ = ["CatalogRow", "IndexFeed", "IndexReader", "IndexWriter"]

Log = Callable[[str, Mapping[str, object]], None]
BLOCK_BYTES: Final = 4_096
"""Smaller blocks of a full file system can end a process that opens a WAL database (FLT-24)."""
FIRST: Final = -(1 << 63)
"""A recency before every session's."""
_BATCH_ROWS: Final = 256
_CLOSE_S: Final = 5.0
_QUERIES: Final = load("index")
_logger: Final = logging.getLogger(__name__)


class IndexOff(Exception):
    """The index cannot be used now; the message says why, without a path."""


def log_warning(action: str, facts: Mapping[str, object]) -> None:
    """Write a line to the logger of this module."""
    _logger.warning("%s: %s", action, dict(facts))


def _connect(path: Path, *, write: bool) -> Database:
    """Open a connection, unless the disk is such that this could end the process (FLT-24a)."""
    disk = os.statvfs(path.parent)
    if disk.f_bsize < BLOCK_BYTES and disk.f_bavail * disk.f_frsize < INDEX_FREE_FLOOR_BYTES:
        raise IndexOff("disk")
    return Database(path, _QUERIES, write=write, busy_ms=INDEX_BUSY_TIMEOUT_MS)


def _has_rows(db: Database) -> bool:
    """Tell whether the table of rows is there: the state alone may have survived."""
    try:
        db.plain("SELECT 1 FROM sessions LIMIT 0")
    except apsw.SQLError:
        return False
    return True


# --- writing --------------------------------------------------------------------------------------


class IndexWriter:
    """The index's writing end, for one thread."""

    def __init__(self, home: Home, log: Log) -> None:
        self._home, self._log = home, log
        self._db: Database | None = None
        self._home_id = self._cause = ""
        self._retry_at = 0.0

    @classmethod
    def open(cls, home: Home, commit: int, log: Log = log_warning) -> IndexWriter:
        """Open the index, make what is missing, and look again at what has changed since.

        Args:
            home: the home, whose storage actor this process is.
            commit: the last commit whose lines stand in the files.
            log: takes the one line that says why the index is off.

        """
        writer = cls(home, log)
        writer._start(commit)
        return writer

    @property
    def on(self) -> bool:
        """Tell whether rows are written at present."""
        return self._db is not None

    def apply(self, rows: Iterable[CatalogRow], commit: int) -> None:
        """Write the rows of sessions that have grown, in one transaction.

        Args:
            rows: at most one for each session.
            commit: the last commit whose lines stand in the files.

        """
        if self._db is None:
            if time.monotonic() >= self._retry_at:
                self._start(commit)
            return
        try:
            with self._db:
                _put(self._db, rows)
                self._db.run("set_applied", {"commit": commit})
        except (apsw.Error, OSError) as error:
            self._off(error)

    def close(self) -> None:
        """Move everything into the main file and close."""
        db, self._db = self._db, None
        if db is None:
            return
        try:
            db.checkpoint()
        except apsw.Error:
            pass  # a reader is at it; the log that stays is as good
        finally:
            db.close()

    def _start(self, commit: int) -> None:
        try:
            self._db = self._open()
            self._reconcile(self._db, commit)
            self._cause = ""
        except (apsw.Error, OSError, CallboardError, IndexOff) as error:
            self._off(error)

    def _off(self, error: Exception) -> None:
        """Go on without an index; one line says so for each cause."""
        db, self._db = self._db, None
        if db is not None:
            db.close()
        self._retry_at = time.monotonic() + INDEX_RETRY_MS / 1_000
        cause = cause_of(error)
        if cause != self._cause:
            self._cause = cause
            self._log("index_off", {"cause": cause, "level": "warning"})

    def _open(self) -> Database:
        try:
            return self._open_once()
        except (apsw.NotADBError, apsw.CorruptError):
            for suffix in ("", "-wal", "-shm"):
                path = self._home.index.with_name(self._home.index.name + suffix)
                if path.exists():
                    remove_file(path)
            return self._open_once()

    def _open_once(self) -> Database:
        path = self._home.index
        for suffix in ("", "-wal", "-shm"):
            _tighten(path.with_name(path.name + suffix), make=not suffix)
        db = _connect(path, write=True)
        try:
            for pragma in (
                f"page_size = {BLOCK_BYTES}",
                "journal_mode = WAL",
                "synchronous = NORMAL",
                "foreign_keys = ON",
                f"journal_size_limit = {INDEX_WAL_BYTES_MAX}",
            ):
                db.plain(f"PRAGMA {pragma}")
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: Database) -> None:
        """Make the tables anew if another version, another home or nobody made these."""
        found = read_format(self._home)
        self._home_id = found.home_id if found else ""
        if _state_of(db, self._home_id) is not None and _has_rows(db):
            return
        with db:
            db.run("drop")
            db.run("schema")

    # --- looking again

    def _reconcile(self, db: Database, commit: int) -> None:
        """Derive the rows of the files that are not as the index knows them."""
        known = {
            SessionRef(str(key), str(name)): FileState(*cast("tuple[int, int, int]", tuple(file)))
            for key, name, *file in db.rows("stats")
        }
        missing = set(known)
        changed = self._changed(known, missing)
        while batch := list(islice(changed, _BATCH_ROWS)):
            with db:
                _put(db, (one.row for one in batch if isinstance(one, Derived)))
                for one in batch:
                    if isinstance(one, Unlisted):
                        db.run("delete_session", one.ref)
                        values = (*one.ref, one.code, *one.file)
                        db.run("put_unlisted", values)
        with db:
            for ref in missing:
                db.run("delete_session", ref)
                db.run("delete_unlisted", ref)
            self._set_state(db, commit)

    def _changed(
        self, known: Mapping[SessionRef, FileState], missing: set[SessionRef]
    ) -> Iterator[Derived | Unlisted]:
        for ref in refs_in(self._home):
            path = self._home.transcript(ref)
            try:
                file = FileState.of(os.lstat(path))
            except (FileNotFoundError, NotADirectoryError):
                continue
            missing.discard(ref)
            if known.get(ref) == file:
                continue
            try:
                yield derive(ref, partial(_lines, ref, path), file)
            except NotFound:
                missing.add(ref)

    def _set_state(self, db: Database, commit: int) -> None:
        values: dict[str, Value] = {
            "schema_version": INDEX_SCHEMA_VERSION,
            "fold_version": FOLD_VERSION,
            "home_id": self._home_id,
            "applied_commit": max(commit, _state_of(db, self._home_id) or 0),
        }
        db.run("set_state", values)


def _lines(ref: SessionRef, path: Path) -> Iterator[Sound | Gap]:
    """Read a transcript that nobody but this process writes; nothing before its end is missing."""
    found = iter(check_transcript(split(read_from(path), RECORD_BYTES_MAX), ref))
    first = next(found, None)
    if first is None:
        raise NotFound
    yield first
    yield from found


def _put(db: Database, rows: Iterable[CatalogRow]) -> None:
    written = list(rows)
    db.run_many("put_session", [row.values() for row in written])
    db.run_many("delete_unlisted", [tuple(row.ref) for row in written])


def _tighten(path: Path, *, make: bool) -> None:
    """Make a file of the index if it has to be there, and see that it is ours alone."""
    if make and not os.path.lexists(path):
        os.close(create_file(path))
    elif os.path.lexists(path):
        os.close(open_state(path, os.O_RDWR))


def _state_of(db: Database, home_id: str) -> int | None:
    """Give the commit that an index has come to, or none if it is not of this version and home."""
    try:
        found = db.first("state") if db.first("has_state") == (1,) else None
    except apsw.SQLError:  # a table of that name that another version made
        return None
    match found:
        case (int(schema), int(fold), str(home), int(applied)):
            own = (INDEX_SCHEMA_VERSION, FOLD_VERSION, home_id)
            return applied if (schema, fold, home) == own else None
        case _:
            return None


def cause_of(error: Exception) -> str:
    """Name what is wrong with an index, without a path."""
    if isinstance(error, IndexOff):
        return str(error)
    if isinstance(error, CallboardError):
        return error.code
    return type(error).__name__


class IndexFeed:
    """An `IndexWriter` in a thread of its own: whoever feeds it never waits.

    Rows wait in a table with one place for each session, so that what waits is bounded by the
    sessions that there are.
    """

    def __init__(self, home: Home, commit: int, log: Log) -> None:
        self._home, self._commit, self._log = home, commit, log
        self._rows: dict[SessionRef, CatalogRow] = {}
        self._change = threading.Condition()
        self._waiting = self._closing = self._ended = False
        self._thread = threading.Thread(target=self._run, name="index", daemon=True)

    @classmethod
    def start(cls, home: Home, commit: int, log: Log = log_warning) -> IndexFeed:
        """Start the thread; see `IndexWriter.open`."""
        feed = cls(home, commit, log)
        feed._thread.start()
        return feed

    def apply(self, rows: Iterable[CatalogRow], commit: int) -> None:
        """Hand over rows; see `IndexWriter.apply`. Returns at once."""
        with self._change:
            if self._ended:
                return
            self._rows.update((row.ref, row) for row in rows)
            self._commit, self._waiting = commit, True
            self._change.notify()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            writer = IndexWriter.open(self._home, self._commit, self._log)
            while self._step(writer):
                pass
            writer.close()
        except Exception as error:  # the index is no reason for its process to end
            self._log("index_off", {"cause": cause_of(error), "level": "error"})
        with self._change:
            self._ended = True
            self._rows.clear()

    def _step(self, writer: IndexWriter) -> bool:
        """Write what has come; false when there will be no more."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closing)
            if not self._waiting:
                return False
            rows, self._rows = self._rows, {}
            commit, self._waiting = self._commit, False
        writer.apply(rows.values(), commit)
        return True


# --- reading --------------------------------------------------------------------------------------


class IndexReader:
    """The index at one moment: a read transaction that lasts as long as the object is open.

    Every method may raise `apsw.Error`; `ERRORS` names all that means "go without it".

    Attributes:
        applied: the commit that the rows have come to.

    """

    ERRORS: Final = (apsw.Error, OSError, ValueError, IndexOff)

    def __init__(self, home: Home, home_id: str) -> None:
        self._db = _connect(home.index, write=False)
        try:
            self._db.plain("BEGIN")
            applied = _state_of(self._db, home_id)
            if applied is None:
                raise IndexOff("version")
        except BaseException:
            self.close()
            raise
        self.applied = applied

    def __enter__(self) -> IndexReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the transaction."""
        self._db.close()

    def page(
        self, scope: Scope, behind: tuple[int, SessionRef] | None, as_of: int
    ) -> Iterator[CatalogRow]:
        """Give the rows of a walk in its order, of sessions that have not grown since `as_of`.

        Args:
            scope: what is walked.
            behind: the last activity and the name of the row before, if there is one.
            as_of: a commit.

        """
        recency, ref = (-behind[0], behind[1]) if behind else (FIRST, SessionRef("", ""))
        bindings = _bindings(scope) | {
            "recency": recency,
            "key": ref.workspace_key,
            "session_id": ref.session_id,
            "as_of": as_of,
        }
        name = "page" if scope.workspace is None else "page_of_workspace"
        return map(CatalogRow.from_values, self._db.rows(name, bindings))

    def moved(self, as_of: int) -> set[SessionRef]:
        """Name the sessions that have grown since a commit."""
        found = self._db.rows("moved", {"as_of": as_of})
        return {SessionRef(str(key), str(name)) for key, name in found}

    def row(self, ref: SessionRef) -> CatalogRow | None:
        """Give a session's row."""
        found = self._db.first("row", ref)
        return CatalogRow.from_values(found) if found else None

    def integrity(self) -> str:
        """Say `ok`, or what is wrong with the file's own structure."""
        found = self._db.first("integrity")
        return str(found[0]) if found else "nothing was said"

    def known(self) -> Iterator[SessionRef]:
        """Name every session and every folder that there is a row of."""
        return (SessionRef(str(key), str(name)) for key, name, *_ in self._db.rows("stats"))

    def is_unlisted(self, ref: SessionRef) -> bool:
        """Tell whether a folder is known as one whose transcript does not say whose it is."""
        return self._db.first("unlisted", ref) is not None

    def damaged(self, scope: Scope) -> dict[SessionRef, str]:
        """Name the damaged sessions of a scope, with what is wrong with them."""
        found = self._db.rows("damaged", _bindings(scope))
        return {SessionRef(str(key), str(name)): str(code) for key, name, code in found}


def _bindings(scope: Scope) -> dict[str, Value]:
    return {
        "workspace": scope.workspace,
        "children": int(scope.include_children),
        "archived": int(scope.archived),
    }
