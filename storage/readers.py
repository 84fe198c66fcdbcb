"""Reading a home beside its writer, or with the plane down. Nothing here writes (REC-7).

A reader fixes `as_of` when it opens the home: with the plane up the last synced commit as
`run/durable` gives it, else what the journal's frames say by the decision that recovery takes
(FLT-12). It never takes a lock; the storage process itself must not use it on its own home, since
closing the probe's descriptor would drop its lock.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from heapq import merge
from itertools import chain
from pathlib import Path
from typing import NamedTuple, cast, get_args

from callboard.errors import (
    Damage,
    FormatUnsupported,
    InboxCorrupt,
    NotFound,
    SessionAmbiguous,
    SessionDamaged,
    StorageUnreadable,
)
from callboard.fold import SessionFold
from callboard.home import Home, Runtime, runtime_of
from callboard.ids import (
    SessionRef,
    canonical_workspace,
    check_session_id,
    parse_ref,
    workspace_key,
)
from callboard.limits import INBOX_BYTES_MAX, READ_RETRIES_MAX, RECORD_BYTES_MAX
from callboard.records import Record, SessionCreated
from callboard.storage.lines import (
    NEVER,
    Gap,
    LiveItem,
    Mark,
    Sound,
    check_transcript,
    read_inbox,
    split,
)
from callboard.storage.metadata import FileState
from callboard.storage.project import Projection, project
from callboard.storage.source import (
    Format,
    View,
    holder_of,
    journal_tail,
    key_of,
    look,
    pieces_of,
    read_format,
    read_small,
    refs_in,
    unreadable,
    workspaces_in,
)
from callboard.storage.tail import Tail


class Behind(NamedTuple):
    """A place in an undamaged transcript."""

    mark: Mark
    """The record that stands before it."""
    offset: int
    """The byte where that record's line ends."""


def open_home(path: Path | str) -> HomeReader:
    """Open a home for reading, whether its plane is up or not.

    Args:
        path: the home; one that does not exist reads as empty.

    Raises:
        StorageUnreadable: it cannot be read, or it changes too fast to be read.
        JournalDamaged: bytes of the journal that were on the disk once are gone or changed.
        FormatUnsupported: it was written by a version that this one does not know.
        HomeUnsafe: its journal or its format file is none of ours.

    """
    with unreadable():
        home = Home(Path(os.path.realpath(path)))
        found = read_format(home)
        if found is None:
            return HomeReader(home, None, None, View(0, 0, Tail()))
        runtime = runtime_of(home.root)
        return HomeReader(home, found, runtime, look(home, runtime, found.home_id))


