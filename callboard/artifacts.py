"""Prompt artifacts: long text of a message, cut into an excerpt and a file, and put back. Pure.

A message whose text is at most ARTIFACT_INLINE_BYTES_MAX bytes long stays as it is (ART-1). Longer
text becomes the content of a file that is named by its hash; the message keeps an excerpt of it and
a reference, `ArtifactRef`. Parts here are JSON objects: `{"type": "text", "text": …}`, with
`prompt_artifact` if the text is an excerpt, and `{"type": "image", …}`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from callboard.errors import ArtifactInvalid, InvalidRequest, PayloadTooLarge
from callboard.limits import (
    ARTIFACT_BYTES_MAX,
    ARTIFACT_CHARS_MAX,
    ARTIFACT_INLINE_BYTES_MAX,
    ARTIFACT_LAYOUT_PARTS_MAX,
    ARTIFACT_READ_BYTES_DEFAULT,
    ARTIFACT_READ_BYTES_MAX,
    ARTIFACT_READ_BYTES_MIN,
    ARTIFACT_TAIL_BYTES_MAX,
)

ARTIFACT_ID: Final = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)
MARKER: Final = "\n\n[… the middle of this message is left out here …]\n\n"
Part: TypeAlias = Mapping[str, object]


class TextPiece(BaseModel):
    """A text part of the original message: so many characters of the file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    type: Literal["text"]
    chars: int = Field(ge=0, le=ARTIFACT_CHARS_MAX)


class ImagePiece(BaseModel):
    """The place of an image part of the original message."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    type: Literal["image"]


class ArtifactRef(BaseModel):
    """What a message says of the file that holds its text (runtime page, section 1)."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    version: Literal[1]
    artifact_id: str = Field(pattern=r"^[0-9a-f]{64}$")
    size_bytes: int = Field(gt=ARTIFACT_INLINE_BYTES_MAX, le=ARTIFACT_BYTES_MAX)
    text_chars: int = Field(ge=1, le=ARTIFACT_CHARS_MAX)
    inline_bytes: int = Field(ge=1, le=ARTIFACT_INLINE_BYTES_MAX)
    layout: list[Annotated[TextPiece | ImagePiece, Field(discriminator="type")]] | None = Field(
        default=None, min_length=1, max_length=ARTIFACT_LAYOUT_PARTS_MAX
    )


class Cut(NamedTuple):
    """A message's parts as they are kept, and what goes into a file."""

    parts: list[dict[str, object]]
    ref: ArtifactRef | None = None
    data: bytes | None = None
    """None if there is nothing to write: short text, or a reference that came with the message."""


class Piece(NamedTuple):
    """A piece of an artifact's text."""

    text: str
    offset: int
    """Of its first byte."""
    next_offset: int | None
    """Where the next piece begins; none at the end."""


# --- references -----------------------------------------------------------------------------------


def read_ref(value: object) -> ArtifactRef:
    """Read a reference that stands in a part.

    Raises:
        ArtifactInvalid: it is malformed; it is never read as a complete text (ART-5).

    """
    try:
        ref = ArtifactRef.model_validate(value)
    except ValidationError:
        raise _invalid(value) from None
    if ref.layout is not None:
        chars = sum(one.chars for one in ref.layout if isinstance(one, TextPiece))
        if chars != ref.text_chars:
            raise _invalid(value)
    return ref


def _invalid(value: object) -> ArtifactInvalid:
    """Refuse a reference; the id is said only if it is one."""
    name: object = None
    if isinstance(value, Mapping):
        name = cast("Mapping[object, object]", value).get("artifact_id")
    if isinstance(name, str) and ARTIFACT_ID.match(name):
        return ArtifactInvalid(artifact_id=name, retryable=False)
    return ArtifactInvalid(retryable=False)


def spell_ref(ref: ArtifactRef) -> dict[str, object]:
    """Spell a reference as it stands in a part."""
    return ref.model_dump(exclude_none=True)


