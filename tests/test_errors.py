"""The table of the architecture page, section 11, and callboard.errors say the same."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard import errors
from callboard.errors import (
    CODES,
    CallboardError,
    ContextMismatch,
    HomeInUse,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    RewindConflict,
    SessionDamaged,
    SessionInUse,
    StatusTransitionInvalid,
)

PAGE = Path(__file__).parents[1] / "docs/spec/architecture.md"
NONE = "\u2013"  # the table's dash
ROW = re.compile(rf"^\| ([a-z_]+) \| (\d+|{NONE}) \| (\d|{NONE}) \| (.+) \|$", re.MULTILINE)
ONLY_IN_TOOL_RESULTS = ("tool_batch_full", "not_run", "indeterminate")

# Where the page describes a field instead of naming it.
DESCRIBED = {
    "artifact id the caller named": "artifact_id",
    "both provenances": "provenances",
    "correlation id": "correlation_id",
    "damage code": "damage",
    "execution_started = false": "execution_started",
    "outcome = indeterminate": "outcome",
    "path as given": "path",
    "turn_id of the owner": "turn_id",
    "workspace paths in scope": "workspaces",
    "workspace-relative path": "path",
}
NOT_FIELDS = {NONE, "nothing", "whatever is absent", "not the caller's", "no text", "content"}


def section_11() -> str:
    return PAGE.read_text().partition("\n## 11. Errors\n")[2].partition("\n## 12.")[0]


ROWS = ROW.findall(section_11())


def fields_of(cell: str) -> list[str]:
    """Give the fields that a cell of the last column names, in their order."""
    parts = re.split(r", or |, | or ", re.sub(r" \(.*?\)", "", cell))
    if "no text" in parts:
        parts.remove("path")
    return [DESCRIBED.get(part, part) for part in parts if part not in NOT_FIELDS]


def test_every_row_has_its_class_in_the_order_of_the_table() -> None:
    assert [row[0] for row in ROWS] == list(CODES)
    assert len(ROWS) > 100


@pytest.mark.parametrize(("code", "http", "cli", "cell"), ROWS, ids=[row[0] for row in ROWS])
def test_a_class_is_its_row(code: str, http: str, cli: str, cell: str) -> None:
    cls = CODES[code]
    assert cls.code == code
    assert cls.http == (None if http == NONE else int(http))
    assert cls.cli == (1 if code in ONLY_IN_TOOL_RESULTS else int(cli))
    carries = [name.removesuffix("_") for name in cls.carries if name not in cls.operator_only]
    assert carries == fields_of(cell)
    if "(operators:" in cell:
        assert ", ".join(cls.operator_only) in cell


def closed_sets() -> dict[str, str]:
    table = section_11().partition("\n| Where | Values |\n|---|---|\n")[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE))


def words(text: str) -> set[str]:
    """Read the values of a row; what explains them has spaces, they have none."""
    parts = re.split(r" · |; |, |: ", text.replace("discards: ", "").replace("at a door also ", ""))
    return {part.strip() for part in parts if re.fullmatch(r"[a-z_]+", part.strip())}


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ("`session_busy.reason`", errors.SESSION_BUSY_REASONS),
        ("`session_damaged.code`, `damage.code`", errors.DAMAGES),
        ("`inbox_corrupt.reason`", errors.INBOX_CORRUPT_REASONS),
        ("`overloaded.resource`, `.scope`", errors.OVERLOADED_RESOURCES | errors.OVERLOADED_SCOPES),
        ("`approval_denied.reason`", errors.APPROVAL_DENIED_REASONS),
        ("`code_history_unavailable.reason`", errors.CODE_HISTORY_REASONS),
        ("`rewind_conflict` file reason", errors.REWIND_FILE_REASONS),
        ("`invalid_request.reason`", errors.INVALID_REQUEST_REASONS),
        ("`home_unsafe.reason`", errors.HOME_UNSAFE_REASONS),
        ("`session_quarantined.reason`", errors.QUARANTINE_REASONS),
        ("`side_failed.reason`", errors.SIDE_FAILED_REASONS),
        (
            "`context_overflow.reason`, `.advice`",
            errors.CONTEXT_OVERFLOW_REASONS | errors.CONTEXT_OVERFLOW_ADVICE,
        ),
        ("`tool_result.error` written by fork and import", errors.WRITTEN_TOOL_ERRORS),
        ("task `failure.code` beside the runtime page's FLR list", errors.TASK_FAILURE_CODES),
    ],
)
def test_a_closed_set_is_its_row(row: str, values: frozenset[str]) -> None:
    assert words(closed_sets()[row]) == values


def test_the_closed_sets_that_refer_to_others() -> None:
    sets = closed_sets()
    assert words(sets["`archive_conflict.reason`"]) == {"damage", "task"}
    assert {"damage", "task"} | errors.SESSION_BUSY_REASONS == errors.ARCHIVE_CONFLICT_REASONS
    assert words(sets["delivery `last_error`"]) == errors.DELIVERY_LAST_ERRORS
    with_terminal, _, discards = sets["`inbox_acknowledged.reason`"].partition("; discards: ")
    assert words(with_terminal.replace(" (with a terminal)", "")) == errors.TERMINAL_REASONS
    assert words(discards) == errors.DISCARD_REASONS


def test_no_closed_set_of_the_page_is_forgotten() -> None:
    assert len(closed_sets()) == 17


@pytest.mark.parametrize("cls", CODES.values(), ids=list(CODES))
def test_a_class_explains_itself(cls: type[CallboardError]) -> None:
    error = cls()
    assert error.message.endswith(".")
    assert "\n" not in str(error)
    assert set(cls.operator_only) <= set(cls.carries)
    assert set(cls.closed) | set(cls.fixed) <= set(cls.carries)
    if cls.way_out is not None:
        assert not cls.way_out.endswith(".")
        assert str(error).endswith(f" — {cls.way_out}")


def test_str_gives_message_carries_and_way_out_in_one_line() -> None:
    error = InvalidRequest("Two\nlines.", field="a\nb", reason="format")
    assert str(error) == (
        "Two lines (field='a\\nb', reason=format) — correct this field and try again"
    )
    assert str(StatusTransitionInvalid(from_="open", to="idle")).endswith("(from=open, to=idle)")
    assert str(Overloaded(resource="memory", scope=None)).count("=") == 1


def test_nothing_that_moves_a_terminal_gets_into_the_line() -> None:
    text = str(InvalidRequest("\x1b]52;c;\x07\u202e\x9b", field="\x1b[2J", reason="format"))
    assert text.isprintable()


def test_the_wire_has_code_and_carries_and_no_message() -> None:
    error = InvalidRequest("a secret path", field="home", reason="empty")
    assert error.to_wire() == {"code": "invalid_request", "field": "home", "reason": "empty"}
    assert error.carried == {"field": "home", "reason": "empty"}
    assert StatusTransitionInvalid(from_=1, to=2).to_wire() == {
        "code": "status_transition_invalid",
        "from": 1,
        "to": 2,
    }
    assert NotFound("of whom?").to_wire() == {"code": "not_found"}
    assert ContextMismatch().to_wire() == {"code": "context_mismatch", "execution_started": False}


def test_only_operators_see_who_holds_it() -> None:
    error = SessionInUse(pid=7, epoch=3)
    assert error.to_wire() == {"code": "session_in_use", "pid": 7, "epoch": 3}
    assert error.to_wire(operator=False) == {"code": "session_in_use"}
    assert HomeInUse(pid=7).to_wire(operator=False) == {"code": "home_in_use"}


@pytest.mark.parametrize(
    ("cls", "carries"),
    [
        (NotFound, {"id": "x"}),
        (InvalidRequest, {"field": 1.5}),
        (InvalidRequest, {"field": b"x"}),
        (InvalidRequest, {"field": [["x"]]}),
        (InvalidRequest, {"field": {"x": {"y": 1}}}),
        (InvalidRequest, {"field": {1: "x"}}),
        (InvalidRequest, {"code": "x"}),
    ],
)
def test_what_may_not_be_carried(cls: type[CallboardError], carries: dict[str, object]) -> None:
    with pytest.raises(TypeError):
        cls(None, **carries)


@pytest.mark.parametrize("value", ["x", 1, True, None, ["a", 1], ("a",), [], {"a": 1, "b": ["c"]}])
def test_what_may_be_carried(value: object) -> None:
    assert InvalidRequest(field=value).carried == {"field": value}


@pytest.mark.parametrize(
    ("cls", "carries"),
    [
        (InvalidRequest, {"reason": "because"}),
        (InvalidRequest, {"reason": 3}),
        (SessionDamaged, {"damage": "some"}),
        (Overloaded, {"resource": "plane"}),
        (Overloaded, {"scope": "memory"}),
        (RewindConflict, {"reasons": ["changed_since", "other"]}),
        (ContextMismatch, {"execution_started": True}),
    ],
)
def test_a_value_outside_its_closed_set(
    cls: type[CallboardError], carries: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=cls.code):
        cls(None, **carries)


def test_from_wire_gives_back_what_was_sent() -> None:
    for error in (
        InvalidRequest(field="home", reason="empty"),
        StatusTransitionInvalid(from_="a", to="b"),
        RewindConflict(files=["a", "b"], reasons=["changed_since"]),
        Overloaded(resource="memory", limit=4, retry_after_ms=10),
        ContextMismatch(),
    ):
        again = CallboardError.from_wire(error.to_wire())
        assert type(again) is type(error)
        assert again.carried == error.carried


def test_from_wire_of_something_unknown() -> None:
    answers: list[dict[str, object]] = [
        {"code": "new_in_v9", "field": "x"},
        {},
        {"code": None},
        {"code": ["internal"]},
    ]
    for answer in answers:
        error = CallboardError.from_wire(answer)
        assert type(error) is Internal
        assert error.to_wire() == {"code": "internal"}


def test_from_wire_drops_what_the_row_does_not_allow() -> None:
    answer: dict[str, object]
    answer = {"code": "invalid_request", "field": "x", "reason": "because", "path": "/etc"}
    assert CallboardError.from_wire(answer).carried == {"field": "x"}
    answer = {"code": "internal", "correlation_id": 1.5, "message": "x"}
    assert CallboardError.from_wire(answer).carried == {}


WILD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)
NAMES = sorted({name.removesuffix("_") for cls in CODES.values() for name in cls.carries})


@given(st.sampled_from(list(CODES)), st.dictionaries(st.sampled_from(NAMES), WILD, max_size=6))
def test_from_wire_never_fails(code: str, carries: dict[str, object]) -> None:
    error = CallboardError.from_wire({**carries, "code": code})
    assert error.code == code
    assert CallboardError.from_wire(error.to_wire()).carried == error.carried
    assert str(error).isprintable()


def test_an_error_survives_a_copy() -> None:
    error = copy.copy(InvalidRequest("why", field="x", reason="type"))
    assert (error.message, error.carried) == ("why", {"field": "x", "reason": "type"})


def test_the_list_is_closed() -> None:
    with pytest.raises(TypeError, match="two classes"):
        type("NotFound", (CallboardError,), {}, http=404)
    assert CODES["not_found"] is NotFound


def test_the_import_is_light() -> None:
    code = (
        "import sys, callboard.errors, callboard.limits;"
        "print([m for m in sys.modules if m.split('.')[0] in sys.argv[1:]])"
    )
    heavy = ["pydantic", "zmq", "pykka", "apsw", "asyncio", "inspect", "platformdirs"]
    out = subprocess.check_output(
        [sys.executable, "-c", code, *heavy], cwd=PAGE.parents[2], text=True
    )
    assert out.strip() == "[]"


def test_the_repr_names_the_class_and_what_it_carries() -> None:
    assert repr(InvalidRequest(field="x", reason="type")) == (
        "InvalidRequest(field='x', reason='type')"
    )
