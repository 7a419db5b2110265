# SPDX-License-Identifier: Apache-2.0
"""Docker's own options of a replica, its address, and the remedies for its errors.

Options (`--engine-option NAME=VALUE`) have the names of those of `docker run`. Those that openenvd
decides itself (ports, labels, restarts, memory, CPUs, GPUs, variables) are not among them.

Docker is found as the `docker` command finds it. The first of these that is set counts:

    DOCKER_HOST ▶ DOCKER_CONTEXT ▶ the current context of ~/.docker/config.json ▶ its usual socket

A context is read from the files that `docker context create` writes:
`contexts/meta/<sha256 of its name>/meta.json`, and its certificates in `contexts/tls`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ....schema.errors import EngineFailed
from ....system.text.json_lines import Json
from ...shim.files import read_json
from ..base import EngineEntry, EngineRefused, Preparation
from ..host_options import read_options, read_pairs

SANDBOX: Json = {
    "ReadonlyRootfs": True,
    "CapDrop": ["ALL"],
    "SecurityOpt": ["no-new-privileges:true"],
    "Tmpfs": {"/tmp": "rw,nosuid,nodev"},  # noqa: S108  in the container
}
_SWITCHES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_SIZES = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_NO_NEW = "no-new-privileges"
NO_NEW_PRIVILEGES = frozenset((_NO_NEW, f"{_NO_NEW}:true", f"{_NO_NEW}=true"))
_VOLUME_NAME = re.compile("[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_NO_PORTS = ("host", "none", "container")  # networks on which no port is published


def host_config(options: Mapping[str, str], *, sandbox: bool) -> tuple[Json, Json]:
    """Return the options as parts of a container's `HostConfig`, and of its own configuration.

    Raises `EngineRefused` for one that is unknown, invalid, or would undo the sandbox.
    """
    host: Json = dict(SANDBOX) if sandbox else {}
    own: Json = {}
    readers = {name: read for name, (_, read) in _OPTIONS.items()}
    for name, value in read_options("docker", options, readers).items():
        if sandbox and name in _UNDOES and _UNDOES[name](value):
            text = f"--engine-option {name}={options[name]} takes back what --sandbox drops"
            raise EngineRefused(text, "leave one of them out")
        key = _OPTIONS[name][0]
        config = own if key == "User" else host  # which is no part of `HostConfig`
        match value:  # it is added to the sandbox's
            case list():
                config[key] = [*config.get(key, ()), *value]
            case dict():
                config[key] = {**config.get(key, {}), **value}
            case _:
                config[key] = value
    return host, own


def _list(text: str) -> list[str]:
    return [part for part in (each.strip() for each in text.split(",")) if part]


def _tmpfs(text: str) -> dict[str, str]:
    """Read `/path[:options]`; the options are separated by commas."""
    path, _, options = text.partition(":")
    if not path.startswith("/"):
        raise ValueError("write /path or /path:size=64m")
    return {path: options}


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCHES:
        raise ValueError("write true or false")
    return _SWITCHES[text.lower()]


def size(text: str) -> int:
    """Read a size such as `64m`, in bytes; raises `ValueError`."""
    unit = text[-1:].lower()
    factor = _SIZES.get(unit)
    try:
        return int(text) if factor is None else int(float(text[:-1]) * factor)
    except ValueError as exc:
        raise ValueError("write a size: 64m, 1g") from exc


def published_network(text: str) -> str:
    """Return a network's name; raises `ValueError` if no port is published on the network."""
    if text.partition(":")[0] in _NO_PORTS:
        raise ValueError("on this network no port is published, so no client could connect")
    return text


def _devices(text: str) -> list[Json]:
    devices = []
    for part in _list(text):
        host, *rest = part.split(":")
        inside, rights = rest[0] if rest else host, rest[1] if len(rest) > 1 else "rwm"
        devices.append({"PathOnHost": host, "PathInContainer": inside, "CgroupPermissions": rights})
    return devices


def _ulimits(text: str) -> list[Json]:
    """Read `nofile=1024:4096,…`."""
    limits = []
    for name, value in read_pairs(text).items():
        soft, _, hard = value.partition(":")
        limits.append({"Name": name, "Soft": int(soft), "Hard": int(hard or soft)})
    return limits


