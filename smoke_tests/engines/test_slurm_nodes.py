# SPDX-License-Identifier: Apache-2.0
"""A node of Slurm's in a network namespace of its own, which is cut off, and joined again.

Slurm itself would give it up after 300 s, its default: what is done before is openenvd's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..conftest import Machine, eventually, new_machine
from .slurm_engine import SlurmCluster, slurm_cluster, why_no_other_node
from .test_slurm import ready_ids, session_at

ALONE_ON_A_NODE = ("--cpus", "3", "--memory", "256M")


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    """A node for each of two replicas, the last node elsewhere, and one more."""
    if (reason := why_no_other_node()) is not None:
        pytest.skip(f"no Slurm with another node: {reason}")
    with slurm_cluster(3, other=True) as made:
        yield made


@pytest.fixture
def machine(tmp_path: Path, cluster: SlurmCluster) -> Iterator[Machine]:
    with new_machine(tmp_path / "home") as made:
        made.environ.update(cluster.environ)
        yield made


@pytest.mark.timeout(300)
def test_a_replica_whose_node_is_cut_off_is_elsewhere_and_ends_there_when_that_is_back(
    machine: Machine, cluster: SlurmCluster
) -> None:
    words = ("--provider", "slurm", "--replicas", "2", "--token", "auto", *ALONE_ON_A_NODE)
    machine.ok("launch", "echo", *words)
    address = machine.ok("address", "echo").out.strip()
    lost = on_the_last_node(machine, cluster)
    cluster.cut()
    try:
        eventually(lambda: replica_of(machine, lost)["restarts"] == 1, within=90)
        assert "has not been heard of" in str(replica_of(machine, lost)["exit"])
        eventually(lambda: len(ready_ids(machine)) == 2, within=90)
        assert cluster.replicas_there() != []
        with session_at(address) as (_, ask):
            assert ask()["type"] == "observation"
    finally:
        cluster.join()
    eventually(lambda: cluster.replicas_there() == [], within=60)
    assert len(cluster.jobs("RUNNING")) == 2
    assert sorted(each["restarts"] for each in replicas(machine)) == [0, 1]


def replicas(machine: Machine) -> list[dict[str, Any]]:
    return list(machine.environment("echo")["replicas"])


def replica_of(machine: Machine, replica_id: str) -> dict[str, Any]:
    [found] = [each for each in replicas(machine) if each["id"] == replica_id]
    return found


def on_the_last_node(machine: Machine, cluster: SlurmCluster) -> str:
    there = cluster.run("squeue", "--noheader", "--format=%i", f"--nodelist={cluster.nodes[-1]}")
    for replica in replicas(machine):
        path = machine.home / "run" / replica["id"] / "slurm.json"
        if json.loads(path.read_bytes())["job"] == there:
            return str(replica["id"])
    raise AssertionError("no replica is there")
