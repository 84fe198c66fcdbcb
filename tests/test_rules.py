"""The rule counter reads pages, marks and the later list, and judges what it read."""

import json
from pathlib import Path

import pytest

from tests import rules

ARCHITECTURE = """\
7. Ids are never reused;
   retired: AAA-2, AAA-4;
   scenarios R2.
"""
RUNTIME = """\
- **AAA-1** One.
  - a. A fact of **AAA-9**.
- **AAA-2** Retired.
- **AAA-3** Three.
- **BB-1** Other.
| **CCC-1** in a table | x |
- **R1** [x] a / b / c
- **R2** retired
Workload **W1** is no rule.
"""
BEYOND = """\
## 1. Rules
1. not a scenario
## 3. Acceptance (given / when / then)
1. [x] a / b / c
2. [x] a / b / c
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    pages = tmp_path / "docs" / "spec"
    pages.mkdir(parents=True)
    (pages / "architecture.md").write_text(ARCHITECTURE)
    (pages / "runtime.md").write_text(RUNTIME)
    (pages / "beyond.md").write_text(BEYOND)
    (tmp_path / "tests").mkdir()
    return tmp_path


def write_test(root: Path, source: str, name: str = "test_x.py") -> None:
    file = root / "tests" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(source)


def write_later(root: Path, text: str) -> None:
    (root / rules.LATER).write_text(text)


def test_the_pages_define_ids_and_retire_some(root: Path) -> None:
    report = rules.examine(root)
    assert report.rules.ids == ("AAA-1", "AAA-3", "BB-1", "CCC-1")
    assert report.scenarios.ids == ("B1", "B2", "R1")
    assert report.errors == ()


def test_an_id_defined_twice_is_an_error(root: Path) -> None:
    with (root / rules.SPEC / "runtime.md").open("a") as page:
        page.write("- **AAA-1** Again.\n")
    assert rules.examine(root).errors == (
        "docs/spec/runtime.md:10: AAA-1 is defined twice, first at docs/spec/runtime.md:1",
    )


@pytest.mark.parametrize(
    "source",
    [
        'import pytest\n@pytest.mark.rule("AAA-1", "R1")\ndef test() -> None: ...\n',
        'import pytest\npytestmark = pytest.mark.rule("AAA-1", "R1")\n',
        'import pytest\npytestmark = [pytest.mark.rule("AAA-1"), pytest.mark.rule("R1")]\n',
        "import pytest\n"
        'CASES = [pytest.param(1, marks=pytest.mark.rule("AAA-1")),\n'
        '         pytest.param(2, marks=[pytest.mark.rule("R1")])]\n',
        'from pytest import mark\n@mark.rule("AAA-1", "R1")\nclass TestIt: ...\n',
    ],
)
def test_every_form_of_mark_is_found(root: Path, source: str) -> None:
    write_test(root, source)
    report = rules.examine(root)
    assert report.rules.tested == {"AAA-1"}
    assert report.scenarios.tested == {"R1"}
    assert report.errors == ()


def test_marks_are_read_from_folders_and_without_importing(root: Path) -> None:
    source = "import absent_module\nX = absent_module.mark.pytest.mark.rule\n"
    write_test(root, source + '@pytest.mark.rule("BB-1")\ndef test(): ...\n', "deep/test_y.py")
    assert rules.examine(root).rules.tested == {"BB-1"}


def test_text_that_looks_like_a_mark_is_none(root: Path) -> None:
    write_test(root, 'TEXT = """pytest.mark.rule("BB-1")"""\nother.rule("BB-1")\n')
    assert rules.examine(root).rules.tested == frozenset()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (
            'pytest.mark.rule("ZZZ-1")',
            "tests/test_x.py:1: ZZZ-1 is on no page of docs/spec",
        ),
        (
            'pytest.mark.rule("AAA-2")',
            "tests/test_x.py:1: AAA-2 is on no page of docs/spec",
        ),
        ("pytest.mark.rule(ID)", "tests/test_x.py:1: an id in a rule mark is a literal string"),
        ("pytest.mark.rule()", "tests/test_x.py:1: a rule mark takes ids and nothing else"),
        ('pytest.mark.rule(id="R1")', "tests/test_x.py:1: a rule mark takes ids and nothing else"),
    ],
)
def test_a_wrong_mark_is_an_error(root: Path, source: str, error: str) -> None:
    write_test(root, source)
    assert rules.examine(root).errors == (error,)


def test_the_later_list_takes_ids_ranges_and_comments(root: Path) -> None:
    write_later(root, "# heading\n\nAAA-1..AAA-4 the storage engine  # half of it\nR1 search\n")
    report = rules.examine(root)
    assert report.rules.later == {"AAA-1", "AAA-3"}, "retired ids in a range are passed over"
    assert report.scenarios.later == {"R1"}
    assert report.errors == ()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ZZZ-1 reason", "tests/rules_later.txt:1: ZZZ-1 is on no page of docs/spec"),
        ("AAA-1", "tests/rules_later.txt:1: AAA-1 has no reason"),
        ("AAA-1 # no reason", "tests/rules_later.txt:1: AAA-1 has no reason"),
        (
            "AAA-1 x\nAAA-1 x",
            "tests/rules_later.txt:2: AAA-1 is listed twice, first at tests/rules_later.txt:1",
        ),
        ("BB-1 x", "tests/rules_later.txt:1: BB-1 is tested and yet listed as later"),
    ],
)
def test_a_wrong_later_line_is_an_error(root: Path, text: str, error: str) -> None:
    write_test(root, 'pytest.mark.rule("BB-1")')
    write_later(root, text)
    assert rules.examine(root).errors == (error,)
    assert rules.main([], root) == 1


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("AAA-1", ["AAA-1"]),
        ("AAA-9..AAA-11", ["AAA-9", "AAA-10", "AAA-11"]),
        ("R1..R2", ["R1", "R2"]),
        ("AAA-1..BB-2", ["AAA-1..BB-2"]),
        ("AAA-2..AAA-1", ["AAA-2..AAA-1"]),
        ("AAA-1..", ["AAA-1.."]),
    ],
)
def test_a_range_is_expanded(text: str, ids: list[str]) -> None:
    assert rules.expand(text) == ids


def test_check_fails_on_an_open_rule_and_prints_it(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_later(root, "AAA-1 search\n")
    assert rules.main(["--check", "AAA", "BB"], root) == 1
    assert capsys.readouterr().out.splitlines() == [
        "AAA-3 is neither tested nor listed as later",
        "BB-1 is neither tested nor listed as later",
        "AAA BB: 2 open, 1 later",
    ]


def test_check_passes_when_all_is_tested_or_later(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_test(root, 'pytest.mark.rule("AAA-3")')
    write_later(root, "AAA-1 search\n")
    assert rules.main(["--check", "AAA"], root) == 0
    assert capsys.readouterr().out == "AAA: 0 open, 1 later\n"


def test_check_of_an_unknown_family_is_a_usage_error(root: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        rules.main(["--check", "NONE"], root)


def test_the_listing_shows_open_ids_and_two_totals(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_test(root, 'pytest.mark.rule("AAA-3")')
    assert rules.main([], root) == 0, "open rules fail nothing but a check"
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["AAA", "AAA-1"] in lines
    assert ["AAA", "2", "1", "0", "1"] in lines
    assert lines[-2:] == [["rules", "4", "1", "0", "3"], ["scenarios", "3", "0", "0", "3"]]


def test_json_is_one_object(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rules.main(["--json", "--check", "BB"], root) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["check"] == {"families": ["BB"], "open": ["BB-1"], "later": 0}
    assert answer["rules"]["families"]["AAA"]["open"] == ["AAA-1", "AAA-3"]
    assert (answer["scenarios"]["total"], answer["errors"]) == (3, [])


def test_this_repository_names_only_rules_that_exist() -> None:
    report = rules.examine()
    assert len(report.rules.ids) > 600
    assert len(report.scenarios.ids) > 350
    assert report.errors == ()
