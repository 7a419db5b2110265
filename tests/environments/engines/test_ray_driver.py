# SPDX-License-Identifier: Apache-2.0
"""The driver process of a Ray cluster, with functions that need no Ray."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from openenvd.environments.engines.base import EngineGone
from openenvd.environments.engines.ray import driver as ray_driver
from openenvd.environments.engines.ray.driver import RayDriver

FUNCTIONS = """
import os, pathlib, time

(pathlib.Path(os.environ["PIDS"]) / str(os.getpid())).touch()

def connect(address):
    time.sleep(600)
"""


@pytest.fixture
def head() -> Iterator[socket.socket]:
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


def wait_for(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30.0
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_driver_that_is_closed_while_it_connects_ends_and_no_other_is_started(
    head: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_driver, "PAUSE_SECONDS", 0.0)
    driver = driver_at(head.getsockname()[1], tmp_path)
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(driver.call, "nodes") for _ in range(3)]
        wait_for(lambda: started(tmp_path))
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
