# SPDX-License-Identifier: Apache-2.0
"""`Cluster`: the API server of one cluster, asked in JSON, through the `kubernetes` library.

Of the library this uses what finds a cluster and authenticates there (kubeconfig with its plug-ins,
a pod's own account), its pool of TLS connections, and its WebSockets, which run a command in a pod.
Requests are made and read here: as JSON, they look the same with every version of library and
cluster, and a list of a thousand pods is not made into a thousand objects of a hundred fields.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client.rest import RESTClientObject
from kubernetes.config.config_exception import ConfigException
from kubernetes.stream import stream as websocket_stream
from urllib3.response import BaseHTTPResponse
from websocket import WebSocketBadStatusException, WebSocketException

from .base import EngineGone, EngineRefused
from .kubernetes_address import CONTEXT, KUBECONFIG, NAMESPACE

Json = dict[str, Any]
T = TypeVar("T")

REQUEST_SECONDS = 30.0
COMMAND_SECONDS = 15.0  # for a command in a pod to end
CONNECTIONS = 256  # kept: a stream of logs for each replica, and some for requests
MERGE = "application/strategic-merge-patch+json"
ALREADY_EXISTS = "AlreadyExists"  # unlike `Conflict`, which is 409, too
LONGEST_WORDS = 300  # of what a server says, in a message
_ERROR_CHANNEL = 3  # of a command's WebSocket: how it ended
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CONFIG_ERRORS = (  # of the library, for files that are missing or are something else
    ConfigException,
    OSError,
    yaml.YAMLError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
)
_NO_CONFIG = "kubectl config view; or name a file: export KUBECONFIG=…"
# A wheel has no docs.
ROLE_IS_IN = "openenvd's source (pip download --no-deps --no-binary :all: openenvd)"
_RIGHTS = f"give this account the role in docs/openenvd-rbac.yaml of {ROLE_IS_IN}"


class ApiRefused(EngineRefused):
    """The API server answers no; `status` is HTTP's, `reason` the word of Kubernetes for it."""

    def __init__(self, message: str, hint: str | None, status: int, reason: str) -> None:
        super().__init__(message, hint)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Request:
    """What the API server is asked; `kind` is the media type of `body`."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Json | None = None
    kind: str = "application/json"


class Cluster:
    """One cluster; connected by the first request. Used by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: tuple[Any, urllib3.PoolManager] | None = None
        self._streams: set[BaseHTTPResponse] = set()
        self._ahead = timedelta()  # of the API server's clock, as its last answer has it

    @property
    def namespace(self) -> str:
        """Where replicas are put that name no other: the context's namespace, or the pod's."""
        if not os.environ.get(KUBECONFIG):
            with contextlib.suppress(OSError):
                return _ACCOUNT.read_text().strip()
            return "default"
        if known := os.environ.get(NAMESPACE):
            return known
        with _configured():
            contexts, current = config.list_kube_config_contexts(os.environ[KUBECONFIG])
        wanted = os.environ.get(CONTEXT) or current["name"]
        found = next((each for each in contexts if each["name"] == wanted), current)
        return str(found["context"].get("namespace") or "default")

    def now(self) -> datetime:
        """Return the time by the API server's clock, which its objects' times are of."""
        return datetime.now(UTC) + self._ahead

    def get(self, path: str, **query: str) -> Json:
        """Return what is at a path; raises `EngineGone`, and `ApiRefused` when it answers no."""
        return self._json(_Request("GET", path, query))

    def post(self, path: str, body: Json) -> Json:
        """Create something; raises as `get`. What is there already is refused with 409."""
        return self._write(_Request("POST", path, body=body))

    def merge(self, path: str, body: Json) -> Json:
        """Merge something into what is there; raises as `get`."""
        return self._write(_Request("PATCH", path, body=body, kind=MERGE))

    def delete(self, path: str, body: Json) -> None:
        """Delete something; what is not there, or is another by now, is no error."""
        try:
            self._json(_Request("DELETE", path, body=body))
        except ApiRefused as exc:
            if exc.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                raise

    @contextlib.contextmanager
    def stream(
        self, path: str, query: Mapping[str, str], silent_seconds: float | None = None
    ) -> Iterator[Iterator[bytes]]:
        """Open what is at a path, as pieces as they come, until it ends or all is closed.

        Raises:
            EngineGone, ApiRefused: Also while it is read.
        """
        response = self._answer_to(_Request("GET", path, query), silent_seconds)
        with self._lock:
            self._streams.add(response)
        try:
            yield _pieces(response)
        finally:
            with self._lock:
                self._streams.discard(response)
            response.close()

    def run(self, namespace: str, pod: str, container: str, command: list[str]) -> int:
        """Run a command in a pod; return its exit code.

        Raises:
            EngineGone: The API server or the pod's node does not answer, or a connection is lost.
            EngineRefused: It cannot be run there.
        """
        configuration, _ = self._connected()
        with client.ApiClient(configuration) as connection:  # one of its own: it is changed
            api = client.CoreV1Api(connection)
            try:
                running = websocket_stream(
                    api.connect_get_namespaced_pod_exec,
                    pod,
                    namespace,
                    container=container,
                    command=command,
                    stdin=False,
                    stdout=True,
                    stderr=True,
                    tty=False,
                    _preload_content=False,
                    _request_timeout=COMMAND_SECONDS,
                )
                try:
                    running.run_forever(timeout=COMMAND_SECONDS)
                    is_over = not running.is_open()
                    told = running.read_channel(_ERROR_CHANNEL)
                finally:
                    running.sock.shutdown()  # `close` leaves a socket open that the server ended
            except client.ApiException as exc:
                raise self._no_command(pod, exc) from exc
            except (OSError, ValueError, urllib3.exceptions.HTTPError, WebSocketException) as exc:
                raise EngineGone(f"no command can be run in pod {pod}: {_short(str(exc))}") from exc
        if not is_over:
            raise EngineRefused(f"a command in pod {pod} did not end in {COMMAND_SECONDS:g} s")
        return _exit_code(pod, told)

    def close(self) -> None:
        """End all streams, and close connections."""
        with self._lock:
            streams, self._streams = self._streams, set()
            known, self._known = self._known, None
        for response in streams:
            with contextlib.suppress(OSError, AttributeError, RuntimeError):
                response.shutdown()  # its reader does the rest
        if known is not None:
            known[1].clear()

    # Inside

    def _connected(self) -> tuple[Any, urllib3.PoolManager]:
        with self._lock:
            if self._known is None:
                configuration = _configuration()
                configuration.connection_pool_maxsize = CONNECTIONS
                self._known = configuration, RESTClientObject(configuration).pool_manager
            return self._known

    def _no_command(self, pod: str, exc: client.ApiException) -> EngineGone | EngineRefused:
        """Return why a command's WebSocket was not opened, which the library tells as its cause."""
        cause = exc.__context__
        if isinstance(cause, WebSocketBadStatusException):
            return self._refusal(cause.status_code, cause.resp_body or b"")
        return EngineGone(f"no command can be run in pod {pod}: {_short(str(exc.reason))}")

    def _write(self, request: _Request) -> Json:
        try:
            return self._json(request)
        except ApiRefused as exc:
            # Others wrote at the same time: a quota, say.
            if exc.status == HTTPStatus.CONFLICT and exc.reason != ALREADY_EXISTS:
                raise EngineGone(exc.message) from exc
            raise

    def _json(self, request: _Request) -> Json:
        response = self._answer_to(request, REQUEST_SECONDS)
        try:
            found: Json = json.loads(_explained(lambda: response.read()))
        except ValueError as exc:
            raise EngineGone(f"what answers at {request.path} is not Kubernetes: {exc}") from exc
        finally:
            response.release_conn()
        return found

    def _answer_to(self, request: _Request, read_seconds: float | None) -> BaseHTTPResponse:
        configuration, pool = self._connected()
        query = f"?{urlencode(request.query)}" if request.query else ""
        headers = {"Accept": "application/json", "User-Agent": "openenvd"}
        if request.body is not None:
            headers["Content-Type"] = request.kind
        response = _explained(
            lambda: pool.request(
                request.method,
                f"{configuration.host}{request.path}{query}",
                headers=headers | _credentials(configuration),
                body=None if request.body is None else json.dumps(request.body),
                timeout=urllib3.Timeout(connect=REQUEST_SECONDS, read=read_seconds),
                preload_content=False,
                retries=False,
            )
        )
        with contextlib.suppress(TypeError, ValueError):  # it has no time, or one that is none
            told = parsedate_to_datetime(response.headers.get("Date", ""))
            self._ahead = told.astimezone(UTC) - datetime.now(UTC)
        if response.status >= HTTPStatus.BAD_REQUEST:
            text = _explained(lambda: response.read(decode_content=True))
            response.release_conn()
            raise self._refusal(response.status, text)
        return response

    def _refusal(self, status: int, body: bytes) -> EngineGone | EngineRefused:
        text, reason = _said(status, body)
        if status == HTTPStatus.UNAUTHORIZED:
            with self._lock:
                self._known = None  # the next request reads the credentials again
            return EngineGone(f"Kubernetes does not accept these credentials: {text}", _NO_CONFIG)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
            return EngineGone(f"Kubernetes does not answer: {text}")
        is_forbidden = status == HTTPStatus.FORBIDDEN and "quota" not in text
        return ApiRefused(
            f"Kubernetes refuses: {text}", _RIGHTS if is_forbidden else None, status, reason
        )


