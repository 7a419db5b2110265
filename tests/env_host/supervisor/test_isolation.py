# SPDX-License-Identifier: Apache-2.0
"""Isolated sessions: a process for each, forked from the host."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from openenvd.env_host.supervisor.session_memory import SessionGroups

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, Host
from ..raw import HEAD
from ..shard.test_shards import ABRUPT_ENDS, last_word, next_exit, pid_of, shards

MEGABYTE = 2**20


def one_group() -> str | None:
    """Why no session can have a memory cgroup here; None when one can."""
    return SessionGroups().why_not or None


def test_a_class_for_one_session_serves_several_each_in_a_process(start: StartHost) -> None:
    """Upstream refuses the second one."""
    host = start("Single", max_sessions=4)
    assert host.ready().items() >= {"max_sessions": 4, "shards": 1, "isolate": True}.items()
    front = {child.pid for child in shards(host)}
    with ExitStack() as stack:
        clients = [stack.enter_context(host.open()) for _ in range(4)]
        pids = {pid_of(client) for client in clients}
        assert len(pids) == 4
        assert not pids & front
        host.note_that(sessions=4)
        with host.open() as fifth:
            refusal = fifth.receive()["data"]
        assert (refusal["code"], refusal["max_sessions"]) == ("CAPACITY_REACHED", 4)
    host.note_that(sessions=0)
    assert host.stop() == 0


def test_a_process_ends_with_its_session(start: StartHost) -> None:
    host = start("Single", max_sessions=2)
    host.ready()
    with host.open() as client:
        process = psutil.Process(pid_of(client))
        client.send("close")
        with pytest.raises(ConnectionClosed):
            client.receive()
    process.wait(WAIT_SECONDS)
    host.emptied()


def test_a_waiting_connection_gets_the_slot_of_an_isolated_session_that_ends(
    start: StartHost,
) -> None:
    host = start("Single", max_sessions=2, admission_timeout_seconds=WAIT_SECONDS)
    host.ready()
    with host.open() as first, host.open() as second, ThreadPoolExecutor(1) as pool:
        first.ask("reset")
        second.ask("reset")
        waiting = pool.submit(lambda: host.open().__enter__())
        first.send("close")
        third = waiting.result(WAIT_SECONDS)
        assert third.ask("reset")["type"] == "observation"
        third.connection.close()


@pytest.mark.parametrize(("what", "how"), ABRUPT_ENDS)
def test_a_killed_isolated_session_ends_no_other(start: StartHost, what: str, how: str) -> None:
    host = start(isolate=True, max_sessions=3)
    host.ready()
    with host.open() as first, host.open() as second:
        pid = pid_of(first)
        first.send("step", {"what": what})
        answer, code = last_word(first)
        assert answer["data"]["code"] == "SESSION_ERROR"
        assert how in answer["data"]["message"]
        assert code == 1011
        told = next_exit(host)
        assert (told["pid"], told["sessions"], told["isolated"]) == (pid, 1, True)
        assert second.ask("reset")["type"] == "observation"
    host.emptied()


def test_many_isolated_sessions_killed_at_once_end_no_others(start: StartHost) -> None:
    """The host hears of deaths and of the ends of their links in any order."""
    host = start(isolate=True, max_sessions=17, admission_timeout_seconds=WAIT_SECONDS)
    host.ready()

    def die(_: int) -> str:
        with host.open() as client:
            client.ask("reset")
            client.send("step", {"what": "kill"})
            return str(last_word(client)[0]["data"]["code"])

    with host.open() as survivor, ThreadPoolExecutor(16) as pool:
        survivor.ask("reset")
        assert set(pool.map(die, range(48))) == {"SESSION_ERROR"}
        assert survivor.ask("reset")["type"] == "observation"
    host.emptied()
    assert host.stop() == 0


def test_a_session_whose_environment_cannot_be_created_gets_the_reason(start: StartHost) -> None:
    host = start("Broken", isolate=True, max_sessions=1, admission_timeout_seconds=WAIT_SECONDS)
    host.ready()
    for _ in range(3):
        with host.open() as client:
            assert client.receive()["data"]["code"] == "FACTORY_ERROR"


def test_a_handshake_is_refused_when_its_process_exits_first(start: StartHost) -> None:
    host = start(isolate=True, max_sessions=2, env={"FAIL_SESSIONS": "1"})
    host.ready()
    with pytest.raises(InvalidStatus) as refused, host.open():
        pass
    assert refused.value.response.status_code == 503
    assert "exited with code 9" in str(refused.value.response.body)
    assert next_exit(host)["isolated"]


def test_only_the_session_whose_process_cannot_be_forked_is_refused(start: StartHost) -> None:
    """As when the machine allows no more processes."""
    host = start("Single", max_sessions=2, env={"NO_ROOM": "3 4"})
    host.ready()
    with host.open() as first:
        first.ask("reset")
        for _ in range(2):
            with pytest.raises(InvalidStatus) as refused, host.open():
                pass
            assert refused.value.response.status_code == 503
            assert "process of another session cannot" in str(refused.value.response.body)
        with host.open() as second:
            assert second.ask("reset")["type"] == "observation"
        assert first.ask("reset")["type"] == "observation"
    host.emptied()


def test_http_is_answered_by_the_front(start: StartHost) -> None:
    host = start("Single", max_sessions=2)
    host.ready()
    assert host.http("GET", "/health") == (200, {"status": "healthy"})
    assert host.http("POST", "/reset", {})[0] == 200


def test_stopping_ends_isolated_sessions_with_a_reason(start: StartHost) -> None:
    host = start("Single", max_sessions=3)
    host.ready()
    with ExitStack() as stack:
        clients = [stack.enter_context(host.open()) for _ in range(3)]
        processes = [psutil.Process(pid_of(client)) for client in clients]
        assert host.stop() == 0
        assert {last_word(client)[1] for client in clients} == {1001}
    assert not [process for process in processes if process.is_running()]


def test_isolated_sessions_continue_when_the_front_exits(start: StartHost) -> None:
    host = start("Single", max_sessions=2)
    host.ready()
    (front,) = shards(host)
    with host.open() as first:
        pid_of(first)
        front.kill()
        assert next_exit(host)["pid"] == front.pid
        with host.open() as second:
            second.ask("reset")
            with host.open() as third:
                assert third.receive()["data"]["code"] == "CAPACITY_REACHED"
            assert first.ask("reset")["type"] == "observation"


def test_a_client_that_does_not_wait_for_its_handshake_harms_no_other(
    start: StartHost,
) -> None:
    """What it has sent already goes with its connection, as far as it fits."""
    host = start("Single", max_sessions=1)
    host.ready()
    for size in (1_000, 600_000):
        with socket.create_connection(("127.0.0.1", host.port), WAIT_SECONDS) as client:
            with suppress(ConnectionError):
                client.sendall(HEAD + b"x" * size)
            with suppress(ConnectionError):
                while client.recv(65536):
                    pass
        host.emptied()
    with host.open() as next_one:
        assert next_one.ask("reset")["type"] == "observation"


def test_the_memory_of_a_session_is_measured_in_its_process(start: StartHost) -> None:
    """Pages of its own: what it shares with the host is paid once."""
    host = start("Single", max_sessions=2)
    host.ready()
    with host.open() as client:
        whole = psutil.Process(pid_of(client)).memory_info().rss
        while "isolated_session_bytes" not in (told := (host.note() or {}).get("capacity", {})):
            pass
    assert MEGABYTE <= told["isolated_session_bytes"] < whole


def test_a_hung_front_learns_of_all_free_slots_later(start: StartHost) -> None:
    host = start("Single", max_sessions=12)
    host.ready()
    (front,) = shards(host)
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(host.open()).ask("reset")
        front.suspend()
    front.resume()
    host.emptied()


def eats_too_much(host: Host) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the client of a session is told that goes over its cap, and what the shim is."""
    host.ready()
    with host.open() as hungry, host.open() as other:
        other.ask("reset")
        hungry.send("step", {"what": "eat"})
        answer, _ = last_word(hungry)
        assert other.ask("step", {"what": "count"})["type"] == "observation"
    return answer, next_exit(host)


def test_a_session_over_its_cap_is_killed_by_the_kernel_alone(start: StartHost) -> None:
    if (why := one_group()) is not None:
        pytest.skip(f"no memory cgroups: {why}")
    host = start("Single", max_sessions=2, session_memory_mb=64)
    answer, told = eats_too_much(host)
    assert "killed for memory" in answer["data"]["message"]
    assert "64 MB" in answer["data"]["message"]
    assert told["out_of_memory"]
    assert told["limit_bytes"] == 64 * MEGABYTE
    assert "looked at" not in host.log.read_text()


def test_without_cgroups_a_watchdog_kills_sessions_over_their_cap(start: StartHost) -> None:
    host = start(
        "Single", max_sessions=2, session_memory_mb=64,
        env={"NO_CGROUPS": "1"},
    )  # fmt: skip
    answer, told = eats_too_much(host)
    assert "killed for memory" in answer["data"]["message"]
    assert told["out_of_memory"]
    assert "their memory is checked" in host.log.read_text()
