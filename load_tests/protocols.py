# SPDX-License-Identifier: Apache-2.0
"""What a WebSocket protocol costs: bare echo servers on uvloop, one process each, side by side.

    python -m load_tests.protocols [--json FILE]

ours      `env_host.websocket.protocol` behind a door that reads the handshake
sansio    `websockets`' `ServerProtocol`, which uvicorn's sans-I/O protocol stands on as well
picows    `picows` on its own transport; `picows-uvloop`, on uvloop's

All answer with the same JSON by the same functions. A session connects, resets, steps once, closes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import psutil
import uvloop
from pydantic_core import from_json, to_json
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from load_tests.shared.report import Report, parse_arguments
from openenvd.env_host.protocol import MAX_MESSAGE_BYTES
from openenvd.env_host.websocket.handshake import END_OF_HEAD, acceptance, parse_upgrade
from openenvd.env_host.websocket.protocol import WebSocketProtocol
from openenvd.system.websocket import upgrade_request

BACKLOG = 4096
KINDS = ("ours", "sansio", "picows", "picows-uvloop")
CONNECTIONS = 2000
STEPS = ((64, 200), (64, 20_000), (4, 2_000_000))
SECONDS = 1.0


def answer(payload: bytes) -> bytes:
    """What every server says."""
    message = from_json(payload)
    size = message["data"].get("answer_bytes", 0)
    return to_json({"type": "observation", "data": {"payload": "x" * size}})


class Ours(WebSocketProtocol):
    """One connection."""

    __slots__ = ()

    def text_received(self, payload: bytes) -> None:
        self.send_text(answer(payload))

    def client_left(self) -> None:
        pass


class Door(asyncio.Protocol):
    """Reads the handshake, which comes in one piece here."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        end = data.index(END_OF_HEAD) + len(END_OF_HEAD)
        upgrade = parse_upgrade(data[:end])
        assert upgrade is not None
        protocol = Ours(asyncio.get_running_loop())
        protocol.connection_made(self._transport)
        self._transport.write(acceptance(upgrade))
        self._transport.set_protocol(protocol)
        if data[end:]:
            protocol.data_received(data[end:])


class SansIo(asyncio.Protocol):
    """One connection, on `websockets`."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._protocol = ServerProtocol(max_size=MAX_MESSAGE_BYTES)

    def data_received(self, data: bytes) -> None:
        protocol = self._protocol
        protocol.receive_data(data)
        for event in protocol.events_received():
            if isinstance(event, Request):
                protocol.send_response(protocol.accept(event))
            elif isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                protocol.send_text(answer(bytes(event.data)))
        self._transport.write(b"".join(protocol.data_to_send()))
        if protocol.close_expected():
            self._transport.close()


async def _picows(listener: socket.socket, *, own_transport: bool) -> Any:
    import picows

    class Listener(picows.WSListener):  # type: ignore[misc,unused-ignore]
        def on_ws_frame(self, transport: Any, frame: Any) -> None:
            if frame.msg_type == picows.WSMsgType.TEXT:
                transport.send(picows.WSMsgType.TEXT, answer(frame.get_payload_as_bytes()))
            elif frame.msg_type == picows.WSMsgType.CLOSE:
                transport.send_close(frame.get_close_code())
                transport.disconnect()

    return await picows.ws_create_server(
        lambda _: Listener(),
        sock=listener,
        backlog=BACKLOG,
        max_frame_size=MAX_MESSAGE_BYTES,
        read_buffer_init_size=2048,  # the least it takes
        use_aiofastnet=own_transport,
    )


async def serve(kind: str) -> None:
    """One server, until its standard input ends."""
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    factories: dict[str, Callable[[], asyncio.Protocol]] = {"ours": Door, "sansio": SansIo}
    if kind in factories:
        server = await loop.create_server(factories[kind], sock=listener, backlog=BACKLOG)
    else:
        server = await _picows(listener, own_transport=kind == "picows")
    print(listener.getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


class Server:
    """One of them, measured from outside."""

    def __init__(self, kind: str, process: subprocess.Popen[bytes], port: int) -> None:
        self.kind = kind
        self.port = port
        self._process = psutil.Process(process.pid)

    def cpu_seconds(self) -> float:
        return sum(self._process.cpu_times()[:2])

    def pss_bytes(self) -> int:
        return int(self._process.memory_full_info().pss)

    def clients(self, sessions: int, payload_bytes: int, *more: str) -> tuple[int, float]:
        """How many steps there were, and the server's CPU time of all."""
        before = self.cpu_seconds()
        command = [sys.executable, "-m", "load_tests.shared.step_clients", str(self.port)]
        command += [str(sessions), str(SECONDS), str(payload_bytes), *more]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        outcome = json.loads(done.stdout)
        if outcome["failed"]:
            raise SystemExit(f"{self.kind}: {outcome['first_failure']}")
        return len(outcome["latencies"]), self.cpu_seconds() - before

    def bytes_of_connection(self) -> float:
        """Of one that is idle after its handshake."""
        before = self.pss_bytes()
        with ExitStack() as stack:
            for _ in range(CONNECTIONS):
                address = ("127.0.0.1", self.port)
                connection = stack.enter_context(socket.create_connection(address))
                connection.sendall(upgrade_request("localhost", "/ws"))
                connection.recv(4096)
            return (self.pss_bytes() - before) / CONNECTIONS


@contextmanager
def started(kind: str) -> Iterator[Server]:
    """One server, with a few sessions behind it."""
    with subprocess.Popen(
        [sys.executable, "-m", "load_tests.protocols", "--serve", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ},
    ) as process:
        assert process.stdout is not None
        server = Server(kind, process, int(process.stdout.readline()))
        server.clients(16, 200, "--steps", "1")
        yield server


def measure(report: Report, repetitions: int) -> None:
    """All of them, in turns."""
    kinds = KINDS if find_spec("picows") else KINDS[:2]
    values: dict[tuple[str, str, str], list[float]] = {}

    def note(kind: str, name: str, unit: str, value: float) -> None:
        values.setdefault((name, kind, unit), []).append(value)

    for _ in range(repetitions):
        for kind in kinds:
            with started(kind) as server:  # memory first: nothing has been freed yet
                note(kind, "memory of a connection", "kB", server.bytes_of_connection() / 1e3)
                time.sleep(0.2)
                _, cpu = server.clients(CONNECTIONS, 0, "--steps", "1")
                note(kind, "CPU of a session", "us", cpu / CONNECTIONS * 1e6)
                for sessions, size in STEPS:
                    steps, cpu = server.clients(sessions, size)
                    note(kind, f"CPU of a step, {size} B each way", "us", cpu / steps * 1e6)
    for (name, kind, unit), found in sorted(values.items(), key=lambda item: item[0][0]):
        report.add(f"{name}: {kind}", unit, found)


def main() -> int:
    """Serve, when asked to; otherwise measure."""
    if sys.argv[1:2] == ["--serve"]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--serve", choices=KINDS)
        uvloop.run(serve(parser.parse_args().serve))
        return 0
    options = parse_arguments("What a WebSocket protocol costs.", 3)
    report = Report("Bare echo servers")
    measure(report, options.repetitions)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
