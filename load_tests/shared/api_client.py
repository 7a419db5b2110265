# SPDX-License-Identifier: Apache-2.0
"""HTTP over a persistent connection, for many clients in one loop; the daemon's API over it."""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

Json = dict[str, Any]

WAIT_SECONDS = 60
KEPT_SECONDS = 2.0  # the daemon closes a connection that was idle for longer than 5 s
FINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


class HttpClient:
    """One connection to a server, kept alive (HTTP/1.1).

    Args:
        connect: Makes the connection, whenever there is none.
        headers: Header lines of each request, with their line ends.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]],
        headers: str = "",
    ) -> None:
        self._connect = connect
        self._headers = headers
        self._used = -math.inf  # monotonic
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def exchange(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[dict[str, str], bytes]:
        """Make one call; returns the headers and the content.

        Raises:
            RuntimeError: The server refused it.
        """
        if time.monotonic() - self._used > KEPT_SECONDS:
            await self.close()
        if self._writer is None:
            self._reader, self._writer = await self._connect()
        assert self._reader is not None
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
        content = await self._reader.readexactly(int(headers["content-length"]))
        self._used = time.monotonic()
        if headers.get("connection", "").lower() == "close":
            await self.close()
        if not first.startswith("HTTP/1.1 2"):
            raise RuntimeError(f"{first}: {content[:500]!r}")
        return headers, content

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


class ApiClient(HttpClient):
    """One connection to the daemon of a home."""

    def __init__(self, home: str) -> None:
        identity = json.loads((Path(home) / "daemon.json").read_text())
        self.pid = int(identity["pid"])
        token = (Path(home) / "token").read_text().strip()
        connect = partial(asyncio.open_unix_connection, str(identity["socket"]))
        super().__init__(connect, f"Authorization: Bearer {token}\r\n")

    async def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """Make one call; raises if the daemon refuses it."""
        content = b"" if body is None else json.dumps(body).encode()
        _, answer = await self.exchange(method, path, content)
        found: Json = json.loads(answer)
        return found

    async def environment(self, name: str) -> Json:
        found: Json = (await self.call("GET", f"/v1/environments/{name}"))["environment"]
        return found

    async def submit(self, operation: str, payload: Json, **options: Any) -> str:
        body = {"operation": operation, "payload": payload, **options}
        return str((await self.call("POST", "/v1/requests", body))["request_id"])

    async def wait(self, request_id: str) -> Json:
        while True:
            path = f"/v1/requests/{request_id}?wait_seconds={WAIT_SECONDS}"
            request: Json = (await self.call("GET", path))["request"]
            if request["state"] in FINAL:
                return request

    async def run(self, operation: str, payload: Json) -> Json:
        return await self.wait(await self.submit(operation, payload))
