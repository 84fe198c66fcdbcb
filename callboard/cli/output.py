"""How commands speak: a table or lines for people, one JSON object a line for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from callboard.cli.text import escape, escape_json
from callboard.errors import CallboardError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(slots=True)
class Invocation:
    """One run of the command line: what all commands share."""

    home: str | None = None
    """As given; none to take it from the configuration."""
    json: bool = False
    """Whether a program listens."""


class UsageProblem(Exception):
    """The command cannot be understood, or not what surrounds it; exit status 2."""

    def __init__(self, error: CallboardError) -> None:
        super().__init__(str(error))
        self.error = error


class CommandFailed(Exception):
    """The command was carried out, and what it was to do failed; exit status 1.

    Args:
        code: a stable word.
        message: one line for a person.
        said: whether a program has been told already, on the standard output.

    """

    def __init__(self, code: str, message: str, *, said: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.said = code, message, said


def leave_logs_aside() -> None:
    """Keep what readers log (an index that is not used, say) from a person's screen."""
    import logging

    logging.getLogger("callboard").addHandler(logging.NullHandler())


def is_terminal() -> bool:
    """Tell whether a person looks at the standard output."""
    try:
        return sys.stdout.isatty()
    except ValueError:
        return False


def console() -> Console:
    """Give rich's view of the standard output; text that goes in is taken literally."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """Print one line for a person."""
    print(escape(text), flush=True)


def say_lines(lines: Iterable[str]) -> None:
    """Print lines that went through `escape` or `block`."""
    for line in lines:
        print(line)
    sys.stdout.flush()


def say_json(value: object) -> None:
    """Print one JSON value as one line of ASCII."""
    print(spell_json(value), flush=True)


def spell_json(value: object) -> str:
    """Spell a value as JSON that is safe to look at."""
    return escape_json(json.dumps(value, separators=(",", ":")))


def say_raw_json(line: bytes) -> None:
    """Print a line of JSON as it is stored; on a terminal with what it would obey escaped."""
    if is_terminal():
        print(escape_json(line.decode("utf-8", "replace")), flush=True)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: drawn for a terminal, else one line a row with tabs between, uncut."""
    if not is_terminal():
        say_lines("\t".join(map(escape, row)) for row in (heads, *rows))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        drawn.add_column(Text(head), overflow="ellipsis", no_wrap=True)
    for row in rows:
        drawn.add_row(*(Text(escape(cell)) for cell in row))
    console().print(drawn)


def complain(code: str, message: str, *, json_too: bool, fields: dict[str, object]) -> None:
    """Print an error: one line, or one JSON object, on the standard error."""
    if json_too:
        text = spell_json({"error": {"code": code, **fields, "message": message}})
    else:
        text = f"{code}: {escape(message)}"
    print(text, file=sys.stderr, flush=True)
