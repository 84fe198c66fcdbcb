"""Reads a home from the format's description alone; shares no code with what it judges (O2, O3)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """What the files say of one session."""

    puts: list[str] = field(default_factory=list[str])
    live: dict[str, int] = field(default_factory=dict[str, int])
    acknowledged: list[str] = field(default_factory=list[str])
    discarded: list[str] = field(default_factory=list[str])
    applied: list[str] = field(default_factory=list[str])
    terminals: list[str] = field(default_factory=list[str])
    started: list[str] = field(default_factory=list[str])
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def read_home(files: Mapping[str, bytes]) -> dict[str, Seen]:
    """Read every session below `/home/sessions/`.

    Raises:
        AssertionError: a law is broken.
    """
    found: dict[str, Seen] = {}
    for path, data in files.items():
        parts = path.split("/")
        if len(parts) == 6 and parts[2] == "sessions" and parts[5] == "transcript.jsonl":
            text = f"{parts[3]}/{parts[4]}"
            seen = found[text] = Seen()
            _read_transcript(text, data, seen)
            inbox = files.get(path.replace("transcript.jsonl", "inbox.jsonl"))
            if inbox is not None:
                _read_inbox(text, inbox, seen)
            for gone in seen.acknowledged + seen.discarded:
                assert gone not in seen.live, (text, gone)
    return found


def _lines(text: str, data: bytes, what: str) -> list[tuple[bytes, str]]:
    assert data.endswith(b"\n"), f"{text}: {what} has an unfinished line"
    chain = hashlib.sha256(text.encode()).hexdigest()
    found: list[tuple[bytes, str]] = []
    for line in data[:-1].split(b"\n"):
        head, _, tail = line.rpartition(b',"chain":"')
        expected = hashlib.sha256(chain.encode() + head).hexdigest()
        assert tail == expected.encode() + b'"}', f"{text}: {what} line {len(found) + 1}"
        found.append((line, chain := expected))
    return found


def _read_transcript(text: str, data: bytes, seen: Seen) -> None:
    commit = epoch = 0
    ts = ""
    for seq, (line, _) in enumerate(_lines(text, data, "transcript"), 1):
        record = json.loads(line)
        assert record["seq"] == seq
        assert record["commit"] >= commit
        assert record["epoch"] >= epoch
        assert record["ts"] >= ts
        assert f"{record['workspace_key']}/{record['session_id']}" == text
        commit, epoch, ts = record["commit"], record["epoch"], record["ts"]
        seen.records.append(record)
    for at, record in enumerate(seen.records):
        _judge(record, seen.records[at + 1 :], seen)
    assert len(set(seen.started)) == len(seen.started)
    assert len(set(seen.terminals)) == len(seen.terminals), "two terminals of one turn"
    assert set(seen.terminals) <= set(seen.started)
    gone = seen.acknowledged + seen.discarded
    assert len(set(gone)) == len(gone), "an input was settled twice"
    ids = [record["id"] for record in seen.records]
    assert len(set(ids)) == len(ids)


def _judge(record: dict[str, Any], behind: list[dict[str, Any]], seen: Seen) -> None:
    data = record["data"]
    match record["type"]:
        case "turn_started":
            seen.started.append(data["turn_id"])
        case "turn_completed" | "turn_aborted":
            seen.terminals.append(data["turn_id"])
        case "message_created":
            if data.get("inbox_message_id"):
                seen.applied.append(data["inbox_message_id"])
        case "inbox_acknowledged":
            ids = [one["message_id"] for one in data["items"]]
            if data["reason"] in ("completed", "aborted"):
                assert behind[0]["type"] == f"turn_{data['reason']}"
                assert set(ids) <= set(behind[0]["data"]["claimed_input_ids"])
                assert behind[0]["commit"] == record["commit"]
                seen.acknowledged += ids
            else:
                seen.discarded += ids
        case _:
            pass


def _read_inbox(text: str, data: bytes, seen: Seen) -> None:
    (first, _), *ops = _lines(text, data, "inbox")
    header = json.loads(first)
    assert header["format"] == 1
    kept = header["next_n"]
    expected = kept
    for line, _ in ops:
        op = json.loads(line)
        if op["n"] >= kept:
            assert op["n"] == expected
            expected += 1
        match op["type"]:
            case "put":
                name = op["data"]["item"]["message_id"]
                assert name not in seen.live
                seen.live[name] = op["n"]
                seen.puts.append(name)
            case "remove":
                del seen.live[op["data"]["message_id"]]
            case other:
                raise AssertionError(other)
    assert len(set(seen.puts)) == len(seen.puts), "one message id was put twice"
