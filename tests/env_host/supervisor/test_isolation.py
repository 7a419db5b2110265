# SPDX-License-Identifier: Apache-2.0
"""Isolated sessions: a process for each, forked from the host."""

import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from websockets.exceptions import ConnectionClosed

from openenvd.env_host.supervisor import session_processes
from openenvd.env_host.supervisor.children import Children
from openenvd.env_host.supervisor.session_processes import Orphans
from openenvd.system.memory.cgroups import GroupsBelow
from openenvd.system.process.exit_reason import ExitReason
from openenvd.system.text.json_lines import Json

from ..conftest import StartHost
from ..hosts import WAIT_SECONDS, until, wait_until_exited
from ..raw import HEAD

MEGABYTE = 2**20


def test_many_isolated_sessions_killed_at_once_end_no_others(serve: StartHost) -> None:
    """The host hears of deaths and of the ends of their links in any order."""
    host = serve(isolate=True, max_sessions=17, admission_timeout_seconds=WAIT_SECONDS)

    def die(_: int) -> str:
        with host.open() as client:
            client.ask("reset")
            client.send("step", {"what": "kill"})
            return str(client.last_word()[0]["data"]["code"])

    with host.open() as survivor, ThreadPoolExecutor(16) as pool:
        survivor.ask("reset")
        assert set(pool.map(die, range(48))) == {"SESSION_ERROR"}
        assert survivor.ask("reset")["type"] == "observation"
    host.emptied()
    assert host.stop() == 0


def test_a_client_hears_of_a_process_that_exits_before_it_has_begun(serve: StartHost) -> None:
    host = serve(isolate=True, max_sessions=2, env={"FAIL_SESSIONS": "1"})
    with host.open() as client:
        assert "exited with code 9" in client.last_word()[0]["data"]["message"]
    assert host.note_that_has("shard_exit")["isolated"]
    host.emptied()


def test_only_the_session_whose_process_cannot_be_forked_is_refused(serve: StartHost) -> None:
    """As when the machine allows no more processes."""
    host = serve("Single", max_sessions=2, env={"NO_COPIES": "2 3", "SPARES": "0"})
    with host.open() as first:
        first.ask("reset")
        for _ in range(2):
            with host.open() as refused:
                told = refused.last_word()[0]["data"]["message"]
                assert "process of another session cannot" in told
        with host.open() as second:
            assert second.ask("reset")["type"] == "observation"
        assert first.ask("reset")["type"] == "observation"
    host.emptied()


def test_isolated_sessions_end_with_their_shard_alone(serve: StartHost) -> None:
    host = serve("Single", shards=2, max_sessions=4)
    with ExitStack() as stack:
        clients = [stack.enter_context(host.open()) for _ in range(4)]
        processes = [psutil.Process(client.pid()) for client in clients]
        shard = host.http("GET", "/capacity")[1]["shards"][0]
        psutil.Process(shard["pid"]).kill()
        told = host.note_that_has("shard_exit")
        assert (told["pid"], told["isolated"], told["sessions"]) == (shard["pid"], False, 2)
        until(lambda: sum(each.is_running() for each in processes) == 2)
        for client, process in zip(clients, processes, strict=True):
            if process.is_running():
                assert client.ask("reset")["type"] == "observation"
            else:
                assert "was killed by SIGKILL" in client.last_word()[0]["data"]["message"]
    wait_until_exited(processes)
    assert host.stop() == 0


def test_a_client_that_does_not_wait_for_its_handshake_harms_no_other(
    serve: StartHost,
) -> None:
    """What it has sent already goes with its connection, as far as it fits."""
    host = serve("Single", max_sessions=1)
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


def test_a_hung_front_learns_of_all_free_slots_later(serve: StartHost) -> None:
    host = serve("Single", max_sessions=12)
    (front,) = host.children()
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(host.open()).ask("reset")
        front.suspend()
    front.resume()
    host.emptied()


@pytest.mark.parametrize("is_watched", [False, True], ids=["by the kernel", "by a watchdog"])
def test_a_session_over_its_cap_is_killed_alone(serve: StartHost, is_watched: bool) -> None:
    if not is_watched and (why := GroupsBelow().why_not):
        pytest.skip(f"no memory cgroups: {why}")
    env = {"NO_CGROUPS": "1"} if is_watched else {}
    host = serve("Single", max_sessions=2, session_memory_mb=64, env=env)
    with host.open() as hungry, host.open() as other:
        other.ask("reset")
        hungry.send("step", {"what": "eat"})
        answer, _ = hungry.last_word()
        assert other.step("count")
    told = host.note_that_has("shard_exit")
    assert told["out_of_memory"]
    assert told["reason"]["limit_bytes"] == 64 * MEGABYTE
    assert told["reason"]["evidence"]
    how = ExitReason.from_json(told["reason"]).sentence()
    assert re.search(r"for memory at \d+ MB; its limit was 64 MB \(", how)
    assert how in answer["data"]["message"]  # the words of `status`
    assert f"{how}\n" in host.log.read_text()
    assert ("their memory is checked" in host.log.read_text()) is is_watched


