"""One seed from its beginning to its verdict, and how a failing one is made small."""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from tests.sim.judge import judge
from tests.sim.kernel import KILLED, SECOND, Violation
from tests.sim.mutants import MUTANTS
from tests.sim.nemesis import Deed, draw_story, unleash
from tests.sim.world import TROUBLE_S, World, unreal
from tests.storage.memory_disk import LoseAll


@dataclass
class Outcome:
    """What became of a seed."""

    seed: int
    mutant: str
    digest: str
    story: list[Deed]
    violation: Violation | None
    events: int
    simulated_us: int
    counts: Counter[str]
    trace: list[str] = field(default_factory=list[str])

    @property
    def faults(self) -> int:
        """Count what went wrong: deeds, lost and doubled messages, failed calls."""
        deeds = sum(n for name, n in self.counts.items() if name.startswith("deed_"))
        return deeds + self.counts["bus_lost"] + self.counts["bus_doubled"]


def run_seed(
    seed: int, mutant: str = "", *, deeds: int | None = None, keep: bool = False
) -> Outcome:
    """Run one seed.

    Args:
        seed: draws everything.
        mutant: what is broken on purpose, by its name in `mutants.MUTANTS`.
        deeds: how many of the nemesis's deeds happen; all by default.
        keep: whether the trace is kept as text.

    """
    gc_was_on = gc.isenabled()
    gc.disable()  # a collected generator would run its `finally` at any time (SIM-10)
    world = World(seed, keep=keep)
    story = draw_story(world)[:deeds]
    broken: AbstractContextManager[None] = (
        MUTANTS[mutant].patched(world) if mutant else nullcontext()
    )
    violation: Violation | None = None
    try:
        with unreal(world), broken:
            violation = _run(world, story)
    finally:
        if gc_was_on:
            gc.enable()
    world.counts["bus_lost"], world.counts["bus_doubled"] = world.bus.lost, world.bus.doubled
    world.counts["calls_failed"] = world.faults.injected
    if violation is not None:
        world.kernel.log("violation", violation)
    return Outcome(
        seed,
        mutant,
        world.kernel.digest(),
        story,
        violation,
        world.kernel.events,
        world.kernel.now,
        world.counts,
        world.kernel.trace,
    )


def _run(world: World, story: list[Deed]) -> Violation | None:
    try:
        unleash(world, story)
        world.run_until(TROUBLE_S * SECOND)
        world.calm()
        for process in world.processes:
            process.end(KILLED)
        world.is_dark = True
        world.kernel.log("last power cut")
        world.disk.cut_power(world.kernel.stream("last cut"), LoseAll())
        judge(world)
    except Violation as violation:
        return violation
    except Exception as error:  # of the code under test: a finding as well
        steps = "".join(traceback.format_exception(error)[-4:])
        return Violation("exception", f"{error!r}\n{steps}")
    return None


def shrink(outcome: Outcome) -> Outcome:
    """Find the shortest beginning of the story that still breaks the same promise (SIM-11)."""
    assert outcome.violation is not None
    for deeds in range(len(outcome.story) + 1):
        shorter = run_seed(outcome.seed, outcome.mutant, deeds=deeds, keep=True)
        if (
            shorter.violation is not None
            and shorter.violation.invariant == outcome.violation.invariant
        ):
            return shorter
    return run_seed(outcome.seed, outcome.mutant, keep=True)
