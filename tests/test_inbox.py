"""Whether an input fits an inbox (INB-7, INB-8)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard import limits
from callboard.ids import SessionRef
from callboard.inbox import Budget, Origin, put_data, put_size, remove_data
from callboard.messages import InboxItem, Text
from callboard.records import PutData, RemoveData, stamp_op

REF = SessionRef("w-" + "0" * 32, "s1")
ORIGINS: tuple[Origin, ...] = ("user", "peer", "background", "shell", "recovery")


def filled(**bytes_of: int) -> Budget:
    budget = Budget()
    for origin, size in bytes_of.items():
        budget.add(origin, size)  # type: ignore[arg-type]
    return budget


@pytest.mark.rule("INB-7", "R1")
@pytest.mark.parametrize("origin", ORIGINS)
def test_each_origin_has_its_own_count(origin: Origin) -> None:
    name = f"INBOX_{origin.upper()}_ITEMS_MAX"
    maximum = getattr(limits, name)
    budget = Budget()
    for _ in range(maximum):
        assert budget.refuse(origin, 10) is None
        budget.add(origin, 10)
    refusal = budget.refuse(origin, 10)
    assert refusal is not None
    assert refusal.carried == {"limit": name, "current": maximum, "maximum": maximum}
    for other in set(ORIGINS) - {origin}:
        assert budget.refuse(other, 10) is None
    budget.remove(origin, 10)
    assert budget.refuse(origin, 10) is None
    assert budget.items == maximum - 1


@pytest.mark.rule("INB-8")
def test_user_peer_and_shell_share_their_bytes() -> None:
    maximum = limits.INBOX_USER_BYTES_MAX
    budget = filled(user=maximum - 100, peer=30, shell=20)
    assert budget.refuse("user", 50) is None
    refusal = budget.refuse("shell", 51)
    assert refusal is not None
    assert refusal.carried == {
        "limit": "INBOX_USER_BYTES_MAX",
        "current": maximum - 50,
        "maximum": maximum,
    }


@pytest.mark.rule("INB-8")
def test_a_background_item_counts_all_that_is_live() -> None:
    maximum = limits.INBOX_BACKGROUND_TOTAL_BYTES_MAX
    budget = filled(user=3_000_000, background=maximum - 3_000_100)
    assert budget.refuse("background", 100) is None
    refusal = budget.refuse("background", 101)
    assert refusal is not None
    assert refusal.carried["limit"] == "INBOX_BACKGROUND_TOTAL_BYTES_MAX"


@pytest.mark.rule("INB-8")
def test_recovery_has_a_reserve_and_small_items() -> None:
    whole = limits.INBOX_BYTES_MAX
    room = whole - limits.INBOX_RECOVERY_RESERVE_BYTES
    budget = filled(background=limits.INBOX_BACKGROUND_TOTAL_BYTES_MAX)
    budget.add("user", room - limits.INBOX_BACKGROUND_TOTAL_BYTES_MAX)
    refusal = budget.refuse("user", 1)
    assert refusal is not None
    assert refusal.carried == {"limit": "INBOX_BYTES_MAX", "current": room, "maximum": room}
    assert budget.refuse("recovery", limits.RECOVERY_ITEM_BYTES_MAX) is None
    refusal = budget.refuse("recovery", limits.RECOVERY_ITEM_BYTES_MAX + 1)
    assert refusal is not None
    assert refusal.carried["limit"] == "RECOVERY_ITEM_BYTES_MAX"


@pytest.mark.rule("INB-8")
@given(
    st.text(max_size=200),
    st.integers(1, 10_000),
    st.integers(1, 10**12),
    st.integers(0, 10**6),
)
def test_size_is_that_of_the_put_line(words: str, n: int, commit: int, epoch: int) -> None:
    item = InboxItem(
        message_id="m1",
        origin="user",
        content=[Text(type="text", text=words)],
        queued_at=1,
        digest="0" * 64,
        principal="p",
    )
    data = put_data(item)
    line, _ = stamp_op(
        REF,
        n=n,
        commit=commit,
        epoch=epoch,
        ts="2026-01-01T00:00:00.000000Z",
        op="put",
        data=data,
        before="0" * 64,
    )
    assert put_size(REF, item, n=n, commit=commit, epoch=epoch) == len(line)
    assert put_size(REF, item) >= len(line)
    assert b"\n" not in data
    assert PutData.model_validate(json.loads(data)).item == item


def test_a_remove_reads_back() -> None:
    assert RemoveData.model_validate(json.loads(remove_data("a:b@c"))).message_id == "a:b@c"
