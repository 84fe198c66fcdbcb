"""What a run of the demo will do, drawn from its seed before it begins. Pure.

A plane gives up on a process that dies too often, and that is right; so the plan stays beneath what
the supervisor forgives (FLT-32) and beneath the attempts that an input has (RTY-1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from random import Random
from statistics import median
from typing import Final, Literal, NamedTuple

from callboard.importers.script_file import Script
from callboard.limits import (
    GATEWAY_RESTARTS_MAX,
    INPUT_ATTEMPTS_MAX,
    RESTART_WINDOW_MS,
    SESSION_RESTARTS_MAX,
    STORAGE_RESTARTS_MAX,
)

Role = Literal["session", "gateway", "storage"]

WINDOW_SECONDS: Final = RESTART_WINDOW_MS / 1000
STORAGE_KILLS_MAX: Final = STORAGE_RESTARTS_MAX - 1
GATEWAY_KILLS_MAX: Final = GATEWAY_RESTARTS_MAX - 1
SESSION_KILLS_MAX: Final = SESSION_RESTARTS_MAX - 1
"""In one window; of sessions, each."""
SESSION_KILLS_TOTAL_MAX: Final = INPUT_ATTEMPTS_MAX - 1

_WINDOWS_MAX: Final = SESSION_KILLS_TOTAL_MAX // SESSION_KILLS_MAX
"""A run is not made longer than this for kills: more of them the sessions would not bear."""
_STORAGE_SHARE: Final = 0.07
_GATEWAY_SHARE: Final = 0.14
_STEP_SECONDS_MIN: Final = 0.04


@dataclass(frozen=True, slots=True)
class Size:
    """How large a run is."""

    sessions: int
    inputs: int
    kills: int
    seconds: float
    """Of steering."""
    turn_seconds: float
    """What a turn is to take, about."""
    settle_seconds: float
    """How long the plane may take to work everything off after it was opened again."""


FULL: Final = Size(50, 20, 30, 24.0, 2.0, 60.0)
QUICK: Final = Size(12, 6, 6, 4.0, 0.8, 20.0)


def size_of(quick: bool, sessions: int | None, inputs: int | None, kills: int | None) -> Size:
    """Give the size of a run: what was asked for, the rest as usual; longer if it must be."""
    base = QUICK if quick else FULL
    many = base.sessions if sessions is None else sessions
    each = base.inputs if inputs is None else inputs
    deaths = base.kills if kills is None else kills
    windows = min(ceil(deaths / kills_in_a_window(many)), _WINDOWS_MAX)
    seconds = max(
        base.seconds,
        many * each / 60,  # inputs a second
        many / 10,
        deaths / 4,
        WINDOW_SECONDS * windows if windows > 1 else 0,
    )
    return Size(many, each, deaths, seconds, base.turn_seconds, base.settle_seconds + many / 5)


def kills_in_a_window(sessions: int) -> int:
    """Give how many kills a plane bears within one window."""
    return SESSION_KILLS_MAX * sessions + GATEWAY_KILLS_MAX + STORAGE_KILLS_MAX


class Kill(NamedTuple):
    """A process to be killed."""

    at: float
    """Seconds after the steering began."""
    role: Role


def plan_kills(random: Random, size: Size) -> list[Kill]:
    """Draw when which kind of process is killed, in the order of time.

    There may be fewer than asked for, where a plane of this size would not bear as many.
    """
    windows = max(1, int(size.seconds // WINDOW_SECONDS))
    storage = _some(size.kills, _STORAGE_SHARE, STORAGE_KILLS_MAX * windows, least=3)
    gateway = _some(size.kills, _GATEWAY_SHARE, GATEWAY_KILLS_MAX * windows, least=2)
    room = size.sessions * min(SESSION_KILLS_MAX * windows, SESSION_KILLS_TOTAL_MAX)
    sessions = min(size.kills - storage - gateway, room)
    roles: list[Role] = ["session"] * sessions
    kills = [Kill(_moment(random, size.seconds), role) for role in roles]
    kills += _spread(random, "gateway", gateway, GATEWAY_KILLS_MAX, size.seconds)
    kills += _spread(random, "storage", storage, STORAGE_KILLS_MAX, size.seconds)
    return sorted(kills)


def _some(kills: int, share: float, most: int, *, least: int) -> int:
    """Give a share of the kills: at least one if there are enough of them."""
    return min(max(round(kills * share), 1 if kills >= least else 0), most)


def _moment(random: Random, seconds: float) -> float:
    return random.uniform(0.08, 0.97) * seconds


def _spread(random: Random, role: Role, count: int, in_window: int, seconds: float) -> list[Kill]:
    """Draw moments of which no window holds more than so many."""
    if count <= in_window:
        return [Kill(_moment(random, seconds), role) for _ in range(count)]
    step = seconds / count
    return [Kill((number + 0.5) * step, role) for number in range(count)]


def plan_sends(random: Random, size: Size) -> list[float]:
    """Draw when one session's inputs are sent, in order, in seconds after the steering began."""
    first = random.uniform(0, 0.1) * size.seconds
    rest = [random.uniform(first, size.seconds) for _ in range(size.inputs - 1)]
    return [first, *sorted(rest)][: size.inputs]


def speed_of(script: Script, turn_seconds: float) -> float:
    """Choose how fast a script is played, so that a turn takes about so long.

    A script of many short steps is played more slowly than that: each step is written durably, and
    the demo is to steer sessions, not to measure disks.
    """
    lengths = [sum(step.delay_ms for step in turn.steps) for turn in script.turns]
    steps = [len(turn.steps) for turn in script.turns]
    wanted = max(turn_seconds, median(steps) * _STEP_SECONDS_MIN)
    usual = median(lengths) / 1000 / wanted
    longest = max(lengths) / 1000 / (4 * wanted)
    return max(usual, longest, 0.001)


def percentile(values: Sequence[float], share: float) -> float:
    """Give the value below which a share of them lies; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(ceil(share * len(ordered)), len(ordered)) - 1]
