# SPDX-License-Identifier: Apache-2.0
"""How a container ended: from its state, and from Docker's events about it.

`OOMKilled` says only that something in the container was ever killed for memory. Docker's events
say when that was, and which signals were sent through Docker: `docker kill` is no kill for
memory, whatever the flag says. They are kept by dockerd until it is restarted, the last 256.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from ...system.proc import signal_name
from .base import ExitFacts

Json = dict[str, Any]

LATE_SECONDS = 0.3  # after an exit, by which Docker has reported what preceded it
_NEVER = "0001-01-01"  # Go's zero time
_EXIT_KILLED, _EXIT_TERMINATED = 128 + signals.SIGKILL, 128 + signals.SIGTERM
_TELL = frozenset({signals.SIGUSR1, signals.SIGUSR2})  # by which we ask a server to drain


def events_of(api: Any, found: Json) -> list[Json]:
    """Return Docker's events about a container that has ended, oldest first.

    Args:
        api: The connection.
        found: What `inspect` says of it.
    """
    state = found["State"]
    if state["StartedAt"].startswith(_NEVER) or state["FinishedAt"].startswith(_NEVER):
        return []
    began, ended = _seconds(state["StartedAt"]), _seconds(state["FinishedAt"]) + LATE_SECONDS
    filters = {"container": found["Id"], "event": ["kill", "oom"]}
    return list(
        api.events(since=f"{began:.9f}", until=f"{ended:.9f}", filters=filters, decode=True)
    )


def exit_of(found: Json, events: Iterable[Json] = ()) -> ExitFacts:
    """Return how a container ended, from what the engine says of it."""
    state = found["State"]
    if state["StartedAt"].startswith(_NEVER):
        return ExitFacts(error=state.get("Error") or "it never ran")
    code, seconds = state["ExitCode"], _seconds_between(state["StartedAt"], state["FinishedAt"])
    oom_at, sent = None, None
    for event in events:
        if event["Action"] == "oom":
            oom_at = event["timeNano"] / 1e9
        elif (number := int(event["Actor"]["Attributes"].get("signal", 0))) not in _TELL:
            sent = number
    if sent == signals.SIGKILL and code == _EXIT_KILLED:
        text = "sent through Docker: docker kill, or docker stop after its time-out"
        return ExitFacts(exit_code=code, seconds=seconds, evidence=text)
    if sent and code in (0, 128 + sent):
        text = f"{signal_name(sent)} was sent through Docker (docker kill, docker stop)"
        return ExitFacts(ended_by=text, seconds=seconds)
    # A process of it was killed for memory. A container that ends well later was not.
    is_oom = state["OOMKilled"] and code not in (0, _EXIT_TERMINATED)
    return ExitFacts(
        exit_code=code,
        is_oom=is_oom,
        oom_at=oom_at,
        seconds=seconds,
        evidence=f"container {found['Id'][:12]}, OOMKilled" if is_oom else None,
    )


def _seconds_between(started: str, finished: str) -> float | None:
    if finished.startswith(_NEVER):
        return None
    return max(0.0, _seconds(finished) - _seconds(started))


def _seconds(moment: str) -> float:
    """Return a time of Docker's in seconds since the epoch."""
    return datetime.fromisoformat(moment).timestamp()
