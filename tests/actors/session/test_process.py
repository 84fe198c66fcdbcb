"""A session in a process of its own, with sockets, signals and threads."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from callboard.messages import CancelResult, Register
from callboard.records import TurnAborted, TurnCompleted, TurnStarted
from tests.actors.session.hall import Hall, hall

AGENTS = "tests.actors.session.blocking_agents"


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose path leaves room for a socket's name."""
    return tmp_path_factory.mktemp("s")


def begun(one: Hall) -> None:
    """Send an input and wait until the agent has the thread for itself."""
    one.receipt(one.send("a", permit=True))
    one.wait(lambda: len(one.storage.story()) == 2)
    time.sleep(0.1)


def completed(one: Hall, count: int) -> None:
    one.wait(lambda: len(one.storage.of(TurnCompleted)) == count)
    one.wait(lambda: one.permits == 0)


@pytest.mark.rule("ACC-1", "TLP-1", "RUN-4", "ADM-5")
def test_a_session_lives_from_lease_to_release(folder: Path) -> None:
    with hall(folder, "echo") as one:
        one.start()
        assert one.receipt(one.send("a", permit=True)).mode == "direct"
        completed(one, 1)
        assert one.receipt(one.send("b")).delivery == "current_turn"
        completed(one, 2)
        assert one.storage.story() == ["user: a", "assistant: a", "user: b", "assistant: b"]
        assert one.process is not None
        one.process.send_signal(signal.SIGTERM)
        assert one.exit_status() == 0
        assert one.storage.released


@pytest.mark.rule("TLP-3", "MBX-1", "TEX-14")
def test_an_agent_that_blocks_does_not_stop_steering(folder: Path) -> None:
    with hall(folder, f"{AGENTS}:block") as one:
        one.start()
        begun(one)
        before = time.monotonic()
        receipts = [one.receipt(one.send(f"b{n}")) for n in range(5)]
        assert time.monotonic() - before < 1.5
        assert {receipt.delivery for receipt in receipts} == {"current_turn"}


@pytest.mark.rule("TEX-14", "FLT-26")
def test_an_agent_that_never_yields_ends_with_its_process(folder: Path) -> None:
    with hall(folder, f"{AGENTS}:stuck") as one:
        one.start()
        begun(one)
        answer = one.answer(one.cancel())
        assert isinstance(answer, CancelResult)
        assert answer.status == "cancelling"
        assert one.exit_status() == 70
        one.start()
        assert one.storage.of(TurnAborted)[0].outcome == "cancelled"


@pytest.mark.rule("SHD-1", "R111")
def test_a_stop_with_a_stuck_agent_ends_in_time(folder: Path) -> None:
    with hall(folder, f"{AGENTS}:stuck") as one:
        one.start()
        begun(one)
        assert one.process is not None
        before = time.monotonic()
        one.process.send_signal(signal.SIGTERM)
        assert one.exit_status() == 0
        assert time.monotonic() - before < 5
        assert one.storage.of(TurnAborted)[0].outcome == "indeterminate"
        assert one.storage.released


@pytest.mark.rule("TLP-8")
def test_a_task_that_exits_ends_no_process(folder: Path) -> None:
    with hall(folder, f"{AGENTS}:leave") as one:
        one.start()
        one.receipt(one.send("a", permit=True))
        completed(one, 1)
        one.receipt(one.send("b", permit=True))
        completed(one, 2)
        assert [line["action"] for line in one.log()] == ["agent_task_failed"] * 2


@pytest.mark.rule("R16", "R48", "RTY-4", "RUN-3")
def test_a_killed_process_is_recovered_by_the_next(folder: Path) -> None:
    with hall(folder, "replay", {"replay.speed": "0.1"}) as one:
        one.start()
        one.receipt(one.send("a", permit=True))
        one.wait(lambda: one.storage.heard() == ["a"])
        one.receipt(one.send("b"))
        assert one.process is not None
        one.process.kill()
        assert one.exit_status() == -signal.SIGKILL
        one.start()
        one.wait(lambda: len(one.storage.of(TurnStarted)) == 2)
        (ended,) = one.storage.of(TurnAborted)
        assert (ended.cause, ended.claimed_input_ids) == ("process_restart", ["a"])
        one.wait(lambda: one.storage.heard() == ["a", "b"])
        one.storage.check()


@pytest.mark.rule("FLT-29")
def test_the_end_of_the_supervisor_is_the_sessions(folder: Path) -> None:
    with hall(folder, "echo") as one:
        one.start()
        one.end_supervisor()
        assert one.exit_status(2) == 0
        assert not one.storage.released


@pytest.mark.rule("RUN-13", "DUR-6")
def test_storage_restarts_under_a_busy_session(folder: Path) -> None:
    with hall(folder, "echo") as one:
        one.start()
        for number in range(10):
            request = one.send(f"m{number}", permit=number == 0)
            one.restart_storage()
            assert one.receipt(request).accepted
        one.wait(lambda: one.storage.inbox == {})
        assert one.storage.heard() == [f"m{number}" for number in range(10)]
        one.storage.check()


@pytest.mark.rule("TLP-8", "FLR-1", "DUR-8")
def test_a_failure_is_logged_without_what_it_says(folder: Path) -> None:
    with hall(folder, "no.such.module:agent") as one:
        one.start()
        one.receipt(one.send("a", permit=True))
        one.wait(lambda: one.storage.of(TurnAborted))
        (line,) = one.log()[:1]
        assert (line["action"], line["error"]) == ("agent_failed", "ModuleNotFoundError")
        assert "no.such" not in str(line["at"])


@pytest.mark.rule("ADM-7")
def test_a_session_registers_with_what_it_holds(folder: Path) -> None:
    with hall(folder, "echo") as one:
        one.start()
        (register,) = [b for b in one.told if isinstance(b, Register)]
        assert (register.epoch, register.permit, register.evictable) == (1, False, True)
