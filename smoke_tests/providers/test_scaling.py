# SPDX-License-Identifier: Apache-2.0
"""Scaling, restarts and updates of replicas behind the gateway, with any provider."""

from contextlib import ExitStack

from ..conftest import eventually
from .harness import NAME, Harness


def ids(harness: Harness) -> list[str]:
    return [replica["id"] for replica in harness.environment()["replicas"]]


def test_scaled_up_and_down(harness: Harness) -> None:
    """Replicas are added at the same address and removed, and no session ends."""
    address = harness.launched("--gateway")["address"]
    with harness.session() as first:
        life = first.ask("life")
        harness.machine.ok("scale", NAME, "2")
        harness.until_all_ready(2)
        assert harness.environment()["address"] == address
        old, new = ids(harness)
        with harness.sessions_at([old, new]) as sessions:
            of_new = sessions[new].ask("life")
            assert of_new != life
            harness.machine.ok("scale", NAME, "1")
            eventually(lambda: harness.replica_of(new)["state"] == "DRAINING")
            assert (first.ask("life"), sessions[new].ask("life")) == (life, of_new)
            assert harness.ask("life") == life
    eventually(lambda: ids(harness) == [old], within=60)
    harness.until_ready()


def test_restarted(harness: Harness) -> None:
    """A restart replaces all replicas, and ends no session."""
    harness.launched("--gateway", "--replicas", "2")
    before = set(ids(harness))
    with harness.session() as session:
        life = session.ask("life")
        restart = harness.machine.ok("restart", NAME, "--async").out.strip()
        eventually(lambda: harness.replica_of(session.replica_id)["state"] == "DRAINING", within=60)
        assert session.ask("life") == life
        assert harness.ask("life") != life
    harness.machine.ok("wait", restart)
    eventually(lambda: not before & set(ids(harness)), within=60)
    harness.until_all_ready(2)
    assert harness.ask("life")


def test_update(harness: Harness) -> None:
    """A launch under a running name replaces its replicas behind the gateway; no session ends."""
    address = harness.launched("--gateway", "-e", "VERSION=1")["address"]
    with harness.session() as session:
        life = session.ask("life")
        assert harness.launched("--gateway", "-e", "VERSION=2")["address"] == address
        assert harness.ask("environ", "VERSION") == "2"
        assert (session.ask("environ", "VERSION"), session.ask("life")) == ("1", life)
    eventually(lambda: harness.states() == ["READY"], within=60)
    eventually(lambda: len(harness.provider.replicas_of(harness.machine)) == 1)


def test_scaled_by_its_sessions(harness: Harness) -> None:
    """With `--max`, replicas are added when all slots are taken, and removed afterwards."""
    harness.launched("--max", "2", "--max-sessions", "4", "--set", "scale-down=1")
    with ExitStack() as sessions:
        begun = [sessions.enter_context(harness.session()) for _ in range(2)]
        harness.until_all_ready(2)
        assert all(session.ask("life") for session in begun)
    scaled = harness.machine.ok("requests", "--json").json["requests"]
    assert "2 of 2 sessions taken" in [one["payload"].get("reason") for one in scaled]
    eventually(lambda: len(ids(harness)) == 1, within=60)
    harness.until_ready()


def test_agent_killed_while_scaling(harness: Harness) -> None:
    """When the agent is killed while replicas are added, sessions go on, and all get ready."""
    harness.launched("--gateway", start="print:begun;sleep:2")
    with harness.session() as session:
        life = session.ask("life")
        scale = harness.machine.ok("scale", NAME, "3", "--async").out.strip()
        eventually(lambda: harness.log().count("begun") > 1, within=60)
        harness.kill_agents()
        harness.machine.ok("wait", scale)
        assert session.ask("life") == life
    harness.until_all_ready(3)
