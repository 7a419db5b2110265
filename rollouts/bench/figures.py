# SPDX-License-Identifier: Apache-2.0
"""Two figures, as PNG through matplotlib, an extra: `pip install '.[bench]'`.

scaling_curves         success and P99 over the batch size: a line for each server and wait
max_batch_comparison   the largest batch with 95 % success, also by core: a bar for each of these

The seed's further figures show the same values: summary.csv has its fields, for its own analysis.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .plan import usable_cores
from .results import Report, Summary
from .table import SUCCESS_THRESHOLD, grouped, max_batch

_DOTS_PER_INCH = 130


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

    drawers = {"scaling_curves": _scaling_curves, "max_batch_comparison": _max_batch}
    written = [folder / f"{name}.png" for name in drawers]
    for path, draw in zip(written, drawers.values(), strict=True):
        figure = draw(plt, report.summaries)
        figure.tight_layout()
        figure.savefig(path, dpi=_DOTS_PER_INCH)
        plt.close(figure)
    return written


def _scaling_curves(pyplot: Any, summaries: list[Summary]) -> Any:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    left.axhline(100 * SUCCESS_THRESHOLD, color="red", linestyle="--", alpha=0.5)
    _curves(left, summaries, lambda s: 100 * (1 - s.error_rate))
    left.set(ylabel="success (%)", ylim=(0, 105), title="Success")
    _curves(right, [s for s in summaries if s.successful], lambda s: s.total_p99)
    right.set_yscale("log", nonpositive="mask")
    right.set(ylabel="total P99 (s)", title="Total P99, the wait included")
    return figure


def _curves(axes: Any, summaries: list[Summary], value: Callable[[Summary], float]) -> None:
    """Draw the median of the repetitions over the batch size."""
    lines: dict[str, dict[int, float]] = {}
    for group in grouped(summaries):
        line = lines.setdefault(_label(group[0].server, group[0].wait_seconds), {})
        line[group[0].num_requests] = statistics.median(map(value, group))
    for label, points in lines.items():
        axes.plot(list(points), list(points.values()), marker="o", label=label)
    batches = sorted({s.num_requests for s in summaries})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{n:,}" for n in batches])
    axes.set_xlabel("sessions at once")
    axes.grid(visible=True, alpha=0.3)
    if lines:
        axes.legend()


def _max_batch(pyplot: Any, summaries: list[Summary]) -> Any:
    keys = dict.fromkeys((s.server, s.wait_seconds) for s in summaries)
    largest = {_label(*key): max_batch(summaries, *key) for key in keys}
    figure, axes = pyplot.subplots(figsize=(6 + 1.2 * len(largest), 5))
    bars = axes.bar(range(len(largest)), list(largest.values()), color="steelblue")
    cores = usable_cores()
    axes.bar_label(bars, [f"{most:,}\n{most / cores:,.0f} a core" for most in largest.values()])
    axes.set_xticks(range(len(largest)), [label.replace(", ", "\n") for label in largest])
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.margins(y=0.15)
    title = f"Largest batch tried of which {100 * SUCCESS_THRESHOLD:g} % succeed ({cores} cores)"
    axes.set(ylabel="sessions at once", title=title)
    return figure


def _label(server: str, wait_seconds: float) -> str:
    return f"{server}, {wait_seconds:g} s"
