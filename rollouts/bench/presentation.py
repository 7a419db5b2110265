# SPDX-License-Identifier: Apache-2.0
"""A measurement for people: as a table.

The table has a row per batch size, wait and server, medians with their spread. It goes to a log,
not a terminal: to fit 80 columns, headings have two lines, and values that are equal in all rows
(such as the wait) stand above them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby

from ...system.text.units import plural
from .results import Report, Summary, machine

SUCCESS_THRESHOLD = 0.95  # the seed's: the largest batch that reaches it is the maximum
_CELLS = 2  # the first headings distinguish batches of one size
_HEADS = (
    ("server", ""), ("wait", ""),
    ("sessions", ""), ("success", ""), ("total", "P50, s"), ("total P99, s", "(spread)"),
    ("connect", "P99, s"), ("CPU ms", "each"), ("kernel", "drops"), ("processes", ""),
)  # fmt: skip
_BUSY = 0.9


def lines_of(report: Report) -> list[str]:
    """Return the whole table, with its notes."""
    facts, plan, summaries = machine(), report.plan, report.summaries
    at_once = f"at most {plan.window} handshakes" if plan.window else "all sessions connect"
    host = f"{facts['memory_gb']} GB, {facts['system']}, Python {facts['python']}"
    lines = [
        f"{facts['cores']} cores shared by server and load, {host}",
        f"{at_once} at once; a handshake may take {plan.handshake_seconds:g} s",
        *_table([_row(group) for group in grouped(summaries)]),
    ]
    if busy := sum(s.generator_busiest_share > _BUSY for s in summaries):
        lines.append(
            f"in {busy} of {len(summaries)} batches a generator used over {_percent(_BUSY)} "
            "of a core outside the step's wait: latencies are upper bounds there"
        )
    if any(s.kernel_listen_drops for s in summaries):
        lines += [
            "kernel drops: TcpExtListenDrops of the whole system (other programs' count too),",
            "  while the batch ran, in the repetition that had the most",
        ]
    return lines


def grouped(summaries: Iterable[Summary]) -> list[list[Summary]]:
    """Group the repetitions of each batch, in the order of the grid."""
    names = list(dict.fromkeys(summary.server for summary in summaries))

    def key(s: Summary) -> tuple[int, float, int]:
        return (s.num_requests, s.wait_seconds, names.index(s.server))

    return [list(group) for _, group in groupby(sorted(summaries, key=key), key)]


def max_batch(summaries: Iterable[Summary], server: str, wait_seconds: float) -> int:
    """Return the largest batch of which, on average of all repetitions, 95 % succeeded."""
    fitting = [s for s in summaries if (s.server, s.wait_seconds) == (server, wait_seconds)]
    good = [
        group[0].num_requests
        for group in grouped(fitting)
        if statistics.mean(1 - s.error_rate for s in group) >= SUCCESS_THRESHOLD
    ]
    return max(good, default=0)


def summary_line(summary: Summary) -> str:
    """Describe one finished batch in a line."""
    errors = f", {summary.errors}" if summary.errors else ""
    wait = waiting(summary.wait_seconds)
    drops = f", {summary.kernel_listen_drops} dropped" if summary.kernel_listen_drops else ""
    return (
        f"{summary.server}: {plural(summary.num_requests, 'session')}{f', {wait}' if wait else ''} "
        f"#{summary.repetition}: {_percent(1 - summary.error_rate)}{errors}, "
        f"P50 {summary.total_p50:.2f} s, P99 {summary.total_p99:.2f} s, "
        f"{summary.server_cpu_ms_per_session:.2f} ms CPU each{drops}"
    )


def waiting(seconds: float) -> str:
    """Return how long each step waits, in words; empty if none does."""
    return f"wait {seconds:g} s" if seconds else ""


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    once = [n for n in range(_CELLS) if len({row[n] for row in rows}) == 1]
    shown = [n for n in range(len(_HEADS)) if n not in once]
    if all(row[-1] == "?" for row in rows):  # no answer names its process
        shown.pop()
    cells = [[row[n] for n in shown] for row in [*zip(*_HEADS, strict=True), *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [", ".join(rows[0][n] for n in once if rows[0][n])] if once else []
    for row in cells:
        aligned = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(aligned).rstrip())
    return lines


def _row(group: Sequence[Summary]) -> tuple[str, ...]:
    first = group[0]
    p99 = [s.total_p99 for s in group]
    drops = [s.kernel_listen_drops for s in group if s.kernel_listen_drops is not None]
    return (
        first.server,
        waiting(first.wait_seconds),
        f"{first.num_requests}",
        _percent(min(1 - s.error_rate for s in group)),
        f"{statistics.median(s.total_p50 for s in group):.2f}",
        f"{statistics.median(p99):.2f} ({min(p99):.2f}-{max(p99):.2f})",
        f"{statistics.median(s.connect_p99 for s in group):.2f}",
        f"{statistics.median(s.server_cpu_ms_per_session for s in group):.2f}",
        f"{max(drops)}" if drops else "?",
        f"{first.unique_pids or '?'}",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
