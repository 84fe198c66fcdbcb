"""The desk: every request gets exactly one answer, whoever dies meanwhile.

Pure but for its ports. It knows each request that is not answered and where it is:

    held        waits for its session to be live, with a place in the activation queue (ADM-1)
    session     was handed to a live session
    storage     was asked of storage: accept, create, await_input, subscribe, discard_input,
                store_artifact
    supervisor  was asked of the supervisor

When a session ends, what was handed to it is dispatched again; when storage or the supervisor comes
back, what it was asked is said again; when a deadline passes, the request is answered with that.
`send` is idempotent by its message id, so dispatching it again stores nothing twice (INB-6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from callboard import messages
from callboard.actors.gateway.ledger import Ledger
from callboard.actors.gateway.permits import Permits
from callboard.actors.gateway.places import Places
from callboard.actors.gateway.requests import (
    Asks,
    Client,
    Deadlines,
    LongText,
    Ports,
    Request,
)
from callboard.actors.gateway.routes import Routes, Session
from callboard.actors.gateway.sessions import THAW, Sessions
from callboard.actors.gateway.waking import AGAIN_MS, Activation, Waking
from callboard.config import Settings
from callboard.errors import (
    CallboardError,
    InvalidRequest,
    Overloaded,
    PlaneClosing,
    SessionInUse,
    StaleEpoch,
    StorageUnavailable,
)
from callboard.levels import queue
from callboard.limits import (
    CLIENT_OUTPUT_BYTES_MAX,
    OPERATOR_REASON_CHARS_MAX,
    RESTART_BACKOFF_MS_MAX,
    SESSION_STOP_MS,
)
from callboard.peer import Credentials
from callboard.wire import Header, decode_body, encode_body

WATCH_BACKLOG_MAX: Final = CLIENT_OUTPUT_BYTES_MAX // 2
"""Beyond it a watch is dropped, so that a connection's other answers still have room (WCH-1c)."""
PRINCIPAL: Final = "principal:operator:local"
HELLO: Final = "gateway_hello"
"""Context of the question for an epoch."""


