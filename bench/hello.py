"""A process that says hello and ends: what `bench.activate` starts in several ways."""

from __future__ import annotations

import os
import socket

from callboard.home import Order


def speak(ear: str) -> None:
    """Say hello to whoever listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
        mouth.sendto(str(os.getpid()).encode(), ear)


def main(order: Order) -> int:
    """Be a session that says hello; its reference is where to."""
    speak(order.session)
    return 0
