# SPDX-License-Identifier: Apache-2.0
"""A daemon without one of its threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenvd.server.daemon import VITAL_THREADS, _Daemon, _hold_lock
from openenvd.server.settings import Paths, Settings


def fail() -> None:
    raise ValueError("a defect")


def run_to_its_death(name: str) -> None:
    thread = threading.Thread(target=fail, name=name)
    thread.start()
    thread.join()


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Daemon]:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # restored afterwards
    paths = Paths(tmp_path)
    with _hold_lock(paths) as lock:
        yield _Daemon(paths, Settings(), None, None, lock)


@pytest.mark.parametrize("name", sorted(VITAL_THREADS))
async def test_a_daemon_ends_when_it_could_only_pretend_to_work(
    daemon: _Daemon, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    daemon._mind_threads()
    run_to_its_death(name)
    await asyncio.wait_for(daemon._stopping.wait(), 10)
    assert f"the thread {name} died" in caplog.text
    assert "a defect" in caplog.text


async def test_a_daemon_lives_on_without_a_thread_that_is_not_vital(daemon: _Daemon) -> None:
    daemon._mind_threads()
    run_to_its_death("log-watcher")
    await asyncio.sleep(0.05)
    assert not daemon._stopping.is_set()
