"""A storage engine over a made-up disk, clock and processes, and the requests that drive it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from callboard import home
from callboard import messages as m
from callboard.errors import CallboardError
from callboard.ids import SessionRef, workspace_key
from callboard.records import item_digest
from callboard.storage.checkpoint import InlineRunner, Runner
from callboard.storage.durable import DurableFile, forget
from callboard.storage.engine import Engine, Options, Reply, Request
from callboard.storage.recovery import recover
from tests.storage.memory_disk import Crash, KeepAll, MemoryDisk

WORKSPACE = "/u/project"
KEY = workspace_key(WORKSPACE)
PLANE = "plane-1"
B = TypeVar("B", bound=m.Body)


def ref(session_id: str = "s1", workspace: str = WORKSPACE) -> str:
    return str(SessionRef(workspace_key(workspace), session_id))


class FakeClock:
    def __init__(self) -> None:
        self.us = 1_700_000_000_000_000
        self.s = 100.0

    def now_us(self) -> int:
        return self.us

    def monotonic(self) -> float:
        return self.s

    def pass_ms(self, ms: int) -> None:
        self.us += ms * 1_000
        self.s += ms / 1_000


class FakeOwners:
    """Processes by nonce: alive, dead or unknown; whoever is not named is dead."""

    def __init__(self) -> None:
        self.verdicts: dict[str, home.Verdict] = {}
        self.can_end = True
        self.ended: list[str] = []

    def judge(self, owner: home.Identity) -> home.Verdict:
        return self.verdicts.get(owner.nonce, "dead")

    def end(self, owner: home.Identity) -> bool:
        if self.can_end:
            self.ended.append(owner.nonce)
            self.verdicts[owner.nonce] = "dead"
        return self.can_end


class World:
    """A home, and one engine after the other on it."""

    def __init__(
        self,
        disk: MemoryDisk | None = None,
        *,
        plane: str = PLANE,
        segment_bytes: int = 1 << 20,
        checkpoint_bytes: int = 1 << 30,
        runner: Callable[[], Runner] = InlineRunner,
        seed: int = 0,
        reserve_bytes: int = 0,
    ) -> None:
        self.disk = disk or MemoryDisk()
        self.clock, self.owners = FakeClock(), FakeOwners()
        self.options = Options(plane, segment_bytes, checkpoint_bytes, 30_000, reserve_bytes)
        self.runner = runner
        self.rng = random.Random(seed)
        self.replies: list[Reply] = []
        self.ids = itertools.count(1)
        self.gateway = 0
        self.engine = self.open()

    def fresh(self) -> str:
        return f"{self.rng.getrandbits(128):032x}"

    def release(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            self.disk.log.append(("reply", str(reply.token)))
        self.replies.extend(replies)

    def open(self, *, with_owners: bool = True) -> Engine:
        """Start the next engine; with the one before it, all owners have ended."""
        if with_owners:
            self.owners.verdicts.clear()
        forget(self.disk, "/run/durable")
        recovered = recover(self.disk, "/home", self.fresh, 64)
        self.engine = Engine(
            self.disk,
            self.clock,
            recovered,
            self.owners,
            DurableFile(self.disk, "/run/durable"),
            self.options,
            self.release,
            self.runner(),
            self.fresh,
        )
        return self.engine

    def crash(self, how: Crash | None = None, *, with_owners: bool = True) -> World:
        """End the engine without a word, and with it all owners; start the next one."""
        self.disk = self.disk.crash(how or KeepAll())
        self.open(with_owners=with_owners)
        return self

    # --- requests -----------------------------------------------------------------------------

    def request(self, body: m.Body) -> Request:
        role = {
            "accept": "gateway",
            "create": "gateway",
            "gateway_hello": "gateway",
            "discard_input": "gateway",
            "unquarantine": "gateway",
            "plane_hello": "supervisor",
            "quarantine": "supervisor",
        }.get(body.kind, "session")
        scope = getattr(body, "session", "") if role == "session" else ""
        return Request(next(self.ids), role, scope, body)

    def batch(self, bodies: Sequence[m.Body]) -> list[m.Body | CallboardError]:
        first = len(self.replies)
        self.engine.run([self.request(body) for body in bodies])
        return [reply.body for reply in self.replies[first:]]

    def call(self, body: m.Body) -> m.Body:
        """Ask one thing; raises the refusal."""
        (answer,) = self.batch([body])
        if isinstance(answer, CallboardError):
            raise answer
        return answer

    def ask(self, kind: type[B], body: m.Body) -> B:
        answer = self.call(body)
        assert isinstance(answer, kind), answer
        return answer

    # --- what sessions, gateways and supervisors do -------------------------------------------

    def hello(self, nonce: str = "1" * 32) -> m.GatewayEpoch:
        answer = self.ask(m.GatewayEpoch, m.GatewayHello(nonce=nonce))
        self.gateway = answer.epoch
        return answer

    def create(self, session_id: str = "s1", record_id: str | None = None) -> str:
        if not self.gateway:
            self.hello()
        body = self.creation(session_id, record_id)
        self.call(body)
        return body.session

    def creation(self, session_id: str = "s1", record_id: str | None = None) -> m.Create:
        return creation(session_id, self.gateway, record_id or self.fresh(), self.clock.us)

    def owner(self, nonce: str | None = None, plane: str = PLANE) -> m.ProcessIdentity:
        return m.ProcessIdentity(
            pid=4242,
            start_time=1,
            boot_id="boot",
            pid_ns=1,
            nonce=nonce or self.fresh(),
            plane_id=plane,
        )

    def acquire(self, text: str, nonce: str | None = None) -> m.LeaseGranted:
        owner = self.owner(nonce)
        granted = self.ask(m.LeaseGranted, m.Acquire(session=text, owner=owner))
        self.owners.verdicts[owner.nonce] = "alive"
        return granted

    def accept(self, text: str, message_id: str, words: str = "hi", **more: object) -> m.Body:
        return self.call(self.acceptance(text, message_id, words, **more))

    def acceptance(self, text: str, message_id: str, words: str = "hi", **more: object) -> m.Accept:
        return m.Accept(
            session=text, gateway_epoch=self.gateway, item=item(message_id, words, **more)
        )

    def append(
        self,
        text: str,
        epoch: int,
        records: Sequence[m.NewRecord] = (),
        puts: Sequence[m.InboxItem] = (),
        removes: Sequence[str] = (),
        first_seq: int | None = None,
    ) -> m.Appended:
        return self.ask(
            m.Appended, appending(text, epoch, records, puts, removes, first_seq=first_seq)
        )

    def turn(self, text: str, epoch: int, message_id: str, turn_id: str, words: str = "hi") -> None:
        """Put an input, run a turn that answers it, and end it."""
        self.append(
            text, epoch, [started(turn_id, epoch, [message_id], self)], [item(message_id, words)]
        )
        self.append(text, epoch, applying(turn_id, message_id, self))
        self.append(text, epoch, *ending(turn_id, [message_id], self, words))


def creation(session_id: str, gateway_epoch: int, record_id: str, at: int = 1) -> m.Create:
    text = ref(session_id)
    principal = "principal:operator:local"
    data = {
        "workspace": WORKSPACE,
        "session_id": session_id,
        "root": text,
        "agent": "echo",
        "created_at": at,
        "owner": {"kind": "operator", "principal_id": principal, "created_at": at},
    }
    record = new("session_created", data, record_id)
    return m.Create(gateway_epoch=gateway_epoch, session=text, record=record)


def item(message_id: str, words: str = "hi", **more: object) -> m.InboxItem:
    content: list[dict[str, object]] = [{"type": "text", "text": words}]
    fields: dict[str, object] = {
        "message_id": message_id,
        "origin": "user",
        "content": [m.Text(type="text", text=words)],
        "queued_at": 1_700_000_000_000_000,
        "digest": item_digest(content, {}),
        "principal": "principal:operator:local",
        **more,
    }
    return m.InboxItem.model_validate(fields)


def appending(
    text: str,
    epoch: int,
    records: Sequence[m.NewRecord] = (),
    puts: Sequence[m.InboxItem] = (),
    removes: Sequence[str] = (),
    *,
    first_seq: int | None = None,
) -> m.Append:
    inbox: list[m.PutOp | m.RemoveOp] = [m.PutOp(op="put", item=one) for one in puts]
    inbox += [m.RemoveOp(op="remove", message_id=one) for one in removes]
    key = records[0].id if records else puts[0].message_id
    return m.Append(
        session=text,
        epoch=epoch,
        key=key,
        first_seq=first_seq,
        records=list(records),
        inbox=inbox,
    )


def new(kind: str, data: object, record_id: str, turn_id: str | None = None) -> m.NewRecord:
    spelled = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
    return m.NewRecord(id=record_id, type=kind, turn_id=turn_id, data=spelled)


def started(turn_id: str, epoch: int, inputs: list[str], world: World) -> m.NewRecord:
    data = {
        "turn_id": turn_id,
        "epoch": epoch,
        "kind": "user",
        "input_ids": inputs,
        "chain_index": 0,
        "started_at": world.clock.us,
        "agent_id": "echo",
        "principal": "principal:operator:local",
        "trace_id": "t",
    }
    return new("turn_started", data, world.fresh(), turn_id)


def message(
    turn_id: str, message_id: str, role: str, world: World, inbox_id: str | None = None
) -> m.NewRecord:
    data = {
        "message_id": message_id,
        "role": role,
        "inbox_message_id": inbox_id,
        "created_at": world.clock.us,
    }
    return new("message_created", data, world.fresh(), turn_id)


def part(turn_id: str, message_id: str, words: str, world: World) -> m.NewRecord:
    data = {
        "part_id": f"part_{message_id}",
        "message_id": message_id,
        "part_type": "text",
        "payload": {"text": words},
        "created_at": world.clock.us,
    }
    return new("part_created", data, world.fresh(), turn_id)


def applying(turn_id: str, message_id: str, world: World) -> list[m.NewRecord]:
    name = f"msg_{message_id}"
    return [
        message(turn_id, name, "user", world, message_id),
        part(turn_id, name, "hi", world),
    ]


def acknowledged(
    ids: Sequence[str],
    world: World,
    words: str = "hi",
    reason: str = "completed",
    turn_id: str | None = None,
) -> m.NewRecord:
    digest = item_digest([{"type": "text", "text": words}], {})
    data = {
        "reason": reason,
        "turn_id": turn_id,
        "items": [{"message_id": one, "digest": digest} for one in ids],
    }
    return new("inbox_acknowledged", data, world.fresh(), turn_id)


def terminal(
    turn_id: str,
    claimed: Sequence[str],
    world: World,
    *,
    cause: str | None = None,
    disposition: str | None = None,
    outcome: str | None = None,
) -> m.NewRecord:
    data: dict[str, object] = {
        "turn_id": turn_id,
        "claimed_input_ids": list(claimed),
        "turns_count": 1,
        "tool_calls_count": 0,
        "duration_ms": 5,
        "outcome": outcome or ("completed" if cause is None else "failed"),
        "input_disposition": disposition or ("acknowledged" if cause is None else "pending"),
    }
    if cause is None:
        return new(
            "turn_completed", data | {"completed_at": world.clock.us}, world.fresh(), turn_id
        )
    data |= {"cause": cause, "aborted_at": world.clock.us}
    return new("turn_aborted", data, world.fresh(), turn_id)


def ending(
    turn_id: str, ids: list[str], world: World, words: str = "hi"
) -> tuple[list[m.NewRecord], list[m.InboxItem], list[str]]:
    records = [
        acknowledged(ids, world, words, turn_id=turn_id),
        terminal(turn_id, ids, world),
    ]
    return records, [], ids
