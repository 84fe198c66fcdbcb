"""What is sound of a damaged transcript, as the lines of a new session (REC-4). Pure.

Each record is carried over with its data byte for byte, under a new seq and id, and says where it
came from. The creation record is made anew: relation `salvage`, parent the damaged session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from pydantic_core import from_json

from callboard.errors import SessionDamaged
from callboard.ids import SessionRef, derived_id
from callboard.limits import RECORD_BYTES_MAX
from callboard.records import (
    Record,
    SessionCreated,
    compact,
    first_chain,
    stamp_record,
    timestamp,
)
from callboard.storage.lines import Gap, Sound
from callboard.storage.load import data_bytes

_ORIGIN: Final = b',"origin":'


@dataclass(slots=True)
class Salvage:
    """Turns a damaged transcript's sound records into lines.

    Args:
        ref: the damaged session.
        new: the session that is made of it.
        commit: the frame that the new session belongs to.
        now_us: microseconds since the epoch.

    Attributes:
        records: how many were carried over, the new creation record not counted.
        gaps: how many places were damaged.
        left_out: records that are too long with their new names.

    """

    ref: SessionRef
    new: SessionRef
    commit: int
    now_us: int
    records: int = 0
    gaps: int = 0
    left_out: int = 0
    _seq: int = 0
    _chain: str = field(default="")

    def lines(self, items: Iterable[Sound | Gap]) -> Iterator[bytes]:
        """Make the new transcript, line by line.

        Args:
            items: the damaged one, as its readers give it.

        Raises:
            SessionDamaged: it has no creation record, so that nobody knows whose it is.

        """
        self._chain = first_chain(str(self.new))
        for item in items:
            if isinstance(item, Gap):
                if not self._seq:
                    raise item.refusal()
                self.gaps += 1
            elif not self._seq:
                yield self._creation(item.record)
            elif (line := self._carry(item)) is not None:
                self.records += 1
                yield line
        if not self._seq:
            raise SessionDamaged(damage="identity_mismatch", line=1)

    def _creation(self, record: Record) -> bytes:
        if not isinstance(record.data, SessionCreated):
            raise SessionDamaged(damage="identity_mismatch", line=1)
        made = record.data.model_copy(
            update={
                "session_id": self.new.session_id,
                "parent": str(self.ref),
                "relation": "salvage",
                "created_at": self.now_us,
            }
        )
        data = compact(made.model_dump(exclude_unset=True))
        line = self._stamp("session_created", None, data, None)
        assert line is not None
        return line

    def _carry(self, item: Sound) -> bytes | None:
        record = item.record
        data, origin = _data_of(item.data)
        came_from = origin or compact(
            {"session_id": self.ref.session_id, "seq": record.seq, "id": record.id}
        )
        return self._stamp(record.type, record.turn_id, data, came_from)

    def _stamp(
        self, kind: str, turn_id: str | None, data: bytes, origin: bytes | None
    ) -> bytes | None:
        line, chain = stamp_record(
            self.new,
            seq=self._seq + 1,
            record_id=derived_id(str(self.new), self._seq + 1),
            commit=self.commit,
            epoch=0,
            ts=timestamp(self.now_us),
            kind=kind,
            turn_id=turn_id,
            data=data,
            before=self._chain,
            origin=origin,
        )
        if len(line) > RECORD_BYTES_MAX:
            self.left_out += 1
            return None
        self._seq, self._chain = self._seq + 1, chain
        return line


def _data_of(line: bytes) -> tuple[bytes, bytes | None]:
    """Cut a record's data out of its line, and its origin if it was salvaged or forked before."""
    found = data_bytes(line)
    origin: object = from_json(line).get("origin")
    if origin is None:
        return found, None
    spelled = compact(origin)
    return found.removesuffix(_ORIGIN + spelled), spelled
