# SPDX-License-Identifier: Apache-2.0
"""The history of the machine's memory, where it cannot be measured."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openenvd.server.dashboard import memory
from openenvd.server.dashboard.memory import MemoryHistory


async def test_measuring_goes_on_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "POLL_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(memory, "MAX_SHARE", 1.0)
    asked = 0

    def status() -> object:
        nonlocal asked
        asked += 1
        raise ProcessLookupError

    deps: Any = SimpleNamespace(
        paths=SimpleNamespace(home=tmp_path),
        reconciler=SimpleNamespace(replicas=SimpleNamespace(live={})),
        executor=SimpleNamespace(status=status),
    )
    history = MemoryHistory(deps)
    for _ in range(3):
        await history.look()
    assert asked == 3
    logged = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert len(logged) == 1
