"""Deadlines, and questions that are said again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from callboard.actors.gateway.requests import BUCKET_MS, Asks, Deadlines
from callboard.wire import Header


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 10_000), max_size=20), st.data())
def test_what_is_due_is_given_once_and_never_early(
    times: dict[str, int], data: st.DataObject
) -> None:
    deadlines = Deadlines()
    for name, due_at in times.items():
        deadlines.add(name, due_at)
    removed = set(data.draw(st.lists(st.sampled_from(sorted(times) or [""]), max_size=5)))
    for name in removed & set(times):
        deadlines.remove(name, times[name])
    taken: list[str] = []
    now: int = 0
    while (at := deadlines.next()) is not None:
        assert at > now
        now = at
        due = deadlines.take(now)
        assert all(times[name] <= now < times[name] + BUCKET_MS for name in due)
        taken += due
    assert sorted(taken) == sorted(set(times) - removed)


def asks() -> tuple[Asks[str], list[str]]:
    said: list[str] = []
    return Asks("x", lambda header, _body: said.append(header.id)), said


def test_questions_wait_for_the_peer_and_are_said_again_in_order() -> None:
    made, said = asks()
    first = made.ask("a", b"", "1")
    assert said == []
    made.up()
    second = made.ask("b", b"", "2")
    third = made.ask("c", b"", "3")
    assert said == [first, second, third]
    assert made.answer(second) == "2"
    assert made.answer(second) is None
    made.lost()
    fourth = made.ask("d", b"", "4")
    made.drop(first)
    said.clear()
    made.up()
    assert said == [third, fourth]
    assert list(made.contexts()) == ["3", "4"]


def test_what_found_no_room_is_said_again_once_unless_it_was_answered() -> None:
    made, said = asks()
    made.up()
    one, two = made.ask("a", b"", "1"), made.ask("b", b"", "2")
    made.refused(one)
    made.refused(two)
    made.refused("unknown")
    assert made.has_unsent
    made.answer(two)
    said.clear()
    made.retry()
    made.retry()
    assert said == [one]
    assert not made.has_unsent


def test_ids_differ_between_incarnations() -> None:
    seen: set[str] = set()
    for prefix in ("a", "b"):
        made: Asks[None] = Asks(prefix, lambda _header, _body: None)
        seen |= {made.ask("k", b"", None) for _ in range(10)}
    assert len(seen) == 20
    assert all(len(Header("k", name).id) <= 128 for name in seen)
