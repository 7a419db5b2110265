# SPDX-License-Identifier: Apache-2.0
"""The bucket brigade: singers in real time, one process against 2 and 4 shards.

Each singer sends 600 ms of a voice as Opus every 600 ms over a WebSocket, and must have the mix
back before the next packet is due; sought is the largest population of which nobody misses once.
The first packets are not counted, latencies are from when a packet was due.

The original (https://www.jefftk.com, "Sharding the Brigade", six cores, singers on other machines):
216 singers in one process, 1,090 with shards. Here singers and server share the cores, and the
singers' own use stands beside the server's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from load_tests.peers.brigade_servers import Trial, serve, sing
from load_tests.shared.report import Measure, Report, parse_arguments, share
from openenvd.rollouts.bench.target import Target

ARRANGEMENTS = (("one process", None), ("2 shards", 2), ("4 shards", 4))
MOST = 4000
WARMING = 16  # singers


def main() -> None:
    """One arrangement after the other, in each repetition."""
    options = parse_arguments(
        __doc__ or "",
        repetitions=3,
        seconds={"type": float, "default": 12.0, "help": "of singing in each trial"},
        first={"type": int, "default": 100, "help": "singers in the first trial"},
        step={"type": share, "default": 0.08, "help": "how exactly to seek the largest (a share)"},
        short={"action": "store_true", "help": "below 30 s: small populations, no search"},
    )
    report = Report("Bucket brigade")
    singing(report, options)
    report.finish(options.json)


def singing(report: Report, options: Any) -> None:
    """The largest population of each arrangement; in the short form, one small one."""
    found: dict[str, list[list[Trial]]] = {name: [] for name, _ in ARRANGEMENTS}
    for _ in range(1 if options.short else options.repetitions):
        for name, shards in ARRANGEMENTS:
            with serve(shards) as target:
                sing(target, WARMING, 2.0)  # further shards come with the load
                trial = _trier(name, target, 1.2 if options.short else options.seconds)
                if options.short:
                    found[name].append([trial(30)])
                else:
                    found[name].append(search(trial, options.first, options.step))
    if options.short:
        report.note("The short form tries one small population; its figures are no limits.")
    largest = {name: _tell_trials(report, name, trials) for name, trials in found.items()}
    for name, _ in ARRANGEMENTS[1:]:
        report.ratio(f"{name} against one process", largest[name], largest["one process"])
    report.note(
        "cores: of all the server's processes, and of the singers beside them, at that population"
    )


def search(trial: Callable[[int], Trial], first: int, exactness: float) -> list[Trial]:
    """Trials that close in on the largest clean population: doubling, then halving."""
    trials, clean, missed, count = list[Trial](), 0, MOST, first
    while count < MOST and missed - clean > exactness * missed:
        trials.append(trial(count))
        if trials[-1].is_clean:
            clean = max(clean, count)
            count = 2 * count if missed == MOST else (clean + missed) // 2
        else:
            missed = min(missed, count)
            count = (clean + missed) // 2
    return trials


def _trier(name: str, target: Target, seconds: float) -> Callable[[int], Trial]:
    def trial(count: int) -> Trial:
        found = sing(target, count, seconds)
        print(found.sentence(name), flush=True)
        return found

    return trial


def _tell_trials(report: Report, name: str, repetitions: list[list[Trial]]) -> Measure:
    best = [_best(trials) for trials in repetitions]
    largest = report.add(f"{name}: singers without a miss", "", [t.singers for t in best])
    report.add("  p50 of an answer there", "ms", [t.p50_seconds * 1000 for t in best])
    report.add("  p99 of an answer there", "ms", [t.p99_seconds * 1000 for t in best])
    report.add("  cores used by the server", "", [t.server_cores for t in best])
    report.add("  cores used by the singers", "", [t.singers_cores for t in best])
    next_up = [_first_that_missed(trials, b) for trials, b in zip(repetitions, best, strict=True)]
    shares = [100 * t.misses / (t.packets or 1) for t in next_up if t is not None]
    if shares:
        report.add("  missed at the next larger population tried", "%", shares)
    return largest


def _best(trials: list[Trial]) -> Trial:
    clean = [trial for trial in trials if trial.is_clean]
    return max(clean or trials[-1:], key=lambda trial: trial.singers)


def _first_that_missed(trials: list[Trial], best: Trial) -> Trial | None:
    missed = [t for t in trials if not t.is_clean and t.singers > best.singers]
    return min(missed, key=lambda trial: trial.singers, default=None)


if __name__ == "__main__":
    main()
