# SPDX-License-Identifier: Apache-2.0
"""Kills of the daemon, the agent and the engine: at the start, while serving, and at the stop.

The agent is the process that reports the replicas' status: with the local provider the shim of each
replica, with an engine one process for all replicas.
"""

from ..conftest import eventually
from .harness import NAME, Harness


def test_daemon_killed(harness: Harness) -> None:
    """When the daemon is killed, sessions go on, and the next daemon adopts their replicas."""
    harness.launched()
    with harness.session() as session:
        life = session.ask("life")
        harness.restart_daemon()
        harness.until_ready()
        assert session.ask("life") == life
    assert harness.ask("life") == life
    assert harness.replica()["restarts"] == 0


def test_daemon_killed_while_starting(harness: Harness) -> None:
    """When the daemon is killed during a launch, the next one finishes it, once."""
    launch = harness.queued(start="print:begun;sleep:3")
    harness.until_printed("begun")
    harness.restart_daemon()
    harness.machine.ok("wait", launch)
    harness.until_ready()
    assert harness.ask("life")
    eventually(lambda: len(harness.provider.replicas_of(harness.machine)) == 1)


def test_daemon_killed_while_stopping(harness: Harness) -> None:
    """When the daemon is killed during a down, the next one finishes it."""
    harness.launched()
    with harness.session() as session:
        session.ask("close_slowly", 600)
        down = harness.machine.ok("down", NAME, "--async").out.strip()
        harness.until_printed("closing")
        harness.restart_daemon()
        harness.machine.ok("wait", down)
        eventually(lambda: NAME not in harness.names(), within=60)
    harness.assert_nothing_left()


def test_daemon_stopped(harness: Harness) -> None:
    """When the daemon is stopped, replicas continue, and the next daemon adopts them."""
    address = harness.launched()["address"]
    life = harness.ask("life")
    harness.machine.ok("stop")
    with harness.session(address=address) as session:
        assert session.ask("life") == life
    harness.machine.ok("up")
    harness.until_ready()
    assert harness.ask("life") == life


def test_exit_without_a_daemon(harness: Harness) -> None:
    """A replica that exits while no daemon runs is restarted by the next one."""
    harness.launched()
    life = harness.ask("life")
    harness.machine.kill_daemon()
    harness.tell_server("exit:7")
    harness.machine.ok("up")
    eventually(lambda: harness.replica()["restarts"] == 1, within=60)
    harness.until_ready()
    assert harness.ask("life") != life


def test_database_lost(harness: Harness) -> None:
    """Environments outlive the loss of the database: the next daemon finds them."""
    address = harness.launched()["address"]
    life = harness.ask("life")
    harness.machine.ok("stop")
    for path in harness.machine.home.glob("requests.db*"):
        path.rename(path.with_name(f"lost-{path.name}"))
    harness.machine.ok("up")
    harness.until_ready()
    assert harness.environment()["address"] == address
    assert harness.ask("life") == life
    harness.machine.ok("down", NAME)
    harness.assert_nothing_left()


def test_agent_killed(harness: Harness) -> None:
    """When the agent is killed, the environment is ready again by itself."""
    harness.launched("--replicas", "2")
    agents = {agent.pid for agent in harness.agents()}
    harness.kill_agents()
    eventually(lambda: harness.agents() and not agents & {a.pid for a in harness.agents()})
    harness.until_all_ready(2)
    assert harness.ask("life")
    eventually(lambda: len(harness.provider.replicas_of(harness.machine)) == 2)


def test_agent_killed_under_sessions(harness: Harness) -> None:
    """When the agent is killed, sessions go on."""
    harness.launched()
    with harness.session() as session:
        life = session.ask("life")
        harness.kill_agents()
        eventually(harness.agents)
        assert session.ask("life") == life
    assert harness.replica()["restarts"] == 0


def test_agent_killed_while_starting(harness: Harness) -> None:
    """When the agent is killed during a launch, this succeeds, or fails and leaves nothing."""
    launch = harness.queued(start="print:begun;sleep:3")
    harness.until_printed("begun")
    harness.kill_agents()
    answer = harness.machine.run("wait", launch)
    if answer.code == 0:
        assert harness.ask("life")
        assert len(harness.provider.replicas_of(harness.machine)) == 1
    else:
        assert harness.machine.request(launch)["error"]["message"]
        harness.assert_nothing_left()


def test_agent_killed_while_stopping(harness: Harness) -> None:
    """When the agent is killed during a down, the replica is gone all the same."""
    harness.launched()
    with harness.session() as session:
        session.ask("close_slowly", 600)
        down = harness.machine.ok("down", NAME, "--async").out.strip()
        harness.until_printed("closing")
        harness.kill_agents()
        harness.machine.run("wait", down)
    eventually(lambda: NAME not in harness.names(), within=60)
    harness.assert_nothing_left()


def test_agent_killed_without_a_daemon(harness: Harness) -> None:
    """When agent and daemon are killed together, the next daemon has the environment ready."""
    harness.launched()
    harness.machine.kill_daemon()
    harness.kill_agents()
    harness.machine.ok("up")
    eventually(harness.agents)
    harness.until_ready()
    assert harness.ask("life")
    assert len(harness.provider.replicas_of(harness.machine)) == 1


def test_engine_restarted(harness: Harness) -> None:
    """When the engine is restarted, environments are ready again by themselves."""
    harness.launched()
    harness.provider.stop_engine()
    harness.provider.start_engine()
    harness.until_served()
    harness.until_ready()
    harness.machine.ok("down", NAME)
    harness.assert_nothing_left()


def test_engine_killed_under_sessions(harness: Harness) -> None:
    """When the engine is killed and started again, sessions through the gateway go on."""
    harness.launched("--gateway")
    with harness.session() as session:
        life = session.ask("life")
        harness.provider.kill_engine()
        try:
            assert session.ask("life") == life
            assert harness.ask("life") == life
        finally:
            harness.provider.start_engine()
        harness.until_ready()
        assert session.ask("life") == life
    assert harness.replica()["restarts"] == 0
    harness.machine.run("down", NAME)  # an engine that has just started may be slow
    eventually(lambda: NAME not in harness.names(), within=120)


def test_engine_gone(harness: Harness) -> None:
    """While the engine is away, status says so, and a down is announced for its return."""
    harness.launched()
    harness.launched(name="other")
    assert harness.replica()["message"] is None
    harness.provider.stop_engine()
    try:
        eventually(lambda: harness.replica()["message"], within=60)
        down = harness.machine.run("down", NAME)
        assert down.code != 0, down.text
        assert "engine does not answer" in down.text
        assert "other" in harness.names()
    finally:
        harness.provider.start_engine()
    eventually(lambda: NAME not in harness.names(), within=60)
    eventually(lambda: len(harness.provider.replicas_of(harness.machine)) == 1, within=60)
    harness.until_served("other")
    assert "does not answer" not in (harness.replica("other")["message"] or "")


def test_engine_hangs(harness: Harness) -> None:
    """While the engine hangs, sessions go on; a down ends when the engine answers again."""
    harness.launched()
    with harness.session() as session:
        life = session.ask("life")
        with harness.provider.hung_engine():
            down = harness.machine.ok("down", NAME, "--async").out.strip()
            assert session.ask("life") == life
            assert harness.machine.request(down)["state"] != "SUCCEEDED"
            assert len(harness.run_dirs()) == 1
    harness.machine.run("wait", down)
    eventually(lambda: NAME not in harness.names(), within=60)
    harness.assert_nothing_left()
