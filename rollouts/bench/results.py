# SPDX-License-Identifier: Apache-2.0
"""Describes the server under test, and writes a row for each session and batch, and a table.

`raw.jsonl` and `summary.csv` begin with the seed's fields, in its order
(https://github.com/burtenshaw/openenv-scaling, `tests/test_scaling.py`), so that its analysis reads
them; our own fields come after. `summary.json` holds the summaries and the machine.

The table is for people, with a row per batch size, wait and server, medians with their spread. It
goes to a log: to fit 80 columns, headings have two lines, and values that are equal in all rows
(such as the wait) stand above them.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson
import psutil

from ...system.text.json_lines import Json
from ...system.text.units import plural

if TYPE_CHECKING:
    from .sweep import Cell, Plan

HTTP_PORT = 80
_COUNTERS = Path("/proc/net/netstat")
_WHOLE_PROCESS = 2  # CPUCLOCK_SCHED in the kernel's coding of clocks, clock_getcpuclockid(3)


@dataclass(frozen=True, slots=True)
class Target:
    """One server under test."""

    name: str  # its name in tables and figures
    url: str
    root_pids: tuple[int, ...] = ()  # its processes, with descendants; empty: they are invisible
    token: str | None = None  # that it requires
    others: tuple[tuple[str, int], ...] = ()  # its further addresses: generators take turns

    @property
    def host(self) -> str:
        """The host part of the URL."""
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def port(self) -> int:
        """The port of the URL; HTTP's own when it names none."""
        return urlsplit(self.url).port or HTTP_PORT

    @property
    def path(self) -> str:
        """Return the part of the path before `/ws`."""
        return urlsplit(self.url).path.rstrip("/")


def processes_of(target: Target) -> list[psutil.Process]:
    """Return the present processes of the server."""
    found: dict[int, psutil.Process] = {}
    for pid in target.root_pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            found.update({p.pid: p for p in (root, *root.children(recursive=True))})
    return list(found.values())


def cpu_seconds(target: Target) -> float:
    """Return the CPU time of its processes so far; ended children count with their parent."""
    total = 0.0
    for process in processes_of(target):
        with contextlib.suppress(psutil.Error, OSError):
            times = process.cpu_times()
            total += times.children_user + times.children_system
            if sys.platform == "linux":  # to the nanosecond: ticks of 10 ms are too coarse
                total += time.clock_gettime((~process.pid << 3) | _WHOLE_PROCESS)
            else:
                total += times.user + times.system
    return total


def read_drops() -> int | None:
    """Return how many connections the kernel has dropped; None if it does not say.

    `TcpExtListenDrops` counts connections that found the queue of a listening socket full, in the
    whole network namespace, including other programs.
    """
    try:
        lines = _COUNTERS.read_text().splitlines()
    except OSError:
        return None
    names, values = (line.split()[1:] for line in lines if line.startswith("TcpExt:"))
    return int(dict(zip(names, values, strict=True))["ListenDrops"])


RAW_NAME, SUMMARY_NAME, REPORT_NAME = "raw.jsonl", "summary.csv", "summary.json"
PHASES = ("connect", "reset", "step", "total")
# Fields of the benchmark environment's observation.
OBSERVED: Json = {"waited_seconds": 0.0, "pid": 0, "session_hash": "", "host_url": ""}
MODE = "ws"  # the seed also measures HTTP, whose routes keep no session between two calls


class Summary(SimpleNamespace):
    """One batch; its attributes are the columns of `summary.csv`, in seconds or the named unit."""


