"""From bytes to checked records: lines, gaps, torn ends, foreign lines, corrupt inboxes."""

import random
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.errors import FormatUnsupported, InboxCorrupt, SessionDamaged
from callboard.ids import SessionRef, workspace_key
from callboard.limits import (
    IDEMPOTENCY_KEYS_PER_SESSION_MAX,
    INBOX_BYTES_MAX,
    INBOX_FILE_BYTES_MAX,
    RECORD_BYTES_MAX,
)
from callboard.records import link, split_chain
from callboard.storage.lines import (
    Gap,
    Hole,
    Mark,
    Sound,
    check_transcript,
    read_inbox,
    split,
)
from tests.storage.readers.homes import Book, created, message, put, remove, updated

WORKSPACE = "/u/my-app"
REF = SessionRef(workspace_key(WORKSPACE), "s1")


def book(records: int = 6, session_id: str = "s1") -> Book:
    """A session whose creation and titles each had a commit of their own."""
    made = Book(SessionRef(REF.workspace_key, session_id), WORKSPACE)
    made.lines(1, [created(made.ref, WORKSPACE)])
    for n in range(2, records + 1):
        made.lines(n, [updated(title=f"title {n}")])
    return made


def check(data: bytes, *, as_of: int = 1 << 60, ref: SessionRef = REF) -> list[int | Gap]:
    """Sound records by their seq, and gaps."""
    found = check_transcript(split([data], RECORD_BYTES_MAX), ref, as_of=as_of)
    return [item.record.seq if isinstance(item, Sound) else item for item in found]


def lines_of(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


# --- lines ----------------------------------------------------------------------------------------


@pytest.mark.rule("FLT-57", "REC-1")
@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6), st.integers(1, 50))
def test_lines_do_not_depend_on_the_pieces(data: bytes, cuts: list[int], limit: int) -> None:
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    pieces = [data[a:b] for a, b in pairwise(places)]
    found = list(split(pieces, limit))
    assert found == list(split([data], limit))
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert [line.size - line.ended for line in found] == [len(one) for one in expected]
    assert [line.data for line in found] == [one if len(one) <= limit else b"" for one in expected]
    assert [line.number for line in found] == list(range(1, len(expected) + 1))
    assert [line.damage for line in found] == [
        None if len(one) <= limit else "bad_line" for one in expected
    ]


def test_a_hole_is_a_line_of_its_own() -> None:
    found = list(split([b"a\nb", Hole(7, "truncated"), b"c\n"], 10, before=4))
    assert [(line.number, line.data, line.size, line.damage) for line in found] == [
        (5, b"a", 2, None),
        (6, b"", 8, "truncated"),
        (7, b"c", 2, None),
    ]


# --- transcripts ----------------------------------------------------------------------------------


@pytest.mark.rule("REC-1")
def test_a_sound_transcript_is_read_whole() -> None:
    made = book()
    found = list(check_transcript(split([made.transcript], RECORD_BYTES_MAX), REF))
    assert [item.record.seq for item in found if isinstance(item, Sound)] == [1, 2, 3, 4, 5, 6]
    assert b"".join(item.data for item in found if isinstance(item, Sound)) == made.transcript


@pytest.mark.rule("REC-6")
def test_later_commits_are_not_read() -> None:
    assert check(book().transcript, as_of=4) == [1, 2, 3, 4]
    assert check(book().transcript, as_of=0) == []


@pytest.mark.rule("REC-2", "A8")
def test_a_torn_tail_is_ignored_and_a_sound_last_line_counts() -> None:
    data = book(3).transcript
    assert check(data + b'{"v":1,"se') == [1, 2, 3]
    assert check(data[:-1]) == [1, 2, 3]
    last = lines_of(data)[-1]
    for cut in range(1, len(last) - 1):
        assert check(data[: -1 - cut]) == [1, 2]


