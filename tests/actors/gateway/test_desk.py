"""The desk: plays of single flows."""

from __future__ import annotations

import pytest

from callboard import messages as m
from callboard.actors.gateway.ledger import REQUEST_MS
from callboard.actors.gateway.requests import Client, LongText
from callboard.actors.gateway.sessions import IN_FLIGHT_MAX, THAW_MS
from callboard.errors import ArtifactQuota
from callboard.limits import CLIENT_OUTPUT_BYTES_MAX
from callboard.wire import Header, error_body
from tests.actors.gateway.world import SUPERVISOR, Fixture, item, ref, send


def receipt(message_id: str, *, duplicate: bool = False) -> m.Receipt:
    return m.Receipt(
        accepted=True,
        message_id=message_id,
        duplicate=duplicate,
        item_state="pending",
        delivery="next_turn",
        queued=1,
    )


def accepted(*, runnable: bool = True, duplicate: bool = False) -> m.Accepted:
    return m.Accepted(duplicate=duplicate, item_state="pending", queued=1, runnable=runnable)


def lease_held() -> m.LeaseHeld:
    owner = m.ProcessIdentity(
        pid=9, start_time=1, boot_id="b", pid_ns=1, nonce="0" * 32, plane_id="p"
    )
    return m.LeaseHeld(owner=owner, epoch=1)


def down(name: str, routing_id: str, cause: str = "crashed", **more: bool) -> m.SessionDown:
    return m.SessionDown.model_validate(
        {
            "session": ref(name),
            "routing_id": routing_id,
            "cause": cause,
            "status": 1,
            "quarantined": more.get("quarantined", False),
            "restarting": more.get("restarting", False),
        }
    )


# ---- Live sessions ----


@pytest.mark.rule("ACC-1")
def test_an_input_of_a_live_session_goes_to_it_and_its_receipt_comes_back_unchanged() -> None:
    world = Fixture().ready()
    client = world.connect()
    routing_id = world.live("a")
    name = world.ask(client, send("a", "m1"))
    to, header, body = world.peer_told("deliver")
    assert to == routing_id
    assert isinstance(body, m.Deliver)
    assert body.permit, "a permit rides along"
    assert body.item.message_id == "m1"
    world.from_session("a", receipt("m1"), cid=header.id)
    assert world.answer(client, name) == receipt("m1")
    assert world.desk.statistics()["inputs_accepted"] == 1
    world.check()


@pytest.mark.rule("ADM-4")
def test_no_permit_rides_along_where_one_is_held_or_none_is_free() -> None:
    world = Fixture(active_turns=1).ready()
    client = world.connect()
    world.live("a")
    world.live("b")
    permits: list[bool] = []
    for session, message_id in (("a", "1"), ("a", "2"), ("b", "3")):
        world.ask(client, send(session, message_id))
        _, _, body = world.peer_told("deliver")
        assert isinstance(body, m.Deliver)
        permits.append(body.permit)
    assert permits == [True, False, False]
    world.from_session("b", m.PermitAsk(), "p1")
    assert world.peer_told("permit")[2] == m.Permit(state="queued", position=1)
    world.from_session("a", m.PermitReturn())
    _to, header, body = world.peer_told("permit")
    assert (header.cid, body) == ("p1", m.Permit(state="granted"))


@pytest.mark.rule("ADM-5")
def test_a_dead_session_gives_its_permit_back() -> None:
    world = Fixture(active_turns=1).ready()
    routing_id = world.live("a")
    world.live("b")
    world.from_session("a", m.PermitAsk(), "p1")
    world.from_session("b", m.PermitAsk(), "p2")
    world.ports.to_peers.clear()
    world.from_supervisor(down("a", routing_id))
    _, header, body = world.peer_told("permit")
    assert (header.cid, body) == ("p2", m.Permit(state="granted"))
    assert world.desk.permits.held == 1


@pytest.mark.rule("ADM-4")
def test_a_full_permit_queue_answers_overloaded() -> None:
    world = Fixture(active_turns=1, turn_queue=1).ready()
    for name in "abc":
        world.live(name)
        world.from_session(name, m.PermitAsk(), f"p-{name}")
    last = world.ports.to_peers[-1]
    assert last[1].cid == "p-c"
    assert isinstance(last[2], m.Refusal)
    assert (last[2].code, last[2].model_dump()["resource"]) == ("overloaded", "pending_count")


@pytest.mark.rule("ACC-3", "RLB-23")
def test_what_a_dead_session_left_goes_to_storage_and_is_answered_once() -> None:
    world = Fixture().ready()
    client = world.connect()
    routing_id = world.live("a")
    name = world.ask(client, send("a", "m1"))
    _, delivered, _ = world.peer_told("deliver")
    world.from_supervisor(down("a", routing_id, restarting=True))
    header, body = world.storage_asked()
    assert isinstance(body, m.Accept)
    assert body.gateway_epoch == 7
    world.check()
    world.from_storage(header, accepted(duplicate=True))
    answer = world.answer(client, name)
    assert isinstance(answer, m.Receipt)
    assert answer.duplicate
    world.from_session("a", receipt("m1"), cid=delivered.id, rid=routing_id)  # late words
    assert world.desk.statistics()["redispatches"] == 1
    world.check()


