"""Scripts for the replay agent: made from items, kept in files, shipped with callboard."""

import json
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.errors import ImportFormatUnknown, ImportMalformed, ImportTooLarge
from callboard.importers.port import (
    ImagePart,
    ImportHeader,
    ImportItem,
    ImportLimits,
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
from callboard.importers.script import (
    PROMPT_ABSENT,
    SCRIPT_DELAY_MS_DEFAULT,
    SCRIPT_DELAY_MS_MAX,
    SCRIPT_TEXT_BYTES_MAX,
    UNFINISHED_CALL,
    SayStep,
    Script,
    ScriptStep,
    ScriptTurn,
    ToolStep,
    cut_text,
    dump_script,
    load_script,
    load_shipped,
    read_transcript,
    script_of,
)
from callboard.importers.script_file import ScriptImporter, json_bytes
from callboard.limits import RECORD_BYTES_MAX
from tests.importers.reading import DATA, of, read

MS = 1_000


def user(text: str, at: int | None = None, **more: Any) -> ImportMessage:  # noqa: ANN401
    return ImportMessage(more.pop("session", "s"), "user", (TextPart(text),), None, at, **more)


def said(text: str, at: int | None = None, session: str = "s") -> ImportMessage:
    return ImportMessage(session, "assistant", (TextPart(text),), None, at)


def call(call_id: str, at: int | None = None, value: Any = None) -> ImportToolCall:  # noqa: ANN401
    return ImportToolCall("s", call_id, "shell", value, at)


def result(call_id: str, output: str = "", at: int | None = None) -> ImportToolResult:
    return ImportToolResult("s", call_id, output, None, at)


def turns(*items: ImportItem) -> tuple[ScriptTurn, ...]:
    return script_of(items).turns


def steps(*items: ImportItem) -> tuple[ScriptStep, ...]:
    (turn,) = turns(user("go", 0), *items)
    return turn.steps


def test_a_turn_for_each_thing_typed() -> None:
    thought = ImportMessage("s", "assistant", (ReasoningPart("hm"),))
    assert turns(
        ImportHeader("s", "s"),
        ImportTurn("s", "started"),
        user("context", hidden=True),
        user("one"),
        thought,
        said("1"),
        user("steered"),
        said("2"),
        ImportTurn("s", "completed"),
        ImportSummary("s", "sum"),
        ImportOpaque("s", "x", None),
        ImportSkipped("s", 3, "torn"),
        user("two"),
    ) == (
        ScriptTurn("one", (SayStep("1"),)),
        ScriptTurn("steered", (SayStep("2"),)),
        ScriptTurn("two", ()),
    )


def test_calls_get_their_results_however_late() -> None:
    got = turns(
        user("a"), call("1"), call("2", value={"x": 1}), result("2", "two"), user("b"),
        result("1", "one"), result("1", "again"), result("9", "no call"), call("3"),
    )  # fmt: skip
    assert got == (
        ScriptTurn("a", (ToolStep("shell", None, "one"), ToolStep("shell", {"x": 1}, "two"))),
        ScriptTurn("b", (ToolStep("shell", None, "", UNFINISHED_CALL),)),
    )


def test_delays_add_up_and_have_a_cap() -> None:
    got = steps(
        said("a", 10 * MS),
        call("1", 20 * MS), call("2", 21 * MS), result("1", at=50 * MS), result("2", at=40 * MS),
        said("b", 45 * MS), said("c", 10**12), said("d"), said("e", 10**12 + 7 * MS),
    )  # fmt: skip
    assert [step.delay_ms for step in got] == [
        10, 40, 0, 0, SCRIPT_DELAY_MS_MAX, SCRIPT_DELAY_MS_DEFAULT, 7,
    ]  # fmt: skip


def test_without_times_there_is_a_default() -> None:
    (turn,) = turns(user("go"), said("a"), call("1"), result("1"))
    assert {step.delay_ms for step in turn.steps} == {SCRIPT_DELAY_MS_DEFAULT}


def test_a_source_without_prompts_can_be_played() -> None:
    assert turns(said("a"), call("1")) == (
        ScriptTurn(PROMPT_ABSENT, (SayStep("a"), ToolStep("shell", None, "", UNFINISHED_CALL))),
    )


def test_a_prompt_is_never_blank() -> None:
    image = ImportMessage("s", "user", (ImagePart("image/png", "AA=="),))
    assert [turn.user for turn in turns(user(" \n"), image)] == ["[blank]", "[image]"]


def test_children_are_played_only_if_there_is_nothing_else() -> None:
    child = ImportHeader("c", "c", relation="child", parent="s")
    theirs: list[ImportItem] = [child, user("find", session="c"), said("found", session="c")]
    assert [turn.user for turn in turns(*theirs, ImportHeader("s", "s"), user("go"))] == ["go"]
    assert [turn.user for turn in turns(*theirs)] == ["find"]


def test_sessions_of_one_file_are_played_by_the_order_of_their_prompts() -> None:
    got = turns(
        user("a", session="1"), user("b", session="2"),
        said("for a", session="1"), said("for b", session="2"),
    )  # fmt: skip
    assert got == (ScriptTurn("a", (SayStep("for a"),)), ScriptTurn("b", (SayStep("for b"),)))


@pytest.mark.parametrize("text", ["x", "é", "潮", "🌊", "\n", "\0", '"', "a🌊\0\n"])
def test_long_texts_are_cut_with_a_marker(text: str) -> None:
    whole = text * (SCRIPT_TEXT_BYTES_MAX + 1)
    cut = cut_text(whole)
    assert SCRIPT_TEXT_BYTES_MAX - 10 < json_bytes(cut) <= SCRIPT_TEXT_BYTES_MAX
    assert len(cut.encode()) <= SCRIPT_TEXT_BYTES_MAX
    kept, marker = cut.split("… [cut: ")
    assert whole.startswith(kept)
    assert marker == f"{len(whole.encode())} bytes in all]"
    just = "x" * (SCRIPT_TEXT_BYTES_MAX - json_bytes(text)) + text
    assert cut_text(just) == just
    assert cut_text("x" + just) != just


@given(st.text(), st.integers(40, 400))
def test_a_cut_text_fits(text: str, bytes_max: int) -> None:
    cut = cut_text(text, bytes_max)
    assert json_bytes(cut) <= bytes_max
    assert (cut == text) == (json_bytes(text) <= bytes_max)


def test_everything_of_a_script_is_cut() -> None:
    long = "🌊\0" * SCRIPT_TEXT_BYTES_MAX
    error = ImportToolResult("s", "1", long, long)
    (turn,) = turns(
        user(long), said(long), call("1", value={"a": [long]}), error, call("2", value=long)
    )
    assert turn == load_back(Script("n", "s", (turn,))).turns[0]
    for step in turn.steps:
        if isinstance(step, ToolStep):
            assert isinstance(step.input, str)
            assert json_bytes(step.output) + json_bytes(step.input) < RECORD_BYTES_MAX
    name = ImportToolCall("s", "1", "n" * 1_000, {})
    (step,) = steps(name)
    assert isinstance(step, ToolStep)
    assert len(step.name) == 200


def load_back(script: Script) -> Script:
    stream = BytesIO()
    dump_script(script, stream)
    stream.seek(0)
    return load_script(stream)


TEXT = st.text(max_size=20)
DELAY = st.integers(0, SCRIPT_DELAY_MS_MAX)
INPUT: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | TEXT | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
STEP = st.builds(SayStep, TEXT, DELAY) | st.builds(
    ToolStep, st.text(min_size=1, max_size=9), INPUT, TEXT, st.none() | TEXT, DELAY
)
USER = TEXT.filter(lambda text: bool(text.strip()))
TURN = st.builds(ScriptTurn, USER, st.lists(STEP, max_size=4).map(tuple))
SCRIPT = st.builds(Script, TEXT, TEXT, st.lists(TURN, max_size=4).map(tuple))


@given(SCRIPT)
def test_what_is_dumped_loads_again(script: Script) -> None:
    assert load_back(script) == script


def test_the_sample_loads() -> None:
    script = read_transcript(DATA / "script.jsonl")
    assert (script.name, script.source, len(script.turns)) == ("small", "hand", 2)
    assert script.turns[0].steps == (
        SayStep("Ich sehe nach. 👀", 5),
        ToolStep("read_file", {"path": "README.md"}, "# Gezeiten", None, 12),
        SayStep("Nur eine Überschrift.", SCRIPT_DELAY_MS_DEFAULT),
    )
    assert script.turns[1].steps == (ToolStep("shell", "ls", "", "exit_2"),)


NO: dict[str, Any] = {}
HEADER = {"format": "callboard-script", "version": 1, "name": "n", "source": "s", "turns": 1}
HI: dict[str, Any] = {"user": "hi", "steps": []}
LONG = "x" * (SCRIPT_TEXT_BYTES_MAX + 1)
TOOL: dict[str, Any] = {"tool": "t", "input": {}, "output": ""}


@pytest.mark.parametrize(
    ("lines", "line", "reason"),
    [
        (list[Any](), 1, "no header"),
        ([{"format": "other"}], 1, "not a callboard-script"),
        ([{**HEADER, "version": 2}], 1, "not version 1"),
        ([{**HEADER, "turns": True}, HI], 1, "turns is no integer"),
        ([{**HEADER, "extra": 1}, HI], 1, "unknown member 'extra'"),
        ([{**HEADER, "name": None}, HI], 1, "name is no text"),
        ([HEADER], 1, "1 turns announced, 0 found"),
        ([HEADER, HI, HI], 3, "1 turns announced, 2 found"),
        ([HEADER, "hi"], 2, "not an object"),
        ([HEADER, {"user": "hi"}], 2, "steps is no list"),
        ([HEADER, {**HI, "role": "x"}], 2, "unknown member 'role'"),
        ([HEADER, {**HI, "user": " "}], 2, "user is blank"),
        ([HEADER, {**HI, "steps": ["say"]}], 2, "a step is no object"),
        ([HEADER, {**HI, "steps": [{"say": 1}]}], 2, "say is no text"),
        ([HEADER, {**HI, "steps": [{"say": "x", "tool": "y"}]}], 2, "unknown member 'tool'"),
        ([HEADER, {**HI, "steps": [NO]}], 2, "tool is no text"),
        ([HEADER, {**HI, "steps": [{**TOOL, "tool": ""}]}], 2, "tool is not of 1..200 characters"),
        ([HEADER, {**HI, "steps": [{**TOOL, "error": 1}]}], 2, "error is no text"),
        ([HEADER, {**HI, "steps": [{**TOOL, "delay_ms": -1}]}], 2, "delay_ms is not in 0..5000"),
        ([HEADER, {**HI, "steps": [{**TOOL, "delay_ms": 1.5}]}], 2, "delay_ms is no integer"),
        ([HEADER, {**HI, "steps": [{**TOOL, "delay_ms": True}]}], 2, "delay_ms is no integer"),
        ([HEADER, {**HI, "steps": [{"say": LONG}]}], 2, "say is above 262144 bytes"),
        ([HEADER, {**HI, "steps": [{**TOOL, "input": [LONG]}]}], 2, "input is above 262144 bytes"),
    ],
)  # fmt: skip
def test_the_loader_is_strict(lines: list[object], line: int, reason: str) -> None:
    source = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    with pytest.raises(ImportMalformed) as caught:
        load_script(BytesIO(source))
    assert caught.value.carried == {"line": line, "reason": reason}


def test_a_torn_or_broken_script_is_refused() -> None:
    source = (DATA / "script.jsonl").read_bytes()
    for broken, line, reason in (
        (source[:-10], 3, "torn"),
        (source.replace(b'{"user"', b'{user"', 1), 2, "not_json"),
        (source.replace(b"README", b"\xff", 1), 2, "not_utf8"),
    ):
        with pytest.raises(ImportMalformed) as caught:
            load_script(BytesIO(broken))
        assert caught.value.carried == {"line": line, "reason": reason}
    with pytest.raises(ImportTooLarge):
        load_script(BytesIO(source), ImportLimits(line_bytes=20))


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_load_or_are_refused(tail: bytes, headed: bool) -> None:
    head = json.dumps(HEADER).encode() + b"\n" if headed else b""
    with suppress(ImportMalformed):
        load_script(BytesIO(head + tail))


@pytest.mark.rule("IMP-1")
def test_a_script_is_a_transcript_too() -> None:
    items = read(ScriptImporter(), (DATA / "script.jsonl").read_bytes())
    assert of(items, ImportHeader)[0].foreign_id == "small"
    assert [turn.state for turn in of(items, ImportTurn)] == ["started", "completed"] * 2
    again = script_of(items, name="small", source="hand")
    loaded = read_transcript(DATA / "script.jsonl")
    assert [turn.user for turn in again.turns] == [turn.user for turn in loaded.turns]


@pytest.mark.parametrize(
    ("file", "source", "users"),
    [
        ("claude.jsonl", "claude-code", 3),
        ("codex.jsonl", "codex", 3),
        ("codex_exec.jsonl", "codex", 1),
    ],
)
def test_transcripts_become_scripts(file: str, source: str, users: int) -> None:
    script = read_transcript(DATA / file)
    assert (script.name, script.source) == (file.removesuffix(".jsonl"), source)
    assert len(script.turns) == users
    assert load_back(script) == script
    assert read_transcript(str(DATA / file), source) == script


@pytest.mark.rule("IMP-3")
def test_files_that_cannot_be_played_are_refused_by_name(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    with pytest.raises(ImportFormatUnknown, match=r"empty\.jsonl"):
        read_transcript(empty)
    titles = tmp_path / "titles.jsonl"
    titles.write_bytes(b'{"type":"summary","summary":"x","leafUuid":"y"}\n')
    with pytest.raises(ImportMalformed, match=r"titles\.jsonl holds no turn.*give a claude-code"):
        read_transcript(titles)
    with pytest.raises(OSError, match="absent"):
        read_transcript(tmp_path / "absent.jsonl")


@given(st.binary(max_size=300), st.sampled_from(["claude-code", "codex", "callboard-script", None]))
def test_any_file_is_played_or_refused(source: bytes, name: str | None) -> None:
    with NamedTemporaryFile() as file:
        file.write(source)
        file.flush()
        with suppress(ImportFormatUnknown, ImportMalformed):
            assert read_transcript(file.name, name).turns


def test_the_shipped_transcript() -> None:
    script = load_shipped()
    assert (script.name, len(script.turns)) == ("tour", 12)
    every = [step for turn in script.turns for step in turn.steps]
    assert all(turn.steps for turn in script.turns)
    assert all(5 <= step.delay_ms <= 60 for step in every)
    tools = [step for step in every if isinstance(step, ToolStep)]
    assert {"shell", "read_file", "edit"} <= {step.name for step in tools}
    assert {step.error for step in tools} == {None, "exit_1"}
    text = "".join(turn.user for turn in script.turns) + "".join(
        step.text for step in every if isinstance(step, SayStep)
    )
    assert {"潮", "島", "é", "🌊"} & set(text) >= {"島", "é", "🌊"}
    assert load_back(script) == script
