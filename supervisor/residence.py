"""A home that is ours: from before the plane's first child until after its last (FLT-28a)."""

from __future__ import annotations

import os
import resource
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from callboard.config import Settings
from callboard.errors import HomeInUse, InvalidRequest
from callboard.home import (
    Home,
    Runtime,
    hold_nonce,
    make_directories,
    open_state,
    prepare_home,
    prepare_runtime,
    probe_holder,
    publish,
    remove_file,
    runtime_of,
)
from callboard.ids import fresh_id, fresh_ulid
from callboard.limits import FD_PER_SESSION, FD_RESERVE, TOKEN_BYTES

_LOCKS: Final = Path("/proc/locks")


@dataclass(frozen=True, slots=True)
class Residence:
    """Where the plane lives, and what is new with each of its starts."""

    home: Home
    runtime: Runtime
    settings: Settings
    plane_id: str
    secret: bytes
    """Tokens on the bus are made with it."""
    operator_token: str
    nonce: str
    """The supervisor's own."""


@contextmanager
def reside(settings: Settings) -> Generator[Residence, None, None]:
    """Take a home, and give it back at the end.

    Raises:
        HomeInUse: another plane has it; `pid` says which.
        HomeUnsafe: it is not safely ours.
        InvalidRequest: more sessions than descriptors allow (FLT-45b).

    """
    raise_descriptor_limit()
    check_descriptors(settings)
    home = prepare_home(settings.home)
    lock = _take(home)
    try:
        runtime = runtime_of(home.root)
        prepare_runtime(runtime)
        if not home.logs.exists():
            make_directories(home.logs)
        remove_dead_nonces(runtime)
        token = secrets.token_hex(TOKEN_BYTES)
        publish(runtime.operator_token, token.encode())
        nonce = fresh_id()
        hold_nonce(runtime, nonce)
        try:
            yield Residence(
                home,
                runtime,
                settings,
                fresh_ulid(),
                secrets.token_bytes(TOKEN_BYTES),
                token,
                nonce,
            )
        finally:  # the operator's authority ends with the plane, however it ends (PRN-4b)
            for path in (runtime.operator_token, runtime.actors / nonce):
                with suppress(OSError):
                    remove_file(path)
    finally:
        lock.release()


@contextmanager
def taken(path: Path) -> Generator[Home, None, None]:
    """Keep planes out of a home that is there, while the block lasts.

    Raises:
        HomeInUse: a plane has it; `pid` says which.
        HomeUnsafe: its lock is none of ours.

    """
    home = Home(Path(os.path.realpath(path)))
    lock = _take(home)
    try:
        yield home
    finally:
        lock.release()


def _take(home: Home) -> FileLock:
    os.close(open_state(home.lock, os.O_RDWR | os.O_CREAT))  # ours and a file, before filelock
    lock = FileLock(home.lock, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise HomeInUse(pid=lock_owner(home)) from None
    return lock


def lock_owner(home: Home) -> int | None:
    """Tell which process holds `home.lock`, as the kernel lists it; none if it does not say."""
    try:
        mark = f":{os.stat(home.lock).st_ino}"
        lines = _LOCKS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        number, *fields = line.split()  # "1: FLOCK ADVISORY WRITE pid maj:min:inode start end"
        if number and fields[0] == "FLOCK" and fields[4].endswith(mark):
            return int(fields[3]) or None
    return None


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard one (FLT-45a); children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_descriptors(settings: Settings) -> None:
    """Refuse a start whose limits the descriptors cannot hold (FLT-45b)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    sessions = FD_PER_SESSION * settings.resident_sessions
    needed = FD_RESERVE + sessions + settings.client_connections
    if limit not in (resource.RLIM_INFINITY, -1) and needed > limit:
        raise InvalidRequest(
            f"{needed} descriptors are needed and {limit} allowed.",
            field="resident_sessions",
            reason="descriptors",
        )


def remove_dead_nonces(runtime: Runtime) -> None:
    """Remove the identities of processes of earlier planes whose lock nobody holds (FLT-36)."""
    for entry in list(os.scandir(runtime.actors)):
        path = Path(entry.path)
        with suppress(OSError):
            if entry.is_file(follow_symlinks=False) and probe_holder(path) == 0:
                remove_file(path)
