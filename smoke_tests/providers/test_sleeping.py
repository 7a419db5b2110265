# SPDX-License-Identifier: Apache-2.0
"""Sleeping: with `--idle-timeout` behind the gateway, and waking for who connects."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

from ..conftest import eventually
from .harness import NAME, Harness

IDLE_SECONDS = 0.5
SLEEPS = ("--gateway", "--idle-timeout", str(IDLE_SECONDS))
CROWD = 24
ROUNDS = 8


def until_asleep(harness: Harness) -> None:
    """Wait until it sleeps, and nothing of it is left on its engine."""
    eventually(lambda: harness.environment()["state"] == "ASLEEP", within=60)
    eventually(lambda: not harness.provider.replicas_of(harness.machine), within=60)


def test_sleeps_and_wakes(harness: Harness) -> None:
    """One that nobody uses is ended, and started for who connects, by a WebSocket or by HTTP."""
    harness.launched(*SLEEPS)
    life = harness.ask("life")
    until_asleep(harness)
    assert "wakes on connect" in harness.machine.ok("status", NAME).out
    with harness.session() as session:
        other = session.ask("life")
        time.sleep(2 * IDLE_SECONDS)  # a session that is silent keeps it awake
        assert session.ask("life") == other != life
    until_asleep(harness)
    assert harness.get("/health")[0]["status"] == "healthy"
    replica = harness.replica()
    assert (replica["restarts"], replica["exit"]) == (0, None)
    assert replica["wakes"] >= 2


def test_crowd_wakes_it(harness: Harness) -> None:
    """Clients who come at once while it sleeps all get their sessions, of one start."""
    harness.launched("--gateway", "--idle-timeout", "4")
    until_asleep(harness)
    with ThreadPoolExecutor(CROWD) as threads:
        lives = list(threads.map(lambda _: harness.ask("life"), range(CROWD)))
    assert len(set(lives)) == 1
    assert harness.replica()["wakes"] == 1


def test_clients_around_its_sleep(harness: Harness) -> None:
    """No client is refused who comes at the moment at which it is put to sleep."""
    harness.launched(*SLEEPS)
    chance = random.Random(14)
    for _ in range(ROUNDS):
        time.sleep(chance.uniform(0.5 * IDLE_SECONDS, 6 * IDLE_SECONDS))
        assert harness.ask("life")
    replica = harness.replica()
    assert replica["restarts"] == 0
    assert replica["wakes"] > 0


def test_sleeps_of_a_range(harness: Harness) -> None:
    """With `--min 0` the last of several replicas sleeps, and wakes."""
    harness.launched("--min", "0", "--max", "2", "--max-sessions", "4", "--scale-down", "1")
    with harness.session(), harness.session():
        harness.until_all_ready(2)
    until_asleep(harness)
    assert harness.ask("life")


def test_changed_while_it_sleeps(harness: Harness) -> None:
    """One that sleeps is restarted, scaled, updated and taken down as any other."""
    address = harness.launched(*SLEEPS)["address"]
    until_asleep(harness)
    harness.machine.ok("restart", NAME)
    assert harness.ask("life")
    until_asleep(harness)
    harness.machine.ok("scale", NAME, "2")
    harness.until_all_ready(2)
    harness.machine.ok("scale", NAME, "1")
    assert harness.ask("life")
    until_asleep(harness)
    assert harness.launched(*SLEEPS, "-e", "COLOUR=red")["address"] == address
    assert harness.ask("environ", "COLOUR") == "red"
    until_asleep(harness)
    harness.machine.ok("down", NAME)
    harness.assert_nothing_left()


def test_daemon_and_agent_killed_while_it_sleeps(harness: Harness) -> None:
    """The daemon and the agent are killed while it sleeps: it sleeps on, and wakes."""
    harness.launched(*SLEEPS)
    until_asleep(harness)
    harness.machine.kill_daemon()
    harness.kill_agents()
    harness.machine.ok("up")
    if harness.provider.name != "local":  # whose server the daemon starts with another shim
        assert harness.environment()["state"] == "ASLEEP"
    assert harness.ask("life")
    until_asleep(harness)


def test_woken_without_its_engine(harness: Harness) -> None:
    """Who comes while the engine is gone is told so, as status is; it wakes when that is back."""
    harness.launched(*SLEEPS)
    until_asleep(harness)
    harness.provider.stop_engine()
    try:
        refusal = harness.refused() or ""
        told = harness.replica()["message"]
    finally:
        harness.provider.start_engine()
    assert refusal.startswith("503")
    assert told.rstrip(".") in refusal
    harness.until_served()
