"""Homes made by hand from the format: sessions, frames, and what of them stands in the files."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from callboard.home import Home, runtime_of
from callboard.ids import SessionRef, workspace_key
from callboard.messages import InboxItem, Text
from callboard.records import (
    compact,
    digest,
    first_chain,
    item_digest,
    stamp_inbox_header,
    stamp_op,
    stamp_record,
    timestamp,
)
from callboard.storage.frames import (
    Checkpoint,
    CleanStop,
    ClosingMark,
    Commit,
    Damaged,
    Epochs,
    FileMark,
    Part,
    Payload,
    SegmentHeader,
    encode,
    pack,
)
from callboard.storage.lines import Gap
from callboard.storage.readers import HomeReader

HOME_ID = "a" * 32
CURSOR_KEY = "07" * 32
T0 = 1_700_000_000_000_000
Data = Mapping[str, Any]
Entry = tuple[str, Data]
"""A record type and its data."""


# --- records --------------------------------------------------------------------------------------


def created(ref: SessionRef, workspace: str, at: int = T0, **more: object) -> Entry:
    return "session_created", {
        "workspace": workspace,
        "session_id": ref.session_id,
        "root": str(ref),
        "agent": "echo",
        "created_at": at,
        "owner": {"kind": "operator", "principal_id": "principal:operator:local", "created_at": at},
        **more,
    }


def updated(at: int = T0, **fields: object) -> Entry:
    return "session_updated", {**fields, "updated_at": at}


def message(message_id: str, role: str = "user", at: int = T0, **more: object) -> Entry:
    return "message_created", {"message_id": message_id, "role": role, "created_at": at, **more}


def part(
    part_id: str,
    message_id: str,
    kind: str,
    at: int = T0,
    *,
    again: bool = False,
    **payload: object,
) -> Entry:
    return "part_updated" if again else "part_created", {
        "part_id": part_id,
        "message_id": message_id,
        "part_type": kind,
        "payload": payload,
        "created_at": at,
    }


def said(
    message_id: str, text: str, role: str = "user", at: int = T0, **more: object
) -> list[Entry]:
    """A message with one text part."""
    return [
        message(message_id, role, at, **more),
        part(f"p-{message_id}", message_id, "text", at, text=text),
    ]


def turn_started(turn_id: str, inputs: Sequence[str] = (), at: int = T0) -> Entry:
    return "turn_started", {
        "turn_id": turn_id,
        "epoch": 1,
        "kind": "user",
        "input_ids": list(inputs),
        "chain_index": 0,
        "started_at": at,
        "agent_id": "echo",
        "principal": "principal:operator:local",
        "trace_id": "t" * 32,
    }


def acknowledged(turn_id: str | None, ids: Sequence[str], reason: str = "completed") -> Entry:
    items = [{"message_id": one, "digest": digest(one)} for one in ids]
    return "inbox_acknowledged", {"reason": reason, "turn_id": turn_id, "items": items}


def turn_completed(turn_id: str, inputs: Sequence[str] = (), at: int = T0) -> Entry:
    return "turn_completed", {**_end(turn_id, inputs, "completed"), "completed_at": at}


def turn_aborted(
    turn_id: str,
    inputs: Sequence[str] = (),
    at: int = T0,
    cause: str = "failed",
    disposition: str = "pending",
) -> Entry:
    end = _end(turn_id, inputs, "failed") | {"input_disposition": disposition}
    return "turn_aborted", {**end, "cause": cause, "aborted_at": at}


def _end(turn_id: str, inputs: Sequence[str], outcome: str) -> dict[str, object]:
    return {
        "turn_id": turn_id,
        "claimed_input_ids": list(inputs),
        "turns_count": 1,
        "tool_calls_count": 0,
        "duration_ms": 1,
        "outcome": outcome,
        "input_disposition": "acknowledged",
        "output_message_ids": [],
    }


def item(message_id: str, text: str = "hello") -> InboxItem:
    content = [{"type": "text", "text": text}]
    return InboxItem(
        message_id=message_id,
        origin="user",
        content=[Text(type="text", text=text)],
        queued_at=T0,
        digest=item_digest([dict(one) for one in content], {}),
        principal="principal:operator:local",
    )


# --- streams --------------------------------------------------------------------------------------


@dataclass
class Book:
    """One session's streams, as storage would have written them."""

    ref: SessionRef
    workspace: str
    transcript: bytes = b""
    inbox: bytes = b""
    chain: str = ""
    seq: int = 0
    inbox_chain: str = ""
    n: int = 0
    generation: str = ""
    epoch: int = 0

    def lines(self, commit: int, entries: Iterable[Entry]) -> bytes:
        """Stamp records; returns what they add to the transcript."""
        before = len(self.transcript)
        for kind, data in entries:
            self.seq += 1
            turn_id = data.get("turn_id") if kind.startswith("turn") else None
            line, self.chain = stamp_record(
                self.ref,
                seq=self.seq,
                record_id=digest([str(self.ref), self.seq])[:32],
                commit=commit,
                epoch=self.epoch,
                ts=timestamp(T0 + commit),
                kind=kind,
                turn_id=turn_id,
                data=compact(data),
                before=self.chain or first_chain(str(self.ref)),
            )
            self.transcript += line
        return self.transcript[before:]

    def ops(self, commit: int, ops: Iterable[tuple[str, Mapping[str, object]]]) -> bytes:
        """Stamp inbox operations; returns what they add to the inbox."""
        before = len(self.inbox)
        if not self.inbox:
            self.header()
        for op, data in ops:
            self.n += 1
            self.op(op, data, n=self.n, commit=commit)
        return self.inbox[before:]

    def header(self, next_n: int = 1) -> None:
        """Begin the inbox anew."""
        self.generation = digest([str(self.ref), self.generation])[:32]
        self.inbox, self.inbox_chain = stamp_inbox_header(
            self.ref, generation=self.generation, next_n=next_n
        )

    def op(self, op: str, data: Mapping[str, object], *, n: int, commit: int = 1) -> None:
        line, self.inbox_chain = stamp_op(
            self.ref,
            n=n,
            commit=commit,
            epoch=self.epoch,
            ts=timestamp(T0 + commit),
            op=op,
            data=compact(data),
            before=self.inbox_chain,
        )
        self.inbox += line


