# SPDX-License-Identifier: Apache-2.0
"""One session at an OpenEnv server: reset and steps, one question at a time (`wire.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import orjson
from websockets.exceptions import InvalidURI
from websockets.uri import WebSocketURI, parse_uri

from ..episodes import BytesLike, FailureReason
from ..errors import EpisodeFailed, NoEnvironment
from .wire import Receiving, Wire

CONNECT_SECONDS = 30.0  # also the time to wait in the queue of a server that is full
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def session_url(address: str) -> str:
    """`http://host:8000` as `ws://host:8000/ws`.

    Raises:
        NoEnvironment: it is not an address.
    """
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        named = (parts.hostname or "").encode("idna")  # as it will be when it is looked up
        scheme = _SCHEMES[parts.scheme] if named and parts.port != 0 else None
    except (KeyError, ValueError):  # a scheme, a host or a port that there is not
        scheme = None
    if scheme is None:
        raise NoEnvironment(f"{address!r} is not the address of an environment")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/ws") else f"{path}/ws"
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


class Session:
    """One connection with its own environment instance."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    @classmethod
    async def open(
        cls, address: str, receiving: Receiving, seconds: float = CONNECT_SECONDS
    ) -> Session:
        """Connects to a server.

        Args:
            address: Of the server, with or without `/ws`.
            receiving: What all sessions of the loop share.
            seconds: Longest wait, also in the queue of a full server.

        Raises:
            EpisodeFailed: NOT_CONNECTED, NO_CAPACITY.
            NoEnvironment: The address is invalid.
        """
        try:
            uri = parse_uri(session_url(address))
        except InvalidURI as exc:
            raise NoEnvironment(f"{address!r} is not the address of an environment") from exc
        try:
            async with asyncio.timeout(seconds):
                return cls(await _opened(uri, receiving))
        except TimeoutError as exc:
            raise _not_connected(address, f"no answer within {seconds:g} s") from exc
        except OSError as exc:
            raise _not_connected(address, exc.strerror or str(exc)) from exc

    @property
    def is_open(self) -> bool:
        """Whether the session can take another question."""
        return self._wire.is_open

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when the socket is closed."""
        return self._wire.ended

    async def reset(self, arguments: Mapping[str, Any], *, seconds: float | None) -> BytesLike:
        """Begins an episode; returns the server's answer."""
        text = orjson.dumps({"type": "reset", "data": arguments})
        return await self._ask(text, seconds, "reset")

    async def step(self, action_json: bytes, *, seconds: float | None) -> BytesLike:
        """Takes a step; returns the server's answer."""
        return await self._ask(b'{"type":"step","data":%b}' % action_json, seconds, "step")

    def close(self) -> None:
        """Sends the close message; the socket closes when it is sent."""
        self._wire.leave()

    def abort(self) -> None:
        """Closes the socket at once."""
        self._wire.abort()

    async def _ask(self, text: bytes, seconds: float | None, what: str) -> BytesLike:
        """Sends a question and returns the server's answer.

        Raises:
            EpisodeFailed: CONNECTION_LOST, STEP_TIMED_OUT, or the error that the server sent.
        """
        answer = self._wire.ask(text)
        timer = None if seconds is None else self._wire.give_up_after(seconds, what)
        try:
            return await answer
        except asyncio.CancelledError:
            self._wire.abort()
            raise
        finally:
            if timer is not None:
                timer.cancel()


async def _opened(uri: WebSocketURI, receiving: Receiving) -> Wire:
    """Opens a connection and waits for its handshake; closes it on failure."""
    loop = asyncio.get_running_loop()
    secure = await receiving.tls.context() if uri.secure else None
    _, wire = await loop.create_connection(
        lambda: Wire(uri, receiving), uri.host, uri.port, ssl=secure
    )
    try:
        await wire.opened
    except BaseException:  # cancelled, too, even right after it was opened
        wire.abort()
        raise
    return wire


def _not_connected(address: str, why: str) -> EpisodeFailed:
    return EpisodeFailed(FailureReason.NOT_CONNECTED, f"{address} does not answer: {why}")
