"""A whole plane: used, killed in pieces under load, and started again."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time

import pytest

from callboard.errors import HomeInUse
from callboard.limits import SESSION_RESTARTS_MAX, STORAGE_RESTARTS_MAX
from tests.system.conftest import Oracle, RealPlane, ended, fold_laws, kill, until


def test_create_send_wait_and_stop(plane: RealPlane) -> None:
    plane.up()
    client = plane.connect()
    session = plane.create(client, "one")
    for n in range(3):
        receipt = client.answer(client.send_text(session, f"m{n}"))
        assert receipt["body"]["accepted"]
        assert not receipt["body"]["duplicate"]
        outcome = client.call("wait", session=session, message_id=f"m{n}")
        assert outcome["body"]["outcome"] == "completed"
    again = client.answer(client.send_text(session, "m0"))
    assert (again["body"]["duplicate"], again["body"]["item_state"]) == (True, "acknowledged")
    status = plane.status()
    assert {p["role"] for p in status["processes"]} == {
        "supervisor",
        "fork",
        "storage",
        "gateway",
        "session",
    }
    until(lambda: plane.status()["sessions"].get("live") == 1)
    assert status["counters"]["inputs_accepted"] == 3
    pids = plane.pids()
    assert plane.down() == 0
    assert ended(pids, 0) == []
    assert plane.applied(session) == ["m0", "m1", "m2"]
    fold_laws(plane.records(session))


@pytest.mark.rule("IDN-8", "MET-1")
def test_a_repeated_creation_is_the_first_one(plane: RealPlane) -> None:
    plane.up()
    client = plane.connect()
    session = plane.create(client, "one")
    kill(plane.pid("gateway"))
    assert plane.create(plane.connect(), "one") == session


def test_unknown_sessions_are_not_found(plane: RealPlane) -> None:
    plane.up()
    client = plane.connect()
    session = plane.create(client, "one")
    missing = session.replace("/one", "/two")
    sends = client.answer(client.send_text(missing, "m"))
    waits = client.call("wait", session=missing, message_id="m")
    watches = client.call("watch", session=missing, from_seq=1)
    assert {a["body"]["code"] for a in (sends, waits, watches)} == {"not_found"}


def test_down_of_a_client_stops_the_plane(plane: RealPlane) -> None:
    launched = plane.up()
    client = plane.connect()
    assert client.call("down")["kind"] == "ok"
    assert launched.wait(20) == 0


@pytest.mark.rule("FLT-28", "F18")
def test_a_second_plane_on_the_home(plane: RealPlane) -> None:
    launched = plane.up()
    with pytest.raises(HomeInUse) as refusal:
        plane.up()
    plane.launched = launched
    assert refusal.value.carried["pid"] == launched.pid


@pytest.mark.rule("RLB-3", "RLB-16", "F23")
@pytest.mark.parametrize("role", ["session", "gateway", "storage", "fork", "supervisor"])
def test_kills_under_load_lose_and_double_nothing(plane: RealPlane, role: str) -> None:
    plane.up()
    client = plane.connect()
    sessions = [plane.create(client, f"s{n}", "tests.system.agents:slow") for n in range(8)]
    client.close()
    oracle = Oracle(plane, sessions, 30).start()
    rng = random.Random(role)
    kills = 0
    while oracle.done < len(sessions) * 30 and kills < 2 and not oracle.failures:
        until(lambda k=kills: oracle.done >= (k + 1) * 50 or oracle.failures, 60)  # type: ignore[misc]
        if role == "supervisor":
            pids = plane.pids()
            plane.kill()
            assert ended(pids, 2.0) == []
            plane.up()
        else:
            there = plane.processes(role)
            if there:
                kill(rng.choice(there)["pid"])
        kills += 1
        time.sleep(0.3)
    oracle.join()
    oracle.judge()
    assert kills == 2
    for session in sessions:
        fold_laws(plane.records(session))
    assert plane.down() == 0
    assert set(oracle.refused) <= {"inbox_full"}, "only what a client can put right"


@pytest.mark.rule("RLB-21", "F30")
def test_a_gateway_that_stands_still_for_a_while_doubles_nothing(plane: RealPlane) -> None:
    plane.up()
    client = plane.connect()
    sessions = [plane.create(client, f"s{n}") for n in range(5)]
    gateway = plane.pid("gateway")
    kill(gateway, signal.SIGSTOP)
    asked = [client.send_text(session, f"m{n:02d}") for n in range(10) for session in sessions]
    time.sleep(5)
    kill(gateway, signal.SIGCONT)
    receipts = [client.answer(request) for request in asked]
    assert all(receipt["kind"] == "receipt" for receipt in receipts)
    assert not any(receipt["body"]["duplicate"] for receipt in receipts)
    for session in sessions:
        until(lambda s=session: len(plane.applied(s)) == 10)  # type: ignore[misc]
        assert plane.applied(session) == [f"m{n:02d}" for n in range(10)]
    assert plane.pid("gateway") == gateway


@pytest.mark.rule("FLT-34")
@pytest.mark.parametrize("role", ["session", "storage", "gateway", "fork"])
def test_no_signal_ends_a_process_ungracefully(plane: RealPlane, role: str) -> None:
    plane.up()
    client = plane.connect()
    session = plane.create(client, "one")
    client.answer(client.send_text(session, "m0"))
    client.call("wait", session=session, message_id="m0")
    pid = plane.pid(role)
    for number in (signal.SIGPIPE, signal.SIGUSR1):
        kill(pid, number)
    time.sleep(0.2)
    assert plane.pid(role) == pid
    traces = "".join(path.read_text() for path in plane.home.logs.glob("*.trace"))
    assert "most recent call first" in traces
    kill(pid, signal.SIGHUP)
    assert ended([pid], 5) == []
    log = (plane.home.logs / "supervisor.log").read_text()
    until(lambda: f'"child_pid":{pid}' in log)
    ends = [json.loads(line) for line in log.splitlines() if '"child_ended"' in line]
    assert all(end["status"] in (0, None) for end in ends), ends
    client = plane.connect()
    client.answer(client.send_text(session, "m1"))
    done = client.call("wait", session=session, message_id="m1")
    assert done["body"]["outcome"] == "completed"


@pytest.mark.rule("RLB-16", "F22")
def test_twenty_sessions_and_their_children_end_with_the_supervisor(plane: RealPlane) -> None:
    plane.up()
    client = plane.connect()
    sessions = [plane.create(client, f"s{n}", "tests.system.agents:parent") for n in range(20)]
    for session in sessions:
        client.answer(client.send_text(session, "m"))

    def children() -> list[int]:
        found: list[int] = []
        for session in sessions:
            for record in plane.records(session):
                text = record["data"].get("payload", {}).get("text", "")
                if record["type"] == "part_created" and text.isdigit():
                    found.append(int(text))
        return found

    until(lambda: len(children()) == 20, 60)
    pids = [*plane.pids(), *children()]
    plane.kill()
    assert ended(pids, 2.0) == []
    plane.up()
    again = plane.connect()
    session = plane.create(again, "after")
    again.answer(again.send_text(session, "m"))
    assert again.call("wait", session=session, message_id="m")["body"]["outcome"] == "completed"


@pytest.mark.rule("ACC-4", "ACC-2")
def test_inputs_of_a_stopped_plane_run_when_it_is_up_again(plane: RealPlane) -> None:
    plane.up(active_turns=1)
    client = plane.connect()
    busy = plane.create(client, "busy", "tests.system.agents:nap")
    sessions = [plane.create(client, f"s{n}") for n in range(3)]
    client.answer(client.send_text(busy, "m"))
    until(lambda: plane.status()["counters"]["turns_running"] == 1)
    for session in sessions:
        client.answer(client.send_text(session, "m"))
    assert plane.down() == 0
    assert [plane.applied(session) for session in sessions] == [[], [], []]
    plane.up()
    for session in sessions:
        until(lambda s=session: plane.applied(s) == ["m"])  # type: ignore[misc]


@pytest.mark.rule("FLT-32", "F25", "RLB-18")
def test_a_session_that_kills_itself_is_quarantined_and_can_be_released(plane: RealPlane) -> None:
    plane.up()
    client = plane.connect()
    healthy = [plane.create(client, f"s{n}") for n in range(5)]
    bad = plane.create(client, "bad", "tests.system.agents:suicide")
    assert client.answer(client.send_text(bad, "m1"))["body"]["accepted"]
    until(lambda: plane.status()["sessions"]["quarantined"] == 1, 60)
    refused = client.answer(client.send_text(bad, "m2"))
    assert refused["body"] == {"code": "session_quarantined", "reason": "crash_loop"}
    for session in healthy:
        client.answer(client.send_text(session, "m"))
        done = client.call("wait", session=session, message_id="m")
        assert done["body"]["outcome"] == "completed"
    started = [r for r in plane.records(bad) if r["type"] == "turn_started"]
    assert 1 <= len(started) <= SESSION_RESTARTS_MAX + 1
    assert client.call("release_session", session=bad)["kind"] == "ok"
    until(lambda: plane.status()["sessions"]["quarantined"] == 0)
    assert plane.down() == 0
    fold_laws(plane.records(bad))


@pytest.mark.rule("FLT-4", "F24")
def test_storage_that_cannot_stay_is_given_up_and_the_plane_says_so(plane: RealPlane) -> None:
    plane.up()
    client = plane.connect()
    session = plane.create(client, "one")
    client.answer(client.send_text(session, "m0"))
    client.call("wait", session=session, message_id="m0")
    for n in range(STORAGE_RESTARTS_MAX + 1):
        pid = until(lambda: plane.processes("storage"))[0]["pid"]
        kill(pid)
        assert ended([pid], 5) == []
        if n < STORAGE_RESTARTS_MAX:
            until(lambda p=pid: any(q["pid"] != p for q in plane.processes("storage")))  # type: ignore[misc]
    until(lambda: plane.status()["detail"])
    assert plane.status()["detail"].startswith("storage is not started again")
    refused = client.answer(client.send_text(session, "m1"))
    assert refused["body"]["code"] == "storage_unavailable"
    assert [r["seq"] for r in plane.records(session)], "reads go on"


@pytest.mark.rule("FLT-20", "RLB-11")
def test_a_full_disk_refuses_and_goes_on_when_there_is_room(plane: RealPlane) -> None:
    plane.up()
    client = plane.connect()
    session = plane.create(client, "one")
    client.answer(client.send_text(session, "m0"))
    client.call("wait", session=session, message_id="m0")
    storage, gateway = plane.pid("storage"), plane.pid("gateway")
    size = max(path.stat().st_size for path in plane.home.journal.glob("*.log"))
    old = resource.prlimit(storage, resource.RLIMIT_FSIZE, (size + 4_096, resource.RLIM_INFINITY))
    text = "x" * 20_000
    refused = client.answer(client.send_text(session, "big", text))
    assert refused["body"]["code"] == "storage_full", refused
    resource.prlimit(storage, resource.RLIMIT_FSIZE, old)

    def accepted() -> bool:
        return bool(client.answer(client.send_text(session, "big", text))["kind"] == "receipt")

    until(accepted, 5)
    assert client.call("wait", session=session, message_id="big")["body"]["outcome"] == "completed"
    assert (plane.pid("storage"), plane.pid("gateway")) == (storage, gateway)
    fold_laws(plane.records(session))


@pytest.mark.rule("RES-1", "R99")
def test_more_sessions_than_slots_take_turns(plane: RealPlane) -> None:
    plane.up(resident_sessions=3)
    client = plane.connect()
    sessions = [plane.create(client, f"s{n}") for n in range(9)]
    for round_ in range(2):
        for session in sessions:

            def sent(s: str = session, m: str = f"m{round_}") -> bool:
                return bool(client.answer(client.send_text(s, m))["kind"] == "receipt")

            until(sent)
            done = client.call("wait", session=session, message_id=f"m{round_}")
            assert done["body"]["outcome"] == "completed"
            assert len(plane.processes("session")) <= 3
    for session in sessions:
        assert plane.applied(session) == ["m0", "m1"]
        fold_laws(plane.records(session))


@pytest.mark.rule("SHD-1")
def test_a_turn_that_does_not_end_is_ended_by_the_stop(plane: RealPlane) -> None:
    plane.up()
    client = plane.connect()
    session = plane.create(client, "one", "tests.system.agents:nap")
    client.answer(client.send_text(session, "m0"))
    until(lambda: any(r["type"] == "turn_started" for r in plane.records(session)))
    started = time.monotonic()
    assert plane.down() == 0
    assert time.monotonic() - started < 5
    terminal = plane.records(session)[-1]
    assert terminal["type"] == "turn_aborted"
    fold_laws(plane.records(session))


@pytest.mark.rule("SHD-1")
def test_a_second_signal_ends_everything_at_once(plane: RealPlane) -> None:
    launched = plane.up()
    client = plane.connect()
    session = plane.create(client, "one", "tests.system.agents:nap")
    client.answer(client.send_text(session, "m0"))
    pids = plane.pids()
    os.kill(launched.pid, signal.SIGTERM)
    os.kill(launched.pid, signal.SIGTERM)
    assert launched.wait(5) == 0
    assert ended(pids, 1.0) == []
    plane.launched = None
    launched.close()
    plane.up()
    again = plane.connect()
    assert again.call("cancel", session=session)["kind"] in ("cancel_result", "error")
    fold_laws(plane.records(session))


@pytest.mark.rule("RLB-20", "T-13")
def test_bad_input_changes_no_file(plane: RealPlane) -> None:
    plane.up(checkpoint_ms=30_000)
    client = plane.connect()
    session = plane.create(client, "one")
    client.answer(client.send_text(session, "m0"))
    client.call("wait", session=session, message_id="m0")
    time.sleep(0.5)  # the closing mark is written
    before = plane.snapshot()
    pids = plane.pids()
    rng = random.Random(5)
    for _ in range(300):
        with plane.connect() as bad:
            try:
                for _ in range(rng.randrange(1, 15)):
                    bad.send_payload(rng.randbytes(rng.randrange(0, 2_000)))
            except OSError:
                pass
    assert plane.snapshot() == before
    assert plane.pids() == pids
    assert client.answer(client.send_text(session, "m1"))["kind"] == "receipt"
