# SPDX-License-Identifier: Apache-2.0
"""The server under test, and the results: a row per session and one per batch, as in the seed.

`raw.jsonl` and `summary.csv` begin with the seed's fields, in its order
(https://github.com/burtenshaw/openenv-scaling, `tests/test_scaling.py`), so that its analysis reads
them; what we add comes after. `summary.json` holds the summaries and the machine.

Of the server, an address and the processes are known, whose CPU time and memory count.
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
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import psutil

from ...system.text.json_lines import Json
from .crew import Harvest
from .plan import Cell, Plan, usable_cores

HTTP_PORT = 80
_COUNTERS = Path("/proc/net/netstat")
_WHOLE_PROCESS = 2  # CPUCLOCK_SCHED in the kernel's coding of clocks, clock_getcpuclockid(3)


@dataclass(frozen=True, slots=True)
class Target:
    """One server."""

    name: str  # as it is called in tables and figures
    url: str
    root_pids: tuple[int, ...] = ()  # it, with everything below; nothing: it is not ours to see
    token: str | None = None  # that it wants
    others: tuple[str, ...] = ()  # further `host:port` of it: load generators take them in turn

    @property
    def host(self) -> str:
        """The host part of the URL."""
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def port(self) -> int:
        """The port of the URL; HTTP's own when it names none."""
        return urlsplit(self.url).port or HTTP_PORT

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each of its addresses."""
        pairs = (text.rpartition(":") for text in self.others)
        return (self.host, self.port), *((host, int(port)) for host, _, port in pairs)

    @property
    def path(self) -> str:
        """What comes in front of `/ws`."""
        return urlsplit(self.url).path.rstrip("/")


def processes_of(target: Target) -> list[psutil.Process]:
    """Its processes that are there now."""
    found: dict[int, psutil.Process] = {}
    for pid in target.root_pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            found.update({p.pid: p for p in (root, *root.children(recursive=True))})
    return list(found.values())


def cpu_seconds(target: Target) -> float:
    """What its processes have used so far; children that have ended count with their parent."""
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
    """Return how many connections the kernel has dropped; None where it does not say.

    `TcpExtListenDrops` counts those that found the queue of a listening socket full, of all sockets
    of the network namespace together: other programs' count as well.
    """
    try:
        lines = _COUNTERS.read_text().splitlines()
    except OSError:
        return None
    names, values = (line.split()[1:] for line in lines if line.startswith("TcpExt:"))
    return int(dict(zip(names, values, strict=True))["ListenDrops"])


RAW_NAME, SUMMARY_NAME, REPORT_NAME = "raw.jsonl", "summary.csv", "summary.json"
MODE = "ws"  # the seed measures HTTP as well, whose routes keep no session between two calls


@dataclass(slots=True)
class Summary:
    """One batch. Seconds, unless a name says otherwise."""

    mode: str
    url: str
    num_requests: int
    batch_size: int
    wait_seconds: float
    repetition: int
    timestamp: str
    hardware: str
    successful: int = 0
    failed: int = 0
    error_rate: float = 0.0
    total_wall_time: float = 0.0
    connect_p50: float = 0.0
    connect_p95: float = 0.0
    connect_p99: float = 0.0
    reset_p50: float = 0.0
    reset_p95: float = 0.0
    reset_p99: float = 0.0
    step_p50: float = 0.0
    step_p95: float = 0.0
    step_p99: float = 0.0
    total_min: float = 0.0
    total_max: float = 0.0
    total_avg: float = 0.0
    total_p50: float = 0.0
    total_p90: float = 0.0
    total_p95: float = 0.0
    total_p99: float = 0.0
    requests_per_second: float = 0.0
    effective_concurrency: float = 0.0
    unique_pids: int = 0
    unique_sessions: int = 0
    unique_hosts: int = 0
    # Ours:
    server: str = ""
    shard_split: str = ""  # sessions by pid: "4711:512 4712:512"
    errors: str = ""  # failures by kind
    server_cpu_seconds: float = 0.0
    server_cpu_ms_per_session: float = 0.0
    generator_cpu_seconds: float = 0.0
    generator_busiest_share: float = 0.0  # of one core, the busiest generator, waits left out
    kernel_listen_drops: int | None = None  # of all programs together; None: it does not tell


@dataclass(slots=True)
class Report:
    """Everything that was measured."""

    plan: Plan
    summaries: list[Summary] = field(default_factory=list)
    facts: Json = field(default_factory=dict)  # what else is known: start-up times, say


def machine() -> Json:
    """What this runs on."""
    return {
        "cores": usable_cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def rows_of(harvest: Harvest, cell: Cell, server: str) -> list[Json]:
    """One row per session, the seed's fields first."""
    timestamp, hardware = _now(), _hardware()
    rows = []
    for number, outcome in enumerate(harvest.outcomes):
        seen = outcome["observation"] or {}
        row = {
            "request_id": number,
            "mode": MODE,
            "timestamp": timestamp,
            "wait_requested": cell.wait_seconds,
            "batch_size": cell.requests,
            "hardware": hardware,
            "connect_latency": outcome["connect_seconds"] or 0.0,
            "reset_latency": outcome["reset_seconds"] or 0.0,
            "step_latency": outcome["step_seconds"] or 0.0,
            "total_latency": outcome["total_seconds"],
            "waited_seconds": seen.get("waited_seconds", 0.0),
            "pid": seen.get("pid", 0),
            "session_hash": seen.get("session_hash", ""),
            "host_url": seen.get("host_url", ""),
            "success": outcome["error_kind"] is None,
            "error_type": outcome["error_kind"],
            "error_message": outcome["error_message"],
            "server": server,
            "repetition": cell.repetition,
        }
        rows.append(row)
    return rows


