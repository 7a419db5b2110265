# SPDX-License-Identifier: Apache-2.0
"""Finding, starting and stopping a daemon: real processes, each a few lines of Python."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import openenvd
from openenvd import AsyncClient, Client
from openenvd.client import daemon, errors
from openenvd.client.errors import (
    DaemonNotStarted,
    DaemonUnreachable,
    InstallationGone,
    OtherVersion,
)
from openenvd.schema.settings import Paths
from openenvd.system.files import installation
from openenvd.system.process.process_identity import ProcessIdentity

from .fake_daemon import FakeDaemon, serving

Program = Callable[[str], None]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Makes the daemon's command a program of the test; `ready` is its pipe."""

    def become(source: str) -> None:
        head = "import json, os, sys\nready = int(sys.argv[sys.argv.index('--ready-fd') + 1])\n"

        def command(settings: dict[str, Any], *more: str) -> list[str]:
            given = [f"{key}={value}" for key, value in settings.items()]
            return [sys.executable, "-I", "-S", "-c", head + source, *more, *given]

        monkeypatch.setattr(daemon, "server_command", command)

    return become


def test_a_running_daemon_is_found_and_one_of_another_version_named(fake: FakeDaemon) -> None:
    started: list[Any] = []
    client = daemon.connect(fake.paths, on_start=started.append)
    assert client.identity["pid"] == fake.identity["pid"]
    assert daemon.is_running(fake.paths)
    assert started == []
    fake.write_identity(version="0.0.1")
    with pytest.raises(OtherVersion, match=r"0\.0\.1") as caught:
        daemon.connect(fake.paths)
    assert caught.value.hint is not None
    assert "openenv stop" in caught.value.hint


LEFT = b'{"pid": 1, "socket": "/nowhere", "address": "x"}'


@pytest.mark.parametrize("content", [LEFT, b"", b"{", b"[]", b'"x"', b"{}", b"\xff\xfe\x00"])
def test_files_without_a_daemon_are_no_daemon(paths: Paths, content: bytes) -> None:
    paths.daemon_file.write_bytes(content)
    paths.token.write_text("x")
    paths.daemon_lock.touch()
    assert (daemon.read_identity(paths) is None) is (content != LEFT)
    assert daemon.find(paths) is None
    assert not daemon.is_running(paths)


@pytest.mark.parametrize("changed", [{"file": [1, 2]}, {"folder": "/nowhere"}, {"folder": 1}, {}])
def test_a_daemon_of_an_installation_that_is_gone_is_named(
    fake: FakeDaemon, changed: dict[str, Any]
) -> None:
    fake.write_identity(installation=changed and installation.mark() | changed)
    with pytest.raises(InstallationGone, match="which was removed or replaced"):
        daemon.find(fake.paths)
    assert daemon.find(fake.paths, any_version=True) is not None


