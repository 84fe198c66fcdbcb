"""Plays close what they opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.scenarios.stage import Stage

Open = Callable[..., Stage]


@pytest.fixture
def stage_for() -> Iterator[Open]:
    """Give a function that sets a stage."""
    stages: list[Stage] = []

    def make(agent: str = "echo", settings: dict[str, str] | None = None) -> Stage:
        stage = Stage(agent, settings)
        stages.append(stage)
        return stage

    yield make
    for stage in stages:
        stage.close()
