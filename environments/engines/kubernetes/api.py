# SPDX-License-Identifier: Apache-2.0
"""`Cluster`: requests to the API server of a cluster, by the `kubernetes` library's dynamic client.

The dynamic client sends and returns JSON as it is. The typed one (`CoreV1Api`) takes 80 MB more,
and leaves out fields of a pod that its version does not know, which a `patch` may have.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.dynamic import DynamicClient
from kubernetes.stream.ws_client import websocket_call
from urllib3.response import BaseHTTPResponse
from websocket import WebSocketBadStatusException, WebSocketException

from ....system.text.json_lines import Json
from ..base import EngineGone, EngineRefused
from .options import CONTEXT, KUBECONFIG, NAMESPACE

REQUEST_SECONDS = 30.0
COMMAND_SECONDS = 15.0  # for a command in a pod to end
CONNECTIONS = 256  # in the pool: a stream of logs for each replica, and some for requests
MERGE = "application/strategic-merge-patch+json"
ALREADY_EXISTS = "AlreadyExists"  # one of the two reasons of a 409; the other is `Conflict`
MAX_MESSAGE_CHARS = 300  # of a server's message
_ERROR_CHANNEL = 3  # of a command's WebSocket, on which its result comes
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_NO_CONFIG = "kubectl config view; or name a file: export KUBECONFIG=…"
# Wheels do not contain docs/.
ROLE_IS_IN = "openenvd's source (pip download --no-deps --no-binary :all: openenvd)"
_RIGHTS = f"give this account the role in docs/openenvd-rbac.yaml of {ROLE_IS_IN}"


class ApiRefused(EngineRefused):
    """The API server refuses a request, for a `reason` of Kubernetes, such as `Conflict`."""

    def __init__(self, message: str, hint: str | None, reason: str) -> None:
        super().__init__(message, hint)
        self.reason = reason


class NotThere(ApiRefused):
    """There is no such object (404)."""


class InConflict(ApiRefused):
    """An object of the same name exists already, or the object was replaced (409)."""


_REFUSALS: dict[int, type[ApiRefused]] = {404: NotThere, 409: InConflict}


class Cluster:
    """One cluster; connected by the first request. Used by many threads."""

    def __init__(self) -> None:
        self._ahead = timedelta()  # of the API server's clock against ours, by its last answer

    @property
    def namespace(self) -> str:
        """Return the default namespace of replicas: the context's, or that of this pod."""
        if not os.environ.get(KUBECONFIG):
            with contextlib.suppress(OSError):
                return _ACCOUNT.read_text().strip()
        return os.environ.get(NAMESPACE) or "default"

    def now(self) -> datetime:
        """Return the time by the API server's clock, on which its objects' times are."""
        return datetime.now(UTC) + self._ahead

    def get(self, path: str, **query: str) -> Json:
        """Return the object at a path; raises `EngineGone`, or `ApiRefused` for a refusal."""
        return self._json("get", path, query_params=list(query.items()))

    def post(self, path: str, body: Json) -> Json:
        """Create an object; raises as `get` does. One that exists is refused with 409."""
        return self._write("post", path, body=body)

    def merge(self, path: str, body: Json) -> Json:
        """Merge changes into an object; raises as `get` does."""
        return self._write("patch", path, body=body, content_type=MERGE)

    def delete(self, path: str, body: Json) -> None:
        """Delete an object, unless it is gone or was replaced."""
        with contextlib.suppress(NotThere, InConflict):
            self._json("delete", path, body=body)

    @contextlib.contextmanager
    def stream(
        self, path: str, query: Mapping[str, str], silent_seconds: float | None = None
    ) -> Iterator[Iterator[bytes]]:
        """Open a stream of pieces; raises `EngineGone` or `ApiRefused`, also while it is read."""
        asked = {"query_params": list(query.items())}
        with contextlib.closing(self._ask("get", path, silent_seconds, **asked)) as response:
            yield _pieces(response)

    def run(self, namespace: str, pod: str, container: str, command: list[str]) -> int:
        """Run a command in a pod; return its exit code.

        Raises:
            EngineGone: The API server or the pod's node does not answer, or a connection is lost.
            EngineRefused: The command cannot be run in the pod.
        """
        configuration = self._client.configuration
        url = f"{configuration.host}/api/v1/namespaces/{namespace}/pods/{pod}/exec"
        who = configuration.auth_settings().values()  # tokens are renewed by the library
        query = [("command", command), ("container", container), ("stderr", "true")]
        try:
            running = websocket_call(
                configuration,
                "GET",
                url,
                query_params=[*query, ("stdin", "false"), ("stdout", "true"), ("tty", "false")],
                headers={each["key"]: each["value"] for each in who if each["in"] == "header"},
                _preload_content=False,
            )
            try:
                running.run_forever(timeout=COMMAND_SECONDS)
                is_over = not running.is_open()
                status_text = running.read_channel(_ERROR_CHANNEL)
            finally:
                running.sock.shutdown()  # `close` leaves the socket open if the server ended it
        except client.ApiException as exc:
            cause = exc.__context__  # the library's error when there is no WebSocket
            if isinstance(cause, WebSocketBadStatusException):
                raise self._refusal(cause.status_code, cause.resp_body or b"") from exc
            text = f"no command can be run in pod {pod}: {_short(str(exc.reason))}"
            raise EngineGone(text) from exc
        except (OSError, ValueError, urllib3.exceptions.HTTPError, WebSocketException) as exc:
            raise EngineGone(f"no command can be run in pod {pod}: {_short(str(exc))}") from exc
        if not is_over:
            raise EngineRefused(f"a command in pod {pod} did not end in {COMMAND_SECONDS:g} s")
        return _exit_code(pod, status_text)

    @functools.cached_property
    def _client(self) -> DynamicClient:
        configuration = _configuration()
        configuration.connection_pool_maxsize = CONNECTIONS
        configuration.retries = False  # the agent asks again
        connection = client.ApiClient(configuration)
        connection.user_agent = "openenvd"
        # Without discovery of the resources, as we know their paths.
        return DynamicClient(connection, discoverer=lambda *_: None)

    def _write(self, method: str, path: str, **asked: Any) -> Json:
        try:
            return self._json(method, path, **asked)
        except InConflict as exc:
            if exc.reason != ALREADY_EXISTS:  # others wrote the same object, such as a quota
                raise EngineGone(exc.message) from exc
            raise

    def _json(self, method: str, path: str, **asked: Any) -> Json:
        response = self._ask(method, path, REQUEST_SECONDS, **asked)
        try:
            with _explained():
                found: Json = json.loads(response.read())
        except ValueError as exc:
            raise EngineGone(f"what answers at {path} is not Kubernetes: {exc}") from exc
        finally:
            response.release_conn()
        return found

    def _ask(
        self, method: str, path: str, read_seconds: float | None, **asked: Any
    ) -> BaseHTTPResponse:
        asked |= {"serialize": False, "_request_timeout": (REQUEST_SECONDS, read_seconds)}
        try:
            with _explained():
                response: BaseHTTPResponse = self._client.request(method, path, **asked)
        except client.ApiException as exc:
            if not exc.status:  # TLS has failed
                raise _gone(str(exc.reason)) from exc
            raise self._refusal(exc.status, exc.body or "") from exc
        with contextlib.suppress(TypeError, ValueError):  # the time is missing or invalid
            server_time = parsedate_to_datetime(response.headers.get("Date", ""))
            self._ahead = server_time.astimezone(UTC) - datetime.now(UTC)
        return response

    def _refusal(self, status: int, body: str | bytes) -> EngineGone | EngineRefused:
        text, reason = _read_message(status, body)
        if status == HTTPStatus.UNAUTHORIZED:
            vars(self).pop("_client", None)  # the next request reads the credentials again
            return EngineGone(f"Kubernetes does not accept these credentials: {text}", _NO_CONFIG)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
            return EngineGone(f"Kubernetes does not answer: {text}")
        is_forbidden = status == HTTPStatus.FORBIDDEN and "quota" not in text
        refusal = _REFUSALS.get(status, ApiRefused)
        return refusal(f"Kubernetes refuses: {text}", _RIGHTS if is_forbidden else None, reason)


