"""Small readings of untyped JSON that every format needs."""

from __future__ import annotations

import re
from collections.abc import Hashable
from datetime import UTC, datetime, timedelta
from typing import Final, Generic, TypeVar

from callboard.importers.port import ImagePart, JsonObject, JsonValue

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_DATA_URI: Final = re.compile(r"data:([^;,]+);base64,")
_MIME: Final = re.compile(r"image/[A-Za-z0-9.+-]{1,64}")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def text_of(value: JsonValue) -> str | None:
    """Return a text that is there and not empty, else None."""
    return value if isinstance(value, str) and value else None


def object_of(value: JsonValue) -> JsonObject:
    """Return an object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def list_of(value: JsonValue) -> list[JsonValue]:
    """Return a list, or an empty one for anything else."""
    return value if isinstance(value, list) else []


def blocks_of(content: JsonValue) -> list[JsonValue]:
    """Return content as blocks: a list as it is, one value as one block, nothing as none."""
    if isinstance(content, list):
        return content
    return [] if content is None else [content]


def kind_of(record: JsonObject) -> str:
    """Return the `type` of a record or block, or "untyped"."""
    return text_of(record.get("type")) or "untyped"


def instant_of(value: JsonValue) -> int | None:
    """Read an ISO 8601 text; without a zone it is UTC.

    Returns:
        Microseconds since the epoch, or None for what is no instant or lies before the epoch.

    """
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        micros = (moment - _EPOCH) // _MICROSECOND
    except (ValueError, OverflowError):
        return None
    return micros if micros >= 0 else None


def inline_image(mime: JsonValue, data: JsonValue) -> ImagePart | None:
    """Make an image of inline base64 data; None for anything that would have to be fetched."""
    if not isinstance(mime, str) or not isinstance(data, str):
        return None
    if not _MIME.fullmatch(mime) or not _BASE64.fullmatch(data):
        return None
    return ImagePart(mime, data)


def image_of_uri(uri: JsonValue) -> ImagePart | None:
    """Make an image of a data URI; None for any other address, which is never opened (IMP-4)."""
    if not isinstance(uri, str) or not (head := _DATA_URI.match(uri)):
        return None
    return inline_image(head[1], uri[head.end() :])


class Recent(Generic[K, V]):
    """A map that forgets its oldest entries, so that a reader's memory stays bounded."""

    def __init__(self, entries_max: int) -> None:
        """Make an empty one that holds so many entries."""
        self._entries_max = entries_max
        self._entries: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """Return what is remembered for a key, or None."""
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        """Remember; the oldest entry goes if there are too many."""
        self._entries[key] = value
        if len(self._entries) > self._entries_max:
            del self._entries[next(iter(self._entries))]

    def pop(self, key: K) -> V | None:
        """Forget a key; return what was remembered for it, or None."""
        return self._entries.pop(key, None)
