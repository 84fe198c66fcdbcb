"""What a client reads for itself from the files of a home, with the plane up or down.

Storage's readers are imported where they are used: a program that only sends pays nothing for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from callboard.artifacts import check_artifact_id
from callboard.errors import InvalidRequest, SessionDamaged
from callboard.home import Home
from callboard.ids import SessionRef, canonical_workspace, check_session_id, parse_ref
from callboard.limits import CATALOG_PAGE_ROWS_DEFAULT, HISTORY_PAGE_MESSAGES_MAX
from callboard.records import (
    Failure,
    LineDamage,
    Record,
    TurnAborted,
    TurnCompleted,
    TurnStarted,
    first_chain,
    link,
    read_record,
    split_chain,
)

if TYPE_CHECKING:
    from callboard.artifact_files import ArtifactReader
    from callboard.config import Settings
    from callboard.storage.catalog import CatalogPage
    from callboard.storage.views import HistoryPage

DAMAGE_CODES: Final = frozenset(
    {"bad_line", "missing_records", "duplicate_record", "identity_mismatch"}
)


def settings_of(
    home: str | os.PathLike[str] | None,
    settings: Settings | Mapping[str, object] | None = None,
) -> Settings:
    """Gather the settings, the home among them, from everywhere they may stand.

    Args:
        home: the home, taken from the working directory if it is relative; default: as configured.
        settings: all of them, or some by name, which win over configuration.

    Raises:
        InvalidRequest: a setting does not fit.

    """
    from callboard.config import Settings, load_settings

    flags: dict[str, object] = {} if isinstance(settings, Settings) else dict(settings or {})
    if home is not None:
        flags["home"] = os.fspath(home)
    if isinstance(settings, Settings) and home is None:
        return settings
    try:
        found = load_settings(flags=flags)
    except FileNotFoundError:
        raise InvalidRequest(
            "The working directory is gone.", field="home", reason="missing"
        ) from None
    if isinstance(settings, Settings):
        return settings.model_copy(update={"home": found.home})
    return found


def existing_workspace(workspace: str | os.PathLike[str]) -> str:
    """Give the canonical path of a workspace that must exist (IDN-2).

    Raises:
        InvalidRequest: it is no folder, or no possible path.

    """
    path = canonical_workspace(absolute(workspace))
    if not os.path.isdir(path):
        raise InvalidRequest(
            "There is no such folder to work in.", field="workspace", reason="missing"
        )
    return path


def absolute(path: str | os.PathLike[str]) -> str:
    """Take a path from the working directory, unless it is absolute; nothing else is looked at.

    Raises:
        InvalidRequest: it is empty, or there is no working directory any more.

    """
    text = os.fspath(path)
    if not text:
        raise InvalidRequest(field="workspace", reason="empty")
    if "\0" in text:
        raise InvalidRequest(field="workspace", reason="nul")
    if os.path.isabs(text):
        return text
    try:
        return os.path.join(os.getcwd(), text)
    except FileNotFoundError:
        raise InvalidRequest(
            "The working directory is gone.", field="workspace", reason="missing"
        ) from None


def artifacts_of(home: Path, ref: SessionRef) -> ArtifactReader:
    """Give the reader of a session's artifacts; nothing is opened yet."""
    from callboard.artifact_files import ArtifactReader

    return ArtifactReader(Home(home).session(ref))


def read_artifact(home: Path, ref: SessionRef, artifact_id: str) -> str:
    """Read the full text of a long message.

    Raises:
        InvalidRequest, ArtifactInvalid, ArtifactStoreUnsafe: see `ArtifactReader.read`.

    """
    data = artifacts_of(home, ref).data(check_artifact_id(artifact_id))
    return data.decode()  # storage keeps nothing that is no UTF-8, and the hash says it is that


def resolve(home: Path, name: str | SessionRef) -> SessionRef:
    """Find the session that a name means: a full reference, or an id that one session has (IDN-1).

    Raises:
        InvalidRequest: neither a reference nor an id.
        NotFound: no session has the id.
        SessionAmbiguous: several have it.

    """
    if isinstance(name, SessionRef):
        return name
    if "/" in name:
        return parse_ref(name)
    check_session_id(name)
    from callboard.storage.readers import open_home

    return open_home(home).find(name)


