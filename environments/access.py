# SPDX-License-Identifier: Apache-2.0
"""Sends one HTTP request to an environment and returns the JSON of its response."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from ..schema.errors import NotAnswering
from ..schema.protocol import NO_SESSIONS, Serving
from ..system.net.access import bearer_header, with_token, without_token
from ..system.text.units import MB
from . import run_files
from .run_files import RunFile
from .shim.client import read_status_file

MAX_ANSWER_BYTES = 16 * MB  # of one answer: a schema is the longest


def ask(
    base_url: str,
    path: str,
    timeout_seconds: float,
    *,
    method: str = "GET",
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Return the JSON that an environment answers to a request.

    `base_url` contains its token, if it has one. Raises `NotAnswering` if there is no answer, its
    status is not 200, or its body is not JSON.
    """
    address, token = without_token(base_url)
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(
        parts.hostname or "127.0.0.1", parts.port, timeout=timeout_seconds
    )
    try:
        url = f"{parts.path.rstrip('/')}{path}"
        connection.request(method, url, headers={**bearer_header(token), **headers})
        response = connection.getresponse()
        body = response.read(MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as exc:
        why = str(exc) or type(exc).__name__
        raise NotAnswering(f"nothing answers at {address}{path}: {why}", _HINT) from exc
    finally:
        connection.close()
    return read_answer(f"{address}{path}", response.status, response.reason, body)


def read_answer(url: str, status: int, reason: str, body: bytes) -> Any:
    """Return the JSON of an answer; raises `NotAnswering` unless it is JSON with status 200."""
    if status != http.client.OK:
        raise NotAnswering(f"{url} answers {status} {reason}", _HINT, status)
    try:
        return json.loads(body)
    except ValueError as exc:
        raise NotAnswering(f"{url} does not answer with JSON", _HINT) from exc


def base_url_by_name(runs: Path, name: str, *, for_sessions: bool = False) -> str:
    """Return the base URL, with its token, of the environment of this name on this machine.

    Raises `NotAnswering` if it has no replica here; or is wanted `for_sessions`, and has none.
    """
    found = find_replica(runs, name, for_sessions=for_sessions)
    return with_token(found.address, found.token)


def find_replica(runs: Path, name: str, *, for_sessions: bool) -> RunFile:
    """Return a replica that serves the environment of this name; raises as `base_url_by_name`."""
    if (found := run_files.that_serves(runs, name)) is None:
        raise NotAnswering(f"{name} has no replica on this machine", _HINT)
    if for_sessions:
        check_sessions(found)
    return found


def check_sessions(replica: RunFile) -> None:
    """Refuse a replica whose app has no sessions; raises `NotAnswering`."""
    info = (read_status_file(replica.run_dir) or {}).get("info") or {}
    if info.get("serving") == Serving.HTTP:
        example = f", such as {info['route']}," if info.get("route") else ""
        hint = f"call its own routes{example} at {replica.address}"
        raise NotAnswering(f"{replica.environment}: {NO_SESSIONS}", hint)


_HINT = "openenv status shows what runs, openenv logs NAME what it printed"
