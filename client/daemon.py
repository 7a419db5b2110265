# SPDX-License-Identifier: Apache-2.0
"""Finds, starts and stops the daemon; as a program, it is the health probe of the daemon's pod.

    connect ──▶ daemon.json, socket answers ──────────────────────────▶ DaemonClient
        └─ no ─▶ start.lock ──▶ ask again ──▶ spawn, wait for its line ──▶ ask again

    the daemon that was spawned finds another, which has  ──▶ ask again: it is starting
    been spawned by a command that was interrupted
    a daemon answers whose installation was removed or    ──▶ kill it, and spawn: the next daemon
    replaced, and which can start nothing from it             has its flags, and adopts what it ran

A pid proves nothing: a daemon runs if its socket answers, or if `daemon.lock` is held. That lock is
tried only under `start.lock`, because a try holds it for a moment, and must not hinder a daemon
that starts.

The daemon inherits only the writing end of a pipe. It writes one line there when it answers or
knows why it cannot. If the pipe ends without a line, the daemon has exited, and its log has the
reason.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..schema.settings import SETTINGS, Paths
from ..system.files import disk_space, installation
from ..system.files.log_files import last_lines
from ..system.process.process_identity import ProcessIdentity, is_locked
from ..system.text.json_lines import Json
from . import errors

if TYPE_CHECKING:
    from .api import DaemonClient  # HTTP takes 15 ms to import, while the daemon starts


START_SECONDS = 60.0  # a first start makes the database, on a slow disk
STOP_SECONDS = 30.0  # running requests get their grace
START_LOCK_SECONDS = 90.0  # while another process starts it
_POLL_INTERVAL_SECONDS = 0.02
_LOG_TAIL_LINES = 10
_SHELL = "/bin/sh"
_READY_FD = 3
MIN_FILES = 64  # a daemon fails below 40, with an environment or two
_MIN_PIPE_FD = 10  # out of the way of 0 to `_READY_FD` in the child


def connect(
    paths: Paths | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    on_start: Callable[[Json], object] = lambda _: None,
    before_start: Callable[[], None] = lambda: None,
) -> DaemonClient:
    """Connect to the running daemon, or start one.

    Args:
        paths: The daemon's home; by default `OPENENV_HOME`, or the platform's state folder.
        settings: Names and values of `Settings` for a daemon that has to be started.
        on_start: Called with the daemon's ready line if a daemon was started; its `replaced` says
            why another one was ended, or is absent.
        before_start: Called before a daemon is started; if it raises, no daemon is started.

    Raises:
        DaemonUnreachable: There is none; the error has the reason and what to do.
    """
    paths = paths or Paths.from_environment()
    with contextlib.suppress(errors.InstallationGone):
        if (client := find(paths)) is not None:
            return client
    with _start_lock(paths):
        deadline = time.monotonic() + START_SECONDS
        replaced: dict[str, str] = {}
        is_service = False
        while True:
            try:
                if (client := find(paths)) is not None:
                    return client
                if not is_service and not is_running(paths):
                    before_start()
                    from .service import resume  # when there is no daemon

                    if not (is_service := resume(paths.home)):
                        on_start({**_start(paths, settings or {}), **replaced})
                    continue
            except errors.InstallationGone as exc:
                _check_installed(exc)
                replaced = {"replaced": exc.message}
                _signal(read_identity(paths), signal.SIGKILL)
            except errors.DaemonNotStarted as exc:
                if exc.kind != "already_running":
                    raise
            if time.monotonic() > deadline:
                raise _silent(paths)
            time.sleep(_POLL_INTERVAL_SECONDS)  # another one is starting or ending


def find(
    paths: Paths, *, any_version: bool = False, answer_seconds: float | None = None
) -> DaemonClient | None:
    """Return the running daemon, or None if none answers; `answer_seconds` is `HttpClient`'s.

    Raises:
        OtherVersion: Its version is another one; not with `any_version`.
        InstallationGone: Its installation is gone; not with `any_version`.
    """
    identity = read_identity(paths)
    token = _read(paths.token)
    if identity is None or token is None or not _answers(str(identity["socket"])):
        return None
    installed = identity.get("installation")
    if not any_version and not installation.is_as_it_was(installed):
        folder = installed.get("folder") if isinstance(installed, dict) else "an unknown folder"
        raise errors.InstallationGone(
            f"the daemon (pid {identity['pid']}) runs from {folder}, which was removed or replaced",
            "openenv status replaces the daemon; environments and their sessions continue",
        )
    if identity.get("version") != __version__ and not any_version:
        raise errors.OtherVersion(
            f"the daemon (pid {identity['pid']}) is openenvd {identity.get('version')}, "
            f"this is {__version__}",
            "openenv stop, and try again; environments continue, the next daemon adopts them",
        )
    from .api import DaemonClient
    from .http import HttpClient

    http = HttpClient(str(identity["socket"]), token.strip(), answer_seconds=answer_seconds)
    return DaemonClient(http, identity)


def read_identity(paths: Paths) -> Json | None:
    """Return the content of `daemon.json`, which may be a killed daemon's."""
    try:
        identity = json.loads(_read(paths.daemon_file) or "null")
    except ValueError:
        return None
    complete = isinstance(identity, dict) and {"pid", "socket", "address"} <= set(identity)
    return identity if complete else None


