# SPDX-License-Identifier: Apache-2.0
"""Starts replicas, on this machine or on an engine, and writes their run files.

    provider_named ─▶ Provider.start, .add ─▶ a run file for each replica ─▶ shim or agent
                        │ on this machine: local/provider.py
                        └ on an engine: `EngineProvider`

A replica's variables are a few inherited ones, ours, and the user's. No others are inherited: the
daemon may have been started from any shell, whose tokens are private, and whose `PYTHONPATH` or
`VIRTUAL_ENV` would make a project import the wrong modules.

The daemon calls providers in a thread.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from ...schema import protocol
from ...schema.errors import EngineFailed, InvalidSpec
from ...schema.layout import Layout, make_private
from ...schema.replica import RunFileData
from ...schema.spec import EnvironmentSpec
from ...system.process.descriptors import Message, send_message
from ...system.text.json_lines import Json
from ...system.text.options import options_of
from ...system.text.units import MB
from .. import run_files
from ..replica_policy import share_sessions
from ..run_files import LOCAL, RunFile, server_options
from ..shim.client import Fork, read_run_file
from ..shim.files import RUN_FILE_NAME, write_json
from ..sources.program import HOST_PROGRAM, ContainerImage, Prepared, Program
from .local.ports import PortOwner, open_listeners
from .registry import address_here, check_provider, entry_of

# They name folders, proxies, certificates and accelerators.
INHERITED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ"}
    | {"TMPDIR", "TMP", "TEMP", "DISPLAY", "HF_HOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}
    | {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"}
    | {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}
)
INHERITED_PREFIXES = ("LC_", "XDG_", "CUDA_", "NVIDIA_", "ROCR_", "HIP_")
MAX_SESSIONS_VARIABLE = "MAX_CONCURRENT_ENVS"  # upstream projects read it by convention
HOME_VARIABLE = "OPENENV_HOME"
RUN_DIR_VARIABLE = "OPENENVD_RUN_DIR"  # shows to which replica a process belongs

# The limit on a replica's log, whose older half is dropped beyond it. The daemon sets the variable.
MAX_LOG_VARIABLE = "OPENENV_MAX_LOG_MB"
DEFAULT_MAX_LOG_MB = 64

ID_PART = 4  # characters of a request's id, in the id of a replica that it adds
_NOT_ALIKE = ("shim", "cgroup")

Listeners = list[socket.socket]  # of one address
RunFiles = list[RunFile]


def provider_named(name: str, home: Path, fork: Fork | None = None) -> Provider:
    """Return the provider of a name; `fork` forks local shims. Raises `UnknownProvider`."""
    if check_provider(name) != LOCAL:
        return EngineProvider(name, home)
    from .local.provider import LocalProvider

    return LocalProvider(name, home, fork)


class Provider:
    """One way to run replicas.

    Each replica is recorded, where the daemon finds it, before it is started. If one cannot be
    started, those that were started with it are stopped, and an `EnvironmentsError` is raised.

    Run files have a common part, which `start` makes of the launch, and `add` takes from a replica.
    """

    has_standby = False  # whether an update's replicas wait at the addresses of those they replace

    def __init__(self, name: str, home: Path) -> None:
        self.name = name
        self._layout = Layout(home)

    def start(
        self,
        spec: EnvironmentSpec,
        prepared: Prepared,
        *,
        count: int | None = None,
        launch_id: str,
        address: str | None = None,
        replaces: str | None = None,
    ) -> list[RunFile]:
        """Start the replicas of a launch, the first `count` of them if that is given.

        Args:
            spec: The specification of the environment.
            prepared: The program or image that a replica runs.
            count: How many of the specified replicas to start; None: all.
            launch_id: The id of the launch's request, which is part of the replicas' ids.
            address: The environment's address at the gateway; None: the replicas have their own.
            replaces: The launch whose replicas serve the environment until the daemon lets the new
                ones take over. The address stays the same, unless the specification names another.
        """
        shares = share_sessions(spec.max_sessions, spec.replicas, spec.max_replicas)[:count]
        make_private(self._layout.runs)
        known = run_files.of_environment(self._layout.runs, spec.name)
        common = _of_launch(spec, launch_id, address) | self._what_runs(spec, prepared)
        common["held"] = self.has_standby and replaces is not None
        replaced = [each for each in known if each.request_id != launch_id] if replaces else []
        listeners = self._listen(spec, len(shares), spec.port, known, replaced)
        return self._start_each(common, launch_id, range(len(shares)), shares, known, listeners)

    def add(
        self,
        like: RunFile,
        shares: Sequence[int | None],
        *,
        replicas: int,
        started_by: str,
        watched: run_files.Known = None,
    ) -> list[RunFile]:
        """Start further replicas of a running environment, at its address.

        Args:
            like: One of its replicas, after which the new ones are modelled.
            shares: How many sessions each new replica may have.
            replicas: How many replicas the environment will have.
            started_by: The request that starts them, which their run files name.
            watched: Run files that are known, and not read again.

        Raises:
            InvalidSpec: Replicas cannot share the address of one replica of an engine.
        """
        if not (like.is_local or like.is_at_gateway):
            raise _not_at_the_gateway(like, replicas)
        spec = EnvironmentSpec(**{**like.data["spec"], "replicas": replicas})
        known = run_files.of_environment(self._layout.runs, spec.name, watched)
        alike = {key: value for key, value in like.data.items() if key not in _NOT_ALIKE}
        common = cast("RunFileData", alike)
        common |= {"held": False, "spec": _written(spec), "started_by": started_by}
        # A replica's id contains its ordinal, which no other of the launch has, and a part of the
        # request's id, as the folder of an earlier replica may still be being removed.
        taken = (each.ordinal for each in known if each.request_id == like.request_id)
        ordinals = run_files.free_numbers(taken, len(shares))
        ending = f"{started_by[:ID_PART]}-{like.request_id}"
        listeners = self._listen(spec, len(shares), None, known, known)
        return self._start_each(common, ending, ordinals, shares, known, listeners)

    def _what_runs(self, spec: EnvironmentSpec, prepared: Prepared) -> RunFileData:
        """Return the common part of run files on the program or image, and its variables."""
        raise NotImplementedError

    def _program_environment(
        self, spec: EnvironmentSpec, prepared: Program, **config: Any
    ) -> dict[str, str]:
        """Return the variables of a program, with its server's configuration.

        If there is a gateway, the prepared configuration has its address and token.
        """
        umask = os.environ.get(protocol.UMASK_VARIABLE)  # of the shell that started the daemon
        config |= {"host": spec.host, "token": spec.token}
        environ = child_environment(
            home=str(self._layout.home),
            max_sessions=spec.max_sessions,
            given=spec.env,
            program=prepared.env,
        )
        whole = replace(prepared.config, umask=int(umask, 8) if umask else None, **config)
        return environ | {protocol.HOST_CONFIG_VARIABLE: json.dumps(whole.to_json())}

    def _listen(
        self, spec: EnvironmentSpec, count: int, port: int | None, known: RunFiles, shared: RunFiles
    ) -> list[Listeners]:
        """Return the sockets of each replica, or those that all share.

        `known` are all replicas of the environment, and `shared` those whose sockets may be taken.
        Raises `EnvironmentsError`: the replicas cannot be started.
        """
        raise NotImplementedError

    def _adapt(self, data: RunFileData, _like_dir: Path) -> RunFileData:
        """Return a replica's run file, of which a part was made for the replica of `_like_dir`."""
        return data

    def _begin(self, run_file: RunFile, listeners: Listeners) -> None:
        """Write a replica's run file; start the replica now if it inherits the open sockets."""
        raise NotImplementedError

    def _finish(self, replica: RunFile) -> None:
        """Start a replica that `_begin` has only recorded; our sockets are closed by now."""

    def _start_each(
        self,
        common: RunFileData,
        id_ending: str,
        ordinals: Iterable[int],
        shares: Sequence[int | None],
        known: RunFiles,
        listeners: list[Listeners],
    ) -> list[RunFile]:
        numbers = run_files.free_numbers((each.number for each in known), len(shares))
        ports = [int(each[0].getsockname()[1]) for each in listeners]
        started: list[RunFile] = []
        try:
            with contextlib.ExitStack() as opened:
                for one in itertools.chain(*listeners):
                    opened.enter_context(one)
                for index, (ordinal, share) in enumerate(zip(ordinals, shares, strict=True)):
                    of_one = index % len(listeners)
                    place = (ordinal, numbers[index], ports[of_one])
                    data = self._of_replica(common, place, id_ending, share)
                    # Before the start: a replica whose start fails must be stopped, too.
                    started.append(RunFile.of(Path(data["run_dir"]), data))
                    self._begin(started[-1], listeners[of_one])
            for each in started:
                self._finish(each)
        except BaseException:
            with contextlib.suppress(EngineFailed):  # the daemon stops them once the engine answers
                run_files.stop_replicas([each.run_dir for each in started], 0.0)
            raise
        return started

    def _open(
        self, spec: EnvironmentSpec, count: int, port: int | None, taken: Collection[int] = ()
    ) -> list[Listeners]:
        """Listen at `count` free ports; the first one is `port`, if that is given."""
        owner = PortOwner(spec.name, self._layout.runs)
        with contextlib.ExitStack() as stack:
            opened: list[Listeners] = []
            for index in range(count):
                wanted = None if index else port
                listeners = open_listeners(host_of(spec), wanted, owner, taken=taken)
                opened.append([stack.enter_context(one) for one in listeners])
            stack.pop_all()
        return opened

    def _of_replica(
        self, common: RunFileData, place: tuple[int, int, int], id_ending: str, share: int | None
    ) -> RunFileData:
        """Return the run file of one replica; `place` has its ordinal, number and port."""
        layout, name, (ordinal, number, port) = self._layout, common["environment"], place
        replica_id = f"{name}-{ordinal}-{id_ending}"
        log_path = layout.replica_log(name, replica_id)
        make_private(log_path.parent)
        data = common | {
            "replica_id": replica_id,
            "ordinal": ordinal,
            "number": number,
            "port": port,
            "run_dir": str(layout.run_dir(replica_id)),
            "log_path": str(log_path),
            "socket_path": str(layout.replica_socket(replica_id)),
            "created_at": time.time(),
        }
        headers = {
            protocol.ENVIRONMENT_HEADER: name,
            protocol.GENERATION_HEADER: data["request_id"],
            protocol.REPLICA_HEADER: replica_id,
        }
        changed = {"replica": number, "headers": headers, "max_sessions": share}
        return self._adapt(with_options(data, **changed), Path(common.get("run_dir", "")))


