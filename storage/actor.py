"""The storage actor's shell: messages in, engine batches, messages out; the only writer's process.

All that has arrived makes one batch. A poisoned engine ends the process at once with 74: nothing
more is answered, nothing more is touched (FLT-3c).
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn

from callboard.errors import CallboardError, InvalidRequest, NotFound, Overloaded
from callboard.home import open_descriptors
from callboard.levels import descriptors
from callboard.limits import (
    JOURNAL_IDLE_MARK_MS,
    STORAGE_FULL_PROBE_MS,
    STORAGE_LEVELS_MS,
    STORAGE_QUEUE_FRAMES_MAX,
)
from callboard.logs import Log
from callboard.messages import (
    AwaitInput,
    Body,
    Forget,
    GatewayHello,
    StageRecords,
    StorageLevels,
    StoreArtifact,
    Subscribe,
)
from callboard.peer import Arrived, BusActor, Event, Io, Posted, Timer, Unreachable
from callboard.storage.backlog import Backlog
from callboard.storage.beside import J
from callboard.storage.disk import Poisoned
from callboard.storage.engine import Engine, News, Reply, Request
from callboard.storage.feeds import Address, Feeds
from callboard.storage.files import SyncJob
from callboard.storage.indexing import Catalog
from callboard.storage.requests import serves
from callboard.wire import Header, decode_body, decode_trusted, encode_body, error_body

LINK: Final = "storage"
POISONED: Final = 74
STOP: Final = object()
"""Posted when the process shall stop in order."""
_MARK, _MAINTAIN, _PUMP, _AGAIN, _INDEX = "mark", "maintain", "pump", "again", "index"
_LEVELS: Final = "levels"
_GO_ON: Final = object()
"""Posted to itself while requests wait for the next batch."""
_FEW: Final = 8
"""Requests that are not worth sharing out."""
_MAINTAIN_MS: Final = 250
_PUMP_MS: Final = 2
_AGAIN_MS: Final = 20
_INDEX_MS: Final = 50
_AGAIN_MAX: Final = 500
"""How often an answer is sent again to a peer whose queue is full: for ten seconds."""
_SENT_MAX: Final = 2_048
_SENT_BYTES_MAX: Final = 16_777_216


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The slow half of a checkpoint has run."""

    job: SyncJob


class ThreadRunner:
    """Runs the slow half of a checkpoint beside the actor, so that acknowledgements go on."""

    def __init__(self, io: Io) -> None:
        self._io = io
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: SyncJob) -> None:
        """See Runner."""
        self._thread = threading.Thread(target=self._run, args=(job,), name="sync", daemon=True)
        self._thread.start()

    def _run(self, job: SyncJob) -> None:
        try:
            job.run()
        except BaseException as error:
            self._error = error
        self._io.call_io(lambda: self._io.post(JobEnded(job)))

    def join(self) -> None:
        """See Runner."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


@dataclass(frozen=True, slots=True)
class Done:
    """A job has run beside the actor; `tell` says so to whoever began it."""

    tell: Callable[[], None]


class ThreadJobs:
    """Runs each job in a thread of its own."""

    def __init__(self, io: Io) -> None:
        self._io = io

    def start(self, job: J, ended: Callable[[J], None]) -> None:
        """See storage.beside.Runner."""

        def run() -> None:
            failure: BaseException | None = None
            try:
                job.run()
            except BaseException as error:
                failure = error

            def tell() -> None:
                if failure is not None:
                    raise failure  # in the actor: its process ends, and no job is waited for
                ended(job)

            self._io.call_io(lambda: self._io.post(Done(tell)))

        threading.Thread(target=run, name="beside", daemon=True).start()


class _Answer(NamedTuple):
    kind: str
    body: bytes
    tries: int = 0


class _Sent:
    """The last answers, in case one cannot be delivered because its peer's queue is full."""

    def __init__(self) -> None:
        self._sent: OrderedDict[Address, _Answer] = OrderedDict()
        self._bytes = 0
        self._waiting: dict[Address, _Answer] = {}

    def add(self, address: Address, answer: _Answer) -> None:
        """Remember an answer that is sent now."""
        if (old := self._sent.pop(address, None)) is not None:
            self._bytes -= len(old.body)
        self._sent[address] = answer
        self._bytes += len(answer.body)
        while len(self._sent) > _SENT_MAX or self._bytes > _SENT_BYTES_MAX:
            self._bytes -= len(self._sent.popitem(last=False)[1].body)

    def undelivered(self, address: Address) -> bool:
        """Keep an answer for another try; false if there is nothing to keep."""
        answer = self._sent.get(address)
        if answer is None or answer.tries >= _AGAIN_MAX or len(self._waiting) >= _SENT_MAX:
            return False
        self._waiting[address] = answer._replace(tries=answer.tries + 1)
        return True

    def again(self) -> list[tuple[Address, _Answer]]:
        """Take those that are to be sent again."""
        found, self._waiting = self._waiting, {}
        for address, answer in found.items():
            self.add(address, answer)
        return list(found.items())


