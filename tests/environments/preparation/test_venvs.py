# SPDX-License-Identifier: Apache-2.0
"""Which virtual environments go: real folders, real run files."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from openenvd.environments.preparation import venv_cleanup
from openenvd.environments.preparation import venv_cleanup as cleanup
from openenvd.environments.preparation.project_venv import COMPLETE, USED, note_use
from openenvd.schema.layout import Layout
from openenvd.system.process.process_identity import boot_seconds

from ..conftest import write_run_file

DAY = 86_400.0
PAYLOAD_BYTES = 64 * 1024


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "home")


def make_venv(layout: Layout, key: str, *, half_made: bool = False) -> Path:
    """One that no launch has used since this boot."""
    venv = layout.venvs / key
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    (venv / "lib.so").write_bytes(os.urandom(PAYLOAD_BYTES))
    if not half_made:
        (venv / COMPLETE).write_text(json.dumps({"project": "/home/me/my_env"}))
    return venv


def note_use_a_day_ago(venv: Path) -> None:
    (venv / USED).write_text(repr(boot_seconds() - DAY))


def write_replica(layout: Layout, python: Path, provider: str = "local") -> None:
    argv = [str(python), "-m", "x"]
    runs: dict[str, Any] = {"argv": argv} if provider == "local" else {"plan": {"command": argv}}
    write_run_file(layout.run_dir("my_env-0-0123"), provider=provider, **runs)


def test_unused_environments_are_removed_with_their_size(layout: Layout, tmp_path: Path) -> None:
    venv = make_venv(layout, "a")
    [gone] = venv_cleanup.prune(layout)
    assert not venv.exists()
    assert (gone.path, gone.project) == (venv, "/home/me/my_env")
    assert gone.freed_bytes >= PAYLOAD_BYTES
    assert venv_cleanup.prune(layout) == []
    venv = make_venv(layout, "a")
    (tmp_path / "cache.so").hardlink_to(venv / "lib.so")
    [gone] = venv_cleanup.prune(layout)
    assert gone.freed_bytes < PAYLOAD_BYTES


@pytest.mark.parametrize("provider", ["local", "slurm"])
def test_the_environment_of_a_replica_is_kept_and_marked_as_used(
    layout: Layout, provider: str
) -> None:
    venv = make_venv(layout, "a")
    write_replica(layout, venv / "bin" / "python", provider)
    assert venv_cleanup.in_use(layout) == {venv}
    assert venv_cleanup.prune(layout) == []
    [found] = venv_cleanup.venvs_of(layout)
    assert venv_cleanup.is_launching(found, boot_seconds())


def test_all_environments_are_kept_while_a_run_file_cannot_be_used(layout: Layout) -> None:
    venvs = {make_venv(layout, "a"), make_venv(layout, "b")}
    folder = layout.run_dir("my_env-0-0123")
    folder.mkdir(parents=True)
    (folder / "replica.json").write_text('{"version": ')
    assert venv_cleanup.in_use(layout) == venvs
    assert venv_cleanup.prune(layout) == []


def test_what_a_replicas_environment_is_laid_over_is_kept(layout: Layout) -> None:
    base, overlay = make_venv(layout, "a"), make_venv(layout, "b")
    (overlay / COMPLETE).write_text(json.dumps({"base": str(base)}))
    write_replica(layout, overlay / "bin" / "python")
    assert venv_cleanup.in_use(layout) == {base, overlay}


def test_only_environments_unused_for_the_given_time_are_removed(layout: Layout) -> None:
    recent, old = make_venv(layout, "a"), make_venv(layout, "b")
    assert venv_cleanup.prune_old(layout, run_seconds=100 * DAY, keep_seconds=30 * DAY) == []
    note_use_a_day_ago(recent)
    assert venv_cleanup.prune_old(layout, run_seconds=101 * DAY, keep_seconds=30 * DAY) == []
    assert [gone.path for gone in venv_cleanup.prune_old(layout, 130 * DAY, 30 * DAY)] == [old]
    assert [gone.path for gone in venv_cleanup.prune_old(layout, 131 * DAY, 30 * DAY)] == [recent]


def test_with_another_database_the_time_begins_anew(layout: Layout) -> None:
    venv = make_venv(layout, "a")
    venv_cleanup.prune_old(layout, run_seconds=100 * DAY, keep_seconds=30 * DAY)
    assert venv_cleanup.prune_old(layout, run_seconds=0.0, keep_seconds=30 * DAY) == []
    assert venv_cleanup.prune_old(layout, run_seconds=29 * DAY, keep_seconds=30 * DAY) == []
    assert [gone.path for gone in venv_cleanup.prune_old(layout, 30 * DAY, 30 * DAY)] == [venv]


@pytest.mark.parametrize("step", [-400 * DAY, 400 * DAY], ids=["back", "ahead"])
def test_a_step_of_the_clock_neither_removes_nor_keeps_an_environment(
    layout: Layout, step: float
) -> None:
    launching, unused = make_venv(layout, "a"), make_venv(layout, "b")
    half_made = make_venv(layout, "c", half_made=True)
    assert note_use(launching)
    then = time.time() + step
    for path in (*launching.iterdir(), *unused.iterdir(), launching, unused, half_made):
        os.utime(path, (then, then))  # what was used before the step of the clock
    assert [gone.path for gone in venv_cleanup.prune_old(layout, 0.0, 30 * DAY)] == [half_made]
    assert [gone.path for gone in venv_cleanup.prune(layout)] == [unused]


def test_what_is_made_or_used_is_kept_and_what_is_removed_not_found(layout: Layout) -> None:
    venv = make_venv(layout, "a", half_made=True)
    with FileLock(layout.venvs / "a.lock"):
        assert venv_cleanup.prune(layout) == []
    assert [gone.path for gone in venv_cleanup.prune(layout)] == [venv]
    venv = make_venv(layout, "a")
    [chosen] = venv_cleanup.venvs_of(layout)
    assert cleanup._take_away(chosen)
    assert not note_use(venv)
    assert [gone.path for gone in venv_cleanup.prune(layout)] == [venv]
    assert not venv.exists()
    venv = make_venv(layout, "a")
    [chosen] = venv_cleanup.venvs_of(layout)
    note_use(venv)
    assert cleanup._remove(chosen) is None
    assert note_use(venv)


@pytest.mark.parametrize(
    ("used", "is_kept"),
    [
        ("1000.0", True),
        (f"{1000 - venv_cleanup.LAUNCH_SECONDS}", True),
        (f"{999 - venv_cleanup.LAUNCH_SECONDS}", False),
        (f"{2**30 + 1000}", False),  # in another boot
        ("", False),
    ],
)
def test_a_launch_has_time_to_write_its_run_file(used: str, is_kept: bool) -> None:
    venv = venv_cleanup.Venv(Path("a"), None, used)
    assert venv_cleanup.is_launching(venv, now=1000.0) is is_kept
