# SPDX-License-Identifier: Apache-2.0
"""Writes Envoy's files, and reads its admin interface.

A changed file is replaced by rename, which Envoy watches for. Endpoints are written first, then
clusters, then routes, so that no file names a file or cluster that does not exist yet. Files that
are no longer named are removed last. `BackendFiles` keeps the content, so that a change of one
environment costs nothing for the others. The admin interface is on a Unix socket; requests block.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ...schema.layout import create_whole, make_private
from ...system.text.json_lines import Json
from ..shim.files import file_identity, replace_file
from . import configuration
from .configuration import Backend, Endpoint, GatewayOptions

ANSWER_SECONDS = 5.0

_FULL_SHARE = 0.95  # this share of the limit counts as full, since connections come and go


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """Envoy's view of one replica."""

    environment: str
    address: str  # host:port
    is_healthy: bool
    is_draining: bool
    sessions: int  # including other requests under way
    problem: str | None = None  # why it is not healthy


def endpoint_statuses(admin_socket: Path) -> list[EndpointStatus]:
    """Return Envoy's view of all replicas; raises `OSError` as `ask_admin` does."""
    return [
        _status(cluster["name"], host)
        for cluster in ask_admin(admin_socket, "/clusters?format=json").get("cluster_statuses", ())
        for host in cluster.get("host_statuses", ())
        if "socket_address" in host["address"]  # otherwise it is the socket of held requests
    ]


@dataclass(frozen=True, slots=True)
class Connections:
    """The clients' connections to the gateway."""

    open: int
    max: int
    refused: int  # how many were closed at once, since Envoy was started

    @property
    def problem(self) -> str | None:
        """Return why clients may be refused; None if there is room."""
        if self.open < _FULL_SHARE * self.max:
            return None
        return (
            f"the gateway is full: {self.open} of {self.max} connections are open, and further "
            f"ones are closed, {self.refused} so far. A higher `ulimit -Hn` of the shell "
            "that starts the daemon makes room for more, once the gateway is restarted"
        )


def read_connections(folder: Path, admin_socket: Path) -> Connections:
    """Return the connections of clients, and their limit; raises `OSError` as `ask_admin` does."""
    path = "/stats?format=json&filter=gateway.downstream_cx_active|downstream_global_cx_overflow"
    stats = {each["name"]: each["value"] for each in ask_admin(admin_socket, path)["stats"]}
    started = json.loads((folder / "bootstrap.json").read_bytes())
    [monitor] = started["overload_manager"]["resource_monitors"]
    most = monitor["typed_config"]["max_active_downstream_connections"]
    now = stats.get("http.gateway.downstream_cx_active", 0)
    refused = sum(n for name, n in stats.items() if name.endswith("global_cx_overflow"))
    return Connections(now, most, refused)


def ask_admin(admin_socket: Path, path: str) -> Any:
    """Return Envoy's answer; raises `OSError` if there is none, or it is not JSON."""
    connection = http.client.HTTPConnection("localhost", timeout=ANSWER_SECONDS)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.settimeout(ANSWER_SECONDS)
        connection.sock.connect(str(admin_socket))
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    except (ValueError, http.client.HTTPException) as exc:
        raise OSError(f"the gateway's admin interface gave no answer: {exc}") from exc
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


_SPARE_FDS = 128  # for files, listeners and health checks
_MAX_FDS = 2**20  # where there is no limit


def write_start_files(folder: Path, options: GatewayOptions, admin_socket: Path) -> None:
    """Write the files that Envoy is started with."""
    make_private(folder / "endpoints")
    where = str(folder)
    if options.certificate:
        _replace(folder / "certificates.json", configuration.certificates(options))
    _replace(folder / "listeners.json", configuration.listeners(options, where))
    # The daemon may have written these by now.
    create_whole(folder / "clusters.json", orjson.dumps(configuration.clusters()))
    create_whole(folder / "routes.json", orjson.dumps(configuration.routes()))
    bootstrap = configuration.bootstrap(where, str(admin_socket), _most_connections())
    _replace(folder / "bootstrap.json", bootstrap)


class BackendFiles:
    """Envoy's clusters, routes and endpoints, as last written. Used by one thread at a time.

    If others have replaced or removed files since, as a restarted gateway does, all files are
    compared again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shared = folder / "clusters.json", folder / "routes.json"
        self._written: dict[str, Backend] = {}
        # By environment, its items of the lists in the shared files
        self._clusters: dict[str, bytes] = {}
        self._routes: dict[str, bytes] = {}
        self._identities: list[tuple[int, int]] = []  # of the shared files

    def write(self, backends: Iterable[Backend]) -> None:
        """Write the files for these environments, as far as they have changed.

        If one cannot be written (`OSError`), earlier files were, and no file is half written.
        """
        wanted = {backend.name: backend for backend in backends}
        folder = self._folder / "endpoints"
        if is_first := not self._identities or self._identities != self._identify():
            self._written = {}
            make_private(self._folder)
            make_private(folder)
        elif wanted == self._written:
            return
        self._identities = []  # unknown, until all files are written
        clusters, routes = {}, {}
        for name, backend in wanted.items():
            if self._written.get(name) == backend:
                clusters[name], routes[name] = self._clusters[name], self._routes[name]
                continue
            path = folder / f"{name}.json"
            _replace(path, configuration.endpoints(backend))
            clusters[name] = orjson.dumps(configuration.cluster(backend, str(path)))
            routes[name] = b",".join(map(orjson.dumps, configuration.routes_to(backend)))
        # A new cluster must be written before its route, and a removed one must go after its route.
        old = self._written.keys() or {path.stem for path in folder.glob("*.json")}
        clusters_path, routes_path = self._shared
        to_all = configuration.routes(map(orjson.Fragment, routes.values()))
        if not old <= wanted.keys():
            _replace(routes_path, to_all)
        if is_first or clusters != self._clusters:
            _replace(clusters_path, configuration.clusters(map(orjson.Fragment, clusters.values())))
        if is_first or routes != self._routes:
            _replace(routes_path, to_all)
        for name in old - wanted.keys():
            (folder / f"{name}.json").unlink(missing_ok=True)
        self._written, self._clusters, self._routes = wanted, clusters, routes
        self._identities = self._identify()

    def _identify(self) -> list[tuple[int, int]]:
        return [file_identity(str(path)) for path in self._shared]


def _most_connections() -> int:
    """Return how many clients the limit on open files allows; each client takes two files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (min(most, _MAX_FDS) - _SPARE_FDS) // 2)


def _replace(path: Path, content: Json) -> None:
    text = orjson.dumps(content)
    with contextlib.suppress(OSError):  # it is missing, or cannot be read
        if path.stat().st_size == len(text) and path.read_bytes() == text:
            return
    replace_file(str(path), text)
