# SPDX-License-Identifier: Apache-2.0
"""A cluster of two nodes, one of which is lost while it has sessions."""

import json
from collections.abc import Iterator

import pytest

from openenvd.environments.engines.base import ENVIRONMENT_LABEL, REPLICA_LABEL
from openenvd.environments.engines.kubernetes.options import CONTAINER

from ..conftest import eventually
from ..engines.links import why_no_namespace
from ..providers.harness import NAME, Harness
from ..providers.under_test import SAMPLE_IMAGE, Kubernetes
from .cluster import Cluster, Node, cut, other_node

APART = {
    "weight": 100,
    "podAffinityTerm": {
        "labelSelector": {"matchLabels": {ENVIRONMENT_LABEL: NAME}},
        "topologyKey": "kubernetes.io/hostname",
    },
}
PATCH = {
    "spec": {
        "affinity": {
            "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [APART]}
        }
    }
}


@pytest.fixture(scope="module")
def other(provider: Kubernetes) -> Iterator[Node]:
    """The other node, which has the sample's image."""
    if (reason := why_no_namespace()) is not None:
        pytest.skip(f"no cluster of two nodes: {reason}")
    with other_node(provider.cluster, [f"docker.io/library/{SAMPLE_IMAGE}"]) as node:
        yield node


def node_of(real: Cluster, replica: str) -> str:
    [pod] = real.pods(f"{REPLICA_LABEL}={replica}")
    return str(pod["spec"]["nodeName"])


def servers_on(node: Node) -> int:
    """Count the servers of replicas on a node, without Kubernetes."""
    ids = node.ctr("tasks", "ls", "-q").split()
    infos = [json.loads(node.ctr("containers", "info", each)) for each in ids]
    names = [info["Labels"].get("io.kubernetes.container.name") for info in infos]
    return names.count(CONTAINER)


def test_replicas_of_a_lost_node_come_back_on_the_other_and_end_where_they_were(
    harness: Harness, real: Cluster, other: Node
) -> None:
    patch = f"patch={json.dumps(PATCH)}"
    harness.launched("--replicas", "2", "--engine-option", patch)
    ids = [replica["id"] for replica in harness.environment()["replicas"]]
    [lost] = [each for each in ids if node_of(real, each) == other.name]
    [kept] = set(ids) - {lost}
    with harness.sessions_at(ids) as sessions:
        life = sessions[kept].ask("life")
        cut(other)
        try:
            assert harness.refused() is None  # a session begins at the remaining replica
            eventually(lambda: harness.replica_of(lost)["restarts"] == 1, within=90)
            assert other.name in str(harness.replica_of(lost)["exit"])
            harness.until_all_ready(2)
            assert node_of(real, lost) != other.name
            assert sessions[kept].ask("life") == life
            assert servers_on(other) == 1
        finally:
            cut(other, is_cut=False)
        eventually(lambda: servers_on(other) == 0, within=90)
        assert harness.states() == ["READY"] * 2
        assert sessions[kept].ask("life") == life
