"""The suite that every storage adapter passes: write a class that makes one, and pytest runs it.

    from callboard.testing.conformance import StorageConformance

    class TestMine(StorageConformance):
        def make(self) -> Storage:
            return MyStorage(self.processes)

What an adapter says it cannot do (`Storage.capabilities`) is skipped. One that is durable overrides
`reopen` and `crash`, one that knows damage overrides `damage`. Each test's docstring begins with
the rules that it holds, and `RULES` has them all.
"""

from __future__ import annotations

import re
import unittest
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import ClassVar, Final, cast

from pydantic_core import from_json

from callboard import messages as m
from callboard.errors import CallboardError
from callboard.limits import INBOX_USER_ITEMS_MAX, RECORD_BYTES_MAX
from callboard.port import PAGE_LINES_MAX, ArtifactStorage, Capability, Storage
from callboard.testing.memory import Processes
from callboard.testing.requests import (
    PRINCIPAL,
    Author,
    digest_of,
    frame,
    item,
    session_ref,
)

PLANE: Final = "plane"
"""The plane that an adapter under test belongs to: leases of its processes are held."""
_TURN: Final = "turn_%026d"


@contextmanager
def refused(code: str, **carried: object) -> Generator[None]:
    """Expect a refusal, to the last byte of what it carries.

    Args:
        code: its code.
        carried: all that it carries, by the names of the wire.

    """
    told: Mapping[str, object] = {}
    try:
        yield
    except CallboardError as error:
        told = error.to_wire()
    assert told == {"code": code, **carried}, told


