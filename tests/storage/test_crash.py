"""Power cuts at every call, on a disk that keeps no more than it must, and what comes back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from callboard import messages as m
from callboard.errors import CallboardError, InboxFull, JournalDamaged
from callboard.storage.engine import Engine
from callboard.storage.segments import JournalWriter
from tests.storage.memory_disk import Crash, Draw, KeepAll, LoseAll, MemoryDisk
from tests.storage.second_reader import Seen, read_home
from tests.storage.world import (
    World,
    acknowledged,
    appending,
    applying,
    ending,
    item,
    ref,
    started,
    terminal,
)


class PowerCut(BaseException):
    """The power goes before a call does anything."""


@dataclass
class Owner:
    """A session actor, as far as a test needs one."""

    text: str
    epoch: int = 0
    turn: str = ""
    claimed: list[str] = field(default_factory=list[str])
    applied: list[str] = field(default_factory=list[str])
    waiting: list[str] = field(default_factory=list[str])


class Play:
    """Clients and sessions that work on one home over many lives of the storage actor."""

    def __init__(self, seed: int, sessions: int = 3) -> None:
        self.rng = random.Random(seed)
        self.world = World(
            segment_bytes=self.rng.choice([2_000, 20_000, 1 << 20]),
            seed=seed,
            checkpoint_bytes=9_000,
        )
        self.oracle: dict[str, list[str]] = {}
        self.turns = self.ids = 0
        self.world.hello()
        self.owners = [Owner(self.world.create(f"s{n}")) for n in range(sessions)]
        self.oracle = {owner.text: [] for owner in self.owners}

    def step(self) -> None:
        with suppress(InboxFull):
            self._step()

    def _step(self) -> None:
        owner = self.rng.choice(self.owners)
        luck = self.rng.random()
        if luck < 0.06:
            self.world.engine.mark()
        elif luck < 0.15 and self.world.engine.checkpoints.due:
            self.world.engine.checkpoints.begin()
            self.world.engine.checkpoints.finish()
        elif not owner.epoch:
            self._passive(owner)
        elif not owner.turn:
            self._idle(owner)
        else:
            self._busy(owner)

    def _passive(self, owner: Owner) -> None:
        if self.rng.random() < 0.5:
            name = self._name()
            self.world.accept(owner.text, name)
            self.oracle[owner.text].append(name)
            return
        granted = self.world.acquire(owner.text)
        owner.epoch = granted.epoch
        owner.waiting = [one.item.message_id for one in granted.pending]
        owner.turn = ""
        if granted.open_turn is not None:
            turn = granted.open_turn
            claimed = list(dict.fromkeys(turn.input_ids + turn.applied_ids))
            record = terminal(
                turn.turn_id, claimed, self.world, cause="process_restart", outcome="lost"
            )
            self.world.append(owner.text, owner.epoch, [record])

    def _idle(self, owner: Owner) -> None:
        if self.rng.random() < 0.15:
            lease = self.world.engine.sessions.get(owner.text)
            assert lease is not None
            assert lease.lease is not None
            nonce = lease.lease.nonce
            self.world.call(m.Release(session=owner.text, epoch=owner.epoch, nonce=nonce))
            owner.epoch = 0
            return
        self.turns += 1
        turn = f"turn_{self.turns:06d}"
        name = self._name() if self.rng.random() < 0.6 or not owner.waiting else ""
        inputs = [name] if name else [owner.waiting.pop(0)]
        self.world.append(
            owner.text,
            owner.epoch,
            [started(turn, owner.epoch, inputs, self.world)],
            [item(name)] if name else [],
        )
        if name:
            self.oracle[owner.text].append(name)
        owner.turn, owner.claimed, owner.applied = turn, inputs, []

    def _busy(self, owner: Owner) -> None:
        left = [name for name in owner.claimed if name not in owner.applied]
        luck = self.rng.random()
        if left and luck < 0.7:
            self.world.append(owner.text, owner.epoch, applying(owner.turn, left[0], self.world))
            owner.applied.append(left[0])
        elif luck < 0.4:
            names = [self._name() for _ in range(self.rng.randint(1, 3))]
            answers = self.world.batch(
                [appending(owner.text, owner.epoch, puts=[item(name)]) for name in names]
            )
            for name, answer in zip(names, answers, strict=True):
                if isinstance(answer, m.Appended):
                    self.oracle[owner.text].append(name)
                    owner.waiting.append(name)
        elif luck < 0.8:
            self.world.append(
                owner.text, owner.epoch, *ending(owner.turn, owner.claimed, self.world)
            )
            owner.turn = ""
        else:
            gone = acknowledged(owner.applied, self.world, reason="aborted", turn_id=owner.turn)
            end = terminal(owner.turn, owner.claimed, self.world, cause="failed")
            records = [gone, end] if owner.applied else [end]
            self.world.append(owner.text, owner.epoch, records, [], owner.applied)
            owner.waiting += left
            owner.turn = ""

    def _name(self) -> str:
        self.ids += 1
        return f"m{self.ids}"

    # --- ends ---------------------------------------------------------------------------------

    def run_until_cut(self, calls: int) -> None:
        """Work until the power goes, at the latest after so many calls of the disk."""
        left = calls

        def fault(name: str, path: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise PowerCut

        self.world.disk.fault = fault
        try:
            for _ in range(60):
                self.step()
        except PowerCut:
            pass
        self.world.disk.fault = None

    def restart(self, disk: MemoryDisk) -> Engine:
        self.world.disk = disk
        self.world.owners.verdicts.clear()
        for owner in self.owners:
            owner.epoch, owner.turn = 0, ""
        engine = self.world.open()
        self.world.hello(self.world.fresh())
        return engine

    def judge(self) -> dict[str, Seen]:
        """Compare what was promised with what is there (RLB-1)."""
        seen = read_home(self.world.disk.home())
        for text, promised in self.oracle.items():
            found = seen[text]
            settled = found.acknowledged + found.discarded
            for name in promised:
                assert (name in found.live) + (name in settled) == 1, (text, name)
            order = [found.live[name] for name in promised if name in found.live]
            assert order == sorted(order), "accept order is FIFO order"
            state = self.world.engine.sessions.get(text)
            assert state is not None
            assert state.damage is None
            assert set(state.inbox.items) == set(found.live)
            assert set(state.settled) == set(settled)
        return seen


def cut(disk: MemoryDisk, rng: random.Random) -> MemoryDisk:
    how: Crash = rng.choice([LoseAll(), KeepAll(), Draw(rng), Draw(rng)])
    return disk.crash(how)


@pytest.mark.rule("FLT-5", "FLT-6", "FLT-7", "FLT-9", "FLT-10", "FLT-13", "FLT-15", "DUR-1", "F11")
@pytest.mark.rule("INB-4", "REC-10", "FLT-17")
@pytest.mark.parametrize("block", range(10))
def test_what_was_promised_is_there_exactly_once_after_every_cut(block: int) -> None:
    for seed in range(block * 12, block * 12 + 12):
        play = Play(seed)
        for _ in range(4):
            play.run_until_cut(play.rng.choice([5, 40, 150, 500]))
            play.restart(cut(play.world.disk, play.rng))
            play.judge()
        for _ in range(30):
            play.step()
        play.judge()


@pytest.mark.rule("FLT-13", "FLT-5", "F9")
@pytest.mark.parametrize("block", range(5))
def test_a_recovery_may_be_cut_at_every_call(block: int) -> None:
    """Twice in a row at a drawn call, then whole: the same home as without the cuts."""
    for seed in range(block * 8, block * 8 + 8):
        play = Play(1_000 + seed)
        play.run_until_cut(play.rng.choice([60, 200, 400]))
        left = cut(play.world.disk, play.rng)
        straight = left.crash(KeepAll())
        play.restart(straight)
        expected = {
            path: data
            for path, data in play.world.disk.home().items()
            if "/sessions/" in path and "lease" not in path
        }
        for _ in range(2):
            calls = play.rng.randint(0, 40)
            left = interrupt(play, left, calls)
        play.restart(left)
        found = play.world.disk.home()
        assert {path: found.get(path) for path in expected} == expected
        play.judge()


def interrupt(play: Play, disk: MemoryDisk, calls: int) -> MemoryDisk:
    def fault(name: str, path: str) -> None:
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise PowerCut

    disk.fault = fault
    play.world.disk = disk
    with suppress(PowerCut):
        play.world.open()
    disk.fault = None
    return disk.crash(play.rng.choice([KeepAll(), LoseAll(), Draw(play.rng)]))


@pytest.mark.rule("FLT-15", "F11", "F33")
def test_a_fresh_home_is_complete_or_absent_after_every_cut() -> None:
    """The first receipt of a home implies all its names, whatever call the power goes at."""
    left = 0
    for calls in range(200):
        for how in (LoseAll(), Draw(random.Random(calls))):
            disk = MemoryDisk()
            promised = False
            left = calls

            def fault(name: str, path: str) -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    raise PowerCut

            disk.fault = fault
            with suppress(PowerCut):
                world = World(disk)
                world.accept(world.create(), "m1")
                promised = True
                world.engine.checkpoints.now()
                world.engine.stop()
            disk.fault = None
            after = World(disk.crash(how))
            state = after.engine.sessions.get(ref())
            if promised:
                assert state is not None
                assert "m1" in state.inbox.items
        if left > 0:
            return
    raise AssertionError("the whole of it takes more calls than were tried")


@pytest.mark.rule("FLT-5", "F10", "FLT-2")
def test_a_repeat_is_answered_only_when_what_it_repeats_is_durable() -> None:
    """The frame was written, storage killed before its sync; the client repeats its key."""
    world = World()
    text = world.create()
    granted = world.acquire(text)
    body = appending(text, granted.epoch, [started("turn_1", granted.epoch, [], world)])

    def fault(name: str, path: str) -> None:
        if name == "datasync" and path.endswith(".log"):
            raise PowerCut

    world.disk.fault = fault
    with pytest.raises(PowerCut):
        world.call(body)
    world.disk.fault = None
    world.disk = world.disk.crash(KeepAll())  # killed: what it wrote lives in memory alone
    world.open()
    log = list(world.disk.log)
    again = world.call(body)
    assert isinstance(again, m.Appended)
    assert again.known is None
    synced = [at for at, (name, path) in enumerate(log) if name == "sync" and "0002.log" in path]
    assert synced, "the new segment was not synced before the answer"
    assert ("datasync", "/home/journal/0001.log") not in world.disk.log
    assert ("sync", "/home/journal/0001.log") not in world.disk.log
    assert ("write", "/home/journal/0001.log") not in world.disk.log
    after = world.disk.crash(LoseAll())
    world.disk = after
    world.open()
    assert world.engine.sessions.get(text) is not None
    state = world.engine.sessions.get(text)
    assert state is not None
    assert state.fold.turn is not None


@pytest.mark.rule("FLT-14")
def test_a_dropped_frame_never_gives_its_number_to_another() -> None:
    world = World()
    text = world.create()
    world.accept(text, "m1")
    last = world.engine.journal.last_commit
    segment = "/home/journal/0001.log"

    def fault(name: str, path: str) -> None:
        if name == "datasync":
            raise PowerCut

    world.disk.fault = fault
    with pytest.raises(PowerCut):
        world.batch([world.acceptance(text, "m2"), world.acceptance(text, "m3")])
    world.disk.fault = None
    data = world.disk.names[segment].seen
    at = data.rfind(b"cbj1", 0, data.rfind(b"cbj1"))
    data[at + 40] ^= 1  # the first of the two is torn, the second is whole
    world.crash()
    answer = world.accept(text, "m4")
    assert isinstance(answer, m.Accepted)
    assert world.engine.journal.last_commit > last + 2
    with pytest.raises(CallboardError):
        world.acquire(ref("nobody"))


def lives(seeds: Iterable[int]) -> None:
    """Cut and judge, again and again."""
    for seed in seeds:
        play = Play(seed)
        for _ in range(4):
            play.run_until_cut(play.rng.choice([5, 40, 150, 500]))
            play.restart(cut(play.world.disk, play.rng))
            play.judge()


def _no_sync(self: JournalWriter) -> None:
    self.durable, self._durable_crc = self.size, self._crc  # pyright: ignore[reportPrivateUsage]


def _nothing(*_: object) -> None:
    """Forget to do it."""


MUTANTS = [
    ("callboard.storage.segments.JournalWriter.sync", _no_sync),
    ("callboard.storage.segments.sync_dir", _nothing),
    ("callboard.storage.files.sync_dir", _nothing),
    ("callboard.storage.files.SyncJob._sync_file", _nothing),
    ("callboard.storage.recovery._Rewrite.run", _nothing),
]


@pytest.mark.parametrize(("name", "wrong"), MUTANTS, ids=[name for name, _ in MUTANTS])
def test_these_tests_see_what_is_forgotten(
    name: str, wrong: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name, wrong)
    with pytest.raises((AssertionError, KeyError, JournalDamaged)):
        lives(range(20))
