"""Staged creation: a session with more records than one frame holds, there at once or not at all.

The records come in pieces. Each is checked and stamped as an append would be, under a commit number
that was set aside when the first came, and written behind the others into a file that nobody reads.
With the last piece that file is synced, then a frame without content is synced, whose number is
above the one set aside, and then the file gets its name: the session is there. A crash before that
leaves a file that is removed, and a number that no frame has (ADR 0073).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from callboard.errors import (
    CallboardError,
    Conflict,
    Overloaded,
    PayloadTooLarge,
    SeqConflict,
    SessionExists,
    StorageFull,
)
from callboard.ids import SessionRef, parse_ref
from callboard.limits import STAGED_BYTES_MAX, STAGED_OPERATIONS_MAX, STORAGE_FULL_PROBE_MS
from callboard.messages import Body, Created, Ok, StageRecords
from callboard.records import timestamp
from callboard.storage.beside import InlineJobs, Runner
from callboard.storage.disk import FULL, Disk, DiskFull, Poisoned, poison, sync_dir, write_all
from callboard.storage.draft import Draft, Moment
from callboard.storage.requests import check_creation, check_gateway
from callboard.storage.state import Key, SessionState, digest_of, new_state, pack_key

if TYPE_CHECKING:
    from callboard.storage.engine import Engine

_OVERLOADED_MS: Final = 1_000


@dataclass(slots=True)
class Operation:
    """One creation in the making."""

    op: str
    ref: SessionRef
    commit: int
    """Set aside for its records."""
    state: SessionState
    pieces: int = 0
    """Those that are written."""
    busy: bool = False

    @property
    def text(self) -> str:
        """The session's reference."""
        return self.state.text


@dataclass(slots=True)
class StageJob:
    """Writes one piece; with the last, everything is made durable but the final name."""

    disk: Disk
    token: object
    path: str
    offset: int
    data: bytes
    last: bool
    parents: tuple[str, ...]
    """Folders whose names must be durable, innermost first."""
    state: SessionState
    error: CallboardError | None = None
    poisoned: Poisoned | None = None

    def run(self) -> None:
        """Do it. What goes wrong is kept for the actor's thread."""
        try:
            self._write()
        except DiskFull:
            self.error = StorageFull(retry_after_ms=STORAGE_FULL_PROBE_MS)
        except Poisoned as error:
            self.poisoned = error

    def _write(self) -> None:
        try:
            fd = self.disk.open(self.path) if self.offset else self._create()
        except OSError as error:
            if error.errno in FULL:
                raise DiskFull from error
            poison("create_staged", error)
        try:
            write_all(self.disk, fd, self.data, self.offset)
            if self.last:
                self._sync(fd)
        except OSError as error:
            if error.errno not in FULL:
                poison("write_staged", error)
            raise DiskFull from error
        finally:
            self.disk.close(fd)
        if self.last:
            for folder in self.parents:
                sync_dir(self.disk, folder)

    def _create(self) -> int:
        folder = self.parents[0]
        if self.disk.stat(folder) is None:
            self.disk.mkdir(folder)
        elif self.disk.stat(self.path) is not None:
            self.disk.unlink(self.path)  # of the same operation, before storage was restarted
        return self.disk.create(self.path)

    def _sync(self, fd: int) -> None:
        try:
            self.disk.sync(fd)
        except OSError as error:
            poison("sync_staged", error)


