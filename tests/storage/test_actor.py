"""The shell: which message gets which answer, what waits for what, and how it ends."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import cast

import pytest

from callboard import messages as m
from callboard.errors import CallboardError
from callboard.limits import JOURNAL_IDLE_MARK_MS
from callboard.peer import Arrived, Credentials, Event, Io, Posted, Timer, Unreachable
from callboard.storage import actor as actor_module
from callboard.storage import requests as requests_module
from callboard.storage import sessions as sessions_module
from callboard.storage.actor import (
    LINK,
    STOP,
    Done,
    JobEnded,
    StorageActor,
    ThreadJobs,
    ThreadRunner,
)
from callboard.storage.checkpoint import InlineRunner, Runner
from callboard.storage.engine import Engine, News
from callboard.storage.indexing import Catalog
from callboard.wire import Header, decode_body, encode_body
from tests.storage.memory_disk import LoseAll
from tests.storage.second_reader import read_home
from tests.storage.world import World, item, ref


class FakeIo:
    """Takes what an actor sends and sets."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Header, bytes]] = []
        self.timers: dict[str, int] = {}
        self.status: int | None = None
        self.calls: list[Callable[[], None]] = []
        self.posted: list[object] = []
        self.stopping = False
        self.flushes = 0

    def send(self, link: str, header: Header, body: bytes, to: str = "") -> None:
        assert link == LINK
        self.sent.append((to, header, body))

    def flush(self) -> None:
        self.flushes += 1

    def after(self, ms: int, name: str) -> None:
        self.timers[name] = ms

    def stop(self, status: int) -> None:
        self.status = status

    def call_io(self, function: Callable[[], None]) -> None:
        self.calls.append(function)

    def post(self, value: object) -> None:
        self.posted.append(value)


class FakeCatalog:
    def __init__(self) -> None:
        self.dirty = False
        self.flushed = 0
        self.closed = False

    def touched(self, news: Iterable[News]) -> None:
        self.dirty = self.dirty or bool(list(news))

    def flush(self, engine: Engine) -> None:
        self.dirty = False
        self.flushed += 1

    def close(self) -> None:
        self.closed = True


class Stage:
    """An actor without threads, and peers that talk to it."""

    def __init__(self, runner: Callable[[], Runner] = InlineRunner) -> None:
        self.world = World(runner=runner)
        self.io, self.catalog = FakeIo(), FakeCatalog()
        self.lines: list[tuple[str, Mapping[str, object]]] = []
        self.actor = StorageActor(
            cast("Io", self.io),
            self.world.engine,
            cast("Catalog", self.catalog),
            lambda action, facts: self.lines.append((action, facts)),
        )
        self.actor.on_start()
        self.count = 0

    def event(self, body: m.Body, role: str = "", scope: str = "", name: str = "") -> Arrived:
        self.count += 1
        role = role or ("session" if body.kind in ("acquire", "append") else "gateway")
        scope = scope or (getattr(body, "session", "") if role == "session" else "")
        peer = Credentials(role, scope, f"{role}-1")
        header = Header(body.kind, name or f"r{self.count}")
        return Arrived(LINK, peer, header, encode_body(body))

    def handle(self, *events: Event) -> list[tuple[str, m.Body]]:
        first = len(self.io.sent)
        self.actor.handle(list(events))
        return [
            (header.cid, decode_body(header.kind, body)) for _, header, body in self.io.sent[first:]
        ]

    def ask(self, body: m.Body, **more: str) -> m.Body:
        ((_, answer),) = self.handle(self.event(body, **more))
        return answer

    def prepare(self) -> str:
        hello = self.ask(m.GatewayHello(nonce="a" * 32))
        assert isinstance(hello, m.GatewayEpoch)
        self.world.gateway = hello.epoch
        body = self.world.creation()
        assert isinstance(self.ask(body), m.Created)
        return body.session


