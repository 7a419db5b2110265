# SPDX-License-Identifier: Apache-2.0
"""A host with a gate gets ready, and accepts nothing before the gate is opened."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import pytest

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, Client, Host

SESSIONS = 20  # that the closed host accepts none of by chance once in a million times
HEADER = "OpenEnvd-Replica"


def replica_of(host: Host) -> str:
    with host.open() as client:
        return reset(client)


def reset(client: Client) -> str:
    assert client.ask("reset")["type"] == "observation"
    response = client.connection.response
    assert response is not None
    return response.headers[HEADER]


@pytest.mark.parametrize("config", [{}, {"shards": 2}, {"isolate": True, "max_sessions": 4}])
def test_a_hosts_successor_takes_its_address_when_the_gate_opens(
    start: StartHost, config: dict[str, Any]
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    reading, writing = os.pipe()
    old = start(listener=listener.dup(), headers={HEADER: "old"}, **config)
    new = start(listener=listener.dup(), gate_fd=reading, headers={HEADER: "new"}, **config)
    os.close(reading)
    listener.close()
    for host in (old, new):
        host.ready()
    assert {replica_of(new) for _ in range(SESSIONS)} == {"old"}
    with old.open() as kept:
        assert reset(kept) == "old"
        os.close(writing)
        old.process.send_signal(signal.SIGUSR2)
        while {replica_of(new) for _ in range(SESSIONS)} != {"new"}:
            pass  # until the old one has taken note
        assert kept.ask("step", {})["type"] == "observation"
        assert old.process.poll() is None
    assert old.process.wait(WAIT_SECONDS) == 0
