"""Any byte of any durable file may change: verify finds it, or it says nothing to anyone (RLB-7).

What is harmless, and why, is `harmless` below, file by file; everything else must be found.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callboard.home import Home
from callboard.storage.catalog import CatalogQuery, list_sessions
from callboard.storage.frames import frames
from callboard.storage.index import IndexReader
from callboard.storage.journal import survey
from callboard.storage.leases import read_lease
from callboard.storage.readers import open_home
from callboard.storage.verify import verify
from tests.storage.small_home import small_home, the

pytestmark = pytest.mark.rule("T-16")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return small_home(tmp_path_factory.mktemp("flips") / "home", segment_bytes=8_192)


def durable(home: Home) -> list[Path]:
    """Every file of a stopped home that says something: no lock file, and none of SQLite's own."""
    return sorted(
        path
        for path in home.root.rglob("*")
        if path.is_file()
        and path.stat().st_size
        and path.name not in ("index.sqlite3-wal", "index.sqlite3-shm")
    )


def harmless_in_journal(home: Home, path: Path, offset: int) -> str | None:
    """Of a stopped home: what stands behind the last promise of a segment."""
    data = path.read_bytes()
    numbers = sorted(int(one.stem) for one in home.journal.glob("*.log"))
    home_id = json.loads(home.format.read_bytes())["home_id"]
    journal = survey(numbers, lambda n: (home.journal / f"{n:04d}.log").read_bytes(), home_id)
    counted = {one.number: one.end for one in journal.segments}
    if int(path.stem) not in counted:
        return "a segment that does not count"
    if offset >= counted[int(path.stem)]:
        return "behind what its successor says of it: it does not exist for anyone (FLT-6c)"
    last = list(frames(memoryview(data)))[-1]
    if path.stem == f"{numbers[-1]:04d}" and offset >= last.offset:
        return "the clean_stop: without it the next start recovers, and finds all that was synced"
    return None


def harmless_in_format(before: bytes, after: bytes) -> str | None:
    try:
        was, now = json.loads(before), json.loads(after)
    except ValueError:
        return None
    rest = {**now, "cursor_key": was["cursor_key"]}
    if rest == was and len(now["cursor_key"]) == len(was["cursor_key"]):
        return "the cursor key: cursors of before are refused, a walk begins anew"
    if {k: v for k, v in now.items() if k in was} == was:
        return "JSON that says the same"
    return None


def harmless_in_lease(before: bytes, after: bytes, session_id: str) -> str | None:
    """A lease has no check. It is compared with the journal while the journal tells of it."""
    if read_lease(before, the(session_id)) == read_lease(after, the(session_id)):
        return "JSON that says the same"
    return None


def harmless_in_index(home: Home) -> str | None:
    """The index is thrown away at will; what it answers must be what the files answer (IDX-1)."""
    reader = open_home(home.root)
    by_index = list_sessions(reader, CatalogQuery()).to_json()
    shutil.move(home.index, home.index.with_suffix(".away"))
    by_scan = list_sessions(reader, CatalogQuery()).to_json()
    shutil.move(home.index.with_suffix(".away"), home.index)
    assert by_index["source"] in ("index", "scan")
    for page in (by_index, by_scan):
        for name in ("source", "as_of"):
            del page[name]
    return "the answer is that of the files" if by_index == by_scan else None


def harmless(home: Home, path: Path, before: bytes, after: bytes, offset: int) -> str | None:
    """Why a changed byte does no harm, or none."""
    match path.name:
        case "format.json":
            return harmless_in_format(before, after)
        case "lease.json":
            return harmless_in_lease(before, after, path.parent.name)
        case "index.sqlite3":
            return harmless_in_index(home)
        case name if name.endswith(".log"):
            path.write_bytes(before)
            try:
                return harmless_in_journal(home, path, offset)
            finally:
                path.write_bytes(after)
        case _:
            return None


def judge(home: Home, path: Path, offset: int, mask: int) -> None:
    before, stat = path.read_bytes(), path.stat()
    changed = bytearray(before)
    changed[offset] ^= mask
    after = bytes(changed)
    restore = _in_place(path, before, (stat.st_atime_ns, stat.st_mtime_ns))
    path.write_bytes(after)
    try:
        found = list(verify(home.root))
        name = str(path.relative_to(home.root))
        if not found:
            assert harmless(home, path, before, after, offset), (name, offset, mask)
        else:
            assert any(_names(one.file, name) for one in found), [one.text() for one in found]
    finally:
        restore()


def _names(found: str, changed: str) -> bool:
    """The file that was changed, or for the identity of a home what no longer fits to it."""
    return found == changed or (changed == "format.json" and found.startswith(("journal", "index")))


def _in_place(path: Path, data: bytes, times: tuple[int, int]) -> Callable[[], None]:
    def restore() -> None:
        for extra in ("-wal", "-shm"):
            if path.name == "index.sqlite3":
                path.with_name(path.name + extra).unlink(missing_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=times)

    return restore


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_changed_byte_is_found_or_harmless(home: Home, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(durable(home)))
    offset = data.draw(st.integers(0, path.stat().st_size - 1))
    judge(home, path, offset, data.draw(st.integers(1, 255)))


@pytest.mark.parametrize("name", ["format.json", "lease.json"])
def test_every_byte_of_the_small_files(home: Home, name: str) -> None:
    """These have no check of their own, so each byte is tried."""
    rng = random.Random(1)
    for path in durable(home):
        if path.name == name:
            for offset in range(path.stat().st_size):
                judge(home, path, offset, rng.randint(1, 255))


def test_the_untouched_home_is_clean(home: Home) -> None:
    assert list(verify(home.root)) == []
    with IndexReader(home, open_home(home.root).home_id) as index:
        assert len(list(index.known())) == 3
