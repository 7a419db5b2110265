# SPDX-License-Identifier: Apache-2.0
"""The five figures of the seed, as PNG through matplotlib, an extra: `pip install '.[bench]'`.

scaling_curves        success and P99 over the batch size, a line per server
max_batch_comparison  the largest batch with 95 % success, by wait
batch_per_core        the same at the shortest wait, by core
latency_heatmap       P99 by server and wait, over the batch size
scaling_comparison    CPU a session, P99 beyond the wait, and memory a session
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .plan import usable_cores
from .results import Report, Summary
from .table import SUCCESS_THRESHOLD, grouped, max_batch

Line = tuple[str, str]  # a server, and the mode in which it was measured

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

    drawers = {
        "scaling_curves": _scaling_curves,
        "max_batch_comparison": _max_batch,
        "batch_per_core": _batch_per_core,
        "latency_heatmap": _heat_map,
        "scaling_comparison": _comparison,
    }
    written = [folder / f"{name}.png" for name in drawers]
    for path, draw in zip(written, drawers.values(), strict=True):
        figure = draw(plt, _Data(report))
        figure.tight_layout()
        figure.savefig(path, dpi=_DOTS_PER_INCH)
        plt.close(figure)
    return written


class _Data:
    """The report, as figures want it: by line, batch size and wait."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.lines = list(dict.fromkeys((s.server, s.mode) for s in report.summaries))
        self.waits = sorted({s.wait_seconds for s in report.summaries})
        self.batches = sorted({s.num_requests for s in report.summaries})

    def label(self, line: Line) -> str:
        several_modes = len({mode for _, mode in self.lines}) > 1
        return f"{line[0]} ({line[1]})" if several_modes else line[0]

    def points(
        self, line: Line, wait_seconds: float, value: Callable[[Summary], float]
    ) -> dict[int, float]:
        """By batch size, the median of `value`."""
        wanted = (*line, wait_seconds)
        fitting = [s for s in self.report.summaries if (s.server, s.mode, s.wait_seconds) == wanted]
        return {g[0].num_requests: statistics.median(map(value, g)) for g in grouped(fitting)}

    def largest(self, wait_seconds: float) -> dict[str, float]:
        """By label, the largest batch that succeeds."""
        return {
            self.label(line): max_batch(self.report.summaries, line[0], wait_seconds, line[1])
            for line in self.lines
        }


def _scaling_curves(pyplot: Any, data: _Data) -> Any:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    wait = data.waits[0]
    left.axhline(100 * SUCCESS_THRESHOLD, color="red", linestyle="--", alpha=0.5)
    _curves(left, data, lambda s: 100 * (1 - s.error_rate))
    left.set(ylabel="success (%)", ylim=(0, 105), title=f"Success, wait = {wait:g} s")
    right.axhline(wait, color="grey", linestyle=":", label="the wait itself")
    _curves(right, data, lambda s: s.total_p99, is_logarithmic=True)
    right.set(ylabel="total P99 (s)", title=f"Total P99, wait = {wait:g} s")
    return figure


def _max_batch(pyplot: Any, data: _Data) -> Any:
    figure, all_axes = pyplot.subplots(
        1, len(data.waits), figsize=(4.5 * len(data.waits) + 1, 5), squeeze=False
    )
    for axes, wait in zip(all_axes[0], data.waits, strict=True):
        _bars(axes, data.largest(wait))
        axes.set(ylabel="sessions at once", title=f"wait = {wait:g} s")
    figure.suptitle(f"Largest batch tried of which {100 * SUCCESS_THRESHOLD:g} % succeed")
    return figure


def _batch_per_core(pyplot: Any, data: _Data) -> Any:
    figure, axes = pyplot.subplots(figsize=(9, 5))
    cores, wait = usable_cores(), data.waits[0]
    _bars(axes, {label: most / cores for label, most in data.largest(wait).items()})
    title = f"Largest batch by core ({cores} cores, generators included; wait = {wait:g} s)"
    axes.set(ylabel="sessions per core", title=title)
    return figure


def _heat_map(pyplot: Any, data: _Data) -> Any:
    rows = [(line, wait) for line in data.lines for wait in data.waits]
    figure, axes = pyplot.subplots(figsize=(11, 1.5 + 0.6 * len(rows)))
    p99 = [
        data.points(line, wait, lambda s: s.total_p99 if s.successful else math.nan)
        for line, wait in rows
    ]
    seconds = [[row.get(n, math.nan) for n in data.batches] for row in p99]
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


def _comparison(pyplot: Any, data: _Data) -> Any:
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(16, 5))
    _curves(left, data, lambda s: s.server_cpu_ms_per_session)
    left.set(ylabel="ms", title="Server CPU a session")
    _curves(middle, data, lambda s: max(0.0, s.total_p99 - s.wait_seconds), is_logarithmic=True)
    middle.set(ylabel="seconds", title=f"Total P99 beyond the wait of {data.waits[0]:g} s")
    sizes = {w.server: w.bytes_per_session for w in data.report.weights}
    known = {name: each / 1024 for name, each in sizes.items() if each is not None}
    _bars(right, known, "{:.1f}")
    right.set(ylabel="kB", title="Memory a session" if known else "Memory a session: not measured")
    return figure


def _curves(
    axes: Any, data: _Data, value: Callable[[Summary], float], *, is_logarithmic: bool = False
) -> None:
    """Draw a line per server over the batch size, at the shortest wait."""
    every = {data.label(line): data.points(line, data.waits[0], value) for line in data.lines}
    for label, points in every.items():
        axes.plot(list(points), list(points.values()), marker="o", label=label)
    if is_logarithmic and any(y > 0 for points in every.values() for y in points.values()):
        axes.set_yscale("log", nonpositive="mask")
    axes.set_xscale("log", base=2)
    axes.set_xticks(data.batches, [f"{n:,}" for n in data.batches])
    axes.set_xlabel("sessions at once")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _bars(axes: Any, heights: Mapping[str, float], labels: str = "{:,.0f}") -> None:
    bars = axes.bar(range(len(heights)), list(heights.values()), color="steelblue")
    axes.bar_label(bars, fmt=labels)
    axes.set_xticks(range(len(heights)), [re.sub("[- ]", "\n", name) for name in heights])
    axes.grid(visible=True, axis="y", alpha=0.3)
