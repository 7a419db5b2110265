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
import importlib
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
from dataclasses import asdict, dataclass
from typing import Any, Never

from ...system import forking
from ...system.backoff import backoff_seconds
from ...system.json_lines import decode_line, encode_line
from ...system.proc import exit_sentence
from ..startup.event_loop import run_loop
from .connection import socket_name
from .errors import StateFailed
from .frames import DEFAULT_LIMITS, Limits
from .server import StateServer

BACKLOG = 128  # shards that connect at the same time
READY_SECONDS = 60.0  # for `create_state`
STOP_SECONDS = 3.0  # between SIGTERM and SIGKILL
WATCH_SECONDS = 1.0  # how often it checks that its supervisor is alive
LONG_LIFE_SECONDS = 10.0  # after such a life the next is started at once
FIRST_DELAY_SECONDS = 0.1
MAX_DELAY_SECONDS = 5.0

EXIT_STATE_FAILED = 4  # `create_state` raised
STATE_CONFIG = "shared_state"  # the key of a `StateOrders` in what a started process is values

Spawn = Callable[[dict[str, Any], tuple[int, ...]], int]  # what it is values, descriptors: its pid

log = logging.getLogger("openenvd.env_host")


@dataclass(frozen=True, slots=True)
class StateConfig:
    """The configuration of a state process."""

    epoch: int
    supervisor_pid: int
    listen_fd: int
    ready_fd: int
    greeting_seconds: float


@dataclass(frozen=True, slots=True)
class StateExit:
    """How a state process ended."""

    pid: int
    epoch: int
    wait_status: int
    seconds: float
    restart_in_seconds: float
    peak_bytes: int | None = None

    @property
    def sentence(self) -> str:
        """The exit as a sentence for people."""
        return (
            f"the process that held the shared state (pid {self.pid}, epoch {self.epoch}) "
            f"{exit_sentence(self.wait_status)} after {self.seconds:.1f} s; its sessions have ended"
        )


def restart_delay_seconds(seconds: float, early_exits: int) -> float:
    """Return how long to wait before the next start, after so many early exits in a row."""
    failures = 0 if seconds >= LONG_LIFE_SECONDS else early_exits - 1
    return backoff_seconds(failures, first=FIRST_DELAY_SECONDS, longest=MAX_DELAY_SECONDS)


