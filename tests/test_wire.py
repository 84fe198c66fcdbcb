import json
import math
import pickle
import random
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from callboard import messages
from callboard.errors import (
    CallboardError,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    ProtocolUnsupported,
)
from callboard.limits import (
    BUS_MESSAGE_BYTES_MAX,
    CLIENT_MESSAGE_BYTES_MAX,
    FREE_DEPTH_MAX,
    INT_ABS_MAX,
    MESSAGE_ID_CHARS_MAX,
    MESSAGE_ITEMS_MAX,
    PROTOCOL,
    TURN_DEADLINE_MS_MAX,
)
from callboard.wire import (
    Header,
    Unframer,
    decode_body,
    decode_door,
    decode_header,
    decode_trusted,
    door_frame,
    encode_body,
    encode_header,
    error_body,
    validate_body,
)

SEND: dict[str, object] = {
    "session": "demo-" + "0" * 32 + "/s1",
    "message_id": "m1",
    "content": [{"type": "text", "text": "hello"}],
}
WATCH: dict[str, object] = {"session": SEND["session"], "from_seq": 1}
NONE: list[object] = []
ENVELOPE: dict[str, object] = {"v": PROTOCOL, "kind": "send", "id": "r1", "body": SEND}

texts = st.text(max_size=30)  # Hypothesis makes no surrogates
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-INT_ABS_MAX, INT_ABS_MAX)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
    | st.binary(max_size=30)
)
values: st.SearchStrategy[object] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(texts, inner, max_size=6),
    max_leaves=40,
)
headers = st.builds(
    Header,
    kind=st.text(min_size=1, max_size=MESSAGE_ID_CHARS_MAX),
    id=texts,
    cid=texts,
    token=texts,
    deadline=st.integers(0, TURN_DEADLINE_MS_MAX),
)


def packed(value: object) -> bytes:
    return msgpack.packb(value)


def door(**changes: object) -> bytes:
    return packed(ENVELOPE | changes)


def with_body(body: bytes) -> bytes:
    """Put raw bytes in the place of a good envelope's body."""
    head = packed({k: v for k, v in ENVELOPE.items() if k != "body"})
    return bytes([head[0] + 1]) + head[1:] + packed("body") + body


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


def reason(decode: Callable[[], object]) -> object:
    with pytest.raises(InvalidRequest) as refused:
        decode()
    return refused.value.carried["reason"]


def through_door(payload: bytes) -> messages.Body:
    header, body = decode_door(payload)
    return validate_body(header.kind, body)


# What goes out comes in


@given(headers)
def test_a_header_comes_back(header: Header) -> None:
    assert decode_header(encode_header(header)) == header


def test_a_default_is_left_out_and_a_token_can_be_put_in() -> None:
    assert msgpack.unpackb(encode_header(Header("ok"))) == {"v": PROTOCOL, "kind": "ok"}
    assert decode_header(encode_header(Header("ok", token="a"), "b")).token == "b"


@given(st.dictionaries(texts, values, max_size=6), texts)
def test_a_body_comes_back(metadata: dict[str, object], text: str) -> None:
    part = messages.Text(type="text", text=text)
    body = messages.Send(
        session="ab/c", message_id="m", content=[part], metadata=metadata, busy_mode="queue"
    )
    assert decode_body("send", encode_body(body)) == body


@given(headers, st.dictionaries(texts, values, max_size=6))
def test_a_door_frame_comes_back_with_its_body_spliced_in(
    header: Header, body: dict[str, object]
) -> None:
    frame = door_frame(header, packed(body))
    assert struct.unpack_from("<I", frame)[0] == len(frame) - 4
    assert decode_door(frame[4:]) == (header, body)


def test_every_kind_of_message_is_found_by_its_kind() -> None:
    for kind, model in messages.BODIES.items():
        assert model.kind == kind
        if not model.model_fields:
            assert decode_body(kind, encode_body(model())) == model()


