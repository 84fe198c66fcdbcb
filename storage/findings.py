"""What `callboard verify` may find: each kind with its meaning, its way out, and who repairs it.

A finding names a file below the home and where in it, never what stands there. It is for whoever
may read the home's files; errors, warnings and events name no file (IDN-7).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from callboard.limits import FINDINGS_PER_FILE_MAX

Kind = Literal[
    "artifact_altered",
    "artifact_missing",
    "bad_line",
    "beyond_journal",
    "case_twin",
    "duplicate_record",
    "durable_invalid",
    "foreign_file",
    "foreign_tail",
    "format_invalid",
    "format_unsupported",
    "identity_mismatch",
    "inbox_corrupt",
    "index_differs",
    "index_unusable",
    "input_acknowledged",
    "input_missing",
    "journal_damaged",
    "journal_foreign",
    "law_broken",
    "lease_behind",
    "lease_differs",
    "lease_invalid",
    "lease_missing",
    "missing_records",
    "more_findings",
    "not_ours",
    "owner_unprovable",
    "torn_tail",
    "transcript_missing",
    "truncated",
    "unlike_checkpoint",
    "unreadable",
    "wrong_mode",
]
Repair = Literal["none", "restore", "cut_tail", "release_lease", "rebuild_index", "set_mode"]
"""What doctor does about it. `restore` puts a file back from the journal, and where its frames are
gone writes what is sound of a transcript into a new session."""


class Meaning(NamedTuple):
    """A kind of finding, in words."""

    sentence: str
    way_out: str
    repair: Repair = "none"


_DOCTOR: Final = "callboard doctor says what it can put right, callboard doctor --repair does it"
_BACKUP: Final = "put the file back from a backup; callboard changes nothing about it"
_VERSION: Final = "use the callboard version that wrote it, or a newer one"
_BY_HAND: Final = "nothing of callboard's uses it: move it out of the home"
_REBUILD: Final = "callboard doctor --repair makes the index anew; lists read the files meanwhile"
_RELEASE: Final = "make sure that its owner is gone, then: callboard doctor --repair"

MEANINGS: Final[Mapping[Kind, Meaning]] = MappingProxyType(
    {
        "artifact_altered": Meaning("The artifact is not what its name says.", _BACKUP),
        "artifact_missing": Meaning("A message names an artifact that is not there.", _BACKUP),
        "bad_line": Meaning("The line is no record of this transcript.", _DOCTOR, "restore"),
        "beyond_journal": Meaning(
            "The file is ahead of the journal, which has lost frames.",
            "put the journal folder back as it was together with this file",
        ),
        "case_twin": Meaning(
            "Two sessions of one workspace have names that differ in case only.",
            "move one of the two folders out of the home",
        ),
        "duplicate_record": Meaning("A record stands there twice.", _DOCTOR, "restore"),
        "durable_invalid": Meaning(
            "The mark of what is durable does not fit the journal.",
            "stop the plane with: callboard down, and start it again",
        ),
        "foreign_file": Meaning("No part of callboard makes files of this name.", _BY_HAND),
        "foreign_tail": Meaning(
            "Whole lines that callboard did not write stand behind the end.", _DOCTOR, "restore"
        ),
        "format_invalid": Meaning("format.json is none of ours.", _BACKUP),
        "format_unsupported": Meaning(
            "This version does not know what is written there.", _VERSION
        ),
        "identity_mismatch": Meaning(
            "It cannot be told whose transcript this is, or it is another one's.",
            _DOCTOR,
            "restore",
        ),
        "inbox_corrupt": Meaning(
            "The inbox is damaged; the session does not start.", _DOCTOR, "restore"
        ),
        "index_differs": Meaning(
            "The index says of a session what its files do not.", _REBUILD, "rebuild_index"
        ),
        "index_unusable": Meaning("The index cannot be used.", _REBUILD, "rebuild_index"),
        "input_acknowledged": Meaning(
            "An input waits in the inbox that the transcript says is done.",
            "the next start of the session takes it out; nothing is run again",
        ),
        "input_missing": Meaning(
            "An input that a turn took and did not finish is not in the inbox.",
            _DOCTOR,
            "restore",
        ),
        "journal_damaged": Meaning(
            "Bytes of the journal that were on the disk once are gone or changed; no plane starts.",
            "put this segment back from a backup; no command cuts a journal, since what stands"
            " behind the damage was promised",
        ),
        "journal_foreign": Meaning("The journal is another home's, or no journal.", _BACKUP),
        "law_broken": Meaning("The record breaks a rule of its type.", _DOCTOR, "restore"),
        "lease_behind": Meaning(
            "The lease's epoch is below one that the session had.", _RELEASE, "release_lease"
        ),
        "lease_differs": Meaning(
            "The lease is not the one that the journal gave.", _RELEASE, "release_lease"
        ),
        "lease_invalid": Meaning("The lease cannot be read.", _RELEASE, "release_lease"),
        "lease_missing": Meaning(
            "The session had an owner, and its lease is gone.", _RELEASE, "release_lease"
        ),
        "missing_records": Meaning("Records are missing before this line.", _DOCTOR, "restore"),
        "more_findings": Meaning("There are more findings in this file.", "see the ones before"),
        "not_ours": Meaning(
            "It is not a file or folder of your own with one name.",
            "make it yours, or move it out of the home",
        ),
        "owner_unprovable": Meaning(
            "It cannot be proven whether the session's last owner still lives.",
            _RELEASE,
            "release_lease",
        ),
        "torn_tail": Meaning(
            "The file ends in a line without an end that no crash explains.", _DOCTOR, "cut_tail"
        ),
        "transcript_missing": Meaning(
            "The session's folder has no transcript any more.", _DOCTOR, "restore"
        ),
        "truncated": Meaning("The file ends before what was once in it.", _DOCTOR, "restore"),
        "unlike_checkpoint": Meaning(
            "The file is not as the last checkpoint left it.", _DOCTOR, "restore"
        ),
        "unreadable": Meaning("It cannot be read.", "check the disk and the modes of the home"),
        "wrong_mode": Meaning(
            "Its mode is not 0600 for a file or 0700 for a folder.",
            "callboard doctor --repair corrects it",
            "set_mode",
        ),
    }
)


class Finding(NamedTuple):
    """Something that is not as it must be, and where."""

    kind: Kind
    file: str
    """Below the home, with slashes; below the runtime directory if it begins with `run/`."""
    line: int | None = None
    """From 1, of a file of lines."""
    offset: int | None = None
    """In bytes: where the line, the frame or the missing part begins."""
    session: str | None = None
    detail: str | None = None
    """A code or a number that says more; never content."""
    salvaged_as: str | None = None
    """The session that holds what was sound of this one: the damage is known and dealt with."""

    @property
    def is_open(self) -> bool:
        """Tell whether anything is left to do about it."""
        return self.salvaged_as is None

    @property
    def meaning(self) -> Meaning:
        """Say what it means."""
        return MEANINGS[self.kind]

    def to_json(self) -> dict[str, object]:
        """Give it as a JSON object; what is not known is left out."""
        known = {name: value for name, value in self._asdict().items() if value is not None}
        return {**known, "message": self.meaning.sentence, "way_out": self.meaning.way_out}

    def text(self) -> str:
        """Give it as one line for a person, but for the way out."""
        place = self.file if self.line is None else f"{self.file}, line {self.line}"
        if self.offset is not None:
            place += f", byte {self.offset}"
        detail = "" if self.detail is None else f" ({self.detail})"
        return f"{self.kind}: {place}{detail}: {self.meaning.sentence}"


def first_of_each_file(found: Iterable[Finding]) -> Iterator[Finding]:
    """Leave out what is beyond FINDINGS_PER_FILE_MAX in one file, and say that it was left out.

    Args:
        found: findings, those of one file one after the other.

    """
    file, count = "", 0
    for finding in found:
        file, count = finding.file, count + 1 if finding.file == file else 1
        if count <= FINDINGS_PER_FILE_MAX:
            yield finding
        elif count == FINDINGS_PER_FILE_MAX + 1:
            yield Finding("more_findings", file, session=finding.session)
