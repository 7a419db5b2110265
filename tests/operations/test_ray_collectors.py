# SPDX-License-Identifier: Apache-2.0
"""How a rollout is divided among collectors, and what may be asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from openenvd.environments.engine_address import EngineAddress
from openenvd.operations.ray_collectors import address_on, cluster_of, shares_of
from openenvd.operations.rollout import RolloutPayload
from openenvd.rollouts.errors import RolloutError


def test_episodes_are_divided_evenly_and_each_is_in_one_share() -> None:
    shares = shares_of(range(10), 4, 1)
    assert sorted(map(len, shares)) == [2, 2, 3, 3]
    assert sorted(number for share in shares for number in share) == list(range(10))


def test_the_episodes_of_a_group_are_in_one_share() -> None:
    assert shares_of(range(8), 3, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_episodes_that_are_missing_are_divided_as_evenly() -> None:
    assert shares_of([2, 5, 7], 2, 1) == [[2, 7], [5]]


def test_several_collectors_need_a_cluster(tmp_path: Path) -> None:
    said = {"name": "sample", "out": str(tmp_path), "collectors": 2}
    with pytest.raises(ValidationError, match="--provider ray"):
        RolloutPayload.model_validate(said)
    assert RolloutPayload.model_validate({**said, "provider": "ray"}).collectors == 2


def environment_of(engine: str, *hosts: str, name: str = "walk", at: str = "") -> Any:
    return SimpleNamespace(
        name=name,
        engine=EngineAddress.of(engine, {"RAY_ADDRESS": at} if at else {}),
        replica_addresses=lambda: [f"http://{host}:8000" for host in hosts],
    )


def test_replicas_that_no_node_of_the_cluster_has_are_refused() -> None:
    with pytest.raises(RolloutError, match="walk are on no node of the Ray cluster"):
        address_on({"10.0.0.1"}, environment_of("slurm", "10.9.0.1"), 0, None)


def test_replicas_of_another_engine_are_played_at_where_their_nodes_are_the_clusters() -> None:
    found = address_on({"10.0.0.1"}, environment_of("slurm", "10.9.0.1", "10.0.0.1"), 0, None)
    assert found == "http://10.0.0.1:8000"
    assert address_on(set(), environment_of("docker", "127.0.0.1"), 0, None) is not None


@pytest.mark.parametrize(("engine", "hosts"), [("ray", ["10.0.0.9"]), ("slurm", [])])
def test_a_lost_node_of_ray_and_a_replica_that_is_not_ready_are_waited_for(
    engine: str, hosts: list[str]
) -> None:
    assert address_on({"10.0.0.1"}, environment_of(engine, *hosts), 0, None) is None


def test_environments_of_two_ray_clusters_are_refused() -> None:
    walk = environment_of("ray", at="10.0.0.1:6399")
    swim = environment_of("ray", name="swim", at="10.0.0.2:6399")
    with pytest.raises(RolloutError) as refused:
        cluster_of([walk, swim])
    assert "walk on 10.0.0.1:6399; swim on 10.0.0.2:6399" in str(refused.value)
    assert "the same RAY_ADDRESS" in str(refused.value.hint)


def test_collectors_are_on_the_ray_cluster_of_the_environments() -> None:
    walk = environment_of("ray", at="10.0.0.1:6399")
    swim = environment_of("ray", name="swim", at="10.0.0.1:6399")
    assert cluster_of([environment_of("docker"), walk, swim]) == walk.engine
    assert cluster_of([environment_of("docker")]) is None
