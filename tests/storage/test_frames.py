"""The journal's codec: what is whole, what is torn, what is damage."""

from __future__ import annotations

import random
import struct
import zlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.storage.frames import (
    OVERHEAD,
    Checkpoint,
    CleanStop,
    ClosingMark,
    Commit,
    Damaged,
    Epochs,
    FileMark,
    Part,
    Payload,
    PayloadDamage,
    SegmentHeader,
    encode,
    pack,
    scan,
    size_of,
    unpack,
)

U64 = st.integers(0, (1 << 64) - 1)
EPOCHS = st.builds(Epochs, U64, st.text(max_size=8), U64, st.text(max_size=8))
PAYLOADS: st.SearchStrategy[Payload] = st.one_of(
    st.builds(
        Commit,
        st.lists(
            st.builds(Part, st.text(max_size=20), st.text(max_size=8), U64, st.binary(max_size=99)),
            max_size=4,
        ).map(tuple),
        st.lists(st.tuples(st.text(max_size=9), st.binary(max_size=50)), max_size=3).map(tuple),
        st.none() | EPOCHS,
    ),
    st.builds(SegmentHeader, st.text(max_size=9), U64, U64, U64, U64, U64, U64, EPOCHS, format=U64),
    st.builds(
        Checkpoint,
        U64,
        U64,
        st.lists(
            st.builds(FileMark, st.text(max_size=9), st.just(""), U64, U64, st.text(max_size=9)),
            max_size=3,
        ).map(tuple),
        st.lists(st.builds(Damaged, st.text(max_size=9), st.just("truncated"), U64)).map(tuple),
        EPOCHS,
    ),
    st.builds(CleanStop, EPOCHS),
    st.just(ClosingMark()),
)


@pytest.mark.rule("FLT-1")
@given(PAYLOADS)
def test_a_payload_survives(payload: Payload) -> None:
    assert unpack(pack(payload)) == payload


@pytest.mark.rule("FLT-1")
@given(U64, U64, st.binary(max_size=300))
def test_a_frame_is_laid_out_as_the_page_says(commit: int, durable: int, payload: bytes) -> None:
    data = encode(commit, durable, payload)
    magic, length, crc, zero = struct.unpack_from("<4sIII", data)
    assert (magic, length, zero) == (b"cbj1", 16 + len(payload), 0)
    body = data[16 : 16 + length]
    assert crc == zlib.crc32(body)
    assert body == struct.pack("<QQ", commit, durable) + payload
    assert len(data) % 8 == 0 == sum(data[16 + length :])
    assert len(data) == size_of(payload)


@pytest.mark.rule("FLT-1")
@pytest.mark.parametrize("junk", [b"\x01", b"\x81\xa1k\xa1x", b"\x81\xa1k\xa6commit\x00", b"\xc1"])
def test_a_payload_of_nobody_is_damage(junk: bytes) -> None:
    with pytest.raises(PayloadDamage):
        unpack(junk)


@pytest.mark.rule("FLT-1")
def test_a_payload_with_wrong_shapes_is_damage() -> None:
    for fields in ({"k": "commit", "p": [[1]]}, {"k": "checkpoint"}, {"k": "segment_header"}, [1]):
        with pytest.raises(PayloadDamage):
            unpack(msgpack.packb(fields))


def batches(count: int, per_batch: int, rng: random.Random) -> list[list[bytes]]:
    """Make batches as a writer does: each frame carries what was synced before its batch."""
    found: list[list[bytes]] = []
    durable, commit = 0, 0
    for _ in range(count):
        batch: list[bytes] = []
        for _ in range(per_batch):
            commit += 1
            batch.append(encode(commit, durable, rng.randbytes(rng.randint(1, 400))))
        durable += sum(map(len, batch))
        found.append(batch)
    return found


