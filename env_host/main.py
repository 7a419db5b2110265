# SPDX-License-Identifier: Apache-2.0
"""The env host's life: read the doors, load the environment, have it served, leave.

    read the doors ─▶ load ─┬─▶ `zygote.Host`, which forks the processes that serve
                            ├─▶ one of those, when it had to be started as a program
                            └─▶ the project's own app, as it is: one process, no shards

Nothing heavy is imported before the environment itself has been asked for, and a failure to start
is told twice: to the log for people, and through the notify pipe for whoever waits.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import logging
import os
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Never

from .environment import gradio_stub
from .errors import ConfigError, LoadError, ShardFailed, StartError
from .ipc.notify import Notifier
from .protocol import (
    CHILD_CONFIG_VARIABLE,
    EXIT_FAILED_TO_START,
    FAILURE_LOG_LINES,
    HOST_CONFIG_VARIABLE,
    LISTEN_FD_VARIABLE,
    NOTIFY_FD_VARIABLE,
    HostConfig,
    Serving,
)

if TYPE_CHECKING:
    from types import TracebackType

    from .environment.definition import Definition
    from .ipc.child_config import ChildConfig
    from .ipc.scoreboard import Scoreboard

# Files whose frames say nothing about an environment that does not import.
_NOT_THE_USERS = (__file__.removesuffix("main.py"), importlib.__file__, "<frozen ")
EXIT_SECONDS = 2.0  # for the interpreter's own end: atexit, threads of executors

log = logging.getLogger("openenvd.env_host")


@dataclass(frozen=True, slots=True)
class Doors:
    """What whoever started us gave us."""

    config: HostConfig
    notify_fd: int | None
    listen_fd: int | None
    orders: dict[str, Any] | None = None  # from a host, when we are one of its children


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
    orders = os.environ.pop(CHILD_CONFIG_VARIABLE, None)
    if orders is not None:
        return Doors(config, None, None, json.loads(orders))
    doors = Doors(config, _fd(NOTIFY_FD_VARIABLE), _fd(LISTEN_FD_VARIABLE))
    for fd in (doors.notify_fd, doors.listen_fd):
        if fd is not None:  # what the environment starts must not keep our socket open
            os.set_inheritable(fd, False)
    return doors


def _run(doors: Doors, notifier: Notifier) -> None:
    config = doors.config
    sys.path[:0] = config.import_paths
    if not config.serve_as_is and not gradio_stub.is_wanted():
        gradio_stub.keep_out()
    definition, app = None, None
    try:
        definition, app = _load(config)
    except LoadError as exc:
        if gradio_stub.was_missed(exc):
            _start_again_with_gradio(doors)
        raise
    if definition is None:
        _serve_as_it_is(doors, notifier, app)
    elif doors.orders is not None:
        _serve_as_ordered(config, definition, doors.orders)
    else:
        _host(doors, notifier, definition)


def _load(config: HostConfig) -> tuple[Definition | None, Any]:
    """What to serve: a definition, or an app that is served as it is."""
    if config.env_class is not None:
        from .environment.definition import definition_of_class

        return definition_of_class(config.env_class, config.name, config.import_paths), None
    from .environment.upstream_project import import_app, load_project

    if config.serve_as_is:
        return None, import_app(config.app_candidates)
    definition = load_project(config.app_candidates, config.name)
    if definition is None:
        return None, import_app(config.app_candidates)
    return definition, None


def _serve_as_it_is(doors: Doors, notifier: Notifier, app: Any) -> None:
    """One process and no shards: it may keep what it knows in memory."""
    from .serving.uvicorn_server import run_loop, serve

    serving = serve(
        app,
        _listener(doors.listen_fd),
        on_ready=lambda: notifier.ready(max_sessions=None, serving=Serving.AS_IS),
    )
    run_loop(serving, _exit_soon)


def _host(doors: Doors, notifier: Notifier, definition: Definition) -> None:
    """Be the parent of the processes that serve."""
    from .environment.plan import plan_of, supports_concurrency, this_machine
    from .shared_state.setup import shares_state
    from .startup import fd_limit
    from .startup.preload import preload
    from .supervisor.supervisor import Host

    preload()
    config = doors.config
    max_fds = fd_limit.raise_limit()
    is_concurrent, class_name = supports_concurrency(definition)
    machine = this_machine(config, max_fds)
    plan = plan_of(config, machine, is_concurrent=is_concurrent, class_name=class_name)
    if config.max_sessions is not None:
        fd_limit.warn_of_few(config.max_sessions, plan.max_sessions, max_fds, plan.shards)

    def serve_as(orders: ChildConfig, scoreboard: Scoreboard, head: bytes) -> Never:
        sys.exit(_serve_here(config, definition, orders, scoreboard, head))

    shared_class = definition.env_class if shares_state(definition.env_class) else None
    listener = _listener(doors.listen_fd)
    Host(config, plan, listener, notifier, serve_as, max_fds, shared_class).run()


def _serve_as_ordered(config: HostConfig, definition: Definition, told: dict[str, Any]) -> None:
    """A process that was started rather than forked: `programs.what_forbids_forking`."""
    from ..system.prctl import die_with_parent
    from .ipc.child_config import ChildConfig
    from .ipc.scoreboard import Scoreboard
    from .shared_state.process import STATE_ORDERS, serve_as_ordered
    from .startup import fd_limit

    if STATE_ORDERS in told:
        serve_as_ordered(definition.env_class, told[STATE_ORDERS])
    die_with_parent(os.getppid())
    fd_limit.raise_limit()
    head = base64.b64decode(told.pop("head"))
    orders = ChildConfig.from_json(told)
    for fd in orders.fds:
        os.set_inheritable(fd, False)
    scoreboard = Scoreboard(orders.scoreboard_fd, orders.shards, orders.rows - orders.shards)
    sys.exit(_serve_here(config, definition, orders, scoreboard, head))


def _serve_here(
    config: HostConfig,
    definition: Definition,
    orders: ChildConfig,
    scoreboard: Scoreboard,
    head: bytes,
) -> int:
    """Serve as one of the host's children; the exit code."""
    from ..system.descriptors import Message, send_message
    from .serving.uvicorn_server import run_loop
    from .shard.shard import run_process
    from .startup import gpus

    gpus.pin(orders.index, config.gpus)

    try:
        run_loop(run_process(config, definition, orders, scoreboard, head), _exit_soon)
    except SystemExit:  # uvicorn: the application's own start-up failed, and the log says how
        text = "the application failed to start (its lifespan ended with an error)"
        failed = {"failed": text, "log_tail": []}
    except Exception as exc:
        lines = _traceback(exc)
        failed = {"failed": f"{type(exc).__name__}: {exc}", "log_tail": lines[-FAILURE_LOG_LINES:]}
    else:
        return 0
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(orders.link_fd)) as link:
        send_message(link, Message(failed))
    return EXIT_FAILED_TO_START


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
    os.environ[gradio_stub.ALLOW_VARIABLE] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  ourselves again


def _fail(notifier: Notifier, message: str, cause: BaseException) -> int:
    notifier.failed(message, _evidence(message, cause)[-FAILURE_LOG_LINES:])
    return EXIT_FAILED_TO_START


def _evidence(message: str, cause: BaseException) -> list[str]:
    if isinstance(cause, ShardFailed):
        return cause.log_tail
    if isinstance(cause, StartError):  # the message tells all of it; the lines would be our own
        sys.stderr.write(f"{message}\n")
        return []
    return _traceback(cause)


def _traceback(cause: BaseException) -> list[str]:
    """To the log, and its lines; without those of ours that led there."""
    where = _users_part(cause.__traceback__)
    lines = "".join(traceback.format_exception(type(cause), cause, where)).splitlines()
    sys.stderr.write("\n".join([*lines, ""]))
    return lines


def _users_part(where: TracebackType | None) -> TracebackType | None:
    """From the first frame that is neither ours nor the import machinery's; all, if none is."""
    frame = where
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.tb_next
    return frame or where


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
