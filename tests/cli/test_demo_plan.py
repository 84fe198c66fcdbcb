"""The plan of a demo: as asked for, repeatable, and never more than a plane must bear."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.cli.demo_plan import (
    FULL,
    GATEWAY_KILLS_MAX,
    QUICK,
    SESSION_KILLS_MAX,
    STORAGE_KILLS_MAX,
    WINDOW_SECONDS,
    kills_in_a_window,
    percentile,
    plan_kills,
    plan_sends,
    size_of,
    speed_of,
)
from callboard.importers.script_file import SayStep, Script, ScriptTurn
from callboard.limits import (
    GATEWAY_RESTARTS_MAX,
    INPUT_ATTEMPTS_MAX,
    SESSION_RESTARTS_MAX,
    STORAGE_RESTARTS_MAX,
)

SIZES = st.builds(
    size_of,
    st.booleans(),
    st.none() | st.integers(1, 300),
    st.none() | st.integers(1, 50),
    st.none() | st.integers(0, 400),
)


def test_the_usual_sizes() -> None:
    assert (FULL.sessions, FULL.inputs, FULL.kills) == (50, 20, 30)
    assert QUICK.seconds + 1 < 15
    assert size_of(False, None, None, None).kills == 30
    assert size_of(True, None, 7, None).inputs == 7


@given(SIZES, st.integers(0, 1_000))
def test_as_many_kills_as_asked_for_where_the_plane_bears_them(size: object, seed: int) -> None:
    assert isinstance(size, type(FULL))
    kills = plan_kills(Random(seed), size)
    assert len(kills) <= size.kills
    if size.kills <= kills_in_a_window(size.sessions) // 2:
        assert len(kills) == size.kills
    assert kills == sorted(kills)
    assert all(0 <= kill.at <= size.seconds for kill in kills)
    assert kills == plan_kills(Random(seed), size)


@pytest.mark.rule("FLT-32")
@given(SIZES, st.integers(0, 1_000))
def test_no_window_holds_more_than_the_supervisor_forgives(size: object, seed: int) -> None:
    assert isinstance(size, type(FULL))
    kills = plan_kills(Random(seed), size)
    for role, most in (("storage", STORAGE_KILLS_MAX), ("gateway", GATEWAY_KILLS_MAX)):
        times = [kill.at for kill in kills if kill.role == role]
        for begin in times:
            assert sum(1 for at in times if begin <= at < begin + WINDOW_SECONDS) <= most
    sessions = sum(1 for kill in kills if kill.role == "session")
    assert sessions <= size.sessions * (INPUT_ATTEMPTS_MAX - 1)


def test_the_plan_is_beneath_the_intensities() -> None:
    assert STORAGE_KILLS_MAX < STORAGE_RESTARTS_MAX
    assert GATEWAY_KILLS_MAX < GATEWAY_RESTARTS_MAX
    assert SESSION_KILLS_MAX < SESSION_RESTARTS_MAX


@given(st.integers(30, 1_000))
def test_all_three_kinds_are_killed(kills: int) -> None:
    plan = plan_kills(Random(1), size_of(False, 200, None, kills))
    assert {kill.role for kill in plan} == {"session", "gateway", "storage"}


@given(SIZES, st.integers(0, 1_000))
def test_inputs_are_sent_in_order_while_the_steering_lasts(size: object, seed: int) -> None:
    assert isinstance(size, type(FULL))
    sends = plan_sends(Random(seed), size)
    assert len(sends) == size.inputs
    assert sends == sorted(sends)
    assert sends[0] >= 0
    assert sends[-1] <= size.seconds
    assert sends == plan_sends(Random(seed), size)


def script(*turns: list[int]) -> Script:
    made = (ScriptTurn("x", tuple(SayStep("y", delay) for delay in steps)) for steps in turns)
    return Script("s", "", tuple(made))


def test_a_script_is_played_so_that_a_turn_takes_about_as_long_as_wanted() -> None:
    assert speed_of(script([1_000] * 4, [2_000] * 4, [3_000] * 4), 2.0) == pytest.approx(4)
    assert speed_of(script([10], [10]), 2.0) == pytest.approx(0.005)


def test_one_long_turn_does_not_keep_a_demo_waiting() -> None:
    assert speed_of(script([100], [100], [160_000]), 2.0) == pytest.approx(20)


def test_a_script_without_any_time_has_a_speed() -> None:
    assert speed_of(script([], [0, 0]), 2.0) > 0


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_one_of_the_values(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(1 for value in values if value <= found) >= share * len(values)


def test_the_percentile_of_nothing() -> None:
    assert percentile([], 0.5) == 0
