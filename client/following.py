# SPDX-License-Identifier: Apache-2.0
"""Follows one request from its present state to its end.

A stream may break while its request continues: the daemon was restarted, or dropped a client that
read too slowly. It is continued after the last known event, so that no log line is lost or printed
twice. Following ends after `COME_BACK_SECONDS` without a daemon; none is started, because the
daemon may have been stopped on purpose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from ..schema.states import FINAL_STATES, RequestState
from ..system.text.json_lines import Json
from .api import DaemonClient
from .errors import ConnectionLost, RequestFailed
from .http import ServerEvent

COME_BACK_SECONDS = 5.0
MAX_WAIT_SECONDS = 15.0  # of one call that waits for a request to end
_POLL_INTERVAL_SECONDS = 0.1  # while there is no daemon

Reconnect = Callable[[], DaemonClient | None]


def follow(
    client: DaemonClient, request_id: str, *, logs: bool = True, reconnect: Reconnect | None = None
) -> Iterator[ServerEvent]:
    """Stream a request's `state`, `progress` and `log` events; the last is the final `state`.

    Args:
        client: The daemon that has the request.
        request_id: The request's id, or its beginning.
        logs: Whether log text is wanted.
        reconnect: Looks for the daemon after the stream broke (`daemon.find`); None: the same
            socket is tried again.

    Raises:
        ApiRefused: There is no such request.
        ConnectionLost: The daemon went away and did not come back.
    """
    after: str | None = None
    final: ServerEvent | None = None
    find = reconnect or (lambda: client)
    while final is None:
        try:
            for event in client.request_events(request_id, logs=logs, after=after):
                after = event.id or after
                if event.name == "state" and event.data["state"] in FINAL_STATES:
                    final = event  # yielded last, after the rest of the log
                else:
                    yield event
        except ConnectionLost:
            pass  # only the final state counts
        if final is None:
            client, request = look(find, request_id)
            if request["state"] in FINAL_STATES:
                final = ServerEvent("", "state", request)
                if logs:
                    # The output between the break of the stream and the end of the request.
                    events = client.request_events(request_id, logs=True, after=after)
                    yield from (event for event in events if event.name == "log")
    yield final


def wait(find: Reconnect, request_id: str, *, seconds: float = math.inf) -> Json:
    """Return a request when it is final, or its present state after `seconds`.

    `find` looks for the daemon, at the beginning and after each answer.

    Raises:
        ApiRefused, ConnectionLost: As `follow`.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        asked = min(max(0.0, left), MAX_WAIT_SECONDS)
        _, request = look(find, request_id, wait_seconds=asked)
        if request["state"] in FINAL_STATES or left <= 0:
            return request
        time.sleep(min(_POLL_INTERVAL_SECONDS, left))  # a daemon that ends answers at once


def run(
    client: DaemonClient, operation: str, payload: Json, *, reconnect: Reconnect | None = None
) -> Json:
    """Submit an operation, wait for it, and return the request, which succeeded.

    Raises:
        RequestFailed: It did not succeed.
        ApiRefused, ConnectionLost: As `follow`.
    """
    request_id = client.submit(operation, payload)["id"]
    request = wait(reconnect or (lambda: client), request_id)
    if request["state"] != RequestState.SUCCEEDED:
        raise RequestFailed(request)
    return request


def look(
    find: Reconnect, request_id: str, *, wait_seconds: float = 0.0
) -> tuple[DaemonClient, Json]:
    """Return a daemon and a request, as it is after `wait_seconds`, or when it is final.

    Waits while the daemon is restarted.

    Raises:
        ApiRefused: There is no such request.
        ConnectionLost: The daemon went away and did not come back; none is started.
    """
    deadline = time.monotonic() + COME_BACK_SECONDS
    while True:
        try:
            if (found := find()) is not None:
                return found, found.request(request_id, wait_seconds=wait_seconds)
        except ConnectionLost:
            pass  # not back yet
        if time.monotonic() > deadline:
            raise ConnectionLost(
                f"the daemon has exited; request {request_id} waits for the next daemon",
                f"openenv wait {request_id} starts a daemon and waits for the request",
            )
        time.sleep(_POLL_INTERVAL_SECONDS)
