"""The client's side of the door, sans I/O: requests in, bytes out; bytes in, answers out.

One `Door` stands behind the sync and the async client alike. It knows which requests have no
answer yet, and says again, under the same ids, whatever a lost connection may have swallowed; it
does not know what a socket is, what time it is, or how to draw a number. A shell gives it those:

    ask() ──► output() ──► socket ──► receive() ──► [Answered, Refused, Streamed, Shut]
    lost() when the connection ended, connected() when there is a new one, expire() when time passed

The request functions below it say once, for both clients, what an operation's message is.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import ceil
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, cast

from callboard import messages
from callboard.artifacts import check_text, cut
from callboard.errors import (
    CallboardError,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotAuthenticated,
    Overloaded,
    PlaneNotRunning,
    ProtocolUnsupported,
)
from callboard.limits import (
    CLIENT_MESSAGE_BYTES_MAX,
    CLIENT_OUTPUT_BYTES_MAX,
    CLIENT_REQUESTS_PENDING_MAX,
    PROTOCOL,
    RESTART_BACKOFF_MS,
    TURN_DEADLINE_MS_MAX,
)
from callboard.wire import Header, Unframer, decode_door, door_frame, encode_body, validate_body

# What one client may owe itself. The door's own limit is CLIENT_REQUESTS_PENDING_MAX unanswered
# requests of a connection (FLT-59c); more than that wait here, and these are bounded as well.
QUEUE_REQUESTS_MAX: Final = 16 * CLIENT_REQUESTS_PENDING_MAX
QUEUE_BYTES_MAX: Final = 8 * CLIENT_OUTPUT_BYTES_MAX
WATCH_BYTES_MAX: Final = CLIENT_OUTPUT_BYTES_MAX
"""How many bytes of lines a watch holds for a reader that is slower than its session."""

WINDOW: Final = CLIENT_REQUESTS_PENDING_MAX - 16
"""Requests under way at the same time; the rest is left to what is urgent."""
WINDOW_LONG: Final = CLIENT_REQUESTS_PENDING_MAX // 2
"""Those of them that may take as long as a turn: waits and watches never stop sends."""

RETRY_MS: Final = RESTART_BACKOFF_MS // 10
RETRY_MS_MAX: Final = RESTART_BACKOFF_MS * 5

Lane = Literal["urgent", "short", "long"]
LANES: Final[Mapping[str, Lane]] = MappingProxyType(
    {"cancel": "urgent", "down": "urgent", "wait": "long", "watch": "long"}
)
"""By kind; short is the rest."""

ANSWERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "hello": "welcome",
        "create_session": "created",
        "send": "receipt",
        "wait": "outcome",
        "watch": "records",
        "unwatch": "ok",
        "cancel": "cancel_result",
        "status": "plane_status",
        "down": "ok",
        "release_session": "ok",
    }
)
"""The kind of the answer, beside `error`."""


class Answered(NamedTuple):
    """The one answer to a request."""

    request: str
    body: messages.Body


class Refused(NamedTuple):
    """The other one answer to a request."""

    request: str
    error: CallboardError


class Streamed(NamedTuple):
    """A piece of what a watch follows."""

    request: str
    records: messages.Records


class Shut(NamedTuple):
    """The connection is of no use any more; close it, then say `lost`."""

    error: CallboardError | None


Event = Answered | Refused | Streamed | Shut


@dataclass(slots=True)
class _Request:
    id: str
    kind: str
    body: bytes
    deadline: float | None
    lane: Lane
    sent: bool = False
    tried: bool = False
    """It was sent once, on this connection or an earlier one."""
    watch: messages.Watch | None = None
    """What a watch asks for next: its body moves on with what has come."""


class Door:
    """What one client has asked for and was not told yet.

    Times are seconds of any one monotonic clock. Answers come in the order in which the plane gives
    them, which need not be the order of the requests.

    Args:
        name: what the client says that it is, for logs.

    """

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._state: Literal["closed", "greeting", "open"] = "closed"
        self._unframer = Unframer(CLIENT_MESSAGE_BYTES_MAX)
        self._out: list[bytes] = []
        self._requests: dict[str, _Request] = {}
        self._lanes: dict[Lane, deque[str]] = {"urgent": deque(), "short": deque(), "long": deque()}
        self._due: list[tuple[float, str]] = []
        self._bytes = 0
        self._under_way: dict[Lane, int] = {"urgent": 0, "short": 0, "long": 0}
        self._obstacle: CallboardError | None = None
        self._unwatched = 0
        self.welcome: messages.Welcome | None = None
        """What the gateway said last when it let this client in."""

    @property
    def is_open(self) -> bool:
        """Tell whether the gateway has let this connection in."""
        return self._state == "open"

    @property
    def is_closed(self) -> bool:
        """Tell whether there is no connection."""
        return self._state == "closed"

    @property
    def wants_connection(self) -> bool:
        """Tell whether somebody waits for something."""
        return bool(self._requests)

    # ---- Requests ----

    def ask(
        self, request: str, kind: str, body: messages.Body, now: float, deadline: float | None
    ) -> None:
        """Take on a request; it is sent now, or when there is room or a connection.

        Args:
            request: its id, not used before.
            kind: its kind; `hello` is answered when this client is let in.
            body: its body.
            now: the present.
            deadline: until when an answer is of use; none for ever.

        Raises:
            Overloaded: this client has too many requests without an answer already.
            InvalidRequest, PayloadTooLarge: the body cannot be sent.

        """
        packed = b"" if kind == "hello" else encode_body(body)
        if len(self._requests) >= QUEUE_REQUESTS_MAX:
            raise Overloaded(resource="pending_count", limit=QUEUE_REQUESTS_MAX)
        if self._bytes + len(packed) > QUEUE_BYTES_MAX and self._requests:
            raise Overloaded(resource="pending_bytes", limit=QUEUE_BYTES_MAX)
        made = _Request(request, kind, packed, deadline, LANES.get(kind, "short"))
        if isinstance(body, messages.Watch):
            made.watch = body
        self._frame(made, now)  # refuses a body that is too large before anything is kept
        self._requests[request] = made
        self._bytes += len(packed)
        if deadline is not None:
            heappush(self._due, (deadline, request))
        if kind == "hello":
            return
        self._lanes[made.lane].append(request)
        self._pump(now)

    def drop(self, request: str) -> None:
        """Forget a request: nobody waits for its answer any more. A watch is ended."""
        made = self._take(request)
        if made is not None and made.kind == "watch" and made.sent and self._state == "open":
            body = encode_body(messages.Unwatch(watch=request))
            self._unwatched += 1
            self._out.append(door_frame(Header("unwatch", f"{request}u{self._unwatched}"), body))

    def expire(self, now: float) -> list[Event]:
        """Refuse what has waited until its deadline."""
        events: list[Event] = []
        while self._due and self._due[0][0] <= now:
            made = self._take(heappop(self._due)[1])
            if made is not None:
                events.append(Refused(made.id, self._too_late(made)))
        return events

    def due(self) -> float | None:
        """Give the first deadline, none if nobody set one."""
        while self._due and self._due[0][1] not in self._requests:
            heappop(self._due)
        return self._due[0][0] if self._due else None

    def give_up(self, error: CallboardError) -> list[Event]:
        """Refuse everything: there is no plane to ask.

        A `down` that was sent is answered well: no plane is what it asked for.
        """
        events: list[Event] = []
        for made in list(self._requests.values()):
            self._take(made.id)
            if made.kind == "down" and made.tried and isinstance(error, PlaneNotRunning):
                events.append(Answered(made.id, messages.Ok()))
            else:
                events.append(Refused(made.id, error))
        return events

    def _take(self, request: str) -> _Request | None:
        made = self._requests.pop(request, None)
        if made is None:
            return None
        self._bytes -= len(made.body)
        if made.sent:
            self._under_way[made.lane] -= 1
        if len(self._due) > 2 * len(self._requests) + 64:
            self._due = [entry for entry in self._due if entry[1] in self._requests]
            heapify(self._due)
        return made

    def _too_late(self, made: _Request) -> CallboardError:
        """Say why there was no answer: nobody let us in, or it took too long."""
        if self._state != "open" and isinstance(self._obstacle, Overloaded):
            return self._obstacle
        return DeadlineExceeded(scope=made.kind)

    # ---- The connection ----

    def connected(self, token: str) -> None:
        """Begin a connection: say who we are, with the token of the home as it stands now."""
        self._state = "greeting"
        self._unframer = Unframer(CLIENT_MESSAGE_BYTES_MAX)
        hello = messages.Hello(protocol=PROTOCOL, token=token, client=self._name)
        self._out = [door_frame(Header("hello", "hello"), encode_body(hello))]

    def hindered(self, error: CallboardError) -> None:
        """Remember why there is no connection, for those whose time runs out meanwhile."""
        self._obstacle = error

    def lost(self) -> None:
        """End a connection: what has no answer yet is sent again on the next one, in order."""
        self._state = "closed"
        self._out = []
        for lane in self._lanes.values():
            lane.clear()
        self._under_way = {"urgent": 0, "short": 0, "long": 0}
        for made in self._requests.values():
            made.sent = False
            if made.kind != "hello":
                self._lanes[made.lane].append(made.id)

    def output(self) -> bytes:
        """Take what is to be written to the connection, in order."""
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out = []
        return data

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Take what was read from the connection.

        Args:
            data: the bytes; what is no message of ours ends the connection, not the requests.
            now: the present.

        """
        events: list[Event] = []
        try:
            payloads = self._unframer.feed(data)
            for payload in payloads:
                header, body = decode_door(payload)
                self._message(header, body, now, events)
        except CallboardError as error:
            events.append(Shut(error))
        self._pump(now)
        return events

    def _message(
        self, header: Header, body: Mapping[str, object], now: float, events: list[Event]
    ) -> None:
        if header.kind == "error":
            self._refusal(header.cid, CallboardError.from_wire(body), events)
        elif header.kind == "welcome":
            self._welcomed(cast("messages.Welcome", validate_body("welcome", body)), now, events)
        elif (made := self._requests.get(header.cid)) is not None:
            self._answer(made, header.kind, body, events)

    def _welcomed(self, welcome: messages.Welcome, now: float, events: list[Event]) -> None:
        self.welcome = welcome
        self._state = "open"
        self._obstacle = None
        for made in [made for made in self._requests.values() if made.kind == "hello"]:
            self._take(made.id)
            events.append(Answered(made.id, welcome))
        self._pump(now)

    def _refusal(self, cid: str, error: CallboardError, events: list[Event]) -> None:
        """Hand a refusal to its request; one of the connection itself ends the connection."""
        if cid and cid != "hello":
            if self._take(cid) is not None:
                events.append(Refused(cid, error))
            return
        self._obstacle = error
        if isinstance(error, ProtocolUnsupported):
            events.extend(self.give_up(error))  # no other try will end better
        events.append(Shut(error))

    def _answer(
        self, made: _Request, kind: str, body: Mapping[str, object], events: list[Event]
    ) -> None:
        try:
            if kind != ANSWERS[made.kind]:
                raise InvalidRequest(field="kind", reason="kind")
            answer = validate_body(kind, body)
        except InvalidRequest:
            self._take(made.id)
            events.append(Refused(made.id, Internal("The plane gave an answer that is none.")))
            return
        if made.watch is not None and isinstance(answer, messages.Records):
            following = answer.last_seq + 1
            if following > made.watch.from_seq:
                made.watch = made.watch.model_copy(update={"from_seq": following})
                events.append(Streamed(made.id, answer))
            return
        self._take(made.id)
        events.append(Answered(made.id, answer))

    # ---- Sending ----

    def _pump(self, now: float) -> None:
        """Send as many of the waiting requests as the door allows, the urgent ones first."""
        if self._state != "open":
            return
        self._pump_lane("urgent", CLIENT_REQUESTS_PENDING_MAX, CLIENT_REQUESTS_PENDING_MAX, now)
        self._pump_lane("short", WINDOW, WINDOW, now)
        self._pump_lane("long", WINDOW, WINDOW_LONG, now)

    def _pump_lane(self, lane: Lane, all_max: int, lane_max: int, now: float) -> None:
        waiting, under_way = self._lanes[lane], self._under_way
        while waiting and under_way[lane] < lane_max and sum(under_way.values()) < all_max:
            made = self._requests.get(waiting.popleft())
            if made is None:
                continue
            self._out.append(self._frame(made, now))
            made.sent = made.tried = True
            under_way[lane] += 1

    def _frame(self, made: _Request, now: float) -> bytes:
        left = 0
        if made.deadline is not None:
            left = min(max(ceil((made.deadline - now) * 1000), 1), TURN_DEADLINE_MS_MAX)
        body = made.body if made.watch is None else encode_body(made.watch)
        return door_frame(Header(made.kind, made.id, deadline=left), body)


