# SPDX-License-Identifier: Apache-2.0
"""Reads Docker's facts about a container: where it is reached, and how it ended.

    a published port   client ──▶ docker-proxy ──▶ container     docker-proxy ends with dockerd
    its own address    client ───────────────────▶ container     as long as the container runs

It is reached at its own address only where nothing speaks against it: it runs on this very machine
(its process has it in its cgroup's name), and its network's gateway is an address of this machine.
An engine in a virtual machine (Docker Desktop), on another host, or without root's rights, whose
bridge is in a namespace of its own, has its containers reached at their published ports.

`OOMKilled` says only that something in the container was ever killed for memory. Docker's events
say when that was, and which signals were sent through Docker: `docker kill` is no kill for
memory, whatever the flag says. They are kept by dockerd until it is restarted, the last 256.
"""

from __future__ import annotations

import signal as signals
import socket
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from ....system.process.proc import signal_name
from ....system.text.json_lines import Json
from ..base import ExitFacts

LATE_SECONDS = 0.3  # after an exit, by which Docker has reported what preceded it
_NEVER = "0001-01-01"  # Go's zero time
_EXIT_KILLED, _EXIT_TERMINATED = 128 + signals.SIGKILL, 128 + signals.SIGTERM
_TELL = frozenset({signals.SIGUSR1, signals.SIGUSR2})  # by which we ask a server to drain


def is_rootless(info: Json) -> bool:
    """Return whether an engine runs without root's rights, as it says."""
    return any("rootless" in each for each in info.get("SecurityOptions") or ())


def own_address(container: Json, proc: Path = Path("/proc")) -> str | None:
    """Return `http://host:port` of an inspected container that runs; None: it is not reached so."""
    settings = container["NetworkSettings"]
    published = [name for name, at in (settings.get("Ports") or {}).items() if at]
    if len(published) != 1 or not _runs_here(container, proc):
        return None
    port = published[0].partition("/")[0]
    for network in (settings.get("Networks") or {}).values():
        if network.get("IPAddress") and _is_of_this_machine(network.get("Gateway")):
            return f"http://{network['IPAddress']}:{port}"
    return None


def _runs_here(container: Json, proc: Path) -> bool:
    try:
        return container["Id"] in (proc / str(container["State"]["Pid"]) / "cgroup").read_text()
    except OSError:
        return False


def _is_of_this_machine(address: str | None) -> bool:
    """Return whether an address can be bound, which takes no privilege."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
            found.bind((address or "", 0))
    except OSError:
        return False
    return bool(address)


def events_of(api: Any, found: Json) -> list[Json]:
    """Return Docker's events about an inspected container that has ended, oldest first."""
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
