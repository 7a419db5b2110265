# SPDX-License-Identifier: Apache-2.0
"""Asks Envoy, over its admin interface on a Unix socket, how its clusters are. Blocks."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .configuration import Endpoint

ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """One replica as Envoy sees it."""

    environment: str
    address: str  # host:port
    is_healthy: bool
    is_draining: bool
    sessions: int  # and other requests under way
    problem: str | None = None  # why it is not healthy

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self)


def endpoint_statuses(admin_socket: Path) -> list[EndpointStatus]:
    """Return all replicas that Envoy knows.

    Raises:
        OSError: Envoy does not answer, or not with JSON.
    """
    try:
        answer = json.loads(_get(admin_socket, "/clusters?format=json"))
    except (ValueError, http.client.HTTPException) as exc:
        raise OSError(f"the gateway's admin interface gave no answer: {exc}") from exc
    return [
        _status(cluster["name"], host)
        for cluster in answer.get("cluster_statuses", ())
        for host in cluster.get("host_statuses", ())
        if "socket_address" in host["address"]  # not what holds requests meanwhile
    ]


def _get(admin_socket: Path, path: str) -> bytes:
    connection = http.client.HTTPConnection("localhost", timeout=ANSWER_SECONDS)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.settimeout(ANSWER_SECONDS)
        connection.sock.connect(str(admin_socket))
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def _status(environment: str, host: dict[str, Any]) -> EndpointStatus:
    address = host["address"]["socket_address"]
    health = host.get("health_status", {})
    is_healthy = not health.get("failed_active_health_check")
    stats = {each["name"]: each.get("value", 0) for each in host.get("stats", ())}
    return EndpointStatus(
        environment,
        Endpoint(0, address["address"], address["port_value"]).address,
        is_healthy=is_healthy,
        is_draining=health.get("eds_health_status") == "DRAINING",
        sessions=int(stats.get("rq_active", 0)),
        problem=None if is_healthy else "it does not answer health checks",
    )
