import os
import random
import select
import signal
import socket as unix
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol, TypeVar, cast

import msgpack
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from callboard import peer
from callboard.errors import HomeUnsafe, Overloaded
from callboard.limits import (
    BUS_HANDSHAKE_MS,
    BUS_MESSAGE_BYTES_MAX,
    BUS_QUEUE_MESSAGES_MAX,
    RUNTIME_PATH_BYTES_MAX,
)
from callboard.peer import (
    Arrived,
    Asked,
    BusActor,
    Connected,
    Credentials,
    Disconnected,
    Event,
    Io,
    Posted,
    Timer,
    Unreachable,
    check_token,
    mint_token,
)
from callboard.wire import Header, encode_header

SECRET = b"s" * 32
SCOPE = "demo-" + "0" * 32 + "/s1"
NOBODY = 65_534
PATIENCE_S = 20.0  # how long a test waits for what must come; never how long anything may take
NULL_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)

Found = TypeVar("Found")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


def routing_id(number: int) -> str:
    return f"{number:032x}"


def token_of(number: int, role: str = "session") -> str:
    return mint_token(SECRET, role, SCOPE, routing_id(number))


# A process's loop, in a thread of this one


class Outside:
    """An `Io` as this thread may use it: what belongs to the loop is done in the loop."""

    def __init__(self, io: Io) -> None:
        self.inside = io

    def send(self, link: str, header: Header, body: bytes, to: str = "") -> None:
        self.inside.call_io(lambda: self.inside.send(link, header, body, to))

    def after(self, ms: int, name: str) -> None:
        self.inside.call_io(lambda: self.inside.after(ms, name))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.inside, name)


class Recorder(BusActor):
    """Keeps every event, and answers what it is told to."""

    def __init__(self, io: Io, plant: "Plant") -> None:
        super().__init__(io)
        self.plant = plant

    def handle(self, events: list[Event]) -> None:
        for event in events:
            self.plant.events.put(event)
            self.plant.react(self.io, event)


def nothing(*_: object) -> None:
    """React in no way, set up nothing, demand nothing."""


class Plant:
    """An Io that runs in a thread, with a recording actor."""

    def __init__(
        self,
        set_up: Callable[[Io], None],
        react: Callable[[Io, Event], None] = nothing,
        **options: Any,  # noqa: ANN401
    ) -> None:
        self.react = react
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.log: list[tuple[str, Mapping[str, object]]] = []
        self.status: int | None = None
        self.failure: BaseException | None = None
        self._ready = threading.Event()
        self._set_up = set_up
        self._options = options
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._ready.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            io = Io(log=lambda action, facts: self.log.append((action, facts)), **self._options)
            self.io = Outside(io)
            self._set_up(io)
        except BaseException as failure:
            self.failure = failure
            cast("Any", self.io)._close()
            return
        finally:
            self._ready.set()
        self.status = io.run(lambda io: Recorder.start(io, self))

    def stop(self) -> None:
        self.io.stop(0)
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def next(self, kind: type[Found]) -> Found:
        """Wait for the next event of a kind, passing over others."""
        while True:
            event = self.events.get(timeout=PATIENCE_S)
            if isinstance(event, kind):
                return event

    def all_so_far(self) -> list[Event]:
        """Give what came until now, everything sent before included."""
        self.io.after(0, "so far")
        events: list[Event] = []
        while not isinstance(event := self.events.get(timeout=PATIENCE_S), Timer):
            events.append(event)
        return events

    def actions(self) -> list[str]:
        return [action for action, _ in self.log]


@pytest.fixture(autouse=True)
def _no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would end a process ends a thread here; the real thing is tried in child processes."""

    def fail(log: object, action: str, error: BaseException | None) -> NoReturn:
        raise RuntimeError(action) from error

    monkeypatch.setattr(peer, "_end_process", fail)


@pytest.fixture
def bus() -> Iterator[Path]:
    """A folder whose sockets' paths are short enough, wherever pytest's own folder is."""
    with tempfile.TemporaryDirectory(prefix="cb", dir="/tmp") as folder:
        yield Path(folder)


class Start(Protocol):
    def __call__(
        self,
        set_up: Callable[[Io], None],
        react: Callable[[Io, Event], None] = ...,
        **options: Any,  # noqa: ANN401
    ) -> Plant: ...


@pytest.fixture
def start() -> Iterator[Start]:
    plants: list[Plant] = []

    def begin(
        set_up: Callable[[Io], None],
        react: Callable[[Io, Event], None] = nothing,
        **options: Any,  # noqa: ANN401
    ) -> Plant:
        plants.append(Plant(set_up, react, **options))
        return plants[-1]

    yield begin
    for plant in reversed(plants):
        if plant.thread.is_alive():
            plant.stop()


def routed(bus: Path, name: str = "gateway") -> Callable[[Io], None]:
    return lambda io: io.bind_router(name, bus / f"{name}.sock", SECRET, bus / "bind.lock")


def dealt(bus: Path, number: int, token: str | None = None) -> Callable[[Io], None]:
    credential = token_of(number) if token is None else token
    path = bus / "gateway.sock"
    return lambda io: io.connect_dealer("gateway", path, routing_id(number), credential)


def echo(io: Io, event: Event) -> None:
    if isinstance(event, Arrived) and event.peer:
        answer = Header("ok", cid=event.header.id)
        io.send(event.link, answer, event.body, event.peer.routing_id)


@pytest.fixture
def raw() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """Plain dealers, for what no honest process sends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealers: list[zmq.Socket[bytes]] = []

    def connect(bus: Path, identity: str) -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        dealers.append(dealer)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, identity.encode())
        dealer.connect(f"ipc://{bus / 'gateway.sock'}")
        return dealer

    yield connect
    for dealer in dealers:
        dealer.close(0)
    context.term()


Raw = Callable[..., zmq.Socket[bytes]]


def request(number: int, name: str = "1", token: str | None = None) -> list[bytes]:
    header = Header("status", name, token=token_of(number) if token is None else token)
    return [encode_header(header), b"\x80"]


def is_answered(dealer: zmq.Socket[bytes], message: Sequence[bytes]) -> bool:
    dealer.send_multipart(message)
    return answer_of(dealer)


def answer_of(dealer: zmq.Socket[bytes]) -> bool:
    if not dealer.poll(int(PATIENCE_S * 1000)):
        return False
    dealer.recv_multipart()
    return True


