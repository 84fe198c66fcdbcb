"""Reads a home with its plane down, from the format's description alone (oracle O2).

It imports nothing of the product: what it says about a home was not decided by the code that it is
held against. Where it is to be trusted it is slow and plain: whole files in memory, every law
checked, every complaint kept.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgpack


@dataclass
class Session:
    """What a home says of one session."""

    inputs: list[str] = field(default_factory=list[str])
    """Message ids that live in the inbox, in FIFO order."""
    acknowledged: list[str] = field(default_factory=list[str])
    """Message ids that an inbox_acknowledged names, in order."""
    order: list[str] = field(default_factory=list[str])
    """Inbox message ids of the messages that turns applied, in order."""
    problems: list[str] = field(default_factory=list[str])
    """Broken laws, as `file:line: what`."""
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class Damage(Exception):
    """The journal lost or changed something that was on the disk."""


def read_home(path: Path) -> dict[str, Session]:
    """Read every session of a home.

    Raises:
        Damage: of the journal.
    """
    files = {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.glob("sessions/*/*/*.jsonl")
        if file.is_file()
    }
    return read_files(files, {f.name: f.read_bytes() for f in path.glob("journal/*.log")})


def read_files(files: dict[str, bytes], segments: Mapping[str, bytes]) -> dict[str, Session]:
    """Read every session of a home that is given as bytes.

    Args:
        files: by path below the home; what the journal says is laid over them.
        segments: of the journal, by name.

    Raises:
        Damage: of the journal.
    """
    replay(segments, files)
    found: dict[str, Session] = {}
    for name in sorted(files):
        _, key, session_id, stream = name.split("/")
        if stream == "transcript.jsonl":
            session = Session()
            read_transcript(f"{key}/{session_id}", files[name], session)
            inbox = files.get(f"sessions/{key}/{session_id}/inbox.jsonl")
            if inbox is not None:
                read_inbox(f"{key}/{session_id}", inbox, session)
            if session.records or session.problems:
                check_laws(session)
                found[f"{key}/{session_id}"] = session
    return found


# --- the journal ----------------------------------------------------------------------------------


class Frame(NamedTuple):
    offset: int
    end: int
    commit: int
    durable: int
    crc: int
    payload: dict[str, Any]


def frame_at(data: bytes, offset: int) -> Frame | None:
    """The frame at an offset, if a whole one is there."""
    if len(data) - offset < 32:
        return None
    magic, length, crc, zero = struct.unpack_from("<4sIII", data, offset)
    body = data[offset + 16 : offset + 16 + length]
    end = offset + 16 + length
    padding = -end % 8
    if magic != b"cbj1" or zero or length < 16 or len(body) != length or zlib.crc32(body) != crc:
        return None
    if data[end : end + padding] != bytes(padding):
        return None
    commit, durable = struct.unpack_from("<QQ", body)
    payload = msgpack.unpackb(body[16:]) if length > 16 else {"k": "mark"}
    return Frame(offset, end + padding, commit, durable, crc, payload)


def segment(data: bytes) -> tuple[list[Frame], int]:
    """The frames of a segment up to the first bad place, and that place (FLT-7)."""
    found: list[Frame] = []
    end = 0
    while (frame := frame_at(data, end)) is not None:
        found.append(frame)
        end = frame.end
    for offset in range(end + 8 - end % 8, len(data), 8):
        later = frame_at(data, offset)
        if later is not None and end < later.durable <= offset:
            raise Damage(f"a frame at {offset} knew of bytes that are bad at {end}")
    return found, end


def chain_of(segments: Mapping[str, bytes]) -> list[list[Frame]]:
    """The frames that count, by segment, oldest first (FLT-6)."""
    read = {
        int(name.removesuffix(".log")): segment(data)
        for name, data in segments.items()
        if re.fullmatch(r"[0-9]{4,}\.log", name)
    }
    numbers = sorted(read)
    while numbers:
        frames, _ = read[numbers[-1]]
        if frames and len(frames) > frames[0].payload["copied"]:
            break
        numbers.pop()  # a start that got no further; its predecessor still tells it all
    counted: list[list[Frame]] = []
    number = numbers[-1] if numbers else 0
    limit: int | None = None
    while number in read:
        frames, end = read[number]
        if limit is not None:
            if end < limit:
                raise Damage(f"segment {number} is bad at {end}")
            frames = [frame for frame in frames if frame.offset < limit]
        header = frames[0].payload
        if header["k"] != "segment_header" or header["number"] != number:
            raise Damage(f"segment {number} does not begin with its header")
        counted.insert(0, frames)
        number, limit = header["previous"], header["previous_bytes"]
    return counted


def replay(segments: Mapping[str, bytes], files: dict[str, bytes]) -> None:
    """Write what the journal holds since its last checkpoint over the files (FLT-9)."""
    frames = [frame for part in chain_of(segments) for frame in part]
    if not frames or frames[-1].payload["k"] == "clean_stop":
        return
    through = max(
        (f.payload["through"] for f in frames if f.payload["k"] == "checkpoint"), default=0
    )
    parts: dict[str, list[tuple[int, bytes]]] = {}
    for frame in frames:
        if frame.payload["k"] != "commit" or frame.commit <= through:
            continue
        for name, _, offset, data in frame.payload.get("p", ()):
            if offset == 0:
                parts[name] = []  # a new file in the place of the one that earlier parts were for
            parts.setdefault(name, []).append((offset, data))
    for name, found in parts.items():
        before = files.get(name, b"")[: found[0][0]]
        for offset, data in found:
            if len(before) != offset:
                raise Damage(f"{name} has {len(before)} bytes where {offset} should be")
            before += data
        files[name] = before


# --- streams --------------------------------------------------------------------------------------


def lines_of(name: str, data: bytes, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a stream that hold, each checked against the one before."""
    before: str | None = hashlib.sha256(name.encode()).hexdigest()
    lines = data.split(b"\n")
    tail = lines.pop()
    for number, line in enumerate([*lines, tail] if tail else lines, start=1):
        head, _, end = line.rpartition(b',"chain":"')
        written = end.removesuffix(b'"}').decode("ascii", "replace")
        right = hashlib.sha256((before or "").encode() + head).hexdigest()
        value = json_object(line)
        good = (
            value is not None
            and re.fullmatch(r"[0-9a-f]{64}", written) is not None
            and end == written.encode() + b'"}'
            and before in (None, before if right == written else "")
            and f"{value.get('workspace_key')}/{value.get('session_id')}" == name
        )
        if not good:
            if line is not tail:
                problems.append(f"{number}: bad line")
                before = None
            continue
        assert value is not None
        before = written
        yield number, value


