"""verify, doctor: is the home whole, and what can be put right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from callboard.cli.options import HomeOption, JsonOption, begin, configured
from callboard.cli.output import CommandFailed, Invocation, leave_logs_aside, say, say_json
from callboard.errors import InvalidRequest

if TYPE_CHECKING:
    from callboard.storage.doctor import Action, Done
    from callboard.storage.findings import Finding
    from callboard.storage.verify import Totals


def verify(
    ctx: typer.Context,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Check everything that the home holds, with the plane up or down; change nothing.

    Journal, transcripts, inboxes, leases, artifacts, the index, names, modes and owners. Exit
    status 1 if anything is wrong; each finding names the file, the place and the way out.
    """
    invocation = begin(ctx, home, json)
    leave_logs_aside()
    place = _place(invocation)
    from callboard.storage.verify import Totals, verify

    totals = Totals()
    count = settled = 0
    for finding in verify(place, totals):
        count += finding.is_open
        settled += not finding.is_open
        _say_finding(invocation, finding)
    _say_totals(invocation, totals, count, settled)
    if count:
        raise CommandFailed(
            "findings",
            f"{_number(count, 'finding')} — callboard doctor says what can be done",
            said=True,
        )


def _place(invocation: Invocation) -> Path:
    """Give the home, which must be there: to find nothing wrong with nothing helps nobody."""
    place = configured(invocation).home
    if not os.path.isdir(place):
        raise InvalidRequest(f"There is no home at {place}.", field="home", reason="missing")
    return place


def _say_finding(invocation: Invocation, finding: Finding) -> None:
    if invocation.json:
        say_json({"finding": finding.to_json()})
        return
    say(finding.text())
    if finding.salvaged_as is None:
        say(f"  way out: {finding.meaning.way_out}")
    else:
        say(f"  dealt with: what was sound of it is in {finding.salvaged_as}")


def _say_totals(invocation: Invocation, totals: Totals, count: int, settled: int) -> None:
    if invocation.json:
        say_json(
            {
                "findings": count,
                "settled": settled,
                "sessions": totals.sessions,
                "records": totals.records,
                "bytes": totals.bytes,
                "artifacts": totals.artifacts,
                "as_of": totals.as_of,
                "plane_up": totals.plane_up,
            }
        )
        return
    looked = f"{_number(totals.sessions, 'session')}, {_number(totals.records, 'record')}"
    result = _number(count, "finding") if count else "nothing is wrong"
    known = f", and {settled} dealt with already" if settled else ""
    say(f"Looked at {looked}, as of commit {totals.as_of}: {result}{known}")


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def doctor(
    ctx: typer.Context,
    repair: Annotated[
        bool, typer.Option("--repair", help="Do it. Needs the plane to be down.")
    ] = False,
    session: Annotated[
        str | None,
        typer.Option(
            metavar="SESSION", help="This session alone, as <workspace key>/<id>. Default: all."
        ),
    ] = None,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Say what is wrong with the home and what would be done about it; with --repair do it.

    Nothing is destroyed: a file that is replaced is kept below `aside/` in the home, and what is
    sound of a transcript that cannot be put back goes into a new session. Exit status 1 if
    anything is wrong, with --repair if anything is left.
    """
    invocation = begin(ctx, home, json)
    leave_logs_aside()
    place = _place(invocation)
    from callboard.ids import parse_ref
    from callboard.storage.doctor import examine

    only = None if session is None else parse_ref(session)
    if repair:
        _repair(invocation, place, None if only is None else str(only))
        return
    found = examine(place, only=None if only is None else str(only))
    for finding in found.findings:
        _say_finding(invocation, finding)
    for action in found.actions:
        _say_action(invocation, action)
    left = sum(one.is_open for one in found.findings)
    if invocation.json:
        say_json({"findings": left, "actions": len(found.actions), "repaired": False})
    elif found.actions:
        say("Nothing was changed; callboard doctor --repair does this, with the plane down")
    elif not left:
        say("Nothing is wrong")
    if left:
        raise CommandFailed("findings", f"{_number(left, 'finding')}", said=True)


def _repair(invocation: Invocation, place: Path, only: str | None) -> None:
    from callboard.storage.doctor import repair
    from callboard.supervisor.residence import taken

    done: list[Done] = []
    with taken(place):
        for one in repair(place, only=only):
            done.append(one)
            _say_done(invocation, one)
        left = _left(invocation, place, only)
    if invocation.json:
        say_json({"findings": left, "actions": len(done), "repaired": True})
    elif not left:
        say("Nothing is wrong any more" if done else "Nothing is wrong")
    if left:
        raise CommandFailed(
            "findings",
            f"{_number(left, 'finding')} left, which nobody can put right from here",
            said=True,
        )


def _left(invocation: Invocation, place: Path, only: str | None) -> int:
    from callboard.storage.doctor import examine

    left = [one for one in examine(place, only=only).findings if one.is_open]
    for finding in left:
        _say_finding(invocation, finding)
    return len(left)


def _say_action(invocation: Invocation, action: Action) -> None:
    if invocation.json:
        say_json({"action": action.to_json()})
    else:
        say(f"would {action.text()}")


def _say_done(invocation: Invocation, done: Done) -> None:
    if invocation.json:
        say_json({"done": done.to_json()})
    else:
        say(f"done: {done.action.text()}{done.says}")
