"""The border: what clients send is checked here, once, before the desk takes it on.

It knows who is who among connections (hello, FLT-41c, FLT-62, RTE-7c), counts what is refused
(FLT-59) and turns a client's words into what they mean: a send into an inbox item, a
create_session into a creation record. Not pure: it asks the clock, and the file system which
canonical path a workspace has.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, cast

from msgpack import unpackb
from pydantic_core import to_json

from callboard import messages
from callboard.actors.gateway.desk import PRINCIPAL, Desk
from callboard.actors.gateway.requests import Client, LongText, Ports
from callboard.artifacts import cut, spell_ref
from callboard.errors import (
    CallboardError,
    InvalidRequest,
    NotAuthenticated,
    Overloaded,
    PayloadTooLarge,
    ProtocolUnsupported,
)
from callboard.ids import (
    SessionRef,
    canonical_workspace,
    check_message_id,
    check_session_id,
    parse_ref,
    workspace_key,
)
from callboard.limits import (
    CLIENT_BAD_INPUT_MAX,
    CLIENT_REQUESTS_PENDING_MAX,
    EXTRA_BYTES_MAX,
    ITEM_METADATA_BYTES_MAX,
    MESSAGE_ID_CHARS_MAX,
    PROTOCOL,
)
from callboard.records import Owner, SessionCreated, canonical, item_digest
from callboard.wire import Header, decode_door, encode_body, error_body, validate_body

BAD_INPUT_MS: Final = 10_000
NAMED_BYTES_MAX: Final = 65_536
URGENT_MORE: Final = 16
"""Urgent requests that a connection may have beyond CLIENT_REQUESTS_PENDING_MAX."""
_SIZES: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
    {
        "metadata": ("ITEM_METADATA_BYTES_MAX", ITEM_METADATA_BYTES_MAX),
        "extra": ("EXTRA_BYTES_MAX", EXTRA_BYTES_MAX),
    }
)


class Asked(NamedTuple):
    """A message that was decoded; what it asks for is not looked at yet."""

    client: Client
    header: Header
    body: Mapping[str, object]
    weight: int


class Border:
    """All connections of the door.

    Args:
        desk: takes requests on.
        ports: where refusals go.
        token: the operator's, of this plane start.
        plane_id: told to clients.

    """

    def __init__(self, desk: Desk, ports: Ports, token: str, plane_id: str) -> None:
        self._desk = desk
        self._ports = ports
        self._token = token.encode()
        self._plane_id = plane_id
        self._clients: dict[int, Client] = {}
        self._urgent: list[Asked] = []
        self._asked: list[Asked] = []

    # ---- Connections ----

    def opened(self, conn: int) -> None:
        """Note that a client has connected."""
        self._clients[conn] = Client(conn)

    def gone(self, conn: int) -> None:
        """Note that a client's connection has ended."""
        client = self._clients.pop(conn, None)
        if client is not None:
            client.state = "closed"
            self._desk.client_gone(client)

    def handshake_over(self, conn: int) -> None:
        """Close a connection that has said no hello in CLIENT_HANDSHAKE_MS (FLT-41c)."""
        client = self._clients.get(conn)
        if client is not None and client.state == "new":
            self._shut(client)

    def refused(self, conn: int, error: CallboardError) -> None:
        """Close a connection whose input cannot be read on (FLT-56)."""
        client = self._clients.get(conn)
        if client is not None and client.state != "closed":
            self._refuse(client, "", error)
            self._shut(client)

    def _shut(self, client: Client) -> None:
        client.state = "closed"
        self._ports.close(client.conn)

    def _refuse(self, client: Client, name: str, error: CallboardError) -> None:
        self._desk.ledger.counters["refusals"] += 1
        self._ports.client(client.conn, Header("error", cid=name), error_body(error))

    # ---- Hello ----

    def welcome_all(self) -> list[tuple[int, list[bytes]]]:
        """Welcome everybody who waits for it.

        Returns:
            The messages that had come behind their hellos and are taken in now, by connection.

        """
        taken: list[tuple[int, list[bytes]]] = []
        for client in list(self._clients.values()):
            if client.state == "greeted":
                self._welcome(client)
                early, client.early = client.early, []
                taken.append((client.conn, early))
                for payload in early:
                    self._message(client, payload)
        return taken

    def _welcome(self, client: Client) -> None:
        client.state = "open"
        body = messages.Welcome(
            protocol=PROTOCOL, plane_id=self._plane_id, gateway_epoch=self._desk.epoch
        )
        self._ports.client(client.conn, Header(body.kind, cid=client.hello), encode_body(body))

    def _hello(self, client: Client, payload: bytes) -> None:
        """Take a connection's first message; whatever else it is reaches nothing."""
        name = ""
        try:
            header, fields = decode_door(payload)
            name = header.id
            self._check_hello(header, fields)
        except (ProtocolUnsupported, NotAuthenticated) as error:
            self._refuse(client, name, error)
            self._shut(client)
        except CallboardError:
            self._shut(client)  # no hello: no word
        else:
            client.hello = name
            client.state = "greeted"
            if self._desk.is_ready:
                self._welcome(client)

    def _check_hello(self, header: Header, fields: Mapping[str, object]) -> None:
        if header.kind != messages.Hello.kind:
            raise InvalidRequest(field="kind", reason="kind")
        if type(version := fields.get("protocol")) is int and version != PROTOCOL:
            raise ProtocolUnsupported(min=PROTOCOL, max=PROTOCOL)
        body = validate_body(header.kind, fields)
        assert isinstance(body, messages.Hello)
        if not hmac.compare_digest(body.token.encode(), self._token):
            raise NotAuthenticated

    # ---- Messages ----

    def came(self, conn: int, payloads: list[bytes]) -> list[bytes]:
        """Take a connection's messages in; `handle` deals with them.

        Returns:
            Those that were taken in; the others wait for the welcome.

        """
        client = self._clients.get(conn)
        if client is None:
            return payloads
        taken: list[bytes] = []
        for payload in payloads:
            if client.state == "greeted":
                client.early.append(payload)
                continue
            taken.append(payload)
            if client.state == "new":
                self._hello(client, payload)
            elif client.state == "open":
                self._message(client, payload)
        return taken

    def _message(self, client: Client, payload: bytes) -> None:
        try:
            header, body = decode_door(payload)
        except CallboardError as error:
            self._refuse_bad(client, _name_of(payload), error)
            return
        asked = Asked(client, header, body, len(payload))
        urgent = header.kind in messages.URGENT_KINDS
        (self._urgent if urgent else self._asked).append(asked)

    def handle(self) -> None:
        """Deal with all that was taken in, what is urgent first (habit 5)."""
        urgent, self._urgent = self._urgent, []
        asked, self._asked = self._asked, []
        for one in urgent:
            self._handle(one, CLIENT_REQUESTS_PENDING_MAX + URGENT_MORE)
        for one in asked:
            self._handle(one, CLIENT_REQUESTS_PENDING_MAX)

    def _handle(self, asked: Asked, pending_max: int) -> None:
        client, header, fields, weight = asked
        if client.state != "open":
            return
        name = header.id
        try:
            _check_header(client, header)
            body = validate_body(header.kind, fields)
            item = long_text = None
            if isinstance(body, messages.Send):
                body, item, long_text = _inbox_item(body)
            elif isinstance(body, messages.CreateSession):
                body = _creation(body, self._desk.epoch)
            else:
                _check_refs(body)
        except CallboardError as error:
            self._refuse_bad(client, name, error)
            return
        if len(client.pending) >= pending_max:
            full = Overloaded(resource="pending_count", limit=CLIENT_REQUESTS_PENDING_MAX)
            self._refuse(client, name, full)
            return
        self._desk.take(client, header, body, weight, item, long_text)

    def _refuse_bad(self, client: Client, name: str, error: CallboardError) -> None:
        """Refuse what is wrong in itself, and a connection that sends too much of it (FLT-59a)."""
        self._refuse(client, name, error)
        now, bad = self._desk.now, client.bad
        bad.append(now)
        while bad[0] <= now - BAD_INPUT_MS:
            bad.popleft()
        if len(bad) >= CLIENT_BAD_INPUT_MAX:
            self._shut(client)


