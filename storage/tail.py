"""The journal's tail: what readers take from frames because the files may not hold it yet.

Pure over the frames (FLT-12b, FLT-12c). Materialising is physical, so the tail is too: for each
file the smallest offset that a frame since the last checkpoint names, and the bytes from there on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from callboard.errors import InvalidRequest
from callboard.ids import SessionRef, parse_ref
from callboard.storage.frames import Commit, Damaged, Part
from callboard.storage.lines import Hole


@dataclass(slots=True)
class Overlay:
    """What a file ends with: nothing of the file itself counts from `cut` on."""

    cut: int
    """0: the whole file is replaced."""
    end: int
    pieces: list[bytes | Hole]

    def put(self, part: Part) -> None:
        """Write a later part over this one, as materialising does."""
        if part.offset == 0:  # a compacted inbox takes the place of the one before (INB-2)
            self.cut, self.pieces = 0, []
        elif part.offset > self.end:
            self.pieces.append(Hole(part.offset - self.end, "truncated"))
        self.pieces.append(part.data)
        self.end = part.offset + len(part.data)


@dataclass(frozen=True, slots=True)
class Tail:
    """The frames that are not known to stand in synced files, by what they are about."""

    through: int = 0
    """Frames up to this commit stand in the files."""
    overlays: dict[str, Overlay] = field(default_factory=dict[str, Overlay])
    """By file, relative to the home."""
    leases: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """The last lease of a session, by its reference as text."""
    changed: dict[SessionRef, int] = field(default_factory=dict[SessionRef, int])
    """Sessions whose transcripts grew, with the last commit that made one grow."""
    damaged: dict[str, Damaged] = field(default_factory=dict[str, Damaged])
    """Sessions that recovery found damaged, by their reference as text."""

    def refs(self) -> Iterator[SessionRef]:
        """Name the sessions that may stand in the journal alone."""
        return iter(self.changed)

    def changed_since(self, commit: int) -> frozenset[SessionRef] | None:
        """Name the sessions whose transcripts grew after a commit, or none if that is too old."""
        if commit < self.through:
            return None
        return frozenset(ref for ref, last in self.changed.items() if last > commit)


def tail_of(
    commits: Iterable[tuple[int, Commit]],
    *,
    through: int,
    damaged: Iterable[Damaged] = (),
    as_of: int,
) -> Tail:
    """Gather a journal's tail.

    Args:
        commits: the frames behind the last checkpoint, in order, with their numbers.
        through: that checkpoint's.
        damaged: sessions that it names as damaged.
        as_of: frames of later commits are left out.

    """
    tail = Tail(through, damaged={one.session: one for one in damaged})
    for commit, frame in commits:
        if commit > as_of:
            break
        tail.leases.update(frame.leases)
        for part in frame.parts:
            overlay = tail.overlays.get(part.file)
            if overlay is None:
                end = part.offset + len(part.data)
                tail.overlays[part.file] = Overlay(part.offset, end, [part.data])
            else:
                overlay.put(part)
            if (ref := transcript_ref(part.file)) is not None:
                tail.changed[ref] = commit
    return tail


def transcript_ref(file: str) -> SessionRef | None:
    """Tell whose transcript a file of the home is, or none if it is another file."""
    match file.split("/"):
        case ["sessions", key, session_id, "transcript.jsonl"]:
            try:
                return parse_ref(f"{key}/{session_id}")
            except InvalidRequest:
                return None
        case _:
            return None
