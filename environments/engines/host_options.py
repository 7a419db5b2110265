# SPDX-License-Identifier: Apache-2.0
"""The options of a replica, as engines read, change and refuse them; its program; its GPUs.

`HOST_OPTIONS_VARIABLE` has the options of the replica's server, as JSON. `read_options` reads the
engine's own (`--engine-option NAME=VALUE`). Slurm jobs and Ray actors run programs of a Python that
their nodes see, too.

The GPUs of this machine (`--gpus N`) are NVIDIA's only: those that the daemon's
`CUDA_VISIBLE_DEVICES` names, or else all. They are counted in the driver's folder, as devices, or
else by `nvidia-smi` (in a container the driver may be outside).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...schema.errors import InvalidSpec
from ...schema.protocol import HOST_CONFIG_VARIABLE, HOST_OPTIONS_VARIABLE
from ...system.net.access import is_loopback
from ...system.net.listening_sockets import http_address, open_listening_sockets
from ...system.process.proc import printed_by
from ...system.text.json_lines import Json
from ...system.text.units import near_matches, plural
from .base import EngineRefused, ReplicaPlan

MAX_NAME_LENGTH = 63  # of objects of Swarm and Kubernetes
_DIGEST_LENGTH = 8


def host_options(env: Mapping[str, str]) -> Json:
    """Return the options of a server, from its replica's variables."""
    return dict(json.loads(env.get(HOST_OPTIONS_VARIABLE) or "{}"))


def with_host_options(env: Mapping[str, str], **changed: Any) -> dict[str, str]:
    """Return a replica's variables with some options of the server changed."""
    return {**env, HOST_OPTIONS_VARIABLE: json.dumps(host_options(env) | changed)}


