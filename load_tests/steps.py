# SPDX-License-Identifier: Apache-2.0
"""Steps per second, and a step's latency and CPU: by environment, sessions and message size.

    python -m load_tests.steps [--short] [--apart] [--json FILE] [--shapes NAME ...]
    python -m load_tests.steps --gateway --shapes async      what Envoy adds

Every session has one step in flight, and each step carries the same number of bytes to the
environment and back. There are three shapes of environment:

    async      `openenv launch benchmark`: on the event loop
    sync       the same with `BENCHMARK_SYNC=1`: on a thread of each session
    template   the project that upstream's `openenv init` generates: synchronous, with pydantic
               models of its own; the message comes back twice

For each shape three servers are started once: ours, upstream's with the same environment, and the
bare server, which is the limit and has no environment. They take turns in each repetition, so that
a change of the machine's speed affects all three. Each has `--processes` processes.

Where servers and clients share the cores, the clients' part of a step bounds every ratio, and the
cost of a thread depends on which core wakes it. With `--apart`, servers have the first core and one
process, and clients have the other cores: the rate is that of a core that only serves, as long as
the clients take less than one core.
"""

import os
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from load_tests.peers import scaling_servers
from load_tests.shared.client_process import ClientProcess
from load_tests.shared.report import Measure, Report, parse_arguments, percentile
from openenvd.rollouts.bench.results import Target, cpu_seconds, processes_of

SESSIONS = (1, 64, 1024)
PAYLOADS = {"200 B": 200, "20 kB": 20_000, "2 MB": 2_000_000}
SHAPES = ("async", "sync", "template")
SHORT_SHAPES = ("async", "sync")  # generating and installing a project takes time
SHORT_SESSIONS = (1, 64)
SHORT_PAYLOADS = {"200 B": 200, "20 kB": 20_000}
MAX_SESSIONS = 4096
CLIENTS = 2  # processes, if there are as many sessions
WARM_UP_SECONDS = 0.3


@dataclass(frozen=True)
class Case:
    """One line of the matrix."""

    shape: str
    sessions: int
    payload: str
    payload_bytes: int

    @property
    def name(self) -> str:
        return f"{self.shape} {self.sessions} x {self.payload}"


@dataclass(frozen=True)
class Found:
    """The measurements of one server in one case."""

    steps_per_second: float
    p50_ms: float
    p99_ms: float
    server_us: float  # of CPU, a step
    client_us: float


class SessionsFailed(Exception):
    """Sessions of one measurement ended early."""


