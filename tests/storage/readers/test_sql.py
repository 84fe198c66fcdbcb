"""Queries by name, out of a file."""

import pytest

from callboard.storage.sql import Query, load, parse


def test_a_file_of_queries() -> None:
    content = """-- what it is about
-- name: one
-- First line,
-- second line.
SELECT 1;

-- name: two
-- Another.
SELECT 2
FROM t;
"""
    assert dict(parse(content)) == {
        "one": Query("one", "First line, second line.", "SELECT 1;"),
        "two": Query("two", "Another.", "SELECT 2\nFROM t;"),
    }


@pytest.mark.parametrize(
    "content",
    [
        "-- name: one\nSELECT 1;",
        "-- name: one\n-- Nothing.\n",
        "-- name: one\n-- A.\nSELECT 1;\n-- name: one\n-- A.\nSELECT 1;",
    ],
)
def test_a_query_is_named_once_described_and_there(content: str) -> None:
    with pytest.raises(ValueError, match="one"):
        parse(content)


def test_every_query_of_the_index_is_described() -> None:
    assert all(query.description.endswith(".") for query in load("index").values())
