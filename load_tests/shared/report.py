# SPDX-License-Identifier: Apache-2.0
"""Shared by all load tests: a daemon for a test, its memory, a table with spread, and JSON."""

import argparse
import contextlib
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

OPENENV = str(Path(sys.executable).with_name("openenv"))
NAME_WIDTH = 52
MEGABYTE = 1e6
KILLED = "killed: "  # prefix of the counts of killed processes
SHOWN_FAULTS = 20


@dataclass
class Measure:
    """One line of the table: repeated values of one quantity."""

    name: str
    unit: str
    values: list[float]

    def row(self, width: int) -> str:
        three = min(self.values), statistics.median(self.values), max(self.values)
        low, middle, high = map(format_number, three)
        return f"  {self.name:<{width}} {middle:>10} {self.unit:<5} ({low} to {high})"


@dataclass
class Report:
    """The measurements of a load test."""

    title: str
    measures: list[Measure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, unit: str, values: Sequence[float]) -> Measure:
        measure = Measure(name, unit, list(values))
        self.measures.append(measure)
        return measure

    def append(self, name: str, unit: str, value: float) -> None:
        """Add a value to a line; the first value makes the line."""
        for measure in self.measures:
            if (measure.name, measure.unit) == (name, unit):
                measure.values.append(value)
                return
        self.add(name, unit, [value])

    def ratio(self, name: str, over: Measure, under: Measure) -> Measure:
        """Divide pair by pair, so that a change of the machine's speed cancels out."""
        pairs = zip(over.values, under.values, strict=True)
        return self.add(name, "x", [a / b for a, b in pairs])

    def beside(
        self,
        name: str,
        unit: str,
        ours: Sequence[float],
        peers: Mapping[str, Sequence[float]],
        *,
        more_is_better: bool = False,
    ) -> None:
        """Add our line, a line per peer, and the ratio by pairs: above 1, ours is better."""
        measure = self.add(name, unit, ours)
        bare = name.partition(" (aim")[0]
        for peer, values in peers.items():
            other = self.add(f"  {bare}: {peer}", unit, values)
            over, under = (measure, other) if more_is_better else (other, measure)
            if unit and min(*measure.values, *other.values) > 0:  # counts get no ratio
                ratio = f"ours / {peer}" if more_is_better else f"{peer} / ours"
                self.ratio(f"    {bare}: {ratio}", over, under)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finish(self, json_path: str | None) -> None:
        print(f"{self.title}\n  {_machine_line()}")
        width = max([NAME_WIDTH, *(len(measure.name) for measure in self.measures)])
        print(f"  {'':<{width}} {'median':>10}       (min to max)")
        for measure in self.measures:
            print(measure.row(width))
        for note in self.notes:
            print(f"  {note}")
        if json_path:
            content = {**asdict(self), "machine": machine()}
            Path(json_path).write_text(json.dumps(content, indent=2) + "\n")


class Findings:
    """Counts and faults of a campaign of kills, kept in the file that `--json` names.

    A later call with the same file continues.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        file = Path(given.json or os.devnull)
        kept = json.loads((file.read_text() if file.exists() else "") or "{}").get("found", {})
        self._given = given
        self.seen = Counter[str](kept.get("seen", {}))
        self.wrong: list[str] = kept.get("wrong", [])

    def kills(self) -> int:
        """Return how many processes this run and the runs that it continues have killed."""
        return sum(count for what, count in self.seen.items() if what.startswith(KILLED))

    def keep(self) -> None:
        """Print the findings, and write them to the file."""
        found = {"seen": self.seen, "wrong": self.wrong}
        print(f"{self.kills()} of {self._given.kills}: {found}", file=sys.stderr)
        if self._given.json:
            content = {"options": vars(self._given), "found": found, "machine": machine()}
            Path(self._given.json).write_text(json.dumps(content, indent=2) + "\n")

    def report(self, name: str) -> Report:
        """Return the report of the campaign."""
        report = Report(f"{name}: {self.kills()} kills, seed {self._given.seed}")
        for what, count in sorted(self.seen.items()):
            report.add(what, "", [count])
        report.add("wrong", "", [len(self.wrong)])
        report.notes += self.wrong[:SHOWN_FAULTS]
        return report


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def format_number(value: float) -> str:
    """Format four digits, or all digits of a whole or a large number."""
    is_whole = abs(value) >= 1000 or float(value).is_integer()
    return f"{value:,.0f}" if is_whole else f"{value:.4g}"


def _machine_line() -> str:
    facts = machine()
    return (
        f"{facts['cores']} cores, {facts['memory_gb']} GB, {facts['system']}, "
        f"Python {facts['python']}, load {facts['load']:.1f}"
    )


def parse_arguments(
    description: str, repetitions: int, **more: dict[str, Any]
) -> argparse.Namespace:
    """Parse `--repetitions`, `--json` and `more`, which has options by name, as argparse's."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument(
        "--json", metavar="FILE", type=os.path.abspath, help="write the figures there"
    )
    for name, told in more.items():
        parser.add_argument(f"--{name}", **told)
    return parser.parse_args()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` (0 to 1) of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


@contextmanager
def daemon(*, is_started: bool = True) -> Iterator[dict[str, str]]:
    """Start a daemon in a home of its own; yields the variables by which commands reach it."""
    with tempfile.TemporaryDirectory(prefix="openenvd-load-") as home:
        environ = {**os.environ, "OPENENV_HOME": home, "OPENENV_PORT": "0"}
        if is_started:
            run([OPENENV, "up"], environ)
        try:
            yield environ
        finally:
            down = [OPENENV, "down", "--all"]
            subprocess.run(down, env=environ, check=False, capture_output=True)
            run([OPENENV, "stop"], environ)


def daemon_pid(environ: Mapping[str, str]) -> int:
    identity = json.loads((Path(environ["OPENENV_HOME"]) / "daemon.json").read_text())
    return int(identity["pid"])


def measure_pss(pid: int) -> list[tuple[str, int]]:
    """Return (role, bytes) of a process and its descendants; PSS, since forks share pages.

    Environments are left out, although the zygote forks them.
    """
    root = psutil.Process(pid)
    left_out = {"shim", "host"} if role_of(root) == "daemon" else set()
    family = [(role_of(each), each) for each in (root, *root.children(recursive=True))]
    return [(role, each.memory_full_info().pss) for role, each in family if role not in left_out]


def pss_bytes(pids: Iterable[int]) -> list[int]:
    """Return the PSS of each of these processes and of each below it."""
    return [size for pid in pids for _, size in measure_pss(pid)]


def measure_family(pid: int) -> tuple[float, int]:
    """Return the PSS in MB and the number of processes of a tree; 0 if one ended meanwhile."""
    with contextlib.suppress(psutil.Error):
        sizes = measure_pss(pid)
        return sum(size for _, size in sizes) / MEGABYTE, len(sizes)
    return 0.0, 0


def role_of(process: psutil.Process) -> str:
    title = " ".join(process.cmdline()) or process.name()
    words = title.removeprefix("openenvd: ").split()
    return words[0] if title.startswith("openenvd: ") else title


@dataclass
class Run:
    """A finished command."""

    seconds: float
    cpu_seconds: float  # its own
    peak_bytes: int
    output: str


def run(command: Sequence[str], environ: dict[str, str] | None = None) -> Run:
    """Run a command to its end; CPU time and memory are the operating system's figures."""
    started = time.perf_counter()
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Run(seconds, cpu_seconds, _peak_bytes(usage), output.decode())


def _peak_bytes(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
