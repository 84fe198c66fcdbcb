"""How a program starts a plane: `launch` runs a supervisor and returns when the plane is up.

The supervisor is a process of its own with one descriptor of ours, an unnamed socket pair: the
start order goes in, one line of JSON comes out (`ready`, or a typed error). When the plane is
embedded the pair stays open, and its end tells the supervisor that the program has ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, cast

from callboard.config import Settings
from callboard.errors import CallboardError, DeadlineExceeded, HomeInUse, Internal
from callboard.supervisor import children
from callboard.supervisor.tree import LOCK_HELD

SUPERVISOR: Final = "callboard.supervisor"
_LINE_BYTES_MAX: Final = 65_536


@dataclass(frozen=True, slots=True)
class StartOrder:
    """What a supervisor is told at its start."""

    settings: str
    """config.Settings as JSON; its home is the plane's."""
    embedded: bool
    """Stop in order when the other end of the channel is closed."""
    modules: Mapping[str, str]
    """By role, what runs in place of the product's own module; for tests."""

    def to_json(self) -> bytes:
        """Spell the order as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_json(data: bytes) -> StartOrder:
        """Read an order that `to_json` spelled."""
        return StartOrder(**json.loads(data))


class Launched:
    """A plane that was started: its supervisor's process.

    Leaving it as a context manager stops an embedded plane and waits for its end.
    """

    def __init__(self, spawned: children.Spawned, *, embedded: bool) -> None:
        self.pid = spawned.pid
        self.pidfd = spawned.pidfd
        self.plane_id = ""
        self.status: int | None = None
        """The exit status, once `wait` has seen it."""
        self._embedded = embedded
        self._channel = spawned.channel
        self._stderr = spawned.stderr

    def terminate(self) -> None:
        """Ask the plane to stop in order; a second time: not to wait."""
        children.send_signal(self.pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """End the supervisor at once; its children end with it, recovery does the rest."""
        children.send_signal(self.pidfd, signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the supervisor's end.

        Returns:
            Its exit status, -N for signal N; none if it has not ended in time.

        """
        if self.status is None and children.has_ended(self.pidfd, timeout_s):
            status = children.reap(self.pidfd)
            self.status = 0 if status is None else status  # none: someone else has reaped it
        return self.status

    def close(self) -> None:
        """Let go of the process without ending it; an embedded plane stops in order then."""
        self._channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            os.close(self._stderr)
            self.pidfd = self._stderr = -1

    def __enter__(self) -> Launched:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._embedded and self.pidfd >= 0:
            self.terminate()
            self.wait()
        self.close()

    def await_ready(self, timeout_s: float | None) -> None:
        """Wait until the plane is up.

        Raises:
            CallboardError: what the supervisor could not do.
            DeadlineExceeded: neither came in time; the supervisor was ended.

        """
        line = self._first_line(timeout_s)
        fields = cast("dict[str, object]", json.loads(line)) if line else {}
        if "ready" in fields:
            self.plane_id = str(fields["ready"])
            if not self._embedded:
                self._channel.close()
            return
        status = self.wait()
        answer = fields.get("error")
        why = str(fields.get("message") or children.last_words(self._stderr) or f"status {status}")
        self.close()
        if isinstance(answer, dict):
            raise _with_message(cast("dict[str, object]", answer), str(fields.get("message", "")))
        if status == LOCK_HELD:
            raise HomeInUse
        raise Internal(f"The plane did not start: {why}.")

    def _first_line(self, timeout_s: float | None) -> bytes:
        """Read the status line, one packet; nothing if the supervisor ended without one."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        if not poll.poll(None if timeout_s is None else timeout_s * 1000):
            self.kill()
            self.wait()
            self.close()
            raise DeadlineExceeded(scope="up")
        try:
            return self._channel.recv(_LINE_BYTES_MAX)
        except ConnectionResetError:
            return b""


def _with_message(answer: Mapping[str, object], message: str) -> CallboardError:
    error = CallboardError.from_wire(answer)
    return type(error)(message, **error.carried) if message else error


def launch(
    home: Path,
    settings: Settings,
    *,
    detach: bool,
    embedded: bool = False,
    timeout_s: float | None = None,
    modules: Mapping[str, str] | None = None,
) -> Launched:
    """Start a plane and wait until it is up.

    Args:
        home: the home; it takes the place of the one in the settings.
        settings: what the plane runs with.
        detach: the plane outlives this program, whatever happens to it.
        embedded: the plane stops in order when this program ends, however it ends. Neither of
            the two: it goes on, and the caller signals and waits.
        timeout_s: how long to wait; none for as long as recovery takes.
        modules: for tests, modules to run in place of the product's own, by role.

    Returns:
        The supervisor's process.

    Raises:
        HomeInUse: another plane has this home (FLT-28c).
        HomeUnsafe, FormatUnsupported, JournalDamaged, InvalidRequest: the start was refused.
        DeadlineExceeded: it took longer than `timeout_s`.
        Internal: the supervisor ended without saying why.

    """
    if detach and embedded:
        raise ValueError("a detached plane is not embedded")
    placed = settings.model_copy(update={"home": home})
    order = StartOrder(placed.model_dump_json(), embedded, dict(modules or {}))
    spawned = children.spawn(children.Program(SUPERVISOR, order.to_json(), two_way=True))
    launched = Launched(spawned, embedded=embedded)
    try:
        launched.await_ready(timeout_s)
    except BaseException:
        if launched.pidfd >= 0:  # interrupted: nobody would stop it
            launched.terminate()
            launched.close()
        raise
    return launched
