# SPDX-License-Identifier: Apache-2.0
"""Slurm from a laptop that reaches nothing but its login node, by ssh: a real sshd and cluster.

The one node of the cluster is in a network of its own, too: the laptop has no route to it.
"""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL

import psutil
import pytest

from .conftest import Machine, eventually, new_machine
from .pages import name_of, pages_that_need, run_blocks
from .slurm_engine import SlurmCluster, slurm_cluster, why_no_other_node
from .ssh_server import HOST, LoginNode, login_node, why_not
from .test_slurm import agents_of, replica_of, session_at

SLURM = ("--provider", "slurm", "--memory", "256M", "--token", "auto")
SESSIONS = 8  # at two replicas


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """A cluster of one node, which is elsewhere."""
    if (reason := why_no_other_node() or why_not()) is not None:
        pytest.skip(f"no Slurm behind ssh: {reason}")
    with slurm_cluster(1, other=True) as made:
        yield made


@pytest.fixture
def login(tmp_path: Path, cluster: SlurmCluster) -> Iterator[LoginNode]:
    """Its login node."""
    (tmp_path / "login").mkdir()
    with login_node(tmp_path / "login", SLURM_CONF=cluster.environ["SLURM_CONF"]) as made:
        yield made


@pytest.fixture
def laptop(tmp_path: Path, login: LoginNode, cluster: SlurmCluster) -> Iterator[Machine]:
    """A user of that cluster, elsewhere; nothing of theirs is left."""
    with new_machine(tmp_path / "home") as made:
        made.command = login.on_laptop(made.command)
        made.environ["PATH"] = login.path
        made.environ["OPENENV_SLURM_SSH"] = HOST
        made.environ["OPENENV_SLURM_SSH_PYTHON"] = sys.executable
        yield made
    eventually(lambda: not cluster.jobs())
    assert [path.name for path in (login.home / "slurm").glob("*/echo-*")] == []


@pytest.fixture
def project(laptop: Machine) -> Path:
    """A project on the laptop."""
    folder = laptop.home.parent / "my_env"
    folder.mkdir()
    (folder / "openenv.yaml").write_text("spec_version: 1\nname: my_env\nclass: loud:Sample\n")
    (folder / "loud.py").write_text(
        "from openenvd.envs.echo.environment import EchoEnvironment as Sample\nprint('so loud')\n"
    )
    return folder


def ssh_processes(machine: Machine) -> list[psutil.Process]:
    """The connections of a home."""
    return [each for each in machine.processes() if each.name() == "ssh"]


def reach(cluster: SlurmCluster) -> None:
    """Connect to the node without ssh, which fails."""
    socket.create_connection((cluster.address_of(cluster.nodes[-1]), 22), timeout=2).close()


def test_a_project_on_a_laptop_is_served_by_jobs_of_the_cluster(
    laptop: Machine, project: Path, cluster: SlurmCluster, login: LoginNode
) -> None:
    with login.on_the_laptop(), pytest.raises(OSError, match="unreachable"):
        reach(cluster)
    laptop.ok("launch", str(project), "--name", "echo", *SLURM)
    address = laptop.ok("address", "echo").out.strip()
    with login.on_the_laptop(), session_at(address) as (_, ask):
        assert ask()["data"]["observation"]["echoed_message"] == "hello"
    eventually(lambda: "so loud" in laptop.ok("logs", "echo").out)
    [job] = cluster.jobs()
    told = cluster.run("scontrol", "show", "job", job)
    assert str(login.home / "slurm") in told
    assert str(laptop.home) not in told
    copies = list((login.home / "slurm" / "sources").glob("*/*/my_env/openenv.yaml"))
    assert len(copies) == 1
    laptop.ok("down", "echo")
    assert cluster.jobs() == []
    assert not copies[0].exists()


def test_a_copy_that_a_launch_has_left_goes_when_an_agent_begins(
    laptop: Machine, project: Path, login: LoginNode
) -> None:
    """As when a launch was killed; the copy that a replica uses stays."""
    laptop.ok("launch", str(project), "--name", "echo", *SLURM)
    [used] = (login.home / "slurm" / "sources").glob("*/*")
    left = used.with_name("0123456789")
    (left / "my_env").mkdir(parents=True)
    [agent] = agents_of(laptop)
    agent.kill()
    psutil.wait_procs([agent], timeout=10)
    eventually(lambda: not left.exists(), within=60)
    assert used.is_dir()
    laptop.ok("down", "echo")
    assert not used.exists()


def test_two_jobs_behind_ssh_are_one_environment_at_the_gateway(
    laptop: Machine, login: LoginNode, cluster: SlurmCluster
) -> None:
    laptop.ok("launch", "echo", *SLURM, "--replicas", "2")
    address = laptop.ok("address", "echo").out.strip()
    replicas = set()
    with login.on_the_laptop(), contextlib.ExitStack() as sessions:
        for _ in range(SESSIONS):  # each of Envoy's threads takes replicas in turn by itself
            replica, ask = sessions.enter_context(session_at(address))
            replicas.add(replica)
            assert ask()["type"] == "observation"
    assert len(replicas) == 2
    assert len(cluster.jobs("RUNNING")) == 2
    laptop.ok("down", "echo")


