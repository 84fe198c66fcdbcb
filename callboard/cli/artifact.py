"""artifact read: the full text of a long message."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from callboard.cli.options import HomeOption, JsonOption, SessionArgument, begin, configured
from callboard.cli.output import leave_logs_aside, say_json, say_lines
from callboard.cli.text import block


def read(
    ctx: typer.Context,
    session: SessionArgument,
    artifact: Annotated[
        str, typer.Argument(metavar="ARTIFACT", help="The artifact's id, 64 hex digits.")
    ],
    offset: Annotated[
        int | None, typer.Option(help="Begin at this byte, or at the character it is in.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="At most so many bytes, 4 to 65,536. Default: everything.")
    ] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Print the full text of a long message, with the plane up or down.

    A terminal gets it with control characters made visible, a file or a pipe gets the bytes as they
    were sent. With --json one object: text, offset, next_offset.
    """
    invocation = begin(ctx, home, json)
    from callboard.reads import artifacts_of, read_artifact, resolve

    leave_logs_aside()
    place = configured(invocation).home
    ref = resolve(place, session)
    start, following = 0, None
    if offset is None and limit is None:
        text = read_artifact(place, ref, artifact)
    else:
        text, start, following = artifacts_of(place, ref).read(artifact, offset or 0, limit)
    if invocation.json:
        say_json({"text": text, "offset": start, "next_offset": following})
    elif sys.stdout.isatty():
        say_lines(block(text))
    else:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.flush()
