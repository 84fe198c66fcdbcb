"""The gateway process at its real sockets: what it says, and what it lives through."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from callboard import messages as m
from callboard.limits import (
    BUS_MESSAGE_BYTES_MAX,
    CLIENT_BAD_INPUT_MAX,
    CLIENT_HANDSHAKE_MS,
    CLIENT_MESSAGE_BYTES_MAX,
    CLIENT_REQUESTS_PENDING_MAX,
    EXTRA_BYTES_MAX,
    ITEM_METADATA_BYTES_MAX,
)
from callboard.peer import mint_token
from tests.actors.gateway.rig import TOKEN, Rig, ref
from tests.system.doorclient import Closed, message

HOSTILE = int(os.environ.get("CALLBOARD_TEST_HOSTILE", "10000"))


@pytest.fixture
def rig(base: Path) -> Iterator[Rig]:
    made = Rig(base)
    yield made.start()
    made.stop()


def hello(token: str = TOKEN, protocol: object = 1, **more: object) -> bytes:
    return message("hello", {"protocol": protocol, "token": token, **more}, "hello")


def send_body(session: str = "a", message_id: str = "m1", **more: object) -> dict[str, object]:
    return {
        "session": ref(session),
        "message_id": message_id,
        "content": [{"type": "text", "text": "hi"}],
        **more,
    }


# ---- Hello ----


@pytest.mark.rule("RTE-7", "FLT-62")
def test_a_hello_is_welcomed_and_what_came_with_it_is_handled_after_it(rig: Rig) -> None:
    with rig.wire() as wire:
        first, second = hello(client="me"), message("status", {}, "s1")
        wire.send_raw(b"".join(struct.pack("<I", len(p)) + p for p in (first, second)))
        welcome, status = wire.receive(), wire.receive()
        assert (welcome["kind"], welcome["cid"]) == ("welcome", "hello")
        assert welcome["body"] == {"protocol": 1, "plane_id": "01plane", "gateway_epoch": 1}
        assert (status["kind"], status["cid"]) == ("plane_status", "s1")


@pytest.mark.rule("RTE-7", "FLT-41", "FLT-62", "PRN-4")
@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (hello("0" * 64), {"code": "not_authenticated"}),
        (hello(""), {"code": "not_authenticated"}),
        (hello("\u00e9" * 64), {"code": "not_authenticated"}),
        (hello(protocol=99), {"code": "protocol_unsupported", "min": 1, "max": 1}),
        (
            msgpack.packb({"v": 99, "kind": "hello", "id": "hello", "body": {}}),
            {"code": "protocol_unsupported", "min": 1, "max": 1},
        ),
        (message("status", {}, "s1"), None),
        (hello(protocol=True), None),
        (hello(extra=1), None),
        (b"not msgpack", None),
        (b"", None),
    ],
)
def test_anything_else_ends_the_connection_and_reaches_nothing(
    rig: Rig, payload: bytes, error: dict[str, object] | None
) -> None:
    with rig.wire() as wire:
        wire.send_payload(payload)
        with suppress(BrokenPipeError):
            wire.send_payload(message("create_session", {}, "c"))
        if error is not None:
            assert wire.receive()["body"] == error
        assert wire.is_closed()
    assert [body.kind for body in rig.stored] == ["gateway_hello"]


@pytest.mark.rule("FLT-41")
@pytest.mark.parametrize("half", [b"", struct.pack("<I", 90) + hello()[:40]])
def test_no_hello_in_time_ends_the_connection(rig: Rig, half: bytes) -> None:
    with rig.wire() as wire:
        started = time.monotonic()
        wire.send_raw(half)
        assert wire.is_closed()
        assert time.monotonic() - started >= CLIENT_HANDSHAKE_MS / 1000 - 0.05


@pytest.mark.rule("RTE-7")
@pytest.mark.parametrize("token", [TOKEN, "0" * 64])
def test_a_second_hello_is_refused_and_the_first_stays(rig: Rig, token: str) -> None:
    with rig.connect() as client:
        client.send_payload(hello(token).replace(b"\xa5hello\xa4body", b"\xa5again\xa4body"))
        answer = client.receive()
        assert answer["body"] == {"code": "invalid_request", "field": "kind", "reason": "kind"}
        assert client.call("status")["kind"] == "plane_status"


# ---- Bad input (reliability page, section 9) ----


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


PADDED = message("status", {}, "x1")
BAD: list[tuple[str, bytes, dict[str, object]]] = [
    ("unknown kind", message("nonsense", {}, "x1"), {"reason": "kind", "field": "kind"}),
    ("a kind of the bus", message("append", {}, "x1"), {"reason": "kind", "field": "kind"}),
    ("an answer", message("receipt", {}, "x1"), {"reason": "kind", "field": "kind"}),
    ("unknown field", message("status", {"x": 1}, "x1"), {"reason": "field", "field": "x"}),
    ("missing field", message("wait", {"session": ref("a")}, "x1"), {"reason": "field"}),
    (
        "true where int",
        message("watch", {"session": ref("a"), "from_seq": True}, "x1"),
        {"reason": "type", "field": "from_seq"},
    ),
    (
        "1.0 where int",
        message("watch", {"session": ref("a"), "from_seq": 1.0}, "x1"),
        {"reason": "type", "field": "from_seq"},
    ),
    (
        "depth 65",
        message("send", send_body(metadata={"deep": nested(65)}), "x1"),
        {"reason": "too_deep"},
    ),
    ("4 G items", PADDED[:-1] + b"\x81\xa1x\xdd\xff\xff\xff\xff", {"reason": "malformed"}),
    ("a trailing byte", PADDED + b"\x00", {"reason": "malformed"}),
    ("an ext type", PADDED[:-1] + b"\x81\xa1x\xd4\x01\x00", {"reason": "malformed"}),
    ("a number as key", PADDED[:-1] + b"\x81\x01\x01", {"reason": "malformed"}),
    ("equal keys", PADDED[:-1] + b"\x82\xa1x\x01\xa1x\x01", {"reason": "duplicate_key"}),
    (
        "NaN",
        message("send", send_body(metadata={"n": float("nan")}), "x1"),
        {"reason": "not_finite"},
    ),
    (
        "2^53",
        message("send", send_body(metadata={"n": 2**53}), "x1"),
        {"reason": "int_range"},
    ),
    ("invalid UTF-8", PADDED[:-1] + b"\x81\xa1x\xa2\xff\xfe", {"reason": "encoding"}),
    ("a surrogate", PADDED[:-1] + b"\x81\xa1x\xa3\xed\xa0\x80", {"reason": "encoding"}),
    ("deadline 0", message("status", {}, "x1", deadline=0), {"reason": "deadline"}),
    ("deadline -1", message("status", {}, "x1", deadline=-1), {"reason": "deadline"}),
    ("deadline 10^18", message("status", {}, "x1", deadline=10**18), {"reason": "deadline"}),
    ("no id", message("status", {}), {"reason": "field", "field": "id"}),
    (
        "a session that is none",
        message("wait", {"session": "../../etc", "message_id": "m"}, "x1"),
        {"reason": "format", "field": "workspace"},
    ),
    (
        "a path as session",
        message("wait", {"session": ref(".."), "message_id": "m"}, "x1"),
        {"reason": "format", "field": "session_id"},
    ),
    (
        "a message id that is none",
        message("send", send_body(message_id="a b"), "x1"),
        {"reason": "format", "field": "message_id"},
    ),
    (
        "bytes in metadata",
        message("send", send_body(metadata={"b": b"x"}), "x1"),
        {"reason": "type", "field": "metadata"},
    ),
    (
        "no content",
        message("send", {**send_body(), "content": []}, "x1"),
        {"reason": "empty", "field": "content"},
    ),
    (
        "a relative workspace",
        message(
            "create_session",
            {"key": "0" * 32, "workspace": "rel", "session_id": "s", "agent": "echo"},
            "x1",
        ),
        {"reason": "format", "field": "workspace"},
    ),
    (
        "a workspace with NUL",
        message(
            "create_session",
            {"key": "0" * 32, "workspace": "/a\0b", "session_id": "s", "agent": "echo"},
            "x1",
        ),
        {"reason": "nul", "field": "workspace"},
    ),
]


@pytest.mark.rule("FLT-56", "FLT-54", "RLB-20", "FLT-48")
def test_bad_messages_are_refused_with_their_reasons_and_nothing_is_stored(rig: Rig) -> None:
    for title, payload, expected in BAD:
        with rig.connect() as client:
            client.send_payload(payload)
            answer = client.receive()
            assert answer["kind"] == "error", title
            assert answer["body"]["code"] == "invalid_request", (title, answer)
            found = {key: answer["body"].get(key) for key in expected}
            assert found == expected, title
            known = "" if title in ("no id",) else "x1"
            if title not in (
                "4 G items",
                "a trailing byte",
                "an ext type",
                "invalid UTF-8",
                "a surrogate",
            ):
                assert answer.get("cid", "") == known, title
            assert client.call("status")["kind"] == "plane_status", "the connection stays open"
    assert [body.kind for body in rig.stored] == ["gateway_hello"]


@pytest.mark.rule("FLT-54", "FLT-58", "T-8")
@pytest.mark.parametrize(
    "payload",
    [
        b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93.",
        b'{"v": 1, "kind": "status"}',
        random.Random(1).randbytes(65_536),
    ],
)
def test_what_is_no_message_is_malformed(rig: Rig, payload: bytes) -> None:
    with rig.connect() as client:
        client.send_payload(payload)
        assert client.receive()["body"] == {"code": "invalid_request", "reason": "malformed"}


@pytest.mark.rule("FLT-56")
@pytest.mark.parametrize("size", [CLIENT_MESSAGE_BYTES_MAX + 1, 2**32 - 1])
def test_a_length_above_the_limit_is_told_and_closed(rig: Rig, size: int) -> None:
    with rig.connect() as client:
        client.send_raw(struct.pack("<I", size) + b"x" * 1_000)
        assert client.receive()["body"] == {
            "code": "payload_too_large",
            "limit": "CLIENT_MESSAGE_BYTES_MAX",
            "maximum": CLIENT_MESSAGE_BYTES_MAX,
        }
        assert client.is_closed()


@pytest.mark.rule("FLT-56")
@pytest.mark.parametrize(
    ("payload", "limit"),
    [
        (
            message("send", send_body(metadata={"x": "y" * ITEM_METADATA_BYTES_MAX}), "x1"),
            "ITEM_METADATA_BYTES_MAX",
        ),
        (
            message(
                "create_session",
                {
                    "key": "0" * 32,
                    "workspace": "/tmp",
                    "session_id": "s",
                    "agent": "echo",
                    "extra": {"x": "y" * EXTRA_BYTES_MAX},
                },
                "x1",
            ),
            "EXTRA_BYTES_MAX",
        ),
    ],
)
def test_free_form_fields_have_their_limits(rig: Rig, payload: bytes, limit: str) -> None:
    with rig.connect() as client:
        client.send_payload(payload)
        answer = client.receive()
        assert answer["cid"] == "x1"
        assert (answer["body"]["code"], answer["body"]["limit"]) == ("payload_too_large", limit)


@pytest.mark.rule("FLT-59")
def test_too_much_bad_input_ends_a_connection_and_no_other(rig: Rig) -> None:
    with rig.connect() as bad, rig.connect() as good:
        for n in range(CLIENT_BAD_INPUT_MAX - 1):
            bad.send("nonsense", {}, f"x{n}")
            assert bad.receive()["body"]["code"] == "invalid_request"
        assert bad.call("status")["kind"] == "plane_status"
        bad.send("nonsense", {}, "last")
        assert bad.receive()["body"]["code"] == "invalid_request"
        assert bad.is_closed()
        assert good.call("status")["kind"] == "plane_status"


@pytest.mark.rule("FLT-59", "T-13")
def test_too_many_unanswered_requests_are_overloaded_but_cancel_is_not(rig: Rig) -> None:
    with rig.connect() as client:
        waits = [
            client.ask("wait", session=ref("a"), message_id=f"m{n}")
            for n in range(CLIENT_REQUESTS_PENDING_MAX)
        ]
        refused = client.call("wait", session=ref("a"), message_id="more")
        assert refused["body"] == {
            "code": "overloaded",
            "resource": "pending_count",
            "limit": CLIENT_REQUESTS_PENDING_MAX,
        }
        assert client.call("cancel", session=ref("a"))["kind"] == "cancel_result"
        assert len(waits) == CLIENT_REQUESTS_PENDING_MAX


def test_an_id_in_use_is_refused(rig: Rig) -> None:
    with rig.connect() as client:
        client.ask("wait", "same", session=ref("a"), message_id="m")
        client.ask("status", "same")
        answer = client.receive()
        assert answer["body"] == {"code": "invalid_request", "field": "id", "reason": "duplicate"}


# ---- Requests ----


@pytest.mark.rule("ACC-1", "ACC-2")
def test_sends_reach_live_and_passive_sessions(rig: Rig) -> None:
    rig.live("a")
    with rig.connect() as client:
        for session, mode in (("a", None), ("b", "pending")):
            answer = client.answer(client.send_text(ref(session), "m1"))
            assert answer["kind"] == "receipt"
            assert answer["body"]["mode"] == mode
    kinds = [body.kind for body in rig.stored]
    assert kinds == ["gateway_hello", "accept"]
    _, _, deliver = rig.delivered[-1]
    assert isinstance(deliver, m.Deliver)
    accept = rig.stored[-1]
    assert isinstance(accept, m.Accept)
    assert deliver.item.digest == accept.item.digest
    assert accept.item.origin == "user"
    assert accept.item.principal == "principal:operator:local"


@pytest.mark.rule("MET-1", "IDN-2")
def test_a_creation_names_the_canonical_workspace(rig: Rig, base: Path) -> None:
    (base / "real").mkdir()
    (base / "link").symlink_to("real")
    with rig.connect() as client:
        answer = client.call(
            "create_session",
            key="1" * 32,
            workspace=str(base / "link" / "."),
            session_id="s",
            agent="echo",
            settings={"a": "b"},
        )
    assert answer["body"]["fresh"] is True
    create = rig.stored[-1]
    assert isinstance(create, m.Create)
    assert create.session == answer["body"]["session"]
    assert create.session.startswith("real-")
    assert create.record.id == "1" * 32
    assert str(base / "real").encode() in create.record.data


@pytest.mark.rule("ACC-3", "RLB-21")
def test_a_request_of_a_session_that_dies_is_answered_once(rig: Rig) -> None:
    rig.live("a")
    rig.mute.add("a")
    with rig.connect() as client:
        asked = [client.send_text(ref("a"), f"m{n}") for n in range(20)]
        rig.until(lambda: sum(d[1].kind == "deliver" for d in rig.delivered) == 20)
        rig.tell(
            "supervisor",
            m.SessionDown(
                session=ref("a"),
                routing_id=rig.sessions["a"],
                cause="crashed",
                status=-9,
                quarantined=False,
                restarting=True,
            ),
        )
        for request in asked:
            assert client.answer(request)["kind"] == "receipt"
        client.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.receive()


@pytest.mark.rule("RLB-21")
def test_a_gateway_that_is_killed_loses_nothing_that_is_asked_again(rig: Rig) -> None:
    rig.live("a")
    client = rig.connect()
    assert client.answer(client.send_text(ref("a"), "m1"))["body"]["duplicate"] is False
    rig.kill_gateway()
    assert client.is_closed()
    client.close()
    rig.start_gateway()
    assert rig.greeted.wait(20)
    with rig.connect() as again:
        assert again.welcome["body"]["gateway_epoch"] == 2
        assert again.answer(again.send_text(ref("a"), "m1"))["body"]["duplicate"] is True


def test_clients_of_a_gateway_without_storage_wait_for_their_welcome(base: Path) -> None:
    rig = Rig(base).start(storage=False)
    try:
        rig.until(rig.runtime.door.exists)
        with rig.wire() as wire:
            wire.send_payload(hello())
            wire.send_payload(message("status", {}, "early"))
            wire.socket.settimeout(0.3)
            with pytest.raises(TimeoutError):
                wire.receive()
            rig.tell("supervisor", m.StorageGivenUp(detail="x"))
            wire.socket.settimeout(20)
            assert wire.receive()["kind"] == "welcome"
            assert wire.receive()["cid"] == "early"
            wire.send("send", send_body(), "s1")
            assert wire.receive()["body"]["code"] == "storage_unavailable"
            creation = {"key": "1" * 32, "workspace": str(base), "session_id": "a", "agent": "echo"}
            wire.send("create_session", creation, "c1")  # there is no epoch to write it under
            assert wire.receive()["body"]["code"] == "storage_unavailable"
    finally:
        rig.stop()


@pytest.mark.rule("FLT-29")
def test_a_gateway_whose_supervisor_is_gone_ends(rig: Rig) -> None:
    rig.cut_lifeline()
    assert rig.reap_gateway(2) == 0


@pytest.mark.rule("SHD-1")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_gateway_that_stops_answers_what_it_has(rig: Rig, number: signal.Signals) -> None:
    with rig.connect() as client:
        request = client.ask("wait", session=ref("a"), message_id="m")
        client.call("status")
        assert rig.stop_gateway(number) == 0
        assert client.answer(request)["body"]["code"] == "plane_closing"
        assert client.is_closed()
    assert not rig.runtime.door.exists()


@pytest.mark.rule("FLT-34")
def test_signals_that_do_not_stop_it(rig: Rig) -> None:
    with rig.connect() as client:
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGUSR1):
            os.kill(rig.pid, number)
        assert client.call("status")["kind"] == "plane_status"
    trace = rig.home.logs / "gateway.trace"
    assert "most recent call first" in rig.until(trace.read_text)


def test_the_urgent_lane_is_not_behind_other_work(rig: Rig) -> None:
    """A cancel that came in the same batch as many sends is handled first (habit 5)."""
    rig.live("a")
    rig.mute.add("a")
    with rig.connect() as client:
        frames = [message("send", send_body("a", f"m{n}"), f"s{n}") for n in range(50)]
        frames.append(message("cancel", {"session": ref("a")}, "c"))
        client.send_raw(b"".join(struct.pack("<I", len(p)) + p for p in frames))
        rig.until(lambda: len([d for d in rig.delivered if d[1].kind != "registered"]) == 51)
        kinds = [d[1].kind for d in rig.delivered if d[1].kind != "registered"]
        assert kinds.index("cancel_turn") < 50


# ---- Floods ----


def snapshot(rig: Rig) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mode, path.read_bytes())
        for path in sorted(rig.home.root.rglob("*"))
        if path.is_file() and path.parent != rig.home.logs
    }


def hostile(rng: random.Random) -> bytes:
    """Make a message: noise, cut, huge, of another version, or good with bytes turned over."""
    good = message("send", send_body("a", f"h{rng.random()}"), f"h{rng.random()}")
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randrange(0, 400))
        case 1:
            return good[: rng.randrange(len(good))]
        case 2:
            fields: dict[str, Any] = msgpack.unpackb(good)
            fields["v"] = rng.choice([0, 2, -1, "1", None, 2**40])
            packed: bytes = msgpack.packb(fields)
            return packed
        case 3:
            size = rng.choice([10_000, 300_000])
            return message("send", send_body("a", "m", metadata={"x": "y" * size}), "h")
        case _:
            data = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(data)


@pytest.mark.rule("RLB-20", "FLT-54", "FLT-59", "T-13")
@pytest.mark.parametrize("known", [False, True])
def test_ten_thousand_hostile_messages_at_the_door(rig: Rig, known: bool) -> None:
    rng = random.Random(7)
    good = rig.connect()
    before = snapshot(rig)
    sent = 0
    while sent < HOSTILE // 2:
        wire = rig.connect() if known else rig.wire()
        with wire:
            try:
                for _ in range(rng.randrange(1, 40)):
                    sent += 1
                    payload = hostile(rng)
                    if rng.random() < 0.02:
                        wire.send_raw(struct.pack("<I", rng.randrange(2**32)) + payload)
                    else:
                        wire.send_payload(payload)
            except (BrokenPipeError, ConnectionResetError):
                pass
        if sent % 50 == 0:
            assert good.call("status")["kind"] == "plane_status"
    assert rig.lives()
    assert good.call("status")["kind"] == "plane_status"
    good.close()
    assert snapshot(rig) == before
    assert all(isinstance(body, m.GatewayHello | m.Accept) for body in rig.stored)


@pytest.mark.rule("FLT-42", "FLT-44", "RLB-20", "T-2")
def test_ten_thousand_hostile_messages_at_the_bus(rig: Rig) -> None:
    rng = random.Random(8)
    rig.live("a")
    good = rig.connect()
    before = snapshot(rig)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sent = 0
    try:
        while sent < HOSTILE:
            if rng.random() < 0.5:
                sent += _hostile_peer(context, rig, rng)
            else:
                sent += _hostile_bytes(rig, rng)
            if rng.random() < 0.02:
                assert good.call("status")["kind"] == "plane_status"
    finally:
        context.destroy(0)
    assert rig.lives()
    assert good.answer(good.send_text(ref("a"), "after"))["kind"] == "receipt"
    good.close()
    assert snapshot(rig) == before


def _hostile_peer(context: zmq.Context[zmq.Socket[bytes]], rig: Rig, rng: random.Random) -> int:
    """Speak ZeroMQ, without a token, with a wrong one, or with another's routing id."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 100)
    if rng.random() < 0.3:
        dealer.setsockopt(zmq.ROUTING_ID, rig.sessions["a"].encode())
    dealer.connect(f"ipc://{rig.runtime.gateway}")
    count = rng.randrange(1, 100)
    for _ in range(count):
        token = rng.choice(["", "x", mint_token(b"wrong", "session", ref("a"), "0" * 32)])
        header: dict[str, object] = {"v": rng.choice([1, 2]), "kind": "register", "token": token}
        frames = [msgpack.packb(header), rng.randbytes(rng.randrange(200))]
        if rng.random() < 0.3:
            frames = [rng.randbytes(rng.randrange(100)) for _ in range(rng.randrange(1, 5))]
        dealer.send_multipart(frames)
    assert dealer.poll(0) == 0, "no reply"
    dealer.close()
    return count


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)


