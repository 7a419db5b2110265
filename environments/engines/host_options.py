# SPDX-License-Identifier: Apache-2.0
"""What engines look at, change and refuse in what a replica is given.

`HOST_OPTIONS_VARIABLE` has the options of its server, as JSON. `--engine-option NAME=VALUE` are the
engine's own, which `read_options` reads by the engine's table.

What a replica's program is given on its node, by what runs it there: a Slurm job, a Ray actor.

Such engines run programs of a Python that their nodes see, too. Imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...schema.protocol import HOST_CONFIG_VARIABLE, HOST_OPTIONS_VARIABLE
from ...system.net.listening_sockets import open_listening_sockets
from ...system.net.request_origin import is_loopback
from ...system.text.json_lines import Json
from .base import EngineRefused, ReplicaPlan


def host_options(env: Mapping[str, str]) -> Json:
    """Return the options that a replica's variables have for its server."""
    return dict(json.loads(env.get(HOST_OPTIONS_VARIABLE) or "{}"))


def with_host_options(env: Mapping[str, str], **changed: Any) -> dict[str, str]:
    """Return a replica's variables with other options for its server."""
    return {**env, HOST_OPTIONS_VARIABLE: json.dumps(host_options(env) | changed)}


def served_anywhere(env: Mapping[str, str]) -> dict[str, str]:
    """Let the server be called by the addresses of its node or pod, too."""
    return with_host_options(env, host="0.0.0.0")  # noqa: S104


def read_options(
    engine: str, given: Mapping[str, str], known: Mapping[str, Callable[[str], Any]]
) -> Json:
    """Return the values of an engine's own options, by name.

    Args:
        engine: Its name.
        given: The options as texts.
        known: What reads each that it has; raises `ValueError` with how to write it.

    Raises:
        EngineRefused: An option is not known, or its value is not one.
    """
    found = {}
    for name, text in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            all_of_them = f"{meant}It has: {', '.join(sorted(known))}"
            raise EngineRefused(f"{engine} has no option {name!r}", all_of_them)
        try:
            found[name] = known[name](text)
        except ValueError as exc:
            raise EngineRefused(f"--engine-option {name}={text}: {exc}") from exc
    return found


def check_no_sandbox(what: str, *, sandbox: bool) -> None:
    """Refuse a sandbox for what is a process of a user; raises `EngineRefused`."""
    if sandbox:
        hint = "leave out --sandbox; or run containers: --provider docker"
        raise EngineRefused(f"{what}: it has no sandbox", hint)


def check_token(plan: ReplicaPlan, address: str | None) -> None:
    """Refuse to serve without a token at an address that others can reach; None: there is none."""
    if address is not None and host_options(plan.env).get("token") is None:
        raise EngineRefused(
            f"nodes of this cluster serve at their own addresses ({address}, …), where everybody "
            "on its network could use the environment",
            "launch with --token auto",
        )


def check_gpus(wanted: float, most: float, remedy: str) -> None:
    """Refuse more GPUs than the node has that has most; `remedy` says how to see what they have."""
    if wanted > most:
        have = "1 GPU" if most == 1 else f"{most:g} GPUs"
        text = f"--gpus {wanted:g}: no node of this cluster has more than {have}"
        raise EngineRefused(text, remedy)


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
