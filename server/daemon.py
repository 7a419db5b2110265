# SPDX-License-Identifier: Apache-2.0
"""The daemon's life: from an empty process to one that answers, and back.

    lock ──▶ settings, limits, plan ──▶ database (migrate, recover) ──▶ executor, dispatcher
         ──▶ reconciler adopts replicas ──▶ sockets bound ──▶ daemon.json, ready line ──▶ serve
         ──▶ SIGTERM or POST /v1/stop ──▶ the same backwards

One process, one event loop (uvloop) on the main thread. The lock on `daemon.lock` is held for as
long as the process lives: whoever wants to know whether a daemon runs tries the lock, and never
trusts a pid alone.

What may go wrong before it answers is told in one line through the ready pipe (`DaemonError`), so
that `openenv up` can say it; what may go wrong later is in `daemon.log`.

When it stops, requests that still run are left RUNNING: the next daemon's recovery decides. Their
workers end with the executor. Environments go on: their shims do not know the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import syslog
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from setproctitle import setproctitle

from .. import __version__
from ..executor import (
    BurstableExecutor,
    FirstZygote,
    Plan,
    settle_leftovers,
    sweep_orphans,
)
from ..operations import registry
from ..processes.resources.limits import Limits, read_limits
from ..processes.resources.pids_limit import is_no_room, no_room_text
from ..requests_db.async_store import AsyncStore
from ..requests_db.dispatch_store import DispatchStore
from ..requests_db.errors import DatabaseError
from ..requests_db.migrate import open_database
from ..requests_db.states import Schedule
from ..shim.files import remove_if_empty
from ..shim.fork_server_client import end_fork_servers
from ..system.loop_lag import EventLoopLagMonitor
from ..system.process_identity import ProcessIdentity
from .api.app import create_app
from .api.dependencies import Dependencies
from .api.security import ensure_token
from .dispatch.dispatcher import Dispatcher
from .dispatch.memory_estimates import MOST_KEPT, Declared, MemoryEstimates
from .dispatch.planning import NO_PROCESSES_HINT, plan_for
from .dispatch.submission import Submitter
from .errors import DaemonError
from .events.bus import EventBus
from .events.log_files import LogWatcher
from .housekeeping.cleanup import collect_daily
from .housekeeping.runtime_dir import held
from .reconcile.reconciler import Reconciler
from .settings import Paths, Settings

log = logging.getLogger(__name__)

LISTEN_BACKLOG = 2048
SHUTDOWN_SECONDS = 2  # for open streams, before their connections are cut
HOME_SECONDS = 2.0  # between looks at whether the home is still there
VITAL_THREADS = frozenset({"dispatcher", "executor-supervisor"})


def run(
    paths: Paths, settings: Settings, ready_fd: int | None, zygote: FirstZygote | None = None
) -> int:
    """Be the daemon until told to stop. Returns the exit code."""
    try:
        with (
            _refused_as_reason(),
            _hold_lock(paths) as lock,
            asyncio.Runner(loop_factory=_new_loop) as runner,
        ):
            runner.run(_Daemon(paths, settings, ready_fd, zygote, lock).main())
    except DaemonError as exc:
        _tell(ready_fd, exc.to_json())
        log.error("%s%s", exc.message, f" ({exc.hint})" if exc.hint else "")
        return 1
    return 0


class _Daemon:
    """The parts, and the order in which they come and go."""

    def __init__(
        self,
        paths: Paths,
        settings: Settings,
        ready_fd: int | None,
        zygote: FirstZygote | None,
        lock: _HomeLock,
    ) -> None:
        self._paths = paths
        self._settings = settings
        self._ready_fd = ready_fd
        self._zygote = zygote
        self._lock = lock
        self._stopping = asyncio.Event()

    async def main(self) -> None:
        setproctitle("openenvd: daemon")
        _mind_signals(self._stopping.set)
        self._mind_threads()
        limits = read_limits()
        tcp, unix = _bind(self._paths, self._settings)
        identity = _identity(self._paths, tcp)
        try:
            with tcp, unix:
                await self._serve(limits, identity, [tcp, unix])
        finally:
            if not self._lock.is_anothers():
                self._tidy_up()

    def _tidy_up(self) -> None:
        end_fork_servers(self._paths.sockets)
        self._paths.daemon_file.unlink(missing_ok=True)
        self._paths.socket.unlink(missing_ok=True)

    async def _serve(
        self, limits: Limits, identity: dict[str, Any], sockets: list[socket.socket]
    ) -> None:
        async with self._parts(limits, identity) as deps:
            token = _introduce(self._paths, identity)
            server = _new_server(create_app(deps, token), self._settings)
            serving = asyncio.create_task(server.serve(sockets=sockets), name="uvicorn")
            _tell(self._ready_fd, {"ready": True, **identity})
            log.info("openenvd %s answers at %s", __version__, identity["address"])
            collecting = asyncio.create_task(collect_daily(self._paths, self._settings))
            await self._until_told(serving)
            self._stopping.set()
            deps.bus.wake_all()  # streams end by themselves, before they would be cut
            server.should_exit = True
            collecting.cancel()
            await serving

    def _mind_threads(self) -> None:
        """Without one of its threads the daemon would accept requests, and never run them.

        The next daemon counts what was running as an attempt, so that no request ends one daemon
        after the other.
        """
        loop = asyncio.get_running_loop()

        def died(args: threading.ExceptHookArgs) -> None:
            name = args.thread.name if args.thread is not None else "?"
            assert args.exc_value is not None
            log.critical("the thread %s died", name, exc_info=args.exc_value)
            if name in VITAL_THREADS:
                with contextlib.suppress(RuntimeError):  # the loop has ended already
                    loop.call_soon_threadsafe(self._stopping.set)

        threading.excepthook = died

    async def _until_told(self, serving: asyncio.Task[None]) -> None:
        told = asyncio.create_task(self._stopping.wait())
        homeless = asyncio.create_task(self._mind_home())
        await asyncio.wait([told, serving, homeless], return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        homeless.cancel()

    async def _mind_home(self) -> None:
        """Until the home is removed, or moved: then no client finds us any more, what we are asked
        for would be lost, and our port is in the next daemon's way.
        """
        while self._lock.is_ours():  # noqa: ASYNC110  no event tells of it everywhere
            await asyncio.sleep(HOME_SECONDS)
        text = f"the state folder {self._paths.home} is gone, and the daemon with it"
        log.critical("%s", text)
        syslog.syslog(syslog.LOG_CRIT, f"openenvd: {text}")  # our own log went with the folder

    @asynccontextmanager
    async def _parts(self, limits: Limits, identity: dict[str, Any]) -> AsyncIterator[Dependencies]:
        loop = asyncio.get_running_loop()
        bus = EventBus(loop)
        with _database_as_reason():
            dispatch_store, store = _open_stores(self._paths)
            _recover(dispatch_store, self._paths)
            plan, estimates = _learned_plan(limits, self._settings, dispatch_store)
        executor, dispatcher = self._queue_side(plan, estimates, dispatch_store, bus)
        reconciler = Reconciler(store, bus, self._paths)
        logs = LogWatcher(loop)
        lag = EventLoopLagMonitor("the daemon's loop")
        submitter = Submitter(store, dispatcher, bus, self._settings)
        try:
            with _database_as_reason():
                await reconciler.start()
            executor.start()
            dispatcher.start()
            lag.start()
            yield Dependencies(
                paths=self._paths,
                settings=self._settings,
                identity=identity,
                limits=asdict(limits),
                store=store,
                executor=executor,
                reconciler=reconciler,
                dispatcher=dispatcher,
                submitter=submitter,
                bus=bus,
                logs=logs,
                lag=lag,
                stopping=self._stopping,
                stop=self._stopping.set,
            )
        finally:
            self._stopping.set()
            await reconciler.stop()
            await asyncio.to_thread(dispatcher.stop)  # first: what ends now stays RUNNING
            await asyncio.to_thread(executor.stop, self._settings.cancel_grace_seconds)
            lag.stop()
            logs.close()
            await store.close()
            dispatch_store.close()

    def _queue_side(
        self, plan: Plan, estimates: MemoryEstimates, store: DispatchStore, bus: EventBus
    ) -> tuple[BurstableExecutor, Dispatcher]:
        dispatcher: Dispatcher
        executor = BurstableExecutor(
            plan,
            preload=registry.PRELOAD,
            home=str(self._paths.home),
            on_event=lambda event: dispatcher.deliver(event),
            cancel_grace_seconds=self._settings.cancel_grace_seconds,
            first_zygote=self._zygote,
        )
        dispatcher = Dispatcher(
            store,
            executor,
            publish=bus.publish_from_thread,
            operations={op.name: registry.dotted_name(op) for op in registry.OPERATIONS},
            paths=self._paths,
            settings=self._settings,
            estimates=estimates,
            budget_bytes=plan.budget_bytes,
        )
        return executor, dispatcher


# The steps of a start, in their order.


class _HomeLock:
    """The lock of a home, held."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def is_ours(self) -> bool:
        """Whether it is still where its home was."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # it cannot be told now
            return True

    def is_anothers(self) -> bool:
        """Whether what lies in the home now is the next daemon's: it was made anew."""
        return self._path.exists() and not self.is_ours()