@pytest.mark.rule("ACC-3")
def test_an_unreachable_session_keeps_its_requests_until_it_is_reached_or_gone() -> None:
    world = Fixture().ready()
    client = world.connect()
    routing_id = world.live("a")
    name = world.ask(client, send("a", "m1"))
    _, header, _ = world.peer_told("deliver")
    world.desk.unreachable(routing_id, header)
    world.check()
    world.pass_time(150)
    _, again, _ = world.peer_told("deliver")
    world.from_session("a", receipt("m1"), cid=again.id)
    assert world.answer(client, name) == receipt("m1")
    assert world.desk.places.count == 0


def test_a_session_on_its_way_out_passes_its_input_on() -> None:
    world = Fixture().ready()
    client = world.connect()
    routing_id = world.live("a")
    name = world.ask(client, send("a", "m1"))
    _, header, _ = world.peer_told("deliver")
    world.from_session("a", m.Refusal(code="gate_closed"), cid=header.id)
    assert world.answer(client, name) is None
    world.from_supervisor(down("a", routing_id, "stopped"))
    header, _ = world.storage_asked()
    world.from_storage(header, accepted())
    assert isinstance(world.answer(client, name), m.Receipt)


def test_a_refusal_of_a_session_is_the_answer() -> None:
    world = Fixture().ready()
    client = world.connect()
    world.live("a")
    name = world.ask(client, send("a", "m1"))
    _, header, _ = world.peer_told("deliver")
    world.from_session("a", m.Refusal(code="request_conflict"), cid=header.id)
    assert world.error(client, name) == {"code": "request_conflict"}


def test_too_much_under_way_to_one_session_is_overloaded() -> None:
    world = Fixture().ready()
    client = world.connect()
    world.live("a")
    names = [world.ask(client, send("a", f"m{n}")) for n in range(IN_FLIGHT_MAX + 1)]
    assert world.error(client, names[-1])["resource"] == "pending_count"
    assert world.answer(client, names[-2]) is None
    world.check()


# ---- Passive sessions ----


@pytest.mark.rule("ACC-2", "ACC-4", "ADM-1")
def test_an_input_of_a_passive_session_is_accepted_and_the_session_is_woken_once() -> None:
    world = Fixture().ready()
    client = world.connect()
    first = world.ask(client, send("a", "m1"))
    second = world.ask(client, send("a", "m2"))
    for _ in range(2):
        header, _ = world.storage_asked()
        world.from_storage(header, accepted())
    answer = world.answer(client, first)
    assert isinstance(answer, m.Receipt)
    assert (answer.delivery, answer.mode) == ("next_turn", "pending")
    assert isinstance(world.answer(client, second), m.Receipt)
    activates = [one for one in world.ports.to_peers if one[1].kind == "activate"]
    assert len(activates) == 1
    assert activates[0][0] == SUPERVISOR
    assert world.desk.places.count == 1, "the wake's place"
    world.check()
    world.live("a")
    assert world.desk.places.count == 0


def test_an_input_that_is_not_runnable_wakes_nobody() -> None:
    world = Fixture().ready()
    world.ask(world.connect(), send("a", "m1"))
    header, _ = world.storage_asked()
    world.from_storage(header, accepted(runnable=False))
    assert not [one for one in world.ports.to_peers if one[1].kind == "activate"]
    assert list(world.desk.routes) == []


@pytest.mark.rule("ACC-3", "ADM-1")
def test_requests_for_an_activating_session_share_its_activation() -> None:
    world = Fixture().ready()
    client = world.connect()
    world.from_supervisor(m.SessionUp(session=ref("a"), routing_id="b" * 32, pid=5))
    names = [world.ask(client, send("a", f"m{n}")) for n in range(3)]
    assert not world.ports.to_storage
    assert world.desk.places.count == 3
    world.live("a", rid="b" * 32)
    for name in names:
        _, header, body = world.peer_told("deliver")
        assert isinstance(body, m.Deliver)
        world.from_session("a", receipt(body.item.message_id), cid=header.id)
        assert isinstance(world.answer(client, name), m.Receipt)
    assert world.desk.places.count == 0


@pytest.mark.rule("ACC-3")
def test_a_held_lease_is_waited_for_then_asked_again() -> None:
    world = Fixture().ready()
    client = world.connect()
    name = world.ask(client, send("a", "m1"))
    header, _ = world.storage_asked()
    world.from_storage(header, lease_held())
    world.check()
    world.pass_time(200)
    header, body = world.storage_asked()
    assert isinstance(body, m.Accept)
    world.from_storage(header, lease_held())
    world.live("a")
    _, delivered, _ = world.peer_told("deliver")
    world.from_session("a", receipt("m1"), cid=delivered.id)
    assert world.answer(client, name) == receipt("m1")


