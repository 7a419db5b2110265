# SPDX-License-Identifier: Apache-2.0
"""Replicas as processes of this machine, each below a shim that outlives us.

    open_listeners ─▶ listening sockets ─▶ run file ─▶ shim 0 ─▶ env host
                                          └▶ run file ─▶ shim 1 ─▶ env host   (the same socket)

All replicas of an environment accept from one socket, so it has one address and the kernel gives a
connection to one that has room. The shims hold the socket; our copy is closed on `release`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ...env_host.protocol import (
    ENVIRONMENT_HEADER,
    GENERATION_HEADER,
    HOST_CONFIG_VARIABLE,
    REPLICA_HEADER,
)
from ...processes.exits.exit_reason import ExitReason
from ...processes.resources.limits import available_memory_bytes, read_limits
from ...processes.resources.memory import replica_bytes
from ...processes.resources.pids_limit import HINT as ROOM_HINT
from ...processes.resources.pids_limit import ProcessRoom, no_room_text, process_room, tells_no_room
from ...shim.client import ShimClient, ShimGone, start_shim
from ...system.log_files import last_lines
from ...system.units import MB
from .. import run_files
from ..errors import (
    EnvironmentsError,
    InvalidSpec,
    NoProcesses,
    NotReady,
    ReplicaFailed,
    with_last_lines,
)
from ..layout import Layout, make_private
from ..sources.program import HOST_PRELOAD, Program
from ..spec import EnvironmentSpec
from . import gpus
from .base import OnReplica, StartedReplica
from .environment_variables import RUN_DIR_VARIABLE, child_environment
from .ports import PortOwner, open_listeners

Json = dict[str, Any]
Devices = tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them

# Of one replica; the shim drops the oldest half beyond it. The daemon sets the variable.
MAX_LOG_VARIABLE = "OPENENV_MAX_LOG_MB"
DEFAULT_MAX_LOG_MB = 64
# Workers carry more and the daemon less: the kernel takes a worker before a replica.
REPLICA_OOM_SCORE_ADJ = 300
LAST_LINES = 20  # of a replica's log, in a failure
_ALIVE = ("starting", "ready")  # states of a shim's status
IMPORTS = "imports"  # in a replica's folder: the links that its imports go through
_IMPORT_MACHINERY = 'File "<frozen importlib'
PROCESSES_OF_REPLICA = 2  # the shim and the host
PROCESSES_TO_START = 1  # the fork server, or a shell
THREADS_OF_SHARD = 2  # its own, and the one that watches its loop
_STOP_GRACE_SECONDS = 2.0  # what is not ready yet has no sessions to end


class LocalProvider:
    """Starts replicas on this machine."""

    name: ClassVar[str] = "local"

    def __init__(self, home: Path) -> None:
        self._layout = Layout(home)

    def start(
        self,
        spec: EnvironmentSpec,
        program: Program,
        *,
        launch_id: str,
        on_started: OnReplica,
    ) -> LocalReplicas:
        """Start a shim per replica.

        Raises:
            InvalidSpec: there are more replicas than sessions, or too few GPUs.
            NoProcesses: there is no room for theirs.
            PortInUse, OSError
        """
        shares = share_sessions(spec.max_sessions, spec.replicas)
        found = gpus.find_gpus({**os.environ, **spec.env}) if spec.gpus else ()
        devices = [
            gpus.share(found, spec.gpus, ordinal) if spec.gpus else ()
            for ordinal in range(spec.replicas)
        ]
        check_process_room(spec, process_room())
        make_private(self._layout.runs)
        make_private(self._layout.sockets)
        owner = PortOwner(spec.name, self._layout.runs)
        replicas = LocalReplicas(spec, open_listeners(spec.host, spec.port, owner))
        plan = _Plan(
            self._layout,
            spec,
            program,
            launch_id,
            replicas.port,
            available_memory_bytes(),
            _cores_of_one(spec),
        )
        try:
            for ordinal, share in enumerate(shares):
                data = plan.run_file(ordinal, share, devices[ordinal])
                on_started(replicas.start_one(data, program.links))
        except BaseException as exc:
            replicas.stop()
            if isinstance(exc, BlockingIOError):
                text = f"a replica's shim cannot be started: {no_room_text()}"
                raise NoProcesses(text, ROOM_HINT) from exc
            raise
        return replicas


class LocalReplicas:
    """The replicas of one launch. Owned by one thread."""

    def __init__(self, spec: EnvironmentSpec, listeners: list[socket.socket]) -> None:
        self._spec = spec
        self._listeners = listeners
        self.port = int(listeners[0].getsockname()[1])
        self._run_files: list[run_files.RunFile] = []
        self._links: dict[str, ShimClient] = {}

    @property
    def address(self) -> str:
        """What goes into upstream's `base_url`."""
        return run_files.address_of(self._spec.host, self.port)

    def start_one(self, data: Json, links: dict[str, Path]) -> StartedReplica:
        """Write one replica down, and start its shim."""
        run_dir = Path(data["run_dir"])
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if links:
            (run_dir / IMPORTS).mkdir(mode=0o700, exist_ok=True)
        for name, target in links.items():
            with contextlib.suppress(FileExistsError):
                (run_dir / IMPORTS / name).symlink_to(target, target_is_directory=True)
        # Before it is started: were we killed in between, it must be found.
        run_file = run_files.RunFile.of(run_dir, data)
        self._run_files.append(run_file)
        start_shim(run_dir, data, listen_fds=[one.fileno() for one in self._listeners])
        return StartedReplica(run_file.replica_id, run_file.ordinal, str(run_dir))

    def wait_until_ready(self, timeout_seconds: float, on_ready: OnReplica) -> list[StartedReplica]:
        """All of them, ready.

        Raises:
            ReplicaFailed, NotReady
        """
        started = time.monotonic()
        ready: dict[str, StartedReplica] = {}
        self._connect()
        while len(ready) < len(self._run_files):
            for run_file in self._changed(started + timeout_seconds):
                status = self._status_of(run_file)
                _raise_if_ended(run_file, status)
                if status["state"] == "ready" and run_file.replica_id not in ready:
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
                    )
                    ready[run_file.replica_id] = replica
                    on_ready(replica)
            waiting = [r for r in self._run_files if r.replica_id not in ready]
            if waiting and time.monotonic() - started >= timeout_seconds:
                raise _not_ready(waiting[0], timeout_seconds)
        return [ready[run_file.replica_id] for run_file in self._run_files]

    def stop(self) -> None:
        """Stop everything that was started, and give the port back."""
        self.release()
        run_files.stop_replicas([r.run_dir for r in self._run_files], _STOP_GRACE_SECONDS)

    def release(self) -> None:
        """Close our ends; the shims have their own."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        for one in self._listeners:
            one.close()

    def _connect(self) -> None:
        for run_file in self._run_files:
            try:
                self._links[run_file.replica_id] = ShimClient.connect(run_file.socket_path)
            except ShimGone as exc:
                raise _shim_lost(run_file) from exc

    def _changed(self, deadline: float) -> list[run_files.RunFile]:
        """Replicas whose shims have reported something; none when the time is over."""
        by_link = {self._links[r.replica_id]: r for r in self._run_files}
        timeout = max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select(list(by_link), [], [], timeout)
        return [by_link[link] for link in readable]

    def _status_of(self, run_file: run_files.RunFile) -> Json:
        link = self._links[run_file.replica_id]
        try:
            status = link.status
        except ShimGone as exc:
            raise _shim_lost(run_file) from exc
        if link.has_ended and status["state"] in _ALIVE:  # it exited after its last status
            raise _shim_lost(run_file)
        return status


@dataclass(frozen=True, slots=True)
class _Plan:
    """Writes the run files of one launch."""

    _layout: Layout
    _spec: EnvironmentSpec
    _program: Program
    _launch_id: str
    _port: int
    # Which the env host cannot find out: it stands alone, and knows no cgroups.
    _available_bytes: int
    _cores: int

    def run_file(self, ordinal: int, max_sessions: int | None, devices: Devices) -> Json:
        """Everything that the shim of one replica needs to know."""
        name = self._spec.name
        replica_id = self._replica_id(ordinal)
        run_dir = self._layout.run_dir(replica_id)
        log_path = self._layout.replica_log(name, replica_id)
        make_private(log_path.parent)
        return {
            "version": run_files.RUN_FILE_VERSION,
            "replica_id": replica_id,
            "environment": name,
            "ordinal": ordinal,
            "request_id": self._launch_id,
            "run_dir": str(run_dir),
            # What a database that was lost knew of it; `env` and `token` stand below.
            "spec": {k: v for k, v in asdict(self._spec).items() if k not in ("env", "token")},
            "argv": list(self._program.argv),
            "entry": self._program.entry,
            "fork_server": self._layout.fork_server(HOST_PRELOAD),
            "env": self._environment(ordinal, max_sessions, devices),
            "cwd": str(self._program.folder),
            "log_path": str(log_path),
            "socket_path": str(self._layout.replica_socket(replica_id)),
            "door_path": str(self._door(ordinal)),
            "host": self._spec.host,
            "port": self._port,
            "token": self._spec.token,
            "cgroups": self._layout.replica_groups,
            "memory_limit_bytes": self._spec.memory_bytes,
            "max_log_bytes": int(os.environ.get(MAX_LOG_VARIABLE) or DEFAULT_MAX_LOG_MB) * MB,
            "oom_score_adj": REPLICA_OOM_SCORE_ADJ,
            "created_at": time.time(),
        }

    def _replica_id(self, ordinal: int) -> str:
        return f"{self._spec.name}-{ordinal}-{self._launch_id}"

    def _door(self, ordinal: int) -> Path:
        return self._layout.replica_socket(self._replica_id(ordinal)).with_suffix(".door")

    def _environment(
        self, ordinal: int, max_sessions: int | None, devices: Devices
    ) -> dict[str, str]:
        config = self._program.config
        replica_id = self._replica_id(ordinal)
        run_dir = self._layout.run_dir(replica_id)
        links = (str(run_dir / IMPORTS),) if self._program.links else ()
        headers = {
            ENVIRONMENT_HEADER: self._spec.name,
            GENERATION_HEADER: self._launch_id,
            REPLICA_HEADER: replica_id,
        }
        count = self._spec.replicas
        config = replace(
            config,
            max_sessions=max_sessions,
            import_paths=(*links, *config.import_paths),
            memory_bytes=self._spec.memory_bytes or self._available_bytes,
            cores=self._cores,
            headers=headers,
            replica=ordinal,
            door_folder=str(self._layout.sockets),
            doors=tuple(self._door(each).name for each in range(count)) if count > 1 else (),
        )
        environ = child_environment(
            os.environ,
            home=str(self._layout.home),
            max_sessions=max_sessions,
            given=self._spec.env,
        )
        if devices:
            environ[gpus.VARIABLE] = ",".join(devices)
        return environ | {
            HOST_CONFIG_VARIABLE: json.dumps(config.to_json()),
            RUN_DIR_VARIABLE: str(run_dir),
        }


def share_sessions(max_sessions: int | None, replicas: int) -> list[int | None]:
    """How many sessions each replica may have, as evenly as it goes.

    Raises:
        InvalidSpec: a replica would have none.
    """
    if max_sessions is None:
        return [None] * replicas
    if max_sessions < replicas:
        raise InvalidSpec(
            f"{replicas} replicas cannot share {max_sessions} sessions",
            f"use --replicas {max_sessions} or fewer, or a higher --max-sessions",
        )
    each, left = divmod(max_sessions, replicas)
    return [each + (ordinal < left) for ordinal in range(replicas)]


def check_process_room(spec: EnvironmentSpec, room: ProcessRoom | None) -> None:
    """Refuse what could not be forked, before any of it is.

    Raises:
        NoProcesses
    """
    shards = 1 if spec.serve_as_is else spec.shards or _cores_of_one(spec)
    each = PROCESSES_OF_REPLICA + shards * THREADS_OF_SHARD
    needed = spec.replicas * each + PROCESSES_TO_START
    if room is None or needed <= room.left:
        return
    who = "1 replica needs" if spec.replicas == 1 else f"{spec.replicas} replicas need"
    raise NoProcesses(
        f"{who} about {needed} processes and threads, and {room.left} are left: {room.sentence()}",
        ROOM_HINT,
    )


def _cores_of_one(spec: EnvironmentSpec) -> int:
    return max(1, int(read_limits().cpus) // spec.replicas)


def _name_of(run_file: run_files.RunFile) -> str:
    return f"replica {run_file.ordinal} of {run_file.environment}"


def _raise_if_ended(run_file: run_files.RunFile, status: Json) -> None:
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
    if status["state"] != "exited" or not status.get("exit"):
        raise ReplicaFailed(f"{who} was stopped before it was ready")
    reason = ExitReason.from_json(status["exit"])
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


def _not_ready(run_file: run_files.RunFile, timeout_seconds: float) -> EnvironmentsError:
    lines = last_lines(run_file.log_path, LAST_LINES)
    message = f"{_name_of(run_file)} was not ready after {timeout_seconds:g} s"
    return NotReady(_with_heading(message, lines), "allow more time with --ready-timeout")


def _shim_lost(run_file: run_files.RunFile) -> ReplicaFailed:
    lines = last_lines(run_file.log_path, LAST_LINES)
    message = f"the shim of {_name_of(run_file)} ended unexpectedly"
    return ReplicaFailed(_with_heading(message, lines), "launch it again")
