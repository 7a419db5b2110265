# SPDX-License-Identifier: Apache-2.0
r"""Crowds of sessions at once and their latencies by the seed's protocol, beside peer and limit.

    python -m load_tests.scaling --short
    python -m load_tests.scaling --compare-limit           the aims below; a quarter of an hour
    python -m load_tests.scaling --compare-limit --clients upstream --requests-grid 16384 \
        --generators 8 --peer upstream --handshake-timeout 60
    python -m load_tests.scaling --requests-grid 32,128,512,2048,4096,8192,16384 \
        --wait-grid 1,5,10 --reps 3 --peer upstream --limit
    python -m load_tests.scaling --window 1024 --limit     at most 1,024 handshakes under way
    python -m load_tests.scaling --requests-grid 256 --max-sessions 400 --peer upstream
    python -m load_tests.scaling --url http://host:8000    a server that runs already
    python -m load_tests.scaling --provider slurm --nodes 2 --requests-grid 16384 --reps 3
                                                           or `ray`: with and without the gateway
    python -m load_tests.scaling --provider gateway --nodes 4 --requests-grid 2048,8192
                                                           the same here, with four replicas

Every session connects, resets, takes one step that waits, and closes. All sessions of a batch
connect in one instant, like training code that opens its sessions in one `gather`; a handshake may
take 10 s, the limit of upstream's client. The load comes from `openenvd.rollouts.bench`: several
processes that report their own CPU, and count latencies from the start of the batch. With
`--clients upstream` it comes from upstream's clients, in one `gather` per process
(`gather_clients.py`), which cost much more than a server. Servers take turns within the run. Drops
are the kernel's, of the whole system: run nothing else at the same time. The program writes
`raw.jsonl` and `summary.csv` with the seed's fields, `summary.json`, and two figures.

Aims, for one, two and four shards, the bundled environment and a project: 2,048, 8,192 and 16,384
sessions at 100 %, none dropped by the kernel, total P99 within 1.3 times the limit's of the same
repetition, and a fifth of upstream's CPU per session. Through the gateway 100 %, and replicas'
shares within 5 % of even, otherwise the exit code is 1.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from load_tests.peers import scaling_servers as servers
from load_tests.peers.cluster_servers import KINDS as CLUSTERS
from load_tests.peers.cluster_servers import is_met, on_cluster, report_lines
from load_tests.peers.scaling_servers import REPOSITORY, Arrangement, Started
from load_tests.shared import chart
from load_tests.shared.report import machine
from openenvd.rollouts.bench import results
from openenvd.rollouts.bench.generator import HANDSHAKE_SECONDS
from openenvd.rollouts.bench.results import Report, Summary, Target
from openenvd.rollouts.bench.sweep import Plan, Sweep
from openenvd.schema.errors import EnvironmentsError

DEFAULT_FOLDER = Path(__file__).with_name("results") / "scaling"
COMPARE_LIMIT = [
    "--requests-grid", "2048,8192,16384", "--wait-grid", "1", "--reps", "3", "--shards", "1,2,4",
    "--max-sessions", "20000", "--project", "--limit",
]  # fmt: skip
MAX_TIMES_LIMIT = 1.3  # the aim for the total P99
SHORT = ["--requests-grid", "32,256", "--wait-grid", "0.5,1", "--reps", "1", "--limit"]
USAGE_EXIT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    kind = CLUSTERS.get(options.provider)
    if kind is not None and (reason := kind.why_not()) is not None:
        print(f"skipped: no {options.provider}: {reason}")
        return 0
    try:
        plan = plan_of(options)
        with _started(options, plan) as started:
            return _measure(options, plan, started)
    except EnvironmentsError as exc:
        hint = f"\n  {exc.hint}" if exc.hint else ""
        print(f"error: {exc.message}{hint}", file=sys.stderr)
        return USAGE_EXIT if exc.kind == "invalid" else 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; given options override what `--short` and the like set."""
    parser = argparse.ArgumentParser(description="How many sessions at once.")
    add = parser.add_argument
    add("--requests-grid", type=parse_grid, default="32,128,512,2048", metavar="N,N,…")
    add("--wait-grid", type=parse_grid, default="1", metavar="SECONDS,…")
    add("--reps", "--repetitions", type=int, default=3)
    add("--peer", choices=("upstream",), action="append", default=[])
    add(
        "--limit",
        action="store_true",
        help="also two bare processes; beside one shard, a single one as well (limit-1)",
    )
    add("--project", action="store_true", help="ours also with the peer's own classes")
    add("--sync", action="store_true", help="the environment that blocks a thread while it waits")
    add(
        "--shards",
        metavar="N,N,…|auto",
        default="auto",
        help="of ours, 1,2,4: one server of each",
    )
    add("--max-sessions", type=int, help="slots of all processes together; by default enough")
    add("--provider", choices=("local", "gateway", *CLUSTERS), default="local",
        help="what runs our server; gateway: local, and through Envoy")  # fmt: skip
    add("--nodes", type=int, default=2, help="with --provider: nodes, with a replica each")
    add("--url", help="measure a server that runs already, instead of ours")
    add(
        "--clients",
        choices=("light", "upstream"),
        default="light",
        help="the clients that make the load",
    )
    add(
        "--window",
        type=int,
        default=0,
        metavar="N",
        help="handshakes under way; 0, the default: all",
    )
    add("--generators", type=int, help="processes that make the load")
    add("--handshake-timeout", type=float, default=HANDSHAKE_SECONDS, help="of a handshake")
    add("--timeout", type=float, default=120.0, help="of a session, beyond its wait")
    add("--output-dir", type=Path, default=DEFAULT_FOLDER)
    add("--json", type=Path, metavar="FILE", help="a copy of summary.json")
    add("--chart", type=Path, metavar="FILE", help="the README's chart, of this run")
    add("--short", action="store_true", help="half a minute: " + " ".join(SHORT))
    add("--compare-limit", action="store_true", help="the aims: " + " ".join(COMPARE_LIMIT))
    presets = {"--short": SHORT, "--compare-limit": COMPARE_LIMIT}
    said = [word for preset in presets if preset in arguments for word in presets[preset]]
    return parser.parse_args([*said, *arguments])


