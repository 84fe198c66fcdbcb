"""Draw the mailbox machine's table: `python -m tests.actors.session.draw_mailbox` writes it anew.

docs/mailbox.md is what this script makes of `mailbox.TRANSITIONS`; a test compares the two.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from callboard.actors.session.mailbox import TRANSITIONS

PAGE = Path(__file__).parents[3] / "docs" / "mailbox.md"
MODES = ("idle", "asking", "starting", "open", "sealed", "finishing")

HEAD = """\
# The mailbox

One pure machine decides what becomes of every input and every turn of a session:
`step(state, command)` gives the next state and what is to be done. Its table is `TRANSITIONS` in
`actors/session/mailbox.py`; this page is drawn from it by
`python -m tests.actors.session.draw_mailbox`, and a test fails when the two differ. The rules are
MBX-1 to MBX-18 of [the runtime page](spec/runtime.md).

| Mode | What it means |
|---|---|
| idle | no turn; nothing of one is on its way |
| asking | idle, and the answer to a request for a turn permit is awaited |
| starting | idle, and a `turn_started` is on its way to the disk |
| open | a turn runs and takes steering |
| sealed | a turn runs and takes no more |
| finishing | a turn's terminal is on its way to the disk |

## Which mode can follow which

An arrow bears the commands that can lead that way; commands that always stay where they are stand
in the table below.

"""


def edges() -> dict[tuple[str, str], list[str]]:
    """Give the commands of each pair of modes that differ, in the table's order."""
    found: dict[tuple[str, str], list[str]] = {}
    for (mode, command), transition in TRANSITIONS.items():
        for to in sorted(transition.to, key=MODES.index):
            if to != mode:
                found.setdefault((mode, to), []).append(command.__name__)
    return dict(sorted(found.items(), key=lambda one: tuple(map(MODES.index, one[0]))))


def diagram() -> Iterator[str]:
    """Draw the state diagram, in Mermaid."""
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield "    [*] --> idle"
    for (mode, to), commands in edges().items():
        yield f"    {mode} --> {to}: {', '.join(commands)}"
    yield "```"


def table() -> Iterator[str]:
    """List every pair of mode and command, and the modes that may come of it."""
    yield "| Command | " + " | ".join(MODES) + " |"
    yield "|---" * (len(MODES) + 1) + "|"
    for command in dict.fromkeys(command for _, command in TRANSITIONS):
        cells = [_cell(mode, command) for mode in MODES]
        yield f"| {command.__name__} | " + " | ".join(cells) + " |"


def _cell(mode: str, command: type) -> str:
    transition = next((t for (m, c), t in TRANSITIONS.items() if (m, c) == (mode, command)), None)
    if transition is None:
        return "-"
    names = sorted(transition.to, key=MODES.index)
    return "=" if names == [mode] else " ".join("=" if name == mode else name for name in names)


def commands() -> Iterator[str]:
    """Say what each command is, by the first line of its docstring."""
    yield "| Command | Meaning |"
    yield "|---|---|"
    for command in dict.fromkeys(command for _, command in TRANSITIONS):
        text = (inspect.getdoc(command) or "").partition("\n")[0]
        yield f"| {command.__name__} | {text} |"


def page() -> str:
    """Make the whole page."""
    parts = [
        HEAD + "\n".join(diagram()),
        "\n## Every pair\n",
        "`=` stays in the mode; `-`: the mode does not know the command (`UnexpectedCommand`).\n",
        "\n".join(table()),
        "\n## The commands\n",
        "\n".join(commands()),
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