def settle(dealer: zmq.Socket[bytes], own: int) -> None:
    """Wait until the router has dealt with all that other peers sent before."""
    for round_trip in range(20):
        assert is_answered(dealer, request(own, str(round_trip)))


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread or process does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def child(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )


# Credentials


@given(st.binary(min_size=1), st.text("abc-/._", max_size=9), st.text("abc-/._", max_size=9))
def test_a_token_proves_its_role_scope_and_routing_id(secret: bytes, role: str, scope: str) -> None:
    token = mint_token(secret, role, scope, routing_id(1))
    assert check_token(secret, token, routing_id(1)) == Credentials(role, scope, routing_id(1))
    assert check_token(secret, token, routing_id(2)) is None
    assert check_token(secret + b"x", token, routing_id(1)) is None


@pytest.mark.parametrize(
    "token",
    [
        "",
        "|",
        "||",
        "session",
        "session||",
        token_of(1)[:-1],
        token_of(1).upper(),
        token_of(1).replace("session", "supervisor"),
        token_of(1).replace("s1", "s2"),
        "sessi\u00f6n|x|" + "0" * 64,
        "session\0|" + token_of(1).partition("|")[2],
    ],
)
def test_another_token_proves_nothing(token: str) -> None:
    assert check_token(SECRET, token, routing_id(1)) is None


def test_a_routing_id_that_is_no_text_of_ours_proves_nothing() -> None:
    assert check_token(SECRET, mint_token(SECRET, "session", "", "\u00e9"), "\u00e9") is None


# Messages between processes


def test_a_request_reaches_the_router_and_its_answer_the_dealer(bus: Path, start: Start) -> None:
    gateway = start(routed(bus), echo)
    session = start(dealt(bus, 1))
    session.next(Connected)
    session.io.send("gateway", Header("status", "r1", deadline=500), b"body")
    arrived = gateway.next(Arrived)
    assert arrived.peer == Credentials("session", SCOPE, routing_id(1))
    assert arrived.header == Header("status", "r1", token=token_of(1), deadline=500)
    assert arrived.body == b"body"
    answer = session.next(Arrived)
    assert (answer.link, answer.peer, answer.header) == ("gateway", None, Header("ok", cid="r1"))


def test_what_is_sent_before_there_is_a_router_waits_in_order(bus: Path, start: Start) -> None:
    session = start(dealt(bus, 1))
    for number in range(50):
        session.io.send("gateway", Header("status", str(number)), b"")
    gateway = start(routed(bus))
    assert [gateway.next(Arrived).header.id for _ in range(50)] == [str(n) for n in range(50)]


def test_the_order_of_a_peer_is_kept_both_ways(bus: Path, start: Start) -> None:
    start(routed(bus), echo)
    session = start(dealt(bus, 1))
    session.next(Connected)
    expected = [str(number) for number in range(3_000)]
    for first in range(0, 3_000, 500):
        for number in range(first, first + 500):
            session.io.send("gateway", Header("status", str(number)), b"")
        got = [session.next(Arrived).header.cid for _ in range(500)]
        assert got == expected[first : first + 500]


def test_large_bodies_pass_up_to_the_limit_and_no_further(bus: Path, start: Start) -> None:
    gateway = start(routed(bus), echo)
    session = start(dealt(bus, 1))
    session.next(Connected)
    session.io.send("gateway", Header("status", "1"), bytes(BUS_MESSAGE_BYTES_MAX))
    assert len(gateway.next(Arrived).body) == BUS_MESSAGE_BYTES_MAX
    assert len(session.next(Arrived).body) == BUS_MESSAGE_BYTES_MAX
    inside = session.io.inside
    with pytest.raises(ValueError, match="BUS_MESSAGE_BYTES_MAX"):
        inside.send("gateway", Header("status", "1"), bytes(BUS_MESSAGE_BYTES_MAX + 1))
    with pytest.raises(KeyError):
        inside.send("nowhere", Header("status", "1"), b"")


