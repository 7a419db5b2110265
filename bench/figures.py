# SPDX-License-Identifier: Apache-2.0
"""The five figures of the seed, as PNG through matplotlib, an extra: `pip install '.[bench]'`.

scaling_curves        success and P99 over the batch size, a line per server
max_batch_comparison  the largest batch with 95 % success, by wait
batch_per_core        the same at the shortest wait, by core
latency_heatmap       P99 by server and wait, over the batch size
scaling_comparison    CPU a session, and P99 beside the limit (or one mode beside the other)
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .results import Report, Summary, Weight, machine
from .table import SUCCESS_THRESHOLD, grouped, max_batch

NAMES = (
    "scaling_curves", "max_batch_comparison", "batch_per_core", "latency_heatmap",
    "scaling_comparison",
)  # fmt: skip
_DOTS_PER_INCH = 130
_DARK = 0.7  # of the heat map's colours, from 0 to 1


def can_draw() -> bool:
    """Whether matplotlib is there; it is not imported."""
    return find_spec("matplotlib") is not None


def draw_all(report: Report, folder: Path) -> list[Path]:
    """Every figure; none where matplotlib is missing or nothing was measured."""
    if not can_draw() or not report.summaries:
        return []
    import matplotlib as mpl

    mpl.use("Agg")  # files, no windows
    from matplotlib import pyplot as plt

    drawers = (_scaling_curves, _max_batch, _batch_per_core, _heat_map, _comparison)
    written = []
    for name, draw in zip(NAMES, drawers, strict=True):
        figure = draw(plt, _Lines(report))
        figure.tight_layout()
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=_DOTS_PER_INCH)
        plt.close(figure)
        written.append(path)
    return written


class _Lines:
    """The report, as figures want it: by line (a server in a mode), batch size and wait."""

    def __init__(self, report: Report) -> None:
        self.summaries = report.summaries
        self.weights: list[Weight] = report.weights
        self.lines = list(dict.fromkeys((s.server, s.mode) for s in report.summaries))
        self.waits = sorted({s.wait_seconds for s in report.summaries})
        self.batches = sorted({s.num_requests for s in report.summaries})
        self._several_modes = len({mode for _, mode in self.lines}) > 1

    def label(self, line: tuple[str, str]) -> str:
        return f"{line[0]} ({line[1]})" if self._several_modes else line[0]

    def points(
        self, line: tuple[str, str], wait_seconds: float, value: Callable[[Summary], float]
    ) -> tuple[list[int], list[float]]:
        """Batch sizes, and the median of `value` at each."""
        fitting = self._fitting(line, wait_seconds)
        groups = grouped(fitting)
        return (
            [group[0].num_requests for group in groups],
            [statistics.median(value(s) for s in group) for group in groups],
        )

    def at(self, line: tuple[str, str], wait_seconds: float, requests: int) -> float:
        """The median P99 of one cell; NaN where nothing succeeded, or nothing was tried."""
        values = [
            s.total_p99
            for s in self._fitting(line, wait_seconds)
            if s.num_requests == requests and s.successful
        ]
        return statistics.median(values) if values else float("nan")

    def largest(self, line: tuple[str, str], wait_seconds: float) -> int:
        return max_batch(self.summaries, line[0], wait_seconds, line[1])

    def _fitting(self, line: tuple[str, str], wait_seconds: float) -> list[Summary]:
        wanted = (*line, wait_seconds)
        return [s for s in self.summaries if (s.server, s.mode, s.wait_seconds) == wanted]


def _scaling_curves(pyplot: Any, data: _Lines) -> Any:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    wait = data.waits[0]
    for line in data.lines:
        batches, success = data.points(line, wait, lambda s: 100 * (1 - s.error_rate))
        left.plot(batches, success, marker="o", label=data.label(line))
        batches, p99 = data.points(line, wait, lambda s: s.total_p99)
        right.plot(batches, p99, marker="o", label=data.label(line))
    left.axhline(100 * SUCCESS_THRESHOLD, color="red", linestyle="--", alpha=0.5)
    left.set(ylabel="success (%)", ylim=(0, 105), title=f"Success, wait = {wait:g} s")
    right.axhline(wait, color="grey", linestyle=":", label="the wait itself")
    right.set(ylabel="total P99 (s)", title=f"Total P99, wait = {wait:g} s")
    _log_scale(right)
    for axes in (left, right):
        _batch_axis(axes, data.batches)
        axes.legend()
    return figure


def _max_batch(pyplot: Any, data: _Lines) -> Any:
    figure, all_axes = pyplot.subplots(
        1, len(data.waits), figsize=(4.5 * len(data.waits) + 1, 5), squeeze=False
    )
    for axes, wait in zip(all_axes[0], data.waits, strict=True):
        largest = [data.largest(line, wait) for line in data.lines]
        _bars(axes, [data.label(line) for line in data.lines], largest, [f"{n:,}" for n in largest])
        axes.set(ylabel="sessions at once", title=f"wait = {wait:g} s")
    figure.suptitle(f"Largest batch tried of which {100 * SUCCESS_THRESHOLD:g} % succeed")
    return figure


def _batch_per_core(pyplot: Any, data: _Lines) -> Any:
    figure, axes = pyplot.subplots(figsize=(9, 5))
    cores, wait = int(machine()["cores"]), data.waits[0]
    per_core = [data.largest(line, wait) / cores for line in data.lines]
    _bars(
        axes, [data.label(line) for line in data.lines], per_core, [f"{n:,.0f}" for n in per_core]
    )
    axes.set(
        ylabel="sessions per core",
        title=f"Largest batch by core ({cores} cores, generators included; wait = {wait:g} s)",
    )
    return figure


def _heat_map(pyplot: Any, data: _Lines) -> Any:
    rows = [(line, wait) for line in data.lines for wait in data.waits]
    figure, axes = pyplot.subplots(figsize=(11, 1.5 + 0.6 * len(rows)))
    seconds = [[data.at(line, wait, n) for n in data.batches] for line, wait in rows]
    image = axes.imshow(seconds, aspect="auto", cmap="YlOrRd")
    for y, row in enumerate(seconds):
        for x, value in enumerate(row):
            colour = "white" if image.norm(value) > _DARK else "black"
            shown = "-" if math.isnan(value) else f"{value:.2f}"
            axes.text(x, y, shown, ha="center", va="center", color=colour)
    axes.set_xticks(range(len(data.batches)), [f"{n:,}" for n in data.batches])
    axes.set_yticks(range(len(rows)), [f"{data.label(line)}, {wait:g} s" for line, wait in rows])
    axes.set(xlabel="sessions at once", title="Total P99 (s)")
    figure.colorbar(image, ax=axes, label="seconds")
    return figure


def _comparison(pyplot: Any, data: _Lines) -> Any:
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(16, 5))
    wait = data.waits[0]
    for line in data.lines:
        batches, cpu = data.points(line, wait, lambda s: s.server_cpu_ms_per_session)
        left.plot(batches, cpu, marker="o", label=data.label(line))
        batches, beyond = data.points(line, wait, lambda s: max(0.0, s.total_p99 - s.wait_seconds))
        middle.plot(batches, beyond, marker="o", label=data.label(line))
    left.set(ylabel="ms", title="Server CPU a session")
    middle.set(ylabel="seconds", title=f"Total P99 beyond the wait of {wait:g} s")
    _log_scale(middle)
    for axes in (left, middle):
        _batch_axis(axes, data.batches)
        axes.legend()
    weights = {w.server: w.bytes_per_session for w in data.weights}
    names = [name for name, each in weights.items() if each is not None]
    kilobytes = [(weights[name] or 0.0) / 1024 for name in names]
    _bars(right, names, kilobytes, [f"{value:.1f}" for value in kilobytes])
    right.set(ylabel="kB", title="Memory a session" if names else "Memory a session: not measured")
    return figure


def _batch_axis(axes: Any, batches: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{n:,}" for n in batches])
    axes.set_xlabel("sessions at once")
    axes.grid(visible=True, alpha=0.3)


def _log_scale(axes: Any) -> None:
    """Where there is anything that has a logarithm; all may have failed."""
    if any(value > 0 for line in axes.get_lines() for value in line.get_ydata()):
        axes.set_yscale("log", nonpositive="mask")


def _bars(axes: Any, names: Sequence[str], heights: Sequence[float], labels: Iterable[str]) -> None:
    bars = axes.bar(range(len(names)), heights, color="steelblue")
    axes.bar_label(bars, labels=list(labels))
    axes.set_xticks(range(len(names)), [re.sub("[- ]", "\n", name) for name in names])
    axes.grid(visible=True, axis="y", alpha=0.3)
