# SPDX-License-Identifier: Apache-2.0
"""`StartedReplicas`: the replicas of one launch, followed through their sockets until ready.

The same for all providers: shims and agents speak one protocol
(`environments/shim/connections.py`).
"""

from __future__ import annotations

import select
import time
from pathlib import Path

from ...schema.errors import (
    EnvironmentsError,
    NoProcesses,
    NotReady,
    ReplicaFailed,
    with_last_lines,
)
from ...schema.replica import StatusLine
from ...system.files.log_files import last_lines
from ...system.memory.pids_limit import HINT as ROOM_HINT
from ...system.memory.pids_limit import no_room_text, tells_no_room
from ...system.memory.usage import replica_bytes
from ...system.process.exit_reason import ExitReason
from .. import run_files
from ..shim.client import ShimClient, ShimGone
from .provider import OnLasting, OnReplica, OnWaiting, StartedReplica

LAST_LINES = 20  # of a replica's log, in a failure
IMPORTS = "imports"  # in a replica's folder: the links that its imports go through
_READY = ("ready", "asleep")  # states of a shim's status; the latter was ready a moment ago
_ALIVE = ("starting", *_READY)
_IMPORT_MACHINERY = 'File "<frozen importlib'
LASTING_SECONDS = 30.0  # without another one that is ready, until it is told what could be done
PATIENT_SECONDS = 10.0  # without a replica that has become ready, until it is told why
_STOP_GRACE_SECONDS = 2.0  # what is not ready yet has no sessions to end


