# SPDX-License-Identifier: Apache-2.0
"""The README's chart: sessions against time, a line for each server, as SVG.

    python -m load_tests.scaling --peer upstream --chart docs/images/sessions.svg

A point is the median of a batch's repetitions; the bar through it reaches from the least to the
greatest. Both axes are logarithmic.
"""

import json
import statistics
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

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
