# SPDX-License-Identifier: Apache-2.0
"""Environments whose replicas are Ray actors: the real command, daemon, agent and cluster."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ..conftest import Machine, eventually
from ..pages import name_of, pages_that_need, run_blocks
from ..test_main_job import say_hello
from . import ray_engine
from .ray_engine import RayCluster
from .test_docker import launched

RAY = ("--provider", "ray", "--memory", "256M")
ACTORS = """
import ray
ray.init(namespace="openenvd", log_to_driver=False, ignore_reinit_error=True)
for each in ray.util.list_named_actors():
    print(each)
"""
KILL_ACTORS = ACTORS.replace(
    "print(each)",
    """
    actor = ray.get_actor(each)
    print(actor._actor_id.hex())
    ray.kill(actor)
""",
)
GROUPS = """
import ray
ray.init(log_to_driver=False, ignore_reinit_error=True)
for each in ray.util.placement_group_table().values():
    if each["state"] != "REMOVED":
        print(each["name"])
"""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    if (reason := ray_engine.why_not()) is not None:
        pytest.skip(f"no Ray: {reason}")
    with ray_engine.ray_cluster() as made:
        yield made


@pytest.fixture
def ray_machine(machine: Machine, ray_cluster: RayCluster) -> Iterator[Machine]:
    """A user of that cluster; none of their actors is left."""
    machine.environ.update(ray_cluster.environ)
    yield machine
    machine.run("down", "--all")
    eventually(lambda: ray_cluster.run(ACTORS + GROUPS) == "")


def until_restarted(machine: Machine) -> str:
    """Wait for the second instance of the first replica; returns why the first one ended."""
    eventually(lambda: machine.replica()["restarts"] == 1, within=60)
    eventually(lambda: machine.replica()["state"] == "READY", within=60)
    return str(machine.replica()["message"])


def test_an_actor_that_somebody_kills_is_told_as_such_and_its_server_ends(
    ray_machine: Machine, ray_cluster: RayCluster
) -> None:
    machine = ray_machine
    address = launched(machine, "echo", *RAY)["address"]
    server = psutil.Process(machine.replica()["pid"])
    [actor] = ray_cluster.run(KILL_ACTORS).split()
    assert "ray.kill" in until_restarted(machine)
    assert not server.is_running()
    left = [path for path in Path(tempfile.gettempdir()).iterdir() if actor[:20] in path.name]
    assert left == []
    say_hello(address)


def test_a_replica_on_a_node_without_memory_is_killed_by_rays_monitor(machine: Machine) -> None:
    if (reason := ray_engine.why_not()) is not None:
        pytest.skip(f"no Ray: {reason}")
    nothing = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    with ray_engine.ray_cluster(settings=nothing) as cluster:
        machine.environ.update(cluster.environ)
        answer = machine.run("launch", "echo", *RAY)
        assert answer.code == 137, answer.text
        assert "killed by Ray's memory monitor" in " ".join(answer.err.split())
        machine.ok("down", "--all")


def test_status_says_what_no_node_has(ray_machine: Machine) -> None:
    machine = ray_machine
    wanted = ("--engine-option", 'resources={"disk": 1}')
    launch = machine.ok("launch", "echo", *RAY, *wanted, "--async").out.strip()
    eventually(lambda: "no node of the cluster has" in machine.ok("status").text)
    assert "disk 1" in machine.ok("status").text
    machine.ok("down", "echo")
    assert machine.run("wait", launch).code != 0


@pytest.mark.parametrize("page", pages_that_need("ray"), ids=name_of)
def test_the_blocks_of_a_page_that_need_ray_run(ray_machine: Machine, page: Path) -> None:
    run_blocks(ray_machine, page, "ray")
