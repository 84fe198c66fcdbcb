"""The real gateway process, between real sockets whose other ends are played by a test."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pykka

from callboard import messages as m
from callboard.config import Settings
from callboard.home import Home, Order, make_directories, prepare_home, prepare_runtime, runtime_of
from callboard.ids import fresh_id
from callboard.messages import URGENT_KINDS
from callboard.peer import (
    Arrived,
    BusActor,
    Connected,
    Disconnected,
    Event,
    Io,
    mint_token,
)
from callboard.supervisor import children
from callboard.wire import Header, decode_body, encode_body
from tests.system.doorclient import DoorClient, Wire, connect

GATEWAY = "callboard.actors.gateway"
TOKEN = "ab" * 32


def ref(name: str) -> str:
    return f"w-{'0' * 32}/{name}"


class Others(BusActor):
    """Everybody but the gateway and its clients."""

    def __init__(self, io: Io, rig: Rig) -> None:
        super().__init__(io)
        self._rig = rig

    def handle(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Arrived(link="storage"):
                    self._storage(event)
                case Arrived(link="supervisor"):
                    self._supervisor(event)
                case Arrived():
                    self._session(event)
                case Connected(link):
                    self._rig.connected(link)
                case Disconnected(link):
                    self._rig.up.discard(link)
                case _:
                    pass

    def _storage(self, event: Arrived) -> None:
        assert event.peer is not None
        body = decode_body(event.header.kind, event.body)
        self._rig.stored.append(body)
        answer = self._rig.storage(body)
        if answer is not None:
            header = Header(answer.kind, cid=event.header.id)
            self.io.send("storage", header, encode_body(answer), event.peer.routing_id)

    def _supervisor(self, event: Arrived) -> None:
        body = decode_body(event.header.kind, event.body)
        self._rig.supervised.append(body)
        answer: m.Body | None = None
        if isinstance(body, m.Ok):
            self._rig.greeted.set()
        elif isinstance(body, m.SupervisorStatus):
            answer = m.ProcessTree(
                plane_id="p",
                plane_epoch=1,
                started_at=1,
                processes=[],
                quarantined=[],
                counters={},
                detail=None,
            )
        elif isinstance(body, m.StopPlane):
            answer = m.Ok()
        if answer is not None:
            header = Header(answer.kind, cid=event.header.id)
            self.io.send("supervisor", header, encode_body(answer))

    def _session(self, event: Arrived) -> None:
        body = decode_body(event.header.kind, event.body)
        self._rig.delivered.append((event.link, event.header, body))
        if isinstance(body, m.Deliver) and event.link not in self._rig.mute:
            known = self._rig.inputs[event.link, body.item.message_id]
            self._rig.inputs[event.link, body.item.message_id] += 1
            answer = m.Receipt(
                accepted=True,
                message_id=body.item.message_id,
                duplicate=known > 0,
                item_state="pending",
                delivery="next_turn",
                queued=1,
            )
            header = Header(answer.kind, cid=event.header.id)
            self.io.send(event.link, header, encode_body(answer))


class Rig:
    def __init__(self, base: Path, settings: Mapping[str, object] | None = None) -> None:
        self.home: Home = prepare_home(base / "h")
        self.runtime = runtime_of(self.home.root)
        prepare_runtime(self.runtime)
        make_directories(self.home.logs)
        self.runtime.operator_token.write_text(TOKEN)
        self.settings = Settings(home=self.home.root, **(settings or {}))  # type: ignore[arg-type]
        self.secret = os.urandom(32)
        self.io = Io(urgent=URGENT_KINDS)
        self.stored: list[m.Body] = []
        self.supervised: list[m.Body] = []
        self.delivered: list[tuple[str, Header, m.Body]] = []
        self.inputs: Counter[tuple[str, str]] = Counter()
        self.mute: set[str] = set()
        self.up: set[str] = set()
        self.sessions: dict[str, str] = {}
        self.greeted = threading.Event()
        self.epochs = 0
        self.storage: Callable[[m.Body], m.Body | None] = self.answer_as_storage
        self.spawned: children.Spawned | None = None
        self._lifeline, self._ours = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        def start(io: Io) -> pykka.ActorRef[Any]:
            return Others.start(io, self)

        self.io.run(start)

    def start(self, *, storage: bool = True) -> Rig:
        if storage:
            self.bind_storage()
        self._connect("supervisor", "supervisor", "")
        self._thread.start()
        self.start_gateway()
        if storage:
            assert self.greeted.wait(20), "the gateway is not ready"
        return self

    def bind_storage(self) -> None:
        self.io.bind_router(
            "storage", self.runtime.storage, self.secret, self.runtime.bus / "test.lock"
        )

    def start_gateway(self, limit: int | None = None) -> None:
        nonce = fresh_id()
        order = Order(
            role="gateway",
            home=str(self.home.root),
            runtime=str(self.runtime.root),
            plane_id="01plane",
            plane_secret=self.secret.hex(),
            plane_epoch=1,
            nonce=nonce,
            token=mint_token(self.secret, "gateway", "", nonce),
            parent_pid=os.getpid(),
            liveness_fd=self._lifeline,
            settings=self.settings.model_dump_json(),
            operator_token=TOKEN,
        )
        program = children.Program(GATEWAY, order.to_json(), inherited=(self._lifeline,))
        self.spawned = children.spawn(program)

    @property
    def pid(self) -> int:
        assert self.spawned is not None
        return self.spawned.pid

    def lives(self) -> bool:
        assert self.spawned is not None
        return not children.has_ended(self.spawned.pidfd)

    def kill_gateway(self) -> int | None:
        return self.stop_gateway(signal.SIGKILL)

    def stop_gateway(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        assert self.spawned is not None
        children.send_signal(self.spawned.pidfd, number)
        return self.reap_gateway()

    def reap_gateway(self, within_s: float = 10) -> int | None:
        assert self.spawned is not None
        assert children.has_ended(self.spawned.pidfd, within_s)
        status = children.reap(self.spawned.pidfd)
        os.close(self.spawned.pidfd)
        os.close(self.spawned.stderr)
        self.spawned.channel.close()
        self.spawned = None
        self.greeted.clear()
        return status

    def stop(self) -> None:
        if self.spawned is not None:
            self.kill_gateway()
        self.io.stop(0)
        self._thread.join(10)
        os.close(self._lifeline)
        if self._ours >= 0:
            os.close(self._ours)

    def cut_lifeline(self) -> None:
        os.close(self._ours)
        self._ours = -1

    # ---- Peers ----

    def _connect(self, link: str, role: str, scope: str) -> str:
        nonce = fresh_id()
        self.sessions[link] = nonce
        token = mint_token(self.secret, role, scope, nonce)
        self.io.connect_dealer(link, self.runtime.gateway, nonce, token)
        return nonce

    def connected(self, link: str) -> None:
        self.up.add(link)
        if link == "supervisor":
            live = [
                m.LiveSession(session=ref(name), routing_id=nonce, pid=4_000)
                for name, nonce in self.sessions.items()
                if name not in ("supervisor", "storage")
            ]
            self.tell("supervisor", m.SupervisorHello(plane_epoch=1, live=live))
        elif link not in ("storage",):
            body = m.Register(session=ref(link), epoch=1, permit=False, evictable=True)
            self.tell(link, body)

    def tell(self, link: str, body: m.Body) -> None:
        header, data = Header(body.kind, fresh_id()), encode_body(body)
        self.io.call_io(lambda: self.io.send(link, header, data))

    def live(self, name: str) -> str:
        """Start a session, and wait until the gateway has registered it."""
        done = threading.Event()
        made: list[str] = []

        def make() -> None:
            made.append(self._connect(name, "session", ref(name)))
            done.set()

        self.io.call_io(make)
        assert done.wait(10)
        up = m.SessionUp(session=ref(name), routing_id=made[0], pid=4_000)
        self.tell("supervisor", up)
        self.until(lambda: any(d[0] == name and d[1].kind == "registered" for d in self.delivered))
        return made[0]

    def answer_as_storage(self, body: m.Body) -> m.Body | None:
        match body:
            case m.GatewayHello():
                self.epochs += 1
                return m.GatewayEpoch(epoch=self.epochs, waiting=[])
            case m.Accept():
                key = (body.session, body.item.message_id)
                known = self.inputs[key]
                self.inputs[key] += 1
                return m.Accepted(
                    duplicate=known > 0, item_state="pending", queued=1, runnable=False
                )
            case m.Create():
                return m.Created(session=body.session, fresh=True)
            case _:
                return None

    # ---- Clients ----

    def connect(self) -> DoorClient:
        return connect(self.runtime.door, self.runtime.operator_token)

    def wire(self) -> Wire:
        return Wire(self.runtime.door)

    def until(self, found: Callable[[], Any]) -> Any:  # noqa: ANN401
        import time

        end = time.monotonic() + 20
        while not (value := found()):
            assert time.monotonic() < end, "it never came"
            time.sleep(0.005)
        return value