def test_a_batch_is_answered_request_by_request() -> None:
    stage = Stage()
    text = stage.prepare()
    events = [stage.event(stage.world.acceptance(text, f"m{n}")) for n in range(3)]
    answers = stage.handle(*events)
    assert [cid for cid, _ in answers] == [event.header.id for event in events]
    assert all(isinstance(body, m.Accepted) for _, body in answers)
    assert stage.catalog.dirty
    assert "index" in stage.io.timers
    stage.handle(Timer("index"))
    assert stage.catalog.flushed == 1


@pytest.mark.rule("FLT-54", "ECX-6")
def test_what_is_not_for_it_is_refused() -> None:
    stage = Stage()
    text = stage.prepare()

    def code(body: m.Body) -> str:
        assert isinstance(body, m.Refusal)
        return body.code

    assert code(stage.ask(m.Status())) == "invalid_request"
    watch = m.Subscribe(session=text, from_seq=1)
    assert code(stage.ask(watch, role="session", scope=text)) == "not_found"
    assert code(stage.ask(watch, role="supervisor")) == "not_found"
    event = stage.event(watch)
    broken = Arrived(event.link, event.peer, event.header, b"\xc1")
    ((_, answer),) = stage.handle(broken)
    assert code(answer) == "invalid_request"
    assert stage.handle(Arrived(LINK, None, Header("accept", "x"), b"")) == []
    assert stage.handle(Arrived(LINK, event.peer, Header("ok", cid="x"), b"\x80")) == []
    silent = Arrived(LINK, event.peer, Header("forget"), encode_body(m.Forget(request="nothing")))
    assert stage.handle(silent) == []


def test_followers_and_waiters_come_behind_the_batch_that_brought_them() -> None:
    stage = Stage()
    text = stage.prepare()
    wait = stage.event(m.AwaitInput(session=text, message_id="m1"), name="wait")
    watch = stage.event(m.Subscribe(session=text, from_seq=1), name="watch")
    answers = stage.handle(wait, watch, stage.event(stage.world.acceptance(text, "m1")))
    assert [type(body) for _, body in answers] == [m.Accepted]
    assert "pump" in stage.io.timers
    ((cid, body),) = stage.handle(Timer("pump"))
    assert cid == "watch"
    assert isinstance(body, m.Records)
    discard = m.DiscardInput(
        session=text, gateway_epoch=stage.world.gateway, message_id="m1", reason="discarded"
    )
    answers = stage.handle(stage.event(discard, name="d"))
    assert [(cid, type(body)) for cid, body in answers] == [
        ("d", m.CancelResult),
        ("watch", m.Records),
        ("wait", m.WaitOutcome),
    ]
    stage.handle(stage.event(m.Forget(request="watch")))
    assert len(stage.handle(stage.event(stage.world.acceptance(text, "m2")))) == 1


@pytest.mark.rule("WCH-1")
def test_a_follower_whose_queue_is_full_is_told_so() -> None:
    stage = Stage()
    text = stage.prepare()
    stage.handle(stage.event(m.Subscribe(session=text, from_seq=1), name="watch"))
    lost = Unreachable(LINK, "gateway-1", Header("records", cid="watch"))
    ((cid, answer),) = stage.handle(lost)
    assert cid == "watch"
    assert isinstance(answer, m.Refusal)
    assert answer.code == "overloaded"
    assert stage.handle(lost) == []


def test_an_answer_that_finds_no_room_is_sent_again() -> None:
    stage = Stage()
    text = stage.prepare()
    ((cid, answer),) = stage.handle(stage.event(stage.world.acceptance(text, "m1")))
    lost = Unreachable(LINK, "gateway-1", Header("accepted", cid=cid))
    for _ in range(3):
        assert stage.handle(lost) == []
        assert stage.handle(Timer("again")) == [(cid, answer)]
    assert stage.handle(Timer("again")) == []
    assert stage.handle(Unreachable(LINK, "gateway-1", Header("ok", cid="unknown"))) == []


