# SPDX-License-Identifier: Apache-2.0
"""Stopping: sessions get time to close, nothing is left, and the name is free again."""

from ..conftest import eventually
from .harness import NAME, Harness


def test_stop_with_grace(harness: Harness) -> None:
    """Sessions are closed before their replica is stopped."""
    harness.launched()
    with harness.session() as session:
        session.ask("close_slowly", 0.5)
        harness.machine.ok("down", NAME)
    assert "closed" in harness.log().splitlines()
    harness.assert_nothing_left()


def test_stop_after_grace(harness: Harness) -> None:
    """A replica whose sessions do not close in time is killed."""
    harness.launched()
    with harness.session() as session:
        session.ask("close_slowly", 600)
        harness.machine.ok("down", NAME)
    log = harness.log().splitlines()
    assert "closing" in log
    assert "closed" not in log
    harness.assert_nothing_left()


def test_down(harness: Harness) -> None:
    """A down removes everything of an environment: replicas, ports and records."""
    address = harness.launched()["address"]
    harness.machine.ok("down", NAME)
    assert harness.names() == []
    harness.assert_nothing_left()
    eventually(lambda: not harness.listening_at(address))


def test_down_all(harness: Harness) -> None:
    """All environments are taken down at once."""
    for name in ("first", "second"):
        harness.launched(name=name)
    harness.machine.ok("down", "--all")
    assert harness.names() == []
    harness.assert_nothing_left()


def test_down_of_a_crashing_replica(harness: Harness) -> None:
    """A replica that is about to be restarted is taken down, and does not come back."""
    harness.launched()
    harness.tell_server("exit:7")
    harness.machine.ok("down", NAME)
    harness.assert_nothing_left()


def test_name_is_free_again(harness: Harness) -> None:
    """After a down, an environment can be launched with the same name and port."""
    port = harness.chosen_port()
    address = harness.launched(*port)["address"]
    life = harness.ask("life")
    harness.machine.ok("down", NAME)
    again = harness.launched(*port)["address"]
    assert again == address
    assert harness.ask("life") != life
