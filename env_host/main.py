# SPDX-License-Identifier: Apache-2.0
"""The env host's life: read its configuration, load the environment, serve it, exit.

    read configuration ─▶ load ─┬─▶ `Supervisor`, which forks the processes that serve
                                ├─▶ one of these processes, if it was started as a program
                                └─▶ the project's own app, as it is: one process, no shards

All code that serves is imported before the environment, because the environment's folder then
comes first on the path, and may have a `queue.py` or a folder `uvicorn`. A failure to start is
reported twice: in the log for people, and through the notify pipe for the waiting process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from ..schema import protocol
from ..schema.protocol import HostConfig
from ..system.net.listening_sockets import listening, open_listening_sockets, sockets_of
from ..system.process.proc import raise_fd_limit
from ..system.process.signal_pipe import take_over
from .environment import deferred_imports
from .errors import ConfigError, ShardFailed, StartError
from .ipc.reports import Notifier
from .startup import contained_import, no_collections, write_bytecode_below

if TYPE_CHECKING:
    from collections.abc import Callable

    from .environment.definition import Definition
    from .ipc.scoreboard import Scoreboard
    from .startup import ChildConfig

_PACKAGE = str(Path(__file__).resolve().parent.parent)
# Files whose stack frames do not explain why an environment cannot be imported.
_NOT_THE_USERS = (__file__.removesuffix("main.py"), importlib.__file__, "<frozen ")
EXIT_SECONDS = 2.0  # for the interpreter's own end: atexit, threads of executors

log = logging.getLogger("openenvd.env_host")


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs from the process that started this one."""

    config: HostConfig
    listeners: list[socket.socket]
    barrier_fd: int | None = None
    child: dict[str, Any] | None = None  # from the supervisor, when this is one of its children


def main() -> int:
    """Serve until asked to stop; returns the exit code."""
    notifier = Notifier(None)
    try:
        _log_to_stderr()
        notifier = Notifier(_fd(protocol.NOTIFY_FD_VARIABLE))
        inputs = read_inputs()
        _run(inputs, notifier)
    except StartError as exc:
        return _fail(notifier, str(exc), exc.__cause__ or exc)
    except KeyboardInterrupt:
        return 0
    except Exception as exc:
        return _fail(notifier, f"{type(exc).__name__}: {exc}", exc)
    return 0


def read_inputs() -> Inputs:
    """Read configuration and descriptors from the environment variables. Raises `ConfigError`."""
    text = os.environ.get(protocol.HOST_CONFIG_VARIABLE)
    if not text:
        starts = "`openenv launch` starts this program"
        raise ConfigError(f"{protocol.HOST_CONFIG_VARIABLE} is not set; {starts}")
    try:
        options = json.loads(os.environ.get(protocol.HOST_OPTIONS_VARIABLE) or "{}")
        config = HostConfig.from_json({**json.loads(text), **options})
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"{protocol.HOST_CONFIG_VARIABLE} is not a configuration: {exc}") from exc
    if not config.app_candidates and not config.env_class:
        raise ConfigError(f"{protocol.HOST_CONFIG_VARIABLE} names neither an app nor a class")
    if config.umask is not None:
        os.umask(config.umask)
    # Processes that the environment starts must not inherit the token.
    del os.environ[protocol.HOST_CONFIG_VARIABLE]
    os.environ.pop(protocol.HOST_OPTIONS_VARIABLE, None)
    child = os.environ.pop(protocol.CHILD_CONFIG_VARIABLE, None)
    if child is not None:
        return Inputs(config, [], child=json.loads(child))
    notify_fd, barrier_fd = _fd(protocol.NOTIFY_FD_VARIABLE), _fd(protocol.GATE_FD_VARIABLE)
    listeners = _listeners()
    for fd in (notify_fd, barrier_fd, *(one.fileno() for one in listeners)):
        if fd is not None:  # what the environment starts must not keep our sockets open
            os.set_inheritable(fd, False)
    return Inputs(config, listeners, barrier_fd)


def _run(inputs: Inputs, notifier: Notifier) -> None:
    config = inputs.config
    if config.venv is not None:
        # Another virtual environment may lie below the same folder.
        write_bytecode_below(str(Path(config.venv).parent), _PACKAGE)
    from . import preload

    preload.yield_names(config.import_paths)
    sys.path[:0] = config.import_paths
    fd_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not config.serve_as_is:
        deferred_imports.keep_gradio_out()
    newest = next(reversed(sys.modules))
    with no_collections(), contained_import():
        definition, app = _load(config, notifier.note)
    if definition is None:
        _serve_as_it_is(inputs, notifier, app)
        return
    preload.unpatch_children()
    if inputs.child is not None:
        _serve_as_program(config, definition, inputs.child)
    else:
        from .environment.source_analysis import differences_in

        if fd_limit == resource.getrlimit(resource.RLIMIT_NOFILE):  # else the environment set it
            raise_fd_limit()
        notifier.differences = differences_in(config.import_paths, newest)
        _supervise(inputs, notifier, definition)


