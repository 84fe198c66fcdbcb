"""The commands on a plane that runs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import callboard
from callboard.ids import parse_ref
from tests.cli.test_run import ROOT, Ran
from tests.cli.test_text import HOSTILE, OBEYED
from tests.whole import short_folder


@pytest.fixture(scope="module")
def plane() -> Iterator[callboard.Plane]:
    with (
        short_folder() as folder,
        callboard.testing.plane(folder) as running,
    ):
        yield running


def ran(plane: callboard.Plane, *words: str, stdin: bytes = b"") -> Ran:
    return Ran(*words, env={"CALLBOARD_HOME": str(plane.home)}, stdin=stdin)


@pytest.fixture
def session(plane: callboard.Plane, tmp_path: Path) -> str:
    made = ran(plane, "new", "--agent", "echo", "--workspace", str(tmp_path))
    assert made.status == 0, made.err
    return made.out.strip()


def lines(data: str) -> list[str]:
    return data.split("\n")[:-1]


# ---- new, ls, show ----


def test_a_new_session_is_listed_in_its_folder(plane: callboard.Plane, tmp_path: Path) -> None:
    made = ran(
        plane,
        *("new", "--agent", "echo", "--workspace", str(tmp_path), "--title", "of mine"),
        *("--model", "m", "--set", "a=b", "--set", "c=", "--id", "mine", "--json"),
    )
    ref = parse_ref(json.loads(made.out)["session"])
    assert ref.session_id == "mine"
    page = json.loads(ran(plane, "ls", "--workspace", str(tmp_path), "--json").out)
    (row,) = page["rows"]
    assert (row["ref"], row["title"], row["model"]) == (str(ref), "of mine", "m")
    assert row["settings"] == {"a": "b", "c": ""}
    table = lines(ran(plane, "ls", "--workspace", str(tmp_path)).out)
    assert [line.split("\t")[0] for line in table] == ["session", "mine"]
    assert str(tmp_path) in ran(plane, "ls", "--all").out
    again = ran(plane, "new", "--agent", "echo", "--workspace", str(tmp_path), "--id", "mine")
    assert again.status == 1
    assert again.one_line().startswith("session_exists: ")


@pytest.mark.rule("CAT-5", "CUR-2")
def test_pages_of_a_listing_make_a_whole(plane: callboard.Plane, tmp_path: Path) -> None:
    made = {
        ran(plane, "new", "--agent", "echo", "--workspace", str(tmp_path)).out.strip()
        for _ in range(5)
    }
    found, cursors = list[str](), list[str]()
    words = ["ls", "--workspace", str(tmp_path), "--limit", "2", "--json"]
    while not cursors or cursors[-1]:
        page = json.loads(ran(plane, *words, *(["--cursor", cursors[-1]] if cursors else [])).out)
        found += [row["ref"].split("/")[1] for row in page["rows"]]
        cursors.append(page["next_cursor"])
    assert sorted(found) == sorted(made)
    assert len(cursors) == 3
    other = ran(plane, "ls", "--all", "--limit", "2", "--cursor", cursors[0])
    assert other.status == 1
    assert other.one_line().startswith("cursor_scope_mismatch: ")


@pytest.mark.rule("IDN-1")
def test_an_id_that_several_folders_have_is_ambiguous(
    plane: callboard.Plane, tmp_path: Path
) -> None:
    refs = list[str]()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        words = ["new", "--agent", "echo", "--workspace", str(tmp_path / name), "--id", "both"]
        refs.append(json.loads(ran(plane, *words, "--json").out)["session"])
    for words in (["send", "both", "x"], ["show", "both"], ["cancel", "both"], ["watch", "both"]):
        refused = ran(plane, *words)
        assert refused.status == 1
        assert refused.one_line().startswith("session_ambiguous: ")
        assert str(tmp_path / "one") in refused.err
        assert str(tmp_path / "two") in refused.err
    for ref in refs:
        assert ran(plane, "send", ref, f"to {ref}", "--wait").out == f"to {ref}\n"
        assert ran(plane, "show", ref).status == 0
    prefix = ran(plane, "show", "bot")
    assert prefix.one_line().startswith("not_found: ")


# ---- send ----


@pytest.mark.rule("INB-6")
def test_send_and_wait(plane: callboard.Plane, session: str) -> None:
    answered = ran(plane, "send", session, "hello\nyou", "--wait")
    assert (answered.status, answered.out, answered.err) == (0, "hello\nyou\n", "")
    first = ran(plane, "send", session, "again", "--message-id", "m1", "--json")
    receipt = json.loads(first.out)
    assert receipt["accepted"]
    assert not receipt["duplicate"]
    same = ran(plane, "send", session, "again", "--message-id", "m1")
    assert same.out.startswith("accepted m1, known already: ")
    other = ran(plane, "send", session, "other", "--message-id", "m1")
    assert other.status == 1
    assert other.one_line().startswith("request_conflict: ")
    outcome = json.loads(ran(plane, "send", session, "x", "--wait", "--json").out)
    assert (outcome["outcome"], outcome["text"]) == ("completed", "x")


@pytest.mark.rule("REC-9")
def test_send_reads_the_standard_input(plane: callboard.Plane, session: str) -> None:
    answered = ran(plane, "send", session, "-", "--wait", stdin="täglich\n".encode() + b"\xff")
    assert answered.out == "täglich\n�\n"
    nothing = ran(plane, "send", session, "-")
    assert nothing.status == 1
    assert "field=text" in nothing.one_line()
    large = ran(plane, "send", session, "-", stdin=b"x" * 6_000_000)
    assert large.status == 1
    assert large.one_line().startswith("payload_too_large: ")


def test_a_turn_that_fails_is_1(plane: callboard.Plane, tmp_path: Path) -> None:
    words = ["new", "--agent", "no.such.module:agent", "--workspace", str(tmp_path)]
    session = ran(plane, *words).out.strip()
    failed = ran(plane, "send", session, "x", "--wait", "--timeout", "30")
    assert failed.status == 1
    assert failed.one_line().startswith("runtime: ")
    assert " — the input " in failed.one_line()  # kept, or given up after its last attempt


def test_what_takes_too_long_is_4(plane: callboard.Plane, tmp_path: Path) -> None:
    script = tmp_path / "slow.jsonl"
    script.write_text(
        '{"format":"callboard-script","version":1,"name":"slow","source":"","turns":1}\n'
        '{"user":"x","steps":[{"say":"late","delay_ms":5000}]}\n'
    )
    session = slow(plane, tmp_path, script)
    late = ran(plane, "send", session, "x", "--wait", "--timeout", "0.5")
    assert late.status == 4
    assert late.one_line().startswith("deadline_exceeded: ")
    cancelled = ran(plane, "cancel", session, "--json")
    assert json.loads(cancelled.out)["status"] in ("cancelled", "cancelling")


def slow(plane: callboard.Plane, folder: Path, script: Path) -> str:
    setting = f"replay.script={script}"
    words = ["new", "--agent", "replay", "--workspace", str(folder), "--set", setting]
    return ran(plane, *words, "--set", "replay.speed=0.1").out.strip()


def test_cancel_of_nothing_is_1(plane: callboard.Plane, session: str) -> None:
    nothing = ran(plane, "cancel", session)
    assert nothing.status == 1
    assert nothing.one_line().startswith("not_found: ")


# ---- watch ----


@pytest.mark.rule("WCH-1")
def test_watch_follows(plane: callboard.Plane, session: str) -> None:
    watching = subprocess.Popen(
        [sys.executable, "-P", "-m", "callboard", "watch", session, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CALLBOARD_HOME": str(plane.home)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert watching.stdout is not None
    first = json.loads(watching.stdout.readline())
    assert (first["seq"], first["type"]) == (1, "session_created")
    ran(plane, "send", session, "hello", "--wait")
    seen = [first]
    while seen[-1]["type"] != "turn_completed":
        seen.append(json.loads(watching.stdout.readline()))
    watching.send_signal(signal.SIGINT)
    assert watching.wait(10) == 0
    watching.stdout.close()
    assert [record["seq"] for record in seen] == list(range(1, len(seen) + 1))


@pytest.mark.rule("FLT-60")
def test_hostile_texts_are_shown_and_not_obeyed(plane: callboard.Plane, tmp_path: Path) -> None:
    title = "".join(text for text in HOSTILE if text.isprintable() or "\x00" not in text)[:190]
    words = ["new", "--agent", "echo", "--workspace", str(tmp_path), "--title", title]
    session = ran(plane, *[word.encode("utf-8", "replace").decode() for word in words]).out.strip()
    with callboard.connect(plane.home) as client:
        place = client.session(session)
        for text in HOSTILE:
            answer = place.wait(place.send(text))
            assert answer.ok
        count = place.history(limit=500)
        last = max(item.seq for item in count.items if not isinstance(item, tuple))
    shown = ran(plane, "show", session)
    listed = ran(plane, "ls", "--workspace", str(tmp_path))
    answered = ran(plane, "send", session, HOSTILE[2], "--wait")
    for said in (shown, listed, answered):
        assert said.status == 0
        assert not any(OBEYED.search(line.replace("\t", "")) for line in said.out.split("\n"))
    assert len(lines(listed.out)) == 2
    assert len(lines(answered.out)) == 1
    heads = [line for line in lines(shown.out) if line.startswith(("user,", "assistant,"))]
    assert len(heads) == 2 * len(HOSTILE)
    assert last > len(HOSTILE)


# ---- up, down, status ----


def test_status(plane: callboard.Plane, session: str) -> None:
    ran(plane, "send", session, "x", "--wait")
    status = json.loads(ran(plane, "status", "--json").out)
    roles = {process["role"] for process in status["processes"]}
    assert roles == {"supervisor", "storage", "gateway", "fork", "session"}
    text = ran(plane, "status").out
    for pid in (process["pid"] for process in status["processes"][:3]):
        assert f"\t{pid}\t" in text


def test_up_and_down(tmp_path: Path) -> None:
    with short_folder() as folder:
        home = str(folder / "home")
        up = Ran("up", "--detach", "--json", "--home", home)
        assert up.status == 0, up.err
        told = json.loads(up.out)
        assert told["home"] == home
        second = Ran("up", "--detach", "--home", home)
        assert second.status == 1
        assert second.one_line().startswith("home_in_use: ")
        down = Ran("down", "--json", "--home", home)
        assert down.status == 0
        assert json.loads(down.out) == {"stopped": True, "home": home}
        assert Ran("down", "--home", home).status == 3
        assert Ran("up", "--detach", "--home", home).status == 0
        assert Ran("down", "--home", home).status == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_in_the_foreground_stops_in_order(number: signal.Signals) -> None:
    with short_folder() as folder:
        home = str(folder / "home")
        process = in_front(home)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (0, "")
        assert out == ""
        assert Ran("status", "--home", home).status == 3


def in_front(home: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "callboard", "up", "--home", home],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("The plane is up on ")
    return process


def test_up_says_when_its_supervisor_was_killed() -> None:
    with short_folder() as folder:
        home = str(folder / "home")
        process = in_front(home)
        status = json.loads(Ran("status", "--json", "--home", home).out)
        (pid,) = (p["pid"] for p in status["processes"] if p["role"] == "supervisor")
        os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 1
        assert err.startswith("plane_not_running: The supervisor ended by signal 9")
        assert err.count("\n") == 1


def test_a_down_while_somebody_waits(plane: callboard.Plane) -> None:
    """A watch ends with the plane, and says so."""
    with short_folder() as folder:
        home = str(folder / "home")
        Ran("up", "--detach", "--home", home)
        session = Ran(
            "new", "--agent", "echo", "--workspace", str(folder), "--home", home
        ).out.strip()
        found = list[Ran]()
        thread = threading.Thread(
            target=lambda: found.append(Ran("watch", session, "--home", home))
        )
        thread.start()
        time.sleep(1)
        assert Ran("down", "--home", home).status == 0
        thread.join(20)
        (watched,) = found
        assert watched.status in (1, 3)
        assert watched.one_line()
        assert "session_created" in watched.out
