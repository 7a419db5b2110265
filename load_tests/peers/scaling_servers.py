# SPDX-License-Identifier: Apache-2.0
"""The servers that `scaling.py` measures: each is a context manager that leaves nothing behind.

    template_project   the project that upstream's `openenv init` makes, for both servers
    openenvd   `openenv launch benchmark`, by a daemon in a home of its own; a number after the
               name is that of its shards
    openenvd-project   the same, for an upstream project with the peer's own classes
    upstream   the same environment on upstream's package: uvicorn with workers, its own Python
    limit      bare_server.py: two processes that do nothing but answer

`Started.facts` has how long the start took. Processes are identified by pid, never by name.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from load_tests.shared.report import OPENENV, daemon
from openenvd.env_host.bundled.benchmark.behaviour import SYNC_VARIABLE
from openenvd.rollouts.bench.results import Target
from smoke_tests.background import answers, read, running, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
TEMPLATE_NAME = "echo_back"
TEMPLATE_APP = f"{TEMPLATE_NAME}.server.app:app"
PEER_REQUIREMENT = "openenv==0.10.0"
MANIFEST = "spec_version: 1\nname: waits\ntype: space\nruntime: fastapi\napp: server.app:app\n"
PACKAGING = f"""[project]
name = "openenv-waits"
version = "0.1.0"
requires-python = ">=3.10"
dependencies = ["{PEER_REQUIREMENT}"]
[tool.setuptools]
packages = ["waits", "waits.server"]
package-dir = {{ "waits" = ".", "waits.server" = "server" }}
"""
# Appended to the benchmark's `environment.py`, with upstream's base classes.
UPSTREAMS_APP = """
import os
from openenv.core.env_server import create_app
bound = int(os.environ.get("MAX_CONCURRENT_ENVS", "100"))
served = SyncBenchmarkEnvironment if is_synchronous() else BenchmarkEnvironment
app = create_app(served, BenchmarkAction, BenchmarkObservation, "benchmark", bound)
"""
PEER_VENV_VARIABLE = "OPENENVD_PEER_VENV"  # kept between runs when it is set
LIMIT_PROCESSES = 2
THROUGH, DIRECT = "gateway", "direct"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The setup of the servers, as similar as possible."""

    max_sessions: int  # all processes together
    processes: int  # of each server: shards, workers
    is_synchronous: bool = False
    shards: str | None = None  # value of `--shards`; None leaves it out

    @property
    def share(self) -> int:
        """Return the most sessions of each process."""
        return -(-self.max_sessions // self.processes)

    @property
    def variables(self) -> dict[str, str]:
        return {SYNC_VARIABLE: "1"} if self.is_synchronous else {}


@dataclass(frozen=True, slots=True)
class Started:
    """A server that answers."""

    target: Target
    facts: dict[str, Any] = field(default_factory=dict)


@contextmanager
def openenvd(arrangement: Arrangement) -> Iterator[Started]:
    with openenvd_all([arrangement]) as [started]:
        yield started


@contextmanager
def openenvd_of(arrangement: Arrangement, source: str) -> Iterator[Started]:
    with daemon() as environ:
        yield _launch(environ, source, "openenvd", arrangement)


@contextmanager
def openenvd_all(
    arrangements: Sequence[Arrangement], *, with_projects: bool = False
) -> Iterator[list[Started]]:
    """Launch our server in each arrangement, by one daemon; several are named after their shards.

    With projects, each arrangement also serves a project as the peer does: upstream's classes, in a
    Python that has its package.
    """
    with daemon() as environ, tempfile.TemporaryDirectory(prefix="openenvd-project-") as folder:
        sources = {"openenvd": "benchmark"}
        if with_projects:
            sources["openenvd-project"] = str(write_project(Path(folder) / "waits"))
        yield [
            _launch(environ, source, f"{name}-{one.shards}" if arrangements[1:] else name, one)
            for name, source in sources.items()
            for one in arrangements
        ]


@contextmanager
def behind_gateway(arrangement: Arrangement, replicas: int) -> Iterator[list[Started]]:
    """Launch the benchmark through the gateway, whose cost is Envoy's alone, and without it.

    Each has this number of replicas of one shard, and slots for twice the sessions.
    """
    doubled = replace(arrangement, max_sessions=2 * arrangement.max_sessions, shards="1")
    words = ("--replicas", str(replicas))
    with daemon() as environ:
        through = _launch(environ, "benchmark", THROUGH, doubled, *words, "--gateway")
        envoy = openenv(environ, "gateway", "status")["gateway"]["pid"]
        direct = _launch(environ, "benchmark", DIRECT, doubled, *words)
        yield [Started(replace(through.target, root_pids=(envoy,)), through.facts), direct]


def _launch(
    environ: dict[str, str], source: str, name: str, arrangement: Arrangement, *more: str
) -> Started:
    started = time.monotonic()
    answer = openenv(environ, *_launch_words(source, arrangement), "--name", name, *more)
    seconds = time.monotonic() - started
    environment = answer["environment"]
    shown = openenv(environ, "status", environment["name"])["environments"][0]
    pids = tuple(replica["pid"] for replica in shown["replicas"])
    facts = {
        "launch_command_seconds": seconds,
        "request_to_ready_seconds": seconds_to_ready(environ, answer),
    }
    return Started(Target(name, environment["address"], pids), facts)


def seconds_to_ready(environ: dict[str, str], answer: Any) -> float:
    """Return how long a launch's request took, by its answer."""
    told = openenv(environ, "wait", answer["request_id"])
    request = told.get("request", told)
    return float(request["finished_at"] - request["created_at"])


def write_project(folder: Path) -> Path:
    server = folder / "server"
    server.mkdir(parents=True)
    (folder / "openenv.yaml").write_text(MANIFEST)
    (folder / "pyproject.toml").write_text(PACKAGING)
    (folder / "__init__.py").touch()
    (server / "__init__.py").touch()
    bundled = REPOSITORY / "env_host" / "bundled" / "benchmark"
    shutil.copyfile(bundled / "behaviour.py", server / "behaviour.py")
    ours = (bundled / "environment.py").read_text()
    on_upstreams = ours.replace("...environment.interfaces", "openenv.core.env_server")
    (server / "app.py").write_text(on_upstreams + UPSTREAMS_APP)
    return folder


def _launch_words(source: str, arrangement: Arrangement) -> list[str]:
    words = ["launch", source, "--max-sessions", str(arrangement.max_sessions)]
    if arrangement.shards is not None:
        words += ["--shards", arrangement.shards]
    for name, value in arrangement.variables.items():
        words += ["--env", f"{name}={value}"]
    return words


def openenv(environ: dict[str, str], *words: str) -> Any:
    """Run a command; returns its JSON. A command that fails ends the program."""
    command = [OPENENV, *words, "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


@contextmanager
def template_project(arrangement: Arrangement, python: Path) -> Iterator[Path]:
    """Generate upstream's `openenv init` project: a synchronous echo with pydantic models.

    Its app allows one session; that bound is raised, as a comment in the app recommends.
    """
    with tempfile.TemporaryDirectory(prefix="openenvd-template-") as folder:
        command = [str(python.with_name("openenv")), "init", TEMPLATE_NAME, "-o", folder]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)
        project = Path(folder) / TEMPLATE_NAME
        app = project / "server" / "app.py"
        bound = f"max_concurrent_envs={arrangement.share}"
        app.write_text(app.read_text().replace("max_concurrent_envs=1", bound))
        yield project


@contextmanager
def upstream(
    arrangement: Arrangement, python: Path, app: str = "server.app:app", app_dir: Path | None = None
) -> Iterator[Started]:
    """Start the peer; each worker refuses a session when its share of `max_sessions` is taken.

    Where the slots are under test, the caller passes their number; otherwise so many that each
    worker may hold all sessions.
    """
    with tempfile.TemporaryDirectory(prefix="openenvd-peer-") as folder:
        port = free_port()
        app_dir = app_dir or write_project(Path(folder) / "waits")
        command = [
            str(python), "-m", "uvicorn", "--app-dir", str(app_dir), app,
            "--host", "127.0.0.1", "--port", str(port),
            "--workers", str(arrangement.processes), "--no-access-log",
        ]  # fmt: skip
        variables = {**arrangement.variables, "MAX_CONCURRENT_ENVS": str(arrangement.share)}
        environ = {**os.environ, **variables}
        log = Path(folder) / "log"
        began = time.monotonic()
        with running(command, log, cwd=folder, env=environ) as process:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(url), {log: process})
            first = time.monotonic() - began
            ready = "Application startup complete"
            wait_until(lambda: read(log).count(ready) >= arrangement.processes, {log: process})
            facts = {"first_ready_seconds": first, "all_ready_seconds": time.monotonic() - began}
            yield Started(Target("upstream", url, (process.pid,)), facts)