@pytest.mark.rule("FLT-33")
def test_sockets_are_touched_by_the_thread_that_made_them_alone(
    bus: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[zmq.Socket[bytes], set[int]] = {}

    def watched(name: str) -> None:
        real = getattr(zmq.Socket, name)

        def call(self: zmq.Socket[bytes], *args: object, **options: object) -> object:
            threads.setdefault(self, set()).add(threading.get_ident())
            return real(self, *args, **options)

        monkeypatch.setattr(zmq.Socket, name, call)

    for name in ("send", "recv", "getsockopt", "setsockopt", "bind", "connect", "close"):
        watched(name)
    gateway = start(routed(bus), echo)
    session = start(dealt(bus, 1))
    session.next(Connected)
    session.io.send("gateway", Header("status", "1"), b"")  # from this thread
    session.next(Arrived)  # sent by the gateway's actor
    session.stop()
    gateway.stop()
    assert len(threads) >= 4  # a router, its ZAP handler, a dealer, its monitor
    assert all(len(users) == 1 for users in threads.values())


@pytest.mark.rule("FLT-33")
def test_what_was_sent_before_stop_arrives(bus: Path, start: Start) -> None:
    def answer_and_stop(io: Io, event: Event) -> None:
        if isinstance(event, Arrived):
            for _ in range(100):
                echo(io, event)
            io.stop(3)
            io.send("gateway", Header("late"), b"", routing_id(1))  # may go, must not fail

    gateway = start(routed(bus), answer_and_stop)
    session = start(dealt(bus, 1))
    session.io.send("gateway", Header("status", "1"), bytes(1_000))
    assert [session.next(Arrived).header.cid for _ in range(100)] == ["1"] * 100
    session.next(Disconnected)
    gateway.thread.join(PATIENCE_S)
    assert gateway.status == 3


@pytest.mark.rule("FLT-33")
def test_every_link_is_flushed_at_the_end(bus: Path, start: Start) -> None:
    storage = start(routed(bus, "storage"))
    names = ("gateway", "spare")

    def set_up(io: Io) -> None:
        for name in names:
            routed(bus, name)(io)
        path = bus / "storage.sock"
        io.connect_dealer("storage", path, routing_id(5), token_of(5))

    def say_and_stop(io: Io, event: Event) -> None:
        if isinstance(event, Arrived) and event.header.kind == "stop":
            for number in range(100):
                io.send("storage", Header("status", str(number)), bytes(1_000))
                for name in names:
                    io.send(name, Header("ok", cid=str(number)), bytes(1_000), routing_id(1))
            io.stop(0)

    first = start(set_up, say_and_stop)
    first.next(Connected)
    path = bus / "spare.sock"
    spare = start(lambda io: io.connect_dealer("spare", path, routing_id(1), token_of(1)))
    session = start(dealt(bus, 1))
    spare.io.send("spare", Header("status", "1"), b"")
    first.next(Arrived)
    session.io.send("gateway", Header("stop", "1"), b"")
    for plant in (storage, spare, session):
        got = [plant.next(Arrived).header for _ in range(100)]
        assert [header.cid or header.id for header in got] == [str(n) for n in range(100)]


# Who is let in


@pytest.mark.rule("FLT-44")
@pytest.mark.parametrize(
    "message",
    [
        request(2, token=""),
        request(2, token="session|x|" + "0" * 64),
        request(2, token=token_of(1)),
        request(2, token=mint_token(b"other plane", "session", SCOPE, routing_id(2))),
    ],
    ids=["unregistered", "wrong token", "another's token", "token of an ended plane"],
)
def test_a_peer_without_its_own_token_gets_no_reply(
    message: list[bytes], bus: Path, start: Start, raw: Raw
) -> None:
    gateway = start(routed(bus), echo)
    stranger, honest = raw(bus, routing_id(2)), raw(bus, routing_id(1))
    for _ in range(3):
        stranger.send_multipart(message)
    settle(honest, 1)
    assert not stranger.poll(100)
    assert {e.peer for e in gateway.all_so_far() if isinstance(e, Arrived)} == {
        Credentials("session", SCOPE, routing_id(1))
    }
    lines = [facts for action, facts in gateway.log if action == "bus_not_authenticated"]
    assert len(lines) == 1
    assert lines[0].keys() == {"link", "bytes", "sha256", "left_out"}


@pytest.mark.rule("FLT-44")
def test_a_token_is_looked_at_in_every_message(bus: Path, start: Start, raw: Raw) -> None:
    start(routed(bus), echo)
    dealer = raw(bus, routing_id(1))
    assert is_answered(dealer, request(1))
    dealer.send_multipart(request(1, token=""))
    dealer.send_multipart(request(1, "2", token=token_of(1, "supervisor")))  # a second valid one
    assert answer_of(dealer)
    assert not dealer.poll(100)


IMPOSTOR = """
    import sys, zmq
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.ROUTING_ID, sys.argv[2].encode())
    dealer.connect("ipc://" + sys.argv[1])
    for _ in range(5):
        dealer.send_multipart([bytes.fromhex(sys.argv[3]), b"\\x80"])
    print("sent", flush=True)
    sys.stdin.readline()
    print(dealer.poll(500))
"""


@pytest.mark.rule("FLT-44", "F19")
def test_a_second_peer_with_a_live_routing_id_gets_nothing(
    bus: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "BUS_HANDSHAKE_MS", 300)
    gateway = start(routed(bus), echo)
    session = start(dealt(bus, 1))
    session.next(Connected)
    session.io.send("gateway", Header("status", "1"), b"")
    session.next(Arrived)
    message = request(1)[0].hex()  # even with the session's own token
    with begin(IMPOSTOR, bus / "gateway.sock", routing_id(1), message) as impostor:
        assert impostor.stdin is not None
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == "sent\n"
        until(lambda: gateway.log)
        for number in range(20):
            answer = Header("permit", cid=str(number))
            gateway.io.send("gateway", answer, b"secret", routing_id(1))
        got = [session.next(Arrived).header.cid for _ in range(20)]
        assert got == [str(number) for number in range(20)]
        impostor.stdin.write("\n")
        impostor.stdin.flush()
        assert impostor.stdout.readline() == "0\n"
    assert gateway.actions() == ["bus_peer_silent"]
    assert str(gateway.log[0][1]["peer"]).endswith(f":{impostor.pid}")


def test_who_proves_itself_in_time_is_no_silent_peer(
    bus: Path, start: Start, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "BUS_HANDSHAKE_MS", 100)
    gateway = start(routed(bus), echo)
    assert is_answered(raw(bus, routing_id(1)), request(1))
    time.sleep(0.3)
    start(dealt(bus, 2)).next(Connected)  # it introduces itself, and says no more
    time.sleep(0.3)
    assert [type(event) for event in gateway.all_so_far()] == [Arrived]
    assert gateway.log == []


def test_the_newcomers_are_bounded_and_each_is_told_once() -> None:
    newcomers = cast("Any", peer)._Newcomers()
    for number in range(1_100):
        newcomers.let_in(str(number), float(number))
    newcomers.proved("1050")
    newcomers.proved("never there")
    silent, again = newcomers.take_silent(1_060.0 + BUS_HANDSHAKE_MS / 1000)
    assert silent == [str(number) for number in range(76, 1_061) if number != 1_050]
    assert again == 1_061.0
    assert newcomers.take_silent(1_062.0) == ([], 1_061.0)


def test_the_cache_of_credentials_is_bounded(
    bus: Path, start: Start, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "_CREDENTIALS_MAX", 2)
    gateway = start(routed(bus), echo)
    dealers = [raw(bus, routing_id(number)) for number in range(5)]
    for _ in range(2):
        for number, dealer in enumerate(dealers):
            assert is_answered(dealer, request(number))
    router = cast("Any", gateway.io)._links["gateway"]
    assert len(router._known) == 2


# Bad input


@pytest.mark.rule("FLT-54")
@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"one"],
        [b"", b"", b""],
        [*request(2), b"more"],
        [*request(2), *[b"x"] * 500],
        [b"", b""],
        [b"\xdd\xff\xff\xff\xff", b""],
        [bytes(100_000), b""],
        [msgpack.packb({"v": 1, "kind": "status", "extra": 1}), b""],
        [msgpack.packb({"v": 99, "kind": "status"}), b""],
        [msgpack.packb([1]), b""],
        [random.Random(1).randbytes(5_000), random.Random(2).randbytes(5_000)],
    ],
)
def test_a_malformed_message_is_dropped_with_one_line(
    frames: list[bytes], bus: Path, start: Start, raw: Raw
) -> None:
    gateway = start(routed(bus), echo)
    stranger, honest = raw(bus, routing_id(2)), raw(bus, routing_id(1))
    for _ in range(3):
        stranger.send_multipart(frames)
    settle(honest, 1)
    assert is_answered(stranger, request(2))  # the same connection still works
    assert gateway.actions() == ["bus_malformed"]
    assert all(isinstance(value, int | str) for value in gateway.log[0][1].values())


