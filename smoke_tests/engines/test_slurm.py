# SPDX-License-Identifier: Apache-2.0
"""Environments whose replicas are Slurm jobs: the real command, daemon, agent and cluster."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import connect

from openenvd.environments.engines.base import EngineGone
from openenvd.environments.engines.slurm.engine import SlurmEngine

from ..conftest import Machine, eventually
from ..pages import name_of, pages_that_need, run_blocks
from ..providers.harness import Session
from ..test_main_job import say_hello
from . import slurm_engine as slurm_clusters
from .slurm_engine import SlurmCluster
from .test_docker import launched

HUNGRY = """
from openenvd.env_host.bundled.echo.environment import EchoEnvironment as Sample
held = []
while True: held.append(bytearray(2**20))
"""
SLURM = ("--provider", "slurm", "--memory", "256M")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    if (reason := slurm_clusters.why_not()) is not None:
        pytest.skip(f"no Slurm: {reason}")
    with slurm_clusters.slurm_cluster() as made:
        yield made


@pytest.fixture
def slurm_machine(machine: Machine, cluster: SlurmCluster) -> Iterator[Machine]:
    """A user of that cluster; none of their jobs is left."""
    machine.environ.update(cluster.environ)
    yield machine
    machine.run("down", "--all")
    eventually(lambda: not cluster.jobs())


def test_an_environment_whose_port_is_taken_meanwhile_is_found_at_another(
    slurm_machine: Machine,
) -> None:
    machine = slurm_machine
    before = launched(machine, "echo", *SLURM)["address"]
    port = int(before.rpartition(":")[2])
    os.kill(machine.replica()["pid"], signal.SIGKILL)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        eventually(lambda: _listens(taken, port))
        eventually(lambda: machine.replica()["restarts"] == 1, within=60)
        eventually(lambda: machine.replica()["state"] == "READY", within=60)
        eventually(lambda: machine.environment("echo")["address"] != before)
        say_hello(machine.environment("echo")["address"])


def _listens(taken: socket.socket, port: int) -> bool:
    try:
        taken.bind(("127.0.0.1", port))
        taken.listen()
    except OSError:
        return False
    return True


def test_a_job_that_slurms_accounting_kills_is_out_of_memory_too(machine: Machine) -> None:
    """Without cgroups, its state is FAILED, and only its output contains the reason."""
    if (reason := slurm_clusters.why_not()) is not None:
        pytest.skip(f"no Slurm: {reason}")
    source = machine.home.parent / "hungry.py"
    source.write_text(HUNGRY.replace("while True:", "import time\nwhile True: time.sleep(0.003);"))
    with slurm_clusters.slurm_cluster(1, kills_over_memory=True) as cluster:
        machine.environ.update(cluster.environ)
        words = ("launch", "hungry:Sample", *SLURM, "--name", "hungry")
        answer = machine.run(*words, cwd=machine.home.parent)
        assert answer.code == 137, answer.text
        assert "was killed by Slurm's accounting" in answer.err
        assert "FAILED, by OverMemoryKill" in answer.err
        assert "256 MB" in answer.err  # its limit


def test_status_says_why_a_job_waits_and_a_down_cancels_it(
    slurm_machine: Machine, cluster: SlurmCluster
) -> None:
    machine = slurm_machine
    cluster.run("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        launch = machine.ok("launch", "echo", *SLURM, "--async").out.strip()
        eventually(lambda: "PENDING (PartitionDown)" in machine.ok("status").text)
        machine.ok("down", "echo")
        assert machine.run("wait", launch).code != 0
        eventually(lambda: cluster.jobs() == [])
    finally:
        cluster.run("scontrol", "update", "PartitionName=main", "State=UP")


def test_a_replica_has_a_successor_before_its_time_limit(
    slurm_machine: Machine, cluster: SlurmCluster
) -> None:
    """Its session continues; new ones begin at the successor. No client sees a TIMEOUT."""
    machine = slurm_machine
    limit = ("--engine-option", "time=1", "--engine-option", "signal=B:USR1@5")
    address = launched(machine, "echo", *SLURM, "--gateway", *limit)["address"]
    [job] = cluster.jobs()
    first = machine.replica()["id"]
    with session_at(address) as old:
        assert old.replica_id == first
        eventually(lambda: first not in ready_ids(machine), within=60)
        [second] = ready_ids(machine)
        with session_at(address) as new:
            assert new.replica_id == second
        assert old.send({"type": "step", "data": {"message": "hello"}})["type"] == "observation"
        eventually(lambda: len(cluster.jobs()) == 2)
    eventually(lambda: job not in cluster.jobs())
    assert "JobState=TIMEOUT" not in cluster.run("scontrol", "show", "job", job)
    assert ready_ids(machine) == [second]


def ready_ids(machine: Machine, name: str = "echo") -> list[str]:
    replicas = machine.environment(name)["replicas"]
    return [each["id"] for each in replicas if each["state"] == "READY"]


@contextlib.contextmanager
def session_at(address: str) -> Iterator[Session]:
    with connect(address.replace("http", "ws", 1) + "/ws", open_timeout=30) as socket:
        session = Session(socket)
        session.reset()
        yield session


def test_a_preempted_job_is_told_and_waits_for_its_place(
    slurm_machine: Machine, cluster: SlurmCluster
) -> None:
    machine = slurm_machine
    here = ("--engine-option", f"nodelist={cluster.nodes[0]}", "--memory", "3000M")
    launched(machine, "echo", "--provider", "slurm", *here)
    place = (f"--nodelist={cluster.nodes[0]}", "--mem=3000M", "--output=/dev/null")
    other = cluster.run("sbatch", "--parsable", "-p", "first", *place, "--wrap=sleep 600")
    eventually(lambda: "another job took its place" in _message(machine), within=60)
    eventually(lambda: "Slurm: PENDING" in _message(machine), within=60)
    cluster.run("scancel", other)
    eventually(lambda: machine.replica()["state"] == "READY", within=60)
    say_hello(machine.environment("echo")["address"])


def _message(machine: Machine) -> str:
    return str(machine.replica()["message"])


def test_options_of_sbatch_are_passed_on_and_refused_in_its_words(
    slurm_machine: Machine, cluster: SlurmCluster
) -> None:
    launched(slurm_machine, "echo", *SLURM, "--engine-option", "partition=first")
    assert cluster.run("squeue", "--noheader", "--format=%P") == "first"
    wrong = ("--engine-option", "partition=none", "--name", "other")
    answer = slurm_machine.run("launch", "echo", *SLURM, *wrong)
    assert answer.code == 1, answer.text
    assert "invalid partition" in answer.err
    assert "engine-option partition=NAME" in answer.err


def test_check_tells_the_version_and_what_is_missing(
    slurm_machine: Machine, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
    monkeypatch.setenv("PATH", cluster.environ["PATH"])
    engine = SlurmEngine()
    assert engine.check().problem is None
    monkeypatch.setenv("PATH", str(slurm_machine.home))
    with pytest.raises(EngineGone) as gone:
        engine.check()
    assert "slurm-client" in str(gone.value.hint)


@pytest.mark.parametrize("page", pages_that_need("slurm"), ids=name_of)
def test_the_blocks_of_a_page_that_need_slurm_run(slurm_machine: Machine, page: Path) -> None:
    run_blocks(slurm_machine, page, "slurm")