def is_final(error: CallboardError, token: str, tried: str) -> bool:
    """Tell whether a connection's refusal will be the same at every further try.

    Args:
        error: why the connection was shut.
        token: the operator token of the home as it stands now.
        tried: the one that the refused connection gave; a plane that has just started writes a new
            one, so only the same token twice is a final no.

    """
    return isinstance(error, NotAuthenticated) and token == tried


def retry_delay(attempt: int, draw: float) -> float:
    """Give the seconds to wait before the next try to connect.

    Args:
        attempt: how many tries have failed, from 1.
        draw: a random number from 0 to 1, so that many clients do not come back at once.

    """
    base: int = min(RETRY_MS * 2 ** min(attempt - 1, 16), RETRY_MS_MAX)
    return base * (0.5 + draw / 2) / 1000


class Feed:
    """Lines of a watch that have come and were not taken yet, in order and each once.

    A reader that is slower than its session gets what fits into WATCH_BYTES_MAX; then the feed is
    `lapsed`: the watch is ended, the lines are read, and a new watch begins behind them. So nothing
    is lost, and memory is bounded.

    Args:
        from_seq: the first line asked for.

    """

    def __init__(self, from_seq: int) -> None:
        self.next_seq = from_seq
        """The first line that has not come."""
        self.lapsed = False
        self._lines: deque[bytes] = deque()
        self._bytes = 0

    def add(self, records: messages.Records) -> None:
        """Take in a piece, unless it was seen, or there is no room."""
        if self.lapsed or records.last_seq < self.next_seq:
            return
        if self._lines and self._bytes >= WATCH_BYTES_MAX:
            self.lapsed = True
            return
        self._lines.extend(records.lines)
        self._bytes += sum(map(len, records.lines))
        self.next_seq = records.last_seq + 1

    def take(self) -> bytes | None:
        """Give the next line without its LF, none if it has not come."""
        if not self._lines:
            return None
        line = self._lines.popleft()
        self._bytes -= len(line)
        return line.removesuffix(b"\n")


