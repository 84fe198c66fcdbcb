"""Messages, gathered from the records of a transcript. Pure.

All views follow the same rules for repeats: a message is created once and its parts attach to it, a
part keeps its first place and shows its latest payload (PRJ-3), a part of an unknown message gets
a synthetic one (PRJ-4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from callboard.artifacts import read_ref
from callboard.errors import ArtifactInvalid
from callboard.records import MessageCreated, PartCreated, PartUpdated, Record, compact

Role = Literal["user", "assistant", "system", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an assistant message."""

    call_id: str
    name: str
    input: object
    effect: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a history or a context."""

    message_id: str
    seq: int
    """Of the record that it stands at."""
    role: Role
    content: str
    created_at: int
    """Microseconds since the epoch."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    """Of a tool message: the call that it answers."""
    name: str | None = None
    """Of a tool message: the tool."""
    error: bool = False
    """Of a tool message: whether the call failed."""
    turn_id: str | None = None
    inbox_message_id: str | None = None
    hidden: bool = False
    artifact_id: str | None = None
    """The file that holds its full text, if `content` is an excerpt (ART-1)."""
    synthetic: bool = False
    """No record holds this message as such (PRJ-4, CTX-1, CTX-4)."""

    def to_json(self) -> dict[str, object]:
        """Give what is set, as a JSON object."""
        calls = [
            {"call_id": c.call_id, "name": c.name, "input": c.input, "effect": c.effect}
            for c in self.tool_calls
        ]
        shown: dict[str, object] = {
            "message_id": self.message_id,
            "seq": self.seq,
            "role": self.role,
            "content": self.content,
            "created_at": self.created_at,
        }
        rest: dict[str, object] = {
            "reasoning": self.reasoning,
            "tool_calls": calls,
            "call_id": self.call_id,
            "name": self.name,
            "error": self.error,
            "turn_id": self.turn_id,
            "inbox_message_id": self.inbox_message_id,
            "hidden": self.hidden,
            "artifact_id": self.artifact_id,
            "synthetic": self.synthetic,
        }
        return shown | {name: value for name, value in rest.items() if value}


# --- gathering ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Part:
    """A part as its last record left it."""

    seq: int
    kind: str
    payload: Mapping[str, object]


@dataclass(slots=True)
class Owner:
    """A message while its parts are gathered."""

    message_id: str
    seq: int
    created: MessageCreated | None
    turn_id: str | None
    created_at: int
    parts: dict[str, Part] = field(default_factory=dict[str, Part])

    def texts(self, kind: str) -> str:
        """Join the texts of its parts of one kind."""
        return "".join(str(p.payload["text"]) for p in self.parts.values() if p.kind == kind)


class Gathered:
    """Messages with their parts, in the order of their first records.

    Only messages that are wanted are kept; of the others the ids alone, so that a part of theirs
    does not look like one of an unknown message.
    """

    def __init__(self, first: int = 1, most: int | None = None) -> None:
        self.first, self.most = first, most
        self.owners: dict[str, Owner] = {}
        self.others: set[str] = set()
        self.next_seq: int | None = None
        """The first message behind those that are kept, or none."""

    def add(self, record: Record) -> None:
        """Take the next record; those that are no message and no part change nothing."""
        data = record.data
        if isinstance(data, MessageCreated):
            self._create(record, data)
        elif isinstance(data, PartCreated | PartUpdated):
            self._attach(record, data)

    def forget(self) -> None:
        """Keep nothing of what stands here so far."""
        self.others.update(self.owners)
        self.owners.clear()

    def _create(self, record: Record, data: MessageCreated) -> None:
        known = self.owners.get(data.message_id)
        if known is not None:
            if known.created is None:  # its parts came first (PRJ-4)
                known.created, known.turn_id, known.created_at = (
                    data,
                    record.turn_id,
                    data.created_at,
                )
        elif data.message_id not in self.others:
            self._begin(record, data.message_id, data, data.created_at)

    def _begin(
        self, record: Record, message_id: str, created: MessageCreated | None, created_at: int
    ) -> Owner | None:
        if record.seq < self.first or len(self.owners) == self.most:
            self.others.add(message_id)
            if record.seq >= self.first and self.next_seq is None:
                self.next_seq = record.seq
            return None
        owner = Owner(message_id, record.seq, created, record.turn_id, created_at)
        self.owners[message_id] = owner
        return owner

    def _attach(self, record: Record, data: PartCreated | PartUpdated) -> None:
        if data.message_id in self.others:
            return
        owner = self.owners.get(data.message_id) or self._begin(
            record, data.message_id, None, data.created_at
        )
        if owner is None:
            return
        part = owner.parts.setdefault(data.part_id, Part(record.seq, "", {}))
        part.kind, part.payload = data.part_type, data.payload


def messages_of(owner: Owner) -> Iterator[Message]:
    """Show a message and the tool results that belong to it."""
    main = main_of(owner)
    if owner.created is None or owner.created.role != "tool" or main.content:
        if main.content or not _only_others(owner):
            yield main
        yield from _summaries(owner, main)
    for part in owner.parts.values():
        if part.kind == "tool_result":
            yield replace(
                main,
                seq=part.seq,
                role="tool",
                content=_result_text(part.payload),
                reasoning="",
                tool_calls=(),
                call_id=str(part.payload["call_id"]),
                name=str(part.payload["name"]),
                error=part.payload.get("error") is not None,
                inbox_message_id=None,
                artifact_id=None,
            )


def _only_others(owner: Owner) -> bool:
    """Tell whether a message says nothing but summaries and tool results."""
    kinds = {part.kind for part in owner.parts.values()}
    return bool(kinds) and kinds <= {"summary", "tool_result"}


def main_of(owner: Owner) -> Message:
    """Show a message without its summaries and tool results."""
    created = owner.created
    calls = tuple(
        ToolCall(
            str(part.payload["call_id"]),
            str(part.payload["name"]),
            part.payload.get("input"),
            str(part.payload.get("effect", "unsafe")),
        )
        for part in owner.parts.values()
        if part.kind == "tool_call"
    )
    return Message(
        owner.message_id,
        owner.seq,
        created.role if created else "assistant",
        owner.texts("text"),
        owner.created_at,
        reasoning=owner.texts("reasoning"),
        tool_calls=calls,
        turn_id=owner.turn_id,
        inbox_message_id=created.inbox_message_id if created else None,
        hidden=created.hidden if created else False,
        artifact_id=_artifact_of(owner),
        synthetic=created is None,
    )


def _artifact_of(owner: Owner) -> str | None:
    """Find the artifact that a message's text is an excerpt of."""
    for part in owner.parts.values():
        if part.kind == "text" and (named := part.payload.get("prompt_artifact")) is not None:
            try:
                return read_ref(named).artifact_id
            except ArtifactInvalid:
                return None
    return None


def _summaries(owner: Owner, main: Message) -> Iterator[Message]:
    for part in owner.parts.values():
        if part.kind == "summary":
            yield replace(
                main,
                seq=part.seq,
                role="system",
                content=str(part.payload["text"]),
                reasoning="",
                tool_calls=(),
                artifact_id=None,
            )


def _result_text(payload: Mapping[str, object]) -> str:
    """Say what a tool gave back: its error, its text, or its value as JSON (HIS-1b)."""
    error, output = payload.get("error"), payload.get("output")
    if error is not None:
        return str(error)
    return output if isinstance(output, str) else compact(output).decode()
