"""JSON lines from the wild: what is a value, what is a bad line, and where reading stops."""

import json
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.errors import ImportTooLarge
from callboard.importers.lines import (
    DEPTH_MAX,
    BadLine,
    Good,
    head_objects,
    json_lines,
    parse_json,
)
from callboard.importers.port import ImportLimits, JsonValue
from callboard.limits import INT_ABS_MAX

NO_LIMITS = ImportLimits()


def found(source: bytes, limits: ImportLimits = NO_LIMITS) -> list[tuple[int, JsonValue]]:
    """Give (line, value) of what is good and (line, ("bad", reason)) of what is not."""
    return [
        (line, value.value if isinstance(value, Good) else f"bad: {value.reason}")
        for line, value in json_lines(BytesIO(source), limits)
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (b"", []),
        (b"\n \n\r\n\t\n", []),
        (b'{"a":1}\n{"a":2}\n', [(1, {"a": 1}), (2, {"a": 2})]),
        (b'{"a":1}{"a":2} {"a":3}\n', [(1, {"a": 1}), (1, {"a": 2}), (1, {"a": 3})]),
        (b'{"a":1}\n{"a":2}', [(1, {"a": 1}), (2, {"a": 2})]),
        (b'{"a":1}\n{"a":', [(1, {"a": 1}), (2, "bad: torn")]),
        (b'{"a":1}{"a":', [(1, {"a": 1}), (1, "bad: torn")]),
        (b'{"a":\n{"a":2}\n', [(1, "bad: not_json"), (2, {"a": 2})]),
        (b'{"a":1}, {"a":2}\n', [(1, {"a": 1}), (1, "bad: not_json")]),
        (b'\xef\xbb\xbf{"a":1}\r\n{"a":2}\r\n', [(1, {"a": 1}), (2, {"a": 2})]),
        (b'{"a":"\xff"}\n[2]\n', [(1, "bad: not_utf8"), (2, [2])]),
        (b'{"a":"\xed\xa0\x80"}\n', [(1, "bad: not_utf8")]),
        (b'{"a":1}\n{"a":"\xe2\x82', [(1, {"a": 1}), (2, "bad: torn")]),
        (b'\0\0\0\n{"a":2}\n', [(1, "bad: nul_bytes"), (2, {"a": 2})]),
        (b'\0\0\0{"a":2}\n', [(1, "bad: nul_bytes"), (1, {"a": 2})]),
        (b"\0\0\0", [(1, "bad: torn")]),
        (b'"text"\n42\nnull\n[1]\n', [(1, "text"), (2, 42), (3, None), (4, [1])]),
        (b'{"a":1,}\n', [(1, "bad: not_json")]),
    ],
)
@pytest.mark.rule("IMP-10")
def test_what_a_line_holds(source: bytes, expected: list[tuple[int, JsonValue]]) -> None:
    assert found(source) == expected


def test_a_line_ends_at_0a_only() -> None:
    text = "a\u2028b\u2029c\u0085d\x7fe"
    assert found(json.dumps({"t": text}, ensure_ascii=False).encode() + b"\n") == [(1, {"t": text})]
    assert found(b'{"a":1}\r{"a":2}\x0b\x0c\n') == [
        (1, {"a": 1}),
        (1, {"a": 2}),
        (1, "bad: not_json"),
    ]


def test_surrogates_and_nul_escapes() -> None:
    assert found(rb'{"a":"x\ud800y","\uDC00":["\ud83c\udf0a"],"n":"a\u0000b"}' + b"\n") == [
        (1, {"a": "x\ufffdy", "\ufffd": ["🌊"], "n": "a\0b"})
    ]
    assert found(rb'{"a":"\\ud800"}' + b"\n") == [(1, {"a": r"\ud800"})]


def test_numbers_that_readers_disagree_about_are_texts() -> None:
    for text in (
        "1e400",
        "-1e400",
        "NaN",
        "Infinity",
        "-Infinity",
        str(INT_ABS_MAX + 1),
        "1" * 9_999,
    ):
        assert found(f"[{text}]".encode()) == [(1, [text])]
    assert found(b"[%d,-%d,1.5,-7]" % (INT_ABS_MAX, INT_ABS_MAX)) == [
        (1, [INT_ABS_MAX, -INT_ABS_MAX, 1.5, -7])
    ]


@pytest.mark.parametrize("depth", [DEPTH_MAX + 1, 900, 10_000, 100_000])
def test_too_deep_is_a_bad_line(depth: int) -> None:
    assert found(b'{"a":1}\n' + b"[" * depth + b"]" * depth + b"\n2\n") == [
        (1, {"a": 1}),
        (2, "bad: too_deep"),
        (3, 2),
    ]


def test_the_deepest_and_the_widest_are_read() -> None:
    deepest = b"[" * DEPTH_MAX + b"]" * DEPTH_MAX
    widest = json.dumps([{"a": [i]} for i in range(1_000)]).encode()
    assert all(not str(value).startswith("bad") for _, value in found(deepest + b"\n" + widest))


@pytest.mark.rule("IMP-10")
def test_limits_of_line_and_source() -> None:
    limits = ImportLimits(source_bytes=30, line_bytes=10)
    assert found(b'"12345678"\n"12345678"', limits) == [(1, "12345678"), (2, "12345678")]
    for source in (b'"123456789"\n', b'1\n"123456789"', b" " * 11):
        with pytest.raises(ImportTooLarge) as caught:
            found(source, limits)
        assert caught.value.carried == {"limit": "IMPORT_LINE_BYTES_MAX"}
    with pytest.raises(ImportTooLarge) as caught:
        found(b"12345678\n" * 4, limits)
    assert caught.value.carried == {"limit": "IMPORT_BYTES_MAX"}


@pytest.mark.rule("IMP-10")
def test_no_more_than_a_line_is_read_ahead() -> None:
    class Stream(BytesIO):
        asked = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            assert 0 < size <= NO_LIMITS.line_bytes + 2
            self.asked += 1
            return super().readline(size)

    stream = Stream(b"1\n" * 100)
    lines = json_lines(stream, NO_LIMITS)
    assert next(lines) == (1, Good(1))
    assert stream.asked == 1


def test_parse_json_takes_one_value() -> None:
    assert parse_json(' {"a": "\\ud800"} ') == {"a": "\ufffd"}
    for text in ("", "{", "{} {}", "nope", "[" * 500 + "]" * 500):
        with pytest.raises(ValueError, match=r".*"):
            parse_json(text)


def test_head_objects_passes_over_a_cut_end() -> None:
    assert list(head_objects(b'1\n{"a":1}{"b":2}\n\xff\n{"c":')) == [{"a": 1}, {"b": 2}]


@given(st.binary(max_size=400))
def test_any_bytes_give_values_or_bad_lines(source: bytes) -> None:
    for line, value in json_lines(BytesIO(source), NO_LIMITS):
        assert 1 <= line <= source.count(b"\n") + 1
        assert isinstance(value, Good | BadLine)


@given(st.lists(st.recursive(st.none() | st.booleans() | st.text(), st.lists)))
def test_every_value_written_is_read(values: list[JsonValue]) -> None:
    source = b"\n".join(json.dumps(value).encode("utf-8") for value in values)
    assert [v for _, v in found(source)] == json.loads(json.dumps(values).encode())
