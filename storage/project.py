"""A transcript's lines, folded: what the session is like, and what is wrong with it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from callboard.fold import SessionFold
from callboard.storage.lines import NEVER, Gap, Sound


class Projection(NamedTuple):
    """A session as its records tell."""

    now: SessionFold
    """After all records up to the reader's as_of."""
    then: SessionFold
    """After those of an earlier commit; not `exists` if there were none."""
    damage: Gap | None
    """The first thing that is wrong with its transcript."""
    chain: str
    """Of the last record; empty if there was none."""


def project(
    items: Iterable[Sound | Gap], then: int = NEVER, behind: SessionFold | None = None
) -> Projection:
    """Fold a transcript's sound records, and say what is wrong with the rest.

    Args:
        items: its lines.
        then: an earlier commit whose state is wanted too.
        behind: the fold that `items` follow, if they are not the whole transcript.

    """
    now = behind or SessionFold()
    before: SessionFold | None = None
    damage: Gap | None = None
    last = ""
    for item in items:
        if isinstance(item, Gap):
            damage = damage or item
            continue
        record = item.record
        if before is None and record.commit > then:
            before = now.clone()
        now.apply(record.seq, record.commit, record.data)
        last = record.chain
    return Projection(now, before or now, damage, last)
