"""One run of the demo, from a fresh home to the verdict."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from callboard import aio
from callboard.cli.demo import fail_unless_clean
from callboard.cli.demo_load import Killer, Tally, Target, follow_status, steer, watch
from callboard.cli.demo_plan import Size, percentile, plan_kills, speed_of
from callboard.cli.demo_view import live, rows_of, show_verdict
from callboard.cli.evidence import verify_home
from callboard.cli.oracle import OracleFile, beside, oracle_of
from callboard.cli.output import CommandFailed, console, say, say_json
from callboard.cli.verdict import Verdict
from callboard.errors import CallboardError, InvalidRequest, PlaneNotRunning
from callboard.home import make_directories
from callboard.ids import fresh_ulid
from callboard.importers.script import Script, dump_script, load_shipped, read_transcript

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

WATCHES_PER_CONNECTION: Final = 64
_FRAME_SECONDS: Final = 0.25
_CREATE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for on the command line."""

    size: Size
    transcripts: tuple[str, ...]
    seed: int | None
    home: str | None
    silent: bool
    """Say nothing until the end."""
    live: bool
    """A person looks at a terminal."""


class SupervisorLost(CommandFailed):
    """Somebody ended the plane under the demo."""

    def __init__(self, home: Path) -> None:
        super().__init__(
            "plane_not_running",
            "The supervisor was ended from outside, in the middle of the demo — go on with: "
            f"callboard up --home {home}, then: callboard demo --verify-home {home}",
        )


def run_demo(wishes: Wishes) -> None:
    """Run the demo and print its verdict.

    Raises:
        CommandFailed: something is lost, doubled or out of order; an input was never accepted; or
            the supervisor was ended from outside.
        InvalidRequest: the home is not fresh, or a transcript cannot be played.

    """
    scripts = [read_script(path) for path in wishes.transcripts] or [load_shipped()]
    seed = int.from_bytes(os.urandom(4), "little") if wishes.seed is None else wishes.seed
    home = fresh_home(wishes.home)
    run = _Run(wishes, home, scripts, seed)
    try:
        verdict = asyncio.run(run.play())
    except KeyboardInterrupt:
        say(f"Stopped; judge what there is with: callboard demo --verify-home {home}")
        raise
    run.report(verdict)
    _mark_clean(home, verdict)
    fail_unless_clean(verdict)
    if run.tally.unsent:
        session, message_id, code = run.tally.unsent[0]
        raise CommandFailed(
            code,
            f"{len(run.tally.unsent)} sessions were not steered to the end; first: {session}, "
            f"input {message_id} was refused",
        )


def read_script(path: str) -> Script:
    """Read a transcript to play.

    Raises:
        InvalidRequest: the file cannot be read.
        ImportFormatUnknown, ImportMalformed, ImportTooLarge: it cannot be played.

    """
    try:
        return read_transcript(path)
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be read: {error.strerror}.", field="transcript", reason="missing"
        ) from None


# ---- The home ----


def cache_folder() -> Path:
    """Name the folder of the demo's own homes."""
    import platformdirs

    return platformdirs.user_cache_path("callboard", appauthor=False) / "demo"


def fresh_home(named: str | None) -> Path:
    """Give a home that does not exist yet, in a folder that does.

    Raises:
        InvalidRequest: something is there already.

    """
    if named is None:
        _sweep(cache_folder())
        home = cache_folder() / fresh_ulid() / "home"
    elif not named or "\0" in named:
        raise InvalidRequest("--home is no path.", field="home", reason="empty")
    else:
        home = Path(os.path.realpath(named))
    if oracle_of(home).exists() or not _is_fresh(home):
        raise InvalidRequest(
            f"There is something in {home} already; the demo wants a fresh home, or judges an "
            "old one with --verify-home.",
            field="home",
            reason="not_allowed",
        )
    make_directories(home.parent, durable=False)
    return home


def _is_fresh(home: Path) -> bool:
    try:
        return not any(home.iterdir())
    except FileNotFoundError:
        return True
    except OSError:
        return False  # a file, or someone else's


def _clean_mark(home: Path) -> Path:
    return beside(home, ".clean")


