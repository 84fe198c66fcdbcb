"""Seeds that once broke a promise, kept for ever (SIM-11).

A seed means another story once the simulator draws otherwise; so the bugs that were found are also
kept as mutants (`forced_compaction`, `permit_evicts`), and must be caught again.
"""

from __future__ import annotations

from typing import Final

FAILED: Final[tuple[tuple[int, str], ...]] = (
    (248, "a forced checkpoint began an inbox anew in the middle of a batch"),
    (294, "the same: the inbox's file was shorter than the next part's offset"),
    (839, "the same: a transcript whose lines stood in another order"),
    (467, "a session was evicted with an input that waited for its next attempt"),
    (100, "the same, in a session that ended by itself"),
    (254, "the simulator let planes hear each other"),
    (790, "the second reader took a part for a file that a later one had replaced"),
    (101_906, "a gateway without an epoch ended at a request for a new session"),
    (102_160, "the simulator let a rival register as if the supervisor had started it"),
    (200_814, "a gateway took a session for dead that was younger than the supervisor's list"),
    (203_917, "a session with a lost request was kept until its next beat, for a minute"),
    (308_077, "two starts in a row that were cut short, and a power cut: journal_damaged"),
    (307_340, "a permit was given back before its registration was answered, and may be"),
    (202_592, "a copy of a refused frame was accepted: the session starts anew, and may"),
    (434, "a permit that rode along with an input crossed a registration"),
    (824, "the simulator left a client with a connection to a dead gateway"),
)
"""Seeds and what they found."""
