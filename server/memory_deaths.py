# SPDX-License-Identifier: Apache-2.0
"""What to say of, and do about, a request that was killed for memory. Pure functions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ..environments.names import name_of_source
from ..executor.messages import Died
from ..processes.exit_reason import ExitReason
from ..requests_db.records import Request, Retry

MB = 2**20

_GROWTH = 2  # how much more the next attempt is given
_PLURALS = {"launch": "launches"}


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the dispatcher knows of a request that ended. Sizes in bytes."""

    request: Request
    label: str
    peaks: Sequence[int] = ()  # of earlier runs of the same
    long_running: int = 1  # LONG requests that ran, this one included
    budget_bytes: int = 0  # of all workers together


def more_memory(reason: ExitReason, budget_bytes: int) -> int | None:
    """What the next attempt should be given; None when it had all there is."""
    had = reason.limit_bytes or reason.peak_bytes or 0
    if had >= budget_bytes:
        return None
    return min(budget_bytes, max(had * _GROWTH, reason.peak_bytes or 0))


def retry_of(event: Died, known: Circumstances) -> Retry | None:
    """The request's next attempt, when it asked for one and may have it."""
    request = known.request
    if not (event.exit.is_oom and request.retry_oom and request.attempts < request.max_attempts):
        return None
    memory = more_memory(event.exit, known.budget_bytes)
    if memory is None:
        return None
    attempt = f"attempt {request.attempts + 1} of {request.max_attempts}"
    message = f"{what_happened(event)}; it runs again with {memory / MB:.0f} MB ({attempt})"
    return Retry(request.id, event.at, memory, message)


def what_happened(event: Died) -> str:
    """`worker long-3 (pid 41233) was killed by the kernel at 251 MB; …`."""
    return f"worker {event.worker} (pid {event.exit.pid}) {event.exit.sentence()}"


def story(event: Died, known: Circumstances) -> str:
    """What happened, what ran, for how long, and what it used to need."""
    ran = f"It was running `{known.label}`"
    if event.exit.seconds is not None:
        ran += f" for {event.exit.seconds:.1f} s"
    lines = [f"{what_happened(event)}.", f"{ran}."]
    if known.peaks:
        lines[-1] += f" {_peak_of_the_last(known)}"
    if known.request.retry_oom and known.request.attempts > 1:
        lines.append(f"It was attempt {known.request.attempts} of {known.request.max_attempts}.")
    return "\n".join(lines)


def advice(event: Died, known: Circumstances) -> str:
    """The commands to try, beginning with `openenv`."""
    memory = more_memory(event.exit, known.budget_bytes)
    tips = [] if memory is None else [_with_more(known.request, memory)]
    if known.long_running > 1:
        tips.append(f"openenv up --max-long-workers {known.long_running - 1}")
    if not tips:
        return "it had all the memory that workers may use: openenv info shows the plan"
    return "   or fewer at once: ".join(tips)


def _with_more(request: Request, memory_bytes: int) -> str:
    megabytes = memory_bytes // MB
    source = request.payload.get("source")
    if request.operation != "launch" or not source:
        return f"openenv up --worker-memory-mb {megabytes}"
    command = f"openenv launch {shlex.quote(str(source))}"
    if request.environment and request.environment != name_of_source(str(source)):
        command += f" --name {request.environment}"
    return f"{command} --memory {megabytes}M"


def _peak_of_the_last(known: Circumstances) -> str:
    operation, count = known.request.operation, len(known.peaks)
    which = operation if count == 1 else f"{count} {_PLURALS.get(operation, f'{operation}s')}"
    return f"Peak of the last {which}: {max(known.peaks) / MB:.0f} MB."
