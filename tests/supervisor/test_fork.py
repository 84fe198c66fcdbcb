"""The fork process by itself: orders, pidfds, exits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import callboard
from callboard.home import Order, Runtime, prepare_runtime
from callboard.supervisor import children, fork
from tests.supervisor.conftest import ended, ref

Packet = dict[str, Any]


class ForkProcess:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.runtime = Runtime(base / "run")
        prepare_runtime(self.runtime)
        (base / "h" / "logs").mkdir(parents=True, exist_ok=True)
        self._lifeline, self.ours = os.pipe2(os.O_CLOEXEC)
        self.order = Order(
            role="fork",
            home=str(base / "h"),
            runtime=str(self.runtime.root),
            plane_id="p",
            plane_secret="",
            plane_epoch=1,
            nonce="0" * 32,
            token="",
            parent_pid=os.getpid(),
            liveness_fd=self._lifeline,
            settings="{}",
        )
        head = {"session": "tests.supervisor.stubs.session", "preload": ["tests.supervisor.play"]}
        text = json.dumps(head).encode() + b"\n" + self.order.to_json()
        program = children.Program(fork.__name__, text, two_way=True, inherited=(self._lifeline,))
        self.spawned = children.spawn(program)
        self.spawned.channel.settimeout(20)
        self.fds: list[int] = []

    def receive(self) -> tuple[Packet, int]:
        data, fds, _, _ = socket.recv_fds(self.spawned.channel, 65_536, 4, socket.MSG_CMSG_CLOEXEC)
        self.fds += fds
        assert len(fds) <= 1
        return json.loads(data), fds[0] if fds else -1

    def fork(self, run: int, name: str) -> tuple[int, int]:
        order = replace(
            self.order, role="session", session=ref(name), nonce=f"{run:032x}", token="t"
        )
        self.spawned.channel.send(b'{"fork":%d}\n' % run + order.to_json())
        packet, pidfd = self.receive()
        assert packet["forked"] == run
        return packet["pid"], pidfd

    def note(self, name: str) -> Packet:
        end = time.monotonic() + 10
        path = Path(f"{self.order.home}.notes")
        while time.monotonic() < end:
            if path.exists():
                for line in path.read_text().splitlines():
                    found: Packet = json.loads(line)
                    if found.get("session") == ref(name):
                        return found
            time.sleep(0.01)
        raise AssertionError("it never came")

    def close(self) -> None:
        children.send_signal(self.spawned.pidfd, signal.SIGKILL)
        children.has_ended(self.spawned.pidfd, None)
        children.reap(self.spawned.pidfd)
        for fd in (*self.fds, self.spawned.pidfd, self.spawned.stderr, self._lifeline):
            os.close(fd)
        if self.ours >= 0:
            os.close(self.ours)
        self.spawned.channel.close()


@pytest.fixture
def forks(base: Path) -> Iterator[ForkProcess]:
    made = ForkProcess(base)
    assert made.receive() == ({"ready": True}, -1)
    yield made
    made.close()


@pytest.mark.rule("FLT-30", "FLT-37")
def test_a_pidfd_comes_with_the_pid_and_an_exit_report_after_the_end(forks: ForkProcess) -> None:
    pid, pidfd = forks.fork(1, "idle")
    assert forks.note("idle")["pid"] == pid
    info = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    assert f"Pid:\t{pid}\n" in info
    assert not children.has_ended(pidfd)
    children.send_signal(pidfd, signal.SIGTERM)
    assert forks.receive() == ({"exited": 1, "status": 0}, -1)
    assert children.has_ended(pidfd)


@pytest.mark.rule("FLT-30", "FLT-37")
def test_even_a_process_that_ends_at_once_has_its_pidfd(forks: ForkProcess) -> None:
    for run in range(1, 30):
        _, pidfd = forks.fork(run, "crash")
        assert forks.receive() == ({"exited": run, "status": 1}, -1)
        assert children.has_ended(pidfd)


@pytest.mark.parametrize(
    ("name", "number", "status"), [("deaf", signal.SIGKILL, -9), ("idle", signal.SIGABRT, -6)]
)
def test_a_signal_is_told_as_such(
    forks: ForkProcess, name: str, number: signal.Signals, status: int
) -> None:
    _, pidfd = forks.fork(1, name)
    forks.note(name)
    children.send_signal(pidfd, number)
    assert forks.receive() == ({"exited": 1, "status": status}, -1)


@pytest.mark.rule("FLT-29", "FLT-31")
def test_a_forked_session_is_a_process_of_its_own(forks: ForkProcess) -> None:
    pid, _ = forks.fork(1, "idle")
    note = forks.note("idle")
    assert note["sid"] == pid
    assert note["core"] == 0
    assert note["umask"] == 0o077
    assert len(note["fds"]) == 6
    assert os.getpgid(pid) == pid != os.getpgid(forks.spawned.pid)


@pytest.mark.rule("FLT-34")
def test_crashes_of_sessions_leave_a_trace_without_data(forks: ForkProcess) -> None:
    pid, pidfd = forks.fork(1, "idle")
    forks.note("idle")
    children.send_signal(pidfd, signal.SIGUSR1)
    trace = forks.base / "h" / "logs" / "fork.trace"
    end = time.monotonic() + 10
    while "stubs/session.py" not in trace.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    children.send_signal(pidfd, signal.SIGSEGV)
    assert forks.receive() == ({"exited": 1, "status": -11}, -1)
    assert "Segmentation fault" in trace.read_text()
    assert pid > 0


def test_it_is_single_threaded_and_has_preloaded_what_it_was_told(forks: ForkProcess) -> None:
    assert len(os.listdir(f"/proc/{forks.spawned.pid}/task")) == 1


@pytest.mark.rule("FLT-29")
def test_sessions_end_with_their_parent(forks: ForkProcess) -> None:
    pids = [forks.fork(run, name)[0] for run, name in enumerate(("idle", "deaf", "parent"), 1)]
    pids.append(forks.note("parent")["pid"])
    children.send_signal(forks.spawned.pidfd, signal.SIGKILL)
    assert ended(pids, 2.0) == []


@pytest.mark.rule("FLT-29")
def test_it_ends_when_the_supervisors_lifeline_is_cut(forks: ForkProcess) -> None:
    pid, _ = forks.fork(1, "idle")
    forks.note("idle")
    os.close(forks.ours)
    forks.ours = -1
    assert children.has_ended(forks.spawned.pidfd, 2)
    assert ended([pid], 2.0) == []


def test_it_ends_when_its_channel_is_closed_or_it_is_told_to(base: Path) -> None:
    for how in ("channel", "signal"):
        made = ForkProcess(base)
        made.receive()
        if how == "channel":
            made.spawned.channel.shutdown(socket.SHUT_RDWR)
        else:
            children.send_signal(made.spawned.pidfd, signal.SIGTERM)
        assert children.has_ended(made.spawned.pidfd, 5)
        assert children.reap(made.spawned.pidfd) == 0
        made.close()


@pytest.mark.rule("FLT-53")
def test_no_room_for_a_process_is_an_answer(base: Path) -> None:
    """Limited to the descriptors it has, it cannot hand over a pidfd; it says so and lives."""
    made = ForkProcess(base)
    made.receive()
    try:
        import resource

        taken = {int(fd) for fd in os.listdir(f"/proc/{made.spawned.pid}/fd")}
        free = min(set(range(1_000)) - taken)
        resource.prlimit(made.spawned.pid, resource.RLIMIT_NOFILE, (free, 1_024))
        order = replace(made.order, role="session", session=ref("idle"), nonce="1" * 32)
        made.spawned.channel.send(b'{"fork":1}\n' + order.to_json())
        packet, _ = made.receive()
        assert packet["refused"] == 1
        resource.prlimit(made.spawned.pid, resource.RLIMIT_NOFILE, (1_024, 1_024))
        assert made.fork(2, "brief")[0] > 0
        assert made.receive()[0] == {"exited": 2, "status": 0}
    finally:
        made.close()


def test_the_words_of_a_dying_process_are_read_without_its_data() -> None:
    fd = os.memfd_create("stderr")
    os.write(fd, b"noise\n")
    assert children.last_words(fd) == ""
    os.write(
        fd,
        b"Traceback (most recent call last):\n"
        b'  File "/usr/lib/python3/runpy.py", line 7, in x\n'
        b'  File "/srv/x/storage/actor.py", line 42, in y\n'
        b"    secret()\n"
        b"callboard.errors.Internal: my secret\n",
    )
    assert children.last_words(fd) == "callboard.errors.Internal at x/storage/actor.py:42"
    os.close(fd)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, []),
        ("", []),
        (".:lib", []),
        ("/a:.:/b:", ["/a", "/b"]),
    ],
)
def test_the_environment_names_no_folder_relative_to_another(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: list[str]
) -> None:
    if before is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", before)
    monkeypatch.setenv("X", "1")
    found = children.child_environment()
    root = str(Path(callboard.__file__).resolve().parents[1])
    assert found["X"] == "1"
    assert [p for p in found.get("PYTHONPATH", "").split(":") if p and p != root] == after


def test_only_children_py_starts_signals_or_waits_for_a_process() -> None:
    """Habit 7: one file may."""
    words = (
        "os.fork",
        "os.kill",
        "os.wait",
        "pidfd_send_signal",
        "pidfd_open",
        "subprocess",
        "posix_spawn",
    )
    folder = Path(children.__file__).parent
    found = [
        f"{file.name}: {word}"
        for file in folder.glob("*.py")
        if file.name != "children.py"
        for word in words
        if word in file.read_text()
    ]
    assert found == []


def test_scratch_is_gone(base: Path) -> None:
    """The fixture's folder is short enough for sockets, and private."""
    assert len(str(base)) < 30
    assert tempfile.gettempdir() in str(base)
    shutil.rmtree(base)
    base.mkdir()
