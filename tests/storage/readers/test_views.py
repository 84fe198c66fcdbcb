"""History, the client's view, the model's context, and the text of a turn."""

import json
from collections.abc import Iterable

import pytest

from callboard.errors import SessionDamaged
from callboard.ids import SessionRef, workspace_key
from callboard.limits import CONTEXT_REPLACEMENTS_MAX
from callboard.records import Record, check_data, compact
from callboard.storage.gather import Message
from callboard.storage.lines import Gap
from callboard.storage.views import NO_RESULT, client_view, context, history, turn_text
from tests.storage.readers.homes import (
    T0,
    Entry,
    created,
    message,
    part,
    said,
    turn_completed,
    turn_started,
    updated,
)

REF = SessionRef(workspace_key("/u/my-app"), "s1")
GAP = Gap(7, 99, "bad_line")


def records(*items: Entry | Gap, turn_id: str | None = None) -> list[Record | Gap]:
    """Number records from 1; a gap takes a number too."""
    found: list[Record | Gap] = []
    for seq, one in enumerate(items, start=1):
        if isinstance(one, Gap):
            found.append(one)
            continue
        data = check_data(one[0], compact(one[1]))
        named = getattr(data, "turn_id", None) or turn_id
        found.append(Record(seq, f"{seq:032x}", seq, 1, "", one[0], named, data, ""))
    return found


def shown(items: Iterable[Message | Gap]) -> list[tuple[str, str]]:
    return [
        ("gap", one.damage) if isinstance(one, Gap) else (one.role, one.content) for one in items
    ]


def whole(items: Iterable[Record | Gap]) -> list[Message | Gap]:
    return list(history(items).items)


# --- history --------------------------------------------------------------------------------------


@pytest.mark.rule("PRJ-3", "A16")
def test_a_message_and_a_part_that_come_again() -> None:
    made = records(
        created(REF, "/u/my-app"),
        message("m1", "assistant"),
        part("p1", "m1", "text", text="draft"),
        message("m2", "user"),
        part("p2", "m2", "text", text="next"),
        message("m1", "assistant"),
        part("p1", "m1", "text", text="better"),
        part("p1", "m1", "text", again=True, text="final"),
        part("p3", "m1", "text", text=" end"),
    )
    expected = [("assistant", "final end"), ("user", "next")]
    assert shown(whole(made)) == expected
    assert shown(context(made)) == expected


@pytest.mark.rule("PRJ-4")
def test_a_part_of_an_unknown_message_gets_a_synthetic_one() -> None:
    made = records(*said("m1", "one"), part("p", "ghost", "text", text="boo"), *said("m2", "two"))
    found = whole(made)
    assert shown(found) == [("user", "one"), ("assistant", "boo"), ("user", "two")]
    assert [one.synthetic for one in found if isinstance(one, Message)] == [False, True, False]
    adopted = whole([*made, *records(message("ghost", "user", T0 + 9))])
    assert shown(adopted) == [("user", "one"), ("user", "boo"), ("user", "two")]
    ghost = adopted[1]
    assert isinstance(ghost, Message)
    assert not ghost.synthetic
    assert ghost.created_at == T0 + 9


@pytest.mark.rule("HIS-1")
def test_what_a_history_shows() -> None:
    made = records(
        message("u", "user", inbox_message_id="i1"),
        part("u1", "u", "text", text="do it"),
        message("a", "assistant", T0 + 1),
        part("a1", "a", "reasoning", text="hm"),
        part("a2", "a", "text", text="I "),
        part("a3", "a", "text", text="will"),
        part("a4", "a", "tool_call", call_id="c1", name="look", input={"x": 1}, effect="readonly"),
        part("a5", "a", "tool_call", call_id="c2", name="break", input=None),
        message("t1", "tool"),
        part("r1", "t1", "tool_result", call_id="c1", name="look", output={"ok": 1}, error=None),
        message("t2", "tool"),
        part("r2", "t2", "tool_result", call_id="c2", name="break", output="x", error="no way"),
        message("h", "user", hidden=True),
        part("h1", "h", "text", text="secret"),
    )
    found = whole(made)
    assert shown(found) == [
        ("user", "do it"),
        ("assistant", "I will"),
        ("tool", '{"ok":1}'),
        ("tool", "no way"),
        ("user", "secret"),
    ]
    user, assistant, good, bad, hidden = found
    assert isinstance(user, Message)
    assert user.inbox_message_id == "i1"
    assert isinstance(assistant, Message)
    assert assistant.reasoning == "hm"
    assert [(call.call_id, call.name, call.input) for call in assistant.tool_calls] == [
        ("c1", "look", {"x": 1}),
        ("c2", "break", None),
    ]
    assert isinstance(good, Message)
    assert (good.call_id, good.name, good.error) == ("c1", "look", False)
    assert isinstance(bad, Message)
    assert (bad.call_id, bad.error) == ("c2", True)
    assert isinstance(hidden, Message)
    assert hidden.hidden
    assert shown(client_view(found)) == [("user", "do it"), ("assistant", "I will")]
    assert assistant.to_json() == {
        "message_id": "a",
        "seq": 3,
        "role": "assistant",
        "content": "I will",
        "created_at": T0 + 1,
        "reasoning": "hm",
        "tool_calls": [
            {"call_id": "c1", "name": "look", "input": {"x": 1}, "effect": "readonly"},
            {"call_id": "c2", "name": "break", "input": None, "effect": "unsafe"},
        ],
    }


