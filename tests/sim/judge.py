"""The verdict over a home after the last power cut, by readers that share no code with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from callboard.errors import CallboardError
from callboard.storage.recovery import Recovered, recover
from tests.second_reader import Damage, Session, read_files
from tests.sim.client import Client, Promised, ref
from tests.sim.disk import SimDisk
from tests.sim.kernel import Violation
from tests.sim.storage import HOME
from tests.sim.world import World
from tests.storage.second_reader import Seen, read_home


def judge(world: World) -> None:
    """Check everything that must hold on the durable home.

    Raises:
        Violation: something does not.

    """
    before = _read_beside(world.disk)
    _recover(world)
    seen = read_recovered(world.disk)
    for session in sorted(world.sessions):
        if ref(session) not in seen:
            raise Violation("receipts", f"{session} was created and is gone")
    for text, one in seen.items():
        _check_parity(text, before.get(text), one)
        check_turns(text, one)
        check_order(text, one, world.numbers)
    for client in world.clients:
        for promised in client.promises.values():
            check_promise(seen, promised)
        check_watches(seen, client)
    check_calls(world, seen)


def _files(disk: SimDisk) -> dict[str, bytes]:
    head = f"{HOME}/sessions/"
    return {
        path.removeprefix(f"{HOME}/"): data
        for path, data in disk.home().items()
        if path.startswith(head) and path.endswith(".jsonl")
    }


def _read_beside(disk: SimDisk) -> dict[str, Session]:
    """Read the home as it is, before anything recovers it (O2)."""
    head = f"{HOME}/journal/"
    segments = {
        path.removeprefix(head): data for path, data in disk.home().items() if path.startswith(head)
    }
    try:
        found = read_files(_files(disk), segments)
    except Damage as damage:
        raise Violation("laws", f"before recovery: {damage}") from None
    for text, session in found.items():
        if session.problems:
            raise Violation("laws", f"{text} before recovery: {session.problems}")
    return found


def _recover(world: World) -> Recovered:
    try:
        return recover(world.disk, HOME, world.fresh, 64)
    except CallboardError as error:
        raise Violation("recovery", f"a legal disk is refused: {error.to_wire()}") from None


def read_recovered(disk: SimDisk) -> dict[str, Seen]:
    try:
        return read_home(disk.home())
    except (AssertionError, KeyError, ValueError) as problem:
        raise Violation("laws", f"after recovery: {problem!r}") from None


def _check_parity(text: str, before: Session | None, seen: Seen) -> None:
    """What a reader saw before the recovery is what the recovery made (RLB-26)."""
    if before is None or before.records != seen.records or before.inputs != list(seen.live):
        raise Violation("laws", f"{text}: recovery changed what was there")


def check_turns(text: str, seen: Seen) -> None:
    """One terminal for each turn that was followed by another one, and one message an input."""
    doubled = [name for name, count in Counter(seen.applied).items() if count > 1]
    if doubled:
        raise Violation("laws", f"{text}: {doubled} became more than one message")
    open_turns = [turn for turn in seen.started if turn not in seen.terminals]
    if open_turns:
        raise Violation("laws", f"{text}: {open_turns} never ended")
    at: str | None = None
    for record in seen.records:
        if record["type"] == "turn_started":
            if at is not None:
                raise Violation("laws", f"{text}: {record['data']['turn_id']} began inside {at}")
            at = record["data"]["turn_id"]
        elif record["type"] in ("turn_completed", "turn_aborted"):
            at = None


def check_order(text: str, seen: Seen, numbers: Mapping[tuple[str, str], int]) -> None:
    """Inputs of one turn are applied in their order, unless an earlier turn had failed on them."""
    held: set[str] = set()
    last = -1
    for record in seen.records:
        data = record["data"]
        if record["type"] == "turn_started":
            last = -1
        elif record["type"] == "turn_aborted":
            held |= set(data["claimed_input_ids"])
        name = data.get("inbox_message_id") if record["type"] == "message_created" else None
        n = numbers.get((text, name)) if name is not None and name not in held else None
        if n is not None:
            if n < last:
                raise Violation("laws", f"{text}: {name} was applied out of order")
            last = n


def check_promise(seen: dict[str, Seen], promised: Promised) -> None:
    """A receipt outlives everything (O1)."""
    name, text = promised.message_id, ref(promised.session)
    one = seen[text]
    is_live, gone = name in one.live, [*one.acknowledged, *one.discarded]
    if not is_live and name not in gone:
        raise Violation("receipts", f"{name} of {text} was promised and is gone")
    if promised.settled == "acknowledged" and name not in one.acknowledged:
        raise Violation("receipts", f"{name} of {text} was said to be acknowledged")
    if name in one.acknowledged and name not in one.applied:
        raise Violation("receipts", f"{name} of {text} was acknowledged and never applied")
    for record in one.records:
        data = record["data"]
        if record["type"] == "message_created" and data.get("inbox_message_id") == name:
            words = _words(one.records, data["message_id"])
            if words != promised.text:
                raise Violation("receipts", f"{name} of {text} has another text")


def _words(records: list[dict[str, Any]], message_id: str) -> str:
    return "".join(
        record["data"]["payload"]["text"]
        for record in records
        if record["type"] == "part_created"
        and record["data"]["message_id"] == message_id
        and record["data"]["part_type"] == "text"
    )


def check_watches(seen: dict[str, Seen], client: Client) -> None:
    """What a watch showed is what is there: nothing un-synced was shown (DUR-7)."""
    for session, watched in client.watched.items():
        one = seen.get(ref(session))
        for seq in watched.lines:
            if one is None or seq > len(one.records):
                raise Violation("watch", f"{session}: line {seq} was shown and is gone")


def check_calls(world: World, seen: dict[str, Seen]) -> None:
    """No tool ran twice, or before its call was durable; each call has one result (O4)."""
    if world.tools.problems:
        raise Violation("tools", "; ".join(world.tools.problems))
    calls: Counter[str] = Counter()
    results: Counter[str] = Counter()
    outputs: dict[str, object] = {}
    for one in seen.values():
        for record in one.records:
            payload = record["data"].get("payload")
            if record["type"] != "part_created" or payload is None:
                continue
            kind = record["data"]["part_type"]
            if kind == "tool_call":
                calls[payload["call_id"]] += 1
            elif kind == "tool_result":
                results[payload["call_id"]] += 1
                outputs[payload["call_id"]] = payload.get("error")
    for call_id, count in world.tools.runs.items():
        if count > 1 or calls[call_id] != 1 or results[call_id] != 1:
            raise Violation(
                "tools",
                f"{call_id}: {count} runs, {calls[call_id]} calls, {results[call_id]} results",
            )
    for call_id in calls:
        if results[call_id] != 1:
            raise Violation("tools", f"{call_id} has {results[call_id]} results")
        if outputs[call_id] is None and not world.tools.runs[call_id]:
            raise Violation("tools", f"{call_id} succeeded and never ran")
        if outputs[call_id] == "not_run" and world.tools.runs[call_id]:
            raise Violation("tools", f"{call_id} ran and is said not to have")
