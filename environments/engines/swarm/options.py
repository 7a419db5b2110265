# SPDX-License-Identifier: Apache-2.0
"""The options of a replica on Swarm: placement, and the Docker options that services have.

`--engine-option constraint=node.labels.gpu==yes` chooses the nodes. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ....system.text.json_lines import Json
from ..base import EngineEntry, EngineRefused, Preparation
from ..docker.options import NO_NEW_PRIVILEGES, docker_address, host_config, published_network, size
from ..host_options import name_within

_NAME = re.compile("[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?")  # Swarm's own


def service_name(name: str) -> str:
    """Return the name of a replica's service, which has at most 63 characters, and no dots."""
    return name_within(name, _NAME, re.sub("[^A-Za-z0-9_-]", "-", name))


def split_options(options: Mapping[str, str]) -> tuple[dict[str, str], Json]:
    """Separate Docker's options from the others, which become a part of the task's template.

    Raises `EngineRefused` if no port is published on the network.
    """
    rest = dict(options)
    template: Json = {}
    if (constraints := rest.pop("constraint", None)) is not None:
        template["Placement"] = {"Constraints": [each.strip() for each in constraints.split(",")]}
    if (network := rest.pop("network", None)) is not None:
        try:
            template["Networks"] = [{"Target": published_network(network)}]
        except ValueError as exc:
            raise EngineRefused(f"--engine-option network={network}: {exc}") from exc
    return rest, template


def check_options(options: Mapping[str, str], *, sandbox: bool) -> None:
    """Raise `EngineRefused` for options that a service cannot have."""
    of_docker, _ = split_options(options)
    container_spec(*host_config(of_docker, sandbox=sandbox))


def container_spec(host: Mapping[str, Any], own: Mapping[str, Any]) -> Json:
    """Return the part of a service's `ContainerSpec` that corresponds to Docker's options.

    `host` has the options of a container's `HostConfig`, `own` those of its `Config`. Raises
    `EngineRefused` for an option that a service cannot have.
    """
    spec: Json = {}
    hint = "leave it out, or use docker"
    for key, value in {**host, **own}.items():
        if key not in _SPEC_OF:
            raise EngineRefused(f"a service of Swarm cannot have Docker's {key}", hint)
        to = _SPEC_OF[key]
        try:
            parts = {to: value} if isinstance(to, str) else to(value)
        except ValueError as exc:
            raise EngineRefused(f"a service of Swarm: {exc}", hint) from exc
        for name, part in parts.items():
            spec[name] = [*spec[name], *part] if name in spec and name == "Mounts" else part
    return spec


def _binds(value: list[str]) -> Json:
    mounts = []
    for bind in value:
        source, _, rest = bind.partition(":")
        target, _, rights = rest.partition(":")
        if not target or rights not in ("", "ro", "rw"):
            raise ValueError(f"write SOURCE:/path or SOURCE:/path:ro, not {bind}")
        mount = {"Source": source, "Target": target, "ReadOnly": rights == "ro"}
        mounts.append({"Type": "bind" if source.startswith("/") else "volume", **mount})
    return {"Mounts": mounts}


def _tmpfs(found: Mapping[str, str]) -> Json:
    mounts = []
    for path, text in found.items():
        options: Json = {}
        for option in filter(None, text.split(",")):
            name, _, value = option.partition("=")
            if name == "size":
                options["SizeBytes"] = size(value)
            elif name == "mode":
                options["Mode"] = int(value, 8)
            elif option not in _TMPFS_ALWAYS:
                raise ValueError(f"a tmpfs has a size and a mode, not {option}")
        mount: Json = {"Type": "tmpfs", "Target": path}
        mounts.append(mount | ({"TmpfsOptions": options} if options else {}))
    return {"Mounts": mounts}


def _security(value: list[str]) -> Json:
    if not set(value) <= NO_NEW_PRIVILEGES:
        raise ValueError("security-opt can be no-new-privileges alone")
    return {"Privileges": {"NoNewPrivileges": True}}


def _hosts(value: list[str]) -> Json:
    pairs = (each.partition(":") for each in value)
    return {"Hosts": [f"{address} {name}" for name, _, address in pairs]}


_TMPFS_ALWAYS = ("rw", "nosuid", "nodev")  # options that Docker always mounts it with
_SPEC_OF: dict[str, str | Callable[[Any], Json]] = {
    "Binds": _binds,
    "CapAdd": "CapabilityAdd",
    "CapDrop": "CapabilityDrop",
    "Dns": lambda value: {"DNSConfig": {"Nameservers": value}},
    "ExtraHosts": _hosts,
    "GroupAdd": "Groups",
    "Init": "Init",
    "PidsLimit": "Pids",
    "ReadonlyRootfs": "ReadOnly",
    # Older Docker engines ignore it for services. There, a setuid program of root gains no
    # privileges because the sandbox drops the capabilities.
    "SecurityOpt": _security,
    "Sysctls": "Sysctls",
    "Tmpfs": _tmpfs,
    "Ulimits": "Ulimits",
    "User": "User",
}


ENGINE = EngineEntry(
    "openenvd.environments.engines.swarm.engine:SwarmEngine",
    Preparation.SHARED_IMAGE,
    extra="docker",
    address=docker_address,
    check_options=check_options,
)