def refs_of(parts: Sequence[Part]) -> list[ArtifactRef]:
    """Read the references of a message's parts.

    Raises:
        ArtifactInvalid: one of them is malformed.

    """
    return [
        read_ref(part["prompt_artifact"])
        for part in parts
        if part.get("prompt_artifact") is not None
    ]


def check_artifact_id(text: str) -> str:
    """Return an artifact id that is one.

    Raises:
        InvalidRequest: anything but 64 lower-case hex digits; nothing was looked at.

    """
    if not ARTIFACT_ID.match(text):
        raise InvalidRequest(field="artifact_id", reason="format")
    return text


# --- cutting --------------------------------------------------------------------------------------


def cut(parts: Sequence[Part]) -> Cut:
    """Cut a message's text into an excerpt and what a file shall hold, if it is long (ART-1).

    Args:
        parts: as they came from a client.

    Raises:
        PayloadTooLarge: more parts, bytes or characters than an artifact may have (ART-4).
        ArtifactInvalid: a reference that came with a part is malformed.
        InvalidRequest: a reference beside more text than a message with one has.

    """
    if len(parts) > ARTIFACT_LAYOUT_PARTS_MAX:
        raise _too_large("ARTIFACT_LAYOUT_PARTS_MAX", ARTIFACT_LAYOUT_PARTS_MAX)
    texts = [str(part["text"]) for part in parts if part["type"] == "text"]
    refs = refs_of(parts)
    data = "".join(texts).encode()
    if len(data) <= ARTIFACT_INLINE_BYTES_MAX:
        if len(refs) > 1 or (refs and refs[0].inline_bytes != _inline_bytes(parts)):
            raise InvalidRequest(field="content", reason="not_allowed")
        return Cut([dict(part) for part in parts], refs[0] if refs else None)
    if refs:
        raise InvalidRequest(field="content", reason="not_allowed")
    chars = sum(map(len, texts))
    _check_size(len(data), chars)
    return _cut(parts, data, chars)


def check_text(text: str) -> None:
    """Refuse a text that no message may have.

    Raises:
        PayloadTooLarge: it has more bytes or characters than an artifact may have (ART-4).

    """
    _check_size(len(text) if text.isascii() else len(text.encode()), len(text))


def _check_size(size: int, chars: int) -> None:
    if size > ARTIFACT_BYTES_MAX:  # first: no text is beyond it that is not beyond the other
        raise _too_large("ARTIFACT_BYTES_MAX", ARTIFACT_BYTES_MAX)
    if chars > ARTIFACT_CHARS_MAX:
        raise _too_large("ARTIFACT_CHARS_MAX", ARTIFACT_CHARS_MAX)


def _inline_bytes(parts: Sequence[Part]) -> int:
    return sum(
        len(str(part["text"]).encode()) for part in parts if part.get("prompt_artifact") is not None
    )


def _cut(parts: Sequence[Part], data: bytes, chars: int) -> Cut:
    name = hashlib.sha256(data).hexdigest()
    text = excerpt(data, name, chars)
    layout = None
    if len(parts) > 1:
        layout = [
            TextPiece(type="text", chars=len(str(part["text"])))
            if part["type"] == "text"
            else ImagePiece(type="image")
            for part in parts
        ]
    ref = ArtifactRef(
        version=1,
        artifact_id=name,
        size_bytes=len(data),
        text_chars=chars,
        inline_bytes=len(text.encode()),
        layout=layout,
    )
    kept: list[dict[str, object]] = []
    said = False
    for part in parts:
        if part["type"] != "text":
            kept.append(dict(part))
        elif not said:
            said = True
            kept.append({"type": "text", "text": text, "prompt_artifact": spell_ref(ref)})
    return Cut(kept, ref, data)


