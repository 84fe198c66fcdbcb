"""The catalog: sessions in pages, by last activity, from the index or from the files alike.

A first page fixes `as_of`; on later pages membership and order are those of that commit, while what
a row says is current (CAT-4). Both paths give the same rows; without a usable index the files are
read (IDX-1, IDX-5). Nothing here writes.
"""

from __future__ import annotations

import heapq
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from callboard.errors import CursorInvalid, InvalidRequest, NotFound, OwnerUnprovable
from callboard.home import Home, judge
from callboard.ids import SessionRef, canonical_workspace, workspace_key
from callboard.limits import (
    CATALOG_PAGE_ROWS_DEFAULT,
    CATALOG_PAGE_ROWS_MAX,
    INDEX_RETRY_MS,
    WARNINGS_MAX,
)
from callboard.storage.cursor import Cursor, decode, encode, scope_digest
from callboard.storage.leases import read_lease
from callboard.storage.lines import NEVER
from callboard.storage.metadata import (
    CatalogRow,
    Damage,
    Derived,
    FileState,
    Scope,
    SessionMetadata,
    Unlisted,
    derive,
    metadata_of,
)
from callboard.storage.readers import Behind, HomeReader, open_home
from callboard.storage.source import CATCH_UP_S, PAUSE_S

if TYPE_CHECKING:
    from callboard.storage.index import IndexReader

Liveness = Literal["live", "passive", "lost", "unknown"]
_logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CatalogQuery:
    """What to list."""

    workspace: str | None = None
    """An absolute path, or none for every workspace."""
    include_children: bool = False
    archived: bool = False
    limit: int = CATALOG_PAGE_ROWS_DEFAULT
    cursor: str | None = None
    """`next_cursor` of the page before."""


class Warning(NamedTuple):
    """A session that is not as it should be."""

    session_id: str
    code: str


@dataclass(frozen=True, slots=True)
class CatalogPage:
    """A piece of a listing."""

    rows: tuple[SessionMetadata, ...]
    next_cursor: str | None
    as_of: int
    source: Literal["index", "scan"]
    warnings: tuple[Warning, ...] = ()
    warnings_total: int = 0

    def to_json(self) -> dict[str, object]:
        """Give it as a JSON object."""
        return {
            "rows": [row.to_json() for row in self.rows],
            "next_cursor": self.next_cursor,
            "as_of": self.as_of,
            "source": self.source,
            "warnings": [warning._asdict() for warning in self.warnings],
            "warnings_total": self.warnings_total,
        }


def list_sessions(home: Home | HomeReader, query: CatalogQuery) -> CatalogPage:
    """List sessions, those with the latest activity first (CAT-1 to CAT-5, CAT-7, CAT-8).

    Args:
        home: a home, or a reader that has it open.
        query: what to list.

    Raises:
        InvalidRequest: the limit or the workspace does not fit.
        CursorInvalid, CursorScopeMismatch: the cursor is none of this listing's.
        StorageUnreadable: something cannot be read.

    """
    return _Listing.of(home, query).page()


def find_session(reader: HomeReader, ref: SessionRef) -> SessionMetadata:
    """Give a session's metadata, as its transcript tells it.

    Raises:
        NotFound: there is no such session.
        SessionDamaged: it cannot be told whose transcript it is, or it is another one's.
        FormatUnsupported: a record that this version does not know.
        StorageUnreadable: it cannot be read.

    """
    found = reader.project(ref)
    gap = found.damage
    return metadata_of(ref, found.now, Damage(gap.damage, gap.line) if gap else None)


def liveness(reader: HomeReader, ref: SessionRef) -> Liveness:
    """Tell whether a session's owner lives; judged now, and kept nowhere (CAT-9).

    Returns:
        live: its process runs. passive: nobody has it. lost: its owner died without giving it
        back. unknown: that cannot be told from here.

    """
    data = reader.lease(ref)
    if data is None or reader.runtime is None:
        return "passive"
    try:
        lease = read_lease(data, ref)
    except OwnerUnprovable:
        return "unknown"
    if not lease.held:
        return "passive"
    match judge(reader.runtime, lease.identity()):
        case "alive":
            return "live"
        case "dead":
            return "lost"
        case "unknown":
            return "unknown"


# --- one page -------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where a session stands in the order of a walk; smaller is earlier (CAT-2)."""

    recency: int
    """The last activity at the walk's as_of, negated."""
    ref: SessionRef


class _Entry(NamedTuple):
    """A session at its place, with what is known of it so far."""

    place: _Place
    found: CatalogRow
    current: bool
    """Whether `found` was read from the transcript just now."""


