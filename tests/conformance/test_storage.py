"""The adapters that are ours pass the suite that is everybody's."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest import SkipTest

import pytest

from callboard import home
from callboard import messages as m
from callboard.errors import CallboardError, SeqConflict
from callboard.ids import fresh_id
from callboard.port import Capability, Page, Storage, Subscription, Tell
from callboard.storage.disk import Disk, RealDisk
from callboard.storage.durable import NoDurable
from callboard.storage.engine import Engine, Options, Release
from callboard.storage.local import LocalStorage
from callboard.storage.recovery import recover
from callboard.testing.conformance import PLANE, StorageConformance
from callboard.testing.memory import MemoryStorage, Processes
from callboard.testing.requests import frame
from tests.storage.memory_disk import LoseAll, MemoryDisk
from tests.storage.world import FakeClock


class ProcessDisk(RealDisk):
    """A real disk as one process after the other has it: at its end all descriptors are closed."""

    def __init__(self) -> None:
        self.fds: set[int] = set()

    def open(self, path: str, what: home.What = "home") -> int:
        fd = super().open(path, what)
        self.fds.add(fd)
        return fd

    def create(self, path: str) -> int:
        fd = super().create(path)
        self.fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        if fd in self.fds:  # else it is of a process that has ended
            self.fds.discard(fd)
            super().close(fd)

    def end(self) -> ProcessDisk:
        """End this process; gives the next one."""
        for fd in list(self.fds):
            self.close(fd)
        return ProcessDisk()


def local(disk: Disk, root: str, processes: Processes, clock: FakeClock) -> LocalStorage:
    """Open a home on any disk, with segments and checkpoints so small that both happen."""

    def make(release: Release) -> Engine:
        recovered = recover(disk, root, fresh_id, 16)
        options = Options(PLANE, 1 << 14, 1 << 13, 1 << 30)
        return Engine(disk, clock, recovered, processes, NoDurable(), options, release)

    return LocalStorage(make)


class _Local(StorageConformance):
    disk: Disk
    root: str

    def open(self) -> LocalStorage:
        return local(self.disk, self.root, self.processes, FakeClock())

    def make(self) -> Storage:
        return self.open()

    def reopen(self, storage: Storage) -> Storage:
        storage.close()
        return self.open()

    def stored(self, session: str) -> str:
        return f"{self.root}/sessions/{session}/transcript.jsonl"


@pytest.mark.rule(
    "ACC-1", "ACC-2", "ACC-3", "DUR-1", "DUR-2", "DUR-3", "DUR-4", "DUR-6", "INB-4", "INB-5"
)
@pytest.mark.rule("INB-6", "INB-7", "INB-8", "INB-9", "LSE-1", "LSE-2", "LSE-4", "LSE-5", "LSE-7")
@pytest.mark.rule("LSE-8", "LSE-9", "REC-3", "REC-8", "RTY-1", "RTY-5", "RUN-4", "RUN-5", "WCH-1")
class TestLocalOnARealDisk(_Local):
    def setup_method(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="conformance-")
        self.real = ProcessDisk()
        self.disk, self.root = self.real, f"{self.folder}/home"
        self.disk.mkdir(self.root)
        super().setup_method()

    def teardown_method(self) -> None:
        super().teardown_method()
        self.real.end()
        shutil.rmtree(self.folder)

    def crash(self, storage: Storage) -> Storage:
        """The process is gone, the kernel is not: what was written is there."""
        self.disk = self.real = self.real.end()
        return self.open()

    def damage(self, storage: Storage, session: str, seq: int) -> Storage:
        storage.close()
        path = Path(self.stored(session))
        path.write_bytes(damaged(path.read_bytes(), seq))
        return self.open()


class TestLocalOnASimulatedDisk(_Local):
    def setup_method(self) -> None:
        self.memory = MemoryDisk()
        self.disk, self.root = self.memory, "/home"
        super().setup_method()

    def crash(self, storage: Storage) -> Storage:
        """The power is gone: what was not synced is not there."""
        self.disk = self.memory = self.memory.crash(LoseAll())
        return self.open()

    def damage(self, storage: Storage, session: str, seq: int) -> Storage:
        storage.close()
        path = self.stored(session)
        self.memory.put(path, damaged(self.memory.content(path), seq))
        return self.open()


class TestMemory(StorageConformance):
    def make(self) -> Storage:
        return MemoryStorage(self.processes, FakeClock().now_us, PLANE)


def damaged(content: bytes, seq: int) -> bytes:
    lines = content.split(b"\n")
    lines[seq - 1] = lines[seq - 1].replace(b'"seq"', b'"sEq"')
    return b"\n".join(lines)


def test_the_marks_are_what_the_suite_says() -> None:
    marks = {one for mark in TestLocalOnARealDisk.pytestmark for one in mark.args}  # type: ignore[attr-defined]
    assert marks == StorageConformance.RULES - {"ART-7"}


# --- the suite itself -----------------------------------------------------------------------------


class Forgets(MemoryStorage):
    """Takes whatever owner comes."""

    def acquire(self, asked: m.Acquire) -> m.LeaseGranted:
        with suppress(KeyError):
            self._sessions[asked.session] = replace(self._sessions[asked.session], lease=None)
        return super().acquire(asked)


class NeverStale(MemoryStorage):
    """Writes for whoever asks."""

    def append(self, asked: m.Append) -> m.Appended:
        lease = self._find(asked.session).lease
        epoch = lease.epoch if lease is not None else asked.epoch
        return super().append(asked.model_copy(update={"epoch": epoch}))


class Anywhere(MemoryStorage):
    """Does not look where a frame shall go."""

    def append(self, asked: m.Append) -> m.Appended:
        return super().append(asked.model_copy(update={"first_seq": None}))


class WrongWords(MemoryStorage):
    """Refuses, and says another thing with it."""

    def append(self, asked: m.Append) -> m.Appended:
        try:
            return super().append(asked)
        except SeqConflict:
            raise SeqConflict(expected=1) from None


class Twice(MemoryStorage):
    """Writes a frame that it has under a new key."""

    def append(self, asked: m.Append) -> m.Appended:
        self._find(asked.session).keys.clear()
        return super().append(asked)


class Halves(MemoryStorage):
    """Writes a frame record by record."""

    def append(self, asked: m.Append) -> m.Appended:
        for one in asked.records[:-1]:
            super().append(frame(asked.session, asked.epoch, [one]))
        return super().append(asked)


class Skips(MemoryStorage):
    """Begins to tell with what comes next."""

    def subscribe(self, asked: m.Subscribe, tell: Tell) -> Subscription:
        after = len(self._find(asked.session).lines) + 1
        later = max(asked.from_seq, after)
        return super().subscribe(asked.model_copy(update={"from_seq": later}), tell)


class Repeats(MemoryStorage):
    """Tells everything two times."""

    def subscribe(self, asked: m.Subscribe, tell: Tell) -> Subscription:
        def again(told: m.Records | CallboardError) -> None:
            tell(told)
            tell(told)

        return super().subscribe(asked, again)


class OffByOne(MemoryStorage):
    """Its pages overlap."""

    def read(self, session: str, from_seq: int = 1, lines_max: int = 1_000) -> Page:
        return super().read(session, max(1, from_seq - 1), lines_max)


class AcceptsAlways(MemoryStorage):
    """Puts input into a session that somebody owns."""

    def accept(self, asked: m.Accept) -> m.Accepted | m.LeaseHeld:
        session = self._find(asked.session)
        self._sessions[asked.session] = replace(session, lease=None)
        try:
            return super().accept(asked)
        finally:
            now = self._sessions[asked.session]
            self._sessions[asked.session] = replace(now, lease=session.lease)


class Loses(MemoryStorage):
    """Says that it keeps what it does not."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset(("durable",))


BROKEN = (
    Forgets,
    NeverStale,
    Anywhere,
    WrongWords,
    Twice,
    Halves,
    Skips,
    Repeats,
    OffByOne,
    AcceptsAlways,
    Loses,
)


@pytest.mark.parametrize("broken", BROKEN)
def test_the_suite_notices_a_broken_adapter(broken: type[MemoryStorage]) -> None:
    class Suite(StorageConformance):
        def make(self) -> Storage:
            return broken(self.processes, FakeClock().now_us, PLANE)

        def crash(self, storage: Storage) -> Storage:
            return self.make()

        def reopen(self, storage: Storage) -> Storage:
            return self.make()

    failed: list[str] = []
    for name in (name for name in dir(Suite) if name.startswith("test_")):
        suite = Suite()
        suite.setup_method()
        with suppress(SkipTest):
            try:
                getattr(suite, name)()
            except (AssertionError, CallboardError):
                failed.append(name)
        suite.teardown_method()
    assert failed