@pytest.mark.rule("FLT-54")
def test_a_dealer_drops_what_is_malformed_too(bus: Path, start: Start) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{bus / 'gateway.sock'}")
    session = start(dealt(bus, 1))
    session.next(Connected)
    session.io.send("gateway", Header("status", "1"), b"")
    assert router.poll(int(PATIENCE_S * 1000))
    name = router.recv_multipart()[0]
    for frames in ([b"x"], [b"x", b"y", b"z"], [b"\xc1", b""], [encode_header(Header("ok")), b""]):
        router.send_multipart([name, *frames])
    assert session.next(Arrived).header == Header("ok")
    assert session.actions() == ["bus_malformed"]
    session.stop()
    context.destroy(0)


def mutated_zmtp(rng: random.Random) -> tuple[bytes, int]:
    """Bytes to send, and where to pause so that the handshake really runs."""
    properties = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    ready = b"\x05READY" + properties + b"\x08Identity" + struct.pack(">I", 0)
    good = bytearray(NULL_GREETING + b"\x04" + bytes([len(ready)]) + ready + b"\x00\x04ping")
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(200)), 64
    if kind == 1:
        good[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        del good[rng.randrange(len(good)) :]
    else:
        size = rng.choice((BUS_MESSAGE_BYTES_MAX + 1, 1 << 31, 1 << 40, (1 << 64) - 1))
        good[-6:] = b"\x02" + struct.pack(">Q", size) + rng.randbytes(50)
    return bytes(good), 64


@pytest.mark.rule("FLT-42")
def test_mutated_zmtp_never_ends_the_actor(bus: Path, start: Start, raw: Raw) -> None:
    start(routed(bus), echo)
    rng = random.Random(7)
    for _ in range(150):
        data, pause = mutated_zmtp(rng)
        with unix.socket(unix.AF_UNIX) as stranger, suppress(OSError):
            stranger.settimeout(0.02)
            stranger.connect(str(bus / "gateway.sock"))
            stranger.sendall(data[:pause])
            stranger.recv(64)
            stranger.sendall(data[pause:])
            stranger.recv(64)
    assert is_answered(raw(bus, routing_id(1)), request(1))


@pytest.mark.rule("FLT-42")
def test_a_frame_above_the_limit_costs_its_sender_the_connection(
    bus: Path, start: Start, raw: Raw
) -> None:
    gateway = start(routed(bus), echo)
    stranger, honest = raw(bus, routing_id(2)), raw(bus, routing_id(1))
    assert is_answered(stranger, request(2))
    stranger.send_multipart([request(2)[0], bytes(BUS_MESSAGE_BYTES_MAX + 1)])
    settle(honest, 1)
    assert all(len(e.body) == 1 for e in gateway.all_so_far() if isinstance(e, Arrived))


@pytest.mark.rule("FLT-42")
def test_the_limits_stand_on_every_socket(bus: Path, start: Start) -> None:
    found: list[list[object]] = []

    def set_up(io: Io) -> None:
        routed(bus, "storage")(io)
        dealt(bus, 1)(io)
        for link in cast("Any", io)._links.values():
            options = (zmq.SNDHWM, zmq.RCVHWM, zmq.MAXMSGSIZE, zmq.HANDSHAKE_IVL, zmq.LINGER)
            found.append([link.socket.getsockopt(option) for option in options])

    start(set_up)
    queue = BUS_QUEUE_MESSAGES_MAX
    assert found == [[queue, queue, BUS_MESSAGE_BYTES_MAX, BUS_HANDSHAKE_MS, 0]] * 2


# The three layers, each alone

OTHER_USER = """
    import os, sys, zmq
    os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.ROUTING_ID, sys.argv[3].encode())
    dealer.connect("ipc://" + sys.argv[1])
    dealer.send_multipart([bytes.fromhex(sys.argv[4]), b"\\x80"])
    print(dealer.poll(int(sys.argv[5])))
"""


def is_served(bus: Path, uid: int, patience_ms: int) -> bool:
    message = request(1)[0].hex()
    answer = child(OTHER_USER, bus / "gateway.sock", uid, routing_id(1), message, patience_ms)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip() == "1"


def open_to_all(bus: Path) -> Callable[[Io], None]:
    """Bind with modes that keep nobody out."""

    def set_up(io: Io) -> None:
        before = os.umask(0)
        try:
            routed(bus)(io)
        finally:
            os.umask(before)

    return set_up


@as_root
@pytest.mark.rule("FLT-42")
@pytest.mark.parametrize("layer", ["none", "folder", "uid filter", "zap"])
def test_each_layer_alone_keeps_another_user_out(
    layer: str, bus: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus.chmod(0o700 if layer == "folder" else 0o755)
    if layer != "uid filter":
        monkeypatch.setattr(peer, "_demand_own_uid", nothing)
    if layer != "zap":
        monkeypatch.setattr(peer, "_demand_zap", nothing)
    gateway = start(open_to_all(bus), echo)
    assert is_served(bus, os.getuid(), int(PATIENCE_S * 1000))
    assert is_served(bus, NOBODY, 700) == (layer == "none")
    assert ("bus_foreign_user" in gateway.actions()) == (layer == "zap")


@as_root
@pytest.mark.rule("FLT-42")
def test_all_layers_together_serve_the_own_user_alone(bus: Path, start: Start) -> None:
    bus.chmod(0o755)
    start(open_to_all(bus), echo)
    assert is_served(bus, os.getuid(), int(PATIENCE_S * 1000))
    assert not is_served(bus, NOBODY, 700)


@pytest.mark.rule("FLT-42")
def test_without_the_handler_nobody_gets_in(bus: Path, start: Start, raw: Raw) -> None:
    def set_up(io: Io) -> None:
        routed(bus)(io)
        handler = cast("Any", io)._zap
        io.remove_fd(handler.getsockopt(zmq.FD))
        handler.close(0)

    gateway = start(set_up, echo)
    dealer = raw(bus, routing_id(1))
    dealer.send_multipart(request(1))
    assert not dealer.poll(700)
    assert gateway.all_so_far() == []


# Binding


@pytest.mark.rule("FLT-42")
def test_a_path_of_99_bytes_works_and_one_of_100_is_refused(bus: Path, start: Start) -> None:
    folder = bus / (
        "d" * (RUNTIME_PATH_BYTES_MAX - len(str(bus)) - len("/") - len("/gateway.sock"))
    )
    folder.mkdir(mode=0o700)
    assert len(str(folder / "gateway.sock")) == RUNTIME_PATH_BYTES_MAX
    start(routed(folder), echo)
    session = start(dealt(folder, 1))
    session.io.send("gateway", Header("status", "1"), b"")
    session.next(Arrived)
    longer = folder.with_name(folder.name + "d")
    longer.mkdir()
    for set_up in (routed(longer), dealt(longer, 1)):
        with pytest.raises(HomeUnsafe) as refused:
            Plant(set_up)
        assert refused.value.carried == {"what": "runtime", "reason": "path_too_long"}
    assert list(longer.iterdir()) == []


BINDS = """
    import sys
    from pathlib import Path
    from callboard.errors import CallboardError
    from callboard.peer import Io
    bus = Path(sys.argv[1])
    try:
        Io().bind_router("gateway", bus / sys.argv[2], b"x", bus / "bind.lock")
        print("bound")
    except CallboardError as refused:
        print(refused.to_wire())
"""


@pytest.mark.rule("FLT-43")
def test_a_second_bind_is_refused_while_the_first_lives(bus: Path, start: Start) -> None:
    gateway = start(routed(bus), echo)
    assert child(BINDS, bus, "gateway.sock").stdout == "{'code': 'home_in_use'}\n"
    session = start(dealt(bus, 1))
    session.io.send("gateway", Header("status", "1"), b"")
    session.next(Arrived)
    assert (bus / "bind.lock").stat().st_mode & 0o777 == 0o600
    assert child(BINDS, bus, "storage.sock").stdout == "bound\n"  # another socket, the same lock
    assert gateway.thread.is_alive()


@pytest.mark.rule("FLT-43")
def test_a_socket_that_nobody_listens_on_is_replaced(bus: Path, start: Start) -> None:
    with unix.socket(unix.AF_UNIX) as stale:
        stale.bind(str(bus / "gateway.sock"))
    start(routed(bus), echo)
    session = start(dealt(bus, 1))
    session.io.send("gateway", Header("status", "1"), b"")
    session.next(Arrived)


@pytest.mark.rule("FLT-43")
@pytest.mark.parametrize("backlog", [None, 8, 0])
def test_a_path_that_is_not_ours_to_replace_is_left_alone(bus: Path, backlog: int | None) -> None:
    path = bus / "gateway.sock"
    with unix.socket(unix.AF_UNIX) as stranger:
        if backlog is None:
            path.write_bytes(b"kept")
        else:
            stranger.bind(str(path))
            stranger.listen(backlog)
        before = path.stat().st_ino
        with pytest.raises(HomeUnsafe) as refused:
            Plant(routed(bus))
        assert refused.value.carried == {"what": "runtime", "reason": "foreign"}
        assert path.stat().st_ino == before


@pytest.mark.rule("FLT-43")
def test_a_lock_that_is_no_file_of_ours_is_refused(bus: Path) -> None:
    (bus / "elsewhere").write_bytes(b"")
    (bus / "bind.lock").symlink_to(bus / "elsewhere")
    with pytest.raises(HomeUnsafe):
        Plant(routed(bus))


def test_the_lock_ends_with_its_process(bus: Path) -> None:
    for _ in range(2):
        assert child(BINDS, bus, "gateway.sock").stdout == "bound\n"


# Connections that come and go


def test_a_dealer_tells_of_its_router_and_resends_in_order(bus: Path, start: Start) -> None:
    asked: list[Asked[int]] = []

    def react(io: Io, event: Event) -> None:
        if not asked:
            asked.append(Asked(io, "gateway"))
        if isinstance(event, Connected):
            asked[0].resend()
        elif isinstance(event, Disconnected):
            asked[0].lost()
        elif isinstance(event, Posted):
            asked[0].ask("status", b"", cast("int", event.value))

    session = start(dealt(bus, 1), react)
    for number in range(10):
        session.io.call_io(partial(session.io.post, number))
    first = start(routed(bus))
    session.next(Connected)
    ids = [first.next(Arrived).header.id for _ in range(10)]
    assert len(set(ids)) == 10
    assert [e for e in first.all_so_far() if isinstance(e, Arrived)] == []  # each came once
    first.stop()
    session.next(Disconnected)
    second = start(routed(bus), echo)
    session.next(Connected)
    assert [second.next(Arrived).header.id for _ in range(10)] == ids
    answers = [session.next(Arrived).header.cid for _ in range(10)]
    assert [asked[0].answer(cid) for cid in answers] == list(range(10))
    assert len(asked[0]) == 0
    second.stop()
    third = start(routed(bus))
    session.next(Connected)
    assert [e for e in third.all_so_far() if isinstance(e, Arrived)] == []


def test_no_connection_is_ever_overslept(bus: Path, start: Start) -> None:
    """ZeroMQ signals a change once: each of these begins with another order of its two threads."""
    gateway = start(routed(bus), echo)
    for number in range(60):
        session = start(dealt(bus, number))
        session.io.send("gateway", Header("status", str(number)), b"")
        assert session.next(Arrived).header.cid == str(number)
        session.stop()
    assert gateway.log == []


def test_a_router_says_whom_it_could_not_reach(bus: Path, start: Start) -> None:
    gateway = start(routed(bus), echo)
    for to in (routing_id(9), "", "no such peer \u00e9", "x" * 300):
        gateway.io.send("gateway", Header("permit", cid="1"), b"", to)
        event = gateway.next(Unreachable)
        assert event == Unreachable("gateway", to, Header("permit", cid="1"))


def test_a_peer_that_does_not_read_is_unreachable_once_its_queue_is_full(
    bus: Path, start: Start, raw: Raw
) -> None:
    gateway = start(routed(bus), echo)
    slow, honest = raw(bus, routing_id(2)), raw(bus, routing_id(1))
    assert is_answered(slow, request(2))

    def flood() -> None:
        for number in range(4 * BUS_QUEUE_MESSAGES_MAX):
            header = Header("records", cid=str(number))
            gateway.io.inside.send("gateway", header, bytes(1_000), routing_id(2))
            gateway.io.inside.flush()  # else they would travel together

    gateway.io.call_io(flood)
    full = gateway.next(Unreachable)
    assert full.to == routing_id(2)
    assert is_answered(honest, request(1))
    got: list[int] = []
    while slow.poll(500):
        got.append(int(msgpack.unpackb(slow.recv_multipart()[0])["cid"]))
    assert got == sorted(got)
    assert int(full.header.cid) not in got
    assert is_answered(slow, request(2, "2"))  # read, so there is room again


def test_a_dealer_keeps_the_oldest_and_refuses_the_newest(bus: Path, start: Start) -> None:
    session = start(dealt(bus, 1))
    for number in range(BUS_QUEUE_MESSAGES_MAX + 5):
        session.io.send("gateway", Header("status", str(number)), b"")
    refused = [session.next(Unreachable).header.id for _ in range(5)]
    assert refused == [str(BUS_QUEUE_MESSAGES_MAX + n) for n in range(5)]
    gateway = start(routed(bus))
    got = [gateway.next(Arrived).header.id for _ in range(BUS_QUEUE_MESSAGES_MAX)]
    assert got == [str(number) for number in range(BUS_QUEUE_MESSAGES_MAX)]


# Load


class Held:
    """An actor's reaction that waits until it is let go."""

    def __init__(self) -> None:
        self.busy = threading.Event()
        self.go = threading.Event()

    def __call__(self, io: Io, event: Event) -> None:
        if isinstance(event, Arrived) and event.header.kind == "hold":
            self.busy.set()
            self.go.wait(PATIENCE_S)


def test_a_batch_is_bounded_and_what_is_urgent_comes_first_in_it(bus: Path, start: Start) -> None:
    held = Held()
    gateway = start(routed(bus), held, inlet_max=10, urgent=frozenset({"cancel"}))
    session = start(dealt(bus, 1))
    session.io.send("gateway", Header("hold", "h"), b"")
    assert held.busy.wait(PATIENCE_S)
    for number in range(5):
        session.io.send("gateway", Header("status", str(number)), b"")
    session.io.send("gateway", Header("cancel", "c"), b"")
    for number in range(5, 500):
        session.io.send("gateway", Header("status", str(number)), b"")
    session.io.after(0, "sent")
    session.next(Timer)
    sizes: list[int] = []
    inlet = cast("Any", gateway.io).inlet
    take: Callable[[], list[Event]] = inlet.take

    def counted() -> list[Event]:
        events = take()
        sizes.append(len(events))
        return events

    inlet.take = counted
    held.go.set()
    names = [gateway.next(Arrived).header for _ in range(502)]
    assert names[0].kind == "hold"
    assert [header.id for header in names if header.kind == "status"] == [
        str(number) for number in range(500)
    ]
    position = [header.kind for header in names].index("cancel")
    assert names[position - 1].id != "4"  # it overtook what came before it in its batch
    assert max(sizes) < 10 + peer.GROUP_MESSAGES_MAX  # it ends with the group that fills it
    assert len(sizes) > 4


def test_the_bytes_of_a_batch_are_bounded_too(
    bus: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "STORAGE_QUEUE_BYTES_MAX", 10_000)
    held = Held()
    gateway = start(routed(bus), held)
    session = start(dealt(bus, 1))
    session.io.send("gateway", Header("hold", "h"), b"")
    assert held.busy.wait(PATIENCE_S)
    for number in range(9):  # each in a group of its own
        session.io.send("gateway", Header("status", str(number)), bytes(300_000))
    session.io.after(0, "sent")
    session.next(Timer)
    held.go.set()
    seen: list[int] = []
    inlet = cast("Any", gateway.io).inlet
    take: Callable[[], list[Event]] = inlet.take

    def counted() -> list[Event]:
        events = take()
        seen.append(sum(isinstance(event, Arrived) for event in events))
        return events

    inlet.take = counted
    assert [gateway.next(Arrived).header.id for _ in range(10)] == ["h", *map(str, range(9))]
    assert max(seen) == 1


def test_a_flood_waits_outside_and_is_not_lost(bus: Path, start: Start) -> None:
    held = Held()
    gateway = start(routed(bus), held, inlet_max=10)
    session = start(dealt(bus, 1))
    session.io.send("gateway", Header("hold", "h"), b"")
    assert held.busy.wait(PATIENCE_S)
    for number in range(500):
        session.io.send("gateway", Header("ok", cid=str(number)), b"")
    session.io.after(0, "sent")
    session.next(Timer)
    held.go.set()
    names = [gateway.next(Arrived).header.cid for _ in range(501)]
    assert names == ["", *map(str, range(500))]


def test_what_an_actor_sends_without_end_is_refused_at_last(bus: Path, start: Start) -> None:
    session = start(dealt(bus, 1))

    def flood() -> None:
        for number in range(BUS_QUEUE_MESSAGES_MAX + 5):
            session.io.inside.send("gateway", Header("status", str(number)), b"")

    session.io.call_io(flood)
    refused = [session.next(Unreachable).header.id for _ in range(5)]
    assert refused == [str(BUS_QUEUE_MESSAGES_MAX + number) for number in range(5)]


def test_messages_of_one_batch_travel_together_and_keep_their_order(
    bus: Path, start: Start, raw: Raw
) -> None:
    """A group is heads and bodies in turn, with one token; larger ones are parted."""
    gateway = start(routed(bus), echo)
    dealer = raw(bus, routing_id(1))
    count = 3 * peer.GROUP_MESSAGES_MAX + 7
    session = start(dealt(bus, 2))
    session.next(Connected)

    def send_all() -> None:
        for number in range(count):
            session.io.inside.send("gateway", Header("status", str(number)), b"%d" % number)

    session.io.call_io(send_all)
    got = [session.next(Arrived) for _ in range(count)]
    assert [(one.header.cid, one.body) for one in got] == [
        (str(number), b"%d" % number) for number in range(count)
    ]
    pair = request(1)
    second = [encode_header(Header("status", "2")), b"two"]
    dealer.send_multipart([*pair, *second])
    frames = dealer.recv_multipart()
    assert len(frames) == 4  # the answers of one batch are one group too
    assert frames[1::2] == [b"\x80", b"two"]
    dealer.send_multipart([*pair, second[0]])  # no pairs: all of it is dropped
    dealer.send_multipart([*pair, b"noise", b"", *second])  # one message of it is
    assert len(dealer.recv_multipart()) == 4
    too_many = [frame for _ in range(peer.GROUP_MESSAGES_MAX + 1) for frame in pair]
    dealer.send_multipart(too_many)
    assert is_answered(dealer, request(1, "3"))
    assert gateway.actions() == ["bus_malformed"]


def test_a_large_message_travels_alone(bus: Path, start: Start, raw: Raw) -> None:
    gateway = start(routed(bus), echo)
    dealer = raw(bus, routing_id(1))
    assert is_answered(dealer, request(1))

    def send_all() -> None:
        for number, size in enumerate((1, peer.GROUP_BYTES_MAX, 2, 3)):
            header = Header("records", cid=str(number))
            gateway.io.inside.send("gateway", header, bytes(size), routing_id(1))

    gateway.io.call_io(send_all)
    assert [len(dealer.recv_multipart()) for _ in range(3)] == [2, 2, 4]


def test_the_order_to_stop_is_waited_for_if_another_thread_is_about_to_give_it() -> None:
    """`stop` says that the loop ends before it tells the actor so."""
    inbox = cast("Any", peer)._LoopInbox()
    turns: list[int] = []

    class Stopping:
        stopping = False
        is_called: Callable[[], int] = int

        def ring(self) -> None:
            """Wake nobody."""

        def turn(self) -> bool:
            turns.append(len(turns))
            if len(turns) == 1:
                self.stopping = True  # as the other thread has just said
            else:
                inbox.put("the order")
            return False

    inbox.put("wake")
    inbox.serve(Stopping())
    assert inbox.get() == "the order"
    assert turns == [0, 1]


def test_an_actor_cannot_take_a_name_of_pykka_by_accident() -> None:
    def _stop(self: BusActor) -> None:
        """Stop in order."""

    with pytest.raises(TypeError, match="Hasty overrides _stop of pykka"):
        type("Hasty", (BusActor,), {"_stop": _stop})


# Timers, descriptors, calls


def test_timers_fire_once_in_the_order_of_their_times(start: Start) -> None:
    plant = start(nothing)
    for name, ms in (("c", 60), ("a", 20), ("b", 40), ("d", 10_000), ("d", 80)):
        plant.io.after(ms, name)
    assert [plant.next(Timer).name for _ in range(4)] == ["a", "b", "c", "d"]
    plant.io.after(1, "a")
    assert plant.next(Timer).name == "a"


@given(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from("abcdef")), max_size=200),
    st.lists(st.integers(0, 25), max_size=10),
)
def test_timers_keep_the_last_time_of_each_name(
    sets: list[tuple[int, str]], looks: list[int]
) -> None:
    timers = cast("Any", peer)._Timers()
    for at, name in sets:
        timers.set(float(at), name)
    expected = {name: at for at, name in sets}
    assert len(timers._heap) <= 2 * len(expected) + 64
    for now in sorted(looks):
        assert timers.next() == (min(expected.values()) if expected else None)
        due = sorted((at, name) for name, at in expected.items() if at <= now)
        assert timers.take_due(float(now)) == [name for _, name in due]
        for _, name in due:
            del expected[name]


