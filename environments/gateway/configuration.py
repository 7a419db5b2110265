# SPDX-License-Identifier: Apache-2.0
"""Envoy's configuration, as plain JSON made by pure functions.

    bootstrap ──names the files of──▶ listeners, clusters       read again when they are replaced
    listeners ──names the files of──▶ routes, certificate
    clusters ───names the files of──▶ endpoints, one for each environment

Only what changes often is in a file of its own: replacing endpoints or routes drops no session,
while a listener that has changed drains its connections. So a listener is written once, and a
cluster says nothing that a scaled environment changes.

Balancing. Replicas get sessions in turn: each of Envoy's threads goes round them by itself, so that
a crowd is split evenly, whoever is slow. (Least requests is not even: a request counts when its
replica has been connected to, so a replica that is slow to accept looks empty and gets more.)
Where some have much less room than others, as the daemon knows, weights say so (`weights.py`).

A replica that is full, or drains, answers a handshake with `RETRY_HEADER` instead of letting it
wait, as long as the gateway may still try another one (`env_host/websocket/handshake.py`): so
a replica is passed over at its own capacity, whoever took its slots. Envoy's circuit breakers
cannot do that: they count all replicas together, and where they count one (`per_host_thresholds`),
requests wait for that one. They are set to no limit at all.

Retries. A handshake is tried again on another replica when it could not be connected to, ended
without an answer, or said that it has no room: no session had begun. As many are asked as there
are, up to `MOST_ASKED`, each once, so that none is refused while there is room. Any other request
is tried again only if it was never sent, or never begun.

Health. A replica that answers no health check gets no session until it does; before that is known,
its handshakes are tried on another. Envoy's outlier detection, which would know sooner, cannot be
had: to it a session that its replica ends, as all do, is a connection that failed, and some that
end one after another eject a replica that is well. Those that do not answer are not tried while any
does (`PANIC_PERCENT`).

Identity. Addresses are used again: two containers may have each other's after a restart of their
engine, while Envoy still has the old ones. So every attempt of a request names the environment, the
launch (its generation) and the replica that Envoy takes the address to be, and another server
refuses it (`env_host/serving/access.py`). A route adds its headers before a replica is chosen, and
has two generations while one drains: its sessions go on, and so do requests for its HTTP sessions.
So launch and replica are added by a filter of the cluster, which runs for each attempt, from the
metadata of the endpoint that was chosen. They come with the address, in one file, so that no order
of updates can part them. Health checks name the same: a server that has taken a replica's address
is ill, and gets no request. A server that is not ours (upstream's, in an image) refuses nothing.

Tokens are compared here, and again by the replica. Host and Origin are passed on as the client sent
them, and are the replica's to judge.

https://www.envoyproxy.io/docs/envoy/latest/api-v3/api
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...env_host.protocol import (
    ATTEMPTS_HEADER,
    ENVIRONMENT_HEADER,
    GENERATION_HEADER,
    REPLICA_HEADER,
    RETRY_HEADER,
)
from ...system.access_tokens import PARAMETER
from .lua import SOURCE as LUA

Json = dict[str, Any]

PREFIX = "/envs/"
MOST_ASKED = 32  # replicas, by one handshake
LEAST_RETRIES = 6  # also of a single replica, which may be restarting
MOST_CHOICES = 1024  # to find a replica that a request has not been sent to
RETRY_SECONDS, MOST_RETRY_SECONDS = 0.005, 0.1  # between two attempts; it doubles, and is random
CONNECT_SECONDS = 5.0
HEAD_SECONDS = 30.0  # for a client to send the head of a request
HEALTH_SECONDS = 5.0  # between two health checks, and for one of them
IDLE_HEALTH_SECONDS = 30.0  # between two of an environment without sessions
UPSTREAM_IDLE_SECONDS = 2.0  # below the five for which a replica keeps an idle connection
PANIC_PERCENT = 1.0  # of replicas that are healthy, below which Envoy tries all: so none
NO_LIMIT = 2**32 - 1  # of a circuit breaker

_NO_REPLICA = (
    "no replica of this environment could be reached; nothing was begun. "
    "`openenv status NAME` and `openenv gateway status` show why"
)

_TYPE = "type.googleapis.com/envoy."
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_PREVIOUS_HOSTS = "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
_HEADER_MUTATION = "extensions.filters.http.header_mutation.v3.HeaderMutation"
_UPSTREAM_CODEC = "extensions.filters.http.upstream_codec.v3.UpstreamCodec"
_OF_AN_ENDPOINT = {GENERATION_HEADER: "generation", REPLICA_HEADER: "replica"}  # in its metadata
_SESSION_DIGITS = 4  # of a session's id, that name its replica (`env_host/shard/arrivals.py`)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica that the gateway may send sessions to; their ids name it by its number."""

    number: int
    host: str
    port: int
    is_draining: bool = False  # it gets no new session
    weight: int = 1  # how many new sessions it gets in its turn
    generation: str = ""  # its launch, and its id: what a request for it says; empty: nothing
    replica: str = ""

    @property
    def address(self) -> str:
        """`host:port`, as Envoy spells it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Backend:
    """One environment behind the gateway.

    Attributes:
        name: Its name, which is its path.
        endpoints: Its replicas that have sessions, or may get some.
        token: What clients must send.
        health_path: What health checks ask for.
        holding_socket: Who answers while no replica takes sessions; a path.
    """

    name: str
    endpoints: tuple[Endpoint, ...] = ()
    token: str | None = None
    health_path: str = "/capacity"
    holding_socket: str | None = None

    @property
    def takes_sessions(self) -> bool:
        """Whether a replica may get new sessions."""
        return self.most_asked > 0

    @property
    def most_asked(self) -> int:
        """How many replicas one handshake may be sent to: those that may get new sessions."""
        return min(sum(not each.is_draining for each in self.endpoints), MOST_ASKED)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Where a gateway listens.

    Attributes:
        host: The address; others than this machine's own need a token for each environment.
        port: The TCP port.
        certificate: A file of PEM certificates, the server's first; empty: no TLS.
        key: The file of its private key.
    """

    host: str
    port: int
    certificate: str = ""
    key: str = ""

    @property
    def address(self) -> str:
        """What the addresses of environments begin with."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        scheme = "https" if self.certificate else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def address_of(self, name: str) -> str:
        """What goes into upstream's `base_url` for an environment."""
        return f"{self.address}{PREFIX}{name}"