def _said(status: int, body: bytes) -> tuple[str, str]:
    """Return what an answer says is wrong, and Kubernetes' word for it; empty: it has none."""
    try:
        found = json.loads(body)
        return _short(str(found["message"])), str(found.get("reason") or "")
    except (ValueError, LookupError, TypeError):
        text = _short(body.decode(errors="replace"))
    try:
        return text or HTTPStatus(status).phrase, ""
    except ValueError:
        return f"HTTP status {status}", ""


def _short(text: str) -> str:
    """Return the beginning of what was said, in one line; of an HTTP answer, its first line."""
    line = " ".join(text.partition("-+-+-")[0].split())
    return line if len(line) <= LONGEST_WORDS else f"{line[:LONGEST_WORDS]}…"


def _exit_code(pod: str, told: str) -> int:
    """Return a command's exit code from what its error channel has, which is a `Status`.

    Raises:
        EngineGone: It has nothing: the connection was lost.
        EngineRefused: The command was not run: there is no such program in the image, say.
    """
    if not told:
        raise EngineGone(f"the connection to a command in pod {pod} was lost")
    try:
        status = json.loads(told)
        if status["status"] == "Success":
            return 0
        causes = (status.get("details") or {}).get("causes") or ()
        codes = [each["message"] for each in causes if each.get("reason") == "ExitCode"]
        if codes:
            return int(codes[0])
        why = str(status.get("message") or status.get("reason") or told)
    except (ValueError, LookupError, TypeError, AttributeError):
        why = told
    raise EngineRefused(f"no command can be run in pod {pod}: {_short(why)}")


