# SPDX-License-Identifier: Apache-2.0
"""How an end is told to the user, and when a request that was killed for memory runs again."""

from dataclasses import replace
from typing import Any

import pytest

from openenvd.executor.messages import Cancelled, Died, Raised, Succeeded, TaskError
from openenvd.requests_db.records import Request, RequestError
from openenvd.schema.states import ErrorKind, RequestState, Schedule
from openenvd.server.dispatch import outcomes
from openenvd.system.memory.limits import HINT, NO_ROOM
from openenvd.system.process.exit_reason import ExitKind, ExitReason

from ..conftest import oom_killed

MB = 2**20
EVIDENCE = "cgroup openenvd/long-3, oom_kill 0→1"
REASON = oom_killed(41233, 251 * MB, 256 * MB, seconds=12.4, evidence=EVIDENCE)
KILLED_BY_HAND = ExitReason(ExitKind.SIGNALED, 7, signal_number=9)
DIED = Died("id", "long-3", REASON, (), REASON.peak_bytes, at=5.0)


def died(reason: ExitReason) -> Died:
    return Died("id", "long-3", reason, ("last line",), peak_bytes=None, at=1.0)


def raised(*words: Any, **more: Any) -> Raised:
    return Raised("id", TaskError(*words, **more), None, at=5.0)


def context(**changes: Any) -> outcomes.FailureContext:
    """What is known of a launch of `trial`; what belongs to its request is that's."""
    asked = Request(
        "id", "launch", Schedule.LONG, {"source": "trial"}, RequestState.RUNNING, 1.0,
        environment="trial", attempts=1, max_attempts=3,
    )  # fmt: skip
    own = {name: changes.pop(name) for name in list(changes) if hasattr(asked, name)}
    known = outcomes.FailureContext(
        replace(asked, **own), [200 * MB] * 19 + [214 * MB], 4, 2048 * MB
    )
    return replace(known, **changes)


def error_of(event: Raised | Died, known: outcomes.FailureContext | None = None) -> RequestError:
    outcome = outcomes.outcome_of(event) if known is None else outcomes.outcome_of(event, known)
    assert outcome.state is RequestState.FAILED
    assert outcome.error is not None
    return outcome.error


def test_a_value_is_a_success_a_cancel_no_error_and_a_kill_by_hand_no_memory() -> None:
    outcome = outcomes.outcome_of(Succeeded("id", {"answer": 42}, 7, at=1.0))
    assert (outcome.state, outcome.error) == (RequestState.SUCCEEDED, None)
    assert (outcome.result, outcome.peak_bytes) == ({"answer": 42}, 7)
    outcome = outcomes.outcome_of(Cancelled("id", at=1.0))
    assert (outcome.state, outcome.error) == (RequestState.CANCELLED, None)
    message = error_of(died(KILLED_BY_HAND)).message
    assert "SIGKILL" in message
    assert "memory" not in message


@pytest.mark.parametrize(
    ("event", "kind", "message", "log_tail"),
    [
        (
            raised("ValueError", "no such thing", traceback="a\nb\nc"),
            ErrorKind.OPERATION_ERROR,
            "ValueError: no such thing",
            ("a", "b", "c"),
        ),
        (  # expected: one line, and a next step
            raised("X", "no such folder", hint="look again", kind="invalid", traceback="a\nb"),
            ErrorKind.INVALID,
            "no such folder",
            (),
        ),
        (  # a kind that is not ours is any exception
            raised("botocore.ClientError", "no", kind="throttled", traceback="a\nb"),
            ErrorKind.OPERATION_ERROR,
            "botocore.ClientError: no",
            ("a", "b"),
        ),
    ],
    ids=["unexpected", "expected", "another's"],
)
def test_an_exception_is_told_as_what_it_is(
    event: Raised, kind: ErrorKind, message: str, log_tail: tuple[str, ...]
) -> None:
    error = error_of(event)
    assert (error.kind, error.message, error.log_tail) == (kind, message, log_tail)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (KILLED_BY_HAND, ErrorKind.WORKER_LOST),
        (ExitReason(ExitKind.SIGNALED, 7, signal_number=11), ErrorKind.WORKER_LOST),
        (ExitReason(ExitKind.EXITED, 7, exit_code=3), ErrorKind.WORKER_LOST),
        (ExitReason(ExitKind.TIMED_OUT, 7), ErrorKind.TIMED_OUT),
        (replace(REASON, pid=7), ErrorKind.OOM_KILLED),
    ],
)
def test_the_error_of_a_death_names_worker_and_pid(reason: ExitReason, kind: ErrorKind) -> None:
    error = error_of(died(reason))
    assert error.kind is kind
    assert error.message.startswith("worker long-3 (pid 7) was ") or kind == "worker_lost"
    assert error.log_tail == ("last line",)
    assert error.hint