@pytest.mark.rule("ACC-3")
def test_the_deadline_ends_the_wait_for_an_owner() -> None:
    world = Fixture().ready()
    client = world.connect()
    name = world.ask(client, send("a", "m1"), deadline=1_000)
    for _ in range(3):
        header, _ = world.storage_asked()
        world.from_storage(header, lease_held())
        world.pass_time(200)
    world.pass_time(1_000)
    assert world.error(client, name) == {"code": "deadline_exceeded", "scope": "send"}
    assert world.desk.places.count == 0
    world.check()


@pytest.mark.rule("ADM-2")
def test_an_expired_waiter_is_never_started() -> None:
    world = Fixture().ready()
    client = world.connect()
    world.from_supervisor(m.SessionUp(session=ref("a"), routing_id="b" * 32, pid=5))
    world.ask(client, send("a", "m1"), deadline=100)
    world.pass_time(200)
    world.ports.to_peers.clear()
    world.live("a", rid="b" * 32)
    assert not [one for one in world.ports.to_peers if one[1].kind == "deliver"]


@pytest.mark.rule("ACC-4", "ADM-1")
@pytest.mark.parametrize(
    ("limits", "weight", "resource"),
    [
        ({"activation_queue": 2}, 10, "pending_count"),
        ({"activation_queue_bytes": 65_536}, 40_000, "pending_bytes"),
    ],
)
def test_without_a_place_nothing_is_stored(
    limits: dict[str, int], weight: int, resource: str
) -> None:
    world = Fixture(**limits).ready()
    client = world.connect()
    names = [world.ask(client, send(f"s{n}", "m"), weight=weight) for n in range(3)]
    assert world.error(client, names[-1])["resource"] == resource
    asked = [body.session for _, body in world.ports.to_storage if isinstance(body, m.Accept)]
    assert ref("s2") not in asked
    world.check()


@pytest.mark.rule("ADM-1")
def test_a_live_session_needs_no_place() -> None:
    world = Fixture(activation_queue=1).ready()
    client = world.connect()
    world.live("a")
    for n in range(5):
        world.ask(client, send("a", f"m{n}"), weight=10**9)
        world.peer_told("deliver")
    assert world.desk.places.count == 0


@pytest.mark.rule("ACC-3", "RES-1")
def test_whatever_storage_refuses_is_the_answer() -> None:
    world = Fixture().ready()
    client = world.connect()
    for code in ("not_found", "session_quarantined", "storage_full", "owner_unprovable"):
        name = world.ask(client, send("a", code))
        header, _ = world.storage_asked()
        world.from_storage(header, m.Refusal(code=code))
        assert world.error(client, name)["code"] == code
    assert list(world.desk.routes) == []
    assert world.desk.places.count == 0


# ---- Residency ----


@pytest.mark.rule("RES-1", "R99")
def test_without_a_slot_the_least_recently_used_idle_session_makes_room() -> None:
    world = Fixture(resident_sessions=2).ready()
    client = world.connect()
    world.live("a")
    first = world.desk.routes.get(ref("a"))
    assert first is not None
    old = first.routing_id
    world.live("b")
    world.ask(client, send("c", "m1"))
    header, _ = world.storage_asked()
    world.from_storage(header, accepted())
    _, activate, body = world.peer_told("activate")
    assert body == m.Activate(session=ref("c"), evict=[ref("a")])
    held = world.ask(client, send("a", "m2"))
    assert not [one for one in world.ports.to_peers if one[1].kind == "deliver"]
    world.from_supervisor(down("a", old, "stopped"))
    header, body = world.storage_asked()
    assert isinstance(body, m.Accept), "what came for it meanwhile is accepted"
    world.from_storage(header, accepted(runnable=False))
    assert isinstance(world.answer(client, held), m.Receipt)
    up = m.Activating(session=ref("c"), routing_id="c" * 32, pid=3)
    world.from_supervisor(up, cid=activate.id)
    world.live("c", rid="c" * 32)
    assert world.desk.routes.resident == 2
    world.check()


@pytest.mark.rule("RES-1")
def test_a_session_that_was_not_needed_gets_its_input_after_all() -> None:
    world = Fixture(resident_sessions=1).ready()
    client = world.connect()
    world.live("a")
    world.ask(client, send("b", "m1"))
    header, _ = world.storage_asked()
    world.from_storage(header, accepted())
    _, activate, _ = world.peer_told("activate")
    world.ask(client, send("a", "m2"))
    up = m.Activating(session=ref("b"), routing_id="b" * 32, pid=3)
    world.from_supervisor(up, cid=activate.id)  # there was a slot
    _to, _, body = world.peer_told("deliver")
    assert isinstance(body, m.Deliver)
    assert body.item.message_id == "m2"


@pytest.mark.rule("RES-1", "R99")
def test_none_evictable_refuses_before_anything_is_stored() -> None:
    world = Fixture(resident_sessions=1).ready()
    client = world.connect()
    world.live("a")
    world.ask(client, send("a", "m0"))  # it runs
    name = world.ask(client, send("b", "m1"))
    error = world.error(client, name)
    assert (error["code"], error["resource"], error["limit"]) == (
        "overloaded",
        "resident_sessions",
        1,
    )
    assert not world.ports.to_storage


