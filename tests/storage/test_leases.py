"""Leases: table 3.2 of the runtime page, epochs, and who may write (LSE)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from callboard import home
from callboard import messages as m
from callboard.errors import (
    CallboardError,
    InboxFull,
    NotFound,
    OwnerUnprovable,
    RequestConflict,
    SessionArchived,
    SessionDamaged,
    SessionInUse,
    SessionQuarantined,
    StaleEpoch,
)
from callboard.ids import SessionRef, fresh_id
from callboard.storage.engine import Request
from callboard.storage.leases import RealOwners, grant, read_lease, standing
from tests.storage.memory_disk import LoseAll
from tests.storage.second_reader import read_home
from tests.storage.world import (
    PLANE,
    World,
    appending,
    item,
    new,
    ref,
    started,
    terminal,
)


def lease_of(world: World, text: str) -> tuple[int, bool]:
    state = world.engine.sessions.get(text)
    assert state is not None
    return state.epoch, bool(state.lease and state.lease.held)


# --- table 3.2 ------------------------------------------------------------------------------------


@pytest.mark.rule("LSE-2", "LSE-5")
def test_none_and_released_are_granted_with_the_next_epoch() -> None:
    world = World()
    text = world.create()
    assert world.acquire(text, "a" * 32).epoch == 1
    world.call(m.Release(session=text, epoch=1, nonce="a" * 32))
    assert lease_of(world, text) == (1, False)
    assert world.acquire(text).epoch == 2


@pytest.mark.rule("LSE-2", "LSE-3", "R30", "R31", "F26")
@pytest.mark.parametrize("plane", [PLANE, "an earlier plane"])
def test_a_dead_owners_lease_is_reclaimed(plane: str) -> None:
    world = World()
    text = world.create()
    owner = world.owner(plane=plane)
    world.call(m.Acquire(session=text, owner=owner))
    assert world.acquire(text).epoch == 2
    assert world.owners.ended == []


@pytest.mark.rule("LSE-2", "R31")
def test_a_live_owner_of_this_plane_keeps_its_session() -> None:
    world = World()
    text = world.create()
    world.acquire(text)
    before = world.disk.home()
    with pytest.raises(SessionInUse) as caught:
        world.acquire(text)
    assert caught.value.carried == {"pid": 4242, "epoch": 1}
    answer = world.accept(text, "m1")
    assert isinstance(answer, m.LeaseHeld)
    assert (answer.epoch, answer.owner.pid) == (1, 4242)
    assert world.disk.home() == before
    world.owners.verdicts.clear()
    assert world.acquire(text).epoch == 2


@pytest.mark.rule("LSE-7")
def test_a_live_owner_of_an_earlier_plane_is_ended_first() -> None:
    for asks in ("acquire", "accept"):
        world = World()
        text = world.create()
        owner = world.owner(plane="an earlier plane")
        world.call(m.Acquire(session=text, owner=owner))
        world.owners.verdicts[owner.nonce] = "alive"
        world.owners.can_end = False
        with pytest.raises(OwnerUnprovable):
            world.acquire(text) if asks == "acquire" else world.accept(text, "m1")
        world.owners.can_end = True
        if asks == "acquire":
            assert world.acquire(text).epoch == 2
        else:
            assert isinstance(world.accept(text, "m1"), m.Accepted)
        assert world.owners.ended == [owner.nonce]


@pytest.mark.rule("LSE-4", "ACC-3", "F27")
@pytest.mark.parametrize("what", ["unknown", "unreadable", "malformed", "another's", "too long"])
def test_what_cannot_be_proven_is_held(what: str) -> None:
    world = World()
    text = world.create()
    epoch = world.acquire(text).epoch
    path = f"/home/sessions/{text}/lease.json"
    world.engine.stop()
    good = world.disk.content(path)
    content = {
        "malformed": b"{}",
        "another's": good.replace(b'"s1"', b'"s2"'),
        "too long": good + b" " * 5_000,
    }.get(what, good)
    world.crash()
    world.disk.put(path, content)
    if what == "unreadable":
        world.disk.names[path].unsafe = True
    if what == "unknown":
        state = world.engine.sessions.get(text)
        assert state is not None
        assert state.lease is not None
        world.owners.verdicts[state.lease.nonce] = "unknown"
    before = world.disk.home()
    with pytest.raises(OwnerUnprovable):
        world.acquire(text)
    with pytest.raises(OwnerUnprovable):
        world.accept(text, "m1")
    assert world.disk.home() == before
    assert epoch == 1


@pytest.mark.rule("LSE-1", "LSE-2")
def test_the_same_nonce_asks_again_and_gets_the_same_lease() -> None:
    world = World()
    text = world.create()
    first = world.acquire(text, "a" * 32)
    before = world.engine.journal.last_commit
    again = world.acquire(text, "a" * 32)
    assert again == first
    world.crash(with_owners=False)
    assert world.acquire(text, "a" * 32) == first
    assert world.engine.journal.last_commit == before
    world.owners.verdicts.clear()
    assert world.acquire(text, "b" * 32).epoch == 2
    world.owners.verdicts["a" * 32] = "alive"
    with pytest.raises(SessionInUse):
        world.acquire(text, "a" * 32)


@pytest.mark.rule("LSE-2", "R32")
def test_of_fifty_claimants_one_wins_and_epochs_rise() -> None:
    world = World()
    text = world.create()
    rng = random.Random(1)
    for round_number in range(1, 101):
        owners = [world.owner() for _ in range(50)]
        rng.shuffle(owners)
        for owner in owners:
            world.owners.verdicts[owner.nonce] = "alive"
        answers = world.batch([m.Acquire(session=text, owner=owner) for owner in owners])
        won = [one for one in answers if isinstance(one, m.LeaseGranted)]
        assert [one.epoch for one in won] == [round_number]
        lost = [one for one in answers if isinstance(one, SessionInUse)]
        assert len(lost) == 49
        world.owners.verdicts.clear()
        if round_number % 25 == 0:
            world.crash(LoseAll())


# --- epochs ---------------------------------------------------------------------------------------


@pytest.mark.rule("LSE-5", "LSE-8", "R33")
def test_another_epoch_than_the_present_one_writes_nothing() -> None:
    world = World()
    text = world.create()
    for epoch in range(1, 8):
        world.owners.verdicts.clear()
        assert world.acquire(text).epoch == epoch
    before = world.disk.home()
    for epoch in (6, 8):
        for body in (
            appending(text, epoch, [started("turn_1", epoch, [], world)]),
            appending(text, epoch, puts=[item("m1")]),
            m.Release(session=text, epoch=epoch, nonce="0" * 32),
        ):
            with pytest.raises(StaleEpoch):
                world.call(body)
    assert world.disk.home() == before
    assert lease_of(world, text) == (7, True)


@pytest.mark.rule("LSE-8")
def test_release_is_idempotent_and_an_older_one_changes_nothing() -> None:
    world = World()
    text = world.create()
    world.acquire(text, "a" * 32)
    with pytest.raises(StaleEpoch):
        world.call(m.Release(session=text, epoch=1, nonce="b" * 32))
    for _ in range(2):
        assert world.call(m.Release(session=text, epoch=1, nonce="a" * 32)) == m.Ok()
    with pytest.raises(StaleEpoch):
        world.append(text, 1, [started("turn_1", 1, [], world)])
    world.acquire(text, "b" * 32)
    with pytest.raises(StaleEpoch):
        world.call(m.Release(session=text, epoch=1, nonce="a" * 32))
    assert lease_of(world, text) == (2, True)


@pytest.mark.rule("LSE-9", "LSE-5")
def test_a_lease_outlives_the_storage_actor() -> None:
    world = World()
    text = world.create()
    epoch = world.acquire(text).epoch
    for how in ("kill", "cut", "stop"):
        if how == "stop":
            world.engine.stop()
        world.crash(LoseAll() if how == "cut" else None, with_owners=False)
        turn = f"turn_{'kcs'.index(how[0])}"
        world.append(text, epoch, [started(turn, epoch, [], world)])
        world.append(text, epoch, [terminal(turn, [], world, cause="failed")])
        with pytest.raises(SessionInUse):
            world.acquire(text)
        assert lease_of(world, text) == (1, True)


@pytest.mark.rule("LSE-1", "LSE-4")
def test_the_epoch_never_falls_even_without_its_lease_file() -> None:
    world = World()
    text = world.create()
    for n in range(4):
        world.owners.verdicts.clear()
        world.acquire(text, f"{n:032x}")
    world.append(text, 4, [started("turn_1", 4, [], world)])
    world.engine.stop()
    world.crash()
    del world.disk.names[f"/home/sessions/{text}/lease.json"]
    assert world.acquire(text).epoch == 5


@pytest.mark.rule("LSE-5")
def test_every_record_and_operation_carries_the_epoch_in_force() -> None:
    world = World()
    text = world.create()
    world.accept(text, "m1")
    epoch = world.acquire(text, "a" * 32).epoch
    world.turn(text, epoch, "m2", "turn_1")
    world.call(m.Release(session=text, epoch=epoch, nonce="a" * 32))
    world.accept(text, "m3")
    seen = read_home(world.disk.home())[text]
    assert [record["epoch"] for record in seen.records] == [0] + [1] * 5
    inbox = world.disk.content(f"/home/sessions/{text}/inbox.jsonl").splitlines()[1:]
    epochs = [int(line.split(b'"epoch":')[1].split(b",")[0]) for line in inbox]
    assert epochs == [0, 1, 1, 1]


# --- who may ask ----------------------------------------------------------------------------------


@pytest.mark.rule("ECX-6", "R114")
def test_a_sessions_credential_covers_its_own_session_alone() -> None:
    world = World()
    mine, other = world.create("mine"), world.create("other")
    epoch = world.acquire(other).epoch
    before = world.disk.home()
    bodies: list[m.Body] = [
        appending(other, epoch, puts=[item("m1")]),
        m.Acquire(session=other, owner=world.owner()),
        m.Release(session=other, epoch=epoch, nonce="0" * 32),
        m.Lookup(session=other, message_id="m1", digest="0" * 64),
    ]
    wrong_role: list[tuple[str, m.Body]] = [
        ("session", world.acceptance(mine, "m1")),
        ("session", m.PlaneHello(plane_id="p")),
        ("gateway", m.Quarantine(session=mine, plane_epoch=1, reason="crash_loop")),
        ("supervisor", m.GatewayHello(nonce="0" * 32)),
        ("gateway", appending(other, epoch, puts=[item("m1")])),
    ]
    requests = [Request(n, "session", mine, body) for n, body in enumerate(bodies)]
    requests += [Request(9, role, mine, body) for role, body in wrong_role]
    first = len(world.replies)
    world.engine.run(requests)
    answers = [reply.body for reply in world.replies[first:]]
    assert all(isinstance(one, NotFound) for one in answers)
    assert world.disk.home() == before


# --- real processes -------------------------------------------------------------------------------


def identity(
    runtime: home.Runtime, plane: str = "p"
) -> tuple[subprocess.Popen[bytes], home.Identity]:
    """Start a process that holds its nonce, as a session does."""
    nonce = fresh_id()
    code = (
        "import sys, time; from pathlib import Path; from callboard import home\n"
        "home.hold_nonce(home.Runtime(Path(sys.argv[1])), sys.argv[2])\n"
        "print(home.start_time(home.os.getpid()), flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(runtime.root), nonce],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    started_at = int(process.stdout.readline())
    owner = home.Identity(process.pid, started_at, home.boot_id(), home.pid_namespace(), nonce, "p")
    return process, owner


@pytest.mark.rule("LSE-3", "LSE-7", "FLT-36", "FLT-37")
def test_real_owners_are_judged_and_ended(tmp_path: Path) -> None:
    runtime = home.Runtime(tmp_path)
    home.prepare_runtime(runtime)
    owners = RealOwners(runtime)
    process, owner = identity(runtime)
    stranger = home.Identity(
        owner.pid, owner.start_time, owner.boot_id, owner.pid_ns, fresh_id(), "p"
    )
    try:
        assert owners.judge(owner) == "alive"
        assert owners.judge(
            home.Identity(os.getpid(), 1, owner.boot_id, owner.pid_ns, "x", "p")
        ) == ("dead")
        (runtime.actors / stranger.nonce).touch()
        assert owners.judge(stranger) == "dead"  # its lock is free: the pid is another's now
        assert owners.end(stranger)
        assert process.poll() is None, "a stranger got the signal"
        assert owners.end(owner)
        assert process.wait(10) == -9
        assert owners.judge(owner) == "dead"
        assert owners.end(owner)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.rule("LSE-2")
def test_standing_asks_nobody_about_a_lease_that_is_free_or_mine() -> None:
    class Nobody:
        def judge(self, owner: home.Identity) -> home.Verdict:
            raise AssertionError

        def end(self, owner: home.Identity) -> bool:
            raise AssertionError

    world = World()
    lease = grant(SessionRef("w-" + "0" * 32, "s"), 3, world.owner("a" * 32), 5)
    assert standing(None, Nobody(), PLANE) == "free"
    assert standing(lease.release(6), Nobody(), PLANE) == "free"
    assert standing(lease, Nobody(), PLANE, "a" * 32) == "mine"
    assert read_lease(lease.spell(), SessionRef("w-" + "0" * 32, "s")) == lease


# --- passive sessions -----------------------------------------------------------------------------


@pytest.mark.rule("ACC-1", "ACC-2", "ACC-3", "R112", "R16", "R17")
def test_an_input_gets_in_by_exactly_one_writer() -> None:
    world = World()
    text = world.create()
    answer = world.accept(text, "m1")
    assert answer == m.Accepted(duplicate=False, item_state="pending", queued=1, runnable=True)
    granted = world.acquire(text)
    assert [one.item.message_id for one in granted.pending] == ["m1"]
    assert isinstance(world.accept(text, "m2"), m.LeaseHeld)
    world.append(text, granted.epoch, puts=[item("m2")])
    world.owners.verdicts.clear()  # its owner dies without a word
    answer = world.accept(text, "m3")
    assert isinstance(answer, m.Accepted)
    assert answer.queued == 3
    live = read_home(world.disk.home())[text].live
    assert list(live) == ["m1", "m2", "m3"]
    path = f"/home/sessions/{text}/inbox.jsonl"
    assert world.disk.content(path).count(b"\n") == 4


@pytest.mark.rule("ACC-3", "R115")
def test_sends_that_race_an_activation_are_all_there_once() -> None:
    for seed in range(20):
        world = World()
        text = world.create()
        rng = random.Random(seed)
        owner = world.owner()
        world.owners.verdicts[owner.nonce] = "alive"
        bodies: list[m.Body] = [world.acceptance(text, f"m{n}") for n in range(15)]
        bodies.insert(rng.randint(0, 15), m.Acquire(session=text, owner=owner))
        answers = world.batch(bodies)
        granted = next(one for one in answers if isinstance(one, m.LeaseGranted))
        for body, answer in zip(bodies, answers, strict=True):
            if isinstance(answer, m.LeaseHeld):
                assert isinstance(body, m.Accept)
                world.append(text, granted.epoch, puts=[body.item])
        seen = read_home(world.disk.home())[text]
        assert sorted(seen.live, key=lambda name: int(name[1:])) == [f"m{n}" for n in range(15)]
        lines = world.disk.content(f"/home/sessions/{text}/inbox.jsonl").splitlines()[1:]
        epochs = [int(line.split(b'"epoch":')[1].split(b",")[0]) for line in lines]
        assert epochs == sorted(epochs)
        assert set(epochs) <= {0, 1}


@pytest.mark.rule("ACC-1", "ACC-2", "R116", "RUN-1", "R59", "INB-7")
def test_what_is_refused_for_a_passive_session_and_in_which_order() -> None:
    world = World()
    world.call(m.PlaneHello(plane_id="p1"))
    archived, full, damaged = (world.create(name) for name in ("archived", "full", "damaged"))
    quarantined = world.create("quarantined")
    epoch = world.acquire(archived, "a" * 32).epoch
    data = {"archived_at": 5, "updated_at": 5}
    world.append(archived, epoch, [new("session_updated", data, world.fresh())])
    world.call(m.Release(session=archived, epoch=epoch, nonce="a" * 32))
    world.call(m.Quarantine(session=quarantined, plane_epoch=1, reason="crash_loop"))
    for n in range(20):
        world.accept(full, f"m{n}")
    world.engine.stop()
    path = f"/home/sessions/{damaged}/transcript.jsonl"
    line = world.disk.content(path)
    world.crash()
    world.disk.put(path, line.replace(b'"agent":"echo"', b'"agent":"ecko"'))
    before = world.disk.home()
    cases: list[tuple[str, str, str, type[CallboardError]]] = [
        (archived, "m1", "hi", SessionArchived),
        (quarantined, "m1", "hi", SessionQuarantined),
        (damaged, "m1", "hi", SessionDamaged),
        (full, "m20", "hi", InboxFull),
        (full, "m3", "other words", RequestConflict),
        (ref("nobody"), "m1", "hi", NotFound),
    ]
    for text, name, words, error in cases:
        with pytest.raises(error):
            world.accept(text, name, words)
        if error in (SessionArchived, SessionQuarantined, SessionDamaged, NotFound):
            epoch_before = world.engine.sessions.get(text)
            with pytest.raises(error):
                world.acquire(text)
            assert world.engine.sessions.get(text) is epoch_before
    assert world.disk.home() == before
    granted = world.acquire(full)
    with pytest.raises(InboxFull) as caught:
        world.append(full, granted.epoch, puts=[item("m20")])
    assert caught.value.carried == {"limit": "INBOX_USER_ITEMS_MAX", "current": 20, "maximum": 20}
    with pytest.raises(RequestConflict):
        world.append(full, granted.epoch, puts=[item("m3", "other words")])


@pytest.mark.rule("IDN-2", "FLT-51")
@pytest.mark.parametrize("text", ["x/y", "../../etc/x", "a-" + "0" * 32 + "/..", "a-" + "0" * 32])
def test_a_reference_is_checked_before_anything_is_looked_at(text: str) -> None:
    world = World()
    world.hello()
    before = len(world.disk.log)
    answers = world.batch(
        [world.acceptance(text, "m1"), m.Acquire(session=text, owner=world.owner())]
    )
    assert [getattr(one, "code", "") for one in answers] == ["invalid_request"] * 2
    assert [call for call, _ in world.disk.log[before:]] == ["reply", "reply"]


# --- planes and gateways --------------------------------------------------------------------------


@pytest.mark.rule("LSE-5")
def test_epochs_of_plane_and_gateway_rise_once_for_each_of_them_and_survive() -> None:
    world = World(segment_bytes=900)
    assert world.call(m.PlaneHello(plane_id="p1")) == m.PlaneEpoch(epoch=1)
    assert world.hello("1" * 32).epoch == 1
    text = world.create()
    for _ in range(2):
        assert world.call(m.PlaneHello(plane_id="p1")) == m.PlaneEpoch(epoch=1)
        assert world.hello("1" * 32).epoch == 1
        world.crash(LoseAll())
    assert world.hello("2" * 32).epoch == 2
    with pytest.raises(StaleEpoch):
        world.call(world.acceptance(text, "m1").model_copy(update={"gateway_epoch": 1}))
    for n in range(9):
        world.accept(text, f"m{n}")
    world.engine.checkpoints.now()
    assert world.engine.journal.numbers[0] > 1  # the frames that raised them are gone
    for stop in (True, False):
        if stop:
            world.engine.stop()
        world.crash(LoseAll())
        assert world.hello("2" * 32).epoch == 2
    assert world.call(m.PlaneHello(plane_id="p2")) == m.PlaneEpoch(epoch=2)
    with pytest.raises(StaleEpoch):
        world.call(m.Quarantine(session=text, plane_epoch=1, reason="crash_loop"))


@pytest.mark.rule("FLT-32")
def test_quarantine_is_durable_and_its_inputs_stay() -> None:
    world = World()
    world.call(m.PlaneHello(plane_id="p1"))
    text = world.create()
    world.accept(text, "m1")
    for _ in range(2):
        assert world.call(m.Quarantine(session=text, plane_epoch=1, reason="crash_loop")) == m.Ok()
    world.crash(LoseAll())
    with pytest.raises(SessionQuarantined):
        world.acquire(text)
    assert world.hello().waiting == []
    for _ in range(2):
        assert world.call(m.Unquarantine(session=text, gateway_epoch=world.gateway)) == m.Ok()
    assert len(read_home(world.disk.home())[text].records) == 3
    assert [one.item.message_id for one in world.acquire(text).pending] == ["m1"]


@pytest.mark.rule("R25", "INB-10")
def test_a_gateway_is_told_which_passive_sessions_have_work() -> None:
    world = World()
    names = ["idle", "input", "open", "live", "held", "quiet"]
    texts = {name: world.create(name) for name in names}
    world.accept(texts["input"], "m1")
    world.accept(texts["quiet"], "m1", wake=False)
    for name, nonce in (("open", "a" * 32), ("live", "b" * 32)):
        epoch = world.acquire(texts[name], nonce).epoch
        world.append(texts[name], epoch, [started("turn_1", epoch, ["m1"], world)], [item("m1")])
    epoch = world.acquire(texts["held"], "c" * 32).epoch
    world.append(texts["held"], epoch, [started("turn_1", epoch, ["m1"], world)], [item("m1")])
    end = terminal("turn_1", ["m1"], world, cause="failed", disposition="held")
    world.append(texts["held"], epoch, [end])
    world.owners.verdicts = {"b" * 32: "alive"}
    assert world.hello("3" * 32).waiting == [texts["open"], texts["input"]]
    world.engine.stop()
    world.crash(with_owners=False)
    loads = [call for call in world.disk.log if call[0] == "open"]
    assert loads == []
    assert world.hello("4" * 32).waiting == [texts["open"], texts["input"]]
    assert world.engine.sessions.cached(texts["idle"]) is None
