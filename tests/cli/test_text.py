"""Text from anywhere on a terminal: shown, never obeyed."""

import io
import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.cli import output
from callboard.cli.text import block, escape, escape_json, instant, shorten

HOSTILE = [
    "ok\nerror: forged line",
    "a\r\x1b[2Kforged",
    "\x1b]0;title\x07",
    "\x1b]52;c;cm0gLXJm\x07",
    "\x9b31mC1",
    "\u202egpj.exe",
    "x\x00y",
    "\ud800",
    "\x1b[8mhidden\x1b[0m",
    "a\u2028b\u2029c",
    "\x85NEL\x7f\x0b\x0c\x1c",
]
OBEYED = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
ANY_TEXT = st.text(st.characters(exclude_categories=()))


@pytest.mark.rule("FLT-60")
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_one_line_that_does_nothing(text: str) -> None:
    line = escape(text)
    assert not OBEYED.search(line)
    assert line.splitlines() == [line]
    line.encode()


@pytest.mark.rule("FLT-60")
@given(ANY_TEXT)
def test_any_text_is_one_line_that_does_nothing(text: str) -> None:
    line = escape(text)
    assert not OBEYED.search(line)
    assert len(line.splitlines()) <= 1


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_what_does_nothing_stays_as_it_is(text: str) -> None:
    assert escape(text) == text


@given(ANY_TEXT)
def test_a_block_has_the_lines_that_the_text_has(text: str) -> None:
    lines = block(text)
    assert len(lines) == text.count("\n") + 1
    assert not any(OBEYED.search(line) for line in lines)


@pytest.mark.rule("FLT-60")
@given(ANY_TEXT)
def test_json_stays_the_same_json(text: str) -> None:
    for spelled in (json.dumps({text: [text]}), json.dumps({text: [text]}, ensure_ascii=False)):
        safe = escape_json(spelled)
        assert json.loads(safe) == {text: [text]}
        assert not OBEYED.search(safe)


@given(ANY_TEXT, st.integers(1, 50))
def test_a_shortened_text_fits(text: str, chars: int) -> None:
    assert len(shorten(text, chars)) <= chars


def test_an_instant_has_a_zone() -> None:
    assert re.fullmatch(r"2026-01-0\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", instant(1_767_312_000_000_000))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.rule("FLT-60")
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_table_of_hostile_cells_has_its_rows_and_nothing_else(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")
    written = stream()
    monkeypatch.setattr(sys, "stdout", written)
    output.table(("n", "title [red]"), [(str(n), text) for n, text in enumerate(HOSTILE)])
    text = written.getvalue()
    assert "\x1b" not in text
    lines = [line for line in text.split("\n") if line.strip(" ─")]
    assert len(lines) == len(HOSTILE) + 1
    assert "[red]" in lines[0]
    assert not any(OBEYED.search(line.replace("\t", "")) for line in lines)


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    output.table(("a", "b"), [("1", "x" * 500)])
    assert written.getvalue() == f"a\tb\n1\t{'x' * 500}\n"
