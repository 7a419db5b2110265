# SPDX-License-Identifier: Apache-2.0
"""The cost of idle environments and of the idle daemon, and the memory left after a burst.

    environments  idle environments: each number of them with a daemon of its own
    daemon        memory of all processes, and of the agent of every engine
    burst         the same when idle, at the peak of 200 requests at once, and 30 s after them

Of idle environments, and of the daemon alone:

    CPU       time on a processor (`schedstat`), in % of one core
    wake-ups  voluntary context switches of all threads, a second
    PSS       memory; a shared page is divided among its processes, such as zygote and workers

of the daemon, its workers and zygote, and of each environment's shim, supervisor and shards. Then
the seconds of `openenv status` and of `openenv down --all`, each with the processor time of the
command itself. A burst is half `launch` of `echo`, half `check`; its environments are taken down
again. With `--peer skypilot`, SkyPilot gets as many requests, but from 50 clients, because it
starts a process for each client that waits.

Aims: an idle environment under 0.05 % of a core, 1 wake-up a second, 17 MB; the idle daemon 2
wake-ups a second and 80 MB; 1,000 environments under 20 % of a core, `status` in 0.3 s; `down
--all` of 400 in 8 s; within 20 MB of idle 30 s after a burst. The daemon may write bytecode, as a
user's does. Launches have a low priority, so that other work goes first.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from load_tests.peers.skypilot_peer import (
    PEER_OPTION,
    SETTLE_SECONDS,
    SKYPILOT,
    PeerClient,
    need,
    skypilot,
    started,
)
from load_tests.shared.api_client import ApiClient
from load_tests.shared.report import (
    MEGABYTE,
    OPENENV,
    Report,
    daemon,
    daemon_pid,
    measure_family,
    measure_pss,
    parse_arguments,
    role_of,
    run,
)
from openenvd.environments.agent_client import ask_agent
from openenvd.environments.engines.registry import address_here, names
from openenvd.schema.errors import EngineFailed
from openenvd.schema.layout import Layout
from openenvd.system.process.proc import children_of, rollup_bytes

LAUNCHES_AT_ONCE = 4
STATUS_REPETITIONS = 5
ALONE_SETTLE_SECONDS = 5.0
NICE = 10
SAMPLE_SECONDS = 0.5
PEER_CLIENTS = 50
ENVIRONMENT_ROLES = ("shim", "supervisor", "shard")
NANOSECONDS = 1e9


class Cost(NamedTuple):
    """The idle cost of all processes of one role."""

    processes: int
    cpu_percent: float
    wake_ups_a_second: float
    pss_bytes: int


def main() -> None:
    options = parse_arguments(
        "The cost of idle processes.",
        repetitions=1,
        parts={"nargs": "+", "choices": list(PARTS), "default": ["environments"]},
        environments={"type": _numbers, "default": "1,100,1000", "help": "how many: 1,100,1000"},
        seconds={"type": float, "default": 20.0, "help": "how long each is watched"},
        settle={
            "type": float,
            "default": 40.0,
            "help": "after the launches: a shard that is not needed is given back after 30 s",
        },
        requests={"type": int, "default": 200, "help": "of a burst"},
        peer=PEER_OPTION,
    )
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.nice(NICE)
    report = Report(f"Idle environments, watched for {options.seconds:g} s")
    for part in options.parts:
        for _ in range(options.repetitions):
            PARTS[part](report, options)
    report.finish(options.json)


def _environments(report: Report, options: argparse.Namespace) -> None:
    for count in options.environments:
        for (name, unit), value in _measure(count, options).items():
            report.append(name, unit, value)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _measure(count: int, options: argparse.Namespace) -> dict[tuple[str, str], float]:
    with daemon() as environ:
        home = environ["OPENENV_HOME"]
        time.sleep(min(options.settle, ALONE_SETTLE_SECONDS))
        alone = _watch(_daemon_roles(environ), options.seconds)
        began = time.monotonic()
        asyncio.run(_launch(home, count))
        launched = time.monotonic() - began
        time.sleep(options.settle)
        roles = _daemon_roles(environ) | _environment_roles(Path(home))
        costs = _watch(roles, options.seconds)
        status = _medians(environ, "status")
        as_json = _medians(environ, "status", "--json")
        down = run([OPENENV, "down", "--all"], environ)
        left = sum(psutil.pid_exists(p) for r in ENVIRONMENT_ROLES for p in roles.get(r, ()))
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
    lines |= _lines(f"{head}each (aims: 0.05 %, 1, 17 MB)", each)
    return lines | {
        (f"{head}launched", "s"): launched,
        (f"{head}openenv status", "s"): status[0],
        (f"{head}  its own processor time", "s"): status[1],
        (f"{head}openenv status --json (aim: 0.3)", "s"): as_json[0],
        (f"{head}  its own processor time", "s "): as_json[1],
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
    root = daemon_pid(environ)
    roles = {"daemon": [root], "zygote": children_of(root)}
    below = [psutil.Process(pid) for zygote in roles["zygote"] for pid in children_of(zygote)]
    roles["workers"] = [each.pid for each in below if role_of(each) == "worker"]
    return roles


def _environment_roles(home: Path) -> dict[str, list[int]]:
    shims = [
        int(json.loads(path.read_text())["shim"]["pid"])
        for path in Layout(home).runs.glob("*/status.json")
    ]
    supervisors = [pid for shim in shims for pid in children_of(shim)]
    shards = [pid for supervisor in supervisors for pid in children_of(supervisor)]
    return {
        "shim": shims,
        "supervisor": supervisors,
        "shard": shards,
    }


# What they use


def _watch(roles: dict[str, list[int]], seconds: float) -> dict[str, Cost]:
    """Measure the cost of each role that has processes, over some seconds."""
    before = {role: _used(pids) for role, pids in roles.items()}
    time.sleep(seconds)
    after = {role: _used(pids) for role, pids in roles.items()}
    costs = {}
    for role, pids in roles.items():
        (since, cpu, wake_ups), (until, last_cpu, last_wake_ups) = before[role], after[role]
        passed = until - since
        if pids:
            costs[role] = Cost(
                len(pids),
                100 * (last_cpu - cpu).total() / NANOSECONDS / passed,
                (last_wake_ups - wake_ups).total() / passed,
                sum(rollup_bytes(pid, "Pss") or 0 for pid in pids),
            )
    return costs


def _used(pids: Iterable[int]) -> tuple[float, Counter[Path], Counter[Path]]:
    """Return the time, and by thread its nanoseconds on a processor and its wake-ups.

    The difference of two of these counters leaves out threads that ended meanwhile.
    """
    cpu, wake_ups = Counter[Path](), Counter[Path]()
    for thread in (thread for pid in pids for thread in Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            cpu[thread] = int((thread / "schedstat").read_bytes().split()[0])
            status = (thread / "status").read_bytes()
            voluntary = status.partition(b"\nvoluntary_ctxt_switches:")[2].split(None, 1)[0]
            wake_ups[thread] = int(voluntary)
    return time.monotonic(), cpu, wake_ups


# Commands


async def _launch(home: str, count: int) -> None:
    numbers = iter(range(count))

    async def launch_some() -> None:
        client = ApiClient(home)
        for number in numbers:
            launched = await client.run("launch", {"source": "echo", "name": f"idle-{number}"})
            if launched["state"] != "SUCCEEDED":
                raise SystemExit(f"launch {number} of {count}: {launched['error']}")
        await client.close()

    await asyncio.gather(*(launch_some() for _ in range(LAUNCHES_AT_ONCE)))


def _medians(environ: dict[str, str], *words: str) -> tuple[float, float]:
    """Run a command several times; returns the medians of its seconds and its processor time."""
    runs = [run([OPENENV, *words], environ) for _ in range(STATUS_REPETITIONS)]
    both = [each.seconds for each in runs], [each.cpu_seconds for each in runs]
    return statistics.median(both[0]), statistics.median(both[1])


# Memory


def _daemon(report: Report, _options: argparse.Namespace) -> None:
    """Measure the PSS of the idle daemon, its workers, and the agents of all engines."""
    with daemon() as environ:
        subprocess.run([OPENENV, "check"], env=environ, check=True, capture_output=True)
        for engine, size in _agents(Path(environ["OPENENV_HOME"])):
            report.append(f"the agent of {engine}, beside the daemon", "MB", size / MEGABYTE)
        sizes = measure_pss(daemon_pid(environ))
    report.append("the idle daemon (aim: 80)", "MB", sum(size for _, size in sizes) / MEGABYTE)
    for role in sorted({role for role, _ in sizes}):
        found = [size for each, size in sizes if each == role]
        report.append(f"  {role}, all of them", "MB", sum(found) / MEGABYTE)


def _agents(home: Path) -> Iterator[tuple[str, int]]:
    """Start the agent of each engine, which runs during the block; yields its name and its bytes.

    An agent is asked even if its engine does not answer, since it imports its library then, too.
    """
    for engine in names():
        with contextlib.suppress(EngineFailed):
            ask_agent(Layout(home), address_here(engine), "list")
        for process in psutil.process_iter(["cmdline"]):
            title = " ".join(process.info["cmdline"] or ()).strip()
            with contextlib.suppress(psutil.Error):
                is_its = title == f"openenvd: agent {engine}"
                if is_its and process.environ().get("OPENENV_HOME") == str(home):
                    yield engine, process.memory_full_info().pss


def _burst(report: Report, options: argparse.Namespace) -> None:
    """Measure the PSS around a burst: ours, and then the peer's."""
    with daemon() as environ:
        home, pid = environ["OPENENV_HOME"], daemon_pid(environ)
        crowd = _requests(home, options.requests)
        _around(report, "openenvd", crowd, lambda: measure_family(pid), options)
    with skypilot(options.peer) as command:
        if command is not None:
            _burst_of_peer(report, command, options)


