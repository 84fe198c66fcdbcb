"""One simulated machine with one home: planes that come and go on it, clients, and trouble.

A run has three parts: work with trouble, calm in which everything must come to rest, and a last
power cut before the home is judged (SIM-6).
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from callboard import home, ids
from callboard.actors.gateway import border
from callboard.config import Settings
from callboard.messages import BusyMode, ProcessIdentity
from callboard.storage import checkpoint, engine, sessions
from tests.sim.agent import Tools
from tests.sim.bus import Bus
from tests.sim.client import Client, Work, ref
from tests.sim.disk import Faults, SimDisk
from tests.sim.gateway import Connection, Gateway
from tests.sim.kernel import KILLED, MS, SECOND, Kernel, Process, Violation
from tests.sim.session import SessionProcess
from tests.sim.storage import Storage, Term
from tests.sim.supervisor import Supervisor

TROUBLE_S: Final = 12
"""How long the nemesis works, in simulated seconds."""
CALM_S: Final = 60
"""Within so long everything must have come to rest (RLB-23)."""
CHECK_MS: Final = 100


@dataclass(frozen=True)
class Options:
    """What the seed draws of the plane's settings and limits (SIM-7)."""

    sessions: int
    inputs: int
    clients: int
    segment_bytes: int
    checkpoint_bytes: int
    checkpoint_ms: int
    open_files: int
    idle_ms: int
    resident: int
    turns: int
    batch_frames: int
    segments_max: int
    dead_bytes: int
    weight: int


def draw_options(luck: random.Random) -> Options:
    """Draw the settings of a run."""
    pick = luck.choice
    return Options(
        sessions=luck.randint(1, 3),
        inputs=luck.randint(4, 9),
        clients=luck.randint(1, 2),
        segment_bytes=pick((2_500, 8_000, 1 << 20)),
        checkpoint_bytes=pick((3_000, 12_000, 1 << 30)),
        checkpoint_ms=pick((700, 5_000, 30_000)),
        open_files=pick((1, 2, 64)),
        idle_ms=pick((300, 2_000, 300_000)),
        resident=pick((1, 2, 8)),
        turns=pick((1, 2, 8)),
        batch_frames=pick((1, 2, 1_024, 1_024)),
        segments_max=pick((2, 3, 16)),
        dead_bytes=pick((150, 3_000, 1 << 20)),
        weight=pick((1, 1 << 28)),
    )