def test_a_peer_that_is_gone_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_module, "_AGAIN_MAX", 3)
    stage = Stage()
    ((cid, _),) = stage.handle(stage.event(m.GatewayHello(nonce="a" * 32)))
    lost = Unreachable(LINK, "gateway-1", Header("gateway_epoch", cid=cid))
    tries = 0
    while True:
        stage.handle(lost)
        if not stage.handle(Timer("again")):
            break
        tries += 1
    assert tries == 3


@pytest.mark.rule("FLT-8")
def test_a_closing_mark_is_written_when_nothing_follows() -> None:
    stage = Stage()
    stage.prepare()
    segment = "/home/journal/0001.log"
    assert stage.io.timers["mark"] == pytest.approx(JOURNAL_IDLE_MARK_MS, abs=2)  # pyright: ignore[reportUnknownMemberType]
    size = len(stage.world.disk.content(segment))
    stage.world.clock.pass_ms(100)
    stage.handle(Timer("mark"))
    assert len(stage.world.disk.content(segment)) == size
    assert stage.io.timers["mark"] == JOURNAL_IDLE_MARK_MS - 100 + 1
    stage.world.clock.pass_ms(101)
    stage.handle(Timer("mark"))
    assert len(stage.world.disk.content(segment)) == size + 32


@pytest.mark.rule("FLT-10")
def test_a_checkpoint_runs_beside_and_is_finished_by_its_message() -> None:
    jobs: list[ThreadRunner] = []
    io = FakeIo()

    def runner() -> Runner:
        jobs.append(ThreadRunner(cast("Io", io)))
        return jobs[-1]

    stage = Stage(runner)

    def running() -> bool:
        return stage.world.engine.checkpoints.running

    text = stage.prepare()
    stage.ask(stage.world.acceptance(text, "m1"))
    stage.world.clock.pass_ms(30_000)
    stage.handle(Timer("maintain"))
    assert running()
    jobs[-1].join()
    for call in io.calls:
        call()
    (ended,) = io.posted
    assert isinstance(ended, JobEnded)
    stage.handle(Posted(ended))
    assert not running()
    assert stage.world.engine.counters.checkpoints == 1
    stage.handle(Posted(ended))


@pytest.mark.rule("FLT-8")
def test_it_answers_what_has_come_and_then_stops_in_order() -> None:
    stage = Stage()
    text = stage.prepare()
    answers = stage.handle(Posted(STOP), stage.event(stage.world.acceptance(text, "m1")))
    assert [type(body) for _, body in answers] == [m.Accepted]
    assert stage.io.status == 0
    assert stage.catalog.closed
    assert stage.lines[-1][0] == "stopped"
    assert stage.lines[-1][1]["clean"] is True
    assert stage.handle(stage.event(stage.world.acceptance(text, "m2"))) == []
    stage.world.crash(LoseAll())
    assert list(read_home(stage.world.disk.home())[text].live) == ["m1"]


@pytest.mark.rule("FLT-3")
def test_a_poisoned_engine_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    text = stage.prepare()

    class Ended(BaseException):
        pass

    def exit_now(status: int) -> None:
        raise Ended(status)

    def fault(name: str, path: str) -> None:
        if name == "datasync":
            raise OSError(errno.EIO, path)

    monkeypatch.setattr("callboard.storage.actor.os._exit", exit_now)
    stage.world.disk.fault = fault
    first = len(stage.io.sent)
    with pytest.raises(Ended) as caught:
        stage.handle(stage.event(stage.world.acceptance(text, "m1")))
    assert caught.value.args == (74,)
    assert stage.io.sent[first:] == []
    assert stage.lines == [("poisoned", {"level": "error", "cause": "sync_journal: EIO"})]


