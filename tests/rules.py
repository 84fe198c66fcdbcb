"""Which rules of docs/spec no test names: `python -m tests.rules [--check FAMILY…] [--json]`.

A rule is defined where a page of docs/spec begins a list item or a table row with its bold id; a
test names it with `@pytest.mark.rule("MBX-3")`. Marks are read from the source and not by
importing, so the answer is the same whatever is installed. Rules that need a part which does not
exist yet stand in tests/rules_later.txt, each with its reason.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parents[1]
SPEC = Path("docs/spec")
LATER = Path("tests/rules_later.txt")

_DEFINITION = re.compile(r"^(?:- |\| )\*\*([A-Z]{1,3}-?\d+)\*\*")
_ID = re.compile(r"([A-Z]{1,3}-?)(\d+)")
_SCENARIO = re.compile(r"(?:[ABFHR]\d+|T-\d+)\Z")
_RETIRED = re.compile(r"\bretired: ([^.]*)\.", re.DOTALL)
_ACCEPTANCE = "## 3. Acceptance"  # of the beyond page, whose items bear a number only
_NUMBERED = re.compile(r"^(\d+)\. ")


@dataclass(frozen=True, slots=True)
class Named:
    """An id, and the place that names it, as `file:line`."""

    id: str
    place: str


@dataclass(frozen=True, slots=True)
class Found:
    """What was read from one kind of source, with the complaints about it."""

    named: tuple[Named, ...] = ()
    errors: tuple[str, ...] = ()

    def ids(self) -> frozenset[str]:
        """Return the ids alone."""
        return frozenset(name.id for name in self.named)


class FamilyJson(TypedDict):
    """One family in the JSON answer; `open` lists the ids neither tested nor later."""

    total: int
    tested: int
    later: int
    open: list[str]


class TotalJson(FamilyJson):
    """A total over families."""

    families: dict[str, FamilyJson]


class CheckJson(TypedDict):
    """What `--check` judged; `later` is a count of ids."""

    families: list[str]
    open: list[str]
    later: int


class ReportJson(TypedDict):
    """The whole JSON answer; `check` is null without `--check`."""

    rules: TotalJson
    scenarios: TotalJson
    check: CheckJson | None
    errors: list[str]


@dataclass(frozen=True, slots=True)
class Tally:
    """Ids in page order, and which of them are tested or left for later."""

    ids: tuple[str, ...]
    tested: frozenset[str]
    later: frozenset[str]

    def open(self) -> list[str]:
        """Return the ids neither tested nor left for later, in page order."""
        return [id for id in self.ids if id not in self.tested and id not in self.later]

    def families(self) -> dict[str, "Tally"]:
        """Return one tally for each family, in page order."""
        groups: dict[str, list[str]] = {}
        for id in self.ids:
            groups.setdefault(family(id), []).append(id)
        return {name: self.only(ids) for name, ids in groups.items()}

    def only(self, ids: Iterable[str]) -> "Tally":
        """Return the tally of these ids."""
        kept = tuple(ids)
        return Tally(kept, self.tested & frozenset(kept), self.later & frozenset(kept))

    def as_json(self) -> FamilyJson:
        """Return the figures."""
        return {
            "total": len(self.ids),
            "tested": len(self.tested),
            "later": len(self.later),
            "open": self.open(),
        }

    def total_json(self) -> TotalJson:
        """Return the figures, and those of each family."""
        families = {name: tally.as_json() for name, tally in self.families().items()}
        return {**self.as_json(), "families": families}


@dataclass(frozen=True, slots=True)
class Report:
    """The state of a checkout: two tallies, and what is wrong with marks or lists."""

    rules: Tally
    scenarios: Tally
    errors: tuple[str, ...] = field(default=())

    def families(self) -> dict[str, Tally]:
        """Return every family, those of scenarios last."""
        return self.rules.families() | self.scenarios.families()


def family(id: str) -> str:
    """Return the family of an id: `MBX` of `MBX-3`, `R` of `R8`."""
    return id.rstrip("0123456789").rstrip("-")


def is_scenario(id: str) -> bool:
    """Tell whether an id is that of an acceptance scenario or threat, not of a rule."""
    return _SCENARIO.match(id) is not None


# Reading the pages


def read_pages(root: Path) -> Found:
    """Return every id that docs/spec defines, retired ones left out, in page order."""
    retired = read_retired(root)
    named = [
        name
        for page in sorted((root / SPEC).glob("*.md"), key=lambda page: page.name)
        for name in _definitions(page, root)
        if name.id not in retired
    ]
    return Found(tuple(named), tuple(_repeated(named, "defined")))


def read_retired(root: Path) -> frozenset[str]:
    """Return the ids that the architecture page lists as retired."""
    match = _RETIRED.search((root / SPEC / "architecture.md").read_text(encoding="utf-8"))
    if match is None:
        return frozenset()
    return frozenset(found.group() for found in _ID.finditer(match.group(1)))


def _definitions(page: Path, root: Path) -> Iterator[Named]:
    numbered = False
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), start=1):
        if line.startswith("## "):
            numbered = line.startswith(_ACCEPTANCE)
        place = f"{page.relative_to(root)}:{number}"
        if defined := _DEFINITION.match(line):
            yield Named(defined.group(1), place)
        elif numbered and (item := _NUMBERED.match(line)):
            yield Named(f"B{item.group(1)}", place)


def _repeated(named: Iterable[Named], verb: str) -> Iterator[str]:
    first: dict[str, str] = {}
    for name in named:
        if name.id in first:
            yield f"{name.place}: {name.id} is {verb} twice, first at {first[name.id]}"
        first.setdefault(name.id, name.place)


# Reading the marks


def read_marks(root: Path) -> Found:
    """Return every id that a `pytest.mark.rule(...)` below tests/ names."""
    named: list[Named] = []
    errors: list[str] = []
    for file in sorted((root / "tests").rglob("*.py")):
        place = str(file.relative_to(root))
        for call in _rule_calls(ast.parse(file.read_bytes(), str(file))):
            found = _ids_of(call, place)
            named += found.named
            errors += found.errors
    return Found(tuple(named), tuple(errors))


def _rule_calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_mark_rule(node.func):
            yield node


def _is_mark_rule(called: ast.expr) -> bool:
    if not (isinstance(called, ast.Attribute) and called.attr == "rule"):
        return False
    match called.value:
        case ast.Name(id="mark") | ast.Attribute(value=ast.Name(id="pytest"), attr="mark"):
            return True
        case _:
            return False


def _ids_of(call: ast.Call, file: str) -> Found:
    named: list[Named] = []
    errors: list[str] = []
    if not call.args or call.keywords:
        errors.append(f"{file}:{call.lineno}: a rule mark takes ids and nothing else")
    for argument in call.args:
        place = f"{file}:{argument.lineno}"
        match argument:
            case ast.Constant(value=str(id)):
                named.append(Named(id, place))
            case _:
                errors.append(f"{place}: an id in a rule mark is a literal string")
    return Found(tuple(named), tuple(errors))


# Reading the list of what comes later


def read_later(root: Path) -> Found:
    """Return the ids of tests/rules_later.txt: `ID reason` or `A-1..A-5 reason` a line."""
    path = root / LATER
    if not path.exists():
        return Found()
    retired = read_retired(root)
    named: list[Named] = []
    errors: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        ids, _, reason = line.partition("#")[0].strip().partition(" ")
        if not ids:
            continue
        place = f"{LATER}:{number}"
        if not reason.strip():
            errors.append(f"{place}: {ids} has no reason")
        named += [Named(id, place) for id in expand(ids) if id not in retired]
    return Found(tuple(named), (*errors, *_repeated(named, "listed")))


def expand(text: str) -> list[str]:
    """Return the ids of a range `A-1..A-5`, ends included; anything else is one id as it stands."""
    first, dots, last = text.partition("..")
    low, high = _ID.fullmatch(first), _ID.fullmatch(last)
    if not dots or low is None or high is None or low.group(1) != high.group(1):
        return [text]
    numbers = range(int(low.group(2)), int(high.group(2)) + 1)
    return [f"{low.group(1)}{number}" for number in numbers] or [text]


# Judging


def examine(root: Path = ROOT) -> Report:
    """Return the state of the checkout at `root`."""
    pages, marks, later = read_pages(root), read_marks(root), read_later(root)
    tally = Tally(
        tuple(dict.fromkeys(name.id for name in pages.named)),
        marks.ids() & pages.ids(),
        later.ids() & pages.ids(),
    )
    errors = (
        *pages.errors,
        *marks.errors,
        *later.errors,
        *_unknown((*marks.named, *later.named), pages.ids()),
        *_contradictions(later.named, marks.ids()),
    )
    return Report(
        tally.only(id for id in tally.ids if not is_scenario(id)),
        tally.only(id for id in tally.ids if is_scenario(id)),
        errors,
    )


def _unknown(named: Iterable[Named], known: frozenset[str]) -> Iterator[str]:
    for name in named:
        if name.id not in known:
            yield f"{name.place}: {name.id} is on no page of {SPEC}"


def _contradictions(later: Iterable[Named], tested: frozenset[str]) -> Iterator[str]:
    for name in later:
        if name.id in tested:
            yield f"{name.place}: {name.id} is tested and yet listed as later"


def check(report: Report, families: Sequence[str]) -> CheckJson:
    """Return what is open, and how much is later, in these families (all of them known)."""
    tallies = [report.families()[name] for name in families]
    return {
        "families": list(families),
        "open": [id for tally in tallies for id in tally.open()],
        "later": sum(len(tally.later) for tally in tallies),
    }


# Showing


def show(report: Report) -> str:
    """Return the open ids by family, then the figures of each family, then both totals."""
    lines = [
        f"{name:<5} {' '.join(tally.open())}"
        for name, tally in report.families().items()
        if tally.open()
    ]
    lines += ["", f"{'':<5} {'rules':>6} {'tested':>6} {'later':>6} {'open':>6}"]
    lines += [_figures(name, tally) for name, tally in report.rules.families().items()]
    lines += ["", _figures("rules", report.rules), _figures("scenarios", report.scenarios)]
    return "\n".join(lines)


def _figures(name: str, tally: Tally) -> str:
    figures = (len(tally.ids), len(tally.tested), len(tally.later), len(tally.open()))
    return f"{name:<5} {' '.join(f'{figure:>6}' for figure in figures)}"


def show_check(verdict: CheckJson) -> str:
    """Return the verdict of `--check` as text."""
    lines = [f"{id} is neither tested nor listed as later" for id in verdict["open"]]
    names = " ".join(verdict["families"])
    lines.append(f"{names}: {len(verdict['open'])} open, {verdict['later']} later")
    return "\n".join(lines)


def _parse(argv: Sequence[str] | None, known: Iterable[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.rules", description=__doc__)
    parser.add_argument(
        "--check", nargs="+", metavar="FAMILY", help="exit 1 if one of these has an open rule"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.check or ()) - set(known)):
        parser.error(f"no such family: {', '.join(unknown)}")
    return options


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Print the report; return 0, or 1 when a check fails or a mark or list is wrong."""
    report = examine(root)
    options = _parse(argv, report.families())
    verdict = check(report, options.check) if options.check else None
    if options.json:
        print(json.dumps(_as_json(report, verdict)))
    else:
        print(show(report) if verdict is None else show_check(verdict))
        for error in report.errors:
            print(error, file=sys.stderr)
    return 1 if report.errors or (verdict is not None and verdict["open"]) else 0


def _as_json(report: Report, verdict: CheckJson | None) -> ReportJson:
    return {
        "rules": report.rules.total_json(),
        "scenarios": report.scenarios.total_json(),
        "check": verdict,
        "errors": list(report.errors),
    }


if __name__ == "__main__":
    sys.exit(main())
