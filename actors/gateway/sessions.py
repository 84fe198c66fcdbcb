"""Sessions as peers: they register, ask for permits, answer, and end (flows 3, 5 and 6).

Pure. Whatever a session leaves unanswered at its end is handed back to the desk, which dispatches
it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from msgpack import packb

from callboard import messages
from callboard.actors.gateway.ledger import Ledger
from callboard.actors.gateway.permits import Grant, Permits
from callboard.actors.gateway.requests import Deadlines, Ports, Request
from callboard.actors.gateway.routes import Routes, Session
from callboard.actors.gateway.waking import AGAIN_MS, Activation, Waking
from callboard.errors import CallboardError, InvalidRequest, NotFound, Overloaded
from callboard.limits import BUS_QUEUE_MESSAGES_MAX
from callboard.peer import Credentials
from callboard.wire import Header, decode_body, encode_body, error_body

IN_FLIGHT_MAX: Final = BUS_QUEUE_MESSAGES_MAX // 2
"""Requests under way to one session: ZeroMQ's queue to it never fills."""
THAW_MS: Final = 2_000
"""How long sessions have to say what they hold after a gateway's start (ADM-7a)."""
THAW: Final = "thaw"

_AWAY: Final = frozenset({"gate_closed", "stale_epoch"})
"""What a session says that is on its way out: the request goes elsewhere."""
_NOT_DUPLICATE: Final = packb("duplicate") + packb(False)
"""How a receipt spells that its input is new; it is forwarded without being decoded."""


