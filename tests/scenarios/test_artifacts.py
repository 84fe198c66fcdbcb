"""Long messages as an agent meets them: an excerpt, a tool that reads the rest, a check before."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from callboard import home
from callboard.actors.session.tools import READ_FAILED
from callboard.agents import ToolError, Turn
from callboard.artifact_files import FOLDER, ArtifactReader
from callboard.artifacts import Cut, cut, spell_ref
from callboard.errors import CallboardError
from callboard.messages import InboxItem, Text
from callboard.records import PartCreated, TurnAborted, TurnCompleted, item_digest
from tests.scenarios.conftest import Open
from tests.scenarios.stage import Stage, cast_agent, item, payload

TEXT = "".join(f"line {n} of a long prompt €\n" for n in range(3_000))
MADE = cut([{"type": "text", "text": TEXT}])
assert MADE.ref is not None
NAME = MADE.ref.artifact_id


def long_item(message_id: str, made: Cut = MADE) -> InboxItem:
    content = [Text.model_validate(part) for part in made.parts]
    return item(message_id).model_copy(
        update={"content": content, "digest": item_digest(made.parts, {})}
    )


@pytest.fixture
def session(tmp_path: Path) -> Path:
    (tmp_path / FOLDER).mkdir(mode=0o700)
    path = tmp_path / FOLDER / NAME
    path.write_bytes(TEXT.encode())
    path.chmod(0o600)
    return tmp_path


def stage_with(stage_for: Open, agent: str, session: Path) -> Stage:
    stage = stage_for(agent)
    stage.host.artifacts = ArtifactReader(session)
    return stage


@pytest.mark.rule("ART-1", "ART-3")
def test_the_record_holds_the_excerpt_and_its_reference(stage_for: Open, session: Path) -> None:
    stage = stage_with(stage_for, "echo", session)
    stage.send(long_item("m1"), permit=True)
    heard = stage.storage.of(PartCreated)[0]
    assert heard.payload == {
        "text": MADE.parts[0]["text"],
        "prompt_artifact": MADE.parts[0]["prompt_artifact"],
    }
    assert stage.storage.fold.artifacts == {NAME}
    assert len(stage.storage.of(TurnCompleted)) == 1


@pytest.mark.rule("ART-11")
def test_an_agent_gets_the_exact_text_back(stage_for: Open, session: Path) -> None:
    seen: list[object] = []

    @cast_agent("reader")
    async def reader(turn: Turn) -> None:
        async for message in turn:
            seen.append((message.artifact_id, await turn.full_text(message)))

    stage = stage_with(stage_for, "reader", session)
    stage.send(long_item("m1"), permit=True)
    stage.send("short", permit=True)
    assert seen == [(NAME, TEXT), (None, "short")]


@pytest.mark.rule("ART-10")
def test_the_tool_reads_on_to_the_end_and_its_results_are_durable(
    stage_for: Open, session: Path
) -> None:
    pieces: list[str] = []

    @cast_agent("pieces")
    async def by_pieces(turn: Turn) -> None:
        async for message in turn:
            offset = 0
            while True:
                found = await turn.tool(
                    "read_prompt_artifact",
                    artifact_id=message.artifact_id,
                    offset=offset,
                    limit=30_000,
                )
                text, _, rest = str(found).rpartition("\n")
                pieces.append(text)
                if rest == "[end]":
                    break
                offset = int(rest.removeprefix("[continue at ").removesuffix("]"))

    stage = stage_with(stage_for, "pieces", session)
    stage.send(long_item("m1"), permit=True)
    assert "".join(pieces) == TEXT
    parts = [payload(one) for one in stage.storage.of(PartCreated)]
    results = [one["output"] for one in parts if "output" in one]
    assert [one.rpartition("\n")[0] for one in results] == pieces
    assert {one["effect"] for one in parts if "effect" in one} == {"readonly"}


@pytest.mark.rule("ART-10", "ART-13")
@pytest.mark.parametrize(
    "arguments",
    [
        {"artifact_id": "A" * 64},
        {"artifact_id": "../../x"},
        {"artifact_id": "0" * 64},
        {"artifact_id": NAME, "offset": -1},
        {"artifact_id": NAME, "offset": 10_000_000},
        {"artifact_id": NAME, "offset": True},
        {"artifact_id": NAME, "limit": 3},
        {"artifact_id": NAME, "limit": 65_537},
        {"artifact_id": NAME, "limit": "10"},
        {"artifact_id": NAME, "path": "/etc/passwd"},
        {},
    ],
)
def test_every_failure_of_the_tool_is_one_sentence(
    stage_for: Open, session: Path, arguments: dict[str, object]
) -> None:
    told: list[str] = []

    @cast_agent("wrong")
    async def wrong(turn: Turn) -> None:
        async for _ in turn:
            try:
                await turn.tool("read_prompt_artifact", **arguments)
            except ToolError as error:
                told.append(str(error))

    stage = stage_with(stage_for, "wrong", session)
    stage.send("m1", permit=True)
    assert told == [READ_FAILED]
    assert stage.storage.story()[-1] == f"result read_prompt_artifact {READ_FAILED}"
    assert len(stage.storage.of(TurnCompleted)) == 1


@pytest.mark.rule("ART-10")
def test_a_session_without_artifacts_has_none_to_read(stage_for: Open) -> None:
    @cast_agent("other")
    async def other(turn: Turn) -> None:
        async for _ in turn:
            with pytest.raises(ToolError, match=READ_FAILED):
                await turn.tool("read_prompt_artifact", artifact_id=NAME)

    stage = stage_for("other")
    stage.send("m1", permit=True)
    assert len(stage.storage.of(TurnCompleted)) == 1


@pytest.mark.rule("ART-13")
def test_what_may_pass_is_tried_again(
    stage_for: Open, session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    real = home.open_shared

    def busy(path: Path) -> int:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.EMFILE, "")
        return real(path)

    @cast_agent("patient")
    async def patient(turn: Turn) -> None:
        async for _ in turn:
            assert await turn.tool("read_prompt_artifact", artifact_id=NAME)

    stage = stage_with(stage_for, "patient", session)
    monkeypatch.setattr("callboard.artifact_files.home.open_shared", busy)
    stage.send("m1", permit=True)
    stage.advance(200)
    assert len(tries) == 2
    stage.advance(400)
    assert len(tries) == 3
    assert len(stage.storage.of(TurnCompleted)) == 1


@pytest.mark.rule("ART-11", "R44")
@pytest.mark.parametrize("wrong", ["byte", "mode", "gone", "link", "chars", "size"])
@pytest.mark.parametrize("swallows", [False, True])
def test_a_turn_whose_artifact_is_not_as_it_must_be_fails_before_the_agent_sees_it(
    stage_for: Open, session: Path, tmp_path: Path, wrong: str, swallows: bool
) -> None:
    path, made = session / FOLDER / NAME, MADE
    assert MADE.ref is not None
    ref = MADE.ref
    if wrong == "byte":
        path.write_bytes(TEXT.encode()[:-2] + b"x\n")
    elif wrong == "mode":
        path.chmod(0o644)
    elif wrong == "gone":
        path.unlink()
    elif wrong == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif wrong == "chars":
        ref = ref.model_copy(update={"text_chars": ref.text_chars - 1})
    else:
        ref = ref.model_copy(update={"size_bytes": ref.size_bytes - 1})
    made = Cut([{**MADE.parts[0], "prompt_artifact": spell_ref(ref)}])
    seen: list[str] = []

    @cast_agent("careless")
    async def careless(turn: Turn) -> str:
        try:
            async for message in turn:
                seen.append(message.text)
        except CallboardError:
            if not swallows:
                raise
        return "all is well"

    stage = stage_with(stage_for, "careless", session)
    stage.send(long_item("m1", made), permit=True)
    assert seen == []
    (aborted,) = stage.storage.of(TurnAborted)
    assert aborted.failure is not None
    assert aborted.failure.code == "unsupported_input"
    assert str(tmp_path) not in aborted.model_dump_json()
    assert "all is well" not in str(stage.storage.story())
