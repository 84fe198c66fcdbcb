"""The nemesis: what goes wrong in a run, drawn before it begins, so that it can be shortened."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from tests.sim.disk import SYNCS, WRITES
from tests.sim.kernel import KILLED, MS, SECOND, Process
from tests.sim.session import Rival, SessionProcess
from tests.sim.storage import Term
from tests.sim.world import TROUBLE_S, World

ROLES: Final = ("storage", "storage", "gateway", "session", "session", "supervisor", "fork")


class Deed(NamedTuple):
    """One thing that goes wrong."""

    at: int
    """Milliseconds from the beginning."""
    kind: str
    role: str
    amount: int
    """What it means depends on the kind."""
    follows: bool = False
    """It follows another one closely, and is not counted."""

    def __str__(self) -> str:
        return f"{self.at / 1_000:.3f} s: {self.kind} {self.role} {self.amount}".rstrip()


def draw_story(world: World) -> list[Deed]:
    """Draw 3 to 12 deeds (SIM-6); some are followed closely by another one."""
    luck = world.kernel.stream("nemesis")
    kinds = list(_DEEDS)
    weights = [_WEIGHTS.get(kind, 1) for kind in kinds]
    story: list[Deed] = []
    for _ in range(luck.randint(3, 12)):
        (kind,) = luck.choices(kinds, weights)
        at = luck.randint(100, TROUBLE_S * 1_000)
        story.append(Deed(at, kind, luck.choice(ROLES), luck.randint(1, 100)))
        if kind == "kill_at_call" and luck.random() < 0.5:  # and the one after it, in its recovery
            story.append(Deed(at + luck.randint(20, 400), kind, "", luck.randint(1, 12), True))
        if kind in ("kill_at_call", "fail_sync", "fail_write") and luck.random() < 0.4:
            cut = at + luck.randint(10, 800)
            story.append(Deed(cut, "power_cut", "", luck.randint(1, 100), True))
    return sorted(story)


def unleash(world: World, story: list[Deed]) -> None:
    """Have it all happen in its time."""
    for deed in story:
        world.kernel.at(deed.at * MS, _do, world, deed)


def _do(world: World, deed: Deed) -> None:
    if world.is_calm or world.is_dark:
        return
    world.kernel.log("nemesis", deed)
    world.count(f"deed_{deed.kind}")
    _DEEDS[deed.kind](world, deed)


def _alive(world: World, role: str) -> list[Process]:
    world.processes[:] = [one for one in world.processes if one.alive]
    return [one for one in world.processes if one.role == role]


def _one(world: World, deed: Deed) -> Process | None:
    found = _alive(world, deed.role)
    return found[deed.amount % len(found)] if found else None


def _kill(world: World, deed: Deed) -> None:
    if (process := _one(world, deed)) is not None:
        process.end(KILLED)


def _kill_at_call(world: World, deed: Deed) -> None:
    """End storage at one of its next calls of the disk, before, or in the middle of, it."""
    world.faults.kill_in = deed.amount % 40 + 1


def _power_cut(world: World, deed: Deed) -> None:
    world.cut_power(deed.amount * 10 * MS)


def _pause(world: World, deed: Deed) -> None:
    """Stop one for long; who takes it for dead must be wrong (FLT-27)."""
    if (process := _one(world, deed)) is not None:
        process.pause(deed.amount * 120 * MS)


def _takeover(world: World, deed: Deed) -> None:
    """Stop a session past every time-out while a second process wants its lease."""
    owners = [one for one in _alive(world, "session") if isinstance(one, SessionProcess)]
    if not owners:
        return
    owner = owners[deed.amount % len(owners)]
    owner.pause(11 * SECOND)
    identity = world.identity(world.fresh(), owner.owner.plane_id)
    rival = Rival(world, f"rival{deed.at}", owner.text, identity)
    world.nonces[identity.nonce] = rival
    world.processes.append(rival)
    world.kernel.at(deed.amount * 40 * MS, rival.end, KILLED)


def _late_words(world: World, deed: Deed) -> None:
    """Let a session's last words come when its successor has the lease already (LSE-5)."""
    owners = [one for one in _alive(world, "session") if isinstance(one, SessionProcess)]
    busy = [one for one in owners if one.session.turn is not None] or owners
    if busy:
        owner = busy[deed.amount % len(busy)]
        owner.stall(SECOND)
        world.kernel.at(deed.amount * 2 * MS, owner.end, KILLED)


def _full(world: World, deed: Deed) -> None:
    """Leave little room for a while."""
    world.disk.capacity = world.disk.used() + deed.amount * 37
    world.kernel.at(deed.amount * 40 * MS, _room, world)


def _room(world: World) -> None:
    world.disk.capacity = None


def _fail_sync(world: World, deed: Deed) -> None:
    _fail(world, SYNCS, errno.EIO, deed.amount % 6 + 1)


def _fail_write(world: World, deed: Deed) -> None:
    _fail(world, WRITES, errno.EIO, deed.amount % 30 + 1)


def _no_descriptors(world: World, deed: Deed) -> None:
    _fail(world, frozenset({"create", "mkdir"}), errno.EMFILE, deed.amount % 4 + 1)


def _fail_full(world: World, deed: Deed) -> None:
    _fail(world, frozenset({"write", "create"}), errno.ENOSPC, deed.amount % 20 + 1)


def _fail(world: World, kinds: frozenset[str], error: int, after: int) -> None:
    world.faults.kinds, world.faults.error, world.faults.error_in = kinds, error, after


def _clock(world: World, deed: Deed) -> None:
    """Move the wall clock by up to fifty years, either way; Linux has none before 1970."""
    jump = (deed.amount - 50) * 365 * 86_400 * SECOND
    world.kernel.wall_offset += max(jump, SECOND - world.kernel.wall())


def _storm(world: World, deed: Deed) -> None:
    """Pause actors one by one, and let them go on in any order."""
    luck = world.kernel.stream(f"storm {deed.at}")
    for role in ("gateway", "storage", "session", "supervisor"):
        for process in _alive(world, role):
            world.kernel.at(luck.randint(0, 400) * MS, process.pause, luck.randint(1, 4_000) * MS)


def _main_loop(world: World, deed: Deed) -> None:
    if (process := _one(world, deed)) is not None and deed.role not in ("supervisor", "fork"):
        process.raises = True
        process.post(None)


def _stop(world: World, deed: Deed) -> None:
    """Stop the plane in order, at times cut short; the operator starts it again."""
    if deed.amount > 50:
        world.cut_in_stop = deed.amount % 14 + 1
    if world.supervisor is not None:
        world.supervisor.post(Term())


def _break(world: World, deed: Deed) -> None:
    world.bus.break_any("storage" if deed.amount % 2 else "gateway")


_DEEDS: Final[Mapping[str, Callable[[World, Deed], None]]] = MappingProxyType(
    {
        "kill": _kill,
        "kill_at_call": _kill_at_call,
        "power_cut": _power_cut,
        "pause": _pause,
        "takeover": _takeover,
        "late_words": _late_words,
        "full": _full,
        "fail_sync": _fail_sync,
        "fail_write": _fail_write,
        "fail_full": _fail_full,
        "no_descriptors": _no_descriptors,
        "clock": _clock,
        "storm": _storm,
        "main_loop": _main_loop,
        "stop": _stop,
        "break": _break,
    }
)
_WEIGHTS: Final = {"kill": 3, "kill_at_call": 4, "power_cut": 4, "full": 2, "stop": 2}
KINDS: Final = tuple(_DEEDS)
