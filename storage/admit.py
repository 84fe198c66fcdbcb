"""Whether an append may be made, and what a repeat of one gets: pure (DUR-1, DUR-6, INB-6).

Checks come in the order of IDN-9, INB-6 and INB-7; those on epochs and on who may ask at all stand
before them, in `requests`.
"""

from __future__ import annotations

from typing import Final, Protocol

from callboard.errors import IdempotencyConflict, InvalidRequest, RecordInvalid, SeqConflict
from callboard.messages import Append, Appended, InboxItem, KnownInput, PutOp
from callboard.storage.draft import Draft, Moment, Plan
from callboard.storage.state import Key, SessionState, digest_of, pack_key, unpack_key

_NOTHING: Final = frozenset[str]()
_set: Final = object.__setattr__


class Artifacts(Protocol):
    """Knows which artifacts are there."""

    def check(self, text: str, item: InboxItem) -> None:
        """Raise ArtifactInvalid if an input names one that is not."""
        ...


def plan_append(state: SessionState, asked: Append, moment: Moment, artifacts: Artifacts) -> Plan:
    """Plan one atomic frame of a live session (DUR-1). Its epoch was checked.

    Raises:
        IdempotencyConflict: the key named another frame (DUR-6).
        RequestConflict: a message id named another content (INB-6b).
        ArtifactInvalid: an input names an artifact that is not there (ART-2).
        SeqConflict: `first_seq` is not the next one (DUR-2).
        InboxFull, RecordInvalid, PayloadTooLarge, TurnActive, …: what is asked breaks a rule.

    """
    puts: list[InboxItem] = []
    removes: list[str] = []
    for op in asked.inbox:
        if isinstance(op, PutOp):
            puts.append(op.item)
        else:
            removes.append(op.message_id)
    records = asked.records
    if len(records) != 1 or puts or asked.key != records[0].id:
        _check_key(asked, puts, removes)
    repeated = _repeated(state, asked, puts)
    if repeated is not None:
        return Plan(repeated)
    if asked.first_seq is not None and asked.first_seq != state.fold.seq + 1:
        raise SeqConflict(expected=state.fold.seq + 1)
    for item in puts:
        artifacts.check(state.text, item)
    draft = Draft(state, moment)
    live = [draft.put(item) for item in puts]
    settles = draft.add_records(records) if records else _NOTHING
    if removes or settles:
        _check_removes(state, removes, settles)
    if removes:
        draft.remove(removes)
    first, last = state.fold.seq + 1, draft.state.fold.seq
    key = None
    if records:
        digest = digest_of(records)
        key = asked.key, pack_key(Key(moment.commit, first, last, digest))
    n, sizes = [one.n for one in live], [one.size_bytes for one in live]
    return draft.plan(_appended(moment.commit, first, last, n, sizes), key)


def _appended(commit: int, first: int, last: int, n: list[int], sizes: list[int]) -> Appended:
    """Make an answer without the check of its fields, which costs as much as stamping a record.

    They are counted here; whoever receives them checks them.
    """
    made = Appended.__new__(Appended)
    fields = {
        "commit": commit,
        "first_seq": first,
        "last_seq": last,
        "n": n,
        "sizes": sizes,
        "known": None,
    }
    _set(made, "__dict__", fields)
    _set(made, "__pydantic_fields_set__", set(fields))
    _set(made, "__pydantic_extra__", None)
    _set(made, "__pydantic_private__", None)
    return made


def _check_removes(state: SessionState, removes: list[str], settles: frozenset[str]) -> None:
    """Check that what leaves is what the frame's records settle (INB-5).

    Only an item that an earlier record settled leaves without one in the frame (INB-4a).
    """
    gone = frozenset(removes)
    left = gone - settles
    late = all(one in state.inbox.items and one in state.settled for one in left)
    if len(gone) != len(removes) or not settles <= gone or not late:
        raise RecordInvalid(type="remove", field="message_id")


def _check_key(asked: Append, puts: list[InboxItem], removes: list[str]) -> None:
    """Check that the key is the first record's id, or else the first message id."""
    records = asked.records
    if records:
        expected: str | None = records[0].id
    else:
        names = [one.message_id for one in puts] or removes
        expected = names[0] if names else None
    if asked.key != expected:
        raise InvalidRequest(field="key", reason="format")
    if len(records) > 1 and len({one.id for one in records}) != len(records):
        raise RecordInvalid(type=records[0].type, field="id")
    if len(puts) > 1 and len({one.message_id for one in puts}) != len(puts):
        raise InvalidRequest(field="message_id", reason="duplicate")


def _repeated(state: SessionState, asked: Append, puts: list[InboxItem]) -> Appended | None:
    """Answer a frame that was written before, or an input that was put before (DUR-6, INB-6)."""
    packed = state.keys.get(asked.key) if asked.records else None
    if packed is None and asked.records and not asked.inbox:
        return None
    if packed is not None:
        key = unpack_key(packed)
        if key.digest != digest_of(asked.records):
            raise IdempotencyConflict
        for item in puts:
            state.known(item.message_id, item.digest)
        return _answered(state, puts, key.commit, key.first_seq, key.last_seq)
    if not puts:
        if asked.records:
            return None
        names = [op.message_id for op in asked.inbox if not isinstance(op, PutOp)]
        if all(name in state.settled and name not in state.inbox.items for name in names):
            return _answered(state, [], state.fold.commit, state.fold.seq + 1, state.fold.seq)
        return None
    known = [state.known(item.message_id, item.digest) for item in puts]
    first = next((one for one in known if one is not None), None)
    if first is None:
        return None
    if not asked.records and all(_is_own(state, item, asked.epoch) for item in puts):
        commit = state.inbox.items[puts[0].message_id].commit
        return _answered(state, puts, commit, state.fold.seq + 1, state.fold.seq)
    return _known(state, first)


def _is_own(state: SessionState, item: InboxItem, epoch: int) -> bool:
    """Tell whether this owner put an item itself: then it asks again because no answer came.

    Its mailbox knows every other live item, from the lease or from its own answers.
    """
    live = state.inbox.items.get(item.message_id)
    return live is not None and live.epoch == epoch


def _answered(
    state: SessionState, puts: list[InboxItem], commit: int, first: int, last: int
) -> Appended:
    items = [state.inbox.items.get(item.message_id) for item in puts]
    return Appended(
        commit=commit,
        first_seq=first,
        last_seq=last,
        n=[one.n if one else 0 for one in items],
        sizes=[one.size_bytes if one else 0 for one in items],
    )


def _known(state: SessionState, known: KnownInput) -> Appended:
    fold = state.fold
    return Appended(
        commit=fold.commit, first_seq=fold.seq + 1, last_seq=fold.seq, n=[], sizes=[], known=known
    )
