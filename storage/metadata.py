"""What the catalog knows of a session: its metadata, and the row that the index keeps of it. Pure.

Both are folded from the session's records and from nothing else (PRJ-1); beside them a row holds
what the transcript's file was like, so that a later look can tell whether it still is (IDX-6).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, TypeVar, cast

from callboard.errors import FormatUnsupported, SessionDamaged
from callboard.fold import SessionFold, TurnState
from callboard.ids import SessionRef
from callboard.records import QuarantineState, SessionCreated
from callboard.storage.lines import NEVER, Gap, Mark, Sound
from callboard.storage.project import project

T = TypeVar("T")
Value = str | int | None
"""What the index keeps in a column."""


class Damage(NamedTuple):
    """What is wrong with a transcript, and at which line."""

    code: str
    line: int


class Quarantine(NamedTuple):
    """Why a session is not started, and since when in µs."""

    reason: str
    since_at: int


@dataclass(frozen=True, slots=True)
class SessionMetadata:
    """A session as everybody may see it; instants are µs since the epoch."""

    ref: SessionRef
    workspace: str
    root: str
    parent: str | None
    relation: str | None
    title: str | None
    agent: str
    model: str | None
    permission_mode: str
    settings: Mapping[str, str]
    extra: Mapping[str, object]
    created_at: int
    first_message_at: int | None
    last_message_at: int | None
    last_activity_at: int
    updated_at: int
    message_count: int
    has_errors: bool
    turn_state: Literal["none", "active"]
    archived_at: int | None
    paused_at: int | None
    quarantine: Quarantine | None
    git_branch: str | None
    damage: Damage | None
    last_seq: int
    last_commit: int
    code_history_from_seq: int

    @property
    def state(self) -> Literal["ok", "damaged"]:
        """Tell whether its transcript is whole."""
        return "damaged" if self.damage else "ok"

    def to_json(self) -> dict[str, object]:
        """Give it as a JSON object; a reference as `<workspace_key>/<session_id>`."""
        fields: dict[str, object] = asdict(self)
        return fields | {
            "ref": str(self.ref),
            "quarantine": self.quarantine._asdict() if self.quarantine else None,
            "state": self.state,
            "damage": self.damage._asdict() if self.damage else None,
        }


def metadata_of(
    ref: SessionRef, fold: SessionFold, damage: Damage | None = None
) -> SessionMetadata:
    """Show what a fold knows of its session, which must have a creation record."""
    created = fold.created
    assert created is not None
    stopped = fold.quarantine
    return SessionMetadata(
        ref=ref,
        workspace=created.workspace,
        root=created.root,
        parent=created.parent,
        relation=created.relation,
        title=fold.title,
        agent=fold.agent,
        model=fold.model,
        permission_mode=fold.permission_mode,
        settings=fold.settings,
        extra=fold.extra,
        created_at=created.created_at,
        first_message_at=fold.first_message_at,
        last_message_at=fold.last_message_at,
        last_activity_at=fold.last_activity_at,
        updated_at=fold.updated_at,
        message_count=fold.message_count,
        has_errors=fold.has_errors,
        turn_state="active" if fold.turn is not None else "none",
        archived_at=fold.archived_at,
        paused_at=fold.paused_at,
        quarantine=Quarantine(stopped.reason, stopped.since_at) if stopped else None,
        git_branch=created.git_branch,
        damage=damage,
        last_seq=fold.seq,
        last_commit=fold.commit,
        code_history_from_seq=created.code_history_from_seq,
    )


class Scope(NamedTuple):
    """Which sessions a listing is about."""

    workspace: str | None
    """A workspace key, or none for all."""
    include_children: bool
    archived: bool

    def holds(self, relation: str | None, archived_at: int | None) -> bool:
        """Tell whether a session of the workspace belongs to it."""
        if relation == "child" and not self.include_children:
            return False
        return (archived_at is not None) == self.archived


class FileState(NamedTuple):
    """What a transcript's file was like when it was read."""

    size: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(stat: os.stat_result) -> FileState:
        """Take it from a stat."""
        return FileState(stat.st_size, stat.st_mtime_ns, stat.st_ino)


