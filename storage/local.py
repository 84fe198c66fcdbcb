"""The storage port over the engine, in one process and without sockets.

For programs that need a home's records and no plane, and for the suite that every adapter passes.
The storage actor does the same for a plane, with batches and sockets around it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn, TypeVar, cast, get_args

from callboard import home
from callboard import messages as m
from callboard.config import Settings
from callboard.errors import (
    CallboardError,
    Damage,
    HomeInUse,
    InvalidRequest,
    NotFound,
    StorageUnavailable,
)
from callboard.ids import fresh_id, parse_ref
from callboard.limits import RECORD_BYTES_MAX, STORAGE_FULL_PROBE_MS
from callboard.port import PAGE_LINES_MAX, Capability, Gap, Page, Subscription, Tell
from callboard.storage.disk import Poisoned, RealClock, RealDisk
from callboard.storage.durable import DurableFile, forget
from callboard.storage.engine import Engine, Options, Release, Reply, Request, storage_full
from callboard.storage.feeds import Address, Feeds
from callboard.storage.leases import RealOwners
from callboard.storage.lines import Gap as LineGap
from callboard.storage.lines import check_transcript, split
from callboard.storage.recovery import recover
from callboard.storage.requests import find

OPEN_FILES: Final = 256
"""Streams' files that are kept open."""
_PIECE: Final = 262_144
_ME: Final = "local"
B = TypeVar("B", bound=m.Body)


def lock_writer(place: home.Home) -> int:
    """Take the writer's lock for life (FLT-28); its file is opened here and nowhere else.

    Args:
        place: the home.

    Returns:
        The descriptor that holds it.

    Raises:
        HomeInUse: another process has it.

    """
    home.make_directories(place.journal)
    home.check_directory(place.journal, "journal")
    fd = home.open_state(place.writer_lock, os.O_RDWR | os.O_CREAT, what="journal")
    if not home.lock_record(fd):
        os.close(fd)
        raise HomeInUse
    return fd


def open_local(root: Path, settings: Settings | None = None) -> LocalStorage:
    """Open a home that no plane has, and write to it from this process.

    Args:
        root: the home; it is made if it is not there.
        settings: sizes of segments and checkpoints; the defaults if none.

    Raises:
        HomeInUse: another process writes to it.
        FormatUnsupported, HomeUnsafe, JournalDamaged: it is refused, and nothing was touched.
        StorageUnavailable: the disk failed.

    """
    chosen = settings or Settings(home=root)
    place = home.prepare_home(root)
    runtime = home.runtime_of(place.root)
    home.prepare_runtime(runtime)
    lock = lock_writer(place)
    disk = RealDisk()

    def make(release: Release) -> Engine:
        forget(disk, str(runtime.durable))
        return Engine(
            disk,
            RealClock(),
            recover(disk, str(place.root), fresh_id, OPEN_FILES),
            RealOwners(runtime),
            DurableFile(disk, str(runtime.durable)),
            Options(
                fresh_id(),
                chosen.journal_segment_bytes,
                chosen.checkpoint_bytes,
                chosen.checkpoint_ms,
            ),
            release,
        )

    try:
        return LocalStorage(make, lambda: os.close(lock))
    except BaseException:
        os.close(lock)
        raise


