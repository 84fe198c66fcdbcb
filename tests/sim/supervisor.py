"""The supervisor as a simulated process: the real restart policy over simulated processes.

What stands here is what `supervisor/actor.py` and `supervisor/keeper.py` do around the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from callboard import messages as m
from callboard.errors import (
    CallboardError,
    Overloaded,
    PlaneClosing,
    SessionQuarantined,
    StorageUnavailable,
)
from callboard.limits import RESTART_BACKOFF_MS_MAX, SESSION_STOP_MS
from callboard.peer import Credentials
from callboard.supervisor import policy, tree
from callboard.wire import Header, decode_body, encode_body, error_body
from tests.sim.bus import Arrived, Connected, Disconnected, Link
from tests.sim.gateway import Gateway
from tests.sim.kernel import KILLED, MS, Process
from tests.sim.session import SessionProcess
from tests.sim.storage import Boot, Storage, Term

if TYPE_CHECKING:
    from tests.sim.world import World

_ORPHAN_MS: Final = 1_400
"""Within so long everything ends whose supervisor has ended (CHILD_ORPHAN_MS)."""


class Due(NamedTuple):
    """What the policy wanted back later."""

    event: tree.Event


class Ended(NamedTuple):
    """A child's end is proven."""

    name: str
    run: int
    status: int | None


class Began(NamedTuple):
    """A session's process is there."""

    name: str
    run: int


class Hello(NamedTuple):
    """Context of a request: which run it greets."""

    run: int


Asked = Hello | tree.Quarantine | tree.TellClosing


class Fork(Process):
    """The fork process: it is there, or it is not."""

    role = "fork"

    def __init__(self, world: World, name: str, run: int) -> None:
        super().__init__(world.kernel, name, world.ended)
        self.run = run

    def handle(self, events: Sequence[object]) -> None:
        if any(isinstance(event, Term) for event in events):
            self.end(0)


@dataclass(slots=True)
class Child:
    """One run of a child."""

    run: int
    nonce: str
    process: Process | None = None


