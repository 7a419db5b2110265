# SPDX-License-Identifier: Apache-2.0
"""Starts replicas as local processes. Each has a shim as its parent, which outlives the daemon.

    open_listeners ─▶ listening sockets ─▶ run file ─▶ shim 0 ─▶ env host
                                          └▶ run file ─▶ shim 1 ─▶ env host   (the same socket)

All replicas of an environment accept from one socket, and so have one address. Behind the gateway,
each replica has a socket of its own. The shims hold the sockets.

An update starts its replicas beside those that it replaces, on the same sockets, which an old shim
passes on. They are on standby (`"held"` in the run file): they become ready, and accept nothing
before the daemon lets them take over.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from ....schema.errors import NoProcesses
from ....schema.layout import make_private
from ....schema.protocol import door_path
from ....schema.replica import RunFileData
from ....schema.spec import EnvironmentSpec
from ....system.memory import limits
from ....system.memory.limits import HINT as ROOM_HINT
from ....system.text.units import plural
from ... import run_files
from ...run_files import RunFile, by_service
from ...shim.client import Fork, start_shim
from ...sources.program import Prepared, Program
from .. import host_options, providers
from ..providers import RunFiles

# Workers have a higher score, and the daemon a lower one: the kernel kills workers first.
REPLICA_OOM_SCORE_ADJ = 300
PROCESSES_OF_REPLICA = 2  # the shim and the host
PROCESSES_TO_START = 1  # the shell that starts a shim as a program
THREADS_OF_SHARD = 2  # its main thread, and the one that watches its loop


class LocalProvider(providers.Provider):
    """Starts replicas on this machine."""

    has_standby = True

    def __init__(self, name: str, home: Path, fork: Fork | None = None) -> None:
        """Make a provider. It forks shims by `fork`; without one, it starts them as programs."""
        super().__init__(name, home)
        self._fork = fork

    def _listen(
        self, spec: EnvironmentSpec, count: int, port: int | None, known: RunFiles, shared: RunFiles
    ) -> list[providers.Listeners]:
        """Take the sockets of other replicas, if they have the specified address, or open some.

        Raises:
            NoProcesses: There is no room for as many processes.
        """
        check_process_room(replace(spec, replicas=count), limits.process_room())
        make_private(self._layout.sockets)
        # After an update, replicas of several launches may exist; those that serve come first.
        before = sorted((each for each in shared if each.is_local), key=by_service)
        there = [each for each in before if each.host == spec.host and not spec.gateway]
        port = port or (there[0].port if there else None)
        if port is not None and (fds := run_files.listeners_of(there, port)):
            return [[socket.socket(fileno=fd) for fd in fds]]
        return self._open(spec, count if spec.gateway else 1, port)

    def _begin(self, run_file: RunFile, listeners: providers.Listeners) -> None:
        """Write the run file and start the shim. The shim holds the sockets from then on."""
        fds = [one.fileno() for one in listeners]
        try:
            start_shim(run_file.run_dir, run_file.data, listen_fds=fds, fork=self._fork)
        except BlockingIOError as exc:
            text = f"a replica's shim cannot be started: {limits.no_room_text()}"
            raise NoProcesses(text, ROOM_HINT) from exc

    def _what_runs(self, spec: EnvironmentSpec, prepared: Prepared) -> RunFileData:
        assert isinstance(prepared, Program)  # as its `Preparation` says
        layout = self._layout
        links = [host_options.IMPORTS] if prepared.links else []  # `_adapt` makes it a path
        environ = self._program_environment(
            spec,
            prepared,
            max_sessions=spec.max_sessions,
            import_paths=(*links, *prepared.config.import_paths),
            memory_bytes=spec.memory_bytes,
            cores=_cores_of_one(spec),
            doors=layout.doors(spec.name),
            shares_address=not spec.gateway,
            sleep_after_seconds=spec.sleep_seconds,
        )
        gpus = host_options.find_gpus({**os.environ, **spec.env}) if spec.gpus else ()
        return {
            "argv": list(prepared.argv),
            "entry": prepared.entry,
            "env": environ,
            "cwd": str(prepared.folder),
            "links": {name: str(folder) for name, folder in prepared.links.items()},
            "gpus": gpus,
            "cgroups": layout.replica_groups,
            "oom_score_adj": REPLICA_OOM_SCORE_ADJ,
        }

    def _adapt(self, data: RunFileData, like_dir: Path) -> RunFileData:
        """Return a run file with a control socket, import links and GPUs of its own.

        Raises `InvalidSpec` if there are too few GPUs.
        """
        config = run_files.server_options(data)
        imports = Path(data["run_dir"], host_options.IMPORTS)
        before = str(like_dir / host_options.IMPORTS)
        paths = [str(imports) if path == before else path for path in config["import_paths"]]
        data = providers.of_this_installation(providers.with_options(data, import_paths=paths))
        data["door_path"] = door_path(config["doors"], data["number"])
        data["env"][providers.RUN_DIR_VARIABLE] = data["run_dir"]
        if gpus_each := config.get("gpus"):
            found = data.get("gpus") or host_options.find_gpus({**os.environ, **data["env"]})
            own = host_options.share(tuple(found), gpus_each, data["number"])
            data["env"][host_options.VARIABLE] = ",".join(own)
        if links := data.get("links", _links_of(like_dir)):
            host_options.link_imports(links, imports)
        return data


def _links_of(like_dir: Path) -> dict[str, str]:
    """Return the links of a replica whose run file, as those of 0.2.0, does not have them."""
    folder = like_dir / host_options.IMPORTS
    links = folder.iterdir() if folder.is_dir() else ()
    return {link.name: str(link.readlink()) for link in links}


def check_process_room(spec: EnvironmentSpec, room: limits.ProcessRoom | None) -> None:
    """Refuse replicas whose processes would exceed a limit; raises `NoProcesses`."""
    shards = 1 if spec.serve_as_is else spec.shards or _cores_of_one(spec)
    each = PROCESSES_OF_REPLICA + shards * THREADS_OF_SHARD
    needed = spec.replicas * each + PROCESSES_TO_START
    if room is None or needed <= room.left:
        return
    needs = f"{plural(spec.replicas, 'replica')} would need about {needed} processes and threads"
    raise NoProcesses(f"{needs}, and {room.left} are left: {room.sentence()}", ROOM_HINT)


def _cores_of_one(spec: EnvironmentSpec) -> int:
    return max(1, int(limits.read_limits().cpus) // spec.replicas)
