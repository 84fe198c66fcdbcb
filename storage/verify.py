"""`callboard verify`: judges a whole home, with its plane up or down, and changes nothing (REC-7).

Beside a running plane everything is judged as of one commit, and what looks wrong is looked at
again, from a new commit, VERIFY_LOOKS times in all: what a writer was in the middle of is right the
next time. Memory is bounded by limits (a line, an inbox, a journal segment, the frames since the
last checkpoint), whatever the size of a transcript.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from callboard.errors import (
    CallboardError,
    FormatUnsupported,
    HomeUnsafe,
    JournalDamaged,
    NotFound,
    OwnerUnprovable,
    SessionDamaged,
    StorageUnreadable,
)
from callboard.home import Home, Runtime, judge, runtime_of
from callboard.ids import SessionRef
from callboard.limits import INBOX_BYTES_MAX, READ_RETRIES_MAX, RECORD_BYTES_MAX, VERIFY_LOOKS
from callboard.storage.check import Expected, InboxCheck, Seen, TranscriptCheck, against
from callboard.storage.findings import Finding, Kind, first_of_each_file
from callboard.storage.frames import FileMark
from callboard.storage.journal import Journal, commits, segment_name
from callboard.storage.leases import LEASE_BYTES_MAX, read_lease
from callboard.storage.lines import NEVER, Hole, InboxFold, Sound, check_transcript, split
from callboard.storage.parity import IndexBook
from callboard.storage.readers import HomeReader
from callboard.storage.source import (
    Format,
    StartOver,
    View,
    holder_of,
    key_of,
    look,
    pieces_of,
    read_durable,
    read_format,
    read_from,
    read_journal,
    refs_in,
    segments_of,
)
from callboard.storage.tail import Tail
from callboard.storage.tree import look_around

_PAUSE_S: Final = 0.05
"""Before something that may be in the middle of a change is looked at again."""


@dataclass(slots=True)
class Totals:
    """What was looked at."""

    sessions: int = 0
    records: int = 0
    bytes: int = 0
    """Of transcripts and inboxes."""
    artifacts: int = 0
    plane_up: bool = False
    as_of: int = 0
    """The last commit that was judged."""
    highest_commit: int = 0
    """In any record."""


def verify(path: Path | str, totals: Totals | None = None) -> Iterator[Finding]:
    """Judge a home.

    Args:
        path: the home; one that does not exist has nothing wrong with it.
        totals: where to count what was looked at.

    Yields:
        What is wrong, as it is found: the folders first, then the journal, then session by session,
        then the index.

    Raises:
        StorageUnreadable: the home cannot be read, or it changes too fast to be read.
        HomeUnsafe: no runtime directory fits it.

    """
    home = Home(Path(os.path.realpath(path)))
    if not os.path.lexists(home.root):
        return
    found = _Verifier(home, runtime_of(home.root), totals or Totals()).run()
    yield from first_of_each_file(found)


class Ground(NamedTuple):
    """What a look at a home found beside its sessions."""

    reader: HomeReader
    view: View
    journal: Journal | None
    """None if it cannot be read: then files are judged by themselves."""
    marks: dict[str, FileMark]
    leases: dict[str, bytes]
    """The last lease of each session that a frame gives, of a home whose plane is down."""

    @property
    def alone(self) -> bool:
        """Tell whether nobody writes."""
        return self.view.holder == 0


@dataclass(slots=True)
class _Verifier:
    home: Home
    runtime: Runtime
    totals: Totals
    format: Format | None = None
    _salvaged: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """By workspace: the sessions that were salvaged, and what each was salvaged as."""

    def run(self) -> Iterator[Finding]:
        yield from self._again(self._names)
        try:
            self.format = read_format(self.home)
        except FormatUnsupported as unsupported:
            version = str(unsupported.carried.get("version"))
            yield Finding("format_unsupported", "format.json", detail=f"version {version}")
            return
        except HomeUnsafe:
            yield Finding("format_invalid", "format.json")
            return
        if self.format is None:
            if any(refs_in(self.home)):
                yield Finding("format_invalid", "format.json", detail="missing")
            return
        ground, found = self._ground()
        yield from found
        if ground.journal is None and found[0].kind == "format_unsupported":
            return
        self.totals.plane_up, self.totals.as_of = not ground.alone, ground.view.as_of
        yield from self._marker(ground)
        index = IndexBook(self.home, self.format.home_id)
        try:
            for ref in ground.reader.refs():
                yield from self._confirmed(ref, ground, index)
            yield from index.end(ground.reader, alone=ground.alone)
        finally:
            index.close()

    # --- the home

    def _names(self) -> list[Finding]:
        uid = os.getuid()
        found = list(look_around(str(self.home.root), uid))
        if self.runtime.root.parent != self.home.root:
            found += look_around(str(self.runtime.root), uid, "run", "run")
        return found

    def _again(self, judge_it: Callable[[], list[Finding]]) -> list[Finding]:
        """Look again at what seems wrong while somebody writes, and keep what stays."""
        found = judge_it()
        for _ in range(VERIFY_LOOKS - 1):
            if not found or not holder_of(self.home):
                break
            time.sleep(_PAUSE_S)
            later = set(judge_it())
            found = [one for one in found if one in later]
        return found

    def _ground(self) -> tuple[Ground, list[Finding]]:
        """Look at the journal and at what can be judged."""
        assert self.format is not None
        try:
            return self._look(), []
        except JournalDamaged as damaged:
            segment, offset = (int(str(damaged.carried[name])) for name in ("segment", "offset"))
            file = f"journal/{segment_name(segment)}"
            finding = Finding("journal_damaged", file, offset=offset)
        except HomeUnsafe as unsafe:
            finding = Finding("journal_foreign", "journal", detail=str(unsafe.carried["reason"]))
        except FormatUnsupported:
            finding = Finding("format_unsupported", "journal")
        view = View(NEVER, 0, Tail())
        reader = HomeReader(self.home, self.format, self.runtime, view)
        return Ground(reader, view, None, {}, {}), [finding]

    def _look(self) -> Ground:
        assert self.format is not None
        home_id = self.format.home_id
        for _ in range(READ_RETRIES_MAX + 1):
            try:
                journal = read_journal(self.home, home_id)
                view = look(self.home, self.runtime, home_id)
                leases = self._journaled_leases(journal) if view.holder == 0 else {}
            except StartOver:
                continue
            except JournalDamaged:
                look(self.home, self.runtime, home_id)  # raises it with nobody at work
                continue
            reader = HomeReader(self.home, self.format, self.runtime, view)
            marks = journal.checkpoint.files if journal.checkpoint else ()
            return Ground(reader, view, journal, {mark.file: mark for mark in marks}, leases)
        raise StorageUnreadable

    def _journaled_leases(self, journal: Journal) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for _, commit in commits(journal._replace(checkpoint=None), segments_of(self.home)):
            found.update(commit.leases)
        return found

    def _marker(self, ground: Ground) -> Iterator[Finding]:
        """Judge `run/durable` beside a plane; with the plane down nobody reads it."""
        if ground.alone or ground.journal is None:
            return
        yield from self._again(self._judge_marker)

    def _judge_marker(self) -> list[Finding]:
        assert self.format is not None
        try:
            pair = read_durable(self.runtime)
            last = read_journal(self.home, self.format.home_id).last_commit
        except (StartOver, JournalDamaged):
            return [Finding("durable_invalid", "run/durable")]
        if pair is None or pair[1] <= pair[0] <= last:
            return []
        detail = f"{pair[0]}, {pair[1]} where the journal has {last}"
        return [Finding("durable_invalid", "run/durable", detail=detail)]

    # --- sessions

    def _confirmed(self, ref: SessionRef, ground: Ground, index: IndexBook) -> list[Finding]:
        found = _Session(self, ref, ground, index).judge()
        for _ in range(VERIFY_LOOKS - 1):
            if not found or ground.journal is None or not self._is_moving(ground):
                break
            time.sleep(_PAUSE_S)
            ground, index_again = self._look(), index.again()
            earlier = {one.kind for one in found}
            try:
                later = _Session(self, ref, ground, index_again).judge()
            finally:
                index_again.close()
            found = [one for one in later if one.kind in earlier]
        if any(one.meaning.repair == "restore" for one in found):
            name = self._salvages(ref.workspace_key).get(str(ref))
            found = [one._replace(salvaged_as=name) for one in found]
        self.totals.sessions += 1
        return found

    def _is_moving(self, ground: Ground) -> bool:
        return not ground.alone or holder_of(self.home) != 0

    def _salvages(self, key: str) -> dict[str, str]:
        """Find out which sessions of a workspace were salvaged, once."""
        if key not in self._salvaged:
            found = self._salvaged[key] = {}
            for ref in refs_in(self.home, key):
                parent = _salvage_of(self.home, ref)
                if parent is not None:
                    found[parent] = str(ref)
        return self._salvaged[key]


def _salvage_of(home: Home, ref: SessionRef) -> str | None:
    """Give the session that a session was salvaged from, by its first record."""
    try:
        lines = split(read_from(home.transcript(ref)), RECORD_BYTES_MAX)
        first = next(check_transcript(lines, ref), None)
    except CallboardError:
        return None
    if not isinstance(first, Sound):
        return None
    data = first.record.data
    relation, parent = getattr(data, "relation", None), getattr(data, "parent", None)
    return str(parent) if relation == "salvage" else None


@dataclass(slots=True)
class _Session:
    """One session under judgement, as of one look at its home."""

    of: _Verifier
    ref: SessionRef
    ground: Ground
    index: IndexBook

    def judge(self) -> list[Finding]:
        found: list[Finding] = []
        artifacts = self._artifacts(found)
        items = self._inbox(found)
        before = self.ground.reader.file(self.ref)
        seen = self._transcript(found, items, artifacts)
        if seen is None:
            return found
        home = self.of.home
        transcript, inbox = home.transcript(self.ref), home.inbox(self.ref)
        names = key_of(home, transcript), key_of(home, inbox)
        found += against(self.ref, *names, seen, items, artifacts)
        self._lease(found, seen)
        if seen.fold.exists and not seen.damaged and self._settled(transcript):
            after = self.ground.reader.file(self.ref)
            still = before is not None and before == after
            found += self.index.compare(
                self.ref, seen, before if still else None, self.ground.alone
            )
        return found

    def _settled(self, path: Path) -> bool:
        """Tell whether the journal has nothing more for a file."""
        known = self.ground.journal is not None
        return known and key_of(self.of.home, path) not in self.ground.view.tail.overlays

    def _expected(self, path: Path) -> Expected:
        ground = self.ground
        known = ground.journal is not None
        return Expected(
            ground.view.as_of,
            alone=ground.alone,
            settled=known and self._settled(path),
            mark=ground.marks.get(key_of(self.of.home, path)),
        )

    def _pieces(self, path: Path) -> Iterator[bytes | Hole]:
        for piece in pieces_of(self.of.home, self.ground.view, path):
            self.of.totals.bytes += piece.size if isinstance(piece, Hole) else len(piece)
            yield piece

    def _find(self, kind: Kind, path: Path, detail: str | None = None) -> Finding:
        file = key_of(self.of.home, path)
        return Finding(kind, file, session=str(self.ref), detail=detail)

    # --- transcript and inbox

    def _transcript(
        self, found: list[Finding], items: InboxFold | None, artifacts: frozenset[str]
    ) -> Seen | None:
        path = self.of.home.transcript(self.ref)
        live = frozenset(items.items) if items is not None else frozenset[str]()
        expected = self._expected(path)
        check = TranscriptCheck(self.ref, key_of(self.of.home, path), expected, live, artifacts)
        try:
            wrong = list(first_of_each_file(check.run(split(self._pieces(path), RECORD_BYTES_MAX))))
        except NotFound:
            if expected.mark is not None or self._has_remains():
                found.append(self._find("transcript_missing", path))
            return None
        except SessionDamaged:
            return None  # none of our files; the look at the names says so
        except StorageUnreadable:
            found.append(self._find("unreadable", path))
            return None
        known = self.ground.view.tail.damaged.get(str(self.ref))
        if known is not None and not wrong:
            kind: Kind = "foreign_tail" if known.damage == "foreign_tail" else "truncated"
            wrong.append(self._find(kind, path, "found by an earlier start"))
            check.seen.damaged = True
        found += wrong
        totals = self.of.totals
        totals.records += check.seen.records
        totals.highest_commit = max(totals.highest_commit, check.seen.commit)
        return check.seen

    def _has_remains(self) -> bool:
        """Tell whether a folder without a transcript once had one."""
        home = self.of.home
        return any(os.path.lexists(path) for path in (home.inbox(self.ref), home.lease(self.ref)))

    def _inbox(self, found: list[Finding]) -> InboxFold | None:
        path = self.of.home.inbox(self.ref)
        expected = self._expected(path)
        check = InboxCheck(self.ref, key_of(self.of.home, path), expected)
        try:
            found += check.run(split(self._pieces(path), INBOX_BYTES_MAX))
        except NotFound:
            if expected.mark is not None:
                found.append(self._find("inbox_corrupt", path, "missing"))
            return None
        except SessionDamaged:
            return None
        except StorageUnreadable:
            found.append(self._find("unreadable", path))
            return None
        return check.fold

    # --- lease

    def _lease(self, found: list[Finding], seen: Seen) -> None:
        path = self.of.home.lease(self.ref)
        data = self.ground.reader.lease(self.ref)
        if data is None:
            if seen.epoch:
                found.append(self._find("lease_missing", path))
            return
        try:
            if len(data) > LEASE_BYTES_MAX:
                raise OwnerUnprovable
            lease = read_lease(data, self.ref)
        except OwnerUnprovable:
            found.append(self._find("lease_invalid", path))
            return
        if lease.epoch < seen.epoch:
            detail = f"epoch {lease.epoch} where {seen.epoch} was"
            found.append(self._find("lease_behind", path, detail))
        elif self.ground.leases.get(str(self.ref), data) != data:
            found.append(self._find("lease_differs", path))
        elif lease.held and judge(self.of.runtime, lease.identity()) == "unknown":
            found.append(self._find("owner_unprovable", path, f"epoch {lease.epoch}"))

    # --- artifacts

    def _artifacts(self, found: list[Finding]) -> frozenset[str]:
        """Hash what is there; names, modes and owners are judged with all other names."""
        folder = self.of.home.session(self.ref) / "artifacts"
        try:
            names = sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return frozenset()
        except OSError:
            found.append(self._find("unreadable", folder))
            return frozenset()
        there: set[str] = set()
        for name in names:
            if _DIGEST.match(name) and (digest := _hash(folder / name)) is not None:
                there.add(name)
                self.of.totals.artifacts += 1
                if digest != name:
                    found.append(self._find("artifact_altered", folder / name))
        return frozenset(there)


_DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)
_PIECE: Final = 1 << 16


def _hash(path: Path) -> str | None:
    """Hash a regular file, a piece at a time; none if there is none that can be opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        digest = hashlib.sha256()
        while piece := os.read(fd, _PIECE):
            digest.update(piece)
        return digest.hexdigest()
    except OSError:
        return None
    finally:
        os.close(fd)
