"""What the supervisor decides: `decide(state, event, now, random01) -> (state, [instruction])`.

Pure. The shell (actor.py) brings what happened as events and does what is instructed; nothing else
decides on a process's life (architecture page, sections 1 and 4; FLT-4, FLT-29, FLT-32, RES-1,
RES-4, SHD-1).

    start:  storage ─► gateway ─► ready          stop:  closing told ─► sessions ─► fork process
            fork process (beside them)                  ─► gateway ─► storage ─► ended
            sessions, as they are asked for

A session that the policy knows holds a slot, whatever phase it is in; one that waits for a slot is
only a name in `waiting`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from callboard.limits import (
    RESTART_BACKOFF_MS,
    RESTART_BACKOFF_MS_MAX,
    SHUTDOWN_CLEANUP_MS,
    SHUTDOWN_EXIT_DELAY_MS,
    SHUTDOWN_HARD_MS,
)
from callboard.supervisor.tree import (
    ALIVE,
    CLOSING_TOLD_MS,
    FINAL_STATUSES,
    MAIN_LOOP_ENDED,
    SPECS,
    STOP_STAGES,
    STOPPED,
    After,
    Begin,
    Cause,
    Child,
    CleanupOver,
    ClosingTold,
    Down,
    Due,
    End,
    Event,
    Exited,
    GraceOver,
    Granted,
    HardStop,
    Instruction,
    NotStarted,
    Phase,
    Plane,
    PlaneReady,
    Quarantine,
    Quarantined,
    Ready,
    Refused,
    Signal,
    Spec,
    Start,
    Stop,
    StorageGivenUp,
    TellClosing,
    Wanted,
)

Step = tuple[Plane, list[Instruction]]

# ---- Reading the state ----


def sessions(plane: Plane) -> list[Child]:
    """Give the sessions that hold a slot."""
    return [child for child in plane.children.values() if child.spec.role == "session"]


def is_stopping(plane: Plane) -> bool:
    """Tell whether the plane is on its way down."""
    return plane.stage in STOP_STAGES


def back_off_ms(before: int, random01: float) -> int:
    """Give the time before a restart: doubling, ± 20 % (FLT-32a).

    Args:
        before: how many restarts are inside the window already.
        random01: a number from 0 to 1.

    """
    # int(): mypy takes a power with an unknown exponent for Any
    base = min(RESTART_BACKOFF_MS_MAX, RESTART_BACKOFF_MS * int(2**before))
    return round(base * (0.8 + 0.4 * random01))


def decide(plane: Plane, event: Event, now: int, random01: float) -> Step:
    """Take one step.

    Args:
        plane: the state so far.
        event: what happened.
        now: monotonic milliseconds.
        random01: a number from 0 to 1, for jitter.

    Returns:
        The new state, and what is to be done, in order.

    """
    step = _Step(plane, now, random01)
    _take(step, event)
    _go_on_stopping(step)
    return step.plane, step.out


def _take(step: _Step, event: Event) -> None:
    match event:
        case Begin():
            _begin(step)
        case Ready():
            _ready(step, event)
        case NotStarted():
            _not_started(step, event)
        case Exited():
            _exited(step, event)
        case Due():
            _due(step, event)
        case GraceOver():
            _grace_over(step, event)
        case Wanted():
            _wanted(step, event)
        case Quarantined():
            _quarantined(step, event)
        case Stop():
            _stop(step, event)
        case ClosingTold():
            _closing_told(step)
        case CleanupOver():
            _cleanup_over(step)
        case HardStop():
            _hard_stop(step)


# ---- Making a step ----


class _Step:
    """A state in the making."""

    def __init__(self, plane: Plane, now: int, random01: float) -> None:
        self.plane = plane
        self.now = now
        self.random01 = random01
        self.out: list[Instruction] = []

    def set(self, child: Child) -> Child:
        self.plane = replace(self.plane, children={**self.plane.children, child.name: child})
        return child

    def remove(self, name: str) -> None:
        left = {key: child for key, child in self.plane.children.items() if key != name}
        self.plane = replace(self.plane, children=left)

    def count(self, what: str) -> None:
        totals = self.plane.totals
        self.plane = replace(self.plane, totals={**totals, what: totals.get(what, 0) + 1})

    def current(self, name: str, run: int) -> Child | None:
        """Give a child if this is its present run; what is told of earlier ones is old news."""
        child = self.plane.children.get(name)
        return child if child is not None and child.run == run else None

    def start(self, child: Child) -> None:
        """Start a child, or let it wait for what it needs."""
        if not self._may_start(child):
            self.set(replace(child, phase="waiting"))
            return
        run = self.plane.runs + 1
        self.plane = replace(self.plane, runs=run)
        self.set(replace(child, phase="starting", run=run, killed=False))
        self.out.append(Start(child.name, child.spec.role, child.spec.module, run))

    def _may_start(self, child: Child) -> bool:
        if child.spec.role == "session":
            return self.phase("fork") == "up"
        return child.spec.role != "gateway" or child.run > 0 or self.phase("storage") in _SETTLED

    def phase(self, name: str) -> Phase:
        child = self.plane.children.get(name)
        return child.phase if child is not None else "waiting"

    def start_waiting(self) -> None:
        """Start whatever waited for something that has come."""
        for child in list(self.plane.children.values()):
            if child.phase == "waiting":
                self.start(child)

    def signal(self, child: Child, *, kill: bool = False) -> None:
        if child.phase not in ALIVE:
            return
        if kill and not child.killed:
            self.set(replace(child, phase="stopping", killed=True))
            self.out.append(Signal(child.name, child.run, kill=True))
        elif not kill and child.phase != "stopping":
            self.set(replace(child, phase="stopping"))
            self.out.append(Signal(child.name, child.run, kill=False))
            grace = GraceOver(child.name, child.run)
            self.out.append(After(child.spec.stop_ms, grace))


_SETTLED: Final = frozenset({"up", "spent"})
"""Phases of storage in which the gateway may be started for the first time."""


def _begin(step: _Step) -> None:
    for role in ("storage", "fork", "gateway"):
        step.start(Child(role, SPECS[role]))


def _ready(step: _Step, event: Ready) -> None:
    child = step.current(event.name, event.run)
    if child is None:
        return
    if child.phase == "starting":
        child = step.set(replace(child, phase="up", was_up=True))
    elif child.phase != "stopping":  # one that is stopping is told of, so that its end is too
        return
    if child.spec.role == "session":
        step.out.append(Granted(child.name, child.run))
    elif not is_stopping(step.plane):
        step.start_waiting()
        if child.name == "gateway" and step.plane.stage == "starting":
            step.plane = replace(step.plane, stage="running")
            step.out.append(PlaneReady())


def _not_started(step: _Step, event: NotStarted) -> None:
    """Refuse the request; a session that is started again by itself tries once more later."""
    child = step.current(event.name, event.run)
    if child is None or child.phase not in ALIVE:
        return
    if child.was_up and not is_stopping(step.plane):
        step.set(replace(child, phase="backoff"))
        step.out.append(After(RESTART_BACKOFF_MS_MAX, Due(child.name, child.run)))
        return
    step.remove(child.name)
    step.out.append(Refused(child.name, "processes"))
    _give_slots(step)


# ---- Ends ----


def _exited(step: _Step, event: Exited) -> None:
    child = step.current(event.name, event.run)
    if child is None or child.phase not in ALIVE:
        return
    if child.spec.role == "session":
        _session_ended(step, child, event.status)
    elif child.name == "fork":
        _fork_ended(step, child, event)
    else:
        _pillar_ended(step, child, event)


def _session_ended(step: _Step, child: Child, status: int | None) -> None:
    cause = _cause(child, status)
    if child.phase == "stopping" or is_stopping(step.plane) or not _comes_back(child.spec, status):
        _session_gone(step, child, cause, status)
    elif status is None:
        _say_down(step, child, cause, status, restarting=True)
        step.start(child)
    elif _is_spent(step, child):
        _quarantine(step, child, status)
    else:
        _say_down(step, child, cause, status, restarting=True)
        _restart_later(step, child)


def _cause(child: Child, status: int | None) -> Cause:
    if status == STOPPED:
        return "stopped"
    if child.killed:
        return "killed"
    if status is None:
        return "parent_lost"
    return "refused" if status in FINAL_STATUSES else "crashed"


def _comes_back(spec: Spec, status: int | None) -> bool:
    """Tell by its restart type whether a child is started again after this exit."""
    if spec.restart == "temporary" or status in FINAL_STATUSES:
        return False
    return spec.restart == "permanent" or status != STOPPED


def _session_gone(step: _Step, child: Child, cause: Cause, status: int | None) -> None:
    _say_down(step, child, cause, status)
    step.remove(child.name)
    if is_stopping(step.plane):
        step.out.append(Refused(child.name, "plane_closing"))
    elif child.phase == "starting":  # whoever asked for it was not answered yet
        step.out.append(Refused(child.name, "processes"))
    _give_slots(step)


def _quarantine(step: _Step, child: Child, status: int) -> None:
    _say_down(step, child, "crashed", status, quarantined=True)
    step.remove(child.name)
    step.count("quarantines")
    quarantined = {**step.plane.quarantined, child.name: False}
    step.plane = replace(step.plane, quarantined=quarantined)
    step.out.append(Quarantine(child.name))
    step.out.append(Refused(child.name, "session_quarantined"))
    _give_slots(step)


def _say_down(
    step: _Step,
    child: Child,
    cause: Cause,
    status: int | None,
    *,
    quarantined: bool = False,
    restarting: bool = False,
) -> None:
    shown = 0 if status is None else status
    step.out.append(Down(child.name, child.run, cause, shown, quarantined, restarting))


def _fork_ended(step: _Step, child: Child, event: Exited) -> None:
    """Start the fork process again; its sessions end with it and wait for it (FLT-29)."""
    for session in sessions(step.plane):
        _kill_orphan(step, session)
    if is_stopping(step.plane):
        step.set(replace(child, phase="spent"))
    elif not _comes_back(child.spec, event.status):
        _fail(step, child, event, event.status or MAIN_LOOP_ENDED)
    elif _is_spent(step, child):
        _fail(step, child, event, MAIN_LOOP_ENDED)
    else:
        _restart_later(step, child)


def _kill_orphan(step: _Step, session: Child) -> None:
    """Make sure of what the kernel does; it stays `up`, so that its end counts as its parent's."""
    if session.phase in ALIVE:
        step.out.append(Signal(session.name, session.run, kill=True))