def excerpt(data: bytes, artifact_id: str, chars: int) -> str:
    """Make the excerpt of a long text: head, marker, tail and a notice (ART-3)."""
    notice = _notice(artifact_id, len(data), chars)
    available = ARTIFACT_INLINE_BYTES_MAX - len(notice.encode()) - len(MARKER.encode())
    tail = min(ARTIFACT_TAIL_BYTES_MAX, available // 2)
    end = floor(data, available - tail)
    begin = _ceiling(data, len(data) - tail)
    return f"{data[:end].decode()}{MARKER}{data[begin:].decode()}{notice}"


def _notice(artifact_id: str, size: int, chars: int) -> str:
    return (
        f"\n\n[This is an excerpt: its full text is the artifact {artifact_id},"
        f" {size} bytes, {chars} characters. Read it with the tool read_prompt_artifact"
        " (artifact_id, offset, limit), from offset 0 on, before you act on this message.]"
    )


def floor(data: bytes, at: int) -> int:
    """Move an offset back to where a character begins, or to the end."""
    while 0 < at < len(data) and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _ceiling(data: bytes, at: int) -> int:
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return at


def _too_large(limit: str, maximum: int) -> PayloadTooLarge:
    return PayloadTooLarge(limit=limit, maximum=maximum)


# --- putting back ---------------------------------------------------------------------------------


def restore(parts: Sequence[Part], data: bytes) -> list[dict[str, object]]:
    """Put a message's original parts back together (ART-11).

    Args:
        parts: as they are kept, one of them with a reference.
        data: the content of the artifact's file, verified.

    Raises:
        ArtifactInvalid: the reference is malformed, or text, parts and layout do not fit together.

    """
    refs = refs_of(parts)
    if not refs:
        return [dict(part) for part in parts]
    ref = refs[0]
    text = decode(ref, data)
    images = [dict(part) for part in parts if part["type"] != "text"]
    pieces = ref.layout or [TextPiece(type="text", chars=ref.text_chars)]
    if len(images) != sum(isinstance(one, ImagePiece) for one in pieces):
        raise ArtifactInvalid(artifact_id=ref.artifact_id, retryable=False)
    found: list[dict[str, object]] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, ImagePiece):
            found.append(images.pop(0))
        else:
            found.append({"type": "text", "text": text[at : at + piece.chars]})
            at += piece.chars
    return found


def decode(ref: ArtifactRef, data: bytes) -> str:
    """Give an artifact's text, checked against its reference.

    Args:
        ref: the reference.
        data: the file's content, whose hash is the reference's id: who reads the file checks that.

    Raises:
        ArtifactInvalid: size, encoding or number of characters are not as the reference says.

    """
    try:
        if len(data) != ref.size_bytes:
            raise ValueError
        text = data.decode()
        if len(text) != ref.text_chars:
            raise ValueError
    except ValueError:
        raise ArtifactInvalid(artifact_id=ref.artifact_id, retryable=False) from None
    return text


# --- reading a piece ------------------------------------------------------------------------------


def check_window(offset: int, limit: int | None) -> int:
    """Check which piece of an artifact is asked for.

    Returns:
        The limit in bytes.

    Raises:
        InvalidRequest: out of range (ART-9).

    """
    if limit is None:
        limit = ARTIFACT_READ_BYTES_DEFAULT
    if not ARTIFACT_READ_BYTES_MIN <= limit <= ARTIFACT_READ_BYTES_MAX:
        raise InvalidRequest(field="limit", reason="out_of_range")
    if offset < 0:
        raise InvalidRequest(field="offset", reason="out_of_range")
    return limit


def piece(data: bytes, offset: int, limit: int | None = None) -> Piece:
    """Give a piece of an artifact; start and end move back to where a character begins (ART-9a).

    Args:
        data: the whole artifact.
        offset: 0 to its size in bytes.
        limit: the most bytes, ARTIFACT_READ_BYTES_MIN to ARTIFACT_READ_BYTES_MAX; default:
            ARTIFACT_READ_BYTES_DEFAULT. A character has at most four, so that it always goes on.

    Raises:
        InvalidRequest: out of range.

    """
    limit = check_window(offset, limit)
    if offset > len(data):
        raise InvalidRequest(field="offset", reason="out_of_range")
    start = floor(data, offset)
    end = floor(data, min(start + limit, len(data)))
    return Piece(data[start:end].decode(), start, end if end < len(data) else None)
