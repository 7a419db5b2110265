# SPDX-License-Identifier: Apache-2.0
"""A project's own app, and its relation to the env host: the project's routes, and its middleware.

What a project serves besides sessions (the web interface and gradio, routes and WebSockets of its
own) keeps its state in its process. So one process answers all of it, and runs the project's
start-up and shutdown hooks: the home shard. It is shard 0, the first to be forked and the last to
be given back. Sessions, our routes and upstream's stateless ones are answered by every shard.

    inbox ─▶ shard a reads the head ─┬─ a session, or a shared path ─▶ answered by a
                                     └─ an own path ─descriptor, bytes read─▶ inbox of home
    a kept connection ─▶ `KeptConnection` reads the next request ─ the same; a request that must not
                         be answered here, above all a handshake, is routed as if it were the first

A path that is not known to be shared (`environment/upstream_project.py`) goes to the home shard. A
connection that was handed to the home shard stays there, since that shard can answer everything.

    home is not forked yet    the connection waits in its inbox, which the supervisor holds
    home exits                those that it had taken are reset, those in its inbox go to its
                              successor, which runs the hooks again; what it kept in memory is lost
    home is full              it answers 503, as any shard does
    home hangs                own routes wait; sessions on other shards continue
    pipelined requests        one for an own path, sent to shard a before a's last answer was read,
                              is answered 421 and the connection closed: the client may ask again;
                              a handshake waits until the requests before it are answered

Its middleware runs around what is ours: the handshakes of sessions, and POST to `/mcp`.

    handshake ─▶ home shard ─▶ the project's app: middleware ─▶ route of `/ws` ─▶ `_accept`
                     │ ◀── accepted, and the headers that were added ── or refused ──┘
                     ├─▶ a slot in any shard, the session
                     └─▶ the refusal: 403, or the answer that the middleware gave instead

Middleware may refuse a handshake or add headers, but does not see the session's messages. The route
`/ws` takes the place of upstream's in the app (`environment/upstream_project.py`).

    it raises, or sends nothing   500, as from upstream's server
    it does not answer in time    500
    its answer is not HTTP        500, from `shard/shard.py`
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from ...schema.protocol import NO_SESSIONS, Serving
from ...system.net.access import split_target, without_parameter
from ...system.net.http_limits import (
    MAX_HEAD_BYTES,
    HttpLimits,
    Message,
    Receive,
    Send,
    send_answer,
)
from ..environment.instances import failure_of
from ..environment.upstream_project import answered_by
from ..ipc.fd_messages import duplicate
from ..websocket.handshake import Upgrade

NOT_FOUND = HTTPStatus.NOT_FOUND.value
_ASKED = (("GET", "/health"), ("GET", "/capacity"))
ANSWERED_POLL_SECONDS = 0.02  # between two checks whether requests before a handshake are answered
CHECK_SECONDS = 30.0  # for the middleware to answer
ASK_SECONDS = 5.0  # for an app that is asked whether it has sessions
_STATE: Message = {"type": "websocket.receive", "text": '{"type": "state"}'}
_LOOPBACK = ("127.0.0.1", 80)
_USUAL_HEADERS = {b"host": b"127.0.0.1", b"user-agent": b"openenvd", b"accept": b"*/*"}
_FAILS = "a %s with a client's usual headers is answered 500: %s"
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}

log = logging.getLogger("openenvd.env_host")


@dataclass(eq=False)
class AppAsItIs:
    """A foreign app, served unchanged. If it has no `/ws`, handshakes of sessions are refused.

    An engine's agent and the gateway ask for `/health` and `/capacity` to see that the server is
    ready; an app without sessions may answer 404, and then the answer is made here. `route` is a
    path that a user can try. The app is asked for sessions when it starts; if it shows a route for
    them (`has_route`), it may refuse that handshake.
    """

    _app: Any
    _route: str | None
    _has_route: bool
    _has_sessions: bool | None = None  # None: it has not been asked
    notes: tuple[str, ...] = ()  # for the user who launches it

    @property
    def how(self) -> Message:
        """Return how it is served, for the shim and an engine's agent."""
        if self._has_sessions is not False:
            return {"serving": Serving.AS_IS, "notes": self.notes}
        notes = (f"{NO_SESSIONS}; it is served as it is", *self.notes)
        return {"serving": Serving.HTTP, "route": self._route, "notes": notes}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Refuse handshakes if the app has no sessions; all else goes to the app first."""
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
            return
        asked = (scope.get("method"), scope["path"])  # a WebSocket has no method
        is_refused = self._has_sessions is False and not self._has_route
        if is_refused and asked == (None, "/ws"):
            await receive()
            headers, body = [(b"content-type", b"text/plain")], NO_SESSIONS.encode()
            await send_answer(send, NOT_FOUND, headers, body, "websocket.http.response")
            return
        is_ours = self._has_sessions is False and asked in _ASKED
        await self._app(scope, receive, self._instead_of_404(send) if is_ours else send)

    async def _start(self, scope: Message, receive: Receive, send: Send) -> None:
        """Run the app's own startup, and find out what it answers before uvicorn listens."""

        async def send_later(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._ask(scope)
            await send(message)

        try:
            await self._app(scope, receive, send_later)
        finally:  # the app may not support lifespan, which uvicorn permits
            await self._ask(scope)

    async def _ask(self, lifespan: Message) -> None:
        if self._has_sessions is None:
            given: Message = {"state": {**lifespan.get("state", {})}}
            scope = _asking() | given
            self._has_sessions = await _may_have_sessions(self._app, scope, self._has_route)
            # No route handles this method: only what stands around the routes runs.
            given |= {"type": "http", "scheme": "http", "method": "OPTIONS"}
            path = (self._route or "GET /health").split()[1]
            if why := await _find_failure(self._app, _asking(path) | given):
                self.notes = (_FAILS % ("request", why),)

    def _instead_of_404(self, send: Send) -> Send:
        is_missing = False

        async def answer(message: Message) -> None:
            nonlocal is_missing
            if message["type"] == "http.response.start" and message["status"] == NOT_FOUND:
                is_missing = True
                body = json.dumps(self.how | {"sessions": 0}).encode()
                headers = [(b"content-type", b"application/json")]
                await send_answer(send, HTTPStatus.OK.value, headers, body)
            elif not is_missing:
                await send(message)

        return answer


@dataclass(frozen=True, slots=True)
class Routing:
    """Decides which later requests on a connection are routed again, as the first one was."""

    is_own: Callable[[str], bool]  # whether only the home shard, another one, answers a path
    handshakes: frozenset[str]  # the paths of sessions
    take: Callable[[int, bytes], None]  # routes a connection, of which these bytes were read


class KeptConnection(HttpLimits):
    """A mixin for uvicorn's HTTP protocol (`limited`), which gives away what it must not answer."""

    routing: Routing | None = None  # None: every request is answered here

    # attributes of uvicorn's protocols
    headers: list[tuple[bytes, bytes]]
    scope: Message
    url: bytes

    _beginning = b""  # the first bytes of a request whose path is not complete
    _handshake = b""  # a handshake that arrived behind requests without an answer

    def data_received(self, data: bytes) -> None:
        """Pass data on if it is for this process; otherwise give the connection away."""
        if self._handshake:
            self.transport.abort()  # its client has not waited for the answer to its handshake
            return
        if self.routing is not None and self._is_between_requests():
            data = self._beginning + data
            line, end, _ = data.partition(b"\r\n")
            self._beginning = data if not end and len(data) <= MAX_HEAD_BYTES else b""
            if self._beginning:
                return
            words = line.split(b" ")
            path = split_target(words[1])[0].decode("latin-1") if len(words) == 3 else ""
            if end and path and self.routing.is_own(path):
                self._give_away(self.routing, data)
                return
        super().data_received(data)

    def handle_websocket_upgrade(self, *request: Any) -> None:
        """Route a handshake, once the requests before it are answered.

        uvicorn would open the WebSocket at once, and write their answers into it.
        """
        target = request[0].target if request else self.url  # h11, httptools
        path = unquote(split_target(target)[0].decode("latin-1"))
        if self.cycle is None or self.routing is None or path not in self.routing.handshakes:
            super().handle_websocket_upgrade(*request)
            return
        lines = [b"%b: %b\r\n" % header for header in self.headers]
        method = self.scope["method"].encode()
        self._handshake = b"%b %b HTTP/1.1\r\n%b\r\n" % (method, target, b"".join(lines))
        self._route_handshake(self.routing)

    def _route_handshake(self, routing: Routing) -> None:
        self._unused_bytes = 0
        if self._is_between_requests():
            self._give_away(routing, self._handshake)
        elif not self.transport.is_closing():
            self.loop.call_later(ANSWERED_POLL_SECONDS, self._route_handshake, routing)

    def _give_away(self, routing: Routing, data: bytes) -> None:
        fd = None if self.transport.is_closing() else duplicate(self.transport)
        self.transport.abort()  # this descriptor only: the connection has another
        if fd is not None:
            routing.take(fd, data)

    def _is_between_requests(self) -> bool:
        cycle = self.cycle
        return (
            cycle is not None  # the first request was routed when it arrived
            and not self._is_refused
            and cycle.response_complete
            and not cycle.more_body
            and not self._unused_bytes
            and not self.transport.get_write_buffer_size()
        )


async def check_handshake(app: Any, upgrade: Upgrade, transport: asyncio.Transport) -> str | bytes:
    """Send a handshake through an app whose route of sessions accepts it.

    Returns the header lines that the answer is to have, as text, when the handshake was accepted;
    otherwise the whole answer.
    """
    scope = answered_by(_accept, _scope(upgrade, transport))
    sent, failure = await _exchange(scope, app, CHECK_SECONDS)
    if not sent or sent[0]["type"] != "websocket.accept":
        if failure is not None:
            log.error("the middleware of this project failed at a handshake", exc_info=failure)
        return _refusal(sent)
    lines = b"".join(b"\r\n%b: %b" % (name, value) for name, value in sent[0].get("headers") or ())
    if protocol := sent[0].get("subprotocol"):
        lines += b"\r\nsec-websocket-protocol: " + protocol.encode()
    return lines.decode("latin-1")


async def _find_failure(app: Any, scope: Message) -> str | None:
    """Return one line that says why a request failed; other headers might change the answer."""
    _, failure = await _exchange(scope, app, ASK_SECONDS)
    if failure is None or isinstance(failure, TimeoutError):
        return None
    return failure_of(failure)


async def try_handshake(app: Any) -> None:
    """Log an error if an app's middleware fails at a handshake that the session route accepts."""
    if why := await _find_failure(app, answered_by(_accept, _asking())):
        log.warning(_FAILS, "handshake", why)


async def _may_have_sessions(app: Any, scope: Message, has_route: bool) -> bool:
    """Begin a session and ask for its state.

    Returns False if the app shows no route for sessions and answers as if it had none, or if the
    first message of its WebSocket is none of OpenEnv's protocol.
    """
    sent, failure = await _exchange(scope, app, ASK_SECONDS, _STATE)
    first: Message = sent[0] if sent else {"type": None}
    if first["type"] == "websocket.accept":
        said = next((each for each in sent if each["type"] == "websocket.send"), None)
        return said is None or _is_message(said.get("text") or said.get("bytes") or "")
    if has_route or not sent:
        return has_route or isinstance(failure, TimeoutError)
    if first["type"] == "websocket.close":  # with a reason, the app refuses an unknown client
        return not (first.get("code", 1000) == 1000 and not first.get("reason"))
    is_answer = first["type"] == "websocket.http.response.start"
    return is_answer and bool(first["status"] != NOT_FOUND)


def _is_message(said: str | bytes) -> bool:
    try:
        message = json.loads(said)
    except ValueError:
        return False
    return isinstance(message, dict) and {"type", "data"} <= message.keys()


async def _exchange(
    scope: Message, app: Any, seconds: float, *more: Message
) -> tuple[list[Message], Exception | None]:
    """Send a handshake or request, and `more`, and leave; return what the app sent and raised."""
    sent: list[Message] = []
    begins = "websocket.connect" if scope["type"] == "websocket" else "http.request"
    received = iter([{"type": begins}, *more])

    async def receive() -> Message:
        return next(received, {"type": f"{scope['type']}.disconnect", "code": 1005})

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        async with asyncio.timeout(seconds):
            await app(scope, receive, send)
    except Exception as exc:
        return sent, exc
    return sent, None


async def _accept(_: Message, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})


