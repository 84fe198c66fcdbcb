"""The books of one running turn: its inputs on their way to the agent, its frames, its end.

The mailbox decides about claims and terminals; here is what lies between: a claimed input becomes
a durable message before the agent sees it (TLP-2), every word and call of the agent is durable
before the agent goes on (TLP-4), and the end waits for all of that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol

from callboard.actors.session.agent_calls import (
    AgentCall,
    AgentSide,
    Call,
    Input,
    Next,
    Over,
    Result,
    Say,
    Steered,
    TurnView,
)
from callboard.actors.session.failures import classify
from callboard.actors.session.mailbox_types import (
    Answer,
    Cause,
    Command,
    Drain,
    Drained,
    DrainOrSeal,
    Entry,
    Figures,
    Finish,
    Token,
    Turn,
)
from callboard.actors.session.retry import Verdict, after_failure
from callboard.actors.session.scribe import Draft, Scribe, encode
from callboard.errors import (
    CallboardError,
    InvalidRequest,
    PayloadTooLarge,
    PersistenceFailed,
    TurnTerminal,
)
from callboard.fold import SessionFold
from callboard.limits import (
    CANCEL_GRACE_MS,
    FRAME_BYTES_MAX,
    GATE_DRAIN_MS,
    TURN_INPUT_IDS_MAX,
)
from callboard.messages import Outcome
from callboard.records import Failure

DRAIN_TOKEN: Final = "drain"
FINISH_TOKEN: Final = "finish"
CLAIM_FRAME_BYTES_MAX: Final = FRAME_BYTES_MAX // 8
"""Of inputs, as the inbox counts them, whose messages share a frame: as a message each has an
envelope of its own, and JSON may spell a character with six bytes. A larger one is alone."""
_LONG_TEXT_CHARS: Final = 500_000
"""A final text beyond it is measured before the terminal is built with it."""
Written = Callable[[CallboardError | None], None]
"""Told when a frame is durable, or why it was refused."""


class Desk(Protocol):
    """What a turn needs of its session."""

    fold: SessionFold
    scribe: Scribe
    agents: AgentSide
    session: str

    def do(self, command: Command) -> None:
        """Let the mailbox take a command; its effects are performed before this returns."""
        ...

    def write(self, drafts: Sequence[Draft], written: Written) -> None:
        """Have a frame written; raises PayloadTooLarge or Overloaded, and writes nothing then."""
        ...

    def after(self, ms: int, name: str) -> None:
        """Set a timer."""
        ...

    def ticks(self) -> int:
        """Milliseconds of a clock that only goes forward."""
        ...

    def chained_turn_id(self) -> str:
        """Make an id for the turn that may chain to this one."""
        ...

    def reply(self, token: Token, answer: Answer) -> None:
        """Answer a request."""
        ...

    def waited_ms(self) -> int:
        """Milliseconds since the first of the failures in a row, 0 for the first."""
        ...


class _Arriving:
    """A claimed input on its way to the agent."""

    __slots__ = ("input", "is_durable")

    def __init__(self, entry: Entry, *, is_durable: bool) -> None:
        self.input = _input(entry)
        self.is_durable = is_durable


def _input(entry: Entry) -> Input:
    content = entry.item.content
    text = "\n".join(part.text for part in content)
    named = next((one.prompt_artifact for one in content if one.prompt_artifact is not None), None)
    if named is None:
        return Input(entry.id, text)
    parts = [part.model_dump(exclude_none=True) for part in content]
    return Input(entry.id, text, str(named.get("artifact_id")), parts)


class OpenTurn:
    """A turn from its durable start until its durable terminal.

    Args:
        desk: its session.
        turn: as the mailbox started it.
        view: what its agent may know.

    """

    def __init__(self, desk: Desk, turn: Turn, view: TurnView) -> None:
        self.turn_id = turn.turn_id
        self.waiters: list[Token] = []
        """Who cancelled it and waits for its end."""
        self.cancel: Literal["", "asked", "durable"] = ""
        self.closing: list[Draft] = []
        """What the terminal's frame holds before the terminal."""
        self.is_finishing = False
        self._desk = desk
        self._turn = turn
        self._view = view
        self._began = desk.ticks()
        self._arriving: deque[_Arriving] = deque()
        self._wanted: Next | Steered | None = None
        self._is_drained = False
        """The mailbox has answered what the agent's present wish asked of it."""
        self._is_sealed = False
        self._stops = False
        self._claimed: list[str] = []
        self._again: set[str] = set()
        self._unanswered = 0
        self._broken: CallboardError | None = None
        self._told: Cause = ""
        self._over: Over | None = None
        self._keep_input = False
        self._outputs: deque[str] = deque(maxlen=TURN_INPUT_IDS_MAX)

    # Its inputs.

    def begin(self, claimed: Sequence[Entry], *, stopping: bool) -> None:
        """Write the prompt and run the agent; in a session that stops, end at once."""
        if stopping:
            self._told = "interrupted"
            self.over(Over(self.turn_id, aborted=True))
            return
        self._take(claimed)
        if self._turn.kind == "pending":
            # One at least, so that a turn whose agent takes nothing uses up what it started for.
            self._desk.do(Drain(DRAIN_TOKEN, self.turn_id, 1))
        self._desk.agents.begin(self._view)

    def _take(self, entries: Sequence[Entry]) -> None:
        """Have claimed inputs written as messages, those of one claim together (TLP-2)."""
        heard: list[tuple[_Arriving, Entry]] = []
        size = 0
        for entry in entries:
            self._claimed.append(entry.id)
            if self._broken is not None:
                continue  # this one and those behind it stay pending (TLP-2b)
            known = entry.id in self._desk.fold.applied
            arriving = _Arriving(entry, is_durable=known or entry.item.stored)
            self._arriving.append(arriving)
            if known:
                self._again.add(entry.id)
            elif not entry.item.stored:
                if heard and size + entry.size > CLAIM_FRAME_BYTES_MAX:
                    self._write_heard(heard)
                    heard, size = [], 0
                heard.append((arriving, entry))
                size += entry.size
        if heard:
            self._write_heard(heard)

    def _write_heard(self, heard: Sequence[tuple[_Arriving, Entry]]) -> None:
        def written(error: CallboardError | None) -> None:
            for arriving, _ in heard:
                arriving.is_durable = error is None
            self._feed()

        if self._broken is not None:
            return
        scribe, turn_id = self._desk.scribe, self.turn_id
        drafts = [draft for _, entry in heard for draft in scribe.heard(turn_id, entry.item)]
        try:
            self._write(drafts, written)
        except CallboardError as error:
            self._break(error)

    def drained(self, answer: Drained | CallboardError) -> None:
        """Take what the mailbox answers to a drain."""
        if isinstance(answer, Drained):
            self._take(answer.entries)
        self._is_sealed |= not isinstance(answer, Drained) or answer.sealed
        self._is_drained = True
        self._feed()

    def _feed(self) -> None:
        """Give the agent what it waits for, if it can have it now."""
        wanted = self._wanted
        if wanted is None or self.cancel:
            return  # a cancel is on its way: the wait ends with that
        if self._broken is not None:
            self._satisfy(wanted, PersistenceFailed())
        elif isinstance(wanted, Steered):
            if self._is_drained and all(one.is_durable for one in self._arriving):
                self._satisfy(wanted, [one.input for one in self._arriving])
                self._arriving.clear()
        elif not self._arriving:
            if self._is_sealed:
                self._satisfy(wanted, None)
        elif self._arriving[0].is_durable:
            self._satisfy(wanted, self._arriving.popleft().input)

    def _satisfy(self, wanted: Next | Steered, value: object) -> None:
        self._wanted = None
        self._desk.agents.answer(wanted.ticket, value)

    # What the agent wants.

    def called(self, call: AgentCall) -> None:
        """Do what the agent wants, or refuse it."""
        if isinstance(call, Over):
            self.over(call)
        elif self._over is not None or self.is_finishing:
            self._desk.agents.answer(call.ticket, TurnTerminal(turn_id=self.turn_id))
        elif self._broken is not None:
            self._desk.agents.answer(call.ticket, PersistenceFailed())
        elif isinstance(call, Next | Steered):
            self._want(call)
        else:
            self._write_for(call)

    def _want(self, call: Next | Steered) -> None:
        self._wanted, self._is_drained = call, False
        if isinstance(call, Steered):
            self._desk.do(Drain(DRAIN_TOKEN, self.turn_id))
        elif self._arriving or self._is_sealed:
            self._feed()
        else:
            # One at a time: what an agent does not ask for is left for the next turn.
            self._desk.do(DrainOrSeal(DRAIN_TOKEN, self.turn_id, 1))

    def _write_for(self, call: Say | Call | Result) -> None:
        """Have a word, a call or a result written, then let the agent go on (TLP-4)."""
        said = ""

        def written(error: CallboardError | None) -> None:
            if said and error is None:
                self._outputs.append(said)
            self._desk.agents.answer(call.ticket, PersistenceFailed() if error else None)

        try:
            drafts = self._drafts_for(call)
            if isinstance(call, Say):
                said = self._desk.scribe.parent or ""
            self._write(drafts, written)
        except CallboardError as error:  # larger than a record may be: nothing was written
            self._desk.scribe.parent = self._desk.fold.last_message_id
            self._desk.agents.answer(call.ticket, error)

    def _drafts_for(self, call: Say | Call | Result) -> list[Draft]:
        scribe, turn_id = self._desk.scribe, self.turn_id
        if isinstance(call, Say):
            return scribe.said(turn_id, call.text)
        if isinstance(call, Call):
            return scribe.called(turn_id, call.call_id, call.name, call.arguments, call.effect)
        known = self._desk.fold.calls.get(call.call_id)
        if known is None:
            raise InvalidRequest(field="call_id", reason="not_active")
        return [
            scribe.returned(
                turn_id, known.message_id, call.call_id, known.name, call.output, call.error
            )
        ]

    def _write(self, drafts: Sequence[Draft], written: Written) -> None:
        def answered(error: CallboardError | None) -> None:
            self._unanswered -= 1
            written(error)
            if error is not None:
                self._break(error)
            self._try_finish()

        self._desk.write(drafts, answered)
        self._unanswered += 1

    def _break(self, error: CallboardError) -> None:
        """Fail the turn: what it did cannot be kept (RUN-13b)."""
        if self._broken is None:
            self._broken = error
            self._feed()
            self._tell("failed")

    # Its end.

    def cancel_by(self, token: Token, principal: str, *, keep_input: bool) -> None:
        """Record that the turn shall end, then tell its agent (TEX-14)."""
        if token:
            self.waiters.append(token)
        if self.cancel or self._over is not None or self._told:
            return
        self.cancel, self._keep_input = "asked", keep_input
        draft = self._desk.scribe.cancelling(self.turn_id, principal, keep_input=keep_input)
        try:
            self._write([draft], self._cancel_written)
        except CallboardError as error:
            self._cancel_written(error)

    def _cancel_written(self, error: CallboardError | None) -> None:
        if error is None:
            self.cancel = "durable"
            self._tell("cancelled")
            return
        self.cancel = ""
        waiters, self.waiters = self.waiters, []
        for token in waiters:
            self._desk.reply(token, error)
        self._feed()

    def interrupt(self) -> None:
        """End because the session stops (TLP-8b)."""
        self._stops = True
        if self._over is None:
            self._told = self._told or "interrupted"
            self._desk.agents.close("plane_stopping")
            self._desk.after(GATE_DRAIN_MS, "grace")

    def _tell(self, cause: Cause) -> None:
        if self._over is None and not self._told:
            self._told = cause
            self._desk.agents.abort(self.turn_id, cause)
            self._desk.after(CANCEL_GRACE_MS, "grace")

    def grace_is_over(self) -> bool:
        """Judge an agent that was told to end a while ago.

        Returns:
            Whether it still runs: its process must end (TEX-14c). In a session that stops it ends
            with its process anyway; its terminal says then that nothing is confirmed.

        """
        if self._over is not None or not self._told:
            return False
        if not self._stops:
            return True
        self.over(Over(self.turn_id, aborted=True, confirmed=False))
        return False

    def over(self, over: Over) -> None:
        """Note how the agent ended; the terminal is written when every frame is answered."""
        if self._over is None:
            self._over = over
            self._wanted = None
            self._try_finish()

    def _try_finish(self) -> None:
        if self._over is None or self._unanswered or self.is_finishing:
            return
        self.is_finishing = True
        self._desk.scribe.parent = self._desk.fold.last_message_id
        final, failure = self._final(self._over)
        if self._broken is not None:
            failure = classify(PersistenceFailed())
        cause = self._cause(self._over, failure)
        self.closing = self._open_calls(self._over)
        if not cause and final:
            self.closing += final
            self._outputs.append(self._desk.scribe.parent or "")
        self._desk.do(self._finish(self._over, cause, failure, len(final)))

    def _final(self, over: Over) -> tuple[list[Draft], Failure | None]:
        """Draft what the agent returned; a text that no frame can hold fails the turn."""
        if over.text is None or over.failure is not None:
            return [], over.failure
        drafts = self._desk.scribe.said(self.turn_id, over.text)
        try:
            if len(over.text) > _LONG_TEXT_CHARS:
                encode(drafts)
        except PayloadTooLarge as error:
            return [], classify(error)
        return drafts, None

    def _cause(self, over: Over, failure: Failure | None) -> Cause:
        if self._told and over.aborted:
            return self._told
        return "failed" if failure is not None else ""

    def _open_calls(self, over: Over) -> list[Draft]:
        """Give every call its one result (TLP-5b)."""
        drafts: list[Draft] = []
        for call in self._desk.fold.calls.values():
            if call.turn_id != self.turn_id:
                continue
            if call.call_id not in over.launched and over.confirmed:
                error, uncertain = "not_run", False
            elif over.confirmed:
                error, uncertain = "cancelled", False
            else:
                error, uncertain = "indeterminate", call.effect != "readonly"
            drafts.append(
                self._desk.scribe.returned(
                    self.turn_id,
                    call.message_id,
                    call.call_id,
                    call.name,
                    None,
                    error,
                    {"side_effects_uncertain": uncertain},
                )
            )
        return drafts

    def _finish(self, over: Over, cause: Cause, failure: Failure | None, final: int) -> Finish:
        verdict = self._verdict(failure) if cause == "failed" else Verdict()
        turn = self._desk.fold.turn
        said = 1 if final and not cause else 0
        outcomes: dict[Cause, Outcome] = {"": "completed", "failed": "failed"}
        stopped: Outcome = "cancelled" if over.confirmed else "indeterminate"
        return Finish(
            FINISH_TOKEN,
            self.turn_id,
            self._desk.chained_turn_id(),
            Figures(
                cause=cause,
                outcome=outcomes.get(cause, stopped),
                failure=failure if cause == "failed" else None,
                turns_count=(turn.steps if turn else 0) + said,
                tool_calls_count=turn.tool_calls if turn else 0,
                duration_ms=self._desk.ticks() - self._began,
                output_message_ids=tuple(self._outputs),
            ),
            acknowledge_input=cause == "cancelled" and not self._keep_input,
            applied=frozenset(turn.applied if turn else ()) | self._again,
            spent=verdict.spent,
            hold=cause == "cancelled" or verdict.hold,
            retry_ms=verdict.retry_ms,
            continue_pending=cause in ("", "cancelled"),
        )

    def _verdict(self, failure: Failure | None) -> Verdict:
        fold = self._desk.fold
        return after_failure(
            self._desk.session,
            self.turn_id,
            {name: fold.attempts.get(name, 0) + 1 for name in self._claimed},
            retryable=failure is not None and failure.retryable,
            wrote_output=fold.turn is not None and fold.turn.wrote_output,
            waited_ms=self._desk.waited_ms(),
        )
