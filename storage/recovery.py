"""Storage's start: section 5 of the reliability page, as a table and in its order.

Everything here may be interrupted at any call and begins anew with the same result (FLT-13).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pydantic_core import from_json

from callboard.errors import Damage, FormatUnsupported, HomeUnsafe, JournalDamaged
from callboard.limits import STORAGE_FORMAT
from callboard.storage.disk import (
    FULL,
    Disk,
    DiskFull,
    is_temporary,
    poison,
    publish,
    read_all,
    remove,
    sync_dir,
    write_all,
)
from callboard.storage.files import Files
from callboard.storage.frames import Damaged, FileMark, Part
from callboard.storage.journal import (
    Journal,
    commits,
    segment_name,
    segment_numbers,
    survey,
)
from callboard.storage.segments import Before, JournalWriter
from callboard.storage.sessions import Sessions

_LAST: Final = re.compile(rb'"(?:seq|n)":(\d+)', re.ASCII)
_PIECE: Final = 1 << 20


class Recovered(NamedTuple):
    """A home that is ready to serve."""

    home_id: str
    journal: JournalWriter
    files: Files
    sessions: Sessions
    marks: dict[str, FileMark]
    """Files that the next checkpoint names, as they are."""
    next_commit: int
    clean: bool
    """The last stop was in order: there was nothing to recover."""


def recover(disk: Disk, root: str, fresh: Callable[[], str], open_max: int) -> Recovered:
    """Make a home ready to serve.

    Args:
        disk: the disk.
        root: the home's path; the folder is there.
        fresh: makes ids of 32 hex digits.
        open_max: how many files may stay open.

    Raises:
        FormatUnsupported, HomeUnsafe, JournalDamaged: refused, and nothing was touched.
        Poisoned: an error of a write or a sync.
        OSError: something cannot be read.

    """
    try:
        home_id = _read_format(disk, root, fresh)
        journal, read = _survey(disk, root, home_id)
        files = Files(disk, root, open_max)
        sessions = Sessions(disk, files)
        writer = JournalWriter(disk, f"{root}/journal", home_id)
        rewrite = _Rewrite(disk, files, sessions, fresh)
        rewrite.gather(journal, read)
        _open(writer, journal)
        rewrite.run()
    except DiskFull as error:
        cause = error.__cause__
        poison("recovery", cause if isinstance(cause, OSError) else OSError())
    highest = max(journal.highest_commit, journal.last_commit)
    clean = journal.clean is not None
    return Recovered(home_id, writer, files, sessions, rewrite.marks, highest + 1, clean)


# --- format.json ----------------------------------------------------------------------------------


def _read_format(disk: Disk, root: str, fresh: Callable[[], str]) -> str:
    """Read the home's id, or make a new home.

    Raises:
        FormatUnsupported: of a format that this version does not know, or of none.

    """
    path = f"{root}/format.json"
    if disk.stat(path) is None:
        return _new_home(disk, root, fresh)
    try:
        value = from_json(read_all(disk, path, "format"))
        version, home_id = value["format"], value["home_id"]
    except (ValueError, KeyError, TypeError):
        raise FormatUnsupported from None
    if version != STORAGE_FORMAT or not isinstance(home_id, str):
        raise FormatUnsupported(version=str(version))
    return home_id


def _new_home(disk: Disk, root: str, fresh: Callable[[], str]) -> str:
    """Publish `format.json`, once and for ever."""
    if disk.stat(f"{root}/journal") is not None and segment_numbers(
        disk.listdir(f"{root}/journal")
    ):
        raise FormatUnsupported  # there is a journal, so there was a format
    for name in disk.listdir(root):
        if is_temporary(name):
            remove(disk, f"{root}/{name}")
    home_id = fresh()
    content = {"format": STORAGE_FORMAT, "home_id": home_id, "cursor_key": fresh() + fresh()}
    publish(disk, f"{root}/format.json", json.dumps(content).encode() + b"\n", fresh())
    sync_dir(disk, root)
    return home_id


# --- journal --------------------------------------------------------------------------------------


def _survey(disk: Disk, root: str, home_id: str) -> tuple[Journal, Callable[[int], bytes]]:
    folder = f"{root}/journal"

    def read(number: int) -> bytes:
        try:
            return read_all(disk, f"{folder}/{segment_name(number)}", "journal")
        except HomeUnsafe as error:
            if error.carried.get("reason") == "symlink":
                raise HomeUnsafe(what="journal", reason="not_regular") from None
            raise

    found = disk.stat(folder)
    if found is None:
        _make(disk, folder)
        return Journal(), read
    if not found.directory:
        raise HomeUnsafe(what="journal", reason="not_directory")
    return survey(segment_numbers(disk.listdir(folder)), read, home_id), read


def _make(disk: Disk, folder: str) -> None:
    try:
        made = disk.mkdir(folder)
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull from error
        poison("mkdir", error)
    for one in made:
        sync_dir(disk, one.rpartition("/")[0])


def _open(writer: JournalWriter, journal: Journal) -> None:
    """Open the journal for writing: behind a clean stop, or in a new segment (FLT-5)."""
    writer.epochs, writer.last_commit = journal.epochs, journal.last_commit
    writer.numbers = sorted((*(one.number for one in journal.segments), *journal.dropped))
    if not journal.segments or journal.tail is None:
        writer.drop(journal.dropped)
        writer.create(1, Before())
        return
    last, tail = journal.segments[-1], journal.tail
    first = journal.segments[0].number
    writer.first = journal.checkpoint.first if journal.checkpoint else first
    if journal.clean is not None:
        durable = journal.clean.durable
        ending = next(frame for frame in tail.frames if frame.end == durable)
        writer.resume(last.number, durable, ending.crc)
        writer.drop(journal.dropped)
        return
    mark = tail.watermark
    copied = [
        (frame.commit, bytes(frame.payload))
        for frame in tail.frames
        if frame.offset >= max(mark, 1) and frame.payload.nbytes
    ]
    writer.drop([number for number in journal.dropped if number > last.number])
    if mark:
        before = Before(last.number, mark, _crc_below(journal, mark))
        obsolete = journal.dropped
    else:  # not even its header is known to be on the disk: it is passed over (ADR 0011)
        header = last.header
        before = Before(header.previous, header.previous_bytes, header.previous_crc)
        obsolete = (*journal.dropped, last.number)
    writer.create(last.number + 1, before, copied)
    writer.drop([number for number in obsolete if number <= last.number])


def _crc_below(journal: Journal, mark: int) -> int:
    """Give the CRC of the frame that ends at the watermark."""
    assert journal.tail is not None
    for frame in journal.tail.frames:
        if frame.end == mark:
            return frame.crc
    raise JournalDamaged(segment=journal.segments[-1].number, offset=mark)


# --- files ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ending:
    """What the journal says of the end of one file."""

    generation: str
    offset: int
    pieces: list[bytes] = field(default_factory=list[bytes])
    end: int = 0

    def add(self, part: Part) -> bool:
        """Take a later part; false if it does not follow."""
        if part.offset == 0 and self.pieces:
            self.generation, self.offset, self.pieces, self.end = part.generation, 0, [], 0
        if self.pieces and (part.offset != self.end or part.generation != self.generation):
            return False
        self.pieces.append(part.data)
        self.end = part.offset + len(part.data)
        return True


class _Rewrite:
    """Cuts each file at the smallest offset that the journal names and writes it anew (FLT-9)."""

    def __init__(
        self, disk: Disk, files: Files, sessions: Sessions, fresh: Callable[[], str]
    ) -> None:
        self.disk, self.files, self.sessions, self.fresh = disk, files, sessions, fresh
        self.marks: dict[str, FileMark] = {}
        self._endings: dict[str, _Ending] = {}

    def gather(self, journal: Journal, read: Callable[[int], bytes]) -> None:
        """Take from the frames since the last checkpoint what they say of files and leases.

        Raises:
            JournalDamaged: they do not fit to each other.

        """
        for damaged in journal.checkpoint.damaged if journal.checkpoint else ():
            self.sessions.damaged[damaged.session] = damaged
        if journal.clean is not None:
            return
        for _, commit in commits(journal, read):
            self.sessions.leases.update(commit.leases)
            for part in commit.parts:
                ending = _Ending(part.generation, part.offset)
                if not self._endings.setdefault(part.file, ending).add(part):
                    raise JournalDamaged(segment=journal.segments[-1].number, offset=0)

    def run(self) -> None:
        """Write the files."""
        for file, ending in self._endings.items():
            if _session_of(file) not in self.sessions.damaged:
                self._rewrite(file, ending)

    def _rewrite(self, file: str, ending: _Ending) -> None:
        data = b"".join(ending.pieces)
        path = self.files.path(file)
        if ending.offset == 0:
            self._note_names(path)
        try:
            fd = self.disk.open(path)
        except HomeUnsafe:
            self._damaged(file, "identity_mismatch", 0)
            return
        except FileNotFoundError:
            if ending.offset:
                self._damaged(file, "truncated", 1)
                return
            fd = self._create(path)
        try:
            done = self._write(fd, file, ending, data)
        finally:
            self.disk.close(fd)
        if not done:
            return
        self.files.touched[file] = ending.offset == 0
        last = data[data[:-1].rfind(b"\n") + 1 : -1]
        found = _LAST.search(last)
        number, chain = int(found[1]) if found else 0, last[-66:-2].decode("ascii", "replace")
        self.marks[file] = FileMark(file, ending.generation, ending.end, number, chain)

    def _write(self, fd: int, file: str, ending: _Ending, data: bytes) -> bool:
        size = self.disk.size(fd)
        generation = self._generation(fd) if ending.generation and size else ending.generation
        if generation != ending.generation:
            return self._replace(file, ending, data)
        if size < ending.offset:
            self._damaged(file, "truncated", self._lines(fd, size) + 1)
            return False
        if size > ending.end and self._ends_a_line(fd, ending.end):
            self._damaged(file, "foreign_tail", self._lines(fd, ending.end) + 1)
            return False
        try:
            self.disk.truncate(fd, ending.offset)
            write_all(self.disk, fd, data, ending.offset)
        except OSError as error:
            poison("rewrite", error)
        return True

    def _replace(self, file: str, ending: _Ending, data: bytes) -> bool:
        """Put a compacted inbox in the place of the one before it (INB-2c)."""
        if ending.offset:
            self._damaged(file, "identity_mismatch", 1)
            return False
        publish(self.disk, self.files.path(file), data, self.fresh())
        return True

    def _generation(self, fd: int) -> str:
        """Read an inbox file's generation; a header that cannot be read has none."""
        line, _, _ = self.disk.pread(fd, 4_096, 0).partition(b"\n")
        try:
            return str(from_json(line)["generation"])
        except (ValueError, KeyError, TypeError):
            return ""

    def _create(self, path: str) -> int:
        folder = path.rpartition("/")[0]
        try:
            if self.disk.stat(folder) is None:
                self.disk.mkdir(folder)
            return self.disk.create(path)
        except OSError as error:
            poison("create", error)

    def _note_names(self, path: str) -> None:
        """Take note that a file and the folders above it may be new since the last checkpoint."""
        folder = path
        while folder != self.files.root:
            folder = folder.rpartition("/")[0]
            self.files.folders.add(folder)

    def _damaged(self, file: str, damage: Damage, line: int) -> None:
        self.sessions.mark_damaged(Damaged(_session_of(file), damage, line))

    def _ends_a_line(self, fd: int, offset: int) -> bool:
        return self._count(fd, offset, 1 << 62, stop=True) > 0

    def _lines(self, fd: int, end: int) -> int:
        return self._count(fd, 0, end)

    def _count(self, fd: int, offset: int, end: int, *, stop: bool = False) -> int:
        """Count line ends between two offsets, or look for the first."""
        count = 0
        while offset < end and (piece := self.disk.pread(fd, min(_PIECE, end - offset), offset)):
            count += piece.count(b"\n")
            if stop and count:
                break
            offset += len(piece)
        return count


def _session_of(file: str) -> str:
    """Give the session of a file named in a frame."""
    _, key, session_id, _ = file.split("/")
    return f"{key}/{session_id}"
