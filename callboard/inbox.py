"""Whether an input fits an inbox, and how many bytes it takes there: one rule set for both writers.

The session actor's mailbox and the storage actor's accept path share this (ACC-1c). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal

from callboard.errors import InboxFull
from callboard.ids import SessionRef
from callboard.limits import (
    INBOX_BACKGROUND_ITEMS_MAX,
    INBOX_BACKGROUND_TOTAL_BYTES_MAX,
    INBOX_BYTES_MAX,
    INBOX_PEER_ITEMS_MAX,
    INBOX_RECOVERY_ITEMS_MAX,
    INBOX_RECOVERY_RESERVE_BYTES,
    INBOX_SHELL_ITEMS_MAX,
    INBOX_USER_BYTES_MAX,
    INBOX_USER_ITEMS_MAX,
    INT_ABS_MAX,
    RECOVERY_ITEM_BYTES_MAX,
)
from callboard.messages import InboxItem
from callboard.records import first_chain, stamp_op

Origin = Literal["user", "peer", "background", "shell", "recovery"]

_ITEMS_MAX: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
    {
        "user": ("INBOX_USER_ITEMS_MAX", INBOX_USER_ITEMS_MAX),
        "peer": ("INBOX_PEER_ITEMS_MAX", INBOX_PEER_ITEMS_MAX),
        "background": ("INBOX_BACKGROUND_ITEMS_MAX", INBOX_BACKGROUND_ITEMS_MAX),
        "shell": ("INBOX_SHELL_ITEMS_MAX", INBOX_SHELL_ITEMS_MAX),
        "recovery": ("INBOX_RECOVERY_ITEMS_MAX", INBOX_RECOVERY_ITEMS_MAX),
    }
)
_USER_GROUP: Final = ("user", "peer", "shell")
_TS: Final = "2000-01-01T00:00:00.000000Z"


class Budget:
    """Live items of one inbox by origin: how many, and their bytes. Staged ones count too.

    Args:
        live: origin and size in bytes of each item that is there.

    """

    __slots__ = ("bytes", "count")

    def __init__(self, live: Iterable[tuple[Origin, int]] = ()) -> None:
        self.count: dict[str, int] = dict.fromkeys(_ITEMS_MAX, 0)
        self.bytes: dict[str, int] = dict.fromkeys(_ITEMS_MAX, 0)
        for origin, size in live:
            self.count[origin] += 1
            self.bytes[origin] += size

    def copy(self) -> Budget:
        """Count on from here without changing this one."""
        other = Budget.__new__(Budget)
        other.count, other.bytes = self.count.copy(), self.bytes.copy()
        return other

    def add(self, origin: Origin, size_bytes: int) -> None:
        """Count an item in."""
        self.count[origin] += 1
        self.bytes[origin] += size_bytes

    def remove(self, origin: Origin, size_bytes: int) -> None:
        """Count an item out."""
        self.count[origin] -= 1
        self.bytes[origin] -= size_bytes

    @property
    def items(self) -> int:
        """How many items there are."""
        return sum(self.count.values())

    def refuse(self, origin: Origin, size_bytes: int) -> InboxFull | None:
        """Tell why one more item does not fit, or none if it does (INB-7, INB-8).

        Args:
            origin: the item's.
            size_bytes: of its put line with its LF, as `put_size` gives it.

        """
        limit, maximum = _ITEMS_MAX[origin]
        if self.count[origin] >= maximum:
            return _full(limit, self.count[origin], maximum)
        return self._refuse_group(origin, size_bytes) or self._refuse_total(origin, size_bytes)

    def _refuse_group(self, origin: Origin, size: int) -> InboxFull | None:
        if origin in _USER_GROUP:
            live = sum(self.bytes[one] for one in _USER_GROUP)
            if live + size > INBOX_USER_BYTES_MAX:
                return _full("INBOX_USER_BYTES_MAX", live, INBOX_USER_BYTES_MAX)
        elif origin == "background":
            live = sum(self.bytes.values())
            maximum = INBOX_BACKGROUND_TOTAL_BYTES_MAX
            if live + size > maximum:
                return _full("INBOX_BACKGROUND_TOTAL_BYTES_MAX", live, maximum)
        elif size > RECOVERY_ITEM_BYTES_MAX:
            return _full("RECOVERY_ITEM_BYTES_MAX", size, RECOVERY_ITEM_BYTES_MAX)
        return None

    def _refuse_total(self, origin: Origin, size: int) -> InboxFull | None:
        reserve = 0 if origin == "recovery" else INBOX_RECOVERY_RESERVE_BYTES
        live, maximum = sum(self.bytes.values()), INBOX_BYTES_MAX - reserve
        return _full("INBOX_BYTES_MAX", live, maximum) if live + size > maximum else None


def _full(limit: str, current: int, maximum: int) -> InboxFull:
    return InboxFull(limit=limit, current=current, maximum=maximum)


def put_data(item: InboxItem) -> bytes:
    """Spell the data of a put, as it is kept: what an item does not say is left out."""
    return b'{"item":%b}' % item.__pydantic_serializer__.to_json(item, exclude_defaults=True)


def remove_data(message_id: str) -> bytes:
    """Spell the data of a remove; a message id needs no escaping."""
    return b'{"message_id":"%b"}' % message_id.encode()


def put_size(
    ref: SessionRef,
    item: InboxItem,
    *,
    n: int = INT_ABS_MAX,
    commit: int = INT_ABS_MAX,
    epoch: int = INT_ABS_MAX,
) -> int:
    """Count the bytes of an item's put line with its LF, which is its `size_bytes`.

    Args:
        ref: whose inbox it goes to.
        item: the item.
        n: the number of the operation; what is not known yet counts with the most digits it can
            have, so that nothing fits here that does not fit in the file.
        commit: the frame that holds it.
        epoch: the session's epoch in force.

    """
    return _envelope_size(ref, n, commit, epoch) + len(put_data(item))


@lru_cache(maxsize=64)  # a session asks for one; the hash chain in it is what costs
def _envelope_size(ref: SessionRef, n: int, commit: int, epoch: int) -> int:
    line, _ = stamp_op(
        ref, n=n, commit=commit, epoch=epoch, ts=_TS, op="put", data=b"", before=first_chain("")
    )
    return len(line)