def _burst_of_peer(report: Report, command: list[str], options: argparse.Namespace) -> None:
    with started(command) as peer:
        port = need(peer).port

        async def many() -> None:
            client = PeerClient(port)
            for _ in range(options.requests // PEER_CLIENTS):
                await client.run()
            await client.close()

        async def all_of_them() -> None:
            await asyncio.gather(*(many() for _ in range(PEER_CLIENTS)))

        time.sleep(SETTLE_SECONDS)
        _around(report, SKYPILOT, all_of_them, peer.look, options)


def _around(
    report: Report,
    name: str,
    crowd: Callable[[], Any],
    look: Callable[[], tuple[float, int]],
    options: argparse.Namespace,
) -> None:
    """Measure before a burst, at its sampled peak, and some seconds after it."""

    async def peak() -> tuple[float, int]:
        ending, found = asyncio.ensure_future(crowd()), (0.0, 0)
        while not ending.done():
            found = max(found, await asyncio.to_thread(look))
            await asyncio.wait([ending], timeout=SAMPLE_SECONDS)
        await ending
        return found

    idle = look()
    looks = {"idle": idle, "peak": asyncio.run(peak())}
    time.sleep(options.seconds)
    looks[f"{options.seconds:g} s after"] = after = look()
    for when, (size, processes) in looks.items():
        report.append(f"burst of {options.requests}, {name}: {when}", "MB", size)
        report.append(f"  {name}: processes, {when}", "", processes)
    report.append(f"burst of {options.requests}, {name}: kept (aim: 20)", "MB", after[0] - idle[0])


def _requests(home: str, count: int) -> Callable[[], Any]:
    """Submit a burst of requests at once; its environments are taken down again."""
    names = [f"burst-{number}" for number in range(count // 2)]

    async def ended(operation: str, payload: dict[str, Any]) -> None:
        client = ApiClient(home)
        request = await client.run(operation, payload)
        await client.close()
        assert request["state"] == "SUCCEEDED", request["error"]

    async def crowd() -> None:
        launches = [ended("launch", {"source": "echo", "name": name}) for name in names]
        await asyncio.gather(*launches, *(ended("check", {}) for _ in names))
        await asyncio.gather(*(ended("down", {"name": name}) for name in names))

    return crowd


PARTS = {"environments": _environments, "daemon": _daemon, "burst": _burst}


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit("idle_cost reads /proc: it needs Linux")
    main()
