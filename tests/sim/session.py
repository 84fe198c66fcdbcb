"""A session as a simulated process: the real core, mailbox, turn and recovery over a port.

What stands here is what `actors/session/actor.py` does around them: what has no answer is said
again when a connection comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from callboard.actors.session.agent_calls import AgentCall
from callboard.actors.session.core import Context, Session, SessionBroken
from callboard.errors import CallboardError, StorageFull
from callboard.ids import parse_ref
from callboard.messages import (
    Acquire,
    Body,
    CancelTurn,
    Deliver,
    LeaseGranted,
    Permit,
    PermitAsk,
    PermitReturn,
    ProcessIdentity,
    Refusal,
    Register,
    Registered,
    Release,
)
from callboard.peer import Credentials
from callboard.wire import Header, decode_body, encode_body, error_body
from tests.sim.agent import Agents
from tests.sim.bus import Arrived, Connected, Disconnected, Link
from tests.sim.kernel import MS, Process, Violation
from tests.sim.storage import Boot, Term

if TYPE_CHECKING:
    from tests.sim.world import World


class Timer(NamedTuple):
    """A time has come, unless the timer was set again."""

    name: str
    setting: int


class SessionProcess(Process):
    """One owner of one session."""

    role = "session"

    def __init__(
        self, world: World, name: str, run: int, text: str, owner: ProcessIdentity
    ) -> None:
        super().__init__(world.kernel, name, world.ended)
        self.world, self.run, self.text, self.owner = world, run, text, owner
        self.plane_id = owner.plane_id
        self.agents = Agents(world.kernel, name, world.tools, self._agent_called)
        self.agents.alive = lambda: self.alive
        self.agents.hold = self._hold
        self.session = Session(self, self.agents, parse_ref(text), owner, world.options.idle_ms)
        peer = Credentials("session", text, owner.nonce)
        self._storage: Link = world.bus.dealer(self, "storage", peer)
        self._gateway: Link = world.bus.dealer(self, "gateway", peer)
        self._asked: dict[str, tuple[Header, Body, Context]] = {}
        self._permit: Header | None = None
        self._count = 0
        self._timers: dict[str, int] = {}
        self._held: list[Callable[[], None]] = []
        self._was_refused = False
        self._is_crossed = False
        """It gave a permit back before its registration was answered: the gateway may take that
        for the next one. One turn too many may run then, until the next one ends."""
        self._registered_at: Process | None = None
        self.owns = False
        """It was granted the lease and has not given it back."""
        self.post(Boot())

    def is_settled(self, gateway: Process) -> bool:
        """Tell whether it runs a turn, and has told this gateway all that it holds."""
        session = self.session
        if self._is_crossed:
            return False
        if self._registered_at is not gateway or not self._gateway.up or session.turn is None:
            return False
        return session.box.permit == "held"

    # --- what comes in ---

    def handle(self, events: Sequence[object]) -> None:
        try:
            if any(isinstance(event, Term) for event in events):
                self.session.stop()
            for event in events:
                self._take(event)
                if not self.alive:
                    return
            self.session.batch_done()
        except SessionBroken as error:
            self._break(error)

    def _take(self, event: object) -> None:
        if isinstance(event, Arrived):
            self._arrived(event)
        elif isinstance(event, Timer):
            if self._timers.get(event.name) == event.setting:
                self.session.timer(event.name)
        elif isinstance(event, Connected):
            self._connected(event.link)
        elif isinstance(event, Disconnected) and event.link == "gateway":
            self._registered_at = None
            self.session.gateway_lost()

    def _connected(self, link: str) -> None:
        if link == "storage":
            self.session.storage_up()
            for header, body, _ in list(self._asked.values()):
                self._storage.send(header, body)
        else:
            self.session.gateway_up()
            if self._permit is not None:
                self._gateway.send(self._permit, encode_body(PermitAsk()))

    def _arrived(self, event: Arrived) -> None:
        header, body = event.header, event.body
        if event.link == "storage":
            found = self._asked.pop(header.cid, None)
            if found is not None:
                assert isinstance(body, Body | CallboardError)
                if isinstance(body, LeaseGranted):
                    self.owns = True
                    self.world.granted(self.text, self, body.epoch)
                elif isinstance(body, StorageFull):
                    self._was_refused = True
                self.session.answered(found[2], body)
            return
        assert isinstance(body, bytes)
        decoded = decode_body(header.kind, body)
        if isinstance(decoded, Deliver):
            self.session.delivered(header.id, decoded)
        elif isinstance(decoded, CancelTurn):
            self.session.cancelled(header.id, decoded)
        elif isinstance(decoded, Registered):
            self._registered_at = self._gateway.server
            self.session.registered()
        elif self._permit is not None and header.cid == self._permit.id:
            self._permit_answered(decoded)

    def _permit_answered(self, answer: Body) -> None:
        if isinstance(answer, Permit) and answer.state == "queued":
            self.session.permit_queued()
            return
        self._permit = None
        if isinstance(answer, Refusal):
            self.session.permit_refused(CallboardError.from_wire(answer.model_dump()))
        else:
            self.session.permit_granted()

    def _agent_called(self, call: AgentCall) -> None:
        """Take a word of the agent's thread, as an event of its own."""
        try:
            self.session.agent_called(call)
            if self.alive:
                self.session.batch_done()
        except SessionBroken as error:
            self._break(error)

    def _break(self, error: SessionBroken) -> None:
        """End, since storage contradicts what this process knows; its successor recovers.

        A request that was refused for want of room may have a copy under way that is not; nothing
        else may lead to this.
        """
        if not self._was_refused:
            raise Violation("contradiction", f"{self.name}: {error}")
        self.kernel.log(self.name, "contradicted", error)
        self.world.count("contradictions")
        self.main_loop_ended()

    def stall(self, us: int) -> None:
        """Let what it says to storage come late."""
        self._storage.stall(us)

    def _hold(self, act: Callable[[], None]) -> bool:
        if self.paused:
            self._held.append(act)
        return self.paused

    def resume(self) -> None:
        super().resume()
        held, self._held = self._held, []
        for act in held:
            act()

    # --- what goes out (`core.Port`) ---

    def _name(self) -> str:
        self._count += 1
        return f"{self.owner.nonce[:12]}-{self._count:x}"

    def ask(self, body: Body, context: Context) -> None:
        if isinstance(body, Release):
            self.owns = False  # it writes nothing any more
        header = Header(body.kind, self._name())
        self._asked[header.id] = header, body, context
        self._storage.send(header, body)

    def tell(self, body: Body) -> None:
        if isinstance(body, Register):
            self._registered_at = None
        self._gateway.send(Header(body.kind), encode_body(body))

    def reply(self, request: str, answer: Body | CallboardError) -> None:
        if isinstance(answer, CallboardError):
            self._gateway.send(Header("error", cid=request), error_body(answer))
        else:
            self._gateway.send(Header(answer.kind, cid=request), encode_body(answer))

    def ask_permit(self) -> None:
        body = PermitAsk()
        self._permit = Header(body.kind, self._name())
        self._gateway.send(self._permit, encode_body(body))

    def drop_permit(self) -> None:
        self._permit = None
        self._is_crossed |= self._registered_at is None
        self.tell(PermitReturn())

    def after(self, ms: int, name: str) -> None:
        """Set a timer; one of the same name is replaced."""
        self._count += 1
        self._timers[name] = self._count
        self.kernel.at(ms * MS, self.post, Timer(name, self._count))

    def now(self) -> int:
        return self.kernel.wall()

    def ticks(self) -> int:
        return self.kernel.now // MS

    def stop_process(self, status: int) -> None:
        self.end(status)

    def log(self, action: str, facts: Mapping[str, object]) -> None:
        self.kernel.log(self.name, action, sorted((k, str(v)) for k, v in facts.items()))


class Rival(Process):
    """A second process that wants a session's lease and nothing else; it ends when it has it."""

    role = "rival"

    def __init__(self, world: World, name: str, text: str, owner: ProcessIdentity) -> None:
        super().__init__(world.kernel, name, world.ended)
        self.world, self.text, self.owner, self.plane_id = world, text, owner, owner.plane_id
        peer = Credentials("session", text, owner.nonce)
        self._storage: Link = world.bus.dealer(self, "storage", peer)
        self._tries = 0

    def handle(self, events: Sequence[object]) -> None:
        for event in events:
            if isinstance(event, Arrived) and isinstance(event.body, LeaseGranted):
                self.world.granted(self.text, self, event.body.epoch)
                self.end(0)
                return
        self._tries += 1
        header = Header(Acquire.kind, f"{self.owner.nonce[:12]}-{self._tries}")
        self._storage.send(header, Acquire(session=self.text, owner=self.owner))
        self.kernel.at(200 * MS, self.post, None)
