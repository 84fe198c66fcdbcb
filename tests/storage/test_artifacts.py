"""Prompt artifacts as storage writes them, on a disk that loses what was not synced."""

from __future__ import annotations

import errno
import hashlib
import itertools
import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from callboard import messages as m
from callboard.artifacts import Cut, cut, spell_ref
from callboard.errors import (
    ArtifactInvalid,
    ArtifactQuota,
    ArtifactStoreUnsafe,
    CallboardError,
    NotFound,
    Overloaded,
    RequestConflict,
    StaleEpoch,
    StorageFull,
)
from callboard.limits import (
    ARTIFACT_BYTES_MAX,
    ARTIFACT_SESSION_BYTES_MAX,
    ARTIFACT_STORES_BYTES_MAX,
    ARTIFACT_UNNAMED_MS,
    ARTIFACTS_PER_SESSION_MAX,
)
from callboard.records import item_digest
from callboard.storage import artifacts as artifacts_module
from callboard.storage.beside import InlineJobs, J
from callboard.storage.disk import Poisoned
from tests.storage.memory_disk import DIRECTORY, Crash, Draw, Inode, KeepAll, LoseAll, MemoryDisk
from tests.storage.world import (
    World,
    appending,
    ending,
    item,
    message,
    new,
    ref,
    started,
)

SIZE = 40_000


class PowerCut(BaseException):
    """The machine stops here."""


