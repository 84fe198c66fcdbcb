"""`callboard doctor`: what can be put right about a home, and doing it with the plane down.

`examine` says what would be done and changes nothing. `repair` does it as a storage actor would: it
holds the writer's lock, recovers first, and ends with a checkpoint and an orderly stop. Whoever
calls it holds the home's lock. Nothing is destroyed: what a file held before is kept below
`aside/`, a transcript that cannot be put back stays where it is, and what is sound of it goes into
a new session (REC-4).
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from callboard import home as names
from callboard.errors import (
    CallboardError,
    HomeInUse,
    NotFound,
    PersistenceFailed,
    SessionDamaged,
    StorageFull,
)
from callboard.home import Home, runtime_of
from callboard.ids import SessionRef, fresh_id, fresh_ulid, parse_ref
from callboard.limits import STORAGE_FULL_PROBE_MS
from callboard.storage.disk import Poisoned, RealClock, RealDisk
from callboard.storage.durable import NoDurable, forget
from callboard.storage.engine import Engine, Options
from callboard.storage.findings import Finding
from callboard.storage.frames import Commit, pack
from callboard.storage.index import IndexWriter
from callboard.storage.leases import Lease, RealOwners
from callboard.storage.lines import Gap
from callboard.storage.readers import HomeReader, open_home
from callboard.storage.recovery import Recovered, recover
from callboard.storage.restore import Restored, restored
from callboard.storage.salvage import Salvage
from callboard.storage.source import read_format, read_from
from callboard.storage.verify import Totals, verify

What = Literal["set_mode", "restore", "salvage", "cut_tail", "release_lease", "rebuild_index"]
_SAYS: Final[dict[What, str]] = {
    "set_mode": "set the mode of {file}",
    "restore": "put {file} back as it was, from the {detail}; the present one is kept aside",
    "salvage": "write what is sound of {file} into a new session; the file stays as it is",
    "cut_tail": "cut the unfinished line at the end of {file}; the present file is kept aside",
    "release_lease": "give back the lease of {session}, with an epoch above all earlier ones",
    "rebuild_index": "make the index anew; the present one is kept as index.bad-N",
}
_ORDER: Final[tuple[What, ...]] = tuple(_SAYS)
_HOPELESS: Final = frozenset({"journal_damaged", "journal_foreign", "format_invalid"})
_OPEN_FILES: Final = 64


class Action(NamedTuple):
    """Something that doctor can do."""

    what: What
    file: str
    """Below the home; below the runtime directory if it begins with `run/`."""
    session: str | None = None
    detail: str = ""
    offset: int = 0
    """Where a tail is cut, in bytes."""

    def text(self) -> str:
        """Say it, for a person."""
        return _SAYS[self.what].format(**self._asdict())

    def to_json(self) -> dict[str, object]:
        """Give it as a JSON object."""
        fields: dict[str, object] = {"action": self.what, "file": self.file}
        return fields | ({"session": self.session} if self.session else {})


class Done(NamedTuple):
    """Something that was done, and what came of it."""

    action: Action
    result: str = ""

    @property
    def says(self) -> str:
        """Say what came of it, to be put behind the action's text."""
        return f" ({self.result})" if self.result else ""

    def to_json(self) -> dict[str, object]:
        """Give it as a JSON object."""
        return self.action.to_json() | {"result": self.result}


class Examined(NamedTuple):
    """What is wrong, and what would be done."""

    findings: tuple[Finding, ...]
    actions: tuple[Action, ...]
    highest_commit: int
    """In any record."""


def examine(path: Path, only: str | None = None) -> Examined:
    """Judge a home and plan what would put it right; nothing is changed.

    Args:
        path: the home.
        only: a session's reference, to look at what is about that one alone.

    Raises:
        StorageUnreadable, HomeUnsafe: see `verify`.

    """
    totals = Totals()
    found = [one for one in verify(path, totals) if only is None or one.session == only]
    actions = _plan(Home(Path(os.path.realpath(path))), found)
    return Examined(tuple(found), tuple(actions), totals.highest_commit)