def _refusal(sent: list[Message]) -> bytes:
    """Return the answer to a handshake that was not accepted, as uvicorn gives it."""
    status, headers, body = HTTPStatus.INTERNAL_SERVER_ERROR.value, [], b"Internal Server Error"
    if sent and sent[0]["type"] == "websocket.close":
        status, body = HTTPStatus.FORBIDDEN.value, b""
    elif sent and sent[0]["type"] == "websocket.http.response.start":
        status, headers = sent[0]["status"], list(sent[0].get("headers") or ())
        body = b"".join(message.get("body", b"") for message in sent[1:])
    own = {b"content-length", b"connection", b"transfer-encoding"}
    lines = [b"%b: %b" % (name, value) for name, value in headers if name.lower() not in own]
    lines += [b"content-length: %d" % len(body), b"connection: close"]
    first = b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b""))
    return b"%b\r\n\r\n%b" % (b"\r\n".join([first, *lines]), body)


def _asking(path: str = "/ws") -> Message:
    transport = asyncio.Transport({"sockname": _LOOPBACK, "peername": _LOOPBACK})
    return _scope(Upgrade(path, "", b"", _USUAL_HEADERS), transport)


def _scope(upgrade: Upgrade, transport: asyncio.Transport) -> Message:
    """Return the scope that uvicorn would make of the handshake."""
    path, headers = upgrade.path, list(upgrade.headers.items())
    protocols = upgrade.headers.get(b"sec-websocket-protocol", b"").decode("latin-1").split(",")
    return {
        "type": "websocket",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": "ws",
        "server": _address(transport.get_extra_info("sockname")),
        "client": _address(transport.get_extra_info("peername")),
        "root_path": "",
        "path": path,
        "raw_path": path.encode(),
        "query_string": without_parameter(upgrade.query.encode("latin-1"))[0],
        "headers": headers,
        "subprotocols": [one for each in protocols if (one := each.strip())],
        "extensions": {"websocket.http.response": {}},
    }


def _address(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
