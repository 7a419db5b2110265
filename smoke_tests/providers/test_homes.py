# SPDX-License-Identifier: Apache-2.0
"""Separation: homes on the same engine, addresses, ports and tokens."""

import socket
from urllib.error import HTTPError

import pytest

from .conftest import MakeHarness
from .harness import NAME, Harness


def test_two_homes(make_harness: MakeHarness) -> None:
    """Two homes have environments of the same name, and neither sees nor stops the other's."""
    one, other = make_harness("one"), make_harness("other")
    one.launched()
    other.launched()
    lives = [each.ask("life") for each in (one, other)]
    assert len(set(lives)) == 2
    one.machine.ok("down", "--all")
    one.assert_nothing_left()
    assert other.ask("life") == lives[1]
    assert other.replica()["restarts"] == 0
    assert len(other.provider.replicas_of(other.machine)) == 1


def test_loopback(harness: Harness) -> None:
    """Ports are open only on the loopback interface."""
    address = harness.launched()["address"]
    assert address.startswith("http://127.0.0.1:")
    assert harness.listening_at(address) == {"127.0.0.1"}


def test_port(harness: Harness) -> None:
    """An environment has the port that was asked for, also after a restart."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    harness.launched("--port", str(port))
    assert harness.environment()["address"] == f"http://127.0.0.1:{port}"
    harness.tell_server("exit:7")
    harness.until_restarted()
    assert harness.environment()["address"] == f"http://127.0.0.1:{port}"
    assert harness.ask("life")


def test_taken_port(harness: Harness) -> None:
    """A port that is in use is refused with its number, and nothing is left."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = harness.launch("--port", str(port))
    assert answer.code == 1, answer.text
    assert str(port) in answer.err
    harness.assert_nothing_left()


def test_token(harness: Harness) -> None:
    """An environment with a token answers only clients that send it."""
    harness.launched("--token", "auto")
    with pytest.raises(HTTPError) as refused:
        harness.get("/metadata")
    refused.value.close()
    assert refused.value.code == 401
    base_url = harness.machine.ok("address", NAME).out.strip()
    token = base_url.partition("token=")[2]
    harness.get("/metadata", headers={"authorization": f"Bearer {token}"})
    with harness.session(address=base_url) as session:
        assert session.ask("life")
    assert token not in harness.machine.ok("status", "--json").out