def _plan(home: Home, findings: Iterable[Finding]) -> list[Action]:
    found = [one for one in findings if one.is_open]
    stuck = any(
        one.kind in _HOPELESS or (one.kind == "format_unsupported" and one.session is None)
        for one in found
    )
    planned: dict[tuple[What, str], Action] = {}
    for finding in found:
        if stuck and finding.meaning.repair != "set_mode":
            continue
        for action in _cure(home, finding, planned):
            planned.setdefault((action.what, action.file), action)
    return sorted(planned.values(), key=lambda action: _ORDER.index(action.what))


def _cure(
    home: Home, finding: Finding, planned: dict[tuple[What, str], Action]
) -> Iterator[Action]:
    file, session = finding.file, finding.session
    match finding.meaning.repair:
        case "set_mode":
            yield Action("set_mode", file)
        case "rebuild_index":
            yield Action("rebuild_index", file)
        case "release_lease":
            yield Action("release_lease", file, session)
        case "restore" | "cut_tail":
            known = (("restore", file), ("salvage", file), ("cut_tail", file))
            if session is not None and not any(one in planned for one in known):
                yield from _cure_file(home, finding, parse_ref(session))
        case "none":
            return


def _cure_file(home: Home, finding: Finding, ref: SessionRef) -> Iterator[Action]:
    found = _restored(home, ref, finding.file)
    if found is not None:
        yield Action("restore", finding.file, finding.session, found.source)
    elif finding.meaning.repair == "cut_tail":
        offset = finding.offset or 0
        yield Action("cut_tail", finding.file, finding.session, offset=offset)
    elif finding.file.endswith("/transcript.jsonl") and _has_creation(home, ref):
        yield Action("salvage", finding.file, finding.session)


def _restored(home: Home, ref: SessionRef, file: str) -> Restored | None:
    found = read_format(home)
    assert found is not None
    return restored(home, found.home_id, ref, home.root / file)


def _has_creation(home: Home, ref: SessionRef) -> bool:
    """Tell whether a transcript's first record says whose it is."""
    try:
        first = next(open_home(home.root).sound(ref), None)
    except CallboardError:
        return False
    return first is not None and not isinstance(first, Gap)


# --- doing it -------------------------------------------------------------------------------------


def repair(path: Path, only: str | None = None) -> Iterator[Done]:
    """Put right what can be put right.

    Args:
        path: the home; the caller holds its lock, so that no plane starts meanwhile.
        only: see `examine`.

    Yields:
        What was done, as it is done.

    Raises:
        HomeInUse: a storage actor is at work on the home.
        PersistenceFailed: the disk did not take something; what was done before holds.
        StorageFull: there is no room.
        StorageUnreadable, HomeUnsafe, JournalDamaged, FormatUnsupported: the home cannot be read.

    """
    home = Home(Path(os.path.realpath(path)))
    examined = examine(home.root, only)
    modes = [one for one in examined.actions if one.what == "set_mode"]
    rest = [one for one in examined.actions if one.what != "set_mode"]
    for action in modes:
        yield Done(action, _set_mode(home, action))
    if not rest:
        return
    reader = open_home(home.root)  # before the writer's lock: a later probe would drop it
    with _writer_lock(home):
        try:
            yield from _Surgery(home, reader, examined.highest_commit).run(rest)
        except Poisoned:
            raise PersistenceFailed from None


def _set_mode(home: Home, action: Action) -> str:
    path = home.root / action.file
    if action.file.partition("/")[0] == "run":
        path = runtime_of(home.root).root.joinpath(*Path(action.file).parts[1:])
    mode = 0o700 if path.is_dir() and not path.is_symlink() else 0o600
    os.chmod(path, mode)
    return f"{mode:04o}"


