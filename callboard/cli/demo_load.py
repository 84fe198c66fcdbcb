"""What the demo does to a plane: a task for each session that steers it, and one that kills."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from callboard.aio import Plane, Session
from callboard.cli.demo_plan import (
    SESSION_KILLS_MAX,
    SESSION_KILLS_TOTAL_MAX,
    WINDOW_SECONDS,
    Kill,
    Size,
    plan_sends,
)
from callboard.cli.oracle import OracleFile
from callboard.door import content_of
from callboard.errors import CallboardError
from callboard.ids import fresh_ulid
from callboard.importers.script_file import Script
from callboard.messages import PlaneStatus, ProcessView
from callboard.records import item_digest
from callboard.supervisor.children import has_ended, send_signal

SEND_SECONDS: Final = 20.0
"""For one try; the client itself tries over and over within it."""
GIVE_UP_SECONDS: Final = 120.0
"""For one input, whatever the plane answers."""
RETRY_SECONDS: Final = 0.1
KILL_GRACE_SECONDS: Final = 15.0
"""How long kills may go on after the last input."""
TEXT_CHARS_MAX: Final = 2_000
_RESTARTS: Final = "restarts_"
_SEQ: Final = re.compile(rb'"seq":(\d+)')
_HEAD_BYTES: Final = 400

FINAL: Final = frozenset(
    {
        "invalid_request",
        "payload_too_large",
        "not_found",
        "request_conflict",
        "session_damaged",
        "session_quarantined",
        "inbox_corrupt",
        "plane_not_running",
        "protocol_unsupported",
        "not_authenticated",
        "cancelled",
    }
)
"""Refusals that another try of the same input will not change."""


@dataclass(slots=True)
class Tally:
    """What has happened so far; the view shows it, the verdict adds to it."""

    phase: str = "starting"
    began: float = field(default_factory=time.monotonic)
    accepted: int = 0
    acknowledged: int = 0
    steered: int = 0
    """Inputs that joined a running turn."""
    duplicates: int = 0
    """Receipts of which an earlier one was lost on its way."""
    retries: int = 0
    receipt_ms: list[float] = field(default_factory=list[float])
    recent: deque[float] = field(default_factory=lambda: deque[float](maxlen=512))
    """When the last receipts came."""
    kills: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[str] = field(default_factory=Counter[str])
    unsent: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """Inputs that were given up: session, message id, code."""
    status: PlaneStatus | None = None
    restarts: Counter[str] = field(default_factory=Counter[str])
    """By role, of the plane that is up; a plane counts from its start."""
    restarts_before: Counter[str] = field(default_factory=Counter[str])

    def see(self, status: PlaneStatus) -> None:
        """Take in what the plane says of itself."""
        self.status = status
        counted = status.counters.items()
        self.restarts = Counter(
            {name.removeprefix(_RESTARTS): n for name, n in counted if name.startswith(_RESTARTS)}
        )

    def plane_ended(self) -> None:
        """Keep what the plane that has ended had counted."""
        self.restarts_before += self.restarts
        self.restarts = Counter()
        self.status = None

    def receipts_per_second(self) -> float:
        """Give the rate of the last two seconds."""
        now = time.monotonic()
        return sum(1 for at in self.recent if at > now - 2) / 2


@dataclass(slots=True)
class Target:
    """A session of the demo."""

    session: Session
    script: Script
    name: str
    accepted: list[str] = field(default_factory=list[str])
    acknowledged: set[str] = field(default_factory=set[str])
    next_seq: int = 1
    """Where watching goes on."""
    killed_at: list[float] = field(default_factory=list[float])

    @property
    def settled(self) -> bool:
        """Tell whether everything accepted was acknowledged."""
        return self.acknowledged.issuperset(self.accepted)


# ---- Steering ----


async def steer(
    target: Target, size: Size, random: Random, oracle: OracleFile, tally: Tally
) -> None:
    """Send a session its inputs at its moments, each after the receipt of the one before."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for number, at in enumerate(plan_sends(random, size)):
        await asyncio.sleep(max(0.0, began + at - loop.time()))
        turn = target.script.turns[random.randrange(len(target.script.turns))]
        text = f"{target.name}.{number + 1} {turn.user}"[:TEXT_CHARS_MAX]
        if not await _send(target, text, oracle, tally):
            return


