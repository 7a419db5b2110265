# SPDX-License-Identifier: Apache-2.0
"""Translates a replica's plan into Ray's terms, and finds the Ray cluster.

    --memory, --cpus, --gpus     `memory`, `CPU` (1 by default) and `GPU` of the placement group
    resources={"disk": 1}        custom resources, as `ray start --resources` names them
    gpus=0.25                    a share of a GPU
    runtime-env={"pip": […]}     the actor's runtime environment, in whose Python the replica runs
    label-selector={"zone": "a"} only nodes with these labels

The module imports nothing of Ray.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path

from ....system.text.json_lines import Json
from ..base import EngineEntry, EngineGone, Preparation, ReplicaPlan
from ..host_options import check_no_sandbox, read_object, read_options

PROBE_SECONDS = 3.0
START = "start one here: ray start --head --port 6399; or set RAY_ADDRESS=HOST:PORT"
_TEMPORARY = "RAY_TMPDIR"
_CURRENT = "ray/ray_current_cluster"  # written by `ray start`
# The variables that have the cluster's token, if it requires one.
_ACCESS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
_RESERVED = ("CPU", "GPU", "memory", "object_store_memory")


def check_options(options: Mapping[str, str], *, sandbox: bool) -> None:
    """Refuse a sandbox and invalid options; raises `EngineRefused`."""
    check_no_sandbox("a Ray actor is a process of the cluster's user", sandbox=sandbox)
    options_of(options)


def options_of(options: Mapping[str, str]) -> Json:
    """Return the values of Ray's options, by name; raises `EngineRefused`."""
    return read_options("ray", options, _OPTIONS)


def bundle(plan: ReplicaPlan) -> dict[str, float]:
    """Return the resources of a replica, as the bundle of a placement group."""
    options = options_of(plan.options)
    wanted: dict[str, float] = {"CPU": plan.cpus or 1.0}
    if plan.memory_bytes:
        wanted["memory"] = float(plan.memory_bytes)
    if gpus := options.get("gpus") or plan.gpus:
        wanted["GPU"] = gpus
    wanted.update(options.get("resources", {}))
    return wanted


def _labels(text: str) -> dict[str, str]:
    return {name: str(value) for name, value in read_object(text).items()}


def _custom(text: str) -> dict[str, float]:
    found = read_object(text)
    for name, value in found.items():
        if name in _RESERVED:
            raise ValueError(f"{name} is not a custom resource; use --cpus, --memory and --gpus")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{name} must be a number above 0, not {value!r}")
    return {name: float(value) for name, value in found.items()}


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (share := float(text)) < float("inf"):
            return share
    raise ValueError("it must be a number")


_OPTIONS = {
    "gpus": _share,
    "label-selector": _labels,
    "resources": _custom,
    "runtime-env": read_object,
}


def ray_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that lead to the named cluster, or else to the one that runs here.

    The address is empty if there is none; the agent's error says what to do.
    """
    address = environ.get("RAY_ADDRESS", "")
    if address in ("", "auto"):
        address = ""
        with contextlib.suppress(OSError):
            current = Path(environ.get(_TEMPORARY) or "/tmp") / _CURRENT  # noqa: S108  Ray's own
            address = current.read_text(encoding="utf-8").strip()
    given = {name: environ[name] for name in _ACCESS if environ.get(name)}
    return {"RAY_ADDRESS": address, **given}


def check_answers(address: str) -> None:
    """Check that a cluster's head accepts a connection; raises `EngineGone`."""
    if not address:
        raise EngineGone("RAY_ADDRESS is not set, and no Ray cluster runs here", START)
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        text = f"RAY_ADDRESS is {address!r}, and must be HOST:PORT of this machine's cluster"
        raise EngineGone(text, "run openenvd on a node of the cluster, and set it to the head's")
    try:
        socket.create_connection((host, int(port)), PROBE_SECONDS).close()
    except OSError as exc:
        text = f"Ray does not answer at {address}: {exc.strerror or exc}"
        raise EngineGone(text, "see whether it runs: ray status") from exc


ENGINE = EngineEntry(
    "openenvd.environments.engines.ray.engine:RayEngine",
    Preparation.PROGRAM,
    extra="ray",
    address=ray_address,
    check_options=check_options,
    has_own_addresses=True,
)
