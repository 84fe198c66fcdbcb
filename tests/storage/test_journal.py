"""Which segments count, and what of them: the start's decision table over made-up bytes."""

from __future__ import annotations

import pytest

from callboard.errors import FormatUnsupported, HomeUnsafe, JournalDamaged
from callboard.storage.frames import (
    Checkpoint,
    CleanStop,
    ClosingMark,
    Commit,
    Epochs,
    Part,
    Payload,
    SegmentHeader,
    encode,
    pack,
    scan,
)
from callboard.storage.journal import (
    Journal,
    commits,
    segment_name,
    segment_numbers,
    survey,
)

HOME = "h1"


class Segment:
    """A segment in the making."""

    def __init__(
        self,
        number: int,
        before: Segment | None = None,
        *,
        copied: int = 0,
        first: int = 1,
        home: str = HOME,
        at: int | None = None,
    ) -> None:
        self.number = number
        self.data = b""
        self.durable = 0
        size = len(before.data) if before else 0
        size = size if at is None else at
        crc = next((f.crc for f in scan(before.data).frames if f.end == size), 0) if before else 0
        previous = before.number if before else 0
        header = SegmentHeader(home, number, previous, size, crc, copied, first, Epochs(1, "p"))
        self.add(0, header)

    def add(self, commit: int, payload: Payload | None = None) -> Segment:
        part = Part(f"sessions/w/s{commit}/transcript.jsonl", "", 0, b"line\n")
        chosen = Commit((part,)) if payload is None else payload
        self.data += encode(commit, self.durable, pack(chosen))
        return self

    def sync(self) -> Segment:
        self.durable = len(self.data)
        return self


def look(*segments: Segment | tuple[int, bytes]) -> Journal:
    found = dict((one.number, one.data) if isinstance(one, Segment) else one for one in segments)
    return survey(found, found.__getitem__, HOME)


def numbers(journal: Journal, *segments: Segment) -> list[int]:
    found = {one.number: one.data for one in segments}
    return [commit for commit, _ in commits(journal, found.__getitem__)]


def test_names() -> None:
    assert segment_name(7) == "0007.log"
    assert segment_name(12_345) == "12345.log"
    names = ["0002.log", "reserve", "0001.log", "0000.log", "x.log", "10000.log", "1.log"]
    assert segment_numbers(names) == [1, 2, 10_000]


@pytest.mark.rule("FLT-6")
def test_an_empty_folder_is_a_new_journal() -> None:
    assert look() == Journal()


@pytest.mark.rule("FLT-6")
def test_segments_follow_each_other() -> None:
    one = Segment(1).add(1).add(2).sync()
    two = Segment(2, one).add(3).sync().add(3, ClosingMark())
    found = look(one, two)
    assert [segment.number for segment in found.segments] == [1, 2]
    assert (found.last_commit, found.highest_commit) == (3, 3)
    assert numbers(found, one, two) == [1, 2, 3]
    assert found.epochs == Epochs(1, "p")
    assert found.clean is None


@pytest.mark.rule("FLT-6")
@pytest.mark.parametrize("data", [b"", bytes(4_096), b"cbj1"])
def test_a_last_segment_without_a_header_is_dropped(data: bytes) -> None:
    one = Segment(1).add(1).sync()
    found = look(one, (2, data))
    assert found.dropped == (2,)
    assert [segment.number for segment in found.segments] == [1]


@pytest.mark.rule("FLT-6")
def test_the_first_start_of_a_home_may_stop_anywhere() -> None:
    for cut in range(len(Segment(1).data)):
        assert look((1, Segment(1).data[:cut])).dropped == (1,)


@pytest.mark.rule("FLT-6")
def test_a_segment_counts_with_all_it_copied_and_not_with_less() -> None:
    one = Segment(1).add(1).sync().add(2).add(3)
    two = Segment(2, one, copied=2, at=one.durable)
    whole = Segment(2, one, copied=2, at=one.durable).add(2).add(3)
    for frames in range(2):
        part = Segment(2, one, copied=2, at=one.durable)
        for commit in range(2, 2 + frames):
            part.add(commit)
        found = look(one, part)
        assert found.dropped == (2,)
        assert numbers(found, one) == [1, 2, 3]
    found = look(one, whole)
    assert [segment.number for segment in found.segments] == [1, 2]
    assert numbers(found, one, whole) == [1, 2, 3]
    assert two.data == whole.data[: len(two.data)]


@pytest.mark.rule("FLT-6")
def test_what_stands_behind_previous_bytes_does_not_exist() -> None:
    one = Segment(1).add(1).sync()
    end = one.durable
    one.add(2).add(3)
    two = Segment(2, one, at=end).add(4).sync().add(4, ClosingMark())
    found = look(one, two)
    assert numbers(found, one, two) == [1, 4]
    assert found.highest_commit == 4


