# SPDX-License-Identifier: Apache-2.0
"""Servers of `scaling.py --provider slurm` or `ray`: one replica on each node of a cluster.

    gateway    sessions go through the gateway
    direct     sessions go to the same replicas' own addresses, one after the other

A session through Envoy takes two of its process's descriptors: with a hard limit of 20,000, which
only CAP_SYS_RESOURCE may raise, Envoy carries fewer than 10,000 sessions.
"""

import math
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load_tests.peers.scaling_servers import DIRECT, THROUGH, Arrangement, Started, openenv
from load_tests.shared.report import daemon
from openenvd.environments.shim.client import read_status_file
from openenvd.rollouts.bench.results import Target
from openenvd.schema.layout import Layout
from smoke_tests.engines import ray_engine, slurm_engine
from smoke_tests.engines.ray_engine import RayCluster
from smoke_tests.engines.slurm_engine import SlurmCluster

MAX_UNEVEN = 5.0  # percent


@dataclass(frozen=True, slots=True)
class ClusterKind:
    """A provider with nodes.

    Attributes:
        why_not: Returns why it cannot be tried here, or None.
        cluster: Makes a cluster of a number of nodes.
        alone: The arguments of a launch that place one replica on each node.
    """

    why_not: Callable[[], str | None]
    cluster: Callable[[int], AbstractContextManager[RayCluster | SlurmCluster]]
    alone: tuple[str, ...]


KINDS = {
    "ray": ClusterKind(
        ray_engine.why_not, ray_engine.ray_cluster, ("--cpus", str(ray_engine.CPUS))
    ),
    "slurm": ClusterKind(slurm_engine.why_not, slurm_engine.slurm_cluster, ("--cpus", "3")),
}


@contextmanager
def on_cluster(provider: str, nodes: int, arrangement: Arrangement) -> Iterator[list[Started]]:
    """Start a cluster, and the benchmark with a replica on each node."""
    kind = KINDS[provider]
    with ExitStack() as stack:
        cluster = stack.enter_context(kind.cluster(nodes))
        os.environ.update(cluster.environ)
        environ = stack.enter_context(daemon())
        words = ["launch", "benchmark", "--name", THROUGH, "--provider", provider, "--gateway"]
        words += ["--replicas", str(nodes), "--max-sessions", str(2 * arrangement.max_sessions)]
        words += ["--shards", arrangement.shards or "1", *kind.alone]
        openenv(environ, *words)
        address = openenv(environ, "status", THROUGH)["environments"][0]["address"]
        own = openenv(environ, "gateway", "status")["gateway"]["pid"]
        through = Target(THROUGH, address, (own,))
        (host, port), *rest = replica_addresses(environ)
        direct = Target(DIRECT, f"http://{host}:{port}", others=tuple(rest))
        yield [Started(through), Started(direct)]


def replica_addresses(environ: dict[str, str]) -> list[tuple[str, int]]:
    layout = Layout(Path(environ["OPENENV_HOME"]))
    replicas = openenv(environ, "status", THROUGH)["environments"][0]["replicas"]
    statuses = [read_status_file(layout.run_dir(replica["id"])) for replica in replicas]
    known = [(status["host"], status["port"]) for status in statuses if status is not None]
    return [(host, port) for host, port in known if host is not None and port is not None]


def unevenness(shard_split: str, replicas: int) -> float:
    """Return replicas' largest deviation from an even share, in percent; each has one shard."""
    counts = [int(part.rpartition(":")[2]) for part in shard_split.split()]
    counts += [0] * (replicas - len(counts))
    even = sum(counts) / replicas
    return 100 * max(abs(count - even) for count in counts) / even if even else math.inf


def report_lines(summaries: Any, nodes: int) -> list[str]:
    """Yield lines on how even each batch was, and what the gateway added to its total P99."""
    ours = [each for each in summaries if each.server in (THROUGH, DIRECT)]
    direct = {_cell_of(each): each for each in ours if each.server == DIRECT}
    lines = []
    for one in ours:
        uneven = unevenness(one.shard_split, nodes)
        line = f"{one.num_requests} x {one.wait_seconds:g} s, {one.server} #{one.repetition}: "
        line += f"{100 * (1 - one.error_rate):.4g} %, off even by {uneven:.1f} %"
        if one.server == THROUGH and (other := direct.get(_cell_of(one))) is not None:
            line += f", total P99 {one.total_p99:.2f} s (direct {other.total_p99:.2f} s)"
        lines.append(line)
    return lines


def is_met(summaries: Any, nodes: int) -> bool:
    """Return whether all sessions through the gateway succeeded and were split within 5 %."""
    through = [each for each in summaries if each.server == THROUGH]
    uneven = statistics.median(unevenness(each.shard_split, nodes) for each in through)
    return uneven <= MAX_UNEVEN and not any(each.failed for each in through)


def _cell_of(summary: Any) -> tuple[Any, ...]:
    return summary.num_requests, summary.wait_seconds, summary.repetition
