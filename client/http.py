# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 over the daemon's Unix socket: each call opens and closes a connection.

`request` is for JSON, `text` for logs, `events` for server-sent events. This module retries
nothing: `following.py` decides what to retry.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from ..system.net.traceparent import HEADER, traceparent
from ..system.text.json_lines import Json
from .errors import ApiRefused, ConnectionLost, NotFound

Query = Mapping[str, str | int | float | bool | Sequence[str] | None]

# Much longer than any answer takes, much shorter than a user's patience with a wedged daemon.
ANSWER_SECONDS = 60.0
# A stream of events has a comment at least every 15 s; after 45 s without one the daemon is dead.
SILENCE_SECONDS = 45.0
_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One server-sent event; `id` goes into `Last-Event-ID` to continue after it."""

    id: str
    name: str
    data: Any


class UnixConnection(HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect the Unix socket; `HTTPConnection.request` calls this."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class HttpClient:
    """Calls to one daemon, each with its token."""

    def __init__(
        self, socket_path: str, token: str, *, answer_seconds: float | None = None
    ) -> None:
        self._socket_path = socket_path
        self._token = token
        self._answer_seconds = answer_seconds or ANSWER_SECONDS
        self._open: set[UnixConnection] = set()
        self._is_closed = False

    def close(self) -> None:
        """End all calls that are under way in any thread; they raise `ConnectionLost`."""
        self._is_closed = True
        for connection in tuple(self._open):
            with suppress(AttributeError, OSError):  # not connected yet, or not any more
                connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads

    def request(
        self, method: str, path: str, body: Json | None = None, query: Query | None = None
    ) -> Json:
        """Make one call, with JSON in and out.

        Raises:
            ApiRefused: The daemon answered with an error.
            ConnectionLost: It did not answer.
        """
        with self._call(method, path, body, query, timeout=self._answer_seconds) as response:
            answer: Json = json.loads(response.read())
            return answer

    def text(
        self, path: str, query: Query | None = None, heads: dict[str, str] | None = None
    ) -> Iterator[str]:
        """Yield a text answer in pieces as they come; silence has no time limit.

        The answer's headers are added to `heads`, and then an empty piece is yielded.
        """
        import codecs

        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with self._call("GET", path, None, query, timeout=None) as response:
            if heads is not None:
                heads.update(response.getheaders())
                yield ""
            while piece := response.read1(_READ_BYTES):
                yield decoder.decode(piece)
            yield decoder.decode(b"", final=True)

    def events(
        self, path: str, query: Query | None = None, *, after: str | None = None
    ) -> Iterator[ServerEvent]:
        """Yield server-sent events until the daemon closes the stream; `after`: the last known id.

        Raises:
            ApiRefused, ConnectionLost: As `request`; a connection may also be lost in between.
        """
        headers = {"Accept": "text/event-stream"}
        if after is not None:
            headers["Last-Event-ID"] = after
        with self._call(
            "GET", path, None, query, timeout=SILENCE_SECONDS, headers=headers
        ) as response:
            yield from parse_events(iter(response.readline, b""))

    @contextmanager
    def _call(
        self,
        method: str,
        path: str,
        body: Json | None,
        query: Query | None,
        *,
        timeout: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[HTTPResponse]:
        connection = UnixConnection(self._socket_path, timeout)
        self._open.add(connection)
        try:
            content = None if body is None else json.dumps(body).encode()
            ours = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
            if method == "POST" and (context := traceparent()) is not None:
                ours[HEADER] = context
            connection.request(method, _target(path, query), content, {**ours, **(headers or {})})
            if self._is_closed:  # before there was a socket to shut down
                raise ConnectionAbortedError("the client was closed")
            response = connection.getresponse()
            if response.status >= 300:
                error = _error_of(response)
                refused = NotFound if error.get("kind") == "not_found" else ApiRefused
                raise refused(response.status, error)
            yield response
        except (OSError, HTTPException) as exc:
            raise ConnectionLost(
                f"the daemon did not answer: {str(exc) or type(exc).__name__}",
                "see the end of daemon.log in its home",
            ) from exc
        finally:
            self._open.discard(connection)
            connection.close()


def parse_events(lines: Iterator[bytes]) -> Iterator[ServerEvent]:
    """Yield the events of an event stream's lines, without comments (keep-alives)."""
    fields: dict[str, str] = {}
    for line in lines:
        text = line.decode().rstrip("\r\n")
        if text.startswith(":"):
            continue
        if text:
            name, _, value = text.partition(":")
            fields[name] = value.removeprefix(" ")
        elif "data" in fields:
            data = json.loads(fields["data"])
            yield ServerEvent(fields.get("id", ""), fields.get("event", "message"), data)
            fields = {}


def _target(path: str, query: Query | None) -> str:
    given = {key: value for key, value in (query or {}).items() if value is not None}
    if not given:
        return path
    from urllib.parse import urlencode

    plain = {k: str(v).lower() if isinstance(v, bool) else v for k, v in given.items()}
    return f"{path}?{urlencode(plain, doseq=True)}"


def _error_of(response: HTTPResponse) -> Json:
    body = response.read()
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {"kind": "http", "message": f"HTTP {response.status} {response.reason}"}
    return error if isinstance(error, dict) else {"kind": "http", "message": str(error)}
