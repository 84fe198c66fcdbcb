"""The session's actor: the one thread that touches the session, and its sockets' other end.

What arrives is decoded and given to `core.Session`; what the session wants is encoded and sent.
Requests to storage and to the gateway that have no answer yet are sent again, in order, whenever
the link comes back; all of them are safe to repeat.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final, cast

from callboard.actors.session.agent_calls import AgentCall, Call, Next, Over, Result, Say, Steered
from callboard.actors.session.core import Context, Session
from callboard.actors.session.runner import AgentHost
from callboard.artifact_files import ArtifactReader
from callboard.errors import CallboardError
from callboard.home import Identity
from callboard.ids import SessionRef
from callboard.limits import BUS_QUEUE_MESSAGES_MAX
from callboard.messages import (
    Body,
    CancelTurn,
    Deliver,
    Permit,
    PermitAsk,
    PermitReturn,
    ProcessIdentity,
    Refusal,
)
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
    Unreachable,
)
from callboard.wire import Header, decode_trusted, encode_body, error_body

STORAGE: Final = "storage"
GATEWAY: Final = "gateway"
TERMINATE: Final = "terminate"
"""Posted by the handler of SIGTERM."""
RESEND_MS: Final = 200
_AGENT_CALLS: Final = (Next, Steered, Say, Call, Result, Over)


class SessionActor(BusActor):
    """Owns one session's state (see the module).

    Args:
        io: the process's sockets.
        ref: the session.
        identity: of this process, its nonce lock held.
        idle_ms: after how long without work the process ends.
        artifacts: reads the session's artifacts, in the agent's thread.

    """

    def __init__(
        self,
        io: Io,
        ref: SessionRef,
        identity: Identity,
        idle_ms: int,
        artifacts: ArtifactReader | None = None,
    ) -> None:
        super().__init__(io)
        self._storage: Asked[Context] = Asked(io, STORAGE, BUS_QUEUE_MESSAGES_MAX)
        self._gateway: Asked[None] = Asked(io, GATEWAY)
        self._permit_asked = ""
        agents = AgentHost(self._from_agent, io.log, artifacts=artifacts)
        owner = ProcessIdentity(**asdict(identity))
        self.session = Session(self, agents, ref, owner, idle_ms)

    def _from_agent(self, call: AgentCall) -> None:
        self.actor_ref.tell(call)

    # What comes in.

    def on_receive(self, message: object) -> None:
        """Take what the agent's side says, or all that has arrived at the sockets."""
        if isinstance(message, _AGENT_CALLS):
            self.session.agent_called(message)
            self.session.batch_done()
        else:
            super().on_receive(message)

    def handle(self, events: list[Event]) -> None:
        """Take a batch: the order to stop first, then everything in the order it came."""
        if any(isinstance(event, Posted) and event.value == TERMINATE for event in events):
            self.session.stop()
        for event in events:
            if isinstance(event, Arrived):
                self._arrived(event)
            elif isinstance(event, Timer):
                self._timer(event.name)
            elif isinstance(event, Connected):
                self._connected(event.link)
            elif isinstance(event, Disconnected):
                self._disconnected(event.link)
            elif isinstance(event, Unreachable):
                self.after(RESEND_MS, f"resend {event.link}")
        self.session.batch_done()

    def _connected(self, link: str) -> None:
        if link == STORAGE:
            self.session.storage_up()
            self._storage.resend()
        else:
            self.session.gateway_up()
            self._gateway.resend()

    def _disconnected(self, link: str) -> None:
        self.log("link_lost", {"link": link})
        if link == STORAGE:
            self._storage.lost()
        else:
            self._gateway.lost()
            self.session.gateway_lost()

    def _timer(self, name: str) -> None:
        if name == f"resend {STORAGE}":
            self._storage.resend()
        elif name == f"resend {GATEWAY}":
            self._gateway.resend()
        else:
            self.session.timer(name)

    def _arrived(self, event: Arrived) -> None:
        header = event.header
        try:
            body = decode_trusted(header.kind, event.body)
        except CallboardError as error:
            self.log("bus_malformed", {"level": "warning", "link": event.link})
            if header.id:
                self.reply(header.id, error)
            return
        if event.link == STORAGE:
            self._from_storage(header, body)
        else:
            self._from_gateway(header, body)

    def _from_storage(self, header: Header, body: Body) -> None:
        context = self._storage.answer(header.cid)
        if context is not None:
            self.session.answered(context, _answer(body))

    def _from_gateway(self, header: Header, body: Body) -> None:
        if isinstance(body, Deliver):
            self.session.delivered(header.id, body)
        elif isinstance(body, CancelTurn):
            self.session.cancelled(header.id, body)
        elif body.kind == "registered":
            self.session.registered()
        elif header.cid and header.cid == self._permit_asked:
            self._permit(_answer(body))

    def _permit(self, answer: Body | CallboardError) -> None:
        """Take an answer about the permit; a queued request gets a second one later."""
        if isinstance(answer, Permit) and answer.state == "queued":
            self.session.permit_queued()
            return
        self._gateway.drop(self._permit_asked)
        self._permit_asked = ""
        if isinstance(answer, CallboardError):
            self.session.permit_refused(answer)
        else:
            self.session.permit_granted()

    # What goes out (`core.Port`).

    def ask(self, body: Body, context: Context) -> None:
        """Send storage a request."""
        self._storage.ask(body.kind, encode_body(body), context)

    def tell(self, body: Body) -> None:
        """Send the gateway a message."""
        self.io.send(GATEWAY, Header(body.kind), encode_body(body))

    def reply(self, request: str, answer: Body | CallboardError) -> None:
        """Answer a request of the gateway."""
        if isinstance(answer, CallboardError):
            self.io.send(GATEWAY, Header("error", cid=request), error_body(answer))
        else:
            self.io.send(GATEWAY, Header(answer.kind, cid=request), encode_body(answer))

    def ask_permit(self) -> None:
        """Ask for a turn permit."""
        body = PermitAsk()
        self._permit_asked = self._gateway.ask(body.kind, encode_body(body), None)

    def drop_permit(self) -> None:
        """Give back a permit, or the request for one."""
        self._gateway.drop(self._permit_asked)
        self._permit_asked = ""
        self.tell(PermitReturn())

    def after(self, ms: int, name: str) -> None:
        """Set a timer."""
        self.io.after(ms, name)

    def now(self) -> int:
        """Microseconds since the epoch."""
        return time.time_ns() // 1_000

    def ticks(self) -> int:
        """Milliseconds of a clock that only goes forward."""
        return time.monotonic_ns() // 1_000_000

    def stop_process(self, status: int) -> None:
        """End the process."""
        self.io.stop(status)

    def log(self, action: str, facts: Mapping[str, object]) -> None:
        """Write a line of the log."""
        self.io.log(action, facts)


def _answer(body: Body) -> Body | CallboardError:
    if isinstance(body, Refusal):
        return CallboardError.from_wire(cast("Mapping[str, object]", body.model_dump()))
    return body
