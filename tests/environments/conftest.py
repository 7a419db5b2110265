# SPDX-License-Identifier: Apache-2.0
"""A home of its own for every test, which leaves no process behind."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.environments import run_files
from openenvd.environments.engines import started_replicas
from openenvd.environments.engines.registry import GROUP
from openenvd.environments.run_files import RUN_FILE_VERSION, RunFile
from openenvd.environments.shim.client import ShimClient, ShimGone
from openenvd.schema.layout import Layout

GRACE_SECONDS = 10.0


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short, so that sockets fit in it; afterwards nothing that was started from it runs."""
    folder = Path(tempfile.mkdtemp(prefix="oe-"))
    monkeypatch.setenv("OPENENV_HOME", str(folder))
    yield folder
    left = [process for process in psutil.process_iter() if _belongs_to(process, folder)]
    _, alive = psutil.wait_procs(left, timeout=GRACE_SECONDS)
    told = [f"{process.pid} {process.cmdline()}" for process in alive]
    for process in alive:
        process.kill()
    shutil.rmtree(folder)
    assert not told, f"left running: {told}"


def write_run_file(run_dir: Path, **changes: Any) -> None:
    """Write the run file of a replica that nothing runs; the folder is named after the replica."""
    told = {
        "version": RUN_FILE_VERSION,
        "replica_id": run_dir.name,
        "environment": "sample",
        **dict.fromkeys(("request_id", "socket_path", "log_path", "host"), ""),
        **dict.fromkeys(("ordinal", "number", "port", "created_at"), 0),
    }
    run_dir.mkdir(parents=True)
    (run_dir / "replica.json").write_text(json.dumps(told | changes))


class Started(list[RunFile]):
    @property
    def address(self) -> str:
        return self[0].address

    def wait(self, seconds: float = 60.0) -> list[dict[str, Any]]:
        """What is known of each, once it is ready; or why it is not."""
        found = []
        for each in self:
            with ShimClient.connect(each.socket_path) as link:
                try:
                    status = link.wait(lambda s: s["state"] != "starting", seconds)
                except ShimGone as exc:
                    if link.status["state"] in started_replicas.ALIVE:
                        raise started_replicas.shim_lost(each) from exc
                    status = link.status
            started_replicas.raise_if_ended(each, status)
            found.append(asdict(started_replicas.started_replica(each, status)))
        return found

    def stop(self) -> None:
        run_files.stop_replicas([each.run_dir for each in self], 0.0)


@pytest.fixture
def layout(home: Path) -> Layout:
    return Layout(home)


def agents_of(home: Path) -> list[psutil.Process]:
    """The agents of engines that run for this home."""
    return [each for each in psutil.process_iter() if _is_agent(each) and _belongs_to(each, home)]


def _is_agent(process: psutil.Process) -> bool:
    try:
        return "openenvd: agent" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _belongs_to(process: psutil.Process, folder: Path) -> bool:
    if process.pid == psutil.Process().pid:
        return False
    try:
        return process.environ().get("OPENENV_HOME") == str(folder)
    except psutil.Error:
        return False


def install_engines(folder: Path, **locations: str) -> None:
    """Put the files of an installed package into a folder: engines, each at its `module:Class`."""
    module = "_".join(("engines", *locations))
    info = folder / "some_engines-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    points = "".join(f"{name} = {module}:{name}\n" for name in locations)
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}")
    given = (f"{name} = EngineEntry({at!r}, Preparation.IMAGE)\n" for name, at in locations.items())
    code = "from openenvd.environments.engines.base import EngineEntry, Preparation\n"
    (folder / f"{module}.py").write_text(code + "".join(given))
