# SPDX-License-Identifier: Apache-2.0
"""The daemon's API over one kept connection, for many clients in one event loop."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]

WAIT_SECONDS = 60
KEPT_SECONDS = 2.0  # the daemon closes a connection that was idle for longer than 5 s
FINAL = ("SUCCEEDED", "FAILED", "CANCELLED")


class ApiClient:
    """One connection to the daemon of a home; HTTP/1.1, kept alive."""

    def __init__(self, home: str) -> None:
        identity = json.loads((Path(home) / "daemon.json").read_text())
        self.pid = int(identity["pid"])
        self._socket = str(identity["socket"])
        self._token = (Path(home) / "token").read_text().strip()
        self._used = -math.inf  # monotonic
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """One call; raises what the daemon refused."""
        if time.monotonic() - self._used > KEPT_SECONDS:
            await self.close()
            self._reader, self._writer = await asyncio.open_unix_connection(self._socket)
        assert self._reader is not None
        assert self._writer is not None
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {self._token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self._writer.write(head.encode() + content)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next(int(line[16:]) for line in lines if line.startswith("content-length: "))
        answer: Json = json.loads(await self._reader.readexactly(length))
        self._used = time.monotonic()
        if not lines[0].startswith("http/1.1 2"):
            raise RuntimeError(f"{lines[0]}: {answer}")
        return answer

    async def submit(self, operation: str, payload: Json, **options: Any) -> str:
        """The id of a new request."""
        body = {"operation": operation, "payload": payload, **options}
        return str((await self.call("POST", "/v1/requests", body))["request_id"])

    async def wait(self, request_id: str) -> Json:
        """The request, once it is final."""
        while True:
            path = f"/v1/requests/{request_id}?wait_seconds={WAIT_SECONDS}"
            request: Json = (await self.call("GET", path))["request"]
            if request["state"] in FINAL:
                return request

    async def run(self, operation: str, payload: Json) -> Json:
        """Submit, and wait for the end."""
        return await self.wait(await self.submit(operation, payload))

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            await self._writer.wait_closed()
