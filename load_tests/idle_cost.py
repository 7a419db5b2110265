# SPDX-License-Identifier: Apache-2.0
"""What idle environments and the idle daemon cost: CPU, wake-ups, memory, and how they are ended.

Some idle environments at a time, each number of them with a daemon of its own:

    CPU       time on a processor (`schedstat`), in % of one core
    wake-ups  voluntary context switches of all threads, a second
    PSS       memory, shared pages shared out

of the daemon, its workers and zygote, the fork server, and of each environment's shim, supervisor
and shards. Then the seconds of `openenv status`, and of `openenv down --all`; with each the
processor time of the command itself.

Aims: an idle environment under 0.02 % of a core, 1 wake-up a second, 9 MB; the idle daemon 2
wake-ups a second; 1,000 environments under 20 % of a core and 10 GB, `status` in 0.3 s; `down
--all` of 400 in 8 s. Memory is read where the daemon may write bytecode, as a user's does. The
launches have little priority, so that other work on the machine goes first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from load_tests.idle_memory import MEGABYTE, daemon_pid
from load_tests.shared.api_client import ApiClient
from load_tests.shared.report import OPENENV, Report, daemon, parse_arguments
from openenvd.environments.layout import Layout
from openenvd.system.proc import children_of, rollup_bytes

LAUNCHES_AT_ONCE = 4
STATUS_REPETITIONS = 5
ALONE_SETTLE_SECONDS = 5.0
NICE = 10
ENVIRONMENT_ROLES = ("shim", "supervisor", "shard")
NANOSECONDS = 1e9


class Usage(NamedTuple):
    """What one thread has used since it started."""

    cpu_nanoseconds: int
    wake_ups: int


class Cost(NamedTuple):
    """What the processes of one role cost while nothing happens."""

    processes: int
    cpu_percent: float
    wake_ups_a_second: float
    pss_bytes: int


class Timed(NamedTuple):
    """One command: how long it took, and its own processor time."""

    seconds: float
    cpu_seconds: float


def main() -> None:
    """Measure each number of environments, as often as asked."""
    options = parse_arguments(
        "What is idle costs nothing.",
        repetitions=1,
        environments={"type": _numbers, "default": "1,100,1000", "help": "how many: 1,100,1000"},
        seconds={"type": float, "default": 20.0, "help": "how long it is watched"},
        settle={
            "type": float,
            "default": 40.0,
            "help": "after the launches: a shard that is not needed is given back after 30 s",
        },
        source={"default": "echo", "help": "what is launched"},
        shards={"type": int, "help": "of each environment"},
    )
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.nice(NICE)
    report = Report(f"Idle environments ({options.source}), watched for {options.seconds:g} s")
    for count in options.environments:
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(options.repetitions):
            for line, value in _measure(count, options).items():
                found[line].append(value)
        for (name, unit), values in found.items():
            report.add(name, unit, values)
    report.finish(options.json)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _measure(count: int, options: argparse.Namespace) -> dict[tuple[str, str], float]:
    with daemon() as environ:
        home = environ["OPENENV_HOME"]
        time.sleep(min(options.settle, ALONE_SETTLE_SECONDS))
        alone = _watch(_daemon_roles(environ), options.seconds)
        began = time.monotonic()
        asyncio.run(_launch(home, count, {"source": options.source, "shards": options.shards}))
        launched = time.monotonic() - began
        time.sleep(options.settle)
        roles = _daemon_roles(environ) | _environment_roles(Path(home))
        costs = _watch(roles, options.seconds)
        status = _median(OPENENV, "status", environ=environ)
        as_json = _median(OPENENV, "status", "--json", environ=environ)
        down = _timed([OPENENV, "down", "--all"], environ)
        left = sum(map(_is_there, (pid for r in ENVIRONMENT_ROLES for pid in roles.get(r, ()))))
    lines: dict[tuple[str, str], float] = {}
    for role, cost in alone.items():
        lines |= _lines(f"daemon alone: {role}", cost)
    lines |= _lines("daemon alone: in all", _sum(alone.values()))
    head = f"{count} environments: "
    for role, cost in costs.items():
        lines |= _lines(f"{head}{role} (of {cost.processes})", cost)
    environments = _sum(costs[role] for role in ENVIRONMENT_ROLES if role in costs)
    lines |= _lines(f"{head}together", environments)
    each = environments._replace(
        cpu_percent=environments.cpu_percent / count,
        wake_ups_a_second=environments.wake_ups_a_second / count,
        pss_bytes=environments.pss_bytes // count,
    )
    lines |= _lines(f"{head}each (aims: 0.02 %, 1, 9 MB)", each)
    return lines | {
        (f"{head}launched", "s"): launched,
        (f"{head}openenv status", "s"): status.seconds,
        (f"{head}  its own processor time", "s"): status.cpu_seconds,
        (f"{head}openenv status --json (aim: 0.3)", "s"): as_json.seconds,
        (f"{head}  its own processor time", "s "): as_json.cpu_seconds,
        (f"{head}openenv down --all", "s"): down.seconds,
        (f"{head}  its own processor time", "s  "): down.cpu_seconds,
        (f"{head}processes left afterwards (aim: 0)", ""): left,
    }


def _lines(name: str, cost: Cost) -> dict[tuple[str, str], float]:
    return {
        (f"{name}, CPU", "%"): cost.cpu_percent,
        (f"{name}, wake-ups", "1/s"): cost.wake_ups_a_second,
        (f"{name}, PSS", "MB"): cost.pss_bytes / MEGABYTE,
    }


def _sum(costs: Iterable[Cost]) -> Cost:
    parts = list(costs)
    return Cost(
        sum(cost.processes for cost in parts),
        sum(cost.cpu_percent for cost in parts),
        sum(cost.wake_ups_a_second for cost in parts),
        sum(cost.pss_bytes for cost in parts),
    )


# Which processes


def _daemon_roles(environ: Mapping[str, str]) -> dict[str, list[int]]:
    """The pids of the daemon and of what is below it, by role."""
    root = daemon_pid(dict(environ))
    roles = {"daemon": [root], "zygote": children_of(root)}
    roles["workers"] = [pid for zygote in roles["zygote"] for pid in children_of(zygote)]
    return roles


def _environment_roles(home: Path) -> dict[str, list[int]]:
    """The pids of all environments' processes, by role."""
    shims = [
        int(json.loads(path.read_text())["shim"]["pid"])
        for path in Layout(home).runs.glob("*/status.json")
    ]
    supervisors = [pid for shim in shims for pid in children_of(shim)]
    shards = [pid for supervisor in supervisors for pid in children_of(supervisor)]
    fork_servers = {_parent_of(shim) for shim in shims} - {1}
    return {
        "fork server": sorted(fork_servers),
        "shim": shims,
        "supervisor": supervisors,
        "shard": shards,
    }


