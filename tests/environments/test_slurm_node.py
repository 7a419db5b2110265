# SPDX-License-Identifier: Apache-2.0
"""Which files a node of Slurm's keeps, of what its jobs have fetched."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openenvd.environments.engines.slurm_options import TOKEN_VARIABLE, URL_VARIABLE
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

    def begin_and_remove(path: Path, ignore_errors: bool = False) -> None:
        with keeping(folder):
            assert not (folder / "my_env").exists()
            (folder / "my_env").mkdir()
            rmtree(path, ignore_errors)
            assert (folder / "my_env").is_dir()

    monkeypatch.setattr(shutil, "rmtree", begin_and_remove)
    with keeping(tmp_path / "own"):
        assert {path.name for path in tmp_path.iterdir()} == {"own", "left"}


JOB = """
import sys, time
from openenvd.environments.engines.slurm_posting import AgentAddress
from openenvd.environments.providers import slurm_node
def wait(*_):
    print("begun", flush=True)
    time.sleep(60)
AgentAddress.ask = wait
sys.exit(slurm_node.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_job_that_is_told_to_end_before_it_serves_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    others, killed = tmp_path / "another", tmp_path / "openenvd-job-killed"
    others.mkdir()
    killed.mkdir()
    url = {URL_VARIABLE: "http://127.0.0.1:1/jobs/echo-0-abc", TOKEN_VARIABLE: "token"}
    environ = os.environ | url | {"SLURM_JOB_ID": "7", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", JOB]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"begun\n"
        was_removed = not killed.exists()
        job.send_signal(number)
    assert was_removed
    assert job.returncode == 128 + number
    assert list(tmp_path.iterdir()) == [others]
