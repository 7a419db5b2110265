# SPDX-License-Identifier: Apache-2.0
"""Which virtual environments go: real folders, real run files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from filelock import FileLock

from openenvd.environments.layout import Layout
from openenvd.environments.run_files import RUN_FILE_VERSION
from openenvd.environments.venv import cleanup
from openenvd.environments.venv.cleanup import LAUNCH_SECONDS, Venv, in_use, prune, unused, venvs_of
from openenvd.environments.venv.project_venv import COMPLETE, note_use

DAY = 86_400.0
PAYLOAD_BYTES = 64 * 1024


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "home")


def make_venv(layout: Layout, key: str, *, days: float = 1.0, half_made: bool = False) -> Path:
    """One that was last used so many days ago."""
    venv = layout.venvs / key
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    (venv / "lib.so").write_bytes(os.urandom(PAYLOAD_BYTES))
    marker = venv if half_made else venv / COMPLETE
    if not half_made:
        marker.write_text(json.dumps({"project": "/home/me/my_env"}))
    then = time.time() - days * DAY
    os.utime(marker, (then, then))
    return venv


def write_run_file(layout: Layout, python: Path) -> None:
    folder = layout.run_dir("my_env-0-0123")
    folder.mkdir(parents=True)
    told = {
        "version": RUN_FILE_VERSION,
        "environment": "my_env",
        "replica_id": "my_env-0-0123",
        "ordinal": 0,
    }
    (folder / "replica.json").write_text(json.dumps({**told, "argv": [str(python), "-m", "x"]}))


def test_unused_environments_are_removed_and_reported_with_their_size(layout: Layout) -> None:
    venv = make_venv(layout, "a")
    [gone] = prune(layout)
    assert not venv.exists()
    assert (gone.path, gone.project) == (venv, "/home/me/my_env")
    assert gone.freed_bytes >= PAYLOAD_BYTES
    assert prune(layout) == []


def test_hard_linked_files_are_not_counted_as_freed(layout: Layout, tmp_path: Path) -> None:
    venv = make_venv(layout, "a")
    (tmp_path / "cache.so").hardlink_to(venv / "lib.so")
    [gone] = prune(layout)
    assert gone.freed_bytes < PAYLOAD_BYTES


def test_the_environment_of_a_replica_is_kept_and_marked_as_used(layout: Layout) -> None:
    venv = make_venv(layout, "a", days=100)
    write_run_file(layout, venv / "bin" / "python")
    assert in_use(layout) == {venv}
    assert prune(layout) == []
    [found] = venvs_of(layout)
    assert found.used_at > time.time() - DAY


def test_what_a_replicas_environment_is_laid_over_is_kept(layout: Layout) -> None:
    base, overlay = make_venv(layout, "a", days=100), make_venv(layout, "b", days=100)
    (overlay / COMPLETE).write_text(json.dumps({"base": str(base)}))
    write_run_file(layout, overlay / "bin" / "python")
    assert in_use(layout) == {base, overlay}


def test_only_environments_unused_for_the_given_time_are_removed(layout: Layout) -> None:
    recent, old = make_venv(layout, "a", days=29), make_venv(layout, "b", days=31)
    assert [gone.path for gone in prune(layout, keep_seconds=30 * DAY)] == [old]
    assert recent.exists()


def test_an_environment_that_a_launch_has_just_looked_up_is_kept(layout: Layout) -> None:
    venv = make_venv(layout, "a")
    assert note_use(venv)
    assert prune(layout) == []


def test_an_environment_that_is_being_made_is_kept(layout: Layout) -> None:
    venv = make_venv(layout, "a", half_made=True)
    with FileLock(layout.venvs / "a.lock"):
        assert prune(layout) == []
    assert [gone.path for gone in prune(layout)] == [venv]


def test_an_environment_used_after_it_was_chosen_is_kept_complete(layout: Layout) -> None:
    venv = make_venv(layout, "a")
    [chosen] = venvs_of(layout)
    note_use(venv)
    assert cleanup._remove(chosen) is None
    assert note_use(venv)


def test_a_launch_does_not_find_an_environment_that_is_being_removed(layout: Layout) -> None:
    venv = make_venv(layout, "a")
    [chosen] = venvs_of(layout)
    assert cleanup._take_away(chosen)
    assert not note_use(venv)


def test_an_interrupted_removal_is_finished_by_the_next_one(layout: Layout) -> None:
    venv = make_venv(layout, "a")
    [chosen] = venvs_of(layout)
    cleanup._take_away(chosen)
    os.utime(venv, (0, 0))
    assert [gone.path for gone in prune(layout)] == [venv]
    assert not venv.exists()


def test_without_projects_there_is_nothing_to_do(layout: Layout) -> None:
    assert prune(layout) == []


def test_a_launch_has_time_to_write_its_run_file() -> None:
    venv = Venv(Path("/a"), None, used_at=1000.0)
    assert unused([venv], set(), now=1000.0 + LAUNCH_SECONDS, keep_seconds=0.0) == []
    assert unused([venv], set(), now=1001.0 + LAUNCH_SECONDS, keep_seconds=0.0) == [venv]