@pytest.mark.rule("HIS-1")
def test_a_summary_is_a_system_message_and_results_may_belong_to_their_caller() -> None:
    made = records(
        message("s", "system"),
        part("s1", "s", "summary", text="before", checkpoint_version=1),
        message("a", "assistant"),
        part("a1", "a", "tool_call", call_id="c", name="n", input=1),
        part("a2", "a", "tool_result", call_id="c", name="n", output="out", error=None),
    )
    assert shown(whole(made)) == [("system", "before"), ("assistant", ""), ("tool", "out")]


def test_people_may_say_the_same_twice() -> None:
    made = records(*said("m1", "yes"), *said("m2", "yes"), *said("m3", "  "), *said("m4", "no"))
    assert shown(client_view(whole(made))) == [("user", "yes"), ("user", "yes"), ("user", "no")]
    twice = records(
        part("p1", "g1", "text", text="made up"), part("p2", "g2", "text", text="made up")
    )
    assert shown(client_view(whole(twice))) == [("assistant", "made up")]
    apart = records(
        part("p1", "g1", "text", text="made up"), GAP, part("p2", "g2", "text", text="made up")
    )
    assert len(list(client_view(whole(apart)))) == 3


@pytest.mark.rule("REC-3", "A9")
def test_a_gap_stands_in_its_place() -> None:
    made = records(*said("m1", "one"), GAP, *said("m2", "two"), GAP)
    expected = [("user", "one"), ("gap", "bad_line"), ("user", "two"), ("gap", "bad_line")]
    assert shown(whole(made)) == expected
    assert shown(client_view(whole(made))) == expected


@pytest.mark.rule("HIS-1")
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 500])
def test_pages_make_the_whole(limit: int) -> None:
    made = records(
        GAP,
        *(entry for n in range(5) for entry in said(f"m{n}", f"text {n}")),
        GAP,
        message("a", "assistant"),
        part("a1", "a", "tool_call", call_id="c1", name="n", input=1),
        part("a2", "a", "tool_call", call_id="c2", name="n", input=1),
        part("a3", "a", "tool_result", call_id="c1", name="n", output="x", error=None),
        part("a4", "a", "tool_result", call_id="c2", name="n", output="y", error=None),
        GAP,
        *said("last", "end"),
        part("p-m0", "m0", "text", again=True, text="changed"),
    )
    found: list[Message | Gap] = []
    from_seq: int | None = 1
    while from_seq is not None:
        page = history(made, from_seq=from_seq, limit=limit)
        messages = [item for item in page.items if isinstance(item, Message)]
        assert 1 <= len(messages) <= max(limit, 3)
        found += page.items
        from_seq = page.next_seq
    assert found == whole(made)
    assert shown(found)[1] == ("user", "changed")


def test_an_empty_transcript_has_an_empty_history() -> None:
    page = history(records(created(REF, "/u/my-app"), updated(title="x")))
    assert (page.items, page.next_seq) == ((), None)


# --- the text of a turn ---------------------------------------------------------------------------


def test_the_text_of_a_turn_is_what_it_said_last() -> None:
    made = [
        *records(*said("x", "other turn", "assistant"), turn_id="turn_0"),
        *records(turn_started("turn_1")),
        *records(*said("u", "question"), *said("a", "first", "assistant"), turn_id="turn_1"),
        *records(*said("b", "second", "assistant"), turn_id="turn_1"),
        *records(part("p-b", "b", "text", again=True, text="second!"), turn_id="turn_1"),
        *records(message("c", "assistant"), turn_id="turn_1"),
        *records(part("c1", "c", "tool_call", call_id="c", name="n", input=1), turn_id="turn_1"),
        *records(turn_completed("turn_1")),
        *records(*said("z", "later", "assistant"), turn_id="turn_1"),
    ]
    assert turn_text(made, "turn_1") == "second!"
    assert turn_text(made, "turn_2") == ""
    read = iter(made)
    turn_text(read, "turn_1")
    assert len(list(read)) == 2  # it stops where the turn ends