def _configuration() -> Any:
    """Return what leads to the cluster that this process's variables name."""
    found = client.Configuration()
    with _configured():
        if os.environ.get(KUBECONFIG):
            config.load_kube_config(
                os.environ[KUBECONFIG],
                context=os.environ.get(CONTEXT) or None,
                client_configuration=found,
            )
        else:
            config.load_incluster_config(client_configuration=found)
    return found


@contextlib.contextmanager
def _configured() -> Iterator[None]:
    """Say what is wrong with a kubeconfig.

    Raises:
        EngineGone
    """
    try:
        yield
    except _CONFIG_ERRORS as exc:
        where = os.environ.get(KUBECONFIG) or "its own account, in no cluster"
        raise EngineGone(f"no cluster is found by {where}: {_short(str(exc))}", _NO_CONFIG) from exc


def _credentials(configuration: Any) -> dict[str, str]:
    """Return the header that says who asks; tokens are renewed by the library."""
    found = configuration.auth_settings().values()
    return {each["key"]: each["value"] for each in found if each["in"] == "header"}


def _pieces(response: BaseHTTPResponse) -> Iterator[bytes]:
    pieces = response.stream(amt=2**16, decode_content=True)
    while True:
        piece = _explained(lambda: next(pieces, None))
        if piece is None:
            return
        yield piece


def _explained(ask: Callable[[], T]) -> T:
    """Ask; raise what the library raises as `EngineGone`."""
    try:
        return ask()
    except (urllib3.exceptions.HTTPError, OSError) as exc:
        text = str(exc)
        hint = "look at the address in it: kubectl cluster-info"
        raise EngineGone(f"Kubernetes does not answer: {text}", hint) from exc
