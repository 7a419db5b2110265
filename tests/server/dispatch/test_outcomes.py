# SPDX-License-Identifier: Apache-2.0
"""How an end is told to the user."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openenvd.executor.messages import Cancelled, Died, Raised, Succeeded, TaskError
from openenvd.schema.states import ErrorKind, RequestState
from openenvd.server.dispatch.outcomes import outcome_of
from openenvd.system.memory.pids_limit import HINT, NO_ROOM
from openenvd.system.process.exit_reason import Detector, ExitKind, ExitReason

from .test_oom_policy import failure_context


def died(reason: ExitReason) -> Died:
    return Died("id", "long-3", reason, ("last line",), peak_bytes=None, at=1.0)


def test_a_returned_value_is_a_success() -> None:
    outcome = outcome_of(Succeeded("id", {"answer": 42}, 7, at=1.0))
    assert (outcome.state, outcome.result, outcome.peak_bytes, outcome.error) == (
        RequestState.SUCCEEDED,
        {"answer": 42},
        7,
        None,
    )


def test_an_unexpected_exception_is_reported_with_type_and_traceback() -> None:
    error = TaskError("ValueError", "no such thing", traceback="a\nb\nc")
    outcome = outcome_of(Raised("id", error, None, at=1.0))
    assert outcome.error is not None
    assert outcome.error.message == "ValueError: no such thing"
    assert outcome.error.log_tail == ("a", "b", "c")


def test_an_expected_failure_is_one_line_and_a_next_step() -> None:
    error = TaskError("X", "no such folder", hint="look again", kind="invalid", traceback="a\nb")
    outcome = outcome_of(Raised("id", error, None, at=1.0))
    assert outcome.error is not None
    assert (outcome.error.kind, outcome.error.message) == (ErrorKind.INVALID, "no such folder")
    assert outcome.error.log_tail == ()


def test_a_kind_that_is_not_ours_is_any_exception() -> None:
    error = TaskError("botocore.ClientError", "no", kind="throttled", traceback="a\nb")
    outcome = outcome_of(Raised("id", error, None, at=1.0))
    assert outcome.error is not None
    assert outcome.error.kind is ErrorKind.OPERATION_ERROR
    assert outcome.error.message == "botocore.ClientError: no"
    assert outcome.error.log_tail == ("a", "b")


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (ExitReason(ExitKind.SIGNALED, 7, signal_number=9), ErrorKind.WORKER_LOST),
        (ExitReason(ExitKind.SIGNALED, 7, signal_number=11), ErrorKind.WORKER_LOST),
        (ExitReason(ExitKind.EXITED, 7, exit_code=3), ErrorKind.WORKER_LOST),
        (ExitReason(ExitKind.TIMED_OUT, 7), ErrorKind.TIMED_OUT),
        (
            ExitReason(ExitKind.OOM_KILLED, 7, signal_number=9, detector=Detector.CGROUP),
            ErrorKind.OOM_KILLED,
        ),
    ],
)
def test_the_error_of_a_death_names_worker_and_pid(reason: ExitReason, kind: ErrorKind) -> None:
    outcome = outcome_of(died(reason))
    assert outcome.state is RequestState.FAILED
    assert outcome.error is not None
    assert outcome.error.kind is kind
    assert outcome.error.message.startswith("worker long-3 (pid 7) was ") or kind == "worker_lost"
    assert outcome.error.log_tail == ("last line",)
    assert outcome.error.hint


def test_a_rollout_whose_worker_was_killed_says_that_it_can_go_on() -> None:
    event = died(ExitReason(ExitKind.SIGNALED, 7, signal_number=9))
    launch = failure_context()
    rollout = replace(launch, request=replace(launch.request, operation="rollout"))
    for known, is_told in ((rollout, True), (launch, False)):
        error = outcome_of(event, known).error
        assert error is not None
        assert ("the same command plays the missing ones" in (error.hint or "")) is is_told


def test_a_kill_by_hand_is_never_called_out_of_memory() -> None:
    outcome = outcome_of(died(ExitReason(ExitKind.SIGNALED, 7, signal_number=9)))
    assert outcome.error is not None
    assert "SIGKILL" in outcome.error.message
    assert "memory" not in outcome.error.message


def test_a_cancelled_request_carries_no_error() -> None:
    outcome = outcome_of(Cancelled("id", at=1.0))
    assert (outcome.state, outcome.error) == (RequestState.CANCELLED, None)


@pytest.mark.parametrize(
    ("why", "hint"), [(f"{NO_ROOM}: 1 of 1", HINT), ("the zygote died", "the daemon's log")]
)
def test_a_request_that_no_worker_took_says_why(why: str, hint: str) -> None:
    reason = ExitReason(ExitKind.LOST, pid=0, evidence=why)
    error = outcome_of(Died("id", "", reason, (), peak_bytes=None, at=1.0)).error
    assert error is not None
    assert error.message == f"it never started: {why}"
    assert hint in (error.hint or "")
