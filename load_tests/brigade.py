# SPDX-License-Identifier: Apache-2.0
"""The bucket brigade: singers in real time, one process against 2 and 4 shards.

Each singer sends 600 ms of a voice as Opus every 600 ms over a WebSocket, and must have the mix
back before the next packet is due. The program searches for the largest population without a miss.
The first packets are not counted; a latency counts from the moment at which its packet was due.

The original (https://www.jefftk.com, "Sharding the Brigade", six cores, singers on other machines):
216 singers in one process, 1,090 with shards. Here singers and server share the cores, so the
report shows the CPU use of both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from load_tests.peers.brigade_singers import PACKET_SECONDS, WARM_UP_PACKETS
from load_tests.peers.scaling_servers import Arrangement, openenvd_of
from load_tests.shared.client_process import ClientProcess
from load_tests.shared.report import Measure, Report, parse_arguments, percentile
from openenvd.rollouts.bench.results import Target, cpu_seconds

ARRANGEMENTS = (("one process", None), ("2 shards", 2), ("4 shards", 4))
FIRST, MOST = 100, 4000  # singers
EXACTNESS = 0.08  # of the largest population, as a share of it
WARMING = 16  # singers
SHARED = "openenvd.env_host.bundled.brigade.environment:BrigadeEnvironment"
ALONE = "load_tests.envs_for_load.brigade_alone:BrigadeAlone"
MAX_SESSIONS = 8192


def main() -> None:
    """Measure one arrangement after the other, in each repetition."""
    options = parse_arguments(
        __doc__ or "",
        repetitions=3,
        seconds={"type": float, "default": 12.0, "help": "of singing in each trial"},
        short={"action": "store_true", "help": "below 30 s: small populations, no search"},
    )
    report = Report("Bucket brigade")
    singing(report, options)
    report.finish(options.json)


def singing(report: Report, options: Any) -> None:
    """Find the largest population of each arrangement; the short form tries a small one."""
    found: dict[str, list[list[Trial]]] = {name: [] for name, _ in ARRANGEMENTS}
    for _ in range(1 if options.short else options.repetitions):
        for name, shards in ARRANGEMENTS:
            with serve(shards) as target:
                sing(target, WARMING, 2.0)  # the load starts further shards
                trial = _trier(name, target, 1.2 if options.short else options.seconds)
                if options.short:
                    found[name].append([trial(30)])
                else:
                    found[name].append(search(trial))
    if options.short:
        report.note("The short form tries one small population; its figures are no limits.")
    largest = {name: _tell_trials(report, name, trials) for name, trials in found.items()}
    for name, _ in ARRANGEMENTS[1:]:
        report.ratio(f"{name} against one process", largest[name], largest["one process"])
    report.note(
        "cores: of all the server's processes, and of the singers beside them, at that population"
    )


def search(trial: Callable[[int], Trial]) -> list[Trial]:
    """Find the largest clean population: double it until a trial fails, then bisect."""
    trials, clean, missed, count = list[Trial](), 0, MOST, FIRST
    while count < MOST and missed - clean > EXACTNESS * missed:
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


# Trials


@dataclass(frozen=True)
class Trial:
    """The measurements of one population of singers."""

    singers: int
    packets: int
    p50_seconds: float
    p99_seconds: float
    misses: int
    heard: int
    server_cores: float  # used by all of the server's processes
    singers_cores: float

    @property
    def is_clean(self) -> bool:
        """Return whether no singer heard a gap."""
        return self.misses == 0

    def sentence(self, name: str) -> str:
        return (
            f"  {name}: {self.singers} singers, p50 {self.p50_seconds * 1000:.0f} ms, "
            f"p99 {self.p99_seconds * 1000:.0f} ms, {self.misses} of {self.packets} missed, "
            f"{self.server_cores:.2f} + {self.singers_cores:.2f} cores"
        )


@contextmanager
def serve(shards: int | None) -> Iterator[Target]:
    """Launch an environment with this many shards and a state process; None: all in one process."""
    arrangement = Arrangement(MAX_SESSIONS, 1, shards=str(shards or 1))
    with openenvd_of(arrangement, ALONE if shards is None else SHARED) as started:
        yield started.target


def sing(target: Target, count: int, seconds: float, processes: int = 2) -> Trial:
    """Run this many singers in real time, for `seconds` after all of them are connected."""
    packets = WARM_UP_PACKETS + max(1, round(seconds / PACKET_SECONDS))
    processes = min(processes, count)
    crews: list[ClientProcess] = []
    try:
        for number in range(processes):
            share = count // processes + (number < count % processes)
            leads = "follows" if number else "leads"
            words = (target.port, share, packets, leads)
            crews.append(ClientProcess("peers.brigade_singers", *words))
            crews[-1].hear()  # the leader is connected before the others
        used = cpu_seconds(target)
        began = time.monotonic()
        for crew in crews:
            crew.tell(began + 0.2)
        found = [crew.hear() for crew in crews]
        cores = (cpu_seconds(target) - used) / (time.monotonic() - began)
    finally:
        for crew in crews:
            crew.kill()
    return _trial(count, found, cores, packets * PACKET_SECONDS)


def _trial(count: int, found: list[dict[str, Any]], cores: float, seconds: float) -> Trial:
    latencies = [latency for one in found for latency in one["latencies"]]
    faults = [fault for one in found for fault in one["faults"]]
    if faults:
        raise SystemExit(f"singers were answered with errors: {faults[:3]}")
    latencies = latencies or [seconds]  # overwhelmed: only the warm-up was answered
    return Trial(
        singers=count,
        packets=sum(one["packets"] for one in found),
        p50_seconds=percentile(latencies, 0.50),
        p99_seconds=percentile(latencies, 0.99),
        misses=sum(one["misses"] for one in found),
        heard=max(one["heard"] for one in found),
        server_cores=cores,
        singers_cores=sum(one["cpu_seconds"] for one in found) / seconds,
    )


if __name__ == "__main__":
    main()
