# SPDX-License-Identifier: Apache-2.0
"""Shards as processes: they share a socket, fill up, hand over, and die without the others."""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, Host, until
from ..raw import HEAD


def test_shards_come_with_the_sessions_and_all_but_the_last_go_with_them(serve: StartHost) -> None:
    host = serve(shards=3, max_sessions=12, env={"LINGER": "0.2"})
    assert len(host.children()) == 1
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(host.open()).ask("reset")
        until(lambda: len(host.children()) == 3)
    until(lambda: len(host.children()) == 1)
    with host.open() as one, host.open() as two:
        assert {client.ask("reset")["type"] for client in (one, two)} == {"observation"}
        # Three where one was slow to take its session: it went to the next, which is in use.
        assert 2 <= len(host.children()) <= 3
    until(lambda: len(host.children()) == 1)
    assert host.log.read_text() == ""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="the score is Linux's")
def test_the_kernel_picks_a_shard_before_the_host_that_tells_its_clients(serve: StartHost) -> None:
    host = serve(shards=2, max_sessions=4)
    pids = [host.process.pid, *(shard.pid for shard in host.children())]
    own, *theirs = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in pids]
    assert theirs
    assert set(theirs) == {own + 200}


@pytest.mark.parametrize("count", [1, 2])
def test_before_the_first_connection_no_shard_is_kept(serve: StartHost, count: int) -> None:
    host = serve(shards=count, max_sessions=4, env={"LINGER": "0.2"})
    until(lambda: not host.children())
    before = psutil.Process(host.process.pid).cpu_times()
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"
    until(lambda: len(host.children()) == 1)
    time.sleep(1.0)  # what must not be: a supervisor that is busy, or that stops the last shard
    after = psutil.Process(host.process.pid).cpu_times()
    assert after.user + after.system - before.user - before.system < 0.5
    assert len(host.children()) == 1
    assert host.stop() == 0


def test_all_slots_of_all_shards_can_be_taken_at_once(serve: StartHost) -> None:
    """The fullest shard does not refuse while another has room."""
    host = serve(shards=4, max_sessions=40)
    with ExitStack() as stack, ThreadPoolExecutor(40) as pool:
        clients = list(pool.map(lambda _: stack.enter_context(host.open()), range(40)))
        assert {c.ask("reset")["type"] for c in clients} == {"observation"}
        by_pid = [client.pid() for client in clients]
        assert {by_pid.count(pid) for pid in set(by_pid)} == {10}
        host.note_that(sessions=40)
        with host.open() as late:
            refusal = late.receive()["data"]
        assert refusal["code"] == "CAPACITY_REACHED"
        assert (refusal["active_sessions"], refusal["max_sessions"]) == (40, 40)
        assert host.http("GET", "/health") == (200, {"status": "healthy"})
    host.note_that(sessions=0)


def test_a_waiting_connection_gets_the_next_free_slot_of_any_process(
    serve: StartHost, isolate: bool
) -> None:
    host = serve(shards=2, max_sessions=2, isolate=isolate, admission_timeout_seconds=WAIT_SECONDS)
    for _ in range(4):
        with host.open() as first, host.open() as second, ThreadPoolExecutor(1) as pool:
            first.ask("reset")
            second.ask("reset")
            waiting = pool.submit(lambda: host.open().__enter__())
            first.leave()
            third = waiting.result(WAIT_SECONDS)
            assert third.ask("reset")["type"] == "observation"
            third.connection.close()


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("kill", "was killed by SIGKILL"),
        ("segfault", "was killed by SIGSEGV"),
        ("exit_at_once", "exited with code 5"),
    ],
)
def test_a_killed_process_ends_its_own_sessions_alone(
    serve: StartHost, what: str, how: str, isolate: bool
) -> None:
    host = serve(shards=2, max_sessions=8, isolate=isolate)
    with ExitStack() as stack:
        clients = [stack.enter_context(host.open()) for _ in range(8)]
        pids = [client.pid() for client in clients]
        doomed = pids[0]
        clients[0].send("step", {"what": what})
        for client, pid in zip(clients, pids, strict=True):
            if pid != doomed:
                assert client.pid() == pid
                continue
            answer, code = client.last_word()
            assert (answer["type"], answer["data"]["code"]) == ("error", "SESSION_ERROR")
            assert how in answer["data"]["message"]
            assert f"pid {doomed}" in answer["data"]["message"]
            assert "openenv logs sample says more" in answer["data"]["message"]
            assert code == 1011
        told = host.note_that_has("shard_exit")
        sessions = 1 if isolate else 4
        assert (told["pid"], told["sessions"], told["isolated"]) == (doomed, sessions, isolate)
    host.emptied()


