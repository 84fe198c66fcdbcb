"""What surrounds every command: exit statuses, one line for an error, never a traceback."""

import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import callboard
from callboard import errors
from callboard.cli import app, output, run
from callboard.errors import CallboardError, DeadlineExceeded, NotFound, Overloaded
from tests.cli.test_text import HOSTILE, OBEYED

ROOT = Path(callboard.__file__).parents[1]


class Ran:
    """One run of the command line as a process of its own."""

    def __init__(
        self, *words: str, env: Mapping[str, str] | None = None, stdin: bytes = b""
    ) -> None:
        self.done = subprocess.run(
            [sys.executable, "-P", "-m", "callboard", *words],
            capture_output=True,
            input=stdin,
            check=False,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        )
        self.status = self.done.returncode
        self.out = self.done.stdout.decode()
        self.err = self.done.stderr.decode()

    def one_line(self) -> str:
        """Give the error, which is one line without a traceback."""
        assert "Traceback" not in self.err
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1
        return self.err.rstrip("\n")


def test_help_is_there_for_every_command(tmp_path: Path) -> None:
    ran = Ran("--help")
    assert ran.status == 0
    for command in app.COMMANDS:
        assert re.search(rf"^  {command.__name__} ", ran.out, re.MULTILINE)
    assert Ran().out == ran.out


@pytest.mark.parametrize(
    "words",
    [
        ["nothing"],
        ["status", "--nothing"],
        ["send", "s"],
        ["new"],
        ["ls", "--limit", "x"],
        ["ls", "--all", "--workspace", "/"],
        ["send", "s", "t", "--mode", "x"],
        ["watch", "s", "--from", "0"],
        ["new", "--agent", "echo", "--set", "novalue"],
        ["demo", "--sessions", "0"],
        ["demo", "--verify-home", ""],
    ],
)
def test_wrong_usage_is_2(words: list[str], tmp_path: Path) -> None:
    ran = Ran(*words, "--home", str(tmp_path / "none")) if words[0] != "nothing" else Ran(*words)
    assert ran.status == 2
    assert ran.out == ""
    assert ran.one_line()


def test_wrong_usage_says_where_help_is() -> None:
    ran = Ran("show")
    assert ran.one_line().startswith("usage: Missing argument")
    assert ran.one_line().endswith("see: callboard show --help")


@pytest.mark.rule("FLT-47")
@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["down"],
        ["send", "s", "x"],
        ["watch", "s"],
        ["cancel", "s"],
        ["new", "--agent=a"],
    ],
)
def test_no_plane_is_3(words: list[str], tmp_path: Path) -> None:
    ran = Ran(*words, "--home", str(tmp_path / "none"))
    assert ran.status == 3
    assert ran.one_line().startswith("plane_not_running: ")
    assert ran.one_line().endswith("callboard up")
    assert not (tmp_path / "none").exists()


def test_an_error_for_a_program_is_json(tmp_path: Path) -> None:
    ran = Ran("status", "--json", "--home", str(tmp_path / "none"))
    assert ran.status == 3
    assert ran.out == ""
    error = json.loads(ran.one_line())["error"]
    assert error["code"] == "plane_not_running"
    ran = Ran("status", "--json", "--nothing")
    assert json.loads(ran.one_line())["error"]["code"] == "usage"


@pytest.mark.parametrize("home", ["", "relative", "x" * 5_000, "/" + "x/" * 2_500])
def test_a_home_in_the_environment_that_is_none_is_2(home: str) -> None:
    for words in (["status"], ["ls", "--all"], ["up"]):
        ran = Ran(*words, env={"CALLBOARD_HOME": home})
        assert ran.status == 2, ran.err
        assert ran.one_line().startswith("invalid_request: ")
        assert "field=home" in ran.one_line()


def test_a_home_on_the_command_line_that_is_none_is_2() -> None:
    assert Ran("status", "--home", "").status == 2
    assert Ran("status", "--home", "x" * 5_000).status == 2
    assert Ran("--home", "", "status").status == 2


def test_a_variable_that_nobody_knows_is_named() -> None:
    ran = Ran("status", env={"CALLBOARD_HOEM": "/x"})
    assert ran.status == 2
    assert "CALLBOARD_HOEM" in ran.one_line()


def test_a_home_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert Ran("status", "--home", str(file)).status == 3
    for words in (["ls", "--all"], ["show", "s"], ["up", "--detach"], ["demo", "--quick"]):
        ran = Ran(*words, "--home", str(file))
        assert ran.status == 1
        assert not ran.one_line().startswith("internal")


def test_the_home_may_stand_before_and_behind_the_command(tmp_path: Path) -> None:
    before = Ran("--home", str(tmp_path / "a"), "ls", "--all", "--json")
    behind = Ran("ls", "--all", "--json", "--home", str(tmp_path / "a"))
    assert before.status == behind.status == 0
    assert before.out == behind.out


@pytest.mark.rule("CAT-8")
def test_a_home_that_is_not_there_lists_nothing(tmp_path: Path) -> None:
    ran = Ran("ls", "--all", "--json", "--home", str(tmp_path / "none"))
    page = json.loads(ran.out)
    assert page["rows"] == []
    assert page["next_cursor"] is None
    assert Ran("ls", "--home", str(tmp_path / "none")).out.startswith("No sessions here")


@pytest.mark.rule("CAT-1")
@pytest.mark.parametrize("limit", ["0", "101", "-1"])
def test_a_limit_out_of_range_is_refused(limit: str, tmp_path: Path) -> None:
    ran = Ran("ls", "--all", "--limit", limit, "--home", str(tmp_path))
    assert ran.status == 1
    assert "field=limit" in ran.one_line()


