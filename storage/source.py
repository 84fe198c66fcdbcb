"""Where a reader's bytes come from: files, and the journal's frames in place of what they lack.

A look at a home tells whether its plane is up, which commit can be answered for, and what of it
the files may not hold yet (FLT-12). Nothing here writes or takes a lock.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from callboard.errors import (
    FormatUnsupported,
    HomeUnsafe,
    InvalidRequest,
    JournalDamaged,
    NotFound,
    SessionDamaged,
    StorageUnreadable,
)
from callboard.home import Home, Runtime, check_regular, probe_holder
from callboard.ids import SessionRef, parse_ref
from callboard.limits import READ_RETRIES_MAX, STORAGE_FORMAT
from callboard.storage.journal import (
    Journal,
    ReadSegment,
    commits,
    segment_name,
    segment_numbers,
    survey,
)
from callboard.storage.lines import NEVER, Hole
from callboard.storage.tail import Tail, tail_of

DURABLE: Final = struct.Struct("<QQ")
"""run/durable: the last synced commit, and the last one whose lines stand in the files."""
CATCH_UP_S: Final = 0.2
"""How long a reader waits for the files, or the index, to reach its as_of."""
PAUSE_S: Final = 0.002
_PIECE: Final = 1 << 16


class Format(BaseModel):
    """What `format.json` says."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    format: int
    home_id: str = Field(min_length=1)
    cursor_key: str = Field(pattern=r"^[0-9a-f]{64}$")


class View(NamedTuple):
    """What was found out about a home at one moment."""

    as_of: int
    holder: int
    """Who held the writer's lock: a pid, 0 for nobody, -1 for someone unseen."""
    tail: Tail


class StartOver(Exception):
    """The ground moved under a reader."""


# --- looking --------------------------------------------------------------------------------------


def read_format(home: Home) -> Format | None:
    """Read `format.json`, or give none if the home was never made.

    Raises:
        FormatUnsupported: of a version that this one does not know.
        HomeUnsafe: it is none of ours.
        StorageUnreadable: it cannot be read.

    """
    try:
        data = read_small(home.format)
    except NotFound:
        return None
    except SessionDamaged:
        raise HomeUnsafe(what="format", reason="not_regular") from None
    try:
        found = Format.model_validate_json(data)
    except ValidationError:
        raise HomeUnsafe(what="format", reason="foreign") from None
    if found.format != STORAGE_FORMAT:
        raise FormatUnsupported(version=str(found.format))
    return found


def look(home: Home, runtime: Runtime, home_id: str, at_least: int = 0) -> View:
    """Find out what can be answered for, and where it stands.

    Args:
        home: the home.
        runtime: its runtime directory.
        home_id: of `format.json`.
        at_least: a commit that was answered for before.

    Raises:
        StorageUnreadable: it cannot be read, or it changes too fast.
        JournalDamaged, HomeUnsafe, FormatUnsupported: as `journal.survey`.

    """
    for _ in range(READ_RETRIES_MAX + 1):
        holder = holder_of(home)
        try:
            view = _beside(home, runtime, home_id, holder) if holder else None
            view = view or _alone(home, home_id, holder)
        except StartOver:
            continue
        except JournalDamaged:
            if holder_of(home) == holder == 0:
                raise
            continue  # beside a writer half a write can look like damage
        if holder_of(home) == holder and view.as_of >= at_least:
            return view
    raise StorageUnreadable


def holder_of(home: Home) -> int:
    """Ask who holds the writer's lock."""
    with unreadable():
        return probe_holder(home.writer_lock)


def journal_tail(home: Home, home_id: str, as_of: int) -> Tail:
    """Read the journal's tail beside a writer, up to a commit that it has synced."""
    for _ in range(READ_RETRIES_MAX + 1):
        try:
            return _tail(home, read_journal(home, home_id), as_of)
        except (StartOver, JournalDamaged):
            continue
    raise StorageUnreadable


def _beside(home: Home, runtime: Runtime, home_id: str, holder: int) -> View | None:
    """Answer for the last synced commit (FLT-12a); none while the writer is still starting."""
    until = time.monotonic() + CATCH_UP_S
    pair = read_durable(runtime)
    if pair is None:
        return None
    as_of, in_files = pair
    while in_files < as_of and time.monotonic() < until:
        time.sleep(PAUSE_S)
        now = read_durable(runtime)
        if now is None:
            raise StartOver
        in_files = now[1]
    tail = Tail(through=as_of)
    if in_files < as_of:
        tail = _tail(home, read_journal(home, home_id), as_of)
    return View(as_of, holder, tail)


def _alone(home: Home, home_id: str, holder: int) -> View:
    """Decide from the journal, as recovery would (FLT-12b, FLT-12c)."""
    journal = read_journal(home, home_id)
    if journal.clean is not None:
        damaged = journal.checkpoint.damaged if journal.checkpoint else ()
        tail = tail_of((), through=journal.last_commit, damaged=damaged, as_of=0)
        return View(journal.last_commit, holder, tail)
    return View(journal.last_commit, holder, _tail(home, journal, journal.last_commit))


def read_journal(home: Home, home_id: str) -> Journal:
    """Decide what the journal holds, as recovery would; see `journal.survey`."""
    return survey(segment_numbers(names_in(home.journal)), segments_of(home), home_id)


