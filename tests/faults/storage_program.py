"""A program for alice.py: three lives of a storage engine on real files, with its promises.

python -m tests.faults.storage_program ROOT
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from callboard import home
from callboard import messages as m
from callboard.ids import fresh_id
from callboard.storage.disk import RealClock, RealDisk
from callboard.storage.durable import NoDurable
from callboard.storage.engine import Engine, Options, Reply, Request
from callboard.storage.recovery import recover
from tests.storage.world import FakeOwners, creation, item, ref


def release(replies: Sequence[Reply]) -> None:
    """Promise what was accepted, in one unbuffered write each."""
    for reply in replies:
        if isinstance(reply.body, m.Accepted):
            os.write(1, b"ACK %d\n" % int(str(reply.token)))


def main(root: str) -> int:
    """Write, stop, and write again."""
    os.umask(0o077)
    place = str(home.prepare_home(Path(root) / "deep" / "home").root)
    count = 0
    for life in range(3):
        disk = RealDisk()
        engine = Engine(
            disk,
            RealClock(),
            recover(disk, place, fresh_id, 64),
            FakeOwners(),
            NoDurable(),
            Options("p", 3_000, 1 << 30, 1 << 30),
            release,
        )
        engine.run([Request(None, "gateway", "", m.GatewayHello(nonce="1" * 32))])
        epoch = engine.journal.epochs.gateway
        for number in range(2):
            body = creation(f"s{number}", epoch, f"{number:032x}")
            engine.run([Request(None, "gateway", "", body)])
        for step in range(5):
            count += 1
            text = ref(f"s{count % 2}")
            accept = m.Accept(session=text, gateway_epoch=epoch, item=item(f"m{count}"))
            engine.run([Request(count, "gateway", "", accept)])
            if step == 2:
                engine.mark()
                discard = m.DiscardInput(
                    session=text,
                    gateway_epoch=epoch,
                    message_id=f"m{count}",
                    reason="discarded",
                )
                engine.run([Request(None, "gateway", "", discard)])
            if step == 3:
                engine.checkpoints.now()
        if life == 1:
            engine.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