def words(number: int, size: int = SIZE) -> str:
    return f"{number:08d}" * (size // 8)


def long_item(message_id: str, text: str, **more: object) -> tuple[m.InboxItem, Cut]:
    """Make the item of a long message as the gateway does."""
    made = cut([{"type": "text", "text": text}])
    content = [m.Text.model_validate(part) for part in made.parts]
    digest = item_digest(made.parts, {})
    return item(message_id, "", content=content, digest=digest, **more), made


def storing(
    world: World, text: str, one: m.InboxItem, made: Cut, **more: object
) -> m.StoreArtifact:
    assert made.ref is not None
    fields: dict[str, object] = {
        "session": text,
        "gateway_epoch": world.gateway,
        "message_id": one.message_id,
        "digest": one.digest,
        "artifact": spell_ref(made.ref),
        "data": made.data,
        **more,
    }
    return m.StoreArtifact.model_validate(fields)


def store(world: World, body: m.StoreArtifact) -> m.Body | CallboardError:
    """Ask for one artifact; the answer is there at once, since jobs run inline."""
    before = len(world.replies)
    world.engine.store_artifact("store", body)
    (reply,) = world.replies[before:]
    return reply.body


def send(world: World, text: str, message_id: str, said: str) -> m.Body | CallboardError:
    """Do as the gateway: the file first, then the input."""
    one, made = long_item(message_id, said)
    stored = store(world, storing(world, text, one, made))
    if not isinstance(stored, m.Ok):
        return stored
    (answer,) = world.batch([m.Accept(session=text, gateway_epoch=world.gateway, item=one)])
    return answer


def folder(text: str) -> str:
    return f"/home/sessions/{text}/artifacts"


def files(disk: MemoryDisk, text: str) -> list[str]:
    return disk.listdir(folder(text)) if folder(text) in disk.names else []


def name_of(said: str) -> str:
    return hashlib.sha256(said.encode()).hexdigest()


# --- the order ------------------------------------------------------------------------------------


@pytest.mark.rule("ART-7", "FLT-16")
def test_a_file_is_written_aside_synced_linked_and_its_name_synced_before_the_answer() -> None:
    world = World()
    text = world.create()
    before = len(world.disk.log)
    assert isinstance(send(world, text, "m1", words(1)), m.Accepted)
    name = name_of(words(1))
    log = world.disk.log[before:]
    steps = [
        call if path.endswith(".tmp") or path.endswith(name) else f"{call} {path}"
        for call, path in log
    ]
    store_steps = steps[: steps.index("reply store") + 1]
    assert store_steps == [
        f"mkdir {folder(text)}",
        *("create", "write", "sync", "link", "unlink"),
        f"sync_dir {folder(text)}",
        f"sync_dir /home/sessions/{text}",
        f"sync_dir /home/sessions/{text.partition('/')[0]}",
        "sync_dir /home/sessions",
        "sync_dir /home",
        "reply store",
    ]
    accept_steps = [call for call, path in log if path.endswith(".log") or call == "reply"]
    assert accept_steps == ["reply", "write", "datasync", "reply"]
    assert world.disk.content(f"{folder(text)}/{name}").decode() == words(1)


@pytest.mark.rule("ART-2", "ART-7")
@pytest.mark.parametrize("how", [LoseAll(), KeepAll(), Draw(random.Random(7))])
def test_after_a_cut_at_any_call_no_frame_names_a_file_that_is_not_whole(how: Crash) -> None:
    """What a receipt was given for is there; what is not named is swept; nothing is half."""
    for calls in itertools.count():
        world = World()
        text = world.create()
        world.engine.checkpoints.now()
        left = calls

        def fault(name: str, path: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise PowerCut

        answer: m.Body | CallboardError | None = None
        world.disk.fault = fault
        with suppress(PowerCut):
            answer = send(world, text, "m1", words(1))
        world.disk.fault = None
        world.crash(how)
        state = world.engine.sessions.get(text)
        assert state is not None
        name = name_of(words(1))
        if "m1" in state.inbox.items or isinstance(answer, m.Accepted):
            assert "m1" in state.inbox.items
            assert world.disk.content(f"{folder(text)}/{name}").decode() == words(1)
        elif name in files(world.disk, text):
            assert world.disk.content(f"{folder(text)}/{name}").decode() == words(1)
        named = "m1" in state.inbox.items
        world.acquire(text)
        assert files(world.disk, text) == ([name] if named else [])
        if answer is not None:
            return
    raise AssertionError


@pytest.mark.rule("ART-2")
def test_a_frame_that_names_a_file_which_is_not_there_is_refused_in_both_writers() -> None:
    world = World()
    text = world.create()
    one, made = long_item("m1", words(1))
    assert made.ref is not None
    accept = m.Accept(session=text, gateway_epoch=world.gateway, item=one)
    (refusal,) = world.batch([accept])
    assert isinstance(refusal, ArtifactInvalid)
    assert refusal.carried == {"artifact_id": made.ref.artifact_id, "retryable": True}
    epoch = world.acquire(text).epoch
    (again,) = world.batch([appending(text, epoch, puts=[one])])
    assert isinstance(again, ArtifactInvalid)
    assert isinstance(store(world, storing(world, text, one, made)), m.Ok)
    assert isinstance(world.call(appending(text, epoch, puts=[one])), m.Appended)


@pytest.mark.rule("ART-5")
def test_a_malformed_reference_is_never_taken_for_a_complete_text() -> None:
    world = World()
    text = world.create()
    one, made = long_item("m1", words(1))
    assert made.ref is not None
    good = spell_ref(made.ref)
    for bad in ({**good, "version": 2}, {**good, "size_bytes": 10}, {}):
        part = m.Text(type="text", text="an excerpt", prompt_artifact=bad)
        wrong = one.model_copy(update={"content": [part]})
        assert isinstance(
            store(world, storing(world, text, one, made, artifact=bad)), ArtifactInvalid
        )
        accept = m.Accept(session=text, gateway_epoch=world.gateway, item=wrong)
        (refusal,) = world.batch([accept])
        assert isinstance(refusal, ArtifactInvalid)
    assert files(world.disk, text) == []
    epoch = world.acquire(text).epoch
    world.append(text, epoch, [started("turn_1", epoch, [], world)])
    data = {
        "part_id": "p1",
        "message_id": "msg_1",
        "part_type": "text",
        "payload": {"text": "an excerpt", "prompt_artifact": {**good, "version": 2}},
        "created_at": 1,
    }
    records = [
        message("turn_1", "msg_1", "user", world),
        new("part_created", data, world.fresh(), "turn_1"),
    ]
    (refusal,) = world.batch([appending(text, epoch, records)])
    assert isinstance(refusal, ArtifactInvalid)


# --- who may, and what is known -------------------------------------------------------------------


@pytest.mark.rule("LSE-5", "R33")
def test_a_store_asks_for_what_the_input_asks_for_before_anything_is_written() -> None:
    world = World()
    text = world.create()
    one, made = long_item("m1", words(1))
    cases: list[tuple[dict[str, object], type[CallboardError]]] = [
        ({"gateway_epoch": world.gateway + 1}, StaleEpoch),
        ({"session": ref("nobody")}, NotFound),
        ({"data": words(2).encode()}, ArtifactInvalid),
        ({"data": None}, ArtifactInvalid),
    ]
    for more, refusal in cases:
        answer = store(world, storing(world, text, one, made, **more))
        assert isinstance(answer, refusal), more
        assert not any("/artifacts/" in path for path in world.disk.names)


@pytest.mark.rule("INB-6")
def test_a_repeat_stores_nothing_and_a_conflict_is_told_before_anything_is_written() -> None:
    world = World()
    text = world.create()
    send(world, text, "m1", words(1))
    before = world.disk.home()
    assert isinstance(send(world, text, "m1", words(2)), RequestConflict)
    again = send(world, text, "m1", words(1))
    assert isinstance(again, m.Accepted)
    assert again.duplicate
    assert world.disk.home() == before


# --- quota, reuse, sweep --------------------------------------------------------------------------


@pytest.mark.rule("ART-6", "R43")
def test_of_129_stores_at_once_128_are_kept_and_one_is_refused() -> None:
    world = World()
    text = world.create()
    held: list[Callable[[], object]] = []

    class Held:
        def start(self, job: J, ended: Callable[[J], None]) -> None:
            def run() -> None:
                job.run()
                ended(job)

            held.append(run)

    world.engine.artifacts.runner = Held()
    bodies = [
        storing(world, text, *long_item(f"m{n}", words(n)))
        for n in range(ARTIFACTS_PER_SESSION_MAX + 1)
    ]
    before = len(world.replies)
    for n, body in enumerate(bodies):
        world.engine.store_artifact(n, body)
    while held:
        run = held.pop()
        assert not held, "two jobs at once could both find the last place"
        run()
        world.engine.artifacts.pump()
    answers = [reply.body for reply in world.replies[before:]]
    assert sum(isinstance(one, m.Ok) for one in answers) == ARTIFACTS_PER_SESSION_MAX
    (refusal,) = [one for one in answers if isinstance(one, CallboardError)]
    assert isinstance(refusal, ArtifactQuota)
    assert refusal.carried == {
        "limit": "ARTIFACTS_PER_SESSION_MAX",
        "current": ARTIFACTS_PER_SESSION_MAX,
        "maximum": ARTIFACTS_PER_SESSION_MAX,
    }
    assert len(files(world.disk, text)) == ARTIFACTS_PER_SESSION_MAX
    world.engine.artifacts.runner = InlineJobs()
    assert isinstance(store(world, bodies[0]), m.Ok)  # by content: one of the 128 again


@pytest.mark.rule("ART-6")
def test_the_bytes_of_a_session_are_bounded_too() -> None:
    world = World()
    text = world.create()
    one, made = long_item("m1", words(1))
    body = storing(world, text, one, made)
    used = ARTIFACT_SESSION_BYTES_MAX - SIZE + 1
    world.disk.put(f"{folder(text)}/{'0' * 64}", b"")
    world.disk.names[f"{folder(text)}/{'0' * 64}"].seen[:] = bytes(used)
    world.engine.artifacts._stored[text] = {"0" * 64: world.clock.s}  # pyright: ignore[reportPrivateUsage]
    answer = store(world, body)
    assert isinstance(answer, ArtifactQuota)
    assert answer.carried["limit"] == "ARTIFACT_SESSION_BYTES_MAX"
    assert answer.carried["current"] == used
    del world.disk.names[f"{folder(text)}/{'0' * 64}"].seen[0]
    assert isinstance(store(world, body), m.Ok)


@pytest.mark.rule("ART-12")
def test_what_is_remembered_of_stores_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts_module, "_ROOTED_MAX", 3)
    world = World()
    texts = [world.create(f"s{number}") for number in range(5)]
    artifacts = world.engine.artifacts
    for number, text in enumerate(texts):
        one, made = long_item(f"m{number}", words(number))
        assert isinstance(store(world, storing(world, text, one, made)), m.Ok)
        assert len(artifacts._rooted) <= 3  # pyright: ignore[reportPrivateUsage]
        world.clock.pass_ms(10)
    stored = artifacts._stored  # pyright: ignore[reportPrivateUsage]
    assert list(stored) == texts
    world.clock.pass_ms(ARTIFACT_UNNAMED_MS - 25)
    one, made = long_item("late", words(9))
    assert isinstance(store(world, storing(world, texts[1], one, made)), m.Ok)
    assert list(stored) == [texts[3], texts[4], texts[1]]  # what is older says nothing any more


@pytest.mark.rule("ART-12", "R46")
def test_what_nothing_names_is_swept_at_activation() -> None:
    world = World()
    text = world.create()
    send(world, text, "kept", words(1))
    one, made = long_item("lost", words(2))
    store(world, storing(world, text, one, made))
    world.crash(LoseAll())
    assert len(files(world.disk, text)) == 2
    world.acquire(text)
    assert files(world.disk, text) == [name_of(words(1))]


@pytest.mark.rule("ART-12")
def test_an_activation_beside_a_store_leaves_what_is_under_way() -> None:
    """A send to a passive session wakes it: its file must outlive the sweep of its activation."""
    world = World()
    text = world.create()
    one, made = long_item("m1", words(1))
    store(world, storing(world, text, one, made))
    epoch = world.acquire(text).epoch
    assert files(world.disk, text) == [name_of(words(1))]
    assert isinstance(world.call(appending(text, epoch, puts=[one])), m.Appended)
    world.clock.pass_ms(ARTIFACT_UNNAMED_MS + 1)
    other, cut_too = long_item("m2", words(2))
    store(world, storing(world, text, other, cut_too))
    world.clock.pass_ms(ARTIFACT_UNNAMED_MS + 1)
    world.engine.artifacts.activated(text)
    world.engine.artifacts.pump()
    assert files(world.disk, text) == [name_of(words(1))]
    (refusal,) = world.batch([appending(text, epoch, puts=[other])])
    assert isinstance(refusal, ArtifactInvalid)  # swept: no frame names it


@pytest.mark.rule("ART-12")
def test_the_transcript_keeps_what_the_inbox_has_given_away() -> None:
    world = World()
    text = world.create()
    one, made = long_item("m1", words(1))
    assert made.ref is not None
    store(world, storing(world, text, one, made))
    epoch = world.acquire(text).epoch
    world.append(text, epoch, [started("turn_1", epoch, ["m1"], world)], [one])
    data = {
        "part_id": "p1",
        "message_id": "msg_m1",
        "part_type": "text",
        "payload": {"text": "an excerpt", "prompt_artifact": spell_ref(made.ref)},
        "created_at": 1,
    }
    records = [
        message("turn_1", "msg_m1", "user", world, "m1"),
        new("part_created", data, world.fresh(), "turn_1"),
    ]
    world.append(text, epoch, records)
    closing, _, removes = ending("turn_1", ["m1"], world)
    closing[0] = new(
        "inbox_acknowledged",
        {
            "reason": "completed",
            "turn_id": "turn_1",
            "items": [{"message_id": "m1", "digest": one.digest}],
        },
        world.fresh(),
        "turn_1",
    )
    world.append(text, epoch, closing, removes=removes)
    world.crash(LoseAll())
    world.acquire(text)
    assert files(world.disk, text) == [name_of(words(1))]


@pytest.mark.rule("ART-12")
def test_quota_is_answered_only_after_a_sweep() -> None:
    world = World()
    text = world.create()
    send(world, text, "kept", words(0))
    for n in range(1, ARTIFACTS_PER_SESSION_MAX):
        one, made = long_item(f"m{n}", words(n))
        store(world, storing(world, text, one, made))
    one, made = long_item("more", words(500))
    assert isinstance(store(world, storing(world, text, one, made)), ArtifactQuota)
    world.clock.pass_ms(ARTIFACT_UNNAMED_MS + 1)
    assert isinstance(store(world, storing(world, text, one, made)), m.Ok)
    assert files(world.disk, text) == sorted([name_of(words(0)), name_of(words(500))])


@pytest.mark.rule("ART-7", "FLT-18")
def test_what_an_interrupted_write_left_is_removed_at_activation() -> None:
    world = World()
    text = world.create()
    send(world, text, "m1", words(1))
    stale = f"{folder(text)}/.{name_of(words(2))}.{'a' * 32}.tmp"
    world.disk.put(stale, b"half")
    world.acquire(text)
    assert files(world.disk, text) == [name_of(words(1))]


@pytest.mark.rule("ART-2")
def test_what_waits_is_bounded() -> None:
    world = World()
    text = world.create()

    class Held:
        def start(self, job: J, ended: Callable[[J], None]) -> None:
            """Run none."""

    world.engine.artifacts.runner = Held()
    made = cut([{"type": "text", "text": "\N{GRINNING FACE}" * 1_000_000}])
    assert made.data is not None
    assert len(made.data) <= ARTIFACT_BYTES_MAX
    one = item("m1", digest=item_digest(made.parts, {}))
    body = storing(world, text, one, made)
    before = len(world.replies)
    for n in range(30):
        world.engine.store_artifact(n, body)
    answers = [reply.body for reply in world.replies[before:]]
    assert answers
    assert all(isinstance(one, Overloaded) for one in answers)
    assert world.engine.artifacts.waiting_bytes <= ARTIFACT_STORES_BYTES_MAX
    assert world.engine.artifacts.waiting == 30 - len(answers)


# --- faults at each step --------------------------------------------------------------------------

STEPS = ["mkdir", "create", "write", "sync", "link", "unlink", "sync_dir"]


@pytest.mark.rule("ART-7", "FLT-3")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("step", STEPS)
def test_each_step_may_fail(step: str, number: int) -> None:
    """No room before the sync is a refusal that leaves nothing; everything else ends the writer."""
    world = World()
    text = world.create()
    world.engine.checkpoints.now()
    failing = True

    def fault(name: str, path: str) -> None:
        if failing and name == step and "/artifacts" in path:
            raise OSError(number, path)

    world.disk.fault = fault
    one, made = long_item("m1", words(1))
    body = storing(world, text, one, made)
    full = number == errno.ENOSPC and step in ("mkdir", "create", "write", "link")
    busy = number == errno.EMFILE and step in ("mkdir", "create")
    if not full and not busy:
        with pytest.raises(Poisoned):
            store(world, body)
        failing = False
        world.crash(KeepAll())
    else:
        answer = store(world, body)
        assert isinstance(answer, StorageFull if full else ArtifactInvalid)
        if busy:
            assert isinstance(answer, ArtifactInvalid)
            assert answer.carried["retryable"] is True
        assert files(world.disk, text) == []
        failing = False
    world.hello()
    body = body.model_copy(update={"gateway_epoch": world.gateway})
    assert isinstance(store(world, body), m.Ok)
    left = [path for path in files(world.disk, text) if not path.startswith(".")]
    assert left == [name_of(words(1))]
    assert world.disk.content(f"{folder(text)}/{left[0]}").decode() == words(1)


@pytest.mark.rule("ART-7", "FLT-20")
def test_a_disk_that_fills_in_the_middle_leaves_nothing() -> None:
    world = World()
    text = world.create()
    world.disk.capacity = world.disk.used() + SIZE // 2
    assert isinstance(send(world, text, "m1", words(1)), StorageFull)
    assert files(world.disk, text) == []
    world.disk.capacity = None
    assert isinstance(send(world, text, "m1", words(1)), m.Accepted)


# --- a folder that is not ours --------------------------------------------------------------------


@pytest.mark.rule("ART-8")
@pytest.mark.parametrize("wrong", ["name", "file", "folder", "content", "size", "upper"])
def test_a_folder_that_holds_what_is_not_ours_is_not_used(wrong: str) -> None:
    world = World()
    text = world.create()
    good = f"{folder(text)}/{name_of(words(1))}"
    if wrong == "name":
        world.disk.put(f"{folder(text)}/notes.txt", b"mine")
    elif wrong == "upper":
        world.disk.put(f"{folder(text)}/{name_of(words(2)).upper()}", b"mine")
    elif wrong == "file":
        world.disk.put(good, words(1).encode())
        world.disk.names[good].unsafe = True  # a symlink, another owner, another mode
    elif wrong == "folder":
        world.disk.put(folder(text), b"a file")
    elif wrong == "content":
        world.disk.put(good, words(9).encode())
    else:
        world.disk.put(good, b"")
    before = world.disk.home()
    assert isinstance(send(world, text, "m1", words(1)), ArtifactStoreUnsafe)
    assert world.disk.home() == before
    assert isinstance(world.accept(text, "short"), m.Accepted)  # only its artifact use stops


@pytest.mark.rule("ART-8")
def test_a_folder_in_place_of_a_file_is_not_swept_away() -> None:
    world = World()
    text = world.create()
    send(world, text, "m1", words(1))
    odd = f"{folder(text)}/{name_of(words(3))}"
    world.disk.names[odd] = world.disk.durable_names[odd] = DIRECTORY
    world.acquire(text)
    assert odd in world.disk.names
    world.disk.names[odd] = Inode()


@pytest.mark.parametrize("forgotten", ["callboard.storage.artifacts.Job._sync_names", "sync"])
def test_these_tests_see_what_is_forgotten(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> None:
        """Forget to do it."""

    real = MemoryDisk.sync

    def sync(disk: MemoryDisk, fd: int) -> None:
        if "/artifacts/" not in disk.fds[fd][0]:
            real(disk, fd)

    if forgotten == "sync":
        monkeypatch.setattr(MemoryDisk, "sync", sync)
    else:
        monkeypatch.setattr(forgotten, nothing)
    with pytest.raises((AssertionError, KeyError)):
        test_after_a_cut_at_any_call_no_frame_names_a_file_that_is_not_whole(LoseAll())
