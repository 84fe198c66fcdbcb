"""Three adapters are asked the same, in any order, and give the same answers (DUR-1, DUR-6, …).

The one in memory never crashes: what it knows is what the others must still know.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pydantic_core import from_json

from callboard import messages as m
from callboard.errors import CallboardError
from callboard.port import Page, Storage
from callboard.testing.conformance import PLANE
from callboard.testing.memory import MemoryStorage, Processes
from callboard.testing.requests import Author, digest_of, frame, item, session_ref
from tests.conformance.test_storage import ProcessDisk, local
from tests.storage.memory_disk import Draw, KeepAll, LoseAll, MemoryDisk
from tests.storage.world import FakeClock

SESSIONS = ("s1", "s2", "S1")
NAMES = ("m1", "m2", "m3", "m4")
MADE_UP = frozenset({"session_updated", "inbox_acknowledged"})
"""Records that storage writes by itself, under an id of its own."""

sessions = st.sampled_from(["s1"] * 6 + ["s2", "s2", "S1"])
names = st.sampled_from(NAMES)
subsets = st.lists(names, unique=True, max_size=3)
words = st.sampled_from(["hello", "other"])
ends = st.sampled_from(["completed", "pending", "held", "aborted"])


class Follower:
    """Somebody who follows one session at one adapter, and comes back after a crash."""

    def __init__(self, session: str, first: int) -> None:
        self.session, self.first, self.next = session, first, first
        self.lines: list[bytes] = []

    def tell(self, told: m.Records | CallboardError) -> None:
        assert isinstance(told, m.Records), told
        assert told.first_seq == self.next
        assert told.last_seq == told.first_seq + len(told.lines) - 1
        self.next = told.last_seq + 1
        self.lines += told.lines

    def follow(self, storage: Storage) -> object:
        asked = m.Subscribe(session=self.session, from_seq=self.next)
        storage.subscribe(asked, self.tell)
        return "follows"


class SideBySide(RuleBasedStateMachine):
    """What is asked is made once; what is answered is compared."""

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.author = Author()
        self.processes = Processes()
        self.clock = FakeClock()
        self.folder = tempfile.mkdtemp(prefix="side-by-side-")
        self.real = ProcessDisk()
        self.real.mkdir(f"{self.folder}/home")
        self.memory_disk = MemoryDisk()
        self.gateway, self.nonce, self.plane = 0, 0, 0
        self.owners: dict[str, list[m.LeaseGranted]] = {}
        self.identities: dict[tuple[str, int], m.ProcessIdentity] = {}
        self.turns: dict[str, tuple[str, list[str]]] = {}
        self.made = 0
        self.sent: list[m.Append] = []
        self.followers: list[tuple[Follower, Follower, Follower]] = []
        self.memory = MemoryStorage(self.processes, self.clock.now_us, PLANE)
        self.open()
        self.hello(True)
        for session in ("s1", "s2"):
            self.create(session, None, True)
            self.acquire(session, PLANE)

    def open(self) -> None:
        self.locals = (
            local(self.real, f"{self.folder}/home", self.processes, self.clock),
            local(self.memory_disk, "/home", self.processes, self.clock),
        )

    @property
    def all(self) -> tuple[Storage, ...]:
        return (self.memory, *self.locals)

    def ask(self, ask: Callable[[Storage], object]) -> object:
        """Ask all of them, compare the answers, and give the first one's."""
        answers = [_answer(ask, storage) for storage in self.all]
        plain = [_plain(answer) for answer in answers]
        assert plain[0] == plain[1], ("real disk", plain[0], plain[1])
        assert plain[0] == plain[2], ("simulated disk", plain[0], plain[2])
        return answers[0]

    # --- epochs and sessions --------------------------------------------------------------------

    @rule(new=st.booleans())
    def hello(self, new: bool) -> None:
        self.nonce += new
        answer = self.ask(lambda s: s.hello_gateway(m.GatewayHello(nonce=f"{self.nonce:032x}")))
        self.gateway = cast("m.GatewayEpoch", answer).epoch

    @rule(session=sessions, title=st.sampled_from([None, "t"]), again=st.booleans())
    def create(self, session: str, title: str | None, again: bool) -> None:
        author = Author(10_000 + SESSIONS.index(session)) if again else self.author
        asked = author.creation(self.gateway, session, title=title)
        self.ask(lambda s: s.create(asked))

    @rule(session=sessions, how=st.sampled_from(["stale", "on", "off", "off", "off"]))
    def quarantine(self, session: str, how: str) -> None:
        text, stale = session_ref(session), how == "stale"
        plane = self.ask(lambda s: s.hello_plane(m.PlaneHello(plane_id=PLANE)))
        epoch = cast("m.PlaneEpoch", plane).epoch + stale
        free = m.Unquarantine(session=text, gateway_epoch=self.gateway + stale)
        if how != "on":
            self.ask(lambda s: s.unquarantine(free))
        if how != "off":
            asked = m.Quarantine(session=text, plane_epoch=epoch, reason="crash_loop")
            self.ask(lambda s: s.quarantine(asked))

    # --- leases ---------------------------------------------------------------------------------

    @rule(session=sessions, plane=st.sampled_from([PLANE, "earlier"]))
    def acquire(self, session: str, plane: str) -> None:
        text, owner = session_ref(session), self.processes.start(plane)
        # An owner of an earlier plane is ended by whoever judges it first; the others find it dead.
        answer = self.ask(lambda s: s.acquire(m.Acquire(session=text, owner=owner)))
        if isinstance(answer, m.LeaseGranted):
            self.owners.setdefault(text, []).append(answer)
            self.identities[text, answer.epoch] = owner

    @precondition(lambda self: self.identities)
    @rule(data=st.data(), how=st.sampled_from(["release", "again", "end", "doubt"]))
    def owner(self, data: st.DataObject, how: str) -> None:
        text, epoch = data.draw(st.sampled_from(sorted(self.identities)))
        owner = self.identities[text, epoch]
        if how == "release":
            self.ask(lambda s: s.release(m.Release(session=text, epoch=epoch, nonce=owner.nonce)))
        elif how == "again":
            self.ask(lambda s: s.acquire(m.Acquire(session=text, owner=owner)))
        elif how == "end":
            self.processes.ended.add(owner.nonce)
        else:
            self.processes.doubtful ^= {owner.nonce}

    # --- inputs ---------------------------------------------------------------------------------

    @rule(session=sessions, name=names, text=words, wake=st.booleans(), stale=st.booleans())
    def accept(self, session: str, name: str, text: str, wake: bool, stale: bool) -> None:
        asked = m.Accept(
            session=session_ref(session),
            gateway_epoch=self.gateway + (stale and name == "m4"),
            item=item(name, text, wake=wake),
        )
        self.ask(lambda s: s.accept(asked))

    @rule(session=sessions, name=names)
    def discard(self, session: str, name: str) -> None:
        asked = m.DiscardInput(
            session=session_ref(session),
            gateway_epoch=self.gateway,
            message_id=name,
            reason="discarded",
        )
        self.ask(lambda s: s.discard(asked))

    @rule(session=sessions, name=names, text=words)
    def look(self, session: str, name: str, text: str) -> None:
        ref = session_ref(session)
        asked = m.Lookup(session=ref, message_id=name, digest=digest_of(text))
        self.ask(lambda s: s.lookup(asked))
        self.ask(lambda s: s.outcome(m.AwaitInput(session=ref, message_id=name)))

    # --- frames ---------------------------------------------------------------------------------

    def _epoch(self, text: str) -> int:
        granted = self.owners.get(text)
        return granted[-1].epoch if granted else 1

    def append(self, asked: m.Append) -> object:
        self.sent = [*self.sent[-20:], asked]
        return self.ask(lambda s: s.append(asked))

    @rule(session=sessions, puts=subsets, text=words, off=st.sampled_from([0, 0, 0, -1, 1]))
    def put(self, session: str, puts: list[str], text: str, off: int) -> None:
        ref = session_ref(session)
        epoch = max(1, self._epoch(ref) + off)
        self.append(frame(ref, epoch, puts=[item(name, text) for name in puts]))

    @rule(session=sessions, end=st.sampled_from(["completed", "aborted", "pending", "held"]))
    def whole_turn(self, session: str, end: str) -> None:
        """Do all of a turn as a session does, with an input of its own; what is open goes on."""
        ref = session_ref(session)
        epoch, name = self._epoch(ref), f"t{self.made}"
        if ref not in self.turns:
            self.start_turn(session, [], False, False)
        turn_id, inputs = self.turns.pop(ref, ("turn_none", []))
        self.append(frame(ref, epoch, [self.author.aborted(turn_id, inputs)]))
        self.made += 1
        turn_id = f"turn_{self.made:026d}"
        records = [self.author.started(turn_id, epoch, [name])]
        records += self.author.said(turn_id, f"in_{name}", "x", "user", name)
        self.append(frame(ref, epoch, records, [item(name)]))
        if end in ("completed", "aborted"):
            gone, records = [name], [self.author.acknowledged({name: "hello"}, end, turn_id)]
        else:
            gone, records = [], []
        if end == "completed":
            records.append(self.author.completed(turn_id, [name]))
        else:
            disposition = "held" if end == "held" else "pending"
            records.append(self.author.aborted(turn_id, [name], disposition))
        self.append(frame(ref, epoch, records, removes=gone))
        self.accept(session, name, "hello", True, False)
        self.look(session, name, "hello")

    @rule(session=sessions, inputs=subsets, apply=st.booleans(), put=st.booleans())
    def start_turn(self, session: str, inputs: list[str], apply: bool, put: bool) -> None:
        ref = session_ref(session)
        self.made += 1
        turn_id, epoch = f"turn_{self.made:026d}", self._epoch(ref)
        records = [self.author.started(turn_id, epoch, inputs)]
        if apply:
            for name in inputs:
                records += self.author.said(turn_id, f"in_{self.made}_{name}", "x", "user", name)
        puts = [item(name) for name in inputs] if put else []
        if isinstance(self.append(frame(ref, epoch, records, puts)), m.Appended):
            self.turns[ref] = turn_id, inputs

    @rule(session=sessions, seq=st.sampled_from([None, None, 1, 5]), tool=st.booleans())
    def say(self, session: str, seq: int | None, tool: bool) -> None:
        ref = session_ref(session)
        turn_id, _ = self.turns.get(ref, ("turn_none", []))
        self.made += 1
        records = self.author.said(turn_id, f"out_{self.made}", "x")
        if tool:
            call: dict[str, object] = {"call_id": f"c{self.made % 3}", "name": "t", "input": {}}
            records.append(self.author.part(turn_id, f"out_{self.made}", "tool_call", call))
        self.append(frame(ref, self._epoch(ref), records, first_seq=seq))

    @rule(session=sessions, call=st.integers(0, 2), error=st.sampled_from([None, "bad"]))
    def result(self, session: str, call: int, error: str | None) -> None:
        ref = session_ref(session)
        turn_id, _ = self.turns.get(ref, ("turn_none", []))
        told = {"call_id": f"c{call}", "name": "t", "error": error}
        record = self.author.part(turn_id, f"out_{self.made}", "tool_result", told)
        self.append(frame(ref, self._epoch(ref), [record]))

    @rule(session=sessions, how=ends, left=subsets, all_of_it=st.booleans(), removes=st.booleans())
    def end_turn(
        self, session: str, how: str, left: list[str], all_of_it: bool, removes: bool
    ) -> None:
        ref = session_ref(session)
        turn_id, inputs = self.turns.get(ref, ("turn_none", []))
        gone = inputs if all_of_it else left
        records: list[m.NewRecord] = []
        if how == "completed":
            end = self.author.completed(turn_id, inputs)
        else:
            end = self.author.aborted(turn_id, inputs, "held" if how == "held" else "pending")
        if how in ("completed", "aborted") and gone:
            known = dict.fromkeys(gone, "hello")
            records = [self.author.acknowledged(known, how, turn_id)]
        asked = frame(
            ref, self._epoch(ref), [*records, end], removes=gone if records and removes else []
        )
        self.append(asked)

    @rule(session=sessions, gone=subsets, also=subsets)
    def discard_live(self, session: str, gone: list[str], also: list[str]) -> None:
        ref = session_ref(session)
        records = []
        if gone:
            records = [self.author.acknowledged(dict.fromkeys(gone, "hello"), "discarded")]
        self.append(frame(ref, self._epoch(ref), records, removes=[*gone, *also]))

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), change=st.booleans())
    def again(self, data: st.DataObject, change: bool) -> None:
        asked = data.draw(st.sampled_from(self.sent))
        if change and asked.records:
            update: dict[str, object] = {"records": [*asked.records[:-1]] or asked.records * 2}
            asked = asked.model_copy(update=update)
        self.ask(lambda s: s.append(asked))

    # --- reading --------------------------------------------------------------------------------

    @rule(session=sessions, first=st.integers(0, 12), size=st.sampled_from([1, 3, 1_000]))
    def read(self, session: str, first: int, size: int) -> None:
        self.ask(lambda s: s.read(session_ref(session), first, size))

    @rule(session=sessions, first=st.integers(1, 12))
    def subscribe(self, session: str, first: int) -> None:
        found = tuple(Follower(session_ref(session), first) for _ in self.all)
        them = dict(zip(map(id, self.all), found, strict=True))
        if self.ask(lambda s: them[id(s)].follow(s)) == "follows":
            self.followers.append(cast("tuple[Follower, Follower, Follower]", found))

    # --- time and trouble -----------------------------------------------------------------------

    @rule(ms=st.integers(1, 100_000))
    def wait(self, ms: int) -> None:
        self.clock.pass_ms(ms)

    @rule()
    def checkpoint(self) -> None:
        for storage in self.locals:
            assert storage.engine.checkpoints.now()

    @rule(how=st.sampled_from(["close", "lose", "keep", "draw"]))
    def come_back(self, how: str) -> None:
        if how == "close":
            for storage in self.locals:
                storage.close()
        else:
            kinds = {"lose": LoseAll(), "keep": KeepAll(), "draw": Draw(self.rng)}
            self.memory_disk = self.memory_disk.crash(kinds[how])
            self.real = self.real.end()
        self.open()
        for followers in self.followers:
            for storage, follower in zip(self.locals, followers[1:], strict=True):
                follower.follow(storage)

    @invariant()
    def all_follow_alike(self) -> None:
        for one, *others in self.followers:
            for other in others:
                assert list(map(_line, other.lines)) == list(map(_line, one.lines))

    @invariant()
    def no_follower_missed_anything(self) -> None:
        for followers in self.followers:
            for storage, follower in zip(self.all, followers, strict=True):
                lines = storage.read(follower.session, follower.first).lines
                assert list(lines) == follower.lines

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            for storage in self.locals:
                storage.close()
            self.real.end()
            shutil.rmtree(self.folder)