class EngineProvider(Provider):
    """Starts replicas on one engine, through its agent, which reports as shims do.

        free ports ─▶ run files with plans ─▶ "adopt" ─▶ the engine's agent ─▶ instances

    Instances cannot share a listening socket: each replica has a port of its own on this machine,
    reserved by its run file, and several replicas are behind the gateway.
    """

    def _listen(
        self, spec: EnvironmentSpec, count: int, port: int | None, known: RunFiles, shared: RunFiles
    ) -> list[Listeners]:
        return self._open(spec, count, port, {each.port for each in known})

    def _begin(self, run_file: RunFile, listeners: Listeners) -> None:
        """Write the run file: it reserves the port, and the daemon finds the replica by it."""
        run_file.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(str(run_file.run_dir / RUN_FILE_NAME), run_file.data, sync=True)

    def _finish(self, replica: RunFile) -> None:
        """Make the agent start the replica; our sockets are closed, so the port is free."""
        run_files.revive(replica)

    def _what_runs(self, spec: EnvironmentSpec, prepared: Prepared) -> RunFileData:
        base: dict[str, str] = {}
        if isinstance(prepared, ContainerImage):  # contains all that its server needs
            program: Json = {"image": prepared.reference, "image_name": prepared.name}
        else:  # a program of a Python here
            links = {name: str(folder) for name, folder in prepared.links.items()}
            program = {"image": "", "command": prepared.argv, "links": links}
            program["folder"] = str(prepared.folder)
            base = self._program_environment(spec, prepared)
        return {
            "provider": self.name,
            "engine_variables": dict(address_here(self.name).variables),
            "is_elsewhere": entry_of(self.name).has_own_addresses,
            "plan": {
                **program,
                "home": self._layout.home_label,
                "memory_bytes": spec.memory_bytes,
                "cpus": spec.cpus,
                "gpus": spec.gpus or 0,
                "sandbox": spec.sandbox,
                "options": spec.options_of_engine,
            },
            "env": base | _engine_environment(spec),
        }

    def _adapt(self, data: RunFileData, _like_dir: Path) -> RunFileData:
        data["env"].pop(protocol.TRIAL_VARIABLE, None)
        if data["ordinal"] == 0 and "started_by" not in data:  # one replica of a launch tries
            data["env"][protocol.TRIAL_VARIABLE] = "1"  # whether sessions can begin
        return data