def _read_message(status: int, body: str | bytes) -> tuple[str, str]:
    """Return the message of an error, and Kubernetes' word for it, which may be empty."""
    try:
        found = json.loads(body)
        return _short(str(found["message"])), str(found.get("reason") or "")
    except (ValueError, LookupError, TypeError):
        text = _short(body if isinstance(body, str) else body.decode(errors="replace"))
        return text or f"HTTP status {status}", ""


def _short(text: str) -> str:
    """Return the beginning of a message in one line; of an HTTP answer, its first line."""
    line = " ".join(text.partition("-+-+-")[0].split())
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[:MAX_MESSAGE_CHARS]}…"


def _exit_code(pod: str, status_text: str) -> int:
    """Return a command's exit code from the `Status` on its error channel.

    Raises `EngineGone`: the connection was lost; `EngineRefused`: there is no such program, say.
    """
    if not status_text:
        raise EngineGone(f"the connection to a command in pod {pod} was lost")
    try:
        status = json.loads(status_text)
        if status["status"] == "Success":
            return 0
        causes = (status.get("details") or {}).get("causes") or ()
        codes = [each["message"] for each in causes if each.get("reason") == "ExitCode"]
        if codes:
            return int(codes[0])
        why = str(status.get("message") or status.get("reason") or status_text)
    except (ValueError, LookupError, TypeError, AttributeError):
        why = status_text
    raise EngineRefused(f"no command can be run in pod {pod}: {_short(why)}")


def _configuration() -> Any:
    """Return the library's configuration for the cluster of our variables; raises `EngineGone`."""
    found = client.Configuration()
    file, context = os.environ.get(KUBECONFIG), os.environ.get(CONTEXT) or None
    try:
        if file:
            config.load_kube_config(file, context=context, client_configuration=found)
        else:
            config.load_incluster_config(client_configuration=found)
    except Exception as exc:  # many kinds, for files that are missing or invalid
        where = file or "its own account, in no cluster"
        raise EngineGone(f"no cluster is found by {where}: {_short(str(exc))}", _NO_CONFIG) from exc
    return found


def _pieces(response: BaseHTTPResponse) -> Iterator[bytes]:
    with _explained():
        yield from response.stream(amt=2**16, decode_content=True)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise the library's errors as `EngineGone`."""
    try:
        yield
    except (urllib3.exceptions.HTTPError, OSError) as exc:
        raise _gone(str(exc)) from exc


def _gone(why: str) -> EngineGone:
    hint = "look at the address in it: kubectl cluster-info"
    return EngineGone(f"Kubernetes does not answer: {why}", hint)
