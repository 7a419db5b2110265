# SPDX-License-Identifier: Apache-2.0
"""A daemon without one of its threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from openenvd.schema.settings import Paths, Settings
from openenvd.server.daemon import VITAL_THREADS, Daemon
from openenvd.server.home_lock import hold_lock


def fail() -> None:
    raise ValueError("a defect")


def run_until_it_fails(name: str) -> None:
    thread = threading.Thread(target=fail, name=name)
    thread.start()
    thread.join()


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # restored afterwards
    paths = Paths(tmp_path)
    with hold_lock(paths) as lock:
        yield Daemon(paths, Settings(), None, None, lock)


@pytest.mark.parametrize("name", sorted(VITAL_THREADS))
async def test_a_daemon_stops_when_a_vital_thread_dies(
    daemon: Daemon, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.watch_threads()
    run_until_it_fails(name)
    await asyncio.wait_for(daemon.stopping.wait(), 10)
    assert f"the thread {name} failed" in caplog.text
    assert "a defect" in caplog.text


async def test_a_daemon_goes_on_without_a_thread_that_is_not_vital(daemon: Daemon) -> None:
    daemon.watch_threads()
    run_until_it_fails("lag-watchdog")
    await asyncio.sleep(0.05)
    assert not daemon.stopping.is_set()
