# SPDX-License-Identifier: Apache-2.0
"""Two trees by turns: figures that a large change must keep, measured in one run.

    python -m load_tests.before_after --before DIR --after DIR --json FILE [--quick]

Each tree is a checkout that is installed in a `.venv` of its own. Both packages have the same name,
so each measurement runs in its tree's Python. The trees take turns with every program (A B, B A,
A B, …), and each runs its own version of the program. The file is written after each measurement; a
later call with the same options continues where an earlier one stopped, and repeats measurements of
other commits. A ratio is after / before: the median over pairs that were measured one after the
other. Run nothing else at the same time.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from load_tests.shared.report import format_number, machine

TREES = ("before", "after")
ERROR_CHARACTERS = 2000

Lines = dict[str, float]  # of one measurement: the median of each line of its report


COMBINED: dict[str, Callable[[list[float]], float]] = {
    "first": itemgetter(0),
    "min": min,
    "max": max,
    "median": statistics.median,
}


@dataclass(frozen=True)
class Program:
    """One program of `load_tests`, as `before_after.yaml` explains it."""

    words: str
    quick_words: str
    times: int
    quick_times: int
    is_after_alone: bool = False


@dataclass(frozen=True)
class Figure:
    """One row of the table, as `before_after.yaml` explains it."""

    name: str
    program: str
    line: str
    bound: str = ""
    combine: str = "first"
    under: str = ""

    def value(self, lines: Lines) -> float:
        """Return the figure of one measurement; a missing line is an `IndexError`."""
        over, under = (
            [v for name, v in lines.items() if all(each in name for each in parts.split("…"))]
            for parts in (self.line, self.under)
        )
        return float(COMBINED[self.combine](over)) / (under[0] if self.under else 1)

    def holds(self, after: float, ratio: float) -> bool:
        *of, sign, limit = self.bound.split()
        value, most = ratio if of else after, float(limit)
        return value <= most if sign == "<=" else value >= most


_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
PROGRAMS = {name: Program(**entry) for name, entry in _TABLES["programs"].items()}
FIGURES = [Figure(**entry) for entry in _TABLES["figures"]]


@dataclass
class Comparison:
    """Both trees, and their measurements so far."""

    folders: dict[str, Path]
    commits: dict[str, str]
    path: Path
    runs: list[dict[str, Any]]

    def measure(self, name: str, words: str, repetition: int, tree: str) -> None:
        key = {"program": name, "words": words, "tree": tree, "repetition": repetition}
        key["commit"] = self.commits[tree]
        if any(run["lines"] and key.items() <= run.items() for run in self.runs):
            return
        began, load = time.monotonic(), machine()["load"]
        lines, error = run_program(self.folders[tree], name, words)
        seconds = round(time.monotonic() - began, 1)
        self.runs.append({**key, "load": load, "seconds": seconds, "lines": lines, "error": error})
        self.path.write_text(json.dumps({"machine": machine(), "runs": self.runs}, indent=1) + "\n")
        print(f"  {name} #{repetition} {tree}: {seconds:.0f} s{' ' + error[-300:]}", flush=True)

    def values(self, figure: Figure, words: str, tree: str) -> dict[int, float]:
        found = {}
        for run in self.runs:
            wanted = (figure.program, words, tree, self.commits[tree])
            if (run["program"], run["words"], run["tree"], run["commit"]) == wanted:
                try:
                    found[run["repetition"]] = figure.value(run["lines"])
                except (IndexError, ValueError, statistics.StatisticsError):
                    continue  # it failed or was skipped; its error is in the file
        return found


def run_program(folder: Path, name: str, words: str) -> tuple[Lines, str]:
    """Run a program in its tree's Python; returns the lines of its report, and its error."""
    with tempfile.TemporaryDirectory(prefix="before-after-") as output:
        path = Path(output) / "report.json"
        command = [str(folder / ".venv/bin/python"), "-m", f"load_tests.{name}"]
        command += words.format(folder=output).split()
        command += ["--json", str(path)]
        if "--repetitions" not in command:
            command += ["--repetitions", "1"]
        # The bytecode of both trees is kept: otherwise a tree that has some would start faster.
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        done = subprocess.run(
            command, cwd=folder, env=environ, check=False, text=True, capture_output=True
        )
        error = ""
        if done.returncode != 0 or not path.exists():
            said = (done.stdout + done.stderr).strip()[-ERROR_CHARACTERS:]
            error = f"exit code {done.returncode}: {said}"
        return (dict(lines_of(json.loads(path.read_text()))) if path.exists() else {}), error


