"""JSON lines as they are found in the wild: glued, torn, with BOM, CRLF, NULs and odd numbers.

A line ends at byte 0x0A and nowhere else. It may hold several values one after the other, and the
last one needs no end. What is no JSON becomes a `BadLine`: never an exception, never nothing. A
line that holds only white space holds nothing.

Values come out such that they can be stored anywhere: a lone surrogate is U+FFFD (REC-9), and a
number that JSON readers disagree about (NaN, 1e400, an integer beyond INT_ABS_MAX) is its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Final

from callboard.errors import ImportTooLarge
from callboard.importers.port import TORN, ImportLimits, JsonObject, JsonValue
from callboard.limits import INT_ABS_MAX, JSON_DEPTH_MAX

NOT_UTF8: Final = "not_utf8"
NOT_JSON: Final = "not_json"
TOO_DEEP: Final = "too_deep"
NUL_BYTES: Final = "nul_bytes"

DEPTH_MAX: Final = JSON_DEPTH_MAX - 8
"""Levels of nesting in one value, which must fit into a record that has levels of its own."""

_BLANK: Final = " \t\r\n"
_BOM: Final = "\ufeff"
_SURROGATE_ESCAPE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class BadLine:
    """A stretch of a line that is no JSON."""

    reason: str


@dataclass(frozen=True, slots=True)
class Good:
    """One JSON value."""

    value: JsonValue


class TooDeep(ValueError):
    """A value nested deeper than DEPTH_MAX."""


def json_lines(stream: IO[bytes], limits: ImportLimits) -> Iterator[tuple[int, Good | BadLine]]:
    """Read every value of a stream, with the number of its line, from 1.

    Args:
        stream: bytes; read forwards only, one line at a time.
        limits: how long a line and the whole may be; the line's end does not count.

    Raises:
        ImportTooLarge: one of these limits was passed.

    """
    for number, line in enumerate(_raw_lines(stream, limits), 1):
        whole = line.endswith(b"\n")
        for found in _values(line):
            torn = isinstance(found, BadLine) and not whole
            yield number, (BadLine(TORN) if torn else found)


def parse_json(text: str) -> JsonValue:
    """Read a text that is one JSON value.

    Raises:
        ValueError: it is not, or the value is nested deeper than DEPTH_MAX.

    """
    value, end = _decode(text, len(text) - len(text.lstrip(_BLANK)))
    if text[end:].strip(_BLANK):
        raise ValueError("more than one value")
    return value


def head_objects(head: bytes) -> Iterator[JsonObject]:
    """Read the objects among the first bytes of a file, whose last line may be cut."""
    for line in head.split(b"\n"):
        for found in _values(line):
            if isinstance(found, Good) and isinstance(found.value, dict):
                yield found.value


def _raw_lines(stream: IO[bytes], limits: ImportLimits) -> Iterator[bytes]:
    total = 0
    while line := stream.readline(limits.line_bytes + 2):
        total += len(line)
        if len(line) - line.endswith(b"\n") > limits.line_bytes:
            raise ImportTooLarge(limit="IMPORT_LINE_BYTES_MAX")
        if total > limits.source_bytes:
            raise ImportTooLarge(limit="IMPORT_BYTES_MAX")
        yield line


def _values(line: bytes) -> Iterator[Good | BadLine]:
    """Give the values of one line until it is used up or its rest is no JSON."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        yield BadLine(NOT_UTF8)
        return
    text = text.removeprefix(_BOM).strip(_BLANK)
    if text.startswith("\0"):  # what a crash leaves of a block; the next write follows it directly
        yield BadLine(NUL_BYTES)
        text = text.lstrip("\0" + _BLANK)
    at = 0
    while at < len(text):
        try:
            value, at = _decode(text, at)
        except TooDeep:
            yield BadLine(TOO_DEEP)
            return
        except ValueError:
            yield BadLine(NOT_JSON)
            return
        yield Good(value)
        while at < len(text) and text[at] in _BLANK:
            at += 1


def _decode(text: str, at: int) -> tuple[JsonValue, int]:
    """Decode the value that begins at `at`; return it and where it ends."""
    try:
        value: JsonValue
        value, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise TooDeep from None
    if text.count("{", at, end) + text.count("[", at, end) > DEPTH_MAX:
        _check_depth(value)
    if _SURROGATE_ESCAPE.search(text, at, end):
        value = _scrubbed(value)
    return value, end


def _check_depth(value: JsonValue) -> None:
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [
            child for node in level for child in _children(node) if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise TooDeep


def _children(node: JsonValue) -> list[JsonValue]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def _scrubbed(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_scrubbed(item) for item in value]
    if isinstance(value, dict):
        return {_SURROGATE.sub("\ufffd", key): _scrubbed(item) for key, item in value.items()}
    return value


def _int(text: str) -> int | str:
    if len(text) > len(str(INT_ABS_MAX)) + 1:
        return text
    number = int(text)
    return number if abs(number) <= INT_ABS_MAX else text


def _float(text: str) -> float | str:
    number = float(text)
    return text if number in (float("inf"), float("-inf")) else number


_DECODER: Final = json.JSONDecoder(parse_int=_int, parse_float=_float, parse_constant=str)
