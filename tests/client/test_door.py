"""The client's side of the door, without a socket: one answer to each request, always."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from callboard import messages
from callboard.door import (
    QUEUE_REQUESTS_MAX,
    WATCH_BYTES_MAX,
    WINDOW,
    WINDOW_LONG,
    Answered,
    Door,
    Event,
    Feed,
    Refused,
    Shut,
    Streamed,
    is_final,
    retry_delay,
    scalars,
    seconds_left,
    send_body,
)
from callboard.errors import (
    CallboardError,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    PlaneNotRunning,
    ProtocolUnsupported,
)
from callboard.limits import (
    ARTIFACT_CHARS_MAX,
    CLIENT_MESSAGE_BYTES_MAX,
    CLIENT_REQUESTS_PENDING_MAX,
    PROTOCOL,
    TURN_DEADLINE_MS_MAX,
)
from callboard.wire import Header, Unframer, decode_door, door_frame, encode_body, error_body

REF = "demo-" + "0" * 32 + "/s1"
OK = messages.Ok()
WELCOME = messages.Welcome(protocol=PROTOCOL, plane_id="p", gateway_epoch=1)


def receipt(message_id: str = "m") -> messages.Receipt:
    return messages.Receipt(
        accepted=True,
        message_id=message_id,
        duplicate=False,
        item_state="pending",
        delivery="next_turn",
        queued=1,
    )


def said(cid: str, what: messages.Body | CallboardError) -> bytes:
    if isinstance(what, CallboardError):
        return door_frame(Header("error", cid=cid), error_body(what))
    return door_frame(Header(what.kind, cid=cid), encode_body(what))


def frames(data: bytes) -> list[tuple[Header, Mapping[str, object]]]:
    return [decode_door(payload) for payload in Unframer(CLIENT_MESSAGE_BYTES_MAX).feed(data)]


def ids(data: bytes) -> list[str]:
    return [header.id for header, _ in frames(data)]


def opened(now: float = 0) -> Door:
    door = Door("test")
    let_in(door, now)
    return door


def let_in(door: Door, now: float = 0) -> list[Event]:
    door.connected("token")
    ((header, body),) = frames(door.output())
    assert (header.kind, body) == (
        "hello",
        {"protocol": PROTOCOL, "token": "token", "client": "test"},
    )
    return door.receive(said(header.id, WELCOME), now)


def ask_send(door: Door, request: str, deadline: float | None = None) -> None:
    door.ask(request, "send", send_body(REF, "x", request, "steer", None), 0, deadline)


# ---- Sending ----


def test_nothing_but_hello_is_sent_before_the_gateway_has_answered() -> None:
    door = Door("test")
    ask_send(door, "r1")
    assert door.output() == b""
    door.connected("token")
    assert [header.kind for header, _ in frames(door.output())] == ["hello"]
    assert door.receive(said("hello", WELCOME), 0) == []
    assert ids(door.output()) == ["r1"]
    assert door.is_open


def test_a_hello_is_answered_when_the_gateway_lets_us_in() -> None:
    door = Door("test")
    door.ask("h", "hello", OK, 0, 10)
    assert let_in(door) == [Answered("h", WELCOME)]
    assert not door.wants_connection


@pytest.mark.rule("INB-6")
def test_what_has_no_answer_is_sent_again_under_the_same_ids_in_the_same_order() -> None:
    door = opened()
    for request in ("a", "b", "c"):
        ask_send(door, request)
    first = frames(door.output())
    assert door.receive(said("b", receipt("b")), 0) == [Answered("b", receipt("b"))]
    door.lost()
    ask_send(door, "d")
    let_in(door)
    second = frames(door.output())
    assert [header.id for header, _ in second] == ["a", "c", "d"]
    assert second[0][1] == first[0][1]


def test_the_deadline_that_is_sent_is_what_is_left_of_it() -> None:
    door = opened()
    ask_send(door, "a", 30)
    assert frames(door.output())[0][0].deadline == 30_000
    door.lost()
    let_in(door, 12.5)
    assert frames(door.output())[0][0].deadline == 17_500


def test_a_deadline_is_sent_as_one_that_the_door_takes() -> None:
    door = opened()
    ask_send(door, "a", 1e9)
    ask_send(door, "b", 1e-6)
    ask_send(door, "c")
    assert [header.deadline for header, _ in frames(door.output())] == [TURN_DEADLINE_MS_MAX, 1, 0]


def test_no_more_is_under_way_than_the_door_allows() -> None:
    door = opened()
    for number in range(CLIENT_REQUESTS_PENDING_MAX + 50):
        ask_send(door, f"s{number}")
    sent = ids(door.output())
    assert sent == [f"s{number}" for number in range(WINDOW)]
    assert WINDOW < CLIENT_REQUESTS_PENDING_MAX
    door.receive(said("s0", receipt()) + said("s7", receipt()), 0)
    assert ids(door.output()) == [f"s{WINDOW}", f"s{WINDOW + 1}"]


def test_waits_never_keep_sends_from_being_sent() -> None:
    door = opened()
    for number in range(CLIENT_REQUESTS_PENDING_MAX):
        body = messages.Wait(session=REF, message_id="m")
        door.ask(f"w{number}", "wait", body, 0, None)
    assert len(ids(door.output())) == WINDOW_LONG
    ask_send(door, "s")
    assert ids(door.output()) == ["s"]


def test_a_cancel_passes_everything_that_waits() -> None:
    door = opened()
    for number in range(QUEUE_REQUESTS_MAX // 2):
        ask_send(door, f"s{number}")
    door.output()
    door.ask("c", "cancel", messages.Cancel(session=REF), 0, 5)
    assert ids(door.output()) == ["c"]


def test_a_client_does_not_owe_itself_without_end() -> None:
    door = Door()
    for number in range(QUEUE_REQUESTS_MAX):
        ask_send(door, f"s{number}")
    with pytest.raises(Overloaded) as refused:
        ask_send(door, "more")
    assert refused.value.carried["resource"] == "pending_count"
    door.drop("s0")
    ask_send(door, "more")


def test_bytes_that_wait_are_bounded_too() -> None:
    door = Door()
    large = send_body(REF, "\N{GRINNING FACE}" * ARTIFACT_CHARS_MAX, "m", "steer", None)

    def ask_until_refused() -> None:
        for number in range(QUEUE_REQUESTS_MAX):
            door.ask(f"r{number}", "send", large, 0, None)

    with pytest.raises(Overloaded) as refused:
        ask_until_refused()
    assert refused.value.carried["resource"] == "pending_bytes"


def test_what_the_door_would_not_take_is_refused_before_it_is_kept() -> None:
    door = opened()
    large = "x" * CLIENT_MESSAGE_BYTES_MAX
    with pytest.raises(PayloadTooLarge):
        door.ask("r", "send", send_body(REF, large, "m", "steer", None), 0, None)
    assert not door.wants_connection
    assert door.output() == b""


# ---- Answers ----


def test_a_refusal_is_the_error_that_it_was() -> None:
    door = opened()
    ask_send(door, "a")
    door.output()
    ((refused),) = door.receive(said("a", NotFound()), 0)
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, NotFound)


@pytest.mark.parametrize(
    ("kind", "body"),
    [("created", {"session": REF, "fresh": True}), ("receipt", {"accepted": True}), ("what", {})],
)
def test_an_answer_that_is_none_is_an_internal_error_of_that_request_alone(
    kind: str, body: dict[str, object]
) -> None:
    import msgpack

    door = opened()
    ask_send(door, "a")
    ask_send(door, "b")
    data = door_frame(Header(kind, cid="a"), msgpack.packb(body)) + said("b", receipt("b"))
    wrong, right = door.receive(data, 0)
    assert isinstance(wrong, Refused)
    assert isinstance(wrong.error, Internal)
    assert right == Answered("b", receipt("b"))


@pytest.mark.parametrize("cid", ["", "nobody", "hello"])
def test_an_answer_that_nobody_waits_for_is_left_aside(cid: str) -> None:
    door = opened()
    assert door.receive(said(cid, receipt()), 0) == []


@given(st.binary(min_size=1, max_size=200))
def test_noise_ends_the_connection_and_no_request(noise: bytes) -> None:
    door = opened()
    ask_send(door, "a")
    events = door.receive(len(noise).to_bytes(4, "little") + noise, 0)
    assert all(isinstance(event, Shut) for event in events)
    door.lost()
    let_in(door)
    assert ids(door.output()) == ["a"]


def test_a_length_above_the_limit_ends_the_connection() -> None:
    door = opened()
    (shut,) = door.receive(b"\xff\xff\xff\xff", 0)
    assert isinstance(shut, Shut)
    assert isinstance(shut.error, PayloadTooLarge)


def test_a_protocol_that_is_not_ours_is_a_final_no() -> None:
    door = Door("test")
    ask_send(door, "a", 30)
    door.connected("token")
    refused, shut = door.receive(said("hello", ProtocolUnsupported(min=9, max=9)), 0)
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, ProtocolUnsupported)
    assert isinstance(shut, Shut)
    assert not door.wants_connection


def test_a_refused_hello_is_a_final_no_only_with_the_same_token() -> None:
    door = Door("test")
    ask_send(door, "a", 30)
    door.connected("old")
    ((shut),) = door.receive(said("hello", NotAuthenticated()), 0)
    assert isinstance(shut, Shut)
    assert shut.error is not None
    assert not is_final(shut.error, "new", "old")
    assert is_final(shut.error, "old", "old")
    assert door.wants_connection


@pytest.mark.rule("FLT-47")
def test_a_full_plane_is_told_when_the_time_is_over() -> None:
    door = Door("test")
    ask_send(door, "a", 5)
    door.connected("token")
    door.receive(said("", Overloaded(resource="connections", limit=256)), 0)
    door.lost()
    assert door.expire(4.9) == []
    ((refused),) = door.expire(5)
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, Overloaded)


def test_a_deadline_is_its_request_s_own() -> None:
    door = opened()
    ask_send(door, "a", 5)
    ask_send(door, "b", 6)
    ask_send(door, "c")
    assert door.due() == 5
    ((refused),) = door.expire(5)
    assert isinstance(refused, Refused)
    assert refused.request == "a"
    assert isinstance(refused.error, DeadlineExceeded)
    assert refused.error.carried == {"scope": "send"}
    assert door.due() == 6
    door.receive(said("b", receipt()), 5)
    assert door.due() is None
    assert door.receive(said("a", receipt()), 6) == []


def test_a_down_is_answered_by_the_plane_s_absence() -> None:
    door = opened()
    door.ask("d", "down", messages.Down(), 0, 5)
    door.ask("s", "status", messages.Status(), 0, 5)
    door.output()
    door.lost()
    done, refused = door.give_up(PlaneNotRunning())
    assert done == Answered("d", OK)
    assert isinstance(refused, Refused)


def test_a_down_that_was_never_sent_is_refused_like_the_rest() -> None:
    door = Door()
    door.ask("d", "down", messages.Down(), 0, 5)
    ((refused),) = door.give_up(PlaneNotRunning())
    assert isinstance(refused, Refused)


# ---- Watching ----


def piece(first: int, last: int) -> messages.Records:
    lines = [b"%d\n" % seq for seq in range(first, last + 1)]
    return messages.Records(session=REF, first_seq=first, last_seq=last, lines=lines)


@pytest.mark.rule("WCH-1")
def test_a_watch_goes_on_behind_what_has_come() -> None:
    door = opened()
    door.ask("w", "watch", messages.Watch(session=REF, from_seq=3), 0, None)
    door.output()
    assert door.receive(said("w", piece(3, 5)), 0) == [Streamed("w", piece(3, 5))]
    assert door.receive(said("w", piece(6, 6)), 0) == [Streamed("w", piece(6, 6))]
    door.lost()
    let_in(door)
    ((header, body),) = frames(door.output())
    assert (header.id, body["from_seq"]) == ("w", 7)
    assert door.receive(said("w", piece(3, 6)), 0) == []


def test_a_watch_that_is_dropped_is_ended_at_the_gateway() -> None:
    door = opened()
    door.ask("w", "watch", messages.Watch(session=REF, from_seq=1), 0, None)
    door.output()
    door.drop("w")
    ((header, body),) = frames(door.output())
    assert (header.kind, body) == ("unwatch", {"watch": "w"})
    assert door.receive(said(header.id, OK) + said("w", piece(1, 2)), 0) == []


def test_a_watch_that_was_never_sent_needs_no_end() -> None:
    door = Door()
    door.ask("w", "watch", messages.Watch(session=REF, from_seq=1), 0, None)
    door.drop("w")
    let_in_quietly(door)
    assert door.output() == b""


def let_in_quietly(door: Door) -> None:
    door.connected("token")
    door.output()
    door.receive(said("hello", WELCOME), 0)


@pytest.mark.rule("WCH-1")
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_a_feed_gives_each_line_once_in_order_however_slowly_it_is_read(
    reads: list[bool], many: int
) -> None:
    feed, read, last = Feed(1), list[bytes](), 24
    size = WATCH_BYTES_MAX // 8
    steps = iter(reads)
    while len(read) < last:
        if next(steps, True) or feed.lapsed:
            while (line := feed.take()) is not None:
                read.append(line)
            feed.lapsed = False
        first = feed.next_seq
        until = min(last, first + many - 1)
        lines = [b"%d" % seq + bytes(size) + b"\n" for seq in range(first, until + 1)]
        feed.add(messages.Records(session=REF, first_seq=first, last_seq=until, lines=lines))
    assert [int(line.rstrip(b"\0")) for line in read] == list(range(1, last + 1))


def test_a_feed_is_bounded() -> None:
    feed = Feed(1)
    while not feed.lapsed:
        feed.add(
            messages.Records(
                session=REF,
                first_seq=feed.next_seq,
                last_seq=feed.next_seq,
                lines=[bytes(1_000_000)],
            )
        )
    assert feed.next_seq <= WATCH_BYTES_MAX // 1_000_000 + 2


# ---- Small things ----


@given(st.text(st.characters(exclude_categories=())))
@pytest.mark.rule("REC-9")
def test_lone_surrogates_become_replacement_characters(text: str) -> None:
    made = scalars(text)
    made.encode()
    assert len(made) == len(text)
    assert made == text or any("\ud800" <= char <= "\udfff" for char in text)


def test_surrogates_in_metadata_too() -> None:
    body = send_body(REF, "\ud800", "m", "steer", {"k\udc00": ["\udfff", {"a": ("b", 1)}]})
    assert body.content[0].text == "�"
    assert body.metadata == {"k�": ["�", {"a": ["b", 1]}]}


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_a_timeout_is_a_time(timeout: float) -> None:
    with pytest.raises(InvalidRequest):
        seconds_left(timeout, 0)


@given(st.integers(1, 100), st.floats(0, 1))
def test_tries_come_less_often_but_never_rarely(attempt: int, draw: float) -> None:
    assert 0.004 < retry_delay(attempt, draw) <= 0.5
    assert retry_delay(attempt, 1) <= retry_delay(attempt + 1, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("session", "x"), ("message_id", "")],
)
def test_a_request_that_does_not_fit_is_refused_before_it_is_sent(field: str, value: str) -> None:
    fields = {"session": REF, "message_id": "m", field: value}
    with pytest.raises(InvalidRequest) as refused:
        send_body(fields["session"], "x", fields["message_id"], "steer", None)
    assert refused.value.carried["field"] == field


# ---- Everything at once ----


@dataclass
class Pending:
    """What the test knows of one request."""

    kind: str
    deadline: float | None
    dropped: bool = False
    answers: list[Event] = field(default_factory=list[Event])


class Doors(RuleBasedStateMachine):
    """A door, a gateway that answers in any order, and connections that end at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.door = Door("test")
        self.now = 0.0
        self.requests: dict[str, Pending] = {}
        self.sent: list[str] = []
        """On the present connection and not answered."""
        self.seen: set[str] = set()
        self.tail = b""

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert not isinstance(event, Shut)
            known = self.requests[event.request]
            assert not known.dropped
            known.answers.append(event)

    def read(self) -> None:
        for header, _ in frames(self.door.output()):
            if header.kind in ("hello", "unwatch"):
                continue
            assert header.id not in self.seen, "sent twice on one connection"
            self.seen.add(header.id)
            self.sent.append(header.id)

    @rule(kind=st.sampled_from(["send", "wait", "cancel"]), wait=st.none() | st.floats(0.1, 50))
    def ask(self, kind: str, wait: float | None) -> None:
        name = f"r{len(self.requests)}"
        deadline = None if wait is None else self.now + wait
        bodies: dict[str, messages.Body] = {
            "send": send_body(REF, name, name, "steer", None),
            "wait": messages.Wait(session=REF, message_id="m"),
            "cancel": messages.Cancel(session=REF),
        }
        self.requests[name] = Pending(kind, deadline)
        self.door.ask(name, kind, bodies[kind], self.now, deadline)
        self.read()

    @precondition(lambda self: self.door.is_closed)
    @rule()
    def connect(self) -> None:
        self.door.connected("token")
        self.seen, self.sent, self.tail = set(), [], b""
        self.take(self.door.receive(said("hello", WELCOME), self.now))
        self.read()
        order = [int(name[1:]) for name in self.sent if self.requests[name].kind == "send"]
        assert order == sorted(order), "sends were repeated in another order"

    @precondition(lambda self: not self.door.is_closed)
    @rule()
    def lose(self) -> None:
        self.door.lost()

    @precondition(lambda self: not self.door.is_closed and self.sent)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        name = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        kind = self.requests[name].kind
        right: dict[str, messages.Body] = {
            "send": receipt(name),
            "wait": messages.WaitOutcome(
                message_id="m",
                item_state="acknowledged",
                input_disposition="acknowledged",
                terminal_seq=1,
            ),
            "cancel": messages.CancelResult(status="cancelled"),
        }
        bytes_ = self.tail + said(name, NotFound() if data.draw(st.booleans()) else right[kind])
        cut = data.draw(st.integers(0, len(bytes_)))
        self.tail = b""
        self.take(self.door.receive(bytes_[:cut], self.now))
        self.take(self.door.receive(bytes_[cut:], self.now))
        self.read()

    @rule(seconds=st.floats(0.01, 20))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.door.expire(self.now))

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        names = [name for name, known in self.requests.items() if not known.answers]
        if names:
            name = data.draw(st.sampled_from(names))
            self.door.drop(name)
            self.requests[name].dropped = True

    @invariant()
    def nothing_is_answered_twice(self) -> None:
        assert all(len(known.answers) <= 1 for known in self.requests.values())

    @invariant()
    def not_too_much_is_under_way(self) -> None:
        assert len(self.sent) <= CLIENT_REQUESTS_PENDING_MAX

    def teardown(self) -> None:
        """Let everything be answered: then nobody waits who did not give up."""
        if self.door.is_closed:
            self.connect()
        while self.sent:
            name = self.sent.pop(0)
            self.take(self.door.receive(said(name, NotFound()), self.now))
            self.read()
        for known in self.requests.values():
            assert len(known.answers) == (0 if known.dropped else 1)
        assert not self.door.wants_connection


TestDoors = Doors.TestCase
