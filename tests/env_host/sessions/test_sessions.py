# SPDX-License-Identifier: Apache-2.0
"""Sessions over `/ws`: what a client receives, and what happens to its environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest
from websockets.exceptions import ConnectionClosed

from ..conftest import ECHO, StartHost
from ..hosts import Client, Host


class Gate:
    """Meets a call inside the host: it says when it is there, and waits to be let go."""

    def __init__(self, folder: Path, name: str = "gate") -> None:
        self.name = name
        self._in, self._out = folder / f"{name}.in", folder / f"{name}.out"
        os.mkfifo(self._in)
        os.mkfifo(self._out)

    def reached(self) -> None:
        self._in.read_bytes()

    def open(self) -> None:
        self._out.write_bytes(b"")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def step(client: Client, what: str, gate: str = "") -> str:
    answer = client.ask("step", {"what": what, "gate": gate})
    assert answer["type"] == "observation", answer
    text: str = answer["data"]["observation"]["text"]
    return text


def number_of_threads(host: Host) -> int:
    server = psutil.Process(host.process.pid)
    return sum(each.num_threads() for each in (server, *server.children(recursive=True)))


def test_each_connection_has_an_environment_of_its_own(start: StartHost) -> None:
    host = start()
    host.ready()
    with host.open() as first, host.open() as second:
        assert [step(first, "count"), step(first, "count")] == ["1", "2"]
        assert step(second, "count") == "1"


def test_arguments_that_reset_does_not_take_are_dropped(start: StartHost) -> None:
    host = start()
    host.ready()
    with host.open() as client:
        answer = client.ask("reset", {"seed": 7, "level": "hard"})
        assert answer["data"]["observation"]["text"] == "seed 7"


def test_arguments_reach_a_reset_that_takes_any(start: StartHost) -> None:
    host = start("Async")
    host.ready()
    with host.open() as client:
        answer = client.ask("reset", {"level": "hard"})
        assert answer["data"]["observation"]["text"] == "async ['level']"


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ("{", "INVALID_JSON"),
        ('{"type":"jump"}', "UNKNOWN_TYPE"),
        ('{"type":"step"}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"how":1}}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"what":"raise"}}', "EXECUTION_ERROR"),
    ],
)
def test_a_bad_frame_is_answered_and_the_session_continues(
    start: StartHost, sent: str, code: str
) -> None:
    host = start()
    host.ready()
    with host.open() as client:
        assert client.say(sent)["data"]["code"] == code
        assert client.ask("state")["type"] == "state"


def test_a_binary_frame_ends_the_session_with_an_error(start: StartHost) -> None:
    host = start()
    host.ready()
    with host.open() as client:
        assert client.say(b"{}")["data"]["code"] == "SESSION_ERROR"
        with pytest.raises(ConnectionClosed):
            client.receive()


def test_a_frame_of_many_megabytes_is_answered(start: StartHost) -> None:
    host = start(ECHO, reset_first=False)
    host.ready()
    message = "x" * (20 * 2**20)
    with host.open() as client:
        answer = client.ask("step", {"message": message})
        assert answer["data"]["observation"]["message_length"] == len(message)


def test_an_asynchronous_step_runs_in_a_task_and_may_time_itself_out(start: StartHost) -> None:
    host = start("Async")
    host.ready()
    with host.open() as client:
        assert step(client, "time_out") == "Task"


@pytest.mark.parametrize(
    ("env_class", "what"),
    [("Counter", "exit"), ("Counter", "stop_iteration"), ("Async", "exit"), ("Async", "cancel")],
)
def test_an_exception_that_would_end_its_thread_or_task_fails_the_step_alone(
    start: StartHost, env_class: str, what: str
) -> None:
    host = start(env_class)
    host.ready()
    with host.open() as client:
        assert client.ask("step", {"what": what})["data"]["code"] == "EXECUTION_ERROR"
        assert client.ask("step", {"what": "count"})["type"] == "observation"


def test_a_synchronous_environment_is_created_called_and_closed_on_its_own_thread(
    start: StartHost,
) -> None:
    host = start("Sqlite")
    host.ready()
    with host.open() as client:
        assert step(client, "same_thread") == "True"
        assert step(client, "count") == "1"
        assert client.ask("state")["data"]["step_count"] == 1
        client.send("close")
    host.emptied()
    assert host.stop() == 0
    assert "failed" not in host.log.read_text()


def test_sessions_of_plain_code_share_a_thread_unless_a_step_blocks(
    start: StartHost, gate: Gate
) -> None:
    host = start("plain:Plain")
    host.ready()
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


def test_a_class_can_ask_for_one_thread_for_all_sessions(start: StartHost) -> None:
    host = start("OneThread")
    host.ready()
    with host.open() as first, host.open() as second:
        assert step(first, "thread_name") == step(second, "thread_name")


def test_an_asynchronous_environment_runs_on_the_event_loop(start: StartHost) -> None:
    host = start("Async")
    host.ready()
    with host.open() as client:
        assert step(client, "count") == "MainThread"


def test_pipelined_messages_are_answered_in_order(start: StartHost) -> None:
    host = start()
    host.ready()
    with host.open() as client:
        for _ in range(50):
            client.send("step", {"what": "count"})
        texts = [client.receive()["data"]["observation"]["text"] for _ in range(50)]
    assert texts == [str(n) for n in range(1, 51)]


def test_a_factory_that_raises_is_named_in_the_error_and_the_connection_closed(
    start: StartHost,
) -> None:
    host = start("Broken")
    host.ready()
    with host.open() as client:
        answer = client.receive()["data"]
        assert (answer["code"], answer["factory_name"]) == ("FACTORY_ERROR", "Broken")
        assert "no licence" in answer["message"]
        with pytest.raises(ConnectionClosed):
            client.receive()
    host.emptied()


def test_a_slot_is_free_as_soon_as_its_client_sees_the_close(start: StartHost) -> None:
    host = start(max_sessions=1)
    host.ready()
    for _ in range(20):
        with host.open() as client:
            assert client.ask("reset")["type"] == "observation"
            client.send("close")
            with pytest.raises(ConnectionClosed):
                client.receive()


def test_a_client_that_leaves_in_the_middle_of_a_step_frees_its_slot(
    start: StartHost, gate: Gate
) -> None:
    host = start(max_sessions=1)
    host.ready()
    with host.open() as client:
        client.send("step", {"what": "wait", "gate": gate.name})
        gate.reached()
    host.emptied()
    with host.open() as client:
        assert client.ask("reset")["type"] == "observation"
    gate.open()
    assert host.stop() == 0


def test_a_client_that_leaves_cancels_an_asynchronous_step(
    start: StartHost, tmp_path: Path
) -> None:
    host = start("Async")
    host.ready()
    cancelled = tmp_path / "cancelled"
    os.mkfifo(cancelled)
    with host.open() as client:
        client.ask("reset")
        client.send("step", {"what": "forever", "gate": str(cancelled)})
    assert cancelled.read_bytes() == b""


def test_a_client_that_leaves_while_its_environment_is_created_frees_its_slot(
    start: StartHost, tmp_path: Path
) -> None:
    creating = Gate(tmp_path, "creating")
    host = start("SlowToCreate", max_sessions=1)
    host.ready()
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


def test_a_step_that_times_out_ends_only_its_session(start: StartHost, gate: Gate) -> None:
    host = start(step_timeout_seconds=0.2)
    host.ready()
    with host.open() as client, host.open() as other:
        other.ask("reset")
        answer = client.ask("step", {"what": "wait", "gate": gate.name})
        assert "0.2 s" in answer["data"]["message"]
        with pytest.raises(ConnectionClosed) as closed:
            client.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
        assert step(other, "count") == "1"
    gate.reached()
    gate.open()


def test_an_idle_session_is_closed_with_its_reason(start: StartHost) -> None:
    host = start(idle_timeout_seconds=0.2)
    host.ready()
    with host.open() as client:
        client.ask("reset")
        answer = client.receive()["data"]
        assert answer["code"] == "SESSION_ERROR"
        assert "idle" in answer["message"]
        with pytest.raises(ConnectionClosed):
            client.receive()
    host.emptied()


def test_a_class_without_base_or_types_is_served(start: StartHost) -> None:
    host = start("Plain")
    host.ready()
    with host.open() as client:
        assert client.ask("reset")["data"]["observation"]["text"] == "plain"
        answer = client.ask("step", {"anything": [1]})
        assert answer["data"]["observation"]["text"] == "[1]"
        assert client.ask("state")["data"] == {"here": True}


def test_prints_of_a_step_are_in_the_log_at_once(start: StartHost) -> None:
    host = start()
    host.ready()
    with host.open() as client:
        step(client, "print")
        assert "said by a step" in host.log.read_text()


def test_an_unknown_path_refuses_the_handshake(start: StartHost) -> None:
    host = start()
    host.ready()
    with pytest.raises(Exception, match="403"), host.open("/nowhere"):
        pass


def test_stopping_notifies_each_client_and_closes_each_environment(
    start: StartHost, tmp_path: Path
) -> None:
    host = start()
    host.ready()
    with host.open() as first, host.open() as second:
        first.ask("reset")
        second.ask("reset")
        assert host.stop() == 0
        for client in (first, second):
            assert json.loads(client.connection.recv())["data"]["code"] == "SESSION_ERROR"
            with pytest.raises(ConnectionClosed) as closed:
                client.receive()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001
    assert (tmp_path / "closed.log").read_text() == "closed\nclosed\n"


def test_a_step_that_never_returns_does_not_keep_the_host_from_stopping(
    start: StartHost, gate: Gate
) -> None:
    host = start()
    host.ready()
    with host.open() as client:
        client.send("step", {"what": "wait", "gate": gate.name})
        gate.reached()
        assert host.stop() == 0
