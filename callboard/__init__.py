"""callboard: a durable, local agent backplane.

    with callboard.Plane() as plane:
        session = plane.create_session(agent="echo", workspace=".")
        session.send("hello")

What stands here is loaded when it is first used: the processes of a plane import this package too,
and pay for nothing but what they need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from callboard import aio as aio
    from callboard import errors as errors
    from callboard import testing as testing
    from callboard.agents import Message as Message
    from callboard.agents import ToolError as ToolError
    from callboard.agents import Turn as Turn
    from callboard.agents import agent as agent
    from callboard.client import CancelResult as CancelResult
    from callboard.client import Client as Client
    from callboard.client import Outcome as Outcome
    from callboard.client import Plane as Plane
    from callboard.client import PlaneStatus as PlaneStatus
    from callboard.client import Receipt as Receipt
    from callboard.client import Session as Session
    from callboard.client import connect as connect
    from callboard.config import Settings as Settings
    from callboard.errors import CallboardError as CallboardError

__all__ = [
    "CallboardError",
    "CancelResult",
    "Client",
    "Message",
    "Outcome",
    "Plane",
    "PlaneStatus",
    "Receipt",
    "Session",
    "Settings",
    "ToolError",
    "Turn",
    "agent",
    "aio",
    "connect",
    "errors",
    "testing",
]

_HOMES = {
    "agents": ("Message", "ToolError", "Turn", "agent"),
    "client": (
        "CancelResult",
        "Client",
        "Outcome",
        "Plane",
        "PlaneStatus",
        "Receipt",
        "Session",
        "connect",
    ),
    "config": ("Settings",),
    "errors": ("CallboardError",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        found: object = getattr(importlib.import_module(f"callboard.{_MODULE_OF[name]}"), name)
    elif name in __all__:
        found = importlib.import_module(f"callboard.{name}")
    else:
        raise AttributeError(f"module 'callboard' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
