"""Each bench runs to its end, quick, and writes what its file format says; no time is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHES = ("append", "steer", "activate", "memory", "peers")


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_runs_and_tells_its_figures(name: str, tmp_path: Path) -> None:
    told = tmp_path / "figures.json"
    ended = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", "--quick", "--json", str(told)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": "/tmp"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
    assert set(report) == {"question", "machine", "versions", "figures"}
    assert report["question"].endswith("?")
    assert report["figures"]
    for figure in report["figures"].values():
        assert set(figure) == {"value", "unit", "limit", "ratio"}
        assert figure["value"] > 0
        assert figure["limit"] > 0
        assert figure["ratio"] == pytest.approx(figure["value"] / figure["limit"], rel=0.01)
