"""One client's connection: what it may send ahead, and what it has not read yet.

Nothing a client does grows without limit: reading stops while the actor has READ_AHEAD of it before
it, and what a slow reader leaves unread is bounded by CLIENT_OUTPUT_BYTES_MAX, after which the
connection is dropped (FLT-59b).
"""

from __future__ import annotations

import socket
import time
from collections import deque
from itertools import islice
from typing import Final, NamedTuple

from callboard.errors import CallboardError, Overloaded, PayloadTooLarge
from callboard.limits import CLIENT_MESSAGE_BYTES_MAX, CLIENT_OUTPUT_BYTES_MAX
from callboard.wire import Header, Unframer, door_frame, error_body

READ_AHEAD_MESSAGES: Final = 64
READ_AHEAD_BYTES: Final = 262_144
HELLO_BYTES_MAX: Final = 16_384
"""More than any hello; a stranger gets no buffer of CLIENT_MESSAGE_BYTES_MAX."""
PIECES_MAX: Final = 256
"""Messages that go out in one call."""
LAST_WORDS_S: Final = 1.0
"""How long a dropped connection has to read why."""


class Taken(NamedTuple):
    """What was read: whole messages, and what ended the input."""

    payloads: list[bytes]
    refused: CallboardError | None = None


class Connection:
    """A connected socket.

    Args:
        number: names it, to the actor.
        made: the socket, non-blocking.

    """

    def __init__(self, number: int, made: socket.socket) -> None:
        self.number = number
        self.socket = made
        self.out_bytes = 0
        """Bytes that wait for the client to read."""
        self._unframer = Unframer(CLIENT_MESSAGE_BYTES_MAX)
        self._greeted = False
        self._ahead_messages = 0  # handed to the actor and not handled yet
        self._ahead_bytes = 0
        self._out: deque[bytes] = deque()
        self._started = False  # a part of the first piece has been written
        self._watched = (True, False)  # reading, writing
        self._closing = False  # nothing more is taken; it ends when _out is written, or at _ends_at
        self._ends_at = 0.0
        self._broken = False
        self._gone = False

    # ---- What the door does ----

    @property
    def is_read(self) -> bool:
        """Tell whether anything is read of it at present."""
        return self._watched[0]

    def feed(self, data: bytes) -> Taken | None:
        """Take what was read; none if it must end: a stranger who says more than a hello."""
        if self._closing:
            return Taken([])
        refused: CallboardError | None = None
        try:
            payloads = self._unframer.feed(data)
        except PayloadTooLarge as error:
            payloads, refused = self._unframer.whole, error
        if not self._greeted and self._unframer.pending > HELLO_BYTES_MAX:
            return None
        self._greeted = self._greeted or bool(payloads)
        self._ahead_messages += len(payloads)
        self._ahead_bytes += sum(map(len, payloads))
        if refused is not None:
            self._stop_reading()
        return Taken(payloads, refused)

    def wanted(self) -> tuple[bool, bool] | None:
        """Give what is to be watched, (reading, writing), if that has changed."""
        behind = (
            self._ahead_messages >= READ_AHEAD_MESSAGES or self._ahead_bytes >= READ_AHEAD_BYTES
        )
        wanted = not behind, bool(self._out)
        if wanted == self._watched:
            return None
        self._watched = wanted
        return wanted

    def flush(self) -> bool:
        """Write on; false when the connection is done with, or broken."""
        self._write()
        return not (self._broken or (self._closing and not self._out))

    def begin_closing(self) -> None:
        """Take nothing more, and end when what waits is written."""
        self._close_in(LAST_WORDS_S)

    def is_overdue(self, now: float) -> bool:
        """Tell whether its last words were not read in time."""
        return self._closing and self._ends_at <= now

    def end(self) -> None:
        """Close the socket."""
        self._gone = True
        self._out.clear()
        self.socket.close()

    # ---- What the actor says ----

    def handled(self, payloads: list[bytes]) -> bool:
        """Note that messages were dealt with; true if the door may read on."""
        self._ahead_messages -= len(payloads)
        self._ahead_bytes -= sum(map(len, payloads))
        return not self._watched[0]

    def write(self, pieces: list[bytes]) -> bool:
        """Send framed messages, in order; true if the door must go on with it."""
        if self._gone or self._closing:
            return False
        for piece in pieces:
            self._add(piece)
        if not self._watched[1]:  # else the socket is full, and will be told of
            self._write()
        return bool(self._out) or self._broken or self._closing

    # ---- Inside ----

    def _stop_reading(self) -> None:
        self._ahead_messages += READ_AHEAD_MESSAGES  # never handled: never read again

    def _close_in(self, seconds: float) -> None:
        if not self._closing:
            self._closing = True
            self._ends_at = time.monotonic() + seconds
            self._stop_reading()

    def _add(self, piece: bytes) -> None:
        """Keep a piece, or let the connection end with a word (FLT-59b)."""
        if self._closing:
            return
        if self.out_bytes + len(piece) <= CLIENT_OUTPUT_BYTES_MAX:
            self._out.append(piece)
            self.out_bytes += len(piece)
            return
        refusal = Overloaded(resource="socket", limit=CLIENT_OUTPUT_BYTES_MAX)
        begun = [self._out[0]] if self._started else []
        self._out = deque([*begun, door_frame(Header("error"), error_body(refusal))])
        self.out_bytes = sum(map(len, self._out))
        self._close_in(LAST_WORDS_S)

    def _write(self) -> None:
        try:
            while self._out and not self._gone:
                if not self._sent_all(self.socket.sendmsg(islice(self._out, PIECES_MAX))):
                    return
        except BlockingIOError:
            pass
        except OSError:
            self._broken = True

    def _sent_all(self, sent: int) -> bool:
        """Drop what was written; false if the last piece of it did not go whole."""
        out = self._out
        self.out_bytes -= sent
        while out and sent >= len(out[0]):
            sent -= len(out.popleft())
            self._started = False
        if sent:
            out[0] = out[0][sent:]
            self._started = True
        return not sent
