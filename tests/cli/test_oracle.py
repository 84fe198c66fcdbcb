"""The file of promises, and what is read back from a home to compare it with."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from callboard.cli.evidence import evidence_of
from callboard.cli.oracle import Entry, OracleFile, oracle_of, read_oracle
from callboard.cli.verdict import Evidence, Input
from callboard.errors import InboxCorrupt, InvalidRequest, NotFound
from callboard.ids import SessionRef
from callboard.messages import InboxItem, Text
from callboard.records import (
    Acknowledged,
    InboxAcknowledged,
    MessageCreated,
    PartCreated,
    Record,
    RecordData,
    TurnAborted,
    TurnCompleted,
    item_digest,
)

REF = "demo-" + "0" * 32 + "/s1"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = oracle_of(tmp_path / "home")
    assert path.name == "home.oracle.jsonl"
    oracle = OracleFile(path)
    oracle.write(REF, "a", "d1", 5)
    oracle.write(REF + "2", "b", "d2", 6)
    oracle.write(REF, "c", "d3", 7)
    assert read_oracle(path) == [  # each line is there before the file is closed
        Entry(REF, 1, "a", "d1", 5),
        Entry(REF + "2", 1, "b", "d2", 6),
        Entry(REF, 2, "c", "d3", 7),
    ]
    oracle.close()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        OracleFile(path)


def test_a_line_that_was_cut_off_is_no_promise(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    oracle = OracleFile(path)
    oracle.write(REF, "a", "d", 5)
    oracle.write(REF, "b", "d", 5)
    oracle.close()
    data = path.read_bytes()
    for cut in range(len(data) // 2 + 1, len(data)):
        path.write_bytes(data[:cut])
        assert [entry.message_id for entry in read_oracle(path)] == ["a"]


@pytest.mark.parametrize(
    "text", ["x\n", "[]\n", "{}\n", '{"session":1,"n":1,"message_id":"a","digest":"d","at":1}\n']
)
def test_another_file_is_no_oracle(tmp_path: Path, text: str) -> None:
    path = tmp_path / "o.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest):
        read_oracle(path)


def test_no_file_is_no_oracle(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_oracle(tmp_path / "none")
    assert refused.value.carried["reason"] == "missing"


# ---- Evidence ----


def records(*frames: list[tuple[str | None, RecordData]]) -> list[Record]:
    made, seq = list[Record](), 0
    for commit, frame in enumerate(frames, 1):
        for turn_id, data in frame:
            seq += 1
            made.append(
                Record(seq, f"{seq:032x}", commit, 1, "t", data.type, turn_id, data, "0" * 64)
            )
    return made


def message(name: str, text: str, role: str = "user") -> list[tuple[str | None, RecordData]]:
    created = MessageCreated.model_validate(
        {
            "message_id": f"msg_{name}",
            "role": role,
            "inbox_message_id": name if role == "user" else None,
            "created_at": 1,
        }
    )
    part = PartCreated(
        part_id=f"part_{name}",
        message_id=f"msg_{name}",
        part_type="text",
        payload={"text": text},
        created_at=1,
    )
    return [("t1", created), ("t1", part)]


def digest(text: str) -> str:
    return item_digest([{"type": "text", "text": text}], {})


def acknowledgement(name: str, reason: str = "completed", turn_id: str = "t1") -> RecordData:
    items = [Acknowledged(message_id=name, digest=digest(f"text of {name}"))]
    return InboxAcknowledged(reason=reason, turn_id=turn_id, items=items)


def end(turn_id: str = "t1") -> RecordData:
    return TurnCompleted(
        turn_id=turn_id,
        claimed_input_ids=[],
        turns_count=1,
        tool_calls_count=0,
        duration_ms=1,
        outcome="completed",
        input_disposition="acknowledged",
        completed_at=1,
    )


def abort() -> RecordData:
    return TurnAborted(
        turn_id="t1",
        claimed_input_ids=[],
        turns_count=1,
        tool_calls_count=0,
        duration_ms=1,
        outcome="lost",
        input_disposition="pending",
        cause="process_restart",
        aborted_at=1,
    )


class Live:
    def __init__(self, item: InboxItem) -> None:
        self.item = item


class Reader:
    """Stands for storage's reader."""

    def __init__(self, found: list[Record], waiting: list[InboxItem] | Exception) -> None:
        self.found, self.waiting = found, waiting

    def transcript(self, ref: SessionRef) -> Iterator[Record]:
        assert str(ref) == REF
        return iter(self.found)

    def inbox(self, ref: SessionRef) -> list[Live]:
        if isinstance(self.waiting, Exception):
            raise self.waiting
        return [Live(item) for item in self.waiting]


