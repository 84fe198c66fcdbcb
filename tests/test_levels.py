"""When something is an alarm: before it refuses (FLT-22)."""

from __future__ import annotations

import pytest

from callboard.levels import descriptors, free_space, queue
from callboard.limits import (
    DISK_FREE_ALARM_BYTES,
    FD_ALARM_PERCENT,
    FD_REFUSE_PERCENT,
    QUEUE_ALARM_PERCENT,
    RESERVE_BYTES,
)


@pytest.mark.rule("FLT-22")
def test_each_alarm_comes_before_its_refusal() -> None:
    assert not free_space(DISK_FREE_ALARM_BYTES).alarm
    assert free_space(DISK_FREE_ALARM_BYTES - 1).alarm
    assert DISK_FREE_ALARM_BYTES > 4 * RESERVE_BYTES
    assert not descriptors("d", FD_ALARM_PERCENT, 100).alarm
    assert descriptors("d", FD_ALARM_PERCENT + 1, 100).alarm
    assert FD_ALARM_PERCENT < FD_REFUSE_PERCENT
    assert not queue("q", QUEUE_ALARM_PERCENT, 100).alarm
    assert queue("q", QUEUE_ALARM_PERCENT + 1, 100).alarm
    assert not queue("q", 0, 0).alarm
