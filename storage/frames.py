"""The journal's frames: bytes to frames and back, torn or damaged. Pure (FLT-1, FLT-6, FLT-7).

A segment is frames from byte 0 on, each at a multiple of 8; integers are little-endian:

    offset  size  what
         0     4  magic `cbj1`
         4     4  length: bytes of commit, durable and payload, so at least 16
         8     4  CRC-32 of these bytes
        12     4  zero
        16     8  commit
        24     8  durable, the watermark: bytes of this segment known to be on the disk when the
                  frame was written
        32     n  payload
             0-7  zero bytes up to the next multiple of 8

The payload is one msgpack map; `k` says which, keys with nothing to say are left out:

    commit          p  [[file, generation, offset, bytes], ...]  what goes where. `file` is relative
                       to the home, with slashes; `generation` is that of an inbox file, "" for a
                       transcript; `bytes` are whole lines (a leading LF ends a sound last line that
                       had none). A part at offset 0 of another generation than the file's starts a
                       new file that replaces it (INB-2).
                    l  [[session reference, lease.json bytes], ...]
                    e  [plane epoch, plane id, gateway epoch, gateway nonce], when one is raised
    segment_header  format, home, number, previous (0: none), previous_bytes, previous_crc (CRC of
                    the last frame below previous_bytes), copied, first (lowest segment needed when
                    it was written), e. The first frame of each segment.
    checkpoint      through (frames up to this commit stand in synced files), first (lowest segment
                    that holds a frame above it), files [[file, generation, length, last seq or n,
                    chain], ...] as of `through`, damaged [[session reference, damage, line], ...],
                    e. Recovery and readers start behind `through`.
    clean_stop      e. The last frame of an orderly stop.
    (no payload)    closing mark: only the watermark (FLT-8)

Only commits take a commit number; every other frame repeats the last one. Text in a payload cannot
imitate a frame: bytes 12 to 15 are zero, and neither JSON nor its lines hold NUL.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias, cast

import msgpack

from callboard.limits import STORAGE_FORMAT

MAGIC: Final = b"cbj1"
HEAD: Final = struct.Struct("<4sIII")
"""Magic, length, CRC, zero."""
BODY: Final = struct.Struct("<QQ")
"""Commit and watermark, in front of the payload."""
OVERHEAD: Final = HEAD.size + BODY.size
"""Bytes of a frame without payload: a closing mark."""


_PADDING: Final = tuple(bytes(-size % 8) for size in range(8))
"""By the length of what stands before, modulo 8."""


class Frame(NamedTuple):
    """One whole frame, as it stands in a segment."""

    offset: int
    end: int
    """Where the next frame begins."""
    commit: int
    durable: int
    crc: int
    payload: memoryview


class Part(NamedTuple):
    """Bytes for one file."""

    file: str
    generation: str
    offset: int
    data: bytes


class Epochs(NamedTuple):
    """The epochs of plane and gateway, and who has them."""

    plane: int = 0
    plane_id: str = ""
    gateway: int = 0
    gateway_nonce: str = ""


class Commit(NamedTuple):
    """One transaction: present whole or absent."""

    parts: tuple[Part, ...] = ()
    leases: tuple[tuple[str, bytes], ...] = ()
    epochs: Epochs | None = None


class SegmentHeader(NamedTuple):
    """The first frame of a segment (FLT-6)."""

    home: str
    number: int
    previous: int
    previous_bytes: int
    previous_crc: int
    copied: int
    first: int
    epochs: Epochs
    format: int = STORAGE_FORMAT


class FileMark(NamedTuple):
    """A file as a checkpoint left it."""

    file: str
    generation: str
    length: int
    last: int
    """Last seq of a transcript, last n of an inbox."""
    chain: str


class Damaged(NamedTuple):
    """A session whose files recovery found damaged; it stays so over starts."""

    session: str
    damage: str
    line: int


class Checkpoint(NamedTuple):
    """Everything up to `through` stands in synced files (FLT-10)."""

    through: int
    first: int
    files: tuple[FileMark, ...]
    damaged: tuple[Damaged, ...]
    epochs: Epochs


class CleanStop(NamedTuple):
    """The last frame of an orderly stop (FLT-8)."""

    epochs: Epochs


class ClosingMark(NamedTuple):
    """A frame without payload: it only carries the watermark."""


Payload: TypeAlias = Commit | SegmentHeader | Checkpoint | CleanStop | ClosingMark


class PayloadDamage(Exception):
    """A frame with the right CRC whose payload is none of ours."""


# --- frames ---------------------------------------------------------------------------------------


def encode(commit: int, durable: int, payload: bytes) -> bytes:
    """Put a frame around a payload.

    Args:
        commit: the frame's number, or of a frame that takes none the last one.
        durable: bytes of this segment that are known to be on the disk now.
        payload: as `pack` makes it; empty for a closing mark.

    """
    return b"".join(pieces(commit, durable, payload))


def pieces(commit: int, durable: int, payload: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Give the bytes of a frame in pieces, the first one its head; see `encode`.

    Many frames are joined at once, so that a payload is copied once.
    """
    body = BODY.pack(commit, durable)
    size = BODY.size + len(payload)
    head = HEAD.pack(MAGIC, size, zlib.crc32(payload, zlib.crc32(body)), 0)
    return head, body, payload, _PADDING[size % 8]


