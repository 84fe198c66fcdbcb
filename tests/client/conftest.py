"""A fake gateway for each test that asks for one."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.fake_gateway import FakeGateway


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="cb", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def gateway(folder: Path) -> Iterator[FakeGateway]:
    with FakeGateway(folder) as running:
        yield running
