"""Agents for the benches; a plane finds them when the repository is in PYTHONPATH."""

from __future__ import annotations

from typing import cast

from callboard import Turn
from callboard.actors.session.agents import Stage
from callboard.limits import INBOX_USER_ITEMS_MAX

POLL_SETTING = "bench.poll_ms"
TAKEN_MAX = INBOX_USER_ITEMS_MAX * 2 // 5
"""Inputs of one turn: they leave the inbox only with its end, and it must never be full."""


async def steered(turn: Turn) -> None:
    """Keep the turn open and take what is steered in, as an agent at work does.

    A turn ends after some inputs, since an inbox holds no more; the next one starts at once with
    those that came meanwhile.
    """
    stage = cast("Stage", turn)
    pause = int(turn.settings.get(POLL_SETTING, "2")) / 1000
    taken = 0
    while taken < TAKEN_MAX:
        taken += len(await stage.steered())
        await stage.pause(pause)
