"""The README's two shell lines are complete, and are what .ci/run executes."""

import re
import subprocess
from pathlib import Path

import pytest
import typer.main

from callboard.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def shell_lines() -> list[str]:
    block = re.search(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert block is not None
    return block.group(1).splitlines()


def test_ci_executes_the_lines_as_they_stand() -> None:
    printed = subprocess.run(
        [ROOT / ".ci" / "run", "--lines"], capture_output=True, text=True, check=True
    )
    assert printed.stdout.splitlines() == shell_lines()


@pytest.mark.parametrize("index", [0, 1])
def test_ci_has_each_line_from_the_readme_alone(index: int) -> None:
    line = shell_lines()[index]
    assert f'readme_line "${{LINES[{index}]}}"' in CI
    assert line not in CI


def test_there_are_two_lines_the_demo_and_the_tests() -> None:
    demo, tests = shell_lines()
    assert demo.endswith("/callboard demo")
    assert tests.endswith("-m pytest")


@pytest.mark.parametrize("line", shell_lines())
def test_each_line_makes_the_environment_that_it_uses(line: str) -> None:
    make, install, run = line.split(" && ")
    assert make == "python3 -m venv .venv"
    assert install.startswith(".venv/bin/pip install ")
    assert run.startswith(".venv/bin/")


def test_the_readme_begins_with_three_sentences_and_a_picture() -> None:
    title, first, second, *_ = re.split(r"\n\n+", README)
    assert title == "# callboard"
    assert len(re.findall(r"\.(?:\s|$)", first)) == 3
    assert second.startswith("```\n")


def test_the_tour_shows_every_command_and_no_other() -> None:
    block = re.search(r"^```console\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert block is not None
    shown = re.findall(r"\bcallboard ([a-z]+)", block.group(1))
    assert set(shown) == set(typer.main.get_group(app.build()).commands)


@pytest.mark.parametrize("link", re.findall(r"\]\((?!https?:)([^)#]+)", README))
def test_every_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()
