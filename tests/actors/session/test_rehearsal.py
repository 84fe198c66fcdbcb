"""The rehearsal before the fork leaves nothing behind."""

from __future__ import annotations

import os
import threading

from callboard.actors.session import rehearse


def test_a_rehearsal_plays_its_turns_and_leaves_nothing() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    assert rehearse() == 3
    assert rehearse("replay", 2, {"replay.speed": "max"}) == 2
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not [one for one in threading.enumerate() if one.name == "agent"]
