"""Writing prompt artifacts: a file by its content, synced before any frame names it (ART-2, ART-7).

Each artifact is a job: what is decided (who may, is it known, is there room, what is swept) is
decided in the actor's thread, where the sessions' states are; what is slow (write, sync, link,
hash) runs beside it, one job at a time, so that acknowledgements go on. A job's reply goes when all
that it promises is durable.

A file that no record, no live input and no recent store names is swept when its session is
activated and before `artifact_quota` is answered (ART-12). A store is recent for
ARTIFACT_UNNAMED_MS; whoever comes later with the frame that names it is refused by `check`, so that
no frame ever names a file that is not there.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from callboard.artifact_files import FOLDER, RETRYABLE, is_artifact_name
from callboard.artifacts import ARTIFACT_ID, ArtifactRef, decode, read_ref
from callboard.errors import (
    ArtifactInvalid,
    ArtifactQuota,
    ArtifactStoreUnsafe,
    CallboardError,
    HomeUnsafe,
    Overloaded,
    StorageFull,
)
from callboard.limits import (
    ARTIFACT_SESSION_BYTES_MAX,
    ARTIFACT_STORES_BYTES_MAX,
    ARTIFACT_UNNAMED_MS,
    ARTIFACTS_PER_SESSION_MAX,
    STORAGE_FULL_PROBE_MS,
)
from callboard.messages import Body, InboxItem, Ok, StoreArtifact
from callboard.storage.beside import InlineJobs, Runner
from callboard.storage.disk import (
    FULL,
    Clock,
    Disk,
    DiskFull,
    Poisoned,
    poison,
    sync_dir,
    write_all,
)

if TYPE_CHECKING:
    from callboard.storage.sessions import Sessions
    from callboard.storage.state import SessionState

_PIECE: Final = 1 << 20
_OVERLOADED_MS: Final = 1_000
_ROOTED_MAX: Final = 4_096
Answer = Callable[[object, "Body | CallboardError"], None]


class Asked(NamedTuple):
    """A store that waits, or without a token the sweep of an activation."""

    token: object
    text: str
    ref: ArtifactRef | None = None
    data: bytes | None = None

    @property
    def weight(self) -> int:
        """Bytes that it holds while it waits."""
        return len(self.data or b"")


@dataclass(slots=True)
class Job:
    """One store or sweep: `run` does what was decided, and touches nothing but this job."""

    disk: Disk
    asked: Asked
    folder: str
    suffix: str
    doomed: Sequence[str] = ()
    """Names that go first."""
    refusal: CallboardError | None = None
    """Decided already: nothing is written."""
    exists: bool = False
    parents: Sequence[str] = ()
    """Folders whose names are not known to be durable, innermost first."""
    answer: Body | CallboardError = field(default_factory=Ok)
    poisoned: Poisoned | None = None

    def run(self) -> None:
        """Do it. What goes wrong is kept for the actor's thread."""
        try:
            self._sweep()
            if self.refusal is not None:
                raise self.refusal
            if self.asked.ref is not None:
                self._store(self.asked.ref)
        except Poisoned as error:
            self.poisoned = error
        except DiskFull:
            self.answer = StorageFull(retry_after_ms=STORAGE_FULL_PROBE_MS)
        except HomeUnsafe:
            self.answer = ArtifactStoreUnsafe()
        except CallboardError as error:
            self.answer = error
        except OSError as error:  # reading: nothing was changed by it
            retryable = error.errno in RETRYABLE
            name = self.asked.ref.artifact_id if self.asked.ref is not None else None
            self.answer = ArtifactInvalid(artifact_id=name, retryable=retryable)

    def _sweep(self) -> None:
        for name in self.doomed:
            self._unlink(name)
        if self.doomed:
            sync_dir(self.disk, self.folder)

    def _unlink(self, name: str) -> None:
        try:
            self.disk.unlink(f"{self.folder}/{name}")
        except FileNotFoundError:
            pass  # it is gone already, which is what was wanted
        except OSError as error:
            poison("unlink", error)

    def _store(self, ref: ArtifactRef) -> None:
        if self.exists:
            if hashlib.sha256(self._content(ref)).hexdigest() != ref.artifact_id:
                raise ArtifactStoreUnsafe
            self._sync_names()  # it may have been linked by a process that ended before its sync
            return
        data = self.asked.data
        assert data is not None
        decode(ref, data)
        if hashlib.sha256(data).hexdigest() != ref.artifact_id:
            raise ArtifactInvalid(artifact_id=ref.artifact_id, retryable=False)
        self._write(ref.artifact_id, data)

    def _content(self, ref: ArtifactRef) -> bytes:
        fd = self.disk.open_shared(f"{self.folder}/{ref.artifact_id}")
        try:
            if self.disk.size(fd) != ref.size_bytes:
                raise ArtifactStoreUnsafe
            pieces: list[bytes] = []
            at = 0
            while at < ref.size_bytes and (piece := self.disk.pread(fd, _PIECE, at)):
                pieces.append(piece)
                at += len(piece)
            return b"".join(pieces)
        finally:
            self.disk.close(fd)

    def _write(self, name: str, data: bytes) -> None:
        """Write under a name of its own, sync, give it the final name, sync that (ART-7)."""
        temporary = f".{name}.{self.suffix}.tmp"
        path = f"{self.folder}/{temporary}"
        fd = self._create(path)
        try:
            write_all(self.disk, fd, data, 0)
        except OSError as error:
            self.disk.close(fd)
            if error.errno not in FULL:
                poison("write_artifact", error)
            self._unlink(temporary)
            raise DiskFull from error
        try:
            self.disk.sync(fd)
        except OSError as error:
            poison("sync_artifact", error)
        self.disk.close(fd)
        try:
            self.disk.link(path, f"{self.folder}/{name}")
        except OSError as error:
            if error.errno not in FULL:
                poison("link_artifact", error)
            self._unlink(temporary)
            raise DiskFull from error
        self._unlink(temporary)
        self._sync_names()

    def _create(self, path: str) -> int:
        try:
            if self.disk.stat(self.folder) is None:
                self.disk.mkdir(self.folder)
            return self.disk.create(path)
        except OSError as error:
            if error.errno in FULL:
                raise DiskFull from error
            if error.errno in RETRYABLE:
                raise
            poison("create_artifact", error)

    def _sync_names(self) -> None:
        sync_dir(self.disk, self.folder)
        for parent in self.parents:
            sync_dir(self.disk, parent)


