# SPDX-License-Identifier: Apache-2.0
"""Asking an environment over HTTP: one GET, one JSON answer."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..system.access_tokens import bearer_header, with_token, without_token
from ..system.units import MB
from . import run_files
from .errors import NotAnswering

MAX_ANSWER_BYTES = 16 * MB  # of a schema, say; more is no sensible answer


def ask(base_url: str, path: str, timeout_seconds: float) -> Any:
    """The JSON that an environment answers to `GET path`.

    Raises:
        NotAnswering: it does not, or not with 200 and JSON.
    """
    address, token = without_token(base_url)
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(
        parts.hostname or "127.0.0.1", parts.port, timeout=timeout_seconds
    )
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}{path}", headers=bearer_header(token))
        response = connection.getresponse()
        body = response.read(MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException) as exc:
        why = str(exc) or type(exc).__name__
        raise NotAnswering(f"nothing answers at {address}{path}: {why}", _HINT) from exc
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise NotAnswering(f"{address}{path} answers {response.status} {response.reason}", _HINT)
    try:
        return json.loads(body)
    except ValueError as exc:
        raise NotAnswering(f"{address}{path} does not answer with JSON", _HINT) from exc


def base_url_by_name(runs: Path, name: str) -> str:
    """The base URL, with its token, of the environment of this name on this machine.

    Raises:
        NotAnswering: none of its replicas has been started here.
    """
    found = run_files.of_environment(runs, name)
    if not found:
        raise NotAnswering(f"{name} has no replica on this machine", _HINT)
    return with_token(found[0].address, found[0].token)


_HINT = "openenv status shows what runs, openenv logs NAME what it printed"