def served_anywhere(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables by which a server also listens at the address of its node or pod."""
    return with_host_options(env, host="0.0.0.0")  # noqa: S104


def read_options(
    engine: str, given: Mapping[str, str], known: Mapping[str, Callable[[str], Any]]
) -> Json:
    """Return the values of an engine's own options, by name; raises `EngineRefused`.

    The functions in `known` read one option each, and raise `ValueError` with how to write it.
    """
    found = {}
    for name, text in given.items():
        if name not in known:
            _, meant = near_matches(name, known, "")
            hint = f"{meant} It has: {', '.join(sorted(known))}".lstrip()
            raise EngineRefused(f"{engine} has no option {name!r}", hint)
        try:
            found[name] = known[name](text)
        except ValueError as exc:
            raise EngineRefused(f"--engine-option {name}={text}: {exc}") from exc
    return found


def read_object(text: str) -> Json:
    """Read an option that is a JSON object; raises `ValueError`."""
    wanted = """it must be a JSON object, in quotes: '{"name": …}'"""
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise ValueError(f"{wanted} ({exc})") from exc
    if not isinstance(found, dict):
        raise ValueError(wanted)
    return found


def read_pairs(text: str) -> dict[str, str]:
    """Read `NAME=VALUE,…`; raises `ValueError`."""
    found = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not name or not equals:
            raise ValueError(f"{part.strip()!r} has no value: write NAME=VALUE,…")
        found[name] = value
    return found


def name_within(text: str, allowed: re.Pattern[str], begin: str) -> str:
    """Return a name of at most `MAX_NAME_LENGTH` characters: the same for the same text.

    If the text itself is allowed, it is the name; otherwise the name is `begin` and a digest.
    """
    if len(text) <= MAX_NAME_LENGTH and allowed.fullmatch(text):
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{begin[: MAX_NAME_LENGTH - _DIGEST_LENGTH - 1]}-{digest}"


def check_no_sandbox(what: str, *, sandbox: bool) -> None:
    """Refuse a sandbox for a replica that is a user's process; raises `EngineRefused`."""
    if sandbox:
        hint = "leave out --sandbox; or run containers: --provider docker"
        raise EngineRefused(f"{what}: it has no sandbox", hint)


def check_nodes(
    plan: ReplicaPlan, gpus: float, nodes: Iterable[tuple[float, str | None]], remedy: str
) -> None:
    """Refuse GPUs that no node has, and serving without a token at addresses that others reach.

    `nodes` has the number of GPUs of each node, and its address if others can reach that.
    """
    found = list(nodes)
    check_gpus(gpus, max((each for each, _ in found), default=0), remedy)
    address = next((each for _, each in found if each is not None), None)
    if address is not None and host_options(plan.env).get("token") is None:
        text = f"nodes of this cluster serve at their own addresses ({address}, …)"
        raise EngineRefused(f"{text}, where everybody reaches them", "launch with --token auto")


def check_gpus(wanted: float, most: float, remedy: str) -> None:
    """Refuse more GPUs than any node has; `most` is the largest number. Raises `EngineRefused`."""
    if wanted > most:
        text = f"no node of this cluster has more than {plural(int(most), 'GPU')}"
        raise EngineRefused(f"--gpus {wanted:g}: {text}", remedy)


IMPORTS = "imports"  # the folder of import links, in a replica's folder


def listen(host: str, port: int) -> list[socket.socket]:
    """Open sockets at an address of this node, at the port or, if it is taken, at any other.

    Raises `OSError` if the address is not this node's.
    """
    address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    try:
        return open_listening_sockets(address, port)
    except OSError as exc:
        if exc.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
    return open_listening_sockets(address, 0)


def server_variables(
    plan: Json, host: str, folder: Path, *, owns_cgroup: bool, **limits: int | None
) -> dict[str, str]:
    """Return the variable with the options of a replica's server, which is reached at `host`.

    It imports through links in its `folder`. Nothing else runs in its cgroup if it `owns_cgroup`.
    `limits` are options that this node sets unless the user did.
    """
    options = host_options(plan["env"])
    options |= {name: value for name, value in limits.items() if value and not options.get(name)}
    options["owns_cgroup"] = owns_cgroup
    if not is_loopback(host):  # clients that come without a gateway call it by this address
        origin = http_address(host, 0).removesuffix(":0")
        options["allow_origin"] = [*options.get("allow_origin", ()), origin]
    if plan.get("links"):
        config = json.loads(plan["env"][HOST_CONFIG_VARIABLE])
        links = link_imports(plan["links"], folder / IMPORTS)
        options["import_paths"] = [links, *config["import_paths"]]
    return {HOST_OPTIONS_VARIABLE: json.dumps(options)}


def link_imports(links: Mapping[str, str | Path], folder: Path) -> str:
    """Make the links through which a project imports; return their folder."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, target in links.items():
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(target, target_is_directory=True)
    return str(folder)


VARIABLE = "CUDA_VISIBLE_DEVICES"
ASK_SECONDS = 10.0

_DRIVER = "proc/driver/nvidia/gpus"
_NONE = ("-1", "NoDevFiles", "void", "none")


def find_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[str, ...]:
    """Return the devices that may be used, as `CUDA_VISIBLE_DEVICES` names them; empty: none."""
    if (said := environ.get(VARIABLE)) is not None:
        return named(said)
    devices = [path for path in root.glob("dev/nvidia*") if path.name[6:].isdecimal()]
    count = len([*root.glob(f"{_DRIVER}/*")]) or len(devices) or _count_by_program(environ)
    return tuple(str(number) for number in range(count))


def named(text: str) -> tuple[str, ...]:
    """Parse `CUDA_VISIBLE_DEVICES`: numbers or ids, up to the first invalid one, as CUDA does."""
    devices = []
    for device in (part.strip() for part in text.split(",")):
        if not device or device in _NONE:
            break
        devices.append(device)
    return tuple(devices)


def share(devices: tuple[str, ...], gpus: int, ordinal: int) -> tuple[str, ...]:
    """Choose a replica's devices, which are shared when all are taken; raises `InvalidSpec`."""
    if not devices:
        lacks = "no NVIDIA driver, no /dev/nvidia0, and no nvidia-smi that shows one"
        hint = "leave --gpus (or gpus in openenv.yaml) out, or launch on a machine that has one"
        raise InvalidSpec(f"--gpus {gpus}: there is no GPU here ({lacks})", hint)
    if gpus > len(devices):
        has = f"{plural(len(devices), 'GPU')} ({', '.join(devices)})"
        hint = f"--gpus {len(devices)}; several shards may share one: --gpus 1 --shards 4"
        raise InvalidSpec(f"--gpus {gpus}: this machine has {has}", hint)
    first = ordinal * gpus
    return tuple(devices[(first + number) % len(devices)] for number in range(gpus))


def _count_by_program(environ: Mapping[str, str]) -> int:
    listed = printed_by(["nvidia-smi", "--list-gpus"], ASK_SECONDS, environ)
    return sum(line.startswith("GPU ") for line in listed.splitlines())