def _name_of(payload: bytes) -> str:
    """Find the id of a message that is refused, so that its sender knows which; empty if none.

    Only of a small one: nothing large is built of bytes that were refused (FLT-54a).
    """
    if len(payload) > NAMED_BYTES_MAX:
        return ""
    try:
        fields: object = unpackb(payload, strict_map_key=False)
        name = cast("dict[object, object]", fields).get("id")
    except Exception:  # whatever it is, it has no id
        return ""
    if isinstance(name, str) and len(name) <= MESSAGE_ID_CHARS_MAX and name.isprintable():
        return name
    return ""


def _check_header(client: Client, header: Header) -> None:
    if header.kind not in messages.CLIENT_KINDS or header.kind == messages.Hello.kind:
        raise InvalidRequest(field="kind", reason="kind")
    if not header.id:
        raise InvalidRequest(field="id", reason="field")
    if header.id in client.pending:
        raise InvalidRequest(field="id", reason="duplicate")


def _check_refs(body: messages.Body) -> None:
    match body:
        case messages.Wait(session=session, message_id=name):
            parse_ref(session)
            check_message_id(name)
        case messages.Cancel(session=session, message_id=name):
            parse_ref(session)
            if name is not None:
                check_message_id(name)
        case messages.Watch(session=session) | messages.ReleaseSession(session=session):
            parse_ref(session)
        case _:
            pass


