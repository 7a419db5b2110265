# SPDX-License-Identifier: Apache-2.0
"""Starts a real env host the way a shim does, and talks to it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from openenvd.schema import protocol

from .zygote import zygote

PROGRAM = Path(__file__).resolve().parents[2] / "env_host" / "__main__.py"
WAIT_SECONDS = 60.0
FORKS = sys.platform == "linux"

Json = dict[str, Any]


class Host:
    """One env host as a child process, with its notify pipe and its log."""

    def __init__(
        self,
        config: protocol.HostConfig,
        folder: Path,
        *,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        listener: socket.socket | None = None,
        gate_fd: int | None = None,
    ) -> None:
        """Start it; it is forked from a zygote unless its Python is given."""
        self.log = folder / "host.log"
        self._listener = socket.create_server(("127.0.0.1", 0)) if listener is None else listener
        self.port: int = self._listener.getsockname()[1]
        self._notify, writing = os.pipe()
        self._buffer = b""
        doors = {
            protocol.LISTEN_FD_VARIABLE: self._listener.fileno(),
            protocol.NOTIFY_FD_VARIABLE: writing,
        }
        doors |= {} if gate_fd is None else {protocol.GATE_FD_VARIABLE: gate_fd}
        told = {protocol.HOST_CONFIG_VARIABLE: json.dumps(config.to_json())}
        environ = {**os.environ, **told, **(env or {})}
        argv = [python or sys.executable, "-P", str(PROGRAM)]
        self.process: subprocess.Popen[bytes]
        with self.log.open("wb") as log:
            if python is None and FORKS:
                self.process = zygote().fork(argv, environ, doors, log, folder)
            else:
                self.process = subprocess.Popen(
                    argv,
                    env=environ | {name: str(fd) for name, fd in doors.items()},
                    pass_fds=tuple(doors.values()),
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        os.close(writing)
        self._listener.close()

    def note(self) -> Json | None:
        """The next line of the notify pipe; None at its end."""
        deadline = time.monotonic() + WAIT_SECONDS
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            assert select.select([self._notify], [], [], max(left, 0))[0], self.log.read_text()
            if not (data := os.read(self._notify, 65536)):
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        note: Json = json.loads(line)
        return note

    def note_that(self, **wanted: Any) -> Json:
        """The next note that contains `wanted`; fails when there will be none."""
        return self._note(wanted, lambda note: wanted.items() <= note.items())

    def note_that_has(self, key: str) -> Any:
        """What the next note says of `key`; fails when there will be none."""
        return self._note(key, lambda note: key in note)[key]

    def _note(self, wanted: object, is_wanted: Callable[[Json], bool]) -> Json:
        while (note := self.note()) is not None:
            if is_wanted(note):
                return note
        raise AssertionError(f"no note {wanted}: {self.log.read_text()}")

    def emptied(self) -> None:
        """Wait until every session has ended.

        The notes of the number do not tell: one that has changed back before the host looked, as
        on a busy machine, is not told.
        """
        self.until(lambda capacity: not capacity["sessions"])

    def until(self, is_so: Callable[[Json], bool]) -> None:
        """Look at `/capacity`, which any shard answers, for as long as one waits for anything."""
        until(lambda: is_so(self.http("GET", "/capacity")[1]))

    def ready(self) -> Json:
        """Wait until it accepts sessions."""
        return self.note_that(ready=True)

    def open(self, path: str = "/ws", **named: Any) -> Client:
        """A new connection; `named` is for `websockets.sync.client.connect`."""
        return Client(f"ws://127.0.0.1:{self.port}{path}", self, **named)

    def http(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and decoded body of one HTTP request; text and bytes are sent as they are."""
        data = body.encode() if isinstance(body, str) else body
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        request = Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else data,
            headers={"content-type": "application/json"},
        )
        try:
            with urlopen(request, timeout=WAIT_SECONDS) as response:
                return response.status, _decoded(response.read())
        except HTTPError as exc:
            with exc:
                return exc.code, _decoded(exc.read())

    def rpc(self, method: str, **params: Any) -> Json:
        """The answer to one JSON-RPC request, which has a connection of its own."""
        body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
        status, answer = self.http("POST", "/mcp", body)
        assert (status, answer["id"]) == (200, 7), answer
        return dict(answer)

    def create_session(self) -> str:
        """The id of a session that is begun over HTTP."""
        return str(self.rpc("openenv/session/create")["result"]["session_id"])

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_SECONDS)
        os.close(self._notify)


