"""Puts of one batch share a frame, and are judged singly if it cannot be written (ADR 0092)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from callboard import messages as m
from callboard.actors.session.agent_calls import AgentCall
from callboard.actors.session.core import PUTS_FRAME_CHARS_MAX, Context, Session
from callboard.actors.session.runner import AgentHost
from callboard.errors import CallboardError, Overloaded, StorageFull
from callboard.ids import parse_ref

REF = f"demo-{'0' * 32}/s1"


class Port:
    """Keeps what the session says."""

    def __init__(self) -> None:
        self.asked: list[tuple[m.Body, Context]] = []
        self.replies: list[tuple[str, m.Body | CallboardError]] = []
        self.full = False

    def ask(self, body: m.Body, context: Context) -> None:
        if self.full:
            raise Overloaded(resource="pending_count", limit=1)
        self.asked.append((body, context))

    def reply(self, request: str, answer: m.Body | CallboardError) -> None:
        self.replies.append((request, answer))

    def tell(self, body: m.Body) -> None:
        """Take a beat."""

    def ask_permit(self) -> None:
        """Leave it unanswered."""

    def drop_permit(self) -> None:
        """Take it."""

    def after(self, ms: int, name: str) -> None:
        """Time stands still."""

    def now(self) -> int:
        return 1

    def ticks(self) -> int:
        return 1

    def stop_process(self, status: int) -> None:
        raise AssertionError(status)

    def log(self, action: str, facts: Mapping[str, object]) -> None:
        """Say nothing."""


class Stage:
    """A paused session: what comes is put, and starts nothing."""

    def __init__(self) -> None:
        self.port = Port()
        owner = m.ProcessIdentity(
            pid=99, start_time=1, boot_id="b", pid_ns=1, nonce="0" * 32, plane_id="p"
        )

        def post(call: AgentCall) -> None:
            raise AssertionError(call)

        agents = AgentHost(post, self.port.log)
        self.session = Session(self.port, agents, parse_ref(REF), owner, 60_000)
        self.session.storage_up()
        self.answer(lease())
        self.session.gateway_up()
        self.session.registered()
        self.number = 0

    def answer(self, answer: m.Body | CallboardError, at: int = 0) -> None:
        _, context = self.port.asked.pop(at)
        self.session.answered(context, answer)
        self.session.batch_done()

    def deliver(self, *texts: str) -> None:
        """Deliver inputs in one batch."""
        for text in texts:
            self.number += 1
            item = m.InboxItem(
                message_id=f"m{self.number}",
                origin="user",
                content=[m.Text(type="text", text=text)],
                queued_at=1,
                digest="0" * 64,
                principal="principal:operator:local",
            )
            self.session.delivered(f"r{self.number}", m.Deliver(item=item, permit=False))
        self.session.batch_done()

    def puts(self) -> list[list[str]]:
        """Name the inputs of each append that waits for its answer."""
        found: list[list[str]] = []
        for body, _ in self.port.asked:
            assert isinstance(body, m.Append)
            assert body.records == []
            found.append([op.item.message_id for op in body.inbox if isinstance(op, m.PutOp)])
            assert body.key == found[-1][0]
        return found

    def receipts(self) -> list[tuple[str, Any]]:
        """Give who was answered, and what: a code, or how many wait."""
        return [
            (name, answer.queued if isinstance(answer, m.Receipt) else getattr(answer, "code", ""))
            for name, answer in self.port.replies
        ]


def lease() -> m.LeaseGranted:
    return m.LeaseGranted(
        session=REF,
        epoch=1,
        last_seq=1,
        workspace="/w",
        agent="echo",
        model=None,
        settings={},
        paused=True,
        turns=0,
        last_turn_id="",
        last_message_id=None,
        open_turn=None,
        open_calls=[],
        pending=[],
        applied_ids=[],
    )


def written(*numbers: int, known: m.KnownInput | None = None) -> m.Appended:
    sizes = [100 + number for number in numbers]
    return m.Appended(commit=5, first_seq=2, last_seq=1, n=[*numbers], sizes=sizes, known=known)


@pytest.mark.rule("MBX-2", "MBX-3")
def test_inputs_of_one_batch_are_one_frame_and_each_has_its_receipt() -> None:
    stage = Stage()
    stage.deliver("a", "b", "c")
    assert stage.puts() == [["m1", "m2", "m3"]]
    assert stage.receipts() == []  # nothing is promised yet
    stage.answer(written(1, 2, 3))
    assert stage.receipts() == [("r1", 1), ("r2", 2), ("r3", 3)]
    assert [(one.id, one.n, one.size) for one in stage.session.box.pending] == [
        ("m1", 1, 101),
        ("m2", 2, 102),
        ("m3", 3, 103),
    ]


def test_inputs_of_two_batches_are_two_frames() -> None:
    stage = Stage()
    stage.deliver("a")
    stage.deliver("b")
    assert stage.puts() == [["m1"], ["m2"]]


@pytest.mark.rule("MBX-2", "INB-6")
def test_when_one_was_known_each_is_judged_by_itself() -> None:
    stage = Stage()
    stage.deliver("a", "b")
    known = m.KnownInput(item_state="acknowledged", turn_id="turn_1")
    stage.answer(written(known=known))
    assert stage.puts() == [["m1"], ["m2"]]
    stage.answer(written(1))
    stage.answer(written(known=known))
    assert [name for name, _ in stage.receipts()] == ["r1", "r2"]
    first, second = (answer for _, answer in stage.port.replies)
    assert isinstance(first, m.Receipt)
    assert isinstance(second, m.Receipt)
    assert (first.duplicate, second.duplicate) == (False, True)
    assert second.item_state == "acknowledged"


@pytest.mark.rule("MBX-2")
def test_when_the_frame_is_refused_each_is_judged_by_itself() -> None:
    stage = Stage()
    stage.deliver("a", "b")
    stage.answer(StorageFull(retry_after_ms=1))
    assert stage.puts() == [["m1"], ["m2"]]
    stage.answer(written(1))
    stage.answer(StorageFull(retry_after_ms=1))
    assert stage.receipts() == [("r1", 1), ("r2", "storage_full")]
    assert not stage.session.box.staged


def test_a_frame_that_cannot_be_asked_for_refuses_all_of_its_inputs() -> None:
    stage = Stage()
    stage.port.full = True
    stage.deliver("a", "b")
    assert stage.receipts() == [("r1", "overloaded"), ("r2", "overloaded")]
    assert not stage.session.box.staged


def test_much_text_is_not_put_together() -> None:
    stage = Stage()
    stage.deliver("x" * (PUTS_FRAME_CHARS_MAX // 2), "y" * PUTS_FRAME_CHARS_MAX)
    assert stage.puts() == [["m1"], ["m2"]]


def test_what_else_goes_to_storage_goes_behind_the_puts_before_it() -> None:
    stage = Stage()
    for number in range(20):
        stage.deliver(str(number))
        stage.answer(written(number + 1))
    stage.deliver("one too many")
    (body, _), *_ = stage.port.asked
    assert isinstance(body, m.Lookup)  # refused, once its id is known to be new
    stage.port.asked.clear()
    half = Stage()
    for number in range(19):
        half.deliver(str(number))
        half.answer(written(number + 1))
    half.deliver("the last one", "one too many")
    assert [type(body) for body, _ in half.port.asked] == [m.Append, m.Lookup]
