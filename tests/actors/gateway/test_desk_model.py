"""The desk under anything: every request is answered exactly once, and only what is true.

Storage, sessions and supervisor are played by a few dictionaries that may die, come back, answer
late or not at all, at any step. `Ports.client` asserts that nothing is answered twice; the end of
each run that nothing was left out, and that every receipt's input is durable.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from callboard import messages as m
from callboard.actors.gateway.requests import Client
from callboard.wire import Header
from tests.actors.gateway.world import Fixture, ref, send

NAMES = ("a", "b", "c", "d")
SLOTS = 2


@dataclass
class Process:
    name: str
    routing_id: str
    registered: bool = False
    inbox: list[tuple[Header, m.Body]] = field(default_factory=list[tuple[Header, m.Body]])
    permit: bool = False
    reachable: bool = True


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = Fixture(
            resident_sessions=SLOTS, active_turns=2, turn_queue=2, activation_queue=6
        )
        self.durable: dict[str, set[str]] = {name: set() for name in NAMES}
        self.processes: dict[str, Process] = {}
        self.storage_up = True
        self.given_up = False
        self.closing = False
        self.count = 0
        self.client = self.world.connect()
        self.receipts: list[tuple[str, str]] = []
        self.wants: list[tuple[str, str, list[str]]] = []
        self.sends: dict[tuple[int, str], tuple[str, str]] = {}
        self.watches: set[tuple[int, str]] = set()
        self.unheard: set[tuple[int, str]] = set()
        self.world.ready()
        for name in NAMES[:SLOTS]:
            process = self._fork(name)
            up = m.SessionUp(session=ref(name), routing_id=process.routing_id, pid=3)
            self.world.from_supervisor(up)
            self._register(process)

    names = st.sampled_from(NAMES)

    # ---- Clients ----

    @rule(name=names, repeat=st.booleans(), deadline=st.sampled_from([0, 200, 5_000]))
    def send(self, name: str, repeat: bool, deadline: int) -> None:
        self.count += not repeat
        body = send(name, f"m{self.count}")
        request = self.world.ask(self.client, body, deadline, weight=100)
        self.sends[self.client.conn, request] = (name, body.message_id)

    @rule(name=names, kind=st.sampled_from(["wait", "cancel", "cancel input", "status", "release"]))
    def ask(self, name: str, kind: str) -> None:
        session = ref(name)
        bodies: dict[str, m.Body] = {
            "wait": m.Wait(session=session, message_id="m1"),
            "cancel": m.Cancel(session=session),
            "cancel input": m.Cancel(session=session, message_id="m1"),
            "status": m.Status(),
            "release": m.ReleaseSession(session=session),
        }
        self.world.ask(self.client, bodies[kind], deadline=3_000)

    @rule(name=names)
    def watch(self, name: str) -> None:
        request = self.world.ask(self.client, m.Watch(session=ref(name), from_seq=1))
        self.watches.add((self.client.conn, request))

    @precondition(lambda self: self.watches)
    @rule(data=st.data())
    def unwatch(self, data: st.DataObject) -> None:
        conn, name = data.draw(st.sampled_from(sorted(self.watches)))
        self.world.ask(self.client, m.Unwatch(watch=name))
        if conn == self.client.conn:
            self.watches.discard((conn, name))
            self.unheard.add((conn, name))

    @rule()
    def reconnect(self) -> None:
        gone: Client = self.client
        self.unheard |= {(gone.conn, name) for name in gone.pending}
        self.watches = {one for one in self.watches if one[0] != gone.conn}
        self.world.desk.client_gone(gone)
        self.client = self.world.connect()

    # ---- Storage ----

    @precondition(lambda self: self.storage_up and self.world.ports.to_storage)
    @rule(refuses=st.sampled_from([None, None, None, None, "storage_full", "not_found"]))
    def storage_answers(self, refuses: str | None) -> None:
        header, body = self.world.ports.to_storage.popleft()
        answer = m.Refusal(code=refuses) if refuses else self._of_storage(header, body)
        if answer is not None:
            self.world.from_storage(header, answer)

    def _of_storage(self, header: Header, body: m.Body) -> m.Body | None:
        match body:
            case m.Accept():
                name = body.session.partition("/")[2]
                if name in self.processes:
                    return _lease_held()
                known = body.item.message_id in self.durable[name]
                self.durable[name].add(body.item.message_id)
                return m.Accepted(
                    duplicate=known, item_state="pending", queued=1, runnable=not known
                )
            case m.DiscardInput():
                if body.session.partition("/")[2] in self.processes:
                    return m.Refusal(code="session_in_use")
                return m.CancelResult(status="not_found")
            case m.AwaitInput():
                return m.WaitOutcome(
                    message_id=body.message_id,
                    item_state="acknowledged",
                    input_disposition="acknowledged",
                    terminal_seq=1,
                )
            case m.Subscribe():
                seq = body.from_seq
                return m.Records(session=body.session, first_seq=seq, last_seq=seq, lines=[b"{}\n"])
            case m.Unquarantine():
                return m.Ok()
            case _:
                return None

    @rule()
    def storage_dies(self) -> None:
        if self.storage_up:
            self.storage_up = False
            self.world.ports.to_storage.clear()
            self.world.desk.storage_lost()

    @precondition(lambda self: not self.storage_up and not self.given_up)
    @rule()
    def storage_comes_back(self) -> None:
        self.storage_up = True
        self.world.desk.storage_up()

    @rule(rare=st.integers(0, 40))
    def storage_is_given_up(self, rare: int) -> None:
        if rare == 0 and not self.given_up:
            self.given_up = True
            self.storage_dies()
            self.world.from_supervisor(m.StorageGivenUp(detail="x"))

    # ---- Supervisor ----

    def _route(self) -> None:
        """Bring what was sent to peers to whoever it is for."""
        while self.world.ports.to_peers:
            to, header, body = self.world.ports.to_peers.popleft()
            if isinstance(body, m.Activate):
                evict = [one.partition("/")[2] for one in body.evict]
                self.wants.append((header.id, body.session.partition("/")[2], evict))
            elif isinstance(body, m.SupervisorStatus):
                self.world.from_supervisor(_tree(), cid=header.id)
            else:
                self._to_session(to, header, body)

    def _to_session(self, to: str, header: Header, body: m.Body) -> None:
        process = next((p for p in self.processes.values() if p.routing_id == to), None)
        if process is None or not process.reachable:
            self.world.desk.unreachable(to, header)
            return
        if isinstance(body, m.Permit):
            process.permit = process.permit or body.state == "granted"
        elif isinstance(body, m.Deliver | m.CancelTurn):
            if isinstance(body, m.Deliver) and body.permit:
                assert not process.permit, "two permits for one session"
                process.permit = True
            process.inbox.append((header, body))

    @precondition(lambda self: self.wants)
    @rule(refuses=st.sampled_from([None, None, None, "overloaded", "session_quarantined"]))
    def supervisor_answers(self, refuses: str | None) -> None:
        self._answer_want(refuses)

    def _answer_want(self, refuses: str | None) -> None:
        request, name, evict = self.wants.pop(0)
        if refuses is not None:
            self.world.from_supervisor(m.Refusal(code=refuses), cid=request)
            return
        if name not in self.processes and len(self.processes) >= SLOTS:
            victim = next((one for one in evict if one in self.processes), None)
            if victim is None:
                self.world.from_supervisor(m.Refusal(code="overloaded"), cid=request)
                return
            self._end(victim, "stopped", restarting=False)
        process = self.processes.get(name) or self._fork(name)
        up = m.Activating(session=ref(name), routing_id=process.routing_id, pid=3)
        self.world.from_supervisor(up, cid=request)

    def _fork(self, name: str) -> Process:
        self.count += 1
        made = Process(name, f"{self.count:032x}")
        self.processes[name] = made
        return made

    def _end(self, name: str, cause: str, *, restarting: bool) -> None:
        process = self.processes.pop(name)
        self.world.from_supervisor(
            m.SessionDown.model_validate(
                {
                    "session": ref(name),
                    "routing_id": process.routing_id,
                    "cause": cause,
                    "status": 0,
                    "quarantined": False,
                    "restarting": restarting,
                }
            )
        )

    @precondition(lambda self: self.processes)
    @rule(
        data=st.data(),
        cause=st.sampled_from(["stopped", "crashed", "refused", "parent_lost"]),
        back=st.booleans(),
    )
    def session_ends(self, data: st.DataObject, cause: str, back: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.processes)))
        back = back and cause in ("crashed", "parent_lost")
        self._end(name, cause, restarting=back)
        if back:
            process = self._fork(name)
            up = m.SessionUp(session=ref(name), routing_id=process.routing_id, pid=3)
            self.world.from_supervisor(up)

    @rule()
    def supervisor_says_hello(self) -> None:
        self._hello()

    def _hello(self) -> None:
        live = [
            m.LiveSession(session=ref(p.name), routing_id=p.routing_id, pid=3)
            for p in self.processes.values()
        ]
        self.wants.clear()
        self.world.hello(live)

    # ---- Sessions ----

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def session_registers(self, data: st.DataObject) -> None:
        self._register(self.processes[data.draw(st.sampled_from(sorted(self.processes)))])

    def _register(self, process: Process) -> None:
        process.registered = True
        body = m.Register(
            session=ref(process.name), epoch=1, permit=process.permit, evictable=not process.permit
        )
        self.world.from_session(process.name, body, "r", rid=process.routing_id)

    @precondition(lambda self: any(p.inbox for p in self.processes.values()))
    @rule(data=st.data(), how=st.sampled_from(["does", "does", "does", "gate_closed", "full"]))
    def session_answers(self, data: st.DataObject, how: str) -> None:
        busy = sorted(p.name for p in self.processes.values() if p.inbox)
        process = self.processes[data.draw(st.sampled_from(busy))]
        header, body = process.inbox.pop(0)
        answer: m.Body
        if how != "does":
            answer = m.Refusal(code="gate_closed" if how == "gate_closed" else "inbox_full")
        elif isinstance(body, m.Deliver):
            known = body.item.message_id in self.durable[process.name]
            self.durable[process.name].add(body.item.message_id)
            answer = _receipt(body.item.message_id, duplicate=known)
        else:
            answer = m.CancelResult(status="not_found")
        rid = process.routing_id
        self.world.from_session(process.name, answer, cid=header.id, rid=rid)

    @precondition(lambda self: any(p.registered for p in self.processes.values()))
    @rule(data=st.data(), what=st.sampled_from(["ask", "return", "beat"]))
    def session_speaks(self, data: st.DataObject, what: str) -> None:
        there = sorted(p.name for p in self.processes.values() if p.registered)
        process = self.processes[data.draw(st.sampled_from(there))]
        self.count += 1
        body: m.Body = m.Beat(phase="idle", evictable=not process.permit, pending=0)
        if what == "ask" and not process.permit:
            body = m.PermitAsk()
        elif what == "return" and process.permit:
            process.permit = False
            body = m.PermitReturn()
        request = f"p{self.count}"
        self.world.from_session(process.name, body, request, rid=process.routing_id)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def link_breaks_or_heals(self, data: st.DataObject) -> None:
        process = self.processes[data.draw(st.sampled_from(sorted(self.processes)))]
        process.reachable = not process.reachable

    # ---- Time, and the end ----

    @rule(ms=st.sampled_from([10, 150, 1_100, 4_000]))
    def time(self, ms: int) -> None:
        self.world.pass_time(ms)

    @rule(rare=st.integers(0, 40))
    def close(self, rare: int) -> None:
        if rare == 0:
            self.world.from_supervisor(m.Closing(), "closing")

    @invariant()
    def nothing_is_in_two_places(self) -> None:
        self._route()
        self.world.check()
        held = sum(p.permit for p in self.processes.values())
        assert self.world.desk.permits.held >= 0
        assert held <= len(self.processes)

    @invariant()
    def receipts_are_true(self) -> None:
        for key, (name, message_id) in self.sends.items():
            answer = self.world.ports.answers.get(key)
            if answer is not None and isinstance(answer.body, m.Receipt):
                assert message_id in self.durable[name]

    def calm(self) -> None:
        """Let everybody do what is theirs, at once."""
        world = self.world
        for _ in range(30):
            self._route()
            while self.wants:
                self.supervisor_answers_well()
                self._route()
            for process in list(self.processes.values()):
                self.does_its_part(process)
                self._route()
            for _ in range(len(world.ports.to_storage)):
                header, body = world.ports.to_storage.popleft()
                answer = self._of_storage(header, body)
                if answer is not None and not isinstance(body, m.Subscribe):
                    world.from_storage(header, answer)
            world.pass_time(60)

    def supervisor_answers_well(self) -> None:
        request, name, evict = self.wants[0]
        full = name not in self.processes and len(self.processes) >= SLOTS
        if full and not set(evict) & set(self.processes):
            self.wants.pop(0)
            self.world.from_supervisor(m.Refusal(code="overloaded"), cid=request)
        else:
            self._answer_want(None)

    def does_its_part(self, process: Process) -> None:
        rid = process.routing_id
        if not process.registered:
            self._register(process)
            self._route()
        while process.inbox:
            header, asked = process.inbox.pop(0)
            answer: m.Body = m.CancelResult(status="not_found")
            if isinstance(asked, m.Deliver):
                self.durable[process.name].add(asked.item.message_id)
                answer = _receipt(asked.item.message_id)
            self.world.from_session(process.name, answer, cid=header.id, rid=rid)
            self._route()
        if process.permit:
            process.permit = False
            self.world.from_session(process.name, m.PermitReturn(), rid=rid)
        beat = m.Beat(phase="idle", evictable=True, pending=0)
        self.world.from_session(process.name, beat, rid=rid)

    def end_well(self) -> None:
        """Once nothing fails any more, inputs are taken: nothing is stuck (RLB-23)."""
        world = self.world
        if not self.storage_up:
            self.storage_up = True
            world.desk.storage_up()
        self._hello()
        for process in self.processes.values():
            process.reachable = True
        for _ in range(3):
            self.calm()
        self.nothing_is_left()
        for name in NAMES:
            request = world.ask(self.client, send(name, f"last-{name}"), 20_000, weight=1)
            self.calm()
            answer = world.answer(self.client, request)
            assert isinstance(answer, m.Receipt), (name, answer)
        self.nothing_is_left()

    def nothing_is_left(self) -> None:
        for session in self.world.desk.routes:
            assert not session.held
            assert not session.in_flight
            assert not session.wanted or session.state != "passive", "it is never started"

    def teardown(self) -> None:
        world = self.world
        if not self.given_up and not world.desk.is_closing:
            self.end_well()
        world.pass_time(100_000_000)
        self._route()
        for key in world.asked:
            if key not in self.watches and key not in self.unheard:
                assert key in world.ports.answers, f"{key} was never answered"
        world.desk.shut()
        assert len(world.desk.ledger) == 0
        for key in self.watches - self.unheard:
            assert key in world.ports.answers
        world.check()


def _receipt(message_id: str, *, duplicate: bool = False) -> m.Receipt:
    return m.Receipt(
        accepted=True,
        message_id=message_id,
        duplicate=duplicate,
        item_state="pending",
        delivery="next_turn",
        queued=1,
    )


def _lease_held() -> m.LeaseHeld:
    owner = m.ProcessIdentity(
        pid=9, start_time=1, boot_id="b", pid_ns=1, nonce="0" * 32, plane_id="p"
    )
    return m.LeaseHeld(owner=owner, epoch=1)


def _tree() -> m.ProcessTree:
    return m.ProcessTree(
        plane_id="p",
        plane_epoch=1,
        started_at=1,
        processes=[],
        quarantined=[],
        counters={},
        detail=None,
    )


Model.TestCase.settings = profile(stateful_step_count=40)
TestModel = pytest.mark.rule("RLB-3", "RLB-21", "RLB-23")(Model.TestCase)