def _hostile_bytes(rig: Rig, rng: random.Random) -> int:
    """Speak no ZeroMQ, half of it, or a mutated handshake."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(1)
        try:
            raw.connect(os.fspath(rig.runtime.gateway))
            data = bytearray(GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER")
            for _ in range(rng.randrange(0, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            raw.sendall(bytes(data[: rng.randrange(len(data))]) + rng.randbytes(rng.randrange(50)))
        except (OSError, TimeoutError):
            pass
    return 1


@pytest.mark.rule("FLT-42")
def test_a_frame_above_the_bus_limit_costs_its_sender_the_connection(rig: Rig) -> None:
    rig.live("a")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    watch = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.connect(f"ipc://{rig.runtime.gateway}")
    dealer.send_multipart([b"", bytes(BUS_MESSAGE_BYTES_MAX + 1)])
    assert watch.poll(10_000)
    dealer.disable_monitor()
    watch.close(0)
    context.destroy(0)
    with rig.connect() as client:
        assert client.answer(client.send_text(ref("a"), "m1"))["kind"] == "receipt"


@pytest.mark.rule("FLT-44", "F19", "T-3", "T-14")
def test_a_peer_with_a_live_sessions_routing_id_receives_nothing(rig: Rig) -> None:
    rig.live("a")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    thief = context.socket(zmq.DEALER)
    thief.setsockopt(zmq.LINGER, 0)
    thief.setsockopt(zmq.ROUTING_ID, rig.sessions["a"].encode())
    thief.connect(f"ipc://{rig.runtime.gateway}")
    body = msgpack.packb({"session": ref("a"), "epoch": 9, "permit": False, "evictable": True})
    thief.send_multipart([msgpack.packb({"v": 1, "kind": "register", "id": "x"}), body])
    with rig.connect() as client:
        for n in range(20):
            assert client.answer(client.send_text(ref("a"), f"m{n}"))["kind"] == "receipt"
    assert thief.poll(100) == 0
    context.destroy(0)


@pytest.mark.rule("FLT-41", "F16", "RLB-12")
def test_more_connections_than_descriptors_kill_nothing(base: Path) -> None:
    """Limited to 512 descriptors, flooded with ten times as many."""
    import resource

    rig = Rig(base)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))  # inherited by the gateway
    try:
        rig.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    old = [rig.connect() for _ in range(3)]
    flood: list[socket.socket] = []
    answers: list[bytes] = []
    try:
        for n in range(5_120):
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            one.connect_ex(os.fspath(rig.runtime.door))
            flood.append(one)
            if n % 400 == 0:
                assert all(client.call("status")["kind"] == "plane_status" for client in old)
        time.sleep(0.2)
        for one in flood:
            with suppress(OSError):
                answers.append(one.recv(1_000))
    finally:
        for one in flood:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert any(b"overloaded" in answer and b"connections" in answer for answer in answers)
    assert rig.lives()
    with rig.connect() as client:
        assert client.call("status")["kind"] == "plane_status"
    for client in old:
        client.close()
    rig.stop()


@pytest.mark.rule("T-13", "RLB-12")
def test_many_clients_at_once_each_get_all_their_answers(rig: Rig) -> None:
    rig.live("a")
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with rig.connect() as client:
                asked = [client.send_text(ref("a"), f"{number}.{n}") for n in range(40)]
                for request in asked:
                    assert client.answer(request)["kind"] == "receipt"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(rig.inputs.values()) == 400


@pytest.mark.rule("T-13", "FLT-59")
def test_a_client_that_does_not_read_keeps_nobody_waiting(rig: Rig) -> None:
    rig.live("a")
    slow = rig.connect()
    slow.socket.settimeout(1)
    text = "x" * 100_000
    try:
        for n in range(200):
            slow.send("nonsense" * 10, {"x": text}, f"b{n}")
    except (OSError, TimeoutError):
        pass
    with rig.connect() as good:
        assert good.answer(good.send_text(ref("a"), "m"))["kind"] == "receipt"
    slow.close()


def test_closed_is_what_closed_connections_raise(rig: Rig) -> None:
    client = rig.connect()
    rig.kill_gateway()
    with pytest.raises(Closed):
        client.receive()
    client.close()
