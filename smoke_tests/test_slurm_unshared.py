# SPDX-License-Identifier: Apache-2.0
"""Slurm whose nodes do not see the daemon's folder: each has an empty one there, of its own.

Jobs report by HTTP, and nodes make ready themselves what is launched.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from . import slurm_engine as slurm_clusters
from .conftest import Machine, eventually, new_machine
from .pages import name_of, pages_that_need, run_blocks
from .slurm_engine import SlurmCluster
from .test_docker import launched, say_hello
from .test_slurm import SLURM, agents_of, replica_of, session_at

LOUD = """
from openenvd.envs.echo.environment import EchoEnvironment as Sample
print("so loud")
"""
TALKING = """
from openenvd.envs.echo.environment import EchoEnvironment
class Sample(EchoEnvironment):
    def step(self, *arguments, **more):
        print("a step was taken", flush=True)
        return super().step(*arguments, **more)
"""
BROKEN = "raise ValueError('it cannot be imported')\n"


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What nodes do not see: the home, and the user's own folder."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def cluster(hidden: Path) -> Iterator[SlurmCluster]:
    """Two nodes."""
    if (reason := slurm_clusters.why_not()) is not None:
        pytest.skip(f"no Slurm: {reason}")
    with slurm_clusters.slurm_cluster(2, hidden=hidden) as made:
        yield made


@pytest.fixture
def user(hidden: Path, cluster: SlurmCluster, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A user of that cluster, of whose jobs none is left."""
    folder = hidden / request.node.name[:40]
    folder.mkdir()
    with new_machine(folder / "home") as made:
        made.environ |= cluster.environ
        made.environ["HOME"] = str(folder / "user")
        made.environ["OPENENV_SLURM_REPORT"] = "127.0.0.1"
        made.environ["OPENENV_SLURM_NODE_PYTHON"] = sys.executable
        yield made
        made.run("down", "--all")
        eventually(lambda: not cluster.jobs())


def test_a_session_runs_in_a_job_that_does_not_see_the_home(
    user: Machine, cluster: SlurmCluster
) -> None:
    address = launched(user, "echo", *SLURM)["address"]
    say_hello(address)
    server = psutil.Process(replica_of(user)["pid"])
    assert not Path(f"/proc/{server.pid}/root{user.home}").exists()
    [job] = cluster.jobs()
    assert str(user.home) not in cluster.run("scontrol", "show", "job", job)
    user.ok("down", "echo")
    assert cluster.jobs() == []
    assert list((user.home / "run").glob("echo-*")) == []


@pytest.fixture
def project(user: Machine) -> Path:
    """A project of the user's."""
    folder = user.home.parent / "my_env"
    folder.mkdir()
    (folder / "openenv.yaml").write_text("spec_version: 1\nname: my_env\nclass: loud:Sample\n")
    (folder / "loud.py").write_text(LOUD)
    return folder


def test_a_project_is_fetched_by_its_jobs_and_forgotten_with_them(
    user: Machine, project: Path, cluster: SlurmCluster
) -> None:
    archives = user.home / "slurm" / "archives"
    launched(user, str(project), *SLURM, "--name", "echo")
    eventually(lambda: "so loud" in user.ok("logs", "echo").out)
    assert len(list(archives.iterdir())) == 1
    user.ok("down", "echo")
    assert list(archives.iterdir()) == []


def test_a_job_goes_on_without_its_agent_and_reports_to_the_next_one(
    user: Machine, project: Path, cluster: SlurmCluster
) -> None:
    (project / "loud.py").write_text(TALKING)
    address = launched(user, str(project), *SLURM, "--name", "echo")["address"]
    before, jobs = replica_of(user), cluster.jobs()
    with session_at(address) as (_, ask):
        [agent] = agents_of(user)
        agent.suspend()  # no other takes its place while it still is there
        ask()
        agent.kill()
        psutil.wait_procs([agent], timeout=10)
        assert ask()["type"] == "observation"
        eventually(lambda: user.ok("logs", "echo").out.count("a step was taken") == 2)
    eventually(lambda: replica_of(user)["state"] == "READY")
    after = replica_of(user)
    assert [after[name] for name in ("pid", "restarts")] == [before["pid"], 0]
    assert cluster.jobs() == jobs
    user.ok("down", "echo")
    assert cluster.jobs() == []


