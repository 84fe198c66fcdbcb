"""A world around the desk: clients, storage, sessions and a supervisor, all made of lists."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

from callboard import messages as m
from callboard.actors.gateway.desk import Desk
from callboard.actors.gateway.requests import Client, Request
from callboard.actors.gateway.sessions import Sessions
from callboard.config import Settings
from callboard.peer import Credentials
from callboard.wire import Header, decode_body, encode_body

SUPERVISOR = "5" * 32
NONCE = "a" * 32


def ref(name: str) -> str:
    return f"w-{'0' * 32}/{name}"


def item(message_id: str) -> m.InboxItem:
    return m.InboxItem(
        message_id=message_id,
        origin="user",
        content=[m.Text(type="text", text="hi")],
        queued_at=1,
        digest="0" * 64,
        principal="principal:operator:local",
    )


def send(session: str, message_id: str) -> m.Send:
    return m.Send(
        session=ref(session), message_id=message_id, content=[m.Text(type="text", text="hi")]
    )


@dataclass
class Answer:
    kind: str
    body: m.Body


@dataclass
class Ports:
    """What the desk sent, as messages on their way."""

    answers: dict[tuple[int, str], Answer] = field(default_factory=dict[tuple[int, str], Answer])
    streamed: list[tuple[int, str, m.Records]] = field(
        default_factory=list[tuple[int, str, m.Records]]
    )
    to_storage: deque[tuple[Header, m.Body]] = field(default_factory=deque[tuple[Header, m.Body]])
    to_peers: deque[tuple[str, Header, m.Body]] = field(
        default_factory=deque[tuple[str, Header, m.Body]]
    )
    closed: list[int] = field(default_factory=list[int])
    unread: Counter[int] = field(default_factory=Counter[int])

    def client(self, conn: int, header: Header, body: bytes) -> None:
        decoded = decode_body(header.kind, body)
        if isinstance(decoded, m.Records):
            self.streamed.append((conn, header.cid, decoded))
            return
        key = (conn, header.cid)
        assert key not in self.answers, f"{key} was answered twice"
        self.answers[key] = Answer(header.kind, decoded)

    def close(self, conn: int) -> None:
        self.closed.append(conn)

    def backlog(self, conn: int) -> int:
        return self.unread[conn]

    def peer(self, routing_id: str, header: Header, body: bytes) -> None:
        self.to_peers.append((routing_id, header, decode_body(header.kind, body)))

    def storage(self, header: Header, body: bytes) -> None:
        self.to_storage.append((header, decode_body(header.kind, body)))


class Fixture:
    """A desk, ready, with a client and a supervisor."""

    def __init__(self, **settings: int) -> None:
        self.ports = Ports()
        self.settings = Settings(home=Path("/nowhere"), **settings)  # type: ignore[arg-type]
        self.desk = Desk(self.ports, NONCE, self.settings)
        self.clients: list[Client] = []
        self.asked: list[tuple[int, str]] = []
        self._count = 0
        self.desk.begin()

    def ready(self, waiting: list[str] | None = None) -> Fixture:
        self.desk.storage_up()
        header, _ = self.ports.to_storage.popleft()
        epoch = m.GatewayEpoch(epoch=7, waiting=[ref(name) for name in waiting or []])
        self.desk.from_storage(Header(epoch.kind, cid=header.id), encode_body(epoch))
        self.hello([])
        return self

    def hello(self, live: list[m.LiveSession]) -> None:
        self.from_supervisor(m.SupervisorHello(plane_epoch=1, live=live), "hello")

    def from_supervisor(self, body: m.Body, request: str = "", cid: str = "") -> None:
        peer = Credentials("supervisor", "", SUPERVISOR)
        self.desk.from_peer(peer, Header(body.kind, request, cid), encode_body(body))

    def from_session(
        self, name: str, body: m.Body, request: str = "", cid: str = "", rid: str = ""
    ) -> None:
        session = self.desk.routes.get(ref(name))
        routing_id = rid or (session.routing_id if session is not None else "0" * 32)
        peer = Credentials("session", ref(name), routing_id)
        self.desk.from_peer(peer, Header(body.kind, request, cid), encode_body(body))

    def connect(self) -> Client:
        client = Client(len(self.clients) + 1, state="open")
        self.clients.append(client)
        return client

    def ask(self, client: Client, body: m.Body, deadline: int = 0, weight: int = 10) -> str:
        self._count += 1
        name = f"q{self._count}"
        self.asked.append((client.conn, name))
        made = item(body.message_id) if isinstance(body, m.Send) else None
        self.desk.take(client, Header(body.kind, name, deadline=deadline), body, weight, made)
        return name

    def answer(self, client: Client, name: str) -> m.Body | None:
        found = self.ports.answers.get((client.conn, name))
        return found.body if found is not None else None

    def error(self, client: Client, name: str) -> dict[str, object]:
        body = self.answer(client, name)
        assert isinstance(body, m.Refusal), body
        return body.model_dump()

    def from_storage(self, header: Header, body: m.Body) -> None:
        self.desk.from_storage(Header(body.kind, cid=header.id), encode_body(body))

    def storage_asked(self) -> tuple[Header, m.Body]:
        return self.ports.to_storage.popleft()

    def peer_told(self, kind: str) -> tuple[str, Header, m.Body]:
        """Give the next message of this kind to a peer; others before it are thrown away."""
        while True:
            found = self.ports.to_peers.popleft()
            if found[1].kind == kind:
                return found

    def live(self, name: str, *, permit: bool = False, rid: str = "") -> str:
        """Make a session live."""
        routing_id = rid or f"{abs(hash(name)):032x}"[:32]
        body = m.Register(session=ref(name), epoch=1, permit=permit, evictable=True)
        self.from_session(name, body, "r", rid=routing_id)
        return routing_id

    def pass_time(self, ms: int) -> None:
        until = self.desk.now + ms
        while (due := self.desk.next_due()) is not None and due <= until:
            self.desk.now = max(due, self.desk.now + 1)
            self.desk.tick()
        self.desk.now = max(until, self.desk.now)

    def check(self) -> None:
        """Assert that each request is in exactly one place."""
        desk = self.desk
        places: Counter[str] = Counter()
        held = 0
        for session in desk.routes:
            for request in session.in_flight.values():
                assert request.where == "session"
                assert session.state == "live"
                places[request.id] += 1
            for request in session.held.values():
                assert request.where == "held"
                places[request.id] += 1
            held += session.placed
        for context in desk._storage.contexts():  # pyright: ignore[reportPrivateUsage]
            if not isinstance(context, str):
                assert context.where == "storage"
                places[context.id] += 1
        for question in desk._supervisor.contexts():  # pyright: ignore[reportPrivateUsage]
            if isinstance(question, Request) and desk.ledger.get(question.id) is not None:
                places[question.id] += 1
        for request in desk.ledger.all():
            assert places[request.id] == 1, (request, places[request.id])
            held += request.placed
        assert desk.places.count == held, "places leak"
        assert desk.routes.resident <= len(list(desk.routes))
        assert isinstance(desk.sessions, Sessions)