class CatalogRow(NamedTuple):
    """What the index keeps of a session."""

    metadata: SessionMetadata
    created_commit: int
    open_turn: str | None
    """The id of the turn that runs, or none."""
    file: FileState
    chain: str
    """Of the last record; empty if it is not known."""

    @property
    def ref(self) -> SessionRef:
        """The session."""
        return self.metadata.ref

    @property
    def mark(self) -> Mark | None:
        """The last record, if reading may go on behind it."""
        sound = self.chain and self.metadata.damage is None
        return Mark(self.metadata.last_seq, self.chain) if sound else None

    @staticmethod
    def of(
        ref: SessionRef,
        fold: SessionFold,
        stat: os.stat_result,
        chain: str = "",
        damage: tuple[str, int] | None = None,
    ) -> CatalogRow:
        """Make a row of a session's fold after its last materialised record.

        Args:
            ref: the session.
            fold: its fold; nothing of it is kept.
            stat: of its transcript, right after that record was written.
            chain: that record's.
            damage: the code and the line, if the session is damaged.

        """
        metadata = metadata_of(ref, fold, Damage(*damage) if damage else None)
        open_turn = fold.turn.turn_id if fold.turn else None
        return CatalogRow(metadata, fold.created_commit, open_turn, FileState.of(stat), chain)

    def values(self) -> tuple[Value, ...]:
        """Give the columns of the table `sessions`, in its order."""
        m = self.metadata
        quarantine, damage = m.quarantine or (None, None), m.damage or (None, None)
        return (
            *m.ref,
            m.workspace,
            m.root,
            m.parent,
            m.relation,
            m.title,
            m.agent,
            m.model,
            m.permission_mode,
            json.dumps(m.settings),
            json.dumps(m.extra),
            m.created_at,
            m.first_message_at,
            m.last_message_at,
            m.last_activity_at,
            m.updated_at,
            m.message_count,
            int(m.has_errors),
            self.open_turn,
            m.archived_at,
            m.paused_at,
            *quarantine,
            m.git_branch,
            *damage,
            m.last_seq,
            m.last_commit,
            m.code_history_from_seq,
            self.created_commit,
            *self.file,
            self.chain,
        )

    @staticmethod
    def from_values(values: Sequence[Value]) -> CatalogRow:
        """Read a row of the table `sessions`, which may have further columns behind."""
        column = iter(values)

        def text() -> str:
            return cast("str", next(column))

        def number() -> int:
            return cast("int", next(column))

        def text_or_none() -> str | None:
            return cast("str | None", next(column))

        def number_or_none() -> int | None:
            return cast("int | None", next(column))

        metadata = SessionMetadata(
            ref=SessionRef(text(), text()),
            workspace=text(),
            root=text(),
            parent=text_or_none(),
            relation=text_or_none(),
            title=text_or_none(),
            agent=text(),
            model=text_or_none(),
            permission_mode=text(),
            settings=json.loads(text()),
            extra=json.loads(text()),
            created_at=number(),
            first_message_at=number_or_none(),
            last_message_at=number_or_none(),
            last_activity_at=number(),
            updated_at=number(),
            message_count=number(),
            has_errors=bool(number()),
            turn_state="active" if (open_turn := text_or_none()) else "none",
            archived_at=number_or_none(),
            paused_at=number_or_none(),
            quarantine=_pair(Quarantine, text_or_none(), number_or_none()),
            git_branch=text_or_none(),
            damage=_pair(Damage, text_or_none(), number_or_none()),
            last_seq=number(),
            last_commit=number(),
            code_history_from_seq=number(),
        )
        created_commit, file = number(), FileState(number(), number(), number())
        return CatalogRow(metadata, created_commit, open_turn, file, text())


def _pair(kind: Callable[[str, int], T], name: str | None, number: int | None) -> T | None:
    return kind(name, number or 0) if name is not None else None


class Unlisted(NamedTuple):
    """A folder that appears in no listing, but as a warning (IDN-4b)."""

    ref: SessionRef
    code: str
    file: FileState


class Derived(NamedTuple):
    """A session's row as its transcript gives it."""

    row: CatalogRow
    then: SessionFold
    """Its fold at an earlier commit."""


def derive(
    ref: SessionRef,
    items: Callable[[], Iterable[Sound | Gap]],
    file: FileState,
    *,
    then: int = NEVER,
    behind: CatalogRow | None = None,
) -> Derived | Unlisted:
    """Derive a session's row from its transcript.

    Args:
        ref: the session.
        items: gives the lines of its transcript, or those behind `behind`.
        file: what the file was like before it was read.
        then: an earlier commit whose fold is wanted too.
        behind: an earlier row, whose session goes on with `items`.

    Raises:
        NotFound: there is no such session.
        StorageUnreadable: its transcript cannot be read.

    """
    try:
        found = project(items(), then, resume(behind) if behind else None)
    except SessionDamaged as damaged:
        return Unlisted(ref, str(damaged.carried["damage"]), file)
    except FormatUnsupported as unsupported:
        return Unlisted(ref, unsupported.code, file)
    gap = found.damage
    damage = Damage(gap.damage, gap.line) if gap else None
    chain = found.chain or (behind.chain if behind else "")
    metadata = metadata_of(ref, found.now, damage)
    open_turn = found.now.turn.turn_id if found.now.turn else None
    row = CatalogRow(metadata, found.now.created_commit, open_turn, file, chain)
    return Derived(row, found.then)


def resume(row: CatalogRow) -> SessionFold:
    """Give a fold that goes on behind a row; it knows of the session what the row does."""
    m = row.metadata
    created = SessionCreated.model_construct(
        workspace=m.workspace,
        session_id=m.ref.session_id,
        root=m.root,
        parent=m.parent,
        relation=m.relation,
        git_branch=m.git_branch,
        created_at=m.created_at,
        code_history_from_seq=m.code_history_from_seq,
    )
    stopped = m.quarantine
    return SessionFold(
        created=created,
        created_commit=row.created_commit,
        seq=m.last_seq,
        commit=m.last_commit,
        title=m.title,
        agent=m.agent,
        model=m.model,
        permission_mode=m.permission_mode,
        settings=dict(m.settings),
        extra=dict(m.extra),
        quarantine=QuarantineState.model_construct(**stopped._asdict()) if stopped else None,
        paused_at=m.paused_at,
        archived_at=m.archived_at,
        updated_at=m.updated_at,
        message_count=m.message_count,
        first_message_at=m.first_message_at,
        last_message_at=m.last_message_at,
        has_errors=m.has_errors,
        turn=TurnState(row.open_turn, "user", 0, (), 0, 0) if row.open_turn else None,
    )