class HomeReader:
    """A home as of one commit.

    Attributes:
        home: its paths.
        as_of: the commit that every answer is for (REC-6).

    """

    def __init__(
        self, home: Home, found: Format | None, runtime: Runtime | None, view: View
    ) -> None:
        self.home, self.as_of = home, view.as_of
        self._format, self._runtime, self._view = found, runtime, view
        self._tail: Tail | None = None

    @property
    def plane_up(self) -> bool:
        """Tell whether a storage actor was at work when the home was last looked at."""
        return self._view.holder != 0

    @property
    def home_id(self) -> str:
        """The home's id, empty for a home that does not exist."""
        return self._format.home_id if self._format else ""

    @property
    def cursor_key(self) -> bytes:
        """The key that signs this home's cursors."""
        return bytes.fromhex(self._format.cursor_key) if self._format else bytes(32)

    @property
    def runtime(self) -> Runtime | None:
        """The runtime directory, or none for a home that does not exist."""
        return self._runtime

    def later(self, as_of: int) -> HomeReader:
        """Give a reader of the same home at a later commit, which the files hold already."""
        return HomeReader(self.home, self._format, self._runtime, self._view._replace(as_of=as_of))

    # --- one session

    def transcript(self, ref: SessionRef, from_seq: int = 1) -> Iterator[Record | Gap]:
        """Read a session's records, with a visible gap in place of what is damaged.

        Args:
            ref: the session.
            from_seq: the first record wanted.

        Raises:
            NotFound: there is no such session.
            SessionDamaged: it cannot be told whose transcript it is, or it is another one's.
            FormatUnsupported: a record that this version does not know.
            StorageUnreadable: it cannot be read.

        """
        return (
            item.record if isinstance(item, Sound) else item
            for item in self._from(from_seq, self.sound(ref))
        )

    def lines(self, ref: SessionRef, from_seq: int = 1) -> Iterator[bytes | Gap]:
        """Read a session's records as they are stored, each with its LF; see `transcript`."""
        return (
            item.data if isinstance(item, Sound) else item
            for item in self._from(from_seq, self.sound(ref))
        )

    @staticmethod
    def _from(first: int, items: Iterator[Sound | Gap]) -> Iterator[Sound | Gap]:
        seq = 0
        for item in items:
            if isinstance(item, Sound):
                seq = item.record.seq
                if seq >= first:
                    yield item
            elif seq >= first - 1:
                yield item

    def sound(self, ref: SessionRef, behind: Behind | None = None) -> Iterator[Sound | Gap]:
        """Read a session's lines with what they say; see `transcript`.

        Args:
            ref: the session.
            behind: where to begin, if not at the start.

        """
        items = self._steady(ref, behind)
        first = next(items, None)
        if first is None and behind is None:
            raise NotFound
        return chain(() if first is None else (first,), items)

    def _steady(self, ref: SessionRef, behind: Behind | None) -> Generator[Sound | Gap, None, None]:
        """Read on while the writer lives; after its end look again where it had left off."""
        given = 0
        for _ in range(READ_RETRIES_MAX + 1):
            view = self._view
            for index, item in enumerate(self._checked(view, ref, behind)):
                if index >= given:
                    given += 1
                    yield item
            if not self._moved(view):
                return
            self._look_again()
        raise StorageUnreadable

    def _checked(self, view: View, ref: SessionRef, behind: Behind | None) -> Iterator[Sound | Gap]:
        mark, start = behind or (None, 0)
        pieces = pieces_of(self.home, view, self.home.transcript(ref), start)
        lines = split(pieces, RECORD_BYTES_MAX, before=mark.seq if mark else 0)
        damaged = False
        for item in check_transcript(lines, ref, as_of=self.as_of, behind=mark):
            damaged = damaged or isinstance(item, Gap)
            yield item
        known = view.tail.damaged.get(str(ref))
        if known is not None and not damaged:
            yield Gap(known.line, 0, _as_damage(known.damage))

    def inbox(self, ref: SessionRef) -> list[LiveItem]:
        """Read a session's live inputs in FIFO order.

        An inbox that was compacted after `as_of` is shown as the compaction left it.

        Raises:
            NotFound: there is no such session.
            InboxCorrupt: anything about the inbox is wrong (INB-3).
            StorageUnreadable: it cannot be read.

        """
        for _ in range(READ_RETRIES_MAX + 1):
            view = self._view
            refusal: InboxCorrupt | None = None
            items: list[LiveItem] = []
            try:
                items = self._live(view, ref)
            except InboxCorrupt as corrupt:
                refusal = corrupt
            if not self._moved(view):
                if refusal is not None:
                    raise refusal
                return items
            self._look_again()
        raise StorageUnreadable

    def _live(self, view: View, ref: SessionRef) -> list[LiveItem]:
        lines = split(pieces_of(self.home, view, self.home.inbox(ref)), INBOX_BYTES_MAX)
        try:
            fold = read_inbox(lines, ref, as_of=self.as_of, growing=view.holder != 0)
        except NotFound:
            if not self.exists(ref):
                raise
            return []
        except SessionDamaged:
            raise InboxCorrupt(reason="bad_header", line=1) from None
        return list(fold.items.values())

    def fold(self, ref: SessionRef) -> SessionFold:
        """Fold a session's sound records; see `transcript`."""
        return self.project(ref).now

    def project(self, ref: SessionRef, then: int = NEVER) -> Projection:
        """Fold a session's sound records, and say what is wrong with the rest.

        Args:
            ref: the session.
            then: an earlier commit whose state is wanted too.

        """
        return project(self.sound(ref), then)

    def exists(self, ref: SessionRef) -> bool:
        """Tell whether a session has a transcript, sound or not."""
        path = self.home.transcript(ref)
        return key_of(self.home, path) in self._view.tail.overlays or os.path.lexists(path)

    def file(self, ref: SessionRef) -> FileState | None:
        """Look at the file of a session's transcript; none if there is no such file."""
        with unreadable():
            try:
                return FileState.of(os.lstat(self.home.transcript(ref)))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def lease(self, ref: SessionRef) -> bytes | None:
        """Give the lease of a session as last granted or released, or none if it never had one."""
        found = self._journaled().leases.get(str(ref))
        if found is not None:
            return found
        try:
            return read_small(self.home.lease(ref))
        except (NotFound, SessionDamaged):
            return None

    # --- all sessions

    def find(self, text: str, workspace: str | None = None) -> SessionRef:
        """Find the one session that a text names (IDN-1).

        Args:
            text: a reference, or a session id that must be unique.
            workspace: an absolute path, to look for the id there alone.

        Raises:
            InvalidRequest: the text or the path is none.
            NotFound: there is no such session.
            SessionAmbiguous: several workspaces have a session of this id.

        """
        if "/" in text:
            named = [parse_ref(text)]
        else:
            check_session_id(text)
            keys = self._keys(workspace)
            named = [SessionRef(key, text) for key in keys]
        found = [ref for ref in named if self.exists(ref)]
        if not found:
            raise NotFound
        if len(found) > 1:
            raise SessionAmbiguous(workspaces=[w for ref in found if (w := self._workspace(ref))])
        return found[0]

    def _keys(self, workspace: str | None) -> list[str]:
        if workspace is not None:
            return [workspace_key(canonical_workspace(workspace))]
        return sorted(
            {ref.workspace_key for ref in self._view.tail.refs()} | set(workspaces_in(self.home))
        )

    def _workspace(self, ref: SessionRef) -> str | None:
        """Give the workspace path that a session's first record names."""
        try:
            first = next(iter(self.transcript(ref)))
        except (NotFound, SessionDamaged, FormatUnsupported):
            return None
        if isinstance(first, Record) and isinstance(first.data, SessionCreated):
            return first.data.workspace
        return None

    def refs(self, key: str | None = None) -> Iterator[SessionRef]:
        """Name every session, in order; a session may vanish before it is read.

        Args:
            key: a workspace key, to name the sessions of that workspace alone.

        """
        alone = {ref for ref in self._view.tail.refs() if key in (None, ref.workspace_key)}
        last: SessionRef | None = None
        for ref in merge(sorted(alone), refs_in(self.home, key)):
            if ref != last:
                yield ref
            last = ref

    def changed_since(self, commit: int) -> frozenset[SessionRef] | None:
        """Name the sessions whose transcripts grew after a commit, or none if nobody knows."""
        if commit >= self.as_of:
            return frozenset()
        return self._journaled().changed_since(commit)

    # --- beneath

    def _journaled(self) -> Tail:
        """Give the journal's tail; beside a plane it is read when it is first asked for."""
        if not self.plane_up or self._view.tail.overlays:
            return self._view.tail
        if self._tail is None:
            self._tail = journal_tail(self.home, self.home_id, self.as_of)
        return self._tail

    def _moved(self, view: View) -> bool:
        """Tell whether the writer that a look found has gone; then what it wrote may be cut."""
        return view.holder != 0 and holder_of(self.home) != view.holder

    def _look_again(self) -> None:
        if self._runtime is not None:
            self._view = look(self.home, self._runtime, self.home_id, self.as_of)


def _as_damage(code: str) -> Damage:
    return cast("Damage", code) if code in get_args(Damage) else "bad_line"
