"""Large sessions on real files: field reports B024, B030, B032."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from bench.append import creation, owner, record, session_ref
from bench.grow import Store, Unsynced
from callboard import messages as m
from callboard.home import Home
from callboard.ids import parse_ref
from callboard.records import Record
from callboard.storage.catalog import find_session
from callboard.storage.readers import open_home
from callboard.storage.views import history

PIECES = 24
WORDS = "x" * 800_000


def turn(number: int, words: str) -> list[m.NewRecord]:
    name, message = f"turn_{number:026d}", f"msg_{number}"
    start: dict[str, object] = {
        "turn_id": name,
        "epoch": 0,
        "kind": "continuation",
        "input_ids": [],
        "chain_index": 0,
        "started_at": 1,
        "agent_id": "echo",
        "principal": "principal:operator:local",
        "trace_id": "t",
    }
    said: dict[str, object] = {
        "part_id": f"part_{number}",
        "message_id": message,
        "part_type": "text",
        "payload": {"text": words},
        "created_at": 1,
    }
    end: dict[str, object] = {
        "turn_id": name,
        "claimed_input_ids": [],
        "turns_count": 1,
        "tool_calls_count": 0,
        "duration_ms": 1,
        "outcome": "completed",
        "input_disposition": "acknowledged",
        "completed_at": 1,
    }
    created = {"message_id": message, "role": "assistant", "created_at": 1}
    return [
        record("turn_started", start, name),
        record("message_created", created, name),
        record("part_created", said, name),
        record("turn_completed", end, name),
    ]


def stage(store: Store, pieces: int, words: str) -> str:
    """Create session 0 in pieces, as an import does."""
    text = session_ref(0)
    first = creation(0, store.gateway).record
    for index in range(pieces + 1):
        body = m.StageRecords(
            gateway_epoch=store.gateway,
            session=text,
            op=first.id,
            index=index,
            records=[first] if index == 0 else turn(index, words),
            last=index == pieces,
        )
        store.engine.stage(None, body)
        answer = store.replies.pop().body
        assert isinstance(answer, m.Created if index == pieces else m.Ok), answer
    return text


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, Unsynced())


def test_b032_a_valid_log_of_18_mb_opens(store: Store, tmp_path: Path) -> None:
    text = stage(store, PIECES, WORDS)
    size = Home(tmp_path / "home").transcript(parse_ref(text)).stat().st_size
    assert size > 18_000_000
    reader = open_home(tmp_path / "home")
    ref = parse_ref(text)
    assert sum(isinstance(one, Record) for one in reader.transcript(ref)) == 4 * PIECES + 1
    assert find_session(reader, ref).message_count == PIECES
    assert len(history(reader.transcript(ref)).items) == PIECES
    granted = store.call("session", m.Acquire(session=text, owner=owner("bench")))
    assert isinstance(granted, m.LeaseGranted)


def test_b030_memory_is_that_of_a_piece_and_not_of_the_session(store: Store) -> None:
    tracemalloc.start()
    try:
        stage(store, PIECES, WORDS)
        _, peak = tracemalloc.get_traced_memory()
        store.engine.sessions.set(session_ref(0), None)
        tracemalloc.reset_peak()
        assert store.engine.sessions.get(session_ref(0)) is not None
        _, folding = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * len(WORDS)  # of 24
    assert folding < 12 * len(WORDS)


def test_b024_a_session_whose_first_message_is_large_is_listed(
    store: Store, tmp_path: Path
) -> None:
    text = stage(store, 1, "y" * 219_000)
    reader = open_home(tmp_path / "home")
    found = find_session(reader, parse_ref(text))
    assert (found.state, found.message_count) == ("ok", 1)