class Artifacts:
    """The artifact folders of a home, as far as storage writes them.

    Args:
        disk: all files.
        root: the home.
        clock: tells how recent a store is.
        sessions: the sessions' states.
        fresh: makes ids.
        answer: takes replies.

    """

    def __init__(
        self,
        disk: Disk,
        root: str,
        clock: Clock,
        sessions: Sessions,
        fresh: Callable[[], str],
        answer: Answer,
    ) -> None:
        self.disk, self.clock, self.sessions, self.fresh = disk, clock, sessions, fresh
        self.answer = answer
        self.runner: Runner = InlineJobs()
        self.waiting_bytes = 0
        self._root = root
        self._waiting: deque[Asked] = deque()
        self._running: Job | None = None
        self._stored: dict[str, dict[str, float]] = {}
        """By session, what was stored lately and when: a frame may be under way (ART-12)."""
        self._rooted: set[str] = set()
        """Sessions whose folders' names are durable."""

    @property
    def waiting(self) -> int:
        """Count the stores that have no answer."""
        return len(self._waiting) + (self._running is not None)

    # --- what is asked ------------------------------------------------------------------------

    def store(self, token: object, body: StoreArtifact) -> None:
        """Take on a store; the answer comes when the file is durable. The asker was checked.

        Raises:
            ArtifactInvalid: its reference is malformed (ART-5).
            Overloaded: too much waits already.

        """
        ref = read_ref(body.artifact)
        asked = Asked(token, body.session, ref, body.data)
        if self._waiting and self.waiting_bytes + asked.weight > ARTIFACT_STORES_BYTES_MAX:
            raise Overloaded(
                resource="pending_bytes",
                limit=ARTIFACT_STORES_BYTES_MAX,
                retry_after_ms=_OVERLOADED_MS,
            )
        self._add(asked)

    def activated(self, text: str) -> None:
        """Sweep a session's folder, now that it has a new owner (ART-12)."""
        if self.disk.stat(self._folder(text)) is not None:
            self._add(Asked(None, text))

    def check(self, text: str, item: InboxItem) -> None:
        """Check that the files which an input names are there, before a frame names them (ART-2).

        Raises:
            ArtifactInvalid: one is not, or its reference is malformed; stored again it will be.

        """
        for ref in _refs(item):
            path = f"{self._folder(text)}/{ref.artifact_id}"
            found = self.disk.stat(path)
            running = self._running
            doomed = (
                running is not None
                and running.asked.text == text
                and ref.artifact_id in running.doomed
            )
            if found is None or not found.regular or found.size != ref.size_bytes or doomed:
                raise ArtifactInvalid(artifact_id=ref.artifact_id, retryable=True)

    def _add(self, asked: Asked) -> None:
        self._waiting.append(asked)
        self.waiting_bytes += asked.weight

    # --- one at a time ------------------------------------------------------------------------

    def pump(self) -> None:
        """Begin the next job, if none runs.

        Raises:
            Poisoned: of a job that ended at once.

        """
        while self._waiting and self._running is None:
            asked = self._waiting.popleft()
            self.waiting_bytes -= asked.weight
            try:
                self._running = job = self._decide(asked)
            except HomeUnsafe:
                self._reply(asked, ArtifactStoreUnsafe())
            except CallboardError as error:
                self._reply(asked, error)
            else:
                self.runner.start(job, self._ended)

    def _ended(self, job: Job) -> None:
        """Take note of a job that has run.

        Raises:
            Poisoned: a write or a sync failed for good (FLT-3c).

        """
        self._running = None
        if job.poisoned is not None:
            raise job.poisoned
        asked = job.asked
        if isinstance(job.answer, Ok) and asked.ref is not None:
            self._note_stored(asked.text, asked.ref.artifact_id)
        self._reply(asked, job.answer)

    def _note_stored(self, text: str, name: str) -> None:
        """Remember a store, and forget what is remembered for nothing."""
        if len(self._rooted) >= _ROOTED_MAX:
            self._rooted.clear()  # their names are synced once more, that is all
        self._rooted.add(text)
        stored = self._stored.pop(text, {})
        stored[name] = self.clock.monotonic()
        self._stored[text] = stored  # last: sessions stand in the order of their last store
        while (first := next(iter(self._stored))) != text and self._is_past(self._stored[first]):
            del self._stored[first]

    def _is_past(self, stored: dict[str, float]) -> bool:
        return max(stored.values()) <= self._oldest()

    def _oldest(self) -> float:
        return self.clock.monotonic() - ARTIFACT_UNNAMED_MS / 1_000

    def _reply(self, asked: Asked, answer: Body | CallboardError) -> None:
        if asked.token is not None:
            self.answer(asked.token, answer)

    # --- deciding -----------------------------------------------------------------------------

    def _decide(self, asked: Asked) -> Job:
        """Decide what a store or a sweep does.

        Raises:
            HomeUnsafe, ArtifactStoreUnsafe: the folder is not ours alone (ART-8).
            ArtifactInvalid: a file that shall be there is not.

        """
        folder = self._folder(asked.text)
        sizes, stale = self._look(folder)
        job = Job(self.disk, asked, folder, self.fresh(), doomed=stale)
        ref = asked.ref
        if ref is None:
            job.doomed = [*stale, *self._unnamed(asked.text, sizes)]
            return job
        job.exists = ref.artifact_id in sizes
        if asked.text not in self._rooted:
            job.parents = _above(folder, self._root)
        if not job.exists and asked.data is None:
            raise ArtifactInvalid(artifact_id=ref.artifact_id, retryable=False)
        if not job.exists and _over(sizes, ref) is not None:
            unnamed = self._unnamed(asked.text, sizes)
            job.doomed = [*stale, *unnamed]
            for name in unnamed:
                del sizes[name]
            job.refusal = _over(sizes, ref)
        return job

    def _look(self, folder: str) -> tuple[dict[str, int], list[str]]:
        """List a folder: artifacts with their sizes, and what an interrupted write left."""
        if self.disk.stat(folder) is None:
            return {}, []
        self.disk.check_folder(folder)
        sizes: dict[str, int] = {}
        stale: list[str] = []
        for name in self.disk.listdir(folder):
            found = self.disk.stat(f"{folder}/{name}")
            if not is_artifact_name(name) or found is None or not found.regular:
                raise ArtifactStoreUnsafe
            if ARTIFACT_ID.match(name):
                sizes[name] = found.size
            else:
                stale.append(name)  # one job runs at a time, and none runs now
        return sizes, stale

    def _unnamed(self, text: str, sizes: Iterable[str]) -> list[str]:
        """Find what no record, no input and no frame under way names; nothing if that is unsure."""
        state = self.sessions.get(text)
        if state is None or state.damage is not None or state.fold.bad_artifact:
            return []
        try:
            named = {ref.artifact_id for item in _items(state) for ref in _refs(item)}
        except ArtifactInvalid:
            return []
        named |= state.fold.artifacts
        oldest = self._oldest()
        stored = self._stored.pop(text, {})
        recent = {name: at for name, at in stored.items() if at > oldest and name not in named}
        if recent:
            self._stored[text] = recent
        return [name for name in sizes if name not in named and name not in recent]

    def _folder(self, text: str) -> str:
        return f"{self._root}/sessions/{text}/{FOLDER}"


