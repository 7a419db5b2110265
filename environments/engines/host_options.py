# SPDX-License-Identifier: Apache-2.0
"""What engines look at, and change, in the options that a replica's server is given."""

from __future__ import annotations

import json

from ...env_host.protocol import HOST_OPTIONS_VARIABLE
from .base import EngineRefused, ReplicaPlan


def served_anywhere(env: dict[str, str]) -> dict[str, str]:
    """Let the server be called by the addresses of its node or pod, too."""
    options = json.loads(env.get(HOST_OPTIONS_VARIABLE) or "{}")
    return {**env, HOST_OPTIONS_VARIABLE: json.dumps({**options, "host": "0.0.0.0"})}  # noqa: S104


def check_token(plan: ReplicaPlan, address: str | None) -> None:
    """Refuse to serve without a token at an address of a node that others can reach.

    Args:
        plan: The replica's.
        address: The address of such a node; None: there is none.

    Raises:
        EngineRefused
    """
    options = json.loads(plan.env.get(HOST_OPTIONS_VARIABLE) or "{}")
    if address is not None and options.get("token") is None:
        raise EngineRefused(
            f"nodes of this cluster serve at their own addresses ({address}, …), where everybody "
            "on its network could use the environment",
            "launch with --token auto",
        )


def check_gpus(wanted: float, most: float, remedy: str) -> None:
    """Refuse more GPUs than any node has.

    Args:
        wanted: How many a replica is to have.
        most: How many the node has that has most.
        remedy: How to see what nodes have.

    Raises:
        EngineRefused
    """
    if wanted > most:
        have = "1 GPU" if most == 1 else f"{most:g} GPUs"
        text = f"--gpus {wanted:g}: no node of this cluster has more than {have}"
        raise EngineRefused(text, remedy)
