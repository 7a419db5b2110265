# SPDX-License-Identifier: Apache-2.0
"""Exits of ready replicas: each provider reports the same `ExitReason` and restarts them."""

import signal

import pytest
from websockets.exceptions import ConnectionClosed

from openenvd.system.text.json_lines import Json

from ..conftest import eventually
from .harness import NAME, Harness

# Facts of an exit that differ between runs and providers.
OF_THIS_EXIT = {"pid", "seconds", "peak_bytes", "victim_pid", "victim_name"}
OF_THE_WITNESS = {"detector", "evidence"}
SAME = {"exit_code": None, "signal_number": None, "signal": None, "limit_bytes": None}
BUDGET_EXITS = 5  # within ten minutes; the next one is the last


def assert_exit(replica: Json, **expected: object) -> None:
    """Assert that the exit has this value, which is equal for all providers."""
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
    """The exit code of a replica is shown."""
    harness.launched()
    harness.tell_server("exit:7")
    replica = harness.until_restarted()
    assert_exit(replica, kind="exited", exit_code=7)
    assert "exited with code 7" in replica["message"]


def test_crash_by_signal(harness: Harness) -> None:
    """A crash of a replica is shown with the signal's name."""
    harness.launched()
    harness.tell_server(f"signal:{signal.SIGABRT:d}")
    replica = harness.until_restarted()
    assert_exit(replica, kind="signaled", signal_number=int(signal.SIGABRT), signal="SIGABRT")


def test_out_of_memory(harness: Harness) -> None:
    """A replica that runs out of memory is restarted; the exit is shown with its limit."""
    harness.launched("--memory", "200M")
    harness.tell_server("hold:400")
    replica = harness.until_restarted()
    killed = {"signal_number": int(signal.SIGKILL), "signal": "SIGKILL"}
    assert_exit(replica, kind="oom_killed", limit_bytes=200 << 20, **killed)
    assert harness.ask("life")


def test_kill_from_outside(harness: Harness) -> None:
    """A replica that a person kills is restarted, and is not reported as out of memory."""
    harness.launched("--memory", "200M")
    harness.provider.kill(harness.machine, harness.replica(), signal.SIGKILL)
    replica = harness.until_restarted()
    killed = {"signal_number": int(signal.SIGKILL), "signal": "SIGKILL"}
    assert_exit(replica, kind="signaled", limit_bytes=200 << 20, **killed)
    assert harness.ask("life")


def test_memory_beyond_the_limit(harness: Harness) -> None:
    """A step beyond the memory limit is killed; client, status and log say why; others go on."""
    harness.launched("--memory", "300M")
    word = harness.tell("hold", 600)
    assert "killed by the kernel for memory at " in word or "ran out of memory" in word, word
    exited = harness.told("killed by the kernel for memory at ")
    assert exited["reason"]["kind"] == "oom_killed"
    assert exited["reason"]["limit_bytes"] == 300 << 20
    assert "300 MB together" in exited["message"]
    assert "--memory 600M" in exited["hint"]
    harness.until_printed("killed by the kernel for memory at ")
    assert harness.ask("life")
    assert harness.replica()["restarts"] == 0


def test_memory_of_a_child(harness: Harness) -> None:
    """A program that a step starts is killed for memory; status shows it; the session goes on."""
    harness.launched("--memory", "300M")
    with harness.session() as session:
        assert session.ask("child_holds", 600) == -signal.SIGKILL
        exited = harness.told("a program that the environment had started")
        assert exited["reason"]["kind"] == "oom_killed"
        assert exited["reason"]["limit_bytes"] == 300 << 20
        assert exited["reason"]["peak_bytes"] > 200 << 20
        harness.until_printed("a program that the environment had started")
        assert session.ask("life")
    assert harness.replica()["restarts"] == 0


@pytest.mark.parametrize("victim", ["hold", "child_holds"])
def test_kill_from_outside_after_one_for_memory(harness: Harness, victim: str) -> None:
    """A replica that a person kills is not reported as out of memory after an earlier such kill."""
    harness.launched("--memory", "300M")
    harness.tell(victim, 600)
    harness.told("killed by the kernel for memory at ")
    harness.provider.kill(harness.machine, harness.replica(), signal.SIGKILL)
    replica = harness.until_restarted()
    killed = {"signal_number": int(signal.SIGKILL), "signal": "SIGKILL"}
    assert_exit(replica, kind="signaled", limit_bytes=300 << 20, **killed)
    assert harness.told("killed by the kernel for memory at ")["reason"]["kind"] == "oom_killed"


def test_crash_of_a_session(harness: Harness) -> None:
    """A crash of a step in C code is shown with its signal to the client, in status and log."""
    harness.launched()
    assert "was killed by SIGSEGV" in harness.tell("signal", int(signal.SIGSEGV))
    exited = harness.told("was killed by SIGSEGV")
    assert exited["reason"]["signal"] == "SIGSEGV"
    harness.until_printed("was killed by SIGSEGV")
    harness.tell("exit", 3)
    harness.told("exited with code 3")
    assert harness.told("was killed by SIGSEGV")
    assert harness.ask("life")
    assert harness.replica()["restarts"] == 0


def test_removed_behind_the_daemons_back(harness: Harness) -> None:
    """A replica that a person removes from its engine is reported as removed, and restarted."""
    harness.launched()
    harness.provider.remove_all(harness.machine)
    replica = harness.until_restarted()
    assert replica["exit"]["kind"] in ("lost", "signaled")
    assert "ended from outside" in replica["message"] or "docker kill" in replica["message"]
    assert harness.ask("life")


def test_deaths_after_the_engine_is_restarted(harness: Harness) -> None:
    """After a restart of the engine, kills for memory and kills by hand are still told apart."""
    harness.launched("--memory", "300M")
    harness.tell("hold", 600)
    harness.told("killed by the kernel for memory at ")
    harness.provider.stop_engine()
    harness.provider.start_engine()
    harness.until_served()
    harness.told("killed by the kernel for memory at ")
    restarts = harness.replica()["restarts"]
    harness.provider.kill(harness.machine, harness.replica(), signal.SIGKILL)
    replica = harness.until_restarted(restarts=restarts + 1)
    assert replica["exit"]["kind"] == "signaled"
    harness.told("killed by the kernel for memory at ")


def test_clients_see_an_exit(harness: Harness) -> None:
    """When a replica exits, its clients' connections end at once."""
    harness.launched()
    with harness.session() as session:
        harness.provider.kill(harness.machine, harness.replica(), signal.SIGKILL)
        with pytest.raises(ConnectionClosed):
            list(session.socket)  # the gateway sends an error before the end


def test_restart_budget(harness: Harness) -> None:
    """A replica that exits again and again is no longer restarted; status shows the reason."""
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
