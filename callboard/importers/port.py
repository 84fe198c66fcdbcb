"""What a transcript format is to callboard: a sniff and a reader, and the items it may give.

A reader is pure over its stream (IMP-1): it opens nothing, asks no clock, and remembers no more
than the line in hand and a few ids. What it cannot use it still gives, as `ImportOpaque`
(understood to be a record, of no kind known here) or `ImportSkipped` (no record at all), so that
nothing of a source is dropped without a count (IMP-6).

Every `created_at` is an instant in microseconds since the epoch, or None where the source has
none. Every `session` is the source's own name of the session that the item belongs to: an
`ImportHeader` with it came before, but for "", which is whatever stands before the first header.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, Literal, Protocol, TypeAlias, get_args

from callboard.errors import CallboardError, ImportMalformed, ImportTooLarge
from callboard.limits import IMPORT_BYTES_MAX, IMPORT_ITEMS_MAX, IMPORT_LINE_BYTES_MAX

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = "dict[str, JsonValue]"

TORN: Final = "torn"
"""The `reason` of an unterminated, incomplete last line: skipped even in a strict import."""

UNNAMED: Final = "unnamed"
"""The session of a source that does not say which session it is."""


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """What a source may measure at most (IMP-10); above it `read` raises `ImportTooLarge`."""

    source_bytes: int = IMPORT_BYTES_MAX
    line_bytes: int = IMPORT_LINE_BYTES_MAX
    items: int = IMPORT_ITEMS_MAX


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of a message."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """What the model thought, as far as the source shows it."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image that stands in the source itself (IMP-4): its MIME type and base64 data."""

    mime: str
    data: str


ImportPart: TypeAlias = TextPart | ReasoningPart | ImagePart


@dataclass(frozen=True, slots=True)
class ImportHeader:
    """A session begins: its first item.

    `parent` names the session that a child was started by or a fork was made from; the source
    need not hold it. `workspace_hint` is for showing and is never followed (IMP-4).
    """

    session: str
    foreign_id: str
    title: str | None = None
    created_at: int | None = None
    model: str | None = None
    workspace_hint: str | None = None
    relation: Literal["import", "child", "fork"] = "import"
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class ImportMessage:
    """A message, or one stretch of a reply: text blocks between two tool calls.

    `hidden` is text that no person typed and no model said: injected context, command output.
    """

    session: str
    role: Literal["user", "assistant"]
    parts: tuple[ImportPart, ...]
    foreign_id: str | None = None
    created_at: int | None = None
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class ImportToolCall:
    """A tool call; `input` is the text itself where the source's arguments are not JSON."""

    session: str
    call_id: str
    name: str
    input: JsonValue
    created_at: int | None = None


@dataclass(frozen=True, slots=True)
class ImportToolResult:
    """What a call gave; `error` is None for success, else a short word for what went wrong."""

    session: str
    call_id: str
    output: str
    error: str | None = None
    created_at: int | None = None


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """A compaction: the model's context begins anew here, with this text or these items."""

    session: str
    text: str
    replacements: tuple[JsonValue, ...] = ()
    created_at: int | None = None


@dataclass(frozen=True, slots=True)
class ImportTurn:
    """A turn begins or ends; a turn without an end was open when the source was written."""

    session: str
    state: Literal["started", "completed", "aborted"]
    cause: str | None = None
    created_at: int | None = None


@dataclass(frozen=True, slots=True)
class ImportOpaque:
    """A record or block that nothing above expresses, kept as it is."""

    session: str
    kind: str
    raw: JsonValue
    created_at: int | None = None


@dataclass(frozen=True, slots=True)
class ImportSkipped:
    """Bytes of a line that are no record; `reason` is one of the words of `lines`, or `TORN`."""

    session: str
    line: int
    reason: str


ImportItem: TypeAlias = (
    ImportHeader
    | ImportMessage
    | ImportToolCall
    | ImportToolResult
    | ImportSummary
    | ImportTurn
    | ImportOpaque
    | ImportSkipped
)
"""All that an importer can say. No control record (rewind, acknowledgement, interaction, archive,
edit, lease, handoff) is among it, so that no import can forge one (IMP-2)."""

_ITEMS: Final = get_args(ImportItem)


class TranscriptImporter(Protocol):
    """One transcript format."""

    name: str
    """The format's name, as `--format` takes it."""

    def sniff(self, head: bytes, file_name: str) -> int:
        """Say how surely a file is of this format, 0 to 100.

        Args:
            head: its first bytes, at most IMPORT_SNIFF_BYTES; the last line may be cut.
            file_name: its name, without folders.

        """
        ...

    def read(self, stream: BinaryIO, limits: ImportLimits) -> Iterator[ImportItem]:
        """Read a transcript, item by item, in the source's order.

        Raises:
            ImportTooLarge: a line, the source or the number of items is above its limit.

        """
        ...


def counted(items: Iterable[ImportItem], limits: ImportLimits) -> Iterator[ImportItem]:
    """Pass items on until there are too many of them (IMP-10).

    Raises:
        ImportTooLarge: the item after the last allowed one came.

    """
    for number, item in enumerate(items, 1):
        if number > limits.items:
            raise ImportTooLarge(limit="IMPORT_ITEMS_MAX")
        yield item


def read_items(
    importer: TranscriptImporter, stream: BinaryIO, limits: ImportLimits
) -> Iterator[ImportItem]:
    """Read through an importer that may be anyone's.

    Raises:
        ImportTooLarge: see `TranscriptImporter.read`.
        ImportMalformed: the importer raised something untyped, or gave something that is no item.
        OSError: the stream could not be read.

    """
    try:
        for item in counted(importer.read(stream, limits), limits):
            _check_item(importer.name, item)
            yield item
    except (CallboardError, OSError, MemoryError):
        raise
    except Exception as error:
        reason = f"the {importer.name} importer raised {type(error).__name__}"
        raise ImportMalformed(line=0, reason=reason) from error


def _check_item(name: str, item: object) -> None:
    if not isinstance(item, _ITEMS):
        reason = f"the {name} importer gave a {type(item).__name__}, which is no item"
        raise ImportMalformed(line=0, reason=reason)