# Files, each a list of resources that Envoy reads again when it is replaced.


def bootstrap(folder: str, admin_socket: str, most_connections: int) -> Json:
    """What Envoy is started with: the files of `folder`, and its admin interface.

    Args:
        folder: Where the other files are.
        admin_socket: A Unix socket in a private folder: who can connect to it can do anything.
        most_connections: Of clients; more are closed when they are accepted.
    """
    monitor = "envoy.resource_monitors.global_downstream_max_connections"
    most = {
        "@type": f"{_TYPE}extensions.resource_monitors.downstream_connections.v3."
        "DownstreamConnectionsConfig",
        "max_active_downstream_connections": most_connections,
    }
    return {
        "overload_manager": {"resource_monitors": [{"name": monitor, "typed_config": most}]},
        "node": {"id": "openenvd", "cluster": "openenvd"},
        "admin": {"address": {"pipe": {"path": admin_socket, "mode": 0o600}}},
        "dynamic_resources": {
            "lds_config": _file(f"{folder}/listeners.json"),
            "cds_config": _file(f"{folder}/clusters.json"),
        },
    }


def listeners(options: GatewayOptions, folder: str) -> Json:
    """The one listener, whose routes are in a file."""
    rds = {
        "rds": {
            "route_config_name": "environments",
            "config_source": _file(f"{folder}/routes.json"),
        }
    }
    return _resources([_listener(options, rds, _certificate_file(options, folder))])


