"""The one fold: records to the state of a session (PRJ-1). Pure, streaming, bounded.

Storage folds what it appends and refuses what breaks a rule; a session actor folds what it wrote;
the catalog folds files. All of them use this code, so that a running and a restarted session agree
(RUN-5). State is bounded by the open turn and the live inbox, never by the transcript: turn ids
rise strictly within a session, so "has this turn ended" needs the highest one only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Literal

from callboard.artifacts import read_ref
from callboard.errors import (
    ArtifactInvalid,
    RecordInvalid,
    TurnActive,
    TurnIdReused,
    TurnNotActive,
    TurnTerminal,
)
from callboard.messages import OpenCall, OpenTurn
from callboard.records import (
    InboxAcknowledged,
    MessageCreated,
    PartCreated,
    PartUpdated,
    QuarantineState,
    RecordData,
    SessionCreated,
    SessionUpdated,
    TurnAborted,
    TurnCancelRequested,
    TurnCompleted,
    TurnStarted,
)

FOLD_VERSION = 1
Effect = Literal["readonly", "keyed", "unsafe"]
TURN_REASONS = frozenset({"completed", "aborted"})
"""Reasons of an inbox_acknowledged that stands directly before its turn's terminal."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call without a result."""

    call_id: str
    name: str
    effect: Effect
    message_id: str
    turn_id: str


@dataclass(slots=True)
class TurnState:
    """The open turn, as far as its records tell."""

    turn_id: str
    kind: Literal["user", "pending", "continuation"]
    epoch: int
    input_ids: tuple[str, ...]
    chain_index: int
    started_at: int
    applied: tuple[str, ...] = ()
    messages: frozenset[str] = frozenset()
    steps: int = 0
    """Assistant messages so far (`turns_count` of the terminal)."""
    tool_calls: int = 0
    had_successful_tool_result: bool = False
    cancel: Literal["", "drop", "keep"] = ""

    @property
    def wrote_output(self) -> bool:
        """Tell whether anything of the turn was output: an assistant message or a tool call."""
        return bool(self.steps or self.tool_calls)


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """The last turn that ended."""

    turn_id: str
    outcome: str
    cause: str
    disposition: Literal["acknowledged", "pending", "held"]
    seq: int
    ended_at: int
    had_output: bool


