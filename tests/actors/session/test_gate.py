"""Operation gates (GTE) and serialisers by key (KEY)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from callboard.actors.session.gate import Gate, Holder, Signal
from callboard.actors.session.serialiser import Serialiser
from callboard.errors import GateClosed


def run(play: Coroutine[Any, Any, None]) -> None:
    asyncio.run(play)


@pytest.mark.rule("GTE-2", "GTE-3", "R35")
def test_a_shutdown_aborts_everybody_once_and_waits_for_them() -> None:
    async def play() -> None:
        gate = Gate(time.monotonic)
        heard: list[str] = []
        tickets = [gate.enter("a"), gate.enter("b")]
        for ticket in tickets:
            ticket.signal.listen(heard.append)
        first = asyncio.create_task(gate.shutdown("bye", 1_000))
        second = asyncio.create_task(gate.shutdown("x", 1))
        await asyncio.sleep(0.02)
        assert heard == ["bye", "bye"]
        assert (gate.stats.accepting, gate.stats.active) == (False, 2)
        with pytest.raises(GateClosed):
            gate.enter("late")
        tickets[0].release()
        await asyncio.sleep(0.02)
        assert not first.done()
        tickets[1].release()
        one, two = await first, await second
        assert one is two
        assert one == (True, "bye", [])
        gate.close("again")
        assert heard == ["bye", "bye"]

    run(play())


@pytest.mark.rule("GTE-1", "GTE-2", "R36")
def test_a_callers_abort_reaches_its_ticket_alone() -> None:
    async def play() -> None:
        gate = Gate(time.monotonic)
        caller = Signal()
        mine, other = gate.enter("mine", caller), gate.enter("other")
        caller.abort("enough")
        caller.abort("again")
        assert (mine.signal.reason, other.signal.aborted) == ("enough", False)
        assert gate.stats.active == 2, "an abort alone is no release"
        mine.release()
        mine.release()
        assert (gate.stats.accepting, gate.stats.active) == (True, 1)
        with gate.enter("next", caller) as ticket:
            assert ticket.signal.reason == "enough", "an aborted caller's reason is copied"
        fresh = Signal()
        with gate.enter("clean", fresh):
            pass
        fresh.abort("late")
        assert gate.stats.active == 1

    run(play())


@pytest.mark.rule("GTE-3", "R37")
def test_a_leak_does_not_hold_up_a_shutdown() -> None:
    async def play() -> None:
        gate = Gate(time.monotonic)
        gate.enter("leak" * 100)
        before = time.monotonic()
        shut = await gate.shutdown("bye", 200)
        assert 0.2 <= time.monotonic() - before < 0.4
        assert not shut.drained
        (holder,) = shut.holders
        assert holder == Holder(("leak" * 100)[:64], holder.held_ms)
        assert 190 <= holder.held_ms < 400

    run(play())


@pytest.mark.rule("GTE-3")
def test_an_empty_gate_is_shut_at_once() -> None:
    async def play() -> None:
        shut = await Gate(time.monotonic).shutdown("bye", 10_000)
        assert shut.drained

    run(play())


@pytest.mark.rule("GTE-1")
def test_listeners_are_forgotten() -> None:
    signal, heard = Signal(), list[str]()
    signal.listen(heard.append)
    signal.unlisten(heard.append)
    signal.unlisten(heard.append)
    signal.abort("x")
    assert heard == []


@pytest.mark.rule("KEY-1", "R38")
def test_ten_thousand_keys_leave_nothing() -> None:
    async def play() -> None:
        serialiser: Serialiser[int] = Serialiser()
        for key in range(10_000):
            async with serialiser.turn(key):
                assert serialiser.keys == 1
        assert (serialiser.keys, serialiser.operations) == (0, 0)

    run(play())


@pytest.mark.rule("KEY-1", "R38")
def test_keys_are_fifo_and_never_wait_for_each_other() -> None:
    async def play() -> None:
        serialiser: Serialiser[int] = Serialiser()
        order: dict[int, list[int]] = {key: [] for key in range(16)}
        inside: set[int] = set()
        most = 0
        chance = random.Random(1)

        async def operate(number: int) -> None:
            nonlocal most
            key = number % 16
            async with serialiser.turn(key):
                assert key not in inside
                inside.add(key)
                most = max(most, serialiser.keys)
                order[key].append(number)
                await asyncio.sleep(chance.random() / 1_000)
                inside.discard(key)
                if number % 7 == 0:
                    raise ValueError(number)

        tasks = [asyncio.create_task(operate(number)) for number in range(256)]
        await asyncio.sleep(0)
        for number in (33, 64, 129):
            tasks[number].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(one, ValueError) for one in results) >= 30
        assert most == 16
        for numbers in order.values():
            assert numbers == sorted(numbers)
        assert (serialiser.keys, serialiser.operations) == (0, 0)

    run(play())


@pytest.mark.rule("KEY-1")
def test_a_turn_given_to_one_that_was_cancelled_goes_on() -> None:
    async def play() -> None:
        serialiser: Serialiser[str] = Serialiser()
        done: list[int] = []

        async def operate(number: int) -> None:
            async with serialiser.turn("k"):
                done.append(number)

        async with serialiser.turn("k"):
            waiting = asyncio.create_task(operate(1))
            behind = asyncio.create_task(operate(2))
            await asyncio.sleep(0)
        waiting.cancel()  # after it was given the turn, before it runs
        await asyncio.gather(waiting, behind, return_exceptions=True)
        assert done == [2]
        assert serialiser.keys == 0

    run(play())