# --- context --------------------------------------------------------------------------------------


def summary(
    message_id: str, text: str, replacements: object = (), checkpoint_version: int = 1
) -> list[Entry]:
    return [
        message(message_id, "system"),
        part(
            f"p-{message_id}",
            message_id,
            "summary",
            text=text,
            checkpoint_version=checkpoint_version,
            replacements=replacements,
        ),
    ]


@pytest.mark.rule("CTX-1", "A37")
def test_a_context_begins_with_what_replaces_the_past() -> None:
    replacements = [
        {"role": "user", "content": "asked"},
        {"role": "assistant", "content": [{"type": "text", "text": "ans"}, _text("wered")]},
    ]
    made = records(
        *said("m1", "one"),
        *said("m2", "two", "assistant"),
        *summary("s", "the story", replacements),
        *said("m3", "three"),
    )
    assert shown(whole(made)) == [
        ("user", "one"),
        ("assistant", "two"),
        ("system", "the story"),
        ("user", "three"),
    ]
    found = context(made)
    assert shown(found) == [("user", "asked"), ("assistant", "answered"), ("user", "three")]
    assert [one.synthetic for one in found] == [True, True, False]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.rule("CTX-1")
@pytest.mark.parametrize(
    ("replacements", "version"),
    [
        ("[]", 1),
        ('[{"role": "user"}]', 1),
        ('[{"role": "nobody", "content": "x"}]', 1),
        ('[{"role": "user", "content": 5}]', 1),
        ('[{"role": "user", "content": "x"}, {"role": "user", "content": [{}]}]', 1),
        (json.dumps([{"role": "user", "content": "x"}] * (CONTEXT_REPLACEMENTS_MAX + 1)), 1),
        ('[{"role": "user", "content": "x"}]', 2),
    ],
)
def test_replacements_that_are_not_valid_give_way_to_the_text(
    replacements: str, version: int
) -> None:
    told = summary("s", "the story", json.loads(replacements), version)
    made = records(*said("m1", "one"), *told, *said("m3", "three"))
    assert shown(context(made)) == [("user", "the story"), ("user", "three")]


@pytest.mark.rule("CTX-1")
def test_the_last_summary_counts() -> None:
    made = records(
        *summary("s1", "old"),
        *said("m1", "one"),
        *summary("s2", "new"),
        *said("m2", "two"),
        part("p-s1", "s1", "summary", again=True, text="old!", checkpoint_version=1),
        part("p-s2", "s2", "summary", text="new!", checkpoint_version=1),
        part("p-m1", "m1", "text", again=True, text="never seen"),
    )
    assert shown(context(made)) == [("user", "new!"), ("user", "two")]
    none = records(*said("m1", "one"), *said("m2", "two"))
    assert shown(context(none)) == [("user", "one"), ("user", "two")]


@pytest.mark.rule("CTX-4")
def test_every_call_has_a_result() -> None:
    made = records(
        message("a", "assistant"),
        part("a1", "a", "tool_call", call_id="c1", name="one", input=1),
        part("a2", "a", "tool_call", call_id="c2", name="two", input=2),
        message("t", "tool"),
        part("t1", "t", "tool_result", call_id="c2", name="two", output="done", error=None),
        *said("u", "and?"),
        message("b", "assistant"),
        part("b1", "b", "tool_call", call_id="c3", name="three", input=3),
    )
    found = context(made)
    assert [(one.role, one.call_id, one.content, one.error, one.synthetic) for one in found] == [
        ("assistant", None, "", False, False),
        ("tool", "c2", "done", False, False),
        ("tool", "c1", NO_RESULT, True, True),
        ("user", None, "and?", False, False),
        ("assistant", None, "", False, False),
        ("tool", "c3", NO_RESULT, True, True),
    ]
    assert NO_RESULT not in {content for _, content in shown(whole(made))}


@pytest.mark.rule("REC-3", "A9")
def test_a_model_is_fed_nothing_with_a_gap() -> None:
    with pytest.raises(SessionDamaged) as refused:
        context(records(*said("m1", "one"), GAP))
    assert refused.value.carried == {"damage": "bad_line", "line": 7}


def test_hidden_messages_are_the_models_to_see() -> None:
    assert shown(context(records(*said("m1", "psst", hidden=True)))) == [("user", "psst")]
