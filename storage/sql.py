"""SQLite, spoken to by the names of queries that stand in .sql files.

A query begins with a line `-- name: its_name`, then comes what it does in further comment lines,
then its text up to the next name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple, cast

import apsw

Value = str | int | None
"""What a column holds here."""
Row = tuple[Value, ...]
Bindings = Sequence[Value] | Mapping[str, Value]


class Query(NamedTuple):
    """A query and what it is for."""

    name: str
    description: str
    text: str


def load(name: str) -> Mapping[str, Query]:
    """Load the queries of a file beside this module, by name.

    Args:
        name: the file's name without `.sql`.

    """
    content = files("callboard.storage").joinpath(f"{name}.sql").read_text(encoding="utf-8")
    return parse(content)


def parse(content: str) -> Mapping[str, Query]:
    """Read the queries of a file's content.

    Raises:
        ValueError: a query without a description or a text, or two of one name.

    """
    found: dict[str, Query] = {}
    for block in content.split("-- name: ")[1:]:
        name, _, rest = block.partition("\n")
        lines = rest.split("\n")
        comments = [line for line in lines if line.startswith("--")]
        text = "\n".join(line for line in lines if not line.startswith("--")).strip()
        description = " ".join(line.removeprefix("--").strip() for line in comments)
        query = Query(name.strip(), description, text)
        if not all(query) or query.name in found:
            raise ValueError(f"query {query.name!r} lacks something, or stands there twice")
        found[query.name] = query
    return MappingProxyType(found)


class Database:
    """A connection to one file, for one thread; as a context, a transaction.

    Every method may raise `apsw.Error`.
    """

    def __init__(
        self, path: Path, queries: Mapping[str, Query], *, write: bool, busy_ms: int
    ) -> None:
        """Open a file that is there.

        Args:
            path: the file.
            queries: as `load` gives them.
            write: whether it is written to.
            busy_ms: how long to wait for another connection's lock.

        """
        flags = apsw.SQLITE_OPEN_READWRITE if write else apsw.SQLITE_OPEN_READONLY
        self._db = apsw.Connection(str(path), flags=flags)
        self._queries = queries
        self._db.set_busy_timeout(busy_ms)

    def __enter__(self) -> Database:
        self._db.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._db.__exit__(kind, value, trace)

    def rows(self, name: str, bindings: Bindings = ()) -> Iterator[Row]:
        """Run a query and give its rows as they come."""
        return self._run(self._queries[name].text, bindings)

    def first(self, name: str, bindings: Bindings = ()) -> Row | None:
        """Run a query and give its first row."""
        return next(self.rows(name, bindings), None)

    def run(self, name: str, bindings: Bindings = ()) -> None:
        """Run a query that gives no rows."""
        for _ in self.rows(name, bindings):
            pass

    def run_many(self, name: str, bindings: Iterable[Bindings]) -> None:
        """Run a query once for each of several bindings."""
        self._db.executemany(self._queries[name].text, bindings)  # pyright: ignore[reportUnknownMemberType]

    def plain(self, text: str) -> None:
        """Run a statement that has no name: a PRAGMA, or BEGIN."""
        for _ in self._run(text, ()):
            pass

    def _run(self, text: str, bindings: Bindings) -> Iterator[Row]:
        cursor = self._db.execute(text, bindings)  # pyright: ignore[reportUnknownMemberType]
        return cast("Iterator[Row]", cursor)

    def checkpoint(self) -> None:
        """Move everything from the log into the main file, and empty the log."""
        self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    def close(self) -> None:
        """Close it, whatever is open on it."""
        self._db.close(True)
