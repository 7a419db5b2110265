# SPDX-License-Identifier: Apache-2.0
"""A measurement as text: a row per batch size, wait and server, medians with their spread.

The table goes to a log, not a terminal: to fit 80 columns, headings have two lines,
and values that are equal in all rows (such as the mode) stand above them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby

from ..system.units import MB
from .plan import HANDSHAKE_SECONDS
from .results import Report, Summary, Weight, machine

SUCCESS_THRESHOLD = 0.95  # of the seed: the largest batch that reaches it is the maximum
_CELL = (
    ("server", ""),
    ("mode", ""),
    ("wait", ""),
    ("handshakes", ""),
)  # what tells batches of one size apart
_HEAD = (
    ("sessions", ""), ("success", ""), ("total", "P50, s"), ("total P99, s", "(spread)"),
    ("connect", "P99, s"), ("CPU ms", "each"), ("kernel", "drops"), ("shards", ""),
)  # fmt: skip
_BUSY = 0.9
_SPLIT_SHOWN = 2  # processes by each; of more, how evenly they share


def lines_of(report: Report) -> list[str]:
    """The whole table, with its notes."""
    facts = machine()
    machine_line = (
        f"{facts['cores']} cores shared by server and load, {facts['memory_gb']} GB, "
        f"{facts['system']}, Python {facts['python']}"
    )
    table = _table(grouped(report.summaries))
    return [machine_line, *table, *map(weight_line, report.weights), *_notes(report)]


def _table(groups: Sequence[Sequence[Summary]]) -> list[str]:
    cells = [(s.server, s.mode, f"wait {s.wait_seconds:g} s", window_words(s)) for s, *_ in groups]
    varying = [n for n in range(len(_CELL)) if len({cell[n] for cell in cells}) > 1]
    rows = [
        (*(cell[n] for n in varying), *row_of(group))
        for cell, group in zip(cells, groups, strict=True)
    ]
    heads = zip(*(_CELL[n] for n in varying), *_HEAD, strict=True)
    same = [cells[0][n] for n in range(len(_CELL)) if n not in varying] if cells else []
    return [*([", ".join(same)] if same else []), *_aligned([*heads, *rows])]


def grouped(summaries: Iterable[Summary]) -> list[list[Summary]]:
    """Repetitions of the same batch together, in the order of the grid."""
    names = list(dict.fromkeys(summary.server for summary in summaries))

    def key(s: Summary) -> tuple[str, int, float, int]:
        return (s.mode, s.num_requests, s.wait_seconds, names.index(s.server))

    return [list(group) for _, group in groupby(sorted(summaries, key=key), key)]


def max_batch(summaries: Iterable[Summary], server: str, wait_seconds: float, mode: str) -> int:
    """The largest batch of which at least 95 % succeeded, on average of all repetitions."""
    fitting = [
        s for s in summaries if (s.server, s.wait_seconds, s.mode) == (server, wait_seconds, mode)
    ]
    good = [
        group[0].num_requests
        for group in grouped(fitting)
        if statistics.mean(1 - s.error_rate for s in group) >= SUCCESS_THRESHOLD
    ]
    return max(good, default=0)


def row_of(group: Sequence[Summary]) -> tuple[str, ...]:
    """One row: the median of the repetitions."""
    first = group[0]
    total_p99 = [s.total_p99 for s in group]
    return (
        f"{first.num_requests}",
        _percent(min(1 - s.error_rate for s in group)),
        f"{statistics.median(s.total_p50 for s in group):.2f}",
        f"{statistics.median(total_p99):.2f} ({min(total_p99):.2f}-{max(total_p99):.2f})",
        f"{statistics.median(s.connect_p99 for s in group):.2f}",
        f"{statistics.median(s.server_cpu_ms_per_session for s in group):.2f}",
        _dropped(group),
        _split(first),
    )


def summary_line(summary: Summary) -> str:
    """One batch, as soon as it is over."""
    errors = f", {summary.errors}" if summary.errors else ""
    drops = f", {summary.kernel_listen_drops} dropped" if summary.kernel_listen_drops else ""
    return (
        f"{summary.server}: {summary.num_requests} x {summary.wait_seconds:g} s {summary.mode} "
        f"#{summary.repetition}: {_percent(1 - summary.error_rate)}{errors}, "
        f"P50 {summary.total_p50:.2f} s, P99 {summary.total_p99:.2f} s, "
        f"{summary.server_cpu_ms_per_session:.2f} ms CPU each{drops}"
    )


def weight_line(weight: Weight) -> str:
    """What a server holds."""
    each = weight.bytes_per_session
    more = "" if each is None else f", {each / 1024:.1f} kB a session ({weight.sessions} open)"
    return (
        f"{weight.server}: {weight.idle_pss_bytes / MB:.0f} MB PSS idle in "
        f"{weight.processes} processes{more}"
    )


def _notes(report: Report) -> list[str]:
    notes = []
    busy = sum(s.generator_busiest_share > _BUSY for s in report.summaries)
    if busy:
        notes.append(
            f"in {busy} of {len(report.summaries)} batches a generator used over {_percent(_BUSY)} "
            "of a core outside the step's wait: latencies are upper bounds there"
        )
    again = sum(s.handshake_retransmits for s in report.summaries)
    if again:
        notes.append(f"the kernel retransmitted {again} handshakes: a server's queue was full")
    if any(s.kernel_listen_drops for s in report.summaries):
        notes.append(
            "kernel drops: TcpExtListenDrops of the whole system (other programs' count too),"
        )
        notes.append("  while the batch ran, in the repetition that had the most")
    return notes


def window_words(summary: Summary) -> str:
    """How many handshakes were under way at once."""
    words = f"window {summary.window}" if summary.window else "all at once"
    seconds = summary.handshake_seconds
    return words if seconds == HANDSHAKE_SECONDS else f"{words}, {seconds:g} s each"


def _dropped(group: Sequence[Summary]) -> str:
    known = [s.kernel_listen_drops for s in group if s.kernel_listen_drops is not None]
    return f"{max(known)}" if known else "?"


def _split(summary: Summary) -> str:
    """Sessions by process: `64/63`, `4 x 32`, `8: 60-68`."""
    counts = sorted((int(part.split(":")[1]) for part in summary.shard_split.split()), reverse=True)
    if len(counts) <= _SPLIT_SHOWN:
        return "/".join(map(str, counts))
    if counts[0] == counts[-1]:
        return f"{len(counts)} x {counts[0]}"
    return f"{len(counts)}: {counts[-1]}-{counts[0]}"


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