def test_a_login_node_that_forwards_nothing_is_told_as_such(
    laptop: Machine, login: LoginNode, cluster: SlurmCluster
) -> None:
    with (login.folder / "sshd_config").open("a") as config:
        config.write("AllowTcpForwarding no\n")
    login.stop()
    login.start()
    answer = laptop.run("launch", "echo", *SLURM)
    assert answer.code == 1, answer.text
    assert f"the host {HOST} does not forward connections to " in answer.err
    assert "AllowTcpForwarding yes" in answer.err
    eventually(lambda: not cluster.jobs())


def test_a_connection_that_is_lost_comes_back_and_replicas_have_gone_on(
    laptop: Machine, login: LoginNode, cluster: SlurmCluster
) -> None:
    laptop.ok("launch", "echo", *SLURM)
    address = laptop.ok("address", "echo").out.strip()
    before = replica_of(laptop)
    login.stop()
    eventually(lambda: f"{HOST} has no ssh server" in laptop.ok("status").text)
    assert len(cluster.jobs("RUNNING")) == 1
    login.start()
    eventually(lambda: f"{HOST} has no ssh server" not in laptop.ok("status").text)
    with login.on_the_laptop(), session_at(address) as (_, ask):
        assert ask()["type"] == "observation"
    after = replica_of(laptop)
    assert [after[name] for name in ("pid", "restarts", "state")] == [before["pid"], 0, "READY"]


def test_a_session_outlives_the_agent_whose_successor_uses_the_same_connection(
    laptop: Machine, login: LoginNode
) -> None:
    laptop.ok("launch", "echo", *SLURM)
    address = laptop.ok("address", "echo").out.strip()
    masters = {each.pid for each in ssh_processes(laptop) if "-M" in each.cmdline()}
    with login.on_the_laptop(), session_at(address) as (_, ask):
        [agent] = agents_of(laptop)
        agent.kill()
        psutil.wait_procs([agent], timeout=10)
        assert ask()["type"] == "observation"
        eventually(lambda: agents_of(laptop))
        eventually(lambda: replica_of(laptop)["state"] == "READY")
    found = {each.pid for each in ssh_processes(laptop) if "-M" in each.cmdline()}
    assert (len(found), found) == (1, masters)
    assert laptop.ok("address", "echo").out.strip() == address


@pytest.mark.parametrize(
    ("host", "python", "problem", "remedy"),
    [
        ("nowhere", sys.executable, "nowhere is unknown", "ssh nowhere true"),
        ("stranger", sys.executable, "stranger refuses this user's keys", "ssh-add"),
        ("unknown", sys.executable, "unknown is not known yet", "by hand once"),
        (HOST, "nothing/python", f"{HOST} has no openenvd at nothing/python", "pip install"),
        (HOST, "/usr/bin/python3", f"{HOST} has no openenvd", "pip install"),
    ],
)
def test_a_launch_says_why_the_login_node_cannot_be_used(
    laptop: Machine, host: str, python: str, problem: str, remedy: str
) -> None:
    laptop.environ["OPENENV_SLURM_SSH"] = host
    laptop.environ["OPENENV_SLURM_SSH_PYTHON"] = python
    answer = laptop.run("launch", "echo", *SLURM)
    assert answer.code == 1, answer.text
    assert problem in answer.err
    assert remedy in answer.err


def test_a_check_from_a_laptop_asks_the_login_node(laptop: Machine) -> None:
    told = laptop.ok("check", "--provider", "slurm").out
    assert [line.split()[1] for line in told.splitlines() if "✓" in line] == [
        *("engine", "launch", "session", "down")
    ]


def test_a_connection_that_was_opened_by_hand_is_used(laptop: Machine, login: LoginNode) -> None:
    """Where a password or a code has to be typed; here, a key that ssh is not told otherwise."""
    laptop.environ["OPENENV_SLURM_SSH"] = "stranger"
    told = laptop.run("launch", "echo", *SLURM).err
    by_hand = shlex.split(told.partition("by hand: ")[2].splitlines()[0])
    assert by_hand[:2] == ["ssh", "-fNM"]
    by_hand[1:1] = ["-i", str(login.folder / "key")]
    inside = ["nsenter", f"--net=/run/netns/{login.laptop}"]
    subprocess.run(
        [*inside, *by_hand], env=laptop.environ, stdout=DEVNULL, stderr=DEVNULL, check=True
    )
    try:
        laptop.ok("launch", "echo", *SLURM)
        address = laptop.ok("address", "echo").out.strip()
        with login.on_the_laptop(), session_at(address) as (_, ask):
            assert ask()["type"] == "observation"
        laptop.ok("down", "echo")
    finally:
        words = ["ssh", "-S", by_hand[by_hand.index("-S") + 1], "-O", "exit", "stranger"]
        subprocess.run(words, env=laptop.environ, capture_output=True, check=True)


@pytest.mark.parametrize("page", pages_that_need("a login node"), ids=name_of)
def test_the_blocks_of_a_page_for_a_laptop_run(
    laptop: Machine, login: LoginNode, page: Path
) -> None:
    del laptop.environ["OPENENV_SLURM_SSH"]  # the page names it
    with login.on_the_laptop():
        run_blocks(laptop, page, "a login node")
