# SPDX-License-Identifier: Apache-2.0
"""Which files a node of Slurm's keeps, of what its jobs have fetched."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openenvd.environments.providers.slurm_node import keeping

KEEPER = """
import sys
from pathlib import Path
from openenvd.environments.providers.slurm_node import keeping
with keeping(Path(sys.argv[1])):
    print("kept", flush=True)
    sys.stdin.read()
"""


def test_files_stay_while_a_job_runs_in_them_and_are_removed_by_the_next(tmp_path: Path) -> None:
    used, left, own = (tmp_path / name for name in ("used", "left", "own"))
    for folder in (used, left):
        (folder / "my_env").mkdir(parents=True)
    command = [sys.executable, "-c", KEEPER, str(used)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"kept\n"
        assert not left.exists()
        with keeping(own):
            assert (used / "my_env").is_dir()
            assert own.is_dir()
        job.kill()
    with keeping(own):
        assert not used.exists()
        with keeping(own):
            assert own.is_dir()


def test_a_job_that_begins_while_its_files_are_removed_has_them_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rmtree = tmp_path / "left", shutil.rmtree
    (folder / "my_env").mkdir(parents=True)

    def begin_and_remove(path: Path, **options: bool) -> None:
        with keeping(folder):
            assert not (folder / "my_env").exists()
            (folder / "my_env").mkdir()
            rmtree(path, **options)
            assert (folder / "my_env").is_dir()

    monkeypatch.setattr(shutil, "rmtree", begin_and_remove)
    with keeping(tmp_path / "own"):
        assert {path.name for path in tmp_path.iterdir()} == {"own", "left"}
