# SPDX-License-Identifier: Apache-2.0
"""Turns executor events into recorded outcomes and messages for users. Pure functions."""

from __future__ import annotations

from dataclasses import replace

from ...executor.messages import Cancelled, Died, Raised, Succeeded, TaskError
from ...processes.exits.exit_reason import ExitKind, ExitReason
from ...processes.resources.pids_limit import HINT, tells_no_room
from ...requests_db.records import Outcome, RequestError
from ...requests_db.states import ErrorKind, RequestState
from .oom_policy import FailureContext, advice, reason_of, story

FinalEvent = Succeeded | Raised | Died | Cancelled

MAX_TRACEBACK_LINES = 20

_KIND_OF_EXIT = {ExitKind.OOM_KILLED: ErrorKind.OOM_KILLED, ExitKind.TIMED_OUT: ErrorKind.TIMED_OUT}
_HINT_OF_KIND = {
    ErrorKind.OOM_KILLED: "give it more with --memory, or run fewer at once: "
    "openenv up --max-long-workers N",
    ErrorKind.TIMED_OUT: "allow more time with --set timeout=DURATION",
    ErrorKind.WORKER_LOST: "the log ends with its last output; no other request was affected",
}


# Hints for operations whose next run continues where this one stopped.
_RESUMES = {"rollout": "finished episodes are kept: the same command plays the missing ones"}


def outcome_of(event: FinalEvent, known: FailureContext | None = None) -> Outcome:
    """The final state, and the error if any, of the request that `event` ended."""
    match event:
        case Succeeded():
            state, result, error = RequestState.SUCCEEDED, event.result, None
        case Raised():
            state, result, error = RequestState.FAILED, None, _error_raised(event, known)
        case Died():
            state, result, error = RequestState.FAILED, None, _error_of_death(event, known)
        case Cancelled():
            return Outcome(event.task_id, RequestState.CANCELLED, event.at)
    return Outcome(event.task_id, state, event.at, result, error, event.peak_bytes)


def error_of_exit(subject: str, reason: ExitReason, log_tail: tuple[str, ...]) -> RequestError:
    """Describe the exit of a worker, or of a replica."""
    kind = _KIND_OF_EXIT.get(reason.kind, ErrorKind.WORKER_LOST)
    message = f"{subject} {reason.sentence()}"
    return RequestError(kind, message, _HINT_OF_KIND[kind], reason.to_json(), log_tail)


def _error_raised(event: Raised, known: FailureContext | None) -> RequestError:
    error, hint, reason = event.error, event.error.hint, reason_of(event)
    if known is not None and reason is not None and reason.is_oom:  # of a replica it was starting
        hint = advice(event, known)
    expected = error.hint is not None or _kind_of(error) is not ErrorKind.OPERATION_ERROR
    tail = () if expected else tuple(error.traceback.splitlines()[-MAX_TRACEBACK_LINES:])
    message = error.message if expected else f"{error.type}: {error.message}"
    return RequestError(_kind_of(error), message, hint, error.evidence, log_tail=tail)


def _kind_of(error: TaskError) -> ErrorKind:
    """Classify the error; a foreign exception's `kind` may mean anything."""
    return ErrorKind(error.kind) if error.kind in set(ErrorKind) else ErrorKind.OPERATION_ERROR


def _error_never_started(reason: ExitReason) -> RequestError:
    why = reason.evidence or "no worker accepted it"
    hint = HINT if tells_no_room(why) else "submit it again; the daemon's log has details"
    return RequestError(ErrorKind.WORKER_LOST, f"it never started: {why}", hint, reason.to_json())


def _error_of_death(event: Died, known: FailureContext | None) -> RequestError:
    if not event.worker:
        return _error_never_started(event.exit)
    subject = f"worker {event.worker} (pid {event.exit.pid})"
    error = error_of_exit(subject, event.exit, event.log_tail)
    if known is None:
        return error
    if event.exit.is_oom:
        return replace(error, message=story(event, known), hint=advice(event, known))
    if known.request.operation in _RESUMES:
        return replace(error, hint=f"{_RESUMES[known.request.operation]}; {error.hint}")
    return error
