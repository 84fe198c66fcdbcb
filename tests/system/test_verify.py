"""verify beside a plane that works: what its writer is in the middle of is no finding."""

from __future__ import annotations

import threading
import time

import pytest

from callboard.storage.verify import Totals, verify
from tests.system.conftest import Oracle, RealPlane, kill, until


@pytest.mark.rule("REC-7")
@pytest.mark.parametrize("kills", [0, 2])
def test_a_running_writer_is_no_finding_and_is_not_held_up(plane: RealPlane, kills: int) -> None:
    plane.up(journal_segment_bytes=1 << 20)
    client = plane.connect()
    sessions = [plane.create(client, f"s{n}") for n in range(3)]
    oracle = Oracle(plane, sessions, 150).start()
    ended = threading.Event()
    killer = threading.Thread(target=_kill_storage, args=(plane, oracle, kills))
    killer.start()
    waiter = threading.Thread(target=_join, args=(oracle, ended))
    waiter.start()
    looks, seen_up, records = 0, 0, 0
    while not ended.is_set() or looks < 3:
        totals = Totals()
        assert [one.text() for one in verify(plane.home.root, totals)] == []
        looks, seen_up = looks + 1, seen_up + totals.plane_up
        records = max(records, totals.records)
    waiter.join()
    killer.join()
    oracle.judge()
    assert seen_up
    assert records
    assert plane.down() == 0
    assert [one.text() for one in verify(plane.home.root)] == []


def _kill_storage(plane: RealPlane, oracle: Oracle, times: int) -> None:
    for n in range(times):
        until(lambda n=n: oracle.done > 100 * (n + 1))  # type: ignore[misc]
        kill(plane.pid("storage"))
        time.sleep(0.2)


def _join(oracle: Oracle, ended: threading.Event) -> None:
    try:
        oracle.join()
    finally:
        ended.set()