class World:
    """Everything of one run."""

    def __init__(self, seed: int, *, keep: bool = False) -> None:
        self.kernel = Kernel(seed, keep=keep)
        luck = self.kernel.stream("plan")
        self.options = draw_options(luck)
        self.disk = SimDisk()
        self.faults = Faults(self.disk, self.kernel.stream("disk"))
        self.bus = Bus(self.kernel)
        self.tools = Tools()
        self.tools.durable = self._is_call_durable
        self.counts: Counter[str] = Counter()
        self.nonces: dict[str, Process] = {}
        self.processes: list[Process] = []
        self.sessions: set[str] = set()
        """Those whose creation was confirmed."""
        self.numbers: dict[tuple[str, str], int] = {}
        """The places of inputs in their sessions' inboxes."""
        self.writer: Storage | None = None
        self.supervisor: Supervisor | None = None
        self.is_calm = False
        self.is_dark = False
        """The power is off."""
        self.cut_in_stop: int | None = None
        """The power goes at so many calls of storage after it was told to stop."""
        self._ids = self.kernel.stream("ids")
        self._luck = self.kernel.stream("world")
        self.token = self.fresh()
        self.settings = Settings(
            home=Path("/home"),
            resident_sessions=self.options.resident,
            active_turns=self.options.turns,
        )
        self._planes = self._connections = 0
        self._keys = {f"s{n}": self.fresh() for n in range(self.options.sessions)}
        self.clients = [
            Client(self, f"client{n}", works)
            for n, works in enumerate(_plans(luck, self.options, TROUBLE_S))
        ]
        self.start_plane()

    # --- luck and names ---

    def fresh(self) -> str:
        """Make an id."""
        return f"{self._ids.getrandbits(128):032x}"

    def urandom(self, count: int) -> bytes:
        """Stand in for the operating system's."""
        return self._ids.getrandbits(8 * count).to_bytes(count, "big")

    def key_of(self, session: str) -> str:
        """Give the idempotency key of a session's creation."""
        return self._keys[session]

    def count(self, what: str, more: int = 1) -> None:
        """Count something for the report."""
        self.counts[what] += more

    # --- planes ---

    def start_plane(self) -> None:
        """Start a plane, as an operator would; one that runs already keeps the home."""
        if self.is_dark or (self.supervisor is not None and self.supervisor.alive):
            return
        self._planes += 1
        plane_id = f"p{self._planes}"
        self.supervisor = Supervisor(self, f"supervisor.{plane_id}", plane_id)
        self.processes.append(self.supervisor)
        self.kernel.log("plane", plane_id)

    def ended(self, process: Process, status: int) -> None:
        """Take note of a process's end."""
        self.count(f"ends_{process.role}")
        self.bus.ended(process)
        supervisor = self.supervisor
        if process is supervisor:
            self.kernel.at(self._luck.randint(50, 2_000) * MS, self.start_plane)
        elif isinstance(process, Storage | Gateway | SessionProcess) or process.role == "fork":
            for one in self.processes:
                if isinstance(one, Supervisor) and one.alive and process in one.processes:
                    one.told_of(process, status)

    def storage_given_up(self, supervisor: Supervisor) -> None:
        """Stop and start the plane, as an operator would who reads its status (FLT-4)."""
        self.count("storage_given_up")
        self.kernel.at(self._luck.randint(500, 3_000) * MS, supervisor.post, Term())

    def cut_power(self, off_us: int) -> None:
        """End everything at once and lose what is not durable."""
        self.count("power_cuts")
        self.kernel.log("power cut")
        self.is_dark = True
        for process in self.processes:
            process.end(KILLED)
        self.nonces.clear()
        self.disk.cut_power(self.kernel.stream(f"cut {self.kernel.now}"))
        self.kernel.at(off_us, self._power_on)

    def _power_on(self) -> None:
        self.is_dark = False
        self.start_plane()

    # --- owners, as storage asks about them ---

    def identity(self, nonce: str, plane_id: str) -> ProcessIdentity:
        """Say who a process is."""
        return ProcessIdentity(
            pid=2, start_time=1, boot_id="boot", pid_ns=1, nonce=nonce, plane_id=plane_id
        )

    def judge(self, owner: home.Identity) -> home.Verdict:
        """Tell whether an owner lives: a paused one does (FLT-27)."""
        process = self.nonces.get(owner.nonce)
        return "alive" if process is not None and process.alive else "dead"

    def end(self, owner: home.Identity) -> bool:
        """End an owner of an earlier plane (LSE-7)."""
        process = self.nonces.get(owner.nonce)
        if process is not None:
            process.end(KILLED)
        return True

    # --- clients ---

    def connect(self, client: Client) -> Connection | None:
        """Connect a client to the door, if there is one."""
        gateway = self.bus.servers.get("gateway")
        if not isinstance(gateway, Gateway) or not gateway.alive or not gateway.is_open:
            return None
        self._connections += 1
        return Connection(self.kernel, self.bus.rates, self._connections, client, gateway)

    def created(self, session: str) -> None:
        """Take note of a session that a client was told exists."""
        self.sessions.add(session)

    # --- invariants (SIM-8) ---

    def granted(self, text: str, owner: Process, epoch: int) -> None:
        """Check that a lease is granted to one living process at a time."""
        self.count("leases")
        for process in self.processes:
            if (
                isinstance(process, SessionProcess)
                and process is not owner
                and process.text == text
                and process.alive
                and process.owns
            ):
                raise Violation("one owner", f"{owner.name} and {process.name}, epoch {epoch}")

    def check_gateway(self, gateway: Gateway) -> None:
        """Check that queues are within their limits."""
        desk = gateway.desk
        if desk.places.count < 0 or desk.permits.waiting > self.settings.turn_queue:
            raise Violation("queues", f"{desk.places.count} places, {desk.permits.waiting} waiting")
        self.check_permits(gateway)

    def check_permits(self, gateway: Gateway) -> None:
        """Check that whoever runs a turn has a permit, as far as this gateway can know."""
        desk = gateway.desk
        for process in self.processes:
            if not isinstance(process, SessionProcess) or not process.alive:
                continue
            route = desk.routes.get(process.text)
            known = route is not None and route.routing_id == process.owner.nonce
            if known and process.is_settled(gateway) and not desk.permits.holds(process.text):
                raise Violation("permits", f"{process.name} runs a turn without a permit")

    def _is_call_durable(self, session: str, call_id: str) -> bool:
        """Tell whether a call stands in synced bytes of the journal or of its transcript."""
        mark = f'"{call_id}"'.encode()
        files = [f"/home/sessions/{session}/transcript.jsonl"]
        files += [path for path in self.disk.names if path.startswith("/home/journal/")]
        return any(
            mark in self.disk.names[path].durable for path in files if path in self.disk.names
        )

    # --- a run ---

    def run_until(self, us: int) -> None:
        """Let time pass.

        Raises:
            Violation: in the calm, nothing can ever happen again and not all is done (SIM-2).

        """
        while self.kernel.now < us:
            if self.kernel.is_idle:
                if self.is_calm and not self._is_at_rest():
                    raise Violation("deadlock", self._what_is_left())
                self.kernel.now = us
            else:
                self.kernel.step()

    def calm(self) -> None:
        """End all trouble and let everything come to rest.

        Raises:
            Violation: it does not, or not in time.

        """
        self.is_calm = True
        self.cut_in_stop = None
        self.faults.calm()
        self.bus.rates.calm()
        for process in self.processes:
            process.resume()
        self.kernel.log("calm")
        end = self.kernel.now + CALM_S * SECOND
        while not self._is_at_rest():
            if self.kernel.now > end:
                raise Violation("liveness", self._what_is_left())
            self.run_until(self.kernel.now + CHECK_MS * MS)

    def _is_at_rest(self) -> bool:
        return all(client.is_done for client in self.clients) and not self._unsettled()

    def _unsettled(self) -> list[str]:
        storage = self.bus.servers.get("storage")
        if not isinstance(storage, Storage):
            return ["no storage"]
        left: list[str] = []
        for session in sorted(self.sessions):
            state = storage.engine.sessions.get(ref(session))
            if state is None:
                raise Violation("receipts", f"{session} was created and is gone")
            if state.fold.turn is not None:
                left.append(f"{session}: turn {state.fold.turn.turn_id}")
            if state.fold.quarantine is not None and self.is_calm:
                self._release(session)
            left += [
                f"{session}: {name}" for name in state.inbox.items if name not in state.fold.held
            ]
        return left

    def _release(self, session: str) -> None:
        """Clear a quarantine, as an operator would."""
        client = self.clients[0]
        if not any(w.kind == "release_session" and not w.done for w in client.open):
            client.want(Work("release_session", session))

    def _what_is_left(self) -> str:
        works = [
            f"{client.name}: {work.kind} {work.session} {work.message_id}"
            for client in self.clients
            for work in client.open
            if not work.done and work.kind != "watch"
        ]
        return "; ".join([*works, *self._unsettled()])


