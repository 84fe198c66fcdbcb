"""Long texts cut into excerpts, put back, and read in pieces: pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.artifacts import (
    MARKER,
    Cut,
    check_text,
    cut,
    piece,
    read_ref,
    restore,
    spell_ref,
)
from callboard.errors import ArtifactInvalid, CallboardError, InvalidRequest, PayloadTooLarge
from callboard.limits import (
    ARTIFACT_BYTES_MAX,
    ARTIFACT_CHARS_MAX,
    ARTIFACT_INLINE_BYTES_MAX,
    ARTIFACT_LAYOUT_PARTS_MAX,
    ARTIFACT_READ_BYTES_DEFAULT,
    ARTIFACT_READ_BYTES_MAX,
    ARTIFACT_READ_BYTES_MIN,
    ARTIFACT_TAIL_BYTES_MAX,
)

IMAGE: dict[str, object] = {"type": "image", "mime": "image/png", "artifact_id": "0" * 64}


def text_part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def one(text: str) -> Cut:
    return cut([text_part(text)])


def excerpt_of(made: Cut) -> str:
    return cast("str", made.parts[0]["text"])


# Texts of any width of characters, short and long, the border among them.
widths = st.sampled_from(["a", "ä", "€", "\N{GRINNING FACE}", "a€", "\r\n", "\0"])


class Made(NamedTuple):
    """What a text is made of: told in a word, however long the text is."""

    unit: str
    size: int
    tail: str

    @property
    def text(self) -> str:
        return self.unit * (self.size // len(self.unit.encode())) + self.tail


texts = st.builds(
    Made,
    widths,
    st.integers(32_000, 40_000) | st.integers(60_000, 300_000),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)


@pytest.mark.rule("ART-1", "R39")
def test_the_border_between_inline_and_artifact() -> None:
    short = one("x" * ARTIFACT_INLINE_BYTES_MAX)
    assert short == Cut([text_part("x" * ARTIFACT_INLINE_BYTES_MAX)])
    long = "h" * 30_000 + "m" * 2_000 + "t" * (ARTIFACT_INLINE_BYTES_MAX + 1 - 32_000)
    made = one(long)
    assert made.ref is not None
    assert made.data == long.encode()
    assert made.ref.artifact_id == hashlib.sha256(long.encode()).hexdigest()
    assert made.parts[0]["prompt_artifact"] == spell_ref(made.ref)


@pytest.mark.rule("ART-1")
def test_the_sum_of_the_parts_counts() -> None:
    halves = [text_part("x" * 20_000), text_part("y" * 20_000)]
    made = cut(halves)
    assert made.data == b"x" * 20_000 + b"y" * 20_000
    assert len(made.parts) == 1
    assert cut([text_part("x" * 16_384)] * 2).ref is None


@pytest.mark.rule("ART-3")
@given(texts)
def test_an_excerpt_is_head_marker_tail_and_notice_within_its_limit(said: Made) -> None:
    text = said.text
    made = one(text)
    if made.ref is None:
        assert len(text.encode()) <= ARTIFACT_INLINE_BYTES_MAX
        return
    shown = excerpt_of(made)
    assert len(shown.encode()) == made.ref.inline_bytes <= ARTIFACT_INLINE_BYTES_MAX
    assert ARTIFACT_INLINE_BYTES_MAX - made.ref.inline_bytes < 8  # cut on characters, no more
    head, _, rest = shown.partition(MARKER)
    tail, _, notice = rest.partition("\n\n[This is an excerpt")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert ARTIFACT_TAIL_BYTES_MAX - 4 < len(tail.encode()) <= ARTIFACT_TAIL_BYTES_MAX
    assert made.ref.artifact_id in notice
    assert f" {len(text.encode())} bytes" in notice
    assert f" {len(text)} characters" in notice
    assert "read_prompt_artifact" in notice


@pytest.mark.rule("ART-3", "R41")
def test_images_stay_at_their_places() -> None:
    parts: list[dict[str, object]] = [
        text_part("a" * 30_000),
        IMAGE,
        text_part("b" * 30_000),
        {**IMAGE, "mime": "x"},
    ]
    made = cut(parts)
    assert [part["type"] for part in made.parts] == ["text", "image", "image"]
    assert made.ref is not None
    assert made.data is not None
    assert restore(made.parts, made.data) == parts


@pytest.mark.rule("ART-11")
@given(st.lists(texts, min_size=1, max_size=4), st.booleans())
def test_restore_gives_the_exact_parts_back(pieces: list[Made], images: bool) -> None:
    parts: list[dict[str, object]] = [
        part for said in pieces for part in (text_part(said.text), *([IMAGE] if images else []))
    ]
    made = cut(parts)
    assert restore(made.parts, made.data or b"") == parts


@pytest.mark.rule("ART-4", "R42")
def test_what_is_too_large_is_refused_by_the_limit_that_it_passes() -> None:
    cases = [
        ([text_part("x")] * (ARTIFACT_LAYOUT_PARTS_MAX + 1), "ARTIFACT_LAYOUT_PARTS_MAX"),
        ([text_part("x" * (ARTIFACT_CHARS_MAX + 1))], "ARTIFACT_CHARS_MAX"),
        ([text_part("x" * (ARTIFACT_BYTES_MAX + 1))], "ARTIFACT_BYTES_MAX"),
    ]
    for parts, limit in cases:
        with pytest.raises(PayloadTooLarge) as refused:
            cut(parts)
        assert refused.value.carried["limit"] == limit
    with pytest.raises(PayloadTooLarge):
        check_text("x" * (ARTIFACT_CHARS_MAX + 1))
    widest = "\N{GRINNING FACE}" * ARTIFACT_CHARS_MAX
    check_text(widest)
    assert one(widest).ref is not None


@pytest.mark.rule("ART-4")
@given(texts)
def test_what_was_cut_is_not_cut_again(said: Made) -> None:
    made = one(said.text)
    again = cut(made.parts)
    assert again.parts == made.parts
    assert again.ref == made.ref
    assert again.data is None or made.ref is None


@pytest.mark.parametrize("change", ["longer", "two", "shorter"])
def test_an_excerpt_with_other_text_beside_its_reference_is_refused(change: str) -> None:
    (part,) = one("x" * 50_000).parts
    parts = {
        "longer": [part, text_part("y" * 10)],
        "two": [part, part],
        "shorter": [{**part, "text": "something else"}],
    }[change]
    with pytest.raises(InvalidRequest):
        cut(parts)


@pytest.mark.rule("ART-5")
@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"size_bytes": 10},
        {"size_bytes": ARTIFACT_BYTES_MAX + 1},
        {"text_chars": 0},
        {"text_chars": "50000"},
        {"inline_bytes": 0},
        {"artifact_id": "A" * 64},
        {"artifact_id": "../x"},
        {"layout": [{"type": "text", "chars": 49_999}]},
        {"layout": []},
        {"layout": [{"type": "text", "chars": 50_000}] + [{"type": "image"}] * 64},
        {"layout": [{"type": "sound"}]},
        {"path": "/etc/passwd"},
    ],
)
def test_a_malformed_reference_is_refused_wherever_it_is_read(change: dict[str, object]) -> None:
    (part,) = one("x" * 50_000).parts
    good = cast("dict[str, object]", part["prompt_artifact"])
    bad = {**part, "prompt_artifact": {**good, **change}}
    uses: list[Callable[[], object]] = [
        lambda: read_ref(bad["prompt_artifact"]),
        lambda: cut([bad]),
        lambda: restore([bad], b"x" * 50_000),
    ]
    for use in uses:
        with pytest.raises(ArtifactInvalid) as refused:
            use()
        assert refused.value.carried.get("artifact_id") in (None, good["artifact_id"])


@pytest.mark.rule("ART-5", "ART-11")
def test_a_text_that_does_not_fit_its_reference_is_refused() -> None:
    made = one("ä" * 50_000)
    assert made.data is not None
    for wrong in (made.data + b"x", made.data[:-2], b"\xff" * len(made.data)):
        with pytest.raises(ArtifactInvalid):
            restore(made.parts, wrong)
    with pytest.raises(ArtifactInvalid):
        restore([*made.parts, IMAGE], made.data)


@pytest.mark.rule("ART-9", "R40")
@given(texts, st.integers(ARTIFACT_READ_BYTES_MIN, ARTIFACT_READ_BYTES_MAX))
def test_pieces_go_on_split_no_character_and_join_to_the_whole(said: Made, limit: int) -> None:
    data = (text := said.text).encode()
    limit = max(limit, len(data) // 50)  # a bounded number of steps
    found: list[str] = []
    at: int | None = 0
    while at is not None:
        got = piece(data, at, min(limit, ARTIFACT_READ_BYTES_MAX))
        assert got.offset == at
        assert len(got.text.encode()) <= limit
        assert got.next_offset is None or got.next_offset > at
        found.append(got.text)
        at = got.next_offset
    assert "".join(found) == text


@pytest.mark.rule("ART-9")
@given(st.text(st.characters(min_codepoint=0x80, exclude_categories=["Cs"]), min_size=9))
def test_the_smallest_piece_goes_on_from_any_byte(text: str) -> None:
    data = text.encode()
    for offset in range(len(data) + 1):
        got = piece(data, offset, ARTIFACT_READ_BYTES_MIN)
        assert got.offset <= offset
        assert offset - got.offset < 4
        assert got.text or offset == len(data)
        assert got.next_offset is None or got.next_offset > got.offset


@pytest.mark.rule("ART-9")
@pytest.mark.parametrize(("offset", "limit"), [(-1, 10), (11, 10), (0, 3), (0, 65_537)])
def test_a_window_out_of_range_is_refused(offset: int, limit: int) -> None:
    with pytest.raises(InvalidRequest):
        piece(b"0123456789", offset, limit)
    whole = piece(b"x" * 30_000, 0)
    assert (len(whole.text), whole.next_offset) == (ARTIFACT_READ_BYTES_DEFAULT, 24_576)
    assert piece(b"0123456789", 10, 4) == ("", 10, None)


@pytest.mark.rule("ART-13")
def test_a_refusal_carries_an_id_and_nothing_else() -> None:
    refusals: list[CallboardError] = []
    uses: list[Callable[[], object]] = [
        lambda: read_ref({"artifact_id": "/etc/passwd"}),
        lambda: cut([text_part("")] * 99),
    ]
    for use in uses:
        try:
            use()
        except CallboardError as error:
            refusals.append(error)
    assert [error.to_wire() for error in refusals] == [
        {"code": "artifact_invalid", "retryable": False},
        {"code": "payload_too_large", "limit": "ARTIFACT_LAYOUT_PARTS_MAX", "maximum": 64},
    ]
