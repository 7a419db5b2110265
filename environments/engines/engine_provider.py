# SPDX-License-Identifier: Apache-2.0
"""Starts replicas on an engine: Docker, Swarm and all others that are installed (`registry.py`).

    free ports ─▶ run files with plans ─▶ "adopt" ─▶ the engine's agent ─▶ instances

The agent reports as shims do (`agent/`), so the steps after a launch are those of local replicas.
Instances cannot share a listening socket: each replica has a port of its own on this machine,
reserved by its run file, and several replicas are behind the gateway.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from ...schema import protocol
from ...schema.replica import RunFileData
from ...schema.spec import EnvironmentSpec
from ...system.text.json_lines import Json
from ...system.text.options import options_of
from .. import run_files
from ..run_files import RunFile
from ..shim.files import RUN_FILE_NAME, write_json
from ..sources.program import ContainerImage, Prepared
from . import providers
from .providers import RunFiles
from .registry import address_here, entry_of


class EngineProvider(providers.Provider):
    """Starts replicas on one engine, through its agent."""

    def _listen(
        self, spec: EnvironmentSpec, count: int, port: int | None, known: RunFiles, shared: RunFiles
    ) -> list[providers.Listeners]:
        return self._open(spec, count, port, {each.port for each in known})

    def _begin(self, run_file: RunFile, listeners: providers.Listeners) -> None:
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
            "env": base | _environment(spec),
        }

    def _adapt(self, data: RunFileData, _like_dir: Path) -> RunFileData:
        data["env"].pop(protocol.TRIAL_VARIABLE, None)
        if data["ordinal"] == 0 and "started_by" not in data:  # one replica of a launch tries
            data["env"][protocol.TRIAL_VARIABLE] = "1"  # whether sessions can begin
        return data


def _environment(spec: EnvironmentSpec) -> dict[str, str]:
    """Return the variables of replicas: ours, and those that the user gave, which win."""
    given = {item.name: getattr(spec, item.name) for item in options_of(protocol.ServeOptions)}
    defaults = {item.name: item.default for item in options_of(protocol.ServeOptions)}
    options = {
        # The image has its own values of options that were not set. `gpus` is an option of the
        # instance, whose server sees those that it got.
        **{k: value for k, value in given.items() if value != defaults[k] and k != "gpus"},
        "max_sessions": spec.max_sessions,
        "memory_bytes": spec.memory_bytes,
        "cores": None if spec.cpus is None else math.ceil(spec.cpus),
        "owns_cgroup": True,
    }
    ours = {protocol.HOST_OPTIONS_VARIABLE: json.dumps(options)}
    if spec.max_sessions is not None:
        ours[providers.MAX_SESSIONS_VARIABLE] = str(spec.max_sessions)
    return {**ours, **spec.env}
