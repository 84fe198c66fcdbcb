"""What an append may say, what it answers, and what a repeat of it gets."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence

import pytest

from callboard import messages as m
from callboard.errors import (
    AlreadyClaimed,
    CallboardError,
    FormatUnsupported,
    IdempotencyConflict,
    InboxCorrupt,
    InboxFull,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    RecordInvalid,
    RequestConflict,
    SeqConflict,
    SessionDamaged,
    SessionExists,
    TurnActive,
    TurnIdReused,
    TurnNotActive,
    TurnTerminal,
)
from callboard.limits import (
    IDEMPOTENCY_KEYS_PER_SESSION_MAX,
    INBOX_BACKGROUND_ITEMS_MAX,
    INBOX_FILE_BYTES_MAX,
    RECORD_BYTES_MAX,
)
from tests.storage.memory_disk import LoseAll
from tests.storage.second_reader import read_home
from tests.storage.world import (
    WORKSPACE,
    World,
    acknowledged,
    appending,
    applying,
    ending,
    item,
    message,
    new,
    part,
    ref,
    started,
    terminal,
)


@pytest.fixture
def world() -> World:
    return World()


def open_session(world: World, session_id: str = "s1") -> tuple[str, int]:
    text = world.create(session_id)
    return text, world.acquire(text).epoch


def transcript(text: str) -> str:
    return f"/home/sessions/{text}/transcript.jsonl"


def inbox(text: str) -> str:
    return f"/home/sessions/{text}/inbox.jsonl"


def refused(world: World, body: m.Body, error: type[CallboardError], **carried: object) -> None:
    """A refusal changes nothing."""
    before, commit = world.disk.home(), world.engine.journal.last_commit
    with pytest.raises(error) as caught:
        world.call(body)
    assert caught.value.carried.items() >= carried.items()
    assert (world.disk.home(), world.engine.journal.last_commit) == (before, commit)


# --- creation -------------------------------------------------------------------------------------


@pytest.mark.rule("MET-1", "IDN-8", "DUR-2", "DUR-6")
def test_a_session_is_created_once_however_often_it_is_asked_for(world: World) -> None:
    world.hello()
    body = world.creation("s1", "a" * 32)
    other = world.creation("s1", "b" * 32)
    changed = body.model_copy(
        update={
            "record": new(
                "session_created", {**json.loads(body.record.data), "title": "x"}, "a" * 32
            )
        }
    )
    fields = json.loads(body.record.data)
    later = {"created_at": fields["created_at"] + 1}
    stamped = {**fields, **later, "owner": {**fields["owner"], **later}}
    again = body.model_copy(update={"record": new("session_created", stamped, "a" * 32)})
    answers = world.batch([body, other, body])
    assert [getattr(one, "fresh", None) for one in answers] == [True, None, False]
    for _ in range(2):
        assert world.call(body) == m.Created(session=body.session, fresh=False)
        assert world.call(again) == m.Created(session=body.session, fresh=False)
        refused(world, other, SessionExists)
        refused(world, changed, IdempotencyConflict)
        world.crash(LoseAll())
    assert len(read_home(world.disk.home())[body.session].records) == 1


@pytest.mark.rule("IDN-6", "A6")
def test_ids_that_differ_in_case_only_cannot_both_exist(world: World) -> None:
    world.create("Foo")
    refused(world, world.creation("foo"), SessionExists)
    world.crash(LoseAll())
    refused(world, world.creation("FOO"), SessionExists)
    world.create("Fooo")


@pytest.mark.rule("IDN-4", "DUR-4", "MET-2")
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"session_id": "other"}, "session_id"),
        ({"workspace": "/elsewhere"}, "workspace"),
        ({"agent": 5}, "agent"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_creation_says_whose_it_is(world: World, change: dict[str, object], field: str) -> None:
    world.hello()
    body = world.creation()
    data = {**json.loads(body.record.data), **change}
    record = new("session_created", data, world.fresh())
    refused(world, body.model_copy(update={"record": record}), RecordInvalid, field=field)
    wrong = body.model_copy(update={"record": new("turn_started", {}, world.fresh())})
    refused(world, wrong, RecordInvalid)


# --- idempotency ----------------------------------------------------------------------------------


@pytest.mark.rule("DUR-6", "R47")
def test_a_repeat_gets_the_first_answer_and_writes_nothing(world: World) -> None:
    text, epoch = open_session(world)
    first = appending(text, epoch, [started("turn_1", epoch, ["m1"], world)], [item("m1")])
    answer = world.call(first)
    assert isinstance(answer, m.Appended)
    assert (answer.first_seq, answer.last_seq, answer.n, answer.known) == (2, 2, [1], None)
    put_only = appending(text, epoch, puts=[item("m2")])
    put_answer = world.call(put_only)
    for _ in range(3):
        before = world.disk.home()
        assert world.call(first) == answer
        assert world.call(put_only) == put_answer
        assert {k: v for k, v in world.disk.home().items() if "sessions" in k} == {
            k: v for k, v in before.items() if "sessions" in k
        }
        world.engine.checkpoints.now()
        world.crash(LoseAll(), with_owners=False)
    changed = [
        new("turn_started", {**json.loads(first.records[0].data), "trace_id": "u"}, first.key)
    ]
    refused(world, appending(text, epoch, changed, [item("m1")]), IdempotencyConflict)


@pytest.mark.rule("DUR-6")
def test_the_last_keys_survive_and_no_more_are_kept(world: World) -> None:
    text, epoch = open_session(world)
    count = IDEMPOTENCY_KEYS_PER_SESSION_MAX + 50
    bodies = [
        appending(text, epoch, [new("session_updated", {"updated_at": n}, f"{n:032x}")])
        for n in range(count)
    ]
    answers = world.batch(bodies)
    for _ in range(2):
        state = world.engine.sessions.get(text)
        assert state is not None
        assert len(state.keys) == IDEMPOTENCY_KEYS_PER_SESSION_MAX
        assert world.batch(bodies[-20:]) == answers[-20:]
        world.crash(LoseAll(), with_owners=False)


@pytest.mark.rule("DUR-6")
def test_the_key_is_the_first_records_id(world: World) -> None:
    text, epoch = open_session(world)
    body = appending(text, epoch, [started("turn_1", epoch, [], world)])
    refused(world, body.model_copy(update={"key": "0" * 32}), InvalidRequest, field="key")
    refused(world, body.model_copy(update={"records": []}), InvalidRequest, field="key")
    twice = [new("session_updated", {"updated_at": 1}, "a" * 32)] * 2
    refused(world, appending(text, epoch, twice), RecordInvalid, field="id")


@pytest.mark.rule("INB-6", "R20", "R21")
def test_a_message_id_is_one_message_for_ever(world: World) -> None:
    text, epoch = open_session(world)
    world.turn(text, epoch, "done", "turn_1")
    world.append(text, epoch, [started("turn_2", epoch, ["m2"], world)], [item("m2"), item("m3")])
    discard = [acknowledged(["m3"], world, reason="discarded")]
    world.append(text, epoch, discard, [], ["m3"])
    known = {
        "done": ("acknowledged", "turn_1"),
        "m2": ("claimed", "turn_2"),
        "m3": ("discarded", None),
    }
    for _ in range(3):
        for name, (state, turn) in known.items():
            asked = m.Lookup(session=text, message_id=name, digest=item(name).digest)
            expected = m.KnownInput.model_validate({"item_state": state, "turn_id": turn})
            assert world.call(asked) == m.LookedUp(known=expected)
            refused(
                world,
                asked.model_copy(update={"digest": item("x", "else").digest}),
                RequestConflict,
            )
            if name == "m2":
                continue
            record = started("turn_9", epoch, [name], world)
            answer = world.call(appending(text, epoch, [record], [item(name)]))
            assert isinstance(answer, m.Appended)
            assert answer.known == expected
            refused(world, appending(text, epoch, puts=[item(name, "else")]), RequestConflict)
        asked = m.Lookup(session=text, message_id="new", digest=item("new").digest)
        assert world.call(asked) == m.LookedUp(known=None)
        world.engine.checkpoints.now()
        world.crash(LoseAll(), with_owners=False)
    world.owners.verdicts.clear()
    answer = world.accept(text, "done")
    assert answer == m.Accepted(
        duplicate=True, item_state="acknowledged", turn_id="turn_1", queued=1, runnable=True
    )


@pytest.mark.rule("INB-6")
def test_an_input_of_an_earlier_owner_is_known_and_ones_own_repeat_is_answered(
    world: World,
) -> None:
    text = world.create()
    world.accept(text, "m1")
    epoch = world.acquire(text).epoch
    answer = world.call(appending(text, epoch, puts=[item("m1")]))
    assert isinstance(answer, m.Appended)
    assert answer.known == m.KnownInput(item_state="pending")
    own = appending(text, epoch, puts=[item("m2")])
    assert world.call(own) == world.call(own)


# --- seq, turns, calls ----------------------------------------------------------------------------


@pytest.mark.rule("DUR-2", "REC-8")
def test_a_wrong_first_seq_writes_nothing(world: World) -> None:
    text, epoch = open_session(world)
    for seq in (1, 3, 9):
        body = appending(text, epoch, [started("turn_1", epoch, [], world)], first_seq=seq)
        refused(world, body, SeqConflict, expected=2)
    world.append(text, epoch, [started("turn_1", epoch, [], world)], first_seq=2)


@pytest.mark.rule("RUN-3", "MBX-18", "FLH-2", "R58")
def test_turns_begin_and_end_once(world: World) -> None:
    text, epoch = open_session(world)
    refused(world, appending(text, epoch, [terminal("turn_1", [], world)]), TurnNotActive)
    refused(world, appending(text, epoch, [message("turn_1", "a", "user", world)]), TurnNotActive)
    start = appending(text, epoch, [started("turn_2", epoch, [], world)])
    world.call(start)
    world.call(start)
    refused(
        world,
        appending(text, epoch, [started("turn_3", epoch, [], world)]),
        TurnActive,
        turn_id="turn_2",
    )
    world.append(text, epoch, [terminal("turn_2", [], world)])
    for record in (terminal("turn_2", [], world), message("turn_2", "a", "assistant", world)):
        refused(world, appending(text, epoch, [record]), TurnTerminal)
    for turn in ("turn_2", "turn_1"):
        refused(world, appending(text, epoch, [started(turn, epoch, [], world)]), TurnIdReused)
    assert read_home(world.disk.home())[text].terminals == ["turn_2"]


@pytest.mark.rule("RUN-3", "RUN-4", "R57")
def test_a_turn_does_not_end_with_an_open_call(world: World) -> None:
    text, epoch = open_session(world)
    world.append(text, epoch, [started("turn_1", epoch, [], world)])

    def payload(part_type: str, fields: dict[str, object]) -> m.NewRecord:
        data = {
            "part_id": f"p_{world.fresh()}",
            "message_id": "a",
            "part_type": part_type,
            "payload": {"call_id": "c1", "name": "sleep", **fields},
            "created_at": 1,
        }
        return new("part_created", data, world.fresh(), "turn_1")

    call = payload("tool_call", {"input": {}})
    result = payload("tool_result", {"output": "ok", "error": None})
    world.append(text, epoch, [message("turn_1", "a", "assistant", world), call])
    refused(world, appending(text, epoch, [terminal("turn_1", [], world)]), RecordInvalid)
    world.append(text, epoch, [result, terminal("turn_1", [], world)])
    refused(
        world,
        appending(text, epoch, [result.model_copy(update={"id": world.fresh()})]),
        RecordInvalid,
        field="payload.call_id",
    )


# --- acknowledgements -----------------------------------------------------------------------------


def with_turn(world: World) -> tuple[str, int]:
    """m1 is applied, m2 claimed, m3 waits."""
    text, epoch = open_session(world)
    puts = [item(f"m{n}") for n in (1, 2, 3)]
    world.append(text, epoch, [started("turn_1", epoch, ["m1", "m2"], world)], puts)
    world.append(text, epoch, applying("turn_1", "m1", world))
    return text, epoch


@pytest.mark.rule("RUN-4", "RUN-5", "INB-5", "R50", "R51")
def test_inputs_leave_in_the_frame_of_their_turns_end(world: World) -> None:
    text, epoch = with_turn(world)
    claimed = ["m1", "m2"]
    done = terminal("turn_1", claimed, world)
    failed = terminal("turn_1", claimed, world, cause="failed")

    def ack(
        *ids: str, reason: str = "completed", turn: str = "turn_1", words: str = "hi"
    ) -> m.NewRecord:
        return acknowledged(ids, world, words, reason, turn)

    cases: list[tuple[Sequence[m.NewRecord], Sequence[str]]] = [
        ([ack(*claimed)], claimed),  # alone
        ([done, ack(*claimed)], claimed),  # behind
        ([ack(*claimed), part("turn_1", "msg_m1", "x", world), done], claimed),  # not directly
        ([ack(*claimed), failed], claimed),  # another reason than the end's
        ([ack(*claimed, reason="aborted"), done], claimed),
        ([ack(*claimed, turn="turn_0"), done], claimed),  # of another turn
        ([ack("m1", "m2", "m3"), done], ["m1", "m2", "m3"]),  # not claimed
        ([ack("m1", "m2", reason="aborted"), failed], claimed),  # m2 was not applied
        ([ack("m1", "m1"), done], ["m1"]),
        ([ack("m9"), done], ["m9"]),  # not live
        ([ack(*claimed, words="else"), done], claimed),  # another digest
        ([ack(*claimed, reason="because"), done], claimed),  # no reason of ours
        ([ack(*claimed), done], []),  # without their removes
        ([ack(*claimed), done], ["m1"]),
        ([ack(*claimed), done], [*claimed, "m3"]),
        ([done], ["m1"]),  # removes without a record
        ([ack("m1"), ack("m2"), done], claimed),
    ]
    for records, removes in cases:
        refused(world, appending(text, epoch, records, [], removes), CallboardError)
    world.append(text, epoch, [ack("m1", reason="aborted"), failed], [], ["m1"])
    seen = read_home(world.disk.home())[text]
    assert (seen.acknowledged, list(seen.live)) == (["m1"], ["m2", "m3"])
    world.append(text, epoch, [started("turn_2", epoch, ["m2"], world)])
    world.append(text, epoch, *ending("turn_2", ["m2"], world))
    assert list(read_home(world.disk.home())[text].live) == ["m3"]


@pytest.mark.rule("RUN-5", "R50")
def test_what_an_earlier_turn_applied_may_go_with_an_abort(world: World) -> None:
    text, epoch = with_turn(world)
    world.append(text, epoch, [terminal("turn_1", ["m1", "m2"], world, cause="failed")])
    world.append(text, epoch, [started("turn_2", epoch, ["m1"], world)])
    gone = acknowledged(["m1"], world, reason="aborted", turn_id="turn_2")
    world.append(
        text, epoch, [gone, terminal("turn_2", ["m1"], world, cause="cancelled")], [], ["m1"]
    )


@pytest.mark.rule("INB-9", "INB-5", "R23")
def test_a_discard_is_one_frame_of_its_record_and_removes(world: World) -> None:
    text, epoch = with_turn(world)
    for reason in ("discarded", "attempts_spent", "cancelled"):
        world.append(text, epoch, puts=[item(reason)])
        world.append(text, epoch, [acknowledged([reason], world, reason=reason)], [], [reason])
    world.owners.verdicts.clear()

    def discard(name: str) -> m.Body:
        return world.call(
            m.DiscardInput(
                session=text, gateway_epoch=world.gateway, message_id=name, reason="cancelled"
            )
        )

    for name in ("m1", "m2"):
        with pytest.raises(AlreadyClaimed):
            discard(name)
    assert discard("m3") == m.CancelResult(status="cancelled")
    assert discard("m3") == m.CancelResult(status="already_terminal")
    assert discard("nobody") == m.CancelResult(status="not_found")
    world.crash(LoseAll())
    seen = read_home(world.disk.home())[text]
    assert seen.discarded == ["discarded", "attempts_spent", "cancelled", "m3"]
    assert list(seen.live) == ["m1", "m2"]


@pytest.mark.rule("INB-4", "R24")
def test_the_transcript_wins_over_the_inbox(world: World) -> None:
    """A valid acknowledgement without its remove, and an invalid one, planted in the files."""
    text = world.create()
    for name in ("gone", "stays"):
        world.accept(text, name)
    epoch = world.acquire(text, "a" * 32).epoch
    world.append(text, epoch, [started("turn_1", epoch, ["gone", "stays"], world)])
    world.append(text, epoch, applying("turn_1", "gone", world))
    before = world.disk.content(inbox(text))
    records = [
        acknowledged(["gone"], world, reason="aborted", turn_id="turn_1"),
        terminal("turn_1", ["gone", "stays"], world, cause="failed"),
    ]
    world.append(text, epoch, records, [], ["gone"])
    world.engine.stop()
    world.crash()
    world.disk.put(inbox(text), before)
    granted = world.acquire(text)
    assert [one.item.message_id for one in granted.pending] == ["gone", "stays"]
    assert granted.acknowledged_ids == ["gone"]
    body = m.Append(
        session=text,
        epoch=granted.epoch,
        key="gone",
        records=[],
        inbox=[m.RemoveOp(op="remove", message_id="gone")],
    )
    stays = body.model_copy(
        update={"key": "stays", "inbox": [m.RemoveOp(op="remove", message_id="stays")]}
    )
    refused(world, stays, RecordInvalid)
    world.call(body)
    world.call(body)
    assert list(read_home(world.disk.home())[text].live) == ["stays"]


# --- sizes and shapes -----------------------------------------------------------------------------


@pytest.mark.rule("REC-12", "DUR-4")
def test_records_and_frames_have_a_largest_size(world: World) -> None:
    text, epoch = open_session(world)
    world.append(text, epoch, [started("turn_1", epoch, [], world)])
    world.append(text, epoch, [message("turn_1", "a", "assistant", world)])

    def words(count: int) -> m.NewRecord:
        return part("turn_1", "a", "x" * count, world)

    probe = len(words(0).data)
    refused(
        world,
        appending(text, epoch, [words(RECORD_BYTES_MAX - probe)]),
        PayloadTooLarge,
        limit="RECORD_BYTES_MAX",
    )
    world.append(text, epoch, [words(RECORD_BYTES_MAX - probe - 600)])
    big = [words(1_000_000) for _ in range(9)]
    refused(world, appending(text, epoch, big), PayloadTooLarge, limit="FRAME_BYTES_MAX")


@pytest.mark.rule("DUR-4", "RUN-5")
@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b"\xff",
        b'{"updated_at":1.0}',
        b'{"updated_at":true}',
        b'{"updated_at":1,"extra":{"x":NaN}}',
        b'{"updated_at":1,"extra":{"x":-Infinity}}',
        b'{"updated_at":1,\n"title":"t"}',
        b'{"updated_at":1,"no_such":1}',
    ],
)
def test_data_that_would_not_read_back_is_refused(world: World, data: bytes) -> None:
    text, epoch = open_session(world)
    record = m.NewRecord(id=world.fresh(), type="session_updated", data=data)
    refused(world, appending(text, epoch, [record]), RecordInvalid)
    unknown = m.NewRecord(id=world.fresh(), type="surprise", data=b"{}")
    refused(world, appending(text, epoch, [unknown]), RecordInvalid, type="surprise")
    quoted = m.NewRecord(
        id=world.fresh(), type="session_updated", turn_id='a","x":"', data=b'{"updated_at":1}'
    )
    refused(world, appending(text, epoch, [quoted]), RecordInvalid, field="turn_id")


@pytest.mark.rule("RUN-5")
def test_a_turn_names_at_most_so_many_inputs(world: World) -> None:
    text, epoch = open_session(world)
    many = started("turn_1", epoch, [f"m{n}" for n in range(121)], world)
    refused(world, appending(text, epoch, [many]), RecordInvalid)
    refused(world, appending(text, epoch, [started("turn_1", epoch, [""], world)]), RecordInvalid)


@pytest.mark.rule("DUR-4")
def test_data_bytes_are_kept_as_they_came(world: World) -> None:
    text, epoch = open_session(world)
    data = '{ "title" : "ä\\u2028 NaN Infinity" , "updated_at" : 7 }'.encode()
    world.append(text, epoch, [m.NewRecord(id=world.fresh(), type="session_updated", data=data)])
    assert b'"data":' + data + b',"chain":"' in world.disk.content(transcript(text))
    world.crash(LoseAll())
    state = world.engine.sessions.get(text)
    assert state is not None
    assert state.fold.title == "ä\u2028 NaN Infinity"


@pytest.mark.rule("INB-7", "INB-8", "R20")
def test_admission_counts_by_origin_and_known_ids_come_first(world: World) -> None:
    text, epoch = open_session(world)
    names = [f"b{n}" for n in range(INBOX_BACKGROUND_ITEMS_MAX)]
    world.batch([appending(text, epoch, puts=[item(name, origin="background")]) for name in names])
    again = world.call(appending(text, epoch, puts=[item("b5", origin="background")]))
    assert isinstance(again, m.Appended)
    body = appending(text, epoch, puts=[item("one more", origin="background")])
    refused(world, body, InvalidRequest)
    body = appending(text, epoch, puts=[item("b100", origin="background")])
    refused(world, body, InboxFull, limit="INBOX_BACKGROUND_ITEMS_MAX", current=100, maximum=100)
    for n in range(20):
        world.append(text, epoch, puts=[item(f"u{n}")])
    refused(world, appending(text, epoch, puts=[item("u20")]), InboxFull)
    twice = appending(text, epoch, puts=[item("p"), item("p")])
    refused(world, twice, InvalidRequest, reason="duplicate")


@pytest.mark.rule("DUR-5", "REC-8")
def test_an_append_costs_the_same_however_long_the_transcript_is(world: World) -> None:
    text, epoch = open_session(world)
    reads = 0
    real = world.disk.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        nonlocal reads
        reads += 1
        return real(fd, size, offset)

    world.disk.pread = pread  # type: ignore[method-assign]
    costs: list[tuple[int, int]] = []
    for length in (10, 2_000):
        state = world.engine.sessions.get(text)
        assert state is not None
        updates = [
            appending(text, epoch, [new("session_updated", {"updated_at": n}, world.fresh())])
            for n in range(length - state.fold.seq)
        ]
        world.batch(updates)
        reads, calls = 0, len(world.disk.log)
        world.append(text, epoch, [new("session_updated", {"updated_at": 1}, world.fresh())])
        assert isinstance(world.call(updates[-1]), m.Appended)  # a repeat looks nothing up either
        costs.append((reads, len(world.disk.log) - calls))
    assert costs[0] == costs[1]
    assert costs[0][0] == 0


@pytest.mark.rule("A106", "REC-10")
def test_the_envelope_is_the_same_whoever_wrote_the_record(world: World) -> None:
    text = world.create()
    world.accept(text, "m1")
    discard = m.DiscardInput(
        session=text, gateway_epoch=world.gateway, message_id="m1", reason="discarded"
    )
    world.call(discard)
    epoch = world.acquire(text).epoch
    world.turn(text, epoch, "m2", "turn_1")
    records = read_home(world.disk.home())[text].records
    names = [
        "v",
        "seq",
        "id",
        "commit",
        "epoch",
        "ts",
        "workspace_key",
        "session_id",
        "type",
        "turn_id",
        "data",
        "chain",
    ]
    for record in records:
        assert list(record) == names
        assert len(record["ts"]) == 27
        assert record["ts"].endswith("Z")
        for name, value in record["data"].items():
            if name.endswith("_at"):
                assert isinstance(value, int)
    assert [record["epoch"] for record in records[:2]] == [0, 0]


@pytest.mark.rule("FLT-38")
def test_a_clock_that_goes_back_moves_no_time_stamp_back(world: World) -> None:
    text, epoch = open_session(world)
    world.turn(text, epoch, "m1", "turn_1")
    world.clock.us -= 60_000_000_000
    world.turn(text, epoch, "m2", "turn_2")
    world.crash(LoseAll(), with_owners=False)
    world.turn(text, epoch, "m3", "turn_3")
    stamps = [record["ts"] for record in read_home(world.disk.home())[text].records]
    assert stamps == sorted(stamps)


# --- damaged and foreign files --------------------------------------------------------------------


def stopped(world: World, turns: int = 3) -> tuple[str, str]:
    """A session at rest, and another."""
    text, epoch = open_session(world)
    other = world.create("other")
    for n in range(turns):
        world.turn(text, epoch, f"m{n}", f"turn_{n}")
    world.engine.stop()
    world.crash()
    return text, other


@pytest.mark.rule("REC-3", "REC-2", "DUR-3", "A9", "R120", "R59")
def test_a_damaged_line_stops_its_session_and_changes_no_byte(world: World) -> None:
    text, other = stopped(world)
    data = bytearray(world.disk.content(transcript(text)))
    at = data.index(b"\n") + 30
    data[at] ^= 1
    world.disk.put(transcript(text), bytes(data))
    before = world.disk.home()
    world.hello()
    for body in (
        m.Acquire(session=text, owner=world.owner()),
        world.acceptance(text, "new"),
        m.Lookup(session=text, message_id="m1", digest=item("m1").digest),
    ):
        refused(world, body, SessionDamaged, damage="bad_line", line=2)
    assert world.disk.home() == before
    assert isinstance(world.accept(other, "m1"), m.Accepted)


@pytest.mark.rule("REC-2", "A8", "REC-10")
def test_a_torn_tail_is_cut_and_a_sound_one_gets_its_lf(world: World) -> None:
    text, _ = stopped(world)
    data = world.disk.content(transcript(text))
    world.disk.put(transcript(text), data + b'{"v":1,"se')
    granted = world.acquire(text)
    assert granted.last_seq == 16
    assert world.disk.content(transcript(text)) == data
    world.append(text, granted.epoch, [started("turn_9", granted.epoch, [], world)])
    assert len(read_home(world.disk.home())[text].records) == 17
    world.engine.stop()
    world.crash()
    data = world.disk.content(transcript(text))
    world.disk.put(transcript(text), data[:-1])
    granted = world.acquire(text)
    assert granted.last_seq == 17
    world.append(text, granted.epoch, [terminal("turn_9", [], world)])
    assert len(read_home(world.disk.home())[text].records) == 18
    world.crash(LoseAll(), with_owners=False)
    assert len(read_home(world.disk.home())[text].records) == 18
    world.append(text, granted.epoch, [started("turn_91", granted.epoch, [], world)])
    assert len(read_home(world.disk.home())[text].records) == 19


@pytest.mark.rule("REC-3", "DUR-4")
def test_a_record_of_tomorrow_stops_its_session_alone(world: World) -> None:
    text, other = stopped(world, 0)
    data = world.disk.content(transcript(text)).replace(b'{"v":1,', b'{"v":2,')
    world.disk.put(transcript(text), relink(text, data))
    refused(world, m.Acquire(session=text, owner=world.owner()), FormatUnsupported, version="2")
    world.acquire(other)


def relink(text: str, data: bytes) -> bytes:
    """Compute every chain anew: a foreign editor who knows how."""
    chain = hashlib.sha256(text.encode()).hexdigest()
    lines: list[bytes] = []
    for line in data[:-1].split(b"\n"):
        head = line[: line.rindex(b',"chain":"')]
        chain = hashlib.sha256(chain.encode() + head).hexdigest()
        lines.append(head + b',"chain":"' + chain.encode() + b'"}\n')
    return b"".join(lines)


@pytest.mark.rule("IDN-4", "IDN-3", "IDN-5")
def test_whose_a_transcript_is_stands_in_it(world: World) -> None:
    text, other = stopped(world, 0)
    mine = world.disk.content(transcript(text))
    world.disk.put(transcript(other), mine)
    refused(
        world,
        m.Acquire(session=other, owner=world.owner()),
        SessionDamaged,
        damage="identity_mismatch",
    )
    empty = ref("empty")
    world.disk.put(transcript(empty), b"")
    refused(world, m.Acquire(session=empty, owner=world.owner()), NotFound)
    assert WORKSPACE not in str(NotFound().to_wire())


@pytest.mark.rule("INB-3", "R18", "R19")
@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("not_json", 3),
        ("gap", 3),
        ("bad_item", 3),
        ("duplicate_id", 3),
        ("wrong_session", 1),
        ("unknown_format", 1),
        ("bad_header", 1),
        ("not_json unfinished", 3),
        ("too_large", None),
        ("unsafe", 1),
    ],
)
def test_an_inbox_that_is_not_right_fails_closed(
    world: World, reason: str, line: int | None
) -> None:
    text, other = world.create(), world.create("other")
    for name in ("m1", "m2"):
        world.accept(text, name)
    world.engine.stop()
    world.crash()
    data = world.disk.content(inbox(text))
    header, first, second = data.splitlines(keepends=True)
    changed = {
        "not_json": header + first + b'{"n":2,\n',
        "gap": relink(text, header + first + second.replace(b'"n":2', b'"n":3')),
        "bad_item": header + first + second.replace(b'"hi"', b'"ho"'),
        "duplicate_id": relink(text, header + first + second.replace(b'"m2"', b'"m1"')),
        "wrong_session": relink(text, header.replace(b'"s1"', b'"s2"') + first),
        "unknown_format": relink(text, header.replace(b'"format":1', b'"format":9') + first),
        "bad_header": first + second,
        "not_json unfinished": data[:-5],
        "too_large": data + b" " * INBOX_FILE_BYTES_MAX,
    }.get(reason, data)
    world.disk.put(inbox(text), changed)
    if reason == "unsafe":
        world.disk.names[inbox(text)].unsafe = True
    expected = {"not_json unfinished": "not_json", "unsafe": "bad_header"}.get(reason, reason)
    for body in (m.Acquire(session=text, owner=world.owner()), world.acceptance(text, "m3")):
        with pytest.raises(InboxCorrupt) as caught:
            world.call(body)
        assert caught.value.carried["reason"] == expected
        if line is not None:
            assert caught.value.carried["line"] == line
    assert world.disk.content(inbox(text)) == changed
    world.acquire(other)


@pytest.mark.rule("RUN-5", "R48")
def test_a_running_and_a_restarted_session_have_the_same_state() -> None:
    for seed in range(10):
        world = World(seed=seed)
        text, epoch = open_session(world)
        rng = random.Random(seed)
        for n in range(12):
            names = [f"m{n}_{k}" for k in range(rng.randint(1, 3))]
            turn = f"turn_{n:02d}"
            world.append(
                text,
                epoch,
                [started(turn, epoch, names, world)],
                [item(name) for name in names],
            )
            for name in names[: rng.randint(0, len(names))]:
                world.append(text, epoch, applying(turn, name, world))
            if rng.random() < 0.5:
                world.append(text, epoch, *ending(turn, names, world))
            else:
                disposition = rng.choice(["pending", "held"])
                cause = rng.choice(["failed", "cancelled", "interrupted"])
                world.append(
                    text,
                    epoch,
                    [terminal(turn, names, world, cause=cause, disposition=disposition)],
                )
        live = world.engine.sessions.get(text)
        assert live is not None
        world.crash(LoseAll(), with_owners=False)
        loaded = world.engine.sessions.get(text)
        assert loaded is not None
        assert loaded is not live
        assert loaded == live
