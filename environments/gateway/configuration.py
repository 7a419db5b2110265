# SPDX-License-Identifier: Apache-2.0
"""Envoy's configuration, as plain JSON made by pure functions.

    bootstrap ──names the files of──▶ listeners, clusters       read again when they are replaced
    listeners ──names the files of──▶ routes, certificate
    clusters ───names the files of──▶ endpoints, one for each environment

Parts that change often are in files of their own: replacing endpoints or routes drops no session,
while a listener that changes drains its connections. So a listener is written once, and a cluster
contains nothing that the scaling of an environment changes.

Balancing. Replicas get sessions in turn, so that a crowd is split evenly. (Least requests would not
be even: Envoy counts a request once its replica has accepted the connection, so a replica that is
slow to accept looks empty and gets more.) Replicas that are known to be full are degraded: they get
requests only if all are full.

A replica that is full, or drains, answers a handshake with `RETRY_HEADER` as long as the gateway
may still try another one (`env_host/websocket/handshake.py`). Envoy's circuit breakers have no
limit, as they count all replicas together, or make requests wait for one.

Retries. A handshake is tried on another replica if the connection failed, ended without an answer,
or was answered with `RETRY_HEADER`: no session had begun. Each replica is tried once, up to
`MAX_ASKED` of them, so that no handshake is refused while there is room. Any other request is tried
again only if it was never sent, or never begun.

Health. A replica that does not answer health checks gets no session until it does; before Envoy
knows that, its handshakes are tried on another replica. Outlier detection is not used, since it
counts every session that a replica ends, as all do, as a failed connection. Replicas that do not
answer are not tried while any replica does (`PANIC_PERCENT`).

Identity. An address may belong to another server while Envoy still has it. So every attempt of a
request names the environment, the launch (its generation) and the replica for which Envoy takes the
address, and any other server refuses the request (`env_host/serving/access.py`). A route adds its
headers before a replica is chosen; so launch and replica are added by a filter of the cluster,
which runs for each attempt, from the metadata of the chosen endpoint. Health checks have the same
headers. A server that is not ours (upstream's, in an image) refuses nothing.

Tokens are compared here, and again by the replica. Host and Origin are passed on as the client sent
them; the replica checks them.

https://www.envoyproxy.io/docs/envoy/latest/api-v3/api
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...schema import protocol
from ...system.net.access import PARAMETER
from ...system.net.listening_sockets import http_address
from ...system.text.json_lines import Json
from .lua import SOURCE as LUA

Resource = Any  # plain JSON, or a fragment that is text already

PREFIX = "/envs/"
MAX_ASKED = 32  # replicas that one handshake is tried on
# Attempts of a request that no replica has begun. Full replicas end them (`may_ask_another`), so
# most are spent on replicas that are gone, for a second or two, until the daemon has removed them.
RETRIES = 48
MAX_CHOICES = 1024  # until one is a replica to which the request has not been sent
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.002, 0.05  # between two attempts; it doubles, and is random
CONNECT_SECONDS = 5.0
HEAD_SECONDS = 5.0  # for a client to send the head of a request, from its first byte
MAX_HEAD_KB = 32  # the same as in `system/net/http_limits.py`, which workers do not import
IDLE_SECONDS = 10.0  # for a connection without a request, and for a TLS handshake
SILENT_SECONDS = 30  # for which the kernel does not pass on a connection that has sent nothing
HEALTH_SECONDS = 5.0  # between two health checks, and for one of them
IDLE_HEALTH_SECONDS = 30.0  # between two health checks of an environment without sessions
UPSTREAM_IDLE_SECONDS = 2.0  # less than the 5 s for which a replica keeps an idle connection
PANIC_PERCENT = 1.0  # of replicas: if fewer were healthy, Envoy would try all; so it never does
NO_LIMIT = 2**32 - 1  # of a circuit breaker

_NO_REPLICA = (
    "no replica of this environment could be reached; nothing was begun. "
    "`openenv status NAME` and `openenv gateway status` show why"
)

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_ENDPOINT_METADATA = {protocol.GENERATION_HEADER: "generation", protocol.REPLICA_HEADER: "replica"}
_ONE_IS_ENOUGH = 100 * 65536  # percent: a single healthy replica gets all new sessions
_SESSION_DIGITS = 4  # of a session's id name its replica (`env_host/shard/connections.py`)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica that the gateway may send sessions to; their ids contain its number."""

    number: int
    host: str
    port: int
    is_draining: bool = False  # it gets no new sessions
    is_full: bool = False  # it gets new sessions only if all replicas are full
    generation: str = ""  # the launch and the replica that requests name; empty: none
    replica: str = ""

    @property
    def address(self) -> str:
        """Return `host:port`, as Envoy spells it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Backend:
    """One environment behind the gateway."""

    name: str  # which is its path, too
    endpoints: tuple[Endpoint, ...] = ()  # its replicas that have sessions, or may get some
    token: str | None = None  # which clients must send
    health_path: str = "/capacity"  # which health checks request
    holding_socket: str | None = None  # which gets requests for which there is no replica

    @property
    def takes_sessions(self) -> bool:
        """Return whether a replica may get new sessions."""
        return self.most_asked > 0

    @property
    def full(self) -> set[int]:
        """Return the numbers of the replicas that are full."""
        return {each.number for each in self.endpoints if each.is_full}

    @property
    def most_asked(self) -> int:
        """Return how many replicas one handshake may be tried on: those that do not drain."""
        return min(sum(not each.is_draining for each in self.endpoints), MAX_ASKED)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The address at which a gateway listens, and its certificate."""

    host: str  # an IP address; if others reach it, each environment needs a token
    port: int
    certificate: str = ""  # a file of PEM certificates, the server's first; empty: no TLS
    key: str = ""  # the file of the private key

    @property
    def address(self) -> str:
        """Return the beginning of all environments' addresses."""
        address = http_address(self.host, self.port)
        return f"https{address.removeprefix('http')}" if self.certificate else address

    def address_of(self, name: str) -> str:
        """Return the address of an environment, which upstream calls `base_url`."""
        return f"{self.address}{PREFIX}{name}"


