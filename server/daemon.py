# SPDX-License-Identifier: Apache-2.0
"""The daemon's life cycle: from an empty process to one that answers, and back.

    listening.py   the lock is taken: one daemon a home; the sockets are bound
    assembly.py    database, executor, dispatcher, reconciler: made and started
    listening.py   daemon.json is written, uvicorn answers, and the ready line says so
                   ... until SIGTERM, a vital thread's failure or the home's removal;
                   then the same backwards

One process, one event loop (uvloop) on the main thread.

A failure before the daemon answers is reported in one line through the ready pipe (`DaemonError`),
so that `openenv up` can show it; later failures are in `daemon.log`.

When the daemon stops, requests that still run are left RUNNING: the next daemon's recovery decides.
Their workers exit with the executor. Environments continue: their shims do not need the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import syslog
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import uvloop
from setproctitle import setproctitle

from .. import __version__
from ..environments import run_files
from ..executor.spawning.zygote import PreforkedZygote
from ..executor.supervisor.memory import sweep_cgroups
from ..schema.settings import Given, Paths, Settings
from ..system.files import installation
from ..system.memory.limits import is_no_room, no_room_text, read_limits
from ..system.text.terminals import write_to_terminals
from .api.app import create_app
from .api.dependencies import Dependencies
from .api.security import BrowserSessions, Guard
from .assembly import running_parts
from .dashboard.routes import add_dashboard
from .dispatch.memory_estimates import NO_PROCESSES_HINT
from .errors import DaemonError
from .housekeeping import collect_daily, environment_names, sweep_regularly
from .listening import HomeLock, bind, hold_lock, http_server, identity_of, write_identity

log = logging.getLogger(__name__)

LOOKS_GONE = 10  # in a row, until openenvd counts as uninstalled: an update takes seconds
HOME_SECONDS = 2.0  # between looks at whether the home is still there
VITAL_THREADS = frozenset({"dispatcher", "executor-supervisor"})


def run(
    paths: Paths,
    settings: Settings,
    ready_fd: int | None,
    zygote: PreforkedZygote | None = None,
    given: Mapping[str, Given] | None = None,
) -> int:
    """Run the daemon until it is stopped; returns the process's exit code.

    One line to `ready_fd` says that it answers, or why it does not. The zygote is that of the
    executor, when it was forked already; `given` are the settings that are not their defaults.
    """
    try:
        with (
            _no_processes_as_reason(),
            hold_lock(paths) as lock,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.get_loop().set_default_executor(_Threads())
            runner.run(Daemon(paths, settings, ready_fd, zygote, lock, given or {}).main())
    except DaemonError as exc:
        _write_ready_line(ready_fd, exc.to_json())
        log.error("%s%s", exc.message, f" ({exc.hint})" if exc.hint else "")
        return 1
    return 0


class _Threads(ThreadPoolExecutor):
    """Threads for which the end of the daemon does not wait: an engine may not answer them."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Begin no further call."""
        super().shutdown(wait=False, cancel_futures=True)


