# SPDX-License-Identifier: Apache-2.0
"""Which Ray cluster is meant, as Ray's own library finds one, and whether anything is there.

Imports nothing of Ray.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path

from .base import EngineGone

PROBE_SECONDS = 3.0
START = "start one here: ray start --head --port 6399; or set RAY_ADDRESS=HOST:PORT"
_TEMPORARY = "RAY_TMPDIR"
_CURRENT = "ray/ray_current_cluster"  # written by `ray start`
# How its nodes know each other, where it asks for a token.
_ACCESS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")


def ray_address(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that lead to a cluster: what is set, or the one that runs here.

    An empty address is of no cluster: the agent says what to do.
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
    """Connect to the head, and leave it again.

    Raises:
        EngineGone: No cluster is known, or none is there.
    """
    if not address:
        raise EngineGone(
            "no Ray cluster is known here: RAY_ADDRESS is not set, and none runs", START
        )
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        text = f"RAY_ADDRESS is {address!r}, and must be HOST:PORT of this machine's cluster"
        raise EngineGone(text, "run openenvd on a node of the cluster, and set it to the head's")
    try:
        socket.create_connection((host, int(port)), PROBE_SECONDS).close()
    except OSError as exc:
        text = f"Ray does not answer at {address}: {exc.strerror or exc}"
        raise EngineGone(text, "see whether it runs: ray status") from exc
