# SPDX-License-Identifier: Apache-2.0
"""Asking an environment over HTTP: one request without a body, one JSON answer."""

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
from ..system.net.access_tokens import bearer_header, with_token, without_token
from ..system.text.units import MB
from . import run_files
from .run_files import RunFile
from .shim.client import read_status_file

MAX_ANSWER_BYTES = 16 * MB  # of a schema, say; more is no sensible answer


def ask(
    base_url: str,
    path: str,
    timeout_seconds: float,
    *,
    host: str | None = None,
    method: str = "GET",
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """The JSON that an environment answers to a request.

    Args:
        base_url: The environment's, with its token, if it has one.
        path: What is asked for.
        timeout_seconds: For the answer.
        host: The name that it is called by; None: that of the URL.
        method: GET, or what else.
        headers: Further ones.

    Raises:
        NotAnswering: it does not, or not with 200 and JSON.
    """
    address, token = without_token(base_url)
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(
        parts.hostname or "127.0.0.1", parts.port, timeout=timeout_seconds
    )
    named = {} if host is None else {"Host": host}
    try:
        url = f"{parts.path.rstrip('/')}{path}"
        connection.request(method, url, headers={**bearer_header(token), **named, **headers})
        response = connection.getresponse()
        body = response.read(MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as exc:
        why = str(exc) or type(exc).__name__
        raise NotAnswering(f"nothing answers at {address}{path}: {why}", _HINT) from exc
    finally:
        connection.close()
    if response.status != http.client.OK:
        message = f"{address}{path} answers {response.status} {response.reason}"
        raise NotAnswering(message, _HINT, response.status)
    try:
        return json.loads(body)
    except ValueError as exc:
        raise NotAnswering(f"{address}{path} does not answer with JSON", _HINT) from exc


def base_url_by_name(runs: Path, name: str, *, for_sessions: bool = False) -> str:
    """The base URL, with its token, of the environment of this name on this machine.

    Raises:
        NotAnswering: none of its replicas has been started here; or it has no sessions, and they
            are wanted.
    """
    found = run_files.that_serves(runs, name)
    if found is None:
        raise NotAnswering(f"{name} has no replica on this machine", _HINT)
    if for_sessions:
        check_sessions(found)
    return with_token(found.address, found.token)


def check_sessions(replica: RunFile) -> None:
    """Refuse a replica whose app has no sessions.

    Raises:
        NotAnswering
    """
    info = (read_status_file(replica.run_dir) or {}).get("info") or {}
    if info.get("serving") == Serving.HTTP:
        hint = f"call its own routes, such as {info.get('route') or '/'} at {replica.address}"
        raise NotAnswering(f"{replica.environment}: {NO_SESSIONS}", hint)


_HINT = "openenv status shows what runs, openenv logs NAME what it printed"