def test_without_a_cgroup_a_replica_over_its_limit_loses_the_process_that_holds_most(
    serve: StartHost, isolate: bool
) -> None:
    host = serve(isolate=isolate, max_sessions=2, memory_bytes=160 * MEGABYTE)
    with host.open() as hungry:
        hungry.send("step", {"what": "eat"})
        message = hungry.last_word()[0]["data"]["message"]
    assert "its replica's processes may use 160 MB together (checked each 0.25 s" in message
    told = host.note_that_has("shard_exit")
    assert (told["out_of_memory"], told["isolated"]) == (False, isolate)
    assert told["reason"]["detector"] == "watchdog"
    with host.open() as next_one:
        assert next_one.ask("reset")["type"] == "observation"


@pytest.mark.parametrize(("asked", "says"), [(None, 1), (2, 0)])
def test_a_launch_says_for_how_many_isolated_sessions_memory_leaves_room(
    start: StartHost, asked: int | None, says: int
) -> None:
    ready = start("Single", memory_bytes=300 * MEGABYTE, max_sessions=asked).ready()
    told = [note for note in ready.get("notes", ()) if "--memory leaves room for 3 at" in note]
    assert (ready["isolate"], len(told)) == (True, says)


# The processes of an isolated session: a group of their own, which ends with the session


SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STARTERS = """
import os, signal, subprocess, sys
from plain import Bare, Seen

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
LEAVE = "import subprocess as s, sys; print(s.Popen(sys.argv[1:], stdout=s.DEVNULL).pid)"


class Starter(Bare):
    def reset(self, **kwargs):
        return Seen(pids=[os.getpid()])

    def step(self, action):
        if action.how == "child":
            return Seen(pids=[subprocess.Popen(SLEEP).pid])
        if action.how == "session":
            return Seen(pids=[subprocess.Popen(SLEEP, start_new_session=True).pid])
        if action.how in ("orphan", "daemon"):
            command = [sys.executable, "-c", LEAVE, *SLEEP]
            is_daemon = action.how == "daemon"
            done = subprocess.run(command, stdout=-1, start_new_session=is_daemon)
            return Seen(pids=[int(done.stdout)])
        if action.how.startswith("SIG"):
            os.killpg(os.getpgrp(), getattr(signal, action.how))
        if action.how == "abort":
            os.abort()
        return Seen(pids=[os.getpid()])
"""


def processes(answer: Json) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in answer["data"]["observation"]["pids"]]


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("how", ["child", "session", "orphan", "daemon"])
def test_what_an_isolated_session_has_started_ends_with_it(
    serve: StartHost, tmp_path: Path, how: str, is_killed: bool
) -> None:
    (tmp_path / "starters.py").write_text(STARTERS)
    host = serve("starters:Starter", isolate=True, max_sessions=2)
    _, answer = host.http("POST", "/step", {"action": {"how": "daemon"}})
    of_front = processes({"data": answer})
    with host.open() as bystander:
        bystander.ask("reset")
        left = processes(bystander.ask("step", {"how": how}))
        with host.open() as client:
            [session] = processes(client.ask("reset"))
            started = processes(client.ask("step", {"how": how}))
            if is_killed:
                session.kill()
                with pytest.raises(ConnectionClosed):
                    [client.receive() for _ in range(2)]  # the reason
        wait_until_exited(started)
        assert all(each.is_running() for each in left)
    wait_until_exited(left)
    assert all(each.is_running() for each in of_front)
    assert host.stop() == 0
    for each in of_front:
        each.kill()


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "abort"])
def test_a_signal_to_the_group_of_an_isolated_session_is_for_it_alone(
    serve: StartHost, tmp_path: Path, how: str
) -> None:
    (tmp_path / "starters.py").write_text(STARTERS)
    host = serve("starters:Starter", isolate=True, max_sessions=2)
    with host.open() as bystander, host.open() as client:
        before = bystander.ask("reset")
        client.ask("reset")
        started = processes(client.ask("step", {"how": "child"}))
        client.send("step", {"how": how})
        with pytest.raises(ConnectionClosed):
            [client.receive() for _ in range(3)]  # an answer, perhaps, and the reason
        wait_until_exited(started)
        assert bystander.ask("step", {})["data"]["observation"] == before["data"]["observation"]
    assert host.stop() == 0


def test_orphans_that_no_ended_session_can_have_started_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier = subprocess.Popen(SLEEP, start_new_session=True)
    time.sleep(0.05)  # the kernel counts by hundredths
    since = time.monotonic()
    of_group = subprocess.Popen(SLEEP)
    of_session = subprocess.Popen(SLEEP, start_new_session=True)
    orphans = [earlier, of_group, of_session]
    monkeypatch.setattr(session_processes, "children_of", lambda _: [e.pid for e in orphans])
    try:
        Orphans(Children()).look(None, ended_since=since)
        assert of_session.wait(10.0) == -signal.SIGKILL
        assert earlier.poll() is None
        assert of_group.poll() is None
    finally:
        for each in orphans:
            each.kill()
            each.wait()