# Files. Each is a list of resources, which Envoy reads again when the file is replaced.


def bootstrap(folder: str, admin_socket: str, most_connections: int) -> Json:
    """Return the configuration that Envoy is started with.

    Args:
        folder: The folder of the other files.
        admin_socket: A Unix socket in a private folder, as its clients have full control of Envoy.
        most_connections: The limit on clients' connections; more are closed at once.
    """
    limit = _typed(
        "extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        max_active_downstream_connections=most_connections,
    )
    monitor = "envoy.resource_monitors.global_downstream_max_connections"
    return {
        "overload_manager": {"resource_monitors": [{"name": monitor, "typed_config": limit}]},
        "node": {"id": "openenvd", "cluster": "openenvd"},
        "admin": {"address": {"pipe": {"path": admin_socket, "mode": 0o600}}},
        "dynamic_resources": {
            "lds_config": _file(f"{folder}/listeners.json"),
            "cds_config": _file(f"{folder}/clusters.json"),
        },
    }


def listeners(options: GatewayOptions, folder: str) -> Json:
    """Return the only listener, whose routes and certificate are in files."""
    chain: Json = {
        "filters": [_filter("network.http_connection_manager", _http(folder))],
        "transport_socket_connect_timeout": _seconds(IDLE_SECONDS),
    }
    if options.certificate:
        source = _file(f"{folder}/certificates.json")
        secrets = [{"name": "certificate", "sds_config": source}]
        context = _typed(
            "extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            common_tls_context={
                "alpn_protocols": ["http/1.1"],
                "tls_certificate_sds_secret_configs": secrets,
            },
        )
        named = {"name": "envoy.transport_sockets.tls", "typed_config": context}
        chain["transport_socket"] = named
    listener = _typed(
        "config.listener.v3.Listener",
        name="gateway",
        address=_address(options.host, options.port),
        filter_chains=[chain],
        socket_options=_tcp_option("TCP_DEFER_ACCEPT", SILENT_SECONDS),
    )
    return _resources(listener)


