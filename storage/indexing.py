"""Feeds the index with what was materialised; off the ack path, nothing rests on it (FLT-23)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from callboard.errors import InboxCorrupt, SessionDamaged
from callboard.home import Home
from callboard.logs import Log
from callboard.storage.index import CatalogRow, IndexFeed

if TYPE_CHECKING:
    from callboard.storage.engine import Engine, News


class Catalog:
    """Remembers which sessions' transcripts grew, and tells the index now and then."""

    def __init__(self, home: Path, commit: int, log: Log) -> None:
        """Start the index's own thread.

        Args:
            home: the home.
            commit: the last one whose lines stand in the files.
            log: is told when the index cannot be used.

        """
        self._feed = IndexFeed.start(Home(home), commit, log)
        self._touched: dict[str, None] = {}
        self.dirty = False

    def touched(self, news: Iterable[News]) -> None:
        """Remember sessions with new records, and that there are commits to tell of."""
        for one in news:
            self.dirty = True
            if one.lines:
                self._touched[one.text] = None

    def flush(self, engine: Engine) -> None:
        """Tell the index what the files hold now; what is behind comes another time."""
        if not self.dirty:
            return
        rows: list[CatalogRow] = []
        behind: dict[str, None] = {}
        for text in self._touched:
            if engine.files.is_behind(f"sessions/{text}/transcript.jsonl"):
                behind[text] = None
            elif (row := _row(engine, text)) is not None:
                rows.append(row)
        self._touched, self.dirty = behind, bool(behind)
        self._feed.apply(rows, engine.files.written(engine.handed))

    def close(self) -> None:
        """End the index's thread in order."""
        self._feed.close()


def _row(engine: Engine, text: str) -> CatalogRow | None:
    state = engine.sessions.cached(text)
    if state is None:
        return None
    damage = None
    if isinstance(state.damage, SessionDamaged | InboxCorrupt):
        code = state.damage.carried.get("damage") or state.damage.code
        damage = str(code), int(str(state.damage.carried.get("line") or 0))
    try:
        stat = os.stat(engine.files.path(f"sessions/{text}/transcript.jsonl"))
    except OSError:
        return None
    return CatalogRow.of(state.ref, state.fold, stat, state.transcript.chain, damage)
