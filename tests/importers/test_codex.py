"""Codex: rollouts, read once where they tell things twice, and the stream of `codex exec`."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.importers.codex import CodexImporter
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
    TextPart,
)
from tests.importers.reading import DATA, of, read

IMPORTER = CodexImporter()
SAMPLE = (DATA / "codex.jsonl").read_bytes()
SEARCH = "web_search_call@1772600769500000"  # it has no id: its time instead
EXEC = (DATA / "codex_exec.jsonl").read_bytes()


def line(kind: str, payload: object) -> bytes:
    return json.dumps({"type": kind, "payload": payload}).encode() + b"\n"


def item(**payload: object) -> list[ImportItem]:
    """Read one `response_item`; leave the header and the turn out."""
    items = read(IMPORTER, line("response_item", payload))
    return [each for each in items if not isinstance(each, ImportHeader | ImportTurn)]


def texts(items: list[ImportItem], *, hidden: bool = False) -> list[tuple[str, list[str]]]:
    return [
        (
            each.role,
            [part.text if not isinstance(part, ImagePart) else "(image)" for part in each.parts],
        )
        for each in of(items, ImportMessage)
        if each.hidden == hidden
    ]


@pytest.mark.rule("IMP-2")
def test_one_copy_of_each_text() -> None:
    items = read(IMPORTER, SAMPLE)
    assert texts(items) == [
        ("user", ["Mesure les colonnes, s'il te plaît"]),
        ("assistant", ["**Planning**"]),
        ("assistant", ["Quatre colonnes."]),
        ("user", ["Compare avec ceci", "(image)"]),
        ("user", ["et vite"]),
    ]
    assert [role for role, _ in texts(items, hidden=True)] == ["user", "user"]
    assert of(items, ImportSkipped) == []


def test_the_other_copy_is_not_lost() -> None:
    kinds = [opaque.kind for opaque in of(read(IMPORTER, SAMPLE), ImportOpaque)]
    assert kinds == [
        "session_meta",
        "turn_context",
        "event_msg/user_message",
        "event_msg/agent_reasoning",
        "response_item/reasoning",
        "event_msg/web_search_end",
        "event_msg/agent_message",
        "event_msg/token_count",
        "block/input_image",
        "event_msg/context_compacted",
        "response_item/ghost_snapshot",
    ]


def test_turn_limits_come_from_the_events() -> None:
    turns = [(turn.state, turn.cause) for turn in of(read(IMPORTER, SAMPLE), ImportTurn)]
    assert turns == [
        ("started", None),
        ("completed", None),
        ("started", None),
        ("aborted", "interrupted"),
    ]


def test_old_rollouts_have_no_turn_events_but_aborts() -> None:
    def said(role: str, text: str) -> bytes:
        kind = "input_text" if role == "user" else "output_text"
        content = [{"type": kind, "text": text}]
        return line("response_item", {"type": "message", "role": role, "content": content})

    late = line("response_item", {"type": "function_call", "name": "shell", "call_id": "c"})
    items = read(
        IMPORTER,
        said("user", "a") + said("assistant", "b") + said("user", "c")
        + line("event_msg", {"type": "turn_aborted", "reason": "interrupted"}) + late
        + said("user", "d") + said("assistant", "e"),
    )  # fmt: skip
    assert [(turn.state, turn.cause) for turn in of(items, ImportTurn)] == [
        ("started", None),
        ("completed", None),
        ("started", None),
        ("aborted", "interrupted"),
        ("started", None),
        ("completed", None),
    ]


def test_calls_and_outputs_in_all_their_forms() -> None:
    items = read(IMPORTER, SAMPLE)
    assert [(call.call_id, call.name, call.input) for call in of(items, ImportToolCall)] == [
        ("c1", "shell", {"command": ["ls"]}),
        ("c2", "shell", "not json {"),
        ("c3", "exec_command", {"cmd": "pytest"}),
        ("c4", "apply_patch", "*** Begin Patch\n*** End Patch"),
        (SEARCH, "web_search", {"type": "search", "query": "east asian width"}),
        ("c5", "shell", {}),
    ]  # fmt: skip
    results = [(r.call_id, r.output[-15:], r.error) for r in of(items, ImportToolResult)]
    assert results == [
        ("c1", "README.md\n", None),
        ("c2", "no such command", "exit_127"),
        ("c3", "utput:\n1 failed", "exit_1"),
        ("c4", "utput:\nSuccess.", None),
        (SEARCH, "completed", None),
        ("c5", "aborted by user", None),
    ]


@pytest.mark.parametrize(
    ("output", "text", "error"),
    [
        ("plain", "plain", None),
        ("", "", None),
        (None, "", None),
        ('{"output":"x","metadata":{"exit_code":0}}', "x", None),
        ('{"output":"x"}', '{"output":"x"}', None),
        ('{"output":3,"metadata":{}}', '{"output":3,"metadata":{}}', None),
        ("{not json", "{not json", None),
        ({"content": "x", "success": False}, "x", "failed"),
        ({"content": [{"type": "input_text", "text": "x"}], "success": True}, "x", None),
        ({"odd": 1}, '{"odd": 1}', None),
        ([{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}], "x\ny", None),
        (5, "5", None),
        ("Exit code: 2\nOutput:\n", "Exit code: 2\nOutput:\n", "exit_2"),
        ("Exit code: 0\nOutput:\n", "Exit code: 0\nOutput:\n", None),
        ("x" * 500 + "\nExit code: 2\n", "x" * 500 + "\nExit code: 2\n", None),
    ],
)
def test_outputs(output: object, text: str, error: str | None) -> None:
    (result,) = of(item(type="function_call_output", call_id="c", output=output), ImportToolResult)
    assert (result.output, result.error) == (text, error)


def test_an_image_in_an_output_stays_opaque() -> None:
    blocks = [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:,"}]
    items = item(type="function_call_output", call_id="c", output=blocks)
    assert [type(each) for each in items] == [ImportToolResult, ImportOpaque]


@pytest.mark.parametrize(
    "payload",
    [
        {"type": "function_call", "name": "shell", "arguments": "{}"},
        {"type": "function_call_output", "output": "x"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "user", "content": []},
        {"type": "message", "role": "user", "content": [{"type": "input_audio"}]},
        {"type": "message", "role": "user"},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": 7},
    ],
)
def test_what_cannot_be_read_is_opaque(payload: dict[str, object]) -> None:
    assert [type(each) for each in item(**payload)] == [ImportOpaque]


def test_compaction_keeps_text_and_replacements() -> None:
    (summary,) = of(read(IMPORTER, SAMPLE), ImportSummary)
    assert summary.text == ""
    assert len(summary.replacements) == 2
    (old,) = of(read(IMPORTER, line("compacted", {"message": "so far"})), ImportSummary)
    assert (old.text, old.replacements) == ("so far", ())


def test_header_of_a_fork_and_of_a_child() -> None:
    fork = line("session_meta", {"id": "b", "forked_from_id": "a", "cwd": "/w"})
    parent = line("session_meta", {"id": "a"})
    (header,) = of(read(IMPORTER, fork + parent), ImportHeader)
    assert (header.foreign_id, header.relation, header.parent) == ("b", "fork", "a")
    source = {"subagent": {"thread_spawn": {"parent_thread_id": "a", "depth": 1}}}
    (header,) = of(
        read(IMPORTER, line("session_meta", {"id": "c", "source": source})), ImportHeader
    )
    assert (header.relation, header.parent) == ("child", "a")


def test_a_slice_without_header_gets_one() -> None:
    items = read(IMPORTER, line("event_msg", {"type": "task_started"}))
    assert isinstance(items[0], ImportHeader)
    assert {each.session for each in items} == {"unnamed"}


@pytest.mark.parametrize(
    "text",
    [
        "<environment_context>\n</environment_context>",
        "# AGENTS.md instructions for /w",
        "\n<user_instructions>x",
        "<skill>\n<name>x</name>",
        "<turn_aborted>",
    ],
)
def test_injected_text_is_hidden(text: str) -> None:
    content = [{"type": "input_text", "text": text}]
    assert texts(item(type="message", role="user", content=content), hidden=True)
    content.append({"type": "input_text", "text": "and a typed one"})
    assert texts(item(type="message", role="user", content=content), hidden=False)
    assert texts(item(type="message", role="developer", content="anything"), hidden=True)


def test_the_exec_stream() -> None:
    items = read(IMPORTER, EXEC)
    assert of(items, ImportHeader) == [ImportHeader("th-1", "th-1")]
    assert texts(items) == [("assistant", ["**Listing**"]), ("assistant", ["One file."])]
    assert [(call.name, call.input) for call in of(items, ImportToolCall)] == [
        ("command_execution", {"command": "ls"}),
        ("find", {"server": "docs", "tool": "find", "arguments": {"q": "x"}}),
    ]
    assert [(r.call_id, r.output, r.error) for r in of(items, ImportToolResult)] == [
        ("i1", "a\n", "exit_2"),
        ("i2", "found", None),
    ]
    turns = [(turn.state, turn.cause) for turn in of(items, ImportTurn)]
    assert turns == [
        ("started", None),
        ("completed", None),
        ("started", None),
        ("aborted", "failed"),
    ]


def test_an_item_begun_twice_is_one_call() -> None:
    begun = {"type": "item.started", "item": {"id": "i", "type": "command_execution"}}
    items = read(IMPORTER, (json.dumps(begun).encode() + b"\n") * 2)
    assert [type(each) for each in items] == [
        ImportHeader,
        ImportTurn,
        ImportToolCall,
        ImportOpaque,
    ]


def test_bom_crlf_glue_and_a_torn_end() -> None:
    plain = read(IMPORTER, SAMPLE)
    assert read(IMPORTER, b"\xef\xbb\xbf" + SAMPLE.replace(b"\n", b"\r\n")) == plain
    assert read(IMPORTER, SAMPLE.replace(b"\n", b"")) == plain
    torn = read(IMPORTER, SAMPLE[:-20])
    assert torn == [*plain[:-1], ImportSkipped("cx-1", 33, "torn")]


def test_nul_and_lone_surrogate_escapes() -> None:
    source = rb'{"type":"response_item","payload":{"type":"message","role":"assistant","content":'
    items = read(IMPORTER, source + rb'[{"type":"output_text","text":"a\u0000b\ud800c"}]}}')
    assert of(items, ImportMessage)[0].parts == (TextPart("a\0b\ufffdc"),)
    arguments = json.dumps(
        {"type": "function_call", "call_id": "c", "arguments": '{"a":"\\ud800"}'}
    )
    items = read(IMPORTER, b'{"type":"response_item","payload":' + arguments.encode() + b"}")
    assert of(items, ImportToolCall)[0].input == {"a": "\ufffd"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = dict.fromkeys(
    [
        "role",
        "content",
        "call_id",
        "name",
        "arguments",
        "input",
        "output",
        "summary",
        "id",
        "reason",
        "message",
        "source",
        "status",
        "action",
        "replacement_history",
        "forked_from_id",
    ],
    JSON,
)
TYPES = st.sampled_from(
    [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "web_search_call",
        "custom_tool_call",
        "task_started",
        "task_complete",
        "turn_aborted",
        "user_message",
        "new",
    ]
)
PAYLOAD = JSON | st.fixed_dictionaries({"type": TYPES}, optional=FIELDS)
KINDS = ["session_meta", "turn_context", "response_item", "event_msg", "compacted", "new"]
ROLLOUT = st.fixed_dictionaries({"type": st.sampled_from(KINDS), "payload": PAYLOAD})
ITEM_TYPES = st.sampled_from(["agent_message", "reasoning", "command_execution", "todo_list"])
STREAM = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            [
                "thread.started",
                "turn.started",
                "turn.completed",
                "turn.failed",
                "item.started",
                "item.completed",
                "item.updated",
            ]
        )
    },
    optional={
        "thread_id": JSON,
        "item": JSON
        | st.fixed_dictionaries(
            {"type": ITEM_TYPES},
            optional=dict.fromkeys(("id", "text", "exit_code", "result", "status"), JSON),
        ),
    },
)


@given(JSON | ROLLOUT | STREAM)
def test_every_record_gives_an_item(value: Any) -> None:  # noqa: ANN401
    items = read(IMPORTER, json.dumps(value).encode())
    assert [each for each in items if not isinstance(each, ImportHeader)]
    known = {header.session for header in of(items, ImportHeader)} | {""}
    assert {each.session for each in items} <= known


@given(st.lists(ROLLOUT | STREAM, max_size=6))
def test_any_sequence_gives_turns_that_open_before_they_close(values: list[Any]) -> None:
    source = b"\n".join(json.dumps(value).encode() for value in values)
    open_turn = False
    for turn in of(read(IMPORTER, source), ImportTurn):
        assert open_turn == (turn.state != "started")
        open_turn = turn.state == "started"


@given(st.binary(max_size=300))
def test_any_bytes_give_items(source: bytes) -> None:
    assert all(each.session == "" for each in read(IMPORTER, source))