def test_a_process_that_is_told_to_stop_by_another_says_so(serve: StartHost, isolate: bool) -> None:
    host = serve(shards=1, max_sessions=2, isolate=isolate)
    with host.open() as bystander, host.open() as client:
        bystander.ask("reset")
        client.ask("reset")
        client.send("step", {"what": "terminate"})
        while (answer := client.receive())["type"] != "error":  # the step's own answer may be first
            pass
        how = "killed" if isolate else "stopped"
        assert f"was {how} by SIGTERM" in answer["data"]["message"]
        told = host.note_that_has("shard_exit")
        assert os.waitstatus_to_exitcode(told["wait_status"]) == -signal.SIGTERM
        assert told["sessions"] == (1 if isolate else 2)
        if isolate:
            assert bystander.ask("step", {})["type"] == "observation"
    with host.open() as later:
        assert later.ask("reset")["type"] == "observation"


def test_an_exit_counts_the_sessions_without_a_websocket_too(serve: StartHost) -> None:
    host = serve(shards=1, max_sessions=4)
    for _ in range(2):
        host.create_session()
    with host.open() as client:
        client.send("step", {"what": "kill"})
        client.last_word()
    assert host.note_that_has("shard_exit")["sessions"] == 3


def test_a_shard_that_cannot_be_forked_is_retried(serve: StartHost) -> None:
    host = serve(shards=2, max_sessions=2, env={"NO_ROOM": "3 4"}, admission_timeout_seconds=30.0)
    with host.open() as first, host.open() as second:
        first.ask("reset")
        second.send("step", {"what": "kill"})
        second.last_word()
        with host.open() as third:
            assert third.ask("reset")["type"] == "observation"
        assert first.ask("reset")["type"] == "observation"
    assert "could not be started" in host.log.read_text()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"NO_ROOM": "1"}, "shard 0 could not be started"),
        ({"FAIL_SHARDS": "1"}, "before it could serve"),
    ],
    ids=["cannot be forked", "exits at once"],
)
def test_the_host_fails_when_no_first_shard_serves(
    start: StartHost, env: dict[str, str], expected: str
) -> None:
    host = start(shards=2, max_sessions=2, env=env)
    assert expected in host.note_that_has("failed")
    assert host.process.wait(WAIT_SECONDS) == 3


@contextlib.contextmanager
def accepted(host: Host, *, said: bytes = b"") -> Iterator[socket.socket]:
    """A connection that a shard has accepted, and has read this of."""
    with socket.create_connection(("127.0.0.1", host.port)) as connection:
        connection.settimeout(WAIT_SECONDS)
        connection.sendall(said)
        for _ in range(2):  # the socket's queue keeps the order; the loop reads what there is
            host.http("GET", "/health")
        yield connection


@pytest.mark.parametrize("said", [b"", HEAD[:40], HEAD])
def test_an_unanswered_connection_of_a_killed_shard_ends_and_the_next_is_served(
    serve: StartHost, said: bytes
) -> None:
    host = serve(max_sessions=1, admission_timeout_seconds=WAIT_SECONDS)
    with host.open() as first:
        first.ask("reset")
        with accepted(host, said=said) as connection:
            host.children()[0].kill()
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1000) == b""
        assert "was killed by SIGKILL" in first.last_word()[0]["data"]["message"]
    with host.open() as second:
        assert second.ask("reset")["type"] == "observation"


def test_the_host_keeps_no_descriptor_of_closed_connections(serve: StartHost) -> None:
    host = serve()
    before = descriptors(host)
    for _ in range(10):
        with accepted(host), accepted(host, said=HEAD[:40]), host.open() as client:
            client.ask("reset")
    until(lambda: descriptors(host) < before + 10)  # it opens files of its own now and then


