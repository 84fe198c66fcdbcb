"""What the benches share: the machine, the raw limits, and how figures are told.

A figure stands beside the raw limit that was measured in the same run on the same disk, so that a
slow machine, or a busy one, does not look like a slow product.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NamedTuple

PACKAGES: Final = ("callboard", "pydantic", "pyzmq", "msgpack", "pykka", "apsw")


class Figure(NamedTuple):
    """One measured number and its raw limit."""

    value: float
    unit: str
    limit: float
    """In the same unit: what the machine does without the product."""

    @property
    def ratio(self) -> float:
        """How many times the limit it is."""
        return self.value / self.limit if self.limit else 0.0


def arguments(description: str) -> argparse.ArgumentParser:
    """Make a parser with what every bench takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    return parser


def percentile(values: Iterable[float], percent: float) -> float:
    """Give a percentile of some values; 50 is the median."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class Bare:
    """A file that is appended to and synced: the raw limit of a durable append."""

    def __init__(self, folder: Path) -> None:
        """Begin.

        Args:
            folder: on the disk in question.

        """
        self._path = folder / "bare"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        self._offset = 0
        self._seconds: list[float] = []

    def append(self, size: int) -> None:
        """Append so many bytes and sync them."""
        data = b"x" * size
        began = time.perf_counter()
        os.pwrite(self._fd, data, self._offset)
        os.fdatasync(self._fd)
        self._seconds.append(time.perf_counter() - began)
        self._offset += size

    def close(self) -> list[float]:
        """End, and give the seconds of each append."""
        os.close(self._fd)
        self._path.unlink()
        return self._seconds


def bare_fdatasync(folder: Path, size: int, rounds: int) -> list[float]:
    """Append and sync again and again; the seconds of each round."""
    bare = Bare(folder)
    for _ in range(rounds):
        bare.append(size)
    return bare.close()


def machine() -> dict[str, object]:
    """Describe the machine, as far as figures depend on it."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Name the versions that figures depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "from the working tree"
    return found


def report(question: str, figures: Mapping[str, Figure], json_path: Path | None) -> None:
    """Print a table of figures, and write them as JSON if a path is given.

    Args:
        question: what the bench answers, in a sentence.
        figures: by name, in the order of the table.
        json_path: `{question, machine, versions, figures: {name: {value, unit, limit, ratio}}}`.

    """
    width = max(map(len, figures), default=0)
    print(question)
    print(f"{'':{width}}  {'measured':>12} {'raw limit':>12} {'ratio':>8}  unit")
    for name, figure in figures.items():
        value, limit = f"{figure.value:,.0f}", f"{figure.limit:,.0f}"
        print(f"{name:{width}}  {value:>12} {limit:>12} {figure.ratio:8.2f}  {figure.unit}")
    if json_path is None:
        return
    told = {
        "question": question,
        "machine": machine(),
        "versions": versions(),
        "figures": {
            name: {**figure._asdict(), "ratio": figure.ratio} for name, figure in figures.items()
        },
    }
    json_path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
