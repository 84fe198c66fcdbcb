"""The reserve: on a full disk nothing begins, and everything may end (FLT-21)."""

from __future__ import annotations

import errno

import pytest

from callboard import messages as m
from callboard.errors import CallboardError
from callboard.storage.disk import Poisoned
from tests.storage.memory_disk import KeepAll, LoseAll
from tests.storage.second_reader import read_home
from tests.storage.world import (
    World,
    appending,
    ending,
    item,
    message,
    new,
    started,
    terminal,
)

RESERVE = 60_000
PATH = "/home/journal/reserve"


def codes(answers: list[m.Body | CallboardError]) -> list[str]:
    return [one.code if isinstance(one, CallboardError) else one.kind for one in answers]


def world_with_turn() -> tuple[World, str, int]:
    """Give a home with a reserve, and a session whose turn has taken m1 and waits."""
    world = World(reserve_bytes=RESERVE)
    text = world.create()
    epoch = world.acquire(text).epoch
    world.append(text, epoch, [started("turn_1", epoch, ["m1"], world)], [item("m1")])
    world.append(text, epoch, [message("turn_1", "msg_m1", "user", world, "m1")])
    return world, text, epoch


def fill(world: World) -> None:
    world.disk.capacity = world.disk.used()


@pytest.mark.rule("FLT-21")
def test_it_is_allocated_and_durable_before_the_first_promise() -> None:
    world = World(reserve_bytes=RESERVE)
    log = [call for call, path in world.disk.log if path == PATH]
    assert log == ["create", "allocate", "truncate", "sync"]
    assert ("sync_dir", "/home/journal") in world.disk.log
    world.crash(LoseAll())
    assert len(world.disk.content(PATH)) == RESERVE


@pytest.mark.rule("FLT-21", "F13", "R113")
def test_on_a_full_disk_what_ends_is_written_and_what_begins_is_refused() -> None:
    world, text, epoch = world_with_turn()
    other = world.create("s2")
    world.accept(other, "waits")
    fill(world)
    refused = [
        appending(text, epoch, puts=[item("m2")]),
        appending(text, epoch, [message("turn_1", "msg_2", "assistant", world)]),
        world.creation("s3"),
        world.acceptance(other, "more"),
    ]
    assert codes(world.batch(refused)) == ["storage_full"] * 4
    assert world.engine.reserve.whole  # nothing that must be written has asked for it
    closing, puts, removes = ending("turn_1", ["m1"], world)
    assert codes(world.batch([appending(text, epoch, closing, puts, removes)])) == ["appended"]
    assert PATH not in world.disk.names
    assert world.disk.free("/home") > 0  # room there is, and yet:
    refused[1] = appending(text, epoch, [started("turn_2", epoch, [], world)])
    assert codes(world.batch(refused)) == ["storage_full"] * 4
    nonce = world.engine.sessions.get(text)
    assert nonce is not None
    assert nonce.lease is not None
    release = m.Release(session=text, epoch=epoch, nonce=nonce.lease.nonce)
    discard = m.DiscardInput(
        session=other, gateway_epoch=world.gateway, message_id="waits", reason="discarded"
    )
    hello = m.GatewayHello(nonce="9" * 32)
    assert codes(world.batch([release, discard, hello])) == ["ok", "cancel_result", "gateway_epoch"]
    world.crash(LoseAll())
    seen = read_home(world.disk.home())
    assert list(seen[text].live) == []
    assert list(seen[other].live) == []


@pytest.mark.rule("FLT-21")
def test_a_recovery_frame_is_written_from_the_reserve() -> None:
    world, text, epoch = world_with_turn()
    call: dict[str, object] = {"call_id": "c1", "name": "shell", "input": {}, "effect": "unsafe"}
    data: dict[str, object] = {
        "part_id": "p1",
        "message_id": "msg_a",
        "part_type": "tool_call",
        "payload": call,
        "created_at": 1,
    }
    records = [
        message("turn_1", "msg_a", "assistant", world),
        new("part_created", data, world.fresh(), "turn_1"),
    ]
    world.append(text, epoch, records)
    fill(world)
    world.crash(KeepAll())
    world.disk.capacity = world.disk.used()
    epoch = world.acquire(text).epoch
    result: dict[str, object] = {
        **data,
        "part_id": "p2",
        "part_type": "tool_result",
        "payload": {"call_id": "c1", "name": "shell", "output": None, "error": "indeterminate"},
    }
    frame = [
        new("part_created", result, world.fresh(), "turn_1"),
        terminal("turn_1", [], world, cause="process_restart", outcome="indeterminate"),
    ]
    assert codes(world.batch([appending(text, epoch, frame)])) == ["appended"]
    assert codes(world.batch([appending(text, epoch, puts=[item("m2")])])) == ["storage_full"]