def read_catalog(
    home: Path,
    workspace: str | os.PathLike[str] | None,
    *,
    limit: int | None = None,
    cursor: str | None = None,
) -> CatalogPage:
    """Give one page of a home's sessions (CAT)."""
    from callboard.storage.catalog import CatalogQuery, list_sessions

    query = CatalogQuery(
        workspace=None if workspace is None else canonical_workspace(absolute(workspace)),
        limit=CATALOG_PAGE_ROWS_DEFAULT if limit is None else limit,
        cursor=cursor,
    )
    return list_sessions(Home(home), query)


def read_history(home: Path, ref: SessionRef, from_seq: int, limit: int | None) -> HistoryPage:
    """Give one page of a session's messages (HIS-1).

    Raises:
        NotFound: there is no such session.
        InvalidRequest: from_seq or limit is out of range.

    """
    from callboard.storage.readers import open_home
    from callboard.storage.views import history

    most = HISTORY_PAGE_MESSAGES_MAX if limit is None else limit
    if not 1 <= most <= HISTORY_PAGE_MESSAGES_MAX:
        raise InvalidRequest(field="limit", reason="out_of_range")
    records = open_home(home).transcript(ref)
    return history(records, from_seq=check_from_seq(from_seq), limit=most)


class TurnEnd(NamedTuple):
    """How a turn ended, as its session's transcript tells."""

    turn_id: str
    outcome: str
    text: str
    """Of its last assistant message."""
    failure: Failure | None


def turn_end(home: Path, ref: SessionRef, turn_id: str) -> TurnEnd | None:
    """Read how a turn ended; none if it has not."""
    return _turn_end(home, ref, lambda end: end.turn_id == turn_id)


def last_try(home: Path, ref: SessionRef, message_id: str) -> TurnEnd | None:
    """Read how the last turn ended that had taken an input; none if no turn had."""
    return _turn_end(home, ref, lambda end: message_id in end.claimed_input_ids)


def _turn_end(
    home: Path, ref: SessionRef, is_meant: Callable[[TurnCompleted | TurnAborted], bool]
) -> TurnEnd | None:
    from callboard.storage.readers import open_home
    from callboard.storage.views import turn_text

    found: TurnEnd | None = None
    turn: list[Record] = []
    for item in open_home(home).transcript(ref):
        if not isinstance(item, Record):
            continue
        data = item.data
        if isinstance(data, TurnStarted):
            turn = []
        turn.append(item)
        if isinstance(data, TurnCompleted | TurnAborted) and is_meant(data):
            failure = data.failure if isinstance(data, TurnAborted) else None
            text = turn_text(turn, data.turn_id)
            found = TurnEnd(data.turn_id, data.outcome, text, failure)
    return found


def check_from_seq(from_seq: int) -> int:
    """Refuse what is no position in a transcript."""
    if from_seq < 1:
        raise InvalidRequest(field="from_seq", reason="out_of_range")
    return from_seq


class RecordReader:
    """Reads the lines of a watch: each is checked, and where they are gapless, their chain too.

    Args:
        ref: whose transcript it is.
        from_seq: where the watch begins.

    """

    def __init__(self, ref: SessionRef, from_seq: int) -> None:
        self._ref = ref
        self._next = from_seq
        self._before = first_chain(str(ref)) if from_seq == 1 else None

    def read(self, line: bytes) -> Record:
        """Read one line without its LF.

        Raises:
            SessionDamaged: it is no record of this transcript, or does not follow the one before.
            FormatUnsupported: a version or type that this callboard does not know.

        """
        try:
            record = read_record(line, None, self._ref, None)
            head, chain = split_chain(line)
            follows = record.seq == self._next and self._before is not None
            if record.seq < self._next or (follows and link(str(self._before), head) != chain):
                raise LineDamage("bad_line")
        except LineDamage as damage:
            code = damage.code if damage.code in DAMAGE_CODES else "bad_line"
            raise SessionDamaged(damage=code, line=self._next) from None
        self._next, self._before = record.seq + 1, chain
        return record