def certificates(options: GatewayOptions) -> Json:
    """Return the certificate, whose files are read again when they are replaced."""
    files = {
        "certificate_chain": {"filename": options.certificate},
        "private_key": {"filename": options.key},
    }
    kind = "extensions.transport_sockets.tls.v3.Secret"
    return _resources(_typed(kind, name="certificate", tls_certificate=files))


def routes(found: Iterable[Resource] = ()) -> Json:
    """Return the routes to all environments, which `routes_to` makes for each of them."""
    host = {
        "name": "environments",
        "domains": ["*"],
        "include_request_attempt_count": True,
        "routes": [*found, _answer({"prefix": "/"}, 404, "no environment has this address")],
    }
    kind = "config.route.v3.RouteConfiguration"
    return _resources(_typed(kind, name="environments", virtual_hosts=[host]))


def clusters(found: Iterable[Resource] = ()) -> Json:
    """Return the clusters of all environments, which `cluster` makes for each of them."""
    return _resources(*found)


def endpoints(backend: Backend) -> Json:
    """Return the endpoints of one environment: its replicas, and the socket of held requests."""
    found = [
        {
            "endpoint": {"address": _address(each.host, each.port)},
            "health_status": _health_status(each),
            "metadata": {
                "filter_metadata": {
                    "openenvd": {key: getattr(each, key) for key in _ENDPOINT_METADATA.values()}
                }
            },
        }
        for each in backend.endpoints
    ]
    places: list[Json] = [{"lb_endpoints": found}]
    if backend.holding_socket is not None:
        holding = {
            "address": {"pipe": {"path": backend.holding_socket}},
            "health_check_config": {"disable_active_health_check": True},
        }
        # It has a lower priority than full replicas. So it gets requests if all replicas are gone,
        # or answer no health checks.
        after = [{"endpoint": holding, "health_status": "DEGRADED"}]
        places.append({"lb_endpoints": after, "priority": 1})
    kind = "config.endpoint.v3.ClusterLoadAssignment"
    policy = {"overprovisioning_factor": _ONE_IS_ENOUGH}
    return _resources(_typed(kind, cluster_name=backend.name, endpoints=places, policy=policy))


def _health_status(endpoint: Endpoint) -> str:
    if endpoint.is_draining:
        return "DRAINING"
    return "DEGRADED" if endpoint.is_full else "HEALTHY"


# Listener


def _http(folder: str) -> Json:
    routes_file = _file(f"{folder}/routes.json")
    lua = _typed("extensions.filters.http.lua.v3.Lua", default_source_code={"inline_string": LUA})
    router = _typed("extensions.filters.http.router.v3.Router", suppress_envoy_headers=True)
    return _typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="gateway",
        codec_type="HTTP1",
        server_name="openenvd",
        server_header_transformation="PASS_THROUGH",
        rds={"route_config_name": "environments", "config_source": routes_file},
        http_filters=[_filter("http.lua", lua), _filter("http.router", router)],
        upgrade_configs=[{"upgrade_type": "websocket"}],
        # A session is silent while its client thinks, which may take any time.
        stream_idle_timeout="0s",
        # Under the WebSocket protocol, the replica closes first, and its client waits for that. So
        # Envoy closes the client's connection as soon as all is sent, and never before.
        delayed_close_timeout="0s",
        request_headers_timeout=_seconds(HEAD_SECONDS),
        max_request_headers_kb=MAX_HEAD_KB,
        common_http_protocol_options={"idle_timeout": _seconds(IDLE_SECONDS)},
        normalize_path=True,
        merge_slashes=True,
        use_remote_address=True,  # clients cannot control Envoy by its own headers
        generate_request_id=False,
        local_reply_config=_local_replies(),
    )


def _local_replies() -> Json:
    """Return Envoy's own answers, which are JSON with the reason, as our servers' are.

    https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_conn_man/local_reply
    """
    flags = ["UF", "UH", "UC", "UR", "URX", "UT", "NC"]
    no_replica = {
        "filter": {"response_flag_filter": {"flags": flags}},
        "body_format_override": {
            "json_format": {"detail": _NO_REPLICA, "cause": "%RESPONSE_CODE_DETAILS%"}
        },
    }
    other = {"json_format": {"detail": "%LOCAL_REPLY_BODY%"}}
    return {"mappers": [no_replica], "body_format": other}