def _parent_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("PPid:")))


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


# What they use


def _watch(roles: dict[str, list[int]], seconds: float) -> dict[str, Cost]:
    """What the processes of each role cost, over some seconds; those without processes not."""
    before = {role: (time.monotonic(), _used(pids)) for role, pids in roles.items()}
    time.sleep(seconds)
    after = {role: (time.monotonic(), _used(pids)) for role, pids in roles.items()}
    costs = {}
    for role, pids in roles.items():
        (since, first), (until, last) = before[role], after[role]
        used = [_difference(usage, first.get(thread)) for thread, usage in last.items()]
        passed = until - since
        if pids:
            costs[role] = Cost(
                len(pids),
                100 * sum(each.cpu_nanoseconds for each in used) / NANOSECONDS / passed,
                sum(each.wake_ups for each in used) / passed,
                sum(rollup_bytes(pid, "Pss") or 0 for pid in pids),
            )
    return costs


def _used(pids: Iterable[int]) -> dict[Path, Usage]:
    """What each thread has used; those that end meanwhile, as burst workers do, are left out."""
    used = {}
    for thread in (thread for pid in pids for thread in Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            cpu = int((thread / "schedstat").read_bytes().split()[0])
            status = (thread / "status").read_bytes()
            voluntary = status.partition(b"\nvoluntary_ctxt_switches:")[2].split(None, 1)[0]
            used[thread] = Usage(cpu, int(voluntary))
    return used


def _difference(usage: Usage, before: Usage | None) -> Usage:
    started = before or Usage(0, 0)
    return Usage(usage.cpu_nanoseconds - started.cpu_nanoseconds, usage.wake_ups - started.wake_ups)


# Commands


async def _launch(home: str, count: int, spec: dict[str, Any]) -> None:
    numbers = iter(range(count))

    async def launch_some() -> None:
        client = ApiClient(home)
        for number in numbers:
            launched = await client.run("launch", spec | {"name": f"idle-{number}"})
            if launched["state"] != "SUCCEEDED":
                raise SystemExit(f"launch {number} of {count}: {launched['error']}")
        await client.close()

    await asyncio.gather(*(launch_some() for _ in range(LAUNCHES_AT_ONCE)))


def _median(*command: str, environ: Mapping[str, str]) -> Timed:
    runs = [_timed(list(command), environ) for _ in range(STATUS_REPETITIONS)]
    return Timed(
        statistics.median(timed.seconds for timed in runs),
        statistics.median(timed.cpu_seconds for timed in runs),
    )


def _timed(command: list[str], environ: Mapping[str, str]) -> Timed:
    began, used = time.monotonic(), _children_cpu()
    subprocess.run(command, env=dict(environ), check=True, capture_output=True)
    return Timed(time.monotonic() - began, _children_cpu() - used)


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit("idle_cost reads /proc: it needs Linux")
    main()
