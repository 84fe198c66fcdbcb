"""The judgement: what a client was promised against what a home holds. Pure.

For each session the client waited for a receipt before it sent the next input, so the order of its
receipts is the order in which the inputs were accepted, and must be the order of the transcript.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from callboard.cli.oracle import Entry

FINDINGS_MAX: Final = 100
Kind = Literal["lost", "doubled", "reordered"]


class Input(NamedTuple):
    """An input as some place holds it."""

    message_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the files say of one session."""

    applied: Sequence[Input] = ()
    """User messages of the transcript that came from the inbox, in order."""
    acknowledged: Sequence[Input] = ()
    """Inputs that left the inbox in the frame of their turn's end."""
    discarded: Sequence[Input] = ()
    """Inputs that left it by a recorded discard."""
    waiting: Sequence[Input] = ()
    """Inputs in the inbox, in order."""
    damage: str = ""
    """Why the session cannot be read to the end, if so."""


class Finding(NamedTuple):
    """Something that must not be."""

    kind: Kind
    session: str
    message_id: str
    detail: str


@dataclass(slots=True)
class Verdict:
    """The sums; `accepted` is the sum of the next four."""

    sessions: int = 0
    accepted: int = 0
    acknowledged: int = 0
    pending: int = 0
    discarded: int = 0
    lost: int = 0
    doubled: int = 0
    reordered: int = 0
    findings: list[Finding] = field(default_factory=list[Finding])
    """The first FINDINGS_MAX of them."""

    @property
    def clean(self) -> bool:
        """Tell whether nothing is lost, doubled or out of order."""
        return not (self.lost or self.doubled or self.reordered)

    def figures(self) -> dict[str, object]:
        """Give the sums by name."""
        return {
            "sessions": self.sessions,
            "accepted": self.accepted,
            "acknowledged": self.acknowledged,
            "pending": self.pending,
            "discarded": self.discarded,
            "lost": self.lost,
            "doubled": self.doubled,
            "reordered": self.reordered,
        }

    def find(self, kind: Kind, session: str, message_id: str, detail: str) -> None:
        """Count something that must not be."""
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(kind, session, message_id, detail))


def judge(entries: Iterable[Entry], sessions: Mapping[str, Evidence]) -> Verdict:
    """Compare promises with evidence.

    Args:
        entries: the oracle, in its order.
        sessions: the evidence of each session; none for a session that is not there.

    """
    promised: dict[str, list[Input]] = {}
    for entry in entries:
        promised.setdefault(entry.session, []).append(Input(entry.message_id, entry.digest))
    names = dict.fromkeys((*promised, *sessions))
    verdict = Verdict(sessions=len(names))
    for session in names:
        inputs = promised.get(session, [])
        evidence = sessions.get(session, Evidence(damage="the session is not there"))
        _judge_session(verdict, session, inputs, evidence)
    return verdict


class _Places:
    """How often each input stands where."""

    def __init__(self, evidence: Evidence) -> None:
        self.applied = Counter(one.message_id for one in evidence.applied)
        self.acknowledged = Counter(one.message_id for one in evidence.acknowledged)
        self.discarded = Counter(one.message_id for one in evidence.discarded)
        self.waiting = Counter(one.message_id for one in evidence.waiting)
        self.digests: dict[str, set[str]] = {}
        for places in (
            evidence.applied,
            evidence.acknowledged,
            evidence.discarded,
            evidence.waiting,
        ):
            for one in places:
                self.digests.setdefault(one.message_id, set()).add(one.digest)

    def ids(self) -> list[str]:
        return list(self.digests)

    def doubled(self, name: str) -> str:
        left = self.acknowledged[name] + self.discarded[name]
        if self.applied[name] > 1:
            return f"it stands {self.applied[name]} times in the transcript"
        if left > 1:
            return f"it left the inbox {left} times"
        if self.waiting[name] > 1:
            return f"it stands {self.waiting[name]} times in the inbox"
        if left and self.waiting[name]:
            return "it left the inbox and is in it"
        return ""

    def lost(self, name: str, digest: str) -> str:
        if self.digests.get(name, {digest}) != {digest}:
            return "its text is another one"
        if self.acknowledged[name] and not self.applied[name]:
            return "it was acknowledged, and no message of the transcript holds it"
        if not (self.acknowledged[name] or self.discarded[name] or self.waiting[name]):
            return "neither the inbox nor an end of a turn knows it"
        return ""


def _judge_session(
    verdict: Verdict, session: str, promised: list[Input], evidence: Evidence
) -> None:
    places = _Places(evidence)
    for name, digest in promised:
        verdict.accepted += 1
        why = places.lost(name, digest)
        if why:
            verdict.find("lost", session, name, f"{why}; {evidence.damage}".rstrip("; "))
        elif places.acknowledged[name]:
            verdict.acknowledged += 1
        elif places.discarded[name]:
            verdict.discarded += 1
        else:
            verdict.pending += 1
    for name in places.ids():
        if why := places.doubled(name):
            verdict.find("doubled", session, name, why)
    _judge_order(verdict, session, promised, evidence)


def _judge_order(verdict: Verdict, session: str, promised: list[Input], evidence: Evidence) -> None:
    """Find what stands behind something that was accepted after it.

    The inbox continues the transcript: what waits in it and was not applied comes next.
    """
    number = {one.message_id: n for n, one in enumerate(promised)}
    order = dict.fromkeys(one.message_id for one in (*evidence.applied, *evidence.waiting))
    highest, before = -1, ""
    for name in order:
        if name not in number:
            continue  # accepted, but the client died before it had the receipt
        if number[name] < highest:
            verdict.find("reordered", session, name, f"it stands behind {before}")
        else:
            highest, before = number[name], name