def item(name: str, text: str) -> InboxItem:
    return InboxItem(
        message_id=name,
        origin="user",
        content=[Text(type="text", text=text)],
        queued_at=1,
        digest="f" * 64,
        principal="p",
    )


def found(reader: Reader) -> Evidence:
    return evidence_of(reader, REF)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_evidence_is_what_the_texts_are_not_what_they_are_said_to_be() -> None:
    reader = Reader(
        records(message("a", "text of a"), [("t1", acknowledgement("a")), ("t1", end())]),
        [item("b", "text of b")],
    )
    evidence = found(reader)
    assert evidence.applied == [Input("a", digest("text of a"))]
    assert evidence.acknowledged == [Input("a", digest("text of a"))]
    assert evidence.waiting == [Input("b", digest("text of b"))]
    assert evidence.damage == ""


@pytest.mark.parametrize(
    "frames",
    [
        [[("t1", acknowledgement("a"))], [("t1", end())]],  # not in one frame
        [[("t1", acknowledgement("a")), ("t1", end("t2"))]],  # of another turn
        [[("t1", acknowledgement("a"))]],  # of none
        [[("t1", acknowledgement("a")), *message("x", "y", "assistant"), ("t1", end())]],
    ],
)
@pytest.mark.rule("INB-5")
def test_an_acknowledgement_counts_only_in_the_frame_of_its_turn_s_end(
    frames: list[list[tuple[str | None, RecordData]]],
) -> None:
    reader = Reader(records(*frames), [])
    evidence = found(reader)
    assert evidence.acknowledged == []


def test_a_recorded_discard_needs_no_end() -> None:
    reader = Reader(records([(None, acknowledgement("a", "cancelled"))]), [])
    evidence = found(reader)
    assert [one.message_id for one in evidence.discarded] == ["a"]


def test_an_abort_may_acknowledge() -> None:
    reader = Reader(records([("t1", acknowledgement("a", "aborted")), ("t1", abort())]), [])
    evidence = found(reader)
    assert [one.message_id for one in evidence.acknowledged] == ["a"]


def test_a_message_in_several_parts_is_one_text() -> None:
    first, part = message("a", "text ")
    second = message("a", "of a")[1]
    reader = Reader(records([first, part, second]), [])
    evidence = found(reader)
    assert evidence.applied == [Input("a", digest("text of a"))]


def test_an_input_applied_twice_stands_there_twice() -> None:
    other = message("a", "text of a")
    created = other[0][1]
    assert isinstance(created, MessageCreated)
    again = created.model_copy(update={"message_id": "msg_again"})
    reader = Reader(records(message("a", "text of a"), [("t1", again)]), [])
    evidence = found(reader)
    assert [one.message_id for one in evidence.applied] == ["a", "a"]


@pytest.mark.parametrize("error", [InboxCorrupt(reason="gap", line=3), NotFound()])
def test_what_cannot_be_read_says_so(error: Exception) -> None:
    reader = Reader(records(message("a", "text of a")), error)
    evidence = found(reader)
    assert evidence.damage
    assert len(evidence.applied) == 1


def test_a_line_is_json(tmp_path: Path) -> None:
    path = tmp_path / "o.jsonl"
    oracle = OracleFile(path)
    oracle.write(REF, "a", "d", 5)
    oracle.close()
    assert json.loads(path.read_text()) == {
        "session": REF,
        "n": 1,
        "message_id": "a",
        "digest": "d",
        "at": 5,
    }
