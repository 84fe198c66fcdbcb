"""Judges a session's files: pure, over lines, one line in memory at a time.

What is checked of a transcript is what its readers check (`lines.check_transcript`), and beyond
that: that it reaches and equals what the last checkpoint wrote down of it, that commits, epochs and
times never fall, that turns begin and end once and acknowledgements stand before their terminal,
and that no record is of a commit that the journal never had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from callboard.errors import FormatUnsupported, InboxCorrupt, SessionDamaged
from callboard.fold import TURN_REASONS, SessionFold
from callboard.ids import SessionRef
from callboard.records import (
    InboxAcknowledged,
    LineDamage,
    PartCreated,
    PartUpdated,
    Record,
    TurnAborted,
    TurnCompleted,
    TurnStarted,
    split_chain,
)
from callboard.storage.findings import Finding, Kind
from callboard.storage.frames import FileMark
from callboard.storage.lines import (
    NEVER,
    Gap,
    InboxFold,
    Line,
    check_transcript,
    read_inbox,
)

_GENERATION: Final = b'"generation":"'


class Expected(NamedTuple):
    """What is known of a session's files from elsewhere."""

    as_of: int
    """The last commit that may be judged."""
    alone: bool = True
    """Nobody writes: what is beyond `as_of` should not be there."""
    settled: bool = True
    """Nothing of the file is still to be written anew from the journal: its end is its end."""
    mark: FileMark | None = None
    """The file as the last checkpoint left it."""