def _answer(ask: Callable[[Storage], object], storage: Storage) -> object:
    try:
        return ask(storage)
    except CallboardError as error:
        return error.to_wire()


def _plain(answer: object) -> object:
    """Leave out what is each adapter's own: commits, and sizes that count a commit's digits."""
    if isinstance(answer, m.GatewayEpoch):
        return answer.epoch, sorted(answer.waiting)
    if isinstance(answer, m.Body):
        value = answer.model_dump(exclude={"commit", "sizes"})
        for one in value.get("pending", ()):
            del one["size_bytes"]
        return answer.kind, value
    if isinstance(answer, Page):
        return answer._replace(lines=()), [_line(line) for line in answer.lines]
    return answer


def _line(line: bytes) -> dict[str, object]:
    value = cast("dict[str, object]", from_json(line))
    for name in ("commit", "chain"):
        del value[name]
    if value["type"] in MADE_UP:
        del value["id"]
    return value


@pytest.mark.rule("ACC-2", "ACC-3", "DUR-1", "DUR-2", "DUR-6", "INB-5", "INB-6", "INB-9")
@pytest.mark.rule("LSE-2", "LSE-5", "LSE-8", "WCH-1")
def test_three_adapters_give_the_same_answers() -> None:
    chosen = settings(
        max_examples=100,
        stateful_step_count=40,
        deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),  # over files a shrink takes minutes
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
    run_state_machine_as_test(SideBySide, settings=chosen)