def _engine_environment(spec: EnvironmentSpec) -> dict[str, str]:
    """Return the variables of an engine's replicas: ours, and the user's, which win."""
    options: Json = {}
    for item in options_of(protocol.ServeOptions):  # the image has its own values of the others
        value = getattr(spec, item.name)
        if value != item.default and item.name != "gpus":  # the server sees those that it gets
            options[item.name] = value
    options |= {"max_sessions": spec.max_sessions, "memory_bytes": spec.memory_bytes}
    options |= {"cores": spec.cpus and math.ceil(spec.cpus), "owns_cgroup": True}
    ours = {protocol.HOST_OPTIONS_VARIABLE: json.dumps(options)}
    if spec.max_sessions is not None:
        ours[MAX_SESSIONS_VARIABLE] = str(spec.max_sessions)
    return {**ours, **spec.env}


def _of_launch(spec: EnvironmentSpec, launch_id: str, address: str | None) -> RunFileData:
    """Return the common part of the run files of a launch; `address` is the gateway's."""
    return {
        "version": run_files.RUN_FILE_VERSION,
        "environment": spec.name,
        "request_id": launch_id,
        "spec": _written(spec),
        "host": host_of(spec),
        "address": address,
        "token": spec.token,
        "memory_limit_bytes": spec.memory_bytes,
        "max_log_bytes": int(os.environ.get(MAX_LOG_VARIABLE) or DEFAULT_MAX_LOG_MB) * MB,
    }


