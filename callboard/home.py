"""Where things lie, who may be trusted to own them, and how a name becomes durable.

This is the one module that creates, links, renames or removes names in a home or a runtime
directory (FLT-15c). Opening follows FLT-50, publishing FLT-16, identity FLT-35 and FLT-36.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import stat
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import platformdirs

from callboard.errors import HomeUnsafe
from callboard.ids import SessionRef
from callboard.limits import RUNTIME_PATH_BYTES_MAX

Verdict = Literal["alive", "dead", "unknown"]
What = Literal["home", "runtime", "journal", "format", "token"]


@dataclass(frozen=True, slots=True)
class Home:
    """The paths of a home (architecture page, section 3)."""

    root: Path

    @property
    def format(self) -> Path:
        """The storage format, the home's id and the cursor key."""
        return self.root / "format.json"

    @property
    def lock(self) -> Path:
        """The lock of the one plane that may use this home."""
        return self.root / "home.lock"

    @property
    def journal(self) -> Path:
        """The folder of the journal's segments."""
        return self.root / "journal"

    @property
    def writer_lock(self) -> Path:
        """The record lock of the storage actor."""
        return self.journal / "writer.lock"

    @property
    def sessions(self) -> Path:
        """The folder of all workspaces' sessions."""
        return self.root / "sessions"

    @property
    def index(self) -> Path:
        """The catalog; rebuildable."""
        return self.root / "index.sqlite3"

    @property
    def logs(self) -> Path:
        """One file per actor."""
        return self.root / "logs"

    def session(self, ref: SessionRef) -> Path:
        """Give the folder of a session."""
        return self.sessions / ref.workspace_key / ref.session_id

    def transcript(self, ref: SessionRef) -> Path:
        """Give the transcript of a session."""
        return self.session(ref) / "transcript.jsonl"

    def inbox(self, ref: SessionRef) -> Path:
        """Give the inbox of a session."""
        return self.session(ref) / "inbox.jsonl"

    def lease(self, ref: SessionRef) -> Path:
        """Give the lease of a session as last granted or released."""
        return self.session(ref) / "lease.json"


@dataclass(frozen=True, slots=True)
class Runtime:
    """The paths of a runtime directory."""

    root: Path

    @property
    def door(self) -> Path:
        """The clients' socket."""
        return self.root / "door.sock"

    @property
    def bus(self) -> Path:
        """The folder of the actors' sockets."""
        return self.root / "bus"

    @property
    def bind_lock(self) -> Path:
        """What a process holds while it binds in `bus`."""
        return self.bus / "bind.lock"

    @property
    def storage(self) -> Path:
        """The storage actor's socket."""
        return self.bus / "storage.sock"

    @property
    def gateway(self) -> Path:
        """The gateway actor's socket for actors."""
        return self.bus / "gateway.sock"

    @property
    def actors(self) -> Path:
        """One locked file per living process."""
        return self.root / "actors"

    @property
    def durable(self) -> Path:
        """Two u64: the last synced commit, and the last one whose lines stand in the files."""
        return self.root / "durable"

    @property
    def operator_token(self) -> Path:
        """The operator's credential of this plane start."""
        return self.root / "operator.token"


def default_home() -> Path:
    """Give the platform's place for a home."""
    return Path(platformdirs.user_data_dir("callboard", appauthor=False))


def runtime_of(home: Path) -> Runtime:
    """Find the runtime directory of a home: inside it, or where paths are short enough.

    Args:
        home: the home's path; it is made real first, so that every spelling gives one directory.

    Raises:
        HomeUnsafe: no place gives paths that a Unix socket can bear (FLT-42c).

    """
    real = os.path.realpath(home)
    name = f"run-{hashlib.sha256(os.fsencode(real)).hexdigest()[:16]}"
    places = [Path(real) / "run"]
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        places.append(Path(base) / "callboard" / name)
    places.append(Path(platformdirs.user_cache_dir("callboard", appauthor=False)) / name)
    for place in places:
        longest = max(len(os.fsencode(p)) for p in _sockets(Runtime(place)))
        if longest <= RUNTIME_PATH_BYTES_MAX:
            return Runtime(place)
    raise HomeUnsafe(what="runtime", reason="path_too_long")


def _sockets(runtime: Runtime) -> tuple[Path, ...]:
    return runtime.door, runtime.storage, runtime.gateway


# --- names --------------------------------------------------------------------------------------


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path, *, durable: bool = True) -> list[Path]:
    """Create a directory and its missing parents, 0700, and make their names durable.

    Args:
        path: absolute.
        durable: sync each new directory's parent, up to the first that was there before
            (FLT-15b); false where the caller syncs the returned directories later.

    Returns:
        The directories whose names are new, outermost first.

    """
    missing: list[Path] = []
    probe = path
    while not probe.exists():
        missing.append(probe)
        probe = probe.parent
    made: list[Path] = []
    for folder in reversed(missing):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            continue
        made.append(folder)
    if durable:
        for folder in made:
            sync_directory(folder.parent)
    return made