def test_a_descriptor_is_watched_and_what_it_posts_joins_the_batch(start: Start) -> None:
    ours, theirs = unix.socketpair()
    ours.setblocking(False)
    seen: list[int] = []

    def read(mask: int) -> None:
        seen.append(mask)
        if mask & select.EPOLLIN:
            data = ours.recv(100)
            plant.io.post(data)
            if not data:
                plant.io.remove_fd(ours.fileno())
        if mask & select.EPOLLOUT:
            plant.io.post("writable")
            plant.io.modify_fd(ours.fileno(), write=False)

    def set_up(io: Io) -> None:
        io.add_fd(ours.fileno(), read)

    plant = start(set_up)
    theirs.send(b"one")
    assert plant.next(Posted).value == b"one"
    plant.io.call_io(lambda: plant.io.modify_fd(ours.fileno(), write=True))
    assert plant.next(Posted).value == "writable"
    plant.io.call_io(lambda: plant.io.modify_fd(ours.fileno(), write=False, read=False))
    plant.all_so_far()
    theirs.send(b"two")
    assert plant.all_so_far() == []
    plant.io.call_io(lambda: plant.io.modify_fd(ours.fileno(), write=False))
    assert plant.next(Posted).value == b"two"
    theirs.close()
    assert plant.next(Posted).value == b""
    plant.stop()
    ours.close()
    assert seen


