"""docs/mailbox.md is what the machine's table says."""

import pytest

from tests.actors.session.draw_mailbox import PAGE, edges, page


@pytest.mark.rule("MBX-1")
def test_the_page_is_drawn_from_the_table() -> None:
    hint = "run python -m tests.actors.session.draw_mailbox"
    assert PAGE.read_text(encoding="utf-8") == page(), hint


def test_the_diagram_holds_the_life_of_a_turn() -> None:
    found = edges()
    for step in (("idle", "starting"), ("starting", "open"), ("open", "sealed")):
        assert step in found
    assert "Finish" in found["sealed", "finishing"]
    assert "AppendDone" in found["finishing", "idle"]
    assert ("idle", "open") not in found, "a turn begins with a durable start"