# Routes


def routes_to(backend: Backend) -> Iterable[Json]:
    """Yield routes for handshakes and other requests, with the token in a header or the query."""
    here = {"path_separated_prefix": f"{PREFIX}{backend.name}"}
    upgrade = [_header("upgrade", {"exact": "websocket", "ignore_case": True})]
    if backend.token is None:
        yield _handshake({**here, "headers": upgrade}, backend)
        yield _request(here, backend)
        return
    token = re.escape(backend.token)
    bearer = _header("authorization", {"safe_regex": {"regex": f"(?i:bearer) +{token} *"}})
    # Clients append a route to the base URL, which ends with the token.
    value = {"safe_regex": {"regex": f"{token}(?:(?:/|%2[Ff]).*)?"}}
    query = [{"name": PARAMETER, "string_match": value}]
    for given in ({"headers": [bearer]}, {"query_parameters": query}):
        headers = given.get("headers", [])
        yield _handshake({**here, **given, "headers": [*headers, *upgrade]}, backend)
        yield _request({**here, **given}, backend)
    # A browser's preflight request has no token; the replica answers it.
    asks = {"name": "access-control-request-method", "present_match": True}
    options = _header(":method", {"exact": "OPTIONS"})
    yield _request({**here, "headers": [options, asks]}, backend)
    text = (
        "this environment wants its token: send `Authorization: Bearer TOKEN`, or connect to the "
        "base URL that `openenv address NAME` prints"
    )
    refusal = _answer(here, 401, text)
    refusal["response_headers_to_add"] = [_added("www-authenticate", "Bearer")]
    yield refusal


def _handshake(match: Json, backend: Backend) -> Json:
    route = _request(match, backend)
    route["route"]["retry_policy"]["retry_on"] += ",reset"
    route["request_headers_to_add"].append(
        _added(protocol.ATTEMPTS_HEADER, str(backend.most_asked))
    )
    return route


def _request(match: Json, backend: Backend) -> Json:
    sessions = {f"{each.number:0{_SESSION_DIGITS}x}": each.address for each in backend.endpoints}
    predicate = _typed("extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate")
    others = {"name": "envoy.retry_host_predicates.previous_hosts", "typed_config": predicate}
    retries = {
        "retry_on": "connect-failure,refused-stream,retriable-headers",
        "num_retries": RETRIES,
        "retry_back_off": {
            "base_interval": _seconds(RETRY_SECONDS),
            "max_interval": _seconds(MAX_RETRY_SECONDS),
        },
        "retriable_headers": [{"name": protocol.RETRY_HEADER, "present_match": True}],
        "retry_host_predicate": [others],
        "host_selection_retry_max_attempts": MAX_CHOICES,
    }
    return {
        "match": match,
        "route": {
            "cluster": backend.name,
            "regex_rewrite": {"pattern": {"regex": "^/envs/[^/]+/?"}, "substitution": "/"},
            "timeout": "0s",
            "idle_timeout": "0s",
            "retry_policy": retries,
        },
        "request_headers_to_add": [_added(protocol.ENVIRONMENT_HEADER, backend.name)],
        "metadata": {
            "filter_metadata": {"envoy.filters.http.lua": {"has_replicas": True, **sessions}}
        },
    }


def _answer(match: Json, status: int, text: str) -> Json:
    body = {"inline_string": text}
    return {"match": match, "direct_response": {"status": status, "body": body}}


def _header(name: str, value: Json) -> Json:
    return {"name": name, "string_match": value}


