"""Checkpoints: what the journal held stands in synced files, then old segments go (FLT-10).

The slow half, syncing files, may run beside the engine. A checkpoint therefore names the commit
that it is about, `through`; frames behind that are replayed at a start as ever. Inboxes that are
empty, or mostly dead bytes, begin a new file on this occasion (INB-2a).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from callboard.limits import (
    INBOX_DEAD_BYTES_MAX,
    STORAGE_FULL_PROBE_MS,
)
from callboard.messages import Ok
from callboard.storage.disk import DiskFull
from callboard.storage.draft import Draft
from callboard.storage.files import Replacement, SyncJob
from callboard.storage.frames import Checkpoint, FileMark
from callboard.storage.state import Inbox

if TYPE_CHECKING:
    from callboard.storage.engine import Engine, Frame

COMPACTIONS_MAX: Final = 256
"""Inboxes that one checkpoint compacts; the others wait for the next."""


class Runner(Protocol):
    """Runs the slow half of a checkpoint."""

    def start(self, job: SyncJob) -> None:
        """Begin it; when it has run, the shell calls `Checkpoints.finish`."""
        ...

    def join(self) -> None:
        """Return when it has run; raises what it raised."""
        ...


class InlineRunner:
    """Runs it at once, in the caller's thread."""

    def start(self, job: SyncJob) -> None:
        """See Runner."""
        job.run()

    def join(self) -> None:
        """See Runner."""


class _Running(NamedTuple):
    job: SyncJob
    through: int
    first: int
    marks: dict[str, FileMark]
    leases: dict[str, bytes]
    parts: dict[str, Replacement]
    files: dict[str, bool]
    folders: set[str]
    bytes: int


class Checkpoints:
    """When checkpoints are due, and the one that runs."""

    def __init__(self, engine: Engine, runner: Runner) -> None:
        self.engine, self.runner = engine, runner
        self._running: _Running | None = None
        self._bytes = 0
        self._last = engine.clock.monotonic()
        self._not_before = self._last
        self._compact: dict[str, None] = {}
        self._urgent = False

    # --- due ----------------------------------------------------------------------------------

    def count(self, size: int) -> None:
        """Count the bytes of a frame."""
        self._bytes += size

    def look_at(self, text: str, inbox: Inbox) -> None:
        """Remember an inbox that a checkpoint may compact."""
        dead = inbox.dead_bytes
        if dead > INBOX_DEAD_BYTES_MAX:
            self._urgent = True
        if dead > 0 and (not inbox.items or dead > INBOX_DEAD_BYTES_MAX):
            self._compact[text] = None

    @property
    def running(self) -> bool:
        """Tell whether one is under way."""
        return self._running is not None

    @property
    def pending(self) -> bool:
        """Tell whether there is anything that a checkpoint would settle."""
        engine = self.engine
        return bool(self._bytes or engine.files.touched or engine.sessions.leases)

    @property
    def due(self) -> bool:
        """Tell whether one should begin now."""
        now = self.engine.clock.monotonic()
        if self._running is not None or not self.pending or now < self._not_before:
            return False
        options = self.engine.options
        late = (now - self._last) * 1_000 >= options.checkpoint_ms
        return late or self._urgent or self._bytes >= options.checkpoint_bytes

    # --- one checkpoint -----------------------------------------------------------------------

    def begin(self, *, compacts: bool = True) -> bool:
        """Begin one; false if the disk is too full for it.

        Args:
            compacts: whether inboxes may begin new files. Not while a batch is under way: the
                frame that begins one would stand in front of frames that were planned before it.

        Raises:
            Poisoned: a failed write or sync.

        """
        engine = self.engine
        self._last = engine.clock.monotonic()
        engine.materialise()
        if engine.files.full:
            self._later()
            return False
        if compacts:
            self._start_compactions()
        parts = engine.files.take_replacements()
        files, folders = engine.files.take_touched()
        leases = dict(engine.sessions.leases)
        path = engine.files.path
        job = SyncJob(
            engine.disk,
            engine.fresh(),
            {path(file): part.data for file, part in parts.items()}
            | {f"{engine.sessions.folder(text)}/lease.json": one for text, one in leases.items()},
            {path(file): new for file, new in files.items() if file not in parts},
            set(folders),
        )
        marks, engine.marks = engine.marks, {}
        self._running = _Running(
            job,
            engine.handed,
            engine.first_unhanded,
            marks,
            leases,
            parts,
            files,
            folders,
            self._bytes,
        )
        self._bytes, self._urgent = 0, False
        engine.sessions.tidy = False
        self.runner.start(job)
        return True

    def _start_compactions(self) -> None:
        """Write the frames that begin new inbox files; `begin` publishes these."""
        frames: list[Frame] = []
        engine = self.engine
        for text in list(self._compact)[:COMPACTIONS_MAX]:
            del self._compact[text]
            state = engine.sessions.cached(text)
            if state is None or state.damage is not None:
                continue
            inbox = state.inbox
            if inbox.items and inbox.dead_bytes <= INBOX_DEAD_BYTES_MAX:
                continue
            draft = Draft(state, engine.next_moment())
            draft.compact()
            frames.append(engine.take(draft.plan(Ok())))
        if frames:
            engine.persist_compactions(frames)

    def ended(self, job: SyncJob) -> None:
        """Go on with a job that has run beside the engine.

        Raises:
            Poisoned: a failed write or sync, in the job too.

        """
        if self._running is not None and self._running.job is job:
            self.runner.join()
            self.finish()

    def finish(self) -> bool:
        """Write the checkpoint's frame when its job has run, and drop what it makes needless.

        Returns:
            False if there was no room: it is tried again later.

        Raises:
            Poisoned: a failed write or sync; no segment was dropped (FLT-10b).

        """
        running = self._running
        if running is None:
            return True
        engine = self.engine
        self._running = None
        engine.sessions.tidy = True
        if not running.job.done:
            self._give_back(running)
            return False
        engine.files.replaced(running.parts)
        engine.materialise()
        journal = engine.journal
        frame = Checkpoint(
            running.through,
            running.first,
            tuple(running.marks.values()),
            tuple(engine.sessions.damaged.values()),
            journal.epochs,
        )
        try:
            journal.note(frame)
        except DiskFull:
            self._give_back(running)
            return False
        for text, lease in running.leases.items():
            if engine.sessions.leases.get(text) is lease:
                del engine.sessions.leases[text]
        journal.first = running.first
        journal.drop([number for number in journal.numbers if number < running.first])
        engine.counters.checkpoints += 1
        engine.noted()
        return True

    def _give_back(self, running: _Running) -> None:
        engine = self.engine
        engine.files.give_back(running.files, running.folders)
        engine.marks = {**running.marks, **engine.marks}
        self._bytes += running.bytes
        self._later()

    def _later(self) -> None:
        self._not_before = self.engine.clock.monotonic() + STORAGE_FULL_PROBE_MS / 1_000

    def now(self, *, compacts: bool = True) -> bool:
        """Do a whole one, and end the one that runs; false if the disk is too full.

        Args:
            compacts: see `begin`.

        """
        if self._running is not None:
            self.runner.join()
            self.finish()
        if not self.pending:
            return True
        if not self.begin(compacts=compacts):
            return False
        self.runner.join()
        return self.finish()