@pytest.mark.rule("FLT-21")
def test_the_first_put_after_room_returned_is_accepted_without_a_restart() -> None:
    world, text, epoch = world_with_turn()
    fill(world)
    closing, puts, removes = ending("turn_1", ["m1"], world)
    world.batch([appending(text, epoch, closing, puts, removes)])
    put = appending(text, epoch, puts=[item("m2")])
    world.engine.probe()
    assert codes(world.batch([put])) == ["storage_full"]  # some room is not enough
    assert world.disk.capacity is not None
    world.disk.capacity += 2 * RESERVE
    world.engine.probe()
    assert len(world.disk.content(PATH)) == RESERVE
    assert codes(world.batch([put])) == ["appended"]
    assert world.engine.files.waiting_bytes == 0
    world.crash(LoseAll())
    assert list(read_home(world.disk.home())[text].live) == ["m2"]


@pytest.mark.rule("FLT-21")
def test_a_start_on_a_full_disk_begins_nothing_until_there_is_room() -> None:
    world, text, _ = world_with_turn()
    world.disk.unlink(PATH)
    world.disk = world.disk.crash(KeepAll())
    world.disk.capacity = world.disk.used() + 8_000
    world.open()
    world.hello("7" * 32)
    assert not world.engine.reserve.whole
    assert codes(world.batch([world.acceptance(text, "m2")])) == ["storage_full"]
    assert codes(world.batch([m.Acquire(session=text, owner=world.owner())])) == ["lease_granted"]
    world.disk.capacity = None
    world.engine.probe()
    assert world.engine.reserve.whole


@pytest.mark.rule("FLT-21")
def test_files_leave_half_of_what_was_given_up_to_the_journal() -> None:
    world, text, epoch = world_with_turn()
    other = world.create("s2")
    world.accept(other, "waits")
    fill(world)
    closing, puts, removes = ending("turn_1", ["m1"], world)
    world.batch([appending(text, epoch, closing, puts, removes)])
    assert world.disk.capacity is not None
    world.disk.capacity -= world.disk.free("/home") - RESERVE // 2  # others write, too
    before = world.disk.content(f"/home/sessions/{other}/transcript.jsonl")
    discard = m.DiscardInput(
        session=other, gateway_epoch=world.gateway, message_id="waits", reason="discarded"
    )
    assert codes(world.batch([discard])) == ["cancel_result"]
    assert world.disk.content(f"/home/sessions/{other}/transcript.jsonl") == before
    assert world.engine.files.waiting_bytes
    world.crash(LoseAll())  # what waited was in the journal
    assert world.engine.sessions.get(text) is not None


@pytest.mark.rule("FLT-21", "FLT-3")
@pytest.mark.parametrize("call", ["create", "allocate", "sync", "unlink", "sync_dir"])
def test_every_other_error_at_the_reserve_poisons(call: str) -> None:
    world, text, epoch = world_with_turn()
    fill(world)
    closing, puts, removes = ending("turn_1", ["m1"], world)
    failing = True

    def fault(name: str, path: str) -> None:
        if failing and name == call and path in (PATH, "/home/journal"):
            raise OSError(errno.EIO, path)

    body = appending(text, epoch, closing, puts, removes)
    world.disk.fault = fault
    if call in ("unlink", "sync_dir"):
        with pytest.raises(Poisoned):
            world.batch([body])
    else:
        world.batch([body])
        world.disk.capacity = None
        with pytest.raises(Poisoned):
            world.engine.probe()
    failing = False
    world.crash(KeepAll())
    world.engine.probe()
    assert len(world.disk.content(PATH)) == RESERVE
