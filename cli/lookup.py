# SPDX-License-Identifier: Apache-2.0
"""`NAME|REQUEST_ID`: an environment of that name, or else the request whose id begins so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..client.api import DaemonClient
from ..client.errors import ApiRefused


@dataclass(frozen=True, slots=True)
class Target:
    """What was meant: one of the two."""

    environment: dict[str, Any] | None = None
    request: dict[str, Any] | None = None


def find_target(client: DaemonClient, text: str) -> Target:
    """The environment or request that `text` names.

    Raises:
        ApiRefused: `not_found` with near matches, or `ambiguous`.
    """
    try:
        return Target(environment=client.environment(text))
    except ApiRefused as exc:
        if exc.kind != "not_found":
            raise
        unknown = exc
    try:
        return Target(request=client.request(text))
    except ApiRefused as exc:
        if exc.kind != "not_found":
            raise
    raise ApiRefused(unknown.status, _neither(text, unknown)) from None


def _neither(text: str, unknown: ApiRefused) -> dict[str, Any]:
    near = unknown.details.get("near") or []
    hint = f"did you mean {' or '.join(near)}?" if near else "openenv status lists both"
    message = f"no environment and no request is called {text!r}"
    return {**unknown.details, "message": message, "hint": hint}
