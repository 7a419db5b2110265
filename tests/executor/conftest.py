# SPDX-License-Identifier: Apache-2.0
"""Fixtures that start executors; and nothing may survive a test."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.executor.policy.plan import Plan

from .executor_bench import Bench, make_plan


def open_descriptors() -> set[str]:
    return {
        f"{fd}:{os.readlink(f'/proc/self/fd/{fd}')}"
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }


@pytest.fixture(autouse=True)
def nothing_survives(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No child process, thread or descriptor is left when a test ends."""
    folder = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
    before = open_descriptors()
    # What other tests in this process have: `multiprocessing` keeps its resource tracker.
    children = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - children == set()
    assert [t.name for t in threading.enumerate() if t.name.startswith("executor")] == []
    if sys.platform == "linux":
        assert open_descriptors() - before == set()


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(plan: Plan | None = None, *, start: bool = True, **options: Any) -> Bench:
        options = {"cancel_grace_seconds": 5.0, **options}
        bench = Bench(tmp_path, plan or make_plan(), **options)
        made.append(bench)
        if start:
            bench.executor.start()
        return bench

    yield make
    for bench in made:
        bench.executor.stop(grace_seconds=0.0)


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """A running executor with two guaranteed and two burst workers of each schedule."""
    return make_bench()
