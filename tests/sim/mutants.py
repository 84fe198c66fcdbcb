"""The product, broken on purpose: each of these must fall, within its budget of seeds (SIM-9).

Each one replaces a function of the real code by one that is wrong in one way. Two have no function
of a machine to replace: who judges processes, and what a main loop's end does, are of the
simulator, which stands there for shells.
"""

# Whoever breaks a machine on purpose reaches into it, whatever the types of what it finds there.
# ruff: noqa: ANN401
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from callboard import messages as m
from callboard.actors.gateway import sessions as gateway_sessions
from callboard.actors.session import core, mailbox, mailbox_types, open_turn
from callboard.actors.session import recovery as session_recovery
from callboard.actors.session.agent_calls import Call
from callboard.actors.session.mailbox_turns import finish
from callboard.storage import admit, checkpoint, files, frames, recovery, requests, segments, state
from callboard.storage.disk import DiskFull, write_all
from callboard.storage.engine import Engine
from tests.sim.kernel import MS, Process
from tests.sim.world import World

Patch = tuple[Any, str, object]
"""A place, a name in it, and what is put there."""


@dataclass(frozen=True)
class Mutant:
    """One way to be wrong."""

    what: str
    budget: int
    """Within so many fresh seeds it must be caught."""
    seed: int
    """One that catches it, recorded."""
    patches: Callable[[World], list[Patch]]

    @contextmanager
    def patched(self, world: World) -> Generator[None]:
        """Be wrong for a while."""
        patches = self.patches(world)
        before = [getattr(place, name) for place, name, _ in patches]
        for place, name, value in patches:
            setattr(place, name, value)
        try:
            yield
        finally:
            for (place, name, _), value in zip(patches, before, strict=True):
                setattr(place, name, value)


# --- storage ---


def _early_reply(world: World) -> list[Patch]:
    right = Engine._perform

    def perform(self: Engine, persist: Any) -> Any:
        self.release(persist.replies)
        return right(self, persist._replace(replies=()))

    return [(Engine, "_perform", perform)]


def _swapped_order(world: World) -> list[Patch]:
    right = Engine._perform

    def perform(self: Engine, persist: Any) -> Any:
        if not persist.frames:
            return right(self, persist)
        news = [self._confirm(frame) for frame in persist.frames]
        self.materialise()
        self.sync()
        self.release(persist.replies)
        self._unhanded = None
        return [one for one in news if one.text]

    return [(Engine, "_perform", perform)]


def _no_dedupe(world: World) -> list[Patch]:
    return [
        (state.SessionState, "known", lambda self, message_id, digest: None),
        (admit, "_repeated", lambda found, asked, puts: None),
    ]


def _no_sync(world: World) -> list[Patch]:
    def sync(self: segments.JournalWriter) -> None:
        self.durable, self._durable_crc = self.size, self._crc

    return [(segments.JournalWriter, "sync", sync)]


def _failed_sync(world: World) -> list[Patch]:
    def sync(self: segments.JournalWriter) -> None:
        with suppress(OSError):
            self.disk.datasync(self._fds[self.number])
        self.durable, self._durable_crc = self.size, self._crc

    return [(segments.JournalWriter, "sync", sync)]


def _torn_bytes(world: World) -> list[Patch]:
    return [(segments.JournalWriter, "_cut_back", lambda self: None)]


def _stale_epoch(world: World) -> list[Patch]:
    def append(engine: Engine, body: m.Append, moment: Any) -> Any:
        state = requests.find(engine, body.session)
        return admit.plan_append(state, body, moment, engine.artifacts)

    handlers = {**requests._HANDLERS, "append": ("session", append)}
    return [(requests, "_HANDLERS", handlers)]


def _trusts(world: World) -> list[Patch]:
    right = recovery._open

    def trust(writer: segments.JournalWriter, journal: Any) -> None:
        if journal.clean is not None or journal.tail is None:
            right(writer, journal)
            return
        writer.epochs, writer.last_commit = journal.epochs, journal.last_commit
        writer.numbers = sorted((*(one.number for one in journal.segments), *journal.dropped))
        first = journal.segments[0].number
        writer.first = journal.checkpoint.first if journal.checkpoint else first
        last, tail = journal.segments[-1], journal.tail
        writer.resume(last.number, tail.end, tail.frames[-1].crc)
        writer.sync()
        writer.drop(journal.dropped)

    return [(recovery, "_open", trust)]