def test_a_daemon_of_an_installation_that_is_gone_continues_where_none_can_be_started(
    fake: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script beside a clone of the repository imports the clone, also after an uninstall."""
    venv.create(tmp_path / "bare")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare/bin/python"))
    fake.write_identity(installation={})
    with pytest.raises(DaemonNotStarted, match="openenvd is not installed for") as caught:
        daemon.connect(fake.paths)
    assert caught.value.hint is not None
    assert caught.value.hint.endswith(f"pip install {Path(openenvd.__file__).parent}")


def test_a_daemon_that_an_interrupted_command_has_started_is_waited_for(
    paths: Paths, fake: FakeDaemon, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its lock after we have looked, and answers after ours has found it locked."""
    identity = paths.daemon_file.read_bytes()
    paths.daemon_file.unlink()
    monkeypatch.setattr(daemon, "is_running", lambda _: False)
    error = {"kind": "already_running", "message": "a daemon is already running"}
    line = json.dumps({"ready": False, "error": error}) + "\n"
    program(
        f"os.write(ready, {line.encode()!r})\n"
        f"open({str(paths.daemon_file)!r}, 'wb').write({identity!r})"
    )
    assert daemon.connect(paths).identity["pid"] == fake.identity["pid"]


def test_the_daemons_reason_for_not_starting_is_quoted(paths: Paths, program: Program) -> None:
    error = {"kind": "port_in_use", "message": "port 1 is taken", "hint": "another"}
    program(
        f"os.write(ready, json.dumps({{'ready': False, 'error': {error!r}}}).encode() + b'\\n')"
    )
    with pytest.raises(DaemonNotStarted, match="port 1 is taken") as caught:
        daemon.connect(paths)
    assert (caught.value.kind, caught.value.hint) == ("port_in_use", "another")


@pytest.mark.parametrize("limit", [1, 2])
def test_a_daemon_that_cannot_be_forked_is_an_error(
    paths: Paths, pids_group: Path, limit: int
) -> None:
    """The shell that would start it, or the daemon itself."""
    script = (
        "from openenvd.client import daemon\n"
        "from openenvd.client.errors import DaemonNotStarted\n"
        "from openenvd.schema.settings import Paths\n"
        "try:\n"
        "    daemon.connect(Paths.from_environment())\n"
        "except DaemonNotStarted as exc:\n"
        "    print(exc.kind, bool(exc.hint), exc)"
    )
    (pids_group / "pids.max").write_text(str(limit))
    within = ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(pids_group)]
    done = subprocess.run(
        [*within, sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    sentence = (
        "no_processes True the daemon cannot be started: there is no room for another process"
    )
    assert done.stdout.strip() == sentence


LOOKS_AROUND = f"""
pipe = os.readlink('/proc/self/fd/3')
links = [os.path.realpath(f'/proc/self/fd/{{n}}') for n in os.listdir('/proc/self/fd')]
copies = sum(link.endswith(pipe) for link in links)
sys.exit(f'{{os.getsid(0) != {os.getsid(0)}}} {{os.readlink("/proc/self/fd/0")}} {{copies}}')
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("sys.exit('the disk is on fire')", "the disk is on fire"),
        ("sys.exit(' '.join(sys.argv[1:]))", "port=0"),
        (LOOKS_AROUND, "True /dev/null 1"),
    ],
    ids=["last lines", "settings", "a session of its own, no input, and the pipe once"],
)
def test_a_daemon_that_exits_is_reported_with_its_own_last_lines(
    paths: Paths, program: Program, source: str, expected: str
) -> None:
    paths.daemon_log.write_text("words of an earlier life\n")
    program(source)
    with pytest.raises(DaemonNotStarted, match=expected) as caught:
        daemon.connect(paths, settings={"port": 0})
    assert "earlier life" not in caught.value.message


def test_the_daemons_command_has_flags_for_given_settings_only() -> None:
    command = daemon.server_command({"port": 0, "max_long_workers": None}, "--ready-fd", "3")
    assert command[1:] == ["-P", "-m", "openenvd.server", "--ready-fd", "3", "--port=0"]


@pytest.mark.parametrize("home", ["file", "file/home"])
def test_a_home_that_cannot_be_made_is_named(tmp_path: Path, home: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DaemonUnreachable, match=f"{home} .*: a file is in its way") as caught:
        daemon.connect(Paths(tmp_path / home))
    assert caught.value.hint is not None


def test_stopping_where_nothing_runs_is_nothing(paths: Paths, tmp_path: Path) -> None:
    assert daemon.stop(paths) is None
    assert daemon.stop(Paths(tmp_path / "never")) is None
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("call", [daemon.stop, daemon.is_running])
def test_a_home_that_may_not_be_looked_into_is_named(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, call: Callable[[Paths], object]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(DaemonNotStarted, match="Permission denied"):
        call(paths)


def test_an_invalid_setting_is_reported_without_a_traceback(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENENV_PORT", "99999")
    with pytest.raises(DaemonNotStarted) as caught:
        daemon.connect(paths)
    assert caught.value.message == "OPENENV_PORT='99999': it must be a whole number from 0 to 65535"


def test_stop_waits_until_the_lock_is_free(paths: Paths) -> None:
    told, gone = threading.Event(), threading.Event()
    own = ProcessIdentity.of(os.getpid())
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())

    def live() -> None:
        with serving(paths) as fake:
            of_us = {"pid": own.pid, "pid_started_at": own.started_at}
            fake.write_identity(version="0.0.1", **of_us)  # of whatever version
            up.set()
            told.wait()
            gone.set()

    up = threading.Event()
    thread = threading.Thread(target=live)
    thread.start()
    up.wait()
    identity = daemon.stop(paths)
    assert gone.is_set()
    assert identity is not None
    assert not daemon.is_running(paths)
    thread.join()
    signal.signal(signal.SIGTERM, before)


# The probe of a daemon's pod, in a process of its own


def probe(paths: Paths) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "openenvd.client.daemon"]
    environ = {**os.environ, "OPENENV_HOME": str(paths.home)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_a_daemon_of_any_version_that_answers_requests_is_healthy(fake: FakeDaemon) -> None:
    fake.write_identity(version="0.0.1")
    fake.get("/v1/health", {"status": "ok"})
    done = probe(fake.paths)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    fake.get("/v1/health", lambda call: call.break_off())
    done = probe(fake.paths)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_where_there_is_no_daemon_none_is_started(paths: Paths) -> None:
    done = probe(paths)
    assert (done.returncode, done.stderr) == (1, "no daemon answers\n")
    assert not daemon.is_running(paths)
    assert not paths.daemon_file.exists()


@pytest.mark.parametrize("home", ["http://h:1", "localhost:8585", ":8585", "[::1]:80", "h:8/x"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_address_is_no_home(
    kind: type[Client | AsyncClient], home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"home is a folder, not an address: '") as caught:
        kind(home=home)
    assert home in str(caught.value)
    kind(home=f"./{home.rpartition('/')[2]}", start=False)  # a folder
    monkeypatch.setenv("OPENENV_HOME", home)
    with pytest.raises(ValueError, match="not an address"):
        kind()
    with pytest.raises(TypeError):
        kind("http://h:1")  # type: ignore[call-arg]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["ApiRefused", "ClientError", "DaemonUnreachable", "RequestFailed", "SessionError"]
)
def test_errors_are_exported(name: str) -> None:
    assert getattr(openenvd, name) is getattr(errors, name)
    assert name in dir(openenvd)
