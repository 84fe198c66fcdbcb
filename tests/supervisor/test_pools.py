"""Holes of the allocator, and what fills them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from callboard.supervisor.pools import holes_by_size

REPORT = """\
Small block threshold = 512, in 32 size classes.

class   size   num pools   blocks in use  avail blocks
-----   ----   ---------   -------------  ------------
    0     16           1             347           674
   31    512          11             312            29

# arenas allocated total           =                   16
16 arenas * 1048576 bytes/arena    =           16,777,216
"""

FILLER = """
import json, sys
from callboard.supervisor import pools
made = [bytes(n) for n in range(1, 470) for _ in range(40)]
del made[::2]
before = sum(n for _, n in pools.holes_by_size(pools._report()))
filled = pools.fill_holes()
after = sum(n for _, n in pools.holes_by_size(pools._report()))
print(json.dumps([before, filled, after]))
"""


def test_the_report_is_read() -> None:
    assert list(holes_by_size(REPORT)) == [(16, 674), (512, 29)]
    assert list(holes_by_size("")) == []


def test_holes_are_filled() -> None:
    import json

    done = subprocess.run(
        [sys.executable, "-c", FILLER],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    before, filled, after = json.loads(done.stdout)
    assert done.stderr == "", "the report is printed nowhere"
    assert before > 5_000
    assert filled > 0.9 * before
    assert after < 0.2 * before
