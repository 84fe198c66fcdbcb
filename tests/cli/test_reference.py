"""The reference pages are what the program says of itself."""

import pytest

from callboard.cli import app
from callboard.config import Settings
from callboard.errors import CallboardError
from tests.cli.reference import PAGES, pages


@pytest.mark.parametrize("name", pages())
def test_a_page_is_current(name: str) -> None:
    written = (PAGES / name).read_text(encoding="utf-8")
    assert written == pages()[name], "run: python -m tests.cli.reference"


def test_nothing_is_left_out() -> None:
    told = pages()
    for command in app.COMMANDS:
        assert f"## callboard {command.__name__}\n" in told["cli.md"]
    for name, (_, functions) in app.GROUPS.items():
        for function in functions:
            assert f"## callboard {name} {function.__name__}\n" in told["cli.md"]
    for error in CallboardError.__subclasses__():
        assert f"| `{error.code}` |" in told["errors.md"]
    for name in Settings.model_fields:
        assert f"| `{name}` |" in told["settings.md"]
    assert told["limits.md"].count("\n| `") > 200


def test_every_option_says_what_it_is_for() -> None:
    for line in pages()["cli.md"].splitlines():
        assert not line.startswith("| `") or not line.endswith("|  |")
