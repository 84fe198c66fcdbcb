"""verify and doctor on the command line."""

import json
import os
from pathlib import Path

import pytest

import callboard
from callboard.home import Home
from tests.cli.test_run import Ran
from tests.storage.small_home import flip, offset_of, small_home, snapshot, the

pytestmark = pytest.mark.damages_home("it is what these tests are about")


@pytest.fixture
def home(base: Path) -> Home:
    return small_home(base / "home")


def damage(home: Home) -> bytes:
    """Flip a bit of a line; returns what the transcript was."""
    path = home.transcript(the("done"))
    before = path.read_bytes()
    flip(path, offset_of(path, 5) + 30)
    return before


def objects(ran: Ran) -> list[dict[str, object]]:
    return [json.loads(line) for line in ran.out.split("\n")[:-1]]


def test_a_sound_home_is_0(home: Home) -> None:
    ran = Ran("verify", "--home", str(home.root))
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.endswith("3 sessions, 24 records, as of commit 24: nothing is wrong\n")
    (last,) = objects(Ran("verify", "--home", str(home.root), "--json"))
    assert last["findings"] == 0
    assert (last["sessions"], last["artifacts"], last["plane_up"]) == (3, 1, False)
    ran = Ran("doctor", "--home", str(home.root))
    assert (ran.status, ran.out) == (0, "Nothing is wrong\n")
    assert Ran("doctor", "--repair", "--home", str(home.root)).out == "Nothing is wrong\n"


def test_a_finding_is_1_and_names_file_place_and_way_out(home: Home) -> None:
    damage(home)
    before = snapshot(home)
    ran = Ran("verify", "--home", str(home.root))
    assert ran.status == 1
    first, way_out, last = ran.out.split("\n")[:-1]
    offset = offset_of(home.transcript(the("done")), 5)
    place = f"sessions/{the('done')}/transcript.jsonl, line 5, byte {offset}: "
    assert first.startswith(f"bad_line: {place}")
    assert way_out.startswith("  way out: callboard doctor")
    assert last.endswith("1 finding")
    assert ran.one_line().startswith("findings: 1 finding — callboard doctor")
    *found, total = objects(Ran("verify", "--home", str(home.root), "--json"))
    assert [one["finding"] for one in found] == [
        {
            "kind": "bad_line",
            "file": f"sessions/{the('done')}/transcript.jsonl",
            "line": 5,
            "offset": offset,
            "session": str(the("done")),
            "message": "The line is no record of this transcript.",
            "way_out": "callboard doctor says what it can put right, "
            "callboard doctor --repair does it",
        }
    ]
    assert total["findings"] == 1
    assert snapshot(home) == before


def test_doctor_says_first_and_does_then(home: Home) -> None:
    was = damage(home)
    before = snapshot(home)
    ran = Ran("doctor", "--home", str(home.root))
    assert ran.status == 1
    assert f"would put sessions/{the('done')}/transcript.jsonl back as it was" in ran.out
    assert "Nothing was changed; callboard doctor --repair does this" in ran.out
    assert snapshot(home) == before
    *_, action, total = objects(Ran("doctor", "--home", str(home.root), "--json"))
    assert action["action"]
    assert total == {"findings": 1, "actions": 1, "repaired": False}
    ran = Ran("doctor", "--repair", "--home", str(home.root))
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("done: put sessions/")
    assert ran.out.endswith("Nothing is wrong any more\n")
    assert home.transcript(the("done")).read_bytes() == was
    assert Ran("verify", "--home", str(home.root)).status == 0


def test_what_nobody_can_put_right_is_1(home: Home) -> None:
    (home.root / "notes.txt").write_text("mine")
    os.chmod(home.root / "notes.txt", 0o600)
    ran = Ran("doctor", "--repair", "--home", str(home.root))
    assert ran.status == 1
    assert "move it out of the home" in ran.out
    assert ran.one_line().startswith("findings: 1 finding left")
    *_, total = objects(Ran("doctor", "--repair", "--home", str(home.root), "--json"))
    assert total == {"findings": 1, "actions": 0, "repaired": True}


def test_one_session_alone(home: Home) -> None:
    damage(home)
    other = Ran("doctor", "--session", str(the("waits")), "--home", str(home.root))
    assert (other.status, other.out) == (0, "Nothing is wrong\n")
    assert Ran("doctor", "--session", str(the("done")), "--home", str(home.root)).status == 1
    wrong = Ran("doctor", "--session", "x", "--home", str(home.root))
    assert wrong.status == 1
    assert wrong.one_line().startswith("invalid_request: ")


@pytest.mark.parametrize("words", [["verify"], ["doctor"], ["doctor", "--repair"]])
def test_no_home_is_said(words: list[str], tmp_path: Path) -> None:
    ran = Ran(*words, "--home", str(tmp_path / "none"))
    assert ran.status == 1
    assert ran.one_line().startswith("invalid_request: There is no home at ")
    assert not (tmp_path / "none").exists()


@pytest.mark.rule("REC-7")
def test_with_a_plane_verify_reads_and_repair_is_refused(base: Path) -> None:
    with callboard.testing.plane(base) as plane:
        session = plane.create_session(agent="echo", workspace=base)
        assert session.wait(session.send("hello"), timeout=30).ok
        (total,) = objects(Ran("verify", "--home", str(plane.home), "--json"))
        assert (total["findings"], total["plane_up"], total["sessions"]) == (0, True, 1)
        ran = Ran("doctor", "--repair", "--home", str(plane.home))
        assert ran.status == 1
        assert ran.one_line().startswith("home_in_use: ")
        assert Ran("doctor", "--home", str(plane.home)).status == 0
