"""Settings: four places in order, one frozen value, nothing unknown, nothing unsafe."""

import json
import math
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from callboard import limits
from callboard.config import PREFIX, Settings, load_settings
from callboard.errors import CallboardError, HomeUnsafe, InvalidRequest

LIMITS = {
    "resident_sessions": "RESIDENT_SESSIONS_MAX",
    "resident_idle_ms": "RESIDENT_IDLE_MS",
    "active_turns": "ACTIVE_TURNS_MAX",
    "turn_queue": "TURN_QUEUE_MAX",
    "activation_queue": "ACTIVATION_QUEUE_MAX",
    "activation_queue_bytes": "ACTIVATION_QUEUE_BYTES_MAX",
    "client_connections": "CLIENT_CONNECTIONS_MAX",
    "checkpoint_ms": "CHECKPOINT_MS",
    "checkpoint_bytes": "CHECKPOINT_BYTES",
    "journal_segment_bytes": "JOURNAL_SEGMENT_BYTES",
}


@pytest.fixture(autouse=True)
def user_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the folders of whoever runs the tests out of them."""
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


def write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def refusal(load: Callable[[], object]) -> tuple[object, object]:
    with pytest.raises(InvalidRequest) as caught:
        load()
    return caught.value.carried["field"], caught.value.carried["reason"]


def in_environ(**variables: str) -> tuple[object, object]:
    return refusal(lambda: load_settings(environ=variables))


def in_flags(**flags: object) -> tuple[object, object]:
    return refusal(lambda: load_settings(flags, environ={}))


def in_file(tmp_path: Path, text: str | bytes) -> tuple[object, object]:
    file = write(tmp_path / "c.toml", text)
    return refusal(lambda: load_settings(environ={}, file=file))


def test_the_defaults_are_the_limits(tmp_path: Path) -> None:
    settings = load_settings(environ={})
    for name, limit in LIMITS.items():
        assert getattr(settings, name) == getattr(limits, limit)
    assert settings.home == tmp_path / "xdg_data_home/callboard"
    assert settings.preload == ()
    assert settings.log_level == "info"
    assert set(Settings.model_fields) == {*LIMITS, "home", "preload", "log_level"}


def test_a_later_place_wins(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", 'active_turns = 2\nturn_queue = 2\nlog_level = "error"')
    environ = {"CALLBOARD_ACTIVE_TURNS": "3", "CALLBOARD_TURN_QUEUE": "3", "PATH": "/bin"}
    settings = load_settings({"turn_queue": 4, "log_level": None}, environ, file)
    assert (settings.active_turns, settings.turn_queue) == (3, 4)
    assert (settings.log_level, settings.activation_queue) == ("error", 1024)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALLBOARD_ACTIVE_TURNS", "7")
    assert load_settings().active_turns == 7


def test_where_the_file_is_looked_for(tmp_path: Path) -> None:
    write(tmp_path / "xdg_config_home/callboard/config.toml", "active_turns = 2")
    other = write(tmp_path / "other.toml", "active_turns = 3")
    third = write(tmp_path / "third.toml", "active_turns = 4")
    environ = {"CALLBOARD_CONFIG": str(other)}
    assert load_settings(environ={}).active_turns == 2
    assert load_settings(environ=environ).active_turns == 3
    assert load_settings(environ=environ, file=third).active_turns == 4


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    gone = tmp_path / "gone.toml"
    assert in_environ(CALLBOARD_CONFIG=str(gone)) == ("config", "missing")
    assert refusal(lambda: load_settings(environ={}, file=gone)) == ("config", "missing")


def test_nothing_is_read_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "callboard.toml", "active_turns = 2")
    write(tmp_path / "config.toml", "active_turns = 2")
    write(tmp_path / ".env", "CALLBOARD_ACTIVE_TURNS=2")
    monkeypatch.chdir(tmp_path)
    assert load_settings(environ={}).active_turns == limits.ACTIVE_TURNS_MAX


@pytest.mark.parametrize("key", ["active_turn", "ACTIVE_TURNS", "limits", "home_dir", "a.b"])
def test_an_unknown_key_is_named(tmp_path: Path, key: str) -> None:
    assert in_file(tmp_path, f'"{key}" = 1') == (key, "unknown")
    assert in_flags(**{key: 1}) == (key, "unknown")


@pytest.mark.parametrize(
    "name", ["CALLBOARD_ACTIVE_TURN", "CALLBOARD_active_turns", "CALLBOARD_", "CALLBOARD_1"]
)
def test_an_unknown_variable_is_named(name: str) -> None:
    assert in_environ(**{name: "1"}) == (name, "unknown")


def test_variables_that_are_no_settings() -> None:
    environ = {"CALLBOARD": "1", "CALLBOARD_USER_SHELL": "1", "CALLBOARD_FAULT": "x", "HOME": "y"}
    assert load_settings(environ=environ) == load_settings(environ={})


def test_the_message_says_where_and_what_was_meant(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", "active_turn = 1")
    with pytest.raises(InvalidRequest, match=r"c\.toml; did you mean active_turns\?"):
        load_settings(environ={}, file=file)
    with pytest.raises(InvalidRequest, match=r"from CALLBOARD_TURN_QUEUE.* from 1 to 100000"):
        load_settings(environ={"CALLBOARD_TURN_QUEUE": "0"})


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_keeps_to_its_range(name: str) -> None:
    low, high = limits.RANGES[LIMITS[name]]
    for value in (low, high):
        assert getattr(load_settings({name: value}, {}), name) == value
        environ = {PREFIX + name.upper(): str(value)}
        assert getattr(load_settings(environ=environ), name) == value
    for value in (low - 1, high + 1, 0, -1, 10**30):
        assert in_flags(**{name: value}) == (name, "out_of_range")
        assert in_environ(**{PREFIX + name.upper(): str(value)}) == (name, "out_of_range")


@pytest.mark.parametrize("value", [1.5, 2.0, math.inf, math.nan, True, "2", b"2", [2], {"x": 2}])
def test_a_limit_is_a_whole_number(value: object) -> None:
    assert in_flags(active_turns=value) == ("active_turns", "type")


@pytest.mark.parametrize("text", ["1.5", "2.0", "inf", "true", '"2"', "[2]", "{x = 2}", "07:32:00"])
def test_a_limit_in_the_file_is_a_whole_number(tmp_path: Path, text: str) -> None:
    assert in_file(tmp_path, f"active_turns = {text}") == ("active_turns", "type")


@pytest.mark.parametrize(
    "text", ["", " ", "x", "1.5", "inf", "1_0", "0x10", " 2", "2\n", "٣", "--2"]
)
def test_a_limit_in_the_environment_is_a_whole_number(text: str) -> None:
    assert in_environ(CALLBOARD_ACTIVE_TURNS=text) == ("active_turns", "format")


def test_thousands_of_digits_are_out_of_range() -> None:
    assert in_environ(CALLBOARD_ACTIVE_TURNS="9" * 9000) == ("active_turns", "out_of_range")


@pytest.mark.parametrize(
    ("home", "reason"),
    [
        ("", "empty"),
        ("relative/home", "format"),
        ("./home", "format"),
        ("~/home", "format"),
        ("/nul\0here", "nul"),
        ("/" + "x" * 4096, "too_long"),
        ("/" + "ä" * 2048, "too_long"),
        ("/not-utf8-\udcff", "encoding"),
    ],
)
def test_a_home_that_cannot_be_one(home: str, reason: str) -> None:
    assert in_environ(CALLBOARD_HOME=home) == ("home", reason)
    if reason != "nul":
        assert in_environ(CALLBOARD_CONFIG=home) == ("config", reason)


def test_the_longest_home() -> None:
    home = "/" + "x" * 4095
    assert load_settings(environ={"CALLBOARD_HOME": home}).home == Path(home)


def test_a_home_in_the_file_is_absolute(tmp_path: Path) -> None:
    assert in_file(tmp_path, 'home = "x"') == ("home", "format")
    assert in_file(tmp_path, "home = 1") == ("home", "type")


def test_a_home_on_the_command_line_may_be_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings({"home": "x"}, {}).home == tmp_path / "x"
    assert load_settings({"home": Path("/a")}, {"CALLBOARD_HOME": "/b"}).home == Path("/a")
    assert in_flags(home="") == ("home", "empty")


def test_what_is_preloaded(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", 'preload = ["a", "b.c"]')
    assert load_settings(environ={}, file=file).preload == ("a", "b.c")
    assert load_settings(environ={"CALLBOARD_PRELOAD": "a, b.c,"}).preload == ("a", "b.c")
    assert load_settings({"preload": ["x"]}, {}).preload == ("x",)
    assert in_flags(preload=("a;b",)) == ("preload", "format")
    assert in_flags(preload=("a..b",)) == ("preload", "format")
    assert in_flags(preload="abc") == ("preload", "type")
    assert in_flags(preload=[1]) == ("preload", "type")


def test_the_log_level_is_one_of_four() -> None:
    assert load_settings(environ={"CALLBOARD_LOG_LEVEL": "debug"}).log_level == "debug"
    assert in_flags(log_level="loud") == ("log_level", "format")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"active_turns", "malformed"),
        (b"active_turns = 1\nactive_turns = 1", "malformed"),
        (b"\0", "malformed"),
        (b"active_turns = " + b"9" * 5000, "malformed"),
        (b"x = " + b"[" * 30_000, "too_deep"),
        (b"x = '\xff'", "encoding"),
        (b"x = '\xed\xa0\x80'", "encoding"),
        (b"\xef\xbb\xbfactive_turns = 1", "encoding"),
        ("active_turns = 1".encode("utf-16"), "encoding"),
        (b"#" * 65_537, "too_long"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes, reason: str) -> None:
    assert in_file(tmp_path, content) == ("config", reason)


def test_the_largest_file(tmp_path: Path) -> None:
    write(tmp_path / "c.toml", b"#" * limits.CONFIG_BYTES_MAX)
    load_settings(environ={}, file=tmp_path / "c.toml")


@pytest.mark.parametrize(("mode", "tightened"), [(0o644, 0o600), (0o666, 0o600), (0o600, 0o600)])
def test_a_looser_mode_is_tightened(tmp_path: Path, mode: int, tightened: int) -> None:
    file = write(tmp_path / "c.toml", "active_turns = 2", mode)
    assert load_settings(environ={}, file=file).active_turns == 2
    assert stat.S_IMODE(file.stat().st_mode) == tightened


def unsafe(file: Path) -> object:
    with pytest.raises(HomeUnsafe) as caught:
        load_settings(environ={}, file=file)
    assert caught.value.carried["what"] == "config"
    return caught.value.carried["reason"]


def test_a_symlink_is_refused(tmp_path: Path) -> None:
    target = write(tmp_path / "real.toml", "active_turns = 2", 0o644)
    (tmp_path / "c.toml").symlink_to(target)
    assert unsafe(tmp_path / "c.toml") == "symlink"
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


@pytest.mark.timeout(5)
def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        kinds = [unsafe(path) for path in (tmp_path, tmp_path / "fifo", tmp_path / "socket")]
    assert kinds == ["not_regular"] * 3
    assert unsafe(Path("/dev/null")) == "not_regular"


def test_another_users_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "c.toml", "active_turns = 2", 0o644)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert unsafe(file) == "owner"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    below = write(tmp_path / "c.toml", "") / "config.toml"
    assert refusal(lambda: load_settings(environ={}, file=below)) == ("config", "not_allowed")


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/fd"))
    for _ in range(3):
        unsafe(tmp_path)
        in_file(tmp_path, b"#" * 65_537)
    assert set(os.listdir("/dev/fd")) == before


def test_settings_are_frozen_and_closed() -> None:
    settings = load_settings(environ={})
    with pytest.raises(ValidationError):
        settings.active_turns = 1
    with pytest.raises(ValidationError):
        Settings.model_validate({"home": Path("/x"), "else": 1})


def test_a_child_process_gets_the_same_settings() -> None:
    settings = load_settings({"home": "/a ä", "preload": ["x.y"], "log_level": "debug"}, {})
    text = settings.model_dump_json()
    assert Settings.model_validate_json(text) == settings
    assert json.loads(text)["home"] == "/a ä"
    for damage in ({"home": "x"}, {"active_turns": 0}, {"else": 1}, {"preload": ["a b"]}):
        with pytest.raises(ValidationError):
            Settings.model_validate_json(json.dumps({**json.loads(text), **damage}))


def test_every_refusal_is_typed(tmp_path: Path) -> None:
    """Whatever stands in the file, a caller has one class to catch."""
    for content in (b"=", b"[a]", b"home = []", b"preload = {}", b"[[home]]", b"log_level = 1"):
        file = write(tmp_path / "c.toml", content)
        with pytest.raises(CallboardError):
            load_settings(environ={}, file=file)
