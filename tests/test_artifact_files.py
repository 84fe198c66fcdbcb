"""Artifacts read from real files: never a wrong byte, and no path in a refusal."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from callboard.artifact_files import FOLDER, ArtifactReader
from callboard.artifacts import Cut, cut
from callboard.errors import ArtifactInvalid, ArtifactStoreUnsafe, CallboardError, InvalidRequest

TEXT = "€" * 20_000
MADE = cut([{"type": "text", "text": TEXT}])
assert MADE.ref is not None
NAME = MADE.ref.artifact_id


@pytest.fixture
def session(tmp_path: Path) -> Path:
    folder = tmp_path / "session"
    folder.mkdir(mode=0o700)
    (folder / FOLDER).mkdir(mode=0o700)
    put(folder, NAME, TEXT.encode())
    return folder


def put(session: Path, name: str, data: bytes, mode: int = 0o600) -> Path:
    path = session / FOLDER / name
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_a_text_and_its_parts_are_read(session: Path) -> None:
    reader = ArtifactReader(session)
    assert MADE.ref is not None
    assert reader.text(MADE.ref) == TEXT
    assert reader.restore(MADE.parts) == [{"type": "text", "text": TEXT}]
    assert reader.read(NAME, 1, 1_000) == ("€" * 333, 0, 999)
    reader.verify([{"type": "text", "text": "short"}])


def unsafe_folder(session: Path) -> None:
    (session / FOLDER).chmod(0o755)


def linked_folder(session: Path) -> None:
    (session / FOLDER).rename(session / "elsewhere")
    (session / FOLDER).symlink_to(session / "elsewhere")


def foreign_name(session: Path) -> None:
    put(session, "notes.txt", b"")


def upper_name(session: Path) -> None:
    put(session, NAME.upper(), b"")


def short_name(session: Path) -> None:
    put(session, NAME[:63], b"")


def loose_file(session: Path) -> None:
    (session / FOLDER / NAME).chmod(0o644)


def linked_file(session: Path) -> None:
    path = session / FOLDER / NAME
    path.rename(session / "elsewhere")
    path.symlink_to(session / "elsewhere")


def fifo(session: Path) -> None:
    path = session / FOLDER / NAME
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.rule("ART-8", "R44", "FLT-50")
@pytest.mark.parametrize(
    "spoil",
    [
        unsafe_folder,
        linked_folder,
        foreign_name,
        upper_name,
        short_name,
        loose_file,
        linked_file,
        fifo,
    ],
)
def test_a_store_that_is_not_ours_alone_is_not_read(
    session: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(session)
    with pytest.raises(ArtifactStoreUnsafe) as refused:
        ArtifactReader(session).verify(MADE.parts)
    assert str(session) not in str(refused.value)
    assert refused.value.to_wire() == {"code": "artifact_store_unsafe"}


@pytest.mark.rule("ART-8")
def test_a_file_with_a_second_name_is_read(session: Path) -> None:
    os.link(session / FOLDER / NAME, session / "taken_over")  # as a fork does (FRK-7)
    assert ArtifactReader(session).read(NAME, 0, 4).text == "€"


@pytest.mark.rule("ART-8", "ART-13", "R44")
@pytest.mark.parametrize("data", [TEXT.encode()[:-1] + b"x", b"", TEXT.encode() + b"x", None])
def test_other_bytes_under_the_name_are_never_given(session: Path, data: bytes | None) -> None:
    path = session / FOLDER / NAME
    if data is None:
        path.unlink()
    else:
        put(session, NAME, data)
    reader = ArtifactReader(session)
    uses: list[Callable[[], object]] = [
        lambda: reader.read(NAME),
        lambda: reader.verify(MADE.parts),
        lambda: reader.restore(MADE.parts),
    ]
    for use in uses:
        with pytest.raises(ArtifactInvalid) as refused:
            use()
        assert refused.value.carried == {"artifact_id": NAME, "retryable": False}
        assert str(session) not in str(refused.value)
    put(session, NAME, TEXT.encode())
    assert reader.restore(MADE.parts) == [{"type": "text", "text": TEXT}]  # ART-13b


@pytest.mark.rule("ART-9")
@pytest.mark.parametrize("name", ["A" * 64, "0" * 63, "../x", "", "0" * 63 + "\n"])
def test_a_name_that_is_none_is_refused_before_anything_is_opened(name: str) -> None:
    with pytest.raises(InvalidRequest):
        ArtifactReader(Path("/nowhere")).read(name)


@pytest.mark.rule("ART-9")
def test_a_file_is_hashed_once_while_it_stays_the_same(
    session: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    real = hashlib.sha256

    def counted(data: bytes) -> object:
        hashed.append(len(data))
        return real(data)

    monkeypatch.setattr("callboard.artifact_files.hashlib.sha256", counted)
    reader = ArtifactReader(session)
    for offset in range(0, 9_000, 3_000):
        reader.read(NAME, offset, 3_000)
    assert len(hashed) == 1
    os.utime(session / FOLDER / NAME, ns=(1, 1))
    reader.read(NAME)
    assert len(hashed) == 2
    changed = TEXT.encode()[:-3] + b"abc"
    path = session / FOLDER / NAME
    before = path.stat().st_mtime_ns
    path.write_bytes(changed)
    os.utime(path, ns=(before, before))  # size and mtime as before: ctime and hash tell
    with pytest.raises(ArtifactInvalid):
        reader.read(NAME)


@pytest.mark.rule("ART-13")
@pytest.mark.parametrize(
    ("number", "retryable"),
    [
        (errno.EBUSY, True),
        (errno.EAGAIN, True),
        (errno.EMFILE, True),
        (errno.ENFILE, True),
        (errno.EIO, False),
        (errno.EACCES, False),
    ],
)
def test_of_an_error_only_what_may_pass_is_kept(
    session: Path, monkeypatch: pytest.MonkeyPatch, number: int, retryable: bool
) -> None:
    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number), str(session))

    reader = ArtifactReader(session)
    with monkeypatch.context() as patched:
        patched.setattr("callboard.artifact_files.home.open_shared", failing)
        with pytest.raises(ArtifactInvalid) as refused:
            reader.read(NAME)
    assert refused.value.to_wire() == {
        "code": "artifact_invalid",
        "artifact_id": NAME,
        "retryable": retryable,
    }
    assert str(session) not in str(refused.value)
    assert reader.read(NAME, 0, 4).text == "€"  # a failed first use is not remembered


def test_a_session_without_artifacts_has_none(tmp_path: Path) -> None:
    with pytest.raises(CallboardError) as refused:
        ArtifactReader(tmp_path).read(NAME)
    assert refused.value.code == "artifact_invalid"


def test_nothing_is_asked_of_a_message_that_was_not_cut(tmp_path: Path) -> None:
    short = Cut([{"type": "text", "text": "hi"}])
    assert ArtifactReader(tmp_path / "nowhere").restore(short.parts) == short.parts