@dataclass(slots=True)
class Tap:
    """Passes lines on and remembers where the last one stands."""

    number: int = 0
    offset: int = 0
    """Where it begins."""
    end: int = 0
    """Where it ends."""
    ended: bool = True

    def over(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Pass lines on."""
        for line in lines:
            self.number, self.offset = line.number, self.end
            self.end += line.size
            self.ended = line.ended
            yield line


@dataclass(slots=True)
class Seen:
    """What a transcript told while it was judged."""

    fold: SessionFold = field(default_factory=SessionFold)
    records: int = 0
    bytes: int = 0
    """Of the lines that were read, sound or not."""
    epoch: int = 0
    """The highest."""
    commit: int = 0
    """The highest."""
    chain: str = ""
    damaged: bool = False
    acknowledged_live: set[str] = field(default_factory=set[str])
    """Inputs of the inbox that an acknowledgement names."""
    missing_artifacts: dict[str, int] = field(default_factory=dict[str, int])
    """Artifacts that records name and nobody has, with the first line that does."""


class TranscriptCheck:
    """Judges one transcript.

    Args:
        ref: whose it must be.
        file: its name, for findings.
        expected: what is known of it.
        live: ids of the inputs in the session's inbox.
        artifacts: the artifacts that the session has.

    Attributes:
        seen: what it told.

    """

    def __init__(
        self,
        ref: SessionRef,
        file: str,
        expected: Expected,
        live: AbstractSet[str] = frozenset(),
        artifacts: AbstractSet[str] = frozenset(),
    ) -> None:
        self.ref, self.file, self.expected = ref, file, expected
        self.live, self.artifacts = live, artifacts
        self.seen = Seen()
        self._tap = Tap()
        self._sound = 0
        self._ts = ""
        self._acknowledged: tuple[Record, InboxAcknowledged] | None = None
        self._marked = expected.mark is None

    def run(self, lines: Iterable[Line]) -> Iterator[Finding]:
        """Judge it line by line.

        Args:
            lines: of the whole file.

        Raises:
            NotFound, SessionDamaged: the lines' own, before the first one.

        """
        expected = self.expected
        as_of = NEVER if expected.alone else expected.as_of
        sound_to = 0
        try:
            for item in check_transcript(self._tap.over(lines), self.ref, as_of=as_of):
                if isinstance(item, Gap):
                    yield self._gap(item)
                    continue
                sound_to, self._sound = self._tap.end, self._tap.number
                if item.record.commit > expected.as_of:
                    yield self._find("beyond_journal", detail=f"commit {item.record.commit}")
                    return
                self.seen.bytes += len(item.data)
                yield from self.take(item.record)
        except SessionDamaged as damaged:
            if not self._tap.number:
                raise  # the file was not opened: it is not of our own
            self.seen.damaged = True
            yield self._find(_kind_of(str(damaged.carried["damage"])))
            return
        except FormatUnsupported:
            self.seen.damaged = True
            yield self._find("format_unsupported")
            return
        yield from self._end(torn=not self._tap.ended and sound_to < self._tap.end)

    def _gap(self, gap: Gap) -> Finding:
        self.seen.damaged = True
        self.seen.bytes += gap.bytes
        self._acknowledged = None
        return self._find(_kind_of(gap.damage), line=gap.line)

    def _find(self, kind: Kind, *, line: int | None = None, detail: str | None = None) -> Finding:
        where = self._tap.number if line is None else line
        return Finding(kind, self.file, where, self._tap.offset, str(self.ref), detail)

    # --- one record

    def take(self, record: Record) -> Iterator[Finding]:
        """Judge one sound record against those before it."""
        seen, data = self.seen, record.data
        yield from self._laws(record)
        seen.records += 1
        seen.fold.apply(record.seq, record.commit, data)
        seen.epoch, seen.commit = max(seen.epoch, record.epoch), max(seen.commit, record.commit)
        seen.chain, self._ts = record.chain, record.ts
        if isinstance(data, InboxAcknowledged):
            seen.acknowledged_live |= {
                one.message_id for one in data.items if one.message_id in self.live
            }
        elif isinstance(data, PartCreated | PartUpdated):
            self._look_for_artifact(data.payload)
        yield from self._compare_mark(record)

    def _laws(self, record: Record) -> Iterator[Finding]:
        seen, fold, data = self.seen, self.seen.fold, record.data
        if record.commit < seen.commit:
            yield self._find("law_broken", detail="its commit falls")
        if record.epoch < seen.epoch:
            yield self._find("law_broken", detail="its epoch falls")
        if record.ts < self._ts:
            yield self._find("law_broken", detail="its time falls")
        acknowledged, self._acknowledged = self._acknowledged, None
        if seen.damaged or (fold.created is not None and fold.created.relation == "salvage"):
            return  # a turn's other records may be what is gone
        if acknowledged is not None and not _is_terminal_of(record, *acknowledged):
            yield self._find("law_broken", detail="an acknowledgement without its terminal")
        if isinstance(data, InboxAcknowledged) and data.reason in TURN_REASONS:
            self._acknowledged = record, data
        elif isinstance(data, TurnStarted):
            if fold.turn is not None or data.turn_id <= fold.last_turn_id:
                yield self._find("law_broken", detail="a turn begins out of order")
        elif isinstance(data, TurnCompleted | TurnAborted) and (
            fold.turn is None or fold.turn.turn_id != data.turn_id
        ):
            yield self._find("law_broken", detail="a turn ends that does not run")

    def _look_for_artifact(self, payload: Mapping[str, object]) -> None:
        name = artifact_named(payload.get("prompt_artifact"))
        if name is not None and name not in self.artifacts:
            self.seen.missing_artifacts.setdefault(name, self._tap.number)

    def _compare_mark(self, record: Record) -> Iterator[Finding]:
        mark = self.expected.mark
        if self._marked or mark is None or self.seen.bytes < mark.length:
            return
        self._marked = True
        same = (self.seen.bytes, record.chain) == (mark.length, mark.chain)
        if not same and not self.seen.damaged:
            yield self._find("unlike_checkpoint")

    # --- the end

    def _end(self, *, torn: bool) -> Iterator[Finding]:
        mark, seen = self.expected.mark, self.seen
        if not self._marked and mark is not None and not seen.damaged:
            self.seen.damaged = True
            detail = f"{seen.bytes} bytes where {mark.length} were"
            line = self._sound + 1
            yield Finding("truncated", self.file, line, seen.bytes, str(self.ref), detail)
        elif torn and self.expected.settled:
            yield self._find("torn_tail")
        if self._acknowledged is not None and not torn:
            yield self._find("law_broken", detail="an acknowledgement without its terminal")


def _is_terminal_of(record: Record, acked: Record, data: InboxAcknowledged) -> bool:
    """Tell whether a record is the terminal that an acknowledgement stands before (INB-4b)."""
    end = record.data
    if not isinstance(end, TurnCompleted | TurnAborted) or record.commit != acked.commit:
        return False
    named = {one.message_id for one in data.items}
    return end.turn_id == data.turn_id and named <= set(end.claimed_input_ids)


def _kind_of(damage: str) -> Kind:
    match damage:
        case (
            "missing_records"
            | "duplicate_record"
            | "identity_mismatch"
            | "truncated"
            | "foreign_tail"
        ):
            return damage
        case _:
            return "bad_line"


def artifact_named(value: object) -> str | None:
    """Give the artifact that a part's `prompt_artifact` names, if it names one."""
    if not isinstance(value, dict):
        return None
    name: object = value.get("artifact_id")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return name if isinstance(name, str) else None


# --- inboxes --------------------------------------------------------------------------------------


class InboxCheck:
    """Judges one inbox; see `TranscriptCheck`.

    Attributes:
        fold: its live items, or none if it is corrupt.

    """

    def __init__(self, ref: SessionRef, file: str, expected: Expected) -> None:
        self.ref, self.file, self.expected = ref, file, expected
        self.fold: InboxFold | None = None
        self._tap = Tap()
        self._unlike: Finding | None = None
        self._marked = expected.mark is None

    def run(self, lines: Iterable[Line]) -> Iterator[Finding]:
        """Judge it line by line."""
        expected = self.expected
        as_of = NEVER if expected.alone else expected.as_of
        tapped = self._compare(self._tap.over(lines))
        try:
            self.fold = read_inbox(tapped, self.ref, as_of=as_of, growing=not expected.alone)
        except InboxCorrupt as corrupt:
            line = corrupt.carried.get("line")
            number = line if isinstance(line, int) else None
            where = self._tap.offset if number is not None else None
            detail = str(corrupt.carried["reason"])
            yield Finding("inbox_corrupt", self.file, number, where, str(self.ref), detail)
            return
        mark = expected.mark
        if self._unlike is not None:
            yield self._unlike
        elif mark is not None and not self._marked and self._tap.end < mark.length:
            detail = f"{self._tap.end} bytes where {mark.length} were"
            line_number = self._tap.number + 1
            yield Finding("truncated", self.file, line_number, self._tap.end, str(self.ref), detail)

    def _compare(self, lines: Iterator[Line]) -> Iterator[Line]:
        """Compare the line that ends where the checkpoint saw the end with what it wrote down."""
        mark = self.expected.mark
        for line in lines:
            if mark is not None and not self._marked:
                self._compare_line(mark, line)
            yield line

    def _compare_line(self, mark: FileMark, line: Line) -> None:
        if line.number == 1 and not self._is_generation(mark, line):
            self._marked = True  # another file has taken its place since
            if self.expected.settled and self.expected.alone:
                self._unlike = self._differs()
        elif self._tap.end >= mark.length:
            self._marked = True
            if self._tap.end != mark.length or _chain_of(line) != mark.chain:
                self._unlike = self._differs()

    @staticmethod
    def _is_generation(mark: FileMark, line: Line) -> bool:
        return _GENERATION + mark.generation.encode() + b'"' in line.data

    def _differs(self) -> Finding:
        tap = self._tap
        return Finding("unlike_checkpoint", self.file, tap.number, tap.offset, str(self.ref))


def _chain_of(line: Line) -> str:
    try:
        return split_chain(line.data)[1]
    except LineDamage:
        return ""


def against(
    ref: SessionRef,
    transcript: str,
    inbox: str,
    seen: Seen,
    items: InboxFold | None,
    artifacts: AbstractSet[str] = frozenset(),
) -> Iterator[Finding]:
    """Judge an inbox against its transcript (INB-4, INB-5), and both against the artifacts.

    Args:
        ref: the session.
        transcript: the name of its transcript, for findings.
        inbox: that of its inbox.
        seen: what the transcript told.
        items: what the inbox holds; none if there is none that can be read.
        artifacts: those that the session has.

    """
    for name in sorted(seen.acknowledged_live):
        yield Finding("input_acknowledged", inbox, session=str(ref), detail=name)
    created = seen.fold.created
    if items is not None and created is not None and created.relation != "salvage":
        for name in seen.fold.applied:
            if name not in items.items and not seen.damaged:
                yield Finding("input_missing", inbox, session=str(ref), detail=name)
    for name, line in seen.missing_artifacts.items():
        yield Finding("artifact_missing", transcript, line, session=str(ref), detail=name)
    for name in sorted(_named_by(items) - artifacts):
        yield Finding("artifact_missing", inbox, session=str(ref), detail=name)


def _named_by(items: InboxFold | None) -> set[str]:
    """Name the artifacts that inputs which wait name."""
    live = items.items.values() if items is not None else ()
    named = (artifact_named(part.prompt_artifact) for one in live for part in one.item.content)
    return {name for name in named if name is not None}
