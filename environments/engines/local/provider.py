# SPDX-License-Identifier: Apache-2.0
"""Replicas as processes of this machine, each below a shim that outlives us.

    open_listeners ─▶ listening sockets ─▶ run file ─▶ shim 0 ─▶ env host
                                          └▶ run file ─▶ shim 1 ─▶ env host   (the same socket)

All replicas of an environment accept from one socket, so it has one address and the kernel gives a
connection to one that has room. Behind the gateway, each has a socket of its own. The shims hold
the sockets.

An update starts its replicas beside those of the launch that it replaces, on the same sockets,
which a shim of these passes on. They are held (`"held"` in the run file): they get ready, and
accept nothing before the daemon has them take over.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

from ....schema.errors import NoProcesses, NotRunning
from ....schema.layout import make_private
from ....schema.protocol import HOST_CONFIG_VARIABLE, door_path
from ....schema.replica import RunFileData
from ....schema.spec import EnvironmentSpec
from ....system.memory import limits
from ....system.memory.limits import HINT as ROOM_HINT
from ... import run_files
from ...run_files import RunFile, by_service
from ...shim.client import Fork, start_shim
from ...sources.program import Prepared, Program
from .. import host_options, providers

# Workers carry more and the daemon less: the kernel takes a worker before a replica.
REPLICA_OOM_SCORE_ADJ = 300
PROCESSES_OF_REPLICA = 2  # the shim and the host
PROCESSES_TO_START = 1  # the shell of a shim that is a program
THREADS_OF_SHARD = 2  # its own, and the one that watches its loop


class LocalProvider(providers.Provider):
    """Starts replicas on this machine."""

    def __init__(self, name: str, home: Path, fork: Fork | None = None) -> None:
        """`fork` forks shims; without it, and where it cannot, they are programs."""
        super().__init__(name, home)
        self._fork = fork

    def _begin_launch(self, batch: providers.Batch, prepared: Prepared) -> providers.Beginning:
        """Take over the sockets of what is replaced, if they are where the spec wants them.

        Raises:
            InvalidSpec: there are too few GPUs.
            NoProcesses: there is no room for theirs.
        """
        assert isinstance(prepared, Program)  # as its `Preparation` says
        spec, count, _, replaced = batch
        found = host_options.find_gpus({**os.environ, **spec.env}) if spec.gpus else ()
        if spec.gpus:
            host_options.share(found, spec.gpus, 0)
        check_process_room(replace(spec, replicas=count), limits.process_room())
        make_private(self._layout.sockets)

        def complete(data: RunFileData, share: int | None) -> RunFileData:
            ordinal = data["ordinal"]
            devices = host_options.share(found, spec.gpus, ordinal) if spec.gpus else ()
            data["held"] = replaced is not None
            return data | self._what_runs(spec, prepared, data, share, devices)

        # An earlier update may have taken over from the launch that is named by now.
        before = sorted((each for each in replaced or () if each.is_local), key=by_service)
        there = [each for each in before if each.host == spec.host and not spec.gateway]
        port = spec.port or (there[0].port if there else None)
        if port is not None and (fds := run_files.listeners_of(there, port)):
            return [[socket.socket(fileno=fd) for fd in fds]], complete
        return self._open(spec, count if spec.gateway else 1, port), complete

    def _begin_more(self, like: RunFile, batch: providers.Batch) -> providers.Beginning:
        """Share the sockets of the others; behind the gateway, each has one of its own.

        Raises:
            NoProcesses
            NotRunning: no shim has the environment's sockets.
        """
        spec, count, known, _ = batch
        check_process_room(replace(spec, replicas=count), limits.process_room())
        complete = partial(self._adapt, like)
        if spec.gateway:
            return self._open(spec, count, None), complete
        fds = run_files.listeners_of(known, like.port)
        if not fds:
            name = like.environment
            raise NotRunning(f"no replica of {name} answers", f"openenv logs {name}")
        return [[socket.socket(fileno=fd) for fd in fds]], complete

    def _begin(self, run_file: RunFile, listeners: providers.Listeners) -> None:
        """Start its shim, which writes the run file first and keeps the sockets."""
        fds = [one.fileno() for one in listeners]
        try:
            start_shim(run_file.run_dir, run_file.data, listen_fds=fds, fork=self._fork)
        except BlockingIOError as exc:
            text = f"a replica's shim cannot be started: {limits.no_room_text()}"
            raise NoProcesses(text, ROOM_HINT) from exc

    def _what_runs(
        self,
        spec: EnvironmentSpec,
        program: Program,
        data: RunFileData,
        max_sessions: int | None,
        devices: tuple[str, ...],
    ) -> RunFileData:
        """Return what a run file says of the program and its variables, for the shim."""
        layout, number, run_dir = self._layout, data["number"], data["run_dir"]
        imports = Path(run_dir) / host_options.IMPORTS
        links = [host_options.link_imports(program.links, imports)] if program.links else []
        config = replace(
            program.config,
            host=spec.host,  # the gateway's, by now, if there is one
            token=spec.token,
            max_sessions=max_sessions,
            import_paths=(*links, *program.config.import_paths),
            # Which the env host cannot find out: it stands alone, and knows no cgroups.
            memory_bytes=spec.memory_bytes or limits.available_memory_bytes(),
            cores=_cores_of_one(spec),
            headers=providers.names_of(data),
            replica=number,
            doors=layout.doors(spec.name),
            shares_address=not spec.gateway,
            sleep_after_seconds=spec.sleep_seconds,
        )
        environ = providers.child_environment(
            os.environ, home=str(layout.home), max_sessions=max_sessions, given=spec.env
        )
        if devices:
            environ[host_options.VARIABLE] = ",".join(devices)
        environ[HOST_CONFIG_VARIABLE] = json.dumps(config.to_json())
        environ[providers.RUN_DIR_VARIABLE] = run_dir
        return {
            "argv": list(program.argv),
            "entry": program.entry,
            "env": environ,
            "cwd": str(program.folder),
            "door_path": door_path(layout.doors(spec.name), number),
            "cgroups": layout.replica_groups,
            "oom_score_adj": REPLICA_OOM_SCORE_ADJ,
        }

    def _adapt(self, like: RunFile, data: RunFileData, _: int | None) -> RunFileData:
        """Return the run file of a replica like another, with links and GPUs of its own."""
        run_dir, number = data["run_dir"], data["number"]
        imports = like.run_dir / host_options.IMPORTS
        old, new = str(imports), str(Path(run_dir) / host_options.IMPORTS)
        config = providers.server_options(data)
        paths = [new if path == old else path for path in config["import_paths"]]
        data = providers.with_options(data, import_paths=paths)
        data = providers.of_this_installation(data)
        data["door_path"] = door_path(self._layout.doors(like.environment), number)
        env = data["env"]
        env[providers.RUN_DIR_VARIABLE] = run_dir
        if gpus_each := config.get("gpus"):
            found = host_options.find_gpus({**os.environ, **env})
            env[host_options.VARIABLE] = ",".join(host_options.share(found, gpus_each, number))
        if imports.is_dir():
            links = {link.name: link.readlink() for link in imports.iterdir()}
            host_options.link_imports(links, Path(new))
        return data


def check_process_room(spec: EnvironmentSpec, room: limits.ProcessRoom | None) -> None:
    """Refuse what could not be forked, before any of it is; raises `NoProcesses`."""
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
    return max(1, int(limits.read_limits().cpus) // spec.replicas)