def test_an_error_says_its_code_and_what_it_carries_and_no_more() -> None:
    body = error_body(Overloaded("never sent", resource="connections", limit=256))
    assert msgpack.unpackb(body) == {"code": "overloaded", "resource": "connections", "limit": 256}
    refusal = decode_body("error", body)
    assert isinstance(refusal, messages.Refusal)
    assert refusal.code == "overloaded"


# The client door's rows of reliability section 9


def artifact_part(artifact: dict[str, object]) -> dict[str, object]:
    return {"type": "text", "text": "x", "prompt_artifact": artifact}


DOOR_ROWS: dict[str, tuple[bytes, str]] = {
    "unknown kind": (door(kind="nope"), "kind"),
    "unknown field": (door(body=SEND | {"nope": 1}), "field"),
    "unknown field of the envelope": (door(nope=1), "field"),
    "missing field": (door(body={"session": "abc"}), "field"),
    "no kind": (packed({"v": PROTOCOL, "body": {}}), "field"),
    "no body": (packed({"v": PROTOCOL, "kind": "status"}), "field"),
    "no version": (packed({"kind": "status", "body": {}}), "field"),
    "true where int": (door(kind="watch", body=WATCH | {"from_seq": True}), "type"),
    "1.0 where int": (door(kind="watch", body=WATCH | {"from_seq": 1.0}), "type"),
    "1 where str": (door(body=SEND | {"message_id": 1}), "type"),
    "true as version": (door(v=True), "type"),
    "1.0 as version": (door(v=1.0), "type"),
    "a number as kind": (door(kind=1), "type"),
    "a list as body": (door(body=NONE), "type"),
    "a number as message": (packed(5), "type"),
    "too deep": (with_body(packed(SEND | {"metadata": {"a": nested(FREE_DEPTH_MAX)}})), "too_deep"),
    "a part's artifact too deep": (
        with_body(packed(SEND | {"content": [artifact_part({"a": nested(FREE_DEPTH_MAX)})]})),
        "too_deep",
    ),
    "bytes as key in a part's artifact": (
        with_body(packed(SEND | {"content": [artifact_part({"a": {b"k": 1}})]})),
        "malformed",
    ),
    "depth 100,000": (b"\x91" * 100_000 + b"\x01", "too_deep"),
    "array that claims 4 G items": (with_body(b"\xdd\xff\xff\xff\xff"), "malformed"),
    "map that claims 4 G items": (b"\xdf\xff\xff\xff\xff", "malformed"),
    "text that claims 4 GB": (with_body(b"\xdb\xff\xff\xff\xff"), "malformed"),
    "bytes that claim 4 GB": (with_body(b"\xc6\xff\xff\xff\xff"), "malformed"),
    "one item too many": (packed([None] * (MESSAGE_ITEMS_MAX + 1)), "malformed"),
    "too many items in total": (packed([[0] * 255] * 258), "malformed"),
    "trailing byte": (door() + b"\x00", "malformed"),
    "cut": (door()[:-1], "malformed"),
    "cut in a number": (b"\x81\xa1a\xcf\x00", "malformed"),
    "empty": (b"", "malformed"),
    "unused first byte": (b"\xc1", "malformed"),
    "ext type": (with_body(packed(msgpack.ExtType(5, b"x"))), "malformed"),
    "empty ext type": (with_body(b"\xc7\x00\x05"), "malformed"),
    "timestamp": (with_body(packed(msgpack.Timestamp(1))), "malformed"),
    "number as key": (with_body(b"\x81\x01\x01"), "malformed"),
    "bytes as key": (with_body(packed(SEND | {"metadata": {b"a": 1}})), "type"),
    "bytes as key of a message": (with_body(b"\x81\xc4\x01a\x01"), "field"),
    "list as key": (with_body(b"\x81\x91\x01\x01"), "malformed"),
    "equal keys": (with_body(b"\x82\xa1a\x01\xa1a\x02"), "duplicate_key"),
    "equal keys of the envelope": (b"\x82\xa1v\x01\xa1v\x01", "duplicate_key"),
    "NaN": (door(body=SEND | {"metadata": {"a": math.nan}}), "not_finite"),
    "infinity": (door(body=SEND | {"metadata": {"a": -math.inf}}), "not_finite"),
    "short NaN": (with_body(b"\xca\x7f\xc0\x00\x00"), "not_finite"),
    "2^53": (door(body=SEND | {"metadata": {"a": 2**53}}), "int_range"),
    "-2^53": (door(body=SEND | {"metadata": {"a": -(2**53)}}), "int_range"),
    "2^64 - 1": (door(body=SEND | {"metadata": {"a": 2**64 - 1}}), "int_range"),
    "invalid UTF-8": (with_body(b"\x81\xa1a\xa1\xff"), "encoding"),
    "surrogate": (with_body(b"\x81\xa1a\xa3\xed\xa0\x80"), "encoding"),
    "overlong": (with_body(b"\x81\xa1a\xa2\xc0\xaf"), "encoding"),
    "invalid UTF-8 in a key": (with_body(b"\x81\xa1\xff\x01"), "encoding"),
    "a pickle": (pickle.dumps({"v": 1}), "malformed"),
    "a JSON text": (json.dumps(ENVELOPE).encode(), "malformed"),
    "64 KiB of noise": (random.Random(1).randbytes(65_536), "malformed"),
    "an id of 129 characters": (door(id="x" * (MESSAGE_ID_CHARS_MAX + 1)), "too_long"),
    "empty content": (door(body=SEND | {"content": NONE}), "empty"),
    "unknown type of part": (door(body=SEND | {"content": [{"type": "x", "text": ""}]}), "unknown"),
    "empty message id": (door(body=SEND | {"message_id": ""}), "empty"),
    "message id of 129": (door(body=SEND | {"message_id": "x" * 129}), "too_long"),
    "below a range": (door(kind="watch", body=WATCH | {"from_seq": 0}), "out_of_range"),
    "not the pattern": (
        door(
            kind="create_session",
            body={"key": "0", "workspace": "/", "session_id": "s", "agent": "a"},
        ),
        "format",
    ),
}


