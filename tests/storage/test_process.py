"""The storage process itself: started, killed, starved and fed nonsense under a real client."""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from callboard import home
from callboard import messages as m
from callboard.errors import CallboardError, StorageFull
from callboard.ids import fresh_id
from callboard.limits import BUS_MESSAGE_BYTES_MAX, CHILD_ORPHAN_MS, MAIN_EXIT_MS
from callboard.storage.frames import scan
from callboard.wire import Header, encode_body, encode_header
from tests.faults.shim import build_shim, under
from tests.storage.process import Client, StorageProcess
from tests.storage.second_reader import Seen, read_home
from tests.storage.world import WORKSPACE, appending, item, new, ref


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[StorageProcess]:
    made = StorageProcess(tmp_path)
    yield made
    made.close()


@pytest.fixture
def clients(storage: StorageProcess) -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def connect(role: str = "gateway", scope: str = "") -> Client:
        made.append(Client(storage.runtime, role, scope))
        return made[-1]

    yield connect
    for client in made:
        client.close()


def hello(gateway: Client) -> int:
    body = m.GatewayHello(nonce=gateway.nonce)
    return gateway.ask(m.GatewayEpoch, body, again_ms=100).epoch


def create(gateway: Client, epoch: int, session_id: str = "s1", timeout_ms: int = 20_000) -> str:
    text = ref(session_id)
    owner = {"kind": "operator", "principal_id": "principal:operator:local", "created_at": 1}
    data = {
        "workspace": WORKSPACE,
        "session_id": session_id,
        "root": text,
        "agent": "echo",
        "created_at": 1,
        "owner": owner,
    }
    record = new("session_created", data, fresh_id())
    body = m.Create(gateway_epoch=epoch, session=text, record=record)
    gateway.call(body, timeout_ms, again_ms=min(timeout_ms, 100))
    return text


def files(storage: StorageProcess) -> dict[str, bytes]:
    root = storage.home.root
    return {
        f"/home/{path.relative_to(root)}": path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "storage.log"
    }


def sessions(storage: StorageProcess) -> dict[str, Seen]:
    return read_home(files(storage))


def segments(storage: StorageProcess) -> list[Path]:
    return sorted(storage.home.journal.glob("*.log"))


@pytest.mark.rule("FLT-8", "FLT-28")
def test_it_serves_and_stops_as_asked(
    storage: StorageProcess, clients: Callable[..., Client]
) -> None:
    storage.start()
    gateway = clients()
    epoch = hello(gateway)
    text = create(gateway, epoch)
    for n in range(3):
        gateway.call(m.Accept(session=text, gateway_epoch=epoch, item=item(f"m{n}")))
    assert storage.stop() == 0
    assert list(sessions(storage)[text].live) == ["m0", "m1", "m2"]
    storage.start()
    assert hello(gateway) == epoch
    log = [
        json.loads(line) for line in (storage.home.logs / "storage.log").read_text().splitlines()
    ]
    recovered = [line["clean"] for line in log if line["action"] == "recovered"]
    assert recovered == [False, True]
    assert len(segments(storage)) == 1


@pytest.mark.rule("FLT-48", "FLT-50", "INB-1", "R17")
def test_everything_it_makes_is_its_owners_alone(
    storage: StorageProcess, clients: Callable[..., Client]
) -> None:
    storage.start()
    gateway = clients()
    epoch = hello(gateway)
    text = create(gateway, epoch)
    gateway.call(m.Accept(session=text, gateway_epoch=epoch, item=item("m1")))
    storage.stop()
    for path in storage.home.root.rglob("*"):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.rule("FLT-28")
