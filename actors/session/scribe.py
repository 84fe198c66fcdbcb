"""A session's records in the making: what was said and done becomes drafts, drafts become records.

A draft is a checked value with its turn; a record is its bytes with an id. The scribe keeps the
chain of messages (TLP-9), nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from pydantic_core import to_json

from callboard.actors.session.mailbox_types import Frame, Gone, Terminal, Turn
from callboard.errors import PayloadTooLarge
from callboard.fold import Effect
from callboard.ids import derived_id, fresh_id, fresh_ulid
from callboard.limits import FINAL_TOOL_CALLS_MAX, FRAME_BYTES_MAX, RECORD_BYTES_MAX
from callboard.messages import InboxItem, NewRecord
from callboard.records import (
    Acknowledged,
    InboxAcknowledged,
    MessageCreated,
    PartCreated,
    RecordData,
    TurnAborted,
    TurnCancelRequested,
    TurnCompleted,
    TurnStarted,
)

ENVELOPE_BYTES: Final = 2_048
"""Kept free in a record for what storage puts around its data."""
PART_CHARS_MAX: Final = 131_072
"""Of a text part: as JSON at most six bytes a character, so that it fits in a record."""


class Draft(NamedTuple):
    """A record to be: its data, and the turn that it belongs to."""

    turn_id: str | None
    data: RecordData


def encode(drafts: Iterable[Draft], key: str = "") -> list[NewRecord]:
    """Spell drafts as records, in order.

    Args:
        drafts: what to spell.
        key: what names the frame, so that a retry by another process carries the same ids
            (DUR-6); without one the ids are random.

    Raises:
        PayloadTooLarge: one of them is larger than a record may be, or all than a frame may be.

    """
    records = [
        _record(draft, derived_id(key, index) if key else fresh_id())
        for index, draft in enumerate(drafts)
    ]
    size = sum(len(record.data) + ENVELOPE_BYTES for record in records)
    if size > FRAME_BYTES_MAX and len(records) > 1:
        raise PayloadTooLarge(limit="FRAME_BYTES_MAX", maximum=FRAME_BYTES_MAX)
    return records


def _record(draft: Draft, record_id: str) -> NewRecord:
    data = to_json(draft.data, exclude_none=True)  # of the model's own fields, not of a payload's
    if len(data) > RECORD_BYTES_MAX - ENVELOPE_BYTES:
        raise PayloadTooLarge(limit="RECORD_BYTES_MAX", maximum=RECORD_BYTES_MAX)
    return NewRecord(id=record_id, type=draft.data.type, turn_id=draft.turn_id, data=data)


class Scribe:
    """Drafts of one session.

    Args:
        epoch: of its lease.
        agent: its agent's name.
        parent: the last message of its chain, or none.
        now: microseconds since the epoch.
        new_id: makes ULIDs.

    """

    def __init__(
        self,
        epoch: int,
        agent: str,
        parent: str | None,
        now: Callable[[], int],
        new_id: Callable[[], str] = fresh_ulid,
    ) -> None:
        self.parent = parent
        """The last message that was drafted."""
        self.now = now
        self._epoch = epoch
        self._agent = agent
        self._new_id = new_id

    # Messages.

    def heard(self, turn_id: str, item: InboxItem) -> list[Draft]:
        """Draft an input as the message that it becomes (TLP-2)."""
        at, message_id = self.now(), self._message_id()
        message = MessageCreated(
            message_id=message_id,
            role="user",
            parent_message_id=self.parent,
            inbox_message_id=item.message_id,
            hidden=item.hidden,
            created_at=at,
            metadata=item.metadata or None,
        )
        self.parent = message_id
        parts = _heard(message_id, item, at)
        return [Draft(turn_id, message), *(Draft(turn_id, part) for part in parts)]

    def said(self, turn_id: str, text: str) -> list[Draft]:
        """Draft an assistant message."""
        at = self.now()
        message = self._assistant(at)
        parts = _texts(message.message_id, [text], at)
        return [Draft(turn_id, message), *(Draft(turn_id, part) for part in parts)]

    def called(
        self, turn_id: str, call_id: str, name: str, arguments: object, effect: Effect
    ) -> list[Draft]:
        """Draft a tool call, a message of its own."""
        at = self.now()
        message = self._assistant(at)
        payload = {"call_id": call_id, "name": name, "input": arguments, "effect": effect}
        part = _part(message.message_id, 0, "tool_call", payload, at)
        return [Draft(turn_id, message), Draft(turn_id, part)]

    def returned(
        self,
        turn_id: str | None,
        message_id: str,
        call_id: str,
        name: str,
        output: object,
        error: str | None,
        metadata: Mapping[str, object] | None = None,
    ) -> Draft:
        """Draft a tool's result: `error` is null for success, and never left out (R49)."""
        payload: dict[str, object] = {
            "call_id": call_id,
            "name": name,
            "output": output,
            "error": error,
        }
        if metadata:
            payload["metadata"] = dict(metadata)
        data = PartCreated(
            part_id=f"part_{self._new_id()}",
            message_id=message_id,
            part_type="tool_result",
            payload=payload,
            created_at=self.now(),
        )
        return Draft(turn_id, data)

    def _assistant(self, at: int) -> MessageCreated:
        message_id = self._message_id()
        message = MessageCreated(
            message_id=message_id,
            role="assistant",
            parent_message_id=self.parent,
            created_at=at,
        )
        self.parent = message_id
        return message

    def _message_id(self) -> str:
        return f"msg_{self._new_id()}"

    # Turns.

    def cancelling(self, turn_id: str, principal: str, *, keep_input: bool) -> Draft:
        """Draft the request to cancel a turn (TEX-14)."""
        data = TurnCancelRequested(
            turn_id=turn_id,
            principal_id=principal,
            keep_input=keep_input,
            requested_at=self.now(),
        )
        return Draft(turn_id, data)

    def of_frame(self, frame: Frame, closing: Sequence[Draft] = ()) -> list[Draft]:
        """Draft what the mailbox wants written, in the order of RUN-4.

        Args:
            frame: its wish.
            closing: results of open calls, and the final message, of a turn that ends.

        """
        drafts: list[Draft] = []
        if frame.terminal is not None:
            drafts += [*closing, *self._terminal(frame.terminal)]
        if frame.discard is not None:
            drafts.append(Draft(None, acknowledging(frame.discard, None)))
        if frame.start is not None:
            drafts.append(self._starting(frame.start))
        return drafts

    def _starting(self, turn: Turn) -> Draft:
        data = TurnStarted(
            turn_id=turn.turn_id,
            epoch=self._epoch,
            kind=turn.kind,
            input_ids=list(turn.input_ids),
            chain_index=turn.chain_index,
            started_at=self.now(),
            agent_id=self._agent,
            principal=turn.principal,
            sender=turn.sender,
            schema_digest=turn.schema_digest,
            trace_id=fresh_id(),
        )
        return Draft(turn.turn_id, data)

    def _terminal(self, terminal: Terminal) -> Iterator[Draft]:
        turn_id = terminal.turn.turn_id
        if terminal.acknowledged is not None:
            yield Draft(turn_id, acknowledging(terminal.acknowledged, turn_id))
        yield Draft(turn_id, self._end(terminal))
        if terminal.spent is not None:
            yield Draft(None, acknowledging(terminal.spent, None))

    def _end(self, terminal: Terminal) -> TurnCompleted | TurnAborted:
        turn, figures = terminal.turn, terminal.figures
        tool_calls = min(figures.tool_calls_count, FINAL_TOOL_CALLS_MAX)
        if not figures.cause:
            return TurnCompleted(
                turn_id=turn.turn_id,
                claimed_input_ids=list(turn.claimed),
                turns_count=figures.turns_count,
                tool_calls_count=tool_calls,
                duration_ms=figures.duration_ms,
                outcome=figures.outcome,
                input_disposition=terminal.disposition,
                output_message_ids=list(figures.output_message_ids),
                needs_user=figures.needs_user,
                completed_at=self.now(),
            )
        return TurnAborted(
            turn_id=turn.turn_id,
            claimed_input_ids=list(turn.claimed),
            turns_count=figures.turns_count,
            tool_calls_count=tool_calls,
            duration_ms=figures.duration_ms,
            outcome=figures.outcome,
            input_disposition=terminal.disposition,
            output_message_ids=list(figures.output_message_ids),
            cause=figures.cause,
            failure=figures.failure,
            aborted_at=self.now(),
        )


