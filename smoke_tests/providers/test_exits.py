# SPDX-License-Identifier: Apache-2.0
"""Exits of replicas that were ready: told by the same `ExitReason`, and followed by a restart."""

from __future__ import annotations

import signal

import pytest
from websockets.exceptions import ConnectionClosed

from ..conftest import eventually
from .harness import NAME, Harness, Json

# What is known of an exit beside how it was: other figures each time, other witnesses.
OF_THIS_EXIT = {"pid", "seconds", "peak_bytes", "victim_pid", "victim_name"}
OF_THE_WITNESS = {"detector", "evidence"}
SAME = {"exit_code": None, "signal_number": None, "signal": None, "limit_bytes": None}
BUDGET_EXITS = 5  # within ten minutes; the next one is the last


def assert_exit(replica: Json, **expected: object) -> None:
    """The exit is the very same value with each provider."""
    told = {k: v for k, v in replica["exit"].items() if k not in OF_THIS_EXIT | OF_THE_WITNESS}
    assert told == {**SAME, "certainty": "certain", **expected}


def test_crash_later(harness: Harness) -> None:
    """A replica that exits later is restarted, at the same address."""
    address = harness.launched()["address"]
    life = harness.ask("life")
    harness.tell_server("exit:7")
    harness.until_restarted()
    with harness.session(address=address) as session:
        assert session.ask("life") != life


def test_exit_code(harness: Harness) -> None:
    """The exit code of a replica is told."""
    harness.launched()
    harness.tell_server("exit:7")
    replica = harness.until_restarted()
    assert_exit(replica, kind="exited", exit_code=7)
    assert "exited with code 7" in replica["message"]


def test_crash_by_signal(harness: Harness) -> None:
    """A replica that crashed is told with the signal's name."""
    harness.launched()
    harness.tell_server(f"signal:{signal.SIGABRT:d}")
    replica = harness.until_restarted()
    assert_exit(replica, kind="signaled", signal_number=int(signal.SIGABRT), signal="SIGABRT")


def test_out_of_memory(harness: Harness) -> None:
    """A replica that runs out of memory is told as such, with its limit, and restarted."""
    harness.launched("--memory", "200M")
    harness.tell_server("hold:400")
    replica = harness.until_restarted()
    killed = {"signal_number": int(signal.SIGKILL), "signal": "SIGKILL"}
    assert_exit(replica, kind="oom_killed", limit_bytes=200 << 20, **killed)
    assert harness.ask("life")


def test_kill_from_outside(harness: Harness) -> None:
    """A replica that somebody kills is restarted, and not taken for one out of memory."""
    harness.launched("--memory", "200M")
    harness.provider.kill(harness.machine, harness.replica(), signal.SIGKILL)
    replica = harness.until_restarted()
    killed = {"signal_number": int(signal.SIGKILL), "signal": "SIGKILL"}
    assert_exit(replica, kind="signaled", limit_bytes=200 << 20, **killed)
    assert harness.ask("life")


def test_clients_see_an_exit(harness: Harness) -> None:
    """A client whose replica exits sees the end of its connection at once."""
    harness.launched()
    with harness.session() as session:
        harness.provider.kill(harness.machine, harness.replica(), signal.SIGKILL)
        with pytest.raises(ConnectionClosed):
            list(session.socket)  # the gateway sends an error before the end


def test_restart_budget(harness: Harness) -> None:
    """A replica that exits again and again is given up, with the reason."""
    harness.launched()
    for exits in range(BUDGET_EXITS):
        harness.tell_server("exit:7")
        harness.until_restarted(restarts=exits + 1)
    harness.tell_server("exit:7")
    eventually(lambda: harness.environment()["state"] == "FAILED", within=60)
    assert harness.replica()["state"] == "FAILED"
    message = harness.environment()["error"]["message"]
    assert "exited with code 7" in message
    assert "exited 6 times" in message
    harness.machine.ok("down", NAME)
    harness.assert_nothing_left()


def test_one_of_two_replicas_exits(harness: Harness) -> None:
    """When one of two replicas exits, the sessions of the other go on."""
    harness.launched("--replicas", "2")
    ids = sorted(replica["id"] for replica in harness.environment()["replicas"])
    with harness.sessions_at(ids) as sessions:
        lost, kept = ids
        harness.provider.kill(harness.machine, harness.replica_of(lost), signal.SIGKILL)
        with pytest.raises(ConnectionClosed):
            list(sessions[lost].socket)  # the gateway sends an error before the end
        assert sessions[kept].ask("life")
    eventually(lambda: harness.replica_of(lost)["state"] == "READY", within=60)
    assert harness.replica_of(kept)["restarts"] == 0
