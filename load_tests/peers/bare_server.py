# SPDX-License-Identifier: Apache-2.0
"""The limit: OpenEnv's JSON protocol on `picows` and uvloop, and nothing else.

    python -m load_tests.peers.bare_server --port 9000 --processes 2

It has no environment, no validation, no limits, and no route but `/ws`: its cost is that of Python,
the event loop and the kernel. No server of environments can be faster; the figure that counts is
the ratio to this limit. Each process has a listening socket of its own (`SO_REUSEPORT`).
"""

import argparse
import asyncio
import itertools
import os
import socket
import time
from typing import Any

import orjson
import uvloop
from picows import WSCloseCode, WSFrame, WSListener, WSMsgType, WSTransport, ws_create_server

from openenvd.system.process.proc import raise_fd_limit

BACKLOG = 4096
HEAD_SECONDS = 30.0  # clients that open many connections send their heads late
_numbers = itertools.count()


class BareSession(WSListener):
    """One connection."""

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._hash = f"{os.getpid():x}-{next(_numbers):x}"
        self._step_count = 0
        self._is_open = True

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self._is_open = False

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if frame.msg_type == WSMsgType.CLOSE:
            transport.send_close(WSCloseCode.OK)
            transport.disconnect()
        elif frame.msg_type == WSMsgType.TEXT:
            self._answer(orjson.loads(frame.get_payload_as_memoryview()))

    def _answer(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "reset":
            self._see(0.0)
        elif kind == "step":
            self._step_count += 1
            data = message["data"]
            seconds, size = data.get("wait_seconds", 0.0), data.get("answer_bytes", 0)
            if seconds:
                self._loop.call_later(seconds, self._see, seconds, size)
            else:
                self._see(seconds, size)
        elif kind == "close":
            self._is_open = False

    def _see(self, waited_seconds: float, size: int = 0) -> None:
        if not self._is_open:
            return
        observation = {
            "waited_seconds": waited_seconds,
            "pid": os.getpid(),
            "session_hash": self._hash,
            "host_url": "bare",
            "step_count": self._step_count,
            "timestamp": time.time(),
            "payload": "x" * size,
        }
        data = {"observation": observation, "reward": None, "done": False}
        answer = orjson.dumps({"type": "observation", "data": data})
        self._transport.send(WSMsgType.TEXT, answer)


async def _serve(listener: socket.socket) -> None:
    server = await ws_create_server(
        lambda _: BareSession(),
        sock=listener,
        backlog=BACKLOG,
        websocket_handshake_timeout=HEAD_SECONDS,
    )
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="The bare server.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    raise_fd_limit()
    # All listen before a client connects: the kernel divides connections among listening sockets.
    listeners = [listen(options.port)]
    port = listeners[0].getsockname()[1]
    listeners += [listen(port) for _ in range(options.processes - 1)]
    mine = 0
    for number in range(1, options.processes):
        if os.fork() == 0:
            mine = number
            break
    for number, listener in enumerate(listeners):
        if number != mine:
            listener.close()
    if not mine:
        print(f"listening on {port}", flush=True)
    uvloop.run(_serve(listeners[mine]))


def listen(port: int) -> socket.socket:
    """Return a listening socket whose port several processes can share."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(BACKLOG)
    return listener


if __name__ == "__main__":
    main()