def _unsynced_recovery(world: World) -> list[Patch]:
    right = recovery._open

    def hasty(writer: Any, journal: Any) -> None:
        writer._fill = lambda fd, path, content: write_all(writer.disk, fd, content, 0)
        right(writer, journal)
        del writer._fill

    return [(recovery, "_open", hasty)]


def _no_dir_sync(world: World) -> list[Patch]:
    return [(place, "sync_dir", lambda disk, path: None) for place in (recovery, segments, files)]


def _no_file_sync(world: World) -> list[Patch]:
    return [(files.SyncJob, "_sync_file", lambda self, path, new: None)]


def _naive_watermark(world: World) -> list[Patch]:
    return [(frames.Scan, "damaged", property(lambda self: bool(self.behind)))]


def _boastful_watermark(world: World) -> list[Patch]:
    right = segments.JournalWriter.append

    def append(self: segments.JournalWriter, found: Any) -> None:
        before, self.durable = self.durable, self.size
        try:
            right(self, found)
        finally:
            self.durable = before

    return [(segments.JournalWriter, "append", append)]


def _early_stop(world: World) -> list[Patch]:
    def stop(self: Engine) -> bool:
        with suppress(DiskFull):
            self.journal.stop()
        return self.checkpoints.now()

    return [(Engine, "stop", stop)]


class _Uncut:
    """A disk that does not truncate."""

    def __init__(self, disk: Any) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def truncate(self, fd: int, size: int) -> None:
        return


def _not_truncated(world: World) -> list[Patch]:
    right = recovery._Rewrite._write

    def write(self: Any, *args: Any) -> Any:
        disk, self.disk = self.disk, _Uncut(self.disk)
        try:
            return right(self, *args)
        finally:
            self.disk = disk

    return [(recovery._Rewrite, "_write", write)]


def _forced_compaction(world: World) -> list[Patch]:
    """The first finding, put back."""
    right, limit = checkpoint.Checkpoints.begin, world.options.segments_max

    def begin(self: checkpoint.Checkpoints, *, compacts: bool = True) -> bool:
        return right(self, compacts=len(self.engine.journal.numbers) < limit)

    return [(checkpoint.Checkpoints, "begin", begin)]


# --- sessions ---


def _tool_again(world: World) -> list[Patch]:
    right = session_recovery.recover

    def recover(lease: m.LeaseGranted, now: Callable[[], int]) -> Any:
        for call in lease.open_calls:
            world.tools.run(lease.session, call.call_id)
        return right(lease, now)

    return [(core, "recover", recover)]


def _early_tool(world: World) -> list[Patch]:
    right = open_turn.OpenTurn._write_for

    def write_for(self: Any, call: Any) -> None:
        if isinstance(call, Call):
            self._desk.agents.answer(call.ticket, None)
            call = replace(call, ticket=None)
        right(self, call)

    return [(open_turn.OpenTurn, "_write_for", write_for)]


def _early_release(world: World) -> list[Patch]:
    def release(box: mailbox_types.Mailbox, command: Any) -> Any:
        box, effects = finish(box, command)
        if box.in_flight == "finish" and box.turn is not None:
            box = box._replace(turn=box.turn._replace(claimed=()))
        return box, effects

    table = dict(mailbox.TRANSITIONS)
    for (mode, kind), transition in mailbox.TRANSITIONS.items():
        if kind is mailbox_types.Finish:
            table[mode, kind] = transition._replace(handler=release)
    return [(mailbox, "TRANSITIONS", table)]


def _split_acknowledgement(world: World) -> list[Patch]:
    right = core.Session._send

    def send(self: core.Session, body: m.Append, context: core.BoxFrame) -> None:
        acks = [one for one in body.records if one.type == "inbox_acknowledged"]
        if not context.is_terminal or not acks:
            right(self, body, context)
            return
        rest = [one for one in body.records if one.type != "inbox_acknowledged"]
        first = {"key": acks[0].id, "records": acks}
        second = {"key": rest[0].id, "records": rest, "inbox": []}
        alone = core.TurnFrame((), lambda error: None)
        self.port.ask(body.model_copy(update=first), alone)
        drafts = [one for one in context.drafts if one.data.type != "inbox_acknowledged"]
        right(self, body.model_copy(update=second), context._replace(drafts=drafts))

    return [(core.Session, "_send", send)]


