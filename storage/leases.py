"""Who owns a session: the lease as it is kept, and table 3.2 of the runtime page (LSE-1 to LSE-7).

`lease.json` and the leases in journal frames are one JSON object {workspace_key, session_id, epoch,
owner_pid, start_time, boot_id, pid_ns, nonce, plane_id, acquired_at, released_at}; `released_at` is
null while the lease is held, instants are microseconds.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from typing import Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from callboard import home
from callboard.errors import OwnerUnprovable
from callboard.ids import SessionRef
from callboard.messages import ProcessIdentity

LEASE_BYTES_MAX: Final = 4_096
END_MS: Final = 1_000
"""How long an owner of an earlier plane may take to end: its parent is dead, and so is it soon."""
Standing = Literal["free", "mine", "held"]


class Lease(BaseModel):
    """A lease as last granted or released."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    workspace_key: str
    session_id: str
    epoch: int = Field(ge=1)
    owner_pid: int
    start_time: int
    boot_id: str
    pid_ns: int
    nonce: str
    plane_id: str
    acquired_at: int = Field(ge=0)
    released_at: int | None = None

    @property
    def held(self) -> bool:
        """Tell whether it was not given back."""
        return self.released_at is None

    def owner(self) -> ProcessIdentity:
        """Say who holds it."""
        return ProcessIdentity(
            pid=self.owner_pid,
            start_time=self.start_time,
            boot_id=self.boot_id,
            pid_ns=self.pid_ns,
            nonce=self.nonce,
            plane_id=self.plane_id,
        )

    def identity(self) -> home.Identity:
        """Say the same for `home.judge`."""
        return home.Identity(**self.owner().model_dump())

    def spell(self) -> bytes:
        """Spell it as it is kept."""
        return self.model_dump_json().encode()

    def release(self, at: int) -> Lease:
        """Give it back."""
        return self.model_copy(update={"released_at": at})


def grant(ref: SessionRef, epoch: int, owner: ProcessIdentity, at: int) -> Lease:
    """Make a lease.

    Args:
        ref: the session.
        epoch: above every earlier one.
        owner: who gets it.
        at: microseconds since the epoch.

    """
    return Lease(
        workspace_key=ref.workspace_key,
        session_id=ref.session_id,
        epoch=epoch,
        owner_pid=owner.pid,
        start_time=owner.start_time,
        boot_id=owner.boot_id,
        pid_ns=owner.pid_ns,
        nonce=owner.nonce,
        plane_id=owner.plane_id,
        acquired_at=at,
    )


def read_lease(data: bytes, ref: SessionRef) -> Lease:
    """Read a lease as it is kept.

    Raises:
        OwnerUnprovable: it is unreadable, malformed, or another session's (LSE-4a).

    """
    try:
        lease = Lease.model_validate_json(data)
        if lease.held:
            lease.owner()  # an owner that no process can be is malformed too
    except ValidationError:
        raise OwnerUnprovable from None
    if (lease.workspace_key, lease.session_id) != ref:
        raise OwnerUnprovable
    return lease


class Owners(Protocol):
    """What storage may learn of processes, and the one thing it may do to one."""

    def judge(self, owner: home.Identity) -> home.Verdict:
        """Tell whether an owner is alive (table FLT-36)."""
        ...

    def end(self, owner: home.Identity) -> bool:
        """End a live owner of an earlier plane (LSE-7); false if it cannot be shown gone."""
        ...


class RealOwners:
    """The processes of this machine."""

    def __init__(self, runtime: home.Runtime) -> None:
        self._runtime = runtime

    def judge(self, owner: home.Identity) -> home.Verdict:
        """See Owners."""
        return home.judge(self._runtime, owner)

    def end(self, owner: home.Identity) -> bool:
        """See Owners. The signal goes through a descriptor that was opened first (FLT-37)."""
        try:
            fd = os.pidfd_open(owner.pid)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        try:
            verdict = home.judge(self._runtime, owner)
            if verdict != "alive":
                return verdict == "dead"
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(END_MS))
        finally:
            os.close(fd)


def standing(lease: Lease | None, owners: Owners, plane_id: str, nonce: str = "") -> Standing:
    """Judge a stored lease (table 3.2).

    Args:
        lease: as stored, or none.
        owners: knows who lives.
        plane_id: of this plane.
        nonce: of who asks for the lease, if anybody does.

    Returns:
        free: nobody has it; mine: the one who asks has it; held: a live process of this plane.

    Raises:
        OwnerUnprovable: what cannot be proven is held (LSE-4).

    """
    if lease is None or not lease.held:
        return "free"
    if lease.nonce == nonce:
        return "mine"
    verdict = owners.judge(lease.identity())
    if verdict == "dead":
        return "free"
    if verdict == "alive":
        if lease.plane_id == plane_id:
            return "held"
        if owners.end(lease.identity()):
            return "free"
    raise OwnerUnprovable(pid=lease.owner_pid, epoch=lease.epoch)
