"""The agent's side of a session: agent code in an event loop, in a thread of its own.

The thread is made for the session's first turn. Whatever agent code does there, block included,
the actor's thread goes on accepting input; whatever it raises, `SystemExit` included, ends its
turn and nothing else. Every `await` of the `Turn` object is a place where a cancel arrives.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
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
from callboard.actors.session.agent_calls import Ticket as CallTicket
from callboard.actors.session.agents import as_awaitable, resolve
from callboard.actors.session.failures import classify, unusable
from callboard.actors.session.gate import Gate, Signal, Ticket
from callboard.actors.session.tools import Tool, as_json, clean, tool
from callboard.agents import Message, ToolError
from callboard.artifact_files import ArtifactReader
from callboard.errors import (
    ArtifactInvalid,
    CallboardError,
    GateClosed,
    InvalidRequest,
    TurnTerminal,
)
from callboard.ids import fresh_ulid

Log = Callable[[str, Mapping[str, object]], None]
Post = Callable[[AgentCall], None]

LEFTOVER_SECONDS: Final = 1.0
"""How long tasks that an agent left behind may take to end after their cancel."""
_HERE: Final = __file__
_TRACE_STEPS: Final = 8


class AgentHost:
    """Runs agents for one session (`agent_calls.AgentSide`).

    Args:
        post: takes what the agent wants; called on the loop's thread, must not block.
        log: takes what the agent's author should know, without a word of what it said.
        loop: for plays without threads: a loop that the caller runs.
        artifacts: reads the session's artifacts; without it there are none.

    """

    def __init__(
        self,
        post: Post,
        log: Log,
        loop: asyncio.AbstractEventLoop | None = None,
        artifacts: ArtifactReader | None = None,
    ) -> None:
        self.post = post
        self.log = log
        self.artifacts = artifacts
        self._gate: Gate | None = None
        self._loop = loop
        self._runs: dict[str, _Run] = {}

    def begin(self, view: TurnView) -> None:
        """Run the agent for a turn."""
        self._on_loop(self._begin, view)

    def abort(self, turn_id: str, reason: str) -> None:
        """Tell a turn's agent to end."""
        self._on_loop(self._abort, turn_id, reason)

    def close(self, reason: str) -> None:
        """Tell everything that runs to end, and let nothing begin any more (GTE-2)."""
        if self._loop is not None:
            self._on_loop(self._close, reason)

    def answer(self, ticket: CallTicket, value: object) -> None:
        """Answer a call; an exception is raised where the agent waits."""
        self._on_loop(_settle, cast("asyncio.Future[object]", ticket), value)

    def _on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        loop = self._loop or self._start_thread()
        loop.call_soon_threadsafe(function, *arguments)

    def _start_thread(self) -> asyncio.AbstractEventLoop:
        self._loop = loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, args=(loop,), name="agent", daemon=True).start()
        return loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while True:
            try:
                loop.run_forever()
            except BaseException as error:  # SystemExit of a task that the agent made
                self.log("agent_task_failed", where_of(error))

    # On the loop.

    def _begin(self, view: TurnView) -> None:
        caller = Signal()
        try:
            ticket = self.gate.enter("agent", caller)
        except GateClosed:
            self.post(Over(view.turn_id, aborted=True))
            return
        run = self._runs[view.turn_id] = _Run(self, view, caller, ticket)
        run.start()

    def _abort(self, turn_id: str, reason: str) -> None:
        run = self._runs.get(turn_id)
        if run is not None:
            run.caller.abort(reason)

    def _close(self, reason: str) -> None:
        self.gate.close(reason)

    def over(self, run: _Run, over: Over) -> None:
        """Forget a run and say that it is over."""
        del self._runs[run.view.turn_id]
        self.post(over)

    @property
    def gate(self) -> Gate:
        """The gate that runs and tools pass (GTE-4)."""
        if self._gate is None:
            self._gate = Gate(asyncio.get_running_loop().time)
        return self._gate


def _settle(future: asyncio.Future[object], value: object) -> None:
    if future.done():
        return
    if isinstance(value, BaseException):
        future.set_exception(value)
        future.exception()  # nobody may wait for it any more
    else:
        future.set_result(value)


