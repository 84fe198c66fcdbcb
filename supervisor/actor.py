"""The supervisor's actor: brings policy.py what happened, and does what it instructs.

It is a peer on the bus, with a dealer to storage (epochs, quarantine) and one to the gateway, which
asks it for sessions. Whatever concerns a process goes through the keeper.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, cast

from callboard import messages
from callboard.errors import (
    CallboardError,
    HomeInUse,
    Internal,
    InvalidRequest,
    Overloaded,
    PlaneClosing,
    SessionQuarantined,
    StorageUnavailable,
)
from callboard.home import Order, remove_file
from callboard.ids import fresh_id
from callboard.limits import RESTART_BACKOFF_MS_MAX, SESSION_STOP_MS
from callboard.peer import (
    Arrived,
    Asked,
    BusActor,
    Connected,
    Disconnected,
    Event,
    Io,
    Posted,
    Timer,
    mint_token,
)
from callboard.supervisor import children, policy, tree
from callboard.supervisor.keeper import Began, Ended, Keeper, NotBegun, Said
from callboard.supervisor.residence import Residence
from callboard.supervisor.signals import Signalled
from callboard.wire import Header, decode_body, encode_body, error_body

STORAGE: Final = "storage"
GATEWAY: Final = "gateway"
_RETRY_AFTER_MS: Final = 1_000


class ProgramGone:
    """The program that this plane is embedded in has ended."""


@dataclass(slots=True)
class _Process:
    """What belongs to one run of a child."""

    run: int
    nonce: str
    pid: int = 0
    error: CallboardError | None = None
    """What it said it could not do."""


@dataclass(frozen=True, slots=True)
class _Hello:
    """Context of a request: which run it greets."""

    run: int


@dataclass(frozen=True, slots=True)
class Setup:
    """What a supervisor is given beside its home."""

    starter: socket.socket
    """Where the status line goes."""
    modules: Mapping[str, str]
    """By role, what runs in place of the product's own module; for tests."""
    lifeline: int
    """Read end of the pipe whose other end is the supervisor's alone."""
    pid: int


