# SPDX-License-Identifier: Apache-2.0
"""Where a container is reached without Docker's help: at its own address, on a bridge here.

    a published port   client ──▶ docker-proxy ──▶ container     docker-proxy ends with dockerd
    its own address    client ───────────────────▶ container     as long as the container runs

Only where nothing speaks against it: the container runs on this very machine (its process has it in
its cgroup's name), and its network's gateway is an address of this machine. An engine in a virtual
machine (Docker Desktop), on another host, or without root's rights, whose bridge is in a namespace
of its own, has its containers reached at their published ports.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def is_rootless(info: Json) -> bool:
    """Whether an engine runs without root's rights, as it says."""
    return any("rootless" in each for each in info.get("SecurityOptions") or ())


def own_address(container: Json, proc: Path = Path("/proc")) -> str | None:
    """Return `http://host:port` of a running container; None when it may not be reached there.

    Args:
        container: What the engine says of it, inspected.
        proc: Where processes are found.
    """
    settings = container["NetworkSettings"]
    published = [name for name, at in (settings.get("Ports") or {}).items() if at]
    if len(published) != 1 or not _runs_here(container, proc):
        return None
    port = published[0].partition("/")[0]
    for network in (settings.get("Networks") or {}).values():
        if network.get("IPAddress") and _is_of_this_machine(network.get("Gateway")):
            return f"http://{network['IPAddress']}:{port}"
    return None


def _runs_here(container: Json, proc: Path) -> bool:
    try:
        return container["Id"] in (proc / str(container["State"]["Pid"]) / "cgroup").read_text()
    except OSError:
        return False


def _is_of_this_machine(address: str | None) -> bool:
    """Whether an address can be bound, which takes no privilege."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
            found.bind((address or "", 0))
    except OSError:
        return False
    return bool(address)
