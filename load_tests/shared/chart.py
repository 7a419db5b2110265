# SPDX-License-Identifier: Apache-2.0
"""The seed's two figures of a measurement, as PNG, and the README's chart, as SVG.

    python -m load_tests.scaling --peer upstream --chart docs/images/sessions.svg

The chart has sessions against time, a line for each server. A point is the median of a batch's
repetitions; the bar through it reaches from the least to the greatest. Both axes are logarithmic.
"""

import json
import math
import statistics
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from openenvd.rollouts.bench import results
from openenvd.rollouts.bench.results import Report, Summary, usable_cores

COLOURS = ("#1f883d", "#bc4c00", "#8250df")
NAMES = {"upstream": "OpenEnv's own server"}


def main(source: Path, target: Path) -> None:
    """Draw the measurement in a `summary.json` that `scaling` has written."""
    report = json.loads(source.read_text())
    lines: dict[str, dict[int, list[float]]] = {}  # P99 of each repetition
    for row in report["summaries"]:
        line = lines.setdefault(NAMES.get(row["server"], row["server"]), {})
        line.setdefault(row["num_requests"], []).append(row["total_p99"])
    figure = Figure(figsize=(6.4, 3.6), layout="tight")
    axes = figure.subplots()
    for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
        repeated = [line[batch] for batch in sorted(line)]
        middle = [statistics.median(seconds) for seconds in repeated]
        least = [m - min(seconds) for m, seconds in zip(middle, repeated, strict=True)]
        most = [max(seconds) - m for m, seconds in zip(middle, repeated, strict=True)]
        axes.errorbar(sorted(line), middle, [least, most], fmt="o-", color=colour, label=name)
    batches = sorted({batch for line in lines.values() for batch in line})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.yaxis.set_major_formatter("{x:g}")
    cores = f"{report['machine']['cores']} cores shared by server and clients"
    axes.set_xlabel(f"sessions at once (connect, reset, a step of 1 s); {cores}", fontsize=8)
    axes.set_title("Seconds until 99 % of the sessions are done", loc="left", fontsize=10)
    axes.grid(visible=True, axis="y", alpha=0.4)
    axes.legend(loc="upper left", frameon=False)
    with mpl.rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(target, metadata={"Date": None})


def draw_all(report: Report, folder: Path) -> list[Path]:
    """Draw the seed's two figures; none if nothing was measured."""
    written: list[Path] = []
    if not report.summaries:
        return written
    for name, draw in {"scaling_curves": _curves, "max_batch_comparison": _max_batch}.items():
        figure = Figure(figsize=(13, 5), layout="tight")
        draw(figure, report.summaries)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=130)
    return written


def _curves(figure: Figure, summaries: list[Summary]) -> None:
    """Draw medians of the repetitions over the batch size, a line for each server and wait."""
    left, right = figure.subplots(1, 2)
    batches = sorted({s.num_requests for s in summaries})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [f"{n:,}" for n in batches])
        axes.set_xlabel("sessions at once")
        axes.grid(visible=True, alpha=0.3)
    left.axhline(100 * results.SUCCESS_THRESHOLD, color="red", linestyle="--", alpha=0.5)
    left.set(ylabel="success (%)", ylim=(0, 105), title="Success")
    right.set(ylabel="total P99 (s)", title="Total P99, the wait included", yscale="log")
    for label, groups in _lines(summaries).items():
        for axes, value in (
            (left, lambda s: 100 * (1 - s.error_rate)),
            (right, lambda s: s.total_p99 if s.successful else math.nan),
        ):
            x = [group[0].num_requests for group in groups]
            axes.plot(x, [statistics.median(map(value, g)) for g in groups], "o-", label=label)
    left.legend()


def _max_batch(figure: Figure, summaries: list[Summary]) -> None:
    """Draw the largest batch with 95 % success, also per core: a bar per server and wait."""
    largest = {
        label: results.max_batch(summaries, groups[0][0].server, groups[0][0].wait_seconds)
        for label, groups in _lines(summaries).items()
    }
    axes, cores = figure.subplots(), usable_cores()
    bars = axes.bar([label.replace(", ", "\n") for label in largest], list(largest.values()))
    axes.bar_label(bars, [f"{most:,}\n{most / cores:,.0f} a core" for most in largest.values()])
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.margins(y=0.15)
    share = 100 * results.SUCCESS_THRESHOLD
    title = f"Largest batch tried of which {share:g} % succeed ({cores} cores)"
    axes.set(ylabel="sessions at once", title=title)


def _lines(summaries: list[Summary]) -> dict[str, list[list[Summary]]]:
    """Return the repetitions of each batch, by server and wait."""
    lines: dict[str, list[list[Summary]]] = {}
    for group in results.grouped(summaries):
        label = f"{group[0].server}, {group[0].wait_seconds:g} s"
        lines.setdefault(label, []).append(group)
    return lines
