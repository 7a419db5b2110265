# SPDX-License-Identifier: Apache-2.0
"""A swarm of two nodes: two real dockerds, the second in a network namespace of its own.

The agent asks the manager, and learns only from Swarm what is on the other node: its replica, its
output, its exit, and that the node is gone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from openenvd.environments.engines.base import REPLICA_LABEL

from ..conftest import eventually
from ..providers.harness import NAME, Harness, home_of, running
from ..providers.under_test import SAMPLE_IMAGE, Swarm
from .docker_engine import DockerEngine, cut, other_node, why_no_other_node

WORDS = ("--token", "auto", "--gateway", "--memory", "256M")
THERE = ("--engine-option", "constraint=node.role==worker")


class SwarmOfTwo(Swarm):
    """A swarm whose replicas may be on another node."""

    other: DockerEngine

    def why_not(self) -> str | None:
        return why_no_other_node()

    @contextmanager
    def engine(self, folder: Path) -> Iterator[None]:
        with super().engine(folder):
            self._engine.docker("swarm", "update", "--dispatcher-heartbeat", "1s")
            with other_node(self._engine, [SAMPLE_IMAGE]) as self.other:
                yield

    def there(self) -> list[str]:
        label = f'{{{{.Label "{REPLICA_LABEL}"}}}}'
        return self.other.docker("ps", "--format", label).split()


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwarmOfTwo]:
    with running(SwarmOfTwo(), tmp_path_factory) as made:
        yield made


@pytest.fixture
def harness(swarm: SwarmOfTwo, tmp_path: Path) -> Iterator[Harness]:
    with home_of(swarm, tmp_path) as made:
        yield made


def address(harness: Harness) -> str:
    return harness.machine.ok("address", NAME).out.strip()


def test_a_replica_on_the_other_node_is_served_logged_and_its_exit_told(
    harness: Harness, swarm: SwarmOfTwo
) -> None:
    harness.launched(*WORDS, *THERE)
    assert len(swarm.there()) == 1
    with harness.session(address=address(harness)) as session:
        session.ask("print", "from the other node")
        harness.until_printed("from the other node")
        session.send({"type": "step", "data": {"do": "server", "argument": "exit:7"}})
    reason = harness.until_restarted()["exit"]
    assert reason["exit_code"] == 7, reason
    assert len(swarm.there()) == 1


def test_a_replica_on_the_other_node_is_drained_as_its_last_session_ends(harness: Harness) -> None:
    harness.launched(*WORDS, *THERE, "--replicas", "2")
    kept, drained = [replica["id"] for replica in harness.environment()["replicas"]]
    with harness.sessions_at([kept, drained], address(harness)) as sessions:
        harness.machine.ok("scale", NAME, "1", "--drain-timeout", "600")
        eventually(lambda: harness.replica_of(drained)["state"] == "DRAINING")
        assert all(session.ask("life") for session in sessions.values())
    eventually(lambda: harness.states() == ["READY"])


@pytest.mark.parametrize("lose", [cut, DockerEngine.kill])
def test_replicas_of_a_lost_node_come_back_on_the_other(
    harness: Harness, swarm: SwarmOfTwo, lose: Callable[[DockerEngine], None]
) -> None:
    harness.launched(*WORDS, "--replicas", "2")
    [lost] = swarm.there()
    [kept] = {replica["id"] for replica in harness.environment()["replicas"]} - {lost}
    with harness.sessions_at([kept, lost], address(harness)) as sessions:
        life = sessions[kept].ask("life")
        lose(swarm.other)
        try:
            if lose is cut:  # its node reports nothing any more, not even its end
                answer = sessions[lost].send({"type": "step", "data": {"do": "life"}})
                assert "The replica of this session is gone" in answer["data"]["message"]
            eventually(lambda: harness.replica_of(lost)["restarts"] == 1, within=60)
            assert "is down" in str(harness.replica_of(lost)["exit"])
            harness.until_all_ready(2)
            assert sessions[kept].ask("life") == life
        finally:
            cut(swarm.other, is_cut=False)
            if swarm.other.process.poll() is not None:
                swarm.other.start()
    eventually(lambda: swarm.there() == [], within=60)