@pytest.mark.rule("FLT-7")
def test_a_bad_frame_below_previous_bytes_is_damage() -> None:
    one = Segment(1).add(1).add(2).sync()
    two = Segment(2, one).add(3).sync()
    broken = bytearray(one.data)
    broken[-20] ^= 1
    with pytest.raises(JournalDamaged) as caught:
        look((1, bytes(broken)), two)
    assert caught.value.carried["segment"] == 1
    with pytest.raises(JournalDamaged):
        look((1, one.data[:-8]), two)


@pytest.mark.rule("FLT-6", "FLT-7")
def test_another_predecessor_than_the_header_says_is_damage() -> None:
    one, other = Segment(1).add(1).sync(), Segment(1).add(9).sync()
    two = Segment(2, one).add(3).sync()
    assert len(one.data) == len(other.data)
    with pytest.raises(JournalDamaged):
        look(other, two)


@pytest.mark.rule("FLT-7", "F7")
def test_damage_names_segment_and_offset() -> None:
    one, offset = Segment(1), 0
    for commit in range(1, 41):
        if commit == 10:
            offset = len(one.data)
        one.add(commit).sync()
    data = bytearray(one.data)
    data[offset + 33] ^= 8
    with pytest.raises(JournalDamaged) as caught:
        look((1, bytes(data)))
    assert caught.value.carried == {"segment": 1, "offset": offset}


@pytest.mark.rule("FLT-6")
def test_missing_segments() -> None:
    one = Segment(1).add(1).sync()
    two = Segment(2, one).add(2).sync()
    three = Segment(3, two).add(3).sync()
    four = Segment(4, three).add(4).sync()
    for left in ([two, four], [one, two, four], [four], [three, four], [one, three, four]):
        with pytest.raises(JournalDamaged):
            look(*left)


@pytest.mark.rule("FLT-10")
def test_a_checkpoint_lets_the_segments_before_it_go() -> None:
    one = Segment(1).add(1).sync()
    two = Segment(2, one).add(2).sync().add(2, Checkpoint(1, 2, (), (), Epochs(1, "p"))).sync()
    three = Segment(3, two, first=2).add(3).sync()
    found = look(two, three)
    assert found.through == 1
    assert numbers(found, two, three) == [2, 3]
    assert numbers(look(one, two, three), one, two, three) == [2, 3]
    with pytest.raises(JournalDamaged):
        look(three)


@pytest.mark.rule("FLT-6", "FLT-13")
def test_a_segment_that_nobody_saw_on_the_disk_is_passed_over() -> None:
    """Its successor copied all of it and names its predecessor (ADR 0011)."""
    one = Segment(1).add(1).sync()
    three = Segment(3, one, copied=1).add(2).sync().add(3)
    for two in (b"", bytes(100), Segment(2, one).add(2).data):
        found = look(one, (2, two), three)
        assert [segment.number for segment in found.segments] == [1, 3]
        assert found.dropped == (2,)
    assert [segment.number for segment in look(one, three).segments] == [1, 3]


@pytest.mark.rule("FLT-8")
def test_a_clean_stop_is_the_very_last_thing() -> None:
    one = Segment(1).add(1).sync().add(1, CleanStop(Epochs(1, "p")))
    assert look(one).clean is not None
    assert look((1, one.data + bytes(8))).clean is None
    assert look((1, one.data[:-8])).clean is None
    assert look(one.sync().add(2)).clean is None


@pytest.mark.rule("FLT-6")
def test_foreign_and_misnamed_segments() -> None:
    with pytest.raises(HomeUnsafe) as caught:
        look(Segment(1, home="other"))
    assert caught.value.carried == {"what": "journal", "reason": "foreign"}
    with pytest.raises(JournalDamaged):
        look((2, Segment(1).data))
    one = Segment(1).add(1).sync()
    with pytest.raises(JournalDamaged):
        look(one, (2, Segment(3, one).data))
    other = SegmentHeader(HOME, 1, 0, 0, 0, 0, 1, Epochs(), format=2)
    with pytest.raises(FormatUnsupported):
        look((1, encode(0, 0, pack(other))))


@pytest.mark.rule("FLT-6")
def test_a_first_frame_that_is_no_header_is_damage() -> None:
    with pytest.raises(JournalDamaged):
        look((1, encode(1, 0, pack(Commit()))))


@pytest.mark.rule("FLT-14")
def test_frames_of_a_dropped_segment_keep_their_numbers_taken() -> None:
    one = Segment(1).add(1).sync()
    two = Segment(2, one, copied=3, at=one.durable).add(7)
    assert look(one, two).highest_commit == 7