@contextmanager
def _hold_lock(paths: Paths) -> Iterator[_HomeLock]:
    try:
        _make_folders(paths)
        descriptor = os.open(paths.daemon_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(descriptor)
        raise DaemonError(
            "already_running", "a daemon is running already", "openenv status shows it"
        ) from exc
    except OSError as exc:
        raise _unwritable(paths, exc) from exc
    lock = _HomeLock(paths.daemon_lock, descriptor)
    try:
        yield lock
    finally:
        if not lock.is_anothers():  # a daemon that could not start leaves none, either
            remove_if_empty(str(paths.sockets))
        os.close(descriptor)


def _make_folders(paths: Paths) -> None:
    folders = (paths.home, paths.sockets, paths.request_logs, paths.environment_logs, paths.runs)
    for folder in folders:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if paths.sockets.stat().st_uid != os.getuid():
        raise DaemonError(
            "state_unwritable",
            f"{paths.sockets} belongs to somebody else",
            "choose a shorter OPENENV_HOME, so that sockets can lie inside it",
        )


def _unwritable(paths: Paths, exc: OSError) -> DaemonError:
    return DaemonError(
        "state_unwritable",
        f"the state folder {paths.home} cannot be written: {exc.strerror}",
        "free space, mend its permissions, or point OPENENV_HOME at another folder",
    )


def _learned_plan(
    limits: Limits, settings: Settings, store: DispatchStore
) -> tuple[Plan, MemoryEstimates]:
    """The plan by what peaks have taught; by what operations declare, where that cannot work."""
    declared = {
        op.name: Declared(op.schedule, op.expected_bytes, op.leaves_bytes)
        for op in registry.OPERATIONS
    }
    known = store.expectations(MOST_KEPT)
    plan = plan_for(limits, settings, registry.expected_bytes())
    estimates = MemoryEstimates(declared, known, most_bytes=plan.budget_bytes)
    shares = {schedule.value: estimates.typical(schedule) for schedule in Schedule}
    with contextlib.suppress(DaemonError):
        plan = plan_for(limits, settings, shares)
    return plan, estimates


def _open_stores(paths: Paths) -> tuple[DispatchStore, AsyncStore]:
    open_database(paths.database)
    return DispatchStore(paths.database), AsyncStore(paths.database)


@contextmanager
def _refused_as_reason() -> Iterator[None]:
    """So is a process or a thread that the system refused; what fails on the way out in its wake,
    for want of the same, is not worth a word."""
    try:
        yield
    except (RuntimeError, OSError) as exc:
        if not any(is_no_room(each) for each in _chain(exc)):
            raise
        raise DaemonError("no_processes", no_room_text(), NO_PROCESSES_HINT) from exc


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """What was raised, and what had been before."""
    last: BaseException | None = exc
    while last is not None:
        yield last
        last = last.__cause__ or last.__context__


@contextmanager
def _database_as_reason() -> Iterator[None]:
    """A database that cannot be read or written is a reason not to start, told in a line."""
    try:
        yield
    except DatabaseError as exc:
        raise DaemonError("database", str(exc), getattr(exc, "hint", None)) from exc


def _recover(store: DispatchStore, paths: Paths) -> None:
    running = store.running()
    workers = [(r.worker_pid, r.worker_started_at) for r in running]
    survivors = sweep_orphans((p, s) for p, s in workers if p is not None and s is not None)
    if survivors:
        log.warning("ended %d workers of an earlier daemon", len(survivors))
    ran = [(r.worker, r.worker_pid, str(paths.request_log(r.id))) for r in running]
    settle_leftovers(paths.request_logs, [(w, p, path) for w, p, path in ran if w and p])
    idempotent = {op.name for op in registry.OPERATIONS if op.idempotent}
    recovery = store.recover(time.time(), idempotent=idempotent)
    if recovery.requeued or recovery.failed:
        log.warning(
            "recovered: %d requests queued again, %d failed as lost",
            len(recovery.requeued),
            len(recovery.failed),
        )


def _bind(paths: Paths, settings: Settings) -> tuple[socket.socket, socket.socket]:
    tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        tcp.bind(("127.0.0.1", settings.port))
        tcp.listen(LISTEN_BACKLOG)  # this too finds out who was there first
    except OSError as exc:
        tcp.close()
        raise DaemonError(
            "port_in_use",
            f"port {settings.port} cannot be bound: {_who_listens(settings.port)}",
            "choose another: openenv up --port N, or OPENENV_PORT=N (0 picks a free one)",
        ) from exc
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with held(paths.sockets):
            paths.socket.unlink(missing_ok=True)  # ours: we hold the lock
            unix.bind(str(paths.socket))
            paths.socket.chmod(0o600)
            unix.listen(LISTEN_BACKLOG)
    except OSError as exc:
        unix.close()
        tcp.close()
        raise _unwritable(paths, exc) from exc
    return tcp, unix


def _who_listens(port: int) -> str:
    from ..environments.providers.ports import holder_of, name_of

    holder = holder_of(port)
    if holder is None:
        return "another process listens there"
    return f"pid {holder.pid} ({name_of(holder)}) listens there"


def _identity(paths: Paths, tcp: socket.socket) -> dict[str, Any]:
    port = tcp.getsockname()[1]
    return {
        "pid": os.getpid(),
        "pid_started_at": time.time() - ProcessIdentity.of(os.getpid()).age_seconds(),
        "version": __version__,
        "address": f"http://127.0.0.1:{port}",
        "port": port,
        "socket": str(paths.socket),
        "home": str(paths.home),
        "started_at": time.time(),
    }


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: the daemon has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _new_server(app: Any, settings: Settings) -> _Server:
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=settings.log_level,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return _Server(config)


def _new_loop() -> asyncio.AbstractEventLoop:
    return uvloop.new_event_loop()


def _mind_signals(stop: Any) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    # The terminal that started us may go; the daemon stays.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _introduce(paths: Paths, identity: dict[str, Any]) -> str:
    """Write down who we are, for clients to find; the token they need."""
    try:
        token = ensure_token(paths.token)
        _write_private(paths.daemon_file, identity)
    except OSError as exc:
        raise _unwritable(paths, exc) from exc
    return token


def _write_private(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def _tell(ready_fd: int | None, line: dict[str, Any]) -> None:
    """Say how the start went, once, to whoever waits for it."""
    if ready_fd is None:
        return
    with contextlib.suppress(OSError):  # the starter may have gone
        os.write(ready_fd, json.dumps(line).encode() + b"\n")
        os.close(ready_fd)
