"""The readers, held against a second one that shares no code with them, over crashes and damage."""

import random
import shutil
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from callboard.errors import CallboardError, JournalDamaged
from callboard.ids import parse_ref
from callboard.storage.lines import Gap
from callboard.storage.readers import open_home
from tests.second_reader import Damage, Session, read_home
from tests.storage.readers.homes import (
    Book,
    Entry,
    HomeMaker,
    acknowledged,
    flip,
    put,
    remove,
    said,
    tree,
    turn_completed,
    turn_started,
    updated,
)

Ending = Literal["stop", "mark", "crash"]
SETTINGS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


class Play:
    """A life of a home, drawn by a seed: puts, turns, titles, checkpoints, late files."""

    def __init__(self, path: Path, seed: int) -> None:
        shutil.rmtree(path, ignore_errors=True)
        self.rng = random.Random(seed)
        self.maker = HomeMaker(path)
        self.waiting: dict[str, list[str]] = {}
        self.number = 0
        self.late = False

    def run(self, steps: int, ending: Ending) -> HomeMaker:
        for _ in range(steps):
            self.number += 1
            self.rng.choice([self.create, self.put, self.put, self.turn, self.title, self.other])()
        if ending == "stop":
            self.everything_to_the_files()
            self.maker.stop()
        elif ending == "mark":
            self.maker.mark()
        return self.maker

    def everything_to_the_files(self) -> None:
        self.maker.synced = len(self.maker.journal.data)
        for book in self.maker.books.values():
            self.maker.write(self.maker.home.transcript(book.ref), book.transcript)
            if book.inbox:
                self.maker.write(self.maker.home.inbox(book.ref), book.inbox)

    def some(self) -> Book | None:
        return self.rng.choice(list(self.maker.books.values())) if self.maker.books else None

    def create(self) -> None:
        if len(self.maker.books) < 3:
            self.maker.new(f"s{self.number}", f"/u/{self.rng.choice('ab')}")

    def put(self) -> None:
        if (book := self.some()) is not None:
            name = f"i{self.number}"
            self.waiting.setdefault(str(book.ref), []).append(name)
            self.maker.commit(ops=[(book, [put(name)])], files=not self.late)

    def turn(self) -> None:
        if (book := self.some()) is not None and (names := self.waiting.pop(str(book.ref), [])):
            turn_id = f"turn_{self.number:06}"
            entries: list[Entry] = [turn_started(turn_id, names)]
            for name in names:
                entries += said(f"m-{name}", "text", inbox_message_id=name)
            entries += [acknowledged(turn_id, names), turn_completed(turn_id, names)]
            gone = [remove(name) for name in names]
            self.maker.commit((book, entries), ops=[(book, gone)], files=not self.late)

    def title(self) -> None:
        if (book := self.some()) is not None:
            entries = [updated(title=f"t{self.number}")] * self.rng.randint(1, 3)
            self.maker.commit((book, entries), files=not self.late)

    def other(self) -> None:
        self.late = self.rng.random() < 0.4
        if self.rng.random() < 0.4:
            self.everything_to_the_files()
            self.maker.checkpoint()


def by_readers(path: Path) -> dict[str, Session]:
    """What the product's readers say, in the second reader's words."""
    reader = open_home(path)
    found: dict[str, Session] = {}
    for ref in reader.refs():
        session = found[str(ref)] = Session()
        for item in reader.transcript(ref):
            if isinstance(item, Gap):
                session.problems.append(f"{item.line}: bad line")
                continue
            dumped = item.data.model_dump(exclude_unset=True)
            session.records.append({"seq": item.seq, "type": item.type, "data": dumped})
            if item.type == "inbox_acknowledged":
                session.acknowledged += [one["message_id"] for one in dumped["items"]]
            elif item.type == "message_created" and dumped.get("inbox_message_id"):
                session.order.append(dumped["inbox_message_id"])
        session.inputs = [live.item.message_id for live in reader.inbox(ref)]
    return found


def by_second(path: Path) -> dict[str, Session]:
    found = read_home(path)
    for session in found.values():
        session.records = [
            {name: record[name] for name in ("seq", "type", "data")} for record in session.records
        ]
    return found


@pytest.mark.rule("REC-6", "REC-7", "FLT-12")
@SETTINGS
@given(st.integers(0, 1 << 32), st.integers(0, 30), st.sampled_from(["stop", "mark", "crash"]))
def test_both_readers_agree_on_every_life(
    short_path: Path, seed: int, steps: int, ending: Ending
) -> None:
    maker = Play(short_path / "home", seed).run(steps, ending)
    before = tree(maker.path)
    found = by_readers(maker.path)
    assert found == by_second(maker.path)
    assert all(session.problems == [] for session in found.values())
    assert tree(maker.path) == before


@pytest.mark.rule("FLT-12")
@SETTINGS
@given(st.integers(0, 1 << 32), st.integers(1, 25), st.integers(0, 1 << 32))
def test_both_readers_agree_on_what_a_power_cut_leaves(
    short_path: Path, seed: int, steps: int, cut: int
) -> None:
    """The journal ends in the middle of an unsynced frame, files hold some of what was not."""
    maker = Play(short_path / "home", seed).run(steps, "crash")
    rng = random.Random(cut)
    segment = maker.home.journal / "0001.log"
    data = segment.read_bytes()
    kept = rng.randint(max(maker.journal.durable, maker.synced), len(data))
    segment.write_bytes(data[:kept] + bytes(rng.choice([0, 0, 17])))
    try:
        expected = read_home(maker.path)
    except Damage:
        expected = {}
    for book in maker.books.values():
        path = maker.home.transcript(book.ref)
        session = expected.get(str(book.ref))
        sure = maker.sure.get(book.ref, 0)
        if path.exists() and session is not None and rng.random() < 0.7:
            written = path.read_bytes()
            path.write_bytes(written[: rng.randint(min(sure, len(written)), len(written))])
    found = by_readers(maker.path)
    assert found == by_second(maker.path)
    for ref, session in found.items():
        assert session.problems == []
        assert [one["seq"] for one in session.records] == [
            one["seq"] for one in expected[ref].records
        ]


@pytest.mark.damages_home("a bit is flipped")
@SETTINGS
@given(st.integers(0, 1 << 32), st.integers(1, 25), st.integers(0, 1 << 32))
def test_both_readers_agree_on_a_flipped_bit(
    short_path: Path, seed: int, steps: int, where: int
) -> None:
    """In the journal: both refuse or both drop it; in a file: both show the same around it."""
    maker = Play(short_path / "home", seed).run(steps, "stop")
    files = [path for path in maker.path.rglob("*") if path.suffix in (".log", ".jsonl")]
    path = random.Random(where).choice(sorted(files))
    size = path.stat().st_size
    flip(path, where % size, where % 8)
    try:
        second = by_second(maker.path)
    except Damage:
        with pytest.raises(JournalDamaged):
            open_home(maker.path)
        return
    except (ValueError, KeyError, AssertionError):
        return  # of an inbox that is no inbox: the second reader is no judge of how to refuse it
    try:
        first = by_readers(maker.path)
    except CallboardError:
        assert path.suffix == ".jsonl"
        assert any(one.problems for one in second.values())
        return
    for ref, session in first.items():
        assert parse_ref(ref)
        assert [r["seq"] for r in session.records] == [r["seq"] for r in second[ref].records]
