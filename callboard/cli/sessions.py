"""new, send, watch, cancel, ls, show: sessions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final, Literal

import typer

from callboard.cli.options import (
    HomeOption,
    JsonOption,
    SessionArgument,
    begin,
    configured,
    connected,
)
from callboard.cli.output import (
    CommandFailed,
    Invocation,
    UsageProblem,
    leave_logs_aside,
    say,
    say_json,
    say_lines,
    say_raw_json,
    table,
)
from callboard.cli.text import block, instant, shorten
from callboard.errors import InvalidRequest, PayloadTooLarge
from callboard.limits import ARTIFACT_BYTES_MAX, CATALOG_PAGE_ROWS_DEFAULT

if TYPE_CHECKING:
    from callboard.client import Outcome, Receipt
    from callboard.storage.catalog import CatalogPage
    from callboard.storage.metadata import SessionMetadata

_SECONDS_MIN: Final = 0.001
_RECEIPT_SECONDS: Final = 30.0
_TURN_SECONDS: Final = 600.0
Mode = Literal["steer", "queue", "interrupt"]


def new(
    ctx: typer.Context,
    agent: Annotated[
        str, typer.Option(help="module:function, or the short name of a registered agent.")
    ],
    workspace: Annotated[
        str, typer.Option(metavar="DIR", help="The folder that the session works in.")
    ] = ".",
    title: Annotated[str | None, typer.Option(help="What it is about.")] = None,
    model: Annotated[str | None, typer.Option(help="A model's name, for the agent.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting for the agent; repeatable."),
    ] = None,
    session_id: Annotated[
        str | None, typer.Option("--id", help="Its id in the workspace. Default: a new one.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Its first input; - reads the standard input.")
    ] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Make a session and print its id."""
    invocation = begin(ctx, home, json)
    settings = dict(_setting(text) for text in setting or ())
    first = None if prompt is None else _typed(prompt)
    with connected(invocation) as client:
        made = client.create_session(
            agent,
            workspace,
            title=title,
            model=model,
            settings=settings,
            session_id=session_id,
            prompt=first,
        )
    if invocation.json:
        ref = made.ref
        say_json({"session": str(ref), "session_id": ref.session_id, "key": ref.workspace_key})
    else:
        say(made.id)


def _setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise UsageProblem(
            InvalidRequest(
                f"--set {text} is not of the form NAME=VALUE.", field="settings", reason="format"
            )
        )
    return name, value


def send(
    ctx: typer.Context,
    session: SessionArgument,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The input; - reads the standard input.")
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Read the input from this file instead.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end of its turn, and print the answer.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=_SECONDS_MIN,
            help=f"Seconds to wait. Default: {_RECEIPT_SECONDS:g}, with --wait {_TURN_SECONDS:g}.",
        ),
    ] = None,
    message_id: Annotated[
        str | None,
        typer.Option(help="Its identity: the same id and text, sent again, is the same message."),
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="Join a running turn, wait for the next, or end it first.")
    ] = "steer",
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Put an input into a session; it is durable when this returns."""
    invocation = begin(ctx, home, json)
    content = _given(text, file)
    with connected(invocation) as client:
        place = client.session(session)
        receipt = place.send(
            content,
            message_id=message_id,
            busy_mode=mode,
            timeout=timeout or _RECEIPT_SECONDS,
        )
        if not wait:
            _say_receipt(invocation, receipt)
            return
        _say_outcome(invocation, place.wait(receipt, timeout or _TURN_SECONDS))


def _given(text: str | None, file: str | None) -> str:
    """Give the input: what was typed, or what a file holds."""
    if (text is None) == (file is None):
        raise UsageProblem(
            InvalidRequest("Give either TEXT or --file FILE.", field="text", reason="missing")
        )
    if text is not None:
        return _typed(text)
    assert file is not None
    try:
        with open(file, "rb") as source:
            return _read(source)
    except OSError as error:
        raise InvalidRequest(
            f"The file cannot be read ({error.strerror}).", field="file", reason="missing"
        ) from None


def _typed(text: str) -> str:
    """Give the input; bytes that are no UTF-8 become U+FFFD, as everywhere (REC-9)."""
    return _read(sys.stdin.buffer) if text == "-" else _some(text)


def _read(source: BinaryIO) -> str:
    """Read an input that no message may be longer than (ART-4)."""
    data = source.read(ARTIFACT_BYTES_MAX + 1)
    if len(data) > ARTIFACT_BYTES_MAX:
        raise PayloadTooLarge(limit="ARTIFACT_BYTES_MAX", maximum=ARTIFACT_BYTES_MAX)
    return _some(data.decode("utf-8", "replace"))


def _some(text: str) -> str:
    if not text:
        raise InvalidRequest("There is nothing to send.", field="text", reason="empty")
    return text


_WHERE: Final = {
    "current_turn": "it joins the running turn",
    "next_turn": "it waits for the next turn",
    "history": "it is in the history",
}


def _say_receipt(invocation: Invocation, receipt: Receipt) -> None:
    if invocation.json:
        say_json(receipt.model_dump(mode="json"))
        return
    known = ", known already" if receipt.duplicate else ""
    where = f"it is {receipt.item_state}" if receipt.duplicate else _WHERE[receipt.delivery]
    if receipt.mode == "direct":
        where = "it starts a turn"
    say(f"accepted {receipt.message_id}{known}: {where}")


def _say_outcome(invocation: Invocation, outcome: Outcome) -> None:
    if invocation.json:
        failure = None if outcome.failure is None else outcome.failure.model_dump(mode="json")
        say_json(
            {
                "message_id": outcome.message_id,
                "input_disposition": outcome.input_disposition,
                "outcome": outcome.outcome,
                "turn_id": outcome.turn_id,
                "text": outcome.text,
                "failure": failure,
                "reason": outcome.reason,
            }
        )
    elif outcome.text:
        say_lines(block(outcome.text))
    if outcome.ok:
        return
    if outcome.failure is not None:
        raise CommandFailed(
            outcome.failure.code, f"{outcome.failure.message}{_kept(outcome)}", said=True
        )
    how = outcome.outcome or outcome.input_disposition
    raise CommandFailed(how, f"the turn was {how}{_kept(outcome)}", said=True)


def _kept(outcome: Outcome) -> str:
    if outcome.input_disposition == "discarded":
        return f" — the input was given up ({outcome.reason}); send it again when that is mended"
    if outcome.input_disposition == "held":
        return " — the input is kept; the next send starts a turn that takes it"
    return ""


def watch(
    ctx: typer.Context,
    session: SessionArgument,
    from_seq: Annotated[
        int, typer.Option("--from", min=1, metavar="SEQ", help="The first record to show.")
    ] = 1,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Follow a session's transcript: what is stored, then what comes, until Ctrl-C."""
    invocation = begin(ctx, home, json)
    from callboard.cli.show import record_line

    with connected(invocation) as client:
        place = client.session(session)
        try:
            if invocation.json:
                for line in place.watch_lines(from_seq):
                    say_raw_json(line)
            else:
                for record in place.watch(from_seq):
                    say_lines((record_line(record),))
        except KeyboardInterrupt:
            return


