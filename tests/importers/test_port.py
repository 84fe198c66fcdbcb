"""The importer port: its items, its limits, and what a reader may not do."""

import builtins
import io
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, BinaryIO, get_args

import pytest

from callboard.errors import ImportMalformed, ImportTooLarge
from callboard.importers.port import (
    ImportItem,
    ImportLimits,
    ImportOpaque,
    TranscriptImporter,
    read_items,
)
from callboard.importers.registry import formats
from callboard.limits import IMPORT_BYTES_MAX, IMPORT_ITEMS_MAX, IMPORT_LINE_BYTES_MAX
from tests.importers.reading import DATA, read

SAMPLES = {
    "claude-code": (DATA / "claude.jsonl").read_bytes(),
    "codex": (DATA / "codex.jsonl").read_bytes(),
    "callboard-script": (DATA / "script.jsonl").read_bytes(),
}


def importer(name: str) -> TranscriptImporter:
    return formats().choose(b"", "", name)


class Foreign:
    """An importer as someone else may write it."""

    name = "foreign"

    def __init__(self, *gives: Any) -> None:  # noqa: ANN401
        self.gives = gives

    def sniff(self, head: bytes, file_name: str) -> int:
        return 0

    def read(self, stream: BinaryIO, limits: ImportLimits) -> Iterator[ImportItem]:
        for each in self.gives:
            if isinstance(each, Exception):
                raise each
            yield each


@pytest.mark.rule("IMP-2")
def test_every_item_is_frozen_and_names_its_session() -> None:
    for kind in get_args(ImportItem):
        assert fields(kind)[0].name == "session"
        assert kind.__dataclass_params__.frozen
        assert not hasattr(kind, "__dict__") or "__dict__" not in kind.__slots__


@pytest.mark.rule("IMP-2")
def test_control_records_cannot_be_expressed() -> None:
    assert {kind.__name__ for kind in get_args(ImportItem)} == {
        "ImportHeader",
        "ImportMessage",
        "ImportToolCall",
        "ImportToolResult",
        "ImportSummary",
        "ImportTurn",
        "ImportOpaque",
        "ImportSkipped",
    }


@pytest.mark.rule("IMP-1")
@pytest.mark.parametrize("name", SAMPLES)
def test_reading_touches_nothing_but_the_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = importer(name)
    before = read(reader, SAMPLES[name])

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError((args, kwargs))

    for module, names in (
        (builtins, ["open"]),
        (io, ["open"]),
        (os, ["open", "stat", "listdir", "getenv"]),
        (socket, ["socket"]),
        (time, ["time", "time_ns", "monotonic"]),
    ):
        for each in names:
            monkeypatch.setattr(module, each, forbidden)
    try:
        after = read(reader, SAMPLES[name])
        reader.sniff(SAMPLES[name], "x.jsonl")
    finally:
        monkeypatch.undo()
    assert after == before


@pytest.mark.rule("IMP-10")
def test_the_limits_are_those_of_the_rule() -> None:
    limits = ImportLimits()
    assert limits.source_bytes == IMPORT_BYTES_MAX == 256 * 1024 * 1024
    assert limits.line_bytes == IMPORT_LINE_BYTES_MAX == 16 * 1024 * 1024
    assert limits.items == IMPORT_ITEMS_MAX == 1_000_000


@pytest.mark.rule("IMP-10")
@pytest.mark.parametrize("name", SAMPLES)
def test_every_reader_keeps_the_limits(name: str) -> None:
    source = SAMPLES[name]
    longest = max(map(len, source.split(b"\n")))
    items = len(read(importer(name), source))
    exact = ImportLimits(len(source), longest, items)
    assert len(read(importer(name), source, exact)) == items
    for limits, broken in (
        (ImportLimits(len(source) - 1, longest, items), "IMPORT_BYTES_MAX"),
        (ImportLimits(len(source), longest - 1, items), "IMPORT_LINE_BYTES_MAX"),
        (ImportLimits(len(source), longest, items - 1), "IMPORT_ITEMS_MAX"),
    ):
        with pytest.raises(ImportTooLarge) as caught:
            read(importer(name), source, limits)
        assert caught.value.carried == {"limit": broken}


@pytest.mark.rule("IMP-10")
def test_a_line_of_one_byte_too_many() -> None:
    class Long(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            return b" " * (IMPORT_LINE_BYTES_MAX + 1)

    with pytest.raises(ImportTooLarge):
        list(importer("codex").read(Long(), ImportLimits()))


def test_a_foreign_importer_is_watched() -> None:
    good = ImportOpaque("", "x", None)
    assert list(read_items(Foreign(good), io.BytesIO(), ImportLimits())) == [good]
    for gives in ({"type": "rewind"}, None, RuntimeError("oops"), RecursionError()):
        items = read_items(Foreign(good, gives), io.BytesIO(), ImportLimits())
        assert next(items) == good
        with pytest.raises(ImportMalformed, match="foreign importer"):
            next(items)
    with pytest.raises(ImportTooLarge):
        list(read_items(Foreign(good, good), io.BytesIO(), ImportLimits(items=1)))
    for error in (OSError("disk"), ImportTooLarge(limit="IMPORT_BYTES_MAX")):
        with pytest.raises(type(error)):
            list(read_items(Foreign(error), io.BytesIO(), ImportLimits()))
