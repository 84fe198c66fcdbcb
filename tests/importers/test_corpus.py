"""Every real transcript at hand is read, and what is bad in it is counted."""

from pathlib import Path

import pytest

from callboard.importers.lines import Good, json_lines
from callboard.importers.port import (
    ImportHeader,
    ImportLimits,
    ImportSkipped,
    ImportToolCall,
    ImportTurn,
    read_items,
)
from callboard.importers.registry import choose
from callboard.importers.script import read_transcript
from callboard.limits import IMPORT_SNIFF_BYTES
from tests.importers.reading import CORPUS, of

FOLDERS = ("claude-code", "codex", "derived")
FILES = sorted(path for folder in FOLDERS for path in (CORPUS / folder).glob("*.jsonl"))
SKIPPED = {
    "d-nul-block-mid-file.jsonl": [(13, "nul_bytes")],
    "d-torn-mid-record.jsonl": [(12, "torn")],
    "d-two-writers-interleaved.jsonl": [(4, "not_json"), (5, "not_json")],
}

pytestmark = pytest.mark.skipif(
    not FILES, reason=f"there is no folder {Path('..', 'shared', 'corpus')} beside the repository"
)


@pytest.fixture(params=FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def path(request: pytest.FixtureRequest) -> Path:
    assert isinstance(request.param, Path)
    return request.param


@pytest.mark.rule("IMP-1")
@pytest.mark.rule("IMP-3")
def test_each_file_is_recognised_and_read(path: Path) -> None:
    with path.open("rb") as stream:
        importer = choose(stream.read(IMPORT_SNIFF_BYTES), path.name)
        assert path.parent.name in (importer.name, "derived")
        stream.seek(0)
        items = list(read_items(importer, stream, ImportLimits()))
        stream.seek(0)
        values = sum(isinstance(each, Good) for _, each in json_lines(stream, ImportLimits()))
    skipped = [(item.line, item.reason) for item in of(items, ImportSkipped)]
    assert skipped == SKIPPED.get(path.name, [])
    assert len(items) - len(skipped) >= values
    assert {item.session for item in items} - {""} == {h.session for h in of(items, ImportHeader)}
    assert of(items, ImportTurn)
    assert of(items, ImportToolCall)


def test_each_file_can_be_played(path: Path) -> None:
    script = read_transcript(path)
    assert script.turns
    assert all(turn.user.strip() for turn in script.turns)
    assert sum(len(turn.steps) for turn in script.turns) > 0


@pytest.mark.parametrize("folder", ["claude-code", "codex"])
def test_there_are_five_different_ones_of_each_format(folder: str) -> None:
    scripts = [read_transcript(path) for path in FILES if path.parent.name == folder]
    assert len({repr(script.turns) for script in scripts}) >= 5


def test_a_grown_file_begins_as_it_did_before() -> None:
    first, second = (read_transcript(CORPUS / "codex" / f"cx-growth-{n}.jsonl") for n in (1, 2))
    kept = len(first.turns) - 1  # the last turn went on
    assert second.turns[:kept] == first.turns[:kept]
