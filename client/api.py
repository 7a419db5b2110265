# SPDX-License-Identifier: Apache-2.0
"""`DaemonClient`: the calls of the HTTP API by name. What they answer stands in `docs/api.md`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from .http import HttpClient, Json, ServerEvent


class DaemonClient:
    """One daemon's API. `identity` is what its `daemon.json` says."""

    def __init__(self, http: HttpClient, identity: Json) -> None:
        self._http = http
        self.identity = identity

    @property
    def address(self) -> str:
        """The daemon's own address over TCP."""
        return str(self.identity["address"])

    # Requests.

    def submit(self, operation: str, payload: Json, **options: Any) -> Json:
        """Queue an operation; the request is durable when this returns.

        `options`: `idempotency_key`, `priority`, `timeout_seconds`, `retry_oom`; None leaves one
        out.
        """
        given = {key: value for key, value in options.items() if value is not None}
        body = {"operation": operation, "payload": payload, **given}
        request: Json = self._http.request("POST", "/v1/requests", body)["request"]
        return request

    def request(self, request_id: str) -> Json:
        """The request with this id, or the one whose id begins so."""
        request: Json = self._http.request("GET", _request(request_id))["request"]
        return request

    def requests(
        self,
        *,
        states: Sequence[str] | None = None,
        operation: str | None = None,
        environment: str | None = None,
        limit: int | None = None,
    ) -> list[Json]:
        """The queue and its history, newest first."""
        query = {
            "state": list(states) if states else None,
            "operation": operation,
            "environment": environment,
            "limit": limit,
        }
        found: list[Json] = self._http.request("GET", "/v1/requests", query=query)["requests"]
        return found

    def cancel(self, request_id: str) -> Json:
        """`{"request", "cancelled"}`; `cancelled` is false when it had ended already."""
        return self._http.request("POST", f"{_request(request_id)}/cancel")

    def request_events(
        self, request_id: str, *, logs: bool, after: str | None
    ) -> Iterator[ServerEvent]:
        """`state`, `progress` and `log` events until the request is final."""
        query = {"logs": logs}
        return self._http.events(f"{_request(request_id)}/events", query, after=after)

    def request_log(
        self, request_id: str, *, tail: int | None = None, follow: bool = False
    ) -> Iterator[str]:
        """What the request printed; with `follow`, until it is final."""
        return self._http.text(f"{_request(request_id)}/logs", _log_query(tail, follow))

    # Environments.

    def environments(self) -> list[Json]:
        """Every environment that is wanted, or that failed."""
        found: list[Json] = self._http.request("GET", "/v1/environments")["environments"]
        return found

    def environment(self, name: str) -> Json:
        """One environment by its name."""
        environment: Json = self._http.request("GET", _environment(name))["environment"]
        return environment

    def environment_log(
        self,
        name: str,
        *,
        tail: int | None = None,
        follow: bool = False,
        replica: str | None = None,
    ) -> Iterator[str]:
        """What a replica printed: the named one, or the youngest."""
        query = {**_log_query(tail, follow), "replica": replica}
        return self._http.text(f"{_environment(name)}/logs", query)

    # The daemon.

    def status(self) -> Json:
        """`{"daemon", "environments", "requests"}`."""
        return self._http.request("GET", "/v1/status")

    def info(self) -> Json:
        """`{"daemon", "limits", "plan", "workers", "settings"}`."""
        return self._http.request("GET", "/v1/info")

    def changes(self, *, after: str | None = None) -> Iterator[ServerEvent]:
        """Everything that changes, from now on."""
        return self._http.events("/v1/events", after=after)

    def stop(self) -> Json:
        """Tell the daemon to end; it answers first."""
        return self._http.request("POST", "/v1/stop", {})


def _request(request_id: str) -> str:
    return f"/v1/requests/{quote(request_id, safe='')}"


def _environment(name: str) -> str:
    return f"/v1/environments/{quote(name, safe='')}"


def _log_query(tail: int | None, follow: bool) -> dict[str, int | bool | None]:
    return {"tail": tail, "follow": follow or None}
