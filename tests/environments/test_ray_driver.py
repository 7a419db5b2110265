# SPDX-License-Identifier: Apache-2.0
"""The driver process of a Ray cluster, with functions that need no Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from openenvd.environments.engines import ray_driver
from openenvd.environments.engines.base import EngineGone
from openenvd.environments.engines.ray_driver import RayDriver

FUNCTIONS = """
import os, pathlib, time

def connect(address):
    (pathlib.Path(address) / str(os.getpid())).touch()
    time.sleep(600)
"""


def wait_for(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30.0
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_driver_that_is_closed_while_it_connects_ends_and_no_other_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_driver, "PAUSE_SECONDS", 0.0)
    (tmp_path / "functions_of_driver.py").write_text(FUNCTIONS)
    (pids := tmp_path / "pids").mkdir()
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "RAY_ADDRESS": str(pids)}
    driver = RayDriver(environ, "functions_of_driver")
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(driver.call, "nodes") for _ in range(3)]
        wait_for(lambda: list(pids.iterdir()))
        driver.close()
        for each in asked:
            with pytest.raises(EngineGone):
                each.result(10.0)
    with pytest.raises(EngineGone):
        driver.call("nodes")
    [pid] = pids.iterdir()
    assert not psutil.pid_exists(int(pid.name))