def test_a_second_writer_finds_the_lock_held(storage: StorageProcess) -> None:
    storage.start()
    gateway = Client(storage.runtime, "gateway")
    hello(gateway)
    gateway.close()
    first, storage.process = storage.process, None
    storage.hang_up()
    assert first is not None
    fd = os.open(storage.home.writer_lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        assert home.lock_holder(fd) == first.pid
        storage.start()
        assert storage.wait() == 75
        assert home.lock_holder(fd) == first.pid
    finally:
        os.close(fd)
        first.kill()
        first.wait()


@pytest.mark.damages_home("format.json is replaced")
@pytest.mark.rule("FLT-13")
@pytest.mark.parametrize("content", ['{"format": 2, "home_id": "x", "cursor_key": ""}', "junk", ""])
def test_an_unknown_format_is_refused_and_nothing_touched(
    storage: StorageProcess, content: str
) -> None:
    storage.home.format.write_text(content)
    os.chmod(storage.home.format, 0o600)
    storage.start()
    assert storage.wait() == 78
    assert storage.refusal()["code"] == "format_unsupported"
    assert storage.home.format.read_text() == content
    assert sorted(path.name for path in storage.home.root.iterdir()) == [
        "format.json",
        "journal",
        "logs",
    ]
    assert [path.name for path in storage.home.journal.iterdir()] == ["writer.lock"]


@pytest.mark.damages_home("a bit of the journal is flipped")
@pytest.mark.rule("FLT-7", "F7", "F8", "FLT-8")
def test_a_flipped_bit_is_reported_with_its_place(
    storage: StorageProcess, clients: Callable[..., Client]
) -> None:
    storage.start()
    gateway = clients()
    epoch = hello(gateway)
    text = create(gateway, epoch)
    gateway.call(m.Accept(session=text, gateway_epoch=epoch, item=item("m1")))
    (segment,) = segments(storage)
    while scan(segment.read_bytes()).watermark < segment.stat().st_size - 32:
        time.sleep(0.02)  # until the closing mark is there
    storage.kill()
    data = bytearray(segment.read_bytes())
    frame = scan(bytes(data)).frames[-2]
    data[frame.offset + 40] ^= 1
    segment.write_bytes(data)
    before = files(storage)
    storage.start()
    assert storage.wait() == 78
    assert storage.refusal() == {
        "code": "journal_damaged",
        "segment": 1,
        "offset": frame.offset,
    }
    assert files(storage) == before


@pytest.mark.damages_home("a segment is replaced by what is no file")
@pytest.mark.rule("FLT-50")
@pytest.mark.parametrize("kind", ["folder", "symlink", "fifo"])
def test_a_segment_that_is_no_file_is_refused_at_once(storage: StorageProcess, kind: str) -> None:
    storage.start()
    gateway = Client(storage.runtime, "gateway")
    hello(gateway)
    gateway.close()
    storage.stop()
    (segment,) = segments(storage)
    segment.rename(segment.with_suffix(".kept"))
    if kind == "folder":
        segment.mkdir()
    elif kind == "symlink":
        segment.symlink_to(segment.with_suffix(".kept"))
    else:
        os.mkfifo(segment)
    storage.start()
    assert storage.wait(10) == 78
    assert storage.refusal() == {"code": "home_unsafe", "what": "journal", "reason": "not_regular"}


@pytest.mark.rule("FLT-29")
def test_it_ends_with_its_supervisor(storage: StorageProcess) -> None:
    storage.start()
    gateway = Client(storage.runtime, "gateway")
    hello(gateway)
    gateway.close()
    assert storage.process is not None
    pidfd = os.pidfd_open(storage.process.pid)
    os.close(storage._mouth)  # pyright: ignore[reportPrivateUsage]
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(CHILD_ORPHAN_MS)
    os.close(pidfd)
    assert storage.wait() == 0
    storage._ear, storage._mouth = os.pipe()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.rule("FLT-54", "FLT-44")
def test_nonsense_on_its_socket_kills_nothing_and_changes_nothing(
    storage: StorageProcess, clients: Callable[..., Client]
) -> None:
    storage.start()
    gateway = clients()
    epoch = hello(gateway)
    text = create(gateway, epoch)
    before, pid = files(storage), storage.pid
    rng = random.Random(1)
    raw = gateway.socket
    good = encode_body(m.Accept(session=text, gateway_epoch=epoch, item=item("m1")))
    kinds = sorted(m.BODIES)
    for n in range(2_000):
        body = bytearray(good)
        for _ in range(rng.randint(1, 8)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        body = body[: rng.randint(0, len(body))] if rng.random() < 0.3 else body
        kind = rng.choice([*kinds, "accept", "accept", "nobody"])
        header = encode_header(Header(kind, f"x{n}", token=gateway.token))
        raw.send_multipart([header if rng.random() < 0.9 else rng.randbytes(30), bytes(body)])
    stranger = clients()
    stranger.token = "gateway||" + "0" * 64
    stranger.send(m.Accept(session=text, gateway_epoch=epoch, item=item("stranger")))
    raw.send_multipart([b"x", b"y", b"z"])
    raw.send_multipart([bytes(BUS_MESSAGE_BYTES_MAX + 1)])
    other = clients()
    assert hello(other) == epoch + 1
    assert storage.pid == pid
    assert storage.stop() == 0
    after = files(storage)
    for path, data in before.items():
        if path.endswith(".jsonl"):
            assert after[path] == data
    assert "stranger" not in sessions(storage)[text].live


@pytest.mark.rule("FLT-20", "R113")
def test_a_limit_of_file_size_is_a_full_disk(
    storage: StorageProcess, clients: Callable[..., Client]
) -> None:
    storage.start()
    gateway = clients()
    epoch = hello(gateway)
    text = create(gateway, epoch)
    pid = storage.pid
    (segment,) = segments(storage)
    limit = segment.stat().st_size + 2_000
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))
    accepted: list[str] = []

    def put_until_refused() -> None:
        for n in range(50):
            gateway.call(m.Accept(session=text, gateway_epoch=epoch, item=item(f"m{n}")))
            accepted.append(f"m{n}")

    with pytest.raises(StorageFull) as caught:
        put_until_refused()
    assert caught.value.carried["retry_after_ms"] == 1_000
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    gateway.call(m.Accept(session=text, gateway_epoch=epoch, item=item("after")))
    assert storage.pid == pid
    storage.kill()
    storage.start()
    hello(gateway)
    assert storage.stop() == 0
    assert list(sessions(storage)[text].live) == [*accepted, "after"]


