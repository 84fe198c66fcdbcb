"""The judge of the demo: what is planted is found, and what is whole is called whole."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from callboard.cli.oracle import Entry
from callboard.cli.verdict import FINDINGS_MAX, Evidence, Input, Verdict, judge

SESSION = "demo-" + "0" * 32 + "/s"


def digest(name: str) -> str:
    return f"digest of {name}"


def entries(names: list[str], session: str = SESSION) -> list[Entry]:
    return [Entry(session, n, name, digest(name), n) for n, name in enumerate(names, 1)]


def inputs(names: list[str]) -> list[Input]:
    return [Input(name, digest(name)) for name in names]


@st.composite
def wholes(draw: st.DrawFn) -> tuple[list[str], Evidence]:
    """A session in which all is as it should be.

    First what was applied and acknowledged, then what was applied by a turn that died, then what
    waits; some of it the client had no receipt for.
    """
    count = draw(st.integers(1, 12))
    names = [f"m{n}" for n in range(count)]
    acknowledged = draw(st.integers(0, count))
    applied = draw(st.integers(acknowledged, count))
    discarded = draw(st.sets(st.sampled_from(names[applied:]))) if applied < count else set[str]()
    promised = [name for name in names if draw(st.integers(0, 9))]  # one in ten has no receipt
    return promised, Evidence(
        applied=inputs(names[:applied]),
        acknowledged=inputs(names[:acknowledged]),
        discarded=inputs([name for name in names if name in discarded]),
        waiting=inputs([name for name in names[acknowledged:] if name not in discarded]),
    )


@given(wholes())
def test_what_is_whole_is_called_whole(whole: tuple[list[str], Evidence]) -> None:
    promised, evidence = whole
    verdict = judge(entries(promised), {SESSION: evidence})
    assert verdict.findings == []
    assert verdict.clean
    assert verdict.accepted == len(promised)
    assert verdict.accepted == verdict.acknowledged + verdict.pending + verdict.discarded


def replaced(evidence: Evidence, place: str, inputs_: Sequence[Input]) -> Evidence:
    changes: dict[str, Any] = {place: inputs_}
    return replace(evidence, **changes)


def without(evidence: Evidence, name: str) -> Evidence:
    """Lose an input: it stands nowhere."""

    def rest(places: Sequence[Input]) -> list[Input]:
        return [one for one in places if one.message_id != name]

    return replace(
        evidence,
        applied=rest(evidence.applied),
        acknowledged=rest(evidence.acknowledged),
        discarded=rest(evidence.discarded),
        waiting=rest(evidence.waiting),
    )


def judged(promised: list[str], evidence: Evidence) -> Verdict:
    return judge(entries(promised), {SESSION: evidence})


@given(wholes(), st.data())
def test_a_planted_loss_is_found(whole: tuple[list[str], Evidence], data: st.DataObject) -> None:
    promised, evidence = whole
    assume(promised)
    name = data.draw(st.sampled_from(promised))
    verdict = judged(promised, without(evidence, name))
    assert (verdict.lost, verdict.doubled, verdict.reordered) == (1, 0, 0)
    assert verdict.findings[0][:3] == ("lost", SESSION, name)


@given(wholes(), st.data())
def test_another_text_is_a_loss(whole: tuple[list[str], Evidence], data: st.DataObject) -> None:
    promised, evidence = whole
    applied = [one.message_id for one in evidence.applied if one.message_id in promised]
    assume(applied)
    name = data.draw(st.sampled_from(applied))
    other = [
        Input(one.message_id, "another") if one.message_id == name else one
        for one in evidence.applied
    ]
    verdict = judged(promised, replace(evidence, applied=other))
    assert (verdict.lost, verdict.doubled, verdict.reordered) == (1, 0, 0)


@given(wholes(), st.data())
def test_an_acknowledgement_without_a_message_is_a_loss(
    whole: tuple[list[str], Evidence], data: st.DataObject
) -> None:
    promised, evidence = whole
    names = [one.message_id for one in evidence.acknowledged if one.message_id in promised]
    assume(names)
    name = data.draw(st.sampled_from(names))
    applied = [one for one in evidence.applied if one.message_id != name]
    verdict = judged(promised, replace(evidence, applied=applied))
    assert (verdict.lost, verdict.doubled, verdict.reordered) == (1, 0, 0)


@given(wholes(), st.sampled_from(["applied", "acknowledged", "waiting"]), st.data())
def test_a_planted_double_is_found(
    whole: tuple[list[str], Evidence], place: str, data: st.DataObject
) -> None:
    promised, evidence = whole
    places: list[Input] = getattr(evidence, place)
    assume(places)
    twice = data.draw(st.sampled_from(places))
    at = data.draw(st.integers(0, len(places)))
    verdict = judged(promised, replaced(evidence, place, [*places[:at], twice, *places[at:]]))
    assert verdict.doubled == 1
    assert verdict.lost == 0
    assert ("doubled", twice.message_id) in {(f.kind, f.message_id) for f in verdict.findings}


@given(wholes(), st.data())
def test_an_input_that_left_and_is_still_there_is_doubled(
    whole: tuple[list[str], Evidence], data: st.DataObject
) -> None:
    promised, evidence = whole
    assume(evidence.acknowledged)
    twice = data.draw(st.sampled_from(list(evidence.acknowledged)))
    verdict = judged(promised, replace(evidence, waiting=[twice, *evidence.waiting]))
    assert verdict.doubled == 1


@given(wholes(), st.data())
def test_a_planted_change_of_order_is_found(
    whole: tuple[list[str], Evidence], data: st.DataObject
) -> None:
    promised, evidence = whole
    known = [n for n, one in enumerate(evidence.applied) if one.message_id in promised]
    assume(len(known) >= 2)
    first, second = sorted(
        data.draw(st.lists(st.sampled_from(known), min_size=2, max_size=2, unique=True))
    )
    applied = list(evidence.applied)
    applied[first], applied[second] = applied[second], applied[first]
    verdict = judged(promised, replace(evidence, applied=applied))
    assert verdict.reordered >= 1
    assert (verdict.lost, verdict.doubled) == (0, 0)


def test_an_input_that_was_overtaken_by_a_later_one_is_found() -> None:
    evidence = Evidence(
        applied=inputs(["a", "c"]), acknowledged=inputs(["a", "c"]), waiting=inputs(["b"])
    )
    verdict = judged(["a", "b", "c"], evidence)
    assert verdict.reordered == 1
    assert verdict.findings[0].message_id == "b"


def test_a_session_that_is_not_there_has_lost_everything() -> None:
    verdict = judge(entries(["a", "b"]), {})
    assert verdict.lost == 2
    assert "not there" in verdict.findings[0].detail


def test_sessions_are_judged_one_by_one() -> None:
    other = SESSION + "2"
    evidence = Evidence(applied=inputs(["a"]), acknowledged=inputs(["a"]))
    promised = [*entries(["a"]), *entries(["a"], other)]
    verdict = judge(promised, {SESSION: evidence, other: Evidence()})
    assert (verdict.sessions, verdict.accepted, verdict.acknowledged, verdict.lost) == (2, 2, 1, 1)


def test_findings_are_bounded_and_sums_are_not() -> None:
    names = [f"m{n}" for n in range(FINDINGS_MAX + 50)]
    verdict = judge(entries(names), {})
    assert verdict.lost == len(names)
    assert len(verdict.findings) == FINDINGS_MAX


@pytest.mark.parametrize("kind", ["lost", "doubled", "reordered"])
def test_each_of_the_three_makes_it_unclean(kind: str) -> None:
    unclean = Verdict()
    setattr(unclean, kind, 1)
    assert not unclean.clean
    assert Verdict(pending=3, discarded=2).clean