@contextmanager
def _writer_lock(home: Home) -> Generator[None]:
    """Be the one writer of the home."""
    fd = names.open_state(home.writer_lock, os.O_RDWR | os.O_CREAT, what="journal")
    try:
        if not names.lock_record(fd):
            raise HomeInUse
        yield
    finally:
        os.close(fd)


@dataclass(slots=True)
class _Surgery:
    """One repair: recovered, done, checkpointed, stopped."""

    home: Home
    reader: HomeReader
    highest_commit: int
    _aside: Path | None = None
    _leases: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def run(self, actions: Iterable[Action]) -> Iterator[Done]:
        disk = RealDisk()
        forget(disk, str(runtime_of(self.home.root).durable))
        recovered = recover(disk, str(self.home.root), fresh_id, _OPEN_FILES)
        next_commit = max(recovered.next_commit, self.highest_commit + 1)
        recovered = recovered._replace(next_commit=next_commit)
        index: Action | None = None
        released: list[Action] = []
        for action in actions:
            match action.what:
                case "restore":
                    yield Done(action, self._restore(recovered, action))
                case "salvage":
                    result, recovered = self._salvage(recovered, action)
                    yield Done(action, result)
                case "cut_tail":
                    yield Done(action, self._cut(action))
                case "release_lease":
                    released.append(action)
                case "rebuild_index":
                    index = action
                case "set_mode":
                    raise AssertionError(action)
        results, recovered = self._release(recovered, released)
        self._stop(disk, recovered)
        yield from results
        if index is not None:
            yield Done(index, self._rebuild(recovered.journal.last_commit))

    # --- files

    def _keep(self, file: str) -> str:
        """Copy a file to where it is kept, and give its new name below the home."""
        if self._aside is None:
            self._aside = self.home.root / "aside" / fresh_ulid()
        target = self._aside / Path(file).relative_to("sessions")
        names.make_directories(target.parent)
        _write(target, read_from(self.home.root / file))
        names.sync_directory(target.parent)
        return str(target.relative_to(self.home.root))

    def _restore(self, recovered: Recovered, action: Action) -> str:
        assert action.session is not None
        path = self.home.root / action.file
        found = _restored(self.home, parse_ref(action.session), action.file)
        if found is None:
            return "recovery had put it right already"
        temporary = path.with_name(f".{path.name}.{fresh_id()}.tmp")
        _write(temporary, found.data())
        kept = f"kept as {self._keep(action.file)}" if path.exists() else "it was gone"
        names.replace_file(temporary, path)
        names.sync_directory(path.parent)
        recovered.sessions.damaged.pop(action.session, None)
        return kept

    def _cut(self, action: Action) -> str:
        path = self.home.root / action.file
        kept = self._keep(action.file)
        fd = names.open_state(path, os.O_RDWR)
        try:
            os.ftruncate(fd, action.offset)
            os.fsync(fd)
        finally:
            os.close(fd)
        return f"kept as {kept}"

    # --- a new session

    def _salvage(self, recovered: Recovered, action: Action) -> tuple[str, Recovered]:
        """Stage the new session's folder, take its commit, then give the folder its name.

        A crash before the last step leaves a staged folder that nobody reads, and a commit without
        content; the next repair begins anew (lifecycle page, 3.5).
        """
        assert action.session is not None
        ref = parse_ref(action.session)
        new = SessionRef(ref.workspace_key, fresh_ulid())
        salvage = Salvage(ref, new, recovered.next_commit, time.time_ns() // 1_000)
        folder = self.home.session(new)
        staged = folder.with_name(f".staged-{fresh_id()}")
        names.make_directories(staged)
        try:
            _write(staged / "transcript.jsonl", salvage.lines(self.reader.sound(ref)))
        except (NotFound, SessionDamaged):
            return "it cannot be told whose it is", recovered
        artifacts = self._copy_artifacts(ref, staged)
        names.sync_directory(staged)
        recovered = self._commit(recovered, Commit())
        names.replace_file(staged, folder)
        names.sync_directory(folder.parent)
        left_out = f", {salvage.left_out} too long for their new names" if salvage.left_out else ""
        return f"{salvage.records} records and {artifacts} artifacts in {new}{left_out}", recovered

    def _copy_artifacts(self, ref: SessionRef, staged: Path) -> int:
        source = self.home.session(ref) / "artifacts"
        if not source.is_dir():
            return 0
        target = staged / "artifacts"
        names.make_directories(target)
        count = 0
        for name in sorted(os.listdir(source)):
            if not name.startswith("."):
                _write(target / name, read_from(source / name))
                count += 1
        names.sync_directory(target)
        return count

    # --- leases

    def _release(
        self, recovered: Recovered, actions: Iterable[Action]
    ) -> tuple[list[Done], Recovered]:
        """Give leases back in one frame, each under an epoch above every earlier one (LSE-4b)."""
        done: list[Done] = []
        leases: dict[str, bytes] = {}
        for action in actions:
            assert action.session is not None
            state = recovered.sessions.get(action.session)
            if state is None or state.damage is not None:
                done.append(Done(action, "the session is damaged: nothing was done"))
                continue
            epoch = state.epoch + 1
            leases[action.session] = _released(state.ref, state.lease, epoch).spell()
            done.append(Done(action, f"epoch {epoch}"))
        if leases:
            recovered = self._commit(recovered, Commit(leases=tuple(leases.items())))
            recovered.sessions.leases.update(leases)
        return done, recovered

    # --- the journal

    def _commit(self, recovered: Recovered, content: Commit) -> Recovered:
        """Write and sync a frame."""
        recovered.journal.append([(recovered.next_commit, pack(content))])
        recovered.journal.sync()
        return recovered._replace(next_commit=recovered.next_commit + 1)

    def _stop(self, disk: RealDisk, recovered: Recovered) -> None:
        """End as a storage actor does: a checkpoint, then a clean_stop."""
        engine = Engine(
            disk,
            RealClock(),
            recovered,
            RealOwners(runtime_of(self.home.root)),
            NoDurable(),
            Options("", 1 << 26, 1 << 25, 30_000),
            lambda _: None,
        )
        if not (engine.checkpoints.begin() and engine.checkpoints.finish()):
            raise StorageFull(retry_after_ms=STORAGE_FULL_PROBE_MS)
        engine.journal.stop()

    # --- the index

    def _rebuild(self, commit: int) -> str:
        """Move the index's files aside, main file first (IDX-7), and make a new one."""
        root = self.home.root
        number = 1 + max(
            (int(one.name[10:]) for one in root.glob("index.bad-*") if one.name[10:].isdigit()),
            default=0,
        )
        kept = root / f"index.bad-{number}"
        names.make_directories(kept)
        for suffix in ("", "-wal", "-shm"):
            path = self.home.index.with_name(self.home.index.name + suffix)
            if os.path.lexists(path):
                names.replace_file(path, kept / path.name)
        names.sync_directory(kept)
        names.sync_directory(root)
        writer = IndexWriter.open(self.home, commit)
        is_on = writer.on
        writer.close()
        return f"kept as {kept.name}" if is_on else f"kept as {kept.name}; the new one is off"


def _released(ref: SessionRef, lease: Lease | None, epoch: int) -> Lease:
    now = time.time_ns() // 1_000
    if lease is not None:
        return lease.model_copy(update={"epoch": epoch, "released_at": now})
    return Lease(
        workspace_key=ref.workspace_key,
        session_id=ref.session_id,
        epoch=epoch,
        owner_pid=0,
        start_time=0,
        boot_id="",
        pid_ns=0,
        nonce="",
        plane_id="",
        acquired_at=now,
        released_at=now,
    )


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    """Create a file, write it a piece at a time and sync it; its name is not durable yet."""
    fd = names.create_file(path)
    try:
        for piece in pieces:
            names.write_all(fd, piece)
        os.fsync(fd)
    except BaseException:
        names.remove_file(path)
        raise
    finally:
        os.close(fd)
