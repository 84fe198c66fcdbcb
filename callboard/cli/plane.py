"""up, down, status: the plane as a whole."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from callboard.cli.options import HomeOption, JsonOption, begin, configured, connected
from callboard.cli.output import CommandFailed, Invocation, say, say_json, table
from callboard.cli.text import instant
from callboard.errors import DeadlineExceeded

if TYPE_CHECKING:
    from callboard.messages import PlaneStatus
    from callboard.supervisor.launch import Launched

_POLL_SECONDS: Final = 0.02
_SECONDS_MIN: Final = 0.001


def up(
    ctx: typer.Context,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the plane is up; it goes on.")
    ] = False,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Start a plane.

    It stays in the foreground until Ctrl-C, which stops it in order; a second Ctrl-C does not wait.
    """
    invocation = begin(ctx, home, json)
    settings = configured(invocation)
    from callboard.supervisor.launch import launch

    launched = launch(settings.home, settings, detach=detach, embedded=not detach)
    try:
        if not detach:
            _stop_on_signals(launched)
        _say_up(invocation, launched, settings.home, detach)
        if not detach:
            _stay(launched)
    finally:
        launched.close()


def _stop_on_signals(launched: Launched) -> None:
    def stop(_number: int, _frame: object) -> None:
        launched.terminate()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)


def _say_up(invocation: Invocation, launched: Launched, home: Path, detach: bool) -> None:
    if invocation.json:
        say_json(
            {
                "plane_id": launched.plane_id,
                "home": str(home),
                "pid": launched.pid,
                "detached": detach,
            }
        )
        return
    how = "stop it with: callboard down" if detach else "Ctrl-C stops it"
    say(f"The plane is up on {home} (pid {launched.pid}); {how}")


def _stay(launched: Launched) -> None:
    status = launched.wait()
    if status:
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        raise CommandFailed(
            "plane_not_running",
            f"The supervisor ended {how} — start it again with: callboard up, it recovers",
        )


def down(
    ctx: typer.Context,
    timeout: Annotated[
        float, typer.Option(min=_SECONDS_MIN, help="Seconds to wait for its end.")
    ] = 30.0,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Stop the plane in order: turns end, what waits is kept."""
    invocation = begin(ctx, home, json)
    from callboard.home import Home
    from callboard.link import supervisor_lives

    until = time.monotonic() + timeout
    with connected(invocation) as client:
        client.down(timeout=timeout)
        place = Home(client.home)
    while supervisor_lives(place):
        if time.monotonic() >= until:
            raise DeadlineExceeded(scope="down")
        time.sleep(_POLL_SECONDS)
    if invocation.json:
        say_json({"stopped": True, "home": str(place.root)})
    else:
        say(f"The plane on {place.root} has stopped")


def status(
    ctx: typer.Context,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Show how the plane is: its processes, its sessions, what it has counted."""
    invocation = begin(ctx, home, json)
    with connected(invocation) as client:
        found = client.status()
    if invocation.json:
        say_json(found.model_dump(mode="json"))
    else:
        _show(found)


def _show(found: PlaneStatus) -> None:
    say(f"plane    {found.plane_id}, up since {instant(found.started_at)}")
    say(f"epochs   plane {found.plane_epoch}, gateway {found.gateway_epoch}")
    say(f"sessions {_counts(found.sessions) or 'none has a process'}")
    say(f"counted  {_counts(found.counters) or 'nothing yet'}")
    for one in found.levels:
        if one.alarm:
            say(f"alarm    {one.name} is {one.value}, the limit is {one.limit}")
    if found.detail:
        say(f"detail   {found.detail}")
    print()
    rows = [
        (p.role, str(p.pid), p.state, str(p.restarts), p.session or "") for p in found.processes
    ]
    table(("process", "pid", "state", "restarts", "session"), rows)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{value} {name}" for name, value in counts.items())