async def _send(target: Target, text: str, oracle: OracleFile, tally: Tally) -> bool:
    """Send one input until there is a receipt; false if there will never be one."""
    message_id = fresh_ulid()
    begun = time.monotonic()
    while True:
        try:
            receipt = await target.session.send(text, message_id=message_id, timeout=SEND_SECONDS)
        except CallboardError as error:
            tally.refusals[error.code] += 1
            if error.code in FINAL or time.monotonic() - begun > GIVE_UP_SECONDS:
                tally.unsent.append((str(target.session), message_id, error.code))
                return False
            tally.retries += 1
            await asyncio.sleep(_pause_of(error))
            continue
        oracle.write(
            str(target.session),
            message_id,
            item_digest(content_of(text), {}),
            time.time_ns() // 1_000,
        )
        now = time.monotonic()
        target.accepted.append(message_id)
        tally.accepted += 1
        tally.steered += receipt.delivery == "current_turn" and receipt.mode is None
        tally.duplicates += receipt.duplicate
        tally.receipt_ms.append((now - begun) * 1000)
        tally.recent.append(now)
        return True


def _pause_of(error: CallboardError) -> float:
    wait = error.carried.get("retry_after_ms")
    return min(wait / 1000, 2.0) if isinstance(wait, int) and wait > 0 else RETRY_SECONDS


# ---- Watching ----


async def watch(target: Target, session: Session, tally: Tally) -> None:
    """Follow a session for ever, and note what it acknowledges."""
    while True:
        with suppress(CallboardError):
            async for line in session.watch_lines(target.next_seq):
                _note(target, line, tally)
        await asyncio.sleep(RETRY_SECONDS)


def _note(target: Target, line: bytes, tally: Tally) -> None:
    found = _SEQ.search(line, 0, _HEAD_BYTES)
    if found is None:
        return
    target.next_seq = int(found[1]) + 1
    if b'"type":"inbox_acknowledged"' not in line[:_HEAD_BYTES]:
        return
    for item in json.loads(line)["data"]["items"]:
        if item["message_id"] not in target.acknowledged:
            target.acknowledged.add(item["message_id"])
            tally.acknowledged += 1


async def follow_status(plane: Plane, tally: Tally) -> None:
    """Ask for the plane's status, over and over."""
    while True:
        with suppress(CallboardError):
            tally.see(await plane.status(timeout=5))
        await asyncio.sleep(0.4)


# ---- Killing ----


def parent_of(pid: int) -> int:
    """Give the parent of a process, 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(text[text.rindex(b")") + 2 :].split()[1])


def kill_child(pid: int, parent: int) -> bool:
    """Kill a process by SIGKILL if it is a living child of this parent, and no other (FLT-37)."""
    if pid <= 1 or parent <= 1:
        return False
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if parent_of(pid) != parent:  # while the descriptor is held the pid is nobody else's
            return False
        if has_ended(pidfd):
            return False
        send_signal(pidfd, signal.SIGKILL)
        return True
    finally:
        os.close(pidfd)


class Killer:
    """Kills processes of one plane as planned, and counts them.

    Args:
        plane: whose processes.
        targets: its sessions.
        random: draws which of several.
        tally: counts.

    """

    def __init__(
        self, plane: Plane, targets: Sequence[Target], random: Random, tally: Tally
    ) -> None:
        self._plane, self._random, self._tally = plane, random, tally
        self._targets = {str(target.session): target for target in targets}

    async def run(self, kills: Sequence[Kill], seconds: float) -> None:
        """Carry out a plan.

        Args:
            kills: the plan.
            seconds: how long the steering lasts; what was not possible until some time after it is
                left out.

        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        last = began + seconds + KILL_GRACE_SECONDS
        for kill in kills:
            await asyncio.sleep(max(0.0, began + kill.at - loop.time()))
            while not await self._one(kill.role):
                if loop.time() > last:
                    return
                await asyncio.sleep(0.05)

    async def _one(self, role: str) -> bool:
        try:
            status = await self._plane.status(timeout=5)
        except CallboardError:
            return False
        self._tally.see(status)
        supervisor = self._plane.pid
        if role != "session":
            pids = [process.pid for process in status.processes if process.role == role]
            if not (pids and kill_child(pids[0], supervisor)):
                return False
            self._tally.kills[role] += 1
            return True
        return self._session(status, supervisor)

    def _session(self, status: PlaneStatus, supervisor: int) -> bool:
        forks = [process.pid for process in status.processes if process.role == "fork"]
        living = [process for process in status.processes if self._may_die(process)]
        if not (forks and living) or parent_of(forks[0]) != supervisor:
            return False
        chosen = self._random.choice(living)
        if not kill_child(chosen.pid, forks[0]):
            return False
        self._targets[str(chosen.session)].killed_at.append(time.monotonic())
        self._tally.kills["session"] += 1
        return True

    def _may_die(self, process: ProcessView) -> bool:
        """Tell whether a session's process may be killed: its session bears it, and has work."""
        target = self._targets.get(process.session or "")
        if process.role != "session" or target is None or process.pid <= 1 or target.settled:
            return False
        now = time.monotonic()
        lately = sum(1 for at in target.killed_at if now - at < WINDOW_SECONDS)
        return lately < SESSION_KILLS_MAX and len(target.killed_at) < SESSION_KILLS_TOTAL_MAX
