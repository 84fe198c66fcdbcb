"""How full things are, and when that is an alarm (FLT-22). Pure."""

from __future__ import annotations

from callboard.limits import DISK_FREE_ALARM_BYTES, FD_ALARM_PERCENT, QUEUE_ALARM_PERCENT
from callboard.messages import Level


def free_space(value: int) -> Level:
    """Judge the free space of a home's disk, in bytes; the alarm comes long before a refusal."""
    alarm = value < DISK_FREE_ALARM_BYTES
    return Level(name="disk_free_bytes", value=value, limit=DISK_FREE_ALARM_BYTES, alarm=alarm)


def descriptors(name: str, value: int, limit: int) -> Level:
    """Judge how many of a process's descriptors are open (FLT-45c)."""
    return Level(name=name, value=value, limit=limit, alarm=_above(value, limit, FD_ALARM_PERCENT))


def queue(name: str, value: int, limit: int) -> Level:
    """Judge how full a queue is, in whatever it is counted."""
    alarm = _above(value, limit, QUEUE_ALARM_PERCENT)
    return Level(name=name, value=value, limit=limit, alarm=alarm)


def _above(value: int, limit: int, percent: int) -> bool:
    return value * 100 > limit * percent
