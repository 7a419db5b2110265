# SPDX-License-Identifier: Apache-2.0
"""The agenda of a measurement: every cell of the grid is tried on every target in turn.

    for each cell:   for each target (the order turns with every repetition): one batch

Targets alternate within the same minute, so that a machine that drifts drifts for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .crew import Crew
from .generator import Batch
from .plan import Cell, Plan
from .results import (
    Report,
    ResultFolder,
    Summary,
    Target,
    cpu_seconds,
    read_drops,
    rows_of,
    summary_of,
)

PAUSE_SECONDS = 0.5  # for the sessions of one batch to be gone before the next, as in the seed

OnProgress = Callable[[str, int, int], None]  # what is done now; batches done, and all of them


class Sweep:
    """One running measurement."""

    def __init__(
        self,
        plan: Plan,
        targets: Sequence[Target],
        folder: Path,
        *,
        on_progress: OnProgress = lambda *_: None,
        on_summary: Callable[[Summary], None] = lambda _: None,
        program: Sequence[str] = (),
    ) -> None:
        self.report = Report(plan)
        self._plan, self._targets = plan, list(targets)
        self._results = ResultFolder(folder)
        self._on_progress, self._on_summary = on_progress, on_summary
        self._program = program

    def run(self) -> list[Path]:
        """Measure everything; return the paths of all files."""
        batches: list[tuple[Cell, Target]] = []
        for cell in self._plan.cells():
            first = (cell.repetition - 1) % max(1, len(self._targets))
            turn = [*self._targets[first:], *self._targets[:first]]
            batches += [(cell, target) for target in turn]
        with Crew(self._plan.crew_size, self._program) as crew:
            for number, (cell, target) in enumerate(batches):
                self._on_progress(cell.words, number, len(batches))
                if number:
                    time.sleep(PAUSE_SECONDS)
                self._measure(crew, cell, target)
        self._on_progress("writing", len(batches), len(batches))
        return self.write()

    def write(self) -> list[Path]:
        """Write the report as it is now; return the paths of all files."""
        return self._results.finish(self.report)

    def _measure(self, crew: Crew, cell: Cell, target: Target) -> None:
        used_before, dropped_before = cpu_seconds(target), read_drops()
        harvest = crew.run(self._batch(cell, target))
        used, dropped = cpu_seconds(target) - used_before, read_drops()
        rows = rows_of(harvest, cell, target.name)
        summary = summary_of(rows, cell, target, harvest, used)
        if dropped is not None and dropped_before is not None:
            summary.kernel_listen_drops = dropped - dropped_before
        self._results.add(rows, summary)
        self.report.summaries.append(summary)
        self._on_summary(summary)

    def _batch(self, cell: Cell, target: Target) -> Batch:
        action = self._plan.action
        return Batch(
            host=target.host,
            port=target.port,
            path=target.path,
            token=target.token,
            others=target.addresses[1:],
            count=cell.requests,
            action={"wait_seconds": cell.wait_seconds} if action is None else action,
            timeout_seconds=self._plan.timeout_seconds + cell.wait_seconds,
            window=self._plan.window,
            handshake_seconds=self._plan.handshake_seconds,
        )
