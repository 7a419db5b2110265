# SPDX-License-Identifier: Apache-2.0
"""What runs on a login node for a daemon elsewhere: Slurm's engine, at the end of its connection.

Each replica has a folder here, below openenvd's home, which the nodes see: `slurm/HOME/REPLICA`,
where HOME is the label of the daemon's own home. It has what such a folder of a daemon's has: the
run file that the job reads, and the files that both write (`slurm_files.py`). The files of what is
launched are in `slurm/sources/HOME`, and go when the daemon there says that no replica uses them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ...shim.files import RUN_FILE_NAME, write_json
from ..layout import make_private
from .base import Instance, Labels, ReplicaPlan
from .remote_engine import serve
from .slurm import SlurmEngine
from .slurm_files import left_jobs

HOME_VARIABLE = "OPENENV_HOME"


def home_there() -> Path:
    """Return openenvd's home on this machine."""
    if named := os.environ.get(HOME_VARIABLE):
        return Path(named).expanduser().absolute()
    from platformdirs import user_state_path

    return user_state_path("openenvd")


def copies(home: Path, label: str) -> Path:
    """Return where the files of what a home elsewhere launches are, a folder for each version."""
    return home / "slurm" / "sources" / label


class SlurmForOthers(SlurmEngine):
    """Slurm's engine, for replicas whose folders are made here."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home

    def find(self, plan: ReplicaPlan) -> Instance | None:
        """Return the job of a replica."""
        return super().find(self._here(plan))

    def start(self, plan: ReplicaPlan) -> Instance:
        """Submit a job, whose folder has the replica's plan."""
        plan = self._here(plan)
        folder = make_private(Path(plan.run_dir))
        write_json(str(folder / RUN_FILE_NAME), {"plan": plan.to_json()}, sync=True)
        return super().start(plan)

    def remove(self, instance: Instance) -> None:
        """Forget a job, and its replica's folder, unless a job that was left may look there."""
        super().remove(instance)
        folder = self._folder_of(instance.labels)
        if not left_jobs(folder):
            shutil.rmtree(folder, ignore_errors=True)

    def keep_copies(self, home: str, digests: Iterable[str]) -> None:
        """Remove all copies of what a home launches, but those of these digests."""
        kept = set(digests)
        for path in copies(self._home, home).glob("*"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _here(self, plan: ReplicaPlan) -> ReplicaPlan:
        return replace(plan, run_dir=str(self._folder_of(plan.labels)))

    def _folder_of(self, labels: Labels) -> Path:
        return self._home / "slurm" / labels.home / labels.replica


if __name__ == "__main__":
    os.umask(0o077)
    serve(SlurmForOthers(home_there()))