def _pillar_ended(step: _Step, child: Child, event: Exited) -> None:
    """Storage or gateway ended."""
    comes_back = _comes_back(child.spec, event.status)
    if _stays_down(step, child):
        step.set(replace(child, phase="spent"))
        if child.name == "gateway":
            _closing_told(step)  # nobody is left to be told
    elif not comes_back and step.plane.stage == "starting" and not child.was_up:
        _fail(step, child, event, event.status or MAIN_LOOP_ENDED)
    elif not comes_back or _is_spent(step, child):
        _give_up(step, child, event)
    else:
        _restart_later(step, child)


def _stays_down(step: _Step, child: Child) -> bool:
    """Tell whether a stopping plane needs this one no more: storage serves the draining ones."""
    if not is_stopping(step.plane):
        return False
    draining = step.plane.stage in ("closing", "sessions")
    return child.name != "storage" or not draining or child.phase == "stopping"


def _give_up(step: _Step, child: Child, event: Exited) -> None:
    if child.name != "storage":
        _fail(step, child, event, MAIN_LOOP_ENDED)
        return
    step.set(replace(child, phase="spent"))
    detail = _detail(child, event)
    step.plane = replace(step.plane, detail=detail)
    step.out.append(StorageGivenUp(detail))
    if not is_stopping(step.plane):
        step.start_waiting()  # the gateway, so that sends are answered (FLT-4)