def where_of(error: BaseException) -> dict[str, object]:
    """Say what kind of error came from where; never what it says (DUR-8)."""
    steps = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != _HERE]
    at = [f"{one.filename}:{one.lineno} {one.name}" for one in steps[-_TRACE_STEPS:]]
    return {"level": "warning", "error": type(error).__name__, "at": at}


# --- one run ----------------------------------------------------------------------------------


class _Run:
    """An agent's run for one turn, and the `Turn` that it sees."""

    def __init__(self, host: AgentHost, view: TurnView, caller: Signal, ticket: Ticket) -> None:
        self.view = view
        self.caller = caller
        self.signal = ticket.signal
        self.launched: set[str] = set()
        self.is_over = False
        self._host = host
        self._ticket = ticket
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Future[object] | None = None
        self._broken: CallboardError | None = None
        """An input's artifact is not as it must be: the turn fails whatever the agent does."""
        self._found = False
        """Whether the agent's function was found; before that, nothing of it has run."""

    def start(self) -> None:
        self._task = self._loop.create_task(self._main())

    def _cancel(self, _: str) -> None:
        if not self.is_over:
            self._task.cancel()

    async def _main(self) -> None:
        """Run the agent and say how it ended; nothing gets out of here."""
        self.signal.listen(self._cancel)  # here: a task cancelled before its first step never runs
        text: str | None = None
        failure = None
        try:
            text = await self._run()
        except asyncio.CancelledError as error:
            if not self.signal.aborted:  # the agent cancelled itself
                failure = classify(error)
        except BaseException as error:
            failure = classify(error) if self._found else unusable(error)
            facts = {"turn_id": self.view.turn_id, "code": failure.code, **where_of(error)}
            self._host.log("agent_failed", facts)
        if self._broken is not None:
            text, failure = None, classify(self._broken)
        aborted = self.signal.aborted
        self.is_over = True
        confirmed = await _end_leftovers()
        self._ticket.release()
        over = Over(self.view.turn_id, text, failure, aborted, confirmed, frozenset(self.launched))
        self._host.over(self, over)

    async def _run(self) -> str | None:
        function = resolve(self.view.agent)
        self._found = True
        result = await as_awaitable(function(LiveTurn(self)))
        if result is not None and not isinstance(result, str):
            raise InvalidRequest(field="agent", reason="type")
        return clean(result) if result else None

    # What the turn's methods are made of.

    async def ask(self, make: Callable[[asyncio.Future[object]], AgentCall]) -> object:
        """Say what the agent wants and wait for the answer; a cancel arrives here."""
        return await self.ticket(make)

    def ticket(self, make: Callable[[asyncio.Future[object]], AgentCall]) -> asyncio.Future[object]:
        """Say what the agent wants.

        Raises:
            CancelledError: the turn was told to end.
            TurnTerminal: it has ended, and this is code that was left behind.

        """
        if self.signal.aborted:
            raise asyncio.CancelledError(self.signal.reason)
        if self.is_over:
            raise TurnTerminal(turn_id=self.view.turn_id)
        future = self._loop.create_future()
        self._host.post(make(future))
        return future

    async def next(self) -> Input | None:
        """Wait for the next input. A wait that was given up is taken up by the next one."""
        if self._next is None:
            self._next = self.ticket(lambda ticket: Next(self.view.turn_id, ticket))
        elif self.signal.aborted:
            raise asyncio.CancelledError(self.signal.reason)
        found = cast("Input | None", await asyncio.shield(self._next))
        self._next = None
        if found is not None:
            self.verify([found])
        return found

    def verify(self, inputs: Sequence[Input]) -> None:
        """Check the artifacts of inputs before the agent, and with it a model, sees them (ART-11).

        Raises:
            ArtifactInvalid, ArtifactStoreUnsafe: one is not as it must be; the turn will fail.

        """
        for one in inputs:
            if one.parts:
                try:
                    self.artifacts(one.artifact_id).verify(one.parts)
                except CallboardError as error:
                    self._broken = self._broken or error
                    raise

    def artifacts(self, artifact_id: str | None) -> ArtifactReader:
        """Give the session's artifacts."""
        if self._host.artifacts is None:
            raise ArtifactInvalid(artifact_id=artifact_id, retryable=False)
        return self._host.artifacts

    async def settle_call(self, call_id: str, output: object, error: str | None) -> None:
        """Make a tool's result durable."""
        turn_id = self.view.turn_id
        await self.ask(lambda ticket: Result(turn_id, ticket, call_id, output, error))

    async def run_tool(self, chosen: Tool, name: str, arguments: Mapping[str, object]) -> object:
        """Run a tool between its durable call and its durable result (rule 5)."""
        turn_id, call_id = self.view.turn_id, f"call_{fresh_ulid()}"
        given = as_json(dict(arguments))
        await self.ask(lambda t: Call(turn_id, t, call_id, name, given, chosen.effect))
        output, error = None, None
        with self._host.gate.enter(f"tool {name}", self.signal):
            self.launched.add(call_id)
            try:
                output = await chosen.run(arguments)
            except ToolError as problem:  # a built-in tool that says in its own words what is wrong
                error = str(problem)
            except Exception as problem:
                error = classify(problem).code
        await self.settle_call(call_id, output, error)
        if error is not None:
            raise ToolError(error)
        return output


