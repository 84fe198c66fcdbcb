"""Plays for the supervisor's policy: a world of children that live only in a test."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from callboard.supervisor import tree
from callboard.supervisor.policy import decide, is_stopping, sessions
from callboard.supervisor.tree import Plane


@dataclass
class World:
    """Runs instructions at once, in virtual time, and remembers them."""

    slots: int = 4
    now: int = 0
    random01: float = 0.5
    plane: Plane = field(init=False)
    told: list[tree.Instruction] = field(default_factory=list[tree.Instruction])
    living: dict[str, int] = field(default_factory=dict[str, int])
    """The run of each process that exists."""
    asked_to_stop: set[str] = field(default_factory=set[str])
    timers: list[tuple[int, int, tree.Event]] = field(
        default_factory=list[tuple[int, int, tree.Event]]
    )
    auto: bool = True
    """Programs become ready, forked sessions exist, and stopping ones end, by themselves."""
    deaf: set[str] = field(default_factory=set[str])
    """They do not end when asked to."""
    owed: list[str] = field(default_factory=list[str])
    """Sessions that were asked for and got no answer."""

    def __post_init__(self) -> None:
        self.plane = Plane(self.slots)

    def begin(self) -> World:
        self.tell(tree.Begin())
        return self

    def tell(self, event: tree.Event) -> list[tree.Instruction]:
        if isinstance(event, tree.Wanted):
            self.owed.append(event.session)
        self.plane, out = decide(self.plane, event, self.now, self.random01)
        self.told += out
        for instruction in out:
            self.perform(instruction)
        self.check()
        return out

    def perform(self, instruction: tree.Instruction) -> None:
        match instruction:
            case tree.Start(name, role, _, run):
                assert name not in self.living, "two runs of one child"
                if role == "session":
                    assert "fork" in self.living
                self.living[name] = run
                if self.auto:
                    self.after(0, tree.Ready(name, run))
            case tree.Signal(name, run, kill):
                if self.living.get(name) == run and self.auto and (kill or name not in self.deaf):
                    self.after(0, tree.Exited(name, run, -9 if kill else 0))
            case tree.After(ms, event):
                self.after(ms, event)
            case tree.Granted(session, _) | tree.Refused(session, _):
                self.owed = [name for name in self.owed if name != session]
            case tree.TellClosing():
                if self.auto:
                    self.after(0, tree.ClosingTold())
            case tree.Quarantine(session):
                self.after(0, tree.Quarantined(session))
            case tree.End():
                assert not self.living, "something is left"
            case _:
                pass

    def after(self, ms: int, event: tree.Event) -> None:
        heapq.heappush(
            self.timers, (self.now + ms, len(self.told) * 1000 + len(self.timers), event)
        )

    def deliver(self, event: tree.Event) -> None:
        if isinstance(event, tree.Exited):
            if self.living.get(event.name) != event.run:
                return
            del self.living[event.name]
        elif isinstance(event, tree.Ready) and self.living.get(event.name) != event.run:
            return
        self.tell(event)

    def run(self, ms: int = 0) -> World:
        """Let time pass."""
        until = self.now + ms
        while self.timers and self.timers[0][0] <= until:
            at, _, event = heapq.heappop(self.timers)
            self.now = max(self.now, at)
            self.deliver(event)
        self.now = until
        return self

    def die(self, name: str, status: int | None = -9, why: str = "") -> None:
        """End a process unasked; the fork process takes its sessions with it."""
        self.deliver(tree.Exited(name, self.living[name], status, why))
        if name == "fork":
            for child in sessions(self.plane):
                if child.name in self.living:
                    self.deliver(tree.Exited(child.name, self.living[child.name], None))

    @property
    def last(self) -> object:
        return self.told[-1]

    def of(self, kind: type) -> list[tree.Instruction]:
        return [one for one in self.told if isinstance(one, kind)]

    def starts(self, name: str) -> int:
        return sum(isinstance(one, tree.Start) and one.name == name for one in self.told)

    def check(self) -> None:
        plane = self.plane
        held = sessions(plane)
        assert len(held) <= plane.slots, "more sessions than slots"
        for child in plane.children.values():
            if child.name in self.living:
                assert child.phase in tree.ALIVE, (child, "lives, and nobody knows")
        for name in self.living:
            assert name in plane.children, (name, "lives, and nobody knows")
        if is_stopping(plane):
            assert not plane.waiting