def size_of(payload: bytes) -> int:
    """Give the bytes that a payload takes as a frame."""
    return OVERHEAD + len(payload) + -len(payload) % 8


def frame_at(data: memoryview, offset: int) -> Frame | None:
    """Return the whole frame at an offset, or none if there is no whole one.

    Args:
        data: a segment's bytes.
        offset: a multiple of 8.

    """
    start = offset + HEAD.size
    if start > len(data):
        return None
    magic, length, crc, zero = HEAD.unpack_from(data, offset)
    if magic != MAGIC or zero or length < BODY.size or start + length > len(data):
        return None
    end = start + length
    if zlib.crc32(data[start:end]) != crc:
        return None
    padded = end + -end % 8
    if padded > len(data) or any(data[end:padded]):
        return None
    commit, durable = BODY.unpack_from(data, start)
    return Frame(offset, padded, commit, durable, crc, data[start + BODY.size : end])


def frames(data: memoryview) -> Iterator[Frame]:
    """Yield the whole frames of a segment up to its end or the first one that is not whole."""
    offset = 0
    while frame := frame_at(data, offset):
        yield frame
        offset = frame.end


class Scan(NamedTuple):
    """What the bytes of one segment say."""

    frames: tuple[Frame, ...]
    """Whole frames from byte 0 on, without a gap."""
    end: int
    """Where they end: the offset of the first bad frame, or of nothing."""
    size: int
    """Bytes that are there."""
    behind: tuple[Frame, ...]
    """Whole frames behind a bad one."""

    @property
    def damaged(self) -> bool:
        """Tell whether what stands at `end` was on the disk once (FLT-7b); else it is torn."""
        return any(frame.durable > self.end for frame in self.behind)

    @property
    def watermark(self) -> int:
        """Bytes of the segment that were on the disk, as far as anyone has said."""
        return max((frame.durable for frame in self.frames + self.behind), default=0)

    @property
    def highest(self) -> int:
        """The highest commit in any whole frame (FLT-14)."""
        return max((frame.commit for frame in self.frames + self.behind), default=0)


def scan(data: bytes | memoryview) -> Scan:
    """Read a segment: its frames, where they end, and what stands behind that."""
    view = memoryview(data)
    found = tuple(frames(view))
    end = found[-1].end if found else 0
    return Scan(found, end, len(view), tuple(_behind(view, bytes(data[end:]), end)))


