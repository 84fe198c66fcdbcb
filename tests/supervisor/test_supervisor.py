"""The real supervisor and fork process, with stub children."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from callboard.errors import (
    DeadlineExceeded,
    HomeInUse,
    HomeUnsafe,
    Internal,
    InvalidRequest,
    JournalDamaged,
)
from callboard.home import Home
from callboard.limits import SESSION_RESTARTS_MAX, STORAGE_RESTARTS_MAX, TOKEN_BYTES
from tests.supervisor.conftest import StubPlane, ended, ref, until


def order_of(plane: StubPlane, *events: tuple[str, str]) -> list[int]:
    """Give where these (role, event) notes stand for the first time."""
    notes = plane.notes()
    return [
        next(n for n, note in enumerate(notes) if (note.get("role"), note.get("event")) == event)
        for event in events
    ]


def test_a_plane_starts_in_order_and_stops_in_reverse(plane: StubPlane) -> None:
    launched = plane.up()
    assert plane.activate("idle")["event"] == "activating"
    plane.note(event="session", session=ref("idle"))
    launched.terminate()
    assert launched.wait(20) == 0
    started = order_of(
        plane,
        ("storage", "started"),
        ("storage", "plane_hello"),
        ("gateway", "started"),
        ("gateway", "supervisor_hello"),
        ("gateway", "activating"),
        ("gateway", "closing"),
        ("gateway", "session_down"),
        ("gateway", "stopping"),
        ("storage", "stopping"),
    )
    assert started == sorted(started)
    assert not plane.runtime.operator_token.exists()


@pytest.mark.rule("FLT-62", "PRN-4")
def test_the_operator_token_is_new_private_and_ends_with_the_plane(plane: StubPlane) -> None:
    tokens: set[str] = set()
    for _ in range(2):
        launched = plane.up()
        found = plane.runtime.operator_token
        tokens.add(found.read_text())
        assert stat.S_IMODE(found.stat().st_mode) == 0o600
        command = Path(f"/proc/{launched.pid}/cmdline").read_text()
        for pid in plane.pids():
            command += Path(f"/proc/{pid}/cmdline").read_text()
        assert not any(token in command for token in tokens)
        launched.terminate()
        assert launched.wait(20) == 0
        assert not found.exists()
    assert len(tokens) == 2
    assert all(len(token) == 2 * TOKEN_BYTES for token in tokens)


@pytest.mark.rule("FLT-28", "F18")
def test_a_second_plane_is_told_who_has_the_home(plane: StubPlane) -> None:
    first = plane.up()
    with pytest.raises(HomeInUse) as refusal:
        plane.up()
    assert refusal.value.carried == {"pid": first.pid}
    assert plane.activate("idle")["event"] == "activating", "the first one noticed nothing"
    first.terminate()
    assert first.wait(20) == 0
    plane.up()


@pytest.mark.rule("FLT-28", "RLB-16")
def test_of_planes_that_start_at_once_one_wins(plane: StubPlane) -> None:
    outcomes: list[str] = []

    def start() -> None:
        try:
            plane.up()
            outcomes.append("up")
        except HomeInUse:
            outcomes.append("in use")

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["in use", "in use", "in use", "up"]
    assert plane.activate("idle")["event"] == "activating"


@pytest.mark.rule("FLT-28")
def test_a_supervisor_on_a_home_in_use_exits_with_75(plane: StubPlane) -> None:
    plane.up()
    from callboard.supervisor import children
    from callboard.supervisor.launch import SUPERVISOR, StartOrder

    settings = f'{{"home": "{plane.home.root}"}}'
    order = StartOrder(settings, False, {}).to_json()
    spawned = children.spawn(children.Program(SUPERVISOR, order, two_way=True))
    assert children.has_ended(spawned.pidfd, 20)
    assert children.reap(spawned.pidfd) == 75
    spawned.channel.close()
    os.close(spawned.pidfd)
    os.close(spawned.stderr)


@pytest.mark.rule("FLT-28")
def test_the_home_lock_is_inherited_by_nobody(plane: StubPlane) -> None:
    launched = plane.up()
    plane.activate("idle")
    plane.note(event="session")
    holders: list[int] = []
    for pid in {launched.pid, *plane.pids()}:
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        holders += [pid] * (str(plane.home.lock) in links)
    assert holders == [launched.pid]


@pytest.mark.rule("FLT-31")
def test_a_session_inherits_nothing_but_its_lifeline(plane: StubPlane) -> None:
    plane.up()
    plane.activate("idle")
    note = plane.note(event="session")
    assert note["fds"][:3] == [0, 1, 2]
    assert len(note["fds"]) == 6, "0, 1, 2, lifeline, trace, and the folder that lists them"
    folder = Path(f"/proc/{note['pid']}/fd")
    there = [os.readlink(fd) for fd in folder.iterdir() if int(fd.name) in note["fds"][3:]]
    assert sum(target.startswith("pipe:") for target in there) == 1
    assert str(plane.home.logs / "fork.trace") in there
    targets = [os.readlink(f"/proc/{note['pid']}/fd/{fd}") for fd in (0, 1, 2)]
    assert targets == ["/dev/null"] * 3
    assert note["secret"] == ""
    assert note["cwd"] == "/"
    assert note["umask"] == 0o077
    assert note["sid"] == note["pid"]


@pytest.mark.rule("FLT-34")
def test_no_process_leaves_a_core(plane: StubPlane) -> None:
    plane.up()
    plane.activate("idle")
    assert plane.note(event="session")["core"] == 0
    for pid in plane.pids():
        limits = Path(f"/proc/{pid}/limits").read_text()
        line = next(line for line in limits.splitlines() if line.startswith("Max core"))
        assert line.split()[4:6] == ["0", "0"]


@pytest.mark.rule("FLT-48")
def test_every_process_makes_private_files(plane: StubPlane) -> None:
    plane.up()
    plane.activate("idle")
    plane.note(event="session")
    for pid in plane.pids():
        assert "Umask:\t0077" in Path(f"/proc/{pid}/status").read_text()
    for path in plane.home.root.rglob("*"):
        loose = stat.S_IMODE(path.lstat().st_mode) & 0o077
        assert not loose or stat.S_ISSOCK(path.lstat().st_mode), path


@pytest.mark.rule("FLT-52")
def test_memory_pressure_ends_sessions_first(plane: StubPlane) -> None:
    plane.up()
    plane.activate("idle")
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert plane.note(event="session")["oom"] == min(own + 500, 1000)
    for role in ("supervisor", "storage", "gateway"):
        assert int(Path(f"/proc/{plane.pid(role)}/oom_score_adj").read_text()) == own


@pytest.mark.rule("FLT-45")
def test_descriptors_are_raised_and_a_plane_that_needs_more_is_refused(plane: StubPlane) -> None:
    plane.up()
    limits = Path(f"/proc/{plane.pid('storage')}/limits").read_text()
    line = next(line for line in limits.splitlines() if line.startswith("Max open files"))
    assert line.split()[3] == line.split()[4]
    plane.launched[0].terminate()
    plane.launched[0].wait(20)
    with pytest.raises(InvalidRequest) as refusal:
        plane.up(resident_sessions=65_536)
    assert refusal.value.carried == {"field": "resident_sessions", "reason": "descriptors"}


@pytest.mark.rule("FLT-19")
@pytest.mark.parametrize("kind", ["symlink", "file"])
def test_an_unsafe_home_refuses_the_start(plane: StubPlane, kind: str) -> None:
    if kind == "symlink":
        (plane.home.root.parent / "elsewhere").mkdir()
        plane.home.root.symlink_to("elsewhere")
    else:
        plane.home.root.write_text("")
    with pytest.raises(HomeUnsafe) as refusal:
        plane.up()
    assert refusal.value.carried["what"] == "home"


@pytest.mark.rule("FLT-19")
def test_loose_modes_are_tightened(plane: StubPlane) -> None:
    plane.home.root.mkdir(mode=0o755)
    plane.home.root.chmod(0o755)
    plane.up()
    assert stat.S_IMODE(plane.home.root.stat().st_mode) == 0o700


def test_a_lock_that_is_no_file_is_refused(plane: StubPlane) -> None:
    plane.home.root.mkdir(mode=0o700)
    os.mkfifo(plane.home.lock)
    with pytest.raises(HomeUnsafe):
        plane.up()


def test_what_storage_cannot_do_reaches_whoever_starts_the_plane(plane: StubPlane) -> None:
    plane.want("damaged")
    with pytest.raises(JournalDamaged) as refusal:
        plane.up()
    assert refusal.value.carried == {"segment": 3, "offset": 4096}
    assert plane.notes(role="gateway") == []


@pytest.mark.rule("FLT-4")
def test_storage_that_always_dies_leaves_a_plane_that_says_so(plane: StubPlane) -> None:
    plane.want("storage-dies")
    plane.up()
    assert len(plane.notes(role="storage", event="started")) == STORAGE_RESTARTS_MAX + 1
    assert plane.note(event="storage_given_up")["body"]["detail"]
    tree = plane.tree()
    assert tree["detail"] == "storage is not started again: signal 9"
    assert plane.activate("idle")["body"]["code"] == "storage_unavailable"


@pytest.mark.rule("FLT-26", "F20")
def test_a_fork_process_that_cannot_import_ends_with_70_and_says_where(plane: StubPlane) -> None:
    launched = plane.up(session="tests.supervisor.stubs.broken")
    assert launched.wait(60) == 70
    ends = [n for n in plane.log() if n["action"] == "child_ended" and n["child"] == "fork"]
    assert {(n["status"], n["why"]) for n in ends} == {
        (70, "RuntimeError at supervisor/stubs/broken.py:3")
    }


def test_a_start_that_takes_too_long_is_given_up_with_all_its_processes(plane: StubPlane) -> None:
    plane.want("storage-hangs")
    with pytest.raises(DeadlineExceeded):
        plane.up(timeout_s=1.5)
    assert ended([plane.note(role="storage", event="started")["pid"]], 2.0) == []


def test_a_plane_that_is_stopped_while_it_starts_says_so(plane: StubPlane) -> None:
    plane.want("storage-hangs")

    def stop() -> None:
        plane.note(role="storage", event="started")
        status = Path(f"/proc/{plane.note(role='storage')['pid']}/status").read_text()
        parent = next(line for line in status.splitlines() if line.startswith("PPid"))
        os.kill(int(parent.split()[1]), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Internal, match="stopped before it was up"):
        plane.up()
    thread.join()
    assert ended([plane.note(role="storage", event="started")["pid"]], 2.0) == []


def test_a_home_that_cannot_be_made_is_told(plane: StubPlane) -> None:
    plane.home.root.parent.joinpath("flat").write_text("")
    plane.home = Home(plane.home.root.parent / "flat" / "h")
    with pytest.raises((Internal, HomeUnsafe)):
        plane.up()


@pytest.mark.rule("FLT-32")
def test_a_gateway_that_always_dies_ends_the_plane(plane: StubPlane) -> None:
    launched = plane.up()
    plane.want("gateway-dies")
    os.kill(plane.pid("gateway"), signal.SIGKILL)
    assert launched.wait(60) == 70


def test_killed_pillars_come_back_and_are_told_what_lives(plane: StubPlane) -> None:
    plane.up()
    plane.activate("idle")
    session = plane.note(event="session")
    for role in ("storage", "gateway"):
        before = plane.pid(role)
        os.kill(before, signal.SIGKILL)
        until(lambda r=role: len(plane.notes(role=r, event="started")) == 2)  # type: ignore[misc]
    until(lambda: len(plane.notes(event="supervisor_hello")) == 2)
    hello = plane.note(event="supervisor_hello")
    assert [live["session"] for live in hello["body"]["live"]] == [ref("idle")]
    assert hello["body"]["live"][0]["pid"] == session["pid"]
    assert len(plane.notes(event="plane_hello")) == 1, "the plane keeps its epoch"
    assert plane.tree()["counters"] == {"restarts_storage": 1, "restarts_gateway": 1}


@pytest.mark.rule("FLT-32", "F25")
def test_a_session_that_crashes_on_every_start_is_quarantined(plane: StubPlane) -> None:
    plane.up()
    plane.activate("crash")
    plane.activate("idle")
    note = plane.note(event="quarantine")
    assert note["body"] == {"session": ref("crash"), "plane_epoch": 1, "reason": "crash_loop"}
    assert len(plane.notes(event="session", session=ref("crash"))) == SESSION_RESTARTS_MAX + 1
    downs = [n["body"] for n in plane.notes(event="session_down")]
    assert [down["quarantined"] for down in downs] == [False] * SESSION_RESTARTS_MAX + [True]
    assert {down["status"] for down in downs} == {1}
    assert until(lambda: plane.tree()["quarantined"]) == [ref("crash")]
    assert [p["session"] for p in plane.tree()["processes"] if p["role"] == "session"] == [
        ref("idle")
    ]


def test_a_session_that_refuses_is_told_of_and_not_started_again(plane: StubPlane) -> None:
    plane.up()
    plane.activate("refuse")
    down = plane.note(event="session_down")["body"]
    assert (down["cause"], down["status"], down["restarting"]) == ("refused", 78, False)


def test_a_session_that_stops_leaves_no_identity_behind(plane: StubPlane) -> None:
    plane.up()
    routing_id = plane.activate("brief")["body"]["routing_id"]
    plane.note(event="session_down", role="gateway")
    until(lambda: not (plane.runtime.actors / routing_id).exists())


@pytest.mark.rule("FLT-36")
def test_identities_of_dead_planes_are_removed_and_of_living_ones_kept(plane: StubPlane) -> None:
    launched = plane.up()
    plane.activate("idle")
    plane.note(event="session")
    launched.kill()
    launched.wait(20)
    left = set(os.listdir(plane.runtime.actors))
    assert left
    sleeper = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX);"
            "print(flush=True); time.sleep(60)",
            str(plane.runtime.actors / "living"),
        ],
        stdout=subprocess.PIPE,
    )
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    try:
        plane.up()
        found = set(os.listdir(plane.runtime.actors))
        assert "living" in found
        assert not left & found
    finally:
        sleeper.kill()
        sleeper.communicate()


@pytest.mark.rule("RES-1")
def test_an_idle_session_makes_room(plane: StubPlane) -> None:
    plane.up(resident_sessions=1)
    plane.activate("idle1")
    refused = plane.activate("idle2")["body"]
    assert refused["code"] == "overloaded"
    assert (refused["resource"], refused["limit"]) == ("resident_sessions", 1)
    assert plane.activate("idle3", ["idle1"])["event"] == "activating"
    assert plane.note(event="session_down")["body"]["session"] == ref("idle1")


@pytest.mark.rule("FLT-29", "F23")
def test_the_death_of_the_fork_process_ends_its_sessions_and_they_come_back(
    plane: StubPlane,
) -> None:
    plane.up()
    for name in ("idle1", "idle2", "parent"):
        plane.activate(name)
    grandchild = plane.note(event="grandchild")["pid"]
    before = {n["session"]: n["pid"] for n in plane.notes(event="session")}
    until(lambda: len(plane.notes(event="session")) >= 3)
    before = {n["session"]: n["pid"] for n in plane.notes(event="session")}
    os.kill(plane.pid("fork"), signal.SIGKILL)
    assert ended([*before.values(), grandchild], 2.0) == []
    until(lambda: len(plane.notes(event="session_up")) == 3)
    downs = [n["body"] for n in plane.notes(event="session_down")]
    assert {down["cause"] for down in downs} == {"parent_lost"}
    assert all(down["restarting"] for down in downs)
    after = {p["session"]: p["restarts"] for p in plane.tree()["processes"] if p["session"]}
    assert after == dict.fromkeys(before, 0)


@pytest.mark.rule("FLT-29", "F22", "RLB-16")
def test_nothing_outlives_the_supervisor(plane: StubPlane) -> None:
    launched = plane.up()
    for name in ("idle1", "idle2", "deaf", "parent"):
        plane.activate(name)
    grandchild = plane.note(event="grandchild")["pid"]
    pids = [*plane.pids(), grandchild]
    launched.kill()
    assert ended(pids, 2.0) == []
    plane.up()
    assert plane.activate("idle1")["event"] == "activating"


@pytest.mark.rule("SHD-1")
def test_a_second_signal_does_not_wait(plane: StubPlane) -> None:
    launched = plane.up()
    plane.activate("deaf")
    pids = plane.pids()
    launched.terminate()
    until(lambda: any(n["action"] == "child_signalled" for n in plane.log()))
    assert launched.wait(0) is None
    launched.terminate()
    assert launched.wait(2) == 0
    assert ended(pids, 0.5) == []


@pytest.mark.rule("SHD-1")
def test_a_deaf_session_is_killed_when_its_time_is_over(plane: StubPlane) -> None:
    launched = plane.up()
    plane.activate("deaf")
    pid = plane.note(event="session")["pid"]
    launched.terminate()
    assert launched.wait(10) == 0
    assert ended([pid], 0) == []
    assert plane.notes(role="storage", event="stopping"), "and storage still stopped in order"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signals_that_stop(plane: StubPlane, number: signal.Signals) -> None:
    launched = plane.up()
    os.kill(launched.pid, number)
    assert launched.wait(20) == 0


@pytest.mark.rule("FLT-34")
def test_signals_that_do_not(plane: StubPlane) -> None:
    launched = plane.up()
    os.kill(launched.pid, signal.SIGPIPE)
    os.kill(launched.pid, signal.SIGUSR1)
    trace = plane.home.logs / "supervisor.trace"
    assert "most recent call first" in until(lambda: trace.read_text())
    assert plane.activate("idle")["event"] == "activating"


def test_stop_plane_of_the_gateway_stops_it(plane: StubPlane) -> None:
    launched = plane.up()
    assert plane.answer("stop_plane", reason="test")["event"] == "ok"
    assert launched.wait(20) == 0


def test_an_embedded_plane_stops_when_its_program_is_gone(plane: StubPlane) -> None:
    launched = plane.up()
    plane.activate("idle")
    pids = plane.pids()
    fd = os.pidfd_open(launched.pid)
    launched.close()
    assert ended(pids, 10.0) == []
    os.close(fd)
    assert plane.notes(role="storage", event="stopping")


def test_a_plane_that_is_not_embedded_does_not(plane: StubPlane) -> None:
    launched = plane.up(embedded=False)
    pid = launched.pid
    launched._channel.close()  # pyright: ignore[reportPrivateUsage]
    assert plane.activate("idle")["event"] == "activating"
    assert launched.pid == pid
    launched.terminate()
    assert launched.wait(20) == 0


def test_nothing_in_a_working_directory_takes_the_place_of_a_module(
    plane: StubPlane, base: Path
) -> None:
    trap = base / "trap"
    for name in ("callboard", "tests"):
        (trap / name).mkdir(parents=True)
        (trap / name / "__init__.py").write_text("raise SystemExit('trapped')")
    for name in ("queue", "zmq", "json", "msgpack", "pykka", "sitecustomize"):
        (trap / f"{name}.py").write_text("raise SystemExit('trapped')")
    plane.up(cwd=str(trap))
    plane.activate("idle")
    note = plane.note(event="session")
    assert not note["queue"].startswith(str(trap))
    for pid in plane.pids():
        assert os.readlink(f"/proc/{pid}/cwd") == "/"


@pytest.mark.rule("T-19")
def test_nobody_listens_where_nobody_should(plane: StubPlane) -> None:
    plane.up()
    plane.activate("idle")
    plane.note(event="session")
    inodes: set[str] = set()
    for pid in plane.pids():
        for fd in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            if target.startswith("socket:"):
                inodes.add(target[8:-1])
    listening: set[str] = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and int(fields[3], 16) & 0x10000:
            listening.add(fields[7] if len(fields) > 7 else "")
    runtime = plane.runtime
    assert listening == {str(runtime.storage), str(runtime.gateway)}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        assert not any(line.split()[9] in inodes for line in lines)