def json_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line is, or none."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def read_transcript(name: str, data: bytes, session: Session) -> None:
    """Read a transcript's records."""
    seq = 0
    for number, record in lines_of(name, data, session.problems):
        if record["seq"] <= seq:
            session.problems.append(f"{number}: seq {record['seq']} behind {seq}")
            continue
        seq = record["seq"]
        session.records.append(record)
        value = record["data"]
        if record["type"] == "inbox_acknowledged":
            session.acknowledged += [item["message_id"] for item in value["items"]]
        elif record["type"] == "message_created" and value.get("inbox_message_id"):
            session.order.append(value["inbox_message_id"])


def read_inbox(name: str, data: bytes, session: Session) -> None:
    """Apply an inbox's operations."""
    live: list[str] = []
    next_n = kept_below = 0
    for number, op in lines_of(name, data, session.problems):
        if number == 1:
            next_n = kept_below = op["next_n"]
            continue
        if op["n"] >= kept_below:
            if op["n"] != next_n:
                session.problems.append(f"inbox {number}: n {op['n']} where {next_n} should be")
            next_n = op["n"] + 1
        value = op["data"]
        if op["type"] == "put":
            live.append(value["item"]["message_id"])
        elif op["type"] == "remove":
            live.remove(value["message_id"])
        elif op["type"] == "move":
            live.remove(value["message_id"])
            behind = value["behind"]
            live.insert(live.index(behind) + 1 if behind else 0, value["message_id"])
    session.inputs = live


def check_laws(session: Session) -> None:
    """Complain of whatever breaks O3."""
    problems = session.problems
    if len(set(session.inputs)) != len(session.inputs):
        problems.append("an input lives twice")
    for name in set(session.inputs) & set(session.acknowledged):
        problems.append(f"{name} lives and is acknowledged")
    if len(set(session.acknowledged)) != len(session.acknowledged):
        problems.append("an input is acknowledged twice")
    commits = [record["commit"] for record in session.records]
    epochs = [record["epoch"] for record in session.records]
    if commits != sorted(commits) or epochs != sorted(epochs):
        problems.append("a commit or an epoch falls")
    ends = [r["data"]["turn_id"] for r in session.records if r["type"] in _TERMINALS]
    if len(set(ends)) != len(ends):
        problems.append("a turn ends twice")


_TERMINALS = ("turn_completed", "turn_aborted")