@pytest.mark.rule("DUR-8")
def test_a_request_that_cannot_be_planned_is_refused_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    lines: list[tuple[str, Mapping[str, object]]] = []

    def log(action: str, facts: Mapping[str, object]) -> None:
        lines.append((action, facts))

    world.engine.log = log
    text = world.create()
    before = world.disk.home()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("with a secret in it")

    monkeypatch.setattr(requests_module, "_startable", fail)
    first, second = world.batch([world.acceptance(text, "m1"), world.creation("s2")])
    assert isinstance(first, CallboardError)
    assert first.code == "internal"
    assert isinstance(second, m.Created)
    assert before.items() <= {**world.disk.home(), **before}.items()
    ((action, facts),) = lines
    assert action == "plan_failed"
    assert facts["correlation_id"] == first.carried["correlation_id"]
    assert "secret" not in str(facts)


def test_states_that_nobody_uses_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "WEIGHT_MAX", 40_000)
    world = World()
    texts = [world.create(f"s{n}") for n in range(20)]
    world.acquire(texts[0])
    for text in texts[1:]:
        world.accept(text, "m1", "x" * 500)
    pinned = texts[1]
    world.engine.trim(lambda state: state.text == pinned)
    kept = [text for text in texts if world.engine.sessions.cached(text) is not None]
    assert texts[0] in kept
    assert pinned in kept
    assert texts[19] in kept
    assert len(kept) < 12
    for text in texts[1:]:
        answer = world.accept(text, "m1", "x" * 500)
        assert isinstance(answer, m.Accepted)
        assert answer.duplicate
    assert item("m1").message_id == "m1"
    assert ref("s0") == texts[0]


@pytest.mark.rule("FLT-2")
def test_a_flood_is_shared_out_over_batches_and_nothing_is_left() -> None:
    """One session has sent 1,500 requests, another one: the other is in the first batch."""
    stage = Stage()
    flooded = stage.prepare()
    other = stage.ask(stage.world.creation("s2"))
    assert isinstance(other, m.Created)
    events: list[Event] = [
        stage.event(m.Lookup(session=flooded, message_id=f"m{n}", digest="0" * 64), role="session")
        for n in range(1_500)
    ]
    last = stage.event(stage.world.acceptance(other.session, "m1"))
    answers = stage.handle(*events, last)
    assert last.header.id in {cid for cid, _ in answers}
    assert len(answers) < 1_501
    assert len(stage.io.posted) == 1
    while stage.io.posted:
        answers += stage.handle(Posted(stage.io.posted.pop()))
    assert len({cid for cid, _ in answers}) == len(answers) == 1_501
    assert all(not isinstance(body, m.Refusal) for _, body in answers)


def test_a_stop_answers_everything_that_was_received() -> None:
    stage = Stage()
    text = stage.prepare()
    events: list[Event] = [
        stage.event(m.Lookup(session=text, message_id=f"m{n}", digest="0" * 64), role="session")
        for n in range(3_000)
    ]
    answers = stage.handle(*events, Posted(STOP))
    assert len(answers) == 3_000
    assert stage.io.status == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_beside_the_actor_always_comes_to_its_end_there(fails: bool) -> None:
    """One that fails in a way nobody foresaw ends the process; nobody waits for it for ever."""
    io = FakeIo()
    ended: list[object] = []
    called = threading.Event()
    call_io = io.call_io

    def heard(function: Callable[[], None]) -> None:
        call_io(function)
        called.set()

    io.call_io = heard  # type: ignore[method-assign]

    class Job:
        def run(self) -> None:
            if fails:
                raise MemoryError

    job = Job()
    ThreadJobs(cast("Io", io)).start(job, ended.append)
    assert called.wait(10)
    (call,) = io.calls
    call()
    (done,) = io.posted
    assert isinstance(done, Done)
    if fails:
        with pytest.raises(MemoryError):
            done.tell()
    else:
        done.tell()
    assert ended == ([] if fails else [job])