def test_calls_run_on_the_io_thread_in_order(start: Start) -> None:
    plant = start(nothing)
    ran: list[tuple[int, int | None]] = []

    def note(number: int) -> None:
        ran.append((number, threading.get_ident()))

    for number in range(100):
        plant.io.call_io(partial(note, number))
    plant.all_so_far()
    assert ran == [(number, plant.thread.ident) for number in range(100)]


def test_an_idle_process_sleeps(bus: Path, start: Start) -> None:
    gateway, session = start(routed(bus), echo), start(dealt(bus, 1))
    session.io.send("gateway", Header("status", "1"), b"")
    session.next(Arrived)
    turns: list[int] = []
    for plant in (gateway, session):
        real = cast("Any", plant.io)._look_at_links

        def counted(real: Callable[[], None] = real) -> None:
            turns.append(1)
            real()

        plant.io.call_io(partial(setattr, plant.io, "_look_at_links", counted))
    time.sleep(0.3)
    assert len(turns) < 10


# Requests without an answer yet


class FakeIo:
    def __init__(self) -> None:
        self.sent: list[tuple[str, str, bytes]] = []

    def send(self, link: str, header: Header, body: bytes, to: str = "") -> None:
        self.sent.append((link, header.id, body))


def test_asked_waits_for_the_link_and_forgets_what_was_dropped() -> None:
    io = FakeIo()
    asked: Asked[str] = Asked(cast("Io", io), "storage", pending_max=3)
    first, second = asked.ask("append", b"1", "one"), asked.ask("append", b"2", "two")
    assert io.sent == []
    asked.drop(first)
    asked.resend()
    assert io.sent == [("storage", second, b"2")]
    third = asked.ask("append", b"3", "three", deadline=9)
    assert io.sent[1:] == [("storage", third, b"3")]
    assert asked.peek(third) == "three"
    assert (asked.answer(third), asked.answer(third), asked.answer(first)) == ("three", None, None)
    asked.lost()
    fourth = asked.ask("append", b"4", "four")
    asked.ask("append", b"5", "five")
    with pytest.raises(Overloaded) as refused:
        asked.ask("append", b"6", "six")
    assert refused.value.carried == {"resource": "pending_count", "limit": 3}
    assert len(io.sent) == 2
    asked.resend()
    assert [name for _, name, _ in io.sent[2:4]] == [second, fourth]


