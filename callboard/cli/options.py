"""What the commands have in common on their command lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from callboard.cli.output import Invocation, UsageProblem
from callboard.errors import InvalidRequest

if TYPE_CHECKING:
    from callboard.client import Client
    from callboard.config import Settings

HomeOption = Annotated[
    str | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="The plane's home. Default: CALLBOARD_HOME, else as configured.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Speak JSON, one object a line.")]
SessionArgument = Annotated[
    str,
    typer.Argument(
        metavar="SESSION", help="A session's id, or <workspace key>/<id> if several have it."
    ),
]


def begin(ctx: typer.Context, home: str | None, json: bool) -> Invocation:
    """Give what this run of the command line shares, with this command's options in it."""
    invocation = ctx.obj
    assert isinstance(invocation, Invocation)
    invocation.home = invocation.home if home is None else home
    invocation.json = invocation.json or json
    return invocation


def configured(invocation: Invocation) -> Settings:
    """Gather the settings; what is wrong with them is wrong with how callboard was called."""
    from callboard.reads import settings_of

    try:
        return settings_of(invocation.home)
    except InvalidRequest as error:
        raise UsageProblem(error) from None


def connected(invocation: Invocation) -> Client:
    """Connect to the plane of the home."""
    from callboard.client import connect

    return connect(configured(invocation).home)