class Sessions:
    """The gateway's side of all sessions.

    Args:
        ports: what can be sent to.
        ledger: the unanswered requests.
        routes: where sessions are.
        permits: the broker.
        waking: who is to be started.
        again: remembers what to try again, and when.
        redispatch: takes back a request whose session is gone or cannot take it.

    """

    def __init__(
        self,
        ports: Ports,
        ledger: Ledger,
        routes: Routes,
        permits: Permits,
        waking: Waking,
        again: Deadlines,
        redispatch: Callable[[Request], None],
    ) -> None:
        self._ports = ports
        self._ledger = ledger
        self._routes = routes
        self._permits = permits
        self._waking = waking
        self._again = again
        self._redispatch = redispatch
        self._silent: set[str] = set()
        """Running sessions that have not registered with this gateway (ADM-7a)."""
        self._supervised = False
        self.epoch = 0
        self.counters: Counter[str] = ledger.counters

    # ---- Requests handed over ----

    def check_room(self, session: Session) -> None:
        """Refuse to hand over more than a session's queue takes.

        Raises:
            Overloaded: too much is under way to it.

        """
        if len(session.in_flight) >= IN_FLIGHT_MAX:
            raise Overloaded(resource="pending_count", limit=IN_FLIGHT_MAX)

    def hand_over(self, session: Session, request: Request, body: messages.Body, now: int) -> None:
        """Send a request to a live session that has room for it."""
        session.held.pop(request.id, None)
        self._ledger.leave_place(request)  # before it runs (ADM-2)
        request.where = "session"
        session.in_flight[request.id] = request
        session.evictable = False
        self._routes.used(session)
        header = Header(body.kind, request.id, deadline=max(1, request.deadline - now))
        self._ports.peer(session.routing_id, header, encode_body(body))

    def hold(self, session: Session, request: Request) -> None:
        """Keep a request until its session is live, or known to be gone (ADM-1b).

        Raises:
            Overloaded: there is no place for it.

        """
        self._ledger.take_place(request)
        request.where = "held"
        session.in_flight.pop(request.id, None)
        session.held[request.id] = request

    def release_held(self, session: Session) -> None:
        """Dispatch what was held, as far as the session can take it."""
        for request in list(session.held.values()):
            if session.takes_input and len(session.in_flight) >= IN_FLIGHT_MAX:
                return  # the rest goes as answers come
            self._redispatch(request)

    def unreachable(self, routing_id: str, header: Header, now: int) -> None:
        """Keep what could not be delivered: its session is going, or coming back."""
        if header.cid:
            self._owe(routing_id, header, now)
            return
        request = self._ledger.get(header.id)
        if request is None or request.where != "session":
            return
        session = self._routes.get(request.session)
        if session is not None and session.routing_id == routing_id:
            if request.permit:  # it did not arrive either
                request.permit = False
                self._granted(self._permits.give_back(session.ref))
            self._hold_again(session, request, now)
        else:
            self._redispatch(request)

    def _owe(self, routing_id: str, header: Header, now: int) -> None:
        """Remember an answer that a session must have to go on."""
        for session in self._routes:
            if session.state == "live" and session.routing_id == routing_id:
                session.owed[header.cid] = header.kind
                self._again.add(session.ref, now + AGAIN_MS)

    def pay(self, session: Session) -> None:
        """Say again what did not reach a session."""
        owed, session.owed = session.owed, {}
        for request, kind in owed.items():
            if kind == messages.Registered.kind:
                self._reply(session.routing_id, request, self._registered())
            elif kind == messages.Permit.kind and self._permits.holds(session.ref):
                self._reply(session.routing_id, request, messages.Permit(state="granted"))

    def _registered(self) -> messages.Registered:
        return messages.Registered(gateway_epoch=self.epoch)

    def _hold_again(self, session: Session, request: Request, now: int) -> None:
        """Keep a request that its session could not take until the session is gone, or can."""
        self._ledger.keep_place(request)
        self.hold(session, request)
        self._again.add(session.ref, now + AGAIN_MS)

    # ---- What sessions say ----

    def said(self, peer: Credentials, header: Header, raw: bytes, now: int) -> None:
        """Take a message of a session; it speaks for itself alone (FLT-44b, T-14)."""
        if header.cid:
            self._answered(peer, header, raw, now)
            return
        try:
            self._asked(peer, header, decode_body(header.kind, raw))
        except CallboardError as error:
            self._ports.peer(peer.routing_id, Header("error", cid=header.id), error_body(error))

    def _asked(self, peer: Credentials, header: Header, body: messages.Body) -> None:
        match body:
            case messages.Register():
                self._register(peer, header, body)
            case messages.PermitAsk():
                self._permit_asked(peer, header)
            case messages.PermitReturn():
                self._permit_returned(peer)
            case messages.Beat():
                self._beat(peer, body)
            case _:
                raise InvalidRequest(field="kind", reason="kind")

    def _incarnation(self, peer: Credentials) -> Session | None:
        """Find the live session that a peer is; an earlier incarnation is none."""
        session = self._routes.get(peer.scope)
        if session is None or session.state != "live" or session.routing_id != peer.routing_id:
            return None
        return session

    def _register(self, peer: Credentials, header: Header, body: messages.Register) -> None:
        if body.session != peer.scope:
            raise NotFound
        if self._routes.is_dead(peer.routing_id):
            return
        session = self._routes.entry(peer.scope)
        if session.state == "live" and session.routing_id != peer.routing_id:
            self.gone(session)
        session.announced &= session.routing_id == peer.routing_id
        session.state = "live"
        session.routing_id = peer.routing_id
        session.evictable = session.said_evictable = body.evictable
        session.retiring = False
        self._routes.used(session)
        self._waking.unwant(session)
        self._granted(self._permits.register(session.ref, holds=body.permit))
        self._reply(peer.routing_id, header.id, self._registered())
        self._silent.discard(session.ref)
        self.thaw_if_known()
        self.release_held(session)

    def _beat(self, peer: Credentials, body: messages.Beat) -> None:
        session = self._incarnation(peer)
        if session is not None:
            session.phase = body.phase
            session.said_evictable = body.evictable
            session.evictable = body.evictable and not session.in_flight
            if session.evictable and not session.retiring:
                self._waking.use_room()

    def _answered(self, peer: Credentials, header: Header, raw: bytes, now: int) -> None:
        request = self._ledger.get(header.cid)
        if request is None or request.where != "session" or request.session != peer.scope:
            return
        session = self._incarnation(peer)
        if session is not None:
            self._routes.used(session)
        if header.kind == "receipt":
            self.counters["receipts"] += 1
            self.counters["inputs_accepted"] += _NOT_DUPLICATE in raw
        elif header.kind == "error" and session is not None and _code(raw) in _AWAY:
            self._hold_again(session, request, now)
            return
        self._ledger.forward(request, header.kind, raw)
        if session is not None and session.held and session.takes_input:
            self.release_held(session)

    def _reply(self, routing_id: str, request: str, body: messages.Body) -> None:
        self._ports.peer(routing_id, Header(body.kind, cid=request), encode_body(body))

    # ---- Permits ----

    def _permit_asked(self, peer: Credentials, header: Header) -> None:
        if self._incarnation(peer) is None:
            return
        place = self._permits.ask(peer.scope, header.id)
        if place == "full":
            raise Overloaded(resource="pending_count")
        answer = messages.Permit(state="queued" if place else "granted", position=place)
        self._reply(peer.routing_id, header.id, answer)

    def _permit_returned(self, peer: Credentials) -> None:
        session = self._incarnation(peer)
        if session is None:
            return
        self._granted(self._permits.give_back(session.ref))
        self.may_go(session)

    def may_go(self, session: Session) -> None:
        """Take a session at its last word again, once nothing is under way to it.

        A permit's return is no such word (a failed turn may have left input for another one), and
        what changed nothing in the session, or never reached it, is not followed by one.
        """
        if session.said_evictable and not (session.in_flight or session.evictable):
            session.evictable = True
            self._waking.use_room()

    def _granted(self, grants: list[Grant]) -> None:
        for ref, request in grants:
            session = self._routes.get(ref)
            if session is not None:
                self._reply(session.routing_id, request, messages.Permit(state="granted"))

    def thaw_if_known(self) -> None:
        """Begin to grant permits once everybody who may hold one has registered."""
        if self._permits.frozen and self._supervised and not self._silent:
            self._granted(self._permits.thaw())

    def thaw(self) -> None:
        """Wait no longer for those who have not registered."""
        self._silent.clear()
        self.thaw_if_known()

    # ---- Beginnings and ends, as the supervisor tells them ----

    def running(self, live: dict[str, str], now: int) -> None:
        """Compare what is known with what the supervisor runs: routing ids by session."""
        for session in self._routes:
            if session.state == "passive" or live.get(session.ref) == session.routing_id:
                continue
            if session.announced:
                self.gone(session)  # its end was told while nobody listened
            else:
                session.announced = True  # it may be younger than this list, not than the next
        for ref, routing_id in live.items():
            self.starting(ref, routing_id)
        self._supervised = True
        if self._permits.frozen:
            self._silent = {s.ref for s in self._routes if s.state == "activating"}
            self._again.add(THAW, now + THAW_MS)
            self.thaw_if_known()

    def starting(self, ref: str, routing_id: str) -> None:
        """Note that a process was started for a session."""
        session = self._routes.entry(ref)
        if self._routes.is_dead(routing_id) or session.routing_id == routing_id:
            session.announced |= session.routing_id == routing_id
            self._routes.forget_if_idle(session)
            return
        if session.state == "live":
            self.gone(session)  # its successor is there, so it is not
        session.state = "activating"
        session.routing_id, session.announced = routing_id, True
        self._routes.settle(session)

    def down(self, body: messages.SessionDown, now: int) -> None:
        """Note that a process has ended."""
        session = self._routes.get(body.session)
        self._routes.bury(body.routing_id)
        if session is not None and session.routing_id == body.routing_id:
            final = body.quarantined or body.cause == "refused"
            if final:
                self._waking.unwant(session)
            elif session.wanted and not body.restarting:
                self._again.add(session.ref, now + AGAIN_MS)
            self.gone(session)
            self._routes.forget_if_idle(session)
        self._waking.use_room()

    def gone(self, session: Session) -> None:
        """Note a session's end; whatever it has not answered goes on elsewhere."""
        if session.routing_id:
            self._routes.bury(session.routing_id)
        session.state, session.routing_id, session.phase = "passive", "", "idle"
        session.announced = False
        session.retiring = session.evictable = session.said_evictable = False
        session.owed.clear()
        self._silent.discard(session.ref)
        self._routes.settle(session)
        self._granted(self._permits.give_back(session.ref))
        self.thaw_if_known()
        unanswered = [*session.in_flight.values(), *session.held.values()]
        session.in_flight.clear()
        session.held.clear()
        for request in unanswered:
            self.counters["redispatches"] += 1
            self._redispatch(request)

    def activation_answered(
        self, asked: Activation, body: messages.Body, refuse: CallboardError | None, now: int
    ) -> None:
        """Take the supervisor's answer to an activation.

        Args:
            asked: what was asked.
            body: the answer.
            refuse: the error that it is, if it is one.
            now: monotonic milliseconds.

        """
        session = self._routes.entry(asked.session)
        session.asked = False
        if isinstance(body, messages.Activating):
            self.starting(body.session, body.routing_id)
        elif refuse is not None:
            goes_on = self._waking.refused(session, refuse.code, now)
            for request in list(session.held.values()):
                if goes_on:
                    self._redispatch(request)
                else:
                    self._ledger.refuse(request, refuse)
        self._routes.settle(session)
        evicted = self._routes.get(asked.evicted) if asked.evicted else None
        if evicted is not None and evicted.retiring:
            evicted.retiring = False  # it was not needed
            self.release_held(evicted)
        self._routes.forget_if_idle(session)


def _code(raw: bytes) -> str:
    try:
        body = decode_body("error", raw)
    except CallboardError:
        return ""
    return body.code if isinstance(body, messages.Refusal) else ""