def _load(config: HostConfig, note: Callable[[str], None]) -> tuple[Definition | None, Any]:
    """Return what to serve: a definition, or an app that is served as it is."""
    if config.env_class is not None:
        from .environment.definition import definition_of_class

        return definition_of_class(config.env_class, config.name, config.import_paths), None
    from .environment.upstream_project import import_app, load_project

    return (None, import_app(config, note)) if config.serve_as_is else load_project(config, note)


def _serve_as_it_is(inputs: Inputs, notifier: Notifier, app: Any) -> None:
    """Serve an app untouched: one process and no shards, since it may keep its state in memory."""
    from .environment.upstream_project import example_route, has_session_route
    from .event_loop import run_loop
    from .serving.own_app import AppAsItIs
    from .serving.uvicorn_server import serve

    served = AppAsItIs(app, example_route(app), has_session_route(app))

    def report_ready() -> None:
        for note in served.how.get("notes", ()):
            notifier.note(note)
        notifier.ready(max_sessions=None, **served.how)

    listeners = listening(inputs.listeners)
    serving = serve(served, listeners, inputs.config, on_ready=report_ready, report=notifier.report)
    run_loop(serving, _exit_soon, has_project_code=True)


def _supervise(inputs: Inputs, notifier: Notifier, definition: Definition) -> None:
    from .environment import plan as plans
    from .shard import session_process, shard  # noqa: F401  before a fork: children share them
    from .startup import note_on_few_fds
    from .supervisor.spawn import what_forbids_forking
    from .supervisor.supervisor import Supervisor

    # Children forked from now on are reaped, even if the environment ignores SIGCHLD.
    take_over((signal.SIGCHLD,), lambda number: signal.signal(number, signal.SIG_DFL))
    config = inputs.config
    max_fds, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    env_class = definition.env_class
    shared_class = env_class if getattr(env_class, "SHARED_STATE", False) else None
    is_tried = os.environ.pop(protocol.TRIAL_VARIABLE, None) is not None
    is_concurrent, class_name = plans.supports_concurrency(
        definition,
        notifier.sessions_fail,
        None if is_tried and not definition.has_own_hooks else plans.TRIAL_SECONDS,
        differs=notifier.differences.append,
        tries_class=is_tried and shared_class is None and what_forbids_forking() is None,
    )
    machine = plans.this_machine(config, max_fds)
    has_hooks = definition.has_own_hooks
    plan = plans.plan_of(
        config, machine, is_concurrent=is_concurrent, class_name=class_name, has_own_hooks=has_hooks
    )
    _ = definition.may_change_threads  # found out once, before shards are forked
    has_several = plan.shards > 1 or plan.isolates
    for sentence in notifier.differences if has_several else ():
        notifier.note(sentence)
    if has_hooks:
        notifier.note(plans.NOTE_ON_HOOKS)
    if plan.isolates and config.max_sessions is None and config.memory_bytes is not None:
        room = f"--memory leaves room for {plan.max_sessions} at a time"
        notifier.note(f"each session has a process of its own, and {room} (--max-sessions)")
    default = plan.max_sessions if plan.isolates else protocol.DEFAULT_SESSIONS
    wanted = 1 if plan.exclusive else config.max_sessions or default
    note = note_on_few_fds(wanted, plan.max_sessions, max_fds, plan.shards, 1 + plan.isolates)
    if note is not None:
        notifier.note(note)

    serve = functools.partial(_serve_as_child, config, definition)
    Supervisor(
        config, plan, inputs.listeners, notifier, serve, max_fds, shared_class, inputs.barrier_fd
    ).run()


def _serve_as_program(config: HostConfig, definition: Definition, child: dict[str, Any]) -> None:
    """Serve as a child that could not be forked (see `spawn.what_forbids_forking`)."""
    from ..system.process.prctl import die_with_parent
    from .ipc.scoreboard import Scoreboard
    from .shared_state.process import STATE_CONFIG, serve_as_program
    from .startup import ChildConfig

    if STATE_CONFIG in child:
        serve_as_program(definition.env_class, child[STATE_CONFIG])
    die_with_parent(os.getppid())
    own = ChildConfig(**child)
    for fd in own.fds:
        os.set_inheritable(fd, False)
    board = None if own.scoreboard_fd is None else Scoreboard(own.scoreboard_fd, own.shards)
    _serve_as_child(config, definition, own, board)