class _Listing:
    """One page in the making."""

    def __init__(
        self, reader: HomeReader, scope: Scope, limit: int, cursor: Cursor | None, digest: str
    ) -> None:
        self.reader, self.scope, self.limit, self.digest = reader, scope, limit, digest
        self.fixed = cursor.as_of if cursor else None
        self.behind = _Place(-cursor.activity_at, cursor.ref) if cursor else None
        self.warnings: dict[SessionRef, str] = {}

    @classmethod
    def of(cls, home: Home | HomeReader, query: CatalogQuery) -> _Listing:
        """Check a query before anything is read but the home itself."""
        if type(query.limit) is not int:
            raise InvalidRequest(field="limit", reason="type")
        if not 1 <= query.limit <= CATALOG_PAGE_ROWS_MAX:
            raise InvalidRequest(field="limit", reason="out_of_range")
        workspace = query.workspace
        key = workspace_key(canonical_workspace(workspace)) if workspace is not None else None
        scope = Scope(key, query.include_children, query.archived)
        digest = _digest(scope)
        reader = home if isinstance(home, HomeReader) else open_home(home.root)
        if query.cursor is None:
            return cls(reader, scope, query.limit, None, digest)
        try:
            cursor = _decode(query.cursor, reader, digest)
        except CursorInvalid:
            if not reader.plane_up:
                raise
            reader = open_home(reader.home.root)  # it may be of a commit since
            cursor = _decode(query.cursor, reader, digest)
        return cls(reader, scope, query.limit, cursor, digest)

    def page(self) -> CatalogPage:
        """Read the page, from the index if it can be used."""
        return self._by_index() or self._by_scan()

    # --- from the files

    def _by_scan(self) -> CatalogPage:
        as_of = self.reader.as_of if self.fixed is None else self.fixed
        self.warnings.clear()
        entries = self._derived(self.reader.refs(self.scope.workspace), as_of)
        first = heapq.nsmallest(self.limit + 1, entries, key=lambda entry: entry.place)
        return self._make(first, as_of, "scan")

    def _derived(self, refs: Iterable[SessionRef], as_of: int) -> Iterator[_Entry]:
        """Read transcripts; give the sessions that belong to the walk and stand behind its place.

        What is wrong with a session of the scope is noted, wherever it stands.
        """
        for ref in refs:
            found = self._read(ref, as_of)
            if found is None:
                continue
            metadata, then = found.row.metadata, found.then
            if not then.exists or not self.scope.holds(metadata.relation, then.archived_at):
                continue
            self._note(metadata)
            place = _Place(-then.last_activity_at, ref)
            if self.behind is None or place > self.behind:
                yield _Entry(place, found.row, current=True)

    def _read(
        self, ref: SessionRef, then: int = NEVER, behind: CatalogRow | None = None
    ) -> Derived | None:
        """Derive a session's row; none if it vanished, or is not listed."""
        file = self.reader.file(ref) or FileState(0, 0, 0)
        start = None
        if behind is not None and behind.mark is not None:
            start = Behind(behind.mark, behind.file.size)
        try:
            items = partial(self.reader.sound, ref, start)
            found = derive(ref, items, file, then=then, behind=behind if start else None)
        except NotFound:
            return None
        if isinstance(found, Unlisted):
            self.warnings[ref] = found.code
            return None
        return found

    def _note(self, metadata: SessionMetadata) -> None:
        if metadata.damage is not None:
            self.warnings[metadata.ref] = metadata.damage.code
        else:
            self.warnings.pop(metadata.ref, None)

    # --- from the index

    def _by_index(self) -> CatalogPage | None:
        """Read the page from the index; none if that cannot be used now."""
        path = self.reader.home.index
        if not self.reader.home_id or indexes_off.is_off(path):
            return None
        if not os.path.lexists(path):
            indexes_off.say(path, "missing")
            return None
        from callboard.storage.index import IndexReader, cause_of  # SQLite, only where it is used

        try:
            with self._caught_up(IndexReader) as index:
                return self._from_index(index)
        except IndexReader.ERRORS as error:
            indexes_off.set(path, cause_of(error))
            return None

    def _caught_up(self, kind: type[IndexReader]) -> IndexReader:
        """Open the index; beside a running plane, wait a little until it has come far enough."""
        until = time.monotonic() + CATCH_UP_S
        while True:
            index = kind(self.reader.home, self.reader.home_id)
            behind = index.applied < self.reader.as_of
            if not (behind and self.reader.plane_up and time.monotonic() < until):
                return index
            index.close()
            time.sleep(PAUSE_S)

    def _from_index(self, index: IndexReader) -> CatalogPage | None:
        if index.applied > self.reader.as_of:
            if not self.reader.plane_up:
                indexes_off.say(self.reader.home.index, "ahead")
                return None
            self.reader = self.reader.later(index.applied)
        changed = self.reader.changed_since(index.applied)
        if changed is None:
            indexes_off.say(self.reader.home.index, "behind")
            return None
        as_of = self.reader.as_of if self.fixed is None else self.fixed
        self.warnings.update(index.damaged(self.scope))
        moved = set(changed) | index.moved(as_of)
        if self.scope.workspace is not None:
            moved = {ref for ref in moved if ref.workspace_key == self.scope.workspace}
        entries = heapq.merge(
            self._indexed(index, as_of, moved),
            sorted(self._derived(sorted(moved), as_of), key=lambda entry: entry.place),
            key=lambda entry: entry.place,
        )
        rows: list[_Entry] = []
        for entry in entries:
            if len(rows) == self.limit:  # that there is a next one is enough to know (CAT-10)
                return self._make([*rows, entry], as_of, "index")
            if (current := self._current(entry)) is not None:
                rows.append(current)
        return self._make(rows, as_of, "index")

    def _indexed(
        self, index: IndexReader, as_of: int, moved: AbstractSet[SessionRef]
    ) -> Iterator[_Entry]:
        behind = (-self.behind.recency, self.behind.ref) if self.behind else None
        for row in index.page(self.scope, behind, as_of):
            if row.ref not in moved:
                yield _Entry(_Place(-row.metadata.last_activity_at, row.ref), row, current=False)

    def _current(self, entry: _Entry) -> _Entry | None:
        """See that a row still says what its transcript does, or derive it anew (IDX-6)."""
        row = entry.found
        if entry.current:
            return entry
        file = self.reader.file(row.ref)
        if file == row.file:
            return entry
        grown = file is not None and file.inode == row.file.inode and file.size > row.file.size
        self.warnings.pop(row.ref, None)
        found = self._read(row.ref, behind=row) if grown else None
        if found is None or found.row.metadata.damage:  # the whole of it says whether that is so
            found = self._read(row.ref)
        if found is None:
            return None
        self._note(found.row.metadata)
        return _Entry(entry.place, found.row, current=True)

    # --- together

    def _make(
        self, entries: Sequence[_Entry], as_of: int, source: Literal["index", "scan"]
    ) -> CatalogPage:
        rows = entries[: self.limit]
        cursor = None
        if len(entries) > self.limit:
            recency, ref = rows[-1].place
            cursor = encode(
                Cursor("catalog", self.digest, as_of, -recency, ref), self.reader.cursor_key
            )
        shown = islice(sorted(self.warnings.items()), WARNINGS_MAX)
        return CatalogPage(
            tuple(entry.found.metadata for entry in rows),
            cursor,
            as_of,
            source,
            tuple(Warning(ref.session_id, code) for ref, code in shown),
            len(self.warnings),
        )