class StorageActor(BusActor):
    """Owns the engine; one batch for each time it is woken."""

    def __init__(self, io: Io, engine: Engine, catalog: Catalog, log: Log) -> None:
        """Take over a home that was recovered."""
        super().__init__(io)
        self._engine, self._catalog, self._log = engine, catalog, log
        self._feeds = Feeds(engine, self._answer)
        self._sent = _Sent()
        self._timers: set[str] = set()
        self._stopped = False
        self._backlog = Backlog[Request]()
        self._gateway = ""
        self._alarms: frozenset[str] = frozenset()
        engine.release = self._release
        engine.artifacts.runner = engine.staging.runner = ThreadJobs(io)

    def on_start(self) -> None:
        """Begin."""
        self._set(_MARK, JOURNAL_IDLE_MARK_MS)
        self._set(_MAINTAIN, _MAINTAIN_MS)

    def handle(self, events: list[Event]) -> None:
        """Answer a batch; behind a clean stop nothing is done any more."""
        if self._stopped:
            return
        try:
            self._handle(events)
        except Poisoned as poisoned:
            self._end(poisoned)

    def _end(self, poisoned: Poisoned) -> NoReturn:
        try:
            self._log("poisoned", {"level": "error", "cause": str(poisoned)})
        finally:
            os._exit(POISONED)

    def _handle(self, events: list[Event]) -> None:
        requests: list[Request] = []
        others: list[tuple[Address, Body]] = []
        stop = False
        for event in events:
            if type(event) is Arrived:
                self._arrived(event, requests, others)
            elif isinstance(event, Timer):
                self._timers.discard(event.name)
                self._timer(event.name)
            elif isinstance(event, Posted):
                if isinstance(event.value, JobEnded):
                    self._engine.checkpoints.ended(event.value.job)
                elif isinstance(event.value, Done):
                    event.value.tell()
                stop = stop or event.value is STOP
            elif isinstance(event, Unreachable):
                self._undelivered(Address(event.to, event.header.cid), event.header.kind)
        self._run(requests, everything=stop)
        for address, body in others:
            self._other(address, body)
        self._said(self._engine.take_news())
        if stop:
            self._shut()
        else:
            self._arm()

    def _run(self, requests: list[Request], *, everything: bool) -> None:
        """Run one batch of what waits, so that what arrives meanwhile can have a place in the next.

        More than one if too much waits: then nothing is received until there is room.
        """
        backlog = self._backlog
        if len(requests) <= _FEW and not backlog:  # a batch of its own, whatever it holds
            self._said(self._engine.run(requests))
            return
        backlog.add(requests)
        while backlog:
            self._said(self._engine.run(backlog.take()))
            if not everything and len(backlog) < STORAGE_QUEUE_FRAMES_MAX:
                break
        if backlog:
            self.io.post(_GO_ON)

    def _said(self, news: list[News]) -> None:
        self._feeds.take(news)
        self._catalog.touched(news)

    # --- messages -----------------------------------------------------------------------------

    def _arrived(
        self,
        event: Arrived,
        requests: list[Request],
        others: list[tuple[Address, Body]],
    ) -> None:
        peer, header = event.peer, event.header
        if peer is None or header.cid:
            return
        address = Address(peer.routing_id, header.id)
        try:
            decode = decode_trusted if peer.role in ("gateway", "supervisor") else decode_body
            body = decode(header.kind, event.body)
        except CallboardError as error:
            self._answer(address, error)
            return
        if serves(header.kind):
            requests.append(Request(address, peer.role, peer.scope, body, len(event.body)))
            if isinstance(body, GatewayHello) and peer.role == "gateway":
                self._feeds.forget_others(peer.routing_id)
                self._gateway = peer.routing_id
                self._set(_LEVELS, 1)
        elif not isinstance(body, AwaitInput | Subscribe | Forget | StageRecords | StoreArtifact):
            self._answer(address, InvalidRequest(reason="kind"))
        elif peer.role != "gateway":
            self._answer(address, NotFound())
        else:
            others.append((address, body))

    def _other(self, address: Address, body: Body) -> None:
        if isinstance(body, Subscribe):
            self._feeds.subscribe(address, body)
        elif isinstance(body, AwaitInput):
            self._feeds.await_input(address, body)
        elif isinstance(body, StoreArtifact):
            self._engine.store_artifact(address, body)
        elif isinstance(body, StageRecords):
            self._engine.stage(address, body)
        elif isinstance(body, Forget):
            self._feeds.forget(Address(address.peer, body.request))

    def _release(self, replies: Sequence[Reply]) -> None:
        """Let replies go: what they promise is synced."""
        for token, body in replies:
            assert isinstance(token, Address)
            self._answer(token, body)
        self.io.flush()  # the files come after that

    def _answer(self, address: Address, body: Body | CallboardError) -> None:
        if not address.request:
            return
        if isinstance(body, CallboardError):
            kind, data = "error", error_body(body)
        else:
            kind = body.kind
            try:
                data = encode_body(body)
            except CallboardError as error:
                kind, data = "error", error_body(error)
        if kind != "records":
            self._sent.add(address, _Answer(kind, data))
        self.io.send(LINK, Header(kind, cid=address.request), data, address.peer)

    def _undelivered(self, address: Address, kind: str) -> None:
        if kind == "records":
            if self._feeds.undelivered(address):
                self._log("follower_dropped", {"session_peer": address.peer})
                self._answer(address, Overloaded(resource="socket"))
            return
        if self._sent.undelivered(address):
            self._set(_AGAIN, _AGAIN_MS)

    # --- time ---------------------------------------------------------------------------------

    def _set(self, name: str, ms: int) -> None:
        if name not in self._timers:
            self._timers.add(name)
            self.io.after(ms, name)

    def _timer(self, name: str) -> None:
        engine = self._engine
        if name == _MARK:
            waits = engine.idle_ms()
            if waits is not None and waits >= JOURNAL_IDLE_MARK_MS:
                engine.mark()
        elif name == _MAINTAIN:
            engine.probe()
            engine.trim(self._feeds.follows)
        elif name == _LEVELS:
            self._tell_levels()
        elif name == _PUMP:
            self._feeds.pump()
        elif name == _INDEX:
            self._catalog.flush(engine)
        elif name == _AGAIN:
            for address, answer in self._sent.again():
                header = Header(answer.kind, cid=address.request)
                self.io.send(LINK, header, answer.body, address.peer)

    def _tell_levels(self) -> None:
        """Tell the gateway how full we are; an alarm that begins or ends is logged."""
        levels = [*self._engine.levels(), descriptors("storage_descriptors", *open_descriptors())]
        alarms = frozenset(one.name for one in levels if one.alarm)
        for one in levels:
            if one.alarm != (one.name in self._alarms):
                action = "alarm" if one.alarm else "alarm_over"
                facts = {"level": "warning", "of": one.name, "value": one.value, "limit": one.limit}
                self._log(action, facts)
        self._alarms = alarms
        if self._gateway:
            body = StorageLevels(levels=levels)
            self.io.send(LINK, Header(body.kind), encode_body(body), self._gateway)
        self._set(_LEVELS, STORAGE_LEVELS_MS)

    def _arm(self) -> None:
        """Begin what is due, and wake up for what will be."""
        engine = self._engine
        if engine.checkpoints.due:
            engine.checkpoints.begin()
        if (waits := engine.idle_ms()) is not None:
            self._set(_MARK, max(1, int(JOURNAL_IDLE_MARK_MS - waits) + 1))
        if engine.checkpoints.pending or engine.files.waiting_bytes or not engine.reserve.whole:
            full = engine.files.full or not engine.reserve.whole
            self._set(_MAINTAIN, STORAGE_FULL_PROBE_MS if full else _MAINTAIN_MS)
        if engine.reserve.whole == ("reserve_given_up_bytes" in self._alarms):
            self._tell_levels()
        if self._feeds.catching_up:
            self._set(_PUMP, _PUMP_MS)
        if self._catalog.dirty:
            self._set(_INDEX, _INDEX_MS)

    def _shut(self) -> None:
        """Stop in order: checkpoint, clean_stop, exit 0."""
        engine, self._stopped = self._engine, True
        clean = engine.stop()
        self._catalog.flush(engine)
        self._catalog.close()
        counters = dataclasses.asdict(engine.counters)
        self._log("stopped", {"clean": clean, "commit": engine.handed, **counters})
        self.io.stop(0)