@pytest.mark.rule("FLT-1", "DUR-1", "F5", "R108")
def test_a_cut_at_any_byte_keeps_every_earlier_frame_and_nothing_of_the_cut_one() -> None:
    frames = [frame for batch in batches(3, 3, random.Random(1)) for frame in batch]
    data = b"".join(frames)
    ends = [sum(map(len, frames[:n])) for n in range(len(frames) + 1)]
    for cut in range(len(data) + 1):
        found = scan(data[:cut])
        whole = max(n for n, end in enumerate(ends) if end <= cut)
        assert [frame.commit for frame in found.frames] == list(range(1, whole + 1))
        assert found.end == ends[whole]
        assert not found.damaged


@pytest.mark.rule("FLT-7", "F6")
@given(st.data())
def test_what_a_power_cut_leaves_of_an_unsynced_batch_is_torn(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 1 << 32)))
    made = batches(3, 5, rng)
    synced = b"".join(made[0] + made[1])
    last = bytearray(b"".join(made[2]))
    for at in range(0, len(last), 512):  # sectors that the cut lost read as zeros
        if rng.random() < 0.5:
            last[at : at + 512] = bytes(len(last[at : at + 512]))
    if rng.random() < 0.3:
        del last[rng.randrange(len(last)) :]
    found = scan(synced + bytes(last))
    assert not found.damaged
    assert [frame.commit for frame in found.frames][:10] == list(range(1, 11))


@pytest.mark.rule("FLT-7", "F7")
def test_a_flip_below_a_watermark_is_damage_at_its_frame() -> None:
    frames = [frame for batch in batches(10, 4, random.Random(3)) for frame in batch]
    data = bytearray(b"".join(frames))
    offset = sum(map(len, frames[:9]))
    data[offset + 40] ^= 1
    found = scan(bytes(data))
    assert found.damaged
    assert found.end == offset


@pytest.mark.rule("FLT-7", "FLT-8")
def test_no_single_flip_goes_unnoticed_and_none_is_cut_behind_a_closing_mark() -> None:
    """The idea of tests/faults watermark.py: invert one bit anywhere, in a log that fell idle."""
    rng = random.Random(5)
    good = b"".join(frame for batch in batches(6, 4, rng) for frame in batch)
    whole = good + encode(24, len(good), b"")
    for bit in rng.sample(range(len(good) * 8), 2_000):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        assert scan(bytes(data)).damaged, bit


@pytest.mark.rule("FLT-8")
def test_without_a_mark_a_flip_in_the_last_batch_looks_torn() -> None:
    made = batches(2, 2, random.Random(7))
    data = bytearray(b"".join(made[0] + made[1]))
    data[len(b"".join(made[0])) + 30] ^= 4
    assert not scan(bytes(data)).damaged


@pytest.mark.rule("FLT-1")
@pytest.mark.parametrize("tail", [b"", bytes(8), bytes(4096), b"cbj1", b"cbj1" + bytes(60)])
def test_nothing_and_a_length_of_zero_end_a_segment(tail: bytes) -> None:
    data = encode(1, 0, b"a") + encode(2, 0, b"b")
    found = scan(data + tail)
    assert len(found.frames) == 2
    assert not found.damaged
    assert found.size - found.end == len(tail)


@pytest.mark.rule("FLT-1", "FLT-7")
def test_text_inside_a_payload_cannot_imitate_a_frame() -> None:
    inner = encode(99, 0, b"forged")
    text = inner.replace(b"\0", b"\\u0000")  # as JSON keeps a NUL
    outer = bytearray(encode(1, 0, bytes(4) + text + bytes(4)))
    outer[20] ^= 1
    assert scan(bytes(outer)).behind == ()


@pytest.mark.rule("FLT-14")
def test_the_highest_commit_counts_dropped_frames_too() -> None:
    first, second = encode(5, 0, b"x" * 100), encode(6, 0, b"y")
    data = bytearray(first + second)
    data[30] ^= 1
    assert scan(bytes(data)).highest == 6


@given(st.binary(max_size=400), st.integers(0, 3))
def test_random_bytes_never_crash_the_scan(junk: bytes, frames: int) -> None:
    data = b"".join(encode(n, 0, b"ok") for n in range(frames)) + junk
    assert len(scan(data).frames) >= frames


def test_the_overhead_is_that_of_a_closing_mark() -> None:
    assert OVERHEAD == len(encode(1, 1, b"")) == 32