def test_signals_mean_what_the_page_says(
    storage: StorageProcess, clients: Callable[..., Client]
) -> None:
    storage.start()
    gateway = clients()
    epoch = hello(gateway)
    for number in (signal.SIGPIPE, signal.SIGUSR1, signal.SIGINT):
        os.kill(storage.pid, number)
    assert hello(gateway) == epoch
    assert (storage.home.logs / "storage.trace").stat().st_size > 0
    os.kill(storage.pid, signal.SIGHUP)
    assert storage.wait() == 0


# --- kills and failing calls ----------------------------------------------------------------------


class Oracle:
    """A client that repeats itself until it is answered, and what it was promised (O1)."""

    def __init__(self, storage: StorageProcess, gateway: Client) -> None:
        self.storage, self.gateway = storage, gateway
        self.epoch = hello(gateway)
        self.texts = [create(gateway, self.epoch, f"s{n}") for n in range(3)]
        self.promised: dict[str, list[str]] = {text: [] for text in self.texts}
        self.count = 0

    def put(self) -> None:
        """One input to each session; storage may die at any moment of it."""
        self.count += 1
        for text in self.texts:
            name = f"m{self.count}"
            body = m.Accept(session=text, gateway_epoch=self.epoch, item=item(name))
            answer = self.gateway.call(body, again_ms=100)
            assert isinstance(answer, m.Accepted)
            self.promised[text].append(name)

    def settle(self) -> None:
        """Make room: a passive session's inputs are discarded."""
        for text, names in self.promised.items():
            for name in names[-8:]:
                self.gateway.call(
                    m.DiscardInput(
                        session=text,
                        gateway_epoch=self.epoch,
                        message_id=name,
                        reason="discarded",
                    ),
                    again_ms=100,
                )

    def judge(self) -> None:
        for text, seen in sessions(self.storage).items():
            gone = seen.acknowledged + seen.discarded
            for name in self.promised[text]:
                assert (name in seen.live) + (name in gone) == 1, (text, name)
            assert set(seen.live) | set(gone) == set(self.promised[text])


