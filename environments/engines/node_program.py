# SPDX-License-Identifier: Apache-2.0
"""What a replica's program is given on its node, by what runs it there: a Slurm job, a Ray actor.

Such engines run programs of a Python that their nodes see, too. Imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
from collections.abc import Mapping
from pathlib import Path

from ...schema.protocol import HOST_CONFIG_VARIABLE, HOST_OPTIONS_VARIABLE
from ...system.net.listening_sockets import open_listening_sockets
from ...system.net.request_origin import is_loopback
from ...system.text.json_lines import Json

IMPORTS = "imports"  # in a replica's folder: the links that its imports go through


def listen(host: str, port: int) -> list[socket.socket]:
    """Open sockets at an address of this node, at that port or, where it is taken, at any other.

    Raises:
        OSError: The address is not this node's.
    """
    address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    try:
        return open_listening_sockets(address, port)
    except OSError as exc:
        if exc.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
    return open_listening_sockets(address, 0)


def http_address(host: str, port: int) -> str:
    """Return what goes into a URL."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_options(
    plan: Json, host: str, folder: Path, *, owns_cgroup: bool, **limits: int | None
) -> dict[str, str]:
    """Return the variable of the options of a replica's server, as they are on this node.

    Args:
        plan: The replica's plan.
        host: The address that it is reached at.
        folder: The replica's, where the links are made that a project's imports go through.
        owns_cgroup: Whether nothing else runs in the cgroup that it is started in.
        limits: Options that this node knows, for those that were not asked for.
    """
    options = json.loads(plan["env"].get(HOST_OPTIONS_VARIABLE) or "{}")
    options |= {name: value for name, value in limits.items() if value and not options.get(name)}
    options["owns_cgroup"] = owns_cgroup
    if not is_loopback(host):  # its own name: of clients that come without a gateway
        origin = http_address(host, 0).removesuffix(":0")
        options["allow_origin"] = [*options.get("allow_origin", ()), origin]
    if plan.get("links"):
        config = json.loads(plan["env"][HOST_CONFIG_VARIABLE])
        links = _link_imports(plan["links"], folder / IMPORTS)
        options["import_paths"] = [links, *config["import_paths"]]
    return {HOST_OPTIONS_VARIABLE: json.dumps(options)}


def _link_imports(links: Mapping[str, str], folder: Path) -> str:
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, target in links.items():
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(target, target_is_directory=True)
    return str(folder)