class LocalStorage:
    """A home behind the storage port (`callboard.port.Storage`). One thread uses it at a time.

    Args:
        make: makes the engine, given what takes its replies.
        closed: is called once, after the end.

    Raises:
        StorageUnavailable: the disk failed while the home was made ready.
        FormatUnsupported, HomeUnsafe, JournalDamaged: the home is refused.

    """

    def __init__(
        self, make: Callable[[Release], Engine], closed: Callable[[], None] = lambda: None
    ) -> None:
        self._replies: list[Reply] = []
        self._closed = closed
        self._open = True
        self._tells: dict[str, Tell] = {}
        self._names = itertools.count(1)
        self._asking = False
        self._refused: CallboardError | None = None
        try:
            self.engine = make(self._release)
        except Poisoned:
            raise _unavailable() from None
        self._feeds = Feeds(self.engine, self._send)

    @property
    def capabilities(self) -> frozenset[Capability]:
        """See Storage."""
        return frozenset(("durable", "damage"))

    # --- requests -----------------------------------------------------------------------------

    def hello_gateway(self, asked: m.GatewayHello) -> m.GatewayEpoch:
        """See Storage."""
        return self._ask(m.GatewayEpoch, "gateway", asked)

    def hello_plane(self, asked: m.PlaneHello) -> m.PlaneEpoch:
        """See Storage."""
        return self._ask(m.PlaneEpoch, "supervisor", asked)

    def acquire(self, asked: m.Acquire) -> m.LeaseGranted:
        """See Storage."""
        return self._ask(m.LeaseGranted, "session", asked, asked.session)

    def release(self, asked: m.Release) -> m.Ok:
        """See Storage."""
        return self._ask(m.Ok, "session", asked, asked.session)

    def create(self, asked: m.Create) -> m.Created:
        """See Storage."""
        return self._ask(m.Created, "gateway", asked)

    def append(self, asked: m.Append) -> m.Appended:
        """See Storage."""
        return self._ask(m.Appended, "session", asked, asked.session)

    def accept(self, asked: m.Accept) -> m.Accepted | m.LeaseHeld:
        """See Storage."""
        answer = self._call("gateway", asked)
        assert isinstance(answer, m.Accepted | m.LeaseHeld), answer.kind
        return answer

    def discard(self, asked: m.DiscardInput) -> m.CancelResult:
        """See Storage."""
        return self._ask(m.CancelResult, "gateway", asked)

    def quarantine(self, asked: m.Quarantine) -> m.Ok:
        """See Storage."""
        return self._ask(m.Ok, "supervisor", asked)

    def unquarantine(self, asked: m.Unquarantine) -> m.Ok:
        """See Storage."""
        return self._ask(m.Ok, "gateway", asked)

    def lookup(self, asked: m.Lookup) -> m.LookedUp:
        """See Storage."""
        return self._ask(m.LookedUp, "session", asked, asked.session)

    def _ask(self, kind: type[B], role: str, body: m.Body, scope: str = "") -> B:
        answer = self._call(role, body, scope)
        assert isinstance(answer, kind), answer.kind
        return answer

    def _call(self, role: str, body: m.Body, scope: str = "") -> m.Body:
        self._check_open()
        try:
            news = self.engine.run([Request(None, role, scope, body)])
            self._feeds.take(news)
            self._catch_up()
            if self.engine.checkpoints.due:
                self.engine.checkpoints.now()
            self.engine.trim(self._feeds.follows)
        except (Poisoned, OSError):
            self._fail()
        answer = self._replies.pop().body
        if isinstance(answer, CallboardError):
            raise answer
        return answer

    def _release(self, replies: Sequence[Reply]) -> None:
        self._replies.extend(replies)

    # --- reading ------------------------------------------------------------------------------

    def outcome(self, asked: m.AwaitInput) -> m.WaitOutcome | None:
        """See Storage."""
        self._check_open()
        state = find(self.engine, asked.session)
        if state.damage is not None:
            raise state.damage
        found = state.outcome(asked.message_id)
        if found is None and asked.message_id not in state.inbox.items:
            raise NotFound
        return found

    def read(self, session: str, from_seq: int = 1, lines_max: int = PAGE_LINES_MAX) -> Page:
        """See Storage. It reads the transcript from its start: pages of a long one add up."""
        self._check_open()
        _check_range("from_seq", from_seq)
        _check_range("lines_max", lines_max, PAGE_LINES_MAX)
        ref, file = parse_ref(session), f"sessions/{session}/transcript.jsonl"
        find(self.engine, session)
        self._write_out(file)
        lines: list[bytes] = []
        gaps: list[Gap] = []
        first = seq = 0
        for found in check_transcript(split(self._pieces(file), RECORD_BYTES_MAX), ref):
            if isinstance(found, LineGap):
                if seq >= from_seq - 1:
                    gaps.append(Gap(seq, found.damage))
                continue
            if len(lines) == lines_max:
                return Page(first, tuple(lines), tuple(gaps), seq + 1, False)
            seq = found.record.seq
            if seq >= from_seq:
                first = first or seq
                lines.append(found.data)
        known = self.engine.sessions.damaged.get(session)
        if known is not None and not gaps:
            gaps.append(Gap(seq, _as_damage(known.damage)))
        behind = max(seq + 1, from_seq)
        return Page(first or behind, tuple(lines), tuple(gaps), behind, True)

    def _write_out(self, file: str) -> None:
        """See that a file has all that is durable; without room for it there is no answer."""
        try:
            if self.engine.files.is_behind(file):
                self.engine.materialise()
        except (Poisoned, OSError):
            self._fail()
        if self.engine.files.is_behind(file):
            raise storage_full()

    def _pieces(self, file: str) -> Iterator[bytes]:
        disk = self.engine.disk
        try:
            fd = disk.open(self.engine.files.path(file))
        except FileNotFoundError:
            return  # taken away by hand: the damage that is known of it says so
        try:
            offset = 0
            while piece := disk.pread(fd, _PIECE, offset):
                yield piece
                offset += len(piece)
        finally:
            disk.close(fd)

    def subscribe(self, asked: m.Subscribe, tell: Tell) -> Subscription:
        """See Storage."""
        self._check_open()
        address = Address(_ME, str(next(self._names)))
        self._tells[address.request] = tell
        self._refused, self._asking = None, True
        self._feeds.subscribe(address, asked)
        self._asking = False
        if self._refused is not None:
            raise self._refused
        self._catch_up()
        return _Subscription(self, address)

    def _catch_up(self) -> None:
        """Give followers what is stored; what waits for room in the files comes another time."""
        while self._feeds.catching_up and self._feeds.pump():
            pass

    def _send(self, address: Address, body: m.Body | CallboardError) -> None:
        if isinstance(body, m.Records):
            self._tells[address.request](body)
        elif isinstance(body, CallboardError):
            tell = self._tells.pop(address.request)
            if self._asking:
                self._refused = body
            else:
                tell(body)

    def forget(self, address: Address) -> None:
        """End a subscription."""
        if self._tells.pop(address.request, None) is not None:
            self._feeds.forget(address)

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """See Storage: a checkpoint, then a clean stop; a full disk makes it a crash."""
        if not self._open:
            return
        self._open = False
        try:
            with suppress(Poisoned, OSError):
                self.engine.stop()
        finally:
            self._closed()

    def _check_open(self) -> None:
        if not self._open:
            raise _unavailable()

    def _fail(self) -> NoReturn:
        """Touch nothing any more: after a failed sync the next start decides (FLT-3)."""
        self._open = False
        self._closed()
        raise _unavailable() from None


class _Subscription:
    def __init__(self, storage: LocalStorage, address: Address) -> None:
        self._storage, self._address = storage, address

    def close(self) -> None:
        """See Subscription."""
        self._storage.forget(self._address)


def _unavailable() -> StorageUnavailable:
    return StorageUnavailable(retry_after_ms=STORAGE_FULL_PROBE_MS)


def _check_range(field: str, value: int, most: int | None = None) -> None:
    if value < 1 or (most is not None and value > most):
        raise InvalidRequest(field=field, reason="out_of_range")


def _as_damage(code: str) -> Damage:
    return cast("Damage", code) if code in get_args(Damage) else "bad_line"
