"""What each kind of request comes to: one pure planning step a kind, checks in the order of IDN-9.

Who may ask is checked first, then whether the asker's epoch is the present one, then existence,
damage, archive and quarantine, then the rules of the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from callboard import messages as m
from callboard.errors import (
    AlreadyClaimed,
    CallboardError,
    IdempotencyConflict,
    InvalidRequest,
    NotFound,
    RecordInvalid,
    SessionArchived,
    SessionExists,
    SessionInUse,
    SessionQuarantined,
    StaleEpoch,
)
from callboard.ids import SessionRef, check_message_id, parse_ref, workspace_key
from callboard.records import SessionCreated, check_data, compact
from callboard.storage.admit import plan_append
from callboard.storage.draft import Draft, Moment, Plan
from callboard.storage.leases import grant, standing
from callboard.storage.state import Key, SessionState, digest_of, new_state, pack_key

if TYPE_CHECKING:
    from callboard.storage.engine import Engine, Request

_WAITING_MAX: Final = 20_000
"""Sessions that a gateway is told to wake; one that is left out wakes with its next input."""
B = TypeVar("B", bound=m.Body)


def plan_request(engine: Engine, request: Request, moment: Moment) -> Plan:
    """Plan one request.

    Raises:
        CallboardError: it is refused, and nothing changes.

    """
    kind = request.body.kind
    role, handler = _HANDLERS.get(kind, ("", None))
    if handler is None or role != request.role:
        raise NotFound
    if role == "session" and getattr(request.body, "session", None) != request.scope:
        raise NotFound  # a session's credential covers its own session alone (ECX-6)
    return handler(engine, request.body, moment)


def serves(kind: str) -> bool:
    """Tell whether a kind is answered here."""
    return kind in _HANDLERS


# --- what all of them check -----------------------------------------------------------------------


def find(engine: Engine, text: str) -> SessionState:
    """Find a session.

    Raises:
        InvalidRequest: the text names none.
        NotFound: there is no such session.

    """
    state = engine.sessions.get(text)
    engine.saw_commit(engine.sessions.highest_commit)
    if state is None:
        raise NotFound
    return state


def _sound(engine: Engine, text: str) -> SessionState:
    """Find a session that may be written to (REC-3b, INB-3)."""
    state = find(engine, text)
    if state.damage is not None:
        raise state.damage
    return state


def _startable(engine: Engine, text: str) -> SessionState:
    """Find a session that may be activated or take input while it is passive (RUN-1)."""
    state = _sound(engine, text)
    if state.fold.archived_at is not None:
        raise SessionArchived(session=text)
    if state.fold.quarantine is not None:
        raise SessionQuarantined(reason=state.fold.quarantine.reason)
    if state.lease_error is not None:
        raise state.lease_error
    return state


def check_gateway(engine: Engine, epoch: int) -> None:
    """Refuse another gateway than the present one."""
    if epoch != engine.journal.epochs.gateway:
        raise StaleEpoch


# --- session --------------------------------------------------------------------------------------


def _acquire(engine: Engine, body: m.Acquire, moment: Moment) -> Plan:
    state = _startable(engine, body.session)
    verdict = standing(state.lease, engine.owners, engine.options.plane_id, body.owner.nonce)
    if verdict == "mine":
        return Plan(state.grant_body())
    if verdict == "held":
        assert state.lease is not None
        raise SessionInUse(pid=state.lease.owner_pid, epoch=state.lease.epoch)
    draft = Draft(state, moment)
    draft.state.epoch = state.epoch + 1
    draft.set_lease(grant(state.ref, draft.state.epoch, body.owner, moment.now_us))
    return draft.plan(draft.state.grant_body())


def _append(engine: Engine, body: m.Append, moment: Moment) -> Plan:
    state = find(engine, body.session)
    lease = state.lease
    if lease is None or not lease.held or lease.epoch != body.epoch:
        raise StaleEpoch
    if state.damage is not None:
        raise state.damage
    return plan_append(state, body, moment, engine.artifacts)


def _lookup(engine: Engine, body: m.Lookup, moment: Moment) -> Plan:
    state = _sound(engine, body.session)
    return Plan(m.LookedUp(known=state.known(check_message_id(body.message_id), body.digest)))


def _release(engine: Engine, body: m.Release, moment: Moment) -> Plan:
    state = find(engine, body.session)
    lease = state.lease
    if lease is None or lease.epoch != body.epoch or lease.nonce != body.nonce:
        raise StaleEpoch
    if not lease.held:
        return Plan(m.Ok())
    draft = Draft(state, moment)
    draft.set_lease(lease.release(moment.now_us))
    return draft.plan(m.Ok())


# --- gateway --------------------------------------------------------------------------------------


def _gateway_hello(engine: Engine, body: m.GatewayHello, moment: Moment) -> Plan:
    epochs, raised = engine.journal.epochs, None
    if body.nonce != epochs.gateway_nonce:
        raised = epochs._replace(gateway=epochs.gateway + 1, gateway_nonce=body.nonce)
    reply = m.GatewayEpoch(epoch=(raised or epochs).gateway, waiting=waiting(engine))
    return Plan(reply, epochs=raised)


def waiting(engine: Engine) -> list[str]:
    """Name the passive sessions with work (host page, section 5).

    Those with an open turn come first, then those with input that a turn should take.
    """
    with_turn: list[str] = []
    with_input: list[str] = []
    for text in engine.sessions.candidates():
        try:
            state = engine.sessions.get(text)
        except InvalidRequest:
            continue
        if state is None or not _is_wakeable(engine, state):
            continue
        if state.fold.turn is not None:
            with_turn.append(text)
        elif state.runnable():
            with_input.append(text)
    engine.saw_commit(engine.sessions.highest_commit)
    return (with_turn + with_input)[:_WAITING_MAX]


def _is_wakeable(engine: Engine, state: SessionState) -> bool:
    if state.damage is not None or state.lease_error is not None:
        return False
    if state.fold.quarantine is not None or state.fold.archived_at is not None:
        return False
    try:
        verdict = standing(state.lease, engine.owners, engine.options.plane_id)
    except CallboardError:
        return False
    return verdict == "free"


def _accept(engine: Engine, body: m.Accept, moment: Moment) -> Plan:
    check_gateway(engine, body.gateway_epoch)
    check_message_id(body.item.message_id)
    state = _startable(engine, body.session)
    if standing(state.lease, engine.owners, engine.options.plane_id) == "held":
        assert state.lease is not None
        return Plan(m.LeaseHeld(owner=state.lease.owner(), epoch=state.lease.epoch))
    known = state.known(body.item.message_id, body.item.digest)
    if known is not None:
        return Plan(
            m.Accepted(
                duplicate=True,
                item_state=known.item_state,
                turn_id=known.turn_id,
                queued=len(state.inbox.items),
                runnable=state.fold.turn is not None or state.runnable(),
            )
        )
    engine.artifacts.check(body.session, body.item)
    draft = Draft(state, moment)
    draft.put(body.item)
    return draft.plan(
        m.Accepted(
            duplicate=False,
            item_state="pending",
            queued=len(draft.state.inbox.items),
            runnable=body.item.wake and state.fold.paused_at is None,
        )
    )


def check_store(engine: Engine, body: m.StoreArtifact) -> bool:
    """Check whether an artifact may be stored: as for the input that will name it (ACC-1c).

    Returns:
        False if that input was accepted before: then nothing needs to be stored.

    Raises:
        StaleEpoch, NotFound, SessionArchived, RequestConflict, …: it is refused.

    """
    check_gateway(engine, body.gateway_epoch)
    state = _startable(engine, body.session)
    return state.known(check_message_id(body.message_id), body.digest) is None


def _create(engine: Engine, body: m.Create, moment: Moment) -> Plan:
    check_gateway(engine, body.gateway_epoch)
    ref = parse_ref(body.session)
    state = engine.sessions.get(body.session)
    if state is not None:
        if body.record.id not in state.keys:
            raise SessionExists
        if not _asks_for(body.record, state.fold.created):
            raise IdempotencyConflict
        return Plan(m.Created(session=body.session, fresh=False))
    check_creation(ref, body.record, key=body.record.id)
    if engine.sessions.twin(ref):
        raise SessionExists
    draft = Draft(new_state(ref), moment)
    draft.add_records([body.record])
    draft.puts = True
    key = body.record.id, pack_key(Key(moment.commit, 1, 1, digest_of([body.record])))
    return draft.plan(m.Created(session=body.session, fresh=True), key)


def check_creation(ref: SessionRef, record: m.NewRecord, *, key: str) -> None:
    """Check a session's first record.

    Raises:
        RecordInvalid: it is none, of another session, or not named as its creation is.

    """
    data = check_data(record.type, record.data)
    if not isinstance(data, SessionCreated):
        raise RecordInvalid(type=record.type, field="type")
    if data.session_id != ref.session_id:
        raise RecordInvalid(type=data.type, field="session_id")
    if workspace_key(data.workspace) != ref.workspace_key:
        raise RecordInvalid(type=data.type, field="workspace")
    if record.id != key:
        raise RecordInvalid(type=data.type, field="id")


def _asks_for(record: m.NewRecord, first: SessionCreated | None) -> bool:
    """Tell whether a creation asks for the session that is there (IDN-8).

    When it was asked for is not compared: the gateway writes that down, anew for each try.
    """
    again = check_data(record.type, record.data)
    if first is None or not isinstance(again, SessionCreated):
        return False
    owner = again.owner.model_copy(update={"created_at": first.owner.created_at})
    return again.model_copy(update={"created_at": first.created_at, "owner": owner}) == first


def _discard_input(engine: Engine, body: m.DiscardInput, moment: Moment) -> Plan:
    check_gateway(engine, body.gateway_epoch)
    state = _sound(engine, body.session)
    if state.lease_error is not None:
        raise state.lease_error
    if standing(state.lease, engine.owners, engine.options.plane_id) == "held":
        raise SessionInUse
    live = state.inbox.items.get(body.message_id)
    if live is None:
        settled = state.settled.get(body.message_id)
        if settled is None:
            return Plan(m.CancelResult(status="not_found"))
        return Plan(_already(settled.ending.turn_id, settled.ending.outcome))
    if state.claimed_by(body.message_id) is not None:
        raise AlreadyClaimed
    items = [{"message_id": body.message_id, "digest": live.item.digest}]
    record = _record(moment, "inbox_acknowledged", {"reason": body.reason, "items": items})
    draft = Draft(state, moment)
    draft.add_records([record])
    draft.remove([body.message_id])
    return draft.plan(m.CancelResult(status="cancelled"))


def _already(turn_id: str | None, outcome: str | None) -> m.CancelResult:
    return m.CancelResult.model_validate(
        {"status": "already_terminal", "turn_id": turn_id, "outcome": outcome}
    )


def _unquarantine(engine: Engine, body: m.Unquarantine, moment: Moment) -> Plan:
    check_gateway(engine, body.gateway_epoch)
    state = _sound(engine, body.session)
    if state.fold.quarantine is None:
        return Plan(m.Ok())
    return _update(state, moment, {"quarantine": None, "updated_at": moment.now_us})


# --- supervisor -----------------------------------------------------------------------------------


def _plane_hello(engine: Engine, body: m.PlaneHello, moment: Moment) -> Plan:
    epochs = engine.journal.epochs
    if body.plane_id == epochs.plane_id:
        return Plan(m.PlaneEpoch(epoch=epochs.plane))
    raised = epochs._replace(plane=epochs.plane + 1, plane_id=body.plane_id)
    return Plan(m.PlaneEpoch(epoch=raised.plane), epochs=raised)


def _quarantine(engine: Engine, body: m.Quarantine, moment: Moment) -> Plan:
    if body.plane_epoch != engine.journal.epochs.plane:
        raise StaleEpoch
    state = _sound(engine, body.session)
    if state.fold.quarantine is not None:
        return Plan(m.Ok())
    since = {"reason": body.reason, "since_at": moment.now_us}
    return _update(state, moment, {"quarantine": since, "updated_at": moment.now_us})


def _update(state: SessionState, moment: Moment, data: Mapping[str, object]) -> Plan:
    draft = Draft(state, moment)
    draft.add_records([_record(moment, "session_updated", data)])
    draft.begins = False  # a quarantine is needed on a full disk, too
    return draft.plan(m.Ok())


def _record(moment: Moment, kind: str, data: Mapping[str, object]) -> m.NewRecord:
    return m.NewRecord(id=moment.fresh(), type=kind, data=compact(data))


_HANDLERS: Final[Mapping[str, tuple[str, Callable[[Engine, Any, Moment], Plan]]]] = (
    MappingProxyType(
        {
            "acquire": ("session", _acquire),
            "append": ("session", _append),
            "lookup": ("session", _lookup),
            "release": ("session", _release),
            "gateway_hello": ("gateway", _gateway_hello),
            "accept": ("gateway", _accept),
            "create": ("gateway", _create),
            "discard_input": ("gateway", _discard_input),
            "unquarantine": ("gateway", _unquarantine),
            "plane_hello": ("supervisor", _plane_hello),
            "quarantine": ("supervisor", _quarantine),
        }
    )
)