def certificates(options: GatewayOptions) -> Json:
    """The certificate, which is read again when its files are replaced."""
    secret = {
        "@type": f"{_TYPE}extensions.transport_sockets.tls.v3.Secret",
        "name": "certificate",
        "tls_certificate": _certificate(options),
    }
    return _resources([secret] if options.certificate else [])


def routes(backends: Iterable[Backend]) -> Json:
    """The routes to all environments, by path."""
    found = _route_configuration(backends)
    return _resources([{"@type": f"{_TYPE}config.route.v3.RouteConfiguration", **found}])


def clusters(backends: Iterable[Backend], folder: str) -> Json:
    """One cluster for each environment, whose endpoints are in a file."""
    return _resources(
        {
            "@type": f"{_TYPE}config.cluster.v3.Cluster",
            **_cluster(backend),
            "type": "EDS",
            "eds_cluster_config": {"eds_config": _file(endpoints_file(folder, backend.name))},
        }
        for backend in backends
    )


def endpoints(backend: Backend) -> Json:
    """The replicas of one environment."""
    kind = f"{_TYPE}config.endpoint.v3.ClusterLoadAssignment"
    return _resources([{"@type": kind, **_load_assignment(backend)}])


def endpoints_file(folder: str, name: str) -> str:
    """The path of the file of an environment's replicas."""
    return f"{folder}/endpoints/{name}.json"


# Listener


def _listener(options: GatewayOptions, where_routes_are: Json, certificate: Json | None) -> Json:
    chain: Json = {"filters": [_filter("network.http_connection_manager", _http(where_routes_are))]}
    if certificate is not None:
        context = {
            "@type": f"{_TYPE}extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "common_tls_context": {"alpn_protocols": ["http/1.1"], **certificate},
        }
        chain["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": context,
        }
    return {
        "@type": f"{_TYPE}config.listener.v3.Listener",
        "name": "gateway",
        "address": _address(options.host, options.port),
        "filter_chains": [chain],
    }


def _http(where_routes_are: Json) -> Json:
    manager = "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    lua = {
        "@type": f"{_TYPE}extensions.filters.http.lua.v3.Lua",
        "default_source_code": {"inline_string": LUA},
    }
    router = {
        "@type": f"{_TYPE}extensions.filters.http.router.v3.Router",
        "suppress_envoy_headers": True,
    }
    return {
        "@type": f"{_TYPE}{manager}",
        "stat_prefix": "gateway",
        "codec_type": "HTTP1",
        "server_name": "openenvd",
        "server_header_transformation": "PASS_THROUGH",
        **where_routes_are,
        "http_filters": [_filter("http.lua", lua), _filter("http.router", router)],
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        # A session may be silent for as long as its client thinks.
        "stream_idle_timeout": "0s",
        # A replica closes first, and its client waits for that, as the protocol of WebSockets asks:
        # closed as soon as all is sent, and never before.
        "delayed_close_timeout": "0s",
        "request_headers_timeout": _seconds(HEAD_SECONDS),
        "normalize_path": True,
        "merge_slashes": True,
        "use_remote_address": True,  # clients may not steer Envoy by headers of its own
        "generate_request_id": False,
        "local_reply_config": _local_replies(),
    }


def _local_replies() -> Json:
    """What Envoy answers itself, as our servers would: JSON with the reason.

    https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_conn_man/local_reply
    """
    no_replica = {
        "filter": {"response_flag_filter": {"flags": ["UF", "UH", "UC", "UR", "URX", "UT", "NC"]}},
        "body_format_override": {
            "json_format": {"detail": _NO_REPLICA, "cause": "%RESPONSE_CODE_DETAILS%"}
        },
    }
    other = {"json_format": {"detail": "%LOCAL_REPLY_BODY%"}}
    return {"mappers": [no_replica], "body_format": other}


