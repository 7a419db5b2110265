# SPDX-License-Identifier: Apache-2.0
"""The nodes of a Slurm cluster, as `sinfo` tells them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .slurm_commands import run

_FIELDS = (
    "NodeList",
    "StateLong",
    "CPUsState",
    "Memory",
    "AllocMem",
    "Gres",
    "GresUsed",
    "NodeAddr",
)
_FORMAT = ",".join(f"{name}:200" for name in _FIELDS)
_UP = ("idle", "mixed", "allocated", "completing")
_GPUS = re.compile(r"\bgpu(?::[A-Za-z][\w.-]*)?:(\d+)")


@dataclass(frozen=True, slots=True)
class Node:
    """One node; memory in MB."""

    name: str
    address: str
    is_up: bool  # it takes jobs
    cpus: int
    free_cpus: int
    memory_mb: int
    free_memory_mb: int
    gpus: int
    free_gpus: int


def nodes(seconds: float) -> list[Node]:
    """Return all nodes, each once, however many partitions it is in.

    Args:
        seconds: How long Slurm may take to answer.

    Raises:
        EngineGone, EngineRefused
    """
    told = run("sinfo", "--noheader", "--Node", f"--Format={_FORMAT}", seconds=seconds)
    found = (_node(line.split()) for line in told.splitlines() if line.strip())
    return list({node.name: node for node in found}.values())


def _node(words: list[str]) -> Node:
    name, state, cpus, memory, used_memory, gres, used_gres, address = words
    _, idle, _, total = (int(part) for part in cpus.split("/"))
    gpus = _count_gpus(gres)
    return Node(
        name=name,
        address=address,
        is_up=state.startswith(_UP) and not state.endswith("*"),  # `*`: it does not answer
        cpus=total,
        free_cpus=idle,
        memory_mb=int(memory),
        free_memory_mb=max(0, int(memory) - int(used_memory)),
        gpus=gpus,
        free_gpus=max(0, gpus - _count_gpus(used_gres)),
    )


def _count_gpus(gres: str) -> int:
    return sum(int(count) for count in _GPUS.findall(gres))
