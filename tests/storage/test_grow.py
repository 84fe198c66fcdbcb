"""An append costs no more on a long transcript: the bench itself, quick (DUR-5)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import grow


@pytest.mark.rule("DUR-5", "R109")
def test_an_append_does_not_grow_with_the_transcript(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ratios: list[float] = []
    for number in range(3):  # a machine that is busy with something else may spoil one
        told = tmp_path / f"figures-{number}.json"
        grow.main(["--quick", "--json", str(told)])
        figures = json.loads(told.read_text(encoding="utf-8"))["figures"]
        assert len(figures) == 3
        (computed,) = [figure for name, figure in figures.items() if "computed" in name]
        ratios.append(computed["ratio"])
        if ratios[-1] <= 1.5:
            return
    raise AssertionError(ratios)