def _fail(step: _Step, child: Child, event: Exited, status: int) -> None:
    """End the plane: it cannot do without this child."""
    step.set(replace(child, phase="spent"))
    step.plane = replace(step.plane, detail=_detail(child, event))
    _stop(step, Stop(status))


def _detail(child: Child, event: Exited) -> str:
    why = event.why or _reading(event.status)
    return f"{child.name} is not started again: {why}"


def _reading(status: int | None) -> str:
    if status is None:
        return "it ended"
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def _is_spent(step: _Step, child: Child) -> bool:
    """Tell whether one more restart would be more than the window allows (FLT-32a)."""
    return len(_recent(step, child)) >= child.spec.restarts_max


def _recent(step: _Step, child: Child) -> tuple[int, ...]:
    return tuple(at for at in child.restarts if step.now - at < child.spec.window_ms)


def _restart_later(step: _Step, child: Child) -> None:
    recent = _recent(step, child)
    step.count(child.spec.role)
    waits = replace(child, phase="backoff", restarts=(*recent, step.now), crashes=child.crashes + 1)
    step.set(waits)
    delay = back_off_ms(len(recent), step.random01)
    step.out.append(After(delay, Due(child.name, child.run)))


def _due(step: _Step, event: Due) -> None:
    child = step.current(event.name, event.run)
    if child is None or child.phase != "backoff":
        return
    if is_stopping(step.plane) and _stays_down(step, child):
        step.set(replace(child, phase="spent"))
    else:
        step.start(child)


def _grace_over(step: _Step, event: GraceOver) -> None:
    child = step.current(event.name, event.run)
    if child is not None and child.phase == "stopping":
        step.signal(child, kill=True)


# ---- Slots (RES-1) ----


def _wanted(step: _Step, event: Wanted) -> None:
    child = step.plane.children.get(event.session)
    if is_stopping(step.plane):
        step.out.append(Refused(event.session, "plane_closing"))
    elif step.plane.quarantined.get(event.session) is False:
        step.out.append(Refused(event.session, "session_quarantined"))
    elif step.phase("storage") == "spent":
        step.out.append(Refused(event.session, "storage_unavailable"))
    elif child is not None and child.phase == "up":
        step.out.append(Granted(child.name, child.run))
    elif child is None or child.phase == "stopping":
        _reserve(step, event)


