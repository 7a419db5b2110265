# SPDX-License-Identifier: Apache-2.0
"""The env host's life: read the doors, load the environment, serve it, leave.

Nothing heavy is imported before the environment itself has been asked for, and a failure to start
is told twice: to the log for people, and through the notify pipe for whoever waits.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import gradio_guard
from .errors import ConfigError, LoadError, SessionEnded, StartError
from .notify import Notifier
from .protocol import (
    EXIT_FAILED_TO_START,
    FAILURE_LOG_LINES,
    HOST_CONFIG_VARIABLE,
    LISTEN_FD_VARIABLE,
    NOTIFY_FD_VARIABLE,
    HostConfig,
    Serving,
)

if TYPE_CHECKING:
    from .definition import Definition
    from .sessions import SessionTable

GOING_AWAY_CLOSE = 1001
MIN_REAP_SECONDS = 1.0
EXIT_SECONDS = 2.0  # for the interpreter's own end: atexit, threads of executors

log = logging.getLogger("openenvd.env_host")


@dataclass(frozen=True, slots=True)
class Doors:
    """What whoever started us gave us."""

    config: HostConfig
    notify_fd: int | None
    listen_fd: int | None


def main() -> int:
    """Serve until told to stop; the exit code."""
    notifier = Notifier(None)
    try:
        _log_to_stderr()
        notifier = Notifier(_fd(NOTIFY_FD_VARIABLE))
        doors = read_doors()
        _run(doors, notifier)
    except StartError as exc:
        return _fail(notifier, str(exc), exc.__cause__ or exc)
    except KeyboardInterrupt:
        return 0
    except Exception as exc:
        return _fail(notifier, f"{type(exc).__name__}: {exc}", exc)
    return 0


def read_doors() -> Doors:
    """Configuration and descriptors from the environment.

    Raises:
        ConfigError: there is no configuration, or it is not one.
    """
    text = os.environ.get(HOST_CONFIG_VARIABLE)
    if not text:
        raise ConfigError(
            f"{HOST_CONFIG_VARIABLE} is not set; `openenv launch` starts this program"
        )
    try:
        config = HostConfig.from_json(json.loads(text))
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"{HOST_CONFIG_VARIABLE} is not a configuration: {exc}") from exc
    if not config.app_candidates and not config.env_class:
        raise ConfigError(f"{HOST_CONFIG_VARIABLE} names neither an app nor a class")
    doors = Doors(config, _fd(NOTIFY_FD_VARIABLE), _fd(LISTEN_FD_VARIABLE))
    for fd in (doors.notify_fd, doors.listen_fd):
        if fd is not None:  # what the environment starts must not keep our socket open
            os.set_inheritable(fd, False)
    return doors


def _run(doors: Doors, notifier: Notifier) -> None:
    config = doors.config
    sys.path[:0] = config.import_paths
    if not config.serve_as_is and not gradio_guard.is_wanted():
        gradio_guard.keep_out()
    definition, app = None, None
    try:
        definition, app = _load(config)
    except LoadError as exc:
        if gradio_guard.was_missed(exc):
            _start_again_with_gradio(doors)
        raise
    from .serve import run_loop

    run_loop(_serve(doors, notifier, definition, app), _exit_soon)


def _load(config: HostConfig) -> tuple[Definition | None, Any]:
    """What to serve: a definition, or an app that is served as it is."""
    if config.env_class is not None:
        from .definition import definition_of_class

        return definition_of_class(config.env_class, config.name), None
    from .project import import_app, load_project

    if config.serve_as_is:
        return None, import_app(config.app_candidates)
    definition = load_project(config.app_candidates, config.name)
    if definition is None:
        return None, import_app(config.app_candidates)
    return definition, None


async def _serve(doors: Doors, notifier: Notifier, definition: Definition | None, app: Any) -> None:
    from .serve import serve

    listener = _listener(doors.listen_fd)
    if definition is None:
        await serve(
            app,
            listener,
            on_ready=lambda: notifier.ready(max_sessions=None, serving=Serving.AS_IS),
            on_stop=_nothing,
        )
        return
    await _serve_sessions(doors.config, notifier, definition, listener)


async def _serve_sessions(
    config: HostConfig, notifier: Notifier, definition: Definition, listener: socket.socket
) -> None:
    from .asgi import HostApp
    from .limits import session_limit, supports_concurrency
    from .serve import serve
    from .sessions import NoHooks, SessionTable

    is_concurrent, name = await asyncio.to_thread(supports_concurrency, definition)
    limit = session_limit(config.max_sessions, is_concurrent=is_concurrent, class_name=name)
    hooks = NoHooks(notifier.sessions)
    table = SessionTable(definition, limit, exclusive=not is_concurrent, hooks=hooks)
    host = HostApp(
        definition,
        table,
        manifest=config.manifest,
        step_timeout_seconds=config.step_timeout_seconds,
    )
    idle_seconds = config.idle_timeout_seconds or definition.session_timeout_seconds
    reaper = asyncio.create_task(reap_idle(table, idle_seconds)) if idle_seconds else None
    stopping = SessionEnded("The environment is stopping.", GOING_AWAY_CLOSE)
    await serve(
        host,
        listener,
        on_ready=lambda: notifier.ready(max_sessions=limit, serving=Serving.SESSIONS),
        on_stop=lambda: table.stop(stopping),
    )
    if reaper is not None:
        reaper.cancel()


async def reap_idle(table: SessionTable, limit_seconds: float) -> None:
    """End sessions that nobody has used for `limit_seconds`, telling those who are connected."""
    loop = asyncio.get_running_loop()
    text = f"The session was idle for more than {limit_seconds:g} s."
    while True:
        await asyncio.sleep(max(limit_seconds / 4, MIN_REAP_SECONDS))
        for session in table.idle(loop.time(), limit_seconds):
            if session.socket is not None:
                session.socket.end(SessionEnded(text, GOING_AWAY_CLOSE))
            else:
                await table.close(session)


def _listener(fd: int | None) -> socket.socket:
    """The socket we were given; by hand, a free one on loopback."""
    if fd is not None:
        return socket.socket(fileno=fd)
    listener = socket.create_server(("127.0.0.1", int(os.environ.get("PORT", "0"))))
    log.warning("listening on http://127.0.0.1:%d", listener.getsockname()[1])
    return listener


def _fd(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return int(text)
    except ValueError as exc:
        raise ConfigError(f"{variable}={text!r} is not a file descriptor") from exc


def _start_again_with_gradio(doors: Doors) -> None:
    log.warning("this project imports gradio itself: starting again with it")
    for fd in (doors.notify_fd, doors.listen_fd):
        if fd is not None:
            os.set_inheritable(fd, True)
    os.environ[gradio_guard.ALLOW_VARIABLE] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  ourselves again


def _fail(notifier: Notifier, message: str, cause: BaseException) -> int:
    lines = "".join(traceback.format_exception(cause)).splitlines()
    sys.stderr.write("\n".join([*lines, ""]))
    notifier.failed(message, lines[-FAILURE_LOG_LINES:])
    return EXIT_FAILED_TO_START


def _log_to_stderr() -> None:
    """Our own and uvicorn's messages to the log; the project's logging stays its own."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)  # a killed process must not lose its last line
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("openenvd", "uvicorn"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
        logger.propagate = False


def _exit_soon() -> None:
    """Make sure that a call that never returns cannot keep the process from exiting."""
    timer = threading.Timer(EXIT_SECONDS, os._exit, (0,))
    timer.daemon = True
    timer.start()


async def _nothing() -> None:
    """Nothing to do before the server stops."""