def is_running(paths: Paths) -> bool:
    """Return whether a daemon holds its lock; the caller holds `start.lock` or knows a daemon."""
    try:
        return is_locked(paths.daemon_lock)
    except OSError as exc:
        raise _unwritable(paths, exc) from exc


def stop(paths: Paths) -> Json | None:
    """End the daemon, of whatever version, and wait until it is gone.

    Returns its identity, or None if none was running.

    Raises `DaemonUnreachable`: it does not end.
    """
    try:
        if not paths.home.is_dir():
            return None
    except OSError as exc:
        raise _unwritable(paths, exc) from exc
    with _start_lock(paths, is_stop=True):
        if not is_running(paths):
            return None
        identity = read_identity(paths) or {}
        _signal(identity, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        # Polling is the only portable way to notice the end of a process that is not our child.
        while is_running(paths):
            if time.monotonic() > deadline:
                raise _silent(paths, identity)
            time.sleep(_POLL_INTERVAL_SECONDS)
        return identity


def why_unhealthy(paths: Paths) -> str | None:
    """Return why the daemon of a home does not answer, or None if it does; starts none."""
    try:
        client = find(paths, any_version=True)
        if client is None:
            return "no daemon answers"
        client.health()
    except errors.ClientError as exc:
        return exc.message
    return None


def server_command(settings: Mapping[str, Any], *more: str) -> list[str]:
    """Return the daemon's command; `-P` ignores a folder `server` in the working folder."""
    flags = {item.name: item.flag for item in SETTINGS}
    given = [f"{flags[name]}={value}" for name, value in settings.items() if value is not None]
    return [sys.executable, "-P", "-m", "openenvd.server", *more, *given]


def _check_installed(gone: errors.InstallationGone) -> None:
    """Check that another daemon can take the place of one whose installation is gone.

    A script imports a clone of the repository that lies beside it; a daemon does not.

    Raises `DaemonNotStarted`: this package is not installed.
    """
    import subprocess

    command = [sys.executable, "-P", "-c", "import openenvd"]
    if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
        text = f"{gone}; openenvd is not installed for {sys.executable}, which can start no other"
        hint = f"install it, such as by pip install {installation.mark()['folder']}"
        raise errors.DaemonNotStarted("not_installed", text, hint)


def _signal(identity: Json | None, number: signal.Signals) -> None:
    """Signal the process that wrote the identity, never another one with its pid."""
    if identity:
        process = ProcessIdentity(int(identity["pid"]), float(identity["pid_started_at"]))
        process.signal(number)


def _answers(socket_path: str) -> bool:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(socket_path) == 0


@contextlib.contextmanager
def _start_lock(paths: Paths, *, is_stop: bool = False) -> Iterator[None]:
    from filelock import FileLock, Timeout

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < MIN_FILES and not is_stop:
        text = f"the limit of open files is {files}, and a daemon needs {MIN_FILES}"
        raise errors.DaemonNotStarted("few_files", text, "ulimit -n 1024, and try again")
    lock = FileLock(paths.start_lock, timeout=START_LOCK_SECONDS, mode=0o600)
    try:
        paths.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as exc:
        raise errors.DaemonUnreachable(
            f"another command has been starting or stopping the daemon for {START_LOCK_SECONDS} s",
            f"see {paths.daemon_log}",
        ) from exc
    except OSError as exc:
        if not (is_stop and exc.errno == errno.EROFS):  # where no daemon can start anyway
            raise _unwritable(paths, exc) from exc
    try:
        yield
    finally:
        lock.release()


def _start(paths: Paths, settings: Mapping[str, Any]) -> Json:
    """Spawn the daemon, wait for its line, and return it if the daemon is ready."""
    reading, low = os.pipe()
    writing = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _MIN_PIPE_FD)
    os.close(low)
    try:
        log_end = _spawn(paths, settings, writing)
    finally:
        os.close(writing)
    from . import api  # noqa: F401  in the time that the daemon takes

    with open(reading, "rb") as pipe:
        is_readable = bool(select.select([pipe], [], [], START_SECONDS)[0])
        text = pipe.readline() if is_readable else b""  # written in one piece
    if not text.endswith(b"\n"):
        raise _died(paths, log_end)
    line: Json = json.loads(text)
    if not line.get("ready"):
        error = line.get("error") or {}
        kind = str(error.get("kind", "internal"))
        message = str(error.get("message", "the daemon cannot start"))
        raise errors.DaemonNotStarted(kind, message, error.get("hint"))
    return line


