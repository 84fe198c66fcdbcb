"""Plays without sockets: a session with a storage and a gateway that are a few lines each.

The storage keeps what the real one keeps and checks with the real fold; it can be slow, full or
away. Time stands still until `advance`. Agent code runs in an event loop that the stage turns.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from callboard.actors.session.agent_calls import AgentCall
from callboard.actors.session.core import Context, Session
from callboard.actors.session.runner import AgentHost
from callboard.agents import AgentFunction, agent
from callboard.artifact_files import ArtifactReader
from callboard.errors import (
    CallboardError,
    IdempotencyConflict,
    RequestConflict,
    StaleEpoch,
    StorageFull,
)
from callboard.fold import SessionFold
from callboard.ids import SessionRef, fresh_id
from callboard.messages import (
    Acquire,
    Append,
    Appended,
    Body,
    BusyMode,
    CancelResult,
    CancelTurn,
    Deliver,
    InboxItem,
    KnownInput,
    LeaseGranted,
    LookedUp,
    Lookup,
    Ok,
    PendingItem,
    ProcessIdentity,
    PutOp,
    Receipt,
    Register,
    Release,
    Text,
)
from callboard.records import (
    InboxAcknowledged,
    MessageCreated,
    Owner,
    PartCreated,
    RecordData,
    SessionCreated,
    TurnStarted,
    check_data,
    item_digest,
)

REF = SessionRef("ws-" + "0" * 32, "s1")
ALICE = "principal:operator:local"


def item(
    message_id: str,
    text: str = "",
    *,
    busy_mode: BusyMode = "steer",
    principal: str = ALICE,
    sender: str | None = None,
    schema: str | None = None,
    wake: bool = True,
    origin: Any = "user",  # noqa: ANN401 - one of a Literal
) -> InboxItem:
    """An input whose text is its id unless given."""
    content = [Text(type="text", text=text or message_id)]
    return InboxItem(
        message_id=message_id,
        origin=origin,
        content=content,
        queued_at=1,
        digest=item_digest([one.model_dump(exclude_none=True) for one in content], {}),
        busy_mode=busy_mode,
        principal=principal,
        sender=sender,
        wake=wake,
        schema_digest=schema,
    )


# --- storage ----------------------------------------------------------------------------------


@dataclass
class FakeStorage:
    """What storage keeps of one session, checked as storage checks it."""

    agent: str = "echo"
    settings: dict[str, str] = field(default_factory=dict[str, str])
    fold: SessionFold = field(default_factory=SessionFold)
    records: list[tuple[str | None, RecordData]] = field(
        default_factory=list[tuple[str | None, RecordData]]
    )
    frames: list[tuple[list[str], list[str]]] = field(
        default_factory=list[tuple[list[str], list[str]]]
    )
    """Of each frame the types of its records and its inbox operations."""
    inbox: dict[str, PendingItem] = field(default_factory=dict[str, PendingItem])
    known: dict[str, tuple[str, KnownInput]] = field(
        default_factory=dict[str, tuple[str, KnownInput]]
    )
    keys: dict[str, tuple[Append, Appended]] = field(
        default_factory=dict[str, tuple[Append, Appended]]
    )
    epoch: int = 0
    commit: int = 0
    n: int = 0
    full_for: Callable[[Append], bool] = lambda _: False
    released: bool = True

    def __post_init__(self) -> None:
        created = SessionCreated(
            workspace="/w",
            session_id=REF.session_id,
            root="/w",
            agent=self.agent,
            settings=self.settings,
            created_at=1,
            owner=Owner(kind="operator", principal_id=ALICE, created_at=1),
        )
        self.fold.admit(None, created, commit=0)
        self.records.append((None, created))

    def handle(self, body: Body) -> Body | CallboardError:
        """Answer a request."""
        if isinstance(body, Append):
            return self._append(body)
        if isinstance(body, Acquire):
            self.epoch += 1
            self.released = False
            return self.lease()
        if isinstance(body, Lookup):
            return self._lookup(body.message_id, body.digest)
        if isinstance(body, Release):
            self.released = True
            return Ok()
        raise AssertionError(body)

    def _lookup(self, message_id: str, digest: str) -> Body | CallboardError:
        found = self.known.get(message_id)
        if found is None:
            return LookedUp(known=None)
        return LookedUp(known=found[1]) if found[0] == digest else RequestConflict()

    def _append(self, body: Append) -> Body | CallboardError:
        if body.epoch != self.epoch:
            return StaleEpoch()
        if body.records and body.key in self.keys:
            before, answer = self.keys[body.key]
            return answer if before == body else IdempotencyConflict()
        for op in body.inbox:
            if isinstance(op, PutOp) and op.item.message_id in self.known:
                digest, known = self.known[op.item.message_id]
                if digest != op.item.digest:
                    return RequestConflict()
                return Appended(
                    commit=self.commit, first_seq=0, last_seq=0, n=[], sizes=[], known=known
                )
        if self.full_for(body):
            return StorageFull(retry_after_ms=1_000)
        return self._write(body)

    def _write(self, body: Append) -> Appended:
        fold = self.fold.clone()
        self.commit += 1
        first = fold.seq + 1
        made: list[tuple[str | None, RecordData]] = []
        for record in body.records:
            data = check_data(record.type, record.data)
            fold.admit(record.turn_id, data, commit=self.commit)
            made.append((record.turn_id, data))
        self.fold = fold
        self.records += made
        ns, sizes = self._operate(body)
        self._note(made)
        ops: list[str] = [one.op for one in body.inbox]
        self.frames.append(([one.type for one in body.records], ops))
        answer = Appended(commit=self.commit, first_seq=first, last_seq=fold.seq, n=ns, sizes=sizes)
        if body.records:
            self.keys[body.key] = (body, answer)
        return answer

    def _operate(self, body: Append) -> tuple[list[int], list[int]]:
        ns, sizes = list[int](), list[int]()
        for op in body.inbox:
            self.n += 1
            if isinstance(op, PutOp):
                size = len(op.item.model_dump_json()) + 100
                name = op.item.message_id
                assert name not in self.inbox
                self.inbox[name] = PendingItem(item=op.item, n=self.n, size_bytes=size)
                self.known[name] = (op.item.digest, KnownInput(item_state="pending"))
                ns.append(self.n)
                sizes.append(size)
            else:
                del self.inbox[op.message_id]
        return ns, sizes

    def _note(self, made: list[tuple[str | None, RecordData]]) -> None:
        for _, data in made:
            if isinstance(data, InboxAcknowledged):
                live = data.reason in ("completed", "aborted")
                for one in data.items:
                    digest, _ = self.known[one.message_id]
                    known = KnownInput(
                        item_state="acknowledged" if live else "discarded", turn_id=data.turn_id
                    )
                    self.known[one.message_id] = (digest, known)

    def lease(self) -> LeaseGranted:
        """Give what a new owner needs, as runtime 5.1 says."""
        fold, turn = self.fold, self.fold.turn
        return LeaseGranted(
            session=str(REF),
            epoch=self.epoch,
            last_seq=fold.seq,
            workspace="/w",
            agent=self.agent,
            model=None,
            settings=self.settings,
            paused=fold.paused_at is not None,
            turns=fold.turns,
            last_turn_id=fold.last_turn_id,
            last_message_id=fold.last_message_id,
            open_turn=fold.open_turn(),
            open_calls=fold.open_calls(),
            pending=[
                one.model_copy(
                    update={
                        "attempts": fold.attempts.get(name, 0),
                        "held": name in fold.held,
                    }
                )
                for name, one in self.inbox.items()
            ],
            applied_ids=[
                name
                for name, by in fold.applied.items()
                if name in self.inbox and (turn is None or by != turn.turn_id)
            ],
        )

    # What a test asks about.

    def types(self) -> list[str]:
        """Give the types of all records but the first."""
        return [data.type for _, data in self.records[1:]]

    def of(self, kind: type[Any]) -> list[Any]:
        """Give the records of one type."""
        return [data for _, data in self.records if isinstance(data, kind)]

    def story(self) -> list[str]:
        """Tell the conversation: `user: text`, `assistant: text`, calls and results."""
        roles: dict[str, str] = {}
        told: list[str] = []
        for _, data in self.records:
            if isinstance(data, MessageCreated):
                roles[data.message_id] = data.role
            elif isinstance(data, PartCreated):
                payload = data.payload
                if data.part_type == "text":
                    told.append(f"{roles[data.message_id]}: {payload['text']}")
                elif data.part_type == "tool_call":
                    told.append(f"call {payload['name']}")
                else:
                    told.append(f"result {payload['name']} {payload['error']}")
        return told

    def heard(self) -> list[str]:
        """Give the ids of the inputs that became messages, in transcript order."""
        return [m.inbox_message_id for m in self.of(MessageCreated) if m.inbox_message_id]

    def check(self) -> None:
        """Check what must hold whenever nothing is on its way (habit 9)."""
        heard = self.heard()
        assert len(heard) == len(set(heard)), "an input became two messages"
        starts = [one.turn_id for one in self.of(TurnStarted)]
        assert starts == sorted(set(starts))
        parents = [m.parent_message_id for m in self.of(MessageCreated)]
        ids = [m.message_id for m in self.of(MessageCreated)]
        assert parents == [None, *ids[:-1]][: len(parents)], "the chain of messages is broken"


# --- the agent's loop -------------------------------------------------------------------------


class PlayLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._clock_resolution = 1e-6  # sums of milliseconds are not exact

    def time(self) -> float:
        return self.seconds

    def turn(self) -> None:
        """Run what is ready, and nothing that waits for time."""
        self.call_soon(self.stop)
        self.run_forever()


# --- the stage --------------------------------------------------------------------------------


class Stage:
    """A session, its storage, and a gateway of which the test plays the part."""

    def __init__(self, agent_name: str = "echo", settings: Mapping[str, str] | None = None) -> None:
        self.storage = FakeStorage(agent_name, dict(settings or {}))
        self.loop = PlayLoop()
        self.replies: dict[str, Body | CallboardError] = {}
        self.told: list[Body] = []
        self.logs: list[tuple[str, Mapping[str, object]]] = []
        self.permits_free = 1_000
        self.permit: str = "none"
        """As the gateway sees it: none, queued, held."""
        self.permit_answer = "grant"
        """What asking gives: grant, queue, refuse, silence."""
        self.storage_says: Callable[[Body], Body | CallboardError] | None = None
        """What storage answers, if not what it should."""
        self.storage_away = False
        self.storage_slow = False
        self.status: int | None = None
        self.ms = 0
        self._requests = 0
        self._calls: deque[AgentCall] = deque()
        self._timers: dict[str, int] = {}
        self.to_storage: deque[tuple[Body, Context]] = deque()
        self._permit_asked = False
        self.artifacts: ArtifactReader | None = None
        self.activate()

    # A life.

    def activate(self, *, idle_ms: int = 300_000) -> None:
        """Start the session's process, up to readiness."""
        self.status = None
        self.to_storage.clear()
        self._calls.clear()
        self._timers.clear()
        self._permit_asked = False
        self.permit = "none"
        self.host = AgentHost(self._calls.append, self.log, self.loop, self.artifacts)
        owner = ProcessIdentity(
            pid=2, start_time=1, boot_id="b", pid_ns=1, nonce=fresh_id(), plane_id="p"
        )
        self.session = Session(self, self.host, REF, owner, idle_ms)
        self.session.storage_up()
        self.session.gateway_up()
        self.run()

    def kill(self) -> None:
        """End the process like SIGKILL: what was not sent to storage is gone."""
        for _ in range(20):  # some agents do not care for a cancel
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.turn()
        self.to_storage.clear()
        self._calls.clear()

    def restart(self) -> None:
        """Kill the process and start it again."""
        self.kill()
        self.activate()

    def close(self) -> None:
        """End the play."""
        self.kill()
        self.loop.close()

    def run(self) -> None:
        """Let everything happen that can happen now."""
        for _ in range(10_000):
            if not self._run_once():
                return
        raise AssertionError("the play does not come to rest")

    def _run_once(self) -> bool:
        moved = False
        if self._storage_can_answer():
            self.storage_answers()
            moved = True
        if self.status is None and self._calls:
            self.session.agent_called(self._calls.popleft())
            self.session.batch_done()
            moved = True
        self.loop.turn()
        waits = self._storage_can_answer() or (self._calls and self.status is None)
        return moved or bool(waits) or self._loop_is_busy()

    def _storage_can_answer(self) -> bool:
        still = self.storage_away or self.storage_slow or self.status is not None
        return bool(self.to_storage) and not still

    def _loop_is_busy(self) -> bool:
        return bool(cast("Any", self.loop)._ready)

    def storage_answers(self, count: int = 1) -> None:
        """Let storage answer its next requests."""
        for _ in range(count):
            body, context = self.to_storage.popleft()
            handle = self.storage_says or self.storage.handle
            self.session.answered(context, handle(body))
            self.session.batch_done()

    def advance(self, ms: int) -> None:
        """Let time pass, timers and the agent's own sleep included."""
        end = self.ms + ms
        while True:
            self.run()
            due = [at for at in self._timers.values() if at <= end]
            sleeps = [one.when() * 1_000 for one in cast("Any", self.loop)._scheduled]
            due += [round(at) for at in sleeps if at <= end + 1e-3]
            if not due:
                break
            self.ms = max(self.ms, min(due))
            self.loop.seconds = self.ms / 1_000
            for name, at in list(self._timers.items()):
                if at <= self.ms and self.status is None:
                    del self._timers[name]
                    self.session.timer(name)
                    self.session.batch_done()
            self.loop.turn()
            if self.status is not None:
                self._timers.clear()
        self.ms = end
        self.loop.seconds = end / 1_000
        self.run()

    # The gateway's part.

    def send(self, message: InboxItem | str, *, permit: bool = False, run: bool = True) -> str:
        """Deliver an input; gives the request's id."""
        body = Deliver(item=item(message) if isinstance(message, str) else message, permit=permit)
        if permit:
            self.permit = "held"
        return self._request(lambda name: self.session.delivered(name, body), run=run)

    def cancel(
        self,
        *,
        turn_id: str | None = None,
        message_id: str | None = None,
        keep_input: bool = False,
        run: bool = True,
    ) -> str:
        """Ask for a cancel; gives the request's id."""
        body = CancelTurn(
            turn_id=turn_id, message_id=message_id, keep_input=keep_input, principal=ALICE
        )
        return self._request(lambda name: self.session.cancelled(name, body), run=run)

    def _request(self, give: Callable[[str], None], *, run: bool) -> str:
        self._requests += 1
        name = f"r{self._requests}"
        give(name)
        self.session.batch_done()
        if run:
            self.run()
        return name

    def receipt(self, request: str) -> Receipt:
        """Give the receipt that answered a request."""
        answer = self.replies[request]
        assert isinstance(answer, Receipt), answer
        return answer

    def refusal(self, request: str) -> CallboardError:
        """Give the error that answered a request."""
        answer = self.replies[request]
        assert isinstance(answer, CallboardError), answer
        return answer

    def cancel_result(self, request: str) -> CancelResult:
        """Give what answered a cancel."""
        answer = self.replies[request]
        assert isinstance(answer, CancelResult), answer
        return answer

    def grant(self) -> None:
        """Grant the permit that was queued."""
        assert self._permit_asked
        self._permit_asked = False
        self.permit = "held"
        self.session.permit_granted()
        self.session.batch_done()
        self.run()

    def stop(self) -> None:
        """Send SIGTERM."""
        self.session.stop()
        self.session.batch_done()
        self.run()

    # `core.Port`.

    def ask(self, body: Body, context: Context) -> None:
        self.to_storage.append((body, context))

    def tell(self, body: Body) -> None:
        self.told.append(body)
        if isinstance(body, Register):
            self.session.registered()
            self.session.batch_done()

    def reply(self, request: str, answer: Body | CallboardError) -> None:
        assert request not in self.replies, f"{request} was answered twice"
        self.replies[request] = answer

    def ask_permit(self) -> None:
        from callboard.errors import Overloaded

        assert not self._permit_asked, "one request per session (ADM-4b)"
        assert self.permit != "held"
        self._permit_asked = True
        if self.permit_answer == "silence":
            return
        self.loop.call_soon(self._answer_permit, self.permit_answer, Overloaded)

    def _answer_permit(self, answer: str, overloaded: type[CallboardError]) -> None:
        if not self._permit_asked:
            return
        if answer == "grant":
            self._permit_asked, self.permit = False, "held"
            self.session.permit_granted()
        elif answer == "queue":
            self.session.permit_queued()
        else:
            self._permit_asked = False
            error = overloaded(resource="pending_count", limit=1, retry_after_ms=500)
            self.session.permit_refused(error)
        self.session.batch_done()

    def drop_permit(self) -> None:
        assert self.permit == "held" or self._permit_asked, "returned twice (ADM-5)"
        self.permit, self._permit_asked = "none", False

    def after(self, ms: int, name: str) -> None:
        self._timers[name] = self.ms + ms

    def now(self) -> int:
        return 1_000_000 + self.ms * 1_000

    def ticks(self) -> int:
        return self.ms

    def stop_process(self, status: int) -> None:
        self.status = status

    def log(self, action: str, facts: Mapping[str, object]) -> None:
        self.logs.append((action, facts))


def cast_agent(name: str) -> Callable[[AgentFunction], AgentFunction]:
    """Register a test's agent under a short name."""
    return agent(name)


def payload(data: PartCreated) -> dict[str, Any]:
    """Give a part's payload, JSON types only."""
    return cast("dict[str, Any]", json.loads(json.dumps(data.payload)))
