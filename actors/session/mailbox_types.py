"""What the mailbox machine is made of: its state, what it is told, what it asks for.

Frozen values only. A `Token` is whatever the shell uses to know a request again; the machine
compares tokens and looks into none. Everything random or timed comes in with a command: `fresh` is
a turn id that was never used, for a turn that this step may start; it may be empty while a turn is
open, for then none starts by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from callboard.errors import CallboardError
from callboard.messages import CancelResult, InboxItem, KnownInput, Outcome, Receipt
from callboard.records import Failure

Token: TypeAlias = str
Phase = Literal["idle", "open", "sealed"]
Mode = Literal["idle", "asking", "starting", "open", "sealed", "finishing"]
"""Phase and what is in flight, as one word: `asking` is idle while the answer to a turn permit is
awaited, `starting` idle with a start in flight, `finishing` open or sealed with a terminal."""
Permit = Literal["none", "asked", "queued", "held"]
TurnKind = Literal["user", "pending", "continuation"]
Cause = Literal["", "failed", "cancelled", "interrupted"]
"""Why a turn was aborted; empty for a completed one."""


# --- the state --------------------------------------------------------------------------------


class Entry(NamedTuple):
    """An input of the inbox, or one on its way there."""

    item: InboxItem
    size: int
    """`size_bytes`; an estimate until the put is durable."""
    n: int = 0
    held: bool = False
    """No wake may start it (RTY-5)."""
    leaving: bool = False
    """A discard of it is in flight: no turn takes it."""
    recovered: bool = False
    """It was there when this process took the session over."""

    @property
    def id(self) -> str:
        """The message id."""
        return self.item.message_id


class Staged(NamedTuple):
    """An input whose put is not durable yet: it counts and keeps its place, nobody sees it."""

    entry: Entry
    tokens: tuple[Token, ...]
    """Who waits for the receipt: the first sender, then senders of copies (INB-6c)."""
    flight: int
    """The frame that holds its put; 0 while the permit's answer is awaited (MBX-6d)."""
    interrupts: bool = False
    """Its sender wants the open turn cancelled (host TAD-10d)."""


class Turn(NamedTuple):
    """A turn, with what it pinned when it was admitted."""

    turn_id: str
    kind: TurnKind
    principal: str
    sender: str | None
    schema_digest: str | None
    chain_index: int
    input_ids: tuple[str, ...]
    """What it started for; only a `user` turn has claimed it as well."""
    claimed: tuple[str, ...] = ()


class Ended(NamedTuple):
    """The last turn that ended."""

    turn_id: str
    outcome: Outcome


class Leaving(NamedTuple):
    """A discard in flight."""

    flight: int
    ids: frozenset[str]
    token: Token
    answer: Discarded | CancelResult


class Refusing(NamedTuple):
    """A refusal that waits until storage has said that the message id is new (INB-6d)."""

    token: Token
    error: CallboardError
    item: InboxItem


class Mailbox(NamedTuple):
    """All that the machine knows."""

    phase: Phase = "idle"
    in_flight: Literal["", "start", "finish"] = ""
    turn: Turn | None = None
    """The owner: while open or sealed."""
    next_turn: Turn | None = None
    """The turn whose start is in flight, alone or chained to a terminal."""
    pending: tuple[Entry, ...] = ()
    """Durable, in FIFO order, claimed ones included."""
    staged: tuple[Staged, ...] = ()
    starters: tuple[Token, ...] = ()
    """Who asked for the continuation whose start is in flight."""
    permit: Permit = "none"
    flight: int = 0
    """The start or terminal in flight."""
    flights: int = 0
    """The number of the last frame."""
    finish: Finish | None = None
    """What the terminal in flight was asked for."""
    discards: tuple[Leaving, ...] = ()
    refusing: tuple[Refusing, ...] = ()
    postponed: tuple[Discard | CancelRequested, ...] = ()
    """What must wait for a frame in flight before it can be judged."""
    paused: bool = False
    delayed: bool = False
    """No turn starts by itself before the next `Wake`: a retry or room is waited for."""
    closing: bool = False
    ended: Ended | None = None
    last_turn_id: str = ""
    epoch: int = 0
    changes: int = 0
    """With `epoch` the mailbox's revision: +1 for each step that changed something."""

    @property
    def mode(self) -> Mode:
        """Phase and what is in flight."""
        if self.in_flight:
            return "starting" if self.in_flight == "start" else "finishing"
        return "asking" if self.permit == "asked" and self.phase == "idle" else self.phase

    @property
    def is_active(self) -> bool:
        """Tell whether the running turn can still take input (MBX-4)."""
        return self.phase == "open" and not self.in_flight

    @property
    def has_owner(self) -> bool:
        """Tell whether a turn stands in the way of replacing state under it (MBX-4)."""
        return self.phase != "idle" or self.in_flight != ""

    @property
    def is_evictable(self) -> bool:
        """Tell whether nothing keeps the session's process alive (RES-2)."""
        return not (
            self.has_owner
            or self.staged
            or self.discards
            or any(not entry.held for entry in self.pending)
        )


