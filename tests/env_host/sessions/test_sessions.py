# SPDX-License-Identifier: Apache-2.0
"""Sessions over `/ws`: what a client receives, and what happens to its environment."""

import os
import re
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from ..conftest import Gate, StartHost
from ..hosts import WAIT_SECONDS, Host


def number_of_threads(host: Host) -> int:
    server = psutil.Process(host.process.pid)
    return sum(each.num_threads() for each in (server, *server.children(recursive=True)))


def test_an_asynchronous_step_runs_on_the_event_loop_in_a_task_and_may_time_itself_out(
    serve: StartHost,
) -> None:
    with serve("Async").open() as client:
        for data, text in (({}, "MainThread"), ({"what": "time_out"}, "Task")):
            assert client.ask("step", data)["data"]["observation"]["text"] == text


@pytest.mark.parametrize(
    ("env_class", "what"),
    [("Counter", "exit"), ("Counter", "stop_iteration"), ("Async", "exit"), ("Async", "cancel")],
)
def test_an_exception_that_would_end_its_thread_or_task_fails_the_step_alone(
    serve: StartHost, env_class: str, what: str
) -> None:
    with serve(env_class).open() as client:
        data = client.ask("step", {"what": what})["data"]
        assert data["code"] == "EXECUTION_ERROR"
        assert what == "cancel" or re.search(r"/samples\.py:\d+, in ", data["place"])
        assert data["exception"] in ("SystemExit", "StopIteration", "RuntimeError")
        assert client.ask("step", {"what": "count"})["type"] == "observation"


def test_a_synchronous_environment_is_created_called_and_closed_on_its_own_thread(
    serve: StartHost,
) -> None:
    host = serve("Sqlite")
    with host.open() as client:
        assert client.step("same_thread") == "True"
        assert client.step("count") == "1"
        assert client.ask("state")["data"]["step_count"] == 1
        client.send("close")
    host.emptied()
    assert host.stop() == 0
    assert "failed" not in host.log.read_text()


def test_sessions_of_plain_code_share_a_thread_unless_a_step_blocks(
    serve: StartHost, gate: Gate
) -> None:
    host = serve("plain:Plain")
    with host.open() as blocked, host.open() as other, host.open() as third:
        assert blocked.ask("step", {})["data"]["observation"]["steps"] == 1
        before = number_of_threads(host)
        for client in (other, third):
            assert client.ask("step", {})["data"]["observation"]["steps"] == 1
        assert number_of_threads(host) == before
        blocked.send("step", {"gate": gate.name})
        gate.reached()
        for client in (other, third):
            assert client.ask("step", {})["data"]["observation"]["steps"] == 2
        gate.open()
        assert blocked.receive()["data"]["observation"]["steps"] == 2
        assert blocked.ask("state")["data"]["step_count"] == 2


@pytest.mark.parametrize(("env_class", "most"), [("OneThread", 1), ("ThreadSafe", 2)])
def test_a_class_can_have_its_sessions_share_a_thread(
    serve: StartHost, env_class: str, most: int
) -> None:
    """Of a class that is thread-safe, a call that seems to block gets another thread."""
    host = serve(env_class)
    with ExitStack() as stack:
        clients = [stack.enter_context(host.open()) for _ in range(6)]
        assert len({client.step("thread_name") for client in clients}) <= most


def test_a_factory_that_raises_is_named_and_its_slot_is_free_again(
    serve: StartHost, isolate: bool
) -> None:
    host = serve("Broken", isolate=isolate, max_sessions=1, admission_timeout_seconds=WAIT_SECONDS)
    for _ in range(3):
        with host.open() as client:
            answer = client.last_word()[0]["data"]
            assert (answer["code"], answer["factory_name"]) == ("FACTORY_ERROR", "Broken")
            assert "no licence" in answer["message"]
    host.emptied()


def test_a_slot_is_free_when_its_client_sees_the_close(serve: StartHost, gate: Gate) -> None:
    host = serve(max_sessions=1)
    for _ in range(20):
        with host.open() as client:
            assert client.ask("reset")["type"] == "observation"
            client.leave()
    with host.open() as client:
        client.send("step", {"what": "wait", "gate": gate.name})
        gate.reached()
    host.emptied()
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"
    gate.open()
    assert host.stop() == 0


