"""How much memory a session costs that lives and does nothing.

    python -m bench.memory [--quick] [--json FILE] [--sessions 50] [--folder DIR]

Proportional memory (PSS) counts a shared page in parts, private memory (USS) not at all. Each
session has run one turn, so that what it writes to is its own; then all are idle. The raw limit is
as many bare forks of a small interpreter that do nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

from bench.common import Figure, arguments, percentile, report
from callboard import Plane
from callboard.messages import PlaneStatus

ROOT: Final = Path(__file__).resolve().parents[1]
SETTLE_S: Final = 2.0


class Memory(NamedTuple):
    """A process's memory in KiB."""

    pss: float
    uss: float


def memory_of(pid: int) -> Memory:
    """Read what the kernel says of a process."""
    fields: dict[str, float] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        fields[name] = float(value)
    return Memory(fields["Pss:"], fields["Private_Clean:"] + fields["Private_Dirty:"])


def bare_forks(count: int) -> Memory:
    """Fork a small interpreter so many times, and give one child's medians."""
    code = (
        "import os, sys, time\n"
        f"for _ in range({count}):\n"
        "    pid = os.fork()\n"
        "    if not pid: time.sleep(600)\n"
        "    print(pid)\n"
        "print('end', flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-ISc", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    pids: list[int] = []
    while (line := parent.stdout.readline().strip()) != "end":
        pids.append(int(line))
    time.sleep(SETTLE_S / 4)
    found = [memory_of(pid) for pid in pids]
    os.killpg(parent.pid, 9)
    parent.communicate()
    return _medians(found)


def _medians(found: list[Memory]) -> Memory:
    return Memory(
        percentile([one.pss for one in found], 50), percentile([one.uss for one in found], 50)
    )


def processes(status: PlaneStatus) -> dict[str, list[int]]:
    """Give the pids of a plane by role."""
    found: dict[str, list[int]] = {}
    for process in status.processes:
        if process.pid:
            found.setdefault(process.role, []).append(process.pid)
    return found


def measure(folder: Path, count: int) -> dict[str, Figure]:
    """Measure everything.

    Args:
        folder: where the home is.
        count: sessions.

    """
    limit = bare_forks(count)
    with Plane(folder / "home") as plane:
        for agent in ("echo",):
            sessions = [plane.create_session(agent, folder) for _ in range(count)]
            for session in sessions:
                session.wait(session.send("hello"), timeout=60)
        time.sleep(SETTLE_S)
        pids = processes(plane.status())
        found = {role: [memory_of(pid) for pid in pids[role]] for role in pids}
    session_ = _medians(found["session"])
    figures = {
        "session, proportional": Figure(session_.pss, "KiB", limit.pss),
        "session, private": Figure(session_.uss, "KiB", limit.uss),
    }
    for role in ("supervisor", "fork", "storage", "gateway"):
        figures[f"{role}, proportional"] = Figure(_medians(found[role]).pss, "KiB", limit.pss)
    return figures


def main() -> None:
    """Measure, print a table, write JSON if asked to."""
    parser = arguments("How much memory an idle session costs.")
    parser.add_argument("--sessions", type=int, default=50, help="how many live at once")
    parser.add_argument("--folder", type=Path, help="where to put the home; default: temporary")
    options = parser.parse_args()
    count = max(5, options.sessions // 10) if options.quick else options.sessions
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="cb") as name:
        figures = measure(Path(name), count)
    report("How much memory does an idle session cost?", figures, options.json)


if __name__ == "__main__":
    main()