def _tail(home: Home, journal: Journal, as_of: int) -> Tail:
    return tail_of(
        commits(journal, segments_of(home)),
        through=journal.through,
        damaged=journal.checkpoint.damaged if journal.checkpoint else (),
        as_of=as_of,
    )


def read_durable(runtime: Runtime) -> tuple[int, int] | None:
    """Read the two commits of `run/durable`; none if there is no such file of ours.

    Raises:
        StartOver: it is not whole.

    """
    try:
        data = read_small(runtime.durable)
    except (NotFound, SessionDamaged):
        return None
    if len(data) != DURABLE.size:
        raise StartOver
    last, in_files = DURABLE.unpack(data)
    return last, in_files


def segments_of(home: Home) -> ReadSegment:
    """Give what reads a segment's bytes by its number."""

    def read(number: int) -> bytes:
        try:
            return b"".join(read_from(home.journal / segment_name(number)))
        except NotFound:
            raise StartOver from None  # a checkpoint dropped it meanwhile (REC-6b)
        except SessionDamaged:
            raise HomeUnsafe(what="journal", reason="not_regular") from None

    return read


# --- files ----------------------------------------------------------------------------------------


@contextmanager
def unreadable() -> Generator[None]:
    """Turn errors of the operating system into the one that readers give (CAT-8)."""
    try:
        yield
    except OSError:
        raise StorageUnreadable from None


def read_small(path: Path) -> bytes:
    """Read a small file; see `read_from`."""
    return b"".join(read_from(path, most=_PIECE))


def read_from(path: Path, start: int = 0, most: int = NEVER) -> Iterator[bytes]:
    """Read a state file by the rules of FLT-50, without changing anything about it.

    Args:
        path: the file.
        start: where to begin.
        most: how many bytes at most.

    Raises:
        NotFound: there is no such file.
        SessionDamaged: it is not a file of our own, so it cannot be told whose it is.
        StorageUnreadable: it cannot be read.

    """
    with unreadable():
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise NotFound from None
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise _not_ours() from None
            raise
        try:
            check_regular(os.fstat(fd), "home", 1)
            while most and (piece := os.pread(fd, min(most, _PIECE), start)):
                start += len(piece)
                most -= len(piece)
                yield piece
        except HomeUnsafe:
            raise _not_ours() from None
        finally:
            os.close(fd)


def _not_ours() -> SessionDamaged:
    return SessionDamaged(damage="identity_mismatch", line=1)


def names_in(path: Path) -> list[str]:
    """List a directory; one that is not there has no names."""
    with unreadable():
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []


def workspaces_in(home: Home) -> Iterator[str]:
    """Name the workspaces' folders, in order."""
    return (name for name in _folders_in(home.sessions) if is_ref(name, "x"))


def refs_in(home: Home, key: str | None = None) -> Iterator[SessionRef]:
    """Name the sessions' folders, in order.

    Args:
        home: the home.
        key: a workspace key, to name those of that workspace alone.

    """
    for folder in (key,) if key is not None else workspaces_in(home):
        for name in _folders_in(home.sessions / folder):
            if is_ref(folder, name):
                yield SessionRef(folder, name)


def _folders_in(path: Path) -> list[str]:
    """List the real folders in a directory, in order."""
    with unreadable():
        try:
            with os.scandir(path) as entries:
                return sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []


def is_ref(key: str, session_id: str) -> bool:
    """Tell whether two names can be those of a session."""
    try:
        parse_ref(f"{key}/{session_id}")
    except InvalidRequest:
        return False
    return True


def pieces_of(home: Home, view: View, path: Path, start: int = 0) -> Iterator[bytes | Hole]:
    """Give a file's bytes, those of the journal in place of what they will overwrite.

    Args:
        home: the home.
        view: what was found out about it.
        path: a file in it.
        start: where to begin.

    Raises:
        NotFound: neither the folder nor the journal has the file.
        SessionDamaged, StorageUnreadable: as `read_from`.

    """
    overlay = view.tail.overlays.get(key_of(home, path))
    if overlay is None:
        yield from read_from(path, start)
        return
    if start < overlay.cut:
        yield from _below(path, start, overlay.cut)
    skip = max(start - overlay.cut, 0)
    for piece in overlay.pieces:
        size = piece.size if isinstance(piece, Hole) else len(piece)
        if skip < size:
            yield piece[skip:] if isinstance(piece, bytes) else piece
        skip = max(skip - size, 0)
    if view.holder == 0 and overlay.cut:
        yield from _foreign(path, overlay.end)


def key_of(home: Home, path: Path) -> str:
    """Give the name that frames use for a file."""
    return str(path.relative_to(home.root))


def _below(path: Path, start: int, cut: int) -> Iterator[bytes | Hole]:
    """Give what the file holds below the first journaled offset."""
    left = cut - start
    try:
        for piece in read_from(path, start, left):
            left -= len(piece)
            yield piece
    except NotFound:
        pass
    if left:
        yield Hole(left, "truncated")


def _foreign(path: Path, end: int) -> Iterator[Hole]:
    """Notice whole lines behind what the journal gave the file (FLT-9d)."""
    size, lines = 0, False
    try:
        for piece in read_from(path, end):
            size += len(piece)
            lines = lines or b"\n" in piece
    except NotFound:
        return
    if lines:
        yield Hole(size, "foreign_tail")