def _spawn(paths: Paths, settings: Mapping[str, Any], ready: int) -> int:
    """Start the process in its own session; returns the offset of its output in the log."""
    try:
        log = os.open(paths.daemon_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as exc:
        raise _unwritable(paths, exc) from exc
    try:
        log_end = os.fstat(log).st_size
        command = server_command(settings, "--ready-fd", str(_READY_FD))
        environ = {**os.environ, "OPENENV_HOME": str(paths.home)}
        # The shell exits and leaves the daemon to init: otherwise a long-lived starting process
        # (training code) would have to reap it.
        shell = os.posix_spawn(
            _SHELL,
            [_SHELL, "-c", '"$@" &', "openenvd", *command],
            environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
                (os.POSIX_SPAWN_DUP2, ready, _READY_FD),
            ],
            setsid=True,
            setsigmask=(),  # the daemon inherits no blocked or ignored signals
            setsigdef=(signal.SIGCHLD,),
        )
        try:
            _, status = os.waitpid(shell, 0)
        except ChildProcessError:  # it ignores SIGCHLD: the kernel has reaped the shell
            status = 0
    except BlockingIOError as exc:  # EAGAIN: a limit of processes is reached
        raise _no_room() from exc
    finally:
        os.close(log)
    if os.waitstatus_to_exitcode(status) > 0:  # the shell only forks
        raise _no_room()
    return log_end


def _died(paths: Paths, log_end: int) -> errors.DaemonNotStarted:
    lines = last_lines(paths.daemon_log, _LOG_TAIL_LINES, after=log_end)
    words = "\n".join(f"  {line}" for line in lines) or "  (its log is empty)"
    return errors.DaemonNotStarted(
        "died", f"the daemon exited before it answered; end of its log:\n{words}",
        f"full log: {paths.daemon_log}",
    )  # fmt: skip


def _no_room() -> errors.DaemonNotStarted:
    return errors.DaemonNotStarted(
        "no_processes",
        "the daemon cannot be started: there is no room for another process",
        "stop what is not needed, or raise the limit (ulimit -u, or pids.max of the control group)",
    )


def _silent(paths: Paths, known: Json | None = None) -> errors.DaemonUnreachable:
    identity = read_identity(paths) or known
    who = f" (pid {identity['pid']})" if identity else ""
    return errors.DaemonUnreachable(
        f"a daemon{who} holds {paths.daemon_lock}, but does not answer",
        f"see the end of {paths.daemon_log}; if it hangs, kill that pid: nothing is lost",
    )


def _unwritable(paths: Paths, exc: OSError) -> errors.DaemonNotStarted:
    if isinstance(exc, FileExistsError | NotADirectoryError):
        return errors.DaemonNotStarted(
            "state_unwritable",
            f"the state folder {paths.home} cannot be made: a file is in its way",
            "move the file away, or point OPENENV_HOME at another folder",
        )
    return errors.DaemonNotStarted("state_unwritable", *disk_space.why_unwritable(paths.home, exc))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")  # the daemon refuses an invalid token
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise errors.DaemonUnreachable(
            f"{path} cannot be read: {disk_space.why_refused(path, exc)}",
            "fix its permissions, or point OPENENV_HOME at another folder",
        ) from exc


if __name__ == "__main__":  # a command would start a second daemon in the pod
    sys.exit(why_unhealthy(Paths.from_environment()))
