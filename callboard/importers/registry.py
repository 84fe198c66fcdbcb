"""The formats that there are, and which of them a file is in (IMP-1, IMP-3)."""

from __future__ import annotations

from callboard.errors import ImportFormatUnknown
from callboard.importers.port import TranscriptImporter
from callboard.limits import IMPORT_SNIFF_BYTES, IMPORT_SNIFF_SCORE_MIN


class Formats:
    """A set of formats, by name; whoever brings one more adds it."""

    def __init__(self, *importers: TranscriptImporter) -> None:
        """Begin with these.

        Raises:
            ValueError: two have one name.

        """
        self._importers: dict[str, TranscriptImporter] = {}
        for importer in importers:
            self.add(importer)

    def add(self, importer: TranscriptImporter) -> None:
        """Plug a format in.

        Raises:
            ValueError: there is one of this name.

        """
        if importer.name in self._importers:
            raise ValueError(f"there is a transcript format {importer.name} already")
        self._importers[importer.name] = importer

    @property
    def names(self) -> list[str]:
        """The names of the formats, in the order they were added."""
        return list(self._importers)

    def choose(self, head: bytes, file_name: str, name: str | None = None) -> TranscriptImporter:
        """Find the format of a file: the named one, else the one that is surest (IMP-3).

        Args:
            head: the file's first bytes; only IMPORT_SNIFF_BYTES of them are looked at.
            file_name: its name, without folders.
            name: the format, if it is known.

        Raises:
            ImportFormatUnknown: no such name, no format is sure enough, or two are equally sure;
                its candidates are the names to choose from.

        """
        if name is not None:
            return self._named(name)
        head = head[:IMPORT_SNIFF_BYTES]
        scores = {each: self._importers[each].sniff(head, file_name) for each in self._importers}
        best = max(scores.values(), default=0)
        winners = [each for each in scores if scores[each] == best]
        if best < IMPORT_SNIFF_SCORE_MIN:
            message = f"{file_name} is in none of the known transcript formats"
            raise ImportFormatUnknown(message, candidates=self.names)
        if len(winners) > 1:
            message = f"{file_name} could be in several transcript formats"
            raise ImportFormatUnknown(message, candidates=winners)
        return self._importers[winners[0]]

    def _named(self, name: str) -> TranscriptImporter:
        if name not in self._importers:
            message = f"there is no transcript format of the name {name!r}"
            raise ImportFormatUnknown(message, candidates=self.names)
        return self._importers[name]


_known: Formats | None = None


def formats() -> Formats:
    """Return this process's formats: the built-in ones, loaded at the first call, and the added."""
    global _known
    if _known is None:
        from callboard.importers.claude_code import ClaudeCodeImporter
        from callboard.importers.codex import CodexImporter
        from callboard.importers.script_file import ScriptImporter

        _known = Formats(ClaudeCodeImporter(), CodexImporter(), ScriptImporter())
    return _known


def choose(head: bytes, file_name: str, name: str | None = None) -> TranscriptImporter:
    """Find the format of a file among `formats()`; see `Formats.choose`."""
    return formats().choose(head, file_name, name)
