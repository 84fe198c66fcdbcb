"""The limit tables of the specification pages and callboard.limits say the same."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from callboard import limits

SPEC = Path(__file__).parents[1] / "docs/spec"
SECTIONS = {
    "runtime": "## 7. Limits",
    "lifecycle": "## 7. Limits",
    "host": "## 7 Limits",
    "reliability": "## 7. Limits",
    "beyond": "## 2. Records and limits",
}
ROW = re.compile(r"^\| ([A-Z][A-Z0-9_]+) \| ([^|]+?) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)

ON_NO_PAGE = {"PROTOCOL", "RECORD_FORMAT", "STORAGE_FORMAT", "CONFIG_BYTES_MAX", "RANGES"}
FIXED_BY_THE_PAGES = {"CHECKPOINT_MS", "CHECKPOINT_BYTES", "JOURNAL_SEGMENT_BYTES"}


class Row(NamedTuple):
    page: str
    name: str
    text: str


def rows() -> Iterator[Row]:
    for page, heading in SECTIONS.items():
        text = (SPEC / f"{page}.md").read_text()
        section = text.partition(f"\n{heading}")[2].partition("\n## ")[0]
        for name, value in ROW.findall(section):
            yield Row(page, name, value)


ROWS = list(rows())


def number(text: str) -> int:
    return int(text.replace(",", ""))


def meant(text: str) -> object:
    """Read the value of a row, without the range and the remark behind it."""
    value = re.sub(r" \(.*\)$", "", text)
    if value == "unset":
        return None
    if re.fullmatch(r"[\d,]+", value):
        return number(value)
    return float(value) if re.fullmatch(r"\d+\.\d+", value) else tuple(value.split(", "))


def configurable(text: str) -> tuple[int, int] | None:
    if match := re.search(r"([\d,]+)\.\.([\d,]+)", text):
        return number(match[1]), number(match[2])
    if match := re.search(r"≥ ([\d,]+)", text):
        return number(match[1]), limits.INT_ABS_MAX
    return None


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_limit_is_its_row(row: Row) -> None:
    value = getattr(limits, row.name)
    assert value == meant(row.text)
    assert type(value) is type(meant(row.text))
    if row.name not in FIXED_BY_THE_PAGES:
        assert limits.RANGES.get(row.name) == configurable(row.text)


def test_each_limit_has_one_home() -> None:
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names)) > 300
    assert {row.page for row in ROWS} == set(SECTIONS)
    assert {name for name in vars(limits) if name.isupper()} - ON_NO_PAGE == set(names)


@pytest.mark.parametrize("name", limits.RANGES)
def test_a_range_holds_its_default(name: str) -> None:
    low, high = limits.RANGES[name]
    default = getattr(limits, name)
    assert 0 < low <= high <= limits.INT_ABS_MAX
    assert default is None or low <= default <= high
    if name in FIXED_BY_THE_PAGES:
        assert default == high


@pytest.mark.rule("R1")
def test_the_five_kinds_share_the_inbox_out() -> None:
    kinds = (
        limits.INBOX_USER_ITEMS_MAX,
        limits.INBOX_PEER_ITEMS_MAX,
        limits.INBOX_BACKGROUND_ITEMS_MAX,
        limits.INBOX_SHELL_ITEMS_MAX,
        limits.INBOX_RECOVERY_ITEMS_MAX,
    )
    assert kinds == (20, 20, 100, 10, 10)
    assert sum(kinds) == limits.INBOX_ITEMS_MAX == 160
    assert limits.TURN_INPUT_IDS_MAX == 120


def asserted_on_the_page() -> list[str]:
    text = (SPEC / "reliability.md").read_text()
    sentence = re.search(r"^Asserted beneath them: (.+)\.$", text, re.MULTILINE)
    assert sentence is not None
    return sentence[1].replace("≤", "<=").replace(" = ", " == ").split("; ")


@pytest.mark.parametrize("relation", asserted_on_the_page())
def test_a_relation_of_the_page_holds_and_is_asserted(relation: str) -> None:
    assert eval(relation, dict(vars(limits)))
    source = Path(limits.__file__).read_text()
    assert f"assert {relation.replace(' / ', ' // ')}\n" in source


def test_a_broken_relation_stops_the_import() -> None:
    source = Path(limits.__file__).read_text()
    broken = source.replace("INBOX_USER_ITEMS_MAX: Final[int] = 20", "INBOX_USER_ITEMS_MAX = 21")
    assert broken != source
    child = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True)
    assert child.returncode == 1
    assert "AssertionError" in child.stderr


def test_names_end_in_their_unit() -> None:
    """Architecture, how to read, 10: the unit stands before MAX."""
    for row in ROWS:
        assert not re.search(r"_MAX_(MS|BYTES|CHARS|ITEMS)$", row.name)