@pytest.mark.rule("FLT-54", "FLT-56")
@pytest.mark.parametrize("row", DOOR_ROWS)
def test_a_row_of_bad_input_has_its_exact_reason(row: str) -> None:
    payload, expected = DOOR_ROWS[row]
    assert reason(lambda: through_door(payload)) == expected


@pytest.mark.rule("FLT-56")
@pytest.mark.parametrize(
    ("carried", "expected"),
    [({"a": nested(FREE_DEPTH_MAX)}, "too_deep"), ({"a": {b"k": 1}}, "malformed")],
)
def test_what_a_refusal_carries_is_bounded_too(carried: dict[str, object], expected: str) -> None:
    """However small the message is, and whoever it comes from."""
    data = packed({"code": "not_found"} | carried)
    for decode in (decode_body, decode_trusted):
        assert reason(partial(decode, "error", data)) == expected
    allowed = packed({"code": "not_found", "a": nested(FREE_DEPTH_MAX - 1)})
    assert decode_body("error", allowed) == decode_trusted("error", allowed)


@pytest.mark.rule("FLT-56")
def test_the_limits_themselves_are_accepted() -> None:
    deepest = SEND | {"metadata": {"a": nested(FREE_DEPTH_MAX - 1)}}
    numbers = SEND | {"metadata": {"a": INT_ABS_MAX, "b": -INT_ABS_MAX, "c": 1.5}}
    many = SEND | {"metadata": {"a": [0] * (MESSAGE_ITEMS_MAX - 20)}}
    for body in (deepest, numbers, many):
        decoded = through_door(door(body=body))
        assert isinstance(decoded, messages.Send)
        assert decoded.metadata == body["metadata"]


