"""Agents that misbehave; named by tests as `tests.system.agents:name`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from callboard import agents


async def suicide(turn: agents.Turn) -> None:
    """End the process in every turn."""
    os.kill(os.getpid(), signal.SIGKILL)


async def slow(turn: agents.Turn) -> None:
    """Say each message back, and take a while over it."""
    async for message in turn:
        await turn.tool("sleep", seconds=0.02)
        await turn.say(message.text)


async def nap(turn: agents.Turn) -> None:
    """Work for longer than any test."""
    async for _message in turn:
        await turn.tool("sleep", seconds=600.0)


async def parent(turn: agents.Turn) -> None:
    """Start a process that dies with this one, and say its pid."""
    code = (
        "import ctypes, signal, time;"
        "ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0); print(flush=True);"
        "time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    async for _message in turn:
        await turn.say(str(child.pid))
        await turn.tool("sleep", seconds=600.0)
