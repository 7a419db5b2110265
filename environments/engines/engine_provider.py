# SPDX-License-Identifier: Apache-2.0
"""Replicas on an engine: Docker, Swarm and what else is installed (`registry.py`).

    free ports ─▶ run files with plans ─▶ "adopt" ─▶ the engine's agent ─▶ instances

The agent reports as shims do (`engines/replica.py`), so what follows a launch is the same as for
local replicas. Instances cannot share a listening socket: each replica has a port of its own on
this machine, reserved by its run file. One replica's address is its environment's; several have
theirs at the gateway.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ...schema.errors import EngineFailed, InvalidSpec
from ...schema.layout import Layout, make_private
from ...schema.protocol import (
    HOST_CONFIG_VARIABLE,
    HOST_OPTIONS_VARIABLE,
    TRIAL_VARIABLE,
    ServeOptions,
)
from ...schema.replica import RunFileData
from ...schema.spec import EnvironmentSpec
from ...system.text.json_lines import Json
from ...system.text.options import options_of
from .. import run_files
from ..replica_policy import share_sessions
from ..shim.files import RUN_FILE_NAME, write_json
from ..sources.program import ContainerImage, Prepared
from . import new_replicas
from .base import Labels, ReplicaPlan
from .local.ports import PortOwner, open_listeners
from .new_replicas import MAX_SESSIONS_VARIABLE, Place, child_environment, host_of
from .registry import address_here, entry_of

_OUTSIDE = ("gpus",)  # an option of the instance: the server in it sees those that it got


class EngineProvider:
    """Starts replicas on one engine, through its agent."""

    def __init__(self, name: str, home: Path) -> None:
        self.name = name
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
        """Write each replica down, and have the agent start it.

        What it `replaces` has ports of its own: nothing is taken over.
        """
        make_private(self._layout.runs)
        shares = share_sessions(spec.max_sessions, spec.replicas, spec.max_replicas)
        known = run_files.of_environment(self._layout.runs, spec.name)
        numbers = run_files.free_numbers(known, spec.replicas)
        with _started() as replicas, self._listening(spec, spec.replicas, known) as ports:
            for ordinal, share in enumerate(shares):
                place = Place(ordinal, numbers[ordinal], ports[ordinal])
                data = new_replicas.of_launch(self._layout, spec, launch_id, place, address)
                _write_down(replicas, self._with_plan(data, spec, prepared, share))
        return replicas

    def add(
        self,
        like: run_files.RunFile,
        shares: Sequence[int | None],
        *,
        replicas: int,
        started_by: str,
    ) -> list[run_files.RunFile]:
        """Write a replica down for each share of the sessions, and have the agent start it.

        Raises:
            InvalidSpec: It has the address of its one replica: others would be at other ones.
        """
        if not like.is_at_gateway:
            raise _not_at_the_gateway(like, replicas)
        spec = EnvironmentSpec(**{**like.data["spec"], "replicas": replicas, "port": None})
        known = run_files.of_environment(self._layout.runs, spec.name)
        ordinals = run_files.free_ordinals(known, like.request_id, len(shares))
        numbers = run_files.free_numbers(known, len(shares))
        with _started() as added, self._listening(spec, len(shares), known) as ports:
            for share, *place in zip(shares, ordinals, numbers, ports, strict=True):
                data = new_replicas.like(
                    self._layout,
                    like,
                    spec,
                    Place(*place),
                    max_sessions=share,
                    started_by=started_by,
                )
                plan = ReplicaPlan.from_json(data["plan"])
                plan = replace(
                    plan,
                    labels=replace(plan.labels, replica=data["replica_id"]),
                    env={name: v for name, v in plan.env.items() if name != TRIAL_VARIABLE},
                    port=data["port"],
                    ordinal=data["number"],
                )
                _write_down(added, data | {"plan": plan.to_json()})
        return added

    def _with_plan(
        self, data: RunFileData, spec: EnvironmentSpec, prepared: Prepared, max_sessions: int | None
    ) -> RunFileData:
        replica_id, launch_id = data["replica_id"], data["request_id"]
        plan = ReplicaPlan(
            labels=Labels(self._layout.home_label, spec.name, replica_id, launch_id),
            **_what_runs(prepared),
            env=self._base(spec, prepared) | _environment(spec, data, max_sessions),
            host=data["host"],
            port=data["port"],
            memory_bytes=spec.memory_bytes,
            cpus=spec.cpus,
            gpus=spec.gpus or 0,
            ordinal=data["number"],
            sandbox=spec.sandbox,
            options=spec.options_of_engine,
        )
        return data | {
            "provider": self.name,
            "engine_variables": dict(address_here(self.name).variables),
            "is_elsewhere": entry_of(self.name).has_own_addresses,
            "plan": plan.to_json(),
            "env": plan.env,
        }

    def _base(self, spec: EnvironmentSpec, prepared: Prepared) -> dict[str, str]:
        """Return the variables that a program needs; an image has them in itself."""
        if isinstance(prepared, ContainerImage):
            return {}
        home = str(self._layout.home)
        # The gateway's, by now, if there is one.
        config = replace(prepared.config, host=spec.host, token=spec.token)
        base = child_environment(os.environ, home=home, max_sessions=None, given=spec.env)
        return {**base, HOST_CONFIG_VARIABLE: json.dumps(config.to_json())}

    @contextmanager
    def _listening(
        self, spec: EnvironmentSpec, count: int, known: list[run_files.RunFile]
    ) -> Iterator[list[int]]:
        """Listen on a free port for each replica, so that no other process takes one meanwhile."""
        owner = PortOwner(spec.name, self._layout.runs)
        taken = {each.port for each in known}
        with contextlib.ExitStack() as opened:
            ports = []
            for index in range(count):
                wanted = None if index else spec.port
                listeners = open_listeners(host_of(spec), wanted, owner, taken=taken)
                for listener in listeners:
                    opened.enter_context(listener)
                ports.append(int(listeners[0].getsockname()[1]))
            yield ports


def _write_down(started: list[run_files.RunFile], data: RunFileData) -> None:
    """Write one replica's run file: from then on its port is reserved, and it is found."""
    run_dir = Path(data["run_dir"])
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(str(run_dir / RUN_FILE_NAME), data, sync=True)
    started.append(run_files.RunFile.of(run_dir, data))