def _decode(token: str, reader: HomeReader, digest: str) -> Cursor:
    return decode(token, reader.cursor_key, kind="catalog", scope=digest, last_commit=reader.as_of)


def _digest(scope: Scope) -> str:
    """Digest what a walk ranges over; filters that come later have their places already."""
    return scope_digest(
        {
            "archived": scope.archived,
            "due_after": None,
            "due_before": None,
            "include_children": scope.include_children,
            "kind": "catalog",
            "principal": "operator",
            "priority": [],
            "status": [],
            "workspace": scope.workspace,
        }
    )


class IndexesOff:
    """Which indexes this process goes without at present, and what it has said of them."""

    def __init__(self) -> None:
        self._until: dict[Path, float] = {}
        self._said: set[tuple[Path, str]] = set()

    def is_off(self, path: Path) -> bool:
        """Tell whether an index failed a moment ago; it is tried again after INDEX_RETRY_MS."""
        return time.monotonic() < self._until.get(path, 0.0)

    def set(self, path: Path, cause: str) -> None:
        """Go without an index for a while."""
        self._until[path] = time.monotonic() + INDEX_RETRY_MS / 1_000
        self.say(path, cause)

    def say(self, path: Path, cause: str) -> None:
        """Say why an index is not used, once for each cause."""
        if (path, cause) not in self._said:
            self._said.add((path, cause))
            _logger.warning("index_off: reading the files instead (%s)", cause)


indexes_off: Final = IndexesOff()
