"""Which format a file is in: the named one, or the one that is surest."""

import subprocess
import sys
from collections.abc import Iterator
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.errors import ImportFormatUnknown
from callboard.importers.port import ImportItem, ImportLimits
from callboard.importers.registry import Formats, choose, formats
from callboard.limits import IMPORT_SNIFF_BYTES
from tests.importers.reading import DATA, ROOT

ALL = ["claude-code", "codex", "callboard-script"]


class Sure:
    """A format that is so sure of every file."""

    def __init__(self, name: str, score: int) -> None:
        self.name, self.score, self.seen = name, score, b""

    def sniff(self, head: bytes, file_name: str) -> int:
        self.seen = head
        return self.score

    def read(self, stream: BinaryIO, limits: ImportLimits) -> Iterator[ImportItem]:
        return iter(())


@pytest.mark.rule("IMP-3")
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("claude.jsonl", "claude-code"),
        ("codex.jsonl", "codex"),
        ("codex_exec.jsonl", "codex"),
        ("script.jsonl", "callboard-script"),
    ],
)
def test_each_sample_is_recognised(file: str, name: str) -> None:
    head = (DATA / file).read_bytes()
    assert choose(head, file).name == name
    assert choose(b"\xef\xbb\xbf" + head.replace(b"\n", b"\r\n"), "x").name == name


@pytest.mark.rule("IMP-3")
def test_a_first_line_longer_than_the_head_is_recognised() -> None:
    def head(start: bytes, filler: bytes) -> bytes:
        return (start + filler * IMPORT_SNIFF_BYTES)[:IMPORT_SNIFF_BYTES]

    codex = b'{"timestamp":"2026-01-01T00:00:00Z","type":"session_meta","payload":{"id":"'
    assert choose(head(codex, b"x"), "rollout-1.jsonl").name == "codex"
    assert choose(head(codex, b"x"), "any").name == "codex"
    claude = b'{"parentUuid":null,"isSidechain":false,"sessionId":"s","type":"user","message":"'
    assert choose(head(claude, b"x"), "any").name == "claude-code"


@pytest.mark.rule("IMP-3")
@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\0" * 100,
        b"hello",
        b"{}",
        b'{"type":"user"}',
        b'{"type":"session","id":"x","version":3}',
        b'{"uuid":"u","sessionId":"s","isSidechain":false,"type":"user","provenance":"real_user"}',
        b'{"type":"session.start","data":{},"id":"x","timestamp":"","parentId":null}',
        b'{"sessionId": "x",\n "messages": []\n}',
        b'{"format":"callboard-script-2"}',
    ],
)
def test_other_files_are_not_recognised(head: bytes) -> None:
    with pytest.raises(ImportFormatUnknown) as caught:
        choose(head, "other.jsonl")
    assert caught.value.carried == {"candidates": ALL}
    assert "other.jsonl" in str(caught.value)


@pytest.mark.rule("IMP-3")
def test_the_given_name_decides() -> None:
    assert choose(b"anything", "x", "codex").name == "codex"
    with pytest.raises(ImportFormatUnknown) as caught:
        choose(b"anything", "x", "word")
    assert caught.value.carried == {"candidates": ALL}


@pytest.mark.rule("IMP-3")
@pytest.mark.parametrize(
    ("scores", "chosen", "candidates"),
    [
        ({"a": 50, "b": 49}, "a", None),
        ({"a": 51, "b": 100, "c": 99}, "b", None),
        ({"a": 49, "b": 49}, None, ["a", "b"]),
        ({"a": 90, "b": 60, "c": 90}, None, ["a", "c"]),
        ({}, None, []),
    ],
)
def test_the_single_highest_score_of_50_or_more(
    scores: dict[str, int], chosen: str | None, candidates: list[str] | None
) -> None:
    known = Formats(*(Sure(name, score) for name, score in scores.items()))
    if chosen:
        assert known.choose(b"", "x").name == chosen
        return
    with pytest.raises(ImportFormatUnknown) as caught:
        known.choose(b"", "x")
    assert caught.value.carried == {"candidates": candidates}


@pytest.mark.rule("IMP-3")
def test_only_the_first_64_kib_are_sniffed() -> None:
    sure = Sure("a", 50)
    Formats(sure).choose(b"x" * (IMPORT_SNIFF_BYTES + 1), "x")
    assert len(sure.seen) == 65_536


@pytest.mark.rule("IMP-1")
def test_formats_are_plugged_in() -> None:
    known = Formats(Sure("a", 60))
    known.add(Sure("b", 70))
    assert known.names == ["a", "b"]
    assert known.choose(b"", "x").name == "b"
    with pytest.raises(ValueError, match="already"):
        known.add(Sure("b", 1))


@pytest.mark.rule("IMP-1")
def test_the_port_knows_no_format() -> None:
    code = (
        "import sys, callboard.importers.port, callboard.importers.registry;"
        "print(*[m for m in sys.modules if m.startswith('callboard.importers.')"
        " and m.rpartition('.')[2] not in ('port', 'registry')])"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert child.stdout.split() == []


@given(st.binary(max_size=300), st.text(max_size=20))
def test_sniffing_any_bytes_gives_a_score(head: bytes, file_name: str) -> None:
    for name in ALL:
        assert 0 <= choose(b"", "", name).sniff(head, file_name) <= 100
    assert formats().names == ALL
