"""The process tree as data: what children are, what can happen to them, what can be instructed.

Frozen values only; policy.py decides over them, actor.py brings the events and does what is
instructed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from callboard.limits import (
    GATEWAY_RESTARTS_MAX,
    RESTART_WINDOW_MS,
    SESSION_RESTARTS_MAX,
    SESSION_STOP_MS,
    SHUTDOWN_CLEANUP_MS,
    SHUTDOWN_EXIT_DELAY_MS,
    SHUTDOWN_HARD_MS,
    STORAGE_RESTARTS_MAX,
)

Role = Literal["storage", "gateway", "fork", "session"]
Restart = Literal["permanent", "transient", "temporary"]
Cause = Literal["stopped", "crashed", "parent_lost", "refused", "killed"]

STOPPED: Final = 0
MAIN_LOOP_ENDED: Final = 70
LOCK_HELD: Final = 75
REFUSES: Final = 78
FINAL_STATUSES: Final = frozenset({LOCK_HELD, REFUSES})
"""Exit statuses after which another start would end the same way (reliability, section 6)."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a child is, for the whole life of the plane.

    permanent: it is there as long as the plane; any end is a crash. transient: started again after
    a crash, not after it stopped by itself. temporary: never started again.
    """

    role: Role
    module: str
    restart: Restart
    restarts_max: int
    window_ms: int
    stop_ms: int


SPECS: Final[Mapping[Role, Spec]] = MappingProxyType(
    {
        "storage": Spec(
            "storage",
            "callboard.storage",
            "permanent",
            STORAGE_RESTARTS_MAX,
            RESTART_WINDOW_MS,
            SHUTDOWN_HARD_MS,
        ),
        "gateway": Spec(
            "gateway",
            "callboard.actors.gateway",
            "permanent",
            GATEWAY_RESTARTS_MAX,
            RESTART_WINDOW_MS,
            SHUTDOWN_HARD_MS - SHUTDOWN_CLEANUP_MS,
        ),
        # The fork process answers to nobody but the supervisor, as the gateway does for clients.
        "fork": Spec(
            "fork",
            "callboard.supervisor.fork",
            "permanent",
            GATEWAY_RESTARTS_MAX,
            RESTART_WINDOW_MS,
            SHUTDOWN_HARD_MS - SHUTDOWN_CLEANUP_MS,
        ),
        "session": Spec(
            "session",
            "callboard.actors.session",
            "transient",
            SESSION_RESTARTS_MAX,
            RESTART_WINDOW_MS,
            SESSION_STOP_MS,
        ),
    }
)

Phase = Literal["waiting", "starting", "up", "backoff", "stopping", "spent"]
"""waiting: for the fork process, or for storage before the first gateway; backoff: for a time;
starting: it was started and has not said that it is ready; spent: no further start."""

ALIVE: Final = frozenset({"starting", "up", "stopping"})


@dataclass(frozen=True, slots=True)
class Child:
    """One child and its history; sessions are named by their reference."""

    name: str
    spec: Spec
    phase: Phase = "waiting"
    run: int = 0
    """Number of the present or last start, from 1; a session's are the plane's, never reused."""
    restarts: tuple[int, ...] = ()
    """When it was started again after a crash, in milliseconds, inside the window."""
    crashes: int = 0
    """How often it was started again in this plane, for people."""
    was_up: bool = False
    killed: bool = False


CLOSING_TOLD_MS: Final = 2 * SHUTDOWN_EXIT_DELAY_MS
"""How long the gateway may take to confirm that it refuses new work."""

Stage = Literal["starting", "running", "closing", "sessions", "fork", "gateway", "storage", "ended"]
STOP_STAGES: Final[tuple[Stage, ...]] = (
    "closing",
    "sessions",
    "fork",
    "gateway",
    "storage",
    "ended",
)


@dataclass(frozen=True, slots=True)
class Plane:
    """All that the policy knows."""

    slots: int
    stage: Stage = "starting"
    children: Mapping[str, Child] = field(default_factory=dict[str, Child])
    waiting: tuple[str, ...] = ()
    """Sessions that wait for a slot which is being vacated, in order."""
    quarantined: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Quarantined by this plane; true once that is durable."""
    detail: str | None = None
    """What stands still and why (FLT-4)."""
    status: int = STOPPED
    """What the supervisor exits with."""
    runs: int = 0
    totals: Mapping[str, int] = field(default_factory=dict[str, int])
    """Restarts by role and quarantines, for people."""


