"""Followers and waiters: nothing lost, doubled or out of order where old and new meet."""

from __future__ import annotations

import errno
import json
import random

import pytest

from callboard import messages as m
from callboard.errors import CallboardError, NotFound, Overloaded, SessionDamaged
from callboard.storage import feeds as feeds_module
from callboard.storage.feeds import Address, Feeds
from callboard.storage.frames import Damaged
from tests.storage.world import (
    World,
    acknowledged,
    ending,
    item,
    message,
    new,
    ref,
    started,
    terminal,
)


class Audience:
    """Peers, and what each got."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.got: dict[Address, list[m.Body | CallboardError]] = {}
        self.feeds = Feeds(world.engine, self.send)

    def send(self, address: Address, body: m.Body | CallboardError) -> None:
        self.got.setdefault(address, []).append(body)

    def run(self, *bodies: m.Body) -> None:
        self.feeds.take(self.world.engine.run([self.world.request(body) for body in bodies]))

    def follow(self, name: str, text: str, from_seq: int = 1) -> Address:
        address = Address("gateway", name)
        self.feeds.subscribe(address, m.Subscribe(session=text, from_seq=from_seq))
        return address

    def wait(self, name: str, text: str, message_id: str) -> Address:
        address = Address("gateway", name)
        self.feeds.await_input(address, m.AwaitInput(session=text, message_id=message_id))
        return address

    def seqs(self, address: Address) -> list[int]:
        found: list[int] = []
        for body in self.got.get(address, []):
            assert isinstance(body, m.Records)
            seqs = [json.loads(line)["seq"] for line in body.lines]
            assert seqs == list(range(body.first_seq, body.last_seq + 1))
            found += seqs
        return found

    def errors(self, address: Address) -> list[type[object]]:
        return [type(body) for body in self.got.get(address, [])]


def update(world: World, text: str, epoch: int, title: str = "t") -> m.Append:
    record = new("session_updated", {"title": title, "updated_at": 1}, world.fresh())
    return m.Append(session=text, epoch=epoch, key=record.id, records=[record], inbox=[])


@pytest.mark.rule("WCH-1", "REC-11", "R110")
@pytest.mark.parametrize("seed", range(20))
def test_every_follower_sees_each_record_once_in_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds_module, "PIECE_BYTES", 700)
    monkeypatch.setattr(feeds_module, "ROUND_BYTES_MAX", 1_500)
    world = World(seed=seed)
    rng = random.Random(seed)
    text = world.create()
    epoch = world.acquire(text).epoch
    audience = Audience(world)
    followers: dict[Address, int] = {}
    for n in range(120):
        luck = rng.random()
        if luck < 0.15:
            state = world.engine.sessions.get(text)
            assert state is not None
            first = rng.randint(1, state.fold.seq + 3)
            followers[audience.follow(f"f{n}", text, first)] = first
        elif luck < 0.4:
            audience.feeds.pump()
        else:
            bodies = [update(world, text, epoch, "x" * rng.randint(0, 600)) for _ in range(3)]
            audience.run(*bodies[: rng.randint(1, 3)])
    while audience.feeds.catching_up:
        audience.feeds.pump()
    state = world.engine.sessions.get(text)
    assert state is not None
    for address, first in followers.items():
        assert audience.seqs(address) == list(range(first, state.fold.seq + 1))


@pytest.mark.rule("WCH-1")
def test_lines_come_as_they_are_stored() -> None:
    world = World()
    text = world.create()
    epoch = world.acquire(text).epoch
    audience = Audience(world)
    old = audience.follow("old", text)
    audience.feeds.pump()
    audience.run(update(world, text, epoch), update(world, text, epoch, "x" * 400_000))
    late = audience.follow("late", text)
    while audience.feeds.catching_up:
        audience.feeds.pump()
    data = world.disk.content(f"/home/sessions/{text}/transcript.jsonl")
    for address in (old, late):
        bodies = [body for body in audience.got[address] if isinstance(body, m.Records)]
        assert b"".join(line for body in bodies for line in body.lines) == data


@pytest.mark.rule("WCH-1")
def test_what_does_not_fit_the_file_yet_comes_later() -> None:
    world = World()
    text = world.create()
    epoch = world.acquire(text).epoch
    audience = Audience(world)
    full = True

    def fault(name: str, path: str) -> None:
        if full and name == "write" and path.endswith("transcript.jsonl"):
            raise OSError(errno.ENOSPC, path)

    world.disk.fault = fault
    audience.run(update(world, text, epoch))
    follower = audience.follow("f", text)
    for _ in range(3):
        audience.feeds.pump()
    assert audience.seqs(follower) == [1]
    assert audience.feeds.catching_up
    full = False
    world.engine.materialise()
    audience.feeds.pump()
    assert audience.seqs(follower) == [1, 2]
    assert not audience.feeds.catching_up


@pytest.mark.rule("WCH-1")
def test_a_follower_that_does_not_read_is_let_go_and_nobody_notices() -> None:
    world = World()
    text = world.create()
    epoch = world.acquire(text).epoch
    audience = Audience(world)
    slow, quick = audience.follow("slow", text), audience.follow("quick", text)
    audience.feeds.pump()
    assert audience.feeds.undelivered(slow)
    assert not audience.feeds.undelivered(slow)
    audience.run(update(world, text, epoch))
    assert audience.seqs(slow) == [1]
    assert audience.seqs(quick) == [1, 2]
    audience.feeds.forget(quick)
    assert len(audience.feeds) == 0
    state = world.engine.sessions.get(text)
    assert state is not None
    assert not audience.feeds.follows(state)


def test_who_is_not_there_and_how_many_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    text, broken = world.create(), world.create("broken")
    audience = Audience(world)
    assert audience.errors(audience.follow("a", ref("nobody"))) == [NotFound]
    assert audience.errors(audience.wait("b", text, "m1")) == [NotFound]
    world.engine.sessions.mark_damaged(Damaged(broken, "truncated", 3))
    assert audience.errors(audience.follow("c", broken)) == [SessionDamaged]
    monkeypatch.setattr(feeds_module, "WATCHERS_MAX", 1)
    follower = audience.follow("d", text)
    assert audience.follow("d", text) == follower  # the same request again
    assert audience.errors(audience.follow("e", text)) == [Overloaded]
    world.engine.sessions.mark_damaged(Damaged(text, "truncated", 3))
    audience.feeds.pump()
    assert audience.errors(follower) == [SessionDamaged]


def test_another_gateway_takes_the_place_of_the_one_before() -> None:
    world = World()
    text = world.create()
    world.accept(text, "m1")
    audience = Audience(world)
    audience.follow("a", text)
    audience.wait("b", text, "m1")
    audience.feeds.forget_others("gateway")
    assert len(audience.feeds) == 2
    audience.feeds.forget_others("another")
    assert len(audience.feeds) == 0
    assert not audience.feeds.catching_up


# --- waiting --------------------------------------------------------------------------------------


@pytest.mark.rule("INB-6")
def test_a_wait_is_answered_when_the_input_is_settled() -> None:
    world = World()
    text = world.create()
    epoch = world.acquire(text).epoch
    audience = Audience(world)
    names = ["done", "gone", "held", "tried"]
    world.append(
        text, epoch, [started("turn_1", epoch, names, world)], [item(name) for name in names]
    )
    waits = {name: audience.wait(f"before {name}", text, name) for name in names}
    assert audience.wait("before done", text, "done") == waits["done"]
    said = message("turn_1", "a", "assistant", world)
    audience.run(m.Append(session=text, epoch=epoch, key=said.id, records=[said], inbox=[]))
    assert not audience.got
    records, _, removes = ending("turn_1", ["done"], world)
    records[1] = terminal("turn_1", names, world)
    audience.run(
        m.Append(
            session=text,
            epoch=epoch,
            key=records[0].id,
            records=records,
            inbox=[m.RemoveOp(op="remove", message_id=removes[0])],
        )
    )
    seq = 5
    done = m.WaitOutcome(
        message_id="done",
        item_state="acknowledged",
        input_disposition="acknowledged",
        turn_id="turn_1",
        outcome="completed",
        terminal_seq=seq,
    )
    assert audience.got == {waits["done"]: [done]}
    late = audience.wait("late", text, "done")
    assert audience.got[late] == [done]
    discard = acknowledged(["gone"], world, reason="discarded")
    audience.run(
        m.Append(
            session=text,
            epoch=epoch,
            key=discard.id,
            records=[discard],
            inbox=[m.RemoveOp(op="remove", message_id="gone")],
        )
    )
    (answer,) = audience.got[waits["gone"]]
    assert isinstance(answer, m.WaitOutcome)
    assert (answer.input_disposition, answer.reason, answer.turn_id) == (
        "discarded",
        "discarded",
        None,
    )


@pytest.mark.rule("RTY-5")
def test_a_wait_ends_when_nothing_will_run_the_input_by_itself() -> None:
    world = World()
    text = world.create()
    epoch = world.acquire(text).epoch
    audience = Audience(world)

    def fail(turn: str, names: list[str], disposition: str) -> m.Append:
        end = terminal(turn, names, world, cause="failed", disposition=disposition)
        return m.Append(session=text, epoch=epoch, key=end.id, records=[end], inbox=[])

    world.append(text, epoch, [started("turn_1", epoch, ["m1"], world)], [item("m1")])
    waiting = audience.wait("w", text, "m1")
    audience.run(fail("turn_1", ["m1"], "pending"))
    assert not audience.got  # it is tried again
    world.append(text, epoch, [started("turn_2", epoch, ["m1"], world)])
    audience.run(fail("turn_2", ["m1"], "held"))
    held = m.WaitOutcome(
        message_id="m1",
        item_state="pending",
        input_disposition="held",
        turn_id="turn_2",
        outcome="failed",
        reason="failed",
        terminal_seq=5,
    )
    assert audience.got[waiting] == [held]
    assert audience.got[audience.wait("late", text, "m1")] == [held]
    world.crash(with_owners=False)
    audience = Audience(world)
    assert audience.got.get(audience.wait("later", text, "m1")) is not None
    world.append(text, epoch, [started("turn_3", epoch, ["m1"], world)])
    again = audience.wait("again", text, "m1")
    assert again not in audience.got  # a turn has it
    audience.run(fail("turn_3", ["m1"], "pending"))
    assert again not in audience.got
    world.append(text, epoch, [started("turn_4", epoch, ["m1"], world)])
    records, _, removes = ending("turn_4", ["m1"], world)
    audience.run(
        m.Append(
            session=text,
            epoch=epoch,
            key=records[0].id,
            records=records,
            inbox=[m.RemoveOp(op="remove", message_id=removes[0])],
        )
    )
    (answer,) = audience.got[again]
    assert isinstance(answer, m.WaitOutcome)
    assert answer.input_disposition == "acknowledged"