def peer_python() -> Path:
    """Return a Python that has upstream's package: the kept one, or a new one."""
    folder = Path(os.environ.get(PEER_VENV_VARIABLE) or tempfile.mkdtemp(prefix="openenvd-peer-"))
    python = folder / "bin" / "python"
    if not python.exists():
        install_python(folder, PEER_REQUIREMENT)
    return python


def install_python(folder: Path, requirement: str) -> None:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"
    words = ["venv", "--quiet", "--clear", "--python", sys.executable, str(folder)]
    subprocess.run([uv, *words], check=True)
    words = ["pip", "install", "--quiet", "--compile-bytecode"]
    words += ["--python", str(folder / "bin" / "python"), requirement]
    subprocess.run([uv, *words], check=True)


def why_no_limit() -> str | None:
    """Return why the bare server cannot run here, or None."""
    if find_spec("picows") is None:
        return "no limit: picows is not installed (pip install picows)"
    return None


@contextmanager
def limit(processes: int = LIMIT_PROCESSES, name: str = "limit") -> Iterator[Started]:
    with tempfile.TemporaryDirectory(prefix="openenvd-limit-") as folder:
        command = [sys.executable, "-m", "load_tests.peers.bare_server"]
        command += ["--processes", str(processes)]
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        log = Path(folder) / "log"
        with running(command, log, cwd=folder, env=environ) as process:
            wait_until(lambda: "listening on" in read(log), {log: process})
            port = int(read(log).partition("listening on ")[2].split()[0])
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(url), {log: process})
            yield Started(Target(name, url, (process.pid,)))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
