"""What becomes of the inputs of a failed turn: tried again, held, or spent (RTY). Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from callboard.limits import (
    INPUT_ATTEMPTS_MAX,
    RETRY_BASE_MS,
    RETRY_DELAY_MS_MAX,
    RETRY_JITTER_PERCENT,
    RETRY_WINDOW_MS,
)


class Verdict(NamedTuple):
    """What a failed turn's terminal says of its inputs."""

    spent: frozenset[str] = frozenset()
    """Inputs without an attempt left: the terminal's frame discards them."""
    hold: bool = False
    """The others wait until somebody asks for them."""
    retry_ms: int | None = None
    """The others start a turn by themselves after so long."""


def after_failure(
    session: str,
    turn_id: str,
    attempts: Mapping[str, int],
    *,
    retryable: bool,
    wrote_output: bool,
    waited_ms: int,
) -> Verdict:
    """Decide about the inputs that a failed turn leaves.

    Args:
        session: the session's reference as text.
        turn_id: the turn that failed.
        attempts: of each claimed input, the failed turn counted in.
        retryable: as the failure says (FLR-3a).
        wrote_output: the turn wrote an assistant part or a tool call.
        waited_ms: since the first abort of this row of failures.

    """
    spent = spent_of(attempts)
    left = [count for name, count in attempts.items() if name not in spent]
    if not left:
        return Verdict(spent)
    if not retryable or wrote_output:
        return Verdict(spent, hold=True)
    delay = retry_delay_ms(session, turn_id, max(left))
    if waited_ms + delay > RETRY_WINDOW_MS:
        return Verdict(spent, hold=True)
    return Verdict(spent, retry_ms=delay)


def spent_of(attempts: Mapping[str, int]) -> frozenset[str]:
    """Name the inputs that have no attempt left (RTY-1b)."""
    return frozenset(name for name, count in attempts.items() if count >= INPUT_ATTEMPTS_MAX)


def retry_delay_ms(session: str, turn_id: str, attempts: int) -> int:
    """Compute the delay after the k-th failed attempt, in milliseconds (RTY-3).

    The jitter depends on session and turn alone, so that a restarted session computes the same.
    """
    delay = min(RETRY_BASE_MS << min(attempts - 1, 16), RETRY_DELAY_MS_MAX)
    spread = delay * RETRY_JITTER_PERCENT // 100
    chance = hashlib.sha256(f"{session}\0{turn_id}".encode()).digest()[:4]
    return delay - spread + int.from_bytes(chance, "big") % (2 * spread + 1)
