"""The storage port: all that the rest of callboard asks of whoever keeps its records.

One call is one commit, and nothing here assumes a file: what is asked and answered are messages
(`callboard.messages`), what is stored are lines (`callboard.records`), what is refused are errors
(`callboard.errors`). An adapter that passes `callboard.testing.conformance` can take the place of
the local one.

Who may ask was settled before: the caller vouches for its role, the adapter checks epochs. Checks
come in the order of IDN-9: the asker's epoch, existence, damage, archive and quarantine, then the
rules of the operation. A refusal writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from callboard import messages as m
from callboard.errors import CallboardError, Damage

Capability = Literal["durable", "damage", "artifacts"]
"""durable: what was answered is there after a crash. damage: stored bytes can go bad, and reads go
on around them. artifacts: it is an `ArtifactStorage` too."""

PAGE_LINES_MAX: Final = 1_000
"""Lines that one `read` gives at most."""

Tell: TypeAlias = Callable[[m.Records | CallboardError], None]
"""Takes what a subscription brings; an error is the last thing it gets."""


class Gap(NamedTuple):
    """A place where something stored is damaged; never what stands there (REC-3a)."""

    after_seq: int
    """The last sound record before it; 0 for none."""
    damage: Damage


class Page(NamedTuple):
    """Some of a session's records."""

    first_seq: int
    """Of the first line; where to read on if there is none."""
    lines: tuple[bytes, ...]
    """As they are stored, each with its LF, in the order of their seq."""
    gaps: tuple[Gap, ...]
    next_seq: int
    """Where to read on."""
    last: bool
    """Whether nothing is stored from `next_seq` on."""


class Subscription(Protocol):
    """Somebody who follows a transcript."""

    def close(self) -> None:
        """Tell no more; a second time does nothing."""
        ...


class Storage(Protocol):
    """Keeps the records and inputs of sessions, and says who owns each.

    Each method may raise, beside what it names: NotFound for a session that does not exist,
    InvalidRequest for a text that names none, StorageFull for want of room, StorageUnavailable for
    an adapter that is closed or cannot go on. What an adapter cannot tell from a lost answer it
    must answer again in the same words: every request can be repeated (DUR-6).
    """

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What this adapter can do beyond the rest."""
        ...

    # --- epochs of the plane --------------------------------------------------------------------

    def hello_gateway(self, asked: m.GatewayHello) -> m.GatewayEpoch:
        """Give a gateway its epoch; the same nonce gets the same one, another ends the earlier."""
        ...

    def hello_plane(self, asked: m.PlaneHello) -> m.PlaneEpoch:
        """Give a plane its epoch; the same plane gets the same one."""
        ...

    # --- leases ---------------------------------------------------------------------------------

    def acquire(self, asked: m.Acquire) -> m.LeaseGranted:
        """Take a session's lease: read, judge and write `epoch + 1` as one step (LSE-2).

        Raises:
            SessionInUse: a living process has it.
            OwnerUnprovable: it cannot be told whether its owner lives (LSE-4).
            SessionArchived, SessionQuarantined, SessionDamaged, InboxCorrupt: it is not started.

        """
        ...

    def release(self, asked: m.Release) -> m.Ok:
        """Give a lease back; a second time does nothing (LSE-8).

        Raises:
            StaleEpoch: it is another's.

        """
        ...

    # --- writing --------------------------------------------------------------------------------

    def create(self, asked: m.Create) -> m.Created:
        """Write a session's first record; the same record again finds the session (IDN-8).

        Raises:
            StaleEpoch: of the gateway.
            SessionExists: another request made it.
            IdempotencyConflict: this request's key made a session of other content.
            RecordInvalid: it is no such record, or not of this session.

        """
        ...

    def append(self, asked: m.Append) -> m.Appended:
        """Write one frame of a live session, whole or not at all (DUR-1).

        Raises:
            StaleEpoch: the lease is not the asker's (LSE-5).
            SeqConflict: `first_seq` is not the next one (DUR-2).
            IdempotencyConflict: the key named another frame (DUR-6).
            RequestConflict: a message id named another content (INB-6).
            RecordInvalid, InvalidRequest, InboxFull, PayloadTooLarge, TurnActive, TurnIdReused,
            TurnTerminal, TurnNotActive: the frame breaks a rule.

        """
        ...

    def accept(self, asked: m.Accept) -> m.Accepted | m.LeaseHeld:
        """Put an input into a passive session; a live owner is named instead (ACC-2, ACC-3).

        Raises:
            StaleEpoch: of the gateway.
            RequestConflict: the message id named another content (INB-6).
            InboxFull: it does not fit (INB-7).
            SessionArchived, SessionQuarantined, OwnerUnprovable, …: it is not started.

        """
        ...

    def discard(self, asked: m.DiscardInput) -> m.CancelResult:
        """Discard an input of a passive session, with a record (INB-9).

        Raises:
            StaleEpoch: of the gateway.
            SessionInUse: a live owner decides on it.
            AlreadyClaimed: an open turn has taken it.

        """
        ...

    def quarantine(self, asked: m.Quarantine) -> m.Ok:
        """Keep a session from being started; StaleEpoch of another plane."""
        ...

    def unquarantine(self, asked: m.Unquarantine) -> m.Ok:
        """Let it be started again; StaleEpoch of another gateway."""
        ...

    # --- reading --------------------------------------------------------------------------------

    def lookup(self, asked: m.Lookup) -> m.LookedUp:
        """Tell what became of a message id (INB-6).

        Raises:
            RequestConflict: it named another content.

        """
        ...

    def outcome(self, asked: m.AwaitInput) -> m.WaitOutcome | None:
        """Tell how an input was settled; none while it is not.

        Raises:
            NotFound: the session never had it, too.

        """
        ...

    def read(self, session: str, from_seq: int = 1, lines_max: int = PAGE_LINES_MAX) -> Page:
        """Read stored records, around what is damaged (DUR-3).

        Args:
            session: the text of its reference.
            from_seq: the first one wanted, from 1.
            lines_max: the most lines to give, 1 to PAGE_LINES_MAX.

        Raises:
            InvalidRequest: one of the numbers is out of range.
            SessionDamaged: it cannot be told whose records these are.

        """
        ...

    def subscribe(self, asked: m.Subscribe, tell: Tell) -> Subscription:
        """Follow a transcript: stored records from a seq on, then new ones (WCH-1).

        None is lost, doubled or out of order where the two meet. `tell` is called before the call
        that wrote returns, in the order of the seq, and before this one returns for what is stored.

        Raises:
            SessionDamaged: nothing can follow.
            Overloaded: too many follow.

        """
        ...

    def close(self) -> None:
        """End in order; a second time does nothing."""
        ...


# --- optional: artifacts --------------------------------------------------------------------------


class ArtifactStorage(Storage, Protocol):
    """A storage that keeps contents beside the records, by their SHA-256.

    Its part of the suite is left out for adapters whose capabilities do not name `artifacts`.
    """

    def store_artifact(self, session: str, gateway_epoch: int, content: bytes) -> str:
        """Keep a content, whole or not at all; the same again is kept once.

        Returns:
            Its name: 64 hex digits.

        Raises:
            StaleEpoch: of the gateway.

        """
        ...

    def fetch_artifact(self, session: str, name: str) -> bytes:
        """Give a content that was stored.

        Raises:
            NotFound: there is none of this name in this session, whatever the name looks like.
            ArtifactInvalid: what is stored is not what was stored.

        """
        ...