def publish(path: Path, content: bytes) -> None:
    """Replace a file by new content, whole or not at all, and make it durable (FLT-16)."""
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    fd = create_file(temporary)
    try:
        write_all(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)
    sync_directory(path.parent)


def create_file(path: Path) -> int:
    """Create a file that must not exist, 0600, and open it for reading and writing.

    The name is durable after `sync_directory` of its folder, not before.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def replace_file(source: Path, target: Path) -> None:
    """Give a file another name, in place of what had it; durable after `sync_directory`."""
    os.rename(source, target)


def link_file(source: Path, target: Path) -> None:
    """Give a file one more name, which nothing may have; durable after `sync_directory`."""
    os.link(source, target, follow_symlinks=False)


def remove_file(path: Path) -> None:
    """Remove a name; durable after `sync_directory` of its folder."""
    os.unlink(path)


def write_all(fd: int, data: bytes) -> None:
    """Write at the descriptor's place until everything is written (FLT-3a)."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def open_state(path: Path, flags: int, *, what: What = "home", links: int = 1) -> int:
    """Open a state file by the rules of FLT-50; a looser mode is tightened.

    Args:
        path: the file.
        flags: `os.O_RDONLY`, `os.O_RDWR`, with or without `os.O_CREAT`.
        what: which part of the home an error names.
        links: how many names the file may have at most; 0 for any number.

    Raises:
        HomeUnsafe: a symlink, not a regular file, another owner, or too many names.
        FileNotFoundError: no such file.

    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise HomeUnsafe(what=what, reason=_NOT_A_FILE[error.errno]) from None
        raise
    try:
        check_regular(os.fstat(fd), what, links)
        if os.fstat(fd).st_mode & 0o077:
            os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_shared(path: Path) -> int:
    """Open an artifact for reading: a regular file of our own, 0600, with any number of names.

    Raises:
        HomeUnsafe: anything else has the name (ART-8).
        FileNotFoundError: no such file.

    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise HomeUnsafe(what="home", reason=_NOT_A_FILE[error.errno]) from None
        raise
    try:
        found = os.fstat(fd)
        check_regular(found, "home", 0)
        if stat.S_IMODE(found.st_mode) != 0o600:
            raise HomeUnsafe(what="home", reason="foreign")
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_private(path: Path) -> None:
    """Refuse a folder that is not a real directory of our own with mode 0700, as it is (ART-8).

    Raises:
        HomeUnsafe: it is not.
        FileNotFoundError: there is none.

    """
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise HomeUnsafe(what="home", reason="not_directory")
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise HomeUnsafe(what="home", reason="owner")


_NOT_A_FILE: dict[int, Literal["symlink", "not_regular"]] = {
    40: "symlink",  # ELOOP
    21: "not_regular",  # EISDIR
    6: "not_regular",  # ENXIO: a FIFO or a socket
}


def check_regular(found: os.stat_result, what: What, links: int) -> None:
    """Refuse what is no regular file of our own with at most `links` names (0: any number)."""
    if not stat.S_ISREG(found.st_mode):
        raise HomeUnsafe(what=what, reason="not_regular")
    if found.st_uid != os.getuid():
        raise HomeUnsafe(what=what, reason="owner")
    if links and found.st_nlink > links:
        raise HomeUnsafe(what=what, reason="foreign")


def check_directory(path: Path, what: What = "home") -> None:
    """Refuse what is no real directory of our own; tighten a looser mode (FLT-19b)."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise HomeUnsafe(what=what, reason="symlink")
    if not stat.S_ISDIR(found.st_mode):
        raise HomeUnsafe(what=what, reason="not_directory")
    if found.st_uid != os.getuid():
        raise HomeUnsafe(what=what, reason="owner")
    if found.st_mode & 0o077:
        os.chmod(path, 0o700)


_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "afs", "fuse.sshfs", "glusterfs"}
)


def check_local(path: Path) -> None:
    """Refuse a home on a network file system, where locks and syncs prove nothing (FLT-19a)."""
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        table = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return
    for line in table.splitlines():
        _, point, name, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, name
    if kind in _NETWORK_FILE_SYSTEMS:
        raise HomeUnsafe(what="home", reason="network_filesystem")


def prepare_home(path: Path) -> Home:
    """Create a home's folder, or check the one that is there.

    Raises:
        HomeUnsafe: it is not a real, local directory of our own.

    """
    if not os.path.lexists(path):
        make_directories(path)
    check_directory(path)
    check_local(path)
    return Home(Path(os.path.realpath(path)))


def prepare_runtime(runtime: Runtime) -> None:
    """Create the runtime directory and its folders, or check the ones that are there."""
    for folder in (runtime.root, runtime.bus, runtime.actors):
        if not os.path.lexists(folder):
            make_directories(folder, durable=False)
        check_directory(folder, "runtime")


# --- record locks and identity --------------------------------------------------------------------

_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid (Linux, 64 bit)


def lock_record(fd: int) -> bool:
    """Take the record lock on a whole file; false if another process has it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def lock_holder(fd: int) -> int:
    """Ask, without taking it, who holds the record lock of a file: a pid, or 0 for nobody.

    A holder in another PID namespace is shown as pid 0 by the kernel with a held lock; that
    reads as -1 here.
    """
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    if kind == fcntl.F_UNLCK:
        return 0
    return pid if pid > 0 else -1


