"""The main job: steer sessions while their processes are killed, then prove that all is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from callboard.cli.options import HomeOption, JsonOption, begin
from callboard.cli.output import CommandFailed, UsageProblem, is_terminal, say, say_json
from callboard.errors import InvalidRequest

if TYPE_CHECKING:
    from callboard.cli.verdict import Verdict


def demo(
    ctx: typer.Context,
    sessions: Annotated[
        int | None, typer.Option(min=1, max=1_000, help="How many. Default: 50.")
    ] = None,
    inputs: Annotated[
        int | None, typer.Option(min=1, max=1_000, help="For each session. Default: 20.")
    ] = None,
    kills: Annotated[
        int | None, typer.Option(min=0, max=10_000, help="Processes to kill. Default: 30.")
    ] = None,
    transcript: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A Claude Code or Codex transcript to play; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat the choices of another run.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small run: 12 sessions, 6 inputs each, 6 kills.")
    ] = False,
    verify_home: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Run nothing; judge what an earlier demo left there."),
    ] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Steer many sessions, kill processes under them, and prove that nothing is lost.

    A plane is started in a fresh home below the user's cache directory, or in --home. Every receipt
    is written to a file beside the home. At the end the plane is opened again, works off what
    waits, and is compared with that file.
    """
    invocation = begin(ctx, home, json)
    if verify_home is not None:
        _verify(verify_home, json_too=invocation.json)
        return
    from callboard.cli.demo_plan import size_of
    from callboard.cli.demo_run import Wishes, run_demo

    run_demo(
        Wishes(
            size_of(quick, sessions, inputs, kills),
            tuple(transcript or ()),
            seed,
            invocation.home,
            silent=invocation.json,
            live=is_terminal() and not invocation.json,
        )
    )


def _verify(text: str, *, json_too: bool) -> None:
    from pathlib import Path

    from callboard.cli.demo_view import show_verdict
    from callboard.cli.evidence import verify_home

    if not text:
        raise UsageProblem(
            InvalidRequest("--verify-home is empty.", field="verify_home", reason="empty")
        )
    verdict = verify_home(Path.cwd() / text)
    if json_too:
        say_json(verdict.figures())
    else:
        show_verdict(verdict)
    fail_unless_clean(verdict)


def fail_unless_clean(verdict: Verdict) -> None:
    """Exit with 1, naming the first session and input, if anything is not as promised."""
    if verdict.clean:
        return
    first = verdict.findings[0]
    raise CommandFailed(
        "verdict",
        f"{verdict.lost} lost, {verdict.doubled} doubled, {verdict.reordered} out of order; first: "
        f"{first.kind}, session {first.session}, input {first.message_id} ({first.detail})",
    )


def say_phase(text: str, *, silent: bool) -> None:
    """Say what happens now, where nobody sees it happen."""
    if not silent:
        say(text)