@pytest.mark.rule("REC-2")
@pytest.mark.parametrize(
    "bad",
    [b"\n", b"\0" * 512 + b"\n", b"null\n", b"5\n", b"[]\n", b"\xff\xfe\n", b'{"v":1}\n', b"{\n"],
)
def test_a_bad_line_is_a_gap(bad: bytes) -> None:
    lines = lines_of(book(5).transcript)
    data = b"".join((*lines[:2], bad, *lines[3:]))
    assert check(data) == [1, 2, Gap(3, len(bad), "bad_line"), 4, 5]


@pytest.mark.rule("REC-2")
def test_what_follows_a_gap_is_checked_against_itself_alone() -> None:
    lines = lines_of(book(5).transcript)
    assert check(b"".join((*lines[:2], *lines[3:]))) == [1, 2, Gap(3, len(lines[3]), "bad_line"), 5]
    repeated = b"".join((*lines[:3], *lines[2:]))
    assert check(repeated) == [1, 2, 3, Gap(4, len(lines[2]), "bad_line"), 4, 5]
    swapped = b"".join((*lines[:2], lines[3], lines[2], lines[4]))
    assert check(swapped) == [
        1,
        2,
        Gap(3, len(lines[3]), "bad_line"),
        3,
        Gap(5, len(lines[4]), "bad_line"),
    ]


@pytest.mark.rule("REC-2")
def test_a_jump_in_seq_is_a_gap_without_a_length() -> None:
    made = book(2)
    made.seq += 3
    made.lines(3, [updated(title="x")])
    assert check(made.transcript) == [1, 2, Gap(3, 0, "missing_records"), 6]


@pytest.mark.rule("REC-2")
def test_a_record_id_that_stands_there_twice_is_a_gap() -> None:
    made = book(2)
    made.seq -= 1  # the id follows from the seq
    made.lines(3, [updated(title="x")])
    twice = lines_of(made.transcript)[2]
    head, _ = split_chain(twice[:-1])
    head = head.replace(b'"seq":2', b'"seq":3')
    before = split_chain(lines_of(made.transcript)[1][:-1])[1]
    line = head + b',"chain":"%b"}\n' % link(before, head).encode()
    data = b"".join((*lines_of(made.transcript)[:2], line))
    assert check(data) == [1, 2, Gap(3, len(line), "duplicate_record")]


def test_the_window_of_record_ids_is_bounded() -> None:
    made = book(1)
    made.lines(2, [updated(title="x")] * (IDEMPOTENCY_KEYS_PER_SESSION_MAX + 5))
    assert len(check(made.transcript)) == IDEMPOTENCY_KEYS_PER_SESSION_MAX + 6


@pytest.mark.rule("REC-1")
def test_a_line_above_the_limit_is_damage_though_its_chain_is_right() -> None:
    made = book(2)
    empty = len(Book(REF, WORKSPACE).lines(1, [created(REF, WORKSPACE, extra={"a": ""})]))
    assert empty < 2_000
    room = RECORD_BYTES_MAX - len(book(2).lines(3, [updated(extra={"a": ""})])) + 1
    data = made.lines(3, [updated(extra={"a": "x" * (room + 1)})])
    assert len(data) == RECORD_BYTES_MAX + 2
    made.lines(4, [updated(title="behind")])
    assert check(made.transcript) == [1, 2, Gap(3, len(data), "bad_line"), 4]
    fits = book(2)
    fits.lines(3, [updated(extra={"a": "x" * room})])
    assert check(fits.transcript) == [1, 2, 3]


@pytest.mark.rule("PRJ-2")
def test_a_second_creation_is_damage() -> None:
    made = book(2)
    data = made.lines(3, [created(REF, WORKSPACE)])
    made.lines(4, [updated(title="x")])
    assert check(made.transcript) == [1, 2, Gap(3, len(data), "bad_line"), 4]