def test_a_client_that_leaves_cancels_an_asynchronous_step(
    serve: StartHost, tmp_path: Path
) -> None:
    host = serve("Async")
    cancelled = tmp_path / "cancelled"
    os.mkfifo(cancelled)
    with host.open() as client:
        client.ask("reset")
        client.send("step", {"what": "forever", "gate": str(cancelled)})
    assert cancelled.read_bytes() == b""


def test_a_client_that_leaves_while_its_environment_is_created_frees_its_slot(
    serve: StartHost, tmp_path: Path
) -> None:
    creating = Gate(tmp_path, "creating")
    host = serve("SlowToCreate", max_sessions=1)
    with host.open():
        creating.reached()
    host.emptied()
    creating.open()
    with host.open() as client:
        creating.reached()
        creating.open()
        assert client.ask("reset")["type"] == "observation"
    assert (tmp_path / "closed.log").exists()


def test_a_class_for_one_session_serves_the_next_client_after_the_close(
    start: StartHost, tmp_path: Path
) -> None:
    """The next client waits for the environment to be closed instead of being refused."""
    closing = Gate(tmp_path, "closing")
    host = start("SlowToClose", isolate=False)
    assert host.ready()["max_sessions"] == 1
    with host.open() as first:
        first.ask("reset")
        first.send("close")
        closing.reached()
        with host.open() as second:
            second.send("reset")
            closing.open()
            assert second.receive()["type"] == "observation"
            second.send("close")
            closing.reached()
            closing.open()


@pytest.mark.parametrize(("env_class", "what"), [("Counter", "wait"), ("Async", "forever")])
def test_a_step_that_times_out_ends_only_its_session(
    serve: StartHost, gate: Gate, env_class: str, what: str
) -> None:
    host = serve(env_class, step_timeout_seconds=0.2)
    with host.open() as client, host.open() as other:
        other.ask("reset")
        client.send("step", {"what": what, "gate": gate.name})
        answer, code = client.last_word()
        assert "0.2 s" in answer["data"]["message"]
        assert code == 1011
        assert other.step("count")
    host.emptied()
    assert "step timed out after 0.2 s" in host.log.read_text()
    if what == "wait":
        gate.reached()
        gate.open()


IDLE = """
from types import SimpleNamespace as Some
from plain import Plain
from openenv.core.env_server.http_server import create_app
app = create_app(Plain, None, None, config=Some(session_timeout=0.2))
"""
OLDER = """
from openenv.core.env_server.http_server import create_app
from samples import Counter, Do, Seen
app = create_app(Counter, Do, Seen)
"""


def test_an_idle_session_is_closed_with_its_reason(serve: StartHost) -> None:
    host = serve(app=IDLE)
    with host.open() as client:
        client.ask("reset")
        answer = client.last_word()[0]["data"]
        assert answer["code"] == "SESSION_ERROR"
        assert "idle" in answer["message"]
    host.emptied()


def test_an_older_version_of_upstream_ignores_the_id_of_an_unknown_session(
    serve: StartHost, isolate: bool
) -> None:
    host = serve(app=OLDER, isolate=isolate)
    for wanted in ("nobody", "00000000-0000-4000-a000-000000000001"):
        with host.open(f"/ws?session_id={wanted}") as client:
            assert client.ask("reset", {"episode_id": "e"})["type"] == "observation"
            assert client.ask("state")["data"]["episode_id"] == "e"
            assert host.http("GET", "/capacity")[1]["sessions"] == 1
        host.emptied()


def test_a_class_without_base_or_types_is_served(serve: StartHost) -> None:
    with serve("Plain").open() as client:
        assert client.ask("reset")["data"]["observation"]["text"] == "plain"
        answer = client.ask("step", {"anything": [1]})
        assert answer["data"]["observation"]["text"] == "[1]"
        assert client.ask("state")["data"] == {"here": True}


def test_a_host_logs_prints_refuses_unknown_paths_and_stops(serve: StartHost, gate: Gate) -> None:
    host = serve()
    with host.open() as client:
        client.step("print")
        assert "said by a step" in host.log.read_text()
    with pytest.raises(Exception, match="403"), host.open("/nowhere"):
        pass
    with host.open() as client:
        client.send("step", {"what": "wait", "gate": gate.name})
        gate.reached()
        assert host.stop() == 0
