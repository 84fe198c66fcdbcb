"""The journal as a chain of segments: what counts, what is torn, what is damage. Reads only.

Pure over a function that gives a segment's bytes, so that the writer's recovery, readers beside it
and tests over made-up disks decide alike (FLT-5 to FLT-7, FLT-12b, FLT-14).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from callboard.errors import FormatUnsupported, HomeUnsafe, JournalDamaged
from callboard.limits import STORAGE_FORMAT
from callboard.storage.frames import (
    Checkpoint,
    CleanStop,
    Commit,
    Epochs,
    Frame,
    Payload,
    PayloadDamage,
    Scan,
    SegmentHeader,
    frames,
    scan,
    unpack,
)

_NAME: Final = re.compile(r"([0-9]{4,})\.log\Z")
ReadSegment = Callable[[int], bytes]
"""Gives the bytes of the segment with a number; FileNotFoundError if there is none."""


def segment_name(number: int) -> str:
    """Give the file name of a segment."""
    return f"{number:04d}.log"


def segment_numbers(names: Iterable[str]) -> list[int]:
    """Pick the segments out of the journal folder's names, in order."""
    numbers = (int(found[1]) for name in names if (found := _NAME.match(name)))
    return sorted(number for number in numbers if number > 0)


class Counted(NamedTuple):
    """A segment of the chain and how much of it exists."""

    number: int
    header: SegmentHeader
    end: int
    """Frames below this offset count; the rest does not exist for anyone (FLT-6c)."""


class Journal(NamedTuple):
    """What a journal says."""

    segments: tuple[Counted, ...] = ()
    """In order; empty for a new home."""
    dropped: tuple[int, ...] = ()
    """Segments that are there and do not count, in order: a start removes them."""
    tail: Scan | None = None
    """The last segment."""
    checkpoint: Checkpoint | None = None
    """The last one."""
    epochs: Epochs = Epochs()
    last_commit: int = 0
    """Of the frames that count."""
    highest_commit: int = 0
    """Of all whole frames, those that do not count included (FLT-14)."""
    clean: Frame | None = None
    """The clean_stop, if the last frame is one."""

    @property
    def through(self) -> int:
        """Commits up to this one stand in synced files."""
        return self.checkpoint.through if self.checkpoint else 0


def survey(numbers: Iterable[int], read: ReadSegment, home_id: str) -> Journal:
    """Decide what a journal holds (section 5 of the reliability page).

    Args:
        numbers: the segments that are there.
        read: gives a segment's bytes.
        home_id: of `format.json`; segments of another home are refused.

    Raises:
        JournalDamaged: bytes that were on the disk once are gone or changed.
        HomeUnsafe: a segment of another home.
        FormatUnsupported: a segment of another format.

    """
    return _Survey(sorted(numbers), read, home_id).run()


