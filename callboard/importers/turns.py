"""Where turns begin and end, in sources that do not always say so.

Some sources mark both ends (*explicit*), others only show a prompt and what follows. An implicit
turn ends at the next prompt: completed if the last thing in it was the assistant's text, else
aborted. At the end of the source a turn that had its reply is completed; any other stays open, for
the import to close (IMP-7). What still comes in after an abort belongs to the aborted turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from callboard.importers.port import ImportTurn

UNFINISHED: Final = "unfinished"
"""Cause of a turn that another one followed before it had its reply."""


class Turns:
    """The turns of one session of a source."""

    __slots__ = ("_aborted", "_at", "_explicit", "_open", "_replied", "_session")

    def __init__(self, session: str) -> None:
        """Begin with no turn open."""
        self._session = session
        self._open = self._explicit = self._replied = self._aborted = False
        self._at: int | None = None

    def start(self, at: int | None, *, explicit: bool = False) -> Iterator[ImportTurn]:
        """Begin a turn; one that is still open ends first."""
        if self._open:
            yield self._end("completed" if self._replied and not self._explicit else "aborted", at)
        self._open, self._explicit = True, explicit
        self._replied = self._aborted = False
        yield ImportTurn(self._session, "started", created_at=at)

    def prompt(self, at: int | None) -> Iterator[ImportTurn]:
        """Note what a user typed: it begins a turn, or steers one whose ends are explicit."""
        self._at = at
        if not (self._open and self._explicit):
            yield from self.start(at)
        self._replied = False

    def work(self, at: int | None, *, reply: bool = False) -> Iterator[ImportTurn]:
        """Note what the assistant says (a reply), thinks or calls; a prompt need not have come."""
        self._at = at
        if not self._open and not self._aborted:
            yield from self.start(at)
        self._replied = reply

    def returned(self, at: int | None) -> None:
        """Note a call's result; one that comes after its turn's end begins no other."""
        if self._open:
            self._at, self._replied = at, False

    def finish(self, at: int | None, abort_cause: str | None = None) -> ImportTurn | None:
        """End the open turn because the source says so; None if there is none."""
        if not self._open:
            return None
        self._aborted = abort_cause is not None
        return self._end("aborted" if self._aborted else "completed", at, abort_cause)

    def source_ended(self) -> Iterator[ImportTurn]:
        """Note the end of the source."""
        if self._open and self._replied and not self._explicit:
            yield self._end("completed", self._at)

    def _end(self, state: str, at: int | None, cause: str | None = None) -> ImportTurn:
        self._open = False
        if state == "completed":
            return ImportTurn(self._session, "completed", created_at=at)
        return ImportTurn(self._session, "aborted", cause or UNFINISHED, at)