def _reserve(step: _Step, event: Wanted) -> None:
    """Give a slot, or the promise of one that is being vacated, or refuse."""
    name = event.session
    if name in step.plane.waiting:
        return
    if name not in step.plane.children and len(sessions(step.plane)) < step.plane.slots:
        _admit(step, name)
        return
    if len(step.plane.waiting) >= _vacating(step) and not _evict(step, event.evict):
        step.out.append(Refused(name, "resident_sessions"))
        return
    step.plane = replace(step.plane, waiting=(*step.plane.waiting, name))


def _admit(step: _Step, name: str) -> None:
    lifted = {key: known for key, known in step.plane.quarantined.items() if key != name}
    step.plane = replace(step.plane, quarantined=lifted)  # the gateway knows that it was released
    step.start(Child(name, SPECS["session"]))


def _vacating(step: _Step) -> int:
    return sum(child.phase == "stopping" for child in sessions(step.plane))


def _evict(step: _Step, candidates: tuple[str, ...]) -> bool:
    """Stop the first candidate that is up; the gateway names the least recently used first."""
    for name in candidates:
        child = step.plane.children.get(name)
        if child is not None and child.phase == "up" and child.spec.role == "session":
            step.signal(child)
            return True
    return False


def _give_slots(step: _Step) -> None:
    """Hand vacated slots to those who wait, in order."""
    if is_stopping(step.plane):
        return
    for name in step.plane.waiting:
        free = len(sessions(step.plane)) < step.plane.slots
        if free and name not in step.plane.children:  # there: it has not ended yet itself
            left = tuple(other for other in step.plane.waiting if other != name)
            step.plane = replace(step.plane, waiting=left)
            _admit(step, name)


def _quarantined(step: _Step, event: Quarantined) -> None:
    if event.session in step.plane.quarantined:
        known = {**step.plane.quarantined, event.session: True}
        step.plane = replace(step.plane, quarantined=known)


# ---- Stopping (SHD-1) ----


def _stop(step: _Step, event: Stop) -> None:
    if is_stopping(step.plane):
        _kill_all(step)
        return
    waiting = step.plane.waiting
    step.plane = replace(step.plane, stage="closing", status=event.status, waiting=())
    step.out.extend(Refused(name, "plane_closing") for name in waiting)
    step.out.append(After(SHUTDOWN_CLEANUP_MS, CleanupOver()))
    step.out.append(After(SHUTDOWN_HARD_MS - SHUTDOWN_EXIT_DELAY_MS, HardStop()))
    if step.phase("gateway") == "up":
        step.out.append(TellClosing())
        step.out.append(After(CLOSING_TOLD_MS, ClosingTold()))
    else:
        _closing_told(step)


def _closing_told(step: _Step) -> None:
    if step.plane.stage == "closing":
        step.plane = replace(step.plane, stage="sessions")
        for session in sessions(step.plane):
            _dismiss(step, session)


def _dismiss(step: _Step, session: Child) -> None:
    if session.phase in ALIVE:
        step.signal(session)
    else:
        step.remove(session.name)
        step.out.append(Refused(session.name, "plane_closing"))


def _go_on_stopping(step: _Step) -> None:
    """Go to the next stage as long as nothing of the present one is left."""
    while is_stopping(step.plane) and step.plane.stage != "closing" and _is_done(step):
        if step.plane.stage == "ended":
            return
        stage = STOP_STAGES[STOP_STAGES.index(step.plane.stage) + 1]
        step.plane = replace(step.plane, stage=stage)
        if stage == "ended":
            step.out.append(End(step.plane.status))
        else:
            _stop_pillar(step, step.plane.children.get(stage))


def _is_done(step: _Step) -> bool:
    if step.plane.stage == "sessions":
        return not sessions(step.plane)
    return step.phase(step.plane.stage) not in ALIVE


def _stop_pillar(step: _Step, child: Child | None) -> None:
    if child is not None and child.phase in ALIVE:
        step.signal(child)
    elif child is not None:
        step.set(replace(child, phase="spent"))


def _cleanup_over(step: _Step) -> None:
    if step.plane.stage == "closing":
        _closing_told(step)
    for session in sessions(step.plane):
        step.signal(session, kill=True)


def _hard_stop(step: _Step) -> None:
    if is_stopping(step.plane):
        _kill_all(step)


def _kill_all(step: _Step) -> None:
    """Wait for nothing more; what that leaves is for recovery, the authority (SHD-1c)."""
    if step.plane.stage == "closing":
        step.plane = replace(step.plane, stage="sessions")
    for child in list(step.plane.children.values()):
        if child.phase in ALIVE:
            step.signal(child, kill=True)
        elif child.spec.role == "session":
            _dismiss(step, child)
        else:
            step.set(replace(child, phase="spent"))
