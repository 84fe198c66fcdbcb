"""Records and inbox lines: what is written is what is read, and nothing else passes."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.errors import FormatUnsupported, RecordInvalid
from callboard.ids import SessionRef, workspace_key
from callboard.records import (
    PAYLOADS,
    RECORDS,
    LineDamage,
    RecordData,
    canonical,
    check_data,
    compact,
    digest,
    first_chain,
    item_digest,
    link,
    read_op,
    read_record,
    split_chain,
    stamp_inbox_header,
    stamp_op,
    stamp_record,
    timestamp,
)
from tests.storage.readers.homes import Entry, created, item, message, part, put, remove, updated

REF = SessionRef(workspace_key("/u/my-app"), "s1")
FIRST = first_chain(str(REF))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
PLAIN = st.none() | st.booleans() | st.integers(-(1 << 53) + 1, (1 << 53) - 1) | TEXT
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)


def stamped(entry: Entry, *, epoch: int = 3, turn_id: str | None = None) -> tuple[bytes, str]:
    return stamp_record(
        REF,
        seq=2,
        record_id="0" * 32,
        commit=7,
        epoch=epoch,
        ts=timestamp(1),
        kind=entry[0],
        turn_id=turn_id,
        data=compact(entry[1]),
        before=FIRST,
    )


@pytest.mark.rule("REC-1", "FLT-57")
@given(TEXT, VALUES, st.none() | st.just("turn_01"))
def test_a_record_is_read_as_it_was_written(text: str, value: object, turn_id: str | None) -> None:
    put_in = [value, {text: value}]
    entry = part("p", "m", "tool_call", call_id="c", name="n", input=put_in, effect="keyed")
    line, chain = stamped(entry, turn_id=turn_id)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    record = read_record(line[:-1], FIRST, REF, 2)
    assert (record.seq, record.commit, record.epoch, record.id) == (2, 7, 3, "0" * 32)
    assert (record.type, record.turn_id, record.chain) == ("part_created", turn_id, chain)
    assert record.data.model_dump()["payload"]["input"] == put_in
    assert check_data(entry[0], compact(entry[1])) == record.data


@pytest.mark.rule("FLT-57")
@pytest.mark.parametrize("char", ["\u2028", "\u2029", "\u0085", "\v", "\f", "\x1c", "\x00", "\r"])
def test_what_ends_a_line_elsewhere_stays_inside_a_record(char: str) -> None:
    line, _ = stamped(part("p", "m", "text", text=f"a{char}b"))
    assert line.count(b"\n") == 1
    found = read_record(line[:-1], FIRST, REF, 2).data.model_dump()
    assert found["payload"] == {"text": f"a{char}b"}


@pytest.mark.rule("A106")
def test_there_is_one_envelope() -> None:
    line, chain = stamped(updated(title="x"), epoch=0)
    assert list(json.loads(line)) == [
        *("v", "seq", "id", "commit", "epoch", "ts", "workspace_key", "session_id"),
        *("type", "turn_id", "data", "chain"),
    ]
    head, written = split_chain(line[:-1])
    assert written == chain == link(FIRST, head)
    assert read_record(line[:-1], FIRST, REF, 2).epoch == 0


@pytest.mark.rule("FLT-1")
def test_every_bit_of_a_line_matters() -> None:
    line, _ = stamped(updated(title="needle"))
    passed: list[tuple[int, int]] = []
    for index in range(len(line) - 1):
        for bit in range(8):
            bad = bytearray(line[:-1])
            bad[index] ^= 1 << bit
            try:
                read_record(bytes(bad), FIRST, REF, 2)
            except LineDamage:
                continue
            passed.append((index, bit))
    assert passed == []


@pytest.mark.rule("FLT-1")
def test_a_chain_is_compared_as_text() -> None:
    line, chain = stamped(updated(title="x"))
    assert chain != chain.upper()
    upper = line[:-1].replace(chain.encode(), chain.upper().encode())
    with pytest.raises(LineDamage):
        read_record(upper, FIRST, REF, 2)


@pytest.mark.rule("REC-1")
@pytest.mark.parametrize(
    "text", [b"", b"null", b"5", b"[]", b"{}", b"\0" * 512, b"\xff", b'{"v":1']
)
def test_what_is_no_record_is_damage(text: bytes) -> None:
    chain = link(FIRST, text)
    for line in (text, text + b',"chain":"%b"}' % chain.encode()):
        with pytest.raises(LineDamage):
            read_record(line, FIRST, REF, 2)


def rechained(line: bytes, old: bytes, new: bytes) -> bytes:
    """Change a line and put the right chain behind it."""
    head, _ = split_chain(line[:-1])
    assert old in head
    head = head.replace(old, new, 1)
    return head + b',"chain":"%b"}' % link(FIRST, head).encode()


@pytest.mark.rule("REC-3")
@pytest.mark.parametrize(
    ("old", "new"), [(b'"v":1', b'"v":2'), (b'"type":"session_updated"', b'"type":"from_later"')]
)
def test_a_newer_version_or_type_is_not_damage(old: bytes, new: bytes) -> None:
    line, _ = stamped(updated(title="x"))
    with pytest.raises(FormatUnsupported):
        read_record(rechained(line, old, new), FIRST, REF, 2)


@pytest.mark.rule("REC-1")
@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (b'"session_id":"s1"', b'"session_id":"s2"', "identity_mismatch"),
        (b'"seq":2', b'"seq":3', "missing_records"),
        (b'"seq":2', b'"seq":1', "bad_line"),
        (b'"title":"x"', b'"title":5', "bad_line"),
        (b'"title":"x"', b'"colour":"x"', "bad_line"),
        (b'"title":"x"', rb'"title":"\ud800"', "bad_line"),
        (b'"epoch":3', b'"epoch":-1', "bad_line"),
        (b'"commit":7', b'"commit":true', "bad_line"),
        (b'"commit":7', b'"commit":7.0', "bad_line"),
    ],
)
def test_a_line_with_a_right_chain_may_still_be_wrong(old: bytes, new: bytes, code: str) -> None:
    line, _ = stamped(updated(title="x"))
    with pytest.raises(LineDamage) as damage:
        read_record(rechained(line, old, new), FIRST, REF, 2)
    assert damage.value.code == code


@pytest.mark.rule("REC-5", "A13")
def test_each_type_says_what_rewind_and_fork_do_with_it() -> None:
    assert len(RECORDS) == 10
    for name, model in RECORDS.items():
        assert model.type == name
        assert model.rewind in ("conversation", "durable", "marker")
        assert model.fork in ("copy", "strip", "drop", "replace")


@pytest.mark.rule("REC-5", "A13")
@pytest.mark.parametrize("missing", ["type", "rewind", "fork"])
def test_a_type_that_does_not_say_so_cannot_be_defined(missing: str) -> None:
    fields = {"type": "new", "rewind": "durable", "fork": "copy", "__module__": __name__}
    del fields[missing]
    with pytest.raises(TypeError, match=missing):
        type("New", (RecordData,), fields)


@pytest.mark.rule("A106")
def test_every_instant_of_the_data_is_an_integer() -> None:
    names = {
        (model.type, name): field.annotation
        for model in RECORDS.values()
        for name, field in model.model_fields.items()
        if name.endswith("_at")
    }
    assert len(names) >= 9
    for annotation in names.values():
        assert annotation in (int, int | None) or "int" in str(annotation)
    with pytest.raises(RecordInvalid):
        check_data("session_updated", b'{"updated_at":1.5}')


@pytest.mark.rule("A106")
@given(st.integers(0, 253_402_300_799_999_999))
def test_a_timestamp_has_six_digits_and_a_z(microseconds: int) -> None:
    text = timestamp(microseconds)
    assert len(text) == 27
    assert text[19] == "."
    assert text.endswith("Z")
    read = datetime.fromisoformat(text)
    since = read - datetime(1970, 1, 1, tzinfo=UTC)
    assert since.days * 86_400_000_000 + since.seconds * 1_000_000 + since.microseconds == (
        microseconds
    )


def test_timestamps_sort_as_instants_do() -> None:
    instants = [0, 1, 999_999, 1_000_000, 1_700_000_000_000_000, 253_402_300_799_999_999]
    assert sorted(map(timestamp, instants)) == list(map(timestamp, instants))


@pytest.mark.parametrize(
    ("kind", "data", "field"),
    [
        ("from_later", b"{}", "type"),
        ("session_updated", b"{}", "updated_at"),
        ("session_updated", b'{"updated_at":1,"colour":"x"}', "colour"),
        ("session_updated", b'{"updated_at":"1"}', "updated_at"),
        ("session_updated", b'{"updated_at":true}', "updated_at"),
        ("session_updated", b"[]", ""),
        ("session_updated", b"", ""),
    ],
)
def test_data_that_does_not_fit_its_type_is_refused(kind: str, data: bytes, field: str) -> None:
    with pytest.raises(RecordInvalid) as refused:
        check_data(kind, data)
    assert refused.value.carried == {"type": kind, "field": field}


@pytest.mark.parametrize("kind", list(PAYLOADS))
def test_a_payload_must_fit_its_part_type(kind: str) -> None:
    with pytest.raises(RecordInvalid):
        check_data("part_created", compact(part("p", "m", kind, colour="x")[1]))


def test_canonical_json_does_not_depend_on_the_order_of_keys() -> None:
    assert canonical({"b": 1, "a": "é"}) == '{"a":"é","b":1}'.encode()
    assert digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    with pytest.raises(ValueError, match="Out of range"):
        canonical(float("nan"))


def test_what_makes_two_inputs_equal() -> None:
    content: list[dict[str, object]] = [{"type": "text", "text": "hello"}]
    assert item_digest(content, {}) == item("m").digest
    others = [
        item_digest([{"type": "text", "text": "hello "}], {}),
        item_digest(content, {"a": 1}),
        item_digest(content, {}, {"type": "object"}),
    ]
    assert len({item_digest(content, {}), *others}) == 4


@pytest.mark.rule("INB-1")
@given(TEXT, st.sampled_from(["put", "replace"]))
def test_an_inbox_line_is_read_as_it_was_written(text: str, op: str) -> None:
    _, data = put("m1", text)
    header, before = stamp_inbox_header(REF, generation="g", next_n=1)
    assert json.loads(header)["next_n"] == 1
    line, chain = stamp_op(
        REF, n=1, commit=2, epoch=0, ts=timestamp(1), op=op, data=compact(data), before=before
    )
    assert line.count(b"\n") == 1
    found = read_op(line[:-1], before)
    assert (found.n, found.commit, found.op, found.message_id) == (1, 2, op, "m1")
    assert found.item == item("m1", text)
    assert found.chain == chain


@pytest.mark.rule("INB-1")
def test_removes_and_moves_are_read_as_they_were_written() -> None:
    for op, data, behind in (
        (*remove("m1"), None),
        ("move", {"message_id": "m1", "behind": "m2"}, "m2"),
        ("move", {"message_id": "m1", "behind": None}, None),
    ):
        line, _ = stamp_op(
            REF, n=9, commit=2, epoch=1, ts=timestamp(1), op=op, data=compact(data), before=FIRST
        )
        found = read_op(line[:-1], FIRST)
        assert (found.op, found.message_id, found.behind, found.item) == (op, "m1", behind, None)


def test_an_inbox_line_that_is_none_is_damage() -> None:
    line, _ = stamp_op(
        REF, n=1, commit=1, epoch=0, ts=timestamp(1), op="put", data=b'{"item":{}}', before=FIRST
    )
    with pytest.raises(LineDamage):
        read_op(line[:-1], FIRST)
    with pytest.raises(LineDamage):
        read_op(line[:-1], "0" * 64)


def test_the_examples_of_these_tests_are_records() -> None:
    for kind, data in (created(REF, "/u/my-app"), message("m1"), updated(title=None)):
        assert check_data(kind, compact(data)).type == kind