@dataclass(slots=True)
class SessionFold:
    """The state of one session after a prefix of its records.

    `admit` checks and applies a new record; `apply` applies a stored one. Cloning is cheap, so that
    a frame is tried on a clone and taken over whole or not at all.
    """

    created: SessionCreated | None = None
    created_commit: int = 0
    seq: int = 0
    commit: int = 0
    title: str | None = None
    agent: str = ""
    model: str | None = None
    permission_mode: str = "default"
    settings: dict[str, str] = field(default_factory=dict[str, str])
    extra: dict[str, object] = field(default_factory=dict[str, object])
    quarantine: QuarantineState | None = None
    paused_at: int | None = None
    archived_at: int | None = None
    task_status: str | None = None
    updated_at: int = 0
    message_count: int = 0
    first_message_at: int | None = None
    last_message_at: int | None = None
    has_errors: bool = False
    last_message_id: str | None = None
    turn: TurnState | None = None
    turns: int = 0
    last_turn_id: str = ""
    last_ended: EndedTurn | None = None
    calls: dict[str, Call] = field(default_factory=dict[str, Call])
    """Calls without a result, by call id, in order."""
    attempts: dict[str, int] = field(default_factory=dict[str, int])
    """Of unacknowledged inputs: turns of theirs that failed or died (RTY-1)."""
    held: frozenset[str] = frozenset()
    """Unacknowledged inputs that no wake may start (RTY-5)."""
    applied: dict[str, str] = field(default_factory=dict[str, str])
    """Unacknowledged inputs that a turn has applied, with that turn's id (RUN-5a)."""
    artifacts: frozenset[str] = frozenset()
    """Prompt artifacts that messages name (ART-12)."""
    bad_artifact: bool = False
    """A message names an artifact in a way that cannot be read: which one is unknown (ART-5)."""
    acknowledging: frozenset[str] = frozenset()
    """Ids of the inbox_acknowledged that was the last record: its terminal comes next (RUN-4)."""

    @property
    def exists(self) -> bool:
        """Tell whether the session's first record was seen."""
        return self.created is not None

    @property
    def last_activity_at(self) -> int:
        """Microseconds of the last counted message, or of the creation (PRJ-8c)."""
        created = self.created.created_at if self.created else 0
        return max(created, self.last_message_at or 0)

    def open_turn(self) -> OpenTurn | None:
        """Say of the open turn what a new owner needs, if there is one (runtime 5.2)."""
        turn = self.turn
        if turn is None:
            return None
        return OpenTurn(
            turn_id=turn.turn_id,
            kind_=turn.kind,
            epoch=turn.epoch,
            input_ids=list(turn.input_ids),
            applied_ids=list(turn.applied),
            chain_index=turn.chain_index,
            started_at=turn.started_at,
            turns_count=turn.steps,
            tool_calls_count=turn.tool_calls,
            wrote_output=turn.wrote_output,
            cancel_requested=bool(turn.cancel),
            keep_input=turn.cancel == "keep",
        )

    def open_calls(self) -> list[OpenCall]:
        """Say of the calls without a result what a new owner needs, in order."""
        return [
            OpenCall(
                call_id=call.call_id,
                name=call.name,
                effect=call.effect,
                message_id=call.message_id,
            )
            for call in self.calls.values()
        ]

    def clone(self) -> SessionFold:
        """Copy the state; what is mutable inside is copied too, values are shared."""
        other = SessionFold(*_values(self))  # a fifth of what copy.copy costs
        other.calls = dict(self.calls) if self.calls else {}
        other.attempts = dict(self.attempts) if self.attempts else {}
        other.applied = dict(self.applied) if self.applied else {}
        if self.turn is not None:
            other.turn = TurnState(*_turn_values(self.turn))
        return other

    def admit(self, turn_id: str | None, data: RecordData, *, commit: int) -> None:
        """Check a new record against the session's state and apply it.

        Args:
            turn_id: the envelope's turn, or none.
            data: the checked data.
            commit: the frame that will hold it.

        Raises:
            RecordInvalid: the record breaks a rule of its type.
            ArtifactInvalid: it names an artifact in a way that cannot be read (ART-5).
            TurnActive, TurnIdReused, TurnTerminal, TurnNotActive: table 3.3 of the runtime page.

        """
        self._check(turn_id, data)
        self.apply(self.seq + 1, commit, data)

    def _check(self, turn_id: str | None, data: RecordData) -> None:
        kind = type(data)  # an isinstance that says no costs a quarter of all this
        if kind is PartCreated:
            assert isinstance(data, PartCreated)
            if data.part_type == "tool_result":
                self._check_result(data)
                return
        elif isinstance(data, SessionCreated):
            if self.exists:
                raise RecordInvalid(type=data.type, field="type")
            return
        elif isinstance(data, TurnStarted):
            self._check_start(data)
            return
        named = turn_id if turn_id is not None else getattr(data, "turn_id", None)
        if named is not None:
            self._check_turn(named)
        self._check_content(data)

    def _check_start(self, data: TurnStarted) -> None:
        if self.turn is not None:
            raise TurnActive(turn_id=self.turn.turn_id)
        if data.turn_id <= self.last_turn_id:
            raise TurnIdReused(turn_id=data.turn_id)

    def _check_turn(self, turn_id: str) -> None:
        if self.turn is not None and self.turn.turn_id == turn_id:
            return
        if turn_id <= self.last_turn_id:
            raise TurnTerminal(turn_id=turn_id)
        raise TurnNotActive(turn_id=turn_id)

    def _check_result(self, data: PartCreated) -> None:
        """Ask for an open call; recovery may close one of an ended turn (RUN-3)."""
        if data.payload.get("call_id") not in self.calls:
            raise RecordInvalid(type=data.type, field="payload.call_id")

    def _check_content(self, data: RecordData) -> None:
        if isinstance(data, PartCreated | PartUpdated):
            if self.turn is None or data.message_id not in self.turn.messages:
                raise RecordInvalid(type=data.type, field="message_id")
            if (named := data.payload.get("prompt_artifact")) is not None:
                read_ref(named)
            if data.part_type == "tool_call" and data.payload.get("call_id") in self.calls:
                raise RecordInvalid(type=data.type, field="payload.call_id")
        elif isinstance(data, MessageCreated):
            if self.turn is None:
                raise RecordInvalid(type=data.type, field="turn_id")
        elif isinstance(data, TurnCompleted | TurnAborted) and self._open_calls_of(data.turn_id):
            raise RecordInvalid(type=data.type, field="turn_id")

    def _open_calls_of(self, turn_id: str) -> bool:
        return any(call.turn_id == turn_id for call in self.calls.values())

    def apply(self, seq: int, commit: int, data: RecordData) -> None:
        """Apply a record that is stored, or about to be.

        Args:
            seq: its position.
            commit: its frame.
            data: its checked data.

        """
        self.seq, self.commit = seq, commit
        if type(data) is InboxAcknowledged:
            self._acknowledge(data)
            return
        self._apply_other(data)
        self.acknowledging = _NOBODY

    def _apply_other(self, data: RecordData) -> None:
        if isinstance(data, PartCreated):
            self._part(data)
            self._name_artifact(data)
        elif isinstance(data, MessageCreated):
            self._message(data)
        elif isinstance(data, PartUpdated):
            self._name_artifact(data)
        elif isinstance(data, TurnStarted):
            self._start(data)
        elif isinstance(data, TurnCompleted | TurnAborted):
            self._end(data)
        elif isinstance(data, TurnCancelRequested):
            if self.turn is not None:
                self.turn.cancel = "keep" if data.keep_input else "drop"
        elif isinstance(data, SessionUpdated):
            self._update(data)
        elif isinstance(data, SessionCreated):
            self._create(data)

    def _create(self, data: SessionCreated) -> None:
        self.created, self.created_commit = data, self.commit
        self.title, self.agent, self.model = data.title, data.agent, data.model
        self.permission_mode = data.permission_mode
        self.settings, self.extra = data.settings, data.extra
        self.updated_at = data.created_at

    def _update(self, data: SessionUpdated) -> None:
        for name in data.model_fields_set - {"settings", "extra", "task_failure"}:
            value = getattr(data, name)
            if value is None and name in ("agent", "permission_mode"):
                continue  # these two cannot be cleared
            setattr(self, name, value)
        if "settings" in data.model_fields_set:
            self.settings = data.settings or {}
        if "extra" in data.model_fields_set:
            self.extra = data.extra or {}

    def _message(self, data: MessageCreated) -> None:
        turn = self.turn
        if turn is not None:
            if data.message_id in turn.messages:
                return  # a repeat attaches its parts to the first (PRJ-3a)
            turn.messages |= {data.message_id}
            if data.role == "assistant":
                turn.steps += 1
            if data.role == "user" and data.inbox_message_id is not None:
                if data.inbox_message_id not in turn.applied:
                    turn.applied += (data.inbox_message_id,)
                self.applied[data.inbox_message_id] = turn.turn_id
        self.last_message_id = data.message_id
        if data.hidden or data.role not in ("user", "assistant"):
            return
        at = data.created_at
        self.message_count += 1
        self.first_message_at = min(at, self.first_message_at if self.first_message_at else at)
        self.last_message_at = max(at, self.last_message_at or 0)

    def _part(self, data: PartCreated) -> None:
        payload = data.payload
        if data.part_type == "tool_call":
            turn_id = self.turn.turn_id if self.turn else ""
            call_id, effect = str(payload["call_id"]), payload.get("effect", "unsafe")
            self.calls[call_id] = Call(
                call_id,
                str(payload["name"]),
                "readonly" if effect == "readonly" else "keyed" if effect == "keyed" else "unsafe",
                data.message_id,
                turn_id,
            )
            if self.turn is not None:
                self.turn.tool_calls += 1
        elif data.part_type == "tool_result":
            call = self.calls.pop(str(payload["call_id"]), None)
            if payload.get("error") is not None:
                self.has_errors = True
            elif "error" in payload and call is not None and self.turn is not None:
                self.turn.had_successful_tool_result |= call.turn_id == self.turn.turn_id

    def _name_artifact(self, data: PartCreated | PartUpdated) -> None:
        """Note which file a long message's text is in; what was ever named is kept (ART-12)."""
        named = data.payload.get("prompt_artifact")
        if named is None:
            return
        try:
            self.artifacts |= {read_ref(named).artifact_id}
        except ArtifactInvalid:
            self.bad_artifact = True

    def _start(self, data: TurnStarted) -> None:
        self.turn = TurnState(
            data.turn_id,
            data.kind,
            data.epoch,
            tuple(data.input_ids),
            data.chain_index,
            data.started_at,
        )
        self.turns += 1
        self.last_turn_id = max(self.last_turn_id, data.turn_id)

    def _acknowledge(self, data: InboxAcknowledged) -> None:
        self.acknowledging = frozenset(item.message_id for item in data.items)
        for item in data.items:
            self.attempts.pop(item.message_id, None)
            self.applied.pop(item.message_id, None)
            self.held -= {item.message_id}

    def _end(self, data: TurnCompleted | TurnAborted) -> None:
        aborted = isinstance(data, TurnAborted)
        cause = data.cause if isinstance(data, TurnAborted) else ""
        turn = self.turn
        if turn is not None and turn.turn_id == data.turn_id:
            self.turn = None
        ended_at = data.aborted_at if isinstance(data, TurnAborted) else data.completed_at
        self.last_ended = EndedTurn(
            data.turn_id,
            data.outcome,
            cause,
            data.input_disposition,
            self.seq,
            ended_at,
            turn is not None and turn.wrote_output,
        )
        if not aborted:
            return
        for message_id in data.claimed_input_ids:
            if message_id in self.acknowledging:
                continue
            if cause in ("failed", "process_restart"):
                self.attempts[message_id] = self.attempts.get(message_id, 0) + 1
            if data.input_disposition == "held":
                self.held |= {message_id}
            else:
                self.held -= {message_id}


_NOBODY = frozenset[str]()
_turn_values = attrgetter(*(one.name for one in fields(TurnState)))
_values = attrgetter(*(one.name for one in fields(SessionFold)))
"""Take all values of a turn, of a fold, in the order of its fields."""