class StartedReplicas:
    """The replicas of one launch, until they are its environment's. Owned by one thread."""

    def __init__(self) -> None:
        self._run_files: list[run_files.RunFile] = []
        self._links: dict[str, ShimClient] = {}

    @property
    def address(self) -> str:
        """What goes into upstream's `base_url`."""
        return self._run_files[0].address

    @property
    def is_address_known(self) -> bool:
        """Whether `address` is theirs already: some engines say it only when they run."""
        first = self._run_files[0]
        return first.is_at_gateway or not first.is_elsewhere

    def wait_until_ready(
        self,
        timeout_seconds: float,
        on_ready: OnReplica,
        on_waiting: OnWaiting = lambda _text: None,
        on_lasting: OnLasting = lambda _text, _seconds: None,
    ) -> list[StartedReplica]:
        """All of them, ready.

        Args:
            timeout_seconds: For all of them.
            on_ready: Called with each that is ready.
            on_waiting: Called with why others are not, when that has changed.
            on_lasting: Called with the same, again and again, once it lasts; and with the seconds
                that are left.

        Raises:
            ReplicaFailed, NotReady
        """
        deadline = time.monotonic() + timeout_seconds
        look_at = time.monotonic() + PATIENT_SECONDS
        waits_since = time.monotonic()
        told: str | None = None
        ready: dict[str, StartedReplica] = {}
        self._connect()
        while len(ready) < len(self._run_files):
            for run_file in self._changed(min(deadline, look_at)):
                status = self._status_of(run_file)
                _raise_if_ended(run_file, status)
                if status["state"] in _READY and run_file.replica_id not in ready:
                    info = status.get("info") or {}
                    replica = StartedReplica(
                        id=run_file.replica_id,
                        ordinal=run_file.ordinal,
                        run_dir=str(run_file.run_dir),
                        pid=status.get("pid"),
                        max_sessions=info.get("max_sessions"),
                        memory_bytes=replica_bytes(status),
                        notes=tuple(info.get("notes", ())),
                        sessions_fail=status.get("sessions_fail"),
                        serving=info.get("serving"),
                        route=info.get("route"),
                    )
                    ready[run_file.replica_id] = replica
                    on_ready(replica)
                    waits_since = time.monotonic()
                    look_at = waits_since + PATIENT_SECONDS
            waiting = [r for r in self._run_files if r.replica_id not in ready]
            if waiting and time.monotonic() >= min(deadline, look_at):
                look_at = time.monotonic() + PATIENT_SECONDS
                why = self._why_waiting(waiting[0])
                if time.monotonic() >= deadline:
                    raise _not_ready(waiting[0], timeout_seconds, why, len(ready))
                if why is not None and why != told:
                    on_waiting(f"{len(waiting)} of {self._all} wait: {why}")
                    told = why
                if why is not None and time.monotonic() - waits_since >= LASTING_SECONDS:
                    counts = f"{len(ready)} of {self._all} are ready"
                    text = f"{counts}; {len(waiting)} wait{'s' if len(waiting) == 1 else ''}: {why}"
                    on_lasting(text, deadline - time.monotonic())
        return [ready[run_file.replica_id] for run_file in self._run_files]

    def stop(self) -> None:
        """Stop everything that was started, and give the port back."""
        self.release()
        run_files.stop_replicas([r.run_dir for r in self._run_files], _STOP_GRACE_SECONDS)

    def release(self) -> None:
        """Close our connections; the replicas go on."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    @property
    def _all(self) -> str:
        new = "new " if any(map(_is_added, self._run_files)) else ""
        return f"{len(self._run_files)} {new}replicas"

    def _connect(self) -> None:
        for run_file in self._run_files:
            try:
                self._links[run_file.replica_id] = ShimClient.connect(run_file.socket_path)
            except ShimGone as exc:
                self._on_lost(run_file, exc)

    def _changed(self, deadline: float) -> list[run_files.RunFile]:
        """Replicas whose shims have reported something; none when the time is over."""
        by_link = {self._links[r.replica_id]: r for r in self._run_files}
        timeout = max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select(list(by_link), [], [], timeout)
        return [by_link[link] for link in readable]

    def _status_of(self, run_file: run_files.RunFile) -> StatusLine:
        while True:
            try:
                return self._read_status(run_file)
            except ShimGone as exc:
                self._on_lost(run_file, exc)

    def _read_status(self, run_file: run_files.RunFile) -> StatusLine:
        link = self._links[run_file.replica_id]
        status = link.status
        if link.has_ended and status["state"] in _ALIVE:  # it exited after its last status
            raise ShimGone(f"the shim of {run_file.replica_id} has ended")
        return status

    def _why_waiting(self, run_file: run_files.RunFile) -> str | None:
        status = self._status_of(run_file)
        return status.get("problem") or status.get("waiting")

    def _on_lost(self, run_file: run_files.RunFile, cause: ShimGone) -> None:
        """Fail, as a replica ends with its shim."""
        raise _shim_lost(run_file) from cause


def _is_added(run_file: run_files.RunFile) -> bool:
    """Whether it is started beside replicas that serve: by a `scale` or a `restart`."""
    return "added_by" in run_file.data


def _name_of(run_file: run_files.RunFile) -> str:
    return f"replica {run_file.ordinal} of {run_file.environment}"


def _raise_if_ended(run_file: run_files.RunFile, status: StatusLine) -> None:
    if status["state"] in _ALIVE:
        return
    who = _name_of(run_file)
    lines = status.get("log_tail") or last_lines(run_file.log_path, LAST_LINES)
    lines = readable(lines, run_file.run_dir / IMPORTS)
    if tells_no_room("\n".join([status.get("failed") or "", *lines])):
        raise NoProcesses(f"{who} cannot be started: {no_room_text()}", ROOM_HINT)
    if failure := status.get("failed"):
        if [line.strip() for line in lines] == [failure]:  # the log repeats it
            lines = []
        raise ReplicaFailed(
            with_last_lines(f"{who} failed to start: {failure}", lines),
            "fix the error above, and launch again",
        )
    how = status.get("exit")
    if status["state"] != "exited" or not how:
        raise ReplicaFailed(f"{who} was stopped before it was ready")
    reason = ExitReason.from_json(how)
    message = f"{who} {reason.sentence()} before it was ready"
    hint = f"full log: openenv logs {run_file.environment}"
    raise ReplicaFailed(
        _with_heading(message, lines),
        "give it more: --memory 2G" if reason.is_oom else hint,
        is_oom=reason.is_oom,
        evidence=reason.to_json(),
    )


def readable(lines: list[str], imports: Path) -> list[str]:
    """Clean a traceback: the project's own paths instead of our links, no frames of `import`."""
    try:
        links = {str(link): str(link.readlink()) for link in imports.iterdir()}
    except OSError:
        links = {}
    kept = [line for line in lines if not line.lstrip().startswith(_IMPORT_MACHINERY)]
    for link, target in links.items():
        kept = [line.replace(link, target) for line in kept]
    return kept


def _with_heading(message: str, lines: list[str]) -> str:
    if not lines:
        return f"{message}, without any output"
    return with_last_lines(f"{message}; its last lines:", lines)


def _not_ready(
    run_file: run_files.RunFile, timeout_seconds: float, why: str | None, ready: int
) -> EnvironmentsError:
    lines = last_lines(run_file.log_path, LAST_LINES)
    message = f"{_name_of(run_file)} was not ready after {timeout_seconds:g} s"
    if why is not None:
        message += f": {why}"
    hint = "allow more time with --set ready-timeout=DURATION"
    if _is_added(run_file):
        hint = "its launch says how long that may take: --set ready-timeout=DURATION"
    elif ready and why is not None:  # its engine has no place for more, perhaps
        hint += f", or ask for {ready}: as many were ready"
    return NotReady(_with_heading(message, lines), hint)


def _shim_lost(run_file: run_files.RunFile) -> ReplicaFailed:
    lines = last_lines(run_file.log_path, LAST_LINES)
    message = f"the shim of {_name_of(run_file)} ended unexpectedly"
    return ReplicaFailed(_with_heading(message, lines), "launch it again")
