"""Agents for real processes."""

import asyncio
import os
import time

from callboard import agents


async def block(turn: agents.Turn) -> str:
    """Hold the thread for two seconds, as careless code does."""
    async for _ in turn:
        await turn.say("blocking")
        end = time.monotonic() + 2
        while time.monotonic() < end:
            pass
    return "awake"


async def stuck(turn: agents.Turn) -> None:
    """Never give the thread back."""
    async for _ in turn:
        await turn.say("stuck")
        while True:
            time.sleep(0.01)


async def leave(turn: agents.Turn) -> None:
    """Leave a task behind that ends the loop's thread, if it can."""
    async for _ in turn:

        async def exit_later() -> None:
            raise SystemExit(9)

        task = asyncio.get_running_loop().create_task(exit_later())
        await asyncio.sleep(0)
        del task


async def die(turn: agents.Turn) -> None:
    """End the process as a broken library does."""
    async for _ in turn:
        os.abort()
