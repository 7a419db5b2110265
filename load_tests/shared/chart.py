# SPDX-License-Identifier: Apache-2.0
"""The README's chart: sessions against time, a line for each server, as SVG.

    python -m load_tests.scaling --peer upstream --chart docs/images/sessions.svg

A point is the median of a batch's repetitions; the bar through it reaches from the least to the
greatest. Both axes are logarithmic.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path

LEFT, TOP, WIDTH, HEIGHT = 52, 46, 560, 250
COLOURS = ("#1f883d", "#bc4c00", "#8250df")
BOLD, END, MIDDLE = 'font-weight="600"', 'text-anchor="end"', 'text-anchor="middle"'
NAMES = {"upstream": "OpenEnv's own server"}
Lines = dict[str, dict[int, list[float]]]  # by server and sessions: P99 of each repetition


def read(path: Path) -> tuple[Lines, str]:
    report = json.loads(path.read_text())
    lines: Lines = {}
    for row in report["summaries"]:
        line = lines.setdefault(NAMES.get(row["server"], row["server"]), {})
        line.setdefault(row["num_requests"], []).append(row["total_p99"])
    return lines, f"{report['machine']['cores']} cores shared by server and clients"


def draw(lines: Lines, note: str) -> str:
    batches = sorted({n for line in lines.values() for n in line})
    times = [t for line in lines.values() for values in line.values() for t in values]
    top = 2.0 ** math.ceil(math.log2(max(times)))
    ticks = [2.0**n for n in range(int(math.log2(top)) + 1)]

    def x(sessions: int) -> float:
        return LEFT + WIDTH * math.log(sessions / batches[0]) / math.log(batches[-1] / batches[0])

    def y(seconds: float) -> float:
        return TOP + HEIGHT * (1 - math.log(max(seconds, 1.0)) / math.log(top))

    parts = [_text(LEFT - 40, 20, "Seconds until 99 % of the sessions are done", BOLD)]
    parts += [
        f'<path d="M{LEFT} {y(t):.1f}h{WIDTH}" class="grid"/>'
        + _text(LEFT - 8, y(t) + 4, f"{t:g}", END)
        for t in ticks
    ]
    parts += [_text(x(n), TOP + HEIGHT + 20, f"{n:,}", MIDDLE) for n in batches]
    below = f"sessions at once (connect, reset, a step of 1 s); {note}"
    parts.append(_text(LEFT, TOP + HEIGHT + 42, below))
    for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
        parts += _line(colour, name, [(x(n), [y(t) for t in ts]) for n, ts in sorted(line.items())])
    return "\n".join([_HEAD, *parts, "</svg>\n"])


def _line(colour: str, name: str, points: Iterable[tuple[float, list[float]]]) -> list[str]:
    at = [(x, statistics.median(ys), min(ys), max(ys)) for x, ys in points]
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in at)
    drawn = [f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2.5"/>']
    drawn += [
        f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
        for x, y, low, high in at
    ]
    x, y, *_ = at[-1]
    return [*drawn, _text(x - 12, y - 12, name, f'{END} {BOLD} fill="{colour}"')]


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{text}</text>'


_HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 28} {TOP + HEIGHT + 56}" \
font-family="system-ui,sans-serif" font-size="13" fill="#59636e" \
role="img" aria-label="Sessions against time">
<style>.grid{{stroke:#d1d9e0}}</style>
<rect width="100%" height="100%" rx="8" fill="#fff"/>"""


def main(source: Path, target: Path) -> None:
    """Draw the measurement in a `summary.json` that `scaling` has written."""
    target.write_text(draw(*read(source)))