def lines_of(content: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Return name and median of each line of a report; of `scaling`, the ratios to the limit."""
    for measure in content.get("measures", []):
        yield measure["name"].strip(), statistics.median(measure["values"])
    for ratio in content.get("facts", {}).get("ratios", []):
        server = f"{ratio['server']}, {ratio['sessions']} sessions"
        yield f"{server}: success", ratio["success"]
        yield f"{server}: drops", ratio["kernel_listen_drops"]
        if ratio["times_limit"] is not None:  # the limit had a P99
            yield f"{server}: times limit", ratio["times_limit"]


def print_table(comparison: Comparison, words: dict[str, str]) -> int:
    """Print a row for each figure that was measured; return how many bounds do not hold."""
    head = f"{'figure':<40} {'before':>25} {'after':>25} {'ratio':>6}  {'bound':<13} holds"
    print(f"\n{head}\n{'-' * len(head)}")
    broken = 0
    for figure in (each for each in FIGURES if each.program in words):
        before, after = (comparison.values(figure, words[figure.program], t) for t in TREES)
        pairs = [after[n] / before[n] for n in after.keys() & before.keys() if before[n]]
        ratio = statistics.median(pairs) if pairs else math.nan
        told = "NOT MEASURED"
        if after:
            told = ""
            if figure.bound:
                holds = figure.holds(statistics.median(after.values()), ratio)
                told = "yes" if holds else "NO"
        broken += told.startswith("NO")
        row = f"{figure.name:<40} {spread(before):>25} {spread(after):>25} {ratio:>6.3f}"
        print(f"{row}  {figure.bound:<13} {told}")
    return broken


def spread(values: dict[int, float]) -> str:
    """Return the median of the values, with the least and the greatest."""
    if not values:
        return "-"
    found = sorted(values.values())
    low, middle, high = map(format_number, (found[0], statistics.median(found), found[-1]))
    return f"{middle} ({low} to {high})"


def commit_of(folder: Path) -> str:
    """Return the commit that a tree has checked out, and whether files differ from it."""
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Two trees in turn.")
    parser.add_argument("--before", type=Path, required=True, metavar="DIR")
    parser.add_argument("--after", type=Path, required=True, metavar="DIR")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="kept as it goes")
    parser.add_argument("--quick", action="store_true", help="about a quarter of an hour")
    parser.add_argument(
        "--repetitions", type=int, help="of each program; by default its own number"
    )
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    given = parser.parse_args()
    folders = {tree: getattr(given, tree).resolve() for tree in TREES}
    kept = json.loads(given.json.read_text())["runs"] if given.json.exists() else []
    commits = {tree: commit_of(folder) for tree, folder in folders.items()}
    comparison = Comparison(folders, commits, given.json, kept)
    chosen = {name: PROGRAMS[name] for name in given.only}
    words = {name: p.quick_words if given.quick else p.words for name, p in chosen.items()}
    times = {
        name: given.repetitions or (p.quick_times if given.quick else p.times)
        for name, p in chosen.items()
    }
    for repetition in range(max(times.values())):
        for name in (each for each in chosen if repetition < times[each]):
            trees = TREES[1:] if given.quick and chosen[name].is_after_alone else TREES
            for tree in trees if repetition % 2 == 0 else trees[::-1]:
                comparison.measure(name, words[name], repetition, tree)
    return 1 if print_table(comparison, words) else 0


if __name__ == "__main__":
    sys.exit(main())