def test_a_job_that_crashes_says_why_in_its_log(user: Machine, project: Path) -> None:
    (project / "loud.py").write_text(BROKEN)
    answer = user.run("launch", str(project), *SLURM, "--name", "echo")
    assert answer.code == 1, answer.text
    assert "ValueError: it cannot be imported" in answer.err


def test_a_job_that_is_killed_has_a_successor(user: Machine) -> None:
    launched(user, "echo", *SLURM)
    os.kill(replica_of(user)["pid"], signal.SIGKILL)
    eventually(lambda: replica_of(user)["restarts"] == 1, within=60)
    eventually(lambda: replica_of(user)["state"] == "READY", within=60)
    assert "SIGKILL" in str(replica_of(user)["exit"])


def test_a_node_without_openenvd_is_told_as_such(user: Machine) -> None:
    user.environ["OPENENV_SLURM_NODE_PYTHON"] = "no/python"
    answer = user.run("launch", "echo", *SLURM)
    assert answer.code == 1, answer.text
    assert "has to be at no/python there" in answer.err


def test_a_replica_that_is_drained_ends_with_its_last_session(
    user: Machine, cluster: SlurmCluster
) -> None:
    address = launched(user, "echo", *SLURM, "--replicas", "2")["address"]
    with ExitStack() as stack:
        asks: dict[str, Any] = {}
        for _ in range(20):  # the gateway's threads take turns each on their own
            replica, ask = stack.enter_context(session_at(address))
            asks[replica] = ask
            if len(asks) == 2:
                break
        assert len(asks) == 2, "all sessions are at one replica"
        user.ok("scale", "echo", "1", "--drain-timeout", "60s", "--async")
        eventually(lambda: "DRAINING" in [each["state"] for each in replicas_of(user)])
        assert [ask()["type"] for ask in asks.values()] == ["observation"] * 2
        assert len(cluster.jobs()) == 2
    eventually(lambda: len(cluster.jobs()) == 1)


def test_a_node_elsewhere_reports_to_an_address_of_this_machine_which_is_warned_of(
    tmp_path: Path,
) -> None:
    if (reason := slurm_clusters.why_no_other_node()) is not None:
        pytest.skip(f"no Slurm with another node: {reason}")
    with (
        slurm_clusters.slurm_cluster(1, other=True, hidden=tmp_path) as cluster,
        new_machine(tmp_path / "home") as user,
    ):
        user.environ |= cluster.environ
        user.environ["HOME"] = str(tmp_path / "user")
        user.environ["OPENENV_SLURM_REPORT"] = cluster.host
        user.environ["OPENENV_SLURM_NODE_PYTHON"] = sys.executable
        told = user.ok("launch", "echo", *SLURM, "--token", "auto")
        assert f"warning: jobs report to {cluster.host} without encryption" in told.text
        with session_at(user.ok("address", "echo").out.strip()) as (_, ask):
            assert ask()["type"] == "observation"
        user.ok("down", "echo")
        assert cluster.jobs() == []


def replicas_of(user: Machine) -> list[dict[str, Any]]:
    """Those of the environment."""
    return list(user.environment("echo")["replicas"])


@pytest.mark.parametrize("page", pages_that_need("nodes of their own"), ids=name_of)
def test_the_blocks_of_a_page_for_such_nodes_run(user: Machine, page: Path) -> None:
    own = user.environ.pop("OPENENV_SLURM_REPORT")
    run_blocks(user, page, "nodes of their own", {"10.0.0.5": own})
