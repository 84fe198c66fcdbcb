"""A small home on a real disk, as the storage engine wrote it, and ways to damage it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Literal

from callboard import messages as m
from callboard.home import Home
from callboard.ids import SessionRef, parse_ref
from callboard.storage.findings import Finding
from callboard.storage.index import IndexWriter
from callboard.storage.verify import Totals, verify
from tests.storage.world import World, new, ref

Ending = Literal["stop", "kill"]
ARTIFACT = b"long text " * 5_000


def small_home(path: Path, ending: Ending = "stop", *, segment_bytes: int = 1 << 20) -> Home:
    """Three sessions: `done` with three turns and a given-back lease, `waits` with inputs and a
    lease of a dead process, `new` with nothing but its creation; an index and an artifact."""
    world = World(segment_bytes=segment_bytes)
    done, waits = world.create("done"), world.create("waits")
    lease = world.acquire(done, "d" * 32)
    for n in range(3):
        world.clock.pass_ms(5)
        world.turn(done, lease.epoch, f"i{n}", f"turn_{n}", words=f"words {n}")
    world.accept(waits, "w1")
    world.accept(waits, "w2", "more words")
    world.create("new")
    assert world.engine.checkpoints.now()
    world.clock.pass_ms(5)
    world.turn(done, lease.epoch, "i3", "turn_3", words="words 3")
    held = world.acquire(waits)
    assert held.epoch == 1
    world.append(waits, 1, [new("session_updated", {"title": "t", "updated_at": 1}, world.fresh())])
    world.call(m.Release(session=done, epoch=lease.epoch, nonce="d" * 32))
    if ending == "stop":
        assert world.engine.stop()
    return dump(world, path)


def dump(world: World, path: Path) -> Home:
    """Write a made-up disk's home to a real one, with an index, a lock file and an artifact."""
    home = Home(path)
    for name, data in world.disk.home().items():
        if name.startswith("/home/"):
            write(path / name.removeprefix("/home/"), data)
    write(home.writer_lock, b"")
    write(home.session(the("done")) / "artifacts" / hashlib.sha256(ARTIFACT).hexdigest(), ARTIFACT)
    writer = IndexWriter.open(home, world.engine.handed)
    assert writer.on
    writer.close()
    return home


def write(path: Path, data: bytes) -> None:
    for folder in reversed(path.parents):
        if not folder.exists():
            folder.mkdir(mode=0o700)
            folder.chmod(0o700)
    path.write_bytes(data)
    path.chmod(0o600)


def the(session_id: str) -> SessionRef:
    return parse_ref(ref(session_id))


def found_in(home: Home) -> list[Finding]:
    return list(verify(home.root))


def kinds(home: Home) -> set[str]:
    return {one.kind for one in found_in(home)}


def only(home: Home) -> Finding:
    """The one thing that is wrong."""
    found = found_in(home)
    assert len(found) == 1, [one.text() for one in found]
    return found[0]


def totals(home: Home) -> Totals:
    counted = Totals()
    assert list(verify(home.root, counted)) == []
    return counted


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def offset_of(path: Path, line: int) -> int:
    return sum(len(one) + 1 for one in lines(path)[: line - 1])


def flip(path: Path, offset: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def snapshot(home: Home) -> dict[str, tuple[int, bytes]]:
    """Mode and content of everything, SQLite's own bookkeeping excepted (REC-7)."""
    return {
        str(path.relative_to(home.root)): (path.lstat().st_mode, content(path))
        for path in sorted(home.root.rglob("*"))
        if not path.name.endswith(("-wal", "-shm"))
    }


def content(path: Path) -> bytes:
    if path.is_symlink():
        return os.fsencode(os.readlink(path))
    return path.read_bytes() if path.is_file() else b""


def lease_of(home: Home, session_id: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(home.lease(the(session_id)).read_bytes())
    return found