def _not_at_the_gateway(like: RunFile, replicas: int) -> InvalidSpec:
    name, place = like.environment, f"--provider {like.provider} --gateway"
    more = f" --replicas {replicas}" if replicas > 1 else ""
    command = f"openenv launch {like.data['spec']['source']} --name {name} {place}{more}"
    return InvalidSpec(
        f"clients reach {name} at its replica's port: others can be added only behind the gateway",
        f"{command}, with its other options, gives it the gateway's address",
    )


def child_environment(
    inherited: Mapping[str, str] = os.environ,
    *,
    home: str,
    max_sessions: int | None = None,
    given: Mapping[str, str] = MappingProxyType({}),
    program: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return all variables of one replica; the user's win over ours, ours over the program's."""
    base = {
        name: value
        for name, value in inherited.items()
        if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
    ours = {
        HOME_VARIABLE: home,  # tells to which home a process belongs
        "PYTHONDONTWRITEBYTECODE": "1",  # a project's folder stays as it is
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves a traceback in the log
    }
    if max_sessions is not None:
        ours[MAX_SESSIONS_VARIABLE] = str(max_sessions)
    return {**program, **base, **ours, **given}


def host_of(spec: EnvironmentSpec) -> str:
    """Return the address that replicas listen on; behind the gateway, it is this machine's own."""
    return protocol.LOOPBACK if spec.gateway else spec.host


def with_options(data: RunFileData, **changed: Any) -> RunFileData:
    """Return a run file with some options of the server changed."""
    env, options = dict(data["env"]), server_options(data)
    env[run_files.options_variable(data)] = json.dumps(options | changed)
    share = changed.get("max_sessions")
    # Another number is the user's own.
    if share is not None and env.get(MAX_SESSIONS_VARIABLE) == str(options.get("max_sessions")):
        env[MAX_SESSIONS_VARIABLE] = str(share)
    return data | {"env": env}


def of_this_installation(data: RunFileData) -> RunFileData:
    """Return a local replica's run file without files of a removed or moved installation."""
    argv = data.get("argv") or [""]
    host = Path(argv[-1])
    if host.parts[-2:] != ("env_host", "__main__.py") or host.exists():
        return data
    before, now = str(host.parents[1]), str(HOST_PROGRAM.parents[1])
    python = sys.executable if data.get("entry") else argv[0]
    cwd = str(data["cwd"]).replace(before, now, 1)
    # No entry: the shim may be a fork that has imported the modules of the other installation.
    return data | {"argv": [python, *argv[1:-1], str(HOST_PROGRAM)], "cwd": cwd, "entry": None}


def renew(run_file: RunFile) -> None:
    """Have the next server of a replica, if it is local, start from this installation. Blocks.

    Raises `FileNotFoundError` if this installation was itself removed or moved.
    """
    data = read_run_file(run_file.run_dir) if run_file.is_local else None
    if data is not None and (renewed := of_this_installation(data)) is not data:
        HOST_PROGRAM.stat()
        write_json(str(run_file.run_dir / RUN_FILE_NAME), renewed, sync=True)


def share_out(staying: Iterable[RunFile], shares: Iterable[int | None]) -> None:
    """Give running replicas another share of the sessions, now and after a restart. Blocks.

    Sessions beyond the share continue. A server on an engine gets the share at its next start.
    """
    for run_file, share in zip(staying, shares, strict=True):
        data = with_options(run_file.data, max_sessions=share)
        write_json(str(run_file.run_dir / RUN_FILE_NAME), data, sync=True)
        if share is None or not run_file.is_local:
            continue
        # An env host that does not run, or counts no sessions, reads the share when it starts.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.setblocking(False)
            end.connect(run_file.data["door_path"])
            send_message(end, Message({"max_sessions": share}))


def _written(spec: EnvironmentSpec) -> Json:
    """Return the specification for the run file, which has `env` and `token` in other fields."""
    return {key: value for key, value in asdict(spec).items() if key not in ("env", "token")}
