"""A damaged file as it was, if the journal still has the frames or the checkpoint's length (REC-4).

Reads only. What is given here was judged like any other file: nothing is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from callboard.errors import (
    FormatUnsupported,
    JournalDamaged,
    NotFound,
    SessionDamaged,
    StorageUnreadable,
)
from callboard.home import Home
from callboard.ids import SessionRef
from callboard.limits import INBOX_BYTES_MAX, READ_RETRIES_MAX, RECORD_BYTES_MAX
from callboard.storage.check import Expected, InboxCheck, TranscriptCheck
from callboard.storage.frames import Commit, FileMark
from callboard.storage.journal import Journal, commits
from callboard.storage.lines import NEVER, Hole, Sound, check_transcript, split
from callboard.storage.source import (
    StartOver,
    View,
    key_of,
    pieces_of,
    read_from,
    read_journal,
    segments_of,
)
from callboard.storage.tail import Overlay, Tail, tail_of

Pieces = Callable[[], Iterator[bytes | Hole]]


class Restored(NamedTuple):
    """A file as it was, to be read any number of times."""

    pieces: Pieces
    source: str
    """`journal` or `checkpoint`: what says so."""

    def data(self) -> Iterator[bytes]:
        """Give its bytes."""
        for piece in self.pieces():
            assert isinstance(piece, bytes)  # it was judged: no hole is in it
            yield piece


def restored(home: Home, home_id: str, ref: SessionRef, path: Path) -> Restored | None:
    """Find out how a session's transcript or inbox was, or give none if nobody knows.

    Args:
        home: the home.
        home_id: of `format.json`.
        ref: the session.
        path: its transcript or its inbox.

    Raises:
        StorageUnreadable: the journal cannot be read, or changes too fast.

    """
    for _ in range(READ_RETRIES_MAX + 1):
        try:
            journal = read_journal(home, home_id)
            overlay = _overlay(home, journal, key_of(home, path))
        except (StartOver, JournalDamaged):
            continue
        return _sound(home, journal, overlay, ref, path)
    raise StorageUnreadable


def _overlay(home: Home, journal: Journal, file: str) -> Overlay | None:
    """Gather what all frames that are still there say of one file."""
    all_frames = commits(journal._replace(checkpoint=None), segments_of(home))
    of_file = (
        (number, Commit(tuple(part for part in commit.parts if part.file == file)))
        for number, commit in all_frames
    )
    return tail_of(of_file, through=0, as_of=NEVER).overlays.get(file)


def _sound(
    home: Home, journal: Journal, overlay: Overlay | None, ref: SessionRef, path: Path
) -> Restored | None:
    file = key_of(home, path)
    marks = journal.checkpoint.files if journal.checkpoint else ()
    mark = next((one for one in marks if one.file == file), None)
    least = _last_sound(ref, path, journal.last_commit)
    if overlay is not None:
        view = View(NEVER, -1, Tail(overlays={file: overlay}))
        found = Restored(lambda: pieces_of(home, view, path), "journal")
        if _is_sound(found.pieces, ref, file, journal.last_commit, mark, least):
            return found
    if mark is not None:
        length = mark.length
        found = Restored(lambda: read_from(path, 0, length), "checkpoint")
        if _is_sound(found.pieces, ref, file, journal.last_commit, mark, least):
            return found
    return None


def _last_sound(ref: SessionRef, path: Path, last_commit: int) -> int:
    """Give the last seq that the damaged transcript itself still has; 0 of an inbox."""
    seq = 0
    if path.name != "transcript.jsonl":
        return seq
    try:
        lines = split(read_from(path), RECORD_BYTES_MAX)
        for item in check_transcript(lines, ref, as_of=last_commit):
            if isinstance(item, Sound):
                seq = item.record.seq
    except (NotFound, SessionDamaged, FormatUnsupported):
        pass  # what was read until there counts
    return seq


def _is_sound(
    pieces: Pieces, ref: SessionRef, file: str, last_commit: int, mark: FileMark | None, least: int
) -> bool:
    """Tell whether nothing is wrong with a file, and no record is lost that the present one has."""
    expected = Expected(last_commit, mark=mark)
    try:
        if file.endswith("/inbox.jsonl"):
            found = InboxCheck(ref, file, expected).run(split(pieces(), INBOX_BYTES_MAX))
            return next(iter(found), None) is None
        check = TranscriptCheck(ref, file, expected)
        wrong = any(
            one.kind != "artifact_missing" for one in check.run(split(pieces(), RECORD_BYTES_MAX))
        )
    except (NotFound, SessionDamaged):
        return False
    return not wrong and check.seen.fold.seq >= max(least, 1)
