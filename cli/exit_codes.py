# SPDX-License-Identifier: Apache-2.0
"""The exit codes: documented on the site's page of commands, stable, equal for all commands."""

from __future__ import annotations

from collections.abc import Iterable

from ..client.errors import (
    ApiRefused,
    ClientError,
    DaemonNotStarted,
    DaemonUnreachable,
    RequestFailed,
)
from ..schema.states import ErrorKind, RequestState
from ..system.text.json_lines import Json

OK = 0  # done, or durably queued with --async
FAILED = 1  # the request failed or was cancelled, or the daemon refused it
USAGE = 2  # the command line is wrong
UNREACHABLE = 3  # the daemon cannot be reached or started
NOT_FOUND = 4  # no such request or environment
TIMED_OUT = 124  # `wait --timeout` expired: the same code as timeout(1)
INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT, as in shells
OUT_OF_MEMORY = 137  # the request ran out of memory: 128 + SIGKILL, as in shells
BROKEN_PIPE = 141  # stdout was closed early (SIGPIPE)


def of_error(error: ClientError) -> int:
    """Return the code of an error that ended the command."""
    match error:
        case RequestFailed():
            return of_request(error.request)
        case DaemonNotStarted(kind="service" | "no_service"):  # a daemon may run all the same
            return FAILED
        case DaemonUnreachable() | ApiRefused(kind="unauthorized" | "forbidden"):
            return UNREACHABLE
        case ApiRefused(kind="not_found"):
            return NOT_FOUND
        case ApiRefused(kind="invalid" | "ambiguous" | "unsupported"):
            return USAGE
    return FAILED


def of_request(request: Json) -> int:
    """Return the code of a final request."""
    if request["state"] == RequestState.SUCCEEDED:
        return OK
    kind = (request.get("error") or {}).get("kind")
    return OUT_OF_MEMORY if kind == ErrorKind.OOM_KILLED else FAILED


def of_requests(requests: Iterable[Json]) -> int:
    """Return the worst code: out of memory, then failed, then ok."""
    return max((of_request(request) for request in requests), default=OK)