@pytest.mark.rule("CUR-3")
def test_a_cursor_that_is_none_is_refused(tmp_path: Path) -> None:
    ran = Ran("ls", "--all", "--cursor", "x", "--home", str(tmp_path))
    assert ran.status == 1
    assert ran.one_line().startswith("cursor_invalid: ")


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        [
            "sh",
            "-c",
            f'cd "{gone}" && rmdir "{gone}" && exec "$0" -P -m callboard ls',
            sys.executable,
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CALLBOARD_HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("invalid_request: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.rule("IDN-1", "IDN-2")
@pytest.mark.parametrize(
    ("name", "code"),
    [("nobody", "not_found"), ("a b", "invalid_request"), ("x/y", "invalid_request")],
)
def test_a_session_that_is_not_there(name: str, code: str, tmp_path: Path) -> None:
    ran = Ran("show", name, "--home", str(tmp_path))
    assert ran.status == 1
    assert ran.one_line().startswith(f"{code}: ")


def test_nobody_who_reads_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "callboard", "ls", "--all", "--home", str(tmp_path)],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(writing)
    assert done.stderr == b""


def test_a_door_that_nobody_opens_is_4(tmp_path: Path) -> None:
    """Overloaded: the backlog is full (FLT-47)."""
    from callboard.home import runtime_of

    runtime = runtime_of(tmp_path)
    runtime.root.mkdir(mode=0o700, parents=True)
    runtime.operator_token.write_text("t")
    runtime.operator_token.chmod(0o600)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(runtime.door))
        listener.listen(0)
        others = list[socket.socket]()
        while True:
            other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            others.append(other)
            try:
                other.connect(str(runtime.door))
            except BlockingIOError:
                break
        ran = Ran("status", "--home", str(tmp_path))
        for other in others:
            other.close()
    assert ran.status == 4
    assert ran.one_line().startswith("overloaded: ")


# ---- In this process ----


class Spoken:
    """What a run in this process has said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        self.status = run.main(words)
        self.out, self.err = out.getvalue(), err.getvalue()


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object) -> object:
        raise error

    monkeypatch.setattr("callboard.cli.plane.connected", fail)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotFound(), 1),
        (Overloaded(resource="memory"), 4),
        (DeadlineExceeded(scope="status"), 4),
        (errors.PlaneNotRunning(), 3),
        (errors.PlaneClosing(retry_after_ms=5), 1),
        (output.CommandFailed("what", "why"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(7), 7),
        (MemoryError(), 1),
        (RecursionError(), 1),
    ],
)
def test_each_error_has_its_status(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raising(monkeypatch, error)
    spoken = Spoken(monkeypatch, "status", "--home", str(tmp_path))
    assert spoken.status == status
    assert spoken.out == ""
    assert spoken.err.count("\n") == (0 if isinstance(error, KeyboardInterrupt | SystemExit) else 1)


@pytest.mark.parametrize("cls", CallboardError.__subclasses__(), ids=lambda cls: cls.code)
def test_every_code_is_told_in_one_line(
    cls: type[CallboardError], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raising(monkeypatch, cls())
    spoken = Spoken(monkeypatch, "status", "--home", str(tmp_path))
    assert spoken.status == cls.cli
    assert spoken.err.startswith(f"{cls.code}: ")
    assert spoken.err.count("\n") == 1
    spoken = Spoken(monkeypatch, "status", "--json", "--home", str(tmp_path))
    assert json.loads(spoken.err)["error"]["code"] == cls.code


@pytest.mark.rule("FLT-60")
@pytest.mark.parametrize("text", HOSTILE)
def test_an_error_is_one_harmless_line_whatever_is_in_it(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for error in (NotFound(text), output.CommandFailed("x", text), ValueError(text)):
        raising(monkeypatch, error)
        for words in (["status"], ["status", "--json"]):
            spoken = Spoken(monkeypatch, *words, "--home", str(tmp_path))
            assert spoken.err.count("\n") == 1
            assert not OBEYED.search(spoken.err.rstrip("\n"))


@pytest.mark.rule("DUR-8")
def test_what_nobody_expected_leaves_its_place_in_the_logs_and_no_content(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    raising(monkeypatch, ZeroDivisionError("the secret text"))
    spoken = Spoken(monkeypatch, "status", "--json", "--home", str(tmp_path))
    error = json.loads(spoken.err)["error"]
    assert error["code"] == "internal"
    (line,) = (tmp_path / "logs" / "command.log").read_text().splitlines()
    logged = json.loads(line)
    assert logged["correlation_id"] == error["correlation_id"]
    assert logged["error"] == "ZeroDivisionError"
    assert any("test_run.py" in frame for frame in logged["frames"])
    assert "secret" not in line
    assert "secret" not in spoken.err


def test_without_a_home_it_is_logged_below_the_user_s_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    raising(monkeypatch, ZeroDivisionError())
    Spoken(monkeypatch, "status", "--home", str(tmp_path / "none"))
    assert (tmp_path / "cache" / "callboard" / "logs" / "command.log").exists()
    assert not (tmp_path / "none").exists()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=5)
)
def test_no_words_bring_a_traceback(words: list[str]) -> None:
    monkeypatch = pytest.MonkeyPatch()
    try:
        monkeypatch.setenv("CALLBOARD_HOME", "/nonexistent/callboard")
        spoken = Spoken(monkeypatch, *words)
    finally:
        monkeypatch.undo()
    assert spoken.status in (0, 1, 2, 3)
    assert "Traceback" not in spoken.err
    assert not spoken.err.startswith("internal")
