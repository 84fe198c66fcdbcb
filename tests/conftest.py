"""What every test run has in common: Hypothesis profiles, and callables banned from the product."""

import marshal
import multiprocessing
import os
import pickle
import shelve
import sys
from collections.abc import Callable
from typing import Any

import zmq
from hypothesis import HealthCheck, settings

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci",
    max_examples=200,
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)


# FLT-58: the product never calls these; libraries may (multiprocessing pickles a start message).
BANNED: dict[object, tuple[str, ...]] = {
    pickle: ("dump", "dumps", "load", "loads"),
    marshal: ("dump", "dumps", "load", "loads"),
    shelve: ("open",),
    multiprocessing: ("Queue", "SimpleQueue", "JoinableQueue", "Manager"),
    zmq.Socket: ("recv_pyobj", "send_pyobj"),
}


def _refusing(real: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
        caller = str(sys._getframe(1).f_globals.get("__name__"))  # pyright: ignore[reportPrivateUsage]
        if caller.partition(".")[0] == "callboard":
            raise AssertionError(f"{caller} calls {name}, which the product never does (FLT-58)")
        return real(*args, **kwargs)

    return call


def pytest_configure() -> None:
    """Make each banned callable raise when a module of the product calls it."""
    for owner, names in BANNED.items():
        for name in names:
            setattr(owner, name, _refusing(getattr(owner, name), name))
