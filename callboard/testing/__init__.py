"""For tests of programs that use callboard: a real plane in a home of its own.

def test_my_agent(tmp_path):
    with callboard.testing.plane(tmp_path) as plane:
        session = plane.create_session(agent="my.module:agent", workspace=tmp_path)
        assert session.wait(session.send("hello")).text == "hi"
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from callboard.client import Plane
from callboard.config import Settings

START_TIMEOUT = 30.0
"""Seconds: a fresh home has nothing to recover, so more than this is a failure."""


@contextmanager
def plane(folder: str | os.PathLike[str], **settings: object) -> Generator[Plane]:
    """Run a plane in a temporary folder while the block lasts.

    What the user and the environment have configured is left aside: a test finds the same plane
    wherever it runs.

    Args:
        folder: where the home is made, as `home`; a second block finds what the first one left.
        settings: any of `callboard.Settings`, by name.

    """
    home = Path(os.path.abspath(folder)) / "home"
    chosen = Settings.model_validate({**settings, "home": home})
    with Plane(settings=chosen, start_timeout=START_TIMEOUT) as up:
        yield up