@pytest.mark.rule("ACC-4", "ADM-2")
def test_an_accepted_item_waits_for_its_slot_however_long() -> None:
    world = Fixture(resident_sessions=1).ready()
    client = world.connect()
    world.ask(client, send("b", "m1"))
    header, _ = world.storage_asked()
    world.from_storage(header, accepted())
    _, activate, _ = world.peer_told("activate")
    full = m.Refusal.model_validate({"code": "overloaded", "resource": "resident_sessions"})
    world.from_supervisor(full, cid=activate.id)
    world.pass_time(3 * REQUEST_MS)
    activates = [one for one in world.ports.to_peers if one[1].kind == "activate"]
    assert activates, "it is asked again"
    world.check()


def test_sessions_with_work_are_started_when_a_gateway_begins() -> None:
    world = Fixture().ready(waiting=["a", "b"])
    asked = [one[2] for one in world.ports.to_peers if one[1].kind == "activate"]
    assert asked == [
        m.Activate(session=ref("a"), evict=[]),
        m.Activate(session=ref("b"), evict=[]),
    ]


def test_more_sessions_with_work_than_slots_are_started_one_after_the_other() -> None:
    world = Fixture(resident_sessions=1).ready(waiting=["a", "b"])
    _, activate, _ = world.peer_told("activate")
    up = m.Activating(session=ref("a"), routing_id="a" * 32, pid=3)
    world.from_supervisor(up, cid=activate.id)
    world.live("a", rid="a" * 32)
    world.from_session("a", m.PermitAsk(), "p")
    world.ports.to_peers.clear()
    world.from_session("a", m.Beat(phase="open", evictable=False, pending=0))
    assert not world.ports.to_peers
    world.from_session("a", m.PermitReturn())
    world.from_session("a", m.Beat(phase="idle", evictable=True, pending=0))
    assert world.peer_told("activate")[2] == m.Activate(session=ref("b"), evict=[ref("a")])


@pytest.mark.rule("RES-2")
def test_a_session_that_gives_its_permit_back_is_evictable_only_if_it_says_so() -> None:
    """Its turn may have failed and left an input that is tried again. Found by the simulator."""
    world = Fixture(resident_sessions=1).ready(waiting=["a", "b"])
    _, activate, _ = world.peer_told("activate")
    up = m.Activating(session=ref("a"), routing_id="a" * 32, pid=3)
    world.from_supervisor(up, cid=activate.id)
    world.live("a", rid="a" * 32)
    world.from_session("a", m.PermitAsk(), "p")
    world.from_session("a", m.Beat(phase="open", evictable=False, pending=1))
    world.ports.to_peers.clear()
    world.from_session("a", m.PermitReturn())
    world.from_session("a", m.Beat(phase="idle", evictable=False, pending=1))
    assert not world.ports.to_peers


@pytest.mark.rule("ADM-7")
def test_a_session_that_is_younger_than_the_supervisors_list_is_not_taken_for_dead() -> None:
    """Its registration overtook the list, and what tells of its start. Found by the simulator."""
    world = Fixture().ready()
    client = world.connect()
    routing_id = world.live("a", rid="a" * 32)
    world.hello([])
    request = world.ask(client, send("a", "m1"))
    to, header, _ = world.peer_told("deliver")
    assert to == routing_id
    receipt = m.Receipt(
        accepted=True,
        message_id="m1",
        duplicate=False,
        item_state="pending",
        delivery="next_turn",
        queued=1,
    )
    world.from_session("a", receipt, cid=header.id)
    assert world.answer(client, request) == receipt
    world.hello([])  # now it should have been told of: it has ended
    route = world.desk.routes.get(ref("a"))
    assert route is None or route.state == "passive"
    world.check()


@pytest.mark.rule("RES-2")
def test_a_session_that_answered_is_as_evictable_as_it_last_said() -> None:
    """Nothing has changed in it, so no beat follows. Found by the simulator."""
    world = Fixture(resident_sessions=1).ready()
    client = world.connect()
    world.live("a")
    world.ask(client, m.Cancel(session=ref("a")), deadline=500)
    world.pass_time(1_000)  # it never came, or its answer did not
    world.ask(client, m.Cancel(session=ref("a")))
    world.peer_told("cancel_turn")
    _, header, _ = world.peer_told("cancel_turn")
    refused = world.ask(client, send("b", "m1"))
    assert world.error(client, refused)["code"] == "overloaded"
    world.from_session("a", m.CancelResult(status="not_found"), cid=header.id)
    world.ask(client, send("b", "m2"))
    assert isinstance(world.storage_asked()[1], m.Accept)
    world.check()


@pytest.mark.rule("FLT-32")
def test_a_refused_activation_lets_storage_say_why() -> None:
    world = Fixture().ready(waiting=["a"])
    client = world.connect()
    name = world.ask(client, send("a", "m1"))
    _, activate, _ = world.peer_told("activate")
    world.from_supervisor(m.Refusal(code="session_quarantined"), cid=activate.id)
    header, _ = world.storage_asked()
    world.from_storage(header, m.Refusal(code="session_quarantined"))
    assert world.error(client, name)["code"] == "session_quarantined"
    assert list(world.desk.routes) == []
    assert world.desk.places.count == 0


