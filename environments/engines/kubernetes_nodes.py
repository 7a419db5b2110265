# SPDX-License-Identifier: Apache-2.0
"""What the nodes of a cluster have for pods. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from .base import Capacity
from .kubernetes_options import GPU

Json = dict[str, Any]

_UNITS = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


def capacity_of(nodes: Iterable[Json]) -> Capacity:
    """Return what the nodes have together that are ready, and take pods."""
    usable = [node["status"]["allocatable"] for node in nodes if _takes_pods(node)]
    return Capacity(
        cpus=float(sum(quantity(each.get("cpu", "0")) for each in usable)),
        memory_bytes=int(sum(quantity(each.get("memory", "0")) for each in usable)),
        gpus=int(sum(quantity(each.get(GPU, "0")) for each in usable)),
        nodes=len(usable),
    )


def quantity(text: str) -> Decimal:
    """Read a quantity of Kubernetes: `1500m`, `16Gi`, `1e3`."""
    unit = text.lstrip("+-0123456789.")
    if unit in _UNITS:
        return Decimal(text[: len(text) - len(unit)]) * _UNITS[unit]
    return Decimal(text)


def _takes_pods(node: Json) -> bool:
    conditions = node["status"].get("conditions") or ()
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return is_ready and not node["spec"].get("unschedulable")
