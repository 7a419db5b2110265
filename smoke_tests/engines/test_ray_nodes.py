# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of three nodes, two of which have addresses of their own; one of these is lost."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL

import psutil
import pytest

from openenvd.environments.engines.ray.driver import RayDriver

from ..conftest import eventually
from ..providers.harness import NAME, Harness, home_of, running
from ..providers.under_test import Ray
from . import ray_engine
from .ray_engine import RayCluster

CPUS = 6  # of a replica: two fit on a node, so that four of them need two nodes
# A lost node is noticed, and notices it itself, within seconds instead of 30 s.
QUICK = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
WORDS = ("--token", "auto", "--gateway", "--memory", "256M", "--cpus", str(CPUS))


class RayOfThree(Ray):
    """A cluster whose replicas may be on other nodes."""

    def why_not(self) -> str | None:
        return ray_engine.why_no_other_node()

    @contextmanager
    def engine(self, folder: Path) -> Iterator[None]:
        with ray_engine.ray_cluster(3, elsewhere=True, settings=QUICK) as self._cluster:
            self._driver = RayDriver({**os.environ, **self.variables()})
            try:
                yield
            finally:
                self._driver.close()

    @property
    def cluster(self) -> RayCluster:
        return self._cluster


@pytest.fixture(scope="module")
def ray_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayOfThree]:
    with running(RayOfThree(), tmp_path_factory) as made:
        yield made


@pytest.fixture
def harness(ray_nodes: RayOfThree, tmp_path: Path) -> Iterator[Harness]:
    with home_of(ray_nodes, tmp_path) as made:
        yield made


def node_of(harness: Harness, replica: str, cluster: RayCluster) -> int:
    """Return the number of a replica's node; on the head, its address is the loopback."""
    status = json.loads((harness.machine.home / "run" / replica / "status.json").read_text())
    others = [number for number in range(1, 3) if cluster.address_of(number) == status["host"]]
    return others[0] if others else 0


def kill(cluster: RayCluster, number: int) -> None:
    cluster.stop_node(number, SIGKILL)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lose", [RayCluster.cut, kill])
def test_replicas_of_a_lost_node_come_back_elsewhere_and_the_old_ones_end(
    harness: Harness, ray_nodes: RayOfThree, lose: Callable[[RayCluster, int], None]
) -> None:
    cluster = ray_nodes.cluster
    harness.launched(*WORDS, "--replicas", "4")
    address = harness.machine.ok("address", NAME).out.strip()
    replicas = {each["id"]: each for each in harness.environment()["replicas"]}
    nodes = {each: node_of(harness, each, cluster) for each in replicas}
    lost = next(each for each, node in nodes.items() if node)
    number = nodes[lost]
    kept = next(each for each, node in nodes.items() if node != number)
    server = psutil.Process(replicas[lost]["pid"])
    with harness.sessions_at([kept, lost], address) as sessions:
        life = sessions[kept].ask("life")
        lose(cluster, number)
        try:
            eventually(lambda: harness.replica_of(lost)["restarts"] == 1, within=90)
            # The end of the killed shim may be noticed before that of its node.
            why = harness.replica_of(lost)["exit"]["evidence"]
            assert why.startswith(("its node has failed", "its shim has ended on node")), why
            eventually(lambda: harness.states() == ["READY"] * 4, within=90)
            assert node_of(harness, lost, cluster) != number
            assert sessions[kept].ask("life") == life
        finally:
            cluster.join(number)
    eventually(lambda: not server.is_running(), within=60)
    assert len(ray_nodes.replicas_of(harness.machine)) == 4
    if number in cluster.groups:
        cluster.stop_node(number)
    cluster.start_node(number)
