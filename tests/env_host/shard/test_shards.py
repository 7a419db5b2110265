# SPDX-License-Identifier: Apache-2.0
"""Shards as processes: they share a socket, fill up, hand over, and die without the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, Client, Host, wait_until_exited

ABRUPT_ENDS = [
    ("kill", "was killed by SIGKILL"),
    ("segfault", "crashed with SIGSEGV"),
    ("exit_at_once", "exited with code 5"),
]


def shards(host: Host) -> list[psutil.Process]:
    return psutil.Process(host.process.pid).children()


def pid_of(client: Client) -> int:
    answer = client.ask("step", {"what": "pid"})
    return int(answer["data"]["observation"]["text"])


def last_word(client: Client) -> tuple[dict[str, Any], int]:
    """What the client is told, and the code of the close."""
    answer = client.receive()
    with pytest.raises(ConnectionClosed) as closed:
        client.receive()
    assert closed.value.rcvd is not None
    return answer, closed.value.rcvd.code


def test_ready_has_the_number_of_shards(start: StartHost) -> None:
    host = start(shards=3, max_sessions=12)
    assert host.ready().items() >= {"max_sessions": 12, "shards": 3, "isolate": False}.items()


def test_shards_come_with_the_sessions(start: StartHost) -> None:
    host = start(shards=3, max_sessions=12)
    host.ready()
    assert len(shards(host)) == 1
    with ExitStack() as stack:
        clients = [stack.enter_context(host.open()) for _ in range(5)]
        assert len({pid_of(client) for client in clients}) == 3
    assert len(shards(host)) == 3


def until_shards(host: Host, count: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while len(shards(host)) != count:
        assert time.monotonic() < deadline, shards(host)
        time.sleep(0.01)


def test_shards_that_are_not_needed_are_stopped_but_for_the_last(start: StartHost) -> None:
    host = start(shards=3, max_sessions=12, env={"LINGER": "0.2"})
    host.ready()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(host.open()).ask("reset")
        until_shards(host, 3)
    until_shards(host, 1)
    with host.open() as one, host.open() as two:
        assert {client.ask("reset")["type"] for client in (one, two)} == {"observation"}
        # Three where one was slow to take its session: it went to the next, which is in use.
        assert 2 <= len(shards(host)) <= 3
    until_shards(host, 1)
    assert host.log.read_text() == ""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="the score is Linux's")
def test_the_kernel_picks_a_shard_before_the_host_that_tells_its_clients(start: StartHost) -> None:
    host = start(shards=2, max_sessions=4)
    host.ready()
    pids = [host.process.pid, *(shard.pid for shard in shards(host))]
    own, *theirs = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in pids]
    assert theirs
    assert set(theirs) == {own + 200}


@pytest.mark.parametrize("count", [1, 2])
def test_before_the_first_connection_no_shard_is_kept(start: StartHost, count: int) -> None:
    host = start(shards=count, max_sessions=4, env={"LINGER": "0.2"})
    host.ready()
    until_shards(host, 0)
    before = psutil.Process(host.process.pid).cpu_times()
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"
    until_shards(host, 1)
    time.sleep(1.0)  # what must not be: a supervisor that is busy, or that stops the last shard
    after = psutil.Process(host.process.pid).cpu_times()
    assert after.user + after.system - before.user - before.system < 0.5
    assert len(shards(host)) == 1
    assert host.stop() == 0


def test_all_slots_of_all_shards_can_be_taken_at_once(start: StartHost) -> None:
    """The fullest shard does not refuse while another has room."""
    host = start(shards=4, max_sessions=40)
    host.ready()
    with ExitStack() as stack, ThreadPoolExecutor(40) as pool:
        clients = list(pool.map(lambda _: stack.enter_context(host.open()), range(40)))
        assert {c.ask("reset")["type"] for c in clients} == {"observation"}
        by_pid = [pid_of(client) for client in clients]
        assert {by_pid.count(pid) for pid in set(by_pid)} == {10}
        with host.open() as late:
            refusal = late.receive()["data"]
        assert refusal["code"] == "CAPACITY_REACHED"
        assert (refusal["active_sessions"], refusal["max_sessions"]) == (40, 40)


def test_http_is_answered_while_all_slots_are_taken(start: StartHost) -> None:
    host = start(shards=2, max_sessions=2)
    host.ready()
    with host.open() as first, host.open() as second:
        first.ask("reset")
        second.ask("reset")
        assert host.http("GET", "/health") == (200, {"status": "healthy"})


def test_the_number_of_sessions_of_all_shards_is_reported_to_the_shim(start: StartHost) -> None:
    host = start(shards=2, max_sessions=4)
    host.ready()
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(host.open()).ask("reset")
        host.note_that(sessions=4)
    host.note_that(sessions=0)


def test_a_waiting_connection_gets_the_next_free_slot_of_any_shard(start: StartHost) -> None:
    host = start(shards=2, max_sessions=2, admission_timeout_seconds=WAIT_SECONDS)
    host.ready()
    for _ in range(4):
        with host.open() as first, host.open() as second, ThreadPoolExecutor(1) as pool:
            first.ask("reset")
            second.ask("reset")
            waiting = pool.submit(lambda: host.open().__enter__())
            first.send("close")
            with pytest.raises(ConnectionClosed):
                first.receive()
            third = waiting.result(WAIT_SECONDS)
            assert third.ask("reset")["type"] == "observation"
            third.connection.close()


def test_a_connection_that_waited_too_long_is_refused_with_the_session_counts(
    start: StartHost,
) -> None:
    host = start(max_sessions=1, admission_timeout_seconds=0.2)
    host.ready()
    with host.open() as first:
        first.ask("reset")
        with host.open() as second:
            assert second.receive()["data"]["code"] == "CAPACITY_REACHED"
        assert first.ask("reset")["type"] == "observation"


def test_a_client_that_leaves_while_waiting_takes_no_slot(start: StartHost) -> None:
    host = start(max_sessions=1, admission_timeout_seconds=WAIT_SECONDS)
    host.ready()
    with host.open() as first:
        first.ask("reset")
        with pytest.raises(TimeoutError):
            host.open_within(0.3)
        first.send("close")
        with pytest.raises(ConnectionClosed):
            first.receive()
    with host.open() as second:
        assert second.ask("reset")["type"] == "observation"


@pytest.mark.parametrize(("what", "how"), ABRUPT_ENDS)
def test_a_killed_shard_ends_its_own_sessions_alone(start: StartHost, what: str, how: str) -> None:
    host = start(shards=2, max_sessions=8)
    host.ready()
    with ExitStack() as stack:
        clients = [stack.enter_context(host.open()) for _ in range(8)]
        pids = [pid_of(client) for client in clients]
        doomed = pids[0]
        clients[0].send("step", {"what": what})
        for client, pid in zip(clients, pids, strict=True):
            if pid != doomed:
                assert pid_of(client) == pid
                continue
            answer, code = last_word(client)
            assert (answer["type"], answer["data"]["code"]) == ("error", "SESSION_ERROR")
            assert how in answer["data"]["message"]
            assert f"pid {doomed}" in answer["data"]["message"]
            assert code == 1011
        told = next_exit(host)
        assert (told["pid"], told["sessions"], told["isolated"]) == (doomed, 4, False)


def test_an_exit_counts_the_sessions_without_a_websocket_too(start: StartHost) -> None:
    host = start(shards=1, max_sessions=4)
    host.ready()
    create = {"jsonrpc": "2.0", "method": "openenv/session/create", "id": 1}
    for _ in range(2):
        assert host.http("POST", "/mcp", create)[1]["result"]["session_id"]
    with host.open() as client:
        client.send("step", {"what": "kill"})
        last_word(client)
    assert next_exit(host)["sessions"] == 3


def next_exit(host: Host) -> dict[str, Any]:
    while (note := host.note()) is not None:
        if "shard_exit" in note:
            exit_: dict[str, Any] = note["shard_exit"]
            return exit_
    raise AssertionError("no shard_exit")


def test_a_killed_shard_is_restarted_and_serves_again(start: StartHost) -> None:
    host = start(shards=1, max_sessions=2)
    host.ready()
    seen = set()
    for _ in range(4):
        with host.open() as client:
            client.ask("reset")
            seen.add(pid_of(client))
            client.send("step", {"what": "kill"})
            last_word(client)
    assert len(seen) == 4
    assert host.stop() == 0


def test_a_shard_that_cannot_be_forked_is_retried(start: StartHost) -> None:
    host = start(shards=2, max_sessions=2, env={"NO_ROOM": "3 4"}, admission_timeout_seconds=30.0)
    host.ready()
    with host.open() as first, host.open() as second:
        first.ask("reset")
        second.send("step", {"what": "kill"})
        last_word(second)
        with host.open() as third:
            assert third.ask("reset")["type"] == "observation"
        assert first.ask("reset")["type"] == "observation"
    assert "could not be started" in host.log.read_text()


def test_the_host_fails_when_a_first_shard_cannot_be_forked(start: StartHost) -> None:
    host = start(shards=2, max_sessions=2, env={"NO_ROOM": "1"})
    note = host.note()
    assert note is not None
    assert "shard 0 could not be started" in note["failed"]
    assert host.process.wait(WAIT_SECONDS) == 3


def handed_over(capacity: dict[str, Any]) -> int:
    return sum(shard["totals"]["handed_over"] for shard in capacity["shards"])


def test_a_connection_in_the_inbox_of_a_killed_shard_goes_to_its_next_process(
    start: StartHost,
) -> None:
    """What is in a shard's inbox outlives it.

    The doomed shard is stopped while a newcomer comes, so it is the other where that waits. Then
    the doomed one gets room, and stops itself before it can look into its inbox.
    """
    host = start("Stopping", shards=2, max_sessions=2, admission_timeout_seconds=WAIT_SECONDS)
    host.ready()
    with host.open() as first, host.open() as second, ThreadPoolExecutor(1) as pool:
        doomed = pid_of(second)
        assert pid_of(first) != doomed
        second.ask("step", {"what": "stop_when_free"})
        os.kill(doomed, signal.SIGSTOP)
        waiting = pool.submit(lambda: host.open().__enter__())
        host.until(lambda capacity: capacity["waiting"] == 1)
        second.send("close")
        os.kill(doomed, signal.SIGCONT)
        while psutil.Process(doomed).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)  # it must not be asked meanwhile: it would not answer
        host.until(lambda capacity: handed_over(capacity) >= 1)  # again, if it is taken back
        assert not waiting.done()
        os.kill(doomed, signal.SIGKILL)
        third = waiting.result(WAIT_SECONDS)
        assert pid_of(third) not in (doomed, pid_of(first))
        third.connection.close()


HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@contextlib.contextmanager
def accepted(host: Host, *, said: bytes = b"") -> Iterator[socket.socket]:
    """A connection that a shard has accepted, and has read this of."""
    with socket.create_connection(("127.0.0.1", host.port)) as connection:
        connection.settimeout(WAIT_SECONDS)
        connection.sendall(said)
        for _ in range(2):  # the socket's queue keeps the order; the loop reads what there is
            host.http("GET", "/health")
        yield connection


@pytest.mark.parametrize("said", [b"", HANDSHAKE[:40], HANDSHAKE])
def test_an_unanswered_connection_of_a_killed_shard_ends_and_the_next_is_served(
    start: StartHost, said: bytes
) -> None:
    host = start(max_sessions=1, admission_timeout_seconds=WAIT_SECONDS)
    host.ready()
    with host.open() as first:
        first.ask("reset")
        with accepted(host, said=said) as connection:
            shards(host)[0].kill()
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1000) == b""
        assert "was killed by SIGKILL" in last_word(first)[0]["data"]["message"]
    with host.open() as second:
        assert second.ask("reset")["type"] == "observation"


def test_the_host_keeps_no_descriptor_of_closed_connections(start: StartHost) -> None:
    host = start()
    host.ready()
    before = descriptors(host)
    with accepted(host), accepted(host, said=HANDSHAKE[:40]), host.open() as client:
        client.ask("reset")
        assert descriptors(host) == before + 1
    deadline = time.monotonic() + WAIT_SECONDS
    while descriptors(host) > before:
        assert time.monotonic() < deadline
        host.http("GET", "/health")


def descriptors(host: Host) -> int:
    return psutil.Process(host.process.pid).num_fds()


def test_a_hung_shard_does_not_keep_clients_from_the_others(start: StartHost) -> None:
    host = start("Async", shards=2, max_sessions=8)
    host.ready()
    hanging = shards(host)[0]
    hanging.suspend()
    try:
        with ExitStack() as stack:
            for _ in range(4):
                assert stack.enter_context(host.open()).ask("reset")["type"] == "observation"
    finally:
        hanging.resume()


def test_when_the_host_is_killed_no_shard_survives(start: StartHost) -> None:
    host = start(shards=3, max_sessions=9)
    host.ready()
    children = shards(host)
    with host.open() as client:
        client.ask("reset")
        host.process.kill()
        wait_until_exited(children)


def test_stopping_closes_the_sessions_of_all_shards_with_the_reason(start: StartHost) -> None:
    host = start(shards=3, max_sessions=6)
    host.ready()
    children = shards(host)
    with ExitStack() as stack:
        clients = [stack.enter_context(host.open()) for _ in range(6)]
        for client in clients:
            client.ask("reset")
        assert host.stop() == 0
        for client in clients:
            answer, code = last_word(client)
            assert answer["data"]["code"] == "SESSION_ERROR"
            assert code == 1001
    assert not [child for child in children if child.is_running()]


def test_an_environment_that_starts_threads_at_import_is_served_by_new_programs(
    start: StartHost,
) -> None:
    host = start("threaded:Threaded", shards=2, max_sessions=4)
    assert host.ready()["shards"] == 2
    with ExitStack() as stack:
        clients = [stack.enter_context(host.open()) for _ in range(4)]
        assert len({pid_of(client) for client in clients}) == 2
        clients[0].send("step", {"what": "kill"})
        assert "SIGKILL" in last_word(clients[0])[0]["data"]["message"]
    assert "left threads running (ticker)" in host.log.read_text()
    assert host.stop() == 0


def test_random_numbers_differ_among_shards(start: StartHost) -> None:
    host = start(shards=4, max_sessions=4)
    host.ready()
    with ExitStack() as stack:
        clients = [stack.enter_context(host.open()) for _ in range(4)]
        answers = [json.dumps(c.ask("step", {"what": "random"})) for c in clients]
    assert len(set(answers)) == 4


def test_a_process_started_by_an_environment_holds_no_connection_open(start: StartHost) -> None:
    """The last process to have a copy of a socket decides when its client sees the end."""
    host = start(shards=1, max_sessions=3)
    host.ready()
    with host.open() as first:
        doomed = pid_of(first)
        with host.open() as second:
            second.ask("reset")
            first.send("step", {"what": "kill"})  # the successor is forked now
            last_word(first)
            last_word(second)
        assert doomed not in {child.pid for child in shards(host)}


def test_a_startup_that_fails_in_every_shard_fails_the_host(start: StartHost) -> None:
    host = start("samples:Counter", shards=2, max_sessions=2, env={"FAIL_SHARDS": "1"})
    note = host.note()
    assert note is not None
    assert "ready" not in note
    assert "before it could serve" in note["failed"]
    assert host.process.wait(WAIT_SECONDS) == 3


def test_many_clients_at_once_all_get_one_of_few_slots_in_the_end(start: StartHost) -> None:
    host = start(shards=3, max_sessions=6, admission_timeout_seconds=WAIT_SECONDS)
    host.ready()
    done = threading.Semaphore(0)

    def play(_: int) -> str:
        with host.open() as client:
            kind: str = client.ask("reset")["type"]
            done.release()
            return kind

    with ThreadPoolExecutor(30) as pool:
        assert set(pool.map(play, range(30))) == {"observation"}