class StateProcess:
    """The state process of one supervisor, which is single-threaded."""

    def __init__(
        self,
        env_class: Any,
        fds_to_close: Callable[[], Iterable[int]] = tuple,
        spawn: Spawn | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._env_class = env_class
        self._fds_to_close = fds_to_close
        self._spawn = spawn
        self._limits = limits
        with suppress(ImportError):
            importlib.import_module("uvloop")  # before a fork: to load a library is not for after
        self._folder: str | None = None
        if sys.platform == "linux":  # a name without a file: nothing is left after a SIGKILL
            self.address = f"@openenvd-world-{secrets.token_hex(16)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="oe-world-")  # 0700
            self.address = f"{self._folder}/state"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_name(self.address))
        self._listener.listen(BACKLOG)
        self._started_at = 0.0
        self._early_exits = 0
        self.epoch = 0
        self.pid: int | None = None
        self.due: float | None = None  # when the next one is to be started

    @property
    def listen_fd(self) -> int:
        """The listening socket, which children must not keep."""
        return self._listener.fileno()

    def start(self, *, wait: bool = True) -> None:
        """Start the next one; with `wait`, return when it is ready or raise `StateFailed`."""
        assert self.pid is None
        self.epoch += 1
        self.due = None
        self._started_at = time.monotonic()
        reading, writing = os.pipe()
        config = StateConfig(
            self.epoch, os.getpid(), self._listener.fileno(), writing, self._limits.greeting_seconds
        )
        if self._spawn is not None:
            self.pid = self._spawn({STATE_CONFIG: asdict(config)}, (config.listen_fd, writing))
        elif (pid := forking.fork()) == 0:
            os.close(reading)
            _become(self._env_class, config, {*self._fds_to_close()} - {config.listen_fd})
        else:
            self.pid = pid
        os.close(writing)
        try:
            if wait:
                self._wait_until_ready(reading)
        finally:
            os.close(reading)

    def reap(self) -> StateExit | None:
        """Return how the process exited, if it has; `due` says when the next is to be started."""
        if self.pid is None:
            return None
        ended, status, usage = os.wait4(self.pid, os.WNOHANG)
        return self.record_exit(status, usage.ru_maxrss * 1024) if ended else None

    def start_if_due(self) -> None:
        """Start the next process, if one is due, without waiting until it is ready."""
        if self.due is not None and time.monotonic() >= self.due:
            try:
                self.start(wait=False)
            except OSError as exc:  # no room for a process: the supervisor goes on
                self.due = time.monotonic() + MAX_DELAY_SECONDS
                log.warning("the shared state has no process yet: %s", exc)

    def record_exit(self, status: int, peak_bytes: int | None = None) -> StateExit:
        """Record the exit that `waitpid` reported, and when the next start is due."""
        assert self.pid is not None
        lived = time.monotonic() - self._started_at
        self._early_exits = 0 if lived >= LONG_LIFE_SECONDS else self._early_exits + 1
        found = StateExit(
            pid=self.pid,
            epoch=self.epoch,
            wait_status=status,
            seconds=round(lived, 3),
            restart_in_seconds=restart_delay_seconds(lived, self._early_exits),
            peak_bytes=peak_bytes,
        )
        self.pid = None
        self.due = time.monotonic() + found.restart_in_seconds
        return found

    def stop(self) -> None:
        """Stop the process, and remove the socket; returns when it has exited. Idempotent."""
        self.due = None
        if self.pid is not None:
            _stop(self.pid)
            self.pid = None
        self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_until_ready(self, reading: int) -> None:
        with open(reading, "rb", closefd=False) as pipe:
            said = pipe.readline()
        answer = decode_line(said) if said else {"failed": "it ended before it was ready"}
        if "failed" in answer:
            self.stop()
            raise StateFailed(f"the shared state could not be created: {answer['failed']}")


def shares_state(env_class: Any) -> bool:
    """Return whether the sessions of a class share a state."""
    return bool(getattr(env_class, "SHARED_STATE", False))


def start_state_process(
    env_class: Any,
    fds_to_close: Callable[[], Iterable[int]] = tuple,
    spawn: Spawn | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> StateProcess:
    """Start the state process before the shards; raises `StateFailed` if it does not get ready.

    It must not keep `fds_to_close()`. `spawn` starts it as a program, where a fork is not safe.
    """
    process = StateProcess(env_class, fds_to_close, spawn, limits)
    process.start()
    return process


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
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            state = create_state(env_class)
        except BaseException as exc:
            _report(config.ready_fd, {"failed": f"{type(exc).__name__}: {exc}"})
            raise
        run_loop(_serve(state, config), lambda: _exit(0))
    except BaseException:
        traceback.print_exc()
    _exit(EXIT_STATE_FAILED)


async def _serve(state: Any, config: StateConfig) -> None:
    """Serve until SIGTERM, or until the supervisor is gone."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    listener = socket.socket(fileno=config.listen_fd)
    StateServer(state, config.epoch, config.greeting_seconds).listen(listener)
    _report(config.ready_fd, {"ready": True})
    os.close(config.ready_fd)
    while os.getppid() == config.supervisor_pid and not asked.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), WATCH_SECONDS)
    if close := getattr(state, "close", None):
        close()


def create_state(env_class: Any) -> Any:
    """Return what `create_state()` returns; raises `StateFailed` if the class has none."""
    create = getattr(env_class, "create_state", None)
    if create is None:
        name = getattr(env_class, "__name__", str(env_class))
        raise StateFailed(f"{name} declares SHARED_STATE = True but has no create_state()")
    return create()


def _exit(code: int) -> Never:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(fd: int, line: dict[str, Any]) -> None:
    with suppress(OSError):
        os.write(fd, encode_line(line))


def _stop(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    with suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return
            time.sleep(0.005)
