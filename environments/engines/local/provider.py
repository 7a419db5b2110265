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

import contextlib
import itertools
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ....schema.errors import NoProcesses, NotRunning
from ....schema.layout import Layout, make_private
from ....schema.protocol import HOST_CONFIG_VARIABLE, door_path
from ....schema.replica import RunFileData
from ....schema.spec import EnvironmentSpec
from ....system.memory.limits import available_memory_bytes, read_limits
from ....system.memory.pids_limit import HINT as ROOM_HINT
from ....system.memory.pids_limit import ProcessRoom, no_room_text, process_room
from ... import run_files
from ...replica_policy import share_sessions
from ...shim.client import start_shim
from ...sources.program import HOST_PRELOAD, Prepared, Program
from .. import host_options, new_replicas
from ..new_replicas import RUN_DIR_VARIABLE, Place, child_environment, host_of
from ..started_replicas import IMPORTS
from .ports import PortOwner, open_listeners

Listeners = list[socket.socket]  # of one address
Devices = tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them

# Workers carry more and the daemon less: the kernel takes a worker before a replica.
REPLICA_OOM_SCORE_ADJ = 300
PROCESSES_OF_REPLICA = 2  # the shim and the host
PROCESSES_TO_START = 1  # the fork server, or a shell
THREADS_OF_SHARD = 2  # its own, and the one that watches its loop


class LocalProvider:
    """Starts replicas on this machine."""

    name = run_files.LOCAL

    def __init__(self, home: Path) -> None:
        self._layout = Layout(home)

    def start(
        self,
        spec: EnvironmentSpec,
        prepared: Prepared,
        *,
        launch_id: str,
        address: str | None = None,
        replaces: str | None = None,
    ) -> list[run_files.RunFile]:
        """Start a shim per replica.

        Raises:
            InvalidSpec: there are too few GPUs.
            NoProcesses: there is no room for theirs.
        """
        assert isinstance(prepared, Program)  # as its `Preparation` says
        shares = share_sessions(spec.max_sessions, spec.replicas, spec.max_replicas)
        found = host_options.find_gpus({**os.environ, **spec.env}) if spec.gpus else ()
        devices = [
            host_options.share(found, spec.gpus, number) if spec.gpus else ()
            for number in range(spec.replicas)
        ]
        check_process_room(spec, process_room())
        make_private(self._layout.runs)
        make_private(self._layout.sockets)
        known = run_files.of_environment(self._layout.runs, spec.name)
        running = [each for each in known if each.is_local]
        # An earlier update may have taken over from the launch that is named by now.
        others = [each for each in running if each.request_id != launch_id]
        replaced = [] if replaces is None else sorted(others, key=run_files.by_service)
        replicas = _Starting(self._listeners(spec, replaced))
        numbers = run_files.free_numbers(known, spec.replicas)
        with replicas:
            for ordinal, share in enumerate(shares):
                place = Place(ordinal, numbers[ordinal], replicas.port(ordinal))
                data = new_replicas.of_launch(self._layout, spec, launch_id, place, address)
                data["held"] = replaces is not None
                data |= self._what_runs(spec, prepared, data, share, devices[ordinal])
                replicas.start_one(data, prepared.links, ordinal)
        return replicas.run_files

    def _what_runs(
        self,
        spec: EnvironmentSpec,
        program: Program,
        data: RunFileData,
        max_sessions: int | None,
        devices: Devices,
    ) -> RunFileData:
        """Return what a run file says of the program and its variables, for the shim."""
        layout, number, run_dir = self._layout, data["number"], data["run_dir"]
        fork_server_log = layout.home / "logs" / "fork-server.log"
        links = (str(Path(run_dir) / IMPORTS),) if program.links else ()
        config = replace(
            program.config,
            host=spec.host,  # the gateway's, by now, if there is one
            token=spec.token,
            max_sessions=max_sessions,
            import_paths=(*links, *program.config.import_paths),
            # Which the env host cannot find out: it stands alone, and knows no cgroups.
            memory_bytes=spec.memory_bytes or available_memory_bytes(),
            cores=_cores_of_one(spec),
            headers=new_replicas.names_of(data),
            replica=number,
            doors=layout.doors(spec.name),
            shares_address=not spec.gateway,
            sleep_after_seconds=spec.sleep_seconds,
        )
        environ = child_environment(
            os.environ, home=str(layout.home), max_sessions=max_sessions, given=spec.env
        )
        if devices:
            environ[host_options.VARIABLE] = ",".join(devices)
        environ[HOST_CONFIG_VARIABLE] = json.dumps(config.to_json())
        environ[RUN_DIR_VARIABLE] = run_dir
        return {
            "argv": list(program.argv),
            "entry": program.entry,
            "fork_server": {"log_path": str(fork_server_log), "preload": HOST_PRELOAD},
            "env": environ,
            "cwd": str(program.folder),
            "door_path": door_path(layout.doors(spec.name), number),
            "cgroups": layout.replica_groups,
            "oom_score_adj": REPLICA_OOM_SCORE_ADJ,
        }

    def _listeners(
        self, spec: EnvironmentSpec, replaced: list[run_files.RunFile]
    ) -> list[Listeners]:
        """Those of what is replaced, if they are where the spec wants them; else new ones."""
        owner = PortOwner(spec.name, self._layout.runs)
        there = [each for each in replaced if each.host == spec.host and not spec.gateway]
        port = spec.port or (there[0].port if there else None)
        if port is not None and (fds := run_files.listeners_of(there, port)):
            return [[socket.socket(fileno=fd) for fd in fds]]
        return _listen(replace(spec, port=port), owner, spec.replicas)

    def add(
        self,
        like: run_files.RunFile,
        shares: Sequence[int | None],
        *,
        replicas: int,
        started_by: str,
    ) -> list[run_files.RunFile]:
        """Start a replica for each share of the sessions, on the sockets of a running one.

        Behind the gateway each has a port of its own.

        Raises:
            NotRunning: no shim has the environment's sockets.
        """
        spec = EnvironmentSpec(**{**like.data["spec"], "replicas": replicas})
        check_process_room(replace(spec, replicas=len(shares)), process_room())
        known = run_files.of_environment(self._layout.runs, spec.name)
        ordinals = run_files.free_ordinals(known, like.request_id, len(shares))
        numbers = run_files.free_numbers(known, len(shares))
        owner = PortOwner(spec.name, self._layout.runs)
        alone = replace(spec, port=None)
        sockets = _listen(alone, owner, len(shares)) if spec.gateway else _sockets_of(like)
        started = _Starting(sockets)
        with started:
            for index, share in enumerate(shares):
                place = Place(ordinals[index], numbers[index], started.port(index))
                data = new_replicas.like(
                    self._layout, like, spec, place, max_sessions=share, started_by=started_by
                )
                data, links = _adapt(data, like, self._layout)
                started.start_one(data, links, index)
        return started.run_files


