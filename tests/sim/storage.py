"""Storage as a simulated process: the real recovery, engine, checkpoints and feeds over ports.

What stands here is what `storage/__main__.py` and `storage/actor.py` do around them, with the
simulator's disk, clock, processes and bus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from callboard import messages as m
from callboard.errors import CallboardError, NotFound
from callboard.limits import JOURNAL_IDLE_MARK_MS, STORAGE_FULL_PROBE_MS
from callboard.storage.disk import Poisoned
from callboard.storage.durable import DurableFile, forget
from callboard.storage.engine import Engine, Options, Reply, Request
from callboard.storage.feeds import Address, Feeds
from callboard.storage.files import SyncJob
from callboard.storage.recovery import recover
from callboard.storage.requests import serves
from callboard.storage.state import SessionState
from callboard.wire import Header, decode_body, encode_body, error_body
from tests.sim.bus import Arrived
from tests.sim.disk import Handle
from tests.sim.kernel import KILLED, MS, Killed, Process, Violation

if TYPE_CHECKING:
    from tests.sim.world import World

HOME: Final = "/home"
DURABLE: Final = "/run/durable"
POISONED: Final = 74
LOCK_HELD: Final = 75
MAINTAIN_MS: Final = 250
PUMP_MS: Final = 2


class Boot(NamedTuple):
    """The process begins."""


class Timer(NamedTuple):
    """A time has come."""

    name: str


class Term(NamedTuple):
    """Somebody sent SIGTERM."""


class JobEnded(NamedTuple):
    """The slow half of a checkpoint has run."""

    job: SyncJob


class Clock:
    """The engine's clock."""

    def __init__(self, world: World) -> None:
        self._kernel = world.kernel

    def now_us(self) -> int:
        return self._kernel.wall()

    def monotonic(self) -> float:
        return self._kernel.now / 1_000_000