def test_a_release_wakes_the_session() -> None:
    world = Fixture().ready()
    client = world.connect()
    name = world.ask(client, m.ReleaseSession(session=ref("a")))
    header, body = world.storage_asked()
    assert body == m.Unquarantine(session=ref("a"), gateway_epoch=7)
    world.from_storage(header, m.Ok())
    assert world.answer(client, name) == m.Ok()
    assert world.peer_told("activate")[2] == m.Activate(session=ref("a"), evict=[])


# ---- Incarnations ----


@pytest.mark.rule("FLT-44", "T-14")
def test_a_session_speaks_for_itself_alone() -> None:
    world = Fixture().ready()
    client = world.connect()
    world.live("a")
    world.live("b")
    name = world.ask(client, send("a", "m1"))
    _, header, _ = world.peer_told("deliver")
    world.from_session("b", receipt("m1"), cid=header.id)
    assert world.answer(client, name) is None
    body = m.Register(session=ref("a"), epoch=1, permit=False, evictable=True)
    world.from_session("b", body, "r2")
    refusal = world.ports.to_peers[-1]
    assert refusal[1].cid == "r2"
    assert refusal[2] == m.Refusal(code="not_found")


def test_late_words_of_a_dead_incarnation_mean_nothing() -> None:
    world = Fixture().ready()
    old = world.live("a")
    world.from_supervisor(down("a", old))
    world.ports.to_peers.clear()
    body = m.Register(session=ref("a"), epoch=1, permit=True, evictable=True)
    world.from_session("a", body, "r", rid=old)
    world.from_session("a", m.PermitAsk(), "p", rid=old)
    assert not world.ports.to_peers
    assert list(world.desk.routes) == []
    assert world.desk.permits.held == 0


def test_a_successor_takes_over_what_its_predecessor_left() -> None:
    world = Fixture().ready()
    client = world.connect()
    world.live("a", rid="1" * 32)
    world.ask(client, send("a", "m1"))
    world.live("a", rid="2" * 32)
    session = world.desk.routes.get(ref("a"))
    assert session is not None
    assert session.routing_id == "2" * 32
    assert isinstance(world.storage_asked()[1], m.Accept)
    world.check()


# ---- Gateway and storage restarts ----


@pytest.mark.rule("ADM-7")
def test_permits_wait_for_the_sessions_that_run() -> None:
    world = Fixture(active_turns=1)
    world.desk.storage_up()
    header, _ = world.storage_asked()
    world.from_storage(header, m.GatewayEpoch(epoch=8, waiting=[]))
    live = [m.LiveSession(session=ref(n), routing_id=n * 32, pid=3) for n in "ab"]
    world.hello(live)
    world.live("b", rid="b" * 32)
    world.from_session("b", m.PermitAsk(), "p")
    assert world.peer_told("permit")[2] == m.Permit(state="queued", position=1)
    world.live("a", rid="a" * 32, permit=True)
    assert not [one for one in world.ports.to_peers if one[1].kind == "permit"]
    world.from_session("a", m.PermitReturn())
    assert world.peer_told("permit")[2] == m.Permit(state="granted")


@pytest.mark.rule("ADM-7")
def test_permits_do_not_wait_for_ever() -> None:
    world = Fixture()
    world.desk.storage_up()
    header, _ = world.storage_asked()
    world.from_storage(header, m.GatewayEpoch(epoch=8, waiting=[]))
    live = [m.LiveSession(session=ref(n), routing_id=n * 32, pid=3) for n in "ab"]
    world.hello(live)
    world.live("b", rid="b" * 32)
    world.from_session("b", m.PermitAsk(), "p")
    world.peer_told("permit")
    world.pass_time(THAW_MS + 100)
    assert world.peer_told("permit")[2] == m.Permit(state="granted")


def test_the_supervisor_is_answered_when_clients_can_be_welcomed() -> None:
    world = Fixture()
    world.hello([])
    assert not world.ports.to_peers
    world.desk.storage_up()
    header, _ = world.storage_asked()
    world.from_storage(header, m.GatewayEpoch(epoch=8, waiting=[]))
    to, header, body = world.ports.to_peers.popleft()
    assert (to, header.cid, body) == (SUPERVISOR, "hello", m.Ok())


def test_a_supervisor_that_comes_back_says_what_ended_meanwhile() -> None:
    world = Fixture().ready()
    client = world.connect()
    routing_id = world.live("a")
    world.from_supervisor(m.SessionUp(session=ref("a"), routing_id=routing_id, pid=2))
    world.live("b", rid="b" * 32)
    world.ask(client, send("a", "m1"))
    world.hello([m.LiveSession(session=ref("b"), routing_id="b" * 32, pid=3)])
    assert isinstance(world.storage_asked()[1], m.Accept)
    assert [s.ref for s in world.desk.routes if s.state == "live"] == [ref("b")]


