"""The fold: a whole is its pieces, a clone is its own, and the rules of a transcript hold."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.errors import (
    CallboardError,
    RecordInvalid,
    TurnActive,
    TurnIdReused,
    TurnNotActive,
    TurnTerminal,
)
from callboard.fold import SessionFold
from callboard.ids import SessionRef, workspace_key
from callboard.records import RecordData, SessionCreated, check_data, compact
from tests.storage.readers.homes import (
    T0,
    Entry,
    acknowledged,
    created,
    message,
    part,
    said,
    turn_aborted,
    turn_completed,
    turn_started,
    updated,
)

REF = SessionRef(workspace_key("/u/my-app"), "s1")
CREATED = created(REF, "/u/my-app", title="first")


def data_of(entry: Entry) -> RecordData:
    return check_data(entry[0], compact(entry[1]))


def admit(fold: SessionFold, *entries: Entry, commit: int = 1) -> SessionFold:
    for entry in entries:
        fold.admit(None, data_of(entry), commit=commit)
    return fold


def folded(*entries: Entry) -> SessionFold:
    return admit(SessionFold(), CREATED, *entries)


# --- sequences that a writer may make -------------------------------------------------------------


@st.composite
def transcripts(draw: st.DrawFn) -> list[tuple[int, RecordData]]:
    """Records that storage would admit, with their commits; drawn by trying."""
    fold = admit(SessionFold(), CREATED)
    found = [(1, data_of(CREATED))]
    commit = 1
    for step in range(draw(st.integers(0, 25))):
        commit += draw(st.integers(0, 1))
        entry = data_of(draw(st.sampled_from(_options(step))))
        tried = fold.clone()
        try:
            tried.admit(None, entry, commit=commit)
        except CallboardError:
            continue
        fold = tried
        found.append((commit, entry))
    return found


def _options(step: int) -> list[Entry]:
    at, turn = T0 + step * 7 % 5, f"turn_{step:02}"
    turns = [f"turn_{n:02}" for n in range(max(0, step - 6), step + 1)]
    return [
        updated(at, title=f"t{step}"),
        updated(at, title=None, settings={"a": "b"}, extra={"n": step}),
        updated(at, paused_at=at, agent=None),
        updated(at, quarantine={"reason": "crash_loop", "since_at": at}),
        updated(at, archived_at=at),
        turn_started(turn, ["i1", "i2"], at),
        *(turn_completed(one, ["i1"], at) for one in turns),
        *(turn_aborted(one, ["i1", "i2"], at, "failed", "held") for one in turns),
        *(turn_aborted(one, ["i2"], at, "process_restart") for one in turns),
        acknowledged(turns[0], ["i1"]),
        acknowledged(None, ["i2"], "cancelled"),
        message("m1", "user", at, inbox_message_id="i1"),
        message(f"m{step}", "assistant", at),
        message(f"h{step}", "user", at, hidden=True),
        part(f"p{step}", "m1", "text", at, text="x"),
        part("p0", "m1", "text", at, again=True, text="y"),
        part(f"c{step}", "m1", "tool_call", at, call_id="c", name="sleep", input={}),
        part(f"r{step}", "m1", "tool_result", at, call_id="c", name="sleep", error=None),
        part(f"e{step}", "m1", "tool_result", at, call_id="c", name="sleep", error="no"),
        (
            "turn_cancel_requested",
            {
                "turn_id": turns[-1],
                "principal_id": "p",
                "keep_input": bool(step % 2),
                "requested_at": at,
            },
        ),
    ]


def fold_of(records: list[tuple[int, RecordData]], onto: SessionFold | None = None) -> SessionFold:
    fold = onto or SessionFold()
    for commit, data in records:
        fold.apply(fold.seq + 1, commit, data)
    return fold


@pytest.mark.rule("PRJ-1", "A15")
@given(transcripts(), st.data())
def test_a_prefix_and_the_rest_make_the_whole(
    records: list[tuple[int, RecordData]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(records)))
    snapshot = fold_of(records[:cut])
    whole = fold_of(records)
    assert fold_of(records[cut:], snapshot.clone()) == whole
    assert asdict(fold_of(records[cut:], snapshot)) == asdict(whole)


@pytest.mark.rule("PRJ-1")
@given(transcripts(), st.data())
def test_a_clone_is_its_own(records: list[tuple[int, RecordData]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(records)))
    original = fold_of(records[:cut])
    before = asdict(original)
    clone = original.clone()
    assert clone == original
    fold_of(records[cut:], clone)
    assert asdict(original) == before
    fold_of(records[cut:], original)
    assert clone == original


@given(transcripts())
def test_admitting_and_applying_agree(records: list[tuple[int, RecordData]]) -> None:
    fold = SessionFold()
    for commit, data in records:
        fold.admit(None, data, commit=commit)
    assert fold == fold_of(records)
    assert fold.seq == len(records)


# --- metadata -------------------------------------------------------------------------------------


@pytest.mark.rule("PRJ-2")
def test_metadata_is_merged_and_null_clears() -> None:
    fold = folded(
        updated(T0 + 1, title="second", model="m"),
        updated(T0 + 2, settings={"a": "1"}, extra={"b": 2}),
        updated(T0 + 3, title=None),
    )
    assert (fold.title, fold.model, fold.settings, fold.extra) == (None, "m", {"a": "1"}, {"b": 2})
    assert fold.updated_at == T0 + 3
    assert folded(updated(agent=None)).agent == "echo"


@pytest.mark.rule("PRJ-2")
def test_a_second_creation_is_refused() -> None:
    with pytest.raises(RecordInvalid):
        folded(CREATED)


def test_the_commit_of_the_creation_is_kept() -> None:
    fold = admit(SessionFold(), CREATED, commit=5)
    admit(fold, updated(title="x"), commit=9)
    assert (fold.created_commit, fold.commit, fold.seq) == (5, 9, 2)
    assert isinstance(fold.created, SessionCreated)


# --- counts and times -----------------------------------------------------------------------------


@pytest.mark.rule("PRJ-8", "A33")
def test_what_counts_as_a_message() -> None:
    fold = folded(
        turn_started("turn_1"),
        message("u", "user", T0 + 5),
        message("h", "user", T0 + 99, hidden=True),
        message("a", "assistant", T0 + 3),
        message("t", "tool", T0 + 98),
        message("s", "system", T0 + 97),
        message("a", "assistant", T0 + 96),
    )
    assert fold.message_count == 2
    assert (fold.first_message_at, fold.last_message_at) == (T0 + 3, T0 + 5)
    assert fold.last_activity_at == T0 + 5
    assert not fold.has_errors


@pytest.mark.rule("PRJ-8")
def test_a_message_older_than_its_session_does_not_lower_the_activity() -> None:
    fold = folded(turn_started("turn_1"), message("u", "user", T0 - 5))
    assert fold.last_activity_at == T0


@pytest.mark.rule("PRJ-8", "A33")
def test_a_failed_tool_is_an_error() -> None:
    call = part("p", "a", "tool_call", call_id="c", name="n", input=1)
    fold = folded(
        turn_started("turn_1"),
        message("a", "assistant"),
        call,
        part("r", "a", "tool_result", call_id="c", name="n", error="no"),
    )
    assert fold.has_errors


@pytest.mark.rule("PRJ-9", "A17")
def test_only_messages_move_the_last_activity() -> None:
    fold = folded(turn_started("turn_1"), *said("u", "hello", at=T0 + 5))
    admit(
        fold,
        updated(T0 + 50, title="renamed"),
        updated(T0 + 51, archived_at=T0 + 51),
        updated(T0 + 52, archived_at=None),
        updated(T0 + 53, settings={"a": "b"}),
        turn_aborted("turn_1", at=T0 + 54, cause="process_restart"),
    )
    assert fold.last_activity_at == T0 + 5


# --- turns ----------------------------------------------------------------------------------------


def test_one_turn_at_a_time_and_each_id_once() -> None:
    fold = folded(turn_started("turn_2"))
    with pytest.raises(TurnActive):
        admit(fold, turn_started("turn_3"))
    admit(fold, turn_completed("turn_2"))
    for spent in ("turn_2", "turn_1"):
        with pytest.raises(TurnIdReused):
            admit(fold, turn_started(spent))
    with pytest.raises(TurnTerminal):
        admit(fold, turn_completed("turn_2"))
    with pytest.raises(TurnNotActive):
        admit(fold, turn_completed("turn_3"))
    assert fold.turns == 1
    assert fold.last_ended is not None
    assert fold.last_ended.outcome == "completed"


@pytest.mark.rule("PRJ-4")
def test_a_part_needs_its_message_in_the_open_turn() -> None:
    fold = folded(turn_started("turn_1"), message("a", "assistant"))
    with pytest.raises(RecordInvalid):
        admit(fold, part("p", "unknown", "text", text="x"))
    admit(fold, part("p", "a", "text", text="x"), part("p", "a", "text", again=True, text="y"))
    admit(fold, turn_completed("turn_1"))
    with pytest.raises(RecordInvalid):
        admit(fold, part("q", "a", "text", text="x"))
    with pytest.raises(RecordInvalid):
        admit(fold, message("b", "assistant"))


def test_a_turn_does_not_end_over_an_open_call() -> None:
    fold = folded(
        turn_started("turn_1"),
        message("a", "assistant"),
        part("p", "a", "tool_call", call_id="c", name="n", input=1, effect="keyed"),
    )
    with pytest.raises(RecordInvalid):
        admit(fold, turn_completed("turn_1"))
    with pytest.raises(RecordInvalid):
        admit(fold, part("q", "a", "tool_call", call_id="c", name="n", input=1))
    assert fold.calls["c"].effect == "keyed"
    admit(fold, part("r", "a", "tool_result", call_id="c", name="n", error=None))
    with pytest.raises(RecordInvalid):
        admit(fold, part("s", "a", "tool_result", call_id="c", name="n", error=None))
    admit(fold, turn_completed("turn_1"))
    assert fold.calls == {}


def test_inputs_of_a_failed_turn_count_their_attempts() -> None:
    fold = folded(
        turn_started("turn_1", ["i1", "i2"]),
        message("u", "user", inbox_message_id="i1"),
        turn_aborted("turn_1", ["i1", "i2"], disposition="held"),
    )
    assert fold.attempts == {"i1": 1, "i2": 1}
    assert fold.held == {"i1", "i2"}
    assert fold.applied == {"i1": "turn_1"}
    admit(
        fold,
        turn_started("turn_2", ["i1", "i2"]),
        acknowledged("turn_2", ["i1"], "aborted"),
        turn_aborted("turn_2", ["i1", "i2"]),
    )
    assert fold.attempts == {"i2": 2}
    assert fold.held == frozenset()
    assert fold.applied == {}