def _certificate_file(options: GatewayOptions, folder: str) -> Json | None:
    if not options.certificate:
        return None
    source = _file(f"{folder}/certificates.json")
    return {"tls_certificate_sds_secret_configs": [{"name": "certificate", "sds_config": source}]}


def _certificate(options: GatewayOptions) -> Json:
    return {
        "certificate_chain": {"filename": options.certificate},
        "private_key": {"filename": options.key},
    }


# Routes


def _route_configuration(backends: Iterable[Backend]) -> Json:
    found = [route for backend in backends for route in _routes_of(backend)]
    host = {
        "name": "environments",
        "domains": ["*"],
        "include_request_attempt_count": True,
        "routes": [*found, _answer({"prefix": "/"}, 404, "no environment has this address")],
    }
    return {"name": "environments", "virtual_hosts": [host]}


def _routes_of(backend: Backend) -> Iterable[Json]:
    """Handshakes and other requests, each with the token in a header or in the query."""
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
    # A browser asks first, and sends no token with that: the replica answers it.
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
    route = _to(match, backend, "connect-failure,refused-stream,reset,retriable-headers")
    route["request_headers_to_add"].append(_added(ATTEMPTS_HEADER, str(backend.most_asked)))
    return route


def _request(match: Json, backend: Backend) -> Json:
    return _to(match, backend, "connect-failure,refused-stream,retriable-headers")


def _to(match: Json, backend: Backend, retry_on: str) -> Json:
    sessions = {f"{each.number:0{_SESSION_DIGITS}x}": each.address for each in backend.endpoints}
    return {
        "match": match,
        "route": {
            "cluster": backend.name,
            "regex_rewrite": {"pattern": {"regex": "^/envs/[^/]+/?"}, "substitution": "/"},
            "timeout": "0s",
            "idle_timeout": "0s",
            "retry_policy": {
                "retry_on": retry_on,
                "num_retries": max(LEAST_RETRIES, backend.most_asked),
                "retry_back_off": {
                    "base_interval": _seconds(RETRY_SECONDS),
                    "max_interval": _seconds(MOST_RETRY_SECONDS),
                },
                "retriable_headers": [{"name": RETRY_HEADER, "present_match": True}],
                "retry_host_predicate": [
                    {
                        "name": "envoy.retry_host_predicates.previous_hosts",
                        "typed_config": {"@type": f"{_TYPE}{_PREVIOUS_HOSTS}"},
                    }
                ],
                "host_selection_retry_max_attempts": MOST_CHOICES,
            },
        },
        "request_headers_to_add": [_added(ENVIRONMENT_HEADER, backend.name)],
        "metadata": {"filter_metadata": {"envoy.filters.http.lua": sessions}},
    }


def _answer(match: Json, status: int, text: str) -> Json:
    return {
        "match": match,
        "direct_response": {"status": status, "body": {"inline_string": text}},
    }


def _header(name: str, value: Json) -> Json:
    return {"name": name, "string_match": value}


def _added(name: str, value: str) -> Json:
    return {
        "header": {"key": name, "value": value},
        "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
    }


# Clusters


_KEEPALIVE = {"keepalive_time": 10, "keepalive_interval": 5, "keepalive_probes": 3}
_USER_TIMEOUT = [  # the same for what has been sent, and is not acknowledged; where it exists
    {
        "level": socket.IPPROTO_TCP,
        "name": getattr(socket, name),
        "int_value": 25_000,
        "state": "STATE_PREBIND",
        "description": name,
    }
    for name in ("TCP_USER_TIMEOUT",)
    if hasattr(socket, name)
]