@dataclass(slots=True)
class Report:
    """All measurements, and the folder to which they are written."""

    plan: Plan
    summaries: list[Summary] = field(default_factory=list)
    facts: Json = field(default_factory=dict)  # further figures, such as start-up times
    folder: Path = Path()
    error: str | None = None  # of the last session that failed

    def add(self, rows: Sequence[Json], summary: Summary) -> None:
        """Add a batch, and write everything up to now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # The first batch replaces the file of an earlier measurement.
        with (self.folder / RAW_NAME).open("ab" if self.summaries else "wb") as raw:
            raw.writelines(orjson.dumps(row) + b"\n" for row in rows)
        failed = (f"{r['error_type']}: {r['error_message']}" for r in rows if not r["success"])
        self.error = next(failed, self.error)
        self.summaries.append(summary)
        self.write()

    def write(self) -> list[Path]:
        """Write the summaries; return the paths of all files."""
        paths = [self.folder / name for name in (RAW_NAME, SUMMARY_NAME, REPORT_NAME)]
        with paths[1].open("w", newline="", encoding="utf-8") as table:
            writer = csv.DictWriter(table, list(vars(self.summaries[0])) if self.summaries else [])
            writer.writeheader()
            writer.writerows(map(vars, self.summaries))
        content = {
            "machine": machine(),
            "plan": asdict(self.plan),
            "facts": self.facts,
            "summaries": [*map(vars, self.summaries)],
        }
        paths[2].write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return paths


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def machine() -> Json:
    """Describe this machine."""
    return {
        "cores": usable_cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def results_of(
    reports: Sequence[Json], cell: Cell, target: Target, used: float, drops: int | None
) -> tuple[list[Json], Summary]:
    """Return a row per session, and the summary of the batch, from the generators' reports.

    `used` is the CPU time of the server in seconds, `drops` the increase of `read_drops`.
    """
    timestamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    hardware = f"{usable_cores()}-cores"
    rows = [
        {
            "request_id": number,
            "mode": MODE,
            "timestamp": timestamp,
            "wait_requested": cell.wait_seconds,
            "batch_size": cell.requests,
            "hardware": hardware,
            **{f"{phase}_latency": outcome[f"{phase}_seconds"] or 0.0 for phase in PHASES},
            **{name: (outcome["observation"] or {}).get(name, OBSERVED[name]) for name in OBSERVED},
            "success": outcome["error_kind"] is None,
            "error_type": outcome["error_kind"],
            "error_message": outcome["error_message"],
            "server": target.name,
            "repetition": cell.repetition,
        }
        for number, outcome in enumerate(o for report in reports for o in report["outcomes"])
    ]
    good = [row for row in rows if row["success"]]
    totals = [row["total_latency"] for row in good] or [0.0]
    wall = max(report["wall_seconds"] for report in reports)
    used_by_generators = [report["cpu_seconds"] for report in reports]
    at_work = max(wall - cell.wait_seconds, 0.05)  # a step's wait costs a generator no work
    pids = Counter(row["pid"] for row in good if row["pid"])
    summary = Summary(
        mode=MODE,
        url=target.url,
        num_requests=cell.requests,
        batch_size=cell.requests,
        wait_seconds=cell.wait_seconds,
        repetition=cell.repetition,
        timestamp=timestamp,
        hardware=hardware,
        successful=len(good),
        failed=len(rows) - len(good),
        error_rate=1 - len(good) / max(1, len(rows)),
        total_wall_time=wall,
        **_latencies(good, "connect", 50, 95, 99),
        **_latencies(good, "reset", 50, 95, 99),
        **_latencies(good, "step", 50, 95, 99),
        total_min=min(totals),
        total_max=max(totals),
        total_avg=statistics.mean(totals),
        **_latencies(good, "total", 50, 90, 95, 99),
        requests_per_second=len(good) / wall if wall else 0.0,
        effective_concurrency=cell.requests * cell.wait_seconds / wall if wall else 0.0,
        unique_pids=len(pids),
        unique_sessions=len({row["session_hash"] for row in good} - {""}),
        unique_hosts=len({row["host_url"] for row in good} - {""}),
        # What the seed does not have:
        server=target.name,
        shard_split=_counted(pids),  # sessions by pid: "4711:512 4712:512"
        errors=_counted(Counter(row["error_type"] for row in rows if not row["success"])),
        server_cpu_seconds=used,
        server_cpu_ms_per_session=1000 * used / max(1, len(rows)),
        generator_cpu_seconds=sum(used_by_generators),
        generator_busiest_share=max(used_by_generators) / at_work,  # of one core
        kernel_listen_drops=drops,
    )
    return rows, summary


def _latencies(good: Sequence[Json], phase: str, *percents: int) -> Json:
    """Return percentiles by name, interpolated like the seed's."""
    values = [row[f"{phase}_latency"] for row in good if row[f"{phase}_latency"] > 0]
    if len(values) < 2:  # too few for `quantiles`
        values = [sum(values)] * 2
    parts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"{phase}_p{percent}": parts[percent - 1] for percent in percents}


def _counted(counts: Counter[Any]) -> str:
    return " ".join(f"{value}:{count}" for value, count in sorted(counts.items()))


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
    """Return the size of the largest batch whose repetitions succeeded to 95 % on average."""
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
