"""The clients on a plane that runs."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import callboard
from callboard import aio
from callboard.cli.demo_load import kill_child
from callboard.errors import (
    CallboardError,
    DeadlineExceeded,
    HomeInUse,
    InvalidRequest,
    NotFound,
    PlaneNotRunning,
    RequestConflict,
    SessionAmbiguous,
    SessionExists,
)
from callboard.limits import RESERVE_BYTES
from callboard.records import TurnCompleted
from callboard.storage.gather import Message
from callboard.storage.readers import open_home
from tests.whole import short_folder

ROOT = Path(callboard.__file__).parents[1]
SLOW = (
    '{"format":"callboard-script","version":1,"name":"slow","source":"","turns":1}\n'
    '{"user":"x","steps":[{"say":"one","delay_ms":300},{"say":"two","delay_ms":5000}]}\n'
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as made:
        yield made


@pytest.fixture(scope="module")
def plane(folder: Path) -> Iterator[callboard.Plane]:
    with callboard.testing.plane(folder) as running:
        yield running


@pytest.fixture
def session(plane: callboard.Plane, tmp_path: Path) -> callboard.Session:
    return plane.create_session("echo", tmp_path)


@pytest.fixture
def slow(plane: callboard.Plane, tmp_path: Path) -> callboard.Session:
    """A session whose turns last until they are cancelled."""
    script = tmp_path / "slow.jsonl"
    script.write_text(SLOW)
    settings = {"replay.script": str(script), "replay.speed": "0.1"}
    return plane.create_session("replay", tmp_path, settings=settings)


def kill(plane: callboard.Plane, role: str) -> None:
    pids = [process.pid for process in plane.status().processes if process.role == role]
    assert kill_child(pids[0], plane.pid)


# ---- One session ----


def test_a_message_and_its_answer(session: callboard.Session) -> None:
    receipt = session.send("hello")
    outcome = session.wait(receipt)
    assert outcome.ok
    assert (outcome.outcome, outcome.text) == ("completed", "hello")
    assert outcome.input_disposition == "acknowledged"
    assert session.wait(receipt.message_id) == outcome
    page = session.history()
    assert [(m.role, m.content) for m in page.items if not isinstance(m, tuple)] == [
        ("user", "hello"),
        ("assistant", "hello"),
    ]
    assert page.next_seq is None


@pytest.mark.rule("INB-6")
def test_the_same_message_twice_is_one(session: callboard.Session) -> None:
    first = session.send("x", message_id="m")
    session.wait(first)
    again = session.send("x", message_id="m")
    assert (first.duplicate, again.duplicate) == (False, True)
    assert again.item_state == "acknowledged"
    with pytest.raises(RequestConflict):
        session.send("y", message_id="m")
    assert len(session.history().items) == 2


def test_a_steer_joins_the_running_turn(slow: callboard.Session) -> None:
    slow.send("begin")
    time.sleep(0.2)
    assert slow.send("steer").delivery == "current_turn"
    assert slow.send("later", busy_mode="queue").delivery == "next_turn"
    assert slow.cancel().status in ("cancelled", "cancelling")


def test_a_wait_has_a_deadline_and_can_be_repeated(slow: callboard.Session) -> None:
    receipt = slow.send("begin")
    with pytest.raises(DeadlineExceeded):
        slow.wait(receipt, timeout=0.3)
    slow.cancel()
    outcome = slow.wait(receipt, timeout=20)
    assert not outcome.ok
    assert outcome.outcome == "cancelled"


def test_a_cancel_of_nothing(session: callboard.Session) -> None:
    assert session.cancel().status == "not_found"
    receipt = session.send("x")
    turn = session.wait(receipt).turn_id
    assert session.cancel(turn_id=turn).status == "already_terminal"


def test_what_is_not_there(plane: callboard.Plane, tmp_path: Path) -> None:
    nobody = plane.session("demo-" + "0" * 32 + "/nobody")
    for ask in (
        lambda: nobody.send("x"),
        lambda: nobody.wait("m"),
        lambda: next(nobody.watch(timeout=5)),
        nobody.history,
    ):
        with pytest.raises(NotFound):
            ask()
    with pytest.raises(NotFound):
        plane.session("nobody")
    existing = plane.create_session("echo", tmp_path)
    with pytest.raises(NotFound):
        existing.wait("never-sent", timeout=5)


@pytest.mark.rule("WCH-1")
def test_a_watch_is_gapless_from_anywhere(
    plane: callboard.Plane, session: callboard.Session
) -> None:
    for number in range(5):
        session.wait(session.send(str(number)))
    last = open_home(plane.home).fold(session.ref).seq
    for start in (1, 2, 7, last):
        seen = list[int]()
        ended = 0
        for record in session.watch(start, timeout=5):
            seen.append(record.seq)
            ended += isinstance(record.data, TurnCompleted)
            if record.seq == last:
                break
        assert seen == list(range(start, last + 1))


def test_a_large_text_and_metadata(session: callboard.Session) -> None:
    text = "ä" * 100_000
    outcome = session.wait(session.send(text, metadata={"a": [1, {"b": None}]}))
    assert outcome.text == text


# ---- Sessions ----


@pytest.mark.rule("IDN-1")
def test_an_id_names_a_session_if_only_one_has_it(plane: callboard.Plane, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        plane.create_session("echo", tmp_path / name, session_id="both")
    single = plane.create_session("echo", tmp_path / "one", session_id="single")
    assert plane.session("single").ref == single.ref
    with pytest.raises(SessionAmbiguous) as refused:
        plane.session("both")
    assert refused.value.carried["workspaces"] == [str(tmp_path / "one"), str(tmp_path / "two")]
    with pytest.raises(SessionExists):
        plane.create_session("echo", tmp_path / "one", session_id="single")


@pytest.mark.rule("CAT-5")
def test_all_sessions_are_listed(plane: callboard.Plane, tmp_path: Path) -> None:
    made = {str(plane.create_session("echo", tmp_path)) for _ in range(60)}
    assert {str(row.ref) for row in plane.sessions(tmp_path)} == made
    page = plane.catalog(tmp_path, limit=7)
    assert len(page.rows) == 7
    assert page.next_cursor is not None
    with pytest.raises(InvalidRequest):
        plane.catalog(tmp_path, limit=0)


# ---- Processes that die ----


def test_sends_go_on_while_the_gateway_dies(plane: callboard.Plane, tmp_path: Path) -> None:
    session = plane.create_session("echo", tmp_path)
    session.send("warm")
    done = threading.Event()
    errors, sent = list[BaseException](), list[str]()

    def send() -> None:
        try:
            while not done.is_set():
                sent.append(session.send("x", timeout=60).message_id)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    for role in ("gateway", "storage"):
        time.sleep(0.5)
        kill(plane, role)
    time.sleep(2)
    done.set()
    thread.join(60)
    assert [error for error in errors if not is_full(error)] == []
    for message_id in sent[-3:]:
        assert session.wait(message_id, timeout=60).ok
    applied = [m.inbox_message_id for m in pages(session) if m.role == "user"]
    assert [name for name in applied if name in set(sent)] == sent


def is_full(error: BaseException) -> bool:
    return isinstance(error, CallboardError) and error.code == "inbox_full"


def pages(session: callboard.Session) -> Iterator[Message]:
    from_seq: int | None = 1
    while from_seq is not None:
        page = session.history(from_seq)
        yield from (item for item in page.items if isinstance(item, Message))
        from_seq = page.next_seq


@pytest.mark.rule("WCH-1")
def test_a_watch_goes_on_while_gateway_and_storage_die(
    plane: callboard.Plane, tmp_path: Path
) -> None:
    session = plane.create_session("echo", tmp_path)
    seen = list[int]()
    last = threading.Event()

    def watch() -> None:
        for record in session.watch(timeout=60):
            seen.append(record.seq)
            if record.type == "part_created" and b"last" in str(record.data).encode():
                last.set()
                return

    thread = threading.Thread(target=watch)
    thread.start()
    for role in ("gateway", "storage", "gateway"):
        session.wait(session.send("x", timeout=60), timeout=60)
        kill(plane, role)
    session.wait(session.send("last", timeout=60), timeout=60)
    assert last.wait(60)
    thread.join()
    assert seen == list(range(1, len(seen) + 1))


# ---- Planes ----


def test_one_home_one_plane(plane: callboard.Plane) -> None:
    with pytest.raises(HomeInUse), callboard.Plane(plane.home):
        pass
    assert plane.alive
    with callboard.connect(plane.home) as client:
        assert client.status().plane_id == plane.status().plane_id


def test_a_plane_starts_again_where_it_was(folder: Path, tmp_path: Path) -> None:
    place = folder / "again"
    place.mkdir()
    with callboard.testing.plane(place) as plane:
        session = plane.create_session("echo", tmp_path, session_id="kept")
        session.wait(session.send("one"))
        home = plane.home
    with pytest.raises(PlaneNotRunning):
        callboard.connect(home)
    with callboard.testing.plane(place) as plane:
        kept = plane.session("kept")
        assert kept.wait(kept.send("two")).text == "two"
        assert len(kept.history().items) == 4


def test_a_down_by_a_client_ends_an_embedded_plane(folder: Path) -> None:
    place = folder / "down"
    place.mkdir()
    with callboard.testing.plane(place) as plane:
        with callboard.connect(plane.home) as client:
            client.down()
        until = time.monotonic() + 15
        while plane.alive:
            assert time.monotonic() < until
            time.sleep(0.05)
        with pytest.raises(PlaneNotRunning):
            plane.status(timeout=10)


def test_a_supervisor_that_is_killed_is_told_at_once(folder: Path) -> None:
    place = folder / "killed"
    place.mkdir()
    with callboard.testing.plane(place) as plane:
        plane.status()
        os.kill(plane.pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(CallboardError):
            ask_until_refused(plane)
        assert time.monotonic() - begun < 5
        assert not plane.alive


def ask_until_refused(plane: callboard.Plane) -> None:
    while True:
        plane.status(timeout=10)


def test_a_plane_ends_with_the_program_it_is_embedded_in(folder: Path) -> None:
    home = folder / "orphan"
    code = f"""
