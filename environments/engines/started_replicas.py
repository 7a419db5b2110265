# SPDX-License-Identifier: Apache-2.0
"""Reports about replicas that are being started: their readiness, or the reason of a failure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...schema import errors
from ...schema.replica import StatusLine
from ...system.files.log_files import last_lines
from ...system.memory.limits import HINT as ROOM_HINT
from ...system.memory.limits import no_room_text, tells_no_room
from ...system.memory.usage import replica_bytes
from ...system.process.exit_reason import ExitReason
from .. import run_files
from ..shim.client import is_alive
from .host_options import IMPORTS

LAST_LINES = 20  # of a replica's log, in a failure
READY = ("ready", "asleep")  # states of a shim's status; one that is asleep has been ready
ALIVE = ("starting", *READY)
_IMPORT_MACHINERY = 'File "<frozen importlib'
# Our frames below an import that takes long, as `faulthandler` writes them.
_OUR_FRAMES = re.compile(
    r'\n  File ".*/env_host/environment/\w+\.py", line \d+ in .*(\n  File .*)*'
)


@dataclass(frozen=True, slots=True)
class StartedReplica:
    """One replica that is ready."""

    id: str
    ordinal: int
    pid: int | None = None
    max_sessions: int | None = None
    memory_bytes: int | None = None  # its memory when it became ready
    notes: tuple[str, ...] = ()  # for the user
    sessions_fail: str | None = None  # why no environment could be created
    serving: str | None = None  # a `schema.protocol.Serving`
    route: str | None = None  # a route to try on a server without sessions: `POST /reset {}`


def started_replica(run_file: run_files.RunFile, status: StatusLine) -> StartedReplica:
    """Return a replica that is ready, by its status."""
    info = status.get("info") or {}
    return StartedReplica(
        id=run_file.replica_id,
        ordinal=run_file.ordinal,
        pid=status.get("pid"),
        max_sessions=info.get("max_sessions"),
        memory_bytes=replica_bytes(status),
        notes=tuple(info.get("notes", ())),
        sessions_fail=status.get("sessions_fail"),
        serving=info.get("serving"),
        route=info.get("route"),
    )


def is_ready(run_file: run_files.RunFile, status: StatusLine) -> bool:
    """Return whether a replica serves, by the last status of its shim or agent."""
    is_there = is_alive(status) or not run_file.is_local  # on an engine it outlives its agent
    return is_there and status.get("state") in READY


def _describe(run_file: run_files.RunFile) -> str:
    return f"replica {run_file.ordinal} of {run_file.environment}"


def raise_if_ended(run_file: run_files.RunFile, status: StatusLine) -> None:
    """Raise why a replica that was being started has ended: `ReplicaFailed` or `NoProcesses`."""
    if status["state"] in ALIVE:
        return
    who = _describe(run_file)
    lines = status.get("log_tail") or last_lines(run_file.log_path, LAST_LINES)
    lines = readable(lines, run_file.run_dir / IMPORTS)
    if tells_no_room("\n".join([status.get("failed") or "", *lines])):
        raise errors.NoProcesses(f"{who} cannot be started: {no_room_text()}", ROOM_HINT)
    if failure := status.get("failed"):
        if [line.strip() for line in lines] == [failure]:  # the log repeats it
            lines = []
        raise errors.ReplicaFailed(
            errors.with_last_lines(f"{who} failed to start: {failure}", lines),
            _hint_on([failure]) or "fix the error above, and launch again",
        )
    how = status.get("exit")
    if status["state"] != "exited" or not how:
        raise errors.ReplicaFailed(f"{who} was stopped before it was ready")
    reason = ExitReason.from_json(how)
    message = f"{who} {reason.sentence()} before it was ready"
    hint = _hint_on(lines) or (f"full log: openenv logs {run_file.environment}" if lines else None)
    raise errors.ReplicaFailed(
        _with_heading(message, lines),
        "give it more: --memory 2G" if reason.is_oom else hint,
        is_oom=reason.is_oom,
        evidence=reason.to_json(),
    )


def _hint_on(lines: list[str]) -> str | None:
    hint = "install the package that has the module, with --with PACKAGE or in the project's"
    hint += " pyproject.toml, and launch again"
    return hint if any("ModuleNotFoundError" in line for line in lines) else None


def readable(lines: list[str], imports: Path) -> list[str]:
    """Return a traceback with the project's paths in place of our links, and no frames of ours."""
    try:
        links = {str(link): str(link.readlink()) for link in imports.iterdir()}
    except OSError:
        links = {}
    lines = _OUR_FRAMES.sub("", "\n".join(lines)).splitlines()
    kept = [line for line in lines if not line.lstrip().startswith(_IMPORT_MACHINERY)]
    for link, target in links.items():
        kept = [line.replace(link, target) for line in kept]
    return kept


def _with_heading(message: str, lines: list[str]) -> str:
    if not lines:
        return f"{message}, without any output"
    return errors.with_last_lines(f"{message}; its last lines:", lines)


def not_ready(
    run_file: run_files.RunFile, timeout_seconds: float, why: str | None
) -> errors.EnvironmentsError:
    """Return the error of a replica that was not ready in time."""
    lines = last_lines(run_file.log_path, 6 * LAST_LINES)  # most may be frames of ours
    lines = readable(lines, run_file.run_dir / IMPORTS)[-LAST_LINES:]
    message = f"{_describe(run_file)} was not ready after {timeout_seconds:g} s"
    if why is not None:
        message += f": {why}"
    hint = "its launch says how long that may take: --set ready-timeout=DURATION"
    return errors.NotReady(_with_heading(message, lines), hint)


def shim_lost(run_file: run_files.RunFile) -> errors.ReplicaFailed:
    """Return the error of a replica whose shim was killed while it was being started."""
    lines = last_lines(run_file.log_path, LAST_LINES)
    message = f"the shim of {_describe(run_file)} ended unexpectedly"
    return errors.ReplicaFailed(_with_heading(message, lines), "launch it again")
