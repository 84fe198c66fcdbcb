"""The storage engine: requests in, one synced batch, replies out (FLT-2). No socket, no thread.

A batch is planned against the ledger, written as one frame a request, synced once, answered, and
then written to the streams' files. What is planned is taken over at once, so that the next request
of the batch sees it, and is undone if the frame does not fit the disk (FLT-20).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from callboard.errors import CallboardError, Internal, StorageFull
from callboard.ids import fresh_id
from callboard.levels import free_space, queue
from callboard.limits import (
    ARTIFACT_STORES_BYTES_MAX,
    COMMIT_BATCH_BYTES_MAX,
    COMMIT_BATCH_FRAMES_MAX,
    FRAME_BYTES_MAX,
    JOURNAL_SEGMENTS_MAX,
    STORAGE_FULL_PROBE_MS,
)
from callboard.logs import Log
from callboard.messages import Body, Level, Ok, StageRecords, StoreArtifact
from callboard.records import timestamp
from callboard.storage.artifacts import Artifacts
from callboard.storage.checkpoint import Checkpoints, InlineRunner, Runner
from callboard.storage.disk import Clock, Disk, DiskFull, Poisoned
from callboard.storage.draft import Moment, Plan
from callboard.storage.durable import Durable
from callboard.storage.frames import Damaged, Epochs, FileMark, pack_commit, size_of
from callboard.storage.leases import Owners
from callboard.storage.load import trim_keys
from callboard.storage.recovery import Recovered
from callboard.storage.requests import check_store, plan_request
from callboard.storage.reserve import Reserve
from callboard.storage.staging import Staging
from callboard.storage.state import SessionState

WAITING_BYTES_MAX: Final = 67_108_864
"""Bytes that may wait for room in the streams' files; beyond it nothing more is written."""
_BATCH_ROOM: Final = COMMIT_BATCH_BYTES_MAX - FRAME_BYTES_MAX - 65_536
"""A batch that has this much takes no further frame, whatever its size."""


class Request(NamedTuple):
    """Something asked of the ledger, by whom, and how to answer."""

    token: object
    role: str
    scope: str
    body: Body
    weight: int = 0
    """Bytes of its message, for its place in a batch."""

    @property
    def lane(self) -> str:
        """The session that it is about, in whose order it stays; empty for none."""
        return getattr(self.body, "session", "")


class Reply(NamedTuple):
    """The one answer to a request."""

    token: object
    body: Body | CallboardError


class News(NamedTuple):
    """What a synced frame says about a session, to those who follow it."""

    text: str
    first_seq: int
    lines: tuple[bytes, ...]


class Frame(NamedTuple):
    """A planned frame, and how to undo that it was taken over."""

    commit: int
    payload: bytes
    size: int
    """Bytes that it takes in the journal."""
    plan: Plan
    text: str
    before: SessionState | None
    epochs: Epochs


class Persist(NamedTuple):
    """An instruction: write and sync these frames, then let these replies go (FLT-2b)."""

    frames: tuple[Frame, ...]
    replies: tuple[Reply, ...]


Release = Callable[[Sequence[Reply]], None]
"""Lets replies go; called only when what they promise is durable."""


def no_log(action: str, facts: Mapping[str, object]) -> None:
    """Write nothing."""


@dataclass(frozen=True, slots=True)
class Options:
    """What an engine is set up with."""

    plane_id: str
    segment_bytes: int
    checkpoint_bytes: int
    checkpoint_ms: int
    reserve_bytes: int = 0
    """Room that is kept for frames that end something; 0 for none."""


@dataclass(slots=True)
class Counters:
    """Monotonic counts, for status and benches."""

    commits: int = 0
    batches: int = 0
    bytes: int = 0
    refused_full: int = 0
    checkpoints: int = 0
    segments: int = 0
    lost_files: int = field(default=0)


