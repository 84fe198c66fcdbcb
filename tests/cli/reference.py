"""Writes the reference pages out of what they describe: `python -m tests.cli.reference`.

`test_reference.py` says when one of them is out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, get_args, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

import callboard.config
import callboard.limits
from callboard.cli import app
from callboard.config import OTHER_VARIABLES, PREFIX, Settings
from callboard.errors import CallboardError
from callboard.limits import RANGES
from callboard.storage.findings import MEANINGS

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = ROOT / "docs" / "reference"
_NOTE: Final = "<!-- Written by `python -m tests.cli.reference`; do not edit. -->"


def pages() -> Mapping[str, str]:
    """Give the text of every page by its file name."""
    return {
        "cli.md": _page(cli()),
        "errors.md": _page(errors()),
        "findings.md": _page(findings()),
        "limits.md": _page(limits()),
        "settings.md": _page(settings()),
    }


def _page(lines: Iterable[str]) -> str:
    return "\n".join((_NOTE, "", *lines, ""))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield _row(*heads)
    yield _row(*("---" for _ in heads))
    for row in rows:
        yield _row(*row)


# ---- The command line ----


def cli() -> Iterator[str]:
    """Describe every command, out of its function's signature."""
    yield "# The command line"
    yield ""
    yield _text(app.start)
    yield ""
    yield "Exit status: 0 done · 1 refused or failed · 2 wrong usage · 3 no plane is running ·"
    yield "4 overloaded or timed out · 130 interrupted. An error is one line on the standard"
    yield "error: its code, what happened, and the way out; with `--json` one object,"
    yield '`{"error": {…}}`.'
    yield ""
    yield from _command("callboard", app.start)
    for function in app.COMMANDS:
        yield f"## callboard {function.__name__}"
        yield ""
        yield _text(function)
        yield ""
        yield from _command(f"callboard {function.__name__}", function)

    for name, (purpose, functions) in app.GROUPS.items():
        for function in functions:
            yield f"## callboard {name} {function.__name__}"
            yield ""
            yield f"{purpose} {_text(function)}"
            yield ""
            yield from _command(f"callboard {name} {function.__name__}", function)


def _text(function: Callable[..., object]) -> str:
    return inspect.cleandoc(function.__doc__ or "")


class Word(NamedTuple):
    """An argument or an option."""

    spelled: str
    help: str
    is_argument: bool


def _command(name: str, function: Callable[..., object]) -> Iterator[str]:
    words = list(_words(function))
    arguments = [word.spelled for word in words if word.is_argument]
    tail = ["COMMAND"] if name == "callboard" else []
    yield from ("```", " ".join((name, *arguments, "[OPTIONS]", *tail)), "```", "")
    yield from _table(("", ""), ((f"`{word.spelled}`", word.help) for word in words))
    yield ""


def _words(function: Callable[..., object]) -> Iterator[Word]:
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        kind, *notes = get_args(hints[name]) or (None,)
        info = next((n for n in notes if isinstance(n, ArgumentInfo | OptionInfo)), None)
        if info is None:
            continue  # the context
        help_text = info.help or ""
        if isinstance(info, ArgumentInfo):
            yield Word(str(info.metavar), help_text, is_argument=True)
            continue
        flag = (info.param_decls or (f"--{name.replace('_', '-')}",))[0]
        value = "" if kind is bool else f" {info.metavar or _kind(kind)}"
        yield Word(f"{flag}{value}", help_text + _default(parameter.default, help_text), False)


def _kind(kind: object) -> str:
    kinds = get_args(kind)
    if kinds and all(isinstance(one, str) for one in kinds):
        return "|".join(kinds)
    if float in (kind, *kinds):
        return "SECONDS"
    return "N" if int in (kind, *kinds) else "TEXT"


def _default(default: object, help_text: str) -> str:
    silent = default is inspect.Parameter.empty or default in (None, False)
    return "" if silent or "Default:" in help_text else f" Default: {default}."


# ---- Errors ----


def errors() -> Iterator[str]:
    """Describe every code."""
    yield "# Errors"
    yield ""
    yield "Every refusal is a `callboard.errors` class with a stable code. What goes over a wire is"
    yield "the code and what it carries, never a message. `fault` says who can put it right: the"
    yield "caller, nobody but time (load), an agent's author, the plane itself, or who runs it."
    yield ""
    yield from _table(
        ("Code", "HTTP", "CLI", "Carries", "Fault", "Meaning", "Way out"),
        (
            (
                f"`{cls.code}`",
                "-" if cls.http is None else str(cls.http),
                str(cls.cli),
                ", ".join(f"`{carry.removesuffix('_')}`" for carry in cls.carries) or "-",
                cls.fault,
                cls().message,
                cls.way_out or "-",
            )
            for cls in CallboardError.__subclasses__()
        ),
    )


