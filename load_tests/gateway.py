# SPDX-License-Identifier: Apache-2.0
"""The gateway's cost: crowds of sessions through Envoy, and the same crowds without it.

    python -m load_tests.gateway [--json FILE]      2,048 and 8,192 sessions, 2 and 4 replicas
    python -m load_tests.gateway --short            256 sessions, 2 replicas

All sessions of a crowd connect in one instant, reset, take one step that waits a second, and close
(`openenvd.rollouts.bench`). The environment is launched twice, with the same number of replicas of
one shard each: once at an address that its replicas share, once behind the gateway. Both take turns
within the run. Then single sessions, and 64 at once, step as fast as they are answered.

The split is the largest deviation of a replica's sessions from an even share. A session's memory is
the difference in Envoy's PSS between many and few open sessions; CPU is Envoy's alone.

Aims: 100 % of the sessions succeed, and the split is within 5 %.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_tests.held_sessions import WARMING_SESSIONS, held
from load_tests.peers.cluster_servers import unevenness
from load_tests.peers.scaling_servers import openenv
from load_tests.shared.report import Report, daemon, parse_arguments, percentile, pss_bytes, run
from openenvd.rollouts.bench.results import Target
from openenvd.rollouts.bench.sweep import Plan, Sweep

CROWDS, SHORT_CROWDS = (2_048, 8_192), (256,)
REPLICAS, SHORT_REPLICAS = (2, 4), (2,)
MAX_UNEVEN = 5.0  # percent
STEPPING_SESSIONS = (1, 64)
STEP_SECONDS, SHORT_STEP_SECONDS = 5.0, 1.0
PAYLOAD_BYTES = 64
HANDSHAKES = 1024  # at once, while sessions are opened to measure Envoy's memory
US, MS = 1e6, 1e3


def launch(environ: dict[str, str], name: str, replicas: int, sessions: int, *more: str) -> Target:
    """Launch an environment that has slots for twice the crowd."""
    words = ["launch", "benchmark", "--name", name, "--shards", "1", *more]
    words += ["--replicas", str(replicas), "--max-sessions", str(2 * sessions)]
    address = openenv(environ, *words)["environment"]["address"]
    return Target(name, address)


def targets_of(environ: dict[str, str], replicas: int, sessions: int) -> list[Target]:
    """Launch the environment without and behind the gateway, whose CPU and memory are Envoy's."""
    direct = launch(environ, "direct", replicas, sessions)
    through = launch(environ, "through", replicas, sessions, "--gateway")
    envoy = openenv(environ, "gateway", "status")["gateway"]["pid"]
    return [direct, Target(through.name, through.url, (envoy,))]


def crowds(report: Report, targets: list[Target], replicas: int, options: Any) -> bool:
    """Measure all crowds; returns whether the aims are met."""
    plan = Plan(tuple(options.crowds), repetitions=options.repetitions)
    with tempfile.TemporaryDirectory(prefix="openenvd-load-") as folder:
        sweep = Sweep(plan, targets, Path(folder))
        sweep.run()
    met = True
    for crowd in options.crowds:
        found = {
            target.name: [
                s
                for s in sweep.report.summaries
                if s.server == target.name and s.num_requests == crowd
            ]
            for target in targets
        }
        what = f"{crowd:,} sessions, {replicas} replicas"
        for name, ours in found.items():
            report.add(f"{what}, {name}: succeeded", "%", [100 * (1 - s.error_rate) for s in ours])
            uneven = [unevenness(s.shard_split, replicas) for s in ours]
            report.add(f"{what}, {name}: split, off even by", "%", uneven)
            report.add(f"{what}, {name}: connected, P99", "ms", [MS * s.connect_p99 for s in ours])
            report.add(f"{what}, {name}: total, P99", "ms", [MS * s.total_p99 for s in ours])
        direct, through = found["direct"], found["through"]
        price = [MS * (a.total_p99 - b.total_p99) for a, b in zip(through, direct, strict=True)]
        report.add(f"{what}: Envoy's price in P99", "ms", price)
        cpu = [s.server_cpu_ms_per_session for s in through]
        report.add(f"{what}: Envoy's CPU a session", "ms", cpu)
        met &= all(s.failed == 0 for s in through)
        met &= statistics.median(unevenness(s.shard_split, replicas) for s in through) <= MAX_UNEVEN
    return met


def weigh(report: Report, through: Target, replicas: int, sessions: int) -> None:
    """Measure Envoy's memory before its first session, and per session."""
    idle = sum(pss_bytes(through.root_pids))
    report.add(f"{replicas} replicas: Envoy, idle", "MB", [idle / 2**20])
    found = []
    for count in (WARMING_SESSIONS, sessions):
        with held(through, count, 1, HANDSHAKES) as clients:
            found.append((clients.opened, sum(pss_bytes(through.root_pids))))
    (few, few_bytes), (many, many_bytes) = found
    each = (many_bytes - few_bytes) / max(1, many - few)
    report.add(f"{replicas} replicas: Envoy, a session", "kB", [each / 1024])


def steps(report: Report, targets: Sequence[Target], options: Any) -> None:
    for sessions in STEPPING_SESSIONS:
        medians: dict[str, list[float]] = {target.name: [] for target in targets}
        slowest: dict[str, list[float]] = {target.name: [] for target in targets}
        for _ in range(options.repetitions):
            for target in targets:
                latencies = step(target, sessions, options.step_seconds)
                medians[target.name].append(US * percentile(latencies, 0.5))
                slowest[target.name].append(US * percentile(latencies, 0.99))
        for what, values in (("P50", medians), ("P99", slowest)):
            for name, each in values.items():
                report.add(f"a step of {sessions}, {name}: {what}", "us", each)
            pairs = zip(values["through"], values["direct"], strict=True)
            report.add(
                f"a step of {sessions}: Envoy's price, {what}", "us", [a - b for a, b in pairs]
            )


def step(target: Target, sessions: int, seconds: float) -> list[float]:
    """Let sessions step for some seconds; returns the latencies of all steps, in seconds."""
    words = [str(target.port), str(sessions), str(seconds), str(PAYLOAD_BYTES)]
    command = [sys.executable, "-m", "load_tests.shared.step_clients", *words]
    outcome = json.loads(run([*command, "--path", f"{target.path}/ws"]).output)
    if outcome["failed"]:
        raise SystemExit(
            f"{target.name}: {outcome['failed']} sessions failed: {outcome['first_failure']}"
        )
    latencies: list[float] = outcome["latencies"]
    return latencies


def main() -> int:
    options = parse_arguments(
        "The gateway's price.",
        3,
        short={"action": "store_true", "help": "256 sessions, 2 replicas"},
    )
    options.crowds = SHORT_CROWDS if options.short else CROWDS
    options.replicas = SHORT_REPLICAS if options.short else REPLICAS
    options.step_seconds = SHORT_STEP_SECONDS if options.short else STEP_SECONDS
    report = Report("The gateway's price")
    met = True
    for replicas in options.replicas:
        with daemon() as environ:
            targets = targets_of(environ, replicas, max(options.crowds))
            weigh(report, targets[1], replicas, max(options.crowds))
            met &= crowds(report, targets, replicas, options)
            if replicas == options.replicas[0]:
                steps(report, targets, options)
    report.finish(options.json)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
