# SPDX-License-Identifier: Apache-2.0
"""The agenda of a measurement: every target is weighed, then every cell tried on each in turn.

    for each target: memory, idle ─▶ with a few sessions open ─▶ with the largest batch open
    for each cell:   for each target (the order turns with every repetition): one batch

Targets alternate within the same minute, so that a machine that drifts drifts for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .crew import Crew
from .generator import Batch
from .plan import GENTLE_WINDOW, Cell, Plan
from .results import Report, ResultFolder, Summary, Weight, rows_of, summary_of
from .target import Target, check_answers, cpu_seconds, pss_bytes, read_dropped

PAUSE_SECONDS = 0.5  # for the sessions of one batch to be gone before the next, as in the seed
WARMING_SESSIONS = 64
_TICKS_APART_SECONDS = 1.0

OnProgress = Callable[[str, float, float], None]  # what is done now; so much of so much


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
        self._plan = plan
        self._targets = list(targets)
        self._results = ResultFolder(folder)
        self._on_progress = on_progress
        self._on_summary = on_summary
        self._program = program  # of the generators, if not our own
        self.report = Report()

    def run(self) -> list[Path]:
        """Measure everything; the files that were written."""
        for target in self._targets:
            check_answers(target)
        batches: list[tuple[Cell, Target]] = []
        for cell in self._plan.cells():
            first = (cell.repetition - 1) % max(1, len(self._targets))
            turn = [*self._targets[first:], *self._targets[:first]]
            batches += [(cell, target) for target in turn]
        with Crew(self._plan.crew_size, self._program) as crew:
            self._weigh_all(crew)
            for number, (cell, target) in enumerate(batches):
                if number:
                    time.sleep(PAUSE_SECONDS)
                self._measure(crew, cell, target, number, len(batches))
        self._on_progress("writing", len(batches), len(batches))
        return self.write()

    def write(self) -> list[Path]:
        """Write the report as it is now; return the paths of all files."""
        return self._results.finish(self.report)

    def _weigh_all(self, crew: Crew) -> None:
        if self._plan.sessions_to_weigh:
            for target in self._targets:
                if target.root_pids:
                    self._on_progress(f"weighing {target.name}", 0, 0)
                    self.report.weights.append(self._weigh(crew, target))
                    time.sleep(PAUSE_SECONDS)

    def _weigh(self, crew: Crew, target: Target) -> Weight:
        idle = pss_bytes(target)
        # What the first sessions make a server import and allocate is no session's weight.
        few, warm = self._hold(crew, target, min(WARMING_SESSIONS, self._plan.sessions_to_weigh))
        good, held = self._hold(crew, target, self._plan.sessions_to_weigh)
        return Weight(target.name, good, len(idle), sum(idle.values()), few, warm, held)

    def _hold(self, crew: Crew, target: Target, sessions: int) -> tuple[int, int]:
        """How many sessions were open at once, and what the target held then, in bytes."""
        held: dict[int, int] = {}
        harvest = crew.run(
            self._batch(Cell("ws", sessions, 0.0, 0), target, hold=True),
            on_held=lambda: held.update(pss_bytes(target)),
        )
        good = sum(outcome["error_kind"] is None for outcome in harvest.outcomes)
        return good, sum(held.values())

    def _measure(self, crew: Crew, cell: Cell, target: Target, number: int, total: int) -> None:
        words = f"{target.name}: {cell.words}" if len(self._targets) > 1 else cell.words
        told_at = 0.0

        def on_tick(ended: int) -> None:
            nonlocal told_at
            if time.monotonic() - told_at >= _TICKS_APART_SECONDS:
                told_at = time.monotonic()
                self._on_progress(words, number + ended / cell.requests, total)

        used_before, dropped_before = cpu_seconds(target), read_dropped()
        harvest = crew.run(self._batch(cell, target), on_tick=on_tick)
        used, dropped = cpu_seconds(target) - used_before, read_dropped()
        rows = rows_of(harvest, cell, target.name)
        summary = summary_of(rows, cell, target, harvest, self._plan, used)
        summary.server_pss_bytes = sum(pss_bytes(target).values())
        if dropped and dropped_before:
            summary.kernel_listen_overflows = dropped.overflows - dropped_before.overflows
            summary.kernel_listen_drops = dropped.drops - dropped_before.drops
        self._results.add(rows, summary)
        self.report.summaries.append(summary)
        self._on_summary(summary)

    def _batch(self, cell: Cell, target: Target, *, hold: bool = False) -> Batch:
        action = self._plan.action
        return Batch(
            mode=cell.mode,
            host=target.host,
            port=target.port,
            path=target.path,
            token=target.token,
            others=target.addresses[1:],
            count=cell.requests,
            action={"wait_seconds": cell.wait_seconds} if action is None else action,
            timeout_seconds=self._plan.timeout_seconds + cell.wait_seconds,
            window=GENTLE_WINDOW if hold else self._plan.window,
            handshake_seconds=self._plan.handshake_seconds,
            hold=hold,
        )
