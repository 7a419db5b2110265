# SPDX-License-Identifier: Apache-2.0
"""Ray's options and address, and the process of its driver, without Ray."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from openenvd.environments.engines.base import EngineGone, EngineRefused, Labels, ReplicaPlan
from openenvd.environments.engines.ray import driver as ray_driver
from openenvd.environments.engines.ray.driver import RayDriver
from openenvd.environments.engines.ray.options import bundle, check_options, options_of, ray_address

from ...env_host.hosts import until


def plan(**fields: object) -> ReplicaPlan:
    labels = Labels("home", "sample", "sample-0-1", "1")
    known: dict[str, object] = {"labels": labels, "image": "", "host": "127.0.0.1", "port": 8000}
    return ReplicaPlan(**(known | fields))  # type: ignore[arg-type]


def test_limits_are_the_bundle_options_json_and_no_sandbox() -> None:
    assert bundle(plan()) == {"CPU": 1.0}
    options = {"resources": '{"disk": 0.5}'}
    asked = plan(cpus=2.0, memory_bytes=1 << 30, gpus=2, options=options)
    assert bundle(asked) == {"CPU": 2.0, "memory": float(1 << 30), "GPU": 2, "disk": 0.5}
    assert bundle(plan(gpus=1, options={"gpus": "0.25"}))["GPU"] == 0.25  # a share
    options = {"runtime-env": '{"pip": ["numpy"]}', "label-selector": '{"zone": "a"}'}
    check_options(options, sandbox=False)
    found = {"runtime-env": {"pip": ["numpy"]}, "label-selector": {"zone": "a"}}
    assert options_of(options) == found
    with pytest.raises(EngineRefused, match="no sandbox"):
        check_options({}, sandbox=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resources": "disk"}, "must be a JSON object"),
        ({"resources": '{"CPU": 1}'}, "is not a custom resource"),
        ({"resources": '{"disk": true}'}, "must be a number above 0"),
        ({"runtime-env": "[]"}, "must be a JSON object"),
        ({"gpus": "many"}, "must be a number"),
        ({"gpus": "nan"}, "must be a number"),
        ({"shm-size": "1g"}, "ray has no option 'shm-size'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, str], words: str) -> None:
    with pytest.raises(EngineRefused, match=words):
        check_options(options, sandbox=False)


def test_the_cluster_is_the_one_of_the_variable_else_that_which_runs_here(tmp_path: Path) -> None:
    environ = {"RAY_ADDRESS": "head:6399", "RAY_AUTH_MODE": "token", "RAY_LOG": "x"}
    found = {"RAY_ADDRESS": "head:6399", "RAY_AUTH_MODE": "token"}
    assert ray_address(environ) == ray_address(found) == found
    others = [{"RAY_TMPDIR": str(tmp_path), **more} for more in ({}, {"RAY_ADDRESS": "auto"})]
    assert [ray_address(each) for each in others] == [{"RAY_ADDRESS": ""}] * 2
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:6399")
    assert [ray_address(each) for each in others] == [{"RAY_ADDRESS": "127.0.0.1:6399"}] * 2


FUNCTIONS = """
import os, pathlib, time

(pathlib.Path(os.environ["PIDS"]) / str(os.getpid())).touch()

def connect(address):
    time.sleep(600)
"""


@pytest.fixture
def head() -> Iterator[socket.socket]:
    """Listens as a cluster's head does, and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def driver_at(port: int, folder: Path) -> RayDriver:
    """A driver for the head at a port; its processes write themselves down."""
    (folder / "functions_of_driver.py").write_text(FUNCTIONS)
    (folder / "pids").mkdir()
    environ = {
        "PYTHONPATH": str(folder),
        "PIDS": str(folder / "pids"),
        "RAY_ADDRESS": f"127.0.0.1:{port}",
    }
    return RayDriver({**os.environ, **environ}, "functions_of_driver")


def started(folder: Path) -> list[int]:
    return [int(each.name) for each in (folder / "pids").iterdir()]


def test_a_driver_that_is_closed_while_it_connects_ends_and_no_other_is_started(
    head: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_driver, "PAUSE_SECONDS", 0.0)
    driver = driver_at(head.getsockname()[1], tmp_path)
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(driver.call, "nodes") for _ in range(3)]
        until(lambda: started(tmp_path))
        driver.close()
        for each in asked:
            with pytest.raises(EngineGone):
                each.result(10.0)
    with pytest.raises(EngineGone):
        driver.call("nodes")
    [pid] = started(tmp_path)
    assert not psutil.pid_exists(pid)


def test_no_driver_is_started_for_a_cluster_that_is_gone(
    head: socket.socket, tmp_path: Path
) -> None:
    """It would import Ray each time that the agent asks."""
    port = head.getsockname()[1]
    head.close()
    driver = driver_at(port, tmp_path)
    with pytest.raises(EngineGone, match=f"Ray does not answer at 127.0.0.1:{port}"):
        driver.call("nodes")
    assert started(tmp_path) == []
