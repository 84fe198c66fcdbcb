"""One session: the mailbox, the fold, and the turn that runs, without sockets and threads.

`Session` performs what the mailbox machine asks for and brings every result back to it. What it
needs of the outside is a `Port`; the actor gives it sockets, plays give it lists. All of its
methods are called by one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from callboard.actors.session.agent_calls import AgentCall, AgentSide, TurnView
from callboard.actors.session.mailbox import step
from callboard.actors.session.mailbox_types import (
    Answer,
    Append,
    AppendDone,
    AppendRefused,
    AskPermit,
    CancelRequested,
    CancelTurn,
    Command,
    Drained,
    Effect,
    Lookup,
    LookupDone,
    Mailbox,
    Mode,
    PermitGranted,
    PermitQueued,
    PermitRefused,
    Reply,
    ReturnPermit,
    Stop,
    Submit,
    Token,
    TurnBegins,
    TurnEnded,
    Wake,
)
from callboard.actors.session.open_turn import DRAIN_TOKEN, FINISH_TOKEN, OpenTurn, Written
from callboard.actors.session.recovery import Recovery, fold_of, mailbox_of, recover
from callboard.actors.session.scribe import Draft, Scribe, encode, removed_by
from callboard.errors import CallboardError
from callboard.fold import SessionFold
from callboard.ids import SessionRef, next_ulid
from callboard.inbox import put_size
from callboard.limits import (
    ACTOR_HEARTBEAT_MS,
    CANCEL_WAIT_MS,
    IDLE_HEARTBEAT_MS,
    PERMIT_ANSWER_MS,
    SESSION_STOP_MS,
    STORAGE_FULL_PROBE_MS,
)
from callboard.messages import (
    Acquire,
    Appended,
    Beat,
    Body,
    CancelResult,
    Deliver,
    InboxItem,
    LeaseGranted,
    LookedUp,
    NewRecord,
    ProcessIdentity,
    PutOp,
    Receipt,
    Register,
    Release,
    RemoveOp,
)
from callboard.messages import (
    Append as AppendBody,
)
from callboard.messages import (
    CancelTurn as CancelBody,
)
from callboard.messages import (
    Lookup as LookupBody,
)

Phase: TypeAlias = Literal["idle", "open", "sealed", "draining"]
_PHASES: Final[Mapping[Mode, Phase]] = MappingProxyType(
    {
        "idle": "idle",
        "asking": "idle",
        "starting": "open",
        "open": "open",
        "sealed": "sealed",
        "finishing": "sealed",
    }
)
PUTS_FRAME_CHARS_MAX: Final = 262_144
"""Text of the inputs that share a frame; more of it goes in frames of its own."""
STOPPED: Final = 0
"""Exit status: ended as asked, or the session belongs to another owner."""
AGENT_STUCK: Final = 70
"""Exit status: an agent did not yield to a cancel; counted as a crash."""
REFUSED: Final = 78
"""Exit status: the session cannot be owned; final until something changes."""
STOP_MS: Final = SESSION_STOP_MS - 500
"""After so long a session that stops ends, whatever is missing; recovery does the rest."""
_PASSING: Final = ("storage_full", "storage_unavailable", "overloaded")
"""Codes of storage that are worth another try of the same frame."""
_BROKEN: Final = (
    "turn_active",
    "turn_id_reused",
    "turn_terminal",
    "turn_not_active",
    "seq_conflict",
    "idempotency_conflict",
)
"""Codes that say that this process's picture of the session is wrong: it must start anew."""


class SessionBroken(Exception):
    """What storage says contradicts what this process knows; the successor's recovery decides."""


class Port(Protocol):
    """What a session needs of the outside; every method returns at once."""

    def ask(self, body: Body, context: Context) -> None:
        """Send storage a request; its answer is for `Session.answered`. Raises Overloaded."""
        ...

    def tell(self, body: Body) -> None:
        """Send the gateway a message that has no answer, or whose answer needs no context."""
        ...

    def reply(self, request: str, answer: Body | CallboardError) -> None:
        """Answer a request of the gateway."""
        ...

    def ask_permit(self) -> None:
        """Ask the gateway for a turn permit; the answer is for `Session.permit_...`."""
        ...

    def drop_permit(self) -> None:
        """Give back a permit, or the request for one."""
        ...

    def after(self, ms: int, name: str) -> None:
        """Have `Session.timer` called once; a same name replaces."""
        ...

    def now(self) -> int:
        """Microseconds since the epoch."""
        ...

    def ticks(self) -> int:
        """Milliseconds of a clock that only goes forward."""
        ...

    def stop_process(self, status: int) -> None:
        """End the process, after what was sent is on its way."""
        ...

    def log(self, action: str, facts: Mapping[str, object]) -> None:
        """Write a line of the log."""
        ...


