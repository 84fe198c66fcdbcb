"""Long messages on a plane that runs: sent, read with the plane up and down, and refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import callboard
from callboard import aio
from callboard.artifacts import read_ref
from callboard.cli.demo_load import kill_child
from callboard.errors import ArtifactInvalid, PayloadTooLarge, RequestConflict
from callboard.limits import ARTIFACT_CHARS_MAX, ARTIFACT_INLINE_BYTES_MAX
from callboard.records import PartCreated
from callboard.storage.gather import Message
from tests.cli.test_run import Ran

LONG = "".join(f"{n}: ein langer Text €\n" for n in range(4_000))


@pytest.fixture(scope="module")
def plane() -> Iterator[callboard.Plane]:
    with (
        tempfile.TemporaryDirectory(prefix="cb", dir="/tmp") as folder,
        callboard.testing.plane(folder) as running,
    ):
        yield running


@pytest.fixture
def session(plane: callboard.Plane, tmp_path: Path) -> callboard.Session:
    return plane.create_session("echo", tmp_path)


def ran(home: Path, *words: str, stdin: bytes = b"") -> Ran:
    return Ran(*words, env={"CALLBOARD_HOME": str(home)}, stdin=stdin)


def artifacts_of(plane: callboard.Plane, session: callboard.Session) -> Path:
    return plane.home / "sessions" / str(session.ref) / "artifacts"


def first_artifact(session: callboard.Session) -> str:
    for record in session.watch(timeout=20):
        data = record.data
        if isinstance(data, PartCreated) and "prompt_artifact" in data.payload:
            named = data.payload["prompt_artifact"]
            return read_ref(named).artifact_id
    raise AssertionError


@pytest.mark.rule("ART-1", "ART-2", "ART-8", "R39")
def test_the_border_on_a_real_plane(plane: callboard.Plane, session: callboard.Session) -> None:
    session.wait(session.send("x" * ARTIFACT_INLINE_BYTES_MAX))
    folder = artifacts_of(plane, session)
    assert not folder.exists()
    outcome = session.wait(session.send("h" * 20_000 + "MIDDLE" + "t" * 12_763, message_id="long"))
    assert outcome.ok
    (name,) = os.listdir(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    shown = session.history().items
    texts = [one.content for one in shown if isinstance(one, Message) and one.role == "user"]
    assert len(texts[-1].encode()) <= ARTIFACT_INLINE_BYTES_MAX
    assert texts[-1].startswith("h" * 20_000)
    assert "read_prompt_artifact" in texts[-1]
    assert session.artifact(name) == "h" * 20_000 + "MIDDLE" + "t" * 12_763


@pytest.mark.rule("INB-6", "ART-6")
def test_a_repeat_is_a_duplicate_and_another_text_a_conflict(
    plane: callboard.Plane, session: callboard.Session
) -> None:
    first = session.send(LONG, message_id="m")
    again = session.send(LONG, message_id="m")
    assert (first.duplicate, again.duplicate) == (False, True)
    with pytest.raises(RequestConflict):
        session.send(LONG + "x", message_id="m")
    session.wait("m")
    third = session.send(LONG, message_id="m")
    assert (third.duplicate, third.item_state) == (True, "acknowledged")
    session.wait(session.send(LONG, message_id="another"))
    assert len(os.listdir(artifacts_of(plane, session))) == 1  # by content


@pytest.mark.rule("ART-1")
def test_a_first_prompt_may_be_long(plane: callboard.Plane, tmp_path: Path) -> None:
    session = plane.create_session("echo", tmp_path, prompt=LONG)
    assert session.artifact(first_artifact(session)) == LONG
    with pytest.raises(PayloadTooLarge):
        plane.create_session("echo", tmp_path, session_id="none", prompt="x" * 1_000_001)
    assert all(row.ref.session_id != "none" for row in plane.sessions(tmp_path))


@pytest.mark.rule("ART-4", "R42")
def test_a_text_that_is_too_long_is_refused_and_nothing_is_kept(
    plane: callboard.Plane, session: callboard.Session
) -> None:
    for text, limit in (
        ("x" * (ARTIFACT_CHARS_MAX + 1), "ARTIFACT_CHARS_MAX"),
        ("x" * (4 * 1024 * 1024 + 1), "ARTIFACT_BYTES_MAX"),
    ):
        with pytest.raises(PayloadTooLarge) as refused:
            session.send(text)
        assert refused.value.carried["limit"] == limit
    assert not artifacts_of(plane, session).exists()
    widest = "\N{GRINNING FACE}" * ARTIFACT_CHARS_MAX
    assert session.wait(session.send(widest)).ok
    assert session.artifact(first_artifact(session)) == widest


def test_an_async_client_does_the_same(plane: callboard.Plane, tmp_path: Path) -> None:
    async def play() -> None:
        async with await aio.connect(plane.home) as client:
            session = await client.create_session("echo", tmp_path, prompt=LONG)
            async for record in session.watch(timeout=20):
                if isinstance(record.data, PartCreated):
                    named = record.data.payload["prompt_artifact"]
                    assert await session.artifact(read_ref(named).artifact_id) == LONG
                    return

    asyncio.run(play())


@pytest.mark.rule("ART-9", "ART-13")
def test_the_command_line_sends_files_and_reads_artifacts(
    plane: callboard.Plane, session: callboard.Session, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(LONG, encoding="utf-8")
    ref = str(session.ref)
    sent = ran(plane.home, "send", ref, "--file", str(file), "--wait")
    assert sent.status == 0, sent.err
    name = first_artifact(session)
    read = ran(plane.home, "artifact", "read", ref, name)
    assert read.out == LONG
    piece = ran(
        plane.home, "artifact", "read", ref, name, "--offset", "1", "--limit", "8", "--json"
    )
    assert json.loads(piece.out) == {"text": LONG[1:9], "offset": 1, "next_offset": 9}
    for words, code in (
        (("artifact", "read", ref, "0" * 64), "artifact_invalid"),
        (("artifact", "read", ref, "../x"), "invalid_request"),
        (("artifact", "read", ref, name, "--limit", "3"), "invalid_request"),
        (("send", ref, "--file", str(tmp_path / "none")), "invalid_request"),
    ):
        refused = ran(plane.home, *words)
        assert (refused.status, code in refused.err) == (1, True), refused.err
        assert str(plane.home) not in refused.err
    for wrong in (("send", ref), ("send", ref, "x", "--file", str(file))):
        assert ran(plane.home, *wrong).status == 2
    made = ran(
        *(plane.home, "new", "--agent", "echo", "--workspace", str(tmp_path)),
        *("--prompt", "-", "--id", "cli"),
        stdin=LONG.encode(),
    )
    assert made.status == 0, made.err
    other = plane.session(f"{session.ref.workspace_key}/cli")
    assert other.artifact(first_artifact(other)) == LONG


@pytest.mark.rule("ART-12", "REC-7")
def test_an_artifact_is_read_with_the_plane_down_and_outlives_it(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="cb", dir="/tmp") as folder:
        with callboard.testing.plane(folder) as plane:
            session = plane.create_session("echo", tmp_path)
            assert session.wait(session.send(LONG)).ok
            name, ref, home = first_artifact(session), str(session.ref), plane.home
        read = ran(home, "artifact", "read", ref, name)
        assert read.out == LONG
        assert "read_prompt_artifact" in ran(home, "show", ref).out
        assert "3999: ein langer Text €" in ran(home, "show", ref, "--full").out
        told = json.loads(ran(home, "show", ref, "--json", "--full").out)["history"][0]
        assert (told["artifact_id"], told["content"]) == (name, LONG)
        with callboard.testing.plane(folder) as plane:
            session = plane.session(ref)
            assert session.wait(session.send("again")).ok  # activated: swept
            assert session.artifact(name) == LONG
            with pytest.raises(ArtifactInvalid):
                session.artifact("0" * 64)


@pytest.mark.rule("ART-2", "ART-7")
def test_storage_is_killed_while_long_texts_are_stored(
    plane: callboard.Plane, session: callboard.Session
) -> None:
    """Each receipt names a text that is there, whole; what was under way is stored again."""
    texts = [f"{n}:" + "€" * 200_000 for n in range(12)]
    receipts = [session.send_nowait(text, message_id=f"m{n}") for n, text in enumerate(texts)]
    (storage,) = [one.pid for one in plane.status().processes if one.role == "storage"]
    assert kill_child(storage, plane.pid)
    for receipt in receipts:
        assert receipt.result(60).accepted
    for n in range(len(texts)):
        assert session.wait(f"m{n}", timeout=60).ok
    folder = artifacts_of(plane, session)
    assert sorted(os.listdir(folder)) == sorted(
        hashlib.sha256(text.encode()).hexdigest() for text in texts
    )
    for text in texts:
        assert session.artifact(hashlib.sha256(text.encode()).hexdigest()) == text
