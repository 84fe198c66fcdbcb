"""The demo itself: what it kills, what it leaves behind, and what it says."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from callboard.cli.demo_load import kill_child, parent_of
from callboard.cli.demo_run import cache_folder, fresh_home
from callboard.cli.oracle import oracle_of, read_oracle
from callboard.errors import InvalidRequest
from tests.cli.test_run import ROOT, Ran

SMALL = ("--sessions", "4", "--inputs", "4", "--kills", "4", "--quick")
KEYS = {
    *("accepted", "acknowledged", "pending", "lost", "doubled", "reordered"),
    *("sessions", "kills", "seconds", "receipt_ms", "seed"),
}


@pytest.fixture
def home(base: Path) -> Path:
    return base / "home"


# ---- Killing ----


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.rule("FLT-37")
def test_only_a_living_child_of_the_right_parent_is_killed(
    child: subprocess.Popen[bytes],
) -> None:
    assert parent_of(child.pid) == os.getpid()
    assert not kill_child(child.pid, os.getppid())
    assert not kill_child(child.pid, 1)
    assert not kill_child(1, os.getpid())
    assert not kill_child(0, os.getpid())
    assert not kill_child(os.getpid(), os.getpid())
    assert child.poll() is None
    assert kill_child(child.pid, os.getpid())
    assert child.wait(5) == -signal.SIGKILL
    assert not kill_child(child.pid, os.getpid())
    assert parent_of(child.pid) == 0


@pytest.mark.rule("FLT-37")
def test_what_has_ended_is_not_counted_as_killed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert not kill_child(ended.pid, os.getpid())
    ended.wait()


# ---- Homes ----


def test_a_home_in_use_is_not_touched(home: Path) -> None:
    home.mkdir()
    (home / "mine").touch()
    ran = Ran("demo", "--quick", "--home", str(home))
    assert ran.status == 1
    assert "field=home" in ran.one_line()
    assert [path.name for path in home.parent.iterdir()] == ["home"]
    oracle_of(home).touch()
    (home / "mine").unlink()
    with pytest.raises(InvalidRequest):
        fresh_home(str(home))


def test_clean_homes_of_earlier_demos_are_removed_and_others_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder().is_relative_to(tmp_path)
    for name in ("clean", "dirty"):
        (cache_folder() / name / "home").mkdir(parents=True)
    (cache_folder() / "clean" / "home.clean").touch()
    made = fresh_home(None)
    assert not made.exists()
    assert made.parent.is_dir()
    assert sorted(path.name for path in cache_folder().iterdir()) == sorted(
        ["dirty", made.parent.name]
    )


@pytest.mark.parametrize("text", ["", "{}\n", "not json\n"])
def test_a_transcript_that_cannot_be_played(home: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(text)
    ran = Ran("demo", "--quick", "--home", str(home), "--transcript", str(file))
    assert ran.status == 1
    assert ran.one_line().startswith("import_")
    ran = Ran("demo", "--quick", "--home", str(home), "--transcript", str(tmp_path / "none"))
    assert ran.status == 1
    assert "field=transcript" in ran.one_line()
    assert list(home.parent.iterdir()) == []


def test_a_home_without_an_oracle_cannot_be_judged(home: Path) -> None:
    ran = Ran("demo", "--verify-home", str(home))
    assert ran.status == 1
    assert "field=verify_home" in ran.one_line()


# ---- Whole runs ----


def test_a_run_and_its_verdict(home: Path) -> None:
    ran = Ran("demo", *SMALL, "--seed", "7", "--json", "--home", str(home))
    assert ran.status == 0, ran.err
    assert ran.err == ""
    found = json.loads(ran.out.splitlines()[-1])
    assert found.keys() >= KEYS
    assert (found["sessions"], found["accepted"], found["seed"]) == (4, 16, 7)
    assert (found["lost"], found["doubled"], found["reordered"]) == (0, 0, 0)
    assert found["acknowledged"] + found["pending"] == 16
    assert found["kills"] == {"session": 2, "gateway": 1, "storage": 1, "supervisor": 0}
    assert found["receipt_ms"].keys() == {"p50", "p99"}
    assert len(read_oracle(oracle_of(home))) == 16
    for words in (["--verify-home", str(home)], ["--verify-home", f"{home}/"]):
        judged = Ran("demo", *words, "--json")
        assert judged.status == 0, judged.err
        assert json.loads(judged.out)["accepted"] == 16
    text = Ran("demo", "--verify-home", str(home))
    assert "holds exactly once" in text.out
    planted(home)


def planted(home: Path) -> None:
    """A promise that the home does not keep is found, and named."""
    with oracle_of(home).open("a") as oracle:
        entry = read_oracle(oracle_of(home))[0]._replace(message_id="planted", n=99)
        oracle.write(json.dumps(entry._asdict()) + "\n")
    judged = Ran("demo", "--verify-home", str(home), "--json")
    assert judged.status == 1
    assert json.loads(judged.out)["lost"] == 1
    assert "planted" in judged.one_line()
    assert entry.session in judged.one_line()


def test_the_plane_may_be_up_while_it_is_judged(home: Path) -> None:
    ran = Ran("demo", *SMALL, "--kills", "0", "--home", str(home))
    assert ran.status == 0, ran.err
    assert "accepted" in ran.out
    assert Ran("up", "--detach", "--home", str(home)).status == 0
    try:
        assert Ran("demo", "--verify-home", str(home)).status == 0
    finally:
        Ran("down", "--home", str(home))


class Running:
    """A demo in the middle of its steering."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "callboard", "demo", "--json", "--home", str(home)),
                *("--sessions", "8", "--inputs", "20", "--kills", "4"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        until = time.monotonic() + 30
        while not self.receipts():
            assert time.monotonic() < until
            assert self.process.poll() is None
            time.sleep(0.1)
        time.sleep(2)

    def receipts(self) -> int:
        path = oracle_of(self.home)
        return len(read_oracle(path)) if path.exists() else 0

    def supervisor(self) -> int:
        status = json.loads(Ran("status", "--json", "--home", str(self.home)).out)
        (pid,) = (p["pid"] for p in status["processes"] if p["role"] == "supervisor")
        return int(pid)


def nobody_is_left(home: Path) -> bool:
    return Ran("status", "--home", str(home)).status == 3


@pytest.mark.rule("FLT-29")
def test_a_supervisor_that_is_killed_in_the_middle(home: Path) -> None:
    running = Running(home)
    os.kill(running.supervisor(), signal.SIGKILL)
    out, err = running.process.communicate(timeout=30)
    assert running.process.returncode == 1
    assert out == ""
    message = json.loads(err)["error"]["message"]
    assert f"callboard up --home {home}" in message
    assert f"callboard demo --verify-home {home}" in message
    assert nobody_is_left(home)
    assert Ran("demo", "--verify-home", str(home)).status == 0
    assert Ran("up", "--detach", "--home", str(home)).status == 0
    try:
        judged = Ran("demo", "--verify-home", str(home), "--json")
        assert judged.status == 0, judged.err
        assert json.loads(judged.out)["accepted"] == running.receipts() > 0
    finally:
        Ran("down", "--home", str(home))


def test_a_demo_that_is_interrupted_stops_its_plane(home: Path) -> None:
    running = Running(home)
    running.process.send_signal(signal.SIGINT)
    running.process.communicate(timeout=30)
    assert running.process.returncode == 130
    assert nobody_is_left(home)
    assert Ran("demo", "--verify-home", str(home)).status == 0


def test_a_demo_that_is_killed_takes_its_plane_with_it(home: Path) -> None:
    running = Running(home)
    running.process.kill()
    running.process.communicate(timeout=30)
    until = time.monotonic() + 15
    while not nobody_is_left(home):
        assert time.monotonic() < until
    assert Ran("demo", "--verify-home", str(home)).status == 0
