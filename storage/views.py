"""Views of a transcript: its history, the client's view of that, and the model's context.

Pure, over the checked records of a transcript (PRJ-1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from callboard.limits import (
    CONTEXT_REPLACEMENTS_BYTES_MAX,
    CONTEXT_REPLACEMENTS_MAX,
    HISTORY_PAGE_MESSAGES_MAX,
)
from callboard.messages import Text
from callboard.records import PartCreated, Record, TurnAborted, TurnCompleted, compact
from callboard.storage.gather import Gathered, Message, Owner, Part, Role, main_of, messages_of
from callboard.storage.lines import Gap

CHECKPOINT_VERSION: Final = 1
"""The only version of a summary's replacements that is understood (CTX-1a)."""
NO_RESULT: Final = "no result: the call was interrupted"
"""What a context says in place of a result that nobody recorded (CTX-4)."""


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """A piece of a history: messages and gaps in the order of the transcript."""

    items: tuple[Message | Gap, ...]
    next_seq: int | None
    """Where the next page begins, or none."""


# --- history ------------------------------------------------------------------------------------


def history(
    records: Iterable[Record | Gap], *, from_seq: int = 1, limit: int = HISTORY_PAGE_MESSAGES_MAX
) -> HistoryPage:
    """Show a page of a transcript as messages, with every gap in its place (HIS-1, REC-3a).

    Args:
        records: the whole transcript: a later record may change an earlier message.
        from_seq: where the page begins; `next_seq` of the page before.
        limit: the most messages of the page.

    """
    gathered = Gathered(from_seq, limit)
    gaps: list[tuple[int, Gap]] = []
    seq = 0
    for item in records:
        if isinstance(item, Gap):
            if seq >= from_seq - 1:
                gaps.append((seq, item))
        else:
            seq = item.seq
            gathered.add(item)
    shown: list[tuple[int, Message | Gap]] = []
    next_seq = gathered.next_seq
    for owner in gathered.owners.values():
        messages = list(messages_of(owner))
        if shown and len(shown) + len(messages) > limit:
            next_seq = owner.seq
            break
        shown += ((owner.seq, message) for message in messages)
    shown += ((at, gap) for at, gap in gaps if next_seq is None or at < next_seq - 1)
    shown.sort(key=lambda pair: pair[0])  # stable: a gap stands behind the record before it
    return HistoryPage(tuple(item for _, item in shown), next_seq)


def client_view(items: Iterable[Message | Gap]) -> Iterator[Message | Gap]:
    """Keep of a history what a person said and was told (HIS-2).

    Hidden and blank messages, tools and system messages fall away; of adjacent synthetic messages
    that say the same one stays.
    """
    last: Message | None = None
    for item in items:
        if isinstance(item, Message):
            if item.hidden or item.role not in ("user", "assistant") or not item.content.strip():
                continue
            if (
                last is not None
                and last.synthetic
                and item.synthetic
                and (last.role, last.content) == (item.role, item.content)
            ):
                continue
            last = item
        else:
            last = None
        yield item


def turn_text(records: Iterable[Record | Gap], turn_id: str) -> str:
    """Give the text of a turn's last assistant message that has one, or the empty text.

    Args:
        records: of its session; they are read as far as the turn's terminal record.
        turn_id: the turn.

    """
    gathered = Gathered()
    for item in records:
        if isinstance(item, Gap) or item.turn_id != turn_id:
            continue
        if isinstance(item.data, TurnCompleted | TurnAborted):
            break
        gathered.add(item)
    for owner in reversed(gathered.owners.values()):
        message = main_of(owner)
        if message.role == "assistant" and message.content:
            return message.content
    return ""


# --- the model's context ------------------------------------------------------------------------


def context(records: Iterable[Record | Gap]) -> list[Message]:
    """Show a transcript as the model is to see it: from the last summary on (CTX-1, CTX-4).

    Raises:
        SessionDamaged: there is a gap, and a model is fed nothing that is not whole (REC-3b).

    """
    gathered = Gathered()
    for item in records:
        if isinstance(item, Gap):
            raise item.refusal()
        data = item.data
        if isinstance(data, PartCreated) and data.part_type == "summary":
            _begin_at(gathered, data)
        gathered.add(item)
    messages: list[Message] = []
    for index, owner in enumerate(gathered.owners.values()):
        summary = _last_summary(owner) if index == 0 else None
        messages += _prefix(owner, summary) if summary else messages_of(owner)
    return _with_results(messages)


def _begin_at(gathered: Gathered, data: PartCreated) -> None:
    """Let the context begin at the message of a summary, unless it is a repeat of an older one."""
    owner = gathered.owners.get(data.message_id)
    if data.message_id in gathered.others or (owner and data.part_id in owner.parts):
        return
    later = {
        name: kept
        for name, kept in gathered.owners.items()
        if owner is not None and kept.seq >= owner.seq
    }
    gathered.forget()
    gathered.owners.update(later)
    gathered.others.difference_update(later)


def _last_summary(owner: Owner) -> Part | None:
    summaries = [part for part in owner.parts.values() if part.kind == "summary"]
    return summaries[-1] if summaries else None


def _prefix(owner: Owner, summary: Part) -> list[Message]:
    """Give what stands for everything before a summary: its replacements, or its text."""
    base = replace(main_of(owner), seq=summary.seq, reasoning="", tool_calls=(), synthetic=True)
    valid = _replacements(summary.payload)
    if valid is None:
        return [replace(base, role="user", content=str(summary.payload["text"]))]
    return [replace(base, role=item.role, content=item.text) for item in valid]


class _Replacement(BaseModel):
    """A message that a summary puts in place of older ones; images come with their part type."""

    model_config = ConfigDict(strict=True, extra="ignore")
    role: Role
    content: str | list[Text]

    @property
    def text(self) -> str:
        """Its content as one text."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class _Replacements(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    checkpoint_version: int = Field(ge=CHECKPOINT_VERSION, le=CHECKPOINT_VERSION)
    replacements: list[_Replacement] = Field(min_length=1, max_length=CONTEXT_REPLACEMENTS_MAX)


def _replacements(payload: Mapping[str, object]) -> list[_Replacement] | None:
    """Read a summary's replacement messages, or none if they are not valid as a whole (CTX-1a)."""
    if len(compact(payload.get("replacements"))) > CONTEXT_REPLACEMENTS_BYTES_MAX:
        return None
    try:
        return _Replacements.model_validate(payload).replacements
    except ValidationError:
        return None


def _with_results(messages: Sequence[Message]) -> list[Message]:
    """Answer every call that has no result with a flagged error, behind its siblings' results."""
    answered = {message.call_id for message in messages if message.role == "tool"}
    complete: list[Message] = []
    owed: list[Message] = []
    for message in messages:
        if message.role != "tool":
            complete += owed
            owed = [
                replace(
                    message,
                    role="tool",
                    content=NO_RESULT,
                    reasoning="",
                    tool_calls=(),
                    call_id=call.call_id,
                    name=call.name,
                    error=True,
                    synthetic=True,
                )
                for call in message.tool_calls
                if call.call_id not in answered
            ]
        complete.append(message)
    return complete + owed
