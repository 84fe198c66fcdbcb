"""Work that runs beside the storage actor, so that acknowledgements go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar


class Job(Protocol):
    """Something slow that touches nothing but itself and files that nobody else writes."""

    def run(self) -> None:
        """Do it; what goes wrong is kept for the actor's thread."""
        ...


J = TypeVar("J", bound=Job)


class Runner(Protocol):
    """Runs jobs."""

    def start(self, job: J, ended: Callable[[J], None]) -> None:
        """Run it, here or beside; `ended` is called in the actor's thread, now or later."""
        ...


class InlineJobs:
    """Runs them at once, in the caller's thread."""

    def start(self, job: J, ended: Callable[[J], None]) -> None:
        """See Runner."""
        job.run()
        ended(job)