def parse_grid(text: str) -> tuple[float, ...]:
    """`32,128,512` as numbers.

    Raises:
        argparse.ArgumentTypeError: A part is not a number, or there is none.
    """
    with suppress(ValueError):
        if values := tuple(float(part) for part in text.split(",") if part.strip()):
            return values
    raise argparse.ArgumentTypeError(f"write numbers, as 32,128,512, instead of {text!r}")


def plan_of(options: argparse.Namespace) -> Plan:
    return Plan(
        requests_grid=tuple(map(int, options.requests_grid)),
        wait_grid=options.wait_grid,
        repetitions=options.reps,
        timeout_seconds=options.timeout,
        generators=options.generators,
        window=options.window,
        handshake_seconds=options.handshake_timeout,
    )


def program_of(options: argparse.Namespace) -> list[str]:
    """Return the command that makes the load; empty: `openenvd.rollouts.bench`'s generator."""
    if options.clients == "light":
        return []
    program = REPOSITORY / "load_tests/peers/gather_clients.py"
    return [str(servers.peer_python()), str(program)]


def _measure(options: argparse.Namespace, plan: Plan, started: list[Started]) -> int:
    targets, program = [one.target for one in started], program_of(options)
    sweep = Sweep(plan, targets, options.output_dir, on_summary=_tell, program=program)
    sweep.report.facts = {one.target.name: one.facts for one in started}
    written = sweep.run()
    sweep.report.facts["ratios"] = ratios(sweep.report)
    sweep.report.write()
    written += chart.draw_all(sweep.report, options.output_dir)
    for line in [
        *results.lines_of(sweep.report),
        *comparison(sweep.report),
        *missed(sweep.report),
    ]:
        print(line)
    if options.provider != "local":
        for line in report_lines(sweep.report.summaries, options.nodes):
            print(line)
    for one in started:
        for name, seconds in one.facts.items():
            print(f"{one.target.name}: {name.replace('_', ' ')} {seconds:.2f}")
    if options.json is not None:
        shutil.copyfile(options.output_dir / "summary.json", options.json)
    if options.chart is not None:
        chart.main(options.output_dir / "summary.json", options.chart)
    print(f"written: {', '.join(str(path) for path in written)}")
    return int(options.provider != "local" and not is_met(sweep.report.summaries, options.nodes))


@contextmanager
def _started(options: argparse.Namespace, plan: Plan) -> Iterator[list[Started]]:
    arrangement = arrangement_of(options, plan)
    with ExitStack() as stack:
        started: list[Started] = []
        if options.url is not None:
            started.append(Started(Target("server", options.url)))
        elif options.provider == "gateway":
            started += stack.enter_context(servers.behind_gateway(arrangement, options.nodes))
        elif options.provider != "local":
            shards = "1" if options.shards == "auto" else options.shards
            arrangement = replace(arrangement, shards=shards)
            started += stack.enter_context(on_cluster(options.provider, options.nodes, arrangement))
        else:
            ours = [replace(arrangement, shards=shards) for shards in shards_of(options)]
            both = servers.openenvd_all(ours, with_projects=options.project)
            started += stack.enter_context(both)
        if "upstream" in options.peer:
            python = servers.peer_python()
            peers = peer_arrangement(arrangement, is_bounded=options.max_sessions is not None)
            started.append(stack.enter_context(servers.upstream(peers, python)))
        if options.limit:
            started += _limit(stack, of_one="1" in shards_of(options))
        yield started