def measure(target: Target, case: Case, seconds: float) -> Found:
    """Run the clients against one server.

    Raises:
        SessionsFailed: Some sessions ended early.
    """
    count = min(CLIENTS, case.sessions)
    words: list[object] = [f"{target.url.replace('http', 'ws', 1)}/ws", case.sessions // count]
    words += [seconds, case.payload_bytes]
    words += ["--echo"] if case.shape == "template" and target.name != "limit" else []
    clients = [ClientProcess("shared.step_clients", *words) for _ in range(count)]
    for client in clients:
        client.hear()  # all its sessions are open
    before = cpu_seconds(target)
    for client in clients:
        client.tell("go")
    outcomes = [client.hear() for client in clients]
    spent = cpu_seconds(target) - before
    for client in clients:
        client.end()
    if failed := sum(o["failed"] for o in outcomes):
        why = next(o["first_failure"] for o in outcomes if o["failed"])
        raise SessionsFailed(f"{case.name} {target.name}: {failed} sessions failed: {why}")
    latencies = [value for o in outcomes for value in o["latencies"]]
    return Found(
        steps_per_second=sum(len(o["latencies"]) / o["stepping_seconds"] for o in outcomes),
        p50_ms=percentile(latencies, 0.5) * 1e3,
        p99_ms=percentile(latencies, 0.99) * 1e3,
        server_us=spent / len(latencies) * 1e6,
        client_us=sum(o["cpu_seconds"] for o in outcomes) / len(latencies) * 1e6,
    )


def _keep_apart(targets: list[Target], cores: list[int]) -> None:
    """Pin the servers to the first core, and this process's clients to the others."""
    first, *others = cores
    for process in (each for target in targets for each in processes_of(target)):
        for thread in process.threads():
            with suppress(ProcessLookupError):  # of a session that has just ended
                os.sched_setaffinity(thread.id, {first})
    os.sched_setaffinity(0, others)


def _cases(shape: str, *, short: bool) -> list[Case]:
    sessions = SHORT_SESSIONS if short else SESSIONS
    payloads = SHORT_PAYLOADS if short else PAYLOADS
    return [Case(shape, n, name, size) for name, size in payloads.items() for n in sessions]


def _targets(stack: ExitStack, shape: str, options: Any) -> list[Target]:
    """Start the servers of one shape: ours first, the limit last; or the gateway's two."""
    arrangement = scaling_servers.Arrangement(
        max_sessions=MAX_SESSIONS,
        processes=options.processes,
        is_synchronous=shape == "sync",
        shards=str(options.processes),
    )
    if options.gateway:
        both = stack.enter_context(scaling_servers.behind_gateway(arrangement, options.processes))
        return [started.target for started in both]
    peer_app: tuple[Any, ...] = ()
    if shape == "template":
        python = scaling_servers.peer_python()
        project = stack.enter_context(scaling_servers.template_project(arrangement, python))
        servers = [scaling_servers.openenvd_of(arrangement, str(project))]
        peer_app = (scaling_servers.TEMPLATE_APP, project.parent)
    else:
        servers = [scaling_servers.openenvd(arrangement)]
    if not options.alone:
        python = scaling_servers.peer_python()
        servers.append(scaling_servers.upstream(arrangement, python, *peer_app))
    if not scaling_servers.why_no_limit():
        servers.append(scaling_servers.limit(options.processes))
    return [stack.enter_context(server).target for server in servers]


def _measure_shape(shape: str, options: Any, seconds: float, report: Report) -> list[str]:
    """Measure all cases of one shape; returns the measurements that failed."""
    failures: list[str] = []
    cases = _cases(shape, short=options.short)
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        targets = _targets(stack, shape, options)
        found: dict[Case, dict[str, list[Found]]] = {
            case: {target.name: [] for target in targets} for case in cases
        }
        for target in targets:
            measure(target, Case(shape, CLIENTS, "a little", 10), WARM_UP_SECONDS)
        if options.apart:
            _keep_apart(targets, cores)
        for number in range(options.repetitions):
            for case in cases:
                turn = number % len(targets)
                for target in targets[turn:] + targets[:turn]:
                    try:
                        found[case][target.name].append(measure(target, case, seconds))
                    except SessionsFailed as exc:
                        failures.append(str(exc))
                        print(exc, file=sys.stderr, flush=True)
    for case in cases:
        _tell(report, case, {name: values for name, values in found[case].items() if values})
    return failures


def _tell(report: Report, case: Case, found: dict[str, list[Found]]) -> None:
    rates: dict[str, Measure] = {}
    for name, values in found.items():
        line = f"{case.name} {name}"
        rates[name] = report.add(line, "st/s", [f.steps_per_second for f in values])
        report.add(f"{line} p50", "ms", [f.p50_ms for f in values])
        report.add(f"{line} p99", "ms", [f.p99_ms for f in values])
        report.add(f"{line} server CPU", "us", [f.server_us for f in values])
        report.add(f"{line} client CPU", "us", [f.client_us for f in values])
    if not rates:
        return
    ours, *others = rates
    for other in others:
        report.ratio(f"{case.name} {ours} / {other}", rates[ours], rates[other])


def main() -> int:
    options = parse_arguments(
        "Steps per second: ours, upstream's, the limit.",
        3,
        short={"action": "store_true", "help": "small numbers, to check that it runs"},
        seconds={"type": float, "help": "of each measurement (default 5; short: 0.5)"},
        processes={"type": int, "default": 2, "help": "of each server"},
        apart={"action": "store_true", "help": "one core for the servers, the others for clients"},
        gateway={"action": "store_true", "help": "ours through the gateway, beside ours without"},
        alone={"action": "store_true", "help": "without upstream's server"},
        shapes={"nargs": "+", "choices": SHAPES, "help": "of the environment (all; short: two)"},
    )
    if options.apart:
        options.processes = 1
    seconds = options.seconds or (0.5 if options.short else 5.0)
    report = Report("Steps per second, by sessions and bytes each way")
    if why := scaling_servers.why_no_limit():
        report.note(why)
    failures: list[str] = []
    for shape in options.shapes or (SHORT_SHAPES if options.short else SHAPES):
        failures += _measure_shape(shape, options, seconds, report)
    for failure in failures:
        report.note(failure)
    report.finish(options.json)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