class Supervisor(BusActor):
    """The process tree of one plane."""

    def __init__(self, io: Io, keeper: Keeper, residence: Residence, setup: Setup) -> None:
        super().__init__(io)
        self._keeper = keeper
        self._at = residence
        self._setup = setup
        self._plane = tree.Plane(residence.settings.resident_sessions)
        self._started_at = time.time_ns() // 1_000
        self._epoch = 0
        self._processes: dict[str, _Process] = {}
        self._timers: dict[str, tree.Event] = {}
        self._asked: Asked[_Hello | tree.Quarantine] = Asked(io, STORAGE)
        self._gateway_up = False
        self._gateway_asked: dict[str, _Hello | tree.TellClosing] = {}
        self._askers: dict[str, list[str]] = {}
        self._told_starter = False
        self._failure: CallboardError | None = None

    def on_start(self) -> None:
        """Begin: storage, the fork process, then the gateway."""
        hello = messages.PlaneHello(plane_id=self._at.plane_id)
        self._asked.ask(hello.kind, encode_body(hello), _Hello(0))
        self._step(tree.Begin())

    def handle(self, events: list[Event]) -> None:
        """Take what has arrived."""
        for event in events:
            match event:
                case Posted(value):
                    self._posted(value)
                case Timer(name):
                    if (due := self._timers.pop(name, None)) is not None:
                        self._step(due)
                case Connected(link):
                    self._connected(link)
                case Disconnected(link):
                    self._disconnected(link)
                case Arrived(link="storage"):
                    self._from_storage(event)
                case Arrived():
                    self._from_gateway(event)
                case _:
                    pass  # what could not be sent is said again when the link is up

    # ---- Deciding, and doing what was decided ----

    def _step(self, event: tree.Event) -> None:
        now = time.monotonic_ns() // 1_000_000
        self._plane, instructions = policy.decide(self._plane, event, now, random.random())
        for instruction in instructions:
            self._do(instruction)

    def _do(self, instruction: tree.Instruction) -> None:
        match instruction:
            case tree.Start():
                self._start(instruction)
            case tree.Signal(name, run, kill):
                number = signal.SIGKILL if kill else signal.SIGTERM
                self._log("child_signalled", child=name, signal=int(number))
                self.io.call_io(partial(self._keeper.signal, name, run, number))
            case tree.After(ms, event):
                name = f"{len(self._timers)}.{fresh_id()}"
                self._timers[name] = event
                self.io.after(ms, name)
            case tree.Granted(session, _):
                self._granted(session)
            case tree.Refused(session, why):
                self._refused(session, why)
            case tree.Down():
                self._down(instruction)
            case tree.Quarantine(session):
                body = messages.Quarantine(
                    session=session, plane_epoch=self._epoch, reason="crash_loop"
                )
                self._log("session_quarantined", session=session)
                self._asked.ask(body.kind, encode_body(body), instruction)
            case tree.StorageGivenUp(detail):
                self._log("storage_given_up", detail=detail)
                self._say(messages.StorageGivenUp(detail=detail))
            case tree.TellClosing():
                self._ask_gateway(messages.Closing(), instruction)
            case tree.PlaneReady():
                self._log("plane_ready", plane=self._at.plane_id)
                self._tell_starter({"ready": self._at.plane_id})
            case tree.End(status):
                self._end(status)

    def _start(self, start: tree.Start) -> None:
        process = _Process(start.run, fresh_id())
        self._processes[start.name] = process
        order = self._order(start, process.nonce)
        if start.role == "session":
            fork = partial(self._keeper.fork, start.name, start.run, order.to_json())
            self.io.call_io(fork)
            return
        program = self._program(start, order)
        self.io.call_io(partial(self._keeper.start, start.name, start.run, program))

    def _program(self, start: tree.Start, order: Order) -> children.Program:
        module = self._setup.modules.get(start.role, start.module)
        inherited = (self._setup.lifeline,)
        if start.role != "fork":
            return children.Program(module, order.to_json(), inherited=inherited)
        session = self._setup.modules.get("session", tree.SPECS["session"].module)
        head = {"session": session, "preload": self._at.settings.preload}
        text = json.dumps(head).encode() + b"\n" + order.to_json()
        return children.Program(module, text, two_way=True, inherited=inherited)

    def _order(self, start: tree.Start, nonce: str) -> Order:
        scope = start.name if start.role == "session" else ""
        on_bus = start.role in ("gateway", "session")
        return Order(
            role=start.role,
            home=str(self._at.home.root),
            runtime=str(self._at.runtime.root),
            plane_id=self._at.plane_id,
            plane_secret=self._at.secret.hex() if start.role in (STORAGE, GATEWAY) else "",
            plane_epoch=self._epoch,
            nonce=nonce,
            token=mint_token(self._at.secret, start.role, scope, nonce) if on_bus else "",
            parent_pid=self._setup.pid,  # of a session: the fork process puts its own there
            liveness_fd=self._setup.lifeline,
            settings=self._at.settings.model_dump_json(),
            operator_token=self._at.operator_token if start.role == GATEWAY else "",
            session=scope,
        )

    def _end(self, status: int) -> None:
        self._log("plane_ended", status=status, detail=self._plane.detail or "")
        failure = self._failure
        if failure is None and status == tree.LOCK_HELD:
            failure = HomeInUse()
        if failure is None:
            why = self._plane.detail or "it was stopped before it was up"
            failure = Internal(f"The plane ended: {why}.")
        self._tell_starter({"error": failure.to_wire(), "message": failure.message})
        self.io.stop(status)

    def _tell_starter(self, fields: dict[str, object]) -> None:
        """Tell whoever started the plane, once."""
        if not self._told_starter:
            self._told_starter = True
            with suppress(OSError):  # it has gone
                self._setup.starter.send(json.dumps(fields).encode())

    # ---- Processes ----

    def _posted(self, value: object) -> None:
        match value:
            case Began(name, run, pid):
                self._began(name, run, pid)
            case NotBegun(name, run):
                self._step(tree.NotStarted(name, run))
            case Ended(name, run, status, why):
                self._ended(name, run, status, why)
            case Said(name, run, line):
                self._said(name, run, line)
            case Signalled(number):
                self._log("signal", signal=number)
                self._step(tree.Stop())
            case ProgramGone():
                self._log("program_gone")
                self._step(tree.Stop())
            case _:
                pass

    def _process(self, name: str, run: int) -> _Process | None:
        process = self._processes.get(name)
        return process if process is not None and process.run == run else None

    def _began(self, name: str, run: int, pid: int) -> None:
        if (process := self._process(name, run)) is not None:
            process.pid = pid
            self._log("child_started", child=name, child_pid=pid, run=run)
            if "/" in name:  # a session: its process is all that can be waited for here
                self._step(tree.Ready(name, run))

    def _ended(self, name: str, run: int, status: int | None, why: str) -> None:
        process = self._process(name, run)
        error = process.error if process is not None else None
        self._log("child_ended", child=name, run=run, status=status, why=why)
        if error is not None:
            why = " ".join([error.code, *(f"{k}={v}" for k, v in error.carried.items())])
            self._failure = error
        if name == GATEWAY:
            self._gateway_up = False
            self._askers.clear()
        if process is not None and "/" not in name:
            self._forget_nonce(process)
        self._step(tree.Exited(name, run, status, why))

    def _said(self, name: str, run: int, line: dict[str, object]) -> None:
        process = self._process(name, run)
        error = line.get("error")
        if process is not None and isinstance(error, dict):
            process.error = CallboardError.from_wire(cast("dict[str, object]", error))
        elif name == "fork" and "ready" in line:
            self._step(tree.Ready(name, run))

    def _down(self, down: tree.Down) -> None:
        process = self._processes.pop(down.session, None)
        if process is None:
            return
        if down.cause == "stopped":  # it gave its lease back, so nobody asks for its identity
            self._forget_nonce(process)
        self._log("session_down", session=down.session, cause=down.cause, status=down.status)
        self._say(
            messages.SessionDown(
                session=down.session,
                routing_id=process.nonce,
                cause=down.cause,
                status=down.status,
                quarantined=down.quarantined,
                restarting=down.restarting,
            )
        )

    def _forget_nonce(self, process: _Process) -> None:
        with suppress(OSError):
            remove_file(self._at.runtime.actors / process.nonce)

    # ---- Storage ----

    def _connected(self, link: str) -> None:
        if link == STORAGE:
            self._asked.resend()
            if self._epoch:
                self._storage_ready()
            return
        self._gateway_up = True
        self._gateway_asked.clear()
        hello = messages.SupervisorHello(plane_epoch=self._epoch, live=self._live())
        self._ask_gateway(hello, _Hello(self._run_of(GATEWAY)))
        if self._plane.children[STORAGE].phase == "spent":
            self._say(messages.StorageGivenUp(detail=self._plane.detail or ""))

    def _disconnected(self, link: str) -> None:
        if link == STORAGE:
            self._asked.lost()
        else:
            self._gateway_up = False

    def _run_of(self, name: str) -> int:
        child = self._plane.children.get(name)
        return child.run if child is not None else 0

    def _storage_ready(self) -> None:
        self._step(tree.Ready(STORAGE, self._run_of(STORAGE)))

    def _from_storage(self, arrived: Arrived) -> None:
        asked = self._asked.answer(arrived.header.cid)
        if asked is None:
            return
        try:
            body = decode_body(arrived.header.kind, arrived.body)
        except CallboardError as error:
            self._log("storage_answer_unreadable", code=error.code)
            return
        match asked, body:
            case _Hello(), messages.PlaneEpoch():
                self._epoch = body.epoch
                self._storage_ready()
            case _Hello(), _:
                self._log("plane_refused", code=getattr(body, "code", ""))
                if isinstance(body, messages.Refusal):
                    self._failure = CallboardError.from_wire(body.model_dump())
                self._step(tree.Stop(tree.REFUSES))
            case tree.Quarantine(session), _:  # a refusal is final as well: there is no session
                self._step(tree.Quarantined(session))

    # ---- Gateway ----

    def _say(self, body: messages.Body) -> None:
        """Tell the gateway; one that is not there hears it from the next hello."""
        if self._gateway_up:
            self.io.send(GATEWAY, Header(body.kind, fresh_id()), encode_body(body))

    def _ask_gateway(self, body: messages.Body, context: _Hello | tree.TellClosing) -> None:
        if self._gateway_up:
            request = fresh_id()
            self._gateway_asked[request] = context
            self.io.send(GATEWAY, Header(body.kind, request), encode_body(body))

    def _answer(self, request: str, body: messages.Body) -> None:
        self.io.send(GATEWAY, Header(body.kind, cid=request), encode_body(body))

    def _live(self) -> list[messages.LiveSession]:
        return [
            messages.LiveSession(session=child.name, routing_id=process.nonce, pid=process.pid)
            for child in policy.sessions(self._plane)
            if child.phase in ("up", "stopping")
            and (process := self._process(child.name, child.run)) is not None
        ]

    def _from_gateway(self, arrived: Arrived) -> None:
        header = arrived.header
        if header.cid:
            self._gateway_answered(header)
            return
        try:
            body = decode_body(header.kind, arrived.body)
            self._asked_by_gateway(header, body)
        except CallboardError as error:
            self.io.send(GATEWAY, Header("error", cid=header.id), error_body(error))

    def _gateway_answered(self, header: Header) -> None:
        match self._gateway_asked.pop(header.cid, None):
            case _Hello(run) if header.kind == "ok":
                self._step(tree.Ready(GATEWAY, run))
            case tree.TellClosing():
                self._step(tree.ClosingTold())
            case _:
                pass

    def _asked_by_gateway(self, header: Header, body: messages.Body) -> None:
        match body:
            case messages.Activate():
                self._askers.setdefault(body.session, []).append(header.id)
                self._step(tree.Wanted(body.session, tuple(body.evict)))
            case messages.SupervisorStatus():
                self._answer(header.id, self.statistics())
            case messages.StopPlane():
                self._log("stop_asked", reason=body.reason)
                self._answer(header.id, messages.Ok())
                if not policy.is_stopping(self._plane):
                    self._step(tree.Stop())
            case _:
                raise InvalidRequest(field="kind", reason="kind")

    def _granted(self, session: str) -> None:
        process = self._processes[session]
        askers = self._askers.pop(session, [])
        answer = messages.Activating(session=session, routing_id=process.nonce, pid=process.pid)
        for request in askers:
            self._answer(request, answer)
        if not askers:
            self._say(
                messages.SessionUp(session=session, routing_id=process.nonce, pid=process.pid)
            )

    def _refused(
        self,
        session: str,
        why: Literal[
            "resident_sessions",
            "processes",
            "session_quarantined",
            "plane_closing",
            "storage_unavailable",
        ],
    ) -> None:
        error: CallboardError
        match why:
            case "resident_sessions":
                error = Overloaded(
                    resource=why, limit=self._plane.slots, retry_after_ms=SESSION_STOP_MS
                )
            case "processes":
                error = Overloaded(resource=why, retry_after_ms=_RETRY_AFTER_MS)
            case "session_quarantined":
                error = SessionQuarantined(reason="crash_loop")
            case "plane_closing":
                error = PlaneClosing()
            case "storage_unavailable":
                error = StorageUnavailable(retry_after_ms=RESTART_BACKOFF_MS_MAX)
        for request in self._askers.pop(session, []):
            self.io.send(GATEWAY, Header("error", cid=request), error_body(error))

    # ---- For people ----

    def _log(self, action: str, **facts: object) -> None:
        self.io.log(action, facts)

    def statistics(self) -> messages.ProcessTree:
        """Give the process tree as it is now."""
        views = [
            messages.ProcessView(role="supervisor", pid=self._setup.pid, state=self._plane.stage)
        ]
        for child in self._plane.children.values():
            process = self._process(child.name, child.run)
            views.append(
                messages.ProcessView(
                    role=child.spec.role,
                    pid=process.pid if process is not None else 0,
                    state=child.phase,
                    session=child.name if child.spec.role == "session" else None,
                    restarts=child.crashes,
                )
            )
        return messages.ProcessTree(
            plane_id=self._at.plane_id,
            plane_epoch=self._epoch,
            started_at=self._started_at,
            processes=views,
            quarantined=list(self._plane.quarantined),
            counters={f"restarts_{what}": n for what, n in self._plane.totals.items()},
            detail=self._plane.detail,
        )
