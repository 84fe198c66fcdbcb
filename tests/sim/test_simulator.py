"""The simulator finds nothing in the product, everything in its mutants, and always the same."""

from __future__ import annotations

import builtins
import errno
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from callboard import messages as m
from callboard.actors.gateway.border import Border
from callboard.actors.gateway.desk import Desk
from callboard.actors.session.core import Session
from callboard.door import Door
from callboard.peer import Credentials
from callboard.storage.checkpoint import Checkpoints
from callboard.storage.draft import Draft
from callboard.storage.engine import Engine
from callboard.storage.feeds import Feeds
from callboard.storage.sessions import Sessions
from callboard.supervisor import policy
from callboard.wire import Header
from tests import simulate
from tests.sim import judge as judging
from tests.sim.bus import Arrived, Bus, Connected, Disconnected
from tests.sim.client import Promised, Watched, ref
from tests.sim.disk import SYNCS, Faults, Handle, SimDisk
from tests.sim.gateway import Gateway
from tests.sim.kernel import MS, SECOND, Kernel, Pipe, Process, Rates, Violation
from tests.sim.mutants import MUTANTS
from tests.sim.nemesis import KINDS, draw_story
from tests.sim.run import run_seed, shrink
from tests.sim.seeds import FAILED
from tests.sim.storage import Storage
from tests.sim.world import World, draw_options, unreal
from tests.storage.memory_disk import Draw, LoseAll

FIRST = int(os.environ.get("CALLBOARD_SIM_FROM") or simulate.fresh_seed())
FRESH = 500
"""Seeds per commit (SIM-12)."""
CHUNK = 50
GOOD = 11
"""Some seed with turns, tools and restarts."""


def fail_of(seed: int, mutant: str = "") -> str:
    """Run a seed and tell its story if it breaks a promise."""
    outcome = run_seed(seed, mutant)
    return simulate.story_of(shrink(outcome)) if outcome.violation is not None else ""


# --- SIM-12, SIM-11, SIM-9: seeds and mutants ---


