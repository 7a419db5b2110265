# SPDX-License-Identifier: Apache-2.0
"""Fixtures: the installed command, and a real daemon in a home of its own; nothing of it is left.

Upstream's package comes from the package index into a virtual environment of its own, kept between
runs (`OPENENVD_SMOKE_CACHE`, or the user's cache folder), and made by the `uv` that we depend on.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock
from platformdirs import user_cache_path
from uv import find_uv_bin

from openenvd.cli.commands.status import read_status
from openenvd.client import daemon
from openenvd.client.errors import DaemonUnreachable
from openenvd.schema.settings import Paths

from .engines import docker_engine as docker_engines
from .engines.docker_engine import DockerEngine

# Docker's client leaves its sockets to the garbage collector, which may run in another test.
_UNCLOSED = (
    "ignore:Exception ignored in. <socket.socket .*family=1:pytest.PytestUnraisableExceptionWarning"
)
# Fixtures whose tests run in one process (`loadgroup`), because they install packages. Daemons and
# engines are not among them: running their tests in one process would take longer than starting
# one in each process.
_MADE_ONCE = ("both", "python", "clients")


# Engines whose tests run only if their code has changed (`.ci/touched.py`), with their fixtures.
_ENGINES = {
    "docker": ("docker_engine",),
    "swarm": ("swarm_engine", "swarm"),
    "slurm": ("cluster",),
}


def pytest_configure(config: pytest.Config) -> None:
    """Prevent that a test fails because another one has left a Unix socket open."""
    config.addinivalue_line("filterwarnings", _UNCLOSED)
    for engine in _ENGINES:
        config.addinivalue_line("markers", f"{engine}: needs this engine")
    config.addinivalue_line(
        "markers", "one_in(n): one in n of its cases runs, but all in the long form"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist writes the groups into the names of tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests that share a fixture; each of the others goes to any free process."""
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        sampled = item.get_closest_marker("one_in")
        if sampled and not item.get_closest_marker("long"):
            test = item.nodeid.partition("[")[0]
            cases.setdefault((test, sampled.args[0]), []).append(item)
        names = getattr(item, "fixturenames", ())
        if shared := [name for name in _MADE_ONCE if name in names]:
            item.add_marker(pytest.mark.xdist_group(shared[0]))
        for engine, fixtures in _ENGINES.items():
            if not {*fixtures}.isdisjoint(names) or item.path.match(f"test_{engine}*.py"):
                item.add_marker(engine)
    for (_, one_in), group in cases.items():
        kept = random.Random(0).sample(group, -(-len(group) // one_in))
        for item in group:
            if item not in kept:
                item.add_marker("long")
    # A group runs in one process: a group that began last would delay the end of the run.
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


# It may be another installation's command, whose Python then runs users' programs.
OPENENV = os.environ.get("OPENENVD_SMOKE_COMMAND") or str(Path(sys.executable).with_name("openenv"))
PYTHON = str(Path(OPENENV).with_name("python"))
REPOSITORY = Path(__file__).resolve().parent.parent
UPSTREAM_REQUIREMENT = "openenv==0.10.0"
GRACE_SECONDS = 30.0
_NOT_KEPT = ("OPENENV", "DISPLAY", "WAYLAND_DISPLAY", "BROWSER")  # no test opens a browser
FREE_PORTS = 26000

# A shell makes a background process ignore Ctrl-C, and the commands that are interrupted here would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Answer:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def text(self) -> str:
        """Both streams, for an assertion's message."""
        return f"exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


@dataclass
class Machine:
    """One user on one machine: a home, and the command."""

    home: Path
    environ: dict[str, str]
    command: str = OPENENV
    background: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, *arguments: str, timeout: float = 120, cwd: Path | None = None) -> Answer:
        """`openenv ARGUMENTS`, to its end."""
        done = subprocess.run(
            [self.command, *arguments],
            env=self.environ,
            cwd=cwd or self.home.parent,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def ok(self, *arguments: str, timeout: float = 120, cwd: Path | None = None) -> Answer:
        """Run `openenv ARGUMENTS`; the test fails unless the command succeeds."""
        answer = self.run(*arguments, timeout=timeout, cwd=cwd)
        assert answer.code == 0, answer.text
        return answer

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [self.command, *arguments],
            env=self.environ,
            cwd=self.home.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.background.append(process)
        return process

    def status(self, target: str | None = None) -> Any:
        """Return the JSON of `openenv status`; if a daemon runs, this process asks it."""
        with contextlib.suppress(DaemonUnreachable):
            if (client := daemon.find(Paths(self.home))) is not None:
                return read_status(client, target)
        return self.ok("status", *([target] if target else []), "--json").json

    def environment(self, name: str) -> dict[str, Any]:
        found = [e for e in self.status()["environments"] if e["name"] == name]
        assert found, f"{name} is not listed"
        environment: dict[str, Any] = found[0]
        return environment

    def replica(self, name: str = "echo") -> dict[str, Any]:
        """The first replica of an environment."""
        replica: dict[str, Any] = self.environment(name)["replicas"][0]
        return replica

    def request(self, request_id: str) -> dict[str, Any]:
        request: dict[str, Any] = self.status(request_id)["requests"][0]
        return request

    @property
    def daemon_pid(self) -> int:
        return int(json.loads((self.home / "daemon.json").read_text())["pid"])

    def kill_daemon(self) -> None:
        """`kill -9`, and wait until it is gone."""
        process = psutil.Process(self.daemon_pid)
        process.send_signal(signal.SIGKILL)
        psutil.wait_procs([process], timeout=GRACE_SECONDS)

    def processes(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if self._is_ours(p)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("OPENENV_HOME") == str(self.home)
        except psutil.Error:
            return False


def output_of(*command: str | Path, timeout: float = 120, **options: Any) -> str:
    """Run a program that must succeed; returns its output. `subprocess.run` takes `options`."""
    words = list(map(str, command))
    done: subprocess.CompletedProcess[str] = subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, check=False, **options
    )
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr[-5000:]}"
    return done.stdout


def eventually(check: Callable[[], object], *, within: float = 30.0) -> None:
    """Wait for something outside that offers no event to wait on.

    An expensive check runs less often: some checks start a command, and several tests that run them
    at once would keep the machine busy.
    """
    deadline = time.monotonic() + within
    looked = time.monotonic()
    while not check():
        assert time.monotonic() < deadline, f"not within {within} s"
        time.sleep(min(max(0.1, 3 * (time.monotonic() - looked)), 0.5))
        looked = time.monotonic()


def free_port() -> int:
    """Return a free port outside the ranges of environments and of outgoing connections."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(FREE_PORTS + number * 100, FREE_PORTS + (number + 1) * 100)
    for port in random.sample(ports, len(ports)):  # another run would try the same ports first
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("all of these ports are in use")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with new_machine(tmp_path / "home") as made:
        yield made


@contextmanager
def new_machine(home: Path) -> Iterator[Machine]:
    """Yield a machine with that home; assert at the end that none of its processes is left."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_KEPT)}
    made = Machine(home, {**kept, "OPENENV_HOME": str(home), "OPENENV_PORT": "0"})
    try:
        yield made
    finally:
        _end(made)


def _end(made: Machine) -> None:
    for process in made.background:
        if process.poll() is None:
            process.kill()
        process.communicate()
    if (made.home / "daemon.json").exists():
        made.run("down", "--all")
        made.run("stop")
    left = made.processes()
    for each in left:  # an engine's agent would end by itself a minute later
        with contextlib.suppress(psutil.Error):
            if " ".join(each.cmdline()).startswith("openenvd: agent"):
                each.terminate()
    _, alive = psutil.wait_procs(left, timeout=GRACE_SECONDS)
    told = [f"{p.pid} {p.cmdline()}" for p in alive if p.is_running()]
    for process_left in alive:
        process_left.kill()
    assert not told, f"left running: {told}"


@contextmanager
def _running_docker(*, swarm: bool) -> Iterator[DockerEngine]:
    if (reason := docker_engines.why_not()) is not None:
        pytest.skip(f"no Docker engine: {reason}")
    with smoke_cache() as cache:
        docker_engines.base_image(cache)
    with docker_engines.docker_engine(cache, swarm=swarm) as engine:
        yield engine


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[DockerEngine]:
    """A Docker engine for this run, with the default base of our images."""
    with _running_docker(swarm=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def swarm_engine() -> Iterator[DockerEngine]:
    with _running_docker(swarm=True) as engine:
        yield engine


@pytest.fixture
def docker_machine(machine: Machine, docker_engine: DockerEngine) -> Iterator[Machine]:
    """A machine whose Docker is that engine; no container of it is left."""
    machine.environ["DOCKER_HOST"] = docker_engine.host
    yield machine
    if left := docker_engine.docker("ps", "--all", "--quiet").split():
        docker_engine.docker("rm", "--force", "--volumes", *left)


@pytest.fixture(scope="session")
def upstream() -> Path:
    return python_with(UPSTREAM_REQUIREMENT)


def python_with(*requirements: str) -> Path:
    """Return a Python with these packages from the index; the first one names its folder."""
    with smoke_cache() as cache:
        folder = cache / requirements[0].replace("==", "-")
        if not (folder / "complete").exists():
            make_venv(folder, *requirements)
            (folder / "complete").touch()
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has upstream's `openenv`, and then ours, as a user installs them."""
    folder = tmp_path_factory.mktemp("both") / "venv"
    make_venv(folder, UPSTREAM_REQUIREMENT)
    with smoke_cache():  # two builds at once would share one `build` folder
        install(folder, str(REPOSITORY))
    return folder / "bin" / "python"


@contextmanager
def smoke_cache() -> Iterator[Path]:
    named = os.environ.get("OPENENVD_SMOKE_CACHE")
    cache = Path(named) if named else user_cache_path("openenvd-smoke")
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "lock"):
        yield cache


def make_venv(folder: Path, *requirements: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    command = [find_uv_bin(), "venv", "-q", "--python", sys.executable, str(folder)]
    subprocess.run(command, check=True)
    install(folder, *requirements)


def install(folder: Path, *requirements: str) -> None:
    python = str(folder / "bin" / "python")
    fresh = ["--reinstall-package", "openenvd"]  # the sources may change without the version
    command = [find_uv_bin(), "pip", "install", "-q", "--python", python, *fresh, *requirements]
    subprocess.run(command, check=True)


def copy_package(folder: Path, version: str | None = None) -> None:
    """Copy our packages into a folder, replacing those that it has."""
    setuptools = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    shutil.rmtree(folder / "openenvd", ignore_errors=True)
    for room in {package.split(".")[1] for package in setuptools["packages"] if "." in package}:
        shutil.copytree(REPOSITORY / room, folder / "openenvd" / room)
    shutil.copy(REPOSITORY / "__init__.py", folder / "openenvd")
    if version is not None:
        with (folder / "openenvd" / "__init__.py").open("a") as file:
            file.write(f'\n__version__ = "{version}"\n')


@pytest.fixture(scope="session")
def generated_project(upstream: Path) -> Path:
    """Return a project that upstream's `openenv init` generated, from the cache if possible."""
    with smoke_cache() as cache:
        kept, made = cache / f"generated-{UPSTREAM_REQUIREMENT}", cache / "being-generated"
        if not kept.exists():
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            command = [str(upstream.with_name("openenv")), "init", "my_env", "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, cwd=made)
            made.rename(kept)
    return kept / "my_env"


@pytest.fixture
def project(generated_project: Path, tmp_path: Path) -> Path:
    return shutil.copytree(generated_project, tmp_path / "projects" / "my_env")


@pytest.fixture
def write_environment(tmp_path: Path) -> Callable[[str], str]:
    """A function that writes a `module:Class` environment into `tmp_path`; returns its name."""

    def write(source: str) -> str:
        (tmp_path / "sample_env.py").write_text(source)
        return "sample_env:Sample"

    return write
