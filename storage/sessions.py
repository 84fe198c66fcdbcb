"""The states of sessions: folded from their files at first touch, kept while they are used.

A state in the cache is ahead of its session's files by what the journal holds; one that is not
there is equal to them, so that it can be folded again at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

from callboard.errors import HomeUnsafe, SessionDamaged
from callboard.ids import SessionRef, parse_ref
from callboard.storage.disk import Disk, is_temporary, poison, read_all, remove
from callboard.storage.files import Files
from callboard.storage.frames import Damaged
from callboard.storage.leases import LEASE_BYTES_MAX
from callboard.storage.load import load
from callboard.storage.state import SessionState, new_state

WEIGHT_MAX: Final = 268_435_456
"""About how many bytes of states are kept beside those that must be."""
_PIECE: Final = 65_536
_WORKSPACES_MAX: Final = 256
"""Workspaces whose names are remembered."""


class Sessions:
    """All sessions of a home, by the text of their references.

    Attributes:
        leases: leases that are in the journal and not in `lease.json` yet.
        damaged: sessions whose files a recovery found damaged.
        highest_commit: the highest commit met in any file.
        staged: sessions that are being made beside the journal.
        tidy: whether temporary files may be removed: none is being made.

    """

    def __init__(self, disk: Disk, files: Files) -> None:
        self.disk, self.files = disk, files
        self.leases: dict[str, bytes] = {}
        self.damaged: dict[str, Damaged] = {}
        self.highest_commit = 0
        self.tidy = True
        self.staged: set[str] = set()
        self._states: OrderedDict[str, SessionState] = OrderedDict()
        self._weights: dict[str, int] = {}
        self._weight = 0
        self._names: dict[str, dict[str, str]] = {}

    def folder(self, text: str) -> str:
        """Give the folder of a session."""
        return f"{self.files.root}/sessions/{text}"

    # --- states -------------------------------------------------------------------------------

    def get(self, text: str) -> SessionState | None:
        """Give a session's state, or none if there is no such session.

        Raises:
            InvalidRequest: the text is no session reference; nothing was looked at (IDN-2).

        """
        state = self._states.get(text)
        if state is not None:
            self._states.move_to_end(text)
            return state
        state = self._load(parse_ref(text), text)
        if state is not None:
            self.set(text, state)
        return state

    def cached(self, text: str) -> SessionState | None:
        """Give a state that is in memory."""
        return self._states.get(text)

    def set(self, text: str, state: SessionState | None) -> None:
        """Put a state in the place of the one before it; none takes it out."""
        if state is None:
            self._states.pop(text, None)
            self._weight -= self._weights.pop(text, 0)
            return
        self._states[text] = state
        self._states.move_to_end(text)
        weight = state.weight
        self._weight += weight - self._weights.get(text, 0)
        self._weights[text] = weight

    def trim(self, is_pinned: Callable[[SessionState], bool]) -> None:
        """Let go of states that were not used for longest, if there are too many.

        Args:
            is_pinned: tells which must stay; it is not asked about those with a lease.

        """
        if self._weight <= WEIGHT_MAX:
            return
        for text, state in list(self._states.items()):
            if self._weight <= WEIGHT_MAX * 3 // 4:
                return
            held = state.lease is not None and state.lease.held
            if not held and not is_pinned(state) and not self._is_behind(text):
                self.set(text, None)

    def _is_behind(self, text: str) -> bool:
        name = f"sessions/{text}"
        return any(self.files.is_behind(f"{name}/{file}.jsonl") for file in ("transcript", "inbox"))

    def mark_damaged(self, damaged: Damaged) -> None:
        """Remember that a session's files are not what they were; later starts know it too."""
        self.damaged[damaged.session] = damaged
        state = self._states.get(damaged.session)
        if state is not None:
            state = state.clone()
            state.damage = _refusal(damaged)
            self.set(damaged.session, state)

    # --- loading ------------------------------------------------------------------------------

    def _load(self, ref: SessionRef, text: str) -> SessionState | None:
        folder = self.folder(text)
        damaged = self.damaged.get(text)
        if damaged is not None or not self._is_safe(f"{folder}/transcript.jsonl"):
            return self._damaged(ref, damaged or Damaged(text, "identity_mismatch", 0))
        if self.disk.stat(f"{folder}/transcript.jsonl") is None:
            return None
        loaded = load(
            ref,
            self._pieces(f"{folder}/transcript.jsonl"),
            self._inbox(f"{folder}/inbox.jsonl"),
            self._lease(text, folder),
        )
        if loaded is None:
            return None
        self.highest_commit = max(self.highest_commit, loaded.highest_commit)
        if loaded.torn and loaded.state.damage is None:
            self._cut(text, loaded.state.transcript.bytes)
        if self.tidy:
            self._tidy(folder)
        return loaded.state

    def _damaged(self, ref: SessionRef, damaged: Damaged) -> SessionState:
        state = new_state(ref)
        state.damage = _refusal(damaged)
        return state

    def _is_safe(self, path: str) -> bool:
        """Tell whether a file is absent or may be opened (FLT-50)."""
        try:
            self.disk.close(self.disk.open(path))
        except HomeUnsafe:
            return False
        except (FileNotFoundError, NotADirectoryError):
            return True
        return True

    def _pieces(self, path: str) -> Iterator[bytes]:
        fd = self.disk.open(path)
        try:
            offset = 0
            while piece := self.disk.pread(fd, _PIECE, offset):
                yield piece
                offset += len(piece)
        finally:
            self.disk.close(fd)

    def _inbox(self, path: str) -> Iterator[bytes] | None:
        if self.disk.stat(path) is None:
            return None
        if not self._is_safe(path):
            return iter((b"",))  # reads as an inbox without a header: inbox_corrupt
        return self._pieces(path)

    def _lease(self, text: str, folder: str) -> bytes | None:
        waiting = self.leases.get(text)
        if waiting is not None:
            return waiting
        found = self.disk.stat(f"{folder}/lease.json")
        if found is None:
            return None
        if found.size > LEASE_BYTES_MAX:
            return b""
        try:
            return read_all(self.disk, f"{folder}/lease.json")
        except HomeUnsafe:
            return b""  # unreadable: its owner cannot be proven (LSE-4a)

    def _cut(self, text: str, size: int) -> None:
        """Cut a torn tail (REC-2a); a crash before that is durable finds it again."""
        file = f"sessions/{text}/transcript.jsonl"
        try:
            fd = self.disk.open(self.files.path(file))
            self.disk.truncate(fd, size)
        except OSError as error:
            poison("cut_tail", error)
        self.disk.close(fd)
        self.files.touched.setdefault(file, False)

    def _tidy(self, folder: str) -> None:
        """Remove what an interrupted publication left (FLT-18)."""
        for name in self.disk.listdir(folder):
            if is_temporary(name):
                remove(self.disk, f"{folder}/{name}")

    # --- names --------------------------------------------------------------------------------

    def twin(self, ref: SessionRef) -> bool:
        """Tell whether the workspace has a session whose id differs in case only (IDN-6)."""
        names = self._names.get(ref.workspace_key)
        if names is None:
            if len(self._names) >= _WORKSPACES_MAX:
                self._names.clear()
            names = self._names[ref.workspace_key] = self._read_names(ref.workspace_key)
        return names.get(ref.session_id.casefold(), ref.session_id) != ref.session_id

    def _read_names(self, key: str) -> dict[str, str]:
        folder = f"{self.files.root}/sessions/{key}"
        found = self.disk.listdir(folder) if self.disk.stat(folder) is not None else []
        waiting = (
            state.ref.session_id
            for state in self._states.values()
            if state.ref.workspace_key == key
        )
        there = (name for name in found if self._is_session(f"{folder}/{name}"))
        return {name.casefold(): name for name in (*there, *waiting)}

    def _is_session(self, folder: str) -> bool:
        """Tell a session's folder from one that a creation left which came to nothing."""
        return self.disk.stat(f"{folder}/transcript.jsonl") is not None

    def created(self, ref: SessionRef) -> None:
        """Take note of a new name."""
        if (names := self._names.get(ref.workspace_key)) is not None:
            names[ref.session_id.casefold()] = ref.session_id

    def uncreated(self, ref: SessionRef) -> None:
        """Forget a name whose frame was not written."""
        self._names.pop(ref.workspace_key, None)

    def candidates(self) -> Iterator[str]:
        """Name the sessions that may have work: cheap, by what their folders show.

        Those whose inbox has more than a header, and those whose lease was not given back.
        """
        root = f"{self.files.root}/sessions"
        seen = set(self._states)
        yield from list(self._states)
        if self.disk.stat(root) is None:
            return
        for key in self.disk.listdir(root):
            for session_id in self._read_folder(f"{root}/{key}"):
                text = f"{key}/{session_id}"
                self._tidy_staged(text)
                if text not in seen and self._may_have_work(text):
                    yield text

    def _tidy_staged(self, text: str) -> None:
        """Remove what a creation left that came to nothing (FLT-18)."""
        folder = self.folder(text)
        if text in self.staged or self._is_session(folder):
            return
        found = self.disk.stat(folder)
        if found is not None and found.directory:
            self._tidy(folder)

    def _read_folder(self, path: str) -> list[str]:
        found = self.disk.stat(path)
        return self.disk.listdir(path) if found is not None and found.directory else []

    def _may_have_work(self, text: str) -> bool:
        folder = self.folder(text)
        inbox = self.disk.stat(f"{folder}/inbox.jsonl")
        if inbox is not None and inbox.size > _HEADER_BYTES + len(text):
            return True
        lease = self._lease(text, folder)
        return lease is not None and b'"released_at":null' in lease


_HEADER_BYTES: Final = 210
"""Of an inbox header, but for the session's reference, at most; a put takes more than that."""


def _refusal(damaged: Damaged) -> SessionDamaged:
    return SessionDamaged(damage=damaged.damage, line=damaged.line)
