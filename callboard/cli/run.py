"""Around every command: exit statuses, errors in one line, and nothing else ever.

0 done · 1 refused or failed · 2 wrong usage · 3 no plane is running · 4 overloaded or timed out
(architecture page, section 7); 130 when interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol, cast

from callboard.cli.output import CommandFailed, Invocation, UsageProblem, complain
from callboard.cli.text import escape
from callboard.errors import CallboardError, Internal

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
_FRAMES_MAX: Final = 20


class _Complaint(Protocol):
    """What the parser raises."""

    exit_code: int
    ctx: object

    def format_message(self) -> str: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: its words; default: those of the process.

    Returns:
        The exit status.

    """
    words = list(sys.argv[1:] if argv is None else argv)
    invocation = Invocation(json="--json" in words)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # what replaces them in a test
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # pyright: ignore
    try:
        return _run(words, invocation)
    except BrokenPipeError:
        # Nobody reads any more; keep the interpreter's own flush at its end from complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(words: list[str], invocation: Invocation) -> int:
    try:
        return _parse_and_do(words, invocation)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except UsageProblem as problem:
        _tell(problem.error, invocation)
        return USAGE
    except CallboardError as error:
        _tell(error, invocation)
        return error.cli
    except CommandFailed as failed:
        if not (failed.said and invocation.json):
            complain(failed.code, failed.message, json_too=invocation.json, fields={})
        return FAILED
    except BaseException as error:
        if isinstance(error, SystemExit):
            return error.code if isinstance(error.code, int) else FAILED
        _tell(keep_trace(error, invocation), invocation)
        return FAILED


def _parse_and_do(words: list[str], invocation: Invocation) -> int:
    import typer

    from callboard.cli.app import command

    usage_error = typer.BadParameter.__mro__[2]  # ClickException, wherever typer has it from
    try:
        done = command().main(
            args=words, prog_name="callboard", standalone_mode=False, obj=invocation
        )
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        if not isinstance(error, usage_error):
            raise
        return _usage(cast("_Complaint", error), invocation)
    return done if isinstance(done, int) else 0


def _usage(complaint: _Complaint, invocation: Invocation) -> int:
    message = " ".join(complaint.format_message().split())
    path = getattr(complaint.ctx, "command_path", None) or "callboard"
    complain("usage", f"{message} — see: {path} --help", json_too=invocation.json, fields={})
    return complaint.exit_code


def _tell(error: CallboardError, invocation: Invocation) -> None:
    fields = {name: value for name, value in error.to_wire().items() if name != "code"}
    complain(error.code, str(error), json_too=invocation.json, fields=fields)


def keep_trace(error: BaseException, invocation: Invocation) -> Internal:
    """Write where an error came from into the logs, without what was said, and name the place."""
    from callboard.ids import fresh_id

    correlation_id = fresh_id()[:16]
    facts: dict[str, object] = {
        "level": "error",
        "correlation_id": correlation_id,
        "error": type(error).__name__,
        "frames": [
            f"{'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)[-_FRAMES_MAX:]
        ],
    }
    with suppress(Exception):
        _log(facts, invocation)
    return Internal(
        f"Something unexpected went wrong ({escape(type(error).__name__)}).",
        correlation_id=correlation_id,
    )


def _log(facts: dict[str, object], invocation: Invocation) -> None:
    """Write to the home's logs; where it has none, to callboard's folder below the user's cache."""
    import platformdirs

    from callboard.home import Home, make_directories
    from callboard.logs import open_log
    from callboard.reads import settings_of

    folder = None
    with suppress(CallboardError):
        folder = Home(settings_of(invocation.home).home).logs
    if folder is None or not folder.is_dir():
        folder = platformdirs.user_cache_path("callboard", appauthor=False) / "logs"
        make_directories(folder, durable=False)
    open_log(folder / "command.log")("internal", facts)
