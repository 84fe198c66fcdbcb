"""One JSON object a line, whatever is logged (FLT-60, DUR-8)."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard import logs
from callboard.limits import LOG_FILES_KEPT_MAX, LOG_LINE_CHARS_MAX
from callboard.logs import log_line, open_log

# From tests/faults/README.md, log_safety.py; rules: docs/spec/reliability.md FLT-60.
HOSTILE = [
    "ok\nERROR root: forged line",
    "a\r\x1b[2Kforged",
    "\x1b]0;title\x07",
    "\x1b]52;c;cm0gLXJm\x07",
    "\x9b31mC1",
    "\u202egpj.exe",
    "x\x00y",
    "\ud800",
    "\x1b[8mhidden\x1b[0m",
    "a\u2028b",
    "\x85NEL\x7f",
]


@pytest.mark.rule("FLT-60")
def test_hostile_texts_make_one_line_each_and_no_escape() -> None:
    for text in HOSTILE:
        line = log_line(1, 2, "action", {"text": text, text: 1})
        assert line.count(b"\n") == 1
        assert re.fullmatch(rb"[\x20-\x7e]+\n", line)
        assert json.loads(line)["text"] == text


@pytest.mark.rule("FLT-60")
@given(
    st.dictionaries(
        st.text(max_size=50),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
            max_leaves=20,
        ),
        max_size=40,
    )
)
def test_every_line_is_short_and_whole(facts: dict[str, object]) -> None:
    line = log_line(1, 2, "action", facts)
    assert len(line) <= LOG_LINE_CHARS_MAX + 1
    value = json.loads(line)
    assert value["action"] == "action"
    assert value["pid"] == 2


@pytest.mark.rule("FLT-60")
def test_what_is_too_long_is_cut() -> None:
    value = json.loads(log_line(1, 2, "action", {"a": "x" * 10_000, "b": 7}))
    assert len(value["a"]) == 80
    assert value["b"] == 7
    value = json.loads(
        log_line(1, 2, "x" * 9_000, {f"\x00{n}" * 30: "\x00" * 90 for n in range(99)})
    )
    assert value["cut"] is True


@pytest.mark.rule("FLT-60")
def test_a_log_is_rotated_and_so_many_files_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOG_FILE_BYTES_MAX", 1_000)
    path = tmp_path / "actor.log"
    log = open_log(path)
    for n in range(200):
        log("action", {"n": n})
    files = sorted(tmp_path.iterdir())
    assert len(files) == LOG_FILES_KEPT_MAX
    assert all(file.stat().st_size <= 1_000 for file in files)
    assert json.loads(path.read_text().splitlines()[-1])["n"] == 199
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)


@pytest.mark.rule("FLT-60")
def test_lines_of_many_threads_stay_whole(tmp_path: Path) -> None:
    log = open_log(tmp_path / "actor.log")
    threads = [
        threading.Thread(target=lambda: [log("action", {"n": n}) for n in range(100)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = (tmp_path / "actor.log").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 400


def test_levels(tmp_path: Path) -> None:
    log = open_log(tmp_path / "actor.log", "warning")
    log("a", {})
    log("b", {"level": "error"})
    log("c", {"level": "debug"})
    lines = (tmp_path / "actor.log").read_text().splitlines()
    assert [json.loads(line)["action"] for line in lines] == ["b"]


@pytest.mark.rule("FLT-60")
def test_a_log_that_cannot_be_written_ends_nobody(tmp_path: Path) -> None:
    open_log(tmp_path / "no" / "such" / "folder.log")("action", {})
    target = tmp_path / "target"
    target.write_text("")
    os.symlink(target, tmp_path / "link.log")
    open_log(tmp_path / "link.log")("action", {})
    assert target.read_text() == ""