class Client:
    """One WebSocket client that sends JSON, or any frame."""

    connection: ClientConnection

    def __init__(self, url: str, host: Host | None = None, **named: Any) -> None:
        self._host = host  # a failure shows its exit status and its last output
        self._open = connect(url, **{"max_size": None, "open_timeout": WAIT_SECONDS, **named})

    def __enter__(self) -> Client:
        self.connection = self._open.__enter__()
        return self

    def __exit__(self, _: object, failure: BaseException | None, __: object) -> None:
        self.connection.close()
        if failure is not None and self._host is not None:
            if isinstance(failure, ConnectionClosed):  # its exit may not be complete yet
                with suppress(subprocess.TimeoutExpired):
                    self._host.process.wait(1)
            lines = self._host.log.read_text(errors="replace").splitlines()[-10:]
            exited = f"the host's exit status: {self._host.process.poll()}; its last output:"
            failure.add_note("\n".join([exited, *lines]))

    def send(self, kind: str, data: Any = None) -> None:
        message = {"type": kind} if data is None else {"type": kind, "data": data}
        self.connection.send(json.dumps(message))

    def receive(self) -> Json:
        frame: Json = json.loads(self.connection.recv(WAIT_SECONDS))
        return frame

    def ask(self, kind: str, data: Any = None) -> Json:
        self.send(kind, data)
        return self.receive()

    def step(self, what: str, gate: str = "") -> str:
        """The text that a step of an environment in `samples.py` is answered with."""
        answer = self.ask("step", {"what": what, "gate": gate})
        assert answer["type"] == "observation", answer
        return str(answer["data"]["observation"]["text"])

    def pid(self) -> int:
        return int(self.step("pid"))

    def last_word(self) -> tuple[Json, int]:
        """What the client is told, and the code of the close that follows."""
        answer = self.receive()
        return answer, self.close_code()

    def close_code(self) -> int:
        try:
            frame = self.receive()
        except ConnectionClosed as exc:
            return exc.rcvd.code if exc.rcvd else 1006
        raise AssertionError(frame)

    def leave(self) -> None:
        """End the session by a message, and wait for the close."""
        self.send("close")
        self.close_code()

    def say(self, text: str | bytes) -> Json:
        self.connection.send(text)
        return self.receive()


def wait_until_exited(processes: Iterable[psutil.Process]) -> None:
    """Wait until every process has exited, whether or not its parent has reaped it.

    The children of a killed host become those of PID 1, and some init processes (in containers
    and virtual machines) reap only every second or two.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    left = list(processes)
    while left := [process for process in left if not _has_exited(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def _has_exited(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()


def until(is_so: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@contextmanager
def serving(config: protocol.HostConfig, folder: Path, **where: Any) -> Iterator[Host]:
    """A host that is ready; it must end as it is asked to."""
    host = Host(config, folder, **where)
    try:
        host.ready()
        yield host
        assert host.stop() == 0, host.log.read_text()
    finally:
        host.close()


@contextmanager
def uvicorn_serving(app: str, folder: Path, python: str = sys.executable) -> Iterator[int]:
    """The port at which uvicorn serves `app:app` of a folder, as upstream does it.

    Its socket is open already, so that nothing waits by polling.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        (folder / f"uvicorn-{app}.log").open("wb") as log,
    ):
        options = ["--fd", str(listener.fileno()), "--log-level", "error"]
        process = subprocess.Popen(
            [python, "-m", "uvicorn", f"{app}:app", *options],
            cwd=folder,
            pass_fds=[listener.fileno()],
            stdout=log,
            stderr=log,
        )
        try:
            yield listener.getsockname()[1]
        finally:
            process.kill()
            process.wait(WAIT_SECONDS)


def python_with_few_descriptors(folder: Path, limit: int) -> str:
    python = folder / "python-with-few-descriptors"
    python.write_text(f'#!/bin/sh\nulimit -n {limit}\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    return str(python)
