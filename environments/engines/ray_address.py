# SPDX-License-Identifier: Apache-2.0
"""Which Ray cluster is meant: as Ray's own library finds one. Imports nothing of Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

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
