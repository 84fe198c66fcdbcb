"""The demo on a screen: while it runs, and its verdict."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from callboard.cli.demo_load import Tally
from callboard.cli.demo_plan import Size, percentile
from callboard.cli.output import console, is_terminal, say, say_lines
from callboard.cli.text import escape
from callboard.cli.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

PROVEN = (
    "Every receipt that a client held names an input that the home holds exactly once, with the "
    "same text, in the order of the receipts."
)


def rows_of(tally: Tally, size: Size, seed: int) -> list[tuple[str, str]]:
    """Say what has happened so far, in rows of a label and a text."""
    seconds = time.monotonic() - tally.began
    status = tally.status
    states = dict(status.sessions) if status is not None else {}
    restarts = tally.restarts_before + tally.restarts
    return [
        ("phase", f"{tally.phase}, {seconds:.0f} s, seed {seed}"),
        ("sessions", f"{size.sessions}: {_counts(states) or 'none has a process'}"),
        (
            "inputs",
            f"{tally.accepted} of {size.sessions * size.inputs} accepted, "
            f"{tally.acknowledged} acknowledged, {tally.steered} joined a running turn",
        ),
        ("kills", f"{tally.kills.total()} of {size.kills}: {_counts(tally.kills) or 'none yet'}"),
        ("restarts", _counts(restarts) or "none yet"),
        (
            "receipts",
            f"{tally.receipts_per_second():.0f}/s now, "
            f"median {percentile(tally.receipt_ms, 0.5):.1f} ms, "
            f"99 % within {percentile(tally.receipt_ms, 0.99):.0f} ms",
        ),
    ]


def live(tally: Tally, size: Size, seed: int) -> RenderableType:
    """Draw what has happened so far."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for label, text in rows_of(tally, size, seed):
        grid.add_row(Text(label), Text(escape(text)))
    return Panel(grid, title="callboard demo", title_align="left", expand=False)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items() if n)


def verdict_rows(verdict: Verdict) -> list[tuple[str, int, str]]:
    """Give the verdict's table: what, how many, and what that means."""
    rows = [
        ("accepted", verdict.accepted, "receipts that clients held"),
        ("acknowledged", verdict.acknowledged, "in a transcript, with the end of their turn"),
        ("pending", verdict.pending, "still in an inbox"),
        ("lost", verdict.lost, "nowhere, or with another text"),
        ("doubled", verdict.doubled, "more than once"),
        ("out of order", verdict.reordered, "behind an input that was accepted later"),
    ]
    if verdict.discarded:
        rows.insert(3, ("discarded", verdict.discarded, "given up, with a record that says why"))
    return rows


def show_verdict(verdict: Verdict) -> None:
    """Print the verdict: a table, what it proves, or what it found."""
    if is_terminal():
        _draw_verdict(verdict)
    else:
        say_lines(f"{name:<13}{count:>7}  {text}" for name, count, text in verdict_rows(verdict))
    if verdict.clean:
        say(PROVEN)
        return
    for finding in verdict.findings:
        kind, session, message_id, detail = finding
        say(f"{kind}: session {session}, input {message_id}: {detail}")


def _draw_verdict(verdict: Verdict) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("verdict")
    table.add_column("inputs", justify="right")
    table.add_column("")
    bad = ("lost", "doubled", "out of order")
    for name, count, text in verdict_rows(verdict):
        style = ("red" if count else "green") if name in bad else ""
        table.add_row(name, str(count), text, style=style)
    console().print(table)