class _Survey:
    def __init__(self, numbers: list[int], read: ReadSegment, home_id: str) -> None:
        self.numbers, self.read, self.home_id = numbers, read, home_id
        self.highest = 0
        self.checkpoint: Checkpoint | None = None

    def run(self) -> Journal:
        found = self._last()
        if found is None:
            return Journal(dropped=tuple(self.numbers), highest_commit=self.highest)
        last, tail = found
        self._look_for_checkpoint(last.number, tail.frames)
        chain = [last]
        while chain[-1].header.previous in self.numbers:
            chain.append(self._before(chain[-1].header))
        chain.reverse()
        self._check_start(chain)
        counted = {one.number for one in chain}
        return Journal(
            tuple(chain),
            tuple(n for n in self.numbers if n not in counted),
            tail,
            self.checkpoint,
            _epochs(last, tail),
            tail.frames[-1].commit,
            self.highest,
            _clean_stop(last.number, tail),
        )

    def _last(self) -> tuple[Counted, Scan] | None:
        """Find the last segment that counts (FLT-6b).

        As many behind it may not as starts in a row were cut short: each passes over the segment
        of the one before, which nobody knows to be on the disk (FLT-6d), and may not get further.
        """
        for number in reversed(self.numbers):
            tail = self._scan(number)
            if tail.damaged:
                raise JournalDamaged(segment=number, offset=tail.end)
            header = self._header(number, tail) if tail.frames else None
            if header is not None and len(tail.frames) > header.copied:
                return Counted(number, header, tail.end), tail
        if self.numbers in ([], [1]):
            return None  # the first start of a home got no further
        raise JournalDamaged(segment=self.numbers[-1], offset=0)

    def _scan(self, number: int) -> Scan:
        found = scan(self.read(number))
        self.highest = max(self.highest, found.highest)
        return found

    def _header(self, number: int, found: Scan) -> SegmentHeader:
        """Check the first frame of a segment, which is whole."""
        header = _payload(number, found.frames[0])
        if not isinstance(header, SegmentHeader):
            raise JournalDamaged(segment=number, offset=0)
        if header.format != STORAGE_FORMAT:
            raise FormatUnsupported(version=str(header.format))
        if header.home != self.home_id:
            raise HomeUnsafe(what="journal", reason="foreign")
        if header.number != number:
            raise JournalDamaged(segment=number, offset=0)
        return header

    def _before(self, after: SegmentHeader) -> Counted:
        """Check the segment before another one: all of it was on the disk (FLT-7a)."""
        number, end = after.previous, after.previous_bytes
        found = self._scan(number)
        if found.end < end or not found.frames:
            raise JournalDamaged(segment=number, offset=found.end)
        counted = [frame for frame in found.frames if frame.offset < end]
        if not counted or counted[-1].end != end or counted[-1].crc != after.previous_crc:
            raise JournalDamaged(segment=number, offset=counted[-1].offset if counted else 0)
        self._look_for_checkpoint(number, counted)
        return Counted(number, self._header(number, found), end)

    def _look_for_checkpoint(self, number: int, found: Iterable[Frame]) -> None:
        """Take the last checkpoint; segments are seen from the last one to the first."""
        if self.checkpoint is None:
            for frame in found:
                payload = _payload(number, frame)
                if isinstance(payload, Checkpoint):
                    self.checkpoint = payload

    def _check_start(self, chain: list[Counted]) -> None:
        """Refuse a chain whose beginning is missing though it is still needed."""
        missing = chain[0].header.previous
        needed = self.checkpoint.first if self.checkpoint else chain[-1].header.first
        if missing and (missing >= needed or self.numbers[0] < missing):
            raise JournalDamaged(segment=missing, offset=0)


def _epochs(last: Counted, tail: Scan) -> Epochs:
    """Give the epochs in force: each segment's header repeats them, a commit may raise them."""
    found = last.header.epochs
    for frame in tail.frames:
        payload = _payload(last.number, frame)
        if isinstance(payload, Commit) and payload.epochs is not None:
            found = payload.epochs
    return found


def _clean_stop(number: int, tail: Scan) -> Frame | None:
    frame = tail.frames[-1]
    return frame if tail.size == tail.end and is_clean_stop(number, frame) else None


def is_clean_stop(number: int, frame: Frame) -> bool:
    """Tell whether a frame of a segment is an orderly stop's last one."""
    return isinstance(_payload(number, frame), CleanStop)


def _payload(number: int, frame: Frame) -> Payload:
    try:
        return unpack(frame.payload)
    except PayloadDamage:
        raise JournalDamaged(segment=number, offset=frame.offset) from None


def commits(journal: Journal, read: ReadSegment) -> Iterator[tuple[int, Commit]]:
    """Yield the commits that are not in synced files yet, in order, with their numbers.

    Args:
        journal: what `survey` found.
        read: gives a segment's bytes again; one segment is in memory at a time.

    """
    for segment in journal.segments:
        if journal.checkpoint and segment.number < journal.checkpoint.first:
            continue
        for frame in frames(memoryview(read(segment.number))[: segment.end]):
            if frame.commit <= journal.through:
                continue
            payload = _payload(segment.number, frame)
            if isinstance(payload, Commit):
                yield frame.commit, payload