def _mark_clean(home: Path, verdict: Verdict) -> None:
    """Let the next demo remove this home, if it is the demo's own and nothing is wrong in it."""
    if verdict.clean and home.is_relative_to(cache_folder()):
        _clean_mark(home).touch(mode=0o600)


def _sweep(folder: Path) -> None:
    """Remove the homes of earlier demos in which nothing was wrong."""
    with suppress(OSError):
        for found in folder.iterdir():
            if not found.is_symlink() and _clean_mark(found / "home").exists():
                shutil.rmtree(found, ignore_errors=True)


# ---- The run ----


class _Run:
    def __init__(self, wishes: Wishes, home: Path, scripts: Sequence[Script], seed: int) -> None:
        self.tally = Tally()
        self._wishes, self._home, self._seed = wishes, home, seed
        self._size = wishes.size
        self._scripts = scripts
        self._oracle = OracleFile(oracle_of(home))
        self._live: Live | None = None

    async def play(self) -> Verdict:
        """Steer and kill, stop, open again, wait, stop, compare."""
        with self._screen():
            targets = await self._steer()
            await self._settle(targets)
            self._phase("comparing", "Comparing every receipt with the transcripts")
            return await asyncio.to_thread(verify_home, self._home)

    async def _steer(self) -> list[Target]:
        size = self._size
        self._phase("starting", f"Starting a plane on {self._home}, seed {self._seed}")
        async with self._plane() as plane:
            targets = await self._create(plane)
            self._phase(
                "steering",
                f"Steering {size.sessions} sessions for about {size.seconds:.0f} s, and killing "
                f"{size.kills} processes under them",
            )
            killer = Killer(plane, targets, Random(f"{self._seed}/targets"), self.tally)
            kills = plan_kills(Random(f"{self._seed}/kills"), size)
            work = [
                steer(target, size, Random(f"{self._seed}/{target.name}"), self._oracle, self.tally)
                for target in targets
            ]
            work.append(killer.run(kills, size.seconds))
            async with self._watchers(targets) as watches:
                await self._race(plane, work, [*watches, follow_status(plane, self.tally)])
            with suppress(CallboardError):
                self.tally.see(await plane.status(timeout=5))
            self._phase("stopping", "Stopping the plane in the middle of it")
        self.tally.plane_ended()
        self._oracle.close()
        return targets

    async def _settle(self, targets: list[Target]) -> None:
        self._phase("opening again", "Opening it again, and waiting for what it has accepted")
        async with self._plane() as plane:
            work = [self._all_acknowledged(targets)]
            async with self._watchers(targets) as watches:
                await self._race(plane, work, [*watches, follow_status(plane, self.tally)])

    async def _all_acknowledged(self, targets: list[Target]) -> None:
        self.tally.phase = "working off"
        with suppress(TimeoutError):
            async with asyncio.timeout(self._size.settle_seconds):
                while not all(target.settled for target in targets):
                    await asyncio.sleep(0.05)

    def _plane(self) -> aio.Plane:
        settings = {"resident_sessions": self._size.sessions + 8}
        return aio.Plane(self._home, settings)

    async def _create(self, plane: aio.Plane) -> list[Target]:
        """Make the sessions; each plays one of the scripts."""
        paths = [self._dump(number, script) for number, script in enumerate(self._scripts)]
        made = [self._make(plane, number, paths) for number in range(self._size.sessions)]
        return await asyncio.gather(*made)

    async def _make(self, plane: aio.Plane, number: int, paths: Sequence[Path]) -> Target:
        script = self._scripts[number % len(paths)]
        speed = speed_of(script, self._size.turn_seconds)
        session = await plane.create_session(
            "replay",
            self._home.parent,
            title=f"demo {number + 1}: {script.name}"[:200],
            settings={
                "replay.script": str(paths[number % len(paths)]),
                "replay.speed": f"{speed:.6g}",
            },
            timeout=_CREATE_SECONDS,
        )
        return Target(session, script, str(number + 1))

    def _dump(self, number: int, script: Script) -> Path:
        path = beside(self._home, f".script-{number}.jsonl")
        with path.open("wb") as stream:
            dump_script(script, stream)
        return path

    # ---- Tasks ----

    def _watchers(self, targets: Sequence[Target]) -> _Watchers:
        return _Watchers(self._home, targets, self.tally)

    async def _race(
        self,
        plane: aio.Plane,
        work: Sequence[Coroutine[object, object, None]],
        beside_it: Sequence[Coroutine[object, object, None]],
    ) -> None:
        """Do the work, with the rest going on beside it, while the supervisor lives."""
        working = [asyncio.ensure_future(one) for one in work]
        others = [asyncio.ensure_future(one) for one in (*beside_it, self._draw())]
        try:
            while not all(task.done() for task in working):
                if not plane.alive:
                    raise SupervisorLost(self._home)
                await asyncio.wait(
                    [task for task in (*working, *others) if not task.done()],
                    timeout=_FRAME_SECONDS,
                    return_when=asyncio.FIRST_EXCEPTION,
                )
                for task in (*working, *others):
                    if task.done():
                        task.result()
            if not plane.alive:
                raise SupervisorLost(self._home)
        finally:
            for task in (*working, *others):
                task.cancel()
            await asyncio.gather(*working, *others, return_exceptions=True)

    # ---- The screen ----

    @contextmanager
    def _screen(self) -> Generator[None]:
        if not self._wishes.live:
            yield
            return
        from rich.live import Live

        with Live(self._picture(), console=console(), auto_refresh=False) as self._live:
            yield
            self._live.update(self._picture(), refresh=True)

    def _picture(self) -> RenderableType:
        return live(self.tally, self._size, self._seed)

    async def _draw(self) -> None:
        while True:
            self._show()
            await asyncio.sleep(_FRAME_SECONDS)

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)

    def _phase(self, name: str, sentence: str) -> None:
        self.tally.phase = name
        if self._live is None and not self._wishes.silent:
            say(sentence)
        self._show()

    # ---- The end ----

    def report(self, verdict: Verdict) -> None:
        """Print the figures and the verdict."""
        if self._wishes.silent:
            say_json(self._figures(verdict))
            return
        if not self._wishes.live:
            for label, text in rows_of(self.tally, self._size, self._seed)[2:]:
                say(f"{label:<10}{text}")
        print()
        show_verdict(verdict)
        say(f"The home is {self._home}; look into it with: callboard ls --all --home {self._home}")

    def _figures(self, verdict: Verdict) -> dict[str, object]:
        tally = self.tally
        roles = ("session", "gateway", "storage", "supervisor")
        return {
            **verdict.figures(),
            "kills": {role: tally.kills[role] for role in roles},
            "restarts": dict(tally.restarts_before + tally.restarts),
            "seconds": round(time.monotonic() - tally.began, 2),
            "receipt_ms": {
                "p50": round(percentile(tally.receipt_ms, 0.5), 3),
                "p99": round(percentile(tally.receipt_ms, 0.99), 3),
            },
            "seed": self._seed,
            "steered": tally.steered,
            "duplicates": tally.duplicates,
            "retries": tally.retries,
            "refusals": dict(tally.refusals),
            "unsent": len(tally.unsent),
            "home": str(self._home),
            "findings": [finding._asdict() for finding in verdict.findings],
        }


class _Watchers:
    """Connections of their own for the watches: each of them has a limit of requests."""

    def __init__(self, home: Path, targets: Sequence[Target], tally: Tally) -> None:
        self._home, self._targets, self._tally = home, targets, tally
        self._clients: list[aio.Client] = []

    async def __aenter__(self) -> list[Coroutine[object, object, None]]:
        watches: list[Coroutine[object, object, None]] = []
        for number, target in enumerate(self._targets):
            if number % WATCHES_PER_CONNECTION == 0:
                self._clients.append(await self._connect())
            session = await self._clients[-1].session(target.session.ref)
            watches.append(watch(target, session, self._tally))
        return watches

    async def _connect(self) -> aio.Client:
        """Connect; the gateway may have died just now."""
        while True:
            try:
                return await aio.connect(self._home)
            except PlaneNotRunning:
                await asyncio.sleep(0.05)

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            with suppress(CallboardError):
                await client.close()
