# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of providers: tests every fact on every provider that can run here.

    python -m smoke_tests.providers                      all providers that can run here
    python -m smoke_tests.providers docker               this one
    python -m smoke_tests.providers --must local,docker  fails when one of these cannot run here
    python -m smoke_tests.providers --without kubernetes leaves this one out
    python -m smoke_tests.providers --half 7 slurm       half of its facts; local is tested whole
    python -m smoke_tests.providers --write              writes the results that the site shows

Exit code 1: a fact does not hold, a fact that applies was skipped, or a provider of `--must` did
not run.
"""

import argparse
import dataclasses
import datetime as dt
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import cast

import pytest

from . import page
from .under_test import PROVIDERS, WITH_EXAMPLE

PROCESSES = 4  # a fact's test mostly waits
OTHER_PROCESSES = {
    "slurm": 6,  # its jobs are polled every two seconds
    "kubernetes": 2,  # each has a node of its own, which is busy even when idle
}
SECONDS = 300  # per fact; the first one includes the engine's start and the build of its images
OTHER_SECONDS = {"kubernetes": 600}
FAILS = "fails"
FEW = 5  # facts that may have failed by chance; more of them have a common cause


class Recorder:
    """A pytest plugin that keeps the outcome of each fact, and the words read of its exits."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.words: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.failed:
            self.outcomes[name] = FAILS
        elif hasattr(report, "wasxfail"):
            self.outcomes[name] = page.DOES_NOT_HOLD + report.wasxfail
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "skipped"
            self.outcomes[name] = reason.removeprefix("Skipped: ")
        elif report.when == "call":
            self.outcomes.setdefault(name, page.HOLDS)
            for what, words in report.user_properties:
                if what == page.WORDS:
                    self.words[name] = cast("dict[str, str]", words)


def try_provider(name: str, facts: Sequence[str]) -> page.Result:
    """Return the outcomes of these facts, today, with this machine's engine.

    If a few facts fail while others run, they are tested again alone; those that hold then are
    printed as flaky.
    """
    tries = Recorder()
    outcomes = tries.outcomes
    try_facts(tries, name, OTHER_PROCESSES.get(name, PROCESSES), facts)
    failed = [fact for fact, outcome in outcomes.items() if outcome == FAILS]
    if 0 < len(failed) <= FEW:
        print(f"\n{name}: {', '.join(failed)} failed; tried again, alone:")
        try_facts(tries, name, 0, failed)
        for fact in failed:
            if page.is_settled(outcomes[fact]):
                print(f"flaky: {name} {fact}  (failed beside others; mend it)")
    tried = {fact: outcomes.get(fact, "not tried") for fact in facts}
    today = dt.datetime.now(dt.UTC).date()
    words = {fact: tries.words[fact] for fact in facts if tries.words.get(fact)}
    return page.Result(today.isoformat(), WITH_EXAMPLE[name]().engine_version(), tried, words)


def try_facts(tries: Recorder, name: str, processes: int, facts: Sequence[str]) -> None:
    for fact in facts:
        tries.outcomes.pop(fact, None)
    options = ["-q", "-n", str(processes), "--dist=worksteal", "-r", "fE", "-p", "no:cacheprovider"]
    options.append(f"--timeout={OTHER_SECONDS.get(name, SECONDS)}")
    options += ["-k", " or ".join(f"{fact}[" for fact in facts)]
    pytest.main([*options, "--provider", name, str(page.FOLDER)], plugins=[tries])


def report(name: str, outcomes: dict[str, str], seconds: float) -> list[str]:
    wrong = {fact: outcome for fact, outcome in outcomes.items() if not page.is_settled(outcome)}
    counts = Counter(each.partition(":")[0] for each in outcomes.values() if page.is_settled(each))
    text = ", ".join(f"{count} {what}" for what, count in counts.items())
    head = f"{'FAILED ' if wrong else 'ran    '}  {name}  ({text}; {seconds:.0f} s)"
    return [head, *(f"           {fact}: {outcome}" for fact, outcome in wrong.items())]


def write(results: page.Results) -> None:
    """Write results and page; providers that did not run keep their earlier results."""
    known = {**(page.read_results() if page.RESULTS.exists() else {}), **results}
    ordered = {name: dataclasses.asdict(known[name]) for name in PROVIDERS if name in known}
    page.RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="smoke_tests.providers", description=__doc__)
    parser.add_argument("providers", nargs="*", metavar="PROVIDER", help=", ".join(WITH_EXAMPLE))
    parser.add_argument("--must", default="", help="providers that must be able to run here")
    parser.add_argument("--without", default="", help="providers that are left out")
    parser.add_argument("--half", type=int, metavar="SEED", help="half of an engine's facts")
    parser.add_argument("--write", action="store_true", help="write the results")
    options = parser.parse_args()
    results: page.Results = {}
    seen = []
    for name in options.providers or PROVIDERS:
        if name in options.without.split(","):
            seen.append(f"skipped  {name}  (left out)")
            continue
        if why_not := WITH_EXAMPLE[name]().why_not():
            word = "FAILED " if name in options.must.split(",") else "skipped"
            seen.append(f"{word}  {name}  (cannot run here: {why_not})")
            continue
        started = time.monotonic()
        facts = [fact.name for fact in page.facts()]
        if options.half is not None and name != "local":
            facts = random.Random(options.half).sample(facts, len(facts) // 2)
        results[name] = try_provider(name, facts)
        seen += report(name, results[name].facts, time.monotonic() - started)
    print("\n".join(["", "providers", *seen]))
    failed = any(line.startswith("FAILED") for line in seen)
    if options.write and options.half is None and not failed:
        write(results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
