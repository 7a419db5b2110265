# SPDX-License-Identifier: Apache-2.0
"""Many open sessions on one machine: their memory, and the latency of steps.

    python -m load_tests.held_sessions [--json FILE] [--limit]      65,536 sessions
    python -m load_tests.held_sessions --short                      2,048
    python -m load_tests.held_sessions --gateway --sessions 8192    Envoy's memory

Opens all sessions (`openenv launch benchmark`, reset, at most 1,024 handshakes under way), leaves
them idle, and reads the memory of the server's processes; then a random tenth of them steps: all at
once, and paced over ten seconds. A latency counts from the moment at which its step was due.

An address has some 28,000 ports towards one server, so clients connect from eight: 127.0.0.1 to
127.0.0.8. The limit on a process's open files is raised from the soft to the hard one; if that is
too low, the sessions are divided among several client processes and several shards.

Memory is the PSS of all of the server's processes, less that with a few sessions. PSS does not
contain the kernel's own memory: `Slab` of /proc/meminfo and the pages of TCP buffers
(/proc/net/sockstat) are the whole machine's, and count both ends of each connection.

Aims: 65,536 sessions, 4 kB or less of PSS each.
"""

import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from load_tests.peers import scaling_servers
from load_tests.shared.light_clients import Clients
from load_tests.shared.report import Report, parse_arguments, percentile, pss_bytes
from openenvd.rollouts.bench.results import Target, cpu_seconds

SESSIONS, SHORT_SESSIONS = 65_536, 2_048
SOURCES = [f"127.0.0.{last}" for last in range(1, 9)]
SPARE_FILES = 512  # of a process, beside its sessions
WARMING_SESSIONS = 64
WINDOW = 1024  # handshakes under way
STEPPING_SHARE = 0.1  # of the sessions
PACED_SECONDS = 10.0  # of the paced steps
SETTLE_SECONDS = 2.0
IDLE_SECONDS = 5.0
KB = 1024


@contextmanager
def held(target: Target, sessions: int, processes: int, window: int) -> Iterator[Clients]:
    clients = Clients(processes)
    sources = SOURCES if sys.platform == "linux" else []
    address = {"host": target.host, "port": target.port, "path": target.path}
    try:
        clients.open(sessions, window, sources, **address)
        yield clients
    finally:
        clients.end()


def kernel_bytes() -> dict[str, int]:
    """Return the kernel's memory on the whole machine; empty if the kernel does not report it."""
    if sys.platform != "linux":
        return {}
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    slab = int(meminfo["Slab"].split()[0]) * KB
    words = next(
        line.split()
        for line in Path("/proc/net/sockstat").read_text().splitlines()
        if line.startswith("TCP:")
    )
    pages = int(words[words.index("mem") + 1])
    return {"slab": slab, "TCP buffers": pages * os.sysconf("SC_PAGE_SIZE")}


def measure(report: Report, target: Target, sessions: int, clients: int) -> None:
    """Measure one server once, and add to the lines of the table."""
    name = target.name
    with held(target, min(WARMING_SESSIONS, sessions), 1, WINDOW) as few:
        few.step(1.0, 0.0)
        time.sleep(SETTLE_SECONDS)
        warm, warm_kernel = sum(pss_bytes(target.root_pids)), kernel_bytes()
        warm_sessions = few.opened
    time.sleep(SETTLE_SECONDS)
    with held(target, sessions, clients, WINDOW) as all_of_them:
        time.sleep(SETTLE_SECONDS)
        pss, kernel = pss_bytes(target.root_pids), kernel_bytes()
        cpu = cpu_seconds(target)
        time.sleep(IDLE_SECONDS)
        cpu = cpu_seconds(target) - cpu
        at_once = all_of_them.step(STEPPING_SHARE, 0.0)
        paced = all_of_them.step(STEPPING_SHARE, PACED_SECONDS)
        after = sum(pss_bytes(target.root_pids))
    more = max(1, all_of_them.opened - warm_sessions)
    report.append(f"{name}: sessions held", "", all_of_them.opened)
    report.append(f"{name}: failed to open, or to step", "", all_of_them.failed)
    report.append(f"{name}: to open them all", "s", all_of_them.seconds)
    report.append(f"{name}: server's processes", "", len(pss))
    report.append(f"{name}: PSS of the server with {warm_sessions}", "MB", warm / KB**2)
    report.append(f"{name}: PSS of the server with all of them", "MB", sum(pss) / KB**2)
    report.append(f"{name}: PSS each (aim: 4)", "kB", (sum(pss) - warm) / more / KB)
    report.append(f"{name}: PSS each, after the steps", "kB", (after - warm) / more / KB)
    for what, held_bytes in kernel.items():
        each = (held_bytes - warm_kernel[what]) / more / KB
        report.append(f"{name}: kernel's {what}, both ends, each", "kB", each)
    report.append(f"{name}: CPU while idle, of one core", "%", 100 * cpu / IDLE_SECONDS)
    for what, latencies in (("at once", at_once), ("paced", paced)):
        report.append(f"{name}: steps {what}", "", len(latencies))
        for share in (0.5, 0.99):
            value = percentile(latencies, share) * 1e3 if latencies else float("nan")
            report.append(f"{name}: a step {what}, P{100 * share:.0f}", "ms", value)


def client_processes(sessions: int) -> int:
    """Return how many the limit on open files requires, at least one for each of two cores."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        files = 2**20
    by_files = -(-sessions // max(1, files - SPARE_FILES))
    return max(2, by_files)


def main() -> int:
    options = parse_arguments(
        "Sessions held open: memory, and the latency of steps.",
        1,
        short={"action": "store_true", "help": f"{SHORT_SESSIONS:,} sessions"},
        sessions={"type": int, "help": f"how many (default {SESSIONS:,})"},
        gateway={"action": "store_true", "help": "through the gateway, with the memory of Envoy"},
        limit={"action": "store_true", "help": "the bare server as well"},
    )
    options.sessions = options.sessions or (SHORT_SESSIONS if options.short else SESSIONS)
    clients = client_processes(options.sessions)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    report = Report("Sessions held open")
    report.note(
        f"a process may have {hard} open files here (the soft limit was {soft}): "
        f"{clients} client processes"
    )
    report.note("the kernel's memory is the whole machine's; other programs change it too")
    arrangement = scaling_servers.Arrangement(max_sessions=options.sessions, processes=clients)
    for _ in range(options.repetitions):
        if options.gateway:
            with scaling_servers.behind_gateway(arrangement, clients) as both:
                for started in both:
                    measure(report, started.target, options.sessions, clients)
            continue
        with scaling_servers.openenvd(arrangement) as started:
            measure(report, started.target, options.sessions, clients)
        if options.limit and not scaling_servers.why_no_limit():
            with scaling_servers.limit(clients) as started:
                measure(report, started.target, options.sessions, clients)
    report.finish(options.json)
    return 0 if _is_complete(report) else 1


def _is_complete(report: Report) -> bool:
    """Return whether every session of ours succeeded."""
    failed = [m for m in report.measures if ": failed to open" in m.name]
    return not any(sum(m.values) for m in failed if not m.name.startswith("limit"))


if __name__ == "__main__":
    sys.exit(main())
