"""Names: what fits, what is refused before any I/O, and workspace keys that never collide."""

import os
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.errors import InvalidRequest
from callboard.ids import (
    SessionRef,
    canonical_workspace,
    check_message_id,
    check_session_id,
    derived_id,
    fresh_id,
    fresh_ulid,
    is_record_id,
    next_ulid,
    parse_ref,
    ulid,
    workspace_key,
)
from callboard.limits import WORKSPACE_PATH_BYTES_MAX

KEY = workspace_key("/u/my-app")
SAFE = string.ascii_letters + string.digits + "._-"


@pytest.mark.rule("IDN-3", "A1")
@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/u/my-app", "my-app-d55b77a3d1b69752c1e8e5d28774a39a"),
        ("/u/my/app", "app-df1224fe769db1d15ea7585d1ea95c62"),
        ("/u/my_app", "my-app-391bd4913836e6e7d68f90fb04f087c1"),
        ("/u/项目", "ws-021f3b060ac03a526202fc1ce3ba933a"),
    ],
)
def test_known_keys(path: str, key: str) -> None:
    assert workspace_key(path) == key


@pytest.mark.rule("IDN-3")
@given(st.lists(st.text("aA-_/.é 项", min_size=1, max_size=12).map("/".__add__), unique=True))
def test_distinct_paths_have_distinct_keys_that_are_folder_names(paths: list[str]) -> None:
    keys = [workspace_key(path) for path in paths]
    assert len(set(keys)) == len(paths)
    for key in keys:
        assert parse_ref(f"{key}/x") == SessionRef(key, "x")


@pytest.mark.rule("IDN-3")
def test_every_spelling_of_a_folder_gives_one_key(tmp_path: Path) -> None:
    real = tmp_path / "demo"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    spellings = [
        str(real),
        f"{real}/",
        f"{real}/.",
        f"{tmp_path}/link",
        f"{tmp_path}/link/../demo",
        f"{tmp_path}//demo",
    ]
    assert {canonical_workspace(one) for one in spellings} == {os.path.realpath(real)}


@pytest.mark.rule("IDN-2", "IDN-3")
def test_a_missing_folder_keeps_its_spelling_below_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    found = canonical_workspace(f"{tmp_path}/link/gone/deeper")
    assert found == f"{os.path.realpath(tmp_path)}/real/gone/deeper"


@pytest.mark.rule("IDN-2")
@pytest.mark.parametrize(
    "text", ["", ".", "..", "a/b", "a" * 201, "a b", "a\0b", "é", ".a", "a\n", "项", "a\u2028"]
)
def test_ids_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_session_id(text)
    assert refused.value.carried["field"] == "session_id"
    with pytest.raises(InvalidRequest):
        parse_ref(f"{KEY}/{text}")


@pytest.mark.rule("IDN-2")
@pytest.mark.parametrize("text", ["-a", "_", "a..b", "A-1.x", "a" * 200, "01h"])
def test_ids_that_fit(text: str) -> None:
    assert check_session_id(text) == text
    assert str(parse_ref(f"{KEY}/{text}")) == f"{KEY}/{text}"


@pytest.mark.rule("IDN-2")
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("relative/x", "format"),
        ("~", "format"),
        ("", "format"),
        ("/a\0b", "nul"),
        ("/" + "a" * WORKSPACE_PATH_BYTES_MAX, "too_long"),
    ],
)
def test_workspaces_that_do_not_fit_are_refused(path: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        canonical_workspace(path)
    assert refused.value.carried == {"field": "workspace", "reason": reason}


@pytest.mark.rule("IDN-2")
@pytest.mark.parametrize(
    "key", ["", "x", "ws-" + "0" * 31, "ws-" + "0" * 33, "-" + "0" * 32, "WS-" + "0" * 32, "../x"]
)
def test_keys_that_do_not_fit_are_refused(key: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_ref(f"{key}/x")
    assert refused.value.carried["field"] == "workspace"


@given(st.text(max_size=250))
def test_any_text_is_an_id_or_refused(text: str) -> None:
    try:
        check_session_id(text)
    except InvalidRequest:
        return
    assert 1 <= len(text) <= 200
    assert set(text) <= set(SAFE)
    assert not text.startswith(".")


@pytest.mark.parametrize("text", ["", "a b", "x" * 129, "é", "a/b", "a\n"])
def test_message_ids_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        check_message_id(text)


def test_message_ids_that_fit() -> None:
    for text in ("a", "A.b_c:d@e-f", "x" * 128):
        assert check_message_id(text) == text


@given(st.integers(0, (1 << 48) - 1), st.integers(0, (1 << 48) - 1), st.binary(min_size=10))
def test_ulids_sort_by_time(first: int, second: int, noise: bytes) -> None:
    one, other = ulid(first, noise[:10]), ulid(second, noise[-10:])
    assert len(one) == 26
    assert one == one.lower()
    if first != second:
        assert (one < other) == (first < second)


def test_a_turn_id_rises_whatever_the_clock_says() -> None:
    last = ulid((1 << 48) - 2, b"\xff" * 10)
    for _ in range(5):
        after = next_ulid(last)
        assert after > last
        last = after
    assert next_ulid("")[:10] <= fresh_ulid()[:10]  # the time alone: the rest is random


def test_made_ids_have_their_shape() -> None:
    assert is_record_id(fresh_id())
    assert is_record_id(derived_id("key"))
    assert derived_id("key", 1) != derived_id("key") == derived_id("key", 0)
    assert not is_record_id("A" * 32)
    assert not is_record_id("a" * 31)
    assert check_session_id(fresh_ulid())
