"""Who waits for what: followers of transcripts, and those who wait until an input is settled.

A follower gets stored records from a position on, then new ones, with nothing lost, doubled or out
of order where the two meet (WCH-1): only one component, this one, knows both. While it catches up
it is a position in a file, whatever is appended meanwhile; it holds no queue, so that a slow
follower costs a position and a fast session does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from callboard.errors import CallboardError, HomeUnsafe, NotFound, Overloaded
from callboard.limits import RECORD_BYTES_MAX
from callboard.messages import AwaitInput, Body, Records, Subscribe
from callboard.storage.engine import Engine, News
from callboard.storage.requests import find
from callboard.storage.state import SessionState

WATCHERS_MAX: Final = 4_096
"""Followers and waiters together."""
PIECE_BYTES: Final = 262_144
"""Read for a follower at a time, at most."""
MESSAGE_LINES_MAX: Final = 2_000
MESSAGE_BYTES_MAX: Final = 1_048_576
"""Of lines in one message; one frame's lines go together whatever their size."""
ROUND_BYTES_MAX: Final = 1_048_576
"""Read for all followers in one round, between two batches."""


class Address(NamedTuple):
    """Whom to answer, and which request."""

    peer: str
    request: str


Send = Callable[[Address, Body | CallboardError], None]


@dataclass(slots=True)
class _Follower:
    address: Address
    text: str
    next_seq: int
    """The next one it shall see."""
    offset: int = 0
    seq: int = 1
    """Of the line at `offset`."""
    live: bool = False