def _heard(message_id: str, item: InboxItem, at: int) -> Iterator[PartCreated]:
    """Make the parts of an input; an excerpt keeps its reference, and is never long (ART-1)."""
    if all(one.prompt_artifact is None for one in item.content):
        yield from _texts(message_id, [one.text for one in item.content], at)
        return
    for number, one in enumerate(item.content):
        payload: dict[str, object] = {"text": one.text}
        if one.prompt_artifact is not None:
            payload["prompt_artifact"] = one.prompt_artifact
        yield _part(message_id, number, "text", payload, at)


def _texts(message_id: str, texts: Sequence[str], at: int) -> Iterator[PartCreated]:
    """Make the parts of a message; a long text becomes several that each fit in a record."""
    pieces = (
        text[start : start + PART_CHARS_MAX]
        for text in texts
        for start in range(0, len(text) or 1, PART_CHARS_MAX)
    )
    for number, piece in enumerate(pieces):
        yield _part(message_id, number, "text", {"text": piece}, at)


def _part(
    message_id: str,
    number: int,
    kind: Literal["text", "tool_call"],
    payload: dict[str, object],
    at: int,
) -> PartCreated:
    """Make a part that is written with its message, named after it."""
    name = message_id.removeprefix("msg_")
    return PartCreated(
        part_id=f"part_{name}-{number}" if number else f"part_{name}",
        message_id=message_id,
        part_type=kind,
        payload=payload,
        created_at=at,
    )


def acknowledging(gone: Gone, turn_id: str | None) -> InboxAcknowledged:
    """Make the record by which inputs leave the inbox."""
    return InboxAcknowledged(
        reason=gone.reason,
        turn_id=turn_id,
        by=gone.by,
        items=[Acknowledged(message_id=name, digest=digest) for name, digest in gone.items],
    )


def removed_by(frame: Frame) -> list[str]:
    """Name the inputs that leave the inbox with a frame, in its order."""
    parts = [frame.discard]
    if frame.terminal is not None:
        parts += [frame.terminal.acknowledged, frame.terminal.spent]
    return [name for part in parts if part is not None for name, _ in part.items]