class Supervisor(Process):
    """One plane's process tree."""

    role = "supervisor"

    def __init__(self, world: World, name: str, plane_id: str) -> None:
        super().__init__(world.kernel, name, world.ended)
        self.world, self.plane_id = world, plane_id
        self.plane = tree.Plane(world.settings.resident_sessions)
        self.children: dict[str, Child] = {}
        self.processes: list[Process] = []
        self.is_over = False
        self._nonce = world.fresh()
        self._epoch = 0
        self._count = 0
        self._asked: dict[str, tuple[Header, m.Body, Asked]] = {}
        self._gateway_asked: dict[str, Asked] = {}
        self._gateway_up = False
        self._askers: dict[str, list[str]] = {}
        peer = Credentials("supervisor", "", self._nonce)
        self._storage: Link = world.bus.dealer(self, "storage", peer)
        self._gateway: Link = world.bus.dealer(self, "gateway", peer)
        self.post(Boot())

    def handle(self, events: Sequence[object]) -> None:
        for event in events:
            if not self.alive:
                return
            match event:
                case Boot():
                    self._ask_storage(m.PlaneHello(plane_id=self.plane_id), Hello(0))
                    self._step(tree.Begin())
                case Due(due):
                    self._step(due)
                case Began(name, run):
                    self._step(tree.Ready(name, run))
                case Ended(name, run, status):
                    self._child_ended(name, run, status)
                case Term():
                    self._step(tree.Stop())
                case Connected(link):
                    self._connected(link)
                case Disconnected("gateway"):
                    self._gateway_up = False
                case Arrived(link="storage", header=header, body=body):
                    assert isinstance(body, m.Body | CallboardError)
                    self._from_storage(header, body)
                case Arrived(header=header, body=bytes(raw)):
                    self._from_gateway(header, raw)
                case _:
                    pass

    # --- deciding, and doing what was decided ---

    def _step(self, event: tree.Event) -> None:
        now = self.kernel.now // MS
        self.plane, instructions = policy.decide(self.plane, event, now, self._luck.random())
        for instruction in instructions:
            self._do(instruction)

    def _do(self, instruction: tree.Instruction) -> None:
        match instruction:
            case tree.Start():
                self._start(instruction)
            case tree.Signal(name, run, kill):
                self._signal(name, run, kill=kill)
            case tree.After(ms, event):
                self.later(ms, Due(event))
            case tree.Granted(session, _):
                self._granted(session)
            case tree.Refused():
                self._refused(instruction)
            case tree.Down():
                self._down(instruction)
            case tree.Quarantine(session):
                self.world.count("quarantines")
                body = m.Quarantine(session=session, plane_epoch=self._epoch, reason="crash_loop")
                self._ask_storage(body, instruction)
            case tree.StorageGivenUp(detail):
                self._say(m.StorageGivenUp(detail=detail))
                self.world.storage_given_up(self)
            case tree.TellClosing():
                self._ask_gateway(m.Closing(), instruction)
            case tree.PlaneReady():
                self.kernel.log(self.name, "plane ready")
            case tree.End(status):
                self.is_over = True
                self.end(status)

    def _start(self, start: tree.Start) -> None:
        child = self.children[start.name] = Child(start.run, self.world.fresh())
        self.kernel.at(self._luck.randint(5, 40) * MS, self._begin, start, child)

    def _begin(self, start: tree.Start, child: Child) -> None:
        """Let a child's process come into being, unless its parent is gone."""
        if not self.alive or self.children.get(start.name) is not child:
            return
        world, name = self.world, f"{start.name.rpartition('/')[2]}.{self.plane_id}.{start.run}"
        if start.role == "storage":
            child.process = Storage(world, name, start.run, self.plane_id)
        elif start.role == "gateway":
            child.process = Gateway(world, name, start.run, child.nonce, self.plane_id)
        elif start.role == "fork":
            child.process = Fork(world, name, start.run)
            self.kernel.at(self._luck.randint(5, 60) * MS, self._ready, start, child)
        else:
            fork = self.children.get("fork")
            if fork is None or fork.process is None or not fork.process.alive:
                self.post(Ended(start.name, start.run, None))
                return
            owner = world.identity(child.nonce, self.plane_id)
            child.process = SessionProcess(world, name, start.run, start.name, owner)
            self.post(Began(start.name, start.run))
        self.kernel.log(self.name, "starts", name)
        world.processes.append(child.process)
        world.nonces[child.nonce] = child.process
        self.processes.append(child.process)

    def _ready(self, start: tree.Start, child: Child) -> None:
        if child.process is not None and child.process.alive:
            self.post(Began(start.name, start.run))

    def _signal(self, name: str, run: int, *, kill: bool) -> None:
        child = self.children.get(name)
        if child is None or child.run != run:
            return
        if child.process is None:  # signalled before it came into being
            self.children.pop(name)
            self.kernel.at(5 * MS, self.post, Ended(name, run, KILLED))
        elif kill:
            self.kernel.at(1 * MS, child.process.end, KILLED)
        else:
            child.process.post(Term())

    def told_of(self, process: Process, status: int) -> None:
        """Learn of a child's end, through its pidfd."""
        for name, child in self.children.items():
            if child.process is process:
                fork = self.children.get("fork")
                lost = "/" in name and (
                    fork is None or fork.process is None or not fork.process.alive
                )
                ended = Ended(name, child.run, None if lost else status)
                self.kernel.at(self._luck.randint(1, 20) * MS, self.post, ended)
                if name == "fork":
                    self._orphan_sessions()

    def _orphan_sessions(self) -> None:
        for name, child in self.children.items():
            if "/" in name and child.process is not None and child.process.alive:
                self.kernel.at(self._luck.randint(0, 300) * MS, child.process.end, KILLED)

    def end(self, status: int) -> None:
        """End; whatever it started ends soon after (FLT-29a)."""
        super().end(status)
        for process in self.processes:
            if process.alive:
                self.kernel.at(self._luck.randint(1, _ORPHAN_MS) * MS, process.end, KILLED)

    def _child_ended(self, name: str, run: int, status: int | None) -> None:
        if name == "gateway":
            self._gateway_up = False
            self._askers.clear()
        self._step(tree.Exited(name, run, status))

    # --- storage ---

    def _name(self) -> str:
        self._count += 1
        return f"{self._nonce[:12]}-{self._count:x}"

    def _ask_storage(self, body: m.Body, context: Asked) -> None:
        header = Header(body.kind, self._name())
        self._asked[header.id] = header, body, context
        self._storage.send(header, body)

    def _connected(self, link: str) -> None:
        if link == "storage":
            for header, body, _ in list(self._asked.values()):
                self._storage.send(header, body)
            if self._epoch:
                self._storage_ready()
            return
        self._gateway_up = True
        self._gateway_asked.clear()
        hello = m.SupervisorHello(plane_epoch=self._epoch, live=self._live())
        self._ask_gateway(hello, Hello(self._run_of("gateway")))
        if self.plane.children["storage"].phase == "spent":
            self._say(m.StorageGivenUp(detail=self.plane.detail or ""))

    def _run_of(self, name: str) -> int:
        child = self.plane.children.get(name)
        return child.run if child is not None else 0

    def _storage_ready(self) -> None:
        self._step(tree.Ready("storage", self._run_of("storage")))

    def _from_storage(self, header: Header, body: m.Body | CallboardError) -> None:
        found = self._asked.pop(header.cid, None)
        if found is None:
            return
        if isinstance(found[2], tree.Quarantine):
            self._step(tree.Quarantined(found[2].session))
        elif isinstance(body, m.PlaneEpoch):
            self._epoch = body.epoch
            self._storage_ready()
        else:
            self._step(tree.Stop(tree.REFUSES))

    # --- gateway ---

    def _say(self, body: m.Body) -> None:
        if self._gateway_up:
            self._gateway.send(Header(body.kind, self._name()), encode_body(body))

    def _ask_gateway(self, body: m.Body, context: Asked) -> None:
        if self._gateway_up:
            request = self._name()
            self._gateway_asked[request] = context
            self._gateway.send(Header(body.kind, request), encode_body(body))

    def _answer(self, request: str, body: m.Body) -> None:
        self._gateway.send(Header(body.kind, cid=request), encode_body(body))

    def _live(self) -> list[m.LiveSession]:
        return [
            m.LiveSession(session=one.name, routing_id=child.nonce, pid=2)
            for one in policy.sessions(self.plane)
            if one.phase in ("up", "stopping")
            and (child := self.children.get(one.name)) is not None
            and child.run == one.run
        ]

    def _from_gateway(self, header: Header, raw: bytes) -> None:
        if header.cid:
            asked = self._gateway_asked.pop(header.cid, None)
            if isinstance(asked, Hello) and header.kind == "ok":
                self._step(tree.Ready("gateway", asked.run))
            elif isinstance(asked, tree.TellClosing):
                self._step(tree.ClosingTold())
            return
        body = decode_body(header.kind, raw)
        if isinstance(body, m.Activate):
            self._askers.setdefault(body.session, []).append(header.id)
            self._step(tree.Wanted(body.session, tuple(body.evict)))

    def _granted(self, session: str) -> None:
        nonce = self.children[session].nonce
        askers = self._askers.pop(session, [])
        for request in askers:
            self._answer(request, m.Activating(session=session, routing_id=nonce, pid=2))
        if not askers:
            self._say(m.SessionUp(session=session, routing_id=nonce, pid=2))

    def _down(self, down: tree.Down) -> None:
        child = self.children.pop(down.session, None)
        if child is not None:
            self._say(
                m.SessionDown(
                    session=down.session,
                    routing_id=child.nonce,
                    cause=down.cause,
                    status=down.status,
                    quarantined=down.quarantined,
                    restarting=down.restarting,
                )
            )

    def _refused(self, refused: tree.Refused) -> None:
        error: CallboardError
        match refused.why:
            case "resident_sessions":
                error = Overloaded(
                    resource=refused.why, limit=self.plane.slots, retry_after_ms=SESSION_STOP_MS
                )
            case "processes":
                error = Overloaded(resource=refused.why, retry_after_ms=1_000)
            case "session_quarantined":
                error = SessionQuarantined(reason="crash_loop")
            case "plane_closing":
                error = PlaneClosing()
            case "storage_unavailable":
                error = StorageUnavailable(retry_after_ms=RESTART_BACKOFF_MS_MAX)
        for request in self._askers.pop(refused.session, []):
            self._gateway.send(Header("error", cid=request), error_body(error))
