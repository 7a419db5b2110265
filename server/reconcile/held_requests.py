# SPDX-License-Identifier: Apache-2.0
"""`HeldRequests`: holds what clients ask of an environment that has no replica, until it has one.

    client ──▶ Envoy ──▶ this socket, the environment's only endpoint ──▶ waits
                 └─────▶ the replica  ◀──"503, OpenEnvd-Retry" when there is one

Envoy sends a request again when the answer says that nothing was begun, so a handshake reaches the
replica on its second attempt, and its client has only waited. Used while an environment's only
replica is restarted.

Failure cases:

* No replica becomes ready in time, or the environment goes or fails: 503 with the cause, which is
  the client's.
* More requests than `MOST_HELD` wait: 503 at once.
* The client leaves: Envoy closes the connection, and nothing waits any more.
* The daemon exits: Envoy finds nobody at the socket, and answers 503 after its retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

from ...schema.protocol import ENVIRONMENT_HEADER, RETRY_HEADER
from ...system.net.connection_limit import closing_answer
from ...system.net.http_limits import MAX_HEAD_BYTES

MOST_HELD = 2048
HEAD_SECONDS = 10.0

# That the gateway adds to every request (`environments/gateway/configuration.py`).
_NAME = re.compile(rf"\r\n{ENVIRONMENT_HEADER}: *([^\r\n]+)".encode(), re.IGNORECASE)
_RETRY = closing_answer(
    HTTPStatus.SERVICE_UNAVAILABLE, "A replica is ready now.", headers=f"{RETRY_HEADER}: 1\r\n"
)
_NONE = closing_answer(HTTPStatus.SERVICE_UNAVAILABLE, "This environment has no replica.")


class HeldRequests:
    """The socket that Envoy sends such requests to. On the daemon's loop.

    Args:
        path: Where the socket is made, for its owner alone.
        until_served: Waits until an environment has a replica, by its name; returns why it has
            none, or None.
    """

    def __init__(self, path: Path, until_served: Callable[[str], Awaitable[str | None]]) -> None:
        self.path = path
        self._until_served = until_served
        self._server: asyncio.Server | None = None
        self._held: set[asyncio.Task[None] | None] = set()

    async def start(self) -> None:
        """Listen, unless it does."""
        if self._server is None:
            self.path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(
                self._hold, self.path, limit=MAX_HEAD_BYTES, backlog=MOST_HELD
            )
            self.path.chmod(0o600)

    async def stop(self) -> None:
        """Listen no more, and hold nothing any more."""
        if self._server is not None:
            self._server.close()
            self._server = None
            with contextlib.suppress(OSError):
                self.path.unlink()
            held = [task for task in self._held if task is not None]
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._held.add(task := asyncio.current_task())
        try:
            answer = await self._answer(reader) if len(self._held) <= MOST_HELD else _NONE
            writer.write(answer)
            await writer.drain()
        except (OSError, TimeoutError, asyncio.LimitOverrunError, asyncio.IncompleteReadError):
            pass  # it left, or is not Envoy
        finally:
            self._held.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        async with asyncio.timeout(HEAD_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
        found = _NAME.search(head)
        if found is None:
            return _NONE
        waiting = asyncio.ensure_future(self._until_served(found[1].decode("latin-1")))
        leaving = asyncio.ensure_future(_until_end(reader))
        try:
            await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return _NONE  # nobody reads it
            why = waiting.result()
            return _RETRY if why is None else closing_answer(HTTPStatus.SERVICE_UNAVAILABLE, why)
        finally:
            waiting.cancel()
            leaving.cancel()


async def _until_end(reader: asyncio.StreamReader) -> None:
    """Read what follows, which nobody needs, until the connection ends."""
    while await reader.read(MAX_HEAD_BYTES):
        pass