@pytest.mark.rule("FLT-4")
def test_requests_wait_for_storage_until_their_deadlines() -> None:
    world = Fixture().ready()
    client = world.connect()
    world.desk.storage_lost()
    short = world.ask(client, send("a", "m1"), deadline=500)
    long = world.ask(client, send("b", "m2"), deadline=20_000)
    assert not world.ports.to_storage
    world.pass_time(1_000)
    assert world.error(client, short)["code"] == "deadline_exceeded"
    world.desk.storage_up()
    header, body = world.storage_asked()
    assert isinstance(body, m.Accept)
    assert body.session == ref("b")
    world.from_storage(header, accepted())
    assert isinstance(world.answer(client, long), m.Receipt)


@pytest.mark.rule("FLT-4", "F24")
def test_without_storage_for_good_everything_is_answered_at_once() -> None:
    world = Fixture().ready()
    client = world.connect()
    world.live("a")
    before = [
        world.ask(client, send("a", "m1")),
        world.ask(client, send("b", "m2")),
        world.ask(client, m.Wait(session=ref("a"), message_id="m1")),
        world.ask(client, m.Watch(session=ref("a"), from_seq=1)),
    ]
    world.from_supervisor(m.StorageGivenUp(detail="gone"))
    after = world.ask(client, send("a", "m3"))
    for name in (*before, after):
        assert world.error(client, name)["code"] == "storage_unavailable"
        assert world.error(client, name)["retry_after_ms"]
    status = world.ask(client, m.Status())
    assert world.answer(client, status) is None, "status still goes to the supervisor"
    world.check()


@pytest.mark.rule("FLT-4")
def test_a_gateway_without_storage_is_ready_to_say_so() -> None:
    world = Fixture()
    ready: list[int] = []
    world.desk.on_ready = lambda: ready.append(1)
    world.hello([])
    world.from_supervisor(m.StorageGivenUp(detail="gone"))
    assert ready == [1]
    assert world.desk.is_ready
    assert world.peer_told("ok")[1].cid == "hello"


def test_a_fenced_gateway_answers_nothing_and_says_that_it_is() -> None:
    world = Fixture().ready()
    client = world.connect()
    name = world.ask(client, send("a", "m1"))
    header, _ = world.storage_asked()
    world.from_storage(header, m.Refusal(code="stale_epoch"))
    assert world.answer(client, name) is None
    assert world.desk.is_fenced


# ---- Waits, watches, cancels, status ----


@pytest.mark.rule("DUR-6")
def test_a_wait_is_asked_again_after_storage_came_back() -> None:
    world = Fixture().ready()
    client = world.connect()
    name = world.ask(client, m.Wait(session=ref("a"), message_id="m1"))
    first, body = world.storage_asked()
    assert body == m.AwaitInput(session=ref("a"), message_id="m1")
    world.desk.storage_lost()
    world.pass_time(2 * REQUEST_MS)
    world.desk.storage_up()
    header, _ = world.storage_asked()
    assert header.id == first.id
    outcome = m.WaitOutcome(
        message_id="m1", item_state="acknowledged", input_disposition="acknowledged", terminal_seq=9
    )
    world.from_storage(header, outcome)
    assert world.answer(client, name) == outcome


def test_an_expired_wait_is_forgotten_by_storage() -> None:
    world = Fixture().ready()
    client = world.connect()
    world.ask(client, m.Wait(session=ref("a"), message_id="m1"), deadline=100)
    header, _ = world.storage_asked()
    world.pass_time(200)
    assert world.storage_asked()[1] == m.Forget(request=header.id)


def records(first: int, last: int) -> m.Records:
    lines = [b"{}\n"] * (last - first + 1)
    return m.Records(session=ref("a"), first_seq=first, last_seq=last, lines=lines)


@pytest.mark.rule("WCH-1")
def test_a_watch_goes_on_where_it_was_after_storage_came_back() -> None:
    world = Fixture().ready()
    client = world.connect()
    name = world.ask(client, m.Watch(session=ref("a"), from_seq=3))
    header, body = world.storage_asked()
    assert body == m.Subscribe(session=ref("a"), from_seq=3)
    world.from_storage(header, records(3, 5))
    world.desk.storage_lost()
    world.desk.storage_up()
    again, body = world.storage_asked()
    assert body == m.Subscribe(session=ref("a"), from_seq=6)
    world.from_storage(header, records(6, 6))  # of the old subscription
    world.from_storage(again, records(6, 7))
    assert [(r.first_seq, r.last_seq) for _, _, r in world.ports.streamed] == [(3, 5), (6, 7)]
    assert world.answer(client, name) is None
    world.check()


@pytest.mark.rule("WCH-1", "FLT-59")
def test_a_slow_watcher_is_dropped_alone() -> None:
    world = Fixture().ready()
    client, other = world.connect(), world.connect()
    slow = world.ask(client, m.Watch(session=ref("a"), from_seq=1))
    header, _ = world.storage_asked()
    fast = world.ask(other, m.Watch(session=ref("a"), from_seq=1))
    second, _ = world.storage_asked()
    world.ports.unread[client.conn] = CLIENT_OUTPUT_BYTES_MAX // 2
    world.from_storage(header, records(1, 2))
    world.from_storage(second, records(1, 2))
    assert world.error(client, slow)["resource"] == "socket"
    assert world.storage_asked()[1] == m.Forget(request=header.id)
    assert world.answer(other, fast) is None
    assert len(world.ports.streamed) == 1


