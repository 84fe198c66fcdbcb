"""Reads what a home holds, for `verdict.judge`; with the plane up or down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from callboard.cli.oracle import Entry, oracle_of, read_oracle
from callboard.cli.verdict import Evidence, Input, Verdict, judge
from callboard.errors import CallboardError, InvalidRequest, NotFound
from callboard.fold import TURN_REASONS
from callboard.ids import parse_ref
from callboard.messages import InboxItem
from callboard.records import (
    InboxAcknowledged,
    MessageCreated,
    PartCreated,
    Record,
    TurnAborted,
    TurnCompleted,
    item_digest,
)

if TYPE_CHECKING:
    from callboard.storage.readers import HomeReader


def verify_home(home: Path) -> Verdict:
    """Compare a home with the oracle file beside it.

    Raises:
        InvalidRequest: there is no oracle file, or it is none of ours.
        StorageUnreadable, JournalDamaged, HomeUnsafe, FormatUnsupported: the home cannot be read.

    """
    from callboard.storage.readers import open_home

    entries = read_oracle(oracle_of(home))
    return judge(entries, gather(open_home(home), entries))


def gather(reader: HomeReader, entries: Iterable[Entry]) -> dict[str, Evidence]:
    """Gather the evidence of every session that an oracle names."""
    names = dict.fromkeys(entry.session for entry in entries)
    return {name: evidence_of(reader, name) for name in names}


def evidence_of(reader: HomeReader, name: str) -> Evidence:
    """Gather the evidence of one session: what can be read of it."""
    reading = _Reading()
    waiting: list[Input] = []
    damage = ""
    try:
        ref = parse_ref(name)
        for item in reader.transcript(ref):
            if isinstance(item, Record):
                reading.take(item)
            else:
                damage = damage or f"line {item.line} of its transcript is damaged"
                reading.gap()
        waiting = [_of_item(live.item) for live in reader.inbox(ref)]
    except (NotFound, InvalidRequest):
        damage = "the session is not there"
    except CallboardError as error:
        damage = f"{error.code}: {error.message}"
    return Evidence(reading.messages(), reading.acknowledged, reading.discarded, waiting, damage)


def _of_item(item: InboxItem) -> Input:
    """Judge an item by what it holds, not by the digest that it carries."""
    content = [part.model_dump(exclude_none=True) for part in item.content]
    return Input(item.message_id, item_digest(content, item.metadata))


@dataclass(slots=True)
class _Applied:
    """A user message, while its parts come."""

    inbox_message_id: str
    metadata: dict[str, object]
    texts: list[str] = field(default_factory=list[str])
    artifact: object = None
    """Its reference to its full text, if it was too long for a record (ART-1)."""

    def content(self) -> list[dict[str, object]]:
        """Give what it says, as digests see it."""
        part: dict[str, object] = {"type": "text", "text": "".join(self.texts)}
        return [part if self.artifact is None else part | {"prompt_artifact": self.artifact}]


@dataclass(slots=True)
class _Reading:
    """A transcript as far as it was read."""

    applied: dict[str, _Applied] = field(default_factory=dict[str, _Applied])
    acknowledged: list[Input] = field(default_factory=list[Input])
    discarded: list[Input] = field(default_factory=list[Input])
    claimed: tuple[int, InboxAcknowledged] | None = None
    """An acknowledgement that is none before its turn's end follows, and the frame it is in."""

    def take(self, record: Record) -> None:
        data, claimed = record.data, self.claimed
        self.claimed = None
        if isinstance(data, InboxAcknowledged):
            if data.reason in TURN_REASONS:
                self.claimed = record.commit, data
            else:
                self.discarded += _acknowledged(data)
        elif isinstance(data, TurnCompleted | TurnAborted):
            # INB-4b: directly before the end of the same turn, and in the same frame (INB-5).
            if claimed and claimed[0] == record.commit and claimed[1].turn_id == data.turn_id:
                self.acknowledged += _acknowledged(claimed[1])
        elif isinstance(data, MessageCreated):
            if data.role == "user" and data.inbox_message_id is not None:
                self.applied.setdefault(
                    data.message_id, _Applied(data.inbox_message_id, data.metadata or {})
                )
        elif (
            isinstance(data, PartCreated)
            and data.part_type == "text"
            and data.message_id in self.applied
        ):
            applied = self.applied[data.message_id]
            applied.texts.append(str(data.payload["text"]))
            applied.artifact = data.payload.get("prompt_artifact")

    def gap(self) -> None:
        self.claimed = None

    def messages(self) -> list[Input]:
        """Give the applied inputs with the digest of what the transcript says they were."""
        return [
            Input(
                one.inbox_message_id,
                item_digest(one.content(), one.metadata),
            )
            for one in self.applied.values()
        ]


def _acknowledged(data: InboxAcknowledged) -> list[Input]:
    return [Input(item.message_id, item.digest) for item in data.items]