def _checked_json(field: str, value: dict[str, object]) -> None:
    """Refuse a free-form field that is no JSON, or more of it than may be."""
    if not value:
        return
    try:
        size = len(canonical(value))
    except (TypeError, ValueError):
        raise InvalidRequest(field=field, reason="type") from None
    limit, maximum = _SIZES[field]
    if size > maximum:
        raise PayloadTooLarge(limit=limit, maximum=maximum)


def _inbox_item(
    body: messages.Send,
) -> tuple[messages.Send, messages.InboxItem, LongText | None]:
    """Make the inbox item that a send means; a long text is cut here (ART-1, ADR 0070)."""
    parse_ref(body.session)
    check_message_id(body.message_id)
    _checked_json("metadata", body.metadata)
    sent: list[dict[str, object]] = [
        {"type": "text", "text": part.text}
        if part.prompt_artifact is None
        else {"type": "text", "text": part.text, "prompt_artifact": part.prompt_artifact}
        for part in body.content
    ]
    content, ref, data = cut(sent)
    long_text = None if ref is None else LongText(spell_ref(ref), data)
    if data is not None:
        kept = [messages.Text.model_validate(part) for part in content]
        body = body.model_copy(update={"content": kept})
    item = messages.InboxItem(
        message_id=body.message_id,
        origin="user",
        content=body.content,
        queued_at=time.time_ns() // 1_000,
        digest=item_digest(content, body.metadata),
        busy_mode=body.busy_mode,
        principal=PRINCIPAL,
        metadata=body.metadata,
    )
    return body, item, long_text


def _creation(body: messages.CreateSession, epoch: int) -> messages.Create:
    check_session_id(body.session_id)
    _checked_json("extra", body.extra)
    workspace = canonical_workspace(body.workspace)
    ref = SessionRef(workspace_key(workspace), body.session_id)
    now = time.time_ns() // 1_000
    created = SessionCreated(
        workspace=workspace,
        session_id=body.session_id,
        root=str(ref),
        title=body.title,
        agent=body.agent,
        model=body.model,
        settings=body.settings,
        extra=body.extra,
        created_at=now,
        owner=Owner(kind="operator", principal_id=PRINCIPAL, created_at=now),
    )
    data = to_json(created, exclude_none=True)
    record = messages.NewRecord(id=body.key, type=created.type, data=data)
    # Not validated: there is no epoch if storage was given up before it gave one, and the desk
    # refuses the request then.
    return messages.Create.model_construct(gateway_epoch=epoch, session=str(ref), record=record)