@pytest.mark.rule("REC-3")
def test_a_type_of_a_later_version_refuses_the_session() -> None:
    made = book(2)
    made.lines(3, [("from_later", {})])
    with pytest.raises(FormatUnsupported):
        check(made.transcript)


# --- whose it is ----------------------------------------------------------------------------------


def refusal(data: bytes, ref: SessionRef = REF) -> tuple[object, object]:
    with pytest.raises(SessionDamaged) as refused:
        check(data, ref=ref)
    return refused.value.carried["damage"], refused.value.carried["line"]


@pytest.mark.rule("IDN-4", "A5")
def test_a_copied_folder_is_not_served() -> None:
    assert refusal(book().transcript, SessionRef(REF.workspace_key, "s2")) == (
        "identity_mismatch",
        1,
    )
    elsewhere = SessionRef(workspace_key("/u/other"), "s1")
    assert refusal(book().transcript, elsewhere) == ("identity_mismatch", 1)


@pytest.mark.rule("IDN-4")
def test_a_creation_that_names_another_workspace_or_none_is_not_served() -> None:
    made = Book(REF, WORKSPACE)
    made.lines(1, [created(REF, "/u/other")])
    assert refusal(made.transcript) == ("identity_mismatch", 1)
    made = Book(REF, WORKSPACE)
    made.lines(1, [message("m1")])
    assert refusal(made.transcript) == ("identity_mismatch", 1)
    made = Book(REF, WORKSPACE)
    made.lines(1, [("session_created", {**created(REF, WORKSPACE)[1], "session_id": "s2"})])
    assert refusal(made.transcript) == ("identity_mismatch", 1)


@pytest.mark.rule("IDN-4", "CAT-7")
def test_without_a_sound_creation_nothing_is_served() -> None:
    lines = lines_of(book().transcript)
    assert refusal(b"".join((b"{}\n", *lines[1:]))) == ("bad_line", 1)
    assert check(lines[0][:-2]) == []  # it was never whole


@pytest.mark.rule("IDN-4")
def test_a_line_of_another_session_is_not_served() -> None:
    lines = lines_of(book().transcript)
    other = lines_of(book(session_id="s2").transcript)
    for strange in other[:4]:
        data = b"".join((*lines[:3], strange, *lines[3:]))
        assert refusal(data) == ("identity_mismatch", 4)


@pytest.mark.rule("REC-2", "IDN-4")
def test_a_flip_in_a_name_is_a_gap_and_no_foreign_line() -> None:
    data = bytearray(book(4).transcript)
    start = data.index(b'"seq":3')
    for field in (b'"workspace_key":"', b'"session_id":"'):
        at = data.index(field, start) + len(field)
        flipped = bytearray(data)
        flipped[at] ^= 1
        found = check(bytes(flipped))
        assert [one for one in found if not isinstance(one, Gap)] == [1, 2, 4]


# --- random damage --------------------------------------------------------------------------------


@pytest.mark.rule("REC-1", "REC-2", "REC-3")
@given(st.integers(0, 1 << 32), st.integers(1, 3))
def test_no_damage_is_read_as_a_record(seed: int, flips: int) -> None:
    """Whatever is flipped: each record given is one that was written, and no damage goes unseen."""
    rng = random.Random(seed)
    made = book(8)
    written = [line.rstrip(b"\n") for line in lines_of(made.transcript)]
    data = bytearray(made.transcript)
    for _ in range(flips):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if bytes(data) == made.transcript:
        return
    try:
        found = list(check_transcript(split([bytes(data)], RECORD_BYTES_MAX), REF))
    except SessionDamaged:
        return
    sound = [item for item in found if isinstance(item, Sound)]
    seqs = [item.record.seq for item in sound]
    assert seqs == sorted(set(seqs))
    behind_gap = True
    for item in found:
        if isinstance(item, Gap):
            behind_gap = True
            continue
        if not behind_gap:
            assert item.data.rstrip(b"\n") == written[item.record.seq - 1]
        behind_gap = False
    gaps = [item for item in found if isinstance(item, Gap)]
    torn = not data.endswith(b"\n")
    assert gaps or torn or b"".join(item.data for item in sound) == bytes(data)


