# SPDX-License-Identifier: Apache-2.0
"""Proportional memory (PSS) of the idle daemon and everything below it.

Aim: under 80 MB, with the agent of every engine running beside it. PSS, not RSS: forked workers
share their pages with the zygote. What peers hold is in `short_requests.py` and `burst_memory.py`,
measured in the same run.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil

from load_tests.shared.report import OPENENV, Report, daemon, parse_arguments
from openenvd.environments.agent_client import ask_agent
from openenvd.environments.engines.registry import ENGINES, address_here
from openenvd.environments.errors import EngineFailed
from openenvd.environments.layout import Layout

MEGABYTE = 1e6
AIM_MB = 80


def main() -> None:
    """Start, let it settle, add up, again."""
    options = parse_arguments("Idle memory of everything.", repetitions=5)
    totals: list[float] = []
    parts: dict[str, list[float]] = defaultdict(list)
    agents: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.repetitions):
        with daemon() as environ:
            subprocess.run([OPENENV, "check"], env=environ, check=True, capture_output=True)
            for engine, size in measure_agents(Path(environ["OPENENV_HOME"])):
                agents[engine].append(size / MEGABYTE)
            sizes = measure_pss(daemon_pid(environ))
            totals.append(sum(size for _, size in sizes) / MEGABYTE)
            for role, size in sizes:
                parts[role].append(size / MEGABYTE)
    report = Report("Idle memory, PSS")
    report.add(f"everything (aim: {AIM_MB})", "MB", totals)
    for role, values in sorted(parts.items()):
        count = round(len(values) / options.repetitions)
        report.add(f"{role} (of {count})", "MB", values)
    for engine, values in sorted(agents.items()):
        report.add(f"beside it: the agent of {engine}", "MB", values)
    report.finish(options.json)


def measure_agents(home: Path) -> Iterator[tuple[str, int]]:
    """Start the agent of each engine, which runs while the rest is measured: its name, its bytes.

    An engine that does not answer is asked all the same: its library is imported then, too.
    """
    for engine in ENGINES:
        with contextlib.suppress(EngineFailed):
            ask_agent(Layout(home), address_here(engine), "list")
        for process in psutil.process_iter(["cmdline"]):
            title = " ".join(process.info["cmdline"] or ()).strip()
            if title == f"openenvd: agent {engine}" and _home_of(process) == str(home):
                yield engine, process.memory_full_info().pss


def _home_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("OPENENV_HOME")
    except psutil.Error:
        return None


def daemon_pid(environ: dict[str, str]) -> int:
    """Who the daemon of this home is."""
    identity = json.loads((Path(environ["OPENENV_HOME"]) / "daemon.json").read_text())
    return int(identity["pid"])


def measure_pss(pid: int) -> list[tuple[str, int]]:
    """(role, bytes) of a process and of all below it."""
    root = psutil.Process(pid)
    return [(_role(p), p.memory_full_info().pss) for p in [root, *root.children(recursive=True)]]


def _role(process: psutil.Process) -> str:
    title = " ".join(process.cmdline()) or process.name()
    words = title.removeprefix("openenvd: ").split()
    return words[0] if title.startswith("openenvd: ") else title


if __name__ == "__main__":
    main()
