"""The sync client against a gateway that dies, lies, hesitates and comes back."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

import callboard
from callboard import Client, connect, messages
from callboard.errors import (
    CallboardError,
    Cancelled,
    DeadlineExceeded,
    HomeUnsafe,
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    PlaneNotRunning,
    ProtocolUnsupported,
    SessionDamaged,
)
from callboard.home import Home
from callboard.ids import parse_ref
from callboard.link import supervisor_lives
from callboard.records import SessionCreated, compact, first_chain, stamp_record
from callboard.wire import Header
from tests.client.fake_gateway import REF, FakeGateway

TEXT: dict[str, object] = {"type": "text", "prompt_artifact": None}
"""A text part as it goes over the door, but for its text."""


def later(seconds: float, function: object) -> threading.Timer:
    assert callable(function)
    timer = threading.Timer(seconds, function)
    timer.start()
    return timer


# ---- Being let in ----


@pytest.mark.rule("FLT-47")
def test_no_home_is_no_plane(tmp_path: Path) -> None:
    with pytest.raises(PlaneNotRunning):
        connect(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.rule("FLT-47")
def test_a_name_without_a_gateway_is_no_plane(gateway: FakeGateway) -> None:
    gateway.die()
    assert gateway.runtime.door.exists()
    with pytest.raises(PlaneNotRunning):
        connect(gateway.home)


@pytest.mark.rule("FLT-47")
def test_a_full_backlog_is_tried_until_the_deadline_then_overloaded(folder: Path) -> None:
    fake = FakeGateway(folder)
    fake.up(backlog=0, serve=False)
    others = fill(fake)
    try:
        begun = time.monotonic()
        with pytest.raises(Overloaded) as refused:
            connect(fake.home, timeout=0.3)
        assert time.monotonic() - begun >= 0.3
        assert refused.value.carried["resource"] == "connections"
    finally:
        for other in others:
            other.close()
        fake.__exit__()


@pytest.mark.rule("FLT-47")
def test_a_backlog_that_empties_lets_us_in(folder: Path) -> None:
    fake = FakeGateway(folder)
    fake.up(backlog=0, serve=False)
    others = fill(fake)
    timer = later(0.2, fake.serve)
    try:
        with connect(fake.home, timeout=5) as client:
            assert client.session(REF).send("x").accepted
    finally:
        timer.join()
        for other in others:
            other.close()
        fake.__exit__()


def fill(fake: FakeGateway) -> list[socket.socket]:
    """Connect until the kernel says EAGAIN."""
    others = list[socket.socket]()
    while True:
        other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        others.append(other)
        try:
            other.connect(str(fake.runtime.door))
        except BlockingIOError:
            return others


def test_a_plane_with_all_the_clients_it_takes(gateway: FakeGateway) -> None:
    gateway.refuse_hello = Overloaded(resource="connections", limit=256)
    with pytest.raises(Overloaded):
        connect(gateway.home, timeout=0.2)
    later(0.2, lambda: setattr(gateway, "refuse_hello", None))
    with connect(gateway.home, timeout=5):
        pass


def test_another_protocol_is_no_reason_to_wait(gateway: FakeGateway) -> None:
    gateway.refuse_hello = ProtocolUnsupported(min=9, max=9)
    begun = time.monotonic()
    with pytest.raises(ProtocolUnsupported):
        connect(gateway.home, timeout=10)
    assert time.monotonic() - begun < 2


def test_a_token_that_is_refused_twice_is_no_reason_to_wait(gateway: FakeGateway) -> None:
    gateway.refuse_hello = NotAuthenticated()
    begun = time.monotonic()
    with pytest.raises(NotAuthenticated):
        connect(gateway.home, timeout=10)
    assert time.monotonic() - begun < 2


def test_a_new_plane_s_token_is_read_again(gateway: FakeGateway) -> None:
    with connect(gateway.home) as client:
        session = client.session(REF)
        session.send("one")
        gateway.die()
        gateway.token = "n" * 64
        gateway.up()
        assert session.send("two", timeout=5).accepted


@pytest.mark.rule("FLT-62")
def test_a_token_that_is_not_the_user_s_own_file_is_refused(gateway: FakeGateway) -> None:
    gateway.runtime.operator_token.unlink()
    gateway.runtime.operator_token.symlink_to("/etc/hostname")
    with pytest.raises(HomeUnsafe) as refused:
        connect(gateway.home)
    assert refused.value.carried == {"what": "token", "reason": "symlink"}


# ---- Asking ----


def test_a_receipt(gateway: FakeGateway) -> None:
    with connect(gateway.home) as client:
        receipt = client.session(REF).send("hello", metadata={"a": 1})
    assert receipt.accepted
    ((header, body),) = gateway.asked
    assert header.kind == "send"
    assert 29_000 < header.deadline <= 30_000
    assert body == {
        "session": REF,
        "message_id": receipt.message_id,
        "content": [TEXT | {"text": "hello"}],
        "busy_mode": "steer",
        "metadata": {"a": 1},
    }


@pytest.mark.rule("REC-9")
def test_a_lone_surrogate_is_replaced(gateway: FakeGateway) -> None:
    with connect(gateway.home) as client:
        receipt = client.session(REF).send("a\ud800b")
    assert gateway.accepted[receipt.message_id] == [TEXT | {"text": "a�b"}]


def test_a_refusal_is_raised_as_what_it_is(gateway: FakeGateway) -> None:
    gateway.handlers["send"] = lambda header, body: NotFound()
    with connect(gateway.home) as client, pytest.raises(NotFound):
        client.session(REF).send("x")


@pytest.mark.parametrize("message_id", ["", "a b", "é", "x" * 129])
def test_a_message_id_is_checked_before_anything_is_sent(
    gateway: FakeGateway, message_id: str
) -> None:
    with connect(gateway.home) as client, pytest.raises(InvalidRequest):
        client.session(REF).send("x", message_id=message_id)
    assert gateway.asked == []


def test_what_is_too_large_is_refused_and_the_connection_lives(gateway: FakeGateway) -> None:
    with connect(gateway.home) as client:
        session = client.session(REF)
        with pytest.raises(PayloadTooLarge):
            session.send("x" * 6_000_000)
        assert session.send("y").accepted


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_every_wait_has_a_deadline(gateway: FakeGateway, timeout: float) -> None:
    with connect(gateway.home) as client, pytest.raises(InvalidRequest):
        client.session(REF).send("x", timeout=timeout)


def test_a_deadline_passes(gateway: FakeGateway) -> None:
    gateway.handlers["send"] = lambda header, body: None
    with connect(gateway.home) as client:
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.session(REF).send("x", timeout=0.2)
        assert 0.2 <= time.monotonic() - begun < 1


def test_an_answer_after_the_deadline_disturbs_nobody(gateway: FakeGateway) -> None:
    held = list[str]()

    def hold(header: Header, body: Mapping[str, object]) -> messages.Body | None:
        if not held:
            held.append(header.id)
            return None
        return gateway.accept(body)

    gateway.handlers["send"] = hold
    with connect(gateway.home) as client:
        session = client.session(REF)
        with pytest.raises(DeadlineExceeded):
            session.send("x", message_id="first", timeout=0.1)
        gateway.say_all(held[0], gateway.accept({"message_id": "first", "content": []}))
        assert session.send("y", message_id="second").message_id == "second"


def test_create_names_the_folder_and_the_session(gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with connect(gateway.home) as client:
        session = client.create_session(
            "echo", tmp_path / "link", title="t\udc00", settings={"a": "b"}
        )
    assert str(session) == REF
    ((_, body),) = gateway.asked
    assert body["workspace"] == str(tmp_path / "real")
    assert (body["agent"], body["title"], body["settings"]) == ("echo", "t�", {"a": "b"})
    assert len(str(body["session_id"])) == 26


@pytest.mark.rule("IDN-2")
@pytest.mark.parametrize("workspace", ["", "a\0b", "/no/such/folder", __file__, "/" + "x" * 5_000])
def test_a_session_needs_a_folder(gateway: FakeGateway, workspace: str) -> None:
    with connect(gateway.home) as client, pytest.raises(InvalidRequest) as refused:
        client.create_session("echo", workspace)
    assert refused.value.carried["field"] == "workspace"
    assert gateway.asked == []


@pytest.mark.rule("IDN-2")
@pytest.mark.parametrize("name", ["", ".", "..", "a b", "x/y", "/", "é", "a\0", "x" * 201])
def test_a_name_that_is_none(gateway: FakeGateway, name: str) -> None:
    with connect(gateway.home) as client, pytest.raises(InvalidRequest):
        client.session(name)


# ---- A gateway that dies ----


@pytest.mark.rule("INB-6")
def test_a_gateway_that_dies_before_its_answer_gets_the_same_message_again(
    gateway: FakeGateway,
) -> None:
    with connect(gateway.home) as client:
        session = client.session(REF)
        session.send("zero")
        gateway.drop_after = 0  # it accepts, and dies before it answers
        receipt = session.send("one", timeout=5)
    assert receipt.duplicate
    first, second = (body for _, body in gateway.asked[1:])
    assert first == second
    assert gateway.order == list(dict.fromkeys(gateway.order))
    assert len(gateway.accepted) == 2


@pytest.mark.rule("INB-6")
def test_a_gateway_that_comes_back_is_found(gateway: FakeGateway) -> None:
    with connect(gateway.home) as client:
        session = client.session(REF)
        session.send("one")
        gateway.die()
        timer = later(0.3, gateway.up)
        assert session.send("two", timeout=10).accepted
        timer.join()


def test_everything_under_way_survives_a_gateway(gateway: FakeGateway) -> None:
    with connect(gateway.home) as client:
        session = client.session(REF)
        futures = [session.send_nowait(str(n), message_id=f"m{n}", timeout=10) for n in range(300)]
        for _ in range(3):
            time.sleep(0.005)
            gateway.die()
            gateway.up()
        receipts = [future.result(10) for future in futures]
    assert [receipt.message_id for receipt in receipts] == [f"m{n}" for n in range(300)]
    assert len(gateway.accepted) == 300
    assert gateway.order == [f"m{n}" for n in range(300)]


def test_without_a_supervisor_nobody_waits_for_a_gateway(gateway: FakeGateway) -> None:
    with connect(gateway.home) as client:
        client.session(REF).send("one")
        gateway.die()
        gateway.release_home()
        begun = time.monotonic()
        with pytest.raises(PlaneNotRunning):
            client.session(REF).send("two", timeout=10)
        assert time.monotonic() - begun < 2


def test_with_a_supervisor_a_gateway_that_does_not_come_is_a_deadline(gateway: FakeGateway) -> None:
    with connect(gateway.home) as client:
        client.session(REF).send("one")
        gateway.die()
        with pytest.raises(DeadlineExceeded):
            client.session(REF).send("two", timeout=0.3)


def test_the_lock_of_a_home_is_seen_and_never_taken(gateway: FakeGateway) -> None:
    home = Home(gateway.home)
    assert supervisor_lives(home)
    gateway.release_home()
    assert not supervisor_lives(home)
    gateway.hold_home()
    assert supervisor_lives(home)
    home.lock.unlink()
    assert not supervisor_lives(home)


def test_a_down_ends_well_when_the_plane_ends_before_its_answer(gateway: FakeGateway) -> None:
    def end(header: Header, body: Mapping[str, object]) -> None:
        gateway.release_home()
        threading.Thread(target=gateway.die).start()

    gateway.handlers["down"] = end
    with connect(gateway.home) as client:
        client.down(timeout=5)


def test_noise_from_a_gateway_is_another_try(gateway: FakeGateway) -> None:
    def noise(header: Header, body: Mapping[str, object]) -> messages.Body | None:
        if len(gateway.asked) == 1:
            for connection in gateway.connections:
                connection.sendall(b"\x05\0\0\0hello")
            return None
        return gateway.accept(body)

    gateway.handlers["send"] = noise
    with connect(gateway.home) as client:
        assert client.session(REF).send("x", timeout=5).accepted


# ---- Threads ----


def test_many_threads_share_one_client(gateway: FakeGateway) -> None:
    errors = list[BaseException]()

    def work(client: Client, number: int) -> None:
        try:
            session = client.session(REF)
            for step in range(50):
                named = f"t{number}-{step}"
                assert session.send("x", message_id=named).message_id == named
        except BaseException as error:
            errors.append(error)

    with connect(gateway.home) as client:
        threads = [threading.Thread(target=work, args=(client, n)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert errors == []
    assert len(gateway.accepted) == 400


def test_a_callback_may_ask_and_even_wait(gateway: FakeGateway) -> None:
    done = threading.Event()
    seen = list[str]()
    with connect(gateway.home) as client:
        session = client.session(REF)

        def again(future: object) -> None:
            seen.append(session.send("b", message_id="b", timeout=5).message_id)
            done.set()

        session.send_nowait("a").add_done_callback(again)
        assert done.wait(5)
    assert seen == ["b"]


def test_closing_answers_whoever_waits(gateway: FakeGateway) -> None:
    gateway.handlers["send"] = lambda header, body: None
    client = connect(gateway.home)
    future = client.session(REF).send_nowait("x")
    refusals = list[CallboardError]()

    def wait() -> None:
        try:
            client.session(REF).send("y")
        except CallboardError as error:
            refusals.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    client.close()
    client.close()
    thread.join(5)
    assert isinstance(future.exception(5), Cancelled)
    assert [type(refusal) for refusal in refusals] == [Cancelled]
    with pytest.raises(Cancelled):
        client.session(REF).send("z")


def test_a_client_may_be_closed_from_a_callback(gateway: FakeGateway) -> None:
    client = connect(gateway.home)
    closed = threading.Event()

    def close(future: object) -> None:
        client.close()
        closed.set()

    client.session(REF).send_nowait("x").add_done_callback(close)
    assert closed.wait(5)
    with pytest.raises(Cancelled):
        client.session(REF).send("z")


def test_one_thread_that_waits_needs_no_other(gateway: FakeGateway) -> None:
    before = threading.active_count()
    with connect(gateway.home) as client:
        client.session(REF).send("x")
        names = [thread.name for thread in threading.enumerate()]
        assert "callboard-client" not in names
        client.session(REF).send_nowait("y").result(5)
        names = [thread.name for thread in threading.enumerate()]
        assert "callboard-client" in names
    assert before >= 1


def test_an_interrupted_wait_leaves_nothing_behind(gateway: FakeGateway) -> None:
    """Ctrl-C in the middle of a send; the client is whole afterwards."""
    import signal

    gateway.handlers["send"] = lambda header, body: None
    with connect(gateway.home) as client:
        timer = later(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            client.session(REF).send("x", timeout=10)
        timer.join()
        del gateway.handlers["send"]
        assert client.session(REF).send("y").accepted


# ---- Watching ----


def lines_of(count: int) -> list[bytes]:
    """The lines of a transcript whose records are all creations; good enough for a reader."""
    ref = parse_ref(REF)
    data = compact(
        SessionCreated(
            workspace="/w",
            session_id="s1",
            root=REF,
            agent="echo",
            created_at=1,
            owner={"kind": "operator", "principal_id": "p", "created_at": 1},  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        ).model_dump()
    )
    before, lines = first_chain(REF), list[bytes]()
    for seq in range(1, count + 1):
        line, before = stamp_record(
            ref,
            seq=seq,
            record_id=f"{seq:032x}",
            commit=seq,
            epoch=1,
            ts="2026-01-01T00:00:00.000000Z",
            kind="session_created",
            turn_id=None,
            data=data,
            before=before,
        )
        lines.append(line)
    return lines


class Watched:
    """Serves watches of a transcript, some lines at a time."""

    def __init__(self, gateway: FakeGateway, count: int) -> None:
        self.lines = lines_of(count)
        self.gateway = gateway
        gateway.handlers["watch"] = self.watch
        self.die_at = set[int]()
        self.refuse_at: dict[int, CallboardError] = {}

    def watch(
        self, header: Header, body: Mapping[str, object]
    ) -> messages.Body | CallboardError | None:
        first = body["from_seq"]
        assert isinstance(first, int)
        for seq in range(first, len(self.lines) + 1):
            if seq in self.die_at:
                self.die_at.discard(seq)
                threading.Thread(target=self.restart).start()
                return None
            if seq in self.refuse_at:
                return self.refuse_at.pop(seq)
            piece = messages.Records(
                session=REF, first_seq=seq, last_seq=seq, lines=[self.lines[seq - 1]]
            )
            self.gateway.say_all(header.id, piece)
        return None

    def restart(self) -> None:
        self.gateway.die()
        self.gateway.up()


@pytest.mark.rule("WCH-1")
def test_a_watch_is_whole_over_the_deaths_of_gateways(gateway: FakeGateway) -> None:
    watched = Watched(gateway, 40)
    watched.die_at = {5, 6, 20, 40}
    with connect(gateway.home) as client:
        seen = list[int]()
        for record in client.session(REF).watch(timeout=5):
            seen.append(record.seq)
            if record.seq == 40:
                break
    assert seen == list(range(1, 41))


@pytest.mark.rule("WCH-1")
def test_a_watch_that_was_too_slow_goes_on_where_it_was(gateway: FakeGateway) -> None:
    watched = Watched(gateway, 12)
    watched.refuse_at = {4: Overloaded(resource="socket"), 9: Overloaded(resource="socket")}
    with connect(gateway.home) as client:
        seen = [next_seq for next_seq, _ in zip(sequence(client, 2), range(11), strict=False)]
    assert seen == list(range(2, 13))


def sequence(client: Client, from_seq: int) -> list[int]:
    seen = list[int]()
    for record in client.session(REF).watch(from_seq, timeout=5):
        seen.append(record.seq)
        if record.seq == 12:
            break
    return seen


def test_a_watch_that_is_refused_says_why(gateway: FakeGateway) -> None:
    gateway.handlers["watch"] = lambda header, body: NotFound()
    with connect(gateway.home) as client, pytest.raises(NotFound):
        next(client.session(REF).watch())


def test_a_watch_without_news_ends_when_asked_to(gateway: FakeGateway) -> None:
    Watched(gateway, 1)
    with connect(gateway.home) as client:
        watching = client.session(REF).watch(timeout=0.2)
        assert next(watching).seq == 1
        with pytest.raises(DeadlineExceeded):
            next(watching)


def test_a_watch_tells_the_gateway_when_it_ends(gateway: FakeGateway) -> None:
    Watched(gateway, 3)
    with connect(gateway.home) as client:
        session = client.session(REF)
        for _ in session.watch():
            break
        session.send("x")
    kinds = [header.kind for header, _ in gateway.asked]
    assert kinds == ["watch", "unwatch", "send"]


def test_a_line_that_does_not_follow_the_one_before_is_damage(gateway: FakeGateway) -> None:
    watched = Watched(gateway, 3)
    watched.lines[1] = lines_of(1)[0].replace(b'"seq":1', b'"seq":2')
    with connect(gateway.home) as client:
        watching = client.session(REF).watch(timeout=5)
        next(watching)
        with pytest.raises(SessionDamaged) as refused:
            next(watching)
    assert refused.value.carried == {"damage": "bad_line", "line": 2}


@pytest.mark.parametrize("from_seq", [0, -1])
def test_a_watch_begins_at_a_record(gateway: FakeGateway, from_seq: int) -> None:
    with connect(gateway.home) as client, pytest.raises(InvalidRequest):
        next(client.session(REF).watch(from_seq))


# ---- What it costs to be imported ----


def imported(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(callboard.__file__).parents[1])},
    )
    return set(done.stdout.split())


HEAVY = {"zmq", "pykka", "apsw", "sqlite3", "pydantic", "typer", "rich", "asyncio", "msgpack"}


def test_importing_callboard_loads_nothing_that_it_may_not_need() -> None:
    modules = imported("import callboard")
    assert not modules & HEAVY
    assert {name for name in modules if name.startswith("callboard")} == {"callboard"}


def test_an_agent_s_module_does_not_pay_for_the_client() -> None:
    modules = imported("from callboard import Turn, agent")
    assert not modules & HEAVY
    assert "callboard.client" not in modules


def test_a_client_does_not_load_what_only_actors_need() -> None:
    modules = imported("import callboard; callboard.connect; callboard.Plane")
    assert not modules & {"zmq", "pykka", "apsw", "sqlite3", "typer", "rich", "asyncio"}


def test_all_public_names_are_there() -> None:
    for name in callboard.__all__:
        assert getattr(callboard, name) is not None
    assert set(callboard.__all__) <= set(dir(callboard))
    with pytest.raises(AttributeError):
        getattr(callboard, "nothing_of_this_name")  # noqa: B009