class Engine:
    """The one writer of a home.

    Args:
        disk: all files.
        clock: all time.
        recovered: the home, as `recovery.recover` left it.
        owners: knows which processes live.
        durable: the numbers that readers look at.
        options: settings.
        release: takes replies.
        runner: runs the slow half of a checkpoint.
        fresh: makes ids.
        log: is told of what should not happen.

    """

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        recovered: Recovered,
        owners: Owners,
        durable: Durable,
        options: Options,
        release: Release,
        runner: Runner | None = None,
        fresh: Callable[[], str] = fresh_id,
        log: Log = no_log,
    ) -> None:
        self.log = log
        self.disk, self.clock, self.owners, self.options = disk, clock, owners, options
        self.durable, self.release, self.fresh = durable, release, fresh
        self.journal, self.files = recovered.journal, recovered.files
        self.sessions = recovered.sessions
        self.marks = dict(recovered.marks)
        self.counters = Counters()
        self._next_commit = recovered.next_commit
        self._last_sync = clock.monotonic()
        self._marked = False
        self.handed = self.journal.last_commit
        """The last commit whose parts the files have, or wait for."""
        self._unhanded: int | None = None
        self.reserve = Reserve(disk, f"{self.files.root}/journal", options.reserve_bytes)
        self.reserve.restore()
        self.checkpoints = Checkpoints(self, runner or InlineRunner())
        self.artifacts = Artifacts(
            disk, self.files.root, clock, self.sessions, fresh, self.answer_one
        )
        self.staging = Staging(self, self._created)
        self._news: list[News] = []
        durable.synced(self.handed)
        durable.written(self.handed)
        self.mark()

    # --- a batch ------------------------------------------------------------------------------

    def run(self, requests: Sequence[Request]) -> list[News]:
        """Answer requests, in order, in as few synced batches as the limits allow.

        Returns:
            What the frames say, in their order.

        Raises:
            Poisoned: nothing more may be answered or touched (FLT-3c).

        """
        news: list[News] = []
        at = 0
        while at < len(requests):
            persist, count = self._plan_batch(requests, at)
            try:
                self._write(persist.frames)
            except DiskFull:
                self._undo(persist.frames)
                persist = self._one_by_one(requests[at : at + count])
            news += self._perform(persist)
            at += count
        self.artifacts.pump()
        return news

    def store_artifact(self, token: object, body: StoreArtifact) -> None:
        """Take on the text of a long message, before the message is admitted (ART-2).

        The answer is released when the file is durable, or at once: what an input of this id was
        accepted with needs no file any more, and what would be refused writes none (INB-6d).
        """
        try:
            if check_store(self, body):
                self.artifacts.store(token, body)
            else:
                self.answer_one(token, Ok())
        except CallboardError as error:
            self.answer_one(token, error)
        self.artifacts.pump()

    def stage(self, token: object, body: StageRecords) -> None:
        """Take on a piece of a session that no frame can hold (lifecycle 3.5)."""
        try:
            self.staging.take(body, token)
        except CallboardError as error:
            self.answer_one(token, error)

    def answer_one(self, token: object, body: Body | CallboardError) -> None:
        """Let one reply go; what it promises is durable."""
        self.release([Reply(token, body)])

    def set_commit_aside(self) -> int:
        """Give a commit number that no frame will have."""
        self._next_commit += 1
        return self._next_commit - 1

    def commit_nothing(self) -> bool:
        """Write and sync a frame without content, above every number that was set aside.

        Returns:
            False if there is no room.

        """
        frame = self.take(Plan(Ok(), epochs=self.journal.epochs))
        if not self._fits(frame):
            return False
        self.sync()
        self._confirm(frame)
        self._unhanded = None
        self.materialise()
        return True

    def _created(self, state: SessionState) -> None:
        self._news.append(News(state.text, 1, (b"",)))

    def take_news(self) -> list[News]:
        """Give what has come about beside the batches."""
        news, self._news = self._news, []
        return news

    def _plan_batch(self, requests: Sequence[Request], at: int) -> tuple[Persist, int]:
        frames: list[Frame] = []
        replies: list[Reply] = []
        size = count = 0
        ts = timestamp(now := self.clock.now_us())
        for request in requests[at:]:
            if len(frames) >= COMMIT_BATCH_FRAMES_MAX or size > _BATCH_ROOM:
                break
            reply, frame = self._plan_one(request, now, ts)
            replies.append(reply)
            if frame is not None:
                frames.append(frame)
                size += frame.size
            count += 1
        return Persist(tuple(frames), tuple(replies)), count

    def _plan_one(self, request: Request, now: int, ts: str) -> tuple[Reply, Frame | None]:
        try:
            plan = plan_request(self, request, Moment(self._next_commit, now, ts, self.fresh))
            while plan.commit not in (0, self._next_commit):  # a file that was read had a later one
                plan = plan_request(self, request, Moment(self._next_commit, now, ts, self.fresh))
            if not plan.writes:
                return Reply(request.token, plan.reply), None
            self._check_room(plan)
        except CallboardError as error:
            return Reply(request.token, error), None
        except (Poisoned, OSError):
            raise
        except Exception as error:
            return Reply(request.token, self._bug(request, error)), None
        return Reply(request.token, plan.reply), self.take(plan)

    def _bug(self, request: Request, error: Exception) -> Internal:
        """Refuse what we cannot plan: planning changed nothing, so no other session suffers."""
        name = self.fresh()
        steps = traceback.extract_tb(error.__traceback__)[-8:]
        facts = {
            "level": "error",
            "correlation_id": name,
            "kind": request.body.kind,
            "error": type(error).__name__,
            "at": [f"{os.path.basename(step.filename)}:{step.lineno}" for step in steps],
        }
        self.log("plan_failed", facts)
        return Internal(correlation_id=name)

    def _check_room(self, plan: Plan) -> None:
        """Refuse what begins something while room is short, and everything when too much waits."""
        waiting = self.files.waiting_bytes
        short = self.files.full and plan.puts
        spent = not self.reserve.whole and not plan.ends
        if short or spent or waiting > WAITING_BYTES_MAX:
            self.counters.refused_full += 1
            raise storage_full()

    def next_moment(self) -> Moment:
        """Give what the next frame is stamped with."""
        now = self.clock.now_us()
        return Moment(self._next_commit, now, timestamp(now), self.fresh)

    def saw_commit(self, commit: int) -> None:
        """Keep the next frame's number above a commit that was met in a file (FLT-14)."""
        self._next_commit = max(self._next_commit, commit + 1)

    # --- taking over, and back ----------------------------------------------------------------

    def take(self, plan: Plan) -> Frame:
        """Take a plan over, for the rest of the batch to see."""
        state = plan.state
        text = state.text if state is not None else ""
        before = self.sessions.cached(text)
        leases = ((text, plan.lease.spell()),) if plan.lease is not None else ()
        payload = pack_commit(plan.parts, leases, plan.epochs)
        size, commit = size_of(payload), self._next_commit
        frame = Frame(commit, payload, size, plan, text, before, self.journal.epochs)
        self._next_commit = commit + 1
        if state is not None:
            if plan.settled:
                state.settled.update(plan.settled)
            if plan.key is not None:
                state.keys[plan.key[0]] = plan.key[1]
            self.sessions.set(text, state)
            if before is None:
                self.sessions.created(state.ref)
        if plan.epochs is not None:
            self.journal.epochs = plan.epochs
        return frame

    def _undo(self, frames: Sequence[Frame]) -> None:
        """Give back what `take` took, last first; nothing of it was ever said."""
        for frame in reversed(frames):
            plan, state = frame.plan, frame.plan.state
            if state is not None:
                for name in plan.settled or ():
                    del state.settled[name]
                if plan.key is not None:
                    del state.keys[plan.key[0]]
                self.sessions.set(frame.text, frame.before)
                if frame.before is None:
                    self.sessions.uncreated(state.ref)
            self.journal.epochs = frame.epochs
            self._next_commit = frame.commit

    # --- writing ------------------------------------------------------------------------------

    def _write(self, frames: Sequence[Frame]) -> None:
        """Write frames behind the last one, in a new segment if they do not fit the present one."""
        if not frames:
            return
        size = sum([frame.size for frame in frames])
        if not self.journal.room_for(size, self.options.segment_bytes):
            self._rotate()
        self.journal.append([(frame.commit, frame.payload) for frame in frames])
        if self._unhanded is None:
            self._unhanded = self.journal.number

    @property
    def first_unhanded(self) -> int:
        """The lowest segment that holds a frame behind `handed`, or will."""
        return self.journal.number if self._unhanded is None else self._unhanded

    def _rotate(self) -> None:
        if self.journal.size > self.journal.durable:
            self.journal.sync()
        if len(self.journal.numbers) >= JOURNAL_SEGMENTS_MAX:
            self.checkpoints.now(compacts=False)  # a batch is under way
        self.journal.rotate()
        self.counters.segments += 1

    def _one_by_one(self, requests: Sequence[Request]) -> Persist:
        """Try each frame of a batch that found no room by itself (FLT-20a)."""
        frames: list[Frame] = []
        replies: list[Reply] = []
        ts = timestamp(now := self.clock.now_us())
        for request in requests:
            reply, frame = self._plan_one(request, now, ts)
            if frame is not None and not self._fits(frame):
                again = frame.plan.ends and self.reserve.give_up()
                if again:
                    self.log("reserve_given_up", {"level": "error"})
                    reply, frame = self._plan_one(request, now, ts)
                if not again or (frame is not None and not self._fits(frame)):
                    frame, reply = None, Reply(request.token, storage_full())
                    self.counters.refused_full += 1
            if frame is not None:
                frames.append(frame)
            replies.append(reply)
        return Persist(tuple(frames), tuple(replies))

    def _fits(self, frame: Frame) -> bool:
        """Write a frame; false if there is no room, and then it is undone."""
        try:
            self._write([frame])
        except DiskFull:
            self._undo([frame])
            return False
        return True

    def _perform(self, persist: Persist) -> list[News]:
        """Sync, reply, and only then touch the streams' files."""
        if not persist.frames:
            self.release(persist.replies)
            return []
        self.sync()
        self.release(persist.replies)
        self._count(persist.frames)
        news = [self._confirm(frame) for frame in persist.frames]
        self._unhanded = None
        self.materialise()
        return [one for one in news if one.text]

    def _count(self, frames: Sequence[Frame]) -> None:
        self.counters.batches += 1
        self.counters.commits += len(frames)
        self.counters.bytes += sum([len(frame.payload) for frame in frames])
        self.checkpoints.count(sum([frame.size for frame in frames]))

    def sync(self) -> None:
        """Make what was written durable, and say so to readers."""
        self.journal.sync()
        self._last_sync = self.clock.monotonic()
        self._marked = False
        self.durable.synced(self.journal.last_commit)

    def _confirm(self, frame: Frame) -> News:
        """Take a synced frame on its way into the files."""
        plan, state = frame.plan, frame.plan.state
        self.handed = frame.commit
        if state is None:
            return News("", 0, ())
        self.note(frame)
        if plan.lease is not None:
            self.sessions.leases[frame.text] = plan.lease.spell()
            if plan.lease.held:
                self.artifacts.activated(frame.text)
        if plan.key is not None:
            trim_keys(state.keys)
        return News(frame.text, plan.first_seq, plan.lines)

    def note(self, frame: Frame, *, same: bool = False) -> None:
        """Hand a synced frame's parts to the files, and remember where these end."""
        plan, state = frame.plan, frame.plan.state
        assert state is not None
        self.files.add(frame.commit, plan.parts, replaces=plan.replaces, same=same)
        for part in plan.parts:
            if part.generation:
                end, inbox = state.inbox.end, state.inbox
                self.checkpoints.look_at(frame.text, inbox)
            else:
                end = state.transcript
            self.marks[part.file] = FileMark(
                part.file, part.generation, end.bytes, end.last, end.chain
            )

    def materialise(self) -> None:
        """Write what waits for the streams' files.

        What the reserve gave up is for the journal: until it is whole, files leave half of it.
        """
        if not self.reserve.whole:
            free = self.disk.free(self.files.root)
            if free < self.files.waiting_bytes + self.reserve.size // 2:
                return
        for lost in self.files.flush():
            _, key, session_id, _ = lost.file.split("/")
            self.sessions.mark_damaged(Damaged(f"{key}/{session_id}", lost.damage, 0))
            self.counters.lost_files += 1
        self.durable.written(self.files.written(self.handed))

    def probe(self) -> None:
        """See whether there is room again: for the reserve first, then for what waits (FLT-21c)."""
        if not self.reserve.whole and self.reserve.restore():
            self.log("reserve_whole", {})
        if self.files.waiting_bytes:
            self.materialise()

    def levels(self) -> list[Level]:
        """Say how full what storage writes to is (FLT-22); the reserve counts until it is whole."""
        given_up = 0 if self.reserve.whole else self.reserve.size
        return [
            free_space(self.disk.free(self.files.root)),
            queue("files_waiting_bytes", self.files.waiting_bytes, WAITING_BYTES_MAX),
            queue(
                "artifacts_waiting_bytes", self.artifacts.waiting_bytes, ARTIFACT_STORES_BYTES_MAX
            ),
            queue("reserve_given_up_bytes", given_up, self.reserve.size),
        ]

    def persist_compactions(self, frames: Sequence[Frame]) -> None:
        """Write and sync frames that nobody waits for; without room they are let be."""
        try:
            if not self.reserve.whole:
                raise DiskFull
            self._write(frames)
        except DiskFull:
            self._undo(frames)
            return
        self.sync()
        for frame in frames:
            self.handed = frame.commit
            self.note(frame, same=True)
        self._unhanded = None
        self.durable.written(self.files.written(self.handed))

    def noted(self) -> None:
        """Take note that the journal was synced by a checkpoint."""
        self._last_sync = self.clock.monotonic()
        self._marked = False

    # --- idle, due, stop ----------------------------------------------------------------------

    def idle_ms(self) -> float | None:
        """Tell for how many milliseconds nothing was synced; none if a closing mark says so."""
        if self._marked:
            return None
        return (self.clock.monotonic() - self._last_sync) * 1_000

    def mark(self) -> None:
        """Write the closing mark (FLT-8)."""
        if not self._marked:
            self.journal.mark()
            self._marked = True

    def stop(self) -> bool:
        """End in order: a checkpoint, then a synced clean_stop.

        Returns:
            False if the disk is too full for that: the next start recovers.

        """
        if not self.checkpoints.now():
            return False
        try:
            self.journal.stop()
        except DiskFull:
            return False
        return True

    def trim(self, is_pinned: Callable[[SessionState], bool]) -> None:
        """Let go of states that nobody needs; between batches only."""
        self.sessions.trim(is_pinned)


def storage_full() -> StorageFull:
    """Say that there is no room, and when to try again."""
    return StorageFull(retry_after_ms=STORAGE_FULL_PROBE_MS)