# --- what it is told --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """An input: into the open turn, or a new turn for it (MBX-5)."""

    token: Token
    item: InboxItem
    size: int
    """Its `size_bytes`, estimated."""
    fresh: str
    permit: bool = False
    """A turn permit came with it."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """An input that wants a turn of its own to start with it (MBX-6)."""

    token: Token
    item: InboxItem
    size: int
    """Its `size_bytes`, estimated."""
    fresh: str
    permit: bool = False


@dataclass(frozen=True, slots=True)
class Enqueue:
    """An input for the open turn; it starts none."""

    token: Token
    item: InboxItem
    size: int
    allow_before_turn: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """Another entitled writer has put an input (MBX-2c)."""

    item: InboxItem
    n: int
    size: int
    fresh: str


@dataclass(frozen=True, slots=True)
class Start:
    """Start a continuation, which claims nothing."""

    token: Token
    turn_id: str
    principal: str
    sender: str | None = None
    permit: bool = False


@dataclass(frozen=True, slots=True)
class Wake:
    """What was waited for is there: a retry's time, room, readiness (MBX-16)."""

    fresh: str


@dataclass(frozen=True, slots=True)
class PermitGranted:
    """The turn permit is there, at once or after having been queued."""

    fresh: str


@dataclass(frozen=True, slots=True)
class PermitQueued:
    """The permit comes later, or its answer does not come in time (MBX-6d)."""


@dataclass(frozen=True, slots=True)
class PermitRefused:
    """There is neither a permit nor a place to wait for one."""

    error: CallboardError
    retry_ms: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Claim what the turn may take, in order (MBX-9)."""

    token: Token
    turn_id: str
    limit: int | None = None
    """How many at most; what is left stays unclaimed."""


@dataclass(frozen=True, slots=True)
class DrainOrSeal:
    """Claim, or seal the turn if nothing can be claimed (MBX-10)."""

    token: Token
    turn_id: str
    limit: int | None = None


class Figures(NamedTuple):
    """How a turn ended, as its shell knows it."""

    cause: Cause = "interrupted"
    outcome: Outcome = "cancelled"
    failure: Failure | None = None
    needs_user: bool = False
    turns_count: int = 0
    tool_calls_count: int = 0
    duration_ms: int = 0
    output_message_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """End the turn. Without figures it is aborted, cause interrupted (MBX-17)."""

    token: Token
    turn_id: str
    fresh: str
    figures: Figures | None = None
    acknowledge_input: bool = False
    """Of an abort: what was claimed and applied leaves the inbox (RUN-5d)."""
    applied: frozenset[str] = frozenset()
    """What the turn has applied, by the fold of its records."""
    spent: frozenset[str] = frozenset()
    """Claimed ids that have no attempt left (RTY-1)."""
    hold: bool = False
    """What an abort leaves is held (RTY-5)."""
    retry_ms: int | None = None
    """What an abort leaves is tried again after so long (RTY-3)."""
    continue_pending: bool = False


@dataclass(frozen=True, slots=True)
class Discard:
    """Take unclaimed inputs out of the inbox, for a recorded reason (INB-9)."""

    token: Token
    ids: tuple[str, ...]
    """None: all unclaimed user inputs."""
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Somebody entitled wants a turn, or an input that waits, to end (host TEX-13 to 15)."""

    token: Token
    turn_id: str | None
    message_id: str | None
    keep_input: bool
    principal: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Start nothing more; what was asked and is not durable is left to the gateway."""


@dataclass(frozen=True, slots=True)
class AppendDone:
    """A frame is durable; or it was not written because its put's id is `known`."""

    flight: int
    fresh: str
    n: int = 0
    size: int = 0
    known: KnownInput | None = None


