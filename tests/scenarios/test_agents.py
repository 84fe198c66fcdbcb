"""Plays of the agents that are built in, and of what an agent sees of its turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from callboard.actors.session.agents import resolve, script_for
from callboard.agents import Turn
from callboard.errors import InvalidRequest, NotFound
from callboard.importers.script import SayStep, Script, ScriptTurn, ToolStep, dump_script
from callboard.records import PartCreated, TurnAborted, TurnCompleted
from tests.scenarios.conftest import Open
from tests.scenarios.stage import REF, cast_agent, payload

SCRIPT = Script(
    "small",
    "hand",
    (
        ScriptTurn(
            "list it",
            (
                SayStep("let me see", 1_000),
                ToolStep("shell", {"command": "ls"}, "a.txt", None, 2_000),
                ToolStep("shell", {"command": "rm"}, "", "no permission", 500),
                SayStep("there is a.txt", 1_000),
            ),
        ),
        ScriptTurn("thanks", (SayStep("welcome", 100),)),
    ),
)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.jsonl"
    with path.open("wb") as stream:
        dump_script(SCRIPT, stream)
    return str(path)


@pytest.mark.rule("TLP-4", "TLP-2")
def test_echo_says_everything_back(stage_for: Open) -> None:
    stage = stage_for("echo")
    stage.storage_slow = True
    stage.send("a", permit=True, run=False)
    stage.send("b", run=False)
    stage.storage_slow = False
    stage.run()
    assert stage.storage.story() == ["user: a", "assistant: a", "user: b", "assistant: b"]


def test_replay_plays_a_turn_in_its_time(stage_for: Open, script: str) -> None:
    stage = stage_for("replay", {"replay.script": script})
    stage.send("hello", permit=True)
    said = ["user: hello"]
    assert stage.storage.story() == said
    stage.advance(1_000)
    said += ["assistant: let me see", "call shell"]
    assert stage.storage.story() == said
    stage.advance(1_999)
    assert stage.storage.story() == said
    stage.advance(1)
    said += ["result shell None", "call shell"]
    assert stage.storage.story() == said
    stage.advance(1_500)
    said += ["result shell no permission", "assistant: there is a.txt"]
    assert stage.storage.story() == said
    (ended,) = stage.storage.of(TurnCompleted)
    assert (ended.turns_count, ended.tool_calls_count, ended.duration_ms) == (4, 2, 4_500)
    stage.send("next", permit=True)
    stage.advance(100)
    assert stage.storage.story()[-1] == "assistant: welcome"
    stage.send("again", permit=True)
    stage.advance(1_000)
    assert stage.storage.story()[-2] == "assistant: let me see", "it begins anew at its end"


@pytest.mark.rule("TLP-3", "TLP-2", "R63")
def test_replay_takes_what_is_steered_in_at_every_step(stage_for: Open, script: str) -> None:
    stage = stage_for("replay", {"replay.script": script})
    stage.send("a", permit=True)
    stage.advance(500)
    for name in ("b", "c"):
        assert stage.receipt(stage.send(name)).delivery == "current_turn"
    assert stage.storage.heard() == ["a"]
    stage.advance(500)
    assert stage.storage.heard() == ["a", "b", "c"]
    stage.send("late")
    stage.advance(10_000)
    assert stage.storage.heard() == ["a", "b", "c", "late"]
    assert stage.storage.of(TurnCompleted)[0].claimed_input_ids == ["a", "b", "c", "late"]


@pytest.mark.rule("RUN-3", "TLP-5", "RUN-9")
def test_rule_5_holds_for_replay(stage_for: Open, script: str) -> None:
    """A recorded call is durable before its time passes, and never played a second time."""
    stage = stage_for("replay", {"replay.script": script})
    stage.send("a", permit=True)
    stage.advance(2_000)
    assert stage.storage.story()[-1] == "call shell"
    stage.restart()
    (ended,) = stage.storage.of(TurnAborted)
    assert ended.outcome == "lost", "a recorded call changes nothing: it is readonly"
    closed = [
        payload(one) for one in stage.storage.of(PartCreated) if one.part_type == "tool_result"
    ]
    assert [one["error"] for one in closed] == ["cancelled"]
    assert closed[0]["metadata"]["side_effects_uncertain"] is False
    stage.advance(20_000)
    assert stage.storage.heard() == ["a"]
    assert len(stage.storage.of(TurnCompleted)) == 1
    stage.storage.check()


@pytest.mark.parametrize(("speed", "ms"), [("2", 2_250), ("0.5", 9_000), ("max", 0), ("0", 0)])
def test_replay_has_a_speed(stage_for: Open, script: str, speed: str, ms: int) -> None:
    stage = stage_for("replay", {"replay.script": script, "replay.speed": speed})
    stage.send("a", permit=True)
    stage.advance(ms)
    assert len(stage.storage.of(TurnCompleted)) == 1
    assert stage.storage.of(TurnCompleted)[0].duration_ms == ms


@pytest.mark.parametrize(
    "settings",
    [{"replay.speed": "fast"}, {"replay.speed": "-1"}, {"replay.script": "/no/such/file"}],
)
def test_replay_with_bad_settings_fails_its_turn(stage_for: Open, settings: dict[str, str]) -> None:
    stage = stage_for("replay", settings)
    stage.send("a", permit=True)
    assert stage.storage.of(TurnAborted)[0].cause == "failed"


def test_replay_plays_the_shipped_script(stage_for: Open) -> None:
    stage = stage_for("replay", {"replay.speed": "max"})
    turns = script_for({}).turns
    for number in range(len(turns) + 1):
        stage.send(f"m{number}", permit=True)
    assert len(stage.storage.of(TurnCompleted)) == len(turns) + 1
    stage.storage.check()


def test_a_name_leads_to_a_function() -> None:
    found = resolve("tests.scenarios.test_agents:test_a_name_leads_to_a_function")
    assert found.__name__ == "test_a_name_leads_to_a_function"
    assert resolve("echo") is resolve("callboard.actors.session.agents:echo")
    with pytest.raises(NotFound):
        resolve("nobody")
    with pytest.raises(InvalidRequest):
        resolve("tests.scenarios.test_agents:SCRIPT")
    with pytest.raises(AttributeError):
        resolve("tests.scenarios.test_agents:nothing.here")


def test_an_agent_sees_its_turn(stage_for: Open) -> None:
    seen: dict[str, object] = {}

    @cast_agent("curious")
    async def curious(turn: Turn) -> None:
        seen.update(
            session=turn.session,
            turn_id=turn.turn_id,
            number=turn.number,
            workspace=turn.workspace,
            settings=dict(turn.settings),
            cancelled=turn.cancelled,
            slept=await turn.tool("sleep", seconds=0),
        )
        with pytest.raises(TypeError):
            turn.settings["colour"] = "red"  # type: ignore[index]

    stage = stage_for("curious", {"colour": "blue"})
    stage.send("a", permit=True)
    ended = stage.storage.of(TurnCompleted)[0]
    assert seen == {
        "session": str(REF),
        "turn_id": ended.turn_id,
        "number": 1,
        "workspace": "/w",
        "settings": {"colour": "blue"},
        "cancelled": False,
        "slept": None,
    }
    stage.restart()
    stage.send("b", permit=True)
    assert seen["number"] == 2


@pytest.mark.parametrize(
    "arguments",
    [{}, {"seconds": "1"}, {"seconds": True}, {"seconds": -1}, {"seconds": 1, "more": 2}],
)
def test_sleep_is_called_rightly_or_not_at_all(
    stage_for: Open, arguments: dict[str, object]
) -> None:
    @cast_agent("sloppy")
    async def sloppy(turn: Turn) -> None:
        await turn.tool("sleep", **arguments)

    stage = stage_for("sloppy")
    stage.send("a", permit=True)
    assert stage.storage.story() == ["user: a"]
    assert stage.storage.of(TurnAborted)[0].failure.error == "invalid_request"
