# SPDX-License-Identifier: Apache-2.0
"""How a kill for memory is told, and when the request runs again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from openenvd.executor.messages import Died, Raised, TaskError
from openenvd.requests_db.records import Request
from openenvd.schema.states import RequestState, Schedule
from openenvd.server.dispatch.outcomes import (
    FailureContext,
    advice,
    more_memory,
    outcome_of,
    retry_of,
    story,
)
from openenvd.system.process.exit_reason import Detector, ExitKind, ExitReason

MB = 2**20
REASON = ExitReason(
    ExitKind.OOM_KILLED,
    41233,
    signal_number=9,
    detector=Detector.CGROUP,
    limit_bytes=256 * MB,
    peak_bytes=251 * MB,
    seconds=12.4,
    evidence="cgroup openenvd/long-3, oom_kill 0→1",
)
DIED = Died("id", "long-3", REASON, (), REASON.peak_bytes, at=5.0)


def failure_context(**changes: Any) -> FailureContext:
    asked = Request(
        "id",
        "launch",
        Schedule.LONG,
        {"source": "trial"},
        RequestState.RUNNING,
        1.0,
        environment="trial",
        attempts=changes.pop("attempts", 1),
        max_attempts=3,
        retry_oom=changes.pop("retry_oom", False),
    )
    known = FailureContext(asked, "launch trial", [200 * MB] * 19 + [214 * MB], 4, 2048 * MB)
    return replace(known, **changes)


def test_the_error_of_a_killed_replica_names_the_command_to_try() -> None:
    told = "replica 0 of trial was killed by the kernel at 256 MB before it was ready"
    evidence = REASON.to_json()
    error = TaskError("ReplicaFailed", told, "give it more", "oom_killed", evidence=evidence)
    outcome = outcome_of(Raised("id", error, None, at=5.0), failure_context())
    assert outcome.error is not None
    assert (outcome.error.message, outcome.error.evidence) == (told, evidence)
    assert outcome.error.hint == "openenv retry id --memory 512M"


def test_the_error_of_a_killed_worker_says_what_ran_for_how_long_and_earlier_peaks() -> None:
    error = outcome_of(DIED, failure_context()).error
    assert error is not None
    assert error.message.splitlines() == [
        (
            "worker long-3 (pid 41233) was killed by the kernel at 251 MB; its limit was 256 MB "
            "(cgroup openenvd/long-3, oom_kill 0→1)."
        ),
        "It was running `launch trial` for 12.4 s. Peak of the last 20 launches: 214 MB.",
    ]
    assert error.hint == (
        "openenv retry id --memory 512M   or fewer at once: openenv up --max-long-workers 3"
    )


def test_without_earlier_peaks_the_error_mentions_none() -> None:
    known = failure_context(peaks=[], long_running=1)
    assert story(DIED, known).splitlines()[1] == "It was running `launch trial` for 12.4 s."
    assert advice(DIED, known) == "openenv retry id --memory 512M"


def test_another_operation_needs_larger_workers() -> None:
    known = failure_context(long_running=1)
    asked = replace(known.request, operation="check", payload={})
    assert advice(DIED, replace(known, request=asked)) == "openenv up --worker-memory-mb 512"


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
    assert more_memory(reason, budget_mb * MB) == more


def test_the_message_of_a_retry_says_what_happened_and_the_next_attempt() -> None:
    retry = retry_of(DIED, failure_context(retry_oom=True))
    assert retry is not None
    assert (retry.request_id, retry.memory_bytes) == ("id", 512 * MB)
    assert retry.message.endswith("; it runs again with 512 MB (attempt 2 of 3)")


@pytest.mark.parametrize(
    "known",
    [
        failure_context(),  # nobody asked for it
        failure_context(retry_oom=True, attempts=3),
        failure_context(retry_oom=True, budget_bytes=256 * MB),  # it had all there is
    ],
)
def test_no_retry(known: FailureContext) -> None:
    assert retry_of(DIED, known) is None


def test_there_is_no_retry_after_a_death_that_was_not_for_memory() -> None:
    killed = replace(DIED, exit=ExitReason(ExitKind.SIGNALED, 7, signal_number=9))
    assert retry_of(killed, failure_context(retry_oom=True)) is None


def test_the_last_attempt_is_counted() -> None:
    told = story(DIED, failure_context(retry_oom=True, attempts=3))
    assert told.endswith("It was attempt 3 of 3.")


def test_the_advice_for_a_rollout_names_its_own_options() -> None:
    """A rollout may have been given --memory, which goes before the daemon's setting."""
    known = failure_context()
    asked = replace(known.request, operation="rollout", payload={"name": "echo", "memory_mb": 256})
    told = advice(DIED, replace(known, request=asked, long_running=1))
    assert told == "the same openenv rollout with --memory 512M (or --retry-oom)"