@contextmanager
def _started() -> Iterator[list[run_files.RunFile]]:
    """Replicas that are written down by the body, and started after it; stopped if that fails."""
    replicas: list[run_files.RunFile] = []
    try:
        yield replicas
        for each in replicas:
            run_files.revive(each)
    except BaseException:
        with contextlib.suppress(EngineFailed):  # the daemon stops them when it answers
            run_files.stop_replicas([each.run_dir for each in replicas], 0.0)
        raise


def _what_runs(prepared: Prepared) -> Json:
    """Return the fields of a plan that say what runs: an image, or a program of a Python here."""
    if isinstance(prepared, ContainerImage):
        return {"image": prepared.reference, "image_name": prepared.name, "command": ()}
    links = {name: str(folder) for name, folder in prepared.links.items()}
    return {"image": "", "command": prepared.argv, "folder": str(prepared.folder), "links": links}


def _not_at_the_gateway(like: run_files.RunFile, replicas: int) -> InvalidSpec:
    spec = like.data["spec"]
    name, provider, source = like.environment, like.provider, spec["source"]
    more = f" --replicas {replicas}" if replicas > 1 else ""
    return InvalidSpec(
        f"{name} runs on {provider} with one replica, at whose own port its clients are: others"
        " can be added, or take its place, only behind the gateway",
        f"openenv launch {source} --name {name} --provider {provider} --gateway{more}, with its"
        " other options: it updates it, and gives it that address",
    )


def _environment(
    spec: EnvironmentSpec, data: RunFileData, max_sessions: int | None
) -> dict[str, str]:
    """Return the variables of one replica: nothing of this machine's, the user's over ours."""
    options = {
        **_asked(spec),
        "max_sessions": max_sessions,
        "memory_bytes": spec.memory_bytes,
        "cores": None if spec.cpus is None else math.ceil(spec.cpus),
        "headers": new_replicas.names_of(data),
        "replica": data["number"],
        "owns_cgroup": True,
    }
    ours = {HOST_OPTIONS_VARIABLE: json.dumps(options)}
    if data["ordinal"] == 0:  # one replica of a launch is enough
        ours[TRIAL_VARIABLE] = "1"
    if max_sessions is not None:
        ours[MAX_SESSIONS_VARIABLE] = str(max_sessions)
    return {**ours, **spec.env}


def _asked(spec: EnvironmentSpec) -> Json:
    """Return the options that were set; the image has its own for others."""
    asked = ((item, getattr(spec, item.name)) for item in options_of(ServeOptions))
    return {
        item.name: value
        for item, value in asked
        if value != item.default and item.name not in _OUTSIDE
    }
