# SPDX-License-Identifier: Apache-2.0
"""Which files a node of Slurm's keeps, of what its jobs have fetched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
