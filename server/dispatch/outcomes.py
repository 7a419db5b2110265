# SPDX-License-Identifier: Apache-2.0
"""Decides what is recorded of a request that ended, and whether it runs again. Pure.

For a request that was killed for memory: the memory of its next attempt, its message and its hint.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ...environments.replica_state import GROWTH
from ...executor.messages import Cancelled, Died, Raised, Succeeded, TaskError
from ...requests_db.records import Outcome, Request, RequestError, Retry, label_of
from ...schema.states import ErrorKind, RequestState
from ...system.memory.limits import HINT, tells_no_room
from ...system.process.exit_reason import ExitKind, ExitReason
from ...system.text.json_lines import Json
from ...system.text.safe_text import hide_credentials, hide_values, secret_values, without_secrets
from ...system.text.units import MB, plural

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


@dataclass(frozen=True, slots=True)
class FailureContext:
    """The dispatcher's knowledge of a request that ended. Sizes in bytes."""

    request: Request
    peaks: Sequence[int] = ()  # of earlier runs of the same
    long_running: int = 1  # LONG requests that ran, this one included
    budget_bytes: int = 0  # of all workers together


def more_memory(reason: ExitReason, budget_bytes: int) -> int | None:
    """Return the memory of the next attempt; None when this one had all that there is."""
    had = reason.limit_bytes or reason.peak_bytes or 0
    if had >= budget_bytes:
        return None
    return min(budget_bytes, max(had * GROWTH, reason.peak_bytes or 0))


def reason_of(event: object) -> ExitReason | None:
    """The death that ended a request: of its worker, or of a replica that it was starting."""
    match event:
        case Died():
            return event.exit
        case Raised() if event.error.evidence is not None:
            # A foreign error's evidence may look alike.
            with contextlib.suppress(KeyError, TypeError, ValueError):
                return ExitReason.from_json(event.error.evidence)
    return None


def retry_of(event: Died | Raised, known: FailureContext) -> Retry | None:
    """The request's next attempt, when it asked for one and may have it; without secrets."""
    request, reason = known.request, reason_of(event)
    may_retry = request.retry_oom and request.attempts < request.max_attempts
    if reason is None or not (reason.is_oom and may_retry):
        return None
    memory = more_memory(reason, known.budget_bytes)
    if memory is None:
        return None
    attempt = f"attempt {request.attempts + 1} of {request.max_attempts}"
    message = f"{what_happened(event)}; it runs again with {memory / MB:.0f} MB ({attempt})"
    message = without_secrets(message, request.payload)
    # The request's row does not keep the error of this attempt.
    error = outcome_of(event, known).error
    shown = error and {name: hide_credentials(value) for name, value in asdict(error).items()}
    secrets = secret_values(request.payload)
    return Retry(request.id, event.at, memory, message, hide_values(shown, secrets))


def payload_of(request: Request) -> Json:
    """Return the payload for the operation; a retry gives more memory to the replicas as well."""
    if request.memory_bytes is None or request.payload.get("memory_mb") is None:
        return request.payload
    return {**request.payload, "memory_mb": math.ceil(request.memory_bytes / MB)}


def what_happened(event: Died | Raised) -> str:
    """`worker long-3 (pid 41233) was killed by the kernel for memory at 251 MB; …`."""
    if isinstance(event, Raised):
        return event.error.message.partition("\n")[0].partition("; its last lines:")[0]
    return f"worker {event.worker} (pid {event.exit.pid}) {event.exit.sentence()}"


def story(event: Died, known: FailureContext) -> str:
    """Describe what happened, what ran, for how long, and how much memory it used to need."""
    ran = f"It was running `{label_of(known.request)}`"
    if event.exit.seconds is not None:
        ran += f" for {event.exit.seconds:.1f} s"
    lines = [f"{what_happened(event)}.", f"{ran}."]
    if known.peaks:
        runs = plural(len(known.peaks), "earlier run")
        lines[-1] += f" Peak of {runs}: {max(known.peaks) / MB:.0f} MB."
    if known.request.retry_oom and known.request.attempts > 1:
        lines.append(f"It was attempt {known.request.attempts} of {known.request.max_attempts}.")
    return "\n".join(lines)


def advice(event: Died | Raised, known: FailureContext) -> str:
    """The commands to try, beginning with `openenv`."""
    reason = reason_of(event)
    memory = None if reason is None else more_memory(reason, known.budget_bytes)
    tips = []
    if memory is not None:
        request, megabytes = known.request, memory // MB
        tips = [f"openenv up --worker-memory-mb {megabytes}"]
        if request.operation == "rollout":  # its other options are many, and must stay the same
            tips = [f"the same openenv rollout with --memory {megabytes}M (or --retry-oom)"]
        elif request.operation == "launch":
            tips = [f"openenv retry {request.id} --memory {megabytes}M"]
    if known.long_running > 1 and isinstance(event, Died):  # a replica has its memory to itself
        tips.append(f"openenv up --max-long-workers {known.long_running - 1}")
    if not tips:
        return "it had all the memory that workers may use: openenv info shows the plan"
    return "   or fewer at once: ".join(tips)


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


def _error_of_death(event: Died, known: FailureContext | None) -> RequestError:
    if not event.worker:
        why = event.exit.evidence or "no worker accepted it"
        hint = HINT if tells_no_room(why) else "submit it again; the daemon's log has details"
        message, evidence = f"it never started: {why}", event.exit.to_json()
        return RequestError(ErrorKind.WORKER_LOST, message, hint, evidence)
    subject = f"worker {event.worker} (pid {event.exit.pid})"
    error = error_of_exit(subject, event.exit, event.log_tail)
    if known is None:
        return error
    if event.exit.is_oom:
        return replace(error, message=story(event, known), hint=advice(event, known))
    if known.request.operation in _RESUMES:
        return replace(error, hint=f"{_RESUMES[known.request.operation]}; {error.hint}")
    return error