def _plans(luck: random.Random, options: Options, seconds: int) -> list[list[tuple[int, Work]]]:
    """Draw what clients do, and when, in milliseconds."""
    names = [f"s{n}" for n in range(options.sessions)]
    plans: list[list[tuple[int, Work]]] = [
        [(luck.randint(0, 200), Work("create_session", name)) for name in names]
        for _ in range(options.clients)
    ]
    modes: tuple[BusyMode, ...] = ("steer", "steer", "queue", "interrupt")
    for n in range(options.inputs):
        plan, name = luck.choice(plans), luck.choice(names)
        at = luck.randint(0, seconds * 900)
        if luck.random() < 0.4 and plan:
            at = plan[-1][0]  # together with another one: batches
        again = luck.choice((0, 0, 0, 1, 2))
        text = luck.choice(("hi", "do it", "x" * luck.randint(1, 900)))
        plan.append((at, Work("send", name, f"m{n}", text, luck.choice(modes), again)))
        if luck.random() < 0.3:
            plan.append((at, Work("wait", name, f"m{n}")))
    if luck.random() < 0.3:
        plans[0].append((luck.randint(0, seconds * 800), Work("watch", luck.choice(names))))
    for _ in range(luck.choice((0, 0, 1, 2))):
        keep = luck.choice(("", "keep"))
        work = Work("cancel", luck.choice(names), text=keep)
        luck.choice(plans).append((luck.randint(500, seconds * 900), work))
    return plans


@contextmanager
def unreal(world: World) -> Generator[None]:
    """Give the machines the simulator's time and luck, and the limits that the seed drew."""
    options = world.options
    patches: list[tuple[Any, str, object]] = [
        (ids, "os", SimpleNamespace(urandom=world.urandom, fsencode=os.fsencode)),
        (ids, "time", SimpleNamespace(time_ns=lambda: world.kernel.wall() * 1_000)),
        (border, "time", SimpleNamespace(time_ns=lambda: world.kernel.wall() * 1_000)),
        (border, "canonical_workspace", str),
        (engine, "COMMIT_BATCH_FRAMES_MAX", options.batch_frames),
        (engine, "JOURNAL_SEGMENTS_MAX", options.segments_max),
        (checkpoint, "INBOX_DEAD_BYTES_MAX", options.dead_bytes),
        (sessions, "WEIGHT_MAX", options.weight),
    ]
    before = [getattr(place, name) for place, name, _ in patches]
    for place, name, value in patches:
        setattr(place, name, value)
    try:
        yield
    finally:
        for (place, name, _), value in zip(patches, before, strict=True):
            setattr(place, name, value)