@pytest.mark.rule("REC-2")
@given(st.integers(0, 5_000))
def test_a_cut_anywhere_leaves_a_prefix(cut: int) -> None:
    made = book(8)
    data = made.transcript[: min(cut, len(made.transcript))]
    whole = data.count(b"\n")
    kept = check(data)
    assert kept == list(range(1, len(kept) + 1))
    assert len(kept) in (whole, whole + 1)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_empty(data: bytes) -> None:
    with suppress(SessionDamaged, FormatUnsupported):
        assert check(data) == []


# --- going on in the middle -----------------------------------------------------------------------


def test_reading_goes_on_behind_a_mark() -> None:
    made = book(4)
    mark, size = Mark(made.seq, made.chain), len(made.transcript)
    made.lines(5, [updated(title="more"), updated(title="still more")])
    rest = split([made.transcript[size:]], RECORD_BYTES_MAX, before=4)
    found = list(check_transcript(rest, REF, behind=mark))
    assert [item.record.seq for item in found if isinstance(item, Sound)] == [5, 6]
    wrong = split([made.transcript[size:]], RECORD_BYTES_MAX, before=4)
    gap = next(iter(check_transcript(wrong, REF, behind=Mark(4, "0" * 64))))
    assert isinstance(gap, Gap)
    assert gap.line == 5


# --- inboxes --------------------------------------------------------------------------------------


def inbox(*ops: tuple[str, dict[str, object]]) -> Book:
    made = Book(REF, WORKSPACE)
    made.ops(1, ops)
    return made


def live(data: bytes, **more: bool) -> list[str]:
    fold = read_inbox(split([data], INBOX_BYTES_MAX), REF, **more)
    return [f"{item.n}:{item.item.message_id}" for item in fold.items.values()]


def corrupt(data: bytes) -> tuple[object, object]:
    with pytest.raises(InboxCorrupt) as refused:
        live(data)
    return refused.value.carried["reason"], refused.value.carried["line"]


@pytest.mark.rule("INB-1")
def test_an_inbox_holds_what_was_put_and_not_removed() -> None:
    made = inbox(put("a"), put("b"), remove("a"), put("c"))
    assert live(made.inbox) == ["2:b", "4:c"]
    sizes = {
        item.item.message_id: item.size_bytes
        for item in read_inbox(split([made.inbox], INBOX_BYTES_MAX), REF).items.values()
    }
    assert sizes == {"b": len(lines_of(made.inbox)[2]), "c": len(lines_of(made.inbox)[4])}


@pytest.mark.rule("INB-1")
def test_items_are_replaced_and_moved_in_their_place() -> None:
    made = inbox(put("a"), put("b"), put("c"))
    made.ops(2, [("replace", put("b", "new")[1])])
    made.ops(3, [("move", {"message_id": "c", "behind": None})])
    assert live(made.inbox) == ["3:c", "1:a", "2:b"]
    made.ops(4, [("move", {"message_id": "c", "behind": "a"})])
    assert live(made.inbox) == ["1:a", "3:c", "2:b"]
    fold = read_inbox(split([made.inbox], INBOX_BYTES_MAX), REF)
    assert fold.items["b"].item.content[0].text == "new"
    assert fold.bytes == sum(item.size_bytes for item in fold.items.values())


