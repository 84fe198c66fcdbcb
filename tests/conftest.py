"""What every test run has in common: Hypothesis profiles, and callables banned from the product."""

import marshal
import multiprocessing
import os
import pickle
import shelve
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, settings

from tests.whole import judge, short_folder

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


# O5: what a test leaves behind is whole, unless the test says that it damages its home, and why.


def _damages_home(request: pytest.FixtureRequest) -> bool:
    marker = request.node.get_closest_marker("damages_home")
    if marker is None:
        return False
    (reason,) = marker.args
    assert reason, "say why"
    return True


@pytest.fixture
def base(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder whose paths are short enough for sockets."""
    with short_folder(whole=not _damages_home(request)) as folder:
        yield folder


@pytest.fixture(autouse=True)
def _whole_homes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Judge the homes in a test's own folder when everything that worked on them has ended."""
    path: Path | None = None
    if "tmp_path" in request.fixturenames:
        path = request.getfixturevalue("tmp_path")
    yield
    if path is not None and not _damages_home(request):
        judge(path)
