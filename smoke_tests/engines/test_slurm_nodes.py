# SPDX-License-Identifier: Apache-2.0
"""A Slurm node in a network namespace of its own, which is cut off and connected again.

Slurm itself would mark the node DOWN after 300 s, its default; openenvd acts before that.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..conftest import eventually
from ..providers.harness import NAME, Harness, home_of, running
from ..providers.under_test import Slurm
from .slurm_engine import SlurmCluster, slurm_cluster, why_no_other_node

ALONE_ON_A_NODE = ("--cpus", "3", "--memory", "256M")


class SlurmOfThree(Slurm):
    """A cluster of three nodes, the last one elsewhere, for two replicas on two of them."""

    def why_not(self) -> str | None:
        return why_no_other_node()

    @contextmanager
    def engine(self, folder: Path) -> Iterator[None]:
        with slurm_cluster(3, other=True) as self._cluster:
            yield

    @property
    def cluster(self) -> SlurmCluster:
        return self._cluster


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmOfThree]:
    with running(SlurmOfThree(), tmp_path_factory) as made:
        yield made


@pytest.fixture
def harness(slurm: SlurmOfThree, tmp_path: Path) -> Iterator[Harness]:
    with home_of(slurm, tmp_path) as made:
        yield made


@pytest.mark.timeout(300)
def test_a_replica_whose_node_is_cut_off_is_elsewhere_and_ends_there_when_that_is_back(
    harness: Harness, slurm: SlurmOfThree
) -> None:
    cluster = slurm.cluster
    harness.launched("--replicas", "2", "--token", "auto", *ALONE_ON_A_NODE)
    address = harness.machine.ok("address", NAME).out.strip()
    lost = on_the_last_node(harness, cluster)
    cluster.cut()
    try:
        eventually(lambda: harness.replica_of(lost)["restarts"] == 1, within=90)
        assert "has not been heard of" in str(harness.replica_of(lost)["exit"])
        eventually(lambda: harness.states() == ["READY"] * 2, within=90)
        assert cluster.replicas_there() != []
        with harness.session(address=address) as session:
            assert session.ask("life")
    finally:
        cluster.join()
    eventually(lambda: cluster.replicas_there() == [], within=60)
    assert len(cluster.jobs("RUNNING")) == 2
    restarts = [each["restarts"] for each in harness.environment()["replicas"]]
    assert sorted(restarts) == [0, 1]


def on_the_last_node(harness: Harness, cluster: SlurmCluster) -> str:
    there = cluster.run("squeue", "--noheader", "--format=%i", f"--nodelist={cluster.nodes[-1]}")
    for run_dir in harness.run_dirs():
        path = run_dir / "slurm.json"
        if path.exists() and json.loads(path.read_bytes())["job"] == there:
            return run_dir.name
    raise AssertionError("no replica is there")