@dataclass(eq=False)
class Daemon:
    """One run: assemble, serve, stop."""

    paths: Paths
    settings: Settings
    ready_fd: int | None
    zygote: PreforkedZygote | None
    lock: HomeLock
    given: Mapping[str, Given] = field(default_factory=dict)
    stopping: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    async def main(self) -> None:
        """Run until stopped; a `DaemonError` says why it could not start."""
        setproctitle("openenvd: daemon")
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stopping.set)
        # The terminal that started the daemon may close; the daemon stays.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.watch_threads()
        tcp, unix = bind(self.paths, self.settings)
        identity = identity_of(self.paths, tcp, self.given)
        self.settings = replace(self.settings, port=identity["port"])
        try:
            with tcp, unix:
                async with running_parts(
                    self.paths, self.settings, read_limits(), identity, self.zygote, self.stopping
                ) as deps:
                    await self._serve(deps, [tcp, unix])
        finally:
            if not self.lock.is_anothers():
                for path in (self.paths.daemon_file, self.paths.socket):  # clients find us by these
                    with contextlib.suppress(OSError):  # the home may be unwritable by now
                        path.unlink()

    async def _serve(self, deps: Dependencies, sockets: list[socket.socket]) -> None:
        """Answer until the daemon is stopped; return when the last stream has ended."""
        token = write_identity(self.paths, deps.identity)
        sessions = BrowserSessions(token)
        app = create_app(deps)
        memory = add_dashboard(app, deps, sessions)
        server = http_server(Guard(app, token, sessions), self.settings)
        serving = asyncio.create_task(server.serve(sockets=sockets), name="uvicorn")
        _write_ready_line(self.ready_fd, {"ready": True, **deps.identity})
        log.info("openenvd %s answers at %s", __version__, deps.identity["address"])
        stopping = asyncio.create_task(self.stopping.wait())
        home = asyncio.create_task(self._watch_home())
        regular = [
            asyncio.create_task(collect_daily(self.paths, self.settings, deps.store)),
            asyncio.create_task(sweep_regularly(self.paths, sweep_cgroups)),
            asyncio.create_task(memory.measure_regularly()),
        ]
        await asyncio.wait([stopping, serving, home], return_when=asyncio.FIRST_COMPLETED)
        self.stopping.set()
        deps.bus.wake_all()  # streams end by themselves, before they would be cut
        server.request_exit()
        for task in (stopping, home, *regular):
            task.cancel()
        await serving

    def watch_threads(self) -> None:
        """Stop the daemon when a vital thread fails.

        Without one of them it would accept requests, and never run them. The next daemon counts
        what was running as an attempt, so that no request ends one daemon after the other.
        """
        loop = asyncio.get_running_loop()

        def died(args: threading.ExceptHookArgs) -> None:
            name = args.thread.name if args.thread is not None else "?"
            assert args.exc_value is not None
            log.critical("the thread %s failed", name, exc_info=args.exc_value)
            if name in VITAL_THREADS:
                with contextlib.suppress(RuntimeError):  # the loop has ended already
                    loop.call_soon_threadsafe(self.stopping.set)

        threading.excepthook = died

    async def _watch_home(self) -> None:
        """Return when the home was removed or moved; report once that openenvd was uninstalled.

        No client finds this daemon any more then, requests would be lost with the folder, and the
        port is in the next daemon's way.
        """
        looks_gone = 0
        while self.lock.is_ours():  # no event tells of it on every system
            await asyncio.sleep(HOME_SECONDS)
            looks_gone = looks_gone + 1 if installation.is_removed() else 0
            if looks_gone == LOOKS_GONE:
                await asyncio.to_thread(self._report_uninstalled)
        text = f"the state folder {self.paths.home} was removed; the daemon exits"
        log.critical("%s", text)
        syslog.syslog(syslog.LOG_CRIT, f"openenvd: {text}")  # our own log went with the folder

    def _report_uninstalled(self) -> None:
        """Report what still runs in the log, and on the user's terminals, since no command can."""
        found = environment_names(*run_files.look(self.paths.runs))
        names = ", ".join(sorted(found)) or "none"
        text = (
            f"openenvd was uninstalled, and still runs: daemon (pid {os.getpid()}), environments: "
            f"{names}\n  to end and forget all of it: rm -r {shlex.quote(str(self.paths.home))}"
            "\n  or install it again, then: openenv down --all && openenv stop"
        )
        log.critical("%s", text)
        write_to_terminals(f"\n{text}\n")


@contextmanager
def _no_processes_as_reason() -> Iterator[None]:
    """A refused process or thread, or what follows from that, is a reason not to start."""
    try:
        yield
    except (RuntimeError, OSError) as exc:
        cause: BaseException | None = exc
        while cause is not None and not is_no_room(cause):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise DaemonError("no_processes", no_room_text(), NO_PROCESSES_HINT) from exc


def _write_ready_line(ready_fd: int | None, line: dict[str, Any]) -> None:
    """Report how the start went, once, to the process that waits for it."""
    if ready_fd is None:
        return
    with contextlib.suppress(OSError):  # the starter may have gone
        os.write(ready_fd, json.dumps(line).encode() + b"\n")
        os.close(ready_fd)
