"""The supervisor's decisions, in plays and at random."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from callboard.limits import (
    GATEWAY_RESTARTS_MAX,
    RESTART_BACKOFF_MS,
    RESTART_BACKOFF_MS_MAX,
    RESTART_WINDOW_MS,
    SESSION_RESTARTS_MAX,
    SESSION_STOP_MS,
    SHUTDOWN_CLEANUP_MS,
    SHUTDOWN_HARD_MS,
    STORAGE_RESTARTS_MAX,
)
from callboard.supervisor import tree
from callboard.supervisor.policy import back_off_ms, is_stopping, sessions
from tests.supervisor.play import World

A, B, C, D = (f"w-{'0' * 32}/{name}" for name in "abcd")


def up(slots: int = 4) -> World:
    world = World(slots).begin().run()
    assert world.of(tree.PlaneReady)
    world.told.clear()
    return world


def downs(world: World) -> list[tuple[str, str, bool, bool]]:
    found: list[tuple[str, str, bool, bool]] = []
    for one in world.told:
        if isinstance(one, tree.Down):
            found.append((one.session, one.cause, one.quarantined, one.restarting))
    return found


# ---- Starting ----


def test_storage_is_ready_before_the_gateway_is_started_and_the_gateway_before_the_plane() -> None:
    world = World()
    world.auto = False
    world.begin()
    assert [one.name for one in world.told if isinstance(one, tree.Start)] == ["storage", "fork"]
    world.deliver(tree.Ready("fork", world.living["fork"]))
    assert world.starts("gateway") == 0
    world.deliver(tree.Ready("storage", world.living["storage"]))
    assert world.starts("gateway") == 1
    assert not world.of(tree.PlaneReady)
    world.deliver(tree.Ready("gateway", world.living["gateway"]))
    assert len(world.of(tree.PlaneReady)) == 1


@pytest.mark.parametrize("status", [75, 78])
def test_a_storage_that_refuses_to_start_refuses_the_plane(status: int) -> None:
    world = World()
    world.auto = False
    world.begin()
    world.die("storage", status, "journal_damaged segment=3")
    world.auto = True
    world.deliver(tree.Exited("fork", world.living["fork"], 0))
    assert world.of(tree.End) == [tree.End(status)]
    assert world.plane.detail == "storage is not started again: journal_damaged segment=3"


@pytest.mark.rule("FLT-29")
def test_sessions_wait_for_the_fork_process() -> None:
    world = World()
    world.auto = False
    world.begin()
    for name in ("storage", "gateway"):
        world.deliver(tree.Ready(name, world.living[name]))
    world.tell(tree.Wanted(A))
    assert world.starts(A) == 0
    world.auto = True
    world.deliver(tree.Ready("fork", world.living["fork"]))
    world.run()
    assert world.of(tree.Granted) == [tree.Granted(A, world.living[A])]


# ---- Restarts ----


@pytest.mark.rule("FLT-32")
@given(st.integers(0, 40), st.floats(0, 1))
def test_the_back_off_doubles_and_is_bounded(before: int, draw: float) -> None:
    plain = min(RESTART_BACKOFF_MS_MAX, RESTART_BACKOFF_MS * 2**before)
    assert round(plain * 0.8) <= back_off_ms(before, draw) <= round(plain * 1.2)


@pytest.mark.rule("FLT-4", "F24")
def test_storage_that_dies_too_often_is_given_up_and_the_plane_stays_up() -> None:
    world = up()
    for _ in range(STORAGE_RESTARTS_MAX):
        world.die("storage", 74)
        world.run(RESTART_BACKOFF_MS_MAX)
    assert "storage" in world.living
    world.die("storage", 74, "persistence_failed")
    world.run(10 * RESTART_WINDOW_MS)
    assert world.starts("storage") == STORAGE_RESTARTS_MAX
    detail = "storage is not started again: persistence_failed"
    assert world.of(tree.StorageGivenUp) == [tree.StorageGivenUp(detail)]
    assert world.plane.detail == detail
    assert "gateway" in world.living
    assert not is_stopping(world.plane)
    world.tell(tree.Wanted(A))
    assert world.of(tree.Refused) == [tree.Refused(A, "storage_unavailable")]


@pytest.mark.rule("F24")
def test_storage_that_dies_at_each_start_leaves_a_plane_that_can_say_so() -> None:
    world = World()
    world.begin()
    while "storage" in world.living:
        world.living.pop("storage")
        run = world.plane.children["storage"].run
        world.timers = [t for t in world.timers if t[2] != tree.Ready("storage", run)]
        world.tell(tree.Exited("storage", run, -6))
        world.run(RESTART_BACKOFF_MS_MAX // 10)
        if world.starts("storage") == STORAGE_RESTARTS_MAX + 1:
            run = world.living.pop("storage")
            world.timers = [t for t in world.timers if t[2] != tree.Ready("storage", run)]
            world.tell(tree.Exited("storage", run, -6))
    world.run(RESTART_WINDOW_MS)
    assert world.of(tree.StorageGivenUp)
    assert world.of(tree.PlaneReady)


@pytest.mark.rule("FLT-32")
def test_a_gateway_that_dies_too_often_ends_the_plane_with_70() -> None:
    world = up()
    for _ in range(GATEWAY_RESTARTS_MAX):
        world.die("gateway", 70)
        world.run(RESTART_BACKOFF_MS_MAX)
        assert not is_stopping(world.plane)
    world.die("gateway", 70)
    world.run(SHUTDOWN_HARD_MS)
    assert world.of(tree.End) == [tree.End(70)]


@pytest.mark.rule("FLT-32")
def test_restarts_outside_the_window_do_not_count() -> None:
    world = up()
    for _ in range(5 * GATEWAY_RESTARTS_MAX):
        world.die("gateway")
        world.run(RESTART_WINDOW_MS)
    assert "gateway" in world.living


@pytest.mark.rule("FLT-32", "F25")
def test_a_session_that_crashes_too_often_is_quarantined() -> None:
    world = up()
    world.tell(tree.Wanted(A))
    world.run()
    for _ in range(SESSION_RESTARTS_MAX):
        world.die(A, 1)
        world.run(RESTART_BACKOFF_MS_MAX)
    assert world.starts(A) == SESSION_RESTARTS_MAX + 1
    world.die(A, 1)
    world.run(RESTART_WINDOW_MS)
    assert world.starts(A) == SESSION_RESTARTS_MAX + 1
    assert world.of(tree.Quarantine) == [tree.Quarantine(A)]
    assert downs(world)[-1] == (A, "crashed", True, False)
    assert sessions(world.plane) == []
    assert world.plane.quarantined == {A: True}


def test_a_session_is_not_started_between_its_quarantine_and_its_durability() -> None:
    world = up()
    world.tell(tree.Wanted(A))
    world.run()
    for _ in range(SESSION_RESTARTS_MAX):
        world.die(A, 1)
        world.run(RESTART_BACKOFF_MS_MAX)
    world.die(A, 1)
    world.tell(tree.Wanted(A))
    assert world.last == tree.Refused(A, "session_quarantined")
    world.run()
    world.tell(tree.Wanted(A))  # it was released: only then does the gateway ask again
    world.run()
    answer: object = world.last
    assert answer == tree.Granted(A, world.living[A])
    assert A not in world.plane.quarantined


@pytest.mark.parametrize(("status", "cause"), [(0, "stopped"), (75, "refused"), (78, "refused")])
def test_a_session_that_stops_or_refuses_is_not_started_again(status: int, cause: str) -> None:
    world = up()
    world.tell(tree.Wanted(A))
    world.run()
    world.die(A, status)
    world.run(RESTART_WINDOW_MS)
    assert downs(world) == [(A, cause, False, False)]
    assert world.starts(A) == 1


@pytest.mark.rule("FLT-29", "F23")
def test_the_end_of_the_fork_process_is_no_crash_of_its_sessions() -> None:
    world = up()
    for name in (A, B, C):
        world.tell(tree.Wanted(name))
    world.run()
    for round_ in range(GATEWAY_RESTARTS_MAX):
        world.die("fork")
        assert sorted(downs(world)[-3:]) == [(n, "parent_lost", False, True) for n in (A, B, C)]
        world.run(RESTART_BACKOFF_MS_MAX)
        assert {A, B, C} <= set(world.living), round_
    assert not world.of(tree.Quarantine)
    assert all(child.restarts == () for child in sessions(world.plane))


def test_old_news_of_earlier_runs_changes_nothing() -> None:
    world = up()
    world.tell(tree.Wanted(A))
    world.run()
    before = world.plane
    for event in (
        tree.Exited(A, 1, -9),
        tree.Ready(A, 1),
        tree.Due(A, 1),
        tree.GraceOver("gateway", 99),
        tree.Exited("nobody", 3, 0),
    ):
        assert world.tell(event) == []
    assert world.plane == before


# ---- Slots ----


@pytest.mark.rule("RES-1")
def test_at_the_limit_an_idle_session_makes_room_and_the_request_waits() -> None:
    world = up(slots=2)
    world.auto = True
    for name in (A, B):
        world.tell(tree.Wanted(name))
    world.run()
    world.tell(tree.Wanted(C, (A, B)))
    assert not any(isinstance(one, tree.Granted) and one.session == C for one in world.told)
    world.run()
    assert downs(world) == [(A, "stopped", False, False)]
    assert set(world.living) >= {B, C}
    assert world.last == tree.Granted(C, world.living[C])


@pytest.mark.rule("RES-1", "R99")
def test_none_evictable_is_overloaded_and_nothing_is_started() -> None:
    world = up(slots=1)
    world.tell(tree.Wanted(A))
    world.run()
    world.tell(tree.Wanted(B))
    assert world.last == tree.Refused(B, "resident_sessions")
    assert world.starts(B) == 0


@pytest.mark.rule("RES-4")
def test_a_deaf_session_is_killed_and_its_slot_is_freed() -> None:
    world = up(slots=1)
    world.deaf.add(A)
    world.tell(tree.Wanted(A))
    world.run()
    world.tell(tree.Wanted(B, (A,)))
    world.run(SESSION_STOP_MS - 1)
    assert A in world.living
    world.run(1)
    world.run(1)
    assert downs(world) == [(A, "killed", False, False)]
    assert B in world.living


@pytest.mark.rule("RES-1")
def test_one_vacated_slot_is_promised_once() -> None:
    world = up(slots=1)
    world.tell(tree.Wanted(A))
    world.run()
    world.tell(tree.Wanted(B, (A,)))
    world.tell(tree.Wanted(C, (A,)))
    assert world.last == tree.Refused(C, "resident_sessions")
    world.run()
    assert B in world.living
    assert C not in world.living


@pytest.mark.rule("RES-1")
def test_a_session_wanted_again_while_it_makes_room_comes_back_when_there_is_some() -> None:
    world = up(slots=2)
    for name in (A, B):
        world.tell(tree.Wanted(name))
    world.run()
    world.auto = False
    world.tell(tree.Wanted(C, (A,)))
    world.tell(tree.Wanted(A, (B,)))
    world.auto = True
    world.deliver(tree.Exited(B, world.living[B], 0))  # before A itself has ended
    world.run()
    assert C in world.living
    world.deliver(tree.Exited(A, world.living[A], 0))
    world.run()
    assert {A, C} <= set(world.living)
    assert world.owed == []


@pytest.mark.rule("FLT-53")
def test_no_room_for_a_process_is_told_and_costs_no_slot() -> None:
    world = up(slots=1)
    world.auto = False
    world.tell(tree.Wanted(A))
    run = world.living.pop(A)
    world.tell(tree.NotStarted(A, run))
    assert world.last == tree.Refused(A, "processes")
    assert sessions(world.plane) == []


def test_a_crashed_session_for_which_there_is_no_process_is_tried_again() -> None:
    world = up(slots=1)
    world.tell(tree.Wanted(A))
    world.run()
    world.auto = False
    world.die(A, -9)
    world.run(1_000)
    run = world.living.pop(A)
    world.tell(tree.NotStarted(A, run))
    world.auto = True
    world.run(RESTART_BACKOFF_MS_MAX + 1)
    assert A in world.living


# ---- Stopping ----


@pytest.mark.rule("SHD-1")
def test_the_plane_stops_in_reverse_order() -> None:
    world = up()
    for name in (A, B):
        world.tell(tree.Wanted(name))
    world.run()
    world.told.clear()
    world.tell(tree.Stop())
    world.run()
    signals = [one.name for one in world.told if isinstance(one, tree.Signal)]
    assert signals == [A, B, "fork", "gateway", "storage"]
    closing = next(n for n, one in enumerate(world.told) if isinstance(one, tree.TellClosing))
    first = next(n for n, one in enumerate(world.told) if isinstance(one, tree.Signal))
    assert closing < first
    assert world.last == tree.End(0)


@pytest.mark.rule("SHD-1")
def test_what_does_not_stop_is_killed_at_its_time() -> None:
    world = up()
    world.deaf |= {A, "gateway", "storage"}
    world.tell(tree.Wanted(A))
    world.run()
    started = world.now
    world.tell(tree.Stop())
    world.run(SHUTDOWN_CLEANUP_MS - 1)
    assert A in world.living
    world.run(2)
    assert A not in world.living
    world.run(SHUTDOWN_HARD_MS)
    assert world.last == tree.End(0)
    assert world.now - started <= SHUTDOWN_CLEANUP_MS + 1 + SHUTDOWN_HARD_MS
    assert not world.living


@pytest.mark.rule("SHD-1")
def test_a_second_signal_does_not_wait() -> None:
    world = up()
    world.deaf |= {A, B, "gateway", "storage"}
    for name in (A, B):
        world.tell(tree.Wanted(name))
    world.run()
    world.tell(tree.Stop())
    world.run()
    assert {A, B} <= set(world.living)
    world.tell(tree.Stop())
    world.run()
    assert world.living == {}
    assert world.last == tree.End(0)


def test_a_stopping_plane_refuses_and_starts_nothing_but_the_storage_it_still_needs() -> None:
    world = up(slots=1)
    world.deaf.add(A)
    world.tell(tree.Wanted(A))
    world.run()
    world.tell(tree.Stop())
    world.run()
    world.tell(tree.Wanted(B))
    assert world.last == tree.Refused(B, "plane_closing")
    world.die("storage", 74)
    world.run(RESTART_BACKOFF_MS * 2)
    assert "storage" in world.living, "A still has its terminal to write"
    world.run(SHUTDOWN_HARD_MS)
    answer: object = world.last
    assert answer == tree.End(0)


def test_who_waits_for_a_slot_is_told_that_the_plane_closes() -> None:
    world = up(slots=1)
    world.tell(tree.Wanted(A))
    world.run()
    world.deaf.add(A)
    world.tell(tree.Wanted(B, (A,)))
    world.tell(tree.Stop())
    assert tree.Refused(B, "plane_closing") in world.told
    world.run(SHUTDOWN_HARD_MS)
    assert world.owed == []


def test_a_gateway_that_dies_while_it_is_told_to_close_holds_nothing_up() -> None:
    world = up()
    world.auto = False
    world.tell(tree.Stop())
    world.auto = True
    world.die("gateway", 70)
    world.run()
    assert world.last == tree.End(0)


def test_the_tree_is_data_for_every_role() -> None:
    assert set(tree.SPECS) == {"storage", "gateway", "fork", "session"}
    assert all(spec.role == role for role, spec in tree.SPECS.items())
    assert tree.SPECS["session"].restart == "transient"
    permanent = [spec.role for spec in tree.SPECS.values() if spec.restart == "permanent"]
    assert permanent == ["storage", "gateway", "fork"]


# ---- At random ----


class Plays(RuleBasedStateMachine):
    """Anything may happen at any time; what must hold is asserted in `World.check`."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(slots=3).begin()

    names = st.sampled_from([A, B, C, D])

    @rule(name=names, evict=st.lists(names, max_size=3, unique=True))
    def want(self, name: str, evict: list[str]) -> None:
        self.world.tell(tree.Wanted(name, tuple(evict)))

    @rule(ms=st.sampled_from([0, 1, 50, 150, 1_000, 6_000, 70_000]))
    def time(self, ms: int) -> None:
        self.world.run(ms)

    @precondition(lambda self: self.world.living)
    @rule(data=st.data(), status=st.sampled_from([0, 1, 70, 74, 75, 78, -9, -11]))
    def die(self, data: st.DataObject, status: int) -> None:
        self.world.die(data.draw(st.sampled_from(sorted(self.world.living))), status)

    @rule(name=names)
    def go_deaf(self, name: str) -> None:
        self.world.deaf ^= {name}

    @rule(draw=st.floats(0, 1))
    def draw(self, draw: float) -> None:
        self.world.random01 = draw

    @precondition(lambda self: not is_stopping(self.world.plane))
    @rule(rare=st.integers(0, 9))
    def stop(self, rare: int) -> None:
        if rare == 0:
            self.world.tell(tree.Stop())

    @invariant()
    def order(self) -> None:
        world = self.world
        if world.plane.stage == "starting" and "gateway" in world.living:
            assert world.plane.children["storage"].was_up or (
                world.plane.children["storage"].phase == "spent"
            )

    def teardown(self) -> None:
        world = self.world
        world.run(200_000)  # every back-off and grace is over
        assert world.owed == [], "who asked was not answered"
        if not is_stopping(world.plane):
            world.tell(tree.Stop())
        world.run(2 * SHUTDOWN_HARD_MS)
        assert world.plane.stage == "ended"
        assert len(world.of(tree.End)) == 1
        assert world.living == {}


TestPlays = Plays.TestCase