class Feeds:
    """Followers and waiters of all sessions.

    Args:
        engine: the ledger; asked between batches only.
        send: sends an answer; may be called many times for one follower.

    """

    def __init__(self, engine: Engine, send: Send) -> None:
        self._engine, self._send = engine, send
        self._followers: dict[Address, _Follower] = {}
        self._waiters: dict[Address, tuple[str, str]] = {}
        self._by_session: dict[str, dict[Address, None]] = {}
        self._catching: dict[Address, _Follower] = {}

    def __len__(self) -> int:
        return len(self._followers) + len(self._waiters)

    @property
    def catching_up(self) -> bool:
        """Tell whether a follower has stored records to come."""
        return bool(self._catching)

    def follows(self, state: SessionState) -> bool:
        """Tell whether anybody looks at a session."""
        return state.text in self._by_session

    # --- coming and going ---------------------------------------------------------------------

    def subscribe(self, address: Address, asked: Subscribe) -> None:
        """Begin to follow a transcript, or answer why not."""
        if address in self._followers:
            return  # the same request again, after a reconnect
        try:
            state = self._admit(asked.session)
        except CallboardError as error:
            self._send(address, error)
            return
        follower = _Follower(address, asked.session, asked.from_seq)
        self._followers[address] = follower
        self._by_session.setdefault(asked.session, {})[address] = None
        if asked.from_seq > state.fold.seq:
            follower.live = True
        else:
            self._catching[address] = follower

    def await_input(self, address: Address, asked: AwaitInput) -> None:
        """Answer when an input is settled, now or later."""
        if address in self._waiters:
            return
        try:
            state = self._admit(asked.session)
            outcome = state.outcome(asked.message_id)
            if outcome is None and asked.message_id not in state.inbox.items:
                raise NotFound
        except CallboardError as error:
            self._send(address, error)
            return
        if outcome is not None:
            self._send(address, outcome)
            return
        self._waiters[address] = asked.session, asked.message_id
        self._by_session.setdefault(asked.session, {})[address] = None

    def _admit(self, text: str) -> SessionState:
        state = find(self._engine, text)
        if state.damage is not None:
            raise state.damage
        if len(self) >= WATCHERS_MAX:
            raise Overloaded(resource="watchers", limit=WATCHERS_MAX)
        return state

    def forget(self, address: Address) -> None:
        """End a subscription or a wait."""
        follower = self._followers.pop(address, None)
        waiter = self._waiters.pop(address, None)
        self._catching.pop(address, None)
        text = follower.text if follower else waiter[0] if waiter else None
        if text is not None and (found := self._by_session.get(text)) is not None:
            found.pop(address, None)
            if not found:
                del self._by_session[text]

    def forget_others(self, peer: str) -> None:
        """Let go of what peers asked that are not there any more: another gateway came."""
        for address in [*self._followers, *self._waiters]:
            if address.peer != peer:
                self.forget(address)

    def undelivered(self, address: Address) -> bool:
        """Drop a follower that does not read (WCH-1c); false if it was none."""
        if address not in self._followers:
            return False
        self.forget(address)
        return True

    # --- news ---------------------------------------------------------------------------------

    def take(self, news: Iterable[News]) -> None:
        """Hand on what synced frames said."""
        if not self._by_session:
            return
        for text, frames in _by_session(news, self._by_session):
            self._tell_followers(text, frames)
            self._tell_waiters(text)

    def _tell_followers(self, text: str, frames: list[News]) -> None:
        for address in list(self._by_session.get(text, ())):
            follower = self._followers.get(address)
            if follower is None or not follower.live:
                continue
            for first, lines in _messages(frames):
                self._give(follower, first, lines)

    def _tell_waiters(self, text: str) -> None:
        state = self._engine.sessions.cached(text)
        if state is None:
            return
        for address in list(self._by_session.get(text, ())):
            waiter = self._waiters.get(address)
            outcome = state.outcome(waiter[1]) if waiter else None
            if outcome is not None:
                self.forget(address)
                self._send(address, outcome)

    def _give(self, follower: _Follower, first: int, lines: list[bytes]) -> None:
        """Send lines, those left out that it does not want."""
        skipped = follower.next_seq - first
        if skipped > 0:
            first, lines = follower.next_seq, lines[skipped:]
        if lines:
            follower.next_seq = first + len(lines)
            last = follower.next_seq - 1
            body = Records(session=follower.text, first_seq=first, last_seq=last, lines=lines)
            self._send(follower.address, body)

    # --- catching up --------------------------------------------------------------------------

    def pump(self) -> int:
        """Read on for those that catch up: a bounded piece, in turns; gives the bytes read."""
        left = ROUND_BYTES_MAX
        for address in list(self._catching):
            if left <= 0:
                break
            follower = self._catching.pop(address)
            self._catching[address] = follower  # behind the others, for the next round
            left -= self._read_on(follower)
        return ROUND_BYTES_MAX - left

    def _read_on(self, follower: _Follower) -> int:
        state = self._engine.sessions.get(follower.text)
        if state is None or state.damage is not None:
            self.forget(follower.address)
            damage = state.damage if state is not None else None
            self._send(follower.address, damage or NotFound())
            return 0
        lines, size = self._lines(follower, state)
        self._give(follower, follower.seq, lines)
        follower.offset += size
        follower.seq += len(lines)
        if follower.seq > state.fold.seq:
            follower.live = True
            del self._catching[follower.address]
        return size

    def _lines(self, follower: _Follower, state: SessionState) -> tuple[list[bytes], int]:
        """Read whole lines from the file; what is not in it yet comes another time."""
        path = self._engine.files.path(f"sessions/{state.text}/transcript.jsonl")
        size = min(PIECE_BYTES, state.transcript.bytes - follower.offset)
        data = self._read(path, size, follower.offset)
        if b"\n" not in data and len(data) == PIECE_BYTES:
            data = self._read(path, RECORD_BYTES_MAX + 1, follower.offset)
        lines = [line + b"\n" for line in data.split(b"\n")[:-1]]
        return lines, sum(map(len, lines))

    def _read(self, path: str, size: int, offset: int) -> bytes:
        disk = self._engine.disk
        try:
            fd = disk.open(path)
        except (HomeUnsafe, OSError):
            return b""
        try:
            return disk.pread(fd, size, offset)
        finally:
            disk.close(fd)


def _by_session(
    news: Iterable[News], wanted: dict[str, dict[Address, None]]
) -> Iterator[tuple[str, list[News]]]:
    found: dict[str, list[News]] = {}
    for one in news:
        if one.text in wanted:
            found.setdefault(one.text, []).append(one)
    yield from found.items()


def _messages(frames: list[News]) -> Iterator[tuple[int, list[bytes]]]:
    """Put the lines of following frames together, as long as messages stay small."""
    first, lines, size = 0, list[bytes](), 0
    for frame in frames:
        more = sum(map(len, frame.lines))
        if lines and (size + more > MESSAGE_BYTES_MAX or len(lines) > MESSAGE_LINES_MAX):
            yield first, lines
            lines, size = [], 0
        if not lines:
            first = frame.first_seq
        lines = [*lines, *frame.lines]
        size += more
    if lines:
        yield first, lines