@pytest.mark.parametrize("deadline", [0, -1, 10**18, TURN_DEADLINE_MS_MAX + 1, -(10**18)])
def test_a_deadline_out_of_range_is_told_by_its_name(deadline: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode_door(door(deadline=deadline))
    assert refused.value.carried == {"field": "deadline", "reason": "deadline"}
    with pytest.raises(InvalidRequest) as refused:
        decode_header(packed({"v": PROTOCOL, "kind": "ok", "deadline": deadline}))
    assert refused.value.carried == {"field": "deadline", "reason": "deadline"}


@pytest.mark.parametrize("deadline", [True, 1.0, "1", None])
def test_a_deadline_of_another_kind(deadline: object) -> None:
    assert reason(lambda: decode_door(door(deadline=deadline))) == "type"


def test_a_good_deadline_beside_a_bad_integer_is_not_blamed() -> None:
    body = SEND | {"metadata": {"a": 2**60}}
    assert reason(lambda: decode_door(door(deadline=5, body=body))) == "int_range"


@pytest.mark.parametrize("version", [0, 2, 99, -1])
def test_another_version_is_refused_whatever_else_there_is(version: int) -> None:
    for payload in (door(v=version), packed({"v": version, "new": 1})):
        with pytest.raises(ProtocolUnsupported) as refused:
            decode_door(payload)
        assert refused.value.carried == {"min": PROTOCOL, "max": PROTOCOL}
    with pytest.raises(ProtocolUnsupported):
        decode_header(packed({"v": version, "kind": "ok"}))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (SEND | {"nope": 1}, "nope"),
        (SEND | {"../../etc": 1}, "body"),
        (SEND | {"x" * 129: 1}, "body"),
        ({"session": "abc", "content": SEND["content"]}, "message_id"),
        (SEND | {"content": [{"type": "text", "text": 5}]}, "content"),
    ],
)
def test_the_field_is_named_unless_the_name_itself_is_foreign(
    body: Mapping[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate_body("send", body)
    assert refused.value.carried["field"] == field


def test_very_many_wrong_values_are_told_as_one() -> None:
    body = {"key": "0" * 32, "workspace": "/", "session_id": "s", "agent": "a"}
    settings = {str(n): n for n in range(60_000)}
    assert reason(lambda: validate_body("create_session", body | {"settings": settings})) == "type"


# Sizes


@pytest.mark.rule("FLT-56")
def test_size_comes_before_everything() -> None:
    noise = bytes(BUS_MESSAGE_BYTES_MAX + 1)
    calls: list[Callable[[], object]] = [
        lambda: decode_header(noise),
        lambda: decode_body("send", noise),
        lambda: decode_door(noise[: CLIENT_MESSAGE_BYTES_MAX + 1]),
        lambda: encode_body(messages.Send.model_validate(SEND | {"metadata": {"a": noise}})),
        lambda: door_frame(Header("ok"), noise),
    ]
    names: list[object] = []
    for call in calls:
        with pytest.raises(PayloadTooLarge) as refused:
            call()
        names.append(refused.value.carried["limit"])
    assert names == [
        "BUS_MESSAGE_BYTES_MAX",
        "BUS_MESSAGE_BYTES_MAX",
        "CLIENT_MESSAGE_BYTES_MAX",
        "BUS_MESSAGE_BYTES_MAX",
        "CLIENT_MESSAGE_BYTES_MAX",
    ]


@pytest.mark.parametrize("metadata", [{"a": "\ud800"}, {"a": 2**70}, {"a": nested(5_000)}])
def test_what_cannot_be_encoded_is_refused_in_type_too(metadata: dict[str, object]) -> None:
    body = messages.Send.model_construct(
        session="abc", message_id="m", content=[], metadata=metadata
    )
    assert reason(lambda: encode_body(body)) in ("encoding", "int_range", "too_deep")


@pytest.mark.rule("FLT-54")
@pytest.mark.parametrize(
    "payload",
    [
        b"\xdc\xff\xff" * 1_000,  # a thousand lists that claim 65,535 items each, one in another
        b"\x81\xa1a" + b"\xdd\x00\x00\xff\xff" * 60 + bytes(CLIENT_MESSAGE_BYTES_MAX // 2),
        b"\x90" * (CLIENT_MESSAGE_BYTES_MAX // 2),
        packed({str(n): [n] for n in range(MESSAGE_ITEMS_MAX // 2)} | {"v": PROTOCOL}),
    ],
    ids=["claims", "claims in a large message", "small lists", "largest legal"],
)
def test_no_message_makes_the_decoder_take_more_than_32_mib(payload: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(CallboardError):
        through_door(payload)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20


# Nothing but typed refusals


GOOD = [door(), door(kind="watch", body=WATCH), packed(SEND), encode_header(Header("ok", "1"))]


def mutated(rng: random.Random) -> bytes:
    data = bytearray(rng.choice([*GOOD, *(row for row, _ in DOOR_ROWS.values())])[:400])
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                data[at:at] = rng.randbytes(rng.randrange(1, 4))
            case 2:
                del data[at : at + rng.randrange(1, 9)]
            case _:
                data[at:at] = rng.choice(GOOD)[rng.randrange(40) :]
    return bytes(data)


def only_typed_refusals(data: bytes) -> None:
    for decode in (through_door, decode_header, partial(decode_body, "send")):
        try:
            decode(data)
        except CallboardError as refused:
            refused.to_wire()


@pytest.mark.rule("FLT-54")
@pytest.mark.parametrize("seed", range(8))
def test_mutated_messages_are_refused_in_type(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        only_typed_refusals(mutated(rng))


@pytest.mark.rule("FLT-54")
@given(st.binary(max_size=300))
@example(b"\x81\xa1v\xc7\x00\xff")
def test_bytes_are_refused_in_type(data: bytes) -> None:
    only_typed_refusals(data)


@given(values)
def test_any_value_is_refused_in_type(value: object) -> None:
    only_typed_refusals(packed(value))
    only_typed_refusals(packed({"v": PROTOCOL, "kind": "send", "body": value}))


@given(st.sampled_from(sorted(messages.BODIES)), st.dictionaries(texts, values, max_size=6))
def test_any_body_of_any_kind_is_refused_in_type(kind: str, body: dict[str, object]) -> None:
    only_typed_refusals(packed({"v": PROTOCOL, "kind": kind, "body": body}))


# The door's framing


@given(st.lists(st.binary(max_size=50), max_size=10), st.data())
def test_messages_come_whole_however_they_are_cut(whole: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(struct.pack("<I", len(message)) + message for message in whole)
    unframer, found = Unframer(50), list[bytes]()
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += unframer.feed(stream[:size])
        stream = stream[size:]
    assert found == whole
    assert unframer.pending == 0


def test_what_is_not_whole_yet_is_pending() -> None:
    unframer = Unframer(10)
    assert unframer.feed(b"\x03\x00\x00\x00ab") == []
    assert unframer.pending == 6
    assert unframer.feed(b"c\x01\x00") == [b"abc"]
    assert unframer.pending == 2


@pytest.mark.rule("FLT-56")
@pytest.mark.parametrize("size", [CLIENT_MESSAGE_BYTES_MAX + 1, 2**32 - 1])
def test_a_length_above_the_limit_is_refused_before_a_byte_behind_it(size: int) -> None:
    unframer = Unframer(CLIENT_MESSAGE_BYTES_MAX)
    first = b"\x02\x00\x00\x00ab"
    with pytest.raises(PayloadTooLarge) as refused:
        unframer.feed(first + struct.pack("<I", size) + b"x" * 1_000)
    assert refused.value.carried["limit"] == "CLIENT_MESSAGE_BYTES_MAX"
    assert unframer.whole == [b"ab"]
    assert unframer.pending == 4
    with pytest.raises(PayloadTooLarge):
        unframer.feed(b"more")
    assert unframer.pending == 4


def test_the_largest_message_passes() -> None:
    unframer = Unframer(CLIENT_MESSAGE_BYTES_MAX)
    frame = struct.pack("<I", CLIENT_MESSAGE_BYTES_MAX) + bytes(CLIENT_MESSAGE_BYTES_MAX)
    assert unframer.feed(frame[:70_000]) == []
    assert [len(message) for message in unframer.feed(frame[70_000:])] == [CLIENT_MESSAGE_BYTES_MAX]