def cancel(
    ctx: typer.Context,
    session: SessionArgument,
    turn: Annotated[
        str | None, typer.Option(metavar="TURN_ID", help="This turn and no other.")
    ] = None,
    message: Annotated[
        str | None,
        typer.Option(metavar="MESSAGE_ID", help="This input, or the turn that has taken it."),
    ] = None,
    keep_input: Annotated[
        bool, typer.Option("--keep-input", help="Keep the turn's inputs, until the next send.")
    ] = False,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """End a session's running turn, or discard an input that still waits."""
    invocation = begin(ctx, home, json)
    with connected(invocation) as client:
        result = client.session(session).cancel(turn, message, keep_input)
    if invocation.json:
        say_json(result.model_dump(mode="json"))
    if result.status == "not_found":
        raise CommandFailed(
            "not_found",
            "There is nothing to cancel — callboard show says what the session does",
            said=True,
        )
    if not invocation.json:
        which = f" {result.turn_id}" if result.turn_id else ""
        say(f"{result.status.replace('_', ' ')}{which}")


def ls(
    ctx: typer.Context,
    everywhere: Annotated[
        bool, typer.Option("--all", help="The sessions of all workspaces.")
    ] = False,
    workspace: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Those of this one. Default: the current folder's."),
    ] = None,
    limit: Annotated[
        int, typer.Option(help="At most so many, 1 to 100.")
    ] = CATALOG_PAGE_ROWS_DEFAULT,
    cursor: Annotated[str | None, typer.Option(help="Go on where a page before ended.")] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """List sessions, those with the latest message first, with the plane up or down."""
    invocation = begin(ctx, home, json)
    if everywhere and workspace is not None:
        raise UsageProblem(
            InvalidRequest(
                "--all and --workspace exclude each other.", field="workspace", reason="not_allowed"
            )
        )
    from callboard.reads import read_catalog

    leave_logs_aside()
    place = None if everywhere else workspace or "."
    page = read_catalog(configured(invocation).home, place, limit=limit, cursor=cursor)
    if invocation.json:
        say_json(page.to_json())
    else:
        _show_page(page, everywhere)


def _show_page(page: CatalogPage, everywhere: bool) -> None:
    heads = ["session", "agent", "turn", "messages", "last activity", "title"]
    rows = [_row(row) for row in page.rows]
    if everywhere:
        heads.append("workspace")
        rows = [[*cells, row.workspace] for cells, row in zip(rows, page.rows, strict=True)]
    if rows:
        table(heads, rows)
    else:
        say("No sessions" if everywhere else "No sessions here; --all lists those of all folders")
    for warning in page.warnings:
        say(f"warning: {warning.session_id} is damaged ({warning.code})")
    if page.next_cursor is not None:
        say(f"more: callboard ls {'--all ' if everywhere else ''}--cursor {page.next_cursor}")


def _row(row: SessionMetadata) -> list[str]:
    state = row.turn_state if row.state == "ok" else row.state
    return [
        row.ref.session_id,
        row.agent,
        state,
        str(row.message_count),
        instant(row.last_activity_at),
        shorten(row.title or "", 60),
    ]


def show(
    ctx: typer.Context,
    session: SessionArgument,
    full: Annotated[
        bool, typer.Option("--full", help="Long messages in full, in place of their excerpts.")
    ] = False,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Show a session: what it is, and its history, with the plane up or down."""
    invocation = begin(ctx, home, json)
    from callboard.cli.show import show_session

    show_session(configured(invocation).home, session, json_too=invocation.json, full=full)