class _Starting:
    """Replicas that are being started: within the block, on sockets that are closed after it.

    The shims have these then. If the block fails, what was started is stopped.
    """

    def __init__(self, listeners: list[Listeners]) -> None:
        """`listeners` are each replica's, or those of all of them."""
        self.run_files: list[run_files.RunFile] = []
        self._listeners = listeners
        self._ports = [int(each[0].getsockname()[1]) for each in listeners]

    def __enter__(self) -> _Starting:
        return self

    def __exit__(self, kind: object, exc: BaseException | None, _: object) -> None:
        for one in itertools.chain(*self._listeners):
            one.close()
        if exc is None:
            return
        run_files.stop_replicas([each.run_dir for each in self.run_files], 0.0)
        if isinstance(exc, BlockingIOError):
            text = f"a replica's shim cannot be started: {no_room_text()}"
            raise NoProcesses(text, ROOM_HINT) from exc

    def port(self, number: int) -> int:
        """The port that the replica which is started as number `number` listens on."""
        return self._ports[number % len(self._ports)]

    def start_one(self, data: RunFileData, links: dict[str, Path], number: int) -> None:
        """Write one replica down, and start its shim; it is the `number`th of these."""
        run_dir = Path(data["run_dir"])
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if links:
            (run_dir / IMPORTS).mkdir(mode=0o700, exist_ok=True)
        for name, target in links.items():
            with contextlib.suppress(FileExistsError):
                (run_dir / IMPORTS / name).symlink_to(target, target_is_directory=True)
        # Before it is started: were we killed in between, it must be found.
        self.run_files.append(run_files.RunFile.of(run_dir, data))
        listeners = self._listeners[number % len(self._listeners)]
        start_shim(run_dir, data, listen_fds=[one.fileno() for one in listeners])


def _listen(spec: EnvironmentSpec, owner: PortOwner, replicas: int) -> list[Listeners]:
    """Open the listening sockets of all replicas, or of each one behind the gateway."""
    with contextlib.ExitStack() as stack:
        opened: list[Listeners] = []
        for _ in range(replicas if spec.gateway else 1):
            listeners = open_listeners(host_of(spec), spec.port, owner)
            opened.append([stack.enter_context(one) for one in listeners])
        stack.pop_all()
    return opened


def _sockets_of(like: run_files.RunFile) -> list[Listeners]:
    """Return the listening sockets of a running environment, which its replicas share.

    Raises:
        NotRunning: no shim has them.
    """
    known = run_files.of_environment(like.run_dir.parent, like.environment)
    fds = run_files.listeners_of(known, like.port)
    if not fds:
        name = like.environment
        raise NotRunning(f"no replica of {name} answers", f"openenv logs {name}")
    return [[socket.socket(fileno=fd) for fd in fds]]


def _adapt(
    data: RunFileData, like: run_files.RunFile, layout: Layout
) -> tuple[RunFileData, dict[str, Path]]:
    """Return the run file of a replica like another, and the links that it imports through."""
    run_dir, number = data["run_dir"], data["number"]
    imports = like.run_dir / IMPORTS
    old, new = str(imports), str(Path(run_dir) / IMPORTS)
    config = new_replicas.server_options(data)
    paths = [new if path == old else path for path in config["import_paths"]]
    data = new_replicas.with_options(data, import_paths=paths)
    data["door_path"] = door_path(layout.doors(like.environment), number)
    env = data["env"]
    env[RUN_DIR_VARIABLE] = run_dir
    if gpus_each := config.get("gpus"):
        found = host_options.find_gpus({**os.environ, **env})
        env[host_options.VARIABLE] = ",".join(host_options.share(found, gpus_each, number))
    links = {link.name: link.readlink() for link in imports.iterdir()} if imports.is_dir() else {}
    return data, links


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
