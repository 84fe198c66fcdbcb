"""The broker of turn permits."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from callboard.actors.gateway.permits import Grant, Permits
from callboard.actors.gateway.places import Places


def broker(limit: int = 2, queue_max: int = 3) -> Permits:
    permits = Permits(limit, queue_max)
    permits.thaw()
    return permits


@pytest.mark.rule("ADM-4")
def test_permits_are_granted_up_to_the_limit_then_queued_in_order_then_refused() -> None:
    permits = broker()
    assert [permits.ask(name, f"r-{name}") for name in "abcdef"] == [0, 0, 1, 2, 3, "full"]
    assert permits.give_back("a") == [Grant("c", "r-c")]
    assert permits.give_back("b") == [Grant("d", "r-d")]
    assert permits.ask("f", "r-f") == 2


@pytest.mark.rule("ADM-4")
def test_a_session_has_one_request() -> None:
    permits = broker(limit=1)
    permits.ask("a", "1")
    assert permits.ask("b", "2") == 1
    assert permits.ask("c", "3") == 2
    assert permits.ask("b", "4") == 1
    assert permits.waiting == 2
    assert permits.give_back("a") == [Grant("b", "4")]


@pytest.mark.rule("ADM-4")
def test_asking_for_what_one_holds_is_granted_and_takes_none() -> None:
    permits = broker(limit=1)
    assert permits.reserve("a")
    assert permits.ask("a", "1") == 0
    assert permits.held == 1


def test_a_permit_rides_along_only_when_nobody_waits() -> None:
    permits = broker(limit=1)
    assert permits.reserve("a")
    assert not permits.reserve("a")
    assert not permits.reserve("b")
    permits.ask("b", "1")
    permits.give_back("a")
    assert permits.holds("b")
    permits.ask("c", "2")
    assert not permits.reserve("d"), "c came first"


@pytest.mark.rule("ADM-5")
def test_what_is_given_back_twice_counts_once() -> None:
    permits = broker(limit=1, queue_max=9)
    permits.ask("a", "1")
    for name in "bcd":
        permits.ask(name, name)
    assert permits.give_back("a") == [Grant("b", "b")]
    assert permits.give_back("a") == []
    assert permits.give_back("c") == [], "a queued request is given back without a grant"
    assert permits.give_back("b") == [Grant("d", "d")]


@pytest.mark.rule("ADM-7")
def test_nothing_is_granted_until_those_who_hold_have_said_so() -> None:
    permits = Permits(2, 9)
    assert permits.ask("new", "1") == 1
    assert not permits.reserve("other")
    assert permits.register("a", holds=True) == []
    assert permits.register("b", holds=True) == []
    assert permits.register("c", holds=True) == [], "more than the limit goes on"
    assert permits.thaw() == []
    assert permits.held == 3
    assert permits.give_back("a") == []
    assert permits.give_back("b") == [Grant("new", "1")]


@pytest.mark.rule("SHD-1")
def test_a_stopping_plane_starts_no_turn_where_one_ended() -> None:
    permits = broker(limit=1)
    permits.ask("a", "1")
    permits.ask("b", "2")
    permits.closed = True
    assert permits.give_back("a") == []
    assert not permits.reserve("c")


class Broker(RuleBasedStateMachine):
    """Against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = broker(limit=2, queue_max=3)
        self.held: set[str] = set()
        self.queue: list[str] = []

    names = st.sampled_from("abcdefgh")

    def granted(self, grants: list[Grant]) -> None:
        expected = self.queue[: max(0, 2 - len(self.held))]
        assert [grant.session for grant in grants] == expected
        self.held |= set(expected)
        self.queue = self.queue[len(expected) :]

    @rule(name=names)
    def ask(self, name: str) -> None:
        answer = self.permits.ask(name, name)
        if name in self.held:
            assert answer == 0
        elif name in self.queue:
            assert answer == self.queue.index(name) + 1
        elif len(self.held) < 2 and not self.queue:
            assert answer == 0
            self.held.add(name)
        elif len(self.queue) == 3:
            assert answer == "full"
        else:
            self.queue.append(name)
            assert answer == len(self.queue)

    @rule(name=names)
    def reserve(self, name: str) -> None:
        free = len(self.held) < 2 and not self.queue and name not in self.held
        assert self.permits.reserve(name) == free
        if free:
            self.held.add(name)

    @rule(name=names)
    def give_back(self, name: str) -> None:
        self.held.discard(name)
        self.queue = [other for other in self.queue if other != name]
        self.granted(self.permits.give_back(name))

    @invariant()
    def agree(self) -> None:
        assert self.permits.held == len(self.held) <= 2
        assert self.permits.waiting == len(self.queue) <= 3


TestBroker = Broker.TestCase


@pytest.mark.rule("ADM-1")
def test_places_judge_the_count_first_then_the_bytes() -> None:
    places = Places(2, 100)
    assert places.enter(90) is None
    refused = places.enter(11)
    assert refused is not None
    assert refused.carried == {"resource": "pending_bytes", "limit": 100}
    assert places.enter(10) is None
    refused = places.enter(0)
    assert refused is not None
    assert refused.carried == {"resource": "pending_count", "limit": 2}
    places.leave(90)
    assert places.enter(90) is None
