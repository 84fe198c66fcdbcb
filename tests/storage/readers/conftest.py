"""A home to fill, at a path that is short enough for its sockets."""

from pathlib import Path

import pytest

from tests.storage.readers.homes import HomeMaker


@pytest.fixture
def short_path(base: Path) -> Path:
    return base


@pytest.fixture
def maker(short_path: Path) -> HomeMaker:
    return HomeMaker(short_path / "home")