def _added(name: str, value: str) -> Json:
    header = {"key": name, "value": value}
    return {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


# Clusters

_KEEPALIVE = {"keepalive_time": 10, "keepalive_interval": 5, "keepalive_probes": 3}
_ENDPOINT_HEADERS = [  # from the metadata of the chosen endpoint
    _added(name, f"%UPSTREAM_METADATA(openenvd:{key})%") for name, key in _ENDPOINT_METADATA.items()
]


def cluster(backend: Backend, replicas_file: str) -> Json:
    """Return the cluster of an environment, whose endpoints are in a file."""
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    mutations = {"request_mutations": [{"append": header} for header in _ENDPOINT_HEADERS]}
    naming = _typed(
        "extensions.filters.http.header_mutation.v3.HeaderMutation", mutations=mutations
    )
    codec = _typed("extensions.filters.http.upstream_codec.v3.UpstreamCodec")
    protocol = _typed(
        _HTTP_OPTIONS.removeprefix("envoy."),
        common_http_protocol_options={"idle_timeout": _seconds(UPSTREAM_IDLE_SECONDS)},
        explicit_http_config={"http_protocol_options": {}},
        http_filters=[
            _filter("http.header_mutation", naming),
            _filter("http.upstream_codec", codec),
        ],
    )
    in_turn = {"policies": [_policy("round_robin")]}
    chosen = {"metadata": {"key": "openenvd", "path": [{"key": "endpoint"}]}}
    override = _policy("override_host", override_host_sources=[chosen], fallback_policy=in_turn)
    return _typed(
        "config.cluster.v3.Cluster",
        name=backend.name,
        type="EDS",
        eds_cluster_config={"eds_config": _file(replicas_file)},
        connect_timeout=_seconds(CONNECT_SECONDS),
        common_lb_config={
            "update_merge_window": "0s",  # so that a replica drains at once
            "healthy_panic_threshold": {"value": PANIC_PERCENT},
        },
        load_balancing_policy={"policies": [override]},
        circuit_breakers={"thresholds": [dict.fromkeys(limits, NO_LIMIT)]},
        typed_extension_protocol_options={_HTTP_OPTIONS: protocol},
        health_checks=[_health_check(backend)],
        ignore_health_on_host_removal=True,
        # Ends sessions of a node that was cut off, which sends nothing, not even a reset.
        upstream_connection_options={"tcp_keepalive": _KEEPALIVE},
        # The same for data that was sent, and is not acknowledged.
        upstream_bind_config={"socket_options": _tcp_option("TCP_USER_TIMEOUT", 25_000)},
    )


def _policy(name: str, **settings: Any) -> Json:
    words = "".join(word.title() for word in name.split("_"))
    typed = _typed(f"extensions.load_balancing_policies.{name}.v3.{words}", **settings)
    named = {"name": f"envoy.load_balancing_policies.{name}", "typed_config": typed}
    return {"typed_extension_config": named}


def _health_check(backend: Backend) -> Json:
    named = [_added(protocol.ENVIRONMENT_HEADER, backend.name), *_ENDPOINT_HEADERS]
    if backend.token is not None:
        named.append(_added("authorization", f"Bearer {backend.token}"))
    http = {"path": backend.health_path, "host": "127.0.0.1", "request_headers_to_add": named}
    return {
        "timeout": _seconds(HEALTH_SECONDS),
        "interval": _seconds(HEALTH_SECONDS),
        "no_traffic_interval": _seconds(IDLE_HEALTH_SECONDS),
        "no_traffic_healthy_interval": _seconds(IDLE_HEALTH_SECONDS),
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "reuse_connection": False,
        "http_health_check": http,
    }


# Shared


def _typed(kind: str, **fields: Any) -> Json:
    return {"@type": f"type.googleapis.com/envoy.{kind}", **fields}


def _resources(*found: Resource) -> Json:
    return {"resources": list(found)}


def _file(path: str) -> Json:
    return {"resource_api_version": "V3", "path_config_source": {"path": path}}


def _filter(name: str, settings: Json) -> Json:
    return {"name": f"envoy.filters.{name}", "typed_config": settings}


def _address(host: str, port: int) -> Json:
    return {"socket_address": {"address": host, "port_value": port}}


def _tcp_option(name: str, value: int) -> list[Json]:
    """Return a TCP option of sockets, if the system has it; only Linux has those used here."""
    if not hasattr(socket, name):
        return []
    return [{"level": socket.IPPROTO_TCP, "name": getattr(socket, name), "int_value": value}]


def _seconds(value: float) -> str:
    return f"{value:g}s"