# The end of a process

PROCESS = """
    import os, sys, threading, time
    from callboard.peer import BusActor, Io, Posted
    threading.Thread(target=time.sleep, args=(600,)).start()  # a heartbeat that would live on

    def log(action, facts):
        print(action, sorted(facts), facts.get("error"), flush=True)

    class Actor(BusActor):
        def on_start(self):
            if mode == "on_start": raise RuntimeError("secret")
            self.io.after(0, "go")
        def handle(self, events):
            if mode == "handle": raise RuntimeError("secret")
            if mode == "exit": raise SystemExit(0)
            if mode == "stop_actor": self.stop()
            if mode == "handler": self.io.call_io(lambda: 1 / 0)
            if mode == "handler_exit": self.io.call_io(sys.exit)
            if mode == "stop": self.io.stop(int(sys.argv[2]))

    mode = sys.argv[1]
    def start(io):
        if mode == "start": raise RuntimeError("secret")
        return Actor.start(io)
    status = Io(log=log).run(start)
    print("stopped", flush=True)
    os._exit(status)
"""


@pytest.mark.rule("FLT-26")
@pytest.mark.parametrize(
    ("mode", "action", "error"),
    [
        ("start", "main_loop_ended", "RuntimeError"),
        ("handler", "main_loop_ended", "ZeroDivisionError"),
        ("handler_exit", "main_loop_ended", "SystemExit"),
        ("on_start", "actor_failed", "RuntimeError"),
        ("handle", "actor_failed", "RuntimeError"),
        ("exit", "actor_ended", None),
        ("stop_actor", "actor_ended", None),
    ],
)
def test_a_process_ends_with_its_main_loop_or_its_actor(
    mode: str, action: str, error: str | None
) -> None:
    ended = child(PROCESS, mode)
    assert ended.returncode == 70, ended.stderr
    facts = ["at", "error"] if error else []
    assert ended.stdout == f"{action} {facts} {error}\n"
    assert "secret" not in ended.stderr


