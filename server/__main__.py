# SPDX-License-Identifier: Apache-2.0
"""`python -m openenvd.server`: what `openenv up` starts.

First it closes every inherited descriptor, except the standard three and the ready
pipe: a daemon that holds its starter's pipe would keep `openenv up | cat` from ending.

Then it checks that it fits on this machine, and forks the zygote while it has one thread and has
imported only what operations need. After that it imports the daemon (`daemon.py`).

The daemon's own log has records as text, or as JSON: one object a line, with `time`, `level`,
`logger`, `message`, `request_id` and `environment`. In the background the daemon writes
`daemon.log` itself, and keeps it short; in the foreground it writes stderr. Uvicorn's records go to
the same place.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import types
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING

from setproctitle import getproctitle

from ..executor.spawning.source import FORK_IS_SAFE
from ..schema.protocol import UMASK_VARIABLE
from ..schema.settings import SETTINGS, Paths, Settings, flags_of_killed, given_settings
from ..system.net.traceparent import VARIABLE
from ..system.process.forking import close_all_but
from ..system.process.proc import prefer_own_session, set_oom_score_adj
from ..system.text.units import MB
from .errors import DaemonError

if TYPE_CHECKING:
    from ..executor.spawning.zygote import PreforkedZygote

MAX_LOG_BYTES = 8 * MB


def set_up_log(paths: Paths, settings: Settings, *, in_background: bool) -> None:
    """Send every record of this process to the daemon's log."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if in_background:
        with contextlib.suppress(OSError):  # `daemon.run` refuses to start: it needs the folder too
            handler = RotatingFileHandler(paths.daemon_log, maxBytes=MAX_LOG_BYTES, backupCount=1)
    formatter = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    if settings.log_format == "json":
        from pythonjsonlogger.core import RESERVED_ATTRS
        from pythonjsonlogger.orjson import OrjsonFormatter

        formatter = OrjsonFormatter(
            ["levelname", "name", "message"],
            rename_fields={"levelname": "level", "name": "logger"},
            reserved_attrs=[*RESERVED_ATTRS, "color_message"],  # uvicorn's, for terminals
            timestamp="time",
        )
    handler.setFormatter(formatter)
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    logging.captureWarnings(True)


# When the machine runs out of memory, workers (600) go first, then replicas (300); the daemon, and
# the zygote that inherits this, last. Lowering needs privilege; without, they stay at 0.
DAEMON_OOM_SCORE_ADJ = -500
# Of the daemon's session, relative to those of workers and replicas; 0 without the privilege.
DAEMON_NICE = -10


def main(arguments: list[str] | None = None) -> int:
    """Parse, detach from the starter, and run the daemon."""
    os.environ["SPT_NOENV"] = "1"  # or titles are written over the environment that `ps e` shows
    getproctitle()  # finds where titles are written; later the environment may have moved
    parser = argparse.ArgumentParser("openenvd.server", description="The openenvd daemon.")
    parser.add_argument("--ready-fd", type=int, help="write one line there when it answers")
    for item in SETTINGS:
        parser.add_argument(item.flag, type=item.kind, help=item.help)
    options = parser.parse_args(arguments)
    os.environ[UMASK_VARIABLE] = oct(os.umask(0o077))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # its starter may ignore it
    close_all_but(fd for fd in (options.ready_fd,) if fd is not None)
    try:
        paths = Paths.from_environment()
        # Flags override variables; a value that cannot be is a `ValueError`.
        set_here = [(s, flag) for s in SETTINGS if (flag := getattr(options, s.name)) is not None]
        flags = {setting.name: setting.check(flag) for setting, flag in set_here}
        given = given_settings(paths, flags_of_killed(paths) | flags)
        settings = Settings(**{name: each.value for name, each in given.items()})
    except ValueError as exc:
        error = DaemonError("invalid", str(exc), "openenv up --help shows every setting")
        return _refuse(options.ready_fd, error, code=2)
    os.environ["OPENENV_HOME"] = str(paths.home)
    for name in (VARIABLE, "TRACESTATE"):  # of the command that started us, not of what follows
        os.environ.pop(name, None)
    os.chdir("/")
    for item in SETTINGS:  # for the processes below
        if (value := getattr(settings, item.name)) is not None:
            os.environ[item.variable] = str(value)
    set_oom_score_adj(os.getpid(), DAEMON_OOM_SCORE_ADJ)
    if options.ready_fd is not None:  # in the background; in the foreground it is the user's
        prefer_own_session(DAEMON_NICE)
    gc.disable()  # imports make many objects, all of which stay: a collection would free nothing
    try:
        _check_floor(settings)
    except DaemonError as exc:
        return _refuse(options.ready_fd, exc, code=1)
    zygote = _fork_zygote(paths)
    # Only now: a worker's records belong into its request's log, not into the daemon's.
    set_up_log(paths, settings, in_background=options.ready_fd is not None)
    run = _import_daemon()
    gc.freeze()
    gc.enable()
    return run(paths, settings, options.ready_fd, zygote, given)


def _import_daemon() -> Callable[..., int]:
    """Import the daemon without what its libraries import and it never uses.

    FastAPI's forty models of OpenAPI are not built before they are requested, which saves 45 ms of
    a start and 1.3 MB. Pydantic's version 1, which no model uses, would take 1.5 MB; so would
    uvicorn's command line with click and multiprocessing.
    """
    from pydantic import BaseModel

    sys.modules["pydantic.v1"] = None  # type: ignore[assignment]  # FastAPI does without, then
    command_line = types.ModuleType("uvicorn.main")
    vars(command_line).update(Server=None, main=None, run=None)  # what `uvicorn` imports from it
    sys.modules["uvicorn.main"] = command_line
    BaseModel.model_config["defer_build"] = True
    try:
        from .daemon import run
    finally:
        del BaseModel.model_config["defer_build"]
        del sys.modules["uvicorn.main"]
    return run


def _fork_zygote(paths: Paths) -> PreforkedZygote | None:
    """Fork the zygote; None where a fork is not safe: the executor then starts workers itself."""
    if not FORK_IS_SAFE:
        return None
    from ..executor.spawning.zygote import prefork_zygote
    from .operations.registry import PRELOAD

    with contextlib.suppress(OSError):  # reported by `daemon.run`
        paths.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return prefork_zygote(PRELOAD, str(paths.home))
    return None


def _check_floor(settings: Settings) -> None:
    """Refuse to start without room; before the imports, where the kernel would kill the process."""
    from ..system.memory.limits import process_room, read_limits
    from .dispatch.memory_estimates import check_process_room, plan_for
    from .operations.registry import expected_bytes

    check_process_room(process_room())
    plan_for(read_limits(), settings, expected_bytes())


def _refuse(ready_fd: int | None, error: DaemonError, *, code: int) -> int:
    sys.stderr.write(f"{error.message}{f' ({error.hint})' if error.hint else ''}\n")
    if ready_fd is not None:
        os.write(ready_fd, json.dumps(error.to_json()).encode() + b"\n")
    return code


if __name__ == "__main__":
    code = main()
    atexit._run_exitfuncs()  # noqa: SLF001  no public name has them
    os._exit(code)  # threads may still wait for an engine that does not answer
