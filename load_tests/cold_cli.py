# SPDX-License-Identifier: Apache-2.0
"""A cold `openenv status --json` against a running daemon, beside `python -c 'import click'`.

Aim: within 3x of it, and under 30 MB. For comparison, measured elsewhere: `sky status` takes 1.1 s
(0.9) to 3.1 s (0.14.1), upstream's `openenv --help` 6.7 s.
"""

from __future__ import annotations

import importlib.util
import sys

from load_tests.report import OPENENV, Report, daemon, parse_arguments, run

MEGABYTE = 1e6


def main() -> None:
    """Measure, in turn, so that a drifting machine meets both alike."""
    options = parse_arguments("A cold command line.", repetitions=20)
    report = Report("Cold command line")
    bare: list[float] = []
    click: list[float] = []
    ours: list[float] = []
    peaks: list[float] = []
    with daemon() as environ:
        for _ in range(options.repetitions + 1):
            bare.append(run([sys.executable, "-c", "pass"]).seconds)
            click.append(run([sys.executable, "-c", "import click"]).seconds)
            status = run([OPENENV, "status", "--json"], environ)
            ours.append(status.seconds)
            peaks.append(status.peak_bytes / MEGABYTE)
    report.add("python -c pass", "s", bare[1:])  # the first run warms the file cache
    floor = report.add("python -c 'import click'", "s", click[1:])
    cold = report.add("openenv status --json", "s", ours[1:])
    report.ratio("openenv status --json / import click (aim: 3)", cold, floor)
    report.add("peak memory of openenv status --json (aim: 30)", "MB", peaks[1:])
    if importlib.util.find_spec("openenv") is not None:
        upstream = [
            run([sys.executable, "-m", "openenv.cli", "--help"]).seconds
            for _ in range(min(3, options.repetitions))
        ]
        report.add("upstream: openenv --help", "s", upstream)
    report.finish(options.json)


if __name__ == "__main__":
    main()