def _serve_as_child(
    config: HostConfig, definition: Definition, own: ChildConfig, scoreboard: Scoreboard | None
) -> Never:
    from ..system.process.descriptors import Message, send_message
    from .event_loop import run_loop
    from .startup import pin_gpu

    if scoreboard is None:
        _serve_session(definition, own, config.gpus or 0)
        _exit_soon()
        sys.exit(0)
    pin_gpu(own.index, config.gpus or 0)
    try:
        serving = _run_shard(config, definition, own, scoreboard)
        run_loop(serving, _exit_soon, has_project_code=definition.runs_on_loop)
    except StartError as exc:
        text, lines = str(exc), list[str]()
    except SystemExit:  # uvicorn: the application's own start-up failed, and the log says how
        text, lines = "the application failed to start (its lifespan ended with an error)", []
    except Exception as exc:
        text, lines = f"{type(exc).__name__}: {exc}", _traceback(exc)
    else:
        sys.exit(0)
    assert own.link_fd is not None
    failed = {"failed": text, "log_tail": lines[-protocol.FAILURE_LOG_LINES :]}
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(own.link_fd)) as link:
        send_message(link, Message(failed))
    sys.exit(protocol.EXIT_FAILED_TO_START)


def _serve_session(definition: Definition, own: ChildConfig, gpus: int) -> None:
    """Serve one session, or be a shard's template, until the shard ends this process."""
    from .shard.session_process import SessionProcess

    assert own.session_fd is not None
    end = socket.socket(fileno=own.session_fd)
    process = SessionProcess(definition, end, own.life_fd, own.state_address, gpus)
    process.serve(own.imported_fds)


async def _run_shard(
    config: HostConfig, definition: Definition, own: ChildConfig, scoreboard: Scoreboard
) -> None:
    from .shard.shard import Shard

    if own.state_address is None:
        await Shard(config, definition, own, scoreboard).run()
        return
    from .shared_state.connection import ProxyFactory, StateLink

    link = StateLink(own.state_address)
    shared = replace(definition, factory=ProxyFactory(definition.factory, link))
    process = Shard(config, shared, own, scoreboard)
    link.on_lost = process.on_state_lost
    try:
        await process.run()
    finally:
        await link.close()


def _listeners() -> list[socket.socket]:
    """Return the inherited sockets, or those of an address; by default, a port on loopback."""
    if text := os.environ.get(protocol.LISTEN_FD_VARIABLE):
        return sockets_of(text)
    default = f"{protocol.LOOPBACK}:{os.environ.get('PORT', 0)}"
    address = os.environ.get(protocol.LISTEN_ADDRESS_VARIABLE) or default
    host, _, port = address.rpartition(":")
    listeners = open_listening_sockets(host, int(port))
    log.warning("listening on http://%s:%d", host, listeners[0].getsockname()[1])
    return listeners


def _fd(variable: str) -> int | None:
    text = os.environ.get(variable)
    return int(text) if text else None


def _fail(notifier: Notifier, message: str, cause: BaseException) -> int:
    if isinstance(cause, ShardFailed):
        lines = cause.log_tail
    elif isinstance(cause, StartError):  # the message is complete; a traceback has only our frames
        sys.stderr.write(f"{message}\n")
        lines = []
    else:
        lines = _traceback(cause)
    notifier.report(failed=message, log_tail=lines[-protocol.FAILURE_LOG_LINES :])
    return protocol.EXIT_FAILED_TO_START


def _traceback(cause: BaseException) -> list[str]:
    """Log and return a traceback, without our frames and the import's if others remain."""
    frame = where = cause.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.tb_next
    if frame is None and isinstance(cause, SyntaxError):  # it names the file and line itself
        text = "".join(traceback.format_exception_only(cause))
    else:
        text = "".join(traceback.format_exception(type(cause), cause, frame or where))
    lines = text.splitlines()
    sys.stderr.write("\n".join([*lines, ""]))
    return lines


def _log_to_stderr() -> None:
    """Log our own and uvicorn's messages to stderr; leave the project's logging as it is."""
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
    from .sessions.threads import start_thread

    def exit_late() -> None:
        time.sleep(EXIT_SECONDS)
        os._exit(0)

    start_thread(exit_late)