@pytest.mark.parametrize(("operation", "is_told"), [("rollout", True), ("launch", False)])
def test_a_rollout_whose_worker_was_killed_says_that_it_can_go_on(
    operation: str, is_told: bool
) -> None:
    error = error_of(died(KILLED_BY_HAND), context(operation=operation))
    assert ("the same command plays the missing ones" in (error.hint or "")) is is_told


@pytest.mark.parametrize(
    ("why", "hint"), [(f"{NO_ROOM}: 1 of 1", HINT), ("the zygote died", "the daemon's log")]
)
def test_a_request_that_no_worker_took_says_why(why: str, hint: str) -> None:
    reason = ExitReason(ExitKind.LOST, pid=0, evidence=why)
    error = error_of(Died("id", "", reason, (), peak_bytes=None, at=1.0))
    assert error.message == f"it never started: {why}"
    assert hint in (error.hint or "")


def test_the_error_of_a_killed_replica_names_the_command_to_try() -> None:
    told = "replica 0 of trial was killed by the kernel for memory at 256 MB before it was ready"
    evidence = REASON.to_json()
    error = error_of(
        raised("ReplicaFailed", told, "give it more", "oom_killed", evidence=evidence), context()
    )
    assert (error.message, error.evidence) == (told, evidence)
    assert error.hint == "openenv retry id --memory 512M"


def test_the_error_of_a_killed_worker_says_what_ran_for_how_long_and_earlier_peaks() -> None:
    error = error_of(DIED, context())
    assert error.message.splitlines() == [
        (
            "worker long-3 (pid 41233) was killed by the kernel for memory at 251 MB; its "
            "limit was 256 MB (cgroup openenvd/long-3, oom_kill 0→1)."
        ),
        "It was running `launch trial` for 12.4 s. Peak of 20 earlier runs: 214 MB.",
    ]
    assert error.hint == (
        "openenv retry id --memory 512M   or fewer at once: openenv up --max-long-workers 3"
    )


def test_without_earlier_peaks_the_error_mentions_none_and_the_last_attempt_is_counted() -> None:
    told = outcomes.story(DIED, context(peaks=[])).splitlines()[1]
    assert told == "It was running `launch trial` for 12.4 s."
    assert outcomes.story(DIED, context(retry_oom=True, attempts=3)).endswith(
        "It was attempt 3 of 3."
    )


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ({}, "openenv retry id --memory 512M"),
        # Another operation needs larger workers.
        ({"operation": "check", "payload": {}}, "openenv up --worker-memory-mb 512"),
        # A rollout may have been given --memory, which goes before the daemon's setting.
        (
            {"operation": "rollout", "payload": {"name": "echo", "memory_mb": 256}},
            "the same openenv rollout with --memory 512M (or --retry-oom)",
        ),
    ],
)
def test_the_advice_is_for_the_operation(request_: dict[str, Any], told: str) -> None:
    assert outcomes.advice(DIED, context(long_running=1, **request_)) == told


@pytest.mark.parametrize(
    ("limit_mb", "peak_mb", "budget_mb", "more_mb"),
    [
        (256, 251, 2048, 512),
        (256, 251, 300, 300),  # all there is
        (300, 299, 300, None),  # it had all there is
        (None, 100, 2048, 200),  # no cap: the watchdog, or the machine
    ],
)
def test_more_memory(
    limit_mb: int | None, peak_mb: int, budget_mb: int, more_mb: int | None
) -> None:
    limit = None if limit_mb is None else limit_mb * MB
    reason = replace(REASON, limit_bytes=limit, peak_bytes=peak_mb * MB)
    more = None if more_mb is None else more_mb * MB
    assert outcomes.more_memory(reason, budget_mb * MB) == more


def test_the_message_of_a_retry_says_what_happened_and_the_next_attempt() -> None:
    retry = outcomes.retry_of(DIED, context(retry_oom=True))
    assert retry is not None
    assert (retry.request_id, retry.memory_bytes) == ("id", 512 * MB)
    assert retry.message.endswith("; it runs again with 512 MB (attempt 2 of 3)")


@pytest.mark.parametrize(
    ("event", "known"),
    [
        (DIED, context()),  # nobody asked for it
        (DIED, context(retry_oom=True, attempts=3)),
        (DIED, context(retry_oom=True, budget_bytes=256 * MB)),  # it had all there is
        (replace(DIED, exit=KILLED_BY_HAND), context(retry_oom=True)),
    ],
)
def test_no_retry(event: Died, known: outcomes.FailureContext) -> None:
    assert outcomes.retry_of(event, known) is None
