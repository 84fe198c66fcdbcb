"""Requests to a storage, made up for tests: sessions, inputs, turns.

Ids, instants and digests are counted, not drawn, so that a failing test says the same twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from callboard import messages as m
from callboard.ids import SessionRef, workspace_key
from callboard.records import compact, item_digest

WORKSPACE: Final = "/callboard/conformance"
PRINCIPAL: Final = "principal:operator:local"
AT: Final = 1_700_000_000_000_000
"""Microseconds since the epoch that everything made up here carries."""


def session_ref(session_id: str, workspace: str = WORKSPACE) -> str:
    """Name a session.

    Args:
        session_id: its id.
        workspace: an absolute path, which need not exist.

    """
    return str(SessionRef(workspace_key(workspace), session_id))


def item(message_id: str, words: str = "hello", **more: object) -> m.InboxItem:
    """Make an input.

    Args:
        message_id: its id.
        words: its text.
        more: any other field of `InboxItem`.

    """
    return m.InboxItem.model_validate(
        {
            "message_id": message_id,
            "origin": "user",
            "content": [m.Text(type="text", text=words)],
            "queued_at": AT,
            "digest": digest_of(words),
            "principal": PRINCIPAL,
            **more,
        }
    )


def digest_of(words: str) -> str:
    """Compute the digest of an input of this text."""
    return item_digest([{"type": "text", "text": words}], {})


class Author:
    """Writes records with ids that it counts.

    Args:
        first: the number that its ids begin with; two authors of one session need two.

    """

    def __init__(self, first: int = 1) -> None:
        self._next = first

    def fresh(self) -> str:
        """Give the next id: 32 hex digits."""
        self._next += 1
        return f"{self._next - 1:032x}"

    def record(
        self, kind: str, data: Mapping[str, object], turn_id: str | None = None
    ) -> m.NewRecord:
        """Make a record."""
        return m.NewRecord(id=self.fresh(), type=kind, turn_id=turn_id, data=compact(data))

    def creation(
        self, gateway_epoch: int, session_id: str, workspace: str = WORKSPACE, **more: object
    ) -> m.Create:
        """Make a session."""
        text = session_ref(session_id, workspace)
        data = {
            "workspace": workspace,
            "session_id": session_id,
            "root": text,
            "agent": "echo",
            "created_at": AT,
            "owner": {"kind": "operator", "principal_id": PRINCIPAL, "created_at": AT},
            **more,
        }
        return m.Create(
            gateway_epoch=gateway_epoch, session=text, record=self.record("session_created", data)
        )

    def started(self, turn_id: str, epoch: int, inputs: Sequence[str]) -> m.NewRecord:
        """Begin a turn."""
        data = {
            "turn_id": turn_id,
            "epoch": epoch,
            "kind": "user",
            "input_ids": list(inputs),
            "chain_index": 0,
            "started_at": AT,
            "agent_id": "echo",
            "principal": PRINCIPAL,
            "trace_id": "t",
        }
        return self.record("turn_started", data, turn_id)

    def said(
        self, turn_id: str, message_id: str, words: str, role: str = "assistant", of: str = ""
    ) -> list[m.NewRecord]:
        """Make a message of one part.

        Args:
            turn_id: the turn that says it.
            message_id: its id.
            words: its text.
            role: who says it.
            of: the id of the input that it is, if it is one.

        """
        message = {
            "message_id": message_id,
            "role": role,
            "inbox_message_id": of or None,
            "created_at": AT,
        }
        return [
            self.record("message_created", message, turn_id),
            self.part(turn_id, message_id, "text", {"text": words}),
        ]

    def part(
        self, turn_id: str, message_id: str, part_type: str, payload: Mapping[str, object]
    ) -> m.NewRecord:
        """Make a part of a message."""
        data = {
            "part_id": f"part_{self._next}",
            "message_id": message_id,
            "part_type": part_type,
            "payload": payload,
            "created_at": AT,
        }
        return self.record("part_created", data, turn_id)

    def acknowledged(
        self, inputs: Mapping[str, str], reason: str, turn_id: str | None = None
    ) -> m.NewRecord:
        """Let inputs leave.

        Args:
            inputs: their texts by message id.
            reason: completed, aborted, or that of a discard.
            turn_id: their turn, if they had one.

        """
        items = [{"message_id": one, "digest": digest_of(text)} for one, text in inputs.items()]
        data = {"reason": reason, "turn_id": turn_id, "items": items}
        return self.record("inbox_acknowledged", data, turn_id)

    def completed(self, turn_id: str, inputs: Sequence[str]) -> m.NewRecord:
        """End a turn well."""
        data = self._end(turn_id, inputs) | {
            "outcome": "completed",
            "input_disposition": "acknowledged",
            "completed_at": AT,
        }
        return self.record("turn_completed", data, turn_id)

    def aborted(
        self, turn_id: str, inputs: Sequence[str], disposition: str = "pending"
    ) -> m.NewRecord:
        """End a turn that failed."""
        data = self._end(turn_id, inputs) | {
            "outcome": "failed",
            "input_disposition": disposition,
            "cause": "failed",
            "aborted_at": AT,
        }
        return self.record("turn_aborted", data, turn_id)

    @staticmethod
    def _end(turn_id: str, inputs: Sequence[str]) -> dict[str, object]:
        return {
            "turn_id": turn_id,
            "claimed_input_ids": list(inputs),
            "turns_count": 1,
            "tool_calls_count": 0,
            "duration_ms": 5,
        }


def frame(
    session: str,
    epoch: int,
    records: Sequence[m.NewRecord] = (),
    puts: Sequence[m.InboxItem] = (),
    removes: Sequence[str] = (),
    first_seq: int | None = None,
) -> m.Append:
    """Make an append with the key that it must have.

    Args:
        session: whose.
        epoch: of the lease.
        records: what its transcript gets.
        puts: what its inbox gets.
        removes: what leaves its inbox.
        first_seq: where the first record must land, if that matters.

    """
    names = [*(one.id for one in records), *(one.message_id for one in puts), *removes]
    ops: list[m.PutOp | m.RemoveOp] = [m.PutOp(op="put", item=one) for one in puts]
    ops += [m.RemoveOp(op="remove", message_id=one) for one in removes]
    return m.Append(
        session=session,
        epoch=epoch,
        key=names[0] if names else "none",
        first_seq=first_seq,
        records=list(records),
        inbox=ops,
    )