@pytest.mark.rule("FLT-5", "FLT-9", "FLT-14", "ACC-2")
def test_killed_at_random_moments_nothing_is_lost_or_doubled(
    storage: StorageProcess, clients: Callable[..., Client]
) -> None:
    rng = random.Random(11)
    storage.settings = storage.settings.model_copy(
        update={"checkpoint_ms": 10, "journal_segment_bytes": 4_096}
    )
    storage.start()
    oracle = Oracle(storage, clients())
    for _ in range(6):
        kill_at = rng.randint(0, 7)
        for n in range(8):
            oracle.put()
            if n == kill_at:
                storage.kill()
                storage.start()
        oracle.settle()
    storage.kill()
    storage.start()
    hello(oracle.gateway)
    assert storage.stop() == 0
    oracle.judge()


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.mark.rule("FLT-3", "FLT-5", "FLT-13")
@pytest.mark.parametrize(
    "rules",
    [
        "pwrite64,.log:torn@9",
        "fdatasync,.log:killafter@5",
        "pwrite64,.jsonl:torn@6",
        "unlink,.log:killafter@2",
        "rename,format:kill@1",
        "pwrite64:short@1+",
    ],
)
def test_faults_at_numbered_calls(
    storage: StorageProcess,
    clients: Callable[..., Client],
    shim: Path,
    tmp_path: Path,
    rules: str,
) -> None:
    hits = tmp_path / "hits"
    storage.settings = storage.settings.model_copy(
        update={"checkpoint_ms": 10, "journal_segment_bytes": 4_096}
    )
    storage.start(**under(shim, rules, hits))
    gateway = clients()
    promised: dict[str, list[str]] = {}
    with suppress(TimeoutError):
        epoch = gateway.ask(
            m.GatewayEpoch, m.GatewayHello(nonce=gateway.nonce), timeout_ms=3_000
        ).epoch
        for name in ("s0", "s1"):
            promised[create(gateway, epoch, name, 1_000)] = []
        for n in range(10):
            for text, names in promised.items():
                long = item(f"m{n}", "x" * 2_000)
                gateway.call(m.Accept(session=text, gateway_epoch=epoch, item=long), 1_000)
                names.append(f"m{n}")
    end = time.monotonic() + 5
    while not hits.exists():  # a checkpoint may still be to come
        assert time.monotonic() < end, "no fault was met"
        time.sleep(0.02)
    assert storage.process is not None
    if ":short" in rules:
        storage.kill()
    else:
        assert storage.wait() == -9
    storage.start()
    hello(gateway)
    assert storage.stop() == 0
    found = sessions(storage)
    for text, names in promised.items():
        assert set(names) <= set(found[text].live)


@pytest.mark.rule("FLT-3", "F1")
@pytest.mark.parametrize(
    "rules", ["fdatasync,.log:EIO@4", "pwrite64,.log:EIO@6", "ftruncate,.log:EIO@1"]
)
def test_an_error_that_is_final_ends_it_with_74_and_nothing_more_is_said(
    storage: StorageProcess,
    clients: Callable[..., Client],
    shim: Path,
    tmp_path: Path,
    rules: str,
) -> None:
    if rules.startswith("ftruncate"):
        rules = "pwrite64,.log:ENOSPC@6;" + rules
    storage.start(**under(shim, rules, tmp_path / "hits"))
    gateway = clients()
    epoch = hello(gateway)
    text = create(gateway, epoch)
    promised: list[str] = []
    with suppress(TimeoutError, CallboardError):
        for n in range(10):
            body = m.Accept(session=text, gateway_epoch=epoch, item=item(f"m{n}"))
            gateway.call(body, MAIN_EXIT_MS)
            promised.append(f"m{n}")
    assert storage.wait() == 74
    assert len(promised) < 10
    storage.start()
    assert hello(gateway) == epoch
    assert storage.stop() == 0
    live = list(sessions(storage)[text].live)
    assert live[: len(promised)] == promised
    log = (storage.home.logs / "storage.log").read_text()
    assert '"action":"poisoned"' in log


@pytest.mark.rule("WCH-1", "FLT-12")
def test_followers_see_what_is_written_by_others(
    storage: StorageProcess, clients: Callable[..., Client]
) -> None:
    storage.start()
    gateway = clients()
    epoch = hello(gateway)
    text = create(gateway, epoch)
    owner = home.Identity(os.getpid(), 1, home.boot_id(), home.pid_namespace(), fresh_id(), "p")
    session = clients("session", text)
    granted = session.ask(
        m.LeaseGranted,
        m.Acquire(
            session=text,
            owner=m.ProcessIdentity(
                pid=owner.pid,
                start_time=owner.start_time,
                boot_id=owner.boot_id,
                pid_ns=owner.pid_ns,
                nonce=owner.nonce,
                plane_id=storage.plane_id,
            ),
        ),
    )
    watch = gateway.send(m.Subscribe(session=text, from_seq=1))
    count = 200
    for n in range(count):
        record = new("session_updated", {"title": f"t{n}", "updated_at": n}, fresh_id())
        session.send(appending(text, granted.epoch, [record]))
    seqs: list[int] = []
    while len(seqs) < count + 1:
        cid, body = gateway.receive()
        assert cid == watch
        assert isinstance(body, m.Records)
        seqs += range(body.first_seq, body.last_seq + 1)
    assert seqs == list(range(1, count + 2))
    for _ in range(count):
        session.receive()
    durable = storage.runtime.durable.read_bytes()
    assert int.from_bytes(durable[:8], "little") >= count
