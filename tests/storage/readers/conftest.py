"""A home to fill, at a path that is short enough for its sockets."""

import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.storage.readers.homes import HomeMaker


@pytest.fixture
def short_path() -> Generator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="cb"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def maker(short_path: Path) -> HomeMaker:
    return HomeMaker(short_path / "home")