@pytest.mark.rule("SIM-12")
@pytest.mark.parametrize("chunk", range(FRESH // CHUNK))
def test_fresh_seeds_break_no_promise(chunk: int) -> None:
    first = FIRST + chunk * CHUNK
    for seed in range(first, first + CHUNK):
        if story := fail_of(seed):
            pytest.fail(story)


@pytest.mark.rule("SIM-11", "SIM-12")
@pytest.mark.parametrize(("seed", "what"), FAILED)
def test_a_seed_that_once_failed_breaks_no_promise(seed: int, what: str) -> None:
    story = fail_of(seed)
    assert not story, f"{what}\n{story}"


@pytest.mark.rule("SIM-9", "SIM-12")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_falls_by_its_recorded_seed(name: str) -> None:
    mutant = MUTANTS[name]
    assert 1 <= mutant.seed <= mutant.budget, "seeds are tried from 1 on"
    outcome = run_seed(mutant.seed, name)
    assert outcome.violation is not None, f"{mutant.what}: seed {mutant.seed} finds nothing"
    assert run_seed(mutant.seed).violation is None, "it is the mutant that falls"


def test_the_page_tells_of_every_mutant() -> None:
    page = (Path(__file__).parents[2] / "docs/reliability.md").read_text()
    for name, mutant in MUTANTS.items():
        assert f"| `{name}` | {mutant.what} | {mutant.budget:,} | {mutant.seed} |" in page


# --- SIM-1: what is simulated ---


@pytest.mark.rule("SIM-1")
def test_the_real_machines_run_and_touch_nothing_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock, no randomness, no socket and no file of this computer is asked for anything."""
    stepped = Counter[str]()
    for real, name in [
        (Engine, "run"),
        (Feeds, "take"),
        (Session, "answered"),
        (Desk, "from_peer"),
        (Border, "came"),
        (Door, "receive"),
    ]:
        right = getattr(real, name)

        def spied(
            self: object, *args: object, right: object = right, label: str = real.__name__
        ) -> object:
            stepped[label] += 1
            assert callable(right)
            return right(self, *args)

        monkeypatch.setattr(real, name, spied)
    decide = policy.decide

    def decided(*args: object) -> object:
        stepped["policy"] += 1
        return decide(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(policy, "decide", decided)
    allowed = World(GOOD)  # imports and builds what it needs

    def touched(*args: object, **options: object) -> NoReturn:
        raise AssertionError(f"something real was touched: {args}")

    for place, name in [
        (time, "time"),
        (time, "time_ns"),
        (time, "monotonic"),
        (time, "monotonic_ns"),
        (time, "sleep"),
        (os, "urandom"),
        (os, "open"),
        (os, "stat"),
        (os, "lstat"),
        (random, "random"),
        (socket, "socket"),
        (builtins, "open"),
    ]:
        monkeypatch.setattr(place, name, touched)
    outcome = run_seed(GOOD)
    monkeypatch.undo()
    assert outcome.violation is None, outcome.violation
    assert allowed.kernel.seed == GOOD
    names = {"Engine", "Feeds", "Session", "Desk", "Border", "Door", "policy"}
    assert {name for name in names if stepped[name]} == names


# --- SIM-2: the scheduler ---


@pytest.mark.rule("SIM-2")
def test_the_seed_draws_the_order_of_what_is_runnable_and_time_waits_for_it() -> None:
    def order(seed: int) -> list[int]:
        kernel, seen = Kernel(seed), list[int]()
        for n in range(8):
            kernel.at(5, seen.append, n)
        kernel.at(6, seen.append, 99)
        for _ in range(8):
            kernel.step()
            assert kernel.now == 5, "time stands while something is runnable"
        kernel.step()
        assert (kernel.now, seen[-1]) == (6, 99)
        return seen

    orders = {tuple(order(seed)) for seed in range(20)}
    assert len(orders) > 15
    assert order(3) == order(3)


@pytest.mark.rule("SIM-2")
def test_nothing_left_to_do_is_a_finding_and_no_hang() -> None:
    world = World(1)
    with unreal(world):
        world.run_until(30 * SECOND)
        world.kernel._heap.clear()  # pyright: ignore[reportPrivateUsage]
        world.clients[0].open[0].done = False
        with pytest.raises(Violation, match="deadlock"):
            world.calm()


# --- SIM-3: processes ---


class Echo(Process):
    """Notes what it is given."""

    def __init__(self, kernel: Kernel, name: str = "echo") -> None:
        self.seen: list[object] = []
        self.ends: list[int] = []
        super().__init__(kernel, name, lambda process, status: self.ends.append(status))

    def handle(self, events: Sequence[object]) -> None:
        self.seen += events


def settle(kernel: Kernel) -> None:
    while not kernel.is_idle:
        kernel.step()


@pytest.mark.rule("SIM-3")
def test_a_killed_process_does_nothing_more_and_a_paused_one_goes_on_later() -> None:
    kernel = Kernel(1)
    dead, slow = Echo(kernel, "dead"), Echo(kernel, "slow")
    dead.post("never seen")
    dead.end(-9)
    dead.post("nor this")
    slow.pause(SECOND)
    slow.post("while it stood")
    settle(kernel)
    assert (dead.seen, dead.ends) == ([], [-9])
    assert slow.seen == ["while it stood"]
    assert kernel.now >= SECOND


@pytest.mark.rule("SIM-3")
def test_the_real_policy_starts_again_what_has_ended_as_a_new_incarnation() -> None:
    world = World(2)
    with unreal(world):
        world.run_until(300 * MS)
        first = world.bus.servers["storage"]
        first.end(-9)
        world.run_until(world.kernel.now + 50 * MS)
        assert "storage" not in world.bus.servers, "there is a delay, by the restart rules"
        world.run_until(world.kernel.now + 2 * SECOND)
    again = world.bus.servers["storage"]
    assert isinstance(again, Storage)
    assert again.alive
    assert again is not first
    assert world.supervisor is not None
    assert world.supervisor.plane.children["storage"].crashes == 1


# --- SIM-4: the disk ---


def written(disk: SimDisk, path: str = "/home/a") -> int:
    fd = disk.create(path)
    disk.pwrite(fd, b"x" * 600, 0)
    return fd


@pytest.mark.rule("SIM-4")
def test_a_failed_sync_leaves_a_phantom_that_no_later_sync_writes() -> None:
    disk = SimDisk()
    faults = Faults(disk, random.Random(1))
    handle = Handle(disk, faults, lambda: True)
    fd = handle.create("/home/a")
    handle.sync_dir("/home")
    handle.pwrite(fd, b"lost", 0)
    faults.kinds, faults.error_in = SYNCS, 1
    with pytest.raises(OSError, match="datasync") as caught:
        handle.datasync(fd)
    assert caught.value.errno == errno.EIO
    handle.datasync(fd)  # says that all is well
    assert handle.pread(fd, 9, 0) == b"lost", "it can still be read"
    disk.cut_power(random.Random(1), LoseAll())
    assert disk.content("/home/a").strip(b"\0") == b""


@pytest.mark.rule("SIM-4")
def test_names_and_bytes_become_durable_by_themselves() -> None:
    disk = SimDisk()
    disk.sync(written(disk))
    disk.cut_power(random.Random(1), LoseAll())
    assert "/home/a" not in disk.names, "its directory was not synced"
    fd = written(disk)
    disk.sync_dir("/home")
    disk.close(fd)
    disk.cut_power(random.Random(1), LoseAll())
    assert disk.content("/home/a").strip(b"\0") == b"", "its bytes were not synced"


@pytest.mark.rule("SIM-4")
def test_a_cut_keeps_some_writes_tears_others_and_keeps_a_prefix_of_the_names() -> None:
    sizes, names = Counter[int](), Counter[tuple[str, ...]]()
    for seed in range(200):
        disk = SimDisk()
        for name in "abc":
            written(disk, f"/home/{name}")
        disk.crash(Draw(random.Random(seed)))
        disk.cut_power(random.Random(seed))
        names[tuple(path for path in disk.names if path != "/home" and path != "/run")] += 1
        sizes.update(
            len(disk.content(path).rstrip(b"\0")) for path in disk.names if "/home/" in path
        )
    assert set(sizes) == {0, 512, 600}
    assert set(names) == {
        (),
        ("/home/a",),
        ("/home/a", "/home/b"),
        ("/home/a", "/home/b", "/home/c"),
    }


@pytest.mark.rule("SIM-4")
def test_a_full_disk_takes_a_part_and_descriptors_run_out() -> None:
    disk = SimDisk()
    faults = Faults(disk, random.Random(1))
    handle = Handle(disk, faults, lambda: True)
    fd = handle.create("/home/a")
    disk.capacity = 100
    assert handle.pwrite(fd, b"x" * 150, 0) == 100
    with pytest.raises(OSError, match="home") as full:
        handle.pwrite(fd, b"x" * 50, 100)
    assert full.value.errno == errno.ENOSPC
    faults.kinds, faults.error, faults.error_in = frozenset({"create"}), errno.EMFILE, 1
    disk.capacity = None
    with pytest.raises(OSError, match="create") as many:
        handle.create("/home/b")
    assert many.value.errno == errno.EMFILE


@pytest.mark.rule("SIM-4")
def test_storage_refuses_in_some_runs() -> None:
    refused = Counter[str]()
    for seed in range(1, 400):
        if {"storage_full", "storage_unavailable"} <= set(refused):
            break
        for line in run_seed(seed, keep=True).trace:
            found = re.search(r"client\d .* (storage_full|storage_unavailable)$", line)
            if found:
                refused[found[1]] += 1
    assert set(refused) == {"storage_full", "storage_unavailable"}


# --- SIM-5: the bus ---


def links(bus: Bus, count: int) -> tuple[Echo, list[Echo]]:
    server = Echo(bus.kernel, "router")
    bus.bind("storage", server)
    dealers = [Echo(bus.kernel, f"dealer{n}") for n in range(count)]
    for n, dealer in enumerate(dealers):
        bus.dealer(dealer, "storage", Credentials("session", "", f"{n:032x}"))
    settle(bus.kernel)
    return server, dealers


@pytest.mark.rule("SIM-5")
def test_messages_are_lost_with_their_connection_or_doubled_or_late() -> None:
    kernel = Kernel(1)
    bus = Bus(kernel)
    server, dealers = links(bus, 3_000)
    for link in list(bus.links.values()):
        link.send(Header("append", "1"), "body")
        link.send(Header("beat"), "body")
    settle(kernel)
    arrived = Counter(one.header.kind for one in server.seen if isinstance(one, Arrived))
    assert 60 < bus.lost < 180, "2 % of 6,000"
    assert 30 < bus.doubled < 90, "2 % of the 3,000 that are requests"
    broken = [one for one in dealers if any(isinstance(e, Disconnected) for e in one.seen)]
    assert len(broken) == bus.lost, "a message is lost with its connection"
    assert all(isinstance(one.seen[-1], Connected) for one in broken), "which comes back"
    assert arrived["beat"] + arrived["append"] <= 6_000 + bus.doubled
    assert arrived["append"] > 2_800


@pytest.mark.rule("SIM-5")
def test_a_connection_keeps_its_order_and_others_overtake_it() -> None:
    kernel, rates = Kernel(4), Rates()
    came = list[tuple[int, int]]()
    pipes: list[Pipe[tuple[int, int]]] = [
        Pipe(kernel, kernel.stream(str(n)), rates, came.append) for n in range(2)
    ]
    for n in range(300):
        for k, pipe in enumerate(pipes):
            pipe.send((k, n))
    late = Pipe(kernel, kernel.stream("late"), rates, came.append)
    rates.late = 1.0
    before = kernel.now
    late.send((2, 0))
    settle(kernel)
    assert kernel.now - before >= 10 * MS, "a hundredfold delay"
    for k in range(2):
        assert [n for one, n in came if one == k] == list(range(300))
    assert [n for _, n in came] != sorted(n for _, n in came)


@pytest.mark.rule("SIM-5")
def test_messages_to_a_dead_incarnation_are_gone() -> None:
    kernel = Kernel(1)
    bus = Bus(kernel)
    bus.rates.calm()
    server, (dealer,) = links(bus, 1)
    (link,) = bus.links.values()
    link.send(Header("append", "1"), "body")
    server.end(-9)
    bus.ended(server)
    successor = Echo(kernel, "router2")
    bus.bind("storage", successor)
    settle(kernel)
    assert not server.seen
    assert not successor.seen
    assert [type(event) for event in dealer.seen] == [Connected, Disconnected, Connected]


# --- SIM-6, SIM-7: the nemesis and rare branches ---


@pytest.mark.rule("SIM-6")
def test_stories_have_three_to_twelve_deeds_of_every_kind() -> None:
    kinds, counts = Counter[str](), Counter[int]()
    for seed in range(300):
        story = draw_story(World(seed))
        kinds.update(deed.kind for deed in story)
        counts[sum(not deed.follows for deed in story)] += 1
    assert set(counts) == set(range(3, 13))
    assert set(kinds) == set(KINDS)


@pytest.mark.rule("SIM-6")
def test_every_run_ends_in_calm_and_with_a_last_power_cut() -> None:
    """What was never made durable does not help a run to be judged well."""
    outcome = run_seed(GOOD, keep=True)
    assert outcome.violation is None
    calm = next(n for n, line in enumerate(outcome.trace) if line.endswith(" calm"))
    assert not any(" nemesis " in line for line in outcome.trace[calm:])
    assert outcome.trace[-1].endswith("last power cut")


@pytest.mark.rule("SIM-7")
def test_short_runs_reach_rare_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = Counter[str]()

    def spy(place: type, name: str, label: str) -> None:
        right = getattr(place, name)

        def spied(self: object, *args: object, **options: object) -> object:
            if label != "eviction" or args[1] is None:
                reached[label] += 1
            if label == "checkpoint" and options.get("compacts") is False:
                reached["forced checkpoint"] += 1
            return right(self, *args, **options)

        monkeypatch.setattr(place, name, spied)

    spy(Engine, "_rotate", "segment change")
    spy(Engine, "_one_by_one", "refused batch")
    spy(Draft, "compact", "compaction")
    spy(Checkpoints, "begin", "checkpoint")
    spy(Sessions, "set", "eviction")
    small = 0
    for seed in range(1, 41):
        run_seed(seed)
        small += draw_options(Kernel(seed).stream("plan")).batch_frames == 1
    labels = ("segment change", "refused batch", "compaction", "forced checkpoint", "eviction")
    assert {label for label in labels if reached[label] > 5} == set(labels)
    assert small > 2


# --- SIM-8: each invariant can fail ---


@pytest.mark.rule("SIM-8")
def test_each_invariant_is_broken_by_some_mutant_or_by_hand() -> None:
    broken = {
        outcome.violation.invariant
        for name, mutant in MUTANTS.items()
        if (outcome := run_seed(mutant.seed, name)).violation is not None
    }
    assert broken >= {
        "reply before its sync",
        "reply after a failed sync",
        "stale epoch",
        "one owner",
        "tools",
        "receipts",
        "recovery",
        "permits",
        "liveness",
        "contradiction",
    }


@pytest.fixture(scope="module")
def judged() -> World:
    """A world that has come to rest and lost what was not durable, found good."""
    world = World(GOOD)
    with unreal(world):
        world.run_until(SECOND * 12)
        world.calm()
        for process in world.processes:
            process.end(-9)
        world.disk.cut_power(random.Random(1), LoseAll())
        judging.judge(world)
    return world


@pytest.mark.rule("SIM-8")
def test_the_judge_sees_what_is_lost_doubled_or_out_of_order(judged: World) -> None:
    seen = judging.read_recovered(judged.disk)
    text = next(text for text, one in seen.items() if len(one.applied) > 1)
    one, session = seen[text], text.rpartition("/")[2]
    promised = Promised(session, "never stored", "hi")
    with pytest.raises(Violation, match="promised and is gone"):
        judging.check_promise(seen, promised)
    name = one.acknowledged[0]
    with pytest.raises(Violation, match="another text"):
        judging.check_promise(seen, Promised(session, name, "other words"))
    one.applied.append(one.applied[0])
    with pytest.raises(Violation, match="more than one message"):
        judging.check_turns(text, one)
    one.applied.pop()
    ended = one.terminals.pop()
    with pytest.raises(Violation, match="never ended"):
        judging.check_turns(text, one)
    one.terminals.append(ended)
    numbers = {(text, name): -n for n, name in enumerate(one.applied)}
    for record in one.records:
        if record["type"] in ("turn_started", "turn_aborted"):
            record["type"] = "other"
    with pytest.raises(Violation, match="out of order"):
        judging.check_order(text, one, numbers)
    judging.check_order(text, one, {key: -n for key, n in numbers.items()})


@pytest.mark.rule("SIM-8")
def test_the_judge_sees_calls_without_results_and_lines_that_were_shown_too_early(
    judged: World,
) -> None:
    seen = judging.read_recovered(judged.disk)
    judging.check_calls(judged, seen)
    call_id = next(iter(judged.tools.runs))
    judged.tools.runs[call_id] += 1
    with pytest.raises(Violation, match=call_id):
        judging.check_calls(judged, seen)
    judged.tools.runs[call_id] -= 1
    client = judged.clients[0]
    client.watched["s0"] = Watched({10_000: b"{}"}, 10_001)
    with pytest.raises(Violation, match="was shown and is gone"):
        judging.check_watches(seen, client)
    del client.watched["s0"]


@pytest.mark.rule("SIM-8")
def test_clients_and_queues_are_checked_in_every_step() -> None:
    world = World(1)
    with unreal(world):
        world.run_until(SECOND)
        gateway = world.bus.servers["gateway"]
        assert isinstance(gateway, Gateway)
        gateway.desk.places.count = -1
        with pytest.raises(Violation, match="queues"):
            world.check_gateway(gateway)
    client = world.clients[0]
    work = next(one for one in client.open if one.kind == "send")
    receipt = m.Receipt(
        accepted=True,
        message_id=work.message_id,
        duplicate=False,
        item_state="pending",
        delivery="next_turn",
        queued=1,
    )
    client.promises.pop((work.session, work.message_id), None)
    client.take_receipt(work, receipt)
    with pytest.raises(Violation, match="new for the second time"):
        client.take_receipt(work, receipt)
    client.watched["s0"] = Watched()
    gap = m.Records(session=ref("s0"), first_seq=3, last_seq=3, lines=[b"{}\n"])
    work.session = "s0"
    with pytest.raises(Violation, match="after a gap"):
        client.take_records(work, gap)


# --- SIM-10: one seed, one trace ---

_DIGESTS = "import sys\nfrom tests.sim.run import run_seed\n" + (
    "print(*[run_seed(int(seed)).digest for seed in sys.argv[1:]])"
)
SEEDS = [3, 5, 11, 17]


def digests_elsewhere(python: str, seeds: Sequence[int], hash_seed: str) -> list[str]:
    root = Path(__file__).parents[2]
    paths = [str(root), *(path for path in sys.path if "site-packages" in path)]
    child = subprocess.run(
        [python, "-c", _DIGESTS, *map(str, seeds)],
        cwd=root,
        env={"PATH": os.defpath, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    )
    return child.stdout.split()


@pytest.mark.rule("SIM-10")
def test_a_seed_has_one_trace_again_in_another_order_and_in_other_processes() -> None:
    """Set CALLBOARD_SIM_PYTHONS to interpreters of other patch versions, to run these as well."""
    here = [run_seed(seed).digest for seed in SEEDS]
    assert len(set(here)) == len(SEEDS)
    assert [run_seed(seed).digest for seed in reversed(SEEDS)] == here[::-1]
    others = os.environ.get("CALLBOARD_SIM_PYTHONS", "").split()
    for n, python in enumerate([sys.executable, sys.executable, *others]):
        assert digests_elsewhere(python, SEEDS[::-1], str(n)) == here[::-1]


# --- SIM-11: what a violation prints ---


@pytest.mark.rule("SIM-11")
def test_a_violation_is_told_by_its_shortest_story_which_runs_alike(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seed = MUTANTS["early_stop"].seed
    whole = run_seed(seed, "early_stop")
    short = shrink(whole)
    assert short.violation is not None
    assert len(short.story) < len(whole.story)
    again = run_seed(seed, "early_stop", deeds=len(short.story), keep=True)
    assert (again.digest, again.trace) == (short.digest, short.trace)
    shorter = run_seed(seed, "early_stop", deeds=len(short.story) - 1)
    assert shorter.violation is None or shorter.violation.invariant != short.violation.invariant
    assert simulate.main(["--seed", str(seed), "--mutant", "early_stop"]) == 1
    told = capsys.readouterr().out
    assert f"seed {seed} breaks a promise: {short.violation}" in told
    assert "options: {'sessions': " in told
    assert f"  {short.story[-1]}\n" in told
    assert f"--seed {seed} --mutant early_stop --deeds {len(short.story)}" in told
    assert all(line in told for line in short.trace[:5])


def test_the_command_counts_and_writes_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert simulate.main(["--seeds", "3", "--from", "1", "--json", str(file)]) == 0
    assert '"seeds": 3' in file.read_text()
    assert "3 seeds from 1: 0 violations" in capsys.readouterr().out
    assert simulate.main(["--mutant", "early_reply", "--json", str(file)]) == 0
    assert '"seed": 1' in file.read_text()
    assert simulate.main(["--seed", "1"]) == 0
