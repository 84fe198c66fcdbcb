"""Claude Code: what its records become, and that none of them disappears."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.importers.claude_code import SIDECHAIN_IDS_MAX, ClaudeCodeImporter
from callboard.importers.port import (
    ImagePart,
    ImportHeader,
    ImportItem,
    ImportMessage,
    ImportOpaque,
    ImportSkipped,
    ImportSummary,
    ImportToolCall,
    ImportToolResult,
    ImportTurn,
    ReasoningPart,
    TextPart,
)
from tests.importers.reading import DATA, of, read

IMPORTER = ClaudeCodeImporter()
SAMPLE = (DATA / "claude.jsonl").read_bytes()
MAIN, SIDE = "s-main", "s-main/side-root"


def record(kind: str, content: object, **fields: object) -> bytes:
    """One line of a session `s`."""
    message = {"role": kind, "content": content}
    whole = {"type": kind, "sessionId": "s", "isSidechain": False, "message": message, **fields}
    return json.dumps(whole).encode() + b"\n"


def outline(items: list[ImportItem]) -> list[str]:
    """Say in a few words what each item is."""
    return [_outline(item) for item in items]


def _outline(item: ImportItem) -> str:
    match item:
        case ImportHeader():
            return f"header {item.session} {item.relation}"
        case ImportMessage():
            kinds = "+".join(type(part).__name__.removesuffix("Part") for part in item.parts)
            return f"{'hidden ' if item.hidden else ''}{item.role} {kinds}"
        case ImportToolCall():
            return f"call {item.call_id}"
        case ImportToolResult():
            return f"result {item.call_id} {item.error}"
        case ImportTurn():
            return f"turn {item.state} {item.cause}"
        case ImportOpaque():
            return f"opaque {item.kind}"
        case ImportSummary():
            return "summary"
        case ImportSkipped():
            return f"skipped {item.line} {item.reason}"


@pytest.mark.rule("IMP-2")
def test_the_sample_of_the_main_session() -> None:
    items = [item for item in read(IMPORTER, SAMPLE) if item.session != SIDE]
    assert outline(items) == [
        "opaque summary",
        "opaque file-history-snapshot",
        "header s-main import",
        "hidden user Text",
        "turn started None",
        "user Text",
        "assistant Reasoning",
        "assistant Text",
        "call toolu_1",
        "opaque progress",
        "result toolu_1 failed",
        "opaque tool_result/image",
        "assistant Text",
        "opaque system/turn_duration",
        "turn completed None",
        "turn started None",
        "user Text+Image",
        "opaque block/image",
        "call toolu_2",
        "turn aborted interrupted",
        "opaque system/compact_boundary",
        "summary",
        "turn started None",
        "user Text",
        "opaque bare_value",
        "opaque brand-new",
        "opaque block/hologram",
        "assistant Text",
        "turn completed None",
    ]
    assert [item.session for item in items[:2]] == ["", ""]
    assert {item.session for item in items[2:]} == {MAIN}


@pytest.mark.rule("IMP-2")
def test_a_sidechain_is_a_child_session() -> None:
    items = read(IMPORTER, SAMPLE)
    assert outline([item for item in items if item.session == SIDE]) == [
        "header s-main/side-root child",
        "turn started None",
        "user Text",
        "assistant Text",
        "call toolu_s",
        "result toolu_s None",
    ]
    assert of(items, ImportHeader)[1].parent == MAIN


def test_values_are_kept() -> None:
    items = read(IMPORTER, SAMPLE)
    header = of(items, ImportHeader)[0]
    assert (header.foreign_id, header.workspace_hint) == (MAIN, "/home/ada/tide")
    assert header.created_at == 1_767_323_041_250_000
    typed = [m for m in of(items, ImportMessage) if m.role == "user" and not m.hidden]
    assert typed[0].parts == (TextPart("Why is Saint-Malo off? 潮汐 🌊"),)
    assert typed[0].foreign_id == "u2"
    assert typed[0].created_at == 1_767_323_042_250_000
    assert ReasoningPart("Look at height().") in of(items, ImportMessage)[2].parts
    assert of(items, ImportToolCall)[0].input == {"command": "pytest -q"}
    assert of(items, ImportToolResult)[0].output == "1 failed"
    assert of(items, ImportSummary)[0].text.startswith("This session is being continued")


def test_images_come_from_inline_data_only() -> None:
    def image(**source: object) -> ImportItem:
        return read(IMPORTER, record("user", [{"type": "image", "source": source}]))[-1]

    inline = image(type="base64", media_type="image/png", data="iVBORw0KGgo=")
    assert isinstance(inline, ImportMessage)
    assert inline.parts == (ImagePart("image/png", "iVBORw0KGgo="),)
    for source in (
        {"type": "url", "url": "file:///etc/passwd"},
        {"type": "base64", "media_type": "text/html", "data": "PGI+"},
        {"type": "base64", "media_type": "image/png", "data": "[REDACTED]"},
        {"type": "base64", "media_type": "image/png", "data": None},
    ):
        assert isinstance(image(**source), ImportOpaque)


def test_a_torn_tail_and_a_bad_line_are_skipped_items() -> None:
    whole = record("user", "one")
    items = read(IMPORTER, whole + b"\0\0\n{broken\n" + record("user", "two") + whole[:-30])
    assert of(items, ImportSkipped) == [
        ImportSkipped("s", 2, "nul_bytes"),
        ImportSkipped("s", 3, "not_json"),
        ImportSkipped("s", 5, "torn"),
    ]
    assert len(of(items, ImportMessage)) == 2


def test_bom_and_crlf() -> None:
    mangled = b"\xef\xbb\xbf" + SAMPLE.replace(b"\n", b"\r\n")
    assert read(IMPORTER, mangled) == read(IMPORTER, SAMPLE)


@pytest.mark.parametrize(
    ("content", "fields", "expected"),
    [
        ("typed", {}, "user Text"),
        ([{"type": "text", "text": "typed"}], {}, "user Text"),
        (["a bare block"], {}, "user Text"),
        ("<command-name>/init</command-name>", {}, "user Text"),
        ("<local-command-stdout>x</local-command-stdout>", {}, "hidden user Text"),
        (" <local-command-stdout></local-command-stdout>", {}, "hidden user Text"),
        ("skill body", {"isMeta": True}, "hidden user Text"),
        (["wow error"], {"toolUseResult": "Error"}, "hidden user Text"),
        ("[Request interrupted by user]", {}, "opaque interrupt"),
        ("", {}, "opaque block/untyped"),
        ([], {}, "opaque user"),
        (None, {}, "opaque user"),
        ({"type": "odd"}, {}, "opaque block/odd"),
        (7, {}, "opaque block/untyped"),
        ([{"type": "tool_result", "content": "no id"}], {}, "opaque block/tool_result"),
    ],
)
def test_user_records(content: object, fields: dict[str, object], expected: str) -> None:
    items = read(IMPORTER, record("user", content, **fields))
    assert outline(items)[-1] == expected
    assert (len(of(items, ImportTurn)) == 1) == (expected == "user Text")


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"type": "tool_use", "id": "t", "name": "Bash", "input": {}}, "call t"),
        ({"type": "server_tool_use", "id": "t", "name": "web", "input": {}}, "call t"),
        ({"type": "tool_use", "name": "Bash", "input": {}}, "opaque block/tool_use"),
        ({"type": "tool_use", "id": "t", "name": 3}, "opaque block/tool_use"),
        ({"type": "thinking", "thinking": "", "signature": "x"}, "opaque block/thinking"),
        ({"type": "redacted_thinking", "data": "x"}, "opaque block/redacted_thinking"),
        ({"type": "text"}, "opaque block/text"),
        (None, "opaque block/untyped"),
    ],
)
def test_assistant_blocks(block: object, expected: str) -> None:
    assert expected in outline(read(IMPORTER, record("assistant", [block])))


def test_records_of_one_reply_keep_their_order_and_their_ids() -> None:
    blocks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "t", "name": "Bash", "input": {}},
        {"type": "text", "text": "b"},
    ]
    together = read(IMPORTER, record("assistant", blocks, uuid="u"))
    assert outline(together) == [
        "header s import",
        "turn started None",
        "assistant Reasoning+Text",
        "call t",
        "assistant Text",
        "turn completed None",
    ]
    assert [m.foreign_id for m in of(together, ImportMessage)] == ["u", "u#1"]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ([{"type": "text", "text": "reply"}], ["started", "completed"]),
        ([{"type": "tool_use", "id": "t", "name": "Bash", "input": 1}], ["started"]),
        ([{"type": "thinking", "thinking": "hm"}], ["started"]),
    ],
)
def test_the_last_turn_is_completed_only_with_its_reply(
    last: list[object], expected: list[str]
) -> None:
    items = read(IMPORTER, record("user", "go") + record("assistant", last))
    assert [turn.state for turn in of(items, ImportTurn)] == expected


def test_a_prompt_ends_the_turn_before() -> None:
    reply = record("assistant", [{"type": "text", "text": "reply"}])
    items = read(IMPORTER, record("user", "a") + reply + record("user", "b") + record("user", "c"))
    turns = [(turn.state, turn.cause) for turn in of(items, ImportTurn)]
    assert turns == [
        ("started", None),
        ("completed", None),
        ("started", None),
        ("aborted", "unfinished"),
        ("started", None),
    ]


def test_a_summary_keeps_what_is_no_text() -> None:
    content = [{"type": "text", "text": "so far"}, {"type": "image"}]
    items = read(IMPORTER, record("user", content, isCompactSummary=True))
    assert outline(items) == ["header s import", "summary", "opaque summary/image"]


@pytest.mark.parametrize(
    ("timestamp", "micros"),
    [
        ("1970-01-01T00:00:01.5Z", 1_500_000),
        ("1970-01-01T08:00:00.000001+08:00", 1),
        ("1970-01-01T00:00:02", 2_000_000),
        ("1969-12-31T23:59:59Z", None),
        ("0001-01-01T00:00:00+14:00", None),
        ("yesterday", None),
        (1_000, None),
        (None, None),
    ],
)
def test_instants(timestamp: object, micros: int | None) -> None:
    items = read(IMPORTER, record("user", "x", timestamp=timestamp))
    assert {item.created_at for item in of(items, ImportMessage)} == {micros}


def test_two_sessions_in_one_file_stay_apart() -> None:
    items = read(
        IMPORTER,
        record("user", "a", sessionId="one")
        + record("user", "b", sessionId="two")
        + record("assistant", [{"type": "text", "text": "c"}], sessionId="one"),
    )
    assert [header.session for header in of(items, ImportHeader)] == ["one", "two"]
    assert [message.session for message in of(items, ImportMessage)] == ["one", "two", "one"]


def test_interleaved_sidechains_are_told_apart() -> None:
    def side(uuid: str, parent: str | None, text: str) -> bytes:
        fields = {"isSidechain": True, "uuid": uuid, "parentUuid": parent}
        return record("user", text, **fields)

    items = read(
        IMPORTER,
        side("a", None, "1")
        + side("b", None, "2")
        + side("c", "a", "3")
        + side("d", "b", "4")
        + side("e", "lost", "5")
        + record("user", "6", isSidechain=True, agentId="x"),
    )
    assert [message.session for message in of(items, ImportMessage)] == [
        "s/a", "s/b", "s/a", "s/b", "s/b", "s/x",
    ]  # fmt: skip


@pytest.mark.rule("IMP-10")
def test_what_is_remembered_of_sidechains_is_bounded() -> None:
    chain = [{"isSidechain": True, "uuid": "u0", "parentUuid": None}]
    chain += [
        {"isSidechain": True, "uuid": f"u{i}", "parentUuid": f"u{i - 1}"}
        for i in range(1, SIDECHAIN_IDS_MAX + 10)
    ]
    items = read(IMPORTER, b"".join(record("user", "x", **fields) for fields in chain))
    assert {message.session for message in of(items, ImportMessage)} == {"s/u0"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
BLOCK = JSON | st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "x"])},
    optional={
        name: JSON | st.text(min_size=1, max_size=6)
        for name in ("text", "thinking", "id", "name", "input", "tool_use_id", "content", "source")
    },
)
RECORD = JSON | st.fixed_dictionaries(
    {"type": st.sampled_from(["user", "assistant", "system", "summary", "progress", "new"])},
    optional={
        "message": JSON | st.fixed_dictionaries({"content": JSON | st.lists(BLOCK, max_size=3)}),
        "sessionId": JSON | st.just("s"),
        "timestamp": JSON | st.just("2026-01-01T00:00:00+08:00"),
        **dict.fromkeys(("isSidechain", "isMeta", "isCompactSummary"), st.booleans() | JSON),
        **dict.fromkeys(("uuid", "parentUuid", "subtype", "agentId", "toolUseResult"), JSON),
    },
)


@given(RECORD)
def test_every_record_gives_an_item(value: Any) -> None:  # noqa: ANN401
    items = read(IMPORTER, json.dumps(value).encode())
    assert [item for item in items if not isinstance(item, ImportHeader)]
    known = {header.session for header in of(items, ImportHeader)} | {""}
    assert {item.session for item in items} <= known


@given(st.lists(RECORD, max_size=6), st.binary(max_size=40))
def test_any_sequence_gives_turns_that_open_before_they_close(
    values: list[Any], tail: bytes
) -> None:
    source = b"\n".join(json.dumps(value).encode() for value in values) + tail
    open_turns: dict[str, bool] = {}
    for turn in of(read(IMPORTER, source), ImportTurn):
        assert open_turns.get(turn.session, False) == (turn.state != "started")
        open_turns[turn.session] = turn.state == "started"


@given(st.binary(max_size=300))
def test_any_bytes_give_items(source: bytes) -> None:
    assert all(item.session == "" for item in read(IMPORTER, source))
