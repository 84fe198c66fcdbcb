"""Which call returned before which reply went out (O8), as the recording disk saw it."""

from __future__ import annotations

import random

import pytest

from callboard import messages as m
from callboard.errors import StaleEpoch
from tests.storage.world import World, appending, item, started

SEGMENT = "/home/journal/0001.log"


def between(world: World, first: int) -> list[tuple[str, str]]:
    return world.disk.log[first:]


def at(log: list[tuple[str, str]], name: str, path: str = "") -> int:
    return next(n for n, (call, where) in enumerate(log) if call == name and path in where)


@pytest.mark.rule("FLT-2", "DUR-7")
def test_replies_leave_after_the_sync_and_before_the_files() -> None:
    world = World()
    text = world.create()
    start = len(world.disk.log)
    world.batch([world.acceptance(text, f"m{n}") for n in range(5)])
    log = between(world, start)
    replies = [n for n, (call, _) in enumerate(log) if call == "reply"]
    assert len(replies) == 5
    assert [call for call, path in log if path == SEGMENT] == ["write", "datasync"]
    assert (
        at(log, "write", SEGMENT) < at(log, "datasync") < at(log, "write", "durable") < replies[0]
    )
    files = [n for n, (_, path) in enumerate(log) if path.endswith(".jsonl")]
    assert min(files) > max(replies)
    assert log[-1] == ("write", "/run/durable")


@pytest.mark.rule("FLT-2")
def test_a_batch_costs_one_sync_however_many_sessions_take_part() -> None:
    world = World()
    texts = [world.create(f"s{n}") for n in range(20)]
    start = len(world.disk.log)
    world.batch([world.acceptance(text, f"m{n}") for text in texts for n in range(10)])
    assert [call for call, _ in between(world, start)].count("datasync") == 1


@pytest.mark.rule("FLT-2")
def test_a_batch_has_bounds() -> None:
    world = World()
    texts = [world.create(f"s{n}") for n in range(120)]
    start = len(world.disk.log)
    world.batch([world.acceptance(text, f"m{n}") for text in texts for n in range(10)])
    assert [call for call, _ in between(world, start)].count("datasync") == 2  # 1,024 frames
    words = "x" * 1_000_000
    start = len(world.disk.log)
    answers = world.batch([world.acceptance(text, "big", words) for text in texts[:20]])
    assert all(isinstance(answer, m.Accepted) for answer in answers)
    assert [call for call, _ in between(world, start)].count("datasync") >= 2  # 16 MiB


@pytest.mark.rule("FLT-2")
def test_a_duplicate_in_the_same_batch_waits_for_the_sync_too() -> None:
    world = World()
    text = world.create()
    start = len(world.disk.log)
    first, second = world.batch([world.acceptance(text, "m1"), world.acceptance(text, "m1")])
    log = between(world, start)
    assert isinstance(first, m.Accepted)
    assert isinstance(second, m.Accepted)
    assert (first.duplicate, second.duplicate) == (False, True)
    assert at(log, "datasync") < at(log, "reply")


@pytest.mark.rule("LSE-5", "R33", "R114")
def test_a_refusal_writes_nothing() -> None:
    world = World()
    text = world.create()
    granted = world.acquire(text)
    before = world.disk.home()
    for body in (
        appending(text, granted.epoch + 1, [started("turn_1", 1, [], world)]),
        appending(text, granted.epoch - 1 or 7, puts=[item("m1")]),
        m.Release(session=text, epoch=granted.epoch + 1, nonce="0" * 32),
        world.acceptance(text, "m1").model_copy(update={"gateway_epoch": 99}),
    ):
        with pytest.raises(StaleEpoch):
            world.call(body)
    assert world.disk.home() == before


@pytest.mark.rule("FLT-3")
def test_short_writes_leave_the_same_bytes() -> None:
    homes: list[dict[str, bytes]] = []
    for short in (False, True):
        world = World(seed=7)
        world.disk.short = random.Random(3) if short else None
        text = world.create()
        epoch = world.acquire(text).epoch
        for n in range(5):
            world.turn(text, epoch, f"m{n}", f"turn_{n:02d}")
        world.engine.checkpoints.now()
        world.engine.stop()
        homes.append(world.disk.home())
    assert homes[0] == homes[1]


@pytest.mark.rule("FLT-8")
def test_the_closing_mark_comes_once_and_needs_no_sync() -> None:
    world = World()
    world.create()
    assert world.engine.idle_ms() == 0
    world.clock.pass_ms(200)
    assert round(world.engine.idle_ms() or 0) == 200
    start = len(world.disk.log)
    world.engine.mark()
    world.engine.mark()
    assert between(world, start) == [("write", SEGMENT)]
    assert world.engine.idle_ms() is None


@pytest.mark.rule("FLT-12")
def test_durable_says_what_is_synced_and_what_stands_in_the_files() -> None:
    world = World()
    text = world.create()
    world.accept(text, "m1")
    last = world.engine.journal.last_commit
    numbers = world.disk.content("/run/durable")
    assert numbers == last.to_bytes(8, "little") * 2
    world.crash()
    assert world.disk.content("/run/durable") == last.to_bytes(8, "little") * 2


def test_an_unknown_kind_is_not_found_and_changes_nothing() -> None:
    world = World()
    before = world.disk.home()
    answer = world.batch([m.Beat(phase="idle", evictable=True, pending=0)])
    assert getattr(answer[0], "code", "") == "not_found"
    assert world.disk.home() == before
