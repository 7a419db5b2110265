# SPDX-License-Identifier: Apache-2.0
"""A daemon removes what is left lying about, and starts whether it can or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openenvd.client import daemon
from openenvd.environments.preparation.project_venv import COMPLETE
from openenvd.environments.preparation.venv_cleanup import UNUSED
from openenvd.requests_db.connections.sqlite import WriteConnection
from openenvd.requests_db.transactions import retention
from openenvd.schema.settings import Paths, Settings
from openenvd.server.housekeeping.sweep import collect

HUNDRED_DAYS = 100 * 86_400.0


@pytest.fixture
def venv(paths: Paths, dispatch: WriteConnection) -> Path:
    """Unused for a hundred days, by a daemon that has run for that long."""
    folder = paths.venvs / "a"
    folder.mkdir(parents=True)
    (folder / COMPLETE).write_text("{}")
    (folder / UNUSED).write_text(json.dumps({"used": "", "since": 0.0}))
    dispatch.write(retention.note_time, HUNDRED_DAYS, HUNDRED_DAYS)
    return folder


def test_a_daemon_that_starts_removes_long_unused_virtual_environments(
    paths: Paths, venv: Path
) -> None:
    daemon.connect(paths, settings={"port": 0})
    daemon.stop(paths)  # it finishes what it has begun
    assert not venv.exists()


def test_how_long_is_a_setting(paths: Paths, venv: Path) -> None:
    collect(paths, Settings(keep_venv_days=36_500), HUNDRED_DAYS)
    assert venv.exists()
    collect(paths, Settings(), HUNDRED_DAYS)
    assert not venv.exists()


def test_an_unreadable_folder_does_not_keep_a_daemon_from_starting(paths: Paths) -> None:
    paths.venvs.write_text("no folder")
    daemon.connect(paths, settings={"port": 0})
    daemon.stop(paths)
