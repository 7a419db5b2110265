# SPDX-License-Identifier: Apache-2.0
"""`StateProcess`: the process that holds the shared state, as its supervisor sees it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, Never

from ...system.process import forking
from ...system.process.backoff import RestartSchedule
from ...system.process.proc import reap
from ...system.process.signal_pipe import take_over
from ...system.text.json_lines import decode_line, encode_line
from ..environment.definition import is_bundled
from ..errors import StartError
from ..event_loop import run_loop
from .connection import socket_name
from .server import StateConnection, StateServer

BACKLOG = 128  # shards that connect at the same time
STOP_SECONDS = 3.0  # between SIGTERM and SIGKILL
WATCH_SECONDS = 1.0  # how often it checks that its supervisor is alive

EXIT_STATE_FAILED = 4  # `create_state` raised
STATE_CONFIG = "shared_state"  # the key of a `StateConfig` in the values of a started process

_NO_ANSWER = encode_line({"failed": "it ended before it was ready"})

Spawn = Callable[[dict[str, Any], tuple[int, ...]], int]  # its values and descriptors: its pid

log = logging.getLogger("openenvd.env_host")


class StateConfig(NamedTuple):
    """The configuration of a state process."""

    epoch: int
    supervisor_pid: int
    listen_fd: int
    ready_fd: int


class StateProcess:
    """The state process of one supervisor, which is single-threaded."""

    def __init__(
        self,
        env_class: Any,
        fds_to_close: Callable[[], Iterable[int]] = tuple,
        spawn: Spawn | None = None,
    ) -> None:
        """Listen on a socket to which only this user may connect.

        The process comes with `start`, and must not keep `fds_to_close()`. `spawn` starts it as a
        program, where a fork is not safe.
        """
        self._env_class = env_class
        self._fds_to_close = fds_to_close
        self._spawn = spawn
        self._folder: str | None = None
        if sys.platform == "linux":  # a name without a file: nothing is left after a SIGKILL
            self.address = f"@openenvd-world-{secrets.token_hex(16)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="oe-world-")  # 0700
            self.address = f"{self._folder}/state"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_name(self.address))
        self._listener.listen(BACKLOG)
        self.listen_fd = self._listener.fileno()  # which children must not keep
        self.restarts = RestartSchedule()  # of one, whose index is 0
        self.epoch = 0
        self.pid: int | None = None

    def start(self, *, wait: bool = True) -> None:
        """Start the next one; with `wait`, return when it is ready or raise `StartError`."""
        assert self.pid is None
        self.epoch += 1
        self.restarts.cancel()
        self._started_at = time.monotonic()
        reading, writing = os.pipe()
        config = StateConfig(self.epoch, os.getpid(), self.listen_fd, writing)
        if self._spawn is not None:
            self.pid = self._spawn({STATE_CONFIG: config._asdict()}, (self.listen_fd, writing))
        elif (pid := os.fork()) == 0:
            os.close(reading)
            _become(self._env_class, config, {*self._fds_to_close()} - {self.listen_fd})
        else:
            self.pid = pid
        os.close(writing)
        with open(reading, "rb") as pipe:
            answer = decode_line(pipe.readline() or _NO_ANSWER) if wait else {}
        if "failed" in answer:
            self.stop()
            raise StartError(f"the shared state could not be created: {answer['failed']}")

    def reap(self) -> dict[str, Any] | None:
        """Return the facts of its exit, if it has exited, as in `shard_exit`; schedule the next."""
        if self.pid is None:
            return None
        ended, status, usage = reap(self.pid)
        if not ended:
            return None
        self.pid = None
        now = time.monotonic()
        seconds = round(now - self._started_at, 3)
        self.restarts.exited(0, seconds=seconds, now=now)
        facts = {"shard": None, "shared_state": True, "pid": ended, "generation": self.epoch}
        peak_bytes = usage.ru_maxrss * 1024
        return facts | {"wait_status": status, "seconds": seconds, "peak_bytes": peak_bytes}

    def start_if_due(self) -> None:
        """Start the next process, if one is due, however often one has exited early."""
        if self.restarts.take_due(time.monotonic()):
            try:
                self.start(wait=False)
            except OSError as exc:  # no room for a process: the supervisor continues
                self.restarts.could_not_start(0, time.monotonic())
                log.warning("the shared state has no process yet: %s", exc)

    def stop(self) -> None:
        """Stop the process, and remove the socket; returns when it has exited. Idempotent."""
        self.restarts.cancel()
        if self.pid is not None:
            self._stop_process(self.pid)
            self.pid = None
        self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _stop_process(self, pid: int) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGTERM)
            while not os.waitpid(pid, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.005)


def serve_as_program(env_class: Any, values: dict[str, Any]) -> Never:
    """Be the state process of a supervisor that could not fork; `values` is what `spawn` got."""
    config = StateConfig(**values)
    for fd in (config.listen_fd, config.ready_fd):
        os.set_inheritable(fd, False)
    _become(env_class, config, ())


def _become(env_class: Any, config: StateConfig, to_close: Iterable[int]) -> Never:
    """Serve, then exit: nothing of the supervisor's may run in its child."""
    try:
        gc.freeze()  # the supervisor's objects must not be finalized here
        forking.leave_parent(config.supervisor_pid, f"state {env_class.__name__}", to_close)
        # Ctrl-C reaches the supervisor, which then stops this process.
        take_over((signal.SIGINT,), lambda number: signal.signal(number, signal.SIG_IGN))
        try:
            if (create := getattr(env_class, "create_state", None)) is None:
                raise StartError("a class with SHARED_STATE = True needs a create_state()")
            state = create()
        except BaseException as exc:
            _report(config.ready_fd, {"failed": f"{type(exc).__name__}: {exc}"})
            raise
        serving = _serve(state, config)
        run_loop(serving, lambda: _exit(0), has_project_code=not is_bundled(env_class))
    except BaseException:
        traceback.print_exc()
    _exit(EXIT_STATE_FAILED)


async def _serve(state: Any, config: StateConfig) -> None:
    """Serve until SIGTERM, or until the supervisor is gone."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    take_over((signal.SIGTERM,), lambda number: loop.add_signal_handler(number, asked.set))
    server, listener = StateServer(state, config.epoch), socket.socket(fileno=config.listen_fd)
    listener.setblocking(False)
    await loop.create_unix_server(lambda: StateConnection(server), sock=listener)
    _report(config.ready_fd, {"ready": True})
    os.close(config.ready_fd)
    while os.getppid() == config.supervisor_pid and not asked.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), WATCH_SECONDS)
    if close := getattr(state, "close", None):
        close()


def _exit(code: int) -> Never:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(fd: int, line: dict[str, Any]) -> None:
    with suppress(OSError):
        os.write(fd, encode_line(line))
