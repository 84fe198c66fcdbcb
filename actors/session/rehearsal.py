"""A rehearsal: a session plays a few turns to nobody, in the fork process, before it forks.

Python writes where it only reads: a count beside every object that it touches, and the bytecode of
every function that it gets to know. A page written before the fork is shared by every session, one
written after it is each session's own: 2.5 MiB of them, measured. So what every session does is
done once before. It leaves nothing behind: no thread, no descriptor, no file, no durable word.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import closing

from callboard.actors.session.agent_calls import AgentCall
from callboard.actors.session.core import Context, Session
from callboard.actors.session.runner import AgentHost
from callboard.errors import CallboardError
from callboard.ids import SessionRef
from callboard.limits import RESIDENT_IDLE_MS
from callboard.messages import (
    Acquire,
    Append,
    Appended,
    Body,
    Deliver,
    InboxItem,
    LeaseGranted,
    Ok,
    ProcessIdentity,
    Receipt,
    Register,
    Text,
)
from callboard.records import item_digest
from callboard.wire import Header, decode_body, decode_header, encode_body, encode_header

_REF = SessionRef("rehearsal-" + "0" * 32, "s")
_ROUNDS_MAX = 10_000


def rehearse(agent: str = "echo", turns: int = 3, settings: Mapping[str, str] | None = None) -> int:
    """Play some turns to nobody.

    Args:
        agent: who plays.
        turns: how many.
        settings: of the session that is played.

    Returns:
        How many receipts came of it: one for each turn.

    """
    with closing(asyncio.new_event_loop()) as loop:
        hall = _Hall(loop, agent, dict(settings or {}))
        for number in range(turns):
            hall.send(f"line-{number}")
        return hall.receipts


class _Hall:
    """An empty hall: a storage that remembers nothing, a gateway that never minds (`core.Port`)."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, agent: str, settings: dict[str, str]
    ) -> None:
        self.receipts = 0
        self._loop = loop
        self._agent = agent
        self._settings = settings
        self._seq = 1
        self._asked: deque[tuple[Body, Context]] = deque()
        self._calls: deque[AgentCall] = deque()
        owner = ProcessIdentity(
            pid=2, start_time=1, boot_id="-", pid_ns=1, nonce="0" * 32, plane_id="-"
        )
        host = AgentHost(self._calls.append, self.log, loop)
        self._session = Session(self, host, _REF, owner, RESIDENT_IDLE_MS)
        self._session.storage_up()
        self._session.gateway_up()
        self._play()

    def send(self, message_id: str) -> None:
        """Send an input and play until nothing more happens."""
        content = [Text(type="text", text=message_id)]
        item = InboxItem(
            message_id=message_id,
            origin="user",
            content=content,
            queued_at=1,
            digest=item_digest([one.model_dump(exclude_none=True) for one in content], {}),
            principal="principal:operator:local",
        )
        body = _over_the_bus(Deliver(item=item, permit=True), "request")
        assert isinstance(body, Deliver)
        self._session.delivered(message_id, body)
        self._play()

    def _play(self) -> None:
        for _ in range(_ROUNDS_MAX):
            self._session.batch_done()
            self._loop.call_soon(self._loop.stop)
            self._loop.run_forever()
            if self._calls:
                self._session.agent_called(self._calls.popleft())
            elif self._asked:
                body, context = self._asked.popleft()
                self._session.answered(context, _over_the_bus(self._answer(body)))
            elif self._session.turn is None:
                return

    def _answer(self, body: Body) -> Body:
        if isinstance(body, Acquire):
            return self._lease()
        if not isinstance(body, Append):
            return Ok()
        first, self._seq = self._seq + 1, self._seq + len(body.records)
        puts = sum(one.op == "put" for one in body.inbox)
        return Appended(
            commit=1, first_seq=first, last_seq=self._seq, n=[1] * puts, sizes=[400] * puts
        )

    def _lease(self) -> LeaseGranted:
        return LeaseGranted(
            session=str(_REF),
            epoch=1,
            last_seq=1,
            workspace="/",
            agent=self._agent,
            model=None,
            settings=self._settings,
            paused=False,
            turns=0,
            last_turn_id="",
            last_message_id=None,
            open_turn=None,
            open_calls=[],
            pending=[],
            applied_ids=[],
        )

    # `core.Port`.

    def ask(self, body: Body, context: Context) -> None:
        self._asked.append((_over_the_bus(body), context))

    def tell(self, body: Body) -> None:
        _over_the_bus(body)
        if isinstance(body, Register):
            self._session.registered()

    def reply(self, request: str, answer: Body | CallboardError) -> None:
        if isinstance(answer, Receipt):
            self.receipts += 1
            _over_the_bus(answer, request)

    def ask_permit(self) -> None:
        """Do nothing: every permit rides along here."""

    def drop_permit(self) -> None:
        """Do nothing: nobody counts them."""

    def after(self, ms: int, name: str) -> None:
        """Do nothing: time stands still."""

    def now(self) -> int:
        return 1

    def ticks(self) -> int:
        return 1

    def stop_process(self, status: int) -> None:
        """Go on: this is the fork process."""

    def log(self, action: str, facts: Mapping[str, object]) -> None:
        """Do nothing: nobody reads it."""


def _over_the_bus(body: Body, request: str = "") -> Body:
    """Encode and decode, as two sockets would have it done."""
    header = decode_header(encode_header(Header(body.kind, request)))
    return decode_body(header.kind, encode_body(body))