class Staging:
    """Creations in the making, of one engine.

    Args:
        engine: writes the frame, and knows the sessions.
        published: told of each session that is there now.

    """

    def __init__(self, engine: Engine, published: Callable[[SessionState], None]) -> None:
        self.engine = engine
        self.runner: Runner = InlineJobs()
        self._published = published
        self._operations: dict[str, Operation] = {}

    def take(self, body: StageRecords, token: object) -> None:
        """Take the next piece of a creation; the answer comes when it is written.

        Raises:
            StaleEpoch, SessionExists, SeqConflict, RecordInvalid, PayloadTooLarge, …: refused. A
                piece that breaks a rule ends its operation: nothing of it stays.

        """
        check_gateway(self.engine, body.gateway_epoch)
        if self._is_there(body):
            self._answer(token, Created(session=body.session, fresh=False))
            return
        one = self._operations.get(body.op) or self._begin(body)
        if one.busy or one.text != body.session:
            raise Conflict
        if body.index + 1 == one.pieces and not body.last:
            self._answer(token, Ok())  # its answer was lost
            return
        if body.index != one.pieces:
            raise SeqConflict(expected=one.pieces)
        try:
            job = self._plan(one, body, token)
        except CallboardError:
            self._abandon(one)
            raise
        one.busy = True
        self.runner.start(job, lambda job: self._ended(one, job))

    def _is_there(self, body: StageRecords) -> bool:
        """Tell whether this very creation was published before; refuse if another one was."""
        state = self.engine.sessions.get(body.session)
        self.engine.saw_commit(self.engine.sessions.highest_commit)
        if state is None:
            return False
        if body.op not in state.keys:
            raise SessionExists
        return True

    def _begin(self, body: StageRecords) -> Operation:
        if body.index:
            raise SeqConflict(expected=0)
        if len(self._operations) >= STAGED_OPERATIONS_MAX:
            raise Overloaded(
                resource="pending_count",
                limit=STAGED_OPERATIONS_MAX,
                retry_after_ms=_OVERLOADED_MS,
            )
        ref = parse_ref(body.session)
        taken = any(one.text == body.session for one in self._operations.values())
        if taken or self.engine.sessions.twin(ref):
            raise SessionExists
        commit = self.engine.set_commit_aside()
        one = Operation(body.op, ref, commit, new_state(ref))
        self._operations[body.op] = one
        self.engine.sessions.staged.add(body.session)
        return one

    def _plan(self, one: Operation, body: StageRecords, token: object) -> StageJob:
        """Check and stamp a piece."""
        if not one.pieces:
            check_creation(one.ref, body.records[0], key=body.op)
        now = self.engine.clock.now_us()
        draft = Draft(one.state, Moment(one.commit, now, timestamp(now), self.engine.fresh))
        draft.add_records(body.records)
        state, data = draft.state, b"".join(draft.lines)
        if state.transcript.bytes > STAGED_BYTES_MAX:
            raise PayloadTooLarge(limit="STAGED_BYTES_MAX", maximum=STAGED_BYTES_MAX)
        state.settled.update(draft.settled)
        if not one.pieces:
            first = Key(one.commit, 1, 1, digest_of(body.records[:1]))
            state.keys[body.op] = pack_key(first)
        folder = self.engine.sessions.folder(one.text)
        return StageJob(
            self.engine.disk,
            token,
            self._path(one),
            one.state.transcript.bytes,
            data,
            body.last,
            (folder, *_above(folder, self.engine.files.root)),
            state,
        )

    def _path(self, one: Operation) -> str:
        return f"{self.engine.sessions.folder(one.text)}/.transcript.jsonl.{one.op}.tmp"

    def _ended(self, one: Operation, job: StageJob) -> None:
        """Go on with a piece that was written.

        Raises:
            Poisoned: a write or a sync failed for good (FLT-3c).

        """
        one.busy = False
        if job.poisoned is not None:
            raise job.poisoned
        error = job.error
        if error is None:
            one.state, one.pieces = job.state, one.pieces + 1
            if not job.last:
                self._answer(job.token, Ok())
                return
            error = self._publish(one)
        if error is not None:
            self._abandon(one)
            self._answer(job.token, error)
            return
        self._answer(job.token, Created(session=one.text, fresh=True))

    def _publish(self, one: Operation) -> CallboardError | None:
        """Give the file its name; from then on the session is there."""
        engine = self.engine
        if engine.sessions.get(one.text) is not None or engine.sessions.twin(one.ref):
            return SessionExists()
        if not engine.reserve.whole or not engine.commit_nothing():
            return StorageFull(retry_after_ms=STORAGE_FULL_PROBE_MS)
        folder = engine.sessions.folder(one.text)
        try:
            engine.disk.rename(self._path(one), f"{folder}/transcript.jsonl")
        except OSError as error:
            poison("publish_staged", error)
        sync_dir(engine.disk, folder)
        self._forget(one)
        engine.sessions.set(one.text, one.state)
        engine.sessions.created(one.ref)
        self._published(one.state)
        return None

    def _abandon(self, one: Operation) -> None:
        """Let nothing of it stay."""
        self._forget(one)
        try:
            self.engine.disk.unlink(self._path(one))
        except FileNotFoundError:
            return  # its first piece was refused, or found no room for a file
        except OSError as error:
            poison("unlink_staged", error)

    def _forget(self, one: Operation) -> None:
        self._operations.pop(one.op, None)
        self.engine.sessions.staged.discard(one.text)

    def _answer(self, token: object, body: Body | CallboardError) -> None:
        self.engine.answer_one(token, body)


def _above(folder: str, root: str) -> list[str]:
    found: list[str] = []
    while folder != root:
        folder = folder.rpartition("/")[0]
        found.append(folder)
    return found
