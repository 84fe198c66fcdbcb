"""Readers beside the real storage process, and after its end at any moment."""

import os
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from callboard import home
from callboard import messages as m
from callboard.ids import fresh_id, parse_ref
from callboard.records import Record
from callboard.storage import catalog
from callboard.storage.catalog import CatalogQuery, list_sessions, liveness
from callboard.storage.readers import HomeReader, open_home
from tests.second_reader import read_home
from tests.storage.process import Client, StorageProcess
from tests.storage.readers.homes import tree
from tests.storage.world import WORKSPACE, appending, item, new, ref

pytestmark = pytest.mark.timeout(120)
Connect = Callable[..., Client]


@pytest.fixture
def storage(short_path: Path) -> Generator[StorageProcess]:
    made = StorageProcess(short_path)
    made.runtime = home.runtime_of(made.home.root)
    home.prepare_runtime(made.runtime)
    yield made
    made.close()


@pytest.fixture
def clients(storage: StorageProcess) -> Iterator[Connect]:
    made: list[Client] = []

    def connect(role: str = "gateway", scope: str = "") -> Client:
        made.append(Client(storage.runtime, role, scope))
        return made[-1]

    yield connect
    for client in made:
        client.close()


class Owner:
    """A session's process, played by this one: it creates the session and owns it."""

    def __init__(self, storage: StorageProcess, clients: Connect, name: str) -> None:
        gateway = clients()
        epoch = hello(gateway)
        self.plane_id = storage.plane_id
        self.text = ref(name)
        self.ref = parse_ref(self.text)
        self.client = clients("session", self.text)
        owner = {"kind": "operator", "principal_id": "p", "created_at": 1}
        data = {
            "workspace": WORKSPACE,
            "session_id": name,
            "root": self.text,
            "agent": "echo",
            "created_at": time.time_ns() // 1_000,
            "owner": owner,
        }
        record = new("session_created", data, fresh_id())
        body = m.Create(gateway_epoch=epoch, session=self.text, record=record)
        gateway.call(body, again_ms=100)
        self.count = 0
        self.acquire()

    def acquire(self) -> None:
        me = m.ProcessIdentity(
            pid=os.getpid(),
            start_time=home.start_time(os.getpid()) or 0,
            boot_id=home.boot_id(),
            pid_ns=home.pid_namespace(),
            nonce=fresh_id(),
            plane_id=self.plane_id,  # of an earlier plane, storage would end this process
        )
        asked = m.Acquire(session=self.text, owner=me)
        self.epoch = self.client.ask(m.LeaseGranted, asked, again_ms=200).epoch

    def title(self, *, put: bool = True) -> tuple[m.Append, str]:
        self.count += 1
        text = f"{self.ref.session_id} {self.count}"
        data = {"title": text, "updated_at": self.count}
        records = [new("session_updated", data, fresh_id())]
        puts = [item(f"i{self.count}")] if put else []
        return appending(self.text, self.epoch, records, puts), text


def hello(gateway: Client) -> int:
    body = m.GatewayHello(nonce=gateway.nonce)
    return gateway.ask(m.GatewayEpoch, body, again_ms=100).epoch


def title_of(reader: HomeReader, owner: Owner) -> str | None:
    return reader.fold(owner.ref).title


@pytest.mark.rule("REC-6")
def test_a_receipt_is_visible_to_whoever_looks_afterwards(
    storage: StorageProcess, clients: Connect
) -> None:
    storage.start()
    owners = [Owner(storage, clients, f"s{n}") for n in range(3)]
    last = 0
    for n in range(60):
        owner = owners[n % 3]
        body, text = owner.title()
        commit = owner.client.ask(m.Appended, body).commit
        reader = open_home(storage.home.root)
        assert reader.plane_up
        assert reader.as_of >= commit > last
        assert title_of(reader, owner) == text
        assert len(reader.inbox(owner.ref)) == owner.count
        records = [one for one in reader.transcript(owner.ref) if isinstance(one, Record)]
        assert all(one.commit <= reader.as_of for one in records)
        if n % 10 == 0:
            page = list_sessions(reader, CatalogQuery())
            assert text in {row.title for row in page.rows}
            assert page.as_of >= commit
        last = commit
    assert liveness(open_home(storage.home.root), owners[0].ref) == "live"


@pytest.mark.rule("REC-6", "A11")
def test_killed_and_left_down_everything_promised_is_shown(
    storage: StorageProcess, clients: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with requests on their way; the files are cut back to what the checkpoint promised."""
    monkeypatch.setattr(catalog, "indexes_off", catalog.IndexesOff())
    for round_ in range(3):
        storage.start()
        owners = [Owner(storage, clients, f"r{round_}s{n}") for n in range(2)]
        promised: dict[str, str] = {}
        for n in range(25):
            owner = owners[n % 2]
            body, text = owner.title()
            owner.client.ask(m.Appended, body)
            promised[owner.text] = text
        for owner in owners:
            owner.client.send(owner.title()[0])
        storage.kill()
        for owner in owners:
            path = storage.home.transcript(owner.ref)
            os.truncate(path, path.stat().st_size // 2)
        before = tree(storage.home.root)
        reader = open_home(storage.home.root)
        assert not reader.plane_up
        for owner in owners:
            shown = title_of(reader, owner) or ""
            assert int(shown.split()[1]) >= int(promised[owner.text].split()[1])
            assert len(reader.inbox(owner.ref)) >= owner.count - 1
        by_scan = {row.ref: row.title for row in list_sessions(reader, CatalogQuery()).rows}
        assert len(by_scan) == 2 * (round_ + 1)
        second = read_home(storage.home.root)
        for owner in owners:
            live = [one.item.message_id for one in reader.inbox(owner.ref)]
            assert live == second[owner.text].inputs
            assert second[owner.text].problems == []
        assert tree(storage.home.root) == before


def test_index_and_files_agree_beside_a_busy_writer(
    storage: StorageProcess, clients: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "indexes_off", catalog.IndexesOff())
    storage.start()
    owners = [Owner(storage, clients, f"s{n}") for n in range(4)]
    sources: set[str] = set()
    for n in range(40):
        for owner in owners:
            owner.client.send(owner.title(put=False)[0])
        if n % 5 == 0:
            first = list_sessions(storage.home, CatalogQuery(limit=2))
            sources.add(first.source)
            rest = list_sessions(storage.home, CatalogQuery(limit=2, cursor=first.next_cursor))
            found = [row.ref for row in (*first.rows, *rest.rows)]
            assert found == [owner.ref for owner in reversed(owners)]
            assert first.warnings_total == rest.warnings_total == 0
        for owner in owners:
            assert isinstance(owner.client.receive()[1], m.Appended)
    assert sources == {"index"}
    storage.stop()
    by_index = list_sessions(storage.home, CatalogQuery())
    storage.home.index.unlink()
    by_scan = list_sessions(storage.home, CatalogQuery())
    assert (by_index.source, by_scan.source) == ("index", "scan")
    assert by_index.rows == by_scan.rows
    assert [row.title for row in by_index.rows] == [f"s{n} 40" for n in reversed(range(4))]
