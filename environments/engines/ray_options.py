# SPDX-License-Identifier: Apache-2.0
"""What a replica's plan asks of Ray: the resources of its bundle, and how its actor is started.

    --memory, --cpus, --gpus     `memory`, `CPU` (1 by default) and `GPU` of the placement group
    resources={"disk": 1}        custom resources, as `ray start --resources` names them
    gpus=0.25                    a share of a GPU
    runtime-env={"pip": […]}     the actor's runtime environment, in whose Python the replica runs
    label-selector={"zone": "a"} only nodes with these labels

Pure functions; imports nothing of Ray.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .base import EngineRefused, ReplicaPlan

Json = dict[str, Any]

_RESERVED = ("CPU", "GPU", "memory", "object_store_memory")
_KNOWN = ("gpus", "label-selector", "resources", "runtime-env")


def check_options(options: Mapping[str, str], *, sandbox: bool) -> None:
    """Refuse what Ray cannot do.

    Raises:
        EngineRefused
    """
    if sandbox:
        raise EngineRefused(
            "a Ray actor is a process of the cluster's user: it has no sandbox",
            "leave out --sandbox; or run containers: --provider docker",
        )
    if "address" in options:
        raise EngineRefused(
            "a cluster is named by a variable, so that everything of this home finds it again",
            "set RAY_ADDRESS=HOST:PORT for openenv",
        )
    for name in options:
        if name not in _KNOWN:
            text = f"--engine-option {name} is none of Ray's: {', '.join(_KNOWN)}"
            raise EngineRefused(text, "leave it out")
    _custom(options)
    _gpu_share(options)
    runtime_env(options)
    label_selector(options)


def bundle(plan: ReplicaPlan) -> dict[str, float]:
    """Return the resources of a replica, as a bundle of a placement group has them.

    Raises:
        EngineRefused: The options cannot be read.
    """
    wanted: dict[str, float] = {"CPU": plan.cpus or 1.0}
    if plan.memory_bytes:
        wanted["memory"] = float(plan.memory_bytes)
    if gpus := _gpu_share(plan.options) or plan.gpus:
        wanted["GPU"] = gpus
    return wanted | _custom(plan.options)


def runtime_env(options: Mapping[str, str]) -> Json:
    """Return the runtime environment of the actor; empty: the cluster's own."""
    return _object(options, "runtime-env")


def label_selector(options: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that a node must have."""
    return {name: str(value) for name, value in _object(options, "label-selector").items()}


def _custom(options: Mapping[str, str]) -> dict[str, float]:
    found = _object(options, "resources")
    for name, value in found.items():
        if name in _RESERVED:
            raise EngineRefused(
                f"--engine-option resources: {name} is not a custom resource",
                "use --cpus, --memory and --gpus, or --engine-option gpus=0.5",
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            text = f"--engine-option resources: {name} must be a number above 0, not {value!r}"
            raise EngineRefused(text)
    return {name: float(value) for name, value in found.items()}


def _gpu_share(options: Mapping[str, str]) -> float:
    text = options.get("gpus", "0")
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise EngineRefused(f"--engine-option gpus must be a number, not {text!r}")
    return share


def _object(options: Mapping[str, str], name: str) -> Json:
    text = options.get(name, "{}")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise EngineRefused(
            f"--engine-option {name} must be a JSON object, not {text!r}",
            f"""write it as --engine-option '{name}={{"name": …}}'""",
        )
    return found