# --- what an answer of storage belongs to -----------------------------------------------------


class Acquiring(NamedTuple):
    """The session's lease."""


class Recovering(NamedTuple):
    """The recovery frame."""

    drafts: Sequence[Draft]
    body: AppendBody


class BoxFrame(NamedTuple):
    """A frame that the mailbox wanted."""

    flight: int
    drafts: Sequence[Draft]
    is_terminal: bool


class PutsFrame(NamedTuple):
    """A frame that holds the puts of several frames that the mailbox wanted (ADR 0092)."""

    puts: Sequence[tuple[int, InboxItem]]
    """The flight and the input of each."""


class TurnFrame(NamedTuple):
    """A frame of the turn that runs."""

    drafts: Sequence[Draft]
    written: Written


class LookingUp(NamedTuple):
    """A question about a message id."""

    token: Token


class Releasing(NamedTuple):
    """The lease, given back."""


Context: TypeAlias = (
    Acquiring | Recovering | BoxFrame | PutsFrame | TurnFrame | LookingUp | Releasing
)


# --- the session ------------------------------------------------------------------------------


class Session:
    """One leased session (see the module).

    Args:
        port: its outside.
        agents: its agent's side.
        session: its reference as text.
        owner: the process that wants to own it.
        idle_ms: after how long without work it gives its process up.

    """

    fold: SessionFold
    scribe: Scribe
    box: Mailbox

    def __init__(
        self,
        port: Port,
        agents: AgentSide,
        ref: SessionRef,
        owner: ProcessIdentity,
        idle_ms: int,
    ) -> None:
        self.port = port
        self.agents = agents
        self.session = str(ref)
        self.turn: OpenTurn | None = None
        self.is_ready = False
        """Registered at the gateway: it may start turns."""
        self._ref = ref
        self._owner = owner
        self._idle_ms = idle_ms
        self._lease: LeaseGranted | None = None
        self._is_acquiring = False
        self._is_recovered = False
        self._gateway_up = False
        self._said_permit = False
        """Whether the last registration said that a permit is held."""
        self._stops = False
        self._is_releasing = False
        self._is_fenced = False
        self._commands: deque[Command] = deque()
        self._is_stepping = False
        self._again: tuple[AppendBody, BoxFrame] | None = None
        self._puts: list[tuple[int, InboxItem]] = []
        """Of this batch, not sent yet: they go before anything else goes to storage."""
        self._recovery = Recovery((), ())
        self._unrecovered: Recovering | None = None
        self._failing_since: int | None = None
        self._beaten: tuple[bool, bool] | None = None
        self._told_of: Mailbox | None = None
        self._heartbeat_at = 0
        self._idle_since = 0

    # Its life: lease, recovery, gateway, stop.

    def storage_up(self) -> None:
        """Storage is there, for the first time: take the lease (5.1)."""
        if self._lease is None and not self._stops and not self._is_acquiring:
            self._is_acquiring = True
            self.port.ask(Acquire(session=self.session, owner=self._owner), Acquiring())

    def gateway_up(self) -> None:
        """Register what is held: the gateway is there, for the first time or again (ADM-7)."""
        self._gateway_up = True
        self._register()

    def gateway_lost(self) -> None:
        """Note that the gateway is away; work goes on."""
        self._gateway_up = False

    def _register(self) -> None:
        if not (self._is_recovered and self._gateway_up) or self._lease is None:
            return
        self._said_permit = self.box.permit == "held"
        self.port.tell(
            Register(
                session=self.session,
                epoch=self._lease.epoch,
                permit=self._said_permit,
                evictable=self.box.is_evictable,
            )
        )

    def registered(self) -> None:
        """Start what waits: the gateway routes here (MBX-16).

        An input that brought a permit may have crossed the registration that knew of none; the
        gateway has taken that permit back, so it is told once more.
        """
        if self.box.permit == "held" and not self._said_permit:
            self._register()
        if not self.is_ready:
            self.is_ready = True
            self.do(Wake(self._fresh()))
        self._beaten = None

    def _granted(self, lease: LeaseGranted) -> None:
        """Go on where the last owner stopped: one recovery frame at most."""
        if self._lease is not None:
            return
        self._lease = lease
        self.fold = fold_of(lease)
        recovery = recover(lease, self.port.now)
        if not recovery.drafts and not recovery.removes:
            self._recovered(recovery, ())
            return
        records = encode(recovery.drafts, f"{self.session}:recovery:{lease.epoch}")
        body = self._body(records[0].id if records else f"recovery:{lease.epoch}", records)
        body = body.model_copy(update={"inbox": [_remove(name) for name in recovery.removes]})
        self._recovery = recovery
        self.port.ask(body, Recovering(recovery.drafts, body))

    def _recovered(self, recovery: Recovery, drafts: Sequence[Draft]) -> None:
        lease = self._lease
        assert lease is not None
        for draft in drafts:
            self.fold.apply(self.fold.seq + 1, 0, draft.data)
        self.box = mailbox_of(lease, recovery, self.fold)
        self.scribe = Scribe(lease.epoch, lease.agent, self.fold.last_message_id, self.port.now)
        self._is_recovered = True
        self._idle_since = self.port.ticks()
        self.port.after(self._idle_ms, "idle")
        self._register()

    def stop(self) -> None:
        """End in order: abort the turn, write its terminal, give the lease back (SHD-1)."""
        if self._stops:
            return
        self._stops = True
        self.port.after(STOP_MS, "stop")
        if not self._is_recovered:
            if self._lease is None:
                self.port.stop_process(STOPPED)
            return
        self.do(Stop())
        if self.turn is not None:
            self.turn.interrupt()

    def _leave(self) -> None:
        """Give the lease back, once nothing is on its way any more."""
        box, lease = self.box, self._lease
        if box.has_owner or box.staged or box.discards or self._is_releasing or lease is None:
            return
        self._is_releasing = True
        body = Release(session=self.session, epoch=lease.epoch, nonce=self._owner.nonce)
        self.port.ask(body, Releasing())

    def _fence(self) -> None:
        """Stop at once: another owner has the session (LSE-6)."""
        self._is_fenced = True
        self.port.log("session_fenced", {"level": "warning"})
        self.port.stop_process(STOPPED)

    # What the gateway wants.

    def delivered(self, request: str, body: Deliver) -> None:
        """Take an input."""
        if not self._is_recovered:
            return  # nobody is told to send before that; the gateway dispatches it again
        size = put_size(self._ref, body.item)
        fresh = self._fresh()
        self.do(Submit(request, body.item, size, fresh, permit=body.permit))

    def cancelled(self, request: str, body: CancelBody) -> None:
        """Take a cancel."""
        if self._is_recovered:
            self.do(
                CancelRequested(
                    request, body.turn_id, body.message_id, body.keep_input, body.principal
                )
            )

    def permit_granted(self) -> None:
        """Take the permit that was asked for."""
        if self.box.permit in ("asked", "queued"):
            self.do(PermitGranted(self._fresh()))

    def permit_queued(self) -> None:
        """Note that the permit comes later."""
        if self.box.permit == "asked":
            self.do(PermitQueued())

    def permit_refused(self, error: CallboardError) -> None:
        """There is no permit and no place in the queue."""
        if self.box.permit in ("asked", "queued"):
            wait = error.carried.get("retry_after_ms")
            self.do(PermitRefused(error, wait if isinstance(wait, int) else STORAGE_FULL_PROBE_MS))

    # What storage answers.

    def answered(self, context: Context, answer: Body | CallboardError) -> None:
        """Take storage's answer to a request."""
        if self._is_fenced:
            return
        if isinstance(answer, CallboardError):
            if answer.code == "stale_epoch":
                self._fence()
            else:
                self._refused(context, answer)
        elif isinstance(context, BoxFrame) and isinstance(answer, Appended):
            self._box_written(context, answer)
        elif isinstance(context, PutsFrame) and isinstance(answer, Appended):
            self._puts_written(context, answer)
        elif isinstance(context, TurnFrame) and isinstance(answer, Appended):
            self._apply(context.drafts, answer)
            context.written(None)
        elif isinstance(context, Acquiring) and isinstance(answer, LeaseGranted):
            self._granted(answer)
        elif isinstance(context, Recovering):
            self._recovered(self._recovery, context.drafts)
        elif isinstance(context, LookingUp) and isinstance(answer, LookedUp):
            self.do(LookupDone(context.token, answer.known))
        elif isinstance(context, Releasing):
            self.port.stop_process(STOPPED)

    def _box_written(self, context: BoxFrame, answer: Appended) -> None:
        if answer.known is None:
            self._apply(context.drafts, answer)
        self.do(
            AppendDone(
                context.flight,
                self._fresh(),
                answer.n[0] if answer.n else 0,
                answer.sizes[0] if answer.sizes else 0,
                answer.known,
            )
        )

    def _puts_written(self, context: PutsFrame, answer: Appended) -> None:
        if answer.known is not None:  # one of them was there before, so none was written
            self._put_singly(context)
            return
        for (flight, _), n, size in zip(context.puts, answer.n, answer.sizes, strict=True):
            self.do(AppendDone(flight, self._fresh(), n, size))

    def _put_singly(self, context: PutsFrame) -> None:
        """Have each put judged by itself, as its frame with the others could not be written."""
        for flight, item in context.puts:
            self._send_put(flight, item)

    def _apply(self, drafts: Sequence[Draft], answer: Appended) -> None:
        for seq, draft in enumerate(drafts, answer.first_seq):
            self.fold.apply(seq, answer.commit, draft.data)

    def _refused(self, context: Context, error: CallboardError) -> None:
        self.port.log("storage_refused", {"code": error.code, "what": type(context).__name__})
        if isinstance(context, BoxFrame):
            self._box_refused(context, error)
        elif isinstance(context, PutsFrame):
            self._put_singly(context)
        elif isinstance(context, TurnFrame):
            context.written(error)
        elif isinstance(context, LookingUp):
            self.do(LookupDone(context.token, error=error))
        elif isinstance(context, Acquiring):
            self._not_granted(error)
        elif isinstance(context, Recovering):
            if error.code not in _PASSING:
                raise SessionBroken(error.code)
            self._unrecovered = context
            self.port.after(STORAGE_FULL_PROBE_MS, "recover")
        else:
            self.port.stop_process(STOPPED)

    def _box_refused(self, context: BoxFrame, error: CallboardError) -> None:
        starts = any(draft.data.type == "turn_started" for draft in context.drafts)
        if error.code in _BROKEN and (starts or context.is_terminal):
            raise SessionBroken(error.code)
        if context.is_terminal and error.code not in _PASSING:
            raise SessionBroken(error.code)
        self.do(AppendRefused(context.flight, error, self._fresh()))

    def _not_granted(self, error: CallboardError) -> None:
        self._is_acquiring = False
        if error.code in _PASSING:
            self.port.after(STORAGE_FULL_PROBE_MS, "acquire")
            return
        self.port.log("session_refused", {"level": "error", "code": error.code})
        self.port.stop_process(REFUSED)

    # What the agent wants.

    def agent_called(self, call: AgentCall) -> None:
        """Take what the agent's side says."""
        if self.turn is not None and self.turn.turn_id == call.turn_id:
            self.turn.called(call)

    # Time.

    def timer(self, name: str) -> None:
        """Do what a timer was set for."""
        if name == "permit":
            self.permit_queued()
        elif name == "heartbeat":
            self._beaten = None
        elif name == "wake":
            self.do(Wake(self._fresh()))
        elif name == "again":
            self._send_again()
        elif name == "grace":
            self._judge_agent()
        elif name == "idle":
            self._judge_idleness()
        elif name == "stop":
            self.port.stop_process(STOPPED)
        elif name == "acquire":
            self.storage_up()
        elif name == "recover":
            if self._unrecovered is not None:
                self.port.ask(self._unrecovered.body, self._unrecovered)
        elif name.startswith("cancel "):
            self._answer_cancel_early(name.removeprefix("cancel "))

    def _judge_agent(self) -> None:
        """End the process of an agent that did not yield to a cancel (TEX-14c)."""
        turn = self.turn
        if turn is None or not turn.grace_is_over():
            return
        for token in turn.waiters:
            self.port.reply(token, CancelResult(status="cancelling", turn_id=turn.turn_id))
        self.port.log("agent_stuck", {"level": "error", "turn_id": turn.turn_id})
        self._is_fenced = True
        self.port.stop_process(AGENT_STUCK)

    def _judge_idleness(self) -> None:
        """Give the process up after a long time without work."""
        idle = self.port.ticks() - self._idle_since
        if self.box.is_evictable and idle >= self._idle_ms:
            self.stop()
        else:
            self.port.after(max(1, self._idle_ms - idle), "idle")

    def _answer_cancel_early(self, token: Token) -> None:
        """Say that a cancel takes longer (TEX-14d)."""
        turn = self.turn
        if turn is not None and token in turn.waiters:
            turn.waiters.remove(token)
            self.port.reply(token, CancelResult(status="cancelling", turn_id=turn.turn_id))

    def batch_done(self) -> None:
        """End a batch of events: tell the gateway what has changed, and leave if it is time."""
        if self._puts:
            self._send_puts()
        if not self._is_recovered or self._is_fenced:
            return
        if self._stops:
            self._leave()
        if self.box is self._told_of and self._beaten is not None:
            return
        self._told_of = self.box
        evictable, phase = self.box.is_evictable, self._phase()
        if not evictable:
            self._idle_since = self.port.ticks()
        news = (evictable, phase == "idle")
        if self.is_ready and self._gateway_up and self._beaten != news:
            self._beaten = news
            pending = len(self.box.pending)
            self.port.tell(Beat(phase=phase, evictable=evictable, pending=pending))
            self._set_heartbeat(IDLE_HEARTBEAT_MS if evictable else ACTOR_HEARTBEAT_MS)

    def _set_heartbeat(self, ms: int) -> None:
        """Set the timer of the next beat, unless it comes early enough as it is."""
        now = self.port.ticks()
        if not now < self._heartbeat_at <= now + ms:
            self._heartbeat_at = now + ms
            self.port.after(ms, "heartbeat")

    def _phase(self) -> Phase:
        return "draining" if self._stops else _PHASES[self.box.mode]

    # The mailbox.

    def do(self, command: Command) -> None:
        """Let the mailbox take a command, and perform what it asks for, all in order (MBX-1)."""
        self._commands.append(command)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while self._commands:
                self.box, effects = step(self.box, self._commands.popleft())
                for effect in effects:
                    self._perform(effect)
        finally:
            self._is_stepping = False

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Append):
            self._append(effect)
        elif isinstance(effect, Reply):
            self.reply(effect.token, effect.answer)
        elif isinstance(effect, TurnBegins):
            self._turn_begins(effect)
        elif isinstance(effect, TurnEnded):
            self._turn_ended(effect)
        elif isinstance(effect, CancelTurn):
            self._cancel_turn(effect)
        elif isinstance(effect, AskPermit):
            self.port.ask_permit()
            self.port.after(PERMIT_ANSWER_MS, "permit")
        elif isinstance(effect, ReturnPermit):
            self.port.drop_permit()
        elif isinstance(effect, Lookup):
            body = LookupBody(
                session=self.session, message_id=effect.message_id, digest=effect.digest
            )
            self._ask(body, LookingUp(effect.token))
        else:
            self.port.after(effect.after_ms, "wake")

    def _append(self, effect: Append) -> None:
        frame = effect.frame
        if frame.is_put and frame.put is not None and not effect.after_ms:
            self._puts.append((effect.flight, frame.put))
            return
        closing = self.turn.closing if frame.terminal is not None and self.turn else ()
        drafts = self.scribe.of_frame(frame, closing)
        key = f"{frame.terminal.turn.turn_id}:terminal" if frame.terminal else ""
        records = encode(drafts, key)
        put = frame.put
        name = records[0].id if records else put.message_id if put else key
        inbox = [*([_put(put)] if put else ()), *map(_remove, removed_by(frame))]
        body = self._body(name, records, inbox)
        context = BoxFrame(effect.flight, drafts, frame.terminal is not None)
        if effect.after_ms:
            self._again = (body, context)
            self.port.after(effect.after_ms, "again")
        else:
            self._send(body, context)

    def _send_puts(self) -> None:
        """Have the puts of this batch written, in one frame if that can hold them."""
        puts, self._puts = self._puts, []
        if len(puts) == 1 or sum(_size_of(item) for _, item in puts) > PUTS_FRAME_CHARS_MAX:
            for flight, item in puts:
                self._send_put(flight, item)
            return
        body = self._body(puts[0][1].message_id, [], inbox=[_put(item) for _, item in puts])
        try:
            self.port.ask(body, PutsFrame(puts))
        except CallboardError as error:
            for flight, _ in puts:
                self.do(AppendRefused(flight, error, self._fresh()))

    def _send_put(self, flight: int, item: InboxItem) -> None:
        body = self._body(item.message_id, [], inbox=[_put(item)])
        self._send(body, BoxFrame(flight, (), is_terminal=False))

    def _ask(self, body: AppendBody | LookupBody, context: Context) -> None:
        """Ask storage, behind the puts that came before."""
        if self._puts:
            self._send_puts()
        self.port.ask(body, context)

    def _send(self, body: AppendBody, context: BoxFrame) -> None:
        try:
            self._ask(body, context)
        except CallboardError as error:
            self.do(AppendRefused(context.flight, error, self._fresh()))

    def _send_again(self) -> None:
        again, self._again = self._again, None
        if again is not None:
            self._send(*again)

    def _body(
        self, key: str, records: list[NewRecord], inbox: Sequence[PutOp | RemoveOp] = ()
    ) -> AppendBody:
        assert self._lease is not None
        return AppendBody(
            session=self.session,
            epoch=self._lease.epoch,
            key=key,
            first_seq=None,
            records=records,
            inbox=list(inbox),
        )

    def _turn_begins(self, effect: TurnBegins) -> None:
        lease = self._lease
        assert lease is not None
        view = TurnView(
            self.session,
            effect.turn.turn_id,
            self.fold.turns,
            lease.workspace,
            MappingProxyType(lease.settings),
            lease.agent,
        )
        self.turn = OpenTurn(self, effect.turn, view)
        self.turn.begin(effect.claimed, stopping=self._stops)

    def _turn_ended(self, effect: TurnEnded) -> None:
        turn, self.turn = self.turn, None
        self.scribe.parent = self.fold.last_message_id
        ended = self.fold.last_ended
        if ended is not None and ended.cause != "failed":
            self._failing_since = None
        for token in turn.waiters if turn else ():
            cancelled = effect.outcome in ("cancelled", "indeterminate")
            self.port.reply(
                token,
                CancelResult(
                    status="cancelled" if cancelled else "already_terminal",
                    turn_id=effect.turn_id,
                    outcome=effect.outcome,
                ),
            )

    def _cancel_turn(self, effect: CancelTurn) -> None:
        if self.turn is None:
            return
        if effect.token:
            self.port.after(CANCEL_WAIT_MS, f"cancel {effect.token}")
        self.turn.cancel_by(effect.token, effect.principal, keep_input=effect.keep_input)

    # For the turn that runs (`open_turn.Desk`).

    def write(self, drafts: Sequence[Draft], written: Written) -> None:
        """Have a frame of the turn written."""
        records = encode(drafts)
        self._ask(self._body(records[0].id, records), TurnFrame(drafts, written))

    def reply(self, token: Token, answer: Answer) -> None:
        """Answer a request, whoever asked."""
        if token == DRAIN_TOKEN:
            if self.turn is not None and isinstance(answer, Drained | CallboardError):
                self.turn.drained(answer)
        elif token != FINISH_TOKEN and isinstance(answer, Receipt | CancelResult | CallboardError):
            self.port.reply(token, answer)

    def after(self, ms: int, name: str) -> None:
        """Set a timer."""
        self.port.after(ms, name)

    def ticks(self) -> int:
        """Milliseconds of a clock that only goes forward."""
        return self.port.ticks()

    def chained_turn_id(self) -> str:
        """Make an id for the turn that may chain to the open one."""
        box = self.box
        if box.turn is not None and len(box.pending) == len(box.turn.claimed):
            return ""  # there is nothing left for another turn
        return self._make_turn_id()

    def _fresh(self) -> str:
        """Make a turn id for a step that may start a turn by itself."""
        return "" if self.box.phase != "idle" else self._make_turn_id()

    def _make_turn_id(self) -> str:
        """Make a turn id above every one of this session."""
        return f"turn_{next_ulid(self.box.last_turn_id.removeprefix('turn_'))}"

    def waited_ms(self) -> int:
        """Milliseconds since the first of the failures in a row (RTY-3b)."""
        now = self.port.ticks()
        if self._failing_since is None:
            self._failing_since = now
        return now - self._failing_since


def _put(item: InboxItem) -> PutOp:
    return PutOp(op="put", item=item)


def _size_of(item: InboxItem) -> int:
    """Estimate from below how large an input is: metadata are limited by themselves."""
    return sum(len(part.text) for part in item.content)


def _remove(name: str) -> RemoveOp:
    return RemoveOp(op="remove", message_id=name)