def probe_holder(path: Path) -> int:
    """Ask who holds a lock file: a pid, 0 for nobody or no file, -1 for someone unseen."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        return lock_holder(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Identity:
    """What proves a process: none of it alone is enough (FLT-35)."""

    pid: int
    start_time: int
    boot_id: str
    pid_ns: int
    nonce: str
    plane_id: str


def boot_id() -> str:
    """Give the id of the kernel's present life."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def open_descriptors() -> tuple[int, int]:
    """Count this process's open descriptors, and tell how many it may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return len(os.listdir("/proc/self/fd")), limit


def pid_namespace() -> int:
    """Give the inode of the PID namespace that this process lives in."""
    return os.stat("/proc/self/ns/pid").st_ino


def start_time(pid: int) -> int | None:
    """Give a process's start time in clock ticks since boot; none if it is gone or a zombie.

    Raises:
        PermissionError: its state cannot be read; nothing is known then (LSE-3b).

    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def this_process(nonce: str, plane_id: str) -> Identity:
    """Describe the running process under the nonce whose lock it holds."""
    pid = os.getpid()
    return Identity(pid, start_time(pid) or 0, boot_id(), pid_namespace(), nonce, plane_id)


def hold_nonce(runtime: Runtime, nonce: str) -> int:
    """Create and lock this process's nonce file; the descriptor must stay open for life.

    A session does this before anything else, so that its lease can be judged from the start.
    """
    fd = create_file(runtime.actors / nonce)
    if not lock_record(fd):
        raise HomeUnsafe(what="runtime", reason="foreign")
    return fd


def judge(runtime: Runtime, owner: Identity) -> Verdict:
    """Tell whether a process that once proved itself is alive (table FLT-36, LSE-3).

    Args:
        runtime: where the nonce files of this plane lie.
        owner: the identity that the lease carries.

    """
    if owner.boot_id != boot_id():
        return "dead"
    if owner.pid_ns != pid_namespace():
        return "unknown"
    if owner.pid <= 1:
        return "unknown"
    if owner.pid == os.getpid():
        # A process sees no lock of its own, and closing a second descriptor would drop it.
        return _judge_by_time(owner)
    try:
        fd = os.open(
            runtime.actors / owner.nonce, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        )
    except FileNotFoundError:
        return _judge_by_time(owner)
    except OSError:
        return "unknown"
    try:
        holder = lock_holder(fd)
    finally:
        os.close(fd)
    if holder == 0:
        return "dead"
    return "alive" if holder == owner.pid else "unknown"


def _judge_by_time(owner: Identity) -> Verdict:
    """No lock file can be read: boot id, namespace and start time decide (LSE-3)."""
    try:
        started = start_time(owner.pid)
    except (OSError, ValueError):
        return "unknown"
    return "alive" if started is not None and started == owner.start_time else "dead"


# --- the order that a parent gives a child ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """What a child process is told at its start, over an inherited descriptor (FLT-62)."""

    role: Literal["storage", "gateway", "fork", "session"]
    home: str
    runtime: str
    plane_id: str
    plane_secret: str
    """64 hex digits; empty for sessions, which get only their token."""
    plane_epoch: int
    nonce: str
    """Nonce file, and routing id on the bus."""
    token: str
    """Credential on the bus for this nonce."""
    parent_pid: int
    liveness_fd: int
    """Read end of a pipe that only the supervisor writes to; its end is the supervisor's."""
    settings: str
    """config.Settings as JSON."""
    operator_token: str = ""
    """Of the gateway alone."""
    session: str = ""
    """Of a session: its reference as text."""

    def to_json(self) -> bytes:
        """Spell the order as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_json(data: bytes) -> Order:
        """Read an order that `to_json` spelled."""
        return Order(**json.loads(data))
