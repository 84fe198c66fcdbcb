"""The simulator: `python -m tests.simulate --seeds N [--from S]`, `--seed X`, `--mutant NAME`.

Runs seeds through the real machines over a simulated machine (docs/reliability.md) until one breaks
a promise; prints that seed's shortest story and trace, and exits with 1. With a mutant it is the
other way round: exit 1 if the mutant survives its budget.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from tests.sim.kernel import SECOND
from tests.sim.mutants import MUTANTS
from tests.sim.run import Outcome, run_seed, shrink
from tests.sim.seeds import FAILED
from tests.sim.world import World, draw_options

QUICK_SEEDS = 100
COLLECT_EVERY = 20
TRACE_LINES = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says.

    Returns:
        0 if every promise was kept (with a mutant: if it was caught), else 1.

    """
    options = _parse(arguments)
    if options.seed is not None:
        return _one(options)
    if options.mutant:
        return _mutants([options.mutant], options.seeds, options.json)
    if options.all_mutants:
        return _mutants(list(MUTANTS), options.seeds, options.json)
    first = options.first if options.first is not None else fresh_seed()
    if options.quick:
        recorded = [seed for seed, _ in FAILED]
        status = _seeds([*recorded, *range(first, first + QUICK_SEEDS)], first, options.json)
        return status or _mutants(list(MUTANTS), 1, "")
    count = options.seeds or 500
    return _seeds(range(first, first + count), first, options.json)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=0, help="how many seeds (500)")
    parser.add_argument("--from", dest="first", type=int, help="the first one (a fresh one)")
    parser.add_argument("--seed", type=int, help="this one alone, with its trace")
    parser.add_argument("--deeds", type=int, help="with --seed: only so many deeds of its story")
    parser.add_argument(
        "--mutant", choices=sorted(MUTANTS), help="with the product broken this way"
    )
    parser.add_argument(
        "--all-mutants", action="store_true", help="each mutant, until it is caught"
    )
    parser.add_argument("--quick", action="store_true", help="100 seeds, and all recorded ones")
    parser.add_argument("--json", default="", metavar="FILE", help="where the figures go")
    return parser.parse_args(arguments)


def fresh_seed() -> int:
    """Draw a seed that was hardly ever run before."""
    return int.from_bytes(os.urandom(4), "big")


# --- one seed ---


def _one(options: argparse.Namespace) -> int:
    outcome = run_seed(options.seed, options.mutant or "", deeds=options.deeds, keep=True)
    print("\n".join(outcome.trace))
    print(f"sha256 {outcome.digest}, {outcome.events} events")
    if outcome.violation is None:
        return 0
    if options.deeds is None:
        outcome = shrink(outcome)
    print(story_of(outcome, trace=False))
    return 1


def story_of(outcome: Outcome, *, trace: bool = True) -> str:
    """Tell what a seed broke, by what, and how to see it again (SIM-11)."""
    world_options = draw_options(World(outcome.seed).kernel.stream("plan"))
    mutant = f" --mutant {outcome.mutant}" if outcome.mutant else ""
    again = f"python -m tests.simulate --seed {outcome.seed}{mutant} --deeds {len(outcome.story)}"
    lines = [
        f"seed {outcome.seed} breaks a promise: {outcome.violation}",
        f"options: {asdict(world_options)}",
        f"the shortest story that still does ({len(outcome.story)} deeds):",
        *(f"  {deed}" for deed in outcome.story),
        f"again: {again}",
        f"sha256 {outcome.digest}",
    ]
    if trace:
        lines += ["the end of its trace:", *outcome.trace[-TRACE_LINES:]]
    return "\n".join(lines)


# --- many ---


def _seeds(seeds: Iterable[int], first: int, file: str) -> int:
    began = time.monotonic()
    totals: Counter[str] = Counter()
    broken: list[Outcome] = []
    done = 0
    simulated = 0
    for seed in seeds:
        try:
            outcome = run_seed(seed)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            break
        done += 1
        totals.update(outcome.counts)
        totals["faults"] += outcome.faults
        totals["events"] += outcome.events
        simulated += outcome.simulated_us
        if outcome.violation is not None:
            broken.append(outcome)
            print(story_of(shrink(outcome)), flush=True)
        if done % COLLECT_EVERY == 0:
            gc.collect()
        if done % 500 == 0:
            print(f"{done} seeds, {len(broken)} violations", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    figures: dict[str, Any] = {
        "first": first,
        "seeds": done,
        "violations": [[one.seed, str(one.violation)] for one in broken],
        "faults": totals.pop("faults"),
        "events": totals.pop("events"),
        "simulated_seconds": simulated // SECOND,
        "seconds": round(seconds, 1),
        "seeds_per_second": round(done / max(seconds, 1e-3), 1),
        "counts": dict(sorted(totals.items())),
    }
    _write(file, figures)
    print(
        f"{done} seeds from {first}: {len(broken)} violations, {figures['faults']} faults, "
        f"{figures['simulated_seconds']} simulated seconds in {seconds:.0f} s "
        f"({figures['seeds_per_second']} seeds/s)"
    )
    return 1 if broken else 0


def _mutants(names: Sequence[str], seeds: int, file: str) -> int:
    """Run mutants: the recorded seed first, then seeds from 1 on, to the budget or to `seeds`."""
    found: dict[str, dict[str, Any]] = {}
    alive = 0
    for name in names:
        mutant = MUTANTS[name]
        budget = seeds or mutant.budget
        tried = [mutant.seed, *range(1, budget)] if seeds == 1 else range(1, budget + 1)
        caught = next((one for seed in tried if (one := run_seed(seed, name)).violation), None)
        alive += caught is None
        found[name] = {
            "budget": mutant.budget,
            "seed": caught.seed if caught else None,
            "violation": str(caught.violation).splitlines()[0] if caught else None,
        }
        by = f"seed {caught.seed}: {found[name]['violation']}" if caught else "ALIVE"
        print(f"{name} ({mutant.what}; budget {mutant.budget}): {by}", flush=True)
        gc.collect()
    _write(file, found)
    return 1 if alive else 0


def _write(file: str, figures: object) -> None:
    if file:
        with open(file, "w", encoding="utf-8") as out:
            json.dump(figures, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    sys.exit(main())