def test_an_ended_watch_gets_nothing_more() -> None:
    world = Fixture().ready()
    client = world.connect()
    watch = world.ask(client, m.Watch(session=ref("a"), from_seq=1))
    header, _ = world.storage_asked()
    for _ in range(2):
        name = world.ask(client, m.Unwatch(watch=watch))
        assert world.answer(client, name) == m.Ok()
    assert world.storage_asked()[1] == m.Forget(request=header.id)
    world.from_storage(header, records(1, 2))
    assert world.ports.streamed == []
    assert (client.conn, watch) not in world.ports.answers
    assert len(world.desk.ledger) == 0


@pytest.mark.rule("TEX-16")
def test_a_client_that_goes_cancels_nothing_but_what_only_it_could_hear() -> None:
    world = Fixture().ready()
    client = world.connect()
    world.live("a")
    world.ask(client, send("a", "m1"))
    world.ask(client, m.Wait(session=ref("a"), message_id="m1"))
    world.ask(client, m.Watch(session=ref("a"), from_seq=1))
    world.ports.to_storage.clear()
    world.desk.client_gone(client)
    assert {body.kind for _, body in world.ports.to_storage} == {"forget"}
    assert len(world.desk.ledger) == 1
    _, header, _ = world.peer_told("deliver")
    world.from_session("a", receipt("m1"), cid=header.id)
    assert world.ports.answers == {}
    assert len(world.desk.ledger) == 0


@pytest.mark.rule("TEX-14", "TEX-15")
def test_a_cancel_goes_to_the_live_session_or_to_storage() -> None:
    world = Fixture().ready()
    client = world.connect()
    world.live("a")
    name = world.ask(client, m.Cancel(session=ref("a"), turn_id="turn_1"))
    _, header, body = world.peer_told("cancel_turn")
    assert isinstance(body, m.CancelTurn)
    assert body.turn_id == "turn_1"
    world.from_session("a", m.CancelResult(status="cancelling"), cid=header.id)
    assert world.answer(client, name) == m.CancelResult(status="cancelling")
    name = world.ask(client, m.Cancel(session=ref("b"), message_id="m1"))
    header, body = world.storage_asked()
    assert isinstance(body, m.DiscardInput)
    assert body.reason == "cancelled"
    world.from_storage(header, m.CancelResult(status="cancelled"))
    assert world.answer(client, name) == m.CancelResult(status="cancelled")
    for body, status in (
        (m.Cancel(session=ref("b"), turn_id="turn_1"), "already_terminal"),
        (m.Cancel(session=ref("b")), "not_found"),
    ):
        answer = world.answer(client, world.ask(client, body))
        assert isinstance(answer, m.CancelResult)
        assert answer.status == status


def test_a_cancel_of_a_session_that_dies_is_answered_by_storage() -> None:
    world = Fixture().ready()
    client = world.connect()
    routing_id = world.live("a")
    name = world.ask(client, m.Cancel(session=ref("a"), message_id="m1"))
    world.from_supervisor(down("a", routing_id))
    header, body = world.storage_asked()
    assert isinstance(body, m.DiscardInput)
    world.from_storage(header, m.Refusal(code="session_in_use"))  # its successor is there
    world.ports.to_peers.clear()
    world.live("a", rid="2" * 32)
    to, again, _ = world.peer_told("cancel_turn")
    assert to == "2" * 32
    world.from_session("a", m.CancelResult(status="not_found"), cid=again.id)
    assert world.answer(client, name) == m.CancelResult(status="not_found")


def tree(detail: str | None = None) -> m.ProcessTree:
    return m.ProcessTree(
        plane_id="p",
        plane_epoch=1,
        started_at=1,
        processes=[],
        quarantined=[ref("q")],
        counters={"restarts_session": 2},
        detail=detail,
    )


def test_status_is_made_of_both_views() -> None:
    world = Fixture().ready()
    client = world.connect()
    world.live("a")
    world.live("b")
    world.from_session("b", m.Beat(phase="open", evictable=False, pending=1))
    name = world.ask(client, m.Status())
    _, header, _ = world.peer_told("supervisor_status")
    world.from_supervisor(tree("storage: gone"), cid=header.id)
    body = world.answer(client, name)
    assert isinstance(body, m.PlaneStatus)
    assert body.sessions == {"live": 1, "turn": 1, "quarantined": 1}
    assert body.counters["restarts_session"] == 2
    assert body.counters["requests_pending"] == 1
    assert body.detail == "storage: gone"


@pytest.mark.rule("SHD-1")
def test_a_closing_plane_refuses_new_work_and_answers_what_is_left() -> None:
    world = Fixture().ready()
    client = world.connect()
    stop = world.ask(client, m.Down())
    _to, header, body = world.peer_told("stop_plane")
    assert body == m.StopPlane(reason="asked")
    world.from_supervisor(m.Ok(), cid=header.id)
    assert world.answer(client, stop) == m.Ok()
    waiting = world.ask(client, send("a", "m0"))
    world.from_supervisor(m.Closing(), "c")
    assert world.peer_told("ok")[1].cid == "c"
    name = world.ask(client, send("a", "m1"))
    assert world.error(client, name)["code"] == "plane_closing"
    assert world.answer(client, waiting) is None
    world.desk.shut()
    assert world.error(client, waiting)["code"] == "plane_closing"
    assert len(world.desk.ledger) == 0
    assert world.desk.places.count == 0