@pytest.mark.parametrize("status", [0, 74])
def test_a_process_that_was_stopped_ends_with_its_status(status: int) -> None:
    ended = child(PROCESS, "stop", status)
    assert (ended.returncode, ended.stdout) == (status, "stopped\n")


@pytest.mark.rule("FLT-26")
def test_a_log_that_fails_does_not_keep_a_process_alive() -> None:
    script = PROCESS.replace('print(action, sorted(facts), facts.get("error"), flush=True)', "1/0")
    assert child(script, "handle").returncode == 70


FORKS = """
    import os, sys, threading
    from pathlib import Path
    import callboard.peer as peer
    import zmq

    assert threading.active_count() == 1
    assert len(os.listdir("/proc/self/task")) == 1
    assert len(os.listdir("/proc/self/fd")) <= 4, os.listdir("/proc/self/fd")
    bus, secret = Path(sys.argv[1]), bytes(32)

    class Serve(peer.BusActor):
        def handle(self, events):
            for e in events:
                if isinstance(e, peer.Arrived):
                    answer = peer.Header("ok", cid=e.header.id)
                    self.io.send(e.link, answer, b"", e.peer.routing_id)

    class Ask(peer.BusActor):
        def handle(self, events):
            for e in events:
                if isinstance(e, peer.Connected):
                    self.io.send("gateway", peer.Header("status", "1"), b"")
                if isinstance(e, peer.Arrived):
                    self.io.stop(0)

    def serve():
        io = peer.Io()
        io.bind_router("gateway", bus / "gateway.sock", secret, bus / "bind.lock")
        return io.run(Serve.start)

    def ask(number):
        io = peer.Io()
        name = str(number)
        token = peer.mint_token(secret, "session", "", name)
        io.connect_dealer("gateway", bus / "gateway.sock", name, token)
        io.connect_dealer("storage", bus / "storage.sock", name, token)
        status = io.run(Ask.start)
        assert threading.active_count() <= 2
        return status

    def fork(work, *args):
        pid = os.fork()
        if pid:
            return pid
        peer.become_child(parent)
        try:
            os._exit(work(*args))
        finally:
            os._exit(99)

    parent = os.getpid()
    server = fork(serve)
    print([os.waitpid(pid, 0)[1] for pid in [fork(ask, n) for n in range(5)]])
    os.kill(server, 9)
"""


def test_processes_forked_from_a_preloaded_one_have_sockets_of_their_own(bus: Path) -> None:
    ended = child(FORKS, bus)
    assert (ended.stdout, ended.stderr) == ("[0, 0, 0, 0, 0]\n", "")


CHILD = """
    import os, resource, sys, time
    from callboard.peer import become_child
    parent = os.getpid()
    if os.fork():
        time.sleep(60)
    become_child(parent + int(sys.argv[1]))
    print(os.getpid(), oct(os.umask(0)), resource.getrlimit(resource.RLIMIT_CORE), flush=True)
    time.sleep(60)
"""


def begin(script: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(script), *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )


@pytest.mark.rule("FLT-29", "FLT-48")
def test_a_child_is_private_and_dies_with_its_parent() -> None:
    with begin(CHILD, 0) as parent:
        assert parent.stdout is not None
        pid, rest = parent.stdout.readline().rstrip().split(" ", 1)
        descriptor = os.pidfd_open(int(pid))
        assert rest == "0o77 (0, 0)"
        parent.kill()
        assert select.select([descriptor], [], [], PATIENCE_S)[0]
        os.close(descriptor)


@pytest.mark.rule("FLT-29")
def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    with begin(CHILD, 1) as parent:
        assert parent.stdout is not None
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")

        def has_ended() -> bool:
            pids = children.read_text().split()
            states = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2] for pid in pids]
            return bool(states) and states[0].startswith("Z")

        until(has_ended)
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == ""