class Desk:
    """The gateway's state.

    Args:
        ports: what it can send to.
        nonce: of this incarnation; its ids begin with a part of it, so that answers to an earlier
            gateway mean nothing.
        settings: the plane's.

    """

    def __init__(self, ports: Ports, nonce: str, settings: Settings) -> None:
        self._ports = ports
        self._nonce = nonce
        own = nonce[:12]
        self.now = 0
        """Monotonic milliseconds; the actor sets it before each batch."""
        self.epoch = 0
        """The gateway's epoch, 0 until storage has granted it."""
        self.storage_gone = False
        """Storage is not started again (FLT-4)."""
        self.is_closing = False
        self.is_fenced = False
        """Another gateway has taken over: this one must end."""
        self.on_ready: Callable[[], None] = _nothing
        """Called when clients can be welcomed."""
        self.routes = Routes(settings.resident_sessions)
        self.permits = Permits(settings.active_turns, settings.turn_queue)
        self.places = Places(settings.activation_queue, settings.activation_queue_bytes)
        self.ledger = Ledger(ports, f"{own}-", self.places, self._closed)
        self._again = Deadlines()
        self._storage: Asks[Request | str] = Asks(f"{own}s", ports.storage)
        self._supervisor: Asks[Request | Activation] = Asks(f"{own}v", self._tell_supervisor)
        self._levels: list[messages.Level] = []
        """How full storage is, as it last said."""
        self.own_levels: Callable[[], list[messages.Level]] = list[messages.Level]
        """Gives what the actor knows: descriptors, connections."""
        self._supervisor_id = ""
        self._greeting: tuple[str, str] | None = None
        """The supervisor's hello, while it waits for this gateway to be ready."""
        self.waking = Waking(self.routes, self.permits, self.places, self._supervisor, self._again)
        self.waking.is_closing = lambda: self.is_closing
        self.sessions = Sessions(
            ports,
            self.ledger,
            self.routes,
            self.permits,
            self.waking,
            self._again,
            self._dispatch_again,
        )

    # ---- Beginning ----

    def begin(self) -> None:
        """Ask for an epoch."""
        hello = messages.GatewayHello(nonce=self._nonce)
        self._storage.ask(hello.kind, encode_body(hello), HELLO)

    @property
    def is_ready(self) -> bool:
        """Tell whether clients can be welcomed."""
        return self.epoch > 0 or self.storage_gone

    def _become_ready(self) -> None:
        if self._greeting is not None:
            self._reply(*self._greeting, messages.Ok())
            self._greeting = None
        self.on_ready()

    # ---- Requests of clients ----

    def take(
        self,
        client: Client,
        header: Header,
        body: messages.Body,
        weight: int,
        item: messages.InboxItem | None = None,
        long_text: LongText | None = None,
    ) -> None:
        """Take on a request that was checked; its answer comes through the ports.

        Args:
            client: who asks.
            header: the request's header.
            body: what is asked; a create_session as the `create` that it means.
            weight: its encoded bytes.
            item: of a send, the inbox item that it means.
            long_text: of a send, what goes into an artifact first.

        """
        request = self.ledger.open(client, header, body, weight, self.now)
        request.item, request.long_text = item, long_text
        try:
            self._begin(request)
        except CallboardError as error:
            self.ledger.refuse(request, error)

    def _begin(self, request: Request) -> None:
        body = request.body
        if self.is_closing and not isinstance(body, messages.Status | messages.Unwatch):
            raise PlaneClosing(retry_after_ms=SESSION_STOP_MS)
        if isinstance(body, messages.Status | messages.Down):
            self._ask_supervisor(request)
        elif isinstance(body, messages.Unwatch):
            self._unwatch(request, body)
        elif self.storage_gone:
            raise StorageUnavailable(retry_after_ms=RESTART_BACKOFF_MS_MAX)
        else:
            self._begin_with_storage(request)

    def _begin_with_storage(self, request: Request) -> None:
        body = request.body
        match body:
            case messages.Send() if request.long_text is not None:
                request.session = body.session
                self._store_artifact(request, body, request.long_text)
            case messages.Send() | messages.Cancel():
                request.session = body.session
                self._dispatch(request)
            case messages.Wait():
                asked = messages.AwaitInput(session=body.session, message_id=body.message_id)
                self._ask_storage(request, asked)
            case messages.Watch():
                request.next_seq = body.from_seq
                self._subscribe(request)
            case messages.ReleaseSession():
                request.session = body.session
                release = messages.Unquarantine(session=body.session, gateway_epoch=self.epoch)
                self._ask_storage(request, release)
            case messages.Create():
                self._ask_storage(request, body)
            case _:
                raise InvalidRequest(field="kind", reason="kind")

    def client_gone(self, client: Client) -> None:
        """Carry on without a client: sends go on, what only it could hear ends (TEX-16)."""
        for request in list(client.pending.values()):
            request.client = None
            if isinstance(request.body, messages.Wait | messages.Watch):
                self.ledger.close(request)
        client.pending.clear()

    def _closed(self, request: Request) -> None:
        """Strike a request out wherever it is."""
        if request.asked:
            self._forget(request)
        session = self.routes.get(request.session) if request.session else None
        if session is not None:
            session.in_flight.pop(request.id, None)
            session.held.pop(request.id, None)
            self.sessions.may_go(session)
            self.routes.forget_if_idle(session)

    def _forget(self, request: Request) -> None:
        asked, request.asked = request.asked, ""
        self._storage.drop(asked)
        if self._storage.is_up and isinstance(request.body, messages.Wait | messages.Watch):
            body = messages.Forget(request=asked)
            self._ports.storage(Header(body.kind), encode_body(body))

    # ---- Sends (flows 1 and 2) ----

    def _store_artifact(self, request: Request, body: messages.Send, text: LongText) -> None:
        """Have a long text's file made durable; the send goes on when it is (ART-2)."""
        assert isinstance(request.item, messages.InboxItem)
        asked = messages.StoreArtifact.model_construct(
            session=body.session,
            gateway_epoch=self.epoch,
            message_id=body.message_id,
            digest=request.item.digest,
            artifact=text.artifact,
            data=text.data,
        )
        self._ask_storage(request, asked)

    def _dispatch(self, request: Request) -> None:
        """Bring a send or a cancel to its session: hand it over, hold it, or ask storage."""
        session = self.routes.get(request.session)
        if session is not None and session.takes_input:
            self.sessions.check_room(session)
            body = self._for_session(session, request)
            self.sessions.hand_over(session, request, body, self.now)
        elif session is not None and session.is_expected:
            self.sessions.hold(session, request)
        elif isinstance(request.body, messages.Cancel):
            self._cancel_passive(request, request.body)
        else:
            self._accept(request)

    def _dispatch_again(self, request: Request) -> None:
        """Dispatch a request that was taken on before: it is not refused for want of room."""
        self.ledger.keep_place(request)
        try:
            self._dispatch(request)
        except CallboardError as error:
            self.ledger.refuse(request, error)

    def _for_session(self, session: Session, request: Request) -> messages.Body:
        body = request.body
        if isinstance(body, messages.Cancel):
            return messages.CancelTurn(
                turn_id=body.turn_id,
                message_id=body.message_id,
                keep_input=body.keep_input,
                principal=PRINCIPAL,
            )
        assert request.item is not None  # a send has one
        request.permit = self.permits.reserve(session.ref)
        return messages.Deliver(item=request.item, permit=request.permit)

    def _accept(self, request: Request) -> None:
        """Let storage put it into a passive session's inbox; room comes first (ACC-4, RES-1b)."""
        if not request.placed:
            if not self.waking.has_room(request.session):
                raise Overloaded(
                    resource="resident_sessions",
                    limit=self.routes.slots,
                    retry_after_ms=SESSION_STOP_MS,
                )
            self.ledger.take_place(request)
        assert request.item is not None  # a send has one
        asked = messages.Accept(
            session=request.session, gateway_epoch=self.epoch, item=request.item
        )
        self._ask_storage(request, asked)

    def _accepted(self, request: Request, body: messages.Accepted) -> None:
        assert isinstance(request.body, messages.Send)
        self.ledger.counters["receipts"] += 1
        self.ledger.counters["inputs_accepted"] += not body.duplicate
        pending = body.item_state == "pending"
        receipt = messages.Receipt(
            accepted=True,
            message_id=request.body.message_id,
            duplicate=body.duplicate,
            item_state=body.item_state,
            delivery="next_turn" if pending else "history",
            turn_id=body.turn_id,
            queued=body.queued,
            mode="pending" if pending else None,
        )
        self.ledger.answer(request, receipt)
        if body.runnable:
            self.waking.wake(self.routes.entry(request.session))

    def _lease_held(self, request: Request) -> None:
        """Wait for the owner: it registers, or it ends (ACC-3)."""
        session = self.routes.entry(request.session)
        if session.takes_input:
            self._dispatch(request)
            return
        self.sessions.hold(session, request)
        if not session.is_expected:
            self._again.add(session.ref, self.now + AGAIN_MS)

    # ---- Cancels (flow 9) ----

    def _cancel_passive(self, request: Request, body: messages.Cancel) -> None:
        """Nothing runs there: an input can be discarded, any turn has ended."""
        if body.message_id is not None:
            discard = messages.DiscardInput(
                session=body.session,
                gateway_epoch=self.epoch,
                message_id=body.message_id,
                reason="cancelled",
            )
            self._ask_storage(request, discard)
        elif body.turn_id is not None:
            ended = messages.CancelResult(status="already_terminal", turn_id=body.turn_id)
            self.ledger.answer(request, ended)
        else:
            self.ledger.answer(request, messages.CancelResult(status="not_found"))

    # ---- Watches (flow 8) ----

    def _subscribe(self, request: Request) -> None:
        assert isinstance(request.body, messages.Watch)
        asked = messages.Subscribe(session=request.body.session, from_seq=request.next_seq)
        self._ask_storage(request, asked)

    def _records(self, request: Request, raw: bytes) -> None:
        body = decode_body("records", raw)
        client = request.client
        if not isinstance(body, messages.Records) or client is None:
            return
        if self._ports.backlog(client.conn) + len(raw) > WATCH_BACKLOG_MAX:
            self.ledger.refuse(request, Overloaded(resource="socket", limit=WATCH_BACKLOG_MAX))
        elif body.last_seq >= request.next_seq:
            request.next_seq = body.last_seq + 1
            self._ports.client(client.conn, Header("records", cid=request.name), raw)

    def _unwatch(self, request: Request, body: messages.Unwatch) -> None:
        client = request.client
        watch = client.pending.get(body.watch) if client is not None else None
        if client is not None and watch is not None and isinstance(watch.body, messages.Watch):
            del client.pending[body.watch]
            watch.client = None
            self.ledger.close(watch)
        self.ledger.answer(request, messages.Ok())

    # ---- Storage ----

    def _ask_storage(self, request: Request, body: messages.Body) -> None:
        session = self.routes.get(request.session) if request.session else None
        if session is not None:
            session.in_flight.pop(request.id, None)
            session.held.pop(request.id, None)
        request.where = "storage"
        request.asked = self._storage.ask(body.kind, encode_body(body), request)

    def storage_up(self) -> None:
        """Say again what storage was asked, watches from where they are."""
        watches = [
            context
            for context in self._storage.contexts()
            if isinstance(context, Request) and isinstance(context.body, messages.Watch)
        ]
        for watch in watches:
            self._storage.drop(watch.asked)
        self._storage.up()
        for watch in watches:
            self._subscribe(watch)

    def storage_lost(self) -> None:
        """Wait for storage; requests wait until their deadlines."""
        self._storage.lost()

    def storage_refused(self, header: Header) -> None:
        """Note that a question to storage found no room on its way."""
        self._storage.refused(header.id)

    def from_storage(self, header: Header, raw: bytes) -> None:
        """Take an answer of storage."""
        if header.kind == messages.StorageLevels.kind:
            told = decode_body(header.kind, raw)
            assert isinstance(told, messages.StorageLevels)
            self._levels = told.levels
            return
        context = self._storage.peek(header.cid)
        if isinstance(context, Request) and header.kind == "records":
            self._records(context, raw)
            return
        self._storage.drop(header.cid)
        if isinstance(context, str):
            self._gateway_epoch(decode_body(header.kind, raw))
        elif context is not None:
            context.asked, context.where = "", "here"
            try:
                self._storage_answered(context, header.kind, raw)
            except CallboardError as error:
                self.ledger.refuse(context, error)

    def _gateway_epoch(self, body: messages.Body) -> None:
        if not isinstance(body, messages.GatewayEpoch):
            self._again.add(HELLO, self.now + AGAIN_MS)
            return
        self.epoch = self.sessions.epoch = body.epoch
        self._become_ready()
        for ref in body.waiting:
            self.waking.wake(self.routes.entry(ref))

    def _storage_answered(self, request: Request, kind: str, raw: bytes) -> None:
        if kind in _READ_HERE:
            match decode_body(kind, raw):
                case messages.Accepted() as accepted:
                    self._accepted(request, accepted)
                    return
                case messages.LeaseHeld():
                    self._lease_held(request)
                    return
                case messages.Refusal(code=StaleEpoch.code):
                    self.is_fenced = True  # unanswered: it is asked again of the successor
                    return
                case messages.Refusal(code=SessionInUse.code):
                    self._lease_held(request)  # what storage says where it writes nothing
                    return
                case _:
                    pass
        if kind == "ok" and request.long_text is not None:
            request.long_text = None
            self._dispatch(request)  # the excerpt; the text itself is needed no more
            return
        self.ledger.forward(request, kind, raw)
        if kind == "ok" and isinstance(request.body, messages.ReleaseSession):
            self.waking.wake(self.routes.entry(request.session))

    def _storage_given_up(self) -> None:
        """Answer what only storage could do, now and from now on (FLT-4)."""
        self.storage_gone = True
        error = StorageUnavailable(retry_after_ms=RESTART_BACKOFF_MS_MAX)
        for request in self.ledger.all():
            if not isinstance(request.body, messages.Status | messages.Down):
                self.ledger.refuse(request, error)
        self._become_ready()

    # ---- Sessions and the supervisor ----

    def from_peer(self, peer: Credentials, header: Header, raw: bytes) -> None:
        """Take a message of a peer on the bus; its role says what it may."""
        if peer.role == "session":
            self.sessions.said(peer, header, raw, self.now)
        elif peer.role == "supervisor":
            self._from_supervisor(peer, header, raw)

    def unreachable(self, routing_id: str, header: Header) -> None:
        """Keep what could not be delivered to a peer on the bus."""
        if routing_id == self._supervisor_id:
            self._supervisor.refused(header.id)
        else:
            self.sessions.unreachable(routing_id, header, self.now)

    def _reply(self, routing_id: str, request: str, body: messages.Body) -> None:
        self._ports.peer(routing_id, Header(body.kind, cid=request), encode_body(body))

    def _tell_supervisor(self, header: Header, body: bytes) -> None:
        self._ports.peer(self._supervisor_id, header, body)

    def _ask_supervisor(self, request: Request) -> None:
        request.where = "supervisor"
        body: messages.Body = messages.SupervisorStatus()
        if isinstance(request.body, messages.Down):
            reason = " ".join(request.body.reason.split()) or "asked"
            body = messages.StopPlane(reason=reason[:OPERATOR_REASON_CHARS_MAX])
        self._supervisor.ask(body.kind, encode_body(body), request)

    def _from_supervisor(self, peer: Credentials, header: Header, raw: bytes) -> None:
        if header.cid:
            self._supervisor_answered(header, raw)
            return
        match decode_body(header.kind, raw):
            case messages.SupervisorHello(live=live):
                self._supervisor_hello(peer, header, live)
            case messages.SessionUp(session=ref, routing_id=routing_id):
                self.sessions.starting(ref, routing_id)
            case messages.SessionDown() as down:
                self.sessions.down(down, self.now)
            case messages.StorageGivenUp():
                self._storage_given_up()
            case messages.Closing():
                self.is_closing = self.permits.closed = True
                self._reply(peer.routing_id, header.id, messages.Ok())
            case _:
                pass

    def _supervisor_hello(
        self, peer: Credentials, header: Header, live: list[messages.LiveSession]
    ) -> None:
        self._supervisor_id = peer.routing_id
        self.sessions.running({one.session: one.routing_id for one in live}, self.now)
        if self.is_ready:
            self._reply(peer.routing_id, header.id, messages.Ok())
        else:
            self._greeting = (peer.routing_id, header.id)
        self._supervisor.up()
        self.waking.use_room()

    def _supervisor_answered(self, header: Header, raw: bytes) -> None:
        context = self._supervisor.answer(header.cid)
        if context is None:
            return
        body = decode_body(header.kind, raw)
        if isinstance(context, Activation):
            refused = isinstance(body, messages.Refusal)
            error = CallboardError.from_wire(body.model_dump()) if refused else None
            self.sessions.activation_answered(context, body, error, self.now)
        elif isinstance(body, messages.ProcessTree):
            self.ledger.answer(context, self._plane_status(body))
        else:
            self.ledger.forward(context, header.kind, raw)

    def _plane_status(self, tree: messages.ProcessTree) -> messages.PlaneStatus:
        states = self.routes.counts()
        states["quarantined"] = len(tree.quarantined)
        return messages.PlaneStatus(
            plane_id=tree.plane_id,
            plane_epoch=tree.plane_epoch,
            gateway_epoch=self.epoch,
            started_at=tree.started_at,
            processes=tree.processes,
            sessions=dict(states),
            counters={**tree.counters, **self.statistics()},
            levels=[*self._levels, *self._queues(), *self.own_levels()],
            detail=tree.detail,
        )

    def _queues(self) -> list[messages.Level]:
        return [
            queue("activation_queue", self.places.count, self.places.count_max),
            queue("activation_queue_bytes", self.places.bytes, self.places.bytes_max),
            queue("turn_queue", self.permits.waiting, self.permits.queue_max),
        ]

    def statistics(self) -> dict[str, int]:
        """Give counters and fill levels (habit 14)."""
        return {
            **self.ledger.counters,
            "requests_pending": len(self.ledger),
            "storage_pending": len(self._storage),
            "activation_queue": self.places.count,
            "turns_running": self.permits.held,
            "turns_waiting": self.permits.waiting,
        }

    # ---- Time ----

    def next_due(self) -> int | None:
        """Give the time at which `tick` has something to do."""
        times = [self.ledger.next_due(), self._again.next()]
        if self._storage.has_unsent or self._supervisor.has_unsent:
            times.append(self.now + AGAIN_MS)
        return min((at for at in times if at is not None), default=None)

    def tick(self) -> None:
        """Do what is due."""
        self.ledger.expire(self.now)
        for name in self._again.take(self.now):
            self._try_again(name)
        self._storage.retry()
        self._supervisor.retry()

    def _try_again(self, name: str) -> None:
        if name == THAW:
            self.sessions.thaw()
        elif name == HELLO:
            self.begin()
        elif (session := self.routes.get(name)) is not None:
            self.waking.activate(session)
            self.sessions.pay(session)
            if not session.is_expected:
                self.sessions.release_held(session)

    # ---- The end ----

    def shut(self) -> None:
        """Answer everything that is not answered: the gateway stops (habit 6)."""
        self.is_closing = True
        error = PlaneClosing(retry_after_ms=SESSION_STOP_MS)
        for request in self.ledger.all():
            self.ledger.refuse(request, error)


_READ_HERE: Final = frozenset({"accepted", "lease_held", "error"})
"""Answers of storage that mean something to the desk; the others go on as they are."""


def _nothing() -> None:
    """Do nothing."""
