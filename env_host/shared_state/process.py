# SPDX-License-Identifier: Apache-2.0
"""`StateProcess`: the process that holds the shared state, as its supervisor sees it.

The supervisor has the listening socket, to which only its own user may connect, and forks the state
process to serve it. When that exits (`reap`), the supervisor forks the next (`start_if_due`) with
the next epoch; connects of the meantime wait in the socket's queue. A state process that exits
early again and again is restarted ever later, but never given up: without it there is no session.
"""

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
from dataclasses import dataclass
from typing import Any, NamedTuple, Never

from ...system import forking
from ...system.json_lines import decode_line, encode_line
from ...system.proc import exit_sentence, reap
from ...system.signal_pipe import take_over
from ..environment.definition import is_bundled
from ..event_loop import run_loop
from ..restart_backoff import RestartSchedule
from .connection import socket_name
from .errors import StateFailed
from .server import StateServer

BACKLOG = 128  # shards that connect at the same time
STOP_SECONDS = 3.0  # between SIGTERM and SIGKILL
WATCH_SECONDS = 1.0  # how often it checks that its supervisor is alive

EXIT_STATE_FAILED = 4  # `create_state` raised
STATE_CONFIG = "shared_state"  # the key of a `StateConfig` in what a started process is values

Spawn = Callable[[dict[str, Any], tuple[int, ...]], int]  # what it is values, descriptors: its pid

log = logging.getLogger("openenvd.env_host")


class StateConfig(NamedTuple):
    """The configuration of a state process."""

    epoch: int
    supervisor_pid: int
    listen_fd: int
    ready_fd: int


@dataclass(frozen=True, slots=True)
class StateExit:
    """How a state process ended."""

    pid: int
    epoch: int
    wait_status: int
    seconds: float
    peak_bytes: int

    @property
    def sentence(self) -> str:
        """The exit as a sentence for people."""
        return (
            f"the process that held the shared state (pid {self.pid}, epoch {self.epoch}) "
            f"{exit_sentence(self.wait_status)} after {self.seconds:.1f} s; its sessions have ended"
        )


class StateProcess:
    """The state process of one supervisor, which is single-threaded."""

    def __init__(
        self,
        env_class: Any,
        fds_to_close: Callable[[], Iterable[int]] = tuple,
        spawn: Spawn | None = None,
    ) -> None:
        """Listen; the process comes with `start`, and must not keep `fds_to_close()`.

        `spawn` starts it as a program, where a fork is not safe.
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
        self._started_at = 0.0
        self._restarts = RestartSchedule()  # of one, whose index is 0
        self.epoch = 0
        self.pid: int | None = None

    @property
    def due(self) -> float | None:
        """When the next one is to be started; None: there is one, or none is wanted."""
        return self._restarts.next_due()

    def start(self, *, wait: bool = True) -> None:
        """Start the next one; with `wait`, return when it is ready or raise `StateFailed`."""
        assert self.pid is None
        self.epoch += 1
        self._restarts.cancel()
        self._started_at = time.monotonic()
        reading, writing = os.pipe()
        config = StateConfig(self.epoch, os.getpid(), self.listen_fd, writing)
        if self._spawn is not None:
            self.pid = self._spawn({STATE_CONFIG: config._asdict()}, (config.listen_fd, writing))
        elif (pid := os.fork()) == 0:
            os.close(reading)
            _become(self._env_class, config, {*self._fds_to_close()} - {config.listen_fd})
        else:
            self.pid = pid
        os.close(writing)
        with open(reading, "rb") as pipe:
            if wait:
                self._wait_until_ready(pipe.readline())

    def reap(self) -> StateExit | None:
        """Return how the process exited, if it has; `due` says when the next is to be started."""
        if self.pid is None:
            return None
        ended, status, usage = reap(self.pid)
        if not ended:
            return None
        now = time.monotonic()
        lived = now - self._started_at
        self._restarts.exited(0, seconds=lived, now=now)
        self.pid = None
        return StateExit(ended, self.epoch, status, round(lived, 3), usage.ru_maxrss * 1024)

    def start_if_due(self) -> None:
        """Start the next process, if one is due, without waiting until it is ready."""
        if self._restarts.take_due(time.monotonic()):
            try:
                self.start(wait=False)
            except OSError as exc:  # no room for a process: the supervisor goes on
                self._restarts.could_not_start(0, time.monotonic())
                log.warning("the shared state has no process yet: %s", exc)

    def stop(self) -> None:
        """Stop the process, and remove the socket; returns when it has exited. Idempotent."""
        self._restarts.cancel()
        self._stop_process()
        self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _stop_process(self) -> None:
        """Send SIGTERM, and SIGKILL after `STOP_SECONDS`."""
        if (pid := self.pid) is None:
            return
        self.pid = None
        deadline = time.monotonic() + STOP_SECONDS
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGTERM)
            while not os.waitpid(pid, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.005)

    def _wait_until_ready(self, line: bytes) -> None:
        answer = decode_line(line) if line else {"failed": "it ended before it was ready"}
        if "failed" in answer:
            self.stop()
            raise StateFailed(f"the shared state could not be created: {answer['failed']}")


def shares_state(env_class: Any) -> bool:
    """Return whether the sessions of a class share a state."""
    return bool(getattr(env_class, "SHARED_STATE", False))


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
                raise StateFailed("a class with SHARED_STATE = True needs a create_state()")
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
    await StateServer(state, config.epoch).listen(socket.socket(fileno=config.listen_fd))
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