def summary_of(
    rows: Sequence[Json], cell: Cell, target: Target, harvest: Harvest, used: float
) -> Summary:
    """A batch in one row; `used` is the server's CPU time in seconds."""
    good = [row for row in rows if row["success"]]
    wall, totals = harvest.wall_seconds, [row["total_latency"] for row in good] or [0.0]
    at_work = max(wall - cell.wait_seconds, 0.05)  # a step's wait costs a generator no work
    return Summary(
        mode=MODE,
        url=target.url,
        num_requests=cell.requests,
        batch_size=cell.requests,
        wait_seconds=cell.wait_seconds,
        repetition=cell.repetition,
        timestamp=_now(),
        hardware=_hardware(),
        successful=len(good),
        failed=len(rows) - len(good),
        error_rate=1 - len(good) / max(1, len(rows)),
        total_wall_time=wall,
        **_latencies(good),
        total_min=min(totals),
        total_max=max(totals),
        total_avg=statistics.mean(totals),
        requests_per_second=len(good) / wall if wall else 0.0,
        effective_concurrency=cell.requests * cell.wait_seconds / wall if wall else 0.0,
        unique_pids=len({row["pid"] for row in good if row["pid"]}),
        unique_sessions=len({row["session_hash"] for row in good if row["session_hash"]}),
        unique_hosts=len({row["host_url"] for row in good if row["host_url"]}),
        server=target.name,
        shard_split=_counted(row["pid"] for row in good if row["pid"]),
        errors=_counted(row["error_type"] for row in rows if not row["success"]),
        server_cpu_seconds=used,
        server_cpu_ms_per_session=1000 * used / max(1, len(rows)),
        generator_cpu_seconds=sum(harvest.cpu_seconds),
        generator_busiest_share=max(harvest.cpu_seconds) / at_work,
    )


def _latencies(good: Sequence[Json]) -> Json:
    """Percentiles by name, between the two nearest values, as the seed computes them."""
    found: dict[str, float] = {}
    for phase in ("connect", "reset", "step", "total"):
        values = [row[f"{phase}_latency"] for row in good if row[f"{phase}_latency"] > 0]
        if len(values) < 2:  # too few for `quantiles`
            values = [sum(values)] * 2
        parts = statistics.quantiles(values, n=100, method="inclusive")
        shares = (50, 90, 95, 99) if phase == "total" else (50, 95, 99)
        found |= {f"{phase}_p{share}": parts[share - 1] for share in shares}
    return found


def _counted(values: Iterable[Any]) -> str:
    return " ".join(f"{value}:{count}" for value, count in sorted(Counter(values).items()))


class ResultFolder:
    """The files of one measurement, written batch by batch."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = (RAW_NAME, SUMMARY_NAME, REPORT_NAME)
        self._raw, self._table, self._report = self._files = [folder / name for name in names]
        for path in self._files:
            path.unlink(missing_ok=True)  # an earlier measurement's

    def add(self, rows: Sequence[Json], summary: Summary) -> None:
        """A batch."""
        with self._raw.open("ab") as file:
            file.writelines(orjson.dumps(row) + b"\n" for row in rows)
        with self._table.open("a", newline="", encoding="utf-8") as table:
            writer = csv.DictWriter(table, [item.name for item in fields(Summary)])
            if not table.tell():
                writer.writeheader()
            writer.writerow(asdict(summary))

    def finish(self, report: Report) -> list[Path]:
        """The report; the paths of everything that was written."""
        content = {
            "machine": machine(),
            "plan": asdict(report.plan),
            "facts": report.facts,
            "summaries": [asdict(summary) for summary in report.summaries],
        }
        text = json.dumps(content, indent=2) + "\n"
        self._report.write_text(text, encoding="utf-8")
        return [path for path in self._files if path.exists()]


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _hardware() -> str:
    return f"{usable_cores()}-cores"