def put(message_id: str, text: str = "hello") -> tuple[str, dict[str, object]]:
    return "put", {"item": item(message_id, text).model_dump(exclude_none=True)}


def remove(message_id: str) -> tuple[str, dict[str, object]]:
    return "remove", {"message_id": message_id}


# --- homes ----------------------------------------------------------------------------------------


@dataclass
class Journal:
    """The bytes of one segment in the making."""

    number: int = 1
    data: bytes = b""
    durable: int = 0

    def add(self, commit: int, payload: Payload) -> None:
        self.data += encode(commit, self.durable, pack(payload))


@dataclass
class HomeMaker:
    """A home in the making: what is committed stands in the journal, and in files if wanted."""

    path: Path
    last: int = 0
    books: dict[SessionRef, Book] = field(default_factory=dict[SessionRef, Book])
    journal: Journal = field(default_factory=Journal)
    sure: dict[SessionRef, int] = field(default_factory=dict[SessionRef, int])
    """Bytes of each transcript that the last checkpoint promised."""
    synced: int = 0
    """Bytes of the journal that must have been synced, since files hold what they say."""

    def __post_init__(self) -> None:
        self.home = Home(self.path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = {"format": 1, "home_id": HOME_ID, "cursor_key": CURSOR_KEY}
        self.write(self.home.format, json.dumps(content).encode())
        self.journal.add(0, SegmentHeader(HOME_ID, 1, 0, 0, 0, 0, 1, Epochs()))
        self._save()

    def write(self, path: Path, data: bytes) -> None:
        for folder in reversed(path.parents):
            folder.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o600)

    def _save(self) -> None:
        self.write(self.home.journal / f"{self.journal.number:04d}.log", self.journal.data)

    def book(self, session_id: str, workspace: str | Path) -> Book:
        ref = SessionRef(workspace_key(str(workspace)), session_id)
        return self.books.setdefault(ref, Book(ref, str(workspace)))

    def new(self, session_id: str, workspace: str | Path, at: int = T0, **more: object) -> Book:
        """Create a session, in the journal and in its file."""
        book = self.book(session_id, workspace)
        self.commit((book, [created(book.ref, str(workspace), at, **more)]))
        return book

    def commit(
        self,
        *changes: tuple[Book, Iterable[Entry]],
        ops: Iterable[tuple[Book, Iterable[tuple[str, Mapping[str, object]]]]] = (),
        files: bool = True,
        leases: Sequence[tuple[str, bytes]] = (),
    ) -> int:
        """Commit one frame; `files` says whether it is materialised."""
        self.last += 1
        parts: list[Part] = []
        for book, entries in changes:
            at = len(book.transcript)
            data = book.lines(self.last, entries)
            parts.append(Part(self.name(book, "transcript"), "", at, data))
        for book, operations in ops:
            at = len(book.inbox)
            data = book.ops(self.last, operations)
            parts.append(Part(self.name(book, "inbox"), book.generation, at, data))
        self.journal.add(self.last, Commit(tuple(parts), tuple(leases)))
        self._save()
        if files:
            self.synced = len(self.journal.data)
            for book, _ in changes:
                self.write(self.home.transcript(book.ref), book.transcript)
            for book, _ in ops:
                self.write(self.home.inbox(book.ref), book.inbox)
        return self.last

    @staticmethod
    def name(book: Book, stream: str) -> str:
        return f"sessions/{book.ref}/{stream}.jsonl"

    def checkpoint(self, damaged: Sequence[Damaged] = ()) -> None:
        """Say that everything so far stands in synced files."""
        marks = [
            FileMark(self.name(one, "transcript"), "", len(one.transcript), one.seq, one.chain)
            for one in self.books.values()
        ]
        frame = Checkpoint(self.last, 1, tuple(marks), tuple(damaged), Epochs())
        self.sure = {book.ref: len(book.transcript) for book in self.books.values()}
        self.journal.durable = len(self.journal.data)
        self.journal.add(self.last, frame)
        self._save()

    def stop(self, damaged: Sequence[Damaged] = ()) -> None:
        """End in order."""
        self.checkpoint(damaged)
        self.journal.durable = len(self.journal.data)
        self.journal.add(self.last, CleanStop(Epochs()))
        self._save()

    def mark(self) -> None:
        """Write a closing mark: all of the segment is on the disk."""
        self.journal.durable = len(self.journal.data)
        self.journal.add(self.last, ClosingMark())
        self._save()

    @contextmanager
    def plane(self, synced: int | None = None, written: int | None = None) -> Generator[None]:
        """Hold the writer's lock in another process, with a run/durable beside it."""
        last = self.last if synced is None else synced
        durable = runtime_of(self.path).durable
        self.durable(last, last if written is None else written)
        self.home.writer_lock.touch(mode=0o600)
        child = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(self.home.writer_lock)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"held\n"
            yield
        finally:
            child.communicate(b"")
            durable.unlink(missing_ok=True)

    def durable(self, synced: int, written: int) -> None:
        self.write(runtime_of(self.path).durable, struct.pack("<QQ", synced, written))


_HOLD = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(fd, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


# --- looking --------------------------------------------------------------------------------------


def types(reader: HomeReader, book: Book) -> list[str]:
    """The types of a transcript's records, gaps as `gap:<damage>@<line>`."""
    return [
        f"gap:{one.damage}@{one.line}" if isinstance(one, Gap) else one.type
        for one in reader.transcript(book.ref)
    ]


def tree(path: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of every file below a path, SQLite's own bookkeeping excepted."""
    return {
        str(file.relative_to(path)): (file.stat().st_mode, file.read_bytes())
        for file in sorted(path.rglob("*"))
        if file.is_file() and not file.name.endswith(("-wal", "-shm"))
    }


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def line_start(path: Path, line: int) -> int:
    """The offset of a line, from 1."""
    lines = path.read_bytes().split(b"\n")
    return sum(len(one) + 1 for one in lines[: line - 1])


def no_permission_checks() -> bool:
    return os.geteuid() == 0