def descriptors(host: Host) -> int:
    return psutil.Process(host.process.pid).num_fds()


def test_a_hung_shard_does_not_keep_clients_from_the_others(serve: StartHost) -> None:
    host = serve("Async", shards=2, max_sessions=8)
    hanging = host.children()[0]
    hanging.suspend()
    try:
        with ExitStack() as stack:
            for _ in range(4):
                assert stack.enter_context(host.open()).ask("reset")["type"] == "observation"
    finally:
        hanging.resume()


@pytest.mark.parametrize("config", [{}, {"shards": 3}, {"isolate": True}])
def test_stopping_tells_each_session_why_and_leaves_no_process(
    serve: StartHost, tmp_path: Path, config: dict[str, Any]
) -> None:
    host = serve(max_sessions=6, **config)
    with ExitStack() as stack:
        clients = [stack.enter_context(host.open()) for _ in range(6)]
        for client in clients:
            client.ask("reset")
        children = host.children()
        assert host.stop() == 0
        for client in clients:
            answer, code = client.last_word()
            assert (answer["data"]["code"], code) == ("SESSION_ERROR", 1001)
    assert not [child for child in children if child.is_running()]
    assert (tmp_path / "closed.log").read_text() == "closed\n" * 6


def test_an_environment_that_starts_threads_at_import_is_served_by_new_programs(
    start: StartHost,
) -> None:
    host = start("threaded:Threaded", shards=2, max_sessions=4)
    assert host.ready()["shards"] == 2
    with ExitStack() as stack:
        clients = [stack.enter_context(host.open()) for _ in range(4)]
        assert len({client.pid() for client in clients}) == 2
        clients[0].send("step", {"what": "kill"})
        assert "SIGKILL" in clients[0].last_word()[0]["data"]["message"]
    assert "left threads running (ticker)" in host.log.read_text()
    assert host.stop() == 0


def test_random_numbers_differ_among_shards(serve: StartHost) -> None:
    host = serve(shards=4, max_sessions=4, admission_timeout_seconds=WAIT_SECONDS)
    with ExitStack() as stack:
        clients = [stack.enter_context(host.open()) for _ in range(4)]
        answers = [json.dumps(c.ask("step", {"what": "random"})) for c in clients]
    assert len(set(answers)) == 4


def test_a_process_started_by_an_environment_holds_no_connection_open(serve: StartHost) -> None:
    """The last process to have a copy of a socket decides when its client sees the end."""
    host = serve(shards=1, max_sessions=3)
    with host.open() as first:
        doomed = first.pid()
        with host.open() as second:
            second.ask("reset")
            first.send("step", {"what": "kill"})  # the successor is forked now
            first.last_word()
            second.last_word()
        assert doomed not in {child.pid for child in host.children()}


def test_a_connection_in_the_inbox_of_a_killed_shard_goes_to_its_next_process(
    serve: StartHost,
) -> None:
    """What is in a shard's inbox outlives it.

    The doomed shard is stopped while a newcomer comes, so it is the other where that waits. Then
    the doomed one gets room, and stops itself before it can look into its inbox.
    """
    host = serve("Stopping", shards=2, max_sessions=2, admission_timeout_seconds=WAIT_SECONDS)
    with host.open() as first, host.open() as second, ThreadPoolExecutor(1) as pool:
        doomed = second.pid()
        assert first.pid() != doomed
        second.ask("step", {"what": "stop_when_free"})
        os.kill(doomed, signal.SIGSTOP)
        waiting = pool.submit(lambda: host.open().__enter__())
        host.until(lambda capacity: capacity["waiting"] == 1)
        second.send("close")
        os.kill(doomed, signal.SIGCONT)
        while psutil.Process(doomed).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)  # it must not be asked meanwhile: it would not answer
        host.until(
            lambda capacity: sum(s["totals"]["handed_over"] for s in capacity["shards"]) >= 1
        )
        assert not waiting.done()
        os.kill(doomed, signal.SIGKILL)
        third = waiting.result(WAIT_SECONDS)
        assert third.pid() not in (doomed, first.pid())
        third.connection.close()
