"""The async client: the same machine behind it, so here is what is its own."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from pathlib import Path

import pytest

from callboard import aio, client, messages
from callboard.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PlaneNotRunning,
)
from callboard.wire import Header
from tests.client.fake_gateway import REF, FakeGateway
from tests.client.test_client import Watched, fill

TEXT: dict[str, object] = {"type": "text", "prompt_artifact": None}
"""A text part as it goes over the door, but for its text."""


def in_loop(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: object) -> None:
        asyncio.run(test(**fixtures), debug=True)

    return run


def names(of: type) -> set[str]:
    return {name for name in vars(of) if not name.startswith("_")}


@pytest.mark.parametrize("name", ["Client", "Session", "Plane"])
def test_both_clients_have_the_same_names_and_take_the_same(name: str) -> None:
    sync: type = getattr(client, name)
    asynchronous: type = getattr(aio, name)
    assert names(sync) == names(asynchronous)
    for member in names(sync):
        if callable(vars(sync)[member]):
            ours = inspect.signature(vars(sync)[member]).parameters
            theirs = inspect.signature(vars(asynchronous)[member]).parameters
            assert list(ours) == list(theirs), member
            assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
    assert set(client.__all__) == set(aio.__all__)


@in_loop
async def test_a_receipt(gateway: FakeGateway) -> None:
    async with await aio.connect(gateway.home) as plane:
        session = await plane.session(REF)
        receipt = await session.send("a\ud800b")
    assert gateway.accepted[receipt.message_id] == [TEXT | {"text": "a�b"}]


@pytest.mark.rule("FLT-47")
@in_loop
async def test_no_plane(tmp_path: Path) -> None:
    with pytest.raises(PlaneNotRunning):
        await aio.connect(tmp_path)


@pytest.mark.rule("FLT-47")
def test_a_full_backlog_is_no_connection(folder: Path) -> None:
    """asyncio itself takes EAGAIN of a Unix socket for a connection under way."""

    async def run() -> None:
        with pytest.raises(Overloaded):
            await aio.connect(fake.home, timeout=0.3)

    fake = FakeGateway(folder)
    fake.up(backlog=0, serve=False)
    others = fill(fake)
    try:
        asyncio.run(run())
    finally:
        for other in others:
            other.close()
        fake.__exit__()


@in_loop
async def test_many_at_once(gateway: FakeGateway) -> None:
    async with await aio.connect(gateway.home) as plane:
        session = await plane.session(REF)
        sends = [session.send(str(n), message_id=f"m{n}") for n in range(600)]
        receipts = await asyncio.gather(*sends)
    assert [receipt.message_id for receipt in receipts] == [f"m{n}" for n in range(600)]
    assert gateway.order == [f"m{n}" for n in range(600)]


@pytest.mark.rule("INB-6")
@in_loop
async def test_everything_under_way_survives_a_gateway(gateway: FakeGateway) -> None:
    async with await aio.connect(gateway.home) as plane:
        session = await plane.session(REF)
        sends = [session.send_nowait(str(n), message_id=f"m{n}", timeout=20) for n in range(300)]
        for _ in range(3):
            await asyncio.sleep(0.005)
            gateway.die()
            gateway.up()
        receipts = await asyncio.gather(*sends)
        gateway.die()
        threading.Timer(0.3, gateway.up).start()
        assert (await session.send("last", message_id="last", timeout=10)).accepted
    assert len(receipts) == 300
    assert gateway.order == [*(f"m{n}" for n in range(300)), "last"]


@in_loop
async def test_a_deadline_passes(gateway: FakeGateway) -> None:
    gateway.handlers["send"] = lambda header, body: None
    async with await aio.connect(gateway.home) as plane:
        session = await plane.session(REF)
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await session.send("x", timeout=0.2)
        assert 0.2 <= time.monotonic() - begun < 1
        with pytest.raises(InvalidRequest):
            await session.send("x", timeout=0)


@in_loop
async def test_a_cancelled_send_is_forgotten(gateway: FakeGateway) -> None:
    gateway.handlers["send"] = lambda header, body: None
    async with await aio.connect(gateway.home) as plane:
        session = await plane.session(REF)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await session.send("x")
        del gateway.handlers["send"]
        assert (await session.send("y")).accepted


@in_loop
async def test_closing_answers_whoever_waits(gateway: FakeGateway) -> None:
    gateway.handlers["send"] = lambda header, body: None
    plane = await aio.connect(gateway.home)
    session = await plane.session(REF)
    waiting = asyncio.ensure_future(session.send("x"))
    await asyncio.sleep(0.05)
    await plane.close()
    await plane.close()
    with pytest.raises(Cancelled):
        await waiting
    with pytest.raises(Cancelled):
        await session.send("y")


@in_loop
async def test_a_plane_that_is_gone_is_told_at_once(gateway: FakeGateway) -> None:
    async with await aio.connect(gateway.home) as plane:
        session = await plane.session(REF)
        await session.send("x")
        gateway.die()
        gateway.release_home()
        begun = time.monotonic()
        with pytest.raises(PlaneNotRunning):
            await session.send("y", timeout=10)
        assert time.monotonic() - begun < 2


@pytest.mark.rule("WCH-1")
@in_loop
async def test_a_watch_is_whole_over_the_deaths_of_gateways(gateway: FakeGateway) -> None:
    watched = Watched(gateway, 30)
    watched.die_at = {5, 20}
    watched.refuse_at = {10: Overloaded(resource="socket")}
    seen = list[int]()
    async with await aio.connect(gateway.home) as plane:
        session = await plane.session(REF)
        async for record in session.watch(timeout=5):
            seen.append(record.seq)
            if record.seq == 30:
                break
    assert seen == list(range(1, 31))


@in_loop
async def test_a_watch_ends_as_it_is_told(gateway: FakeGateway) -> None:
    Watched(gateway, 1)
    async with await aio.connect(gateway.home) as plane:
        session = await plane.session(REF)
        watching = session.watch(timeout=0.2)
        assert (await anext(watching)).seq == 1
        with pytest.raises(DeadlineExceeded):
            await anext(watching)
        gateway.handlers["watch"] = lambda header, body: NotFound()
        with pytest.raises(NotFound):
            await anext(session.watch())


@in_loop
async def test_what_is_large_is_written_as_the_socket_takes_it(gateway: FakeGateway) -> None:
    held = threading.Event()

    def slow(header: Header, body: Mapping[str, object]) -> messages.Body:
        held.wait(5)
        return gateway.accept(body)

    gateway.handlers["send"] = slow
    async with await aio.connect(gateway.home) as plane:
        session = await plane.session(REF)
        sends = [asyncio.ensure_future(session.send("x" * 1_000_000)) for _ in range(8)]
        await asyncio.sleep(0.2)
        held.set()
        assert all(receipt.accepted for receipt in await asyncio.gather(*sends))
