# SPDX-License-Identifier: Apache-2.0
"""Starts replicas as local processes. Each has a shim as its parent, which outlives the daemon.

    open_listeners ─▶ listening sockets ─▶ run file ─▶ shim 0 ─▶ env host
                                          └▶ run file ─▶ shim 1 ─▶ env host   (the same socket)

All replicas of an environment accept from one socket, so the environment has one address, and the
kernel passes a connection to a replica that accepts it. Behind the gateway, each replica has a
socket of its own. The shims hold the sockets.

An update starts its replicas beside those that it replaces, on the same sockets, which an old shim
passes on. They are on standby (`"held"` in the run file): they become ready, and accept no
connection before the daemon lets them take over.
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

# Workers have a higher score, and the daemon a lower one: the kernel kills workers first.
REPLICA_OOM_SCORE_ADJ = 300
PROCESSES_OF_REPLICA = 2  # the shim and the host
PROCESSES_TO_START = 1  # the shell that starts a shim as a program
THREADS_OF_SHARD = 2  # its main thread, and the one that watches its loop


class LocalProvider(providers.Provider):
    """Starts replicas on this machine."""

    def __init__(self, name: str, home: Path, fork: Fork | None = None) -> None:
        """Make a provider. It forks shims by `fork`; without one, it starts them as programs."""
        super().__init__(name, home)
        self._fork = fork

    def _begin_launch(self, batch: providers.Batch, prepared: Prepared) -> providers.Beginning:
        """Take the sockets of the replaced replicas, if they have the specified address.

        Raises:
            InvalidSpec: There are too few GPUs.
            NoProcesses: There is no room for as many processes.
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

        # After an update, replicas of several launches may exist; those that serve come first.
        before = sorted((each for each in replaced or () if each.is_local), key=by_service)
        there = [each for each in before if each.host == spec.host and not spec.gateway]
        port = spec.port or (there[0].port if there else None)
        if port is not None and (fds := run_files.listeners_of(there, port)):
            return [[socket.socket(fileno=fd) for fd in fds]], complete
        return self._open(spec, count if spec.gateway else 1, port), complete

    def _begin_more(self, like: RunFile, batch: providers.Batch) -> providers.Beginning:
        """Share the sockets of the others; behind the gateway, open one for each replica.

        Raises:
            NoProcesses
            NotRunning: No shim has the environment's sockets.
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
        """Write the run file and start the shim. The shim holds the sockets from then on."""
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
        """Return the run file's fields on the program and its variables."""
        layout, number, run_dir = self._layout, data["number"], data["run_dir"]
        imports = Path(run_dir) / host_options.IMPORTS
        links = [host_options.link_imports(program.links, imports)] if program.links else []
        config = replace(
            program.config,
            host=spec.host,  # behind a gateway, the gateway's host
            token=spec.token,
            max_sessions=max_sessions,
            import_paths=(*links, *program.config.import_paths),
            # The env host cannot find these out, as it does not know about cgroups.
            memory_bytes=spec.memory_bytes or limits.available_memory_bytes(),
            cores=_cores_of_one(spec),
            headers=providers.names_of(data),
            umask=providers.user_umask(),
            replica=number,
            doors=layout.doors(spec.name),
            shares_address=not spec.gateway,
            sleep_after_seconds=spec.sleep_seconds,
        )
        environ = providers.child_environment(
            home=str(layout.home), max_sessions=max_sessions, given=spec.env, program=program.env
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
        """Return a copied run file with import links and GPUs of its own."""
        run_dir, number = data["run_dir"], data["number"]
        imports = like.run_dir / host_options.IMPORTS
        old, new = str(imports), str(Path(run_dir) / host_options.IMPORTS)
        config = run_files.server_options(data)
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
    """Refuse replicas whose processes would exceed a limit; raises `NoProcesses`."""
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
