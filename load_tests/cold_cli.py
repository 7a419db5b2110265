# SPDX-License-Identifier: Apache-2.0
"""A cold `openenv status --json` against a running daemon, beside `python -c 'import click'`.

Aim: at most 3 times its seconds, and under 30 MB.
"""

import sys

from load_tests.shared.report import MEGABYTE, OPENENV, Report, daemon, parse_arguments, run


def main() -> None:
    """Measure both by turns, so that a change of the machine's speed affects them alike."""
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
    report.finish(options.json)


if __name__ == "__main__":
    main()
