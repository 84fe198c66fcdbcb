"""verify's memory does not grow with a transcript: shown under a limit of address space."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from callboard.storage.frames import Commit
from tests.storage.readers.homes import HomeMaker, said, turn_completed, turn_started

pytestmark = pytest.mark.damages_home("it is what these tests are about")
ROOM = 64 << 20
"""What verify gets beside the interpreter and its libraries."""
SIZE = 160 << 20
_CHILD = """
import json, resource, sys
from callboard.storage.verify import Totals, verify
list(verify(sys.argv[1] + "/none"))
def said(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))
limit = said("VmSize") + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
before, totals = said("VmRSS"), Totals()
kinds = [one.kind for one in verify(sys.argv[1], totals)]
print(json.dumps([kinds, totals.records, totals.bytes, said("VmHWM") - before]))
"""


def fill(path: Path, size: int) -> tuple[HomeMaker, int]:
    """Make a home with one session of at least so many bytes, and give its number of turns."""
    maker = HomeMaker(path)
    book = maker.new("large", "/u/a")
    text = "x" * 800_000
    written = turns = 0
    with maker.home.transcript(book.ref).open("ab") as file:
        while written < size:
            turns += 1
            maker.last += 1
            turn = f"t{turns:06}"
            book.transcript = b""  # the file alone keeps it
            entries = [turn_started(turn), *said(f"m{turns}", text), turn_completed(turn)]
            written += file.write(book.lines(maker.last, entries))
            maker.journal.add(maker.last, Commit())
    maker.books.clear()  # no checkpoint names it
    maker.stop()
    return maker, turns


def test_a_large_transcript_fits(tmp_path: Path) -> None:
    _, turns = fill(tmp_path / "home", SIZE)
    kinds, records, read, peak = verified(tmp_path / "home")
    assert kinds == []
    assert records == 1 + 4 * turns
    assert read > SIZE
    assert peak < ROOM


def test_a_line_without_an_end_fits(tmp_path: Path) -> None:
    maker, turns = fill(tmp_path / "home", 1 << 20)
    (path,) = maker.home.sessions.glob("*/*/transcript.jsonl")
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + SIZE)  # NULs
        file.seek(0, os.SEEK_END)
        file.write(b"\n")
    kinds, records, read, peak = verified(maker.path)
    assert kinds == ["bad_line"]
    assert (records, read > SIZE) == (1 + 4 * turns, True)
    assert peak < ROOM


def verified(path: Path) -> tuple[list[str], int, int, int]:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path), str(ROOM)],
        capture_output=True,
        check=True,
        timeout=120,
    )
    kinds, records, read, peak = json.loads(done.stdout)
    return kinds, records, read, peak
