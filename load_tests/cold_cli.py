# SPDX-License-Identifier: Apache-2.0
"""A cold `openenv status --json` against a running daemon, beside `python -c 'import click'`.

Aim: at most 3 times its seconds, and under 30 MB. With `--peer skypilot`, `sky status` takes turns
with ours, against its own server (skypilot_peer.py). So does upstream's `openenv --help`, where
it is installed.
"""

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from load_tests.peers.skypilot_peer import (
    PEER_OPTION,
    SETTLE_SECONDS,
    SKYPILOT,
    kinds,
    need,
    started,
)
from load_tests.shared.report import MEGABYTE, OPENENV, Report, daemon, parse_arguments, run


def main() -> None:
    """Measure both by turns, so that a change of the machine's speed affects them alike."""
    options = parse_arguments("A cold command line.", repetitions=20, peer=PEER_OPTION)
    report = Report("Cold command line")
    bare: list[float] = []
    click: list[float] = []
    ours: list[float] = []
    peaks: list[float] = []
    sky: list[float] = []
    with daemon() as environ, _skypilot(options.peer) as skypilot:
        for _ in range(options.repetitions + 1):
            bare.append(run([sys.executable, "-c", "pass"]).seconds)
            click.append(run([sys.executable, "-c", "import click"]).seconds)
            status = run([OPENENV, "status", "--json"], environ)
            ours.append(status.seconds)
            peaks.append(status.peak_bytes / MEGABYTE)
            if skypilot is not None:
                sky.append(run(*skypilot).seconds)
    report.add("python -c pass", "s", bare[1:])  # the first run warms the file cache
    floor = report.add("python -c 'import click'", "s", click[1:])
    cold = report.add("openenv status --json", "s", ours[1:])
    if sky:
        peer = report.add(f"sky status: {SKYPILOT}", "s", sky[1:])
        report.ratio("sky status / openenv status --json", peer, cold)
    report.ratio("openenv status --json / import click (aim: 3)", cold, floor)
    report.add("peak memory of openenv status --json (aim: 30)", "MB", peaks[1:])
    if importlib.util.find_spec("openenv") is not None:
        upstream = [
            run([sys.executable, "-m", "openenv.cli", "--help"]).seconds
            for _ in range(min(3, options.repetitions))
        ]
        report.add("upstream: openenv --help", "s", upstream)
    report.finish(options.json)


@contextmanager
def _skypilot(real: str | None) -> Iterator[tuple[list[str], dict[str, str]] | None]:
    """Yield the peer's status command, and the variables by which it reaches a running server."""
    if real is None:
        yield None
        return
    with kinds(real) as [kind], started(kind) as peer:
        need(peer)
        time.sleep(SETTLE_SECONDS)
        yield kind.status, peer.environ


if __name__ == "__main__":
    main()
