"""A fake gateway for each test that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.fake_gateway import FakeGateway


@pytest.fixture
def folder(base: Path) -> Path:
    return base


@pytest.fixture
def gateway(folder: Path) -> Iterator[FakeGateway]:
    with FakeGateway(folder) as running:
        yield running
