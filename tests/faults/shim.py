"""Builds the preload shim of faultshim.c and says how a process is started under it.

For docs/spec/reliability.md RLB-5: errors, short writes, kills and stops at the Nth call.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("faultshim.c")


def build_shim(folder: Path) -> Path:
    """Compile the shim into a folder, once; skips the test when there is no C compiler."""
    library = folder / "faultshim.so"
    if not library.exists():
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O2", "-o", library, SOURCE, "-ldl", "-lpthread"],
            check=True,
        )
    return library


def under(library: Path, rules: str, hits: Path) -> dict[str, str]:
    """Give the environment of a process that shall meet these faults.

    Args:
        library: as `build_shim` gives it.
        rules: `call[,part of path]:action@when`, several separated by `;`.
        hits: a file that gets a line for each fault.
    """
    return {"LD_PRELOAD": str(library), "FAULT": rules, "FAULT_LOG": str(hits)}