def _items(state: SessionState) -> list[InboxItem]:
    return [one.item for one in state.inbox.items.values()]


def _refs(item: InboxItem) -> list[ArtifactRef]:
    """Read the references of an input; most have none.

    Raises:
        ArtifactInvalid: one of them is malformed.

    """
    return [
        read_ref(part.prompt_artifact) for part in item.content if part.prompt_artifact is not None
    ]


def _over(sizes: dict[str, int], ref: ArtifactRef) -> ArtifactQuota | None:
    """Tell whether one more file is too much for its session (ART-6a)."""
    if len(sizes) >= ARTIFACTS_PER_SESSION_MAX:
        return ArtifactQuota(
            limit="ARTIFACTS_PER_SESSION_MAX",
            current=len(sizes),
            maximum=ARTIFACTS_PER_SESSION_MAX,
        )
    if (used := sum(sizes.values())) + ref.size_bytes > ARTIFACT_SESSION_BYTES_MAX:
        return ArtifactQuota(
            limit="ARTIFACT_SESSION_BYTES_MAX", current=used, maximum=ARTIFACT_SESSION_BYTES_MAX
        )
    return None


def _above(folder: str, root: str) -> list[str]:
    """Name the folders between an artifact folder and its home, the home included."""
    found: list[str] = []
    while folder != root:
        folder = folder.rpartition("/")[0]
        found.append(folder)
    return found