def _behind(view: memoryview, rest: bytes, base: int) -> Iterator[Frame]:
    """Search for whole frames behind a bad one, at multiples of 8."""
    at = rest.find(MAGIC)
    while at >= 0:
        frame = frame_at(view, base + at) if (base + at) % 8 == 0 else None
        if frame is not None and frame.durable <= frame.offset:
            yield frame
            at = rest.find(MAGIC, frame.end - base)
        else:
            at = rest.find(MAGIC, at + 1)


_spell: Final = msgpack.Packer().pack
"""One packer for all: making one takes as long as packing."""


# --- payloads -------------------------------------------------------------------------------------


def pack(payload: Payload) -> bytes:
    """Spell a payload as msgpack."""
    fields: dict[str, object]
    match payload:
        case Commit(parts, leases, epochs):
            return pack_commit(parts, leases, epochs)
        case SegmentHeader():
            fields = {"k": "segment_header", **payload._asdict()}
            fields["e"] = fields.pop("epochs")
        case Checkpoint():
            fields = {"k": "checkpoint", **payload._asdict()}
            fields["e"] = fields.pop("epochs")
        case CleanStop(epochs):
            fields = {"k": "clean_stop", "e": epochs}
        case ClosingMark():
            return b""
    return msgpack.packb(fields)


def pack_commit(
    parts: tuple[Part, ...],
    leases: tuple[tuple[str, bytes], ...] = (),
    epochs: Epochs | None = None,
) -> bytes:
    """Spell a commit; see `Commit`."""
    if not leases and epochs is None and parts:
        return _spell({"k": "commit", "p": parts})
    fields: dict[str, object] = {"k": "commit"}
    if parts:
        fields["p"] = parts
    if leases:
        fields["l"] = leases
    if epochs is not None:
        fields["e"] = epochs
    return _spell(fields)


def unpack(payload: bytes | memoryview) -> Payload:
    """Read a payload that `pack` spelled.

    Raises:
        PayloadDamage: it is none of ours.

    """
    if not len(payload):
        return ClosingMark()
    try:
        fields = msgpack.unpackb(payload, use_list=False)
        match fields["k"]:
            case "commit":
                return _commit(fields)
            case "segment_header":
                return _header(fields)
            case "checkpoint":
                return _checkpoint(fields)
            case "clean_stop":
                return CleanStop(_epochs(fields))
            case _:
                raise PayloadDamage
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException):
        raise PayloadDamage from None


def _commit(fields: dict[str, object]) -> Commit:
    parts = cast("tuple[tuple[str, str, int, bytes], ...]", fields.get("p", ()))
    leases = cast("tuple[tuple[str, bytes], ...]", fields.get("l", ()))
    return Commit(
        tuple(Part(*part) for part in parts),
        tuple((ref, lease) for ref, lease in leases),
        _epochs(fields) if "e" in fields else None,
    )


def _header(fields: dict[str, object]) -> SegmentHeader:
    names = ("number", "previous", "previous_bytes", "previous_crc", "copied", "first")
    number, previous, size, crc, copied, first = (cast("int", fields[name]) for name in names)
    home, form = cast("str", fields["home"]), cast("int", fields["format"])
    return SegmentHeader(home, number, previous, size, crc, copied, first, _epochs(fields), form)


def _checkpoint(fields: dict[str, object]) -> Checkpoint:
    marks = cast("tuple[tuple[str, str, int, int, str], ...]", fields["files"])
    damaged = cast("tuple[tuple[str, str, int], ...]", fields["damaged"])
    return Checkpoint(
        cast("int", fields["through"]),
        cast("int", fields["first"]),
        tuple(FileMark(*mark) for mark in marks),
        tuple(Damaged(*one) for one in damaged),
        _epochs(fields),
    )


def _epochs(fields: dict[str, object]) -> Epochs:
    return Epochs(*cast("tuple[int, str, int, str]", fields["e"]))
