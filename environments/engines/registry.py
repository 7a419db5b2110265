# SPDX-License-Identifier: Apache-2.0
"""The engines: a line each. To add one: its file beside this one, and its line here.

Imports no engine: an engine's file is imported by `load`, in the agent's process alone. Engines of
other packages are named by a variable: `OPENENVD_ENGINES=NAME=module:Class,…`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...system.files.installation import install_command
from ..agent_client import EngineAddress
from .base import Engine, EngineRefused
from .docker.options import docker_address, host_config
from .kubernetes import options as kubernetes_options
from .kubernetes.address import kubernetes_address
from .ray import options as ray_options
from .slurm import options as slurm_options
from .swarm import options as swarm_options

Variables = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """Where an engine is, and what it needs.

    Attributes:
        location: `module:Class`, or what else makes it; a module that begins with a dot is in
            this package.
        extra: The extra of openenvd that installs its library; None: it needs none.
        address: Returns the variables that say which engine it is, all of them, from a process's
            own (`address_here`). Raises `EngineFailed` when these lead nowhere. By default there is
            one for all processes of this machine.
        check_options: Called with the engine's own options of a replica, and whether it is in a
            `sandbox`; raises `EngineRefused` for what it would refuse, so that a launch need not
            begin. None: that is seen when the replica is started.
        has_own_addresses: Whether its replicas are reached where their instances say, and at no
            port of this machine.
        moves: Whether a replica that is started again has another address: its environment has
            one at the gateway then, also with one replica.
        pulls_images: Whether its machines pull images themselves: none is looked for here.
        runs_programs: Whether it runs programs of a Python here, which its machines see, too,
            rather than images.
    """

    location: str
    extra: str | None = None
    address: Callable[[Variables], dict[str, str]] = lambda _: {}
    check_options: Callable[..., object] | None = None
    has_own_addresses: bool = False
    moves: bool = False
    pulls_images: bool = False
    runs_programs: bool = False


ENGINES: dict[str, EngineEntry] = {
    "docker": EngineEntry(".docker.engine:DockerEngine", "docker", docker_address, host_config),
    "swarm": EngineEntry(
        ".swarm.engine:SwarmEngine", "docker", docker_address, swarm_options.check_options
    ),
    "slurm": EngineEntry(
        ".slurm.engine:SlurmEngine",
        address=slurm_options.slurm_address,
        check_options=slurm_options.check_options,
        runs_programs=True,
        has_own_addresses=True,
    ),
    "ray": EngineEntry(
        ".ray.engine:RayEngine",
        "ray",
        ray_options.ray_address,
        ray_options.check_options,
        has_own_addresses=True,
        runs_programs=True,
    ),
    "kubernetes": EngineEntry(
        ".kubernetes.engine:KubernetesEngine",
        "kubernetes",
        kubernetes_address,
        kubernetes_options.options_of,
        has_own_addresses=True,
        moves=True,
        pulls_images=True,
    ),
}
MORE_VARIABLE = "OPENENVD_ENGINES"


def entries() -> dict[str, EngineEntry]:
    """Return all engines by name, those of other packages included."""
    more = (item.partition("=") for item in os.environ.get(MORE_VARIABLE, "").split(",") if item)
    return ENGINES | {name: EngineEntry(location) for name, _, location in more}


def address_here(name: str, environ: Variables = os.environ) -> EngineAddress:
    """Return the engine that these variables lead to. Those of an address lead to itself.

    Raises:
        EngineFailed: They lead nowhere.
    """
    entry = entries().get(name)
    return EngineAddress.of(name, {} if entry is None else entry.address(environ))


def traits_of(provider: str) -> EngineEntry:
    """Return what distinguishes a provider; this machine, which is no engine, runs programs."""
    return entries().get(provider) or EngineEntry("", runs_programs=True)


def load(name: str) -> Engine:
    """Import an engine and make it.

    Raises:
        EngineRefused: There is no such engine, or its library is not installed.
    """
    entry = entries().get(name)
    if entry is None:
        raise EngineRefused(f"there is no engine {name!r}")
    module, _, cls = entry.location.partition(":")
    try:
        found = importlib.import_module(module, __package__)
    except ImportError as exc:
        hint = None if entry.extra is None else install_command(entry.extra)
        raise EngineRefused(f"the library of {name} cannot be imported: {exc}", hint) from exc
    engine: Engine = getattr(found, cls)()
    return engine