def _permit_twice(world: World) -> list[Patch]:
    right = core.Session._perform

    def again(session: core.Session) -> None:
        if session.box.permit == "held":
            session.port.drop_permit()

    def perform(self: core.Session, effect: Any) -> None:
        right(self, effect)
        if isinstance(effect, mailbox_types.ReturnPermit):
            world.kernel.at(60 * MS, again, self)

    return [(core.Session, "_perform", perform)]


def _permit_evicts(world: World) -> list[Patch]:
    """The second finding, put back."""
    right = gateway_sessions.Sessions._permit_returned

    def returned(self: Any, peer: Any) -> None:
        session = self._incarnation(peer)
        if session is not None:
            session.said_evictable = True
        right(self, peer)

    return [(gateway_sessions.Sessions, "_permit_returned", returned)]


def _permit_crosses(world: World) -> list[Patch]:
    """The third finding, put back."""
    right = core.Session.registered

    def registered(self: core.Session) -> None:
        self._said_permit = True
        right(self)

    return [(core.Session, "registered", registered)]


# --- processes ---


def _silence(world: World) -> list[Patch]:
    def judge(owner: Any) -> str:
        process = world.nonces.get(owner.nonce)
        return "alive" if process and process.alive and not process.paused else "dead"

    return [(world, "judge", judge)]


def _dead_main_loop(world: World) -> list[Patch]:
    def stays(self: Process) -> None:
        self.deaf = True

    return [(Process, "main_loop_ended", stays)]


MUTANTS: Final[Mapping[str, Mutant]] = MappingProxyType(
    {
        "early_reply": Mutant("answers before the sync", 200, 1, _early_reply),
        "no_sync": Mutant("does not sync the journal", 200, 1, _no_sync),
        "no_dedupe": Mutant("stores a repeated message again", 200, 1, _no_dedupe),
        "failed_sync": Mutant("answers after a failed sync", 200, 3, _failed_sync),
        "torn_bytes": Mutant("leaves what a full disk took of a batch", 400, 2, _torn_bytes),
        "tool_again": Mutant("runs a tool again after a restart", 200, 11, _tool_again),
        "early_tool": Mutant("runs a tool before its call is durable", 200, 1, _early_tool),
        "stale_epoch": Mutant("accepts a stale epoch", 400, 32, _stale_epoch),
        "trusts": Mutant("trusts what it reads after a failed sync", 400, 5, _trusts),
        "dead_main_loop": Mutant("lives on without its main loop", 2_000, 18, _dead_main_loop),
        "unsynced_recovery": Mutant(
            "answers before what it recovered is synced", 6_000, 1, _unsynced_recovery
        ),
        "no_dir_sync": Mutant("syncs no directory", 400, 1, _no_dir_sync),
        "no_file_sync": Mutant(
            "drops segments before their files are synced", 400, 1, _no_file_sync
        ),
        "naive_watermark": Mutant(
            "takes a good frame behind a bad one for damage", 2_000, 203, _naive_watermark
        ),
        "boastful_watermark": Mutant(
            "says of bytes that they are synced before they are", 400, 21, _boastful_watermark
        ),
        "early_stop": Mutant("writes clean_stop before the checkpoint", 2_000, 42, _early_stop),
        "swapped_order": Mutant(
            "writes the files before the journal is synced", 400, 68, _swapped_order
        ),
        "not_truncated": Mutant("rewrites files without cutting them", 2_000, 5, _not_truncated),
        "early_release": Mutant(
            "ends claims before the terminal is durable", 400, 1, _early_release
        ),
        "split_acknowledgement": Mutant(
            "acknowledges in a frame of its own", 400, 1, _split_acknowledgement
        ),
        "permit_twice": Mutant("gives a permit back twice", 400, 19, _permit_twice),
        "forced_compaction": Mutant(
            "compacts inboxes in a checkpoint that a batch has forced", 400, 98, _forced_compaction
        ),
        "permit_evicts": Mutant(
            "takes a session for evictable when its permit comes back", 6_000, 964, _permit_evicts
        ),
        "permit_crosses": Mutant(
            "forgets a permit that crossed a registration", 6_000, 434, _permit_crosses
        ),
        "silence": Mutant("takes a silent owner for dead", 400, 5, _silence),
    }
)