def test_what_finds_no_room_on_its_way_is_said_again() -> None:
    world = Fixture().ready()
    client = world.connect()
    name = world.ask(client, m.Status())
    _, header, _ = world.peer_told("supervisor_status")
    world.desk.unreachable(SUPERVISOR, header)
    world.ask(client, send("a", "m1"))
    asked, _ = world.storage_asked()
    world.desk.storage_refused(asked)
    world.pass_time(150)
    assert world.storage_asked()[0].id == asked.id
    _, again, _ = world.peer_told("supervisor_status")
    world.from_supervisor(tree(), cid=again.id)
    assert isinstance(world.answer(client, name), m.PlaneStatus)


def test_unknown_kinds_of_peers_are_refused_or_ignored() -> None:
    world = Fixture().ready()
    world.live("a")
    world.ports.to_peers.clear()
    world.from_session("a", m.Status(), "x")
    assert world.ports.to_peers.popleft()[2] == m.Refusal.model_validate(
        {"code": "invalid_request", "field": "kind", "reason": "kind"}
    )
    world.from_supervisor(m.Ok(), "y")
    world.desk.from_storage(Header("ok", cid="nobody asked"), b"\x80")
    world.check()


# ---- Long texts ----


def long_send(world: Fixture, client: Client, message_id: str = "m1") -> tuple[str, m.InboxItem]:
    """Ask as the border does for a send whose text it has cut."""
    body = send("a", message_id)
    made = item(message_id)
    text = LongText({"artifact_id": "0" * 64}, b"the long text")
    name = f"long-{message_id}"
    world.asked.append((client.conn, name))
    world.desk.take(client, Header("send", name), body, 10, made, text)
    return name, made


@pytest.mark.rule("ART-2")
@pytest.mark.parametrize("live", [True, False])
def test_a_long_text_is_durable_before_its_send_is_admitted(live: bool) -> None:
    world = Fixture().ready()
    client = world.connect()
    if live:
        world.live("a")
    name, made = long_send(world, client)
    header, body = world.storage_asked()
    assert isinstance(body, m.StoreArtifact)
    assert (body.data, body.message_id, body.digest) == (b"the long text", "m1", made.digest)
    assert not world.ports.to_peers or all(one[1].kind != "deliver" for one in world.ports.to_peers)
    assert not world.ports.to_storage
    world.from_storage(header, m.Ok())
    if live:
        _, told, _ = world.peer_told("deliver")
        world.from_session("a", receipt("m1"), cid=told.id)
    else:
        asked, accept = world.storage_asked()
        assert isinstance(accept, m.Accept)
        world.from_storage(asked, accepted())
    answer = world.answer(client, name)
    assert isinstance(answer, m.Receipt)
    world.check()


@pytest.mark.rule("ART-2", "ART-6")
def test_a_text_that_was_refused_is_not_admitted() -> None:
    world = Fixture().ready()
    client = world.connect()
    world.live("a")
    name, _ = long_send(world, client)
    header, _ = world.storage_asked()
    quota = ArtifactQuota(limit="ARTIFACTS_PER_SESSION_MAX", current=128, maximum=128)
    world.desk.from_storage(Header("error", cid=header.id), error_body(quota))
    assert world.error(client, name)["code"] == "artifact_quota"
    assert not any(one[1].kind == "deliver" for one in world.ports.to_peers)
    world.check()


@pytest.mark.rule("ART-2")
def test_a_text_is_said_again_to_a_storage_that_was_restarted() -> None:
    world = Fixture().ready()
    client = world.connect()
    name, _ = long_send(world, client)
    world.storage_asked()
    world.desk.storage_lost()
    world.desk.storage_up()
    header, again = world.storage_asked()
    assert isinstance(again, m.StoreArtifact)
    assert again.data == b"the long text"
    world.from_storage(header, m.Ok())
    asked, _ = world.storage_asked()
    world.from_storage(asked, accepted())
    assert isinstance(world.answer(client, name), m.Receipt)


@pytest.mark.rule("FLT-22")
def test_status_shows_how_full_things_are_and_waits_for_nobody() -> None:
    world = Fixture(activation_queue=1).ready()
    client = world.connect()
    full = m.Level(name="disk_free_bytes", value=5, limit=10, alarm=True)
    world.from_storage(Header("", ""), m.StorageLevels(levels=[full]))
    world.desk.storage_lost()
    world.ask(client, send("a", "m1"))
    name = world.ask(client, m.Status())
    _, header, _ = world.peer_told("supervisor_status")
    world.from_supervisor(tree("fine"), cid=header.id)
    body = world.answer(client, name)
    assert isinstance(body, m.PlaneStatus)
    by_name = {one.name: one for one in body.levels}
    assert by_name["disk_free_bytes"] == full
    assert by_name["activation_queue"].alarm
    assert not by_name["turn_queue"].alarm