def _cluster(backend: Backend) -> Json:
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    protocol = {
        "@type": f"{_TYPE}{_HTTP_OPTIONS.removeprefix('envoy.')}",
        "common_http_protocol_options": {"idle_timeout": _seconds(UPSTREAM_IDLE_SECONDS)},
        "explicit_http_config": {"http_protocol_options": {}},
        "http_filters": [
            _filter("http.header_mutation", _whose_request_it_is()),
            _filter("http.upstream_codec", {"@type": f"{_TYPE}{_UPSTREAM_CODEC}"}),
        ],
    }
    return {
        "name": backend.name,
        "connect_timeout": _seconds(CONNECT_SECONDS),
        "common_lb_config": {
            "update_merge_window": "0s",  # a replica drains at once
            "healthy_panic_threshold": {"value": PANIC_PERCENT},
        },
        "load_balancing_policy": {"policies": [_policy("override_host", _override_host())]},
        "circuit_breakers": {"thresholds": [dict.fromkeys(limits, NO_LIMIT)]},
        "typed_extension_protocol_options": {_HTTP_OPTIONS: protocol},
        "health_checks": [_health_check(backend)],
        "ignore_health_on_host_removal": True,
        # Sessions of a node that was cut off end: it sends nothing, not even that it is gone.
        "upstream_connection_options": {"tcp_keepalive": _KEEPALIVE},
        "upstream_bind_config": {"socket_options": _USER_TIMEOUT},
    }


def _whose_request_it_is() -> Json:
    """Name the endpoint that was chosen."""
    mutations = [{"append": header} for header in _named_by_endpoint()]
    return {"@type": f"{_TYPE}{_HEADER_MUTATION}", "mutations": {"request_mutations": mutations}}


def _named_by_endpoint() -> list[Json]:
    return [
        _added(name, f"%UPSTREAM_METADATA(openenvd:{key})%")
        for name, key in _OF_AN_ENDPOINT.items()
    ]


def _override_host() -> Json:
    source = {"metadata": {"key": "openenvd", "path": [{"key": "endpoint"}]}}
    in_turn = _policy("round_robin", {})
    return {"override_host_sources": [source], "fallback_policy": {"policies": [in_turn]}}


def _policy(name: str, settings: Json) -> Json:
    words = "".join(word.title() for word in name.split("_"))
    kind = f"{_TYPE}extensions.load_balancing_policies.{name}.v3.{words}"
    typed = {"name": f"envoy.load_balancing_policies.{name}"}
    return {"typed_extension_config": {**typed, "typed_config": {"@type": kind, **settings}}}


def _health_check(backend: Backend) -> Json:
    http: Json = {"path": backend.health_path, "host": "127.0.0.1"}
    named = [_added(ENVIRONMENT_HEADER, backend.name), *_named_by_endpoint()]
    if backend.token is not None:
        named.append(_added("authorization", f"Bearer {backend.token}"))
    http["request_headers_to_add"] = named
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


def _load_assignment(backend: Backend) -> Json:
    found: list[Json] = [
        {
            "endpoint": {"address": _address(each.host, each.port)},
            "health_status": "DRAINING" if each.is_draining else "HEALTHY",
            "load_balancing_weight": each.weight,
            "metadata": {
                "filter_metadata": {
                    "openenvd": {key: getattr(each, key) for key in _OF_AN_ENDPOINT.values()}
                }
            },
        }
        for each in backend.endpoints
    ]
    if backend.holding_socket is not None and not backend.takes_sessions:
        held = {
            "address": {"pipe": {"path": backend.holding_socket}},
            "health_check_config": {"disable_active_health_check": True},
        }
        found.append({"endpoint": held, "health_status": "HEALTHY"})
    return {"cluster_name": backend.name, "endpoints": [{"lb_endpoints": found}]}


# Shared


def _resources(found: Iterable[Json]) -> Json:
    return {"resources": list(found)}


def _file(path: str) -> Json:
    return {"resource_api_version": "V3", "path_config_source": {"path": path}}


def _filter(name: str, settings: Json) -> Json:
    return {"name": f"envoy.filters.{name}", "typed_config": settings}


def _address(host: str, port: int) -> Json:
    return {"socket_address": {"address": host, "port_value": port}}


def _seconds(value: float) -> str:
    return f"{value:g}s"