def needs(capability: Capability) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Skip a test for adapters that lack a capability."""

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        def run(self: StorageConformance) -> None:
            if capability not in self.storage.capabilities:
                raise unittest.SkipTest(f"this storage is not capable of: {capability}")
            test(self)

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return wrap


class StorageConformance:
    """What holds of every storage. Subclass it, and override at least `make`.

    Attributes:
        processes: tells the adapter which owners of leases live.
        storage: the one under test, made anew for each test.

    """

    processes: Processes
    storage: Storage
    author: Author
    RULES: ClassVar[frozenset[str]]

    # --- what an adapter's author writes --------------------------------------------------------

    def make(self) -> Storage:
        """Make an empty storage of plane PLANE, whose owners are judged by `self.processes`."""
        raise NotImplementedError

    def reopen(self, storage: Storage) -> Storage:
        """Close a durable storage in order, and open what it kept."""
        raise NotImplementedError

    def crash(self, storage: Storage) -> Storage:
        """Take a durable storage's process away without a word, and open what it kept."""
        raise NotImplementedError

    def damage(self, storage: Storage, session: str, seq: int) -> Storage:
        """Change a stored record's bytes, so that it cannot be read, and open what is left."""
        raise NotImplementedError

    # --- around each test -----------------------------------------------------------------------

    def setup_method(self) -> None:
        """Begin a test; pytest calls it."""
        self.processes = Processes()
        self.author = Author()
        self.storage = self.make()

    def teardown_method(self) -> None:
        """End a test; pytest calls it."""
        self.storage.close()

    # --- what tests say -------------------------------------------------------------------------

    def gateway(self, nonce: str = "a" * 32) -> int:
        """Be the gateway; gives its epoch."""
        return self.storage.hello_gateway(m.GatewayHello(nonce=nonce)).epoch

    def create(self, session_id: str = "s1") -> str:
        """Make a session; gives its reference as text."""
        return self.storage.create(self.author.creation(self.gateway(), session_id)).session

    def acquire(self, session: str) -> tuple[m.LeaseGranted, m.ProcessIdentity]:
        """Take a lease as a new process."""
        owner = self.processes.start(PLANE)
        return self.storage.acquire(m.Acquire(session=session, owner=owner)), owner

    def live(self, session_id: str = "s1") -> tuple[str, int]:
        """Make a session and own it; gives its reference and epoch."""
        session = self.create(session_id)
        return session, self.acquire(session)[0].epoch

    def turn(self, session: str, epoch: int, number: int, inputs: list[str]) -> str:
        """Put inputs, begin a turn that claims them, and apply them; gives the turn's id."""
        turn_id = _TURN % number
        puts = [item(name, name) for name in inputs]
        records = [self.author.started(turn_id, epoch, inputs)]
        for name in inputs:
            records += self.author.said(turn_id, f"msg_{name}", name, "user", name)
        self.storage.append(frame(session, epoch, records, puts))
        return turn_id

    def end(self, session: str, epoch: int, turn_id: str, inputs: list[str]) -> m.Appended:
        """End a turn well, and let its inputs leave."""
        acked = self.author.acknowledged({name: name for name in inputs}, "completed", turn_id)
        records = [acked, self.author.completed(turn_id, inputs)]
        return self.storage.append(frame(session, epoch, records, removes=inputs))

    def say(self, turn_id: str, words: str = "hm") -> list[m.NewRecord]:
        """Make records of an open turn."""
        return self.author.said(turn_id, f"said_{self.author.fresh()}", words)

    def records(self, session: str, from_seq: int = 1) -> list[Mapping[str, object]]:
        """Read all records from a seq on, page after page."""
        found: list[Mapping[str, object]] = []
        while True:
            page = self.storage.read(session, from_seq)
            assert page.first_seq == (from_seq if page.lines else page.next_seq)
            found += [cast("Mapping[str, object]", from_json(line)) for line in page.lines]
            if page.last:
                return found
            from_seq = page.next_seq

    def everything(self, session: str) -> object:
        """Read all that can be read of a session, to see that nothing changed."""
        names = [f"m{number}" for number in range(9)]
        return self.storage.read(session), [self._known(session, name) for name in names]

    def _known(self, session: str, name: str) -> object:
        try:
            return self.storage.lookup(
                m.Lookup(session=session, message_id=name, digest=digest_of(name))
            )
        except CallboardError as error:
            return error.to_wire()

    # --- epochs of the plane ----------------------------------------------------------------------

    def test_a_gateway_keeps_its_epoch_until_another_one_comes(self) -> None:
        """LSE-5: an earlier gateway writes nothing."""
        first = self.gateway("a" * 32)
        assert self.gateway("a" * 32) == first
        session = self.create()
        second = self.gateway("b" * 32)
        assert second > first
        before = self.everything(session)
        with refused("stale_epoch"):
            self.storage.accept(m.Accept(session=session, gateway_epoch=first, item=item("m1")))
        with refused("stale_epoch"):
            self.storage.create(self.author.creation(first, "s2"))
        asked = m.DiscardInput(
            session=session, gateway_epoch=first, message_id="m1", reason="discarded"
        )
        with refused("stale_epoch"):
            self.storage.discard(asked)
        with refused("not_found"):
            self.storage.read(session_ref("s2"))
        assert self.everything(session) == before

    def test_a_plane_keeps_its_epoch_and_quarantines(self) -> None:
        """LSE-5: quarantine is the supervisor's, and keeps a session from being started."""
        session = self.create()
        epoch = self.storage.hello_plane(m.PlaneHello(plane_id="p1")).epoch
        assert self.storage.hello_plane(m.PlaneHello(plane_id="p1")).epoch == epoch
        later = self.storage.hello_plane(m.PlaneHello(plane_id="p2")).epoch
        assert later > epoch
        asked = m.Quarantine(session=session, plane_epoch=epoch, reason="crash_loop")
        with refused("stale_epoch"):
            self.storage.quarantine(asked)
        for _ in range(2):
            self.storage.quarantine(asked.model_copy(update={"plane_epoch": later}))
        with refused("session_quarantined", reason="crash_loop"):
            self.acquire(session)
        with refused("session_quarantined", reason="crash_loop"):
            self._accept(session, "m1")
        for _ in range(2):
            asked2 = m.Unquarantine(session=session, gateway_epoch=self.gateway())
            self.storage.unquarantine(asked2)
        self.acquire(session)
        kinds = [one["type"] for one in self.records(session)]
        assert kinds == ["session_created", "session_updated", "session_updated"]

    # --- sessions ---------------------------------------------------------------------------------

    def test_what_is_absent_is_not_found(self) -> None:
        """DUR-3: missing is never another answer, and no text but a reference names a session."""
        absent, epoch = session_ref("nobody"), self.gateway()
        with refused("not_found"):
            self.storage.read(absent)
        with refused("not_found"):
            self.acquire(absent)
        with refused("not_found"):
            self._accept(absent, "m1")
        with refused("not_found"):
            self.storage.append(frame(absent, 1, [self.author.started(_TURN % 1, 1, [])]))
        with refused("not_found"):
            self.storage.subscribe(m.Subscribe(session=absent, from_seq=1), _nobody)
        with refused("not_found"):
            self.storage.outcome(m.AwaitInput(session=absent, message_id="m1"))
        for text in ("no reference", "../x/y", "k/../../etc"):
            with _some_refusal("invalid_request"):
                self.storage.read(text)
            with _some_refusal("invalid_request"):
                item_ = item("m1")
                self.storage.accept(m.Accept(session=text, gateway_epoch=epoch, item=item_))

    def test_of_two_creators_one_wins(self) -> None:
        """DUR-2, DUR-6: a creation again is the first one, another one is too late."""
        asked = self.author.creation(self.gateway(), "s1")
        assert self.storage.create(asked).fresh is True
        assert self.storage.create(asked).fresh is False
        with refused("session_exists"):
            self.storage.create(self.author.creation(self.gateway(), "s1"))
        with refused("session_exists"):
            self.storage.create(self.author.creation(self.gateway(), "S1"))
        other = self.author.creation(self.gateway(), "s1", title="another")
        same = asked.record.model_copy(update={"data": other.record.data})
        with refused("idempotency_conflict"):
            self.storage.create(asked.model_copy(update={"record": same}))
        assert [one["seq"] for one in self.records(asked.session)] == [1]

    def test_a_creation_names_its_own_session(self) -> None:
        """DUR-4: a first record of another session, or of another type, is refused."""
        asked = self.author.creation(self.gateway(), "s1")
        other = self.author.creation(self.gateway(), "s2")
        with refused("record_invalid", type="session_created", field="session_id"):
            self.storage.create(asked.model_copy(update={"session": other.session}))
        elsewhere = asked.model_copy(update={"session": session_ref("s1", "/elsewhere")})
        with refused("record_invalid", type="session_created", field="workspace"):
            self.storage.create(elsewhere)
        update = self.author.record("session_updated", {"updated_at": 1})
        with refused("record_invalid", type="session_updated", field="type"):
            self.storage.create(asked.model_copy(update={"record": update}))
        with refused("not_found"):
            self.storage.read(asked.session)

    # --- frames -----------------------------------------------------------------------------------

    def test_records_are_kept_byte_for_byte_and_in_order(self) -> None:
        """DUR-1, REC-8: what was sent is what is read, numbered without a gap."""
        session, epoch = self.live()
        turn_id = self.turn(session, epoch, 1, ["m1"])
        said = self.say(turn_id, 'quote " and \u2028 and \\n')
        answer = self.storage.append(frame(session, epoch, said))
        assert (answer.first_seq, answer.last_seq) == (5, 6)
        stored = self.records(session)
        assert [one["seq"] for one in stored] == [1, 2, 3, 4, 5, 6]
        assert [one["id"] for one in stored[4:]] == [one.id for one in said]
        assert [one["commit"] for one in stored[4:]] == [answer.commit] * 2
        assert {one["epoch"] for one in stored[1:]} == {epoch}
        lines = self.storage.read(session, 5).lines
        assert all(one.data in line for one, line in zip(said, lines, strict=True))

    def test_a_frame_is_there_whole_or_not_at_all(self) -> None:
        """DUR-1: a record that breaks a rule takes its whole frame with it, inputs too."""
        session, epoch = self.live()
        turn_id = self.turn(session, epoch, 1, ["m1"])
        before = self.everything(session)
        good = self.say(turn_id)
        bad = self.author.part(turn_id, "no_message", "text", {"text": "x"})
        with refused("record_invalid", type="part_created", field="message_id"):
            self.storage.append(frame(session, epoch, [*good, bad], [item("m2", "m2")]))
        with refused("turn_active", turn_id=turn_id):
            again = self.author.started(_TURN % 2, epoch, [])
            self.storage.append(frame(session, epoch, [*good, again]))
        with _some_refusal("record_invalid"):
            shapeless = self.author.record("part_created", {"part_id": 1}, turn_id)
            self.storage.append(frame(session, epoch, [*good, shapeless]))
        with refused("record_invalid", type="no_such_type", field="type"):
            unknown = self.author.record("no_such_type", {}, turn_id)
            self.storage.append(frame(session, epoch, [*good, unknown]))
        with refused("record_invalid", type="message_created", field="id"):
            self.storage.append(frame(session, epoch, [good[0], good[0]]))
        large = self.say(turn_id, "x" * RECORD_BYTES_MAX)
        with refused("payload_too_large", limit="RECORD_BYTES_MAX", maximum=RECORD_BYTES_MAX):
            self.storage.append(frame(session, epoch, [*good, *large]))
        assert self.everything(session) == before
        assert self.storage.append(frame(session, epoch, good)).first_seq == 5

    def test_a_frame_goes_where_it_says(self) -> None:
        """DUR-2: a wrong first_seq writes nothing and names the right one."""
        session, epoch = self.live()
        turn_id = self.turn(session, epoch, 1, ["m1"])
        before = self.everything(session)
        for wrong in (1, 4, 6, 1_000):
            with refused("seq_conflict", expected=5):
                self.storage.append(frame(session, epoch, self.say(turn_id), first_seq=wrong))
        assert self.everything(session) == before
        self.storage.append(frame(session, epoch, self.say(turn_id), first_seq=5))
        with refused("seq_conflict", expected=7):
            self.storage.append(frame(session, epoch, self.say(turn_id), first_seq=5))

    def test_a_frame_again_gets_the_first_answer(self) -> None:
        """DUR-6: the same words get the same answer, other words under the same key none."""
        session, epoch = self.live()
        turn_id = self.turn(session, epoch, 1, ["m1"])
        said = self.say(turn_id)
        asked = frame(session, epoch, said, first_seq=5)
        first = self.storage.append(asked)
        self.storage.append(frame(session, epoch, self.say(turn_id)))
        before = self.everything(session)
        assert self.storage.append(asked) == first
        other = said[0].model_copy(update={"data": said[0].data.replace(b"said", b"told")})
        with refused("idempotency_conflict"):
            self.storage.append(frame(session, epoch, [other, said[1]]))
        with refused("idempotency_conflict"):
            self.storage.append(frame(session, epoch, said[:1]))
        with refused("invalid_request", field="key", reason="format"):
            self.storage.append(asked.model_copy(update={"key": said[1].id}))
        assert self.everything(session) == before

    def test_turn_ids_are_used_once(self) -> None:
        """RUN-4, DUR-1: nothing is written to a turn that ended, or that never began."""
        session, epoch = self.live()
        turn_id = self.turn(session, epoch, 1, ["m1"])
        self.end(session, epoch, turn_id, ["m1"])
        before = self.everything(session)
        with refused("turn_terminal", turn_id=turn_id):
            self.storage.append(frame(session, epoch, self.say(turn_id)))
        with refused("turn_id_reused", turn_id=turn_id):
            self.storage.append(frame(session, epoch, [self.author.started(turn_id, epoch, [])]))
        with refused("turn_not_active", turn_id=_TURN % 2):
            self.storage.append(frame(session, epoch, self.say(_TURN % 2)))
        assert self.everything(session) == before

    # --- inboxes ----------------------------------------------------------------------------------

    def test_an_input_twice_is_one_input(self) -> None:
        """INB-6: by message id, at any time of its life; another content is refused."""
        session, epoch = self.live()
        put = frame(session, epoch, puts=[item("m1", "m1")])
        first = self.storage.append(put)
        assert first.n == [1]
        assert self.storage.append(put) == first
        states: list[str] = []
        turn_id = _TURN % 1

        def again() -> None:
            with refused("request_conflict"):
                self.storage.append(frame(session, epoch, puts=[item("m1", "other")]))
            asked = m.Lookup(session=session, message_id="m1", digest=digest_of("m1"))
            known = self.storage.lookup(asked).known
            assert known is not None
            states.append(known.item_state)
            with refused("request_conflict"):
                self.storage.lookup(asked.model_copy(update={"digest": digest_of("other")}))

        again()
        self.storage.append(frame(session, epoch, [self.author.started(turn_id, epoch, ["m1"])]))
        again()
        said = self.author.said(turn_id, "msg_m1", "m1", "user", "m1")
        self.storage.append(frame(session, epoch, said))
        self.end(session, epoch, turn_id, ["m1"])
        again()
        assert states == ["pending", "claimed", "acknowledged"]
        told = self.storage.append(put)
        assert told.known == m.KnownInput(item_state="acknowledged", turn_id=turn_id)
        fresh = m.Lookup(session=session, message_id="m2", digest=digest_of("m2"))
        assert self.storage.lookup(fresh).known is None

    def test_an_input_leaves_only_with_its_turns_end(self) -> None:
        """INB-5, INB-4, RUN-4: remove and acknowledgement go together, before the terminal."""
        session, epoch = self.live()
        turn_id = self.turn(session, epoch, 1, ["m1", "m2"])
        before = self.everything(session)
        acked = self.author.acknowledged({"m1": "m1"}, "completed", turn_id)
        done = self.author.completed(turn_id, ["m1", "m2"])
        with refused("record_invalid", type="remove", field="message_id"):
            self.storage.append(frame(session, epoch, removes=["m1"]))
        with refused("record_invalid", type="remove", field="message_id"):
            self.storage.append(frame(session, epoch, [acked, done]))
        with refused("record_invalid", type="remove", field="message_id"):
            self.storage.append(frame(session, epoch, [acked, done], removes=["m1", "m2"]))
        with refused("record_invalid", type="inbox_acknowledged", field="turn_id"):
            self.storage.append(frame(session, epoch, [acked], removes=["m1"]))
        with refused("record_invalid", type="inbox_acknowledged", field="items"):
            stranger = self.author.acknowledged({"m9": "m9"}, "completed", turn_id)
            self.storage.append(frame(session, epoch, [stranger, done], removes=["m9"]))
        with refused("record_invalid", type="inbox_acknowledged", field="reason"):
            whim = self.author.acknowledged({"m1": "m1"}, "whim", turn_id)
            self.storage.append(frame(session, epoch, [whim, done], removes=["m1"]))
        assert self.everything(session) == before
        self.storage.append(frame(session, epoch, [acked, done], removes=["m1"]))
        granted, _ = self._take_over(session, epoch)
        assert [one.item.message_id for one in granted.pending] == ["m2"]

    def test_a_failed_turn_leaves_its_inputs(self) -> None:
        """INB-5, RTY-1, RTY-5: pending and counted, or held, as the terminal says."""
        session, epoch = self.live()
        first = self.turn(session, epoch, 1, ["m1"])
        self.storage.append(frame(session, epoch, [self.author.aborted(first, ["m1"])]))
        started = self.author.started(_TURN % 2, epoch, ["m1"])
        aborted = self.author.aborted(_TURN % 2, ["m1"], "held")
        self.storage.append(frame(session, epoch, [started]))
        asked = m.AwaitInput(session=session, message_id="m1")
        assert self.storage.outcome(asked) is None
        self.storage.append(frame(session, epoch, [aborted]))
        outcome = self.storage.outcome(asked)
        assert outcome is not None
        assert (outcome.input_disposition, outcome.turn_id) == ("held", _TURN % 2)
        granted, _ = self._take_over(session, epoch)
        assert [(one.attempts, one.held) for one in granted.pending] == [(2, True)]

    def test_what_a_turn_claims_and_never_was_has_no_outcome(self) -> None:
        """RTY-5: only an input that is there can be held."""
        session, epoch = self.live()
        started = self.author.started(_TURN % 1, epoch, ["m9"])
        held = self.author.aborted(_TURN % 1, ["m9"], "held")
        self.storage.append(frame(session, epoch, [started, held]))
        with refused("not_found"):
            self.storage.outcome(m.AwaitInput(session=session, message_id="m9"))

    def test_outcomes_name_how_an_input_ended(self) -> None:
        """INB-9: acknowledged, discarded, or not yet; an input that never was is not found."""
        session, epoch = self.live()
        turn_id = self.turn(session, epoch, 1, ["m1"])
        self.storage.append(frame(session, epoch, puts=[item("m2", "m2")]))
        last = self.end(session, epoch, turn_id, ["m1"]).last_seq
        acked = self.author.acknowledged({"m2": "m2"}, "discarded")
        self.storage.append(frame(session, epoch, [acked], removes=["m2"]))
        found = self.storage.outcome(m.AwaitInput(session=session, message_id="m1"))
        assert found is not None
        assert (found.item_state, found.outcome, found.terminal_seq, found.turn_id) == (
            "acknowledged",
            "completed",
            last,
            turn_id,
        )
        found = self.storage.outcome(m.AwaitInput(session=session, message_id="m2"))
        assert found is not None
        assert (found.item_state, found.reason) == ("discarded", "discarded")
        with refused("not_found"):
            self.storage.outcome(m.AwaitInput(session=session, message_id="m3"))

    def test_a_full_inbox_refuses_and_says_by_what(self) -> None:
        """INB-7, INB-8: after the id check; nothing changes."""
        session, epoch = self.live()
        for start in range(0, INBOX_USER_ITEMS_MAX, 50):
            end = min(start + 50, INBOX_USER_ITEMS_MAX)
            puts = [item(f"m{number}", "x") for number in range(start, end)]
            self.storage.append(frame(session, epoch, puts=puts))
        full = {
            "limit": "INBOX_USER_ITEMS_MAX",
            "current": INBOX_USER_ITEMS_MAX,
            "maximum": INBOX_USER_ITEMS_MAX,
        }
        with refused("inbox_full", **full):
            self.storage.append(frame(session, epoch, puts=[item("one_more")]))
        with refused("request_conflict"):
            self.storage.append(frame(session, epoch, puts=[item("m0", "other")]))
        again = self.storage.append(frame(session, epoch, puts=[item("m0", "x")]))
        assert again.n == [1]
        self.storage.append(frame(session, epoch, puts=[item("b", origin="background")]))

    def test_message_ids_are_checked(self) -> None:
        """INB-6: ids that cannot be kept are refused, by both writers alike."""
        session, epoch = self.live()
        for name in (" m1", "a/b", "\u00e9"):
            bad = {"field": "message_id", "reason": "format"}
            with refused("invalid_request", **bad):
                self.storage.append(frame(session, epoch, puts=[item(name)]))
            with refused("invalid_request", **bad):
                self._accept(session, name)
        with refused("invalid_request", field="message_id", reason="duplicate"):
            self.storage.append(frame(session, epoch, puts=[item("m1"), item("m1")]))

    # --- accept -----------------------------------------------------------------------------------

    def test_a_passive_session_takes_input(self) -> None:
        """ACC-2, ACC-1, INB-6: durable, in order, once; the next owner gets it."""
        session = self.create()
        first = self._accept(session, "m1")
        assert first == m.Accepted(duplicate=False, item_state="pending", queued=1, runnable=True)
        again = self._accept(session, "m1")
        assert again == m.Accepted(duplicate=True, item_state="pending", queued=1, runnable=True)
        with refused("request_conflict"):
            self._accept(session, "m1", "other")
        self._accept(session, "m2")
        assert self.gateway("c" * 32) > 0
        granted, _ = self.acquire(session)
        assert [one.item for one in granted.pending] == [item("m1"), item("m2")]
        assert [one.n for one in granted.pending] == [1, 2]

    def test_a_live_owner_is_named_instead(self) -> None:
        """ACC-3: with a live lease nothing is written; a dead owner's lease counts as none."""
        session = self.create()
        granted, owner = self.acquire(session)
        before = self.everything(session)
        answer = self._accept(session, "m1")
        assert answer == m.LeaseHeld(owner=owner, epoch=granted.epoch)
        assert self.everything(session) == before
        self.processes.doubtful.add(owner.nonce)
        with _some_refusal("owner_unprovable"):
            self._accept(session, "m1")
        self.processes.doubtful.clear()
        self.processes.ended.add(owner.nonce)
        assert isinstance(self._accept(session, "m1"), m.Accepted)

    def test_waiting_sessions_are_named_to_a_gateway(self) -> None:
        """ACC-2: passive sessions with work, those with an open turn first."""
        idle = self.create("idle")
        queued = self.create("queued")
        self._accept(queued, "m1")
        cut, epoch = self.live("cut")
        self.turn(cut, epoch, 1, ["m1"])
        owned, _ = self.live("owned")
        self._end_owner(cut)
        waiting = self.storage.hello_gateway(m.GatewayHello(nonce="d" * 32)).waiting
        assert waiting == [cut, queued]
        assert idle not in waiting
        assert owned not in waiting

    def test_a_passive_sessions_input_is_discarded_with_a_record(self) -> None:
        """INB-9: while nobody owns the session, and not what a turn has taken."""
        session = self.create()
        self._accept(session, "m1")
        asked = m.DiscardInput(
            session=session, gateway_epoch=self.gateway(), message_id="m1", reason="cancelled"
        )
        assert self.storage.discard(asked) == m.CancelResult(status="cancelled")
        assert self.storage.discard(asked).status == "already_terminal"
        assert [one["type"] for one in self.records(session)][1:] == ["inbox_acknowledged"]
        absent = asked.model_copy(update={"message_id": "m9"})
        assert self.storage.discard(absent) == m.CancelResult(status="not_found")
        assert self._accept(session, "m1") == m.Accepted(
            duplicate=True, item_state="discarded", queued=0, runnable=False
        )
        epoch = self.acquire(session)[0].epoch
        with refused("session_in_use"):
            self.storage.discard(absent)
        self.turn(session, epoch, 1, ["m2"])
        self._end_owner(session)
        with refused("already_claimed"):
            self.storage.discard(asked.model_copy(update={"message_id": "m2"}))

    # --- leases -----------------------------------------------------------------------------------

    def test_of_any_number_of_claimants_one_wins(self) -> None:
        """LSE-2: the others are told; the winner may ask again."""
        session = self.create()
        granted, owner = self.acquire(session)
        assert granted.epoch == 1
        for _ in range(3):
            with refused("session_in_use", pid=owner.pid, epoch=1):
                self.acquire(session)
        assert self.storage.acquire(m.Acquire(session=session, owner=owner)) == granted

    def test_an_epoch_only_rises(self) -> None:
        """LSE-1, LSE-8: by release, by death; a stale owner's release changes nothing."""
        session = self.create()
        epochs: list[int] = []
        owners: list[m.ProcessIdentity] = []
        for number in range(4):
            granted, owner = self.acquire(session)
            epochs.append(granted.epoch)
            owners.append(owner)
            if number % 2:
                self.processes.ended.add(owner.nonce)
            else:
                for _ in range(2):  # a release again does nothing
                    self._release(session, granted.epoch, owner)
        assert epochs == [1, 2, 3, 4]
        with refused("stale_epoch"):
            self._release(session, 1, owners[0])
        with refused("stale_epoch"):
            self._release(session, 4, owners[0])

    def test_an_old_owner_writes_nothing(self) -> None:
        """LSE-5: every append carries the epoch in force."""
        session, epoch = self.live()
        turn_id = self.turn(session, epoch, 1, ["m1"])
        said = self.say(turn_id)
        granted, owner = self._take_over(session, epoch)
        before = self.everything(session)
        for wrong in (epoch, granted.epoch + 1):
            with refused("stale_epoch"):
                self.storage.append(frame(session, wrong, said))
            with refused("stale_epoch"):
                self.storage.append(frame(session, wrong, puts=[item("m2")]))
        assert self.everything(session) == before
        self.storage.append(frame(session, granted.epoch, said))
        self._release(session, granted.epoch, owner)
        with refused("stale_epoch"):
            self.storage.append(frame(session, granted.epoch, self.say(turn_id)))

    def test_a_doubtful_owner_keeps_its_lease(self) -> None:
        """LSE-4: what cannot be proven is held."""
        session = self.create()
        granted, owner = self.acquire(session)
        self.processes.doubtful.add(owner.nonce)
        with refused("owner_unprovable", pid=owner.pid, epoch=granted.epoch):
            self.acquire(session)

    def test_an_owner_of_an_earlier_plane_is_ended(self) -> None:
        """LSE-7: it is gone before the epoch is raised."""
        session = self.create()
        owner = self.processes.start("an earlier plane")
        self.storage.acquire(m.Acquire(session=session, owner=owner))
        granted, _ = self.acquire(session)
        assert granted.epoch == 2
        assert owner.nonce in self.processes.ended

    def test_a_new_owner_is_told_all_that_it_needs(self) -> None:
        """RUN-5: the open turn, open calls, what was applied, what waits."""
        session, epoch = self.live()
        turn_id = self.turn(session, epoch, 1, ["m1", "m2"])
        said = self.say(turn_id)
        name = str(cast("Mapping[str, object]", from_json(said[0].data))["message_id"])
        call: dict[str, object] = {
            "call_id": "c1",
            "name": "sleep",
            "input": {},
            "effect": "readonly",
        }
        calls = self.author.part(turn_id, name, "tool_call", call)
        cancel = {
            "turn_id": turn_id,
            "principal_id": PRINCIPAL,
            "keep_input": True,
            "requested_at": 1,
        }
        asked = self.author.record("turn_cancel_requested", cancel, turn_id)
        self.storage.append(frame(session, epoch, [*said, calls, asked], [item("m3")]))
        granted, _ = self._take_over(session, epoch)
        turn = granted.open_turn
        assert turn is not None
        assert (turn.turn_id, turn.input_ids, turn.applied_ids) == (
            turn_id,
            ["m1", "m2"],
            ["m1", "m2"],
        )
        assert (turn.cancel_requested, turn.keep_input, turn.wrote_output) == (True, True, True)
        assert [(one.call_id, one.effect) for one in granted.open_calls] == [("c1", "readonly")]
        assert [one.item.message_id for one in granted.pending] == ["m1", "m2", "m3"]
        assert (granted.last_seq, granted.turns, granted.last_turn_id) == (10, 1, turn_id)

    # --- reading and following --------------------------------------------------------------------

    def test_pages_join_without_a_seam(self) -> None:
        """DUR-3: every record once, whatever the size of a page."""
        session, epoch = self.live()
        turn_id = self.turn(session, epoch, 1, ["m1"])
        for _ in range(8):
            self.storage.append(frame(session, epoch, self.say(turn_id)))
        whole = self.storage.read(session)
        assert (whole.first_seq, whole.next_seq, whole.last) == (1, 21, True)
        for size in (1, 3, 20, 21, PAGE_LINES_MAX):
            lines: list[bytes] = []
            at, last = 1, False
            while not last:
                page = self.storage.read(session, at, size)
                assert (page.first_seq, len(page.lines) <= size) == (at, True)
                lines += page.lines
                at, last = page.next_seq, page.last
            assert tuple(lines) == whole.lines
        assert self.storage.read(session, 30) == (30, (), (), 30, True)
        for bad in ((0, 1), (-1, 1)):
            with refused("invalid_request", field="from_seq", reason="out_of_range"):
                self.storage.read(session, *bad)
        for bad in ((1, 0), (1, PAGE_LINES_MAX + 1)):
            with refused("invalid_request", field="lines_max", reason="out_of_range"):
                self.storage.read(session, *bad)

    def test_followers_miss_nothing_and_see_nothing_twice(self) -> None:
        """WCH-1: stored records, then live ones, wherever they begin."""
        session, epoch = self.live()
        other, other_epoch = self.live("s2")
        turn_id = self.turn(session, epoch, 1, ["m1"])
        seen: dict[int, list[bytes]] = {}
        for first in (1, 3, 5, 8):
            self._follow(session, first, seen.setdefault(first, []))
        self.storage.append(frame(session, epoch, self.say(turn_id)))
        self.turn(other, other_epoch, 1, ["m1"])
        late: list[bytes] = []
        stop = self._follow(session, 2, late)
        said = frame(session, epoch, self.say(turn_id))
        self.storage.append(said)
        self.storage.append(said)
        stop()
        stop()
        self.storage.append(frame(session, epoch, self.say(turn_id)))
        lines = self.storage.read(session).lines
        assert len(lines) == 10
        for first, found in seen.items():
            assert tuple(found) == lines[first - 1 :]
        assert tuple(late) == lines[1:8]

    def test_a_closed_storage_does_nothing(self) -> None:
        """DUR-1: after its end there is one answer."""
        session = self.create()
        self.storage.close()
        for ask in (
            lambda: self.storage.read(session),
            lambda: self.gateway("e" * 32),
            lambda: self.acquire(session),
        ):
            with _some_refusal("storage_unavailable"):
                ask()

    # --- durable ----------------------------------------------------------------------------------

    @needs("durable")
    def test_what_was_answered_is_there_after_a_crash(self) -> None:
        """DUR-1, DUR-6, INB-6, LSE-9: records, inputs, keys, leases, epochs."""
        self._comes_back(self.crash)

    @needs("durable")
    def test_what_was_answered_is_there_after_a_close(self) -> None:
        """DUR-1, DUR-6, INB-6, LSE-9: as after a crash."""
        self._comes_back(self.reopen)

    def _comes_back(self, again: Callable[[Storage], Storage]) -> None:
        session, epoch = self.live()
        gateway = self.gateway()
        passive = self.create("passive")
        for name in ("m1", "m2"):
            self._accept(passive, name)
        discard = m.DiscardInput(
            session=passive, gateway_epoch=gateway, message_id="m2", reason="cancelled"
        )
        self.storage.discard(discard)
        first = self.turn(session, epoch, 1, ["m1"])
        self.end(session, epoch, first, ["m1"])
        turn_id = self.turn(session, epoch, 2, ["m2"])
        asked = frame(session, epoch, self.say(turn_id))
        answer = self.storage.append(asked)
        before = [(self.everything(one), self.records(one)) for one in (session, passive)]
        self.storage = again(self.storage)
        after = [(self.everything(one), self.records(one)) for one in (session, passive)]
        assert after == before
        assert self.gateway() == gateway
        assert self.storage.append(asked) == answer
        changed = asked.records[0].model_copy(update={"turn_id": None})
        with refused("idempotency_conflict"):
            self.storage.append(frame(session, epoch, [changed, *asked.records[1:]]))
        assert self.storage.discard(discard).status == "already_terminal"
        told = self.storage.append(frame(session, epoch, puts=[item("m1", "m1")]))
        assert told.known == m.KnownInput(item_state="acknowledged", turn_id=first)
        self.storage.append(frame(session, epoch, self.say(turn_id), first_seq=12))
        granted, _ = self._take_over(session, epoch)
        assert granted.epoch == epoch + 1
        assert granted.open_turn is not None
        commits = [cast("int", one["commit"]) for one in self.records(session)]
        assert commits == sorted(commits)

    # --- damage -----------------------------------------------------------------------------------

    @needs("damage")
    def test_reads_go_on_around_damage_and_writes_do_not(self) -> None:
        """DUR-3, REC-3: a visible gap; damaged is not missing; other sessions notice nothing."""
        session, epoch = self.live()
        other, other_epoch = self.live("s2")
        turn_id = self.turn(session, epoch, 1, ["m1"])
        self.storage.append(frame(session, epoch, self.say(turn_id)))
        whole = self.storage.read(session).lines
        self.storage = self.damage(self.storage, session, 3)
        page = self.storage.read(session)
        assert page.lines == whole[:2] + whole[3:]
        assert [(gap.after_seq, gap.damage) for gap in page.gaps] == [(2, "bad_line")]
        with _some_refusal("session_damaged"):
            self.storage.append(frame(session, epoch, self.say(turn_id)))
        self._end_owner(session)
        with _some_refusal("session_damaged"):
            self.acquire(session)
        with _some_refusal("session_damaged"):
            self._accept(session, "m2")
        with _some_refusal("session_damaged"):
            self.storage.subscribe(m.Subscribe(session=session, from_seq=1), _nobody)
        assert self.storage.read(session) == page
        self.turn(other, other_epoch, 1, ["m1"])

    # --- optional: artifacts ----------------------------------------------------------------------

    @needs("artifacts")
    def test_artifacts_are_kept_by_their_content(self) -> None:
        """ART-7: once, under its hash, for its own session alone."""
        storage = cast("ArtifactStorage", self.storage)
        session, other, epoch = self.create(), self.create("s2"), self.gateway()
        name = storage.store_artifact(session, epoch, b"long text")
        assert re.fullmatch("[0-9a-f]{64}", name)
        assert storage.store_artifact(session, epoch, b"long text") == name
        assert storage.fetch_artifact(session, name) == b"long text"
        for text, wanted in ((other, name), (session, "0" * 64), (session, "../../format.json")):
            with refused("not_found"):
                storage.fetch_artifact(text, wanted)
        with refused("stale_epoch"):
            storage.store_artifact(session, epoch + 1, b"late")

    # --- beneath ----------------------------------------------------------------------------------

    def _accept(self, session: str, message_id: str, words: str = "hello") -> object:
        asked = m.Accept(
            session=session, gateway_epoch=self.gateway(), item=item(message_id, words)
        )
        return self.storage.accept(asked)

    def _release(self, session: str, epoch: int, owner: m.ProcessIdentity) -> None:
        self.storage.release(m.Release(session=session, epoch=epoch, nonce=owner.nonce))

    def _end_owner(self, session: str) -> None:
        """End whoever owns a session."""
        answer = self._accept_nothing(session)
        if answer is not None:
            self.processes.ended.add(answer.owner.nonce)

    def _accept_nothing(self, session: str) -> m.LeaseHeld | None:
        """Ask who owns a session; none if it is refused."""
        try:
            answer = self._accept(session, "never")
        except CallboardError:
            return None
        assert isinstance(answer, m.LeaseHeld)
        return answer

    def _take_over(self, session: str, epoch: int) -> tuple[m.LeaseGranted, m.ProcessIdentity]:
        """End the owner of an epoch, and own the session."""
        answer = self._accept_nothing(session)
        assert answer is not None
        assert answer.epoch == epoch
        self.processes.ended.add(answer.owner.nonce)
        return self.acquire(session)

    def _follow(self, session: str, first: int, found: list[bytes]) -> Callable[[], None]:
        expected = first

        def tell(told: m.Records | CallboardError) -> None:
            nonlocal expected
            assert isinstance(told, m.Records), told
            assert told.session == session
            assert told.first_seq == expected
            assert len(told.lines) == told.last_seq - told.first_seq + 1
            expected = told.last_seq + 1
            found.extend(told.lines)

        asked = m.Subscribe(session=session, from_seq=first)
        return self.storage.subscribe(asked, tell).close


def _nobody(told: m.Records | CallboardError) -> None:
    raise AssertionError(told)


@contextmanager
def _some_refusal(code: str) -> Generator[None]:
    """Expect a refusal whose details are the adapter's own."""
    found = ""
    try:
        yield
    except CallboardError as error:
        found = error.code
    assert found == code, found


def _rules() -> frozenset[str]:
    """Collect what the tests say they hold."""
    tests = (getattr(StorageConformance, name) for name in dir(StorageConformance))
    heads = ((test.__doc__ or "").partition(":")[0] for test in tests if callable(test))
    return frozenset(
        rule for head in heads for rule in head.split(", ") if re.fullmatch(r"[A-Z]{3}-\d+", rule)
    )


StorageConformance.RULES = _rules()
