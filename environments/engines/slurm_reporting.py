# SPDX-License-Identifier: Apache-2.0
"""Slurm whose nodes see no folder of this machine's (`openenv up --slurm-report HOST`).

    agent: SlurmReporting ──sbatch──▶ a job: `providers/slurm_node.py`, of the node's own openenvd
              │                          │
              └─ ReportServer ◀──HTTP────┘  its plan, files; address, beats, exit, output

A replica's folder on this machine gets the files that a job in a shared folder would write
(`slurm_reports.py`), so all else is `SlurmEngine`'s. Jobs are told to drain or to end by Slurm's
signals, as ever, and that their replica has another by the answers to their reports.

Failure cases, beside those of `slurm_reports.py` and `slurm_posting.py`

    the node has no openenvd, or the job    it ends and has not been heard of: the exit says so, and
    does not reach this machine             what to look at
    nobody can listen at the address        `EngineGone` for all that is asked; tried again
    a copy of a project is not used any     it is removed with the replica that used it last, or
    more                                    when an agent begins
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import __version__
from ...shim.files import read_run_file
from ...system.request_origin import is_loopback
from ..engine_address import EngineAddress
from ..layout import Layout
from .base import Check, ExitFacts, Instance, ReplicaPlan
from .slurm import SlurmEngine
from .slurm_address import REPORT_VARIABLE, report_address, slurm_address
from .slurm_commands import Row
from .slurm_copies import Copies
from .slurm_files import OUTPUT_FILE_NAME, read_report
from .slurm_options import JobPlace, node_place
from .slurm_reports import JobFiles, ReportServer

_NOT_ENCRYPTED = (
    "jobs report to {host} without encryption: whoever can listen to the cluster's network sees "
    "tokens and files of what is launched"
)


def archive_path(layout: Layout, digest: str) -> Path:
    """Return where the files of one version of what is launched are kept for nodes, as tar."""
    return layout.home / "slurm" / "archives" / f"{digest}.tar"


def exposure(host: str) -> str | None:
    """Return a warning where jobs report to an address that others reach, too."""
    return None if is_loopback(host) else _NOT_ENCRYPTED.format(host=host)


class SlurmReporting(SlurmEngine):
    """Slurm's engine, for nodes that share no folder with this machine."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__()
        self._layout = Layout(Path(environ["OPENENV_HOME"]))
        self._host, port = report_address(environ[REPORT_VARIABLE])
        at = EngineAddress.of(self.name, slurm_address(environ))
        self._files = JobFiles(self._layout, self._archive_of)
        folder = self._layout.engines / at.key
        self._reports = ReportServer(self._layout, folder, self._host, port, self._files)
        self._copies = Copies(self._layout)
        self._has_cleared = False

    def check(self) -> Check:
        """Tell whether jobs can be submitted here, and what mends it if not."""
        found, warning = super().check(), exposure(self._host)
        return found if warning is None else replace(found, notes=(*found.notes, warning))

    def list(self) -> Iterable[Instance]:
        """Return every job of this user that carries our labels and is not forgotten."""
        self._reports.url()  # jobs report from now on
        if not self._has_cleared:
            self._has_cleared = True
            self._remove_archives()
        return super().list()

    def start(self, plan: ReplicaPlan) -> Instance:
        """Submit a job."""
        self._copies.started(plan.labels.replica)
        return super().start(plan)

    def remove(self, instance: Instance) -> None:
        """Forget a job, and the copies that no replica uses any more."""
        super().remove(instance)
        self._copies.removed(instance.labels.replica)
        self._remove_archives()

    def close(self) -> None:
        """End `changes` and `logs`; jobs report no more."""
        super().close()
        self._reports.close()

    def _place(self, plan: ReplicaPlan) -> JobPlace:
        replica = plan.labels.replica
        url = f"{self._reports.url()}/jobs/{replica}"
        return node_place(plan, plan.source["python"], url, self._reports.token(replica))

    def _run_dir(self, row: Row) -> Path:
        if row.labels.home != self._layout.home_label:
            return row.run_dir
        return self._layout.run_dir(row.labels.replica)

    def _exit(self, row: Row) -> ExitFacts:
        facts = super()._exit(row)
        was_heard = (row.run_dir / OUTPUT_FILE_NAME.format(job=row.id)).exists()
        is_explained = facts.ended_by is not None or facts.is_oom
        if is_explained or was_heard or read_report(row.run_dir, row.id) is not None:
            return facts
        python = read_run_file(str(row.run_dir))["plan"]["source"]["python"]
        return ExitFacts(
            error=f"job {row.id} on {row.node} ended with code {facts.exit_code} and was not heard "
            f"of: openenvd {__version__} has to be at {python} there (openenv up "
            f"--slurm-node-python), and {self._reports.url()} has to be reached from there"
        )

    def _note_read(self, folder: Path, job: str, read_bytes: int) -> None:
        self._files.forget_read(folder, job, read_bytes)

    def _archive_of(self, plan: dict[str, Any]) -> Path | None:
        digest = (plan.get("source") or {}).get("digest")
        return None if digest is None else archive_path(self._layout, str(digest))

    def _remove_archives(self) -> None:
        with (
            contextlib.suppress(OSError),
            self._copies.in_use() as digests,
        ):
            for path in archive_path(self._layout, "").parent.iterdir():  # also of killed launches
                if digests is not None and path.stem not in digests:
                    path.unlink(missing_ok=True)