async def _end_leftovers() -> bool:
    """End the tasks that an agent left behind; false if one goes on all the same."""
    mine = asyncio.current_task()
    tasks = [task for task in asyncio.all_tasks() if task is not mine]
    for task in tasks:
        task.cancel()
    if not tasks:
        return True
    await asyncio.wait(tasks, timeout=LEFTOVER_SECONDS)
    return all(task.done() for task in tasks)


class _Inputs:
    """The inputs of a turn, one at a time."""

    __slots__ = ("_run",)

    def __init__(self, run: _Run) -> None:
        self._run = run

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        message = await self._run.next()
        if message is None:
            raise StopAsyncIteration
        return message


class LiveTurn:
    """A turn as its agent sees it (`callboard.agents.Turn`, and `agents.Stage` for `replay`)."""

    __slots__ = ("_run",)

    def __init__(self, run: _Run) -> None:
        self._run = run

    @property
    def session(self) -> str:
        """The session's reference."""
        return self._run.view.session

    @property
    def turn_id(self) -> str:
        """The turn's id."""
        return self._run.view.turn_id

    @property
    def number(self) -> int:
        """The turn's ordinal in its session, from 1."""
        return self._run.view.number

    @property
    def workspace(self) -> str:
        """The session's workspace."""
        return self._run.view.workspace

    @property
    def settings(self) -> Mapping[str, str]:
        """The session's settings."""
        return self._run.view.settings

    @property
    def cancelled(self) -> bool:
        """Whether somebody told this turn to end."""
        return self._run.signal.aborted

    def __aiter__(self) -> AsyncIterator[Message]:
        """Give the prompt, then what is steered in, until nothing is left: that seals the turn."""
        return _Inputs(self._run)

    async def full_text(self, message: Message) -> str:
        """Give a message's text as it was sent."""
        if not isinstance(message, Input) or not message.parts:
            return message.text
        parts = self._run.artifacts(message.artifact_id).restore(message.parts)
        return "\n".join(str(part["text"]) for part in parts if part["type"] == "text")

    async def say(self, text: str) -> None:
        """Write an assistant message."""
        if not text:
            raise InvalidRequest(field="text", reason="empty")
        turn_id, written = self.turn_id, clean(text)
        await self._run.ask(lambda ticket: Say(turn_id, ticket, written))

    async def tool(self, name: str, /, **arguments: object) -> object:
        """Run a built-in tool."""
        chosen = tool(name, self._run.artifacts)
        chosen.check(arguments)
        return await self._run.run_tool(chosen, name, arguments)

    async def steered(self) -> list[Message]:
        """Take what was steered in, without sealing the turn."""
        found = await self._run.ask(lambda ticket: Steered(self.turn_id, ticket))
        self._run.verify(cast("list[Input]", found))
        return cast("list[Message]", found)

    async def play(
        self, name: str, arguments: object, output: object, error: str | None, seconds: float
    ) -> None:
        """Record a tool call and, after a while, its result; no tool runs."""
        run, call_id = self._run, f"call_{fresh_ulid()}"
        turn_id = self.turn_id
        await run.ask(lambda t: Call(turn_id, t, call_id, name, arguments, "readonly"))
        run.launched.add(call_id)
        await asyncio.sleep(seconds)
        await run.settle_call(call_id, output, error)

    async def pause(self, seconds: float) -> None:
        """Let time pass."""
        await asyncio.sleep(seconds)