# ---- Findings ----

_FINDINGS: Final = """
# Findings

What `callboard verify` may find, in alphabetical order. A finding is a state that no legal run of
callboard leaves behind, crashes included. It names the file below the home, the line or the byte,
and never what stands there. With `--json` each is one object a line, `{"finding": {…}}`, with
`kind`, `file`, `line`, `offset`, `session`, `detail`, `message` and `way_out` as far as they are
known; the last object counts what was looked at. `salvaged_as` names the session that holds what
was sound of a damaged one: such a finding is settled and does not count.

What `callboard doctor --repair` does: *restore* puts the file back from the journal, or where that
has no frames of it any more, writes what is sound of a transcript into a new session; *cut tail*
removes the unfinished line; *release lease* gives the lease back with an epoch above every earlier
one; *rebuild index* and *set mode* do what they say. What a file held before is kept below `aside/`
in the home, an index as `index.bad-N`. Doctor changes nothing else.
"""


def findings() -> Iterator[str]:
    """Describe every kind of finding."""
    yield from _FINDINGS.strip().split("\n")
    yield ""
    yield from _table(
        ("Kind", "Meaning", "Way out", "Doctor"),
        (
            (
                f"`{kind}`",
                meaning.sentence,
                meaning.way_out,
                "-" if meaning.repair == "none" else meaning.repair.replace("_", " "),
            )
            for kind, meaning in MEANINGS.items()
        ),
    )


# ---- Limits ----

_LIMIT: Final = re.compile(r"([A-Z][A-Z0-9_]*): Final\[[^\]]*\] = (.*?)(?:\s+#\s*(.*))?$")
_SECTION: Final = re.compile(r"# -+ (.*?) -+$")


def limits() -> Iterator[str]:
    """Describe every limit, in the order and under the headings of limits.py."""
    source = Path(str(callboard.limits.__file__)).read_text(encoding="utf-8")
    yield "# Limits"
    yield ""
    yield "Reaching one of these is a typed answer, never silence. A limit with a range can be set,"
    yield "see [settings](settings.md)."
    heading: list[str] = []
    for line in source.split("\n"):
        if section := _SECTION.match(line):
            heads = _table(("Limit", "Value", "Range", "Note"), ())
            heading = ["", f"## {section[1]}", "", *heads]
        elif limit := _LIMIT.match(line):
            yield from heading
            heading = []
            yield _limit(limit[1], limit[3] or "")


def _limit(name: str, note: str) -> str:
    value: object = getattr(callboard.limits, name)
    low, high = RANGES.get(name, (None, None))
    span = "" if low is None else f"{low:,} to {high:,}"
    shown = f"{value:,}" if type(value) is int else str(value)
    return _row(f"`{name}`", shown, span, note)


# ---- Settings ----


def settings() -> Iterator[str]:
    """Describe every setting."""
    yield "# Settings"
    yield ""
    yield "A later place wins: the default, `callboard/config.toml` in the user's configuration"
    yield "folder, the environment, a flag or an argument. A key that nobody knows is an error"
    yield "that names it."
    yield ""
    texts = _field_texts()
    yield from _table(
        ("Key of `config.toml`", "Environment", "Default", "Range", "Meaning"),
        (
            (
                f"`{name}`",
                f"`{PREFIX}{name.upper()}`",
                _shown_default(name, field.default),
                _range(name),
                texts[name],
            )
            for name, field in Settings.model_fields.items()
        ),
    )
    yield ""
    others = ", ".join(f"`{PREFIX}{name}`" for name in sorted(OTHER_VARIABLES))
    yield f"Further variables of this prefix, which are no settings: {others}."


def _shown_default(name: str, value: object) -> str:
    if name == "home":
        return "the platform's folder for user data"
    if type(value) is int:
        return f"{value:,}"
    return f"`{value}`" if value else "none"


def _range(name: str) -> str:
    for limit, (low, high) in RANGES.items():
        if limit.lower() in (name, f"{name}_max"):
            return f"{low:,} to {high:,}"
    return ""


def _field_texts() -> dict[str, str]:
    """Read the texts that stand behind the fields of Settings."""
    tree = ast.parse(Path(str(callboard.config.__file__)).read_text(encoding="utf-8"))
    (model,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Settings")
    texts: dict[str, str] = {}
    for field, text in zip(model.body, model.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value, ast.Constant)
            texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


def main() -> None:
    """Write the pages."""
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
