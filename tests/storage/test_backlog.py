"""A session that floods, and two hundred that do not: who waits for whom. Pure."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from callboard import messages as m
from callboard.limits import (
    COMMIT_BATCH_BYTES_MAX,
    COMMIT_BATCH_FRAMES_MAX,
    COMMIT_SHARED_BYTES_MAX,
    FRAME_BYTES_MAX,
)
from callboard.storage.backlog import Backlog
from callboard.storage.engine import Request
from tests.storage.world import World


class One(NamedTuple):
    lane: str
    number: int
    weight: int = 700


def flood(count: int, weight: int = 700) -> list[One]:
    return [One("flood", n, weight) for n in range(count)]


def quiet(count: int, weight: int = 700) -> list[One]:
    return [One(f"q{n}", 0, weight) for n in range(count)]


@pytest.mark.rule("FLT-2")
@pytest.mark.parametrize("weight", [700, 100_000, FRAME_BYTES_MAX])
def test_two_hundred_quiet_sessions_are_in_the_next_batch_however_much_one_has_sent(
    weight: int,
) -> None:
    backlog = Backlog[One]()
    backlog.add(flood(10_000, weight))
    backlog.add(quiet(200))
    batch = backlog.take()
    assert sum(one.lane.startswith("q") for one in batch) == 200
    flooded = sum(one.weight for one in batch if one.lane == "flood")
    assert flooded <= weight + COMMIT_SHARED_BYTES_MAX
    backlog.add(quiet(200))  # they came while that one was synced
    assert sum(one.lane.startswith("q") for one in backlog.take()) == 200


@pytest.mark.rule("FLT-2")
def test_a_session_that_is_alone_gets_whole_batches() -> None:
    backlog = Backlog[One]()
    backlog.add(flood(3 * COMMIT_BATCH_FRAMES_MAX))
    sizes: list[int] = []
    while backlog:
        sizes.append(len(backlog.take()))
    assert sizes == [COMMIT_BATCH_FRAMES_MAX] * 3
    backlog.add(flood(100, FRAME_BYTES_MAX))
    assert len(backlog.take()) == COMMIT_BATCH_BYTES_MAX // FRAME_BYTES_MAX


@pytest.mark.rule("FLT-2")
def test_sessions_with_large_frames_take_turns() -> None:
    """What did not fit is before everything that has had its turn."""
    backlog = Backlog[One]()
    heavy = [One(f"s{n}", k, FRAME_BYTES_MAX) for k in range(3) for n in range(5)]
    backlog.add(heavy)
    order: list[str] = []
    while backlog:
        order += [one.lane for one in backlog.take()]
    assert order == [one.lane for one in heavy]


def test_what_is_about_no_session_goes_first() -> None:
    backlog = Backlog[One]()
    backlog.add([*flood(5), One("", 0), *quiet(2), One("", 1)])
    assert [one for one in backlog.take() if not one.lane] == [One("", 0), One("", 1)]
    assert backlog.take() == []


ones = st.builds(
    One,
    st.sampled_from(["", "a", "b", "c", "d"]),
    st.just(0),
    st.integers(0, FRAME_BYTES_MAX),
)


@pytest.mark.rule("FLT-2")
@given(st.lists(ones, max_size=60))
def test_nothing_is_lost_or_doubled_and_a_session_keeps_its_order(made: list[One]) -> None:
    asked = [one._replace(number=n) for n, one in enumerate(made)]
    backlog = Backlog[One]()
    backlog.add(asked)
    taken: list[One] = []
    while backlog:
        batch = backlog.take()
        assert batch
        taken += batch
    assert sorted(taken) == sorted(asked)
    for lane in {one.lane for one in asked}:
        numbers = [one.number for one in taken if one.lane == lane]
        assert numbers == sorted(numbers)


class Sharing(RuleBasedStateMachine):
    """Requests come while batches are taken: how long does each wait?"""

    def __init__(self) -> None:
        super().__init__()
        self.backlog = Backlog[One]()
        self.left: dict[str, int] = {}
        """Of each session, its requests that wait."""
        self.unserved: dict[str, int] = {}
        """Of each session that waits, the batches since it had something in one."""
        self.count = 0

    @rule(lane=st.sampled_from("abcdefgh"), number=st.integers(1, 40), heavy=st.booleans())
    def come(self, lane: str, number: int, heavy: bool) -> None:
        weight = FRAME_BYTES_MAX if heavy else 500
        self.backlog.add([One(lane, self.count + n, weight) for n in range(number)])
        self.count += number
        self.left[lane] = self.left.get(lane, 0) + number
        self.unserved.setdefault(lane, 0)

    @rule()
    def batch(self) -> None:
        taken = self.backlog.take()
        assert len(taken) <= COMMIT_BATCH_FRAMES_MAX
        assert len(taken) == 1 or sum(one.weight for one in taken) <= COMMIT_BATCH_BYTES_MAX
        for lane in self.unserved:
            self.unserved[lane] += 1
        for one in taken:
            self.left[one.lane] -= 1
            self.unserved[one.lane] = 0
        for lane in [lane for lane, left in self.left.items() if not left]:
            del self.left[lane], self.unserved[lane]

    @invariant()
    def nobody_waits_longer_than_the_others_first_frames_take(self) -> None:
        # Eight sessions, two of the largest frames a batch.
        assert all(waited < 4 for waited in self.unserved.values())

    @invariant()
    def it_knows_how_much_it_holds(self) -> None:
        assert len(self.backlog) == sum(self.left.values())


TestSharing = Sharing.TestCase


def test_a_request_is_in_the_lane_of_its_session() -> None:
    world = World()
    text = world.create()
    body = world.acceptance(text, "m1")
    assert Request(1, "gateway", "", body).lane == text
    assert Request(1, "gateway", "", m.GatewayHello(nonce="1" * 32)).lane == ""