class Later:
    """Runs the slow half of a checkpoint some time later, while the engine goes on."""

    def __init__(self, storage: Storage, delay: Callable[[], int]) -> None:
        self._storage, self._delay = storage, delay
        self._job: SyncJob | None = None
        self._error: BaseException | None = None

    def start(self, job: SyncJob) -> None:
        self._job = job
        self._storage.kernel.at(self._delay(), self._begin, job)

    def _begin(self, job: SyncJob) -> None:
        storage = self._storage
        if not storage.alive or self._job is not job:
            return
        if storage.paused:
            storage.kernel.at(10 * MS, self._begin, job)
            return
        try:
            self._run(job)
        except Killed:
            storage.end(KILLED)
        else:
            storage.post(JobEnded(job))

    def _run(self, job: SyncJob) -> None:
        self._job = None
        try:
            job.run()
        except Poisoned as error:
            self._error = error

    def join(self) -> None:
        if self._job is not None:
            self._run(self._job)
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class Storage(Process):
    """The only writer's process."""

    role = "storage"
    engine: Engine
    feeds: Feeds

    def __init__(self, world: World, name: str, run: int, plane_id: str) -> None:
        super().__init__(world.kernel, name, world.ended)
        self.world, self.run, self.plane_id = world, run, plane_id
        self.disk = Handle(world.disk, world.faults, lambda: self.alive)
        self.is_serving = False
        self._timers: set[str] = set()
        self._requests: dict[Address, Request] = {}
        self._epochs: dict[str, int] = {}
        self._busy_until = 0
        self._dealers: dict[str, str] = {}
        self.post(Boot())

    def busy(self) -> int:
        return max(0, self._busy_until - self.kernel.now)

    def handle(self, events: Sequence[object]) -> None:
        self._busy_until = self.kernel.now + self._luck.randint(2, 50) * 100
        try:
            if isinstance(events[0], Boot):
                self._boot()
                events = events[1:]
            if self.alive and self.is_serving:
                self._batch(events)
        except Poisoned as poisoned:
            self.kernel.log(self.name, "poisoned", poisoned)
            self.end(POISONED)

    # --- start ---

    def _boot(self) -> None:
        other = self.world.writer
        if other is not None and other.alive:
            self.end(LOCK_HELD)
            return
        self.world.writer = self
        options = self.world.options
        try:
            forget(self.disk, DURABLE)
            recovered = recover(self.disk, HOME, self.world.fresh, options.open_files)
        except CallboardError as error:
            raise Violation("recovery", f"a legal disk is refused: {error.to_wire()}") from None
        self.world.count("recoveries", not recovered.clean)
        if recovered.sessions.damaged:
            raise Violation("recovery", f"damaged: {recovered.sessions.damaged}")
        self.engine = Engine(
            self.disk,
            Clock(self.world),
            recovered,
            self.world,
            DurableFile(self.disk, DURABLE),
            Options(
                self.plane_id,
                options.segment_bytes,
                options.checkpoint_bytes,
                options.checkpoint_ms,
            ),
            self._release,
            Later(self, lambda: self._luck.randint(0, 400) * 100),
            self.world.fresh,
            log=self._log,
        )
        self.feeds = Feeds(self.engine, self._answer)
        self.is_serving = True
        self._set("mark", JOURNAL_IDLE_MARK_MS)
        self._set("maintain", MAINTAIN_MS)
        self.world.bus.bind("storage", self)

    def _log(self, action: str, facts: object) -> None:
        raise Violation("exception", f"storage {action}: {facts}")

    # --- a batch ---

    def _batch(self, events: Sequence[object]) -> None:
        requests: list[Request] = []
        others: list[tuple[Address, m.Body]] = []
        stop = False
        for event in events:
            if isinstance(event, Arrived):
                self._arrived(event, requests, others)
            elif isinstance(event, Timer):
                self._timers.discard(event.name)
                self._timer(event.name)
            elif isinstance(event, JobEnded):
                self.engine.checkpoints.ended(event.job)
            elif isinstance(event, Term):
                stop = True
        self._note(requests)
        self.feeds.take(self.engine.run(requests))
        self._note_numbers(requests)
        self._requests.clear()
        for address, body in others:
            self._other(address, body)
        if stop:
            self._stop()
        else:
            self._arm()

    def _stop(self) -> None:
        calls, self.world.cut_in_stop = self.world.cut_in_stop, None
        if calls is not None:
            self.world.faults.kill_in = calls
        try:
            self.engine.stop()
        except Killed:
            if calls is not None:
                self.kernel.at(0, self.world.cut_power, 100 * MS)
            raise
        self.world.faults.kill_in = None
        self.end(0)

    def _arrived(
        self, event: Arrived, requests: list[Request], others: list[tuple[Address, m.Body]]
    ) -> None:
        peer, header = event.peer, event.header
        if header.cid:
            return
        self._dealers[peer.routing_id] = peer.role
        address = Address(peer.routing_id, header.id)
        body = event.body
        if isinstance(body, bytes):
            body = decode_body(header.kind, body)
        assert isinstance(body, m.Body)
        if serves(header.kind):
            requests.append(Request(address, peer.role, peer.scope, body))
            if isinstance(body, m.GatewayHello):
                self.feeds.forget_others(peer.routing_id)
        elif peer.role != "gateway":
            self._answer(address, NotFound())
        else:
            others.append((address, body))

    def _note(self, requests: Sequence[Request]) -> None:
        """Keep what the invariants compare the replies with."""
        self._epochs.clear()
        for request in requests:
            assert isinstance(request.token, Address)
            self._requests[request.token] = request
            text = getattr(request.body, "session", "")
            state = self.engine.sessions.cached(text)
            if state is not None and state.lease is not None:
                self._epochs[text] = state.lease.epoch

    def _note_numbers(self, requests: Sequence[Request]) -> None:
        """Keep the numbers that inputs were given, which compaction takes out of the inbox."""
        for request in requests:
            body = request.body
            if isinstance(body, m.Accept | m.Append):
                state = self.engine.sessions.cached(body.session)
                for name, item in state.inbox.items.items() if state is not None else ():
                    self.world.numbers.setdefault((body.session, name), item.n)

    def _other(self, address: Address, body: m.Body) -> None:
        if isinstance(body, m.Subscribe):
            self.feeds.subscribe(address, body)
        elif isinstance(body, m.AwaitInput):
            self.feeds.await_input(address, body)
        elif isinstance(body, m.Forget):
            self.feeds.forget(Address(address.peer, body.request))

    # --- replies ---

    def _release(self, replies: Sequence[Reply]) -> None:
        self._check_replies(replies)
        for token, body in replies:
            assert isinstance(token, Address)
            self._answer(token, body)

    def _check_replies(self, replies: Sequence[Reply]) -> None:
        """Hold replies against the disk and the epochs (SIM-8)."""
        granted = [(token, body) for token, body in replies if isinstance(body, m.Body)]
        journal = self.engine.journal
        if granted and self.world.disk.is_owed(journal.path(journal.number)):
            raise Violation("reply before its sync", granted[0][1].kind)
        if granted and self.disk.failed_journal:
            raise Violation("reply after a failed sync", granted[0][1].kind)
        for token, body in granted:
            assert isinstance(token, Address)
            request = self._requests.get(token)
            if request is None or not isinstance(request.body, m.Append | m.Release):
                continue
            if request.body.epoch < self._epochs.get(request.body.session, 0):
                raise Violation("stale epoch", f"{request.body.kind} got {body.kind}")

    def _answer(self, address: Address, body: m.Body | CallboardError) -> None:
        if not address.request:
            return
        kind = "error" if isinstance(body, CallboardError) else body.kind
        sent: object = body
        if self._dealers.get(address.peer) == "gateway":
            sent = error_body(body) if isinstance(body, CallboardError) else encode_body(body)
        self.world.bus.send("storage", address.peer, Header(kind, cid=address.request), sent)

    # --- time ---

    def _set(self, name: str, ms: int) -> None:
        if name not in self._timers:
            self._timers.add(name)
            self.later(ms, Timer(name))

    def _timer(self, name: str) -> None:
        engine = self.engine
        if name == "mark":
            waits = engine.idle_ms()
            if waits is not None and waits >= JOURNAL_IDLE_MARK_MS:
                engine.mark()
        elif name == "maintain":
            if engine.files.waiting_bytes:
                engine.materialise()
            engine.trim(self._is_pinned)
        elif name == "pump":
            self.feeds.pump()

    def _is_pinned(self, state: SessionState) -> bool:
        return self.feeds.follows(state)

    def _arm(self) -> None:
        engine = self.engine
        if engine.checkpoints.due:
            engine.checkpoints.begin()
        if (waits := engine.idle_ms()) is not None:
            self._set("mark", max(1, int(JOURNAL_IDLE_MARK_MS - waits) + 1))
        if engine.checkpoints.pending or engine.files.waiting_bytes:
            self._set("maintain", STORAGE_FULL_PROBE_MS if engine.files.full else MAINTAIN_MS)
        if self.feeds.catching_up:
            self._set("pump", PUMP_MS)