import callboard, time
with callboard.Plane({str(home)!r}) as plane:
    print(plane.pid, flush=True)
    time.sleep(60)
"""
    program = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert program.stdout is not None
    assert int(program.stdout.readline()) > 1
    program.kill()
    program.wait()
    program.stdout.close()
    until = time.monotonic() + 15
    while True:
        try:
            callboard.connect(home, timeout=1).close()
        except PlaneNotRunning:
            break
        except CallboardError:
            pass
        assert time.monotonic() < until
        time.sleep(0.05)


# ---- Async ----


def test_the_same_with_asyncio(folder: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with aio.Plane(folder / "aio") as plane:
            assert plane.alive
            session = await plane.create_session("echo", tmp_path)
            receipts = await asyncio.gather(*(session.send(str(n)) for n in range(10)))
            outcomes = [await session.wait(receipt) for receipt in receipts]
            assert all(outcome.ok for outcome in outcomes)
            seen = 0
            async for record in session.watch(timeout=5):
                seen += record.type == "message_created"
                if seen == 20:
                    break
            assert len((await session.history()).items) == 20
            assert [row.ref async for row in plane.sessions(tmp_path)] == [session.ref]
            assert (await plane.session(session.id)).ref == session.ref
            assert (await session.cancel()).status == "not_found"
            assert (await plane.status()).processes
            async with await aio.connect(plane.home) as client:
                await client.down()
        with pytest.raises(PlaneNotRunning):
            await aio.connect(folder / "aio")

    asyncio.run(run())


@pytest.mark.rule("FLT-22")
def test_status_shows_how_full_the_plane_is(plane: callboard.Plane) -> None:
    names = {
        "disk_free_bytes",
        "files_waiting_bytes",
        "reserve_given_up_bytes",
        "storage_descriptors",
        "gateway_descriptors",
        "activation_queue",
        "turn_queue",
    }
    until = time.monotonic() + 20
    while not names <= set(found := {one.name: one for one in plane.status().levels}):
        assert time.monotonic() < until, found
        time.sleep(0.05)
    assert found["disk_free_bytes"].value > 0
    assert 0 < found["storage_descriptors"].value < found["storage_descriptors"].limit
    assert (plane.home / "journal" / "reserve").stat().st_size == RESERVE_BYTES
