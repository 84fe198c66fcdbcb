"""Cursors: only this home's, only this query's, and nothing but a position."""

import base64
import hashlib
import hmac
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.errors import CursorInvalid, CursorScopeMismatch
from callboard.ids import SessionRef, workspace_key
from callboard.records import canonical
from callboard.storage.cursor import Cursor, Kind, decode, encode, scope_digest

KEY = bytes(range(32))
SCOPE = scope_digest({"workspace": None})
REF = SessionRef(workspace_key("/u/my-app"), "s1")
CURSOR = Cursor("catalog", SCOPE, 5, 1_700_000_000_000_000, REF)
TOKEN = encode(CURSOR, KEY)
PAYLOAD: dict[str, object] = {
    "a": 1,
    "as_of": 5,
    "k": "catalog",
    "q": SCOPE,
    "s": "s1",
    "v": 2,
    "w": REF.workspace_key,
}


def read(token: str, *, key: bytes = KEY, kind: Kind = "catalog", last: int = 5) -> Cursor:
    return decode(token, key, kind=kind, scope=SCOPE, last_commit=last)


def tagged(payload: bytes, key: bytes = KEY) -> str:
    tag = hmac.new(key, payload, hashlib.sha256).digest()[:16]
    return base64.urlsafe_b64encode(tag + payload).rstrip(b"=").decode()


def payload_of(token: str) -> bytes:
    return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))[16:]


SESSION_IDS = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", fullmatch=True)
CURSORS = st.builds(
    Cursor,
    st.sampled_from(["catalog", "search"]),
    st.binary(min_size=8, max_size=8).map(bytes.hex),
    st.integers(0, 1 << 60),
    st.integers(0, 1 << 60),
    st.builds(SessionRef, st.just(REF.workspace_key), SESSION_IDS),
)


@pytest.mark.rule("CUR-1")
@given(CURSORS, st.binary(min_size=32, max_size=32))
def test_a_cursor_is_read_as_it_was_written(cursor: Cursor, key: bytes) -> None:
    token = encode(cursor, key)
    assert len(token) <= 1_024
    back = decode(token, key, kind=cursor.kind, scope=cursor.scope, last_commit=cursor.as_of)
    assert back == cursor


@pytest.mark.rule("CUR-1", "A29")
def test_the_form_of_a_token() -> None:
    payload = payload_of(TOKEN)
    assert payload == canonical(json.loads(payload))
    assert set(json.loads(payload)) == {"a", "as_of", "k", "q", "s", "v", "w"}
    assert b"/" not in payload
    assert tagged(payload) == TOKEN
    assert read(TOKEN) == CURSOR


@pytest.mark.rule("CUR-3", "A29")
@pytest.mark.parametrize(
    "token",
    [
        "",
        TOKEN + "=",
        TOKEN + "***",
        TOKEN[:-1],
        TOKEN[1:],
        " " + TOKEN,
        TOKEN + "\n",
        "not-base64url-json",
        "é",
        "A",
        "A" * 1_024,
        "A" * 1_025,
        TOKEN.replace("A", "B", 1),
        encode(CURSOR, bytes(32)),
    ],
)
def test_what_is_no_token_of_this_home(token: str) -> None:
    with pytest.raises(CursorInvalid):
        read(token)


@pytest.mark.rule("CUR-3", "A30")
@pytest.mark.parametrize(
    "change",
    [
        {"v": 1},
        {"v": 3},
        {"v": "2"},
        {"v": 2.0},
        {"a": 1.5},
        {"a": 1.0},
        {"a": -1},
        {"a": True},
        {"a": "1"},
        {"a": None},
        {"as_of": 6},
        {"as_of": -1},
        {"as_of": False},
        {"k": "other"},
        {"q": SCOPE.upper()},
        {"q": SCOPE + "0"},
        {"s": ".."},
        {"s": "a/b"},
        {"s": ""},
        {"w": "nothing"},
        {"w": "../" + REF.workspace_key},
        {"n": 1},
    ],
)
def test_a_right_tag_makes_no_wrong_payload_right(change: dict[str, object]) -> None:
    if change.get("q") == SCOPE:
        pytest.skip("a digest without letters")
    with pytest.raises(CursorInvalid):
        read(tagged(canonical(PAYLOAD | change)))


@pytest.mark.rule("CUR-3", "A30")
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"{" * 200,
        canonical(PAYLOAD)[:-1],
        canonical(PAYLOAD) + b" ",
        json.dumps(PAYLOAD).encode(),
        canonical(PAYLOAD).replace(b"}", b',"v":2}'),
        canonical(PAYLOAD).replace(b'"a":1', b'"a":NaN'),
    ],
)
def test_a_payload_that_this_home_would_not_have_written(payload: bytes) -> None:
    with pytest.raises(CursorInvalid):
        read(tagged(payload))
    with pytest.raises(CursorInvalid):
        read(base64.urlsafe_b64encode(payload).rstrip(b"=").decode())


@pytest.mark.rule("CUR-3", "A29")
@given(st.integers(0, len(TOKEN) - 1), st.sampled_from("ABCabc012-_"))
def test_one_character_altered(index: int, char: str) -> None:
    token = TOKEN[:index] + char + TOKEN[index + 1 :]
    if token == TOKEN:
        return
    with pytest.raises(CursorInvalid):
        read(token)


@given(st.text(max_size=1_100))
def test_any_text_is_a_cursor_or_refused(text: str) -> None:
    with pytest.raises(CursorInvalid):
        read(text)


@pytest.mark.rule("CUR-2", "A28")
def test_a_cursor_of_another_walk_is_told_from_a_bad_one() -> None:
    with pytest.raises(CursorScopeMismatch):
        read(TOKEN, kind="search")
    with pytest.raises(CursorScopeMismatch):
        decode(TOKEN, KEY, kind="catalog", scope="0" * 16, last_commit=5)
    with pytest.raises(CursorInvalid):  # the home is asked about before the query is
        decode(TOKEN, KEY, kind="search", scope="0" * 16, last_commit=4)
