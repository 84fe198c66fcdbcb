"""The activation queue's account: how many requests may wait for a session, with how many bytes.

Pure. Where they wait is with their session (routes.py); here it is only counted (ADM-1 to ADM-3).
"""

from __future__ import annotations

from callboard.errors import Overloaded


class Places:
    """A count and a sum of bytes, each with its limit.

    Args:
        count_max: ACTIVATION_QUEUE_MAX.
        bytes_max: ACTIVATION_QUEUE_BYTES_MAX.

    """

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self.count_max = count_max
        self.bytes_max = bytes_max
        self.count = 0
        self.bytes = 0

    def enter(self, weight: int) -> Overloaded | None:
        """Take a place, or say why there is none; the count is judged first (ADM-1a).

        Args:
            weight: the request's encoded bytes.

        """
        if self.count >= self.count_max:
            return Overloaded(resource="pending_count", limit=self.count_max)
        if self.bytes + weight > self.bytes_max:
            return Overloaded(resource="pending_bytes", limit=self.bytes_max)
        self.force(weight)
        return None

    def force(self, weight: int) -> None:
        """Take a place that cannot be refused: what waits was accepted before."""
        self.count += 1
        self.bytes += weight

    def leave(self, weight: int) -> None:
        """Give a place back, before whoever had it goes on (ADM-2)."""
        self.count -= 1
        self.bytes -= weight
