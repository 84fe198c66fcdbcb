"""All commands, in the order in which a newcomer meets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Protocol, cast

import typer

from callboard.cli import artifact, demo, health, plane, sessions
from callboard.cli.options import HomeOption

COMMANDS: tuple[Callable[..., None], ...] = (
    demo.demo,
    plane.up,
    plane.down,
    plane.status,
    sessions.new,
    sessions.send,
    sessions.watch,
    sessions.cancel,
    sessions.ls,
    sessions.show,
    health.verify,
    health.doctor,
)
GROUPS: Mapping[str, tuple[str, tuple[Callable[..., None], ...]]] = {
    "artifact": ("Read the texts of long messages.", (artifact.read,))
}
"""Commands of two words: the first, what it is for, and the functions of the second."""


def start(
    ctx: typer.Context,
    home: HomeOption = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Keep many agent sessions alive on one machine, and steer them while they run."""
    if home is not None:
        ctx.obj.home = home
    if version:
        from importlib.metadata import version as installed

        print(installed("callboard"))
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())
        raise typer.Exit


def build() -> typer.Typer:
    """Put the commands together."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(start)
    for command in COMMANDS:
        app.command()(command)
    for name, (purpose, functions) in GROUPS.items():
        group = typer.Typer(help=purpose, no_args_is_help=True)
        group.callback()(_nothing)  # without it a single command would swallow its own name
        for function in functions:
            group.command()(function)
        app.add_typer(group, name=name)
    return app


def _nothing() -> None:
    """Do nothing: what is asked is the second word's."""


class Command(Protocol):
    """A command line that was put together; typer's own class has moved between its versions."""

    def main(
        self,
        args: list[str] | None = None,
        prog_name: str | None = None,
        *,
        standalone_mode: bool = True,
        obj: object = None,
    ) -> object:
        """Parse the words and do what they say."""
        ...


@cache
def command() -> Command:
    """Give the command line that `run` runs."""
    return cast("Command", typer.main.get_command(build()))
