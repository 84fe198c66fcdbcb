"""The door on real sockets, with an actor that echoes."""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pykka
import pytest

from callboard.actors.gateway import connection as connection_module
from callboard.actors.gateway.connection import HELLO_BYTES_MAX, READ_AHEAD_MESSAGES
from callboard.actors.gateway.door import (
    Came,
    Done,
    Door,
    Gone,
    Opened,
    Paused,
)
from callboard.errors import HomeInUse, HomeUnsafe
from callboard.limits import CLIENT_MESSAGE_BYTES_MAX, CLIENT_OUTPUT_BYTES_MAX
from callboard.peer import BusActor, Event, Io, Posted
from tests.system.doorclient import Closed, Wire

CONNECTIONS = 5


def framed(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


class Echo(BusActor):
    """Sends back what comes, unless told to hold it."""

    def __init__(self, io: Io, rig: Rig) -> None:
        super().__init__(io)
        self._rig = rig

    def handle(self, events: list[Event]) -> None:
        for event in events:
            assert isinstance(event, Posted)
            self._rig.events.append(event.value)
            match event.value:
                case Came(conn, payloads, refused):
                    if refused is not None:
                        done = Done(messages={conn: [framed(b"refused")]}, closed=[conn])
                        self._rig.finish(done)
                    elif not self._rig.holds:
                        echoes = {conn: [framed(payload) for payload in payloads]}
                        self._rig.finish(Done([(conn, payloads)], echoes))
                case Paused():
                    self.io.call_io(self._rig.door.resume)
                case _:
                    pass


class Rig:
    def __init__(self, base: Path) -> None:
        self.path = base / "door.sock"
        self.lock = base / "bind.lock"
        self.io = Io()
        self.door = Door(self.io, self.path, self.lock, CONNECTIONS)
        self.events: list[object] = []
        self.holds = False
        self.statuses: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Rig:
        self.door.open()
        self._thread.start()
        return self

    def _run(self) -> None:
        def start(io: Io) -> pykka.ActorRef[Any]:
            return Echo.start(io, self)

        self.statuses.append(self.io.run(start))

    def stop(self) -> None:
        if self._thread.is_alive():
            self.io.call_io(self.door.shut)
            self.io.stop(0)
            self._thread.join(10)
            assert self.statuses == [0]

    def finish(self, done: Done) -> None:
        """Do in the loop what an actor there would."""
        self.io.call_io(lambda: self.door.finish(done))

    def discard(self) -> None:
        """Let go of a loop that never ran."""
        listener = self.door._listener  # pyright: ignore[reportPrivateUsage]
        if listener is not None:
            listener.close()
        self.io._close()  # pyright: ignore[reportPrivateUsage]

    def connect(self) -> Wire:
        return Wire(self.path)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def rig(base: Path) -> Iterator[Rig]:
    made = Rig(base)
    yield made.start()
    made.stop()


def until(found: Callable[[], Any]) -> Any:  # noqa: ANN401
    end = time.monotonic() + 10
    while not (value := found()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
    return value


def echo(wire: Wire, payload: bytes = b"\x81\xa1a\x01") -> bool:
    wire.send_payload(payload)
    return bool(wire.receive())


def test_messages_come_whole_and_in_order_however_they_are_cut(rig: Rig) -> None:
    with rig.connect() as wire:
        stream = b"".join(framed(b"\x81\xa1a" + bytes([n])) for n in range(50))
        for at in range(0, len(stream), 3):
            wire.send_raw(stream[at : at + 3])
        assert [wire.receive()["a"] for _ in range(50)] == list(range(50))


@pytest.mark.rule("FLT-41", "T-1")
def test_the_socket_is_private(rig: Rig) -> None:
    assert os.stat(rig.path).st_mode & 0o777 == 0o600


@pytest.mark.rule("FLT-41", "T-13")
def test_one_connection_too_many_is_told_and_closed_at_once(rig: Rig) -> None:
    wires = [rig.connect() for _ in range(CONNECTIONS)]
    assert all(echo(wire) for wire in wires)
    for _ in range(3):
        with rig.connect() as extra:
            answer = extra.receive()
            assert answer["kind"] == "error"
            assert answer["body"] == {
                "code": "overloaded",
                "resource": "connections",
                "limit": CONNECTIONS,
            }
            assert extra.is_closed()
    assert all(echo(wire) for wire in wires)
    wires.pop().close()
    until(lambda: rig.of(Gone))
    with rig.connect() as wire:
        assert echo(wire)
    for wire in wires:
        wire.close()
    assert rig.door.refused == 3


@pytest.mark.rule("FLT-41", "FLT-46", "F16", "RLB-12")
def test_two_thousand_connections_at_once(rig: Rig) -> None:
    old = rig.connect()
    assert echo(old)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flood: list[socket.socket] = []
    full = 0
    try:
        for _ in range(2_000):
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            full += one.connect_ex(os.fspath(rig.path)) == errno.EAGAIN  # the backlog (FLT-47)
            flood.append(one)
            if len(flood) % 100 == 0:
                assert echo(old), "the old client is served throughout"
    finally:
        for one in flood:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert full < 2_000
    old.close()
    until(lambda: rig.door.connections == 0)
    with rig.connect() as wire:
        assert echo(wire)


AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as door:
    try:
        door.connect(sys.argv[1])
    except PermissionError:
        print("PermissionError")
    else:
        print(door.recv(1000), door.recv(1000))
"""


def as_nobody(path: Path) -> str:
    """Connect as another user."""
    command = [sys.executable, "-c", AS_NOBODY, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.rule("T-1", "FLT-41")
@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_another_user_is_turned_away_by_the_door_itself(rig: Rig, base: Path) -> None:
    """Folder and socket are opened up by hand: SO_PEERCRED alone is left."""
    base.chmod(0o755)
    rig.path.chmod(0o777)
    said = as_nobody(rig.path)
    assert "not_authenticated" in said
    assert said.endswith("b''"), "and closed"
    assert rig.of(Opened) == []


@pytest.mark.rule("T-1")
@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
@pytest.mark.parametrize(("folder", "door"), [(0o700, 0o777), (0o755, 0o600)])
def test_another_user_is_turned_away_by_each_mode_alone(
    rig: Rig, base: Path, folder: int, door: int
) -> None:
    base.chmod(folder)
    rig.path.chmod(door)
    assert as_nobody(rig.path) == "PermissionError"


@pytest.mark.rule("FLT-56")
@pytest.mark.parametrize("size", [CLIENT_MESSAGE_BYTES_MAX + 1, 2**32 - 1])
def test_a_length_above_the_limit_ends_the_input(rig: Rig, size: int) -> None:
    with rig.connect() as wire:
        assert echo(wire)
        wire.send_raw(framed(b"\x80") + struct.pack("<I", size) + b"x" * 100)
        came = until(lambda: [one for one in rig.of(Came) if one.refused is not None])[0]
        assert came.payloads == [b"\x80"], "what came before it is kept"
        assert came.refused.carried["limit"] == "CLIENT_MESSAGE_BYTES_MAX"


@pytest.mark.rule("T-13")
def test_a_stranger_gets_no_large_buffer(rig: Rig) -> None:
    with rig.connect() as wire:
        wire.send_raw(struct.pack("<I", CLIENT_MESSAGE_BYTES_MAX) + b"x" * (2 * HELLO_BYTES_MAX))
        assert wire.is_closed()


def test_a_large_message_of_a_known_client_passes(rig: Rig) -> None:
    with rig.connect() as wire:
        assert echo(wire)
        payload = b"\x81\xa1a\xc6" + struct.pack(">I", 4_000_000) + bytes(4_000_000)
        sender = threading.Thread(target=wire.send_payload, args=(payload,))
        sender.start()
        assert len(wire.receive()["a"]) == 4_000_000
        sender.join()


def test_a_client_that_dies_in_the_middle_of_a_message_is_gone(rig: Rig) -> None:
    wire = rig.connect()
    wire.send_raw(framed(b"\x80") + b"\xff\x00\x00\x00half")
    wire.close()
    until(lambda: rig.of(Gone))
    assert [came.payloads for came in rig.of(Came)] == [[b"\x80"]]
    with rig.connect() as other:
        assert echo(other)


@pytest.mark.rule("T-13", "FLT-59")
def test_a_slow_reader_is_dropped_with_a_word_and_others_are_served(rig: Rig) -> None:
    slow, other = rig.connect(), rig.connect()
    assert echo(slow)
    assert echo(other)
    piece = framed(b"\x81\xa1a\xc6" + struct.pack(">I", 1_000_000) + bytes(1_000_000))
    number = rig.of(Opened)[0].conn
    for _ in range(2 * CLIENT_OUTPUT_BYTES_MAX // 1_000_000):
        rig.finish(Done(messages={number: [piece]}))
        assert rig.door.backlog(number) <= CLIENT_OUTPUT_BYTES_MAX
        assert echo(other)
    last: dict[str, Any] = {}
    count = 0
    try:
        while True:
            last = slow.receive()
            count += 1
    except Closed:
        pass
    assert last["body"] == {
        "code": "overloaded",
        "resource": "socket",
        "limit": CLIENT_OUTPUT_BYTES_MAX,
    }
    assert count <= 2, "what waited behind the present piece was thrown away"
    slow.close()
    other.close()


@pytest.mark.rule("T-13", "FLT-59")
def test_last_words_that_nobody_reads_hold_nothing_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "LAST_WORDS_S", 0.1)
    slow = rig.connect()
    assert echo(slow)
    number = rig.of(Opened)[0].conn
    for _ in range(20):
        rig.finish(Done(messages={number: [framed(bytes(1_000_000))]}))
    until(lambda: rig.door.backlog(number))
    time.sleep(0.2)
    rig.io.call_io(rig.door.sweep)
    until(lambda: rig.of(Gone))
    slow.close()


@pytest.mark.rule("T-13")
def test_reading_stops_while_the_actor_is_behind(rig: Rig) -> None:
    rig.holds = True
    with rig.connect() as wire:
        wire.socket.settimeout(0.2)
        flood = framed(b"\x80") * 500_000
        with pytest.raises(TimeoutError):
            wire.socket.sendall(flood)
        time.sleep(0.1)
        taken = sum(len(came.payloads) for came in rig.of(Came))
        assert taken >= READ_AHEAD_MESSAGES
        assert taken * 5 <= 2 * 65_536, "one read beyond the limit at most"
        rig.holds = False
        rig.finish(Done([(came.conn, came.payloads) for came in rig.of(Came)]))
        until(lambda: sum(len(came.payloads) for came in rig.of(Came)) > 2 * taken)


@pytest.mark.rule("T-13")
def test_a_slow_sender_keeps_nobody_waiting(rig: Rig) -> None:
    with rig.connect() as slow, rig.connect() as other:
        for byte in framed(b"\x81\xa1a\x07"):
            slow.send_raw(bytes([byte]))
            assert echo(other)
        assert slow.receive() == {"a": 7}


@pytest.mark.rule("FLT-46")
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_no_room_for_a_connection_pauses_the_door(base: Path, number: int) -> None:
    lines: list[str] = []
    rig = Rig(base)

    def log(action: str, _facts: object) -> None:
        lines.append(action)

    rig.io.log = log
    rig.door.open()
    listener = rig.door._listener  # pyright: ignore[reportPrivateUsage]
    assert listener is not None
    real: socket.socket = listener

    class Full:
        failures = 3

        def accept(self) -> tuple[socket.socket, object]:
            if self.failures:
                self.failures -= 1
                raise OSError(number, os.strerror(number))
            return real.accept()

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            return getattr(real, name)

    rig.door._listener = Full()  # type: ignore[assignment]  # pyright: ignore
    rig._thread.start()  # pyright: ignore[reportPrivateUsage]
    try:
        with rig.connect() as wire:
            assert echo(wire)
        assert len(rig.of(Paused)) == 3
        assert lines == ["door_paused"], "one line per cause and minute"
    finally:
        rig.stop()


@pytest.mark.rule("FLT-43", "T-3")
def test_a_stale_socket_is_replaced_and_a_live_one_is_not(base: Path) -> None:
    first = Rig(base)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(os.fspath(first.path))
    stale.close()
    first.start()
    with first.connect() as wire:
        assert echo(wire)
    first.stop()
    assert not first.path.exists()
    foreign = socket.socket(socket.AF_UNIX)
    foreign.bind(os.fspath(first.path))
    foreign.listen()
    second = Rig(base)
    with pytest.raises(HomeUnsafe):
        second.door.open()
    foreign.close()
    os.unlink(first.path)
    first.path.write_text("no socket")
    with pytest.raises(HomeUnsafe):
        second.door.open()
    second.discard()


BINDER = """
import sys, time
from pathlib import Path
from callboard.actors.gateway.door import Door
from callboard.peer import Io
Door(Io(), Path(sys.argv[1]), Path(sys.argv[2]), 1).open()
print("bound", flush=True)
time.sleep(60)
"""


@pytest.mark.rule("FLT-43")
def test_only_one_process_binds_the_door(base: Path) -> None:
    rig = Rig(base)
    holder = subprocess.Popen(
        [sys.executable, "-c", BINDER, str(rig.path), str(rig.lock)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"bound\n"
    with pytest.raises(HomeInUse):
        rig.door.open()
    holder.kill()
    holder.communicate()
    again = Rig(base).start()
    again.stop()
    rig.discard()


@pytest.mark.rule("FLT-42")
def test_a_path_that_no_socket_can_bear_is_refused(base: Path) -> None:
    deep = base / ("x" * 90)
    deep.mkdir()
    rig = Rig(deep)
    with pytest.raises(HomeUnsafe) as refusal:
        rig.door.open()
    rig.discard()
    assert refusal.value.carried["reason"] == "path_too_long"