# ---- What an operation's message is ----

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def scalars(text: str) -> str:
    """Replace each lone surrogate by U+FFFD, as storage would (REC-9)."""
    return _SURROGATE.sub("�", text)


def _scalars_of(value: object) -> object:
    if isinstance(value, str):
        return scalars(value)
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, object]", value).items()
        return {scalars(str(key)): _scalars_of(item) for key, item in entries}
    if isinstance(value, list | tuple):
        return [_scalars_of(item) for item in cast("list[object]", value)]
    return value


def seconds_left(timeout: float | None, now: float) -> float | None:
    """Turn a timeout into a deadline.

    Args:
        timeout: seconds, above 0; none for ever.
        now: the present.

    Raises:
        InvalidRequest: no number, not above 0, or not finite.

    """
    if timeout is None:
        return None
    if not 0 < timeout < float("inf"):
        raise InvalidRequest(field="timeout", reason="out_of_range")
    return now + timeout


def content_of(text: str) -> list[dict[str, object]]:
    """Give the content of an input that is one text, as it is kept and as digests see it.

    Raises:
        PayloadTooLarge: it is longer than any text may be (ART-4).

    """
    return cut([{"type": "text", "text": scalars(text)}]).parts


def send_body(
    session: str,
    text: str,
    message_id: str,
    busy_mode: str,
    metadata: Mapping[str, object] | None,
) -> messages.Send:
    """Make a send out of what a caller gave.

    Raises:
        InvalidRequest: a field does not fit.
        PayloadTooLarge: the text is longer than any may be (ART-4).

    """
    check_text(spelled := scalars(text))
    body = validate_body(
        "send",
        {
            "session": session,
            "message_id": message_id,
            "content": [{"type": "text", "text": spelled}],
            "busy_mode": busy_mode,
            "metadata": _scalars_of(metadata or {}),
        },
    )
    return cast("messages.Send", body)


def create_body(
    *,
    key: str,
    workspace: str,
    session_id: str,
    agent: str,
    title: str | None,
    model: str | None,
    settings: Mapping[str, str] | None,
) -> messages.CreateSession:
    """Make the creation of a session out of what a caller gave.

    Raises:
        InvalidRequest: a field does not fit.

    """
    body = validate_body(
        "create_session",
        {
            "key": key,
            "workspace": workspace,
            "session_id": session_id,
            "agent": scalars(agent),
            "title": None if title is None else scalars(title),
            "model": None if model is None else scalars(model),
            "settings": _scalars_of(settings or {}),
        },
    )
    return cast("messages.CreateSession", body)


def cancel_body(
    session: str, turn_id: str | None, message_id: str | None, keep_input: bool
) -> messages.Cancel:
    """Make a cancel out of what a caller gave.

    Raises:
        InvalidRequest: a field does not fit.

    """
    fields = {
        "session": session,
        "turn_id": turn_id,
        "message_id": message_id,
        "keep_input": keep_input,
    }
    return cast("messages.Cancel", validate_body("cancel", fields))