@dataclass(frozen=True, slots=True)
class AppendRefused:
    """Nothing of a frame was written."""

    flight: int
    error: CallboardError
    fresh: str


@dataclass(frozen=True, slots=True)
class LookupDone:
    """What storage knows of a message id: `known` is none for a new one."""

    token: Token
    known: KnownInput | None = None
    error: CallboardError | None = None
    """It was used with other content, or storage could not say."""


Command: TypeAlias = (
    Submit
    | Prepare
    | Enqueue
    | Committed
    | Start
    | Wake
    | PermitGranted
    | PermitQueued
    | PermitRefused
    | Drain
    | DrainOrSeal
    | Finish
    | Discard
    | CancelRequested
    | Stop
    | AppendDone
    | AppendRefused
    | LookupDone
)


# --- what it asks for -------------------------------------------------------------------------


class Drained(NamedTuple):
    """The answer to `Drain` and `DrainOrSeal`."""

    entries: tuple[Entry, ...]
    sealed: bool


class Discarded(NamedTuple):
    """The answer to `Discard`."""

    number: int


class Started(NamedTuple):
    """The answer to `Start`."""

    turn_id: str


Answer: TypeAlias = Receipt | CancelResult | Drained | Discarded | Started | Ended | CallboardError


class Gone(NamedTuple):
    """Inputs that leave the inbox in a frame, and why."""

    reason: str
    items: tuple[tuple[str, str], ...]
    """Message ids with their digests."""
    by: str | None = None


class Terminal(NamedTuple):
    """The terminal part of a frame."""

    turn: Turn
    figures: Figures
    disposition: Literal["acknowledged", "pending", "held"]
    acknowledged: Gone | None
    """Stands directly before the terminal."""
    spent: Gone | None
    """Stands behind it."""


class Frame(NamedTuple):
    """What one append holds."""

    put: InboxItem | None = None
    terminal: Terminal | None = None
    discard: Gone | None = None
    start: Turn | None = None

    @property
    def is_put(self) -> bool:
        """Whether it is a put and nothing else."""
        return self.terminal is None and self.discard is None and self.start is None


@dataclass(frozen=True, slots=True)
class Append:
    """Write a frame; its reply is a command, and releases the answers to these requests."""

    flight: int
    frame: Frame
    releases: tuple[Token, ...] = ()
    after_ms: int = 0
    """Not before so long: it was refused and is tried again."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a request."""

    token: Token
    answer: Answer


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ask storage about a message id; `LookupDone` brings the answer."""

    token: Token
    message_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class AskPermit:
    """Ask for a turn permit (ADM-4)."""


@dataclass(frozen=True, slots=True)
class ReturnPermit:
    """Give the permit back, or the request for one (ADM-5)."""


@dataclass(frozen=True, slots=True)
class WakeLater:
    """Send `Wake` after so long."""

    after_ms: int


@dataclass(frozen=True, slots=True)
class TurnBegins:
    """A turn's start is durable: run it."""

    turn: Turn
    claimed: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn's terminal is durable."""

    turn_id: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class CancelTurn:
    """Record that the turn shall end, then signal it (host TEX-14); it is sealed already."""

    token: Token
    turn_id: str
    keep_input: bool
    principal: str


Effect: TypeAlias = (
    Append
    | Reply
    | Lookup
    | AskPermit
    | ReturnPermit
    | WakeLater
    | TurnBegins
    | TurnEnded
    | CancelTurn
)

Step: TypeAlias = tuple[Mailbox, tuple[Effect, ...]]
"""What a step gives: the next state, and what is to be done, in order."""

QUIET: Final[tuple[Effect, ...]] = ()
