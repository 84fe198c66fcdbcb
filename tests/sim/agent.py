"""The agent's side of a session, without threads: short plays with tools that count their runs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator
from typing import Final, cast

from callboard.actors.session.agent_calls import (
    AgentCall,
    Call,
    Input,
    Next,
    Over,
    Result,
    Say,
    Steered,
    TurnView,
)
from callboard.fold import Effect
from callboard.records import Failure
from tests.sim.kernel import MS, Kernel

_EFFECTS: Final[tuple[Effect, ...]] = ("readonly", "keyed", "unsafe")


class Tools:
    """What tools have done, kept outside of the home (O4)."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.durable: Callable[[str, str], bool] = lambda session, call: True
        self.problems: list[str] = []

    def run(self, session: str, call_id: str) -> None:
        """Run one; its call must be durable, and it must be the first time."""
        self.runs[call_id] += 1
        if self.runs[call_id] > 1:
            self.problems.append(f"{call_id} of {session} ran again")
        if not self.durable(session, call_id):
            self.problems.append(f"{call_id} of {session} ran before its call was durable")


class _Stopped(Exception):
    """The turn was told to end."""


Play = Generator[AgentCall | int, object, None]
"""Yields what the agent asks for, or for how many milliseconds it works."""


class Agents:
    """Plays the turns of one session process (`agent_calls.AgentSide`)."""

    def __init__(
        self, kernel: Kernel, name: str, tools: Tools, call: Callable[[AgentCall], None]
    ) -> None:
        self.kernel, self.tools, self._call = kernel, tools, call
        self._luck = kernel.stream(f"agent {name}")
        self._view: TurnView | None = None
        self._play: Play | None = None
        self._launched: set[str] = set()
        self._closed = False
        self._calls = 0
        self._nonce = hashlib.sha256(name.encode()).hexdigest()[:12]
        self.alive: Callable[[], bool] = lambda: True
        self.hold: Callable[[Callable[[], None]], bool] = lambda act: False
        """Keeps something for later if the process stands still."""

    # --- what the session asks for ---

    def begin(self, view: TurnView) -> None:
        self._view = view
        self._launched = set()
        if self._closed:
            self._say(Over(view.turn_id, aborted=True))
            return
        self._play = self._turn(view)
        self._later(self._step, self._play, None, None)

    def abort(self, turn_id: str, reason: str) -> None:
        if self._view is not None and self._view.turn_id == turn_id and self._play is not None:
            self._later(self._end, self._play)

    def close(self, reason: str) -> None:
        self._closed = True
        if self._play is not None:
            self._later(self._end, self._play)

    def answer(self, ticket: object, value: object) -> None:
        play = cast("Play", ticket)
        if isinstance(value, BaseException):
            self._later(self._step, play, None, value)
        else:
            self._later(self._step, play, value, None)

    # --- its one thread ---

    def _later(self, act: Callable[..., None], *args: object, ms: int = 0) -> None:
        delay = ms * MS + self._luck.randint(0, 3) * 100
        self.kernel.at(delay, self._run, act, args)

    def _run(self, act: Callable[..., None], args: tuple[object, ...]) -> None:
        if self.alive() and not self.hold(lambda: self._run(act, args)):
            act(*args)

    def _say(self, call: AgentCall) -> None:
        self._later(self._call, call)

    def _end(self, play: Play) -> None:
        """Throw a cancel into the play; it ends at once."""
        if play is self._play:
            self._step(play, None, _Stopped())

    def _step(self, play: Play, value: object, error: BaseException | None) -> None:
        if play is not self._play or self._view is None:
            return
        turn_id = self._view.turn_id
        try:
            wanted = play.throw(error) if error is not None else play.send(value)
        except StopIteration:
            self._over(Over(turn_id, text=f"done {self._luck.randrange(1_000)}"))
        except _Stopped:
            self._over(Over(turn_id, aborted=True, launched=frozenset(self._launched)))
        except Exception as problem:
            failure = Failure(
                code="runtime",
                message="the agent failed",
                retryable=self._luck.random() < 0.5,
                error=type(problem).__name__,
            )
            self._over(Over(turn_id, failure=failure, launched=frozenset(self._launched)))
        else:
            if isinstance(wanted, int):
                self._later(self._step, play, None, None, ms=wanted)
            else:
                self._say(wanted)

    def _over(self, over: Over) -> None:
        self._play = None
        self._say(over)

    # --- the play ---

    def _turn(self, view: TurnView) -> Play:
        luck = self._luck
        while True:
            ticket = self._play
            given = yield Next(view.turn_id, ticket)
            if given is None:
                return
            assert isinstance(given, Input)
            yield luck.choice((0, 0, 1, 20, 200))
            if luck.random() < 0.04:
                raise RuntimeError("an agent's own failure")
            if luck.random() < 0.5:
                yield Say(view.turn_id, ticket, f"heard {given.id}")
            if luck.random() < 0.5:
                yield from self._tool(view, ticket)
            if luck.random() < 0.15:
                yield Steered(view.turn_id, ticket)

    def _tool(self, view: TurnView, ticket: object) -> Play:
        luck = self._luck
        self._calls += 1
        call_id = f"call_{self._nonce}_{self._calls}"
        effect = luck.choice(_EFFECTS)
        yield Call(view.turn_id, ticket, call_id, "count", {"by": self._calls}, effect)
        self._launched.add(call_id)
        self.tools.run(view.session, call_id)
        yield luck.choice((0, 1, 50, 300))
        yield Result(view.turn_id, ticket, call_id, {"ran": 1}, None)