# ---- Events ----


@dataclass(frozen=True, slots=True)
class Begin:
    """The home is ours; start."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A child said that it is ready; a session: its process exists."""

    name: str
    run: int


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The system had no room for a session's process (FLT-53a)."""

    name: str
    run: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A child's end is proven. `status` is none when its parent ended before it could be told.

    `why` is what the child said about it, in one line, without content.
    """

    name: str
    run: int
    status: int | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Due:
    """A back-off is over."""

    name: str
    run: int


@dataclass(frozen=True, slots=True)
class GraceOver:
    """A child that was asked to stop has had its time."""

    name: str
    run: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """The gateway asks for a session's process; `evict` names idle ones that may make room."""

    session: str
    evict: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A session's quarantine is durable."""

    session: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop in order; a second one does not wait (SHD-1a)."""

    status: int = STOPPED


@dataclass(frozen=True, slots=True)
class ClosingTold:
    """The gateway refuses new work, or is not there to be told."""


@dataclass(frozen=True, slots=True)
class CleanupOver:
    """Sessions have had SHUTDOWN_CLEANUP_MS."""


@dataclass(frozen=True, slots=True)
class HardStop:
    """All have had SHUTDOWN_HARD_MS."""


Event = (
    Begin
    | Ready
    | NotStarted
    | Exited
    | Due
    | GraceOver
    | Wanted
    | Quarantined
    | Stop
    | ClosingTold
    | CleanupOver
    | HardStop
)

# ---- Instructions ----


@dataclass(frozen=True, slots=True)
class Start:
    """Start a child. The end of its last run was proven before."""

    name: str
    role: Role
    module: str
    run: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Ask a child to stop (SIGTERM), or end it (SIGKILL), through its pidfd."""

    name: str
    run: int
    kill: bool


@dataclass(frozen=True, slots=True)
class After:
    """Bring an event back later."""

    ms: int
    event: Event


@dataclass(frozen=True, slots=True)
class Granted:
    """A session's process exists: tell the gateway, which may have asked for it."""

    session: str
    run: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Whoever asked for a session's process gets an error.

    resident_sessions and processes are resources of `overloaded`; the others are codes.
    """

    session: str
    why: Literal[
        "resident_sessions",
        "processes",
        "session_quarantined",
        "plane_closing",
        "storage_unavailable",
    ]


@dataclass(frozen=True, slots=True)
class Down:
    """A session's process has ended: tell the gateway."""

    session: str
    run: int
    cause: Cause
    status: int
    quarantined: bool
    restarting: bool


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Make a quarantine durable (FLT-32b)."""

    session: str


@dataclass(frozen=True, slots=True)
class StorageGivenUp:
    """Tell the gateway that storage is not started again (FLT-4)."""

    detail: str


@dataclass(frozen=True, slots=True)
class TellClosing:
    """Tell the gateway to refuse new work; ClosingTold comes back."""


@dataclass(frozen=True, slots=True)
class PlaneReady:
    """Tell whoever started the plane that it is up."""


@dataclass(frozen=True, slots=True)
class End:
    """Nothing of the plane is left: exit."""

    status: int


Instruction = (
    Start
    | Signal
    | After
    | Granted
    | Refused
    | Down
    | Quarantine
    | StorageGivenUp
    | TellClosing
    | PlaneReady
    | End
)