@pytest.mark.rule("INB-2")
def test_a_compacted_inbox_keeps_numbers_and_order() -> None:
    made = Book(REF, WORKSPACE)
    made.header(next_n=9)
    made.op(*put("c"), n=7)
    made.op(*put("a"), n=3)
    made.n = 8
    made.ops(5, [put("d"), remove("c")])
    assert live(made.inbox) == ["3:a", "9:d"]
    late = Book(REF, WORKSPACE)
    late.header(next_n=9)
    late.op(*put("d"), n=9)
    late.op(*put("a"), n=3)  # kept puts stand before all else
    assert corrupt(late.inbox) == ("gap", 3)
    removed = Book(REF, WORKSPACE)
    removed.header(next_n=9)
    removed.op(*remove("a"), n=3)
    assert corrupt(removed.inbox) == ("gap", 2)


@pytest.mark.rule("INB-3")
def test_an_inbox_fails_closed() -> None:
    good = inbox(put("a"), put("b"), put("c"))
    lines = lines_of(good.inbox)
    assert corrupt(b"".join((*lines[:2], b"{\n", *lines[3:]))) == ("not_json", 3)
    assert corrupt(b"".join((*lines[:2], b"[]\n", *lines[3:]))) == ("not_json", 3)
    assert corrupt(b"".join((*lines[:2], *lines[3:]))) == ("gap", 3)
    assert corrupt(b"".join(lines[1:])) == ("bad_header", 1)
    assert corrupt(b"") == ("bad_header", 1)
    assert corrupt(good.inbox.replace(b'"format":1', b'"format":2')) == ("unknown_format", 1)
    assert corrupt(good.inbox.replace(b'"generation":"', b'"generation":"0')) == ("bad_header", 1)
    assert corrupt(good.inbox.replace(b'"text":"hello"', b'"text":"hellp"', 1)) == ("bad_item", 2)
    assert corrupt(good.inbox[:-1]) == ("not_json", 4)
    assert corrupt(good.inbox + b'{"v":1') == ("not_json", 5)
    other = Book(SessionRef(REF.workspace_key, "s2"), WORKSPACE)
    other.ops(1, [put("a")])
    assert corrupt(other.inbox) == ("wrong_session", 1)


@pytest.mark.rule("INB-3")
def test_operations_that_cannot_be() -> None:
    assert corrupt(inbox(put("a"), put("a")).inbox) == ("duplicate_id", 3)
    assert corrupt(inbox(remove("a")).inbox) == ("bad_item", 2)
    assert corrupt(inbox(("move", {"message_id": "a", "behind": None})).inbox) == ("bad_item", 2)
    twice = inbox(put("a"), ("move", {"message_id": "a", "behind": "a"}))
    assert corrupt(twice.inbox) == ("bad_item", 3)
    assert corrupt(inbox(("put", {"item": {}})).inbox) == ("bad_item", 2)
    assert corrupt(inbox(("shuffle", {})).inbox) == ("bad_item", 2)
    jump = inbox(put("a"))
    jump.n += 1
    jump.ops(2, [put("b")])
    assert corrupt(jump.inbox) == ("gap", 3)


@pytest.mark.rule("INB-3")
def test_an_inbox_has_its_limits() -> None:
    text = "x" * (INBOX_BYTES_MAX // 2)
    assert corrupt(inbox(put("a", text), put("b", text)).inbox)[0] == "too_large"
    many = inbox()
    for n in range(INBOX_FILE_BYTES_MAX // INBOX_BYTES_MAX * 3):
        many.ops(1, [put("a", text), remove("a")])
        if n > 8:
            break
    assert corrupt(many.inbox)[0] == "too_large"


@pytest.mark.rule("INB-3")
def test_beside_a_writer_an_unfinished_line_is_not_there_yet() -> None:
    made = inbox(put("a"), put("b"))
    assert live(made.inbox[:-5], growing=True) == ["1:a"]
    assert live(b"", growing=True) == []


@given(st.integers(0, 1 << 32))
def test_a_flip_in_an_inbox_never_passes(seed: int) -> None:
    rng = random.Random(seed)
    made = inbox(put("a"), put("b"), remove("a"))
    data = bytearray(made.inbox)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    assert corrupt(bytes(data))[0] is not None
