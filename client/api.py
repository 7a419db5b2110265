# SPDX-License-Identifier: Apache-2.0
"""`DaemonClient`: the calls of the HTTP API by name. Answers: `docs/api.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict, Unpack, cast
from urllib.parse import quote

from ..schema.states import EnvironmentState
from ..system.text.json_lines import Json
from .errors import ConnectionLost, NotFound
from .http import HttpClient, ServerEvent

_LOG_HEADER = "openenvd-log"  # the id of the replica whose log an answer is


class RequestFilters(TypedDict, total=False):
    """Conditions on a list of requests; one that is None or absent is not applied."""

    states: Sequence[str] | None  # in one of these states
    operation: str | None
    environment: str | None  # about this environment
    limit: int | None  # most requests to return


class DaemonClient:
    """The API of one daemon.

    Each call raises `ApiRefused` when the daemon refuses it, and `ConnectionLost` when the daemon
    exits during it.

    Args:
        http: The connection to the daemon's socket.
        identity: The content of the daemon's `daemon.json`: pid, version, address.
    """

    def __init__(self, http: HttpClient, identity: Json) -> None:
        self._http = http
        self.identity = identity

    @property
    def address(self) -> str:
        """The daemon's own address over TCP."""
        return str(self.identity["address"])

    def close(self) -> None:
        """End the calls that are under way in other threads; they raise `ConnectionLost`."""
        self._http.close()

    def submit(self, operation: str, payload: Json, **options: Any) -> Json:
        """Queue an operation; the request is durable when this returns.

        Args:
            operation: The operation's name: `launch`, `down`, `rollout`, …
            payload: The operation's payload, as `docs/api.md` describes it.
            options: `idempotency_key`, `priority` (-100 to 100), `timeout_seconds`, `retry_oom`;
                None leaves one out.

        Returns:
            The request as it was queued.
        """
        given = {key: value for key, value in options.items() if value is not None}
        body = {"operation": operation, "payload": payload, **given}
        return cast("Json", self._http.request("POST", "/v1/requests", body)["request"])

    def request(self, request_id: str, *, wait_seconds: float = 0.0) -> Json:
        """Return the request with this id, or with this beginning of its id.

        The daemon answers when it is final, at the latest after `wait_seconds`.
        """
        query = {"wait_seconds": wait_seconds} if wait_seconds else None
        found = self._http.request("GET", _request(request_id), query=query)
        return cast("Json", found["request"])

    def requests(self, **filters: Unpack[RequestFilters]) -> list[Json]:
        """List the queue and its history, newest first."""
        states = filters.pop("states", None)
        query: Json = {"state": list(states) if states else None, **filters}
        found = self._http.request("GET", "/v1/requests", query=query)["requests"]
        return cast("list[Json]", found)

    def cancel(self, request_id: str) -> Json:
        """Cancel a request.

        Returns:
            `{"request", "cancelled", "cancelling"}`. `cancelled`: it is cancelled for good.
            `cancelling`: its worker is being ended, and until then it may still succeed. Both are
            false if it had ended already.
        """
        return self._http.request("POST", f"{_request(request_id)}/cancel")

    def retry(self, request_id: str, **limits: int | None) -> Json:
        """Submit an ended request again.

        Args:
            request_id: The request's id, or its beginning.
            limits: New `memory_mb` and `session_memory_mb` of a launch; None keeps the old one.

        Returns:
            The new request as it was queued.
        """
        given = {name: value for name, value in limits.items() if value is not None}
        path = f"{_request(request_id)}/retry"
        return cast("Json", self._http.request("POST", path, given)["request"])

    def request_events(
        self, request_id: str, *, logs: bool, after: str | None
    ) -> Iterator[ServerEvent]:
        """Stream `state`, `progress` and `log` events until the request is final.

        Args:
            request_id: The request's id, or its beginning.
            logs: Whether log text is wanted.
            after: The id of the last event that was received; None: from the beginning.
        """
        return self._http.events(f"{_request(request_id)}/events", {"logs": logs}, after=after)

    def request_log(
        self,
        request_id: str,
        *,
        tail: int | None = None,
        since: float | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Stream what the request printed.

        Args:
            request_id: The request's id, or its beginning.
            tail: Begin this many lines from the end; None: from the beginning.
            since: Begin with what was printed in the last `since` seconds.
            follow: Continue until the request is final.
        """
        return self._http.text(f"{_request(request_id)}/logs", _log_query(tail, since, follow))

    def environments(self) -> list[Json]:
        """List every environment that is wanted, or that failed."""
        return cast("list[Json]", self._http.request("GET", "/v1/environments")["environments"])

    def environment(self, name: str) -> Json:
        """Return one environment by its name."""
        return cast("Json", self._http.request("GET", _environment(name))["environment"])

    def base_url(self, name: str) -> Json:
        """Return `{"address", "token", "base_url", "is_served"}`, for clients of an environment.

        Without an address the call is refused as `not_found`, with the reason.
        """
        return self._http.request("GET", f"{_environment(name)}/base_url")

    def environment_log(
        self,
        name: str,
        *,
        tail: int | None = None,
        since: float | None = None,
        follow: bool = False,
        replica: str | None = None,
        on_change: Callable[[str | None], object] = lambda _: None,
    ) -> Iterator[str]:
        """Stream what a replica printed.

        Args:
            name: The environment's name.
            tail: Begin this many lines from the end; None: from the beginning.
            since: Begin with what was printed in the last `since` seconds.
            follow: Follow the log as it grows, until the environment is down; when other replicas
                replace the youngest one, continue with the youngest of those.
            replica: The replica's id; None: the youngest.
            on_change: Called with a replica's id before its log follows that of another one, and
                with None when the environment is down.
        """
        path = f"{_environment(name)}/logs"
        query = {**_log_query(tail, since, follow), "replica": replica}
        heads: dict[str, str] = {}
        yield from filter(None, self._http.text(path, query, heads))
        while follow and (after := heads.get(_LOG_HEADER)) is not None:
            try:
                is_down = self.environment(name)["state"] == EnvironmentState.STOPPED
            except ConnectionLost:
                return
            except NotFound:
                is_down = True
            if is_down:
                on_change(None)
                return
            query = {"follow": True, "replica": replica, "after": after}
            for piece in self._http.text(path, query, heads):
                if heads[_LOG_HEADER] != after:
                    after = heads[_LOG_HEADER]
                    on_change(after)
                if piece:
                    yield piece

    def gateway(self) -> Json:
        """Return `{"gateway"}`: its address, process and environments; null if none runs."""
        return self._http.request("GET", "/v1/gateway")

    def status(self, *, all_failed: bool = False) -> Json:
        """Return `{"daemon", "environments", "requests"}`.

        Launches that failed and left no environment are included: the newest ones, or all of them
        if `all_failed` is set.
        """
        query = {"all_failed": "true"} if all_failed else None
        return self._http.request("GET", "/v1/status", query=query)

    def info(self) -> Json:
        """Return `{"daemon", "limits", "plan", "workers", "settings"}`."""
        return self._http.request("GET", "/v1/info")

    def dashboard_link(self, folder: str | None = None) -> Json:
        """Return `{"address", "url", "expires_seconds"}`: a link that signs a browser in, once.

        In the launch form, relative paths are relative to `folder`.
        """
        query = {"folder": folder} if folder else None
        return self._http.request("POST", "/v1/dashboard/link", query=query)

    def health(self) -> Json:
        """Return `{"status": "ok", "version"}`."""
        return self._http.request("GET", "/v1/health")

    def changes(self, *, after: str | None = None) -> Iterator[ServerEvent]:
        """Stream every change, from now on or after the event with the id `after`."""
        return self._http.events("/v1/events", after=after)


def _request(request_id: str) -> str:
    return f"/v1/requests/{quote(request_id, safe='')}"


def _environment(name: str) -> str:
    """Return an environment's path; raises `NotFound` if the name can be none's: a folder."""
    if "/" in name:
        error = {"kind": "not_found", "message": f"no environment is called {name!r}"}
        raise NotFound(404, {**error, "hint": "write a name that openenv status lists"})
    return f"/v1/environments/{quote(name, safe='')}"


def _log_query(tail: int | None, since: float | None, follow: bool) -> dict[str, float | None]:
    return {"tail": tail, "since_seconds": since, "follow": follow or None}
