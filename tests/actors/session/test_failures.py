"""Failures by name (FLR) and what follows from them (RTY)."""

from __future__ import annotations

import errno
import socket

import hypothesis.strategies as st
import pytest
from hypothesis import given

from callboard.actors.session.failures import KINDS, classify, failure, read_failure
from callboard.actors.session.retry import Verdict, after_failure, retry_delay_ms
from callboard.errors import (
    ArtifactInvalid,
    ContextOverflow,
    DeadlineExceeded,
    InboxFull,
    NotFound,
    Overloaded,
    PersistenceFailed,
    StorageFull,
)
from callboard.limits import INPUT_ATTEMPTS_MAX, RETRY_DELAY_MS_MAX, RETRY_WINDOW_MS


class Http(Exception):
    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status_code = status


class Wrapped(Exception):
    def __init__(self, status: int) -> None:
        super().__init__("see response")
        self.response = type("Response", (), {"status": status})()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.rule("FLR-1", "R84")
@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (Http(401), "authentication"),
        (Http(403), "permission"),
        (Http(429), "rate_limit"),
        (Wrapped(429), "rate_limit"),
        (Http(408), "timeout"),
        (Http(504), "timeout"),
        (Http(404, "no model gpt-9"), "model_unavailable"),
        (Http(404, "no page"), "runtime"),
        (Http(503), "model_unavailable"),
        (Http(529), "model_unavailable"),
        (Http(413), "context_limit"),
        (Http(422), "unsupported_input"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "network"),
        (OSError(errno.EHOSTUNREACH, "x"), "network"),
        (OSError(errno.ETIMEDOUT, "x"), "timeout"),
        (socket.gaierror(-2, "x"), "network"),
        (TimeoutError(), "timeout"),
        ("model x not found", "model_unavailable"),
        ("maximum context length", "context_limit"),
        ("unsupported image", "unsupported_input"),
        ("timed out at https://u:pw@host/x?key=abc", "timeout"),
        ("Invalid API key sk-123", "authentication"),
        (Overloaded(resource="pending_count"), "capacity"),
        (InboxFull(), "capacity"),
        (StorageFull(), "capacity"),
        (DeadlineExceeded(), "timeout"),
        (ContextOverflow(), "context_limit"),
        (ArtifactInvalid(), "unsupported_input"),
        (PersistenceFailed(), "runtime"),
        (NotFound("no such provider, unauthorized"), "runtime"),
        (Unspeakable(), "runtime"),
        (ZeroDivisionError("division by zero"), "runtime"),
        (SystemExit(3), "runtime"),
        ("x" * 9_000 + "unauthorized", "runtime"),
    ],
)
def test_the_first_match_names_a_failure(problem: object, code: str) -> None:
    found = classify(problem)
    assert found.code == code
    assert found.message == KINDS[found.code].sentence
    assert "key" not in found.model_dump_json()
    assert "http" not in found.model_dump_json()


@pytest.mark.rule("FLR-2")
def test_a_failure_is_classified_as_itself() -> None:
    one = failure("network")
    assert classify(one) is one


@pytest.mark.rule("FLR-2")
@pytest.mark.parametrize(
    "stored",
    [
        {"code": "timeout", "message": "my own words", "retryable": True},
        {
            "code": "timeout",
            "message": KINDS["timeout"].sentence,
            "retryable": True,
            "resource": "pending_count",
        },
        {"code": "surprise", "message": "x", "retryable": True},
        "text",
        None,
    ],
)
def test_a_stored_failure_that_breaks_the_list_reads_as_runtime(stored: object) -> None:
    assert read_failure(stored) == failure("runtime")


@pytest.mark.rule("FLR-2", "FLR-3")
def test_a_stored_failure_reads_as_it_was_written() -> None:
    for one in (
        classify(Overloaded(resource="resident_sessions")),
        classify(PersistenceFailed()),
        classify(TimeoutError()),
    ):
        assert read_failure(one.model_dump()) == one


@pytest.mark.rule("FLR-3")
def test_a_failure_names_the_code_that_caused_it() -> None:
    assert classify(PersistenceFailed()).error == "persistence_failed"
    overloaded = classify(Overloaded(resource="pending_bytes"))
    assert (overloaded.error, overloaded.resource) == ("overloaded", "pending_bytes")
    assert classify(Overloaded(resource="watchers")).resource is None
    assert classify(TimeoutError()).error is None


# --- what follows -----------------------------------------------------------------------------


@pytest.mark.rule("RTY-3", "R28")
@given(st.text(max_size=20), st.text(max_size=20), st.integers(1, 40))
def test_the_delay_doubles_within_its_jitter(session: str, turn: str, attempts: int) -> None:
    session, turn = repr(session), repr(turn)
    delay = retry_delay_ms(session, turn, attempts)
    base = min(1_000 * 2 ** (attempts - 1), RETRY_DELAY_MS_MAX)
    assert base * 0.8 <= delay <= base * 1.2
    assert delay == retry_delay_ms(session, turn, attempts), "the same after a restart"


@pytest.mark.rule("RTY-3")
def test_the_jitter_differs_between_sessions() -> None:
    assert len({retry_delay_ms(f"s{n}", "t", 1) for n in range(50)}) > 30


@pytest.mark.rule("RTY-2", "RTY-5")
@pytest.mark.parametrize(
    ("retryable", "wrote_output", "retries"),
    [(True, False, True), (True, True, False), (False, False, False), (False, True, False)],
)
def test_only_a_retryable_failure_without_output_is_tried_again(
    retryable: bool, wrote_output: bool, retries: bool
) -> None:
    verdict = after_failure(
        "s", "t", {"a": 1}, retryable=retryable, wrote_output=wrote_output, waited_ms=0
    )
    assert (verdict.retry_ms is not None) == retries
    assert verdict.hold != retries
    assert verdict.spent == frozenset()


@pytest.mark.rule("RTY-1")
def test_what_has_no_attempt_left_is_spent_alone() -> None:
    verdict = after_failure(
        "s",
        "t",
        {"a": INPUT_ATTEMPTS_MAX, "b": 2},
        retryable=True,
        wrote_output=False,
        waited_ms=0,
    )
    assert verdict.spent == {"a"}
    assert verdict.retry_ms is not None
    assert 1_600 <= verdict.retry_ms <= 2_400
    every = after_failure("s", "t", {"a": 5}, retryable=True, wrote_output=True, waited_ms=0)
    assert every == Verdict(frozenset({"a"}))


@pytest.mark.rule("RTY-3", "RTY-5")
def test_beyond_the_window_input_is_held() -> None:
    verdict = after_failure(
        "s", "t", {"a": 2}, retryable=True, wrote_output=False, waited_ms=RETRY_WINDOW_MS
    )
    assert verdict == Verdict(hold=True)
