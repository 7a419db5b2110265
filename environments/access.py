# SPDX-License-Identifier: Apache-2.0
"""Reaching an environment: one HTTP request, one JSON answer; one launch, through its restarts.

`FollowedEnvironment` finds a launch of this machine again by its run files.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from ..schema.errors import NotAnswering
from ..schema.protocol import (
    ENVIRONMENT_HEADER,
    GENERATION_HEADER,
    HOST_CONFIG_VARIABLE,
    HOST_OPTIONS_VARIABLE,
    NO_SESSIONS,
    Serving,
)
from ..system.net.access import bearer_header, with_token, without_token
from ..system.process.process_identity import ProcessIdentity
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
    return read_answer(f"{address}{path}", response.status, response.reason, body)


def read_answer(url: str, status: int, reason: str, body: bytes) -> Any:
    """The JSON of an answer; raises `NotAnswering` unless it is 200 and JSON."""
    if status != http.client.OK:
        raise NotAnswering(f"{url} answers {status} {reason}", _HINT, status)
    try:
        return json.loads(body)
    except ValueError as exc:
        raise NotAnswering(f"{url} does not answer with JSON", _HINT) from exc


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


class FollowedEnvironment:
    """The launch that had an environment's name when this was made.

    Attributes:
        name: The environment's.
        base_url: Where it answers, with its token.
        server: What its handshakes say: its name, and its launch.
    """

    def __init__(self, runs: Path, name: str) -> None:
        """Find it.

        Raises:
            NotAnswering: None of its replicas has been started here, or it has no sessions.
        """
        found = run_files.that_serves(runs, name)
        if found is None:
            hint = "openenv status shows what runs, openenv logs NAME what it printed"
            raise NotAnswering(f"{name} has no replica on this machine", hint)
        check_sessions(found)
        self._runs = runs
        self.name = name
        self._launch = found.request_id
        self.base_url = with_token(found.address, found.token)
        self.server = _server_of(found)

    def is_starting(self) -> bool:
        """Whether none of its replicas takes sessions, and it has some still. Reads some files.

        Those that are drained, since an update has replaced them, let their sessions go on.

        Raises:
            NotAnswering: It was updated, taken down, or given up.
        """
        return not any(map(_is_ready, self._replicas()))

    def _replicas(self) -> list[RunFile]:
        found = run_files.of_environment(self._runs, self.name)
        own = [run_file for run_file in found if run_file.request_id == self._launch]
        if not own and found:
            raise NotAnswering(
                f"{self.name} was updated before this had ended, and what it was has ended",
                "what has finished is kept; the same command plays the rest with what serves now",
            )
        if not own:
            raise NotAnswering(
                f"{self.name} was taken down, or has failed for good, before this had ended",
                f"what has finished is kept; launch {self.name}, and run the same command again",
            )
        return own


def _server_of(run_file: RunFile) -> tuple[str | None, str | None]:
    """What its handshakes say."""
    environ = run_file.data["env"]
    config = json.loads(environ.get(HOST_OPTIONS_VARIABLE) or environ[HOST_CONFIG_VARIABLE])
    return config["headers"][ENVIRONMENT_HEADER], config["headers"][GENERATION_HEADER]


def _is_ready(run_file: RunFile) -> bool:
    status = read_status_file(run_file.run_dir)
    if status is None or status.get("state") not in ("ready", "asleep"):
        return False
    if status.get("is_draining"):
        return False
    if not run_file.is_local:
        return True  # it does not end with its agent
    shim = status["shim"]
    return ProcessIdentity(shim["pid"], shim["started_at"]).is_alive()