# Whether a value of an option undoes a part of `SANDBOX`.
_UNDOES: dict[str, Callable[[Any], bool]] = {
    "cap-add": bool,
    "device": bool,
    "ipc": lambda mode: mode.partition(":")[0] in ("host", "container"),
    "privileged": bool,
    "read-only": lambda is_read_only: not is_read_only,
    "security-opt": lambda found: not set(found) <= NO_NEW_PRIVILEGES,
    "tmpfs": lambda found: any({"dev", "suid"} & set(each.split(",")) for each in found.values()),
    # A folder of the engine's machine, rather than a volume with a name.
    "volume": lambda binds: any(
        not _VOLUME_NAME.fullmatch(each.partition(":")[0]) for each in binds
    ),
}
_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "add-host": ("ExtraHosts", _list),
    "cap-add": ("CapAdd", _list),
    "cap-drop": ("CapDrop", _list),
    "cpuset-cpus": ("CpusetCpus", str),
    "device": ("Devices", _devices),
    "dns": ("Dns", _list),
    "group-add": ("GroupAdd", _list),
    "init": ("Init", _switch),
    "ipc": ("IpcMode", str),
    "network": ("NetworkMode", published_network),
    "pids-limit": ("PidsLimit", int),
    "privileged": ("Privileged", _switch),
    "read-only": ("ReadonlyRootfs", _switch),
    "runtime": ("Runtime", str),
    "security-opt": ("SecurityOpt", _list),
    "shm-size": ("ShmSize", size),
    "sysctl": ("Sysctls", read_pairs),
    "tmpfs": ("Tmpfs", _tmpfs),
    "ulimit": ("Ulimits", _ulimits),
    "user": ("User", str),
    "volume": ("Binds", _list),
}


USUAL_SOCKET = "unix:///var/run/docker.sock"
_HOST, _VERIFY, _CERTIFICATES = "DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"
INSTALL = "install Docker: apt install docker.io, or https://docs.docker.com/engine/install"
_NO_ANSWER = ("cannot connect", "error during connect")
_VARIABLES = ("DOCKER_HOST", "DOCKER_CONTEXT")  # which lead to it
# Parts of Docker's messages, in lower case, and the command that fixes each problem.
_REMEDIES = {
    "permission denied": "let this user use it: sudo usermod -aG docker $USER, and log in again",
    "no such host": "its registry is not reachable; an image from elsewhere: docker load -i FILE",
    "no space left": "make room: docker system prune",
    "pull access denied": "look at the image's name; docker login, if it is private",
    "manifest unknown": "look at the image's tag",
    "not found: manifest": "look at the image's tag",
    "no command specified": "its image starts no server; make one that does: openenv image build",
}


def docker_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that lead Docker's library to the engine that `docker` would use.

    Those that are not set are empty. Raises `EngineFailed`: the context cannot be read.
    """
    folder = Path(environ.get("DOCKER_CONFIG") or Path(environ.get("HOME") or "~", ".docker"))
    folder = folder.expanduser()
    found = {name: environ.get(name, "") for name in (_HOST, _VERIFY, _CERTIFICATES)}
    if not found[_HOST]:
        current = (read_json(folder / "config.json") or {}).get("currentContext")
        context = environ.get("DOCKER_CONTEXT") or current
        if context not in (None, "", "default"):
            return _read_context(folder, str(context))
    return found | {_HOST: found[_HOST] or USUAL_SOCKET}


def _read_context(folder: Path, name: str) -> dict[str, str]:
    digest = hashlib.sha256(name.encode()).hexdigest()
    try:
        meta = json.loads((folder / "contexts" / "meta" / digest / "meta.json").read_bytes())
        endpoint: dict[str, Any] = meta["Endpoints"]["docker"]
        host = str(endpoint["Host"])
    except (OSError, ValueError, LookupError, TypeError) as exc:
        message = f"Docker has no context {name!r} that can be read"
        raise EngineFailed(message, "docker context ls; docker context use default") from exc
    certificates = folder / "contexts" / "tls" / digest / "docker"
    if not certificates.is_dir():
        return {_HOST: host, _VERIFY: "", _CERTIFICATES: ""}
    verify = "" if endpoint.get("SkipTLSVerify") else "1"
    return {_HOST: host, _VERIFY: verify, _CERTIFICATES: str(certificates)}


def hint_on(text: str) -> str | None:
    """Return the command that fixes the problem in Docker's message; None: none is known."""
    lowered = text.lower()
    if any(words in lowered for words in _NO_ANSWER):
        # The daemon may lack variables of the user's shell.
        known = {name: os.environ.get(name, "") for name in _VARIABLES}
        own = [f"{name}={text}" for name, text in known.items() if text not in ("", USUAL_SOCKET)]
        has = " and ".join(own) if own else f"no {' and no '.join(_VARIABLES)}"
        start = "start it: sudo systemctl start docker, or open Docker Desktop"
        again = "to give it those of your shell (replicas continue): openenv stop; openenv up"
        return f"{start}. The daemon has {has}; {again}"
    return next((hint for words, hint in _REMEDIES.items() if words in lowered), None)


ENGINE = EngineEntry(
    "openenvd.environments.engines.docker.engine:DockerEngine",
    Preparation.IMAGE,
    extra="docker",
    address=docker_address,
    check_options=host_config,
)