def _limit(stack: ExitStack, *, of_one: bool) -> list[Started]:
    """Start the bare server with two processes, and with one as the limit of one shard."""
    if why_not := servers.why_no_limit():
        print(why_not)
        return []
    started = [stack.enter_context(servers.limit())]
    if of_one:
        started.append(stack.enter_context(servers.limit(1, "limit-1")))
    return started


def arrangement_of(options: argparse.Namespace, plan: Plan) -> Arrangement:
    """Arrange our server: as many slots as sessions, unless the slots are under test."""
    return Arrangement(
        max_sessions=options.max_sessions or max(plan.requests_grid),
        processes=int(machine()["cores"]),
        is_synchronous=options.sync,
    )


def shards_of(options: argparse.Namespace) -> list[str]:
    """Return the value of `--shards` for each of our servers."""
    return str(options.shards).split(",")


def peer_arrangement(ours: Arrangement, *, is_bounded: bool) -> Arrangement:
    """Arrange the peer: each worker gets its share of the slots where they are under test.

    Otherwise each worker may take every session, so that no session is refused by chance.
    """
    slots = ours.max_sessions if is_bounded else ours.max_sessions * ours.processes
    return Arrangement(slots, ours.processes, ours.is_synchronous)


def ratios(report: Report) -> list[dict[str, Any]]:
    """Compare each batch of ours with the limit's of the same repetition."""
    limits = {(*_cell_of(s), s.repetition): s for s in report.summaries if s.server == "limit"}
    return [
        {
            "server": s.server,
            "sessions": s.num_requests,
            "wait_seconds": s.wait_seconds,
            "repetition": s.repetition,
            "success": 1 - s.error_rate,
            "kernel_listen_drops": s.kernel_listen_drops,
            "total_p99": s.total_p99,
            "times_limit": s.total_p99 / limit.total_p99 if limit.total_p99 else None,
            "server_cpu_ms_per_session": s.server_cpu_ms_per_session,
        }
        for s in report.summaries
        if (limit := limits.get((*_cell_of(s), s.repetition))) and is_ours(s)
    ]


def missed(report: Report) -> list[str]:
    """Describe our batches that miss an aim; there are aims only beside a limit."""
    every = ratios(report)
    lines = [
        f"{one['sessions']} x {one['wait_seconds']:g} s, {one['server']} #{one['repetition']}: "
        f"{100 * one['success']:.4g} %, {one['kernel_listen_drops']} dropped, "
        f"{one['times_limit'] or float('nan'):.2f} times the limit"
        for one in every
        if one["success"] < 1
        or one["kernel_listen_drops"]
        or (one["times_limit"] or 0.0) > MAX_TIMES_LIMIT
    ]
    if not every:
        return []
    aims = f"100 %, none dropped, within {MAX_TIMES_LIMIT} times the limit"
    return [f"aims ({aims}): met by {len(every) - len(lines)} of {len(every)} batches", *lines]


def is_ours(summary: Summary) -> bool:
    """Return whether the summary is of a server of ours that was started here."""
    return str(summary.server).startswith("openenvd")


def comparison(report: Report) -> list[str]:
    """Compare our servers with each other server, cell by cell and repetition by repetition."""
    groups = results.grouped(report.summaries)
    lines = []
    for mine in (group for group in groups if is_ours(group[0])):
        for other in groups:
            same = _cell_of(other[0]) == _cell_of(mine[0])
            if same and not is_ours(other[0]):
                lines.append(_against(mine, other))
    return lines


def _cell_of(summary: Summary) -> tuple[Any, ...]:
    return summary.num_requests, summary.wait_seconds


def _against(mine: list[Summary], other: list[Summary]) -> str:
    pairs = list(zip(mine, other, strict=False))
    p99 = [a.total_p99 / b.total_p99 for a, b in pairs if b.total_p99]
    cpu = [
        a.server_cpu_ms_per_session / b.server_cpu_ms_per_session
        for a, b in pairs
        if b.server_cpu_ms_per_session
    ]
    first = mine[0]
    cell = f"{first.num_requests} x {first.wait_seconds:g} s"
    return (
        f"{cell}: {first.server} against {other[0].server}: "
        f"total P99 {_spread(p99)}, CPU a session {_spread(cpu)}"
    )


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return "not known"
    middle = sorted(ratios)[len(ratios) // 2]
    return f"{middle:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def _tell(summary: Summary) -> None:
    print(results.summary_line(summary), flush=True)


if __name__ == "__main__":
    sys.exit(main())
