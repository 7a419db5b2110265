# SPDX-License-Identifier: Apache-2.0
"""Steps that go on although nobody waits for them: they are counted, and their shards replaced."""

import re
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from openenvd.env_host.ipc.reports import abandoned_steps
from openenvd.env_host.ipc.scoreboard import Counters, Field, now_microseconds
from openenvd.env_host.shard.shard import memory_sentences
from openenvd.env_host.supervisor.shard_policies import (
    PATIENCE_SECONDS,
    Replacement,
    replacement_of,
)
from openenvd.system.process.exit_reason import ExitKind, ExitReason

from ..conftest import Gate, StartHost
from ..hosts import WAIT_SECONDS, Client, Host, until, wait_until_exited

STARVED = Replacement.STARVED.value
SOON: dict[str, Any] = {"env": {"PATIENCE": "0.3"}, "step_timeout_seconds": 0.2}


def abandon(client: Client, what: str, gate: Gate) -> None:
    client.send("step", {"what": what, "gate": gate.name})
    assert "did not finish within" in client.last_word()[0]["data"]["message"]
    gate.reached()


def abandoned(host: Host) -> int:
    found: int = host.http("GET", "/capacity")[1]["shards"][0]["abandoned"]
    return found


def test_steps_that_go_on_are_counted_until_they_return(
    serve: StartHost, gate: Gate, tmp_path: Path
) -> None:
    host = serve(step_timeout_seconds=0.2)
    over_http = Gate(tmp_path, "http")
    with host.open() as client, host.open() as other:
        pid = other.pid()
        abandon(client, "wait", gate)
        assert abandoned(host) == 1
        step = {"action": {"what": "wait", "gate": over_http.name}}
        assert host.http("POST", "/step", step)[0] >= 500
        over_http.reached()
        assert abandoned(host) == 2
        for each in (gate, over_http):
            each.open()
        host.until(lambda capacity: capacity["shards"][0]["abandoned"] == 0)
        assert other.pid() == pid


@pytest.mark.parametrize(
    ("name", "what", "function"),
    [
        ("ThreadSafe", "wait", "pass_gate"),
        ("Sqlite", "wait", "pass_gate"),
        ("Async", "forever", "step_async"),
    ],
)
def test_the_line_of_a_step_that_hangs_is_in_its_clients_error_and_in_the_log(
    serve: StartHost, gate: Gate, tmp_path: Path, name: str, what: str, function: str
) -> None:
    host = serve(name, step_timeout_seconds=0.2)
    path = gate.name if what == "wait" else str(tmp_path / "ended")
    with host.open() as client:
        client.send("step", {"what": what, "gate": path})
        text = client.last_word()[0]["data"]["message"]
    place = re.search(rf"within 0.2 s \({tmp_path}/samples.py:\d+, in {function}\)", text)
    assert place is not None, text
    assert f"step timed out after 0.2 s {place[0][13:]}" in host.log.read_text()
    if what == "wait":
        gate.reached()
        gate.open()


def test_a_shard_is_replaced_when_its_other_sessions_have_ended(
    serve: StartHost, gate: Gate
) -> None:
    host = serve(shards=1, **SOON)
    with host.open() as client, host.open() as other:
        pid = other.pid()
        abandon(client, "wait", gate)
        host.until(lambda capacity: capacity["shards"][0]["abandoned_seconds"] > 1.5)
        assert other.pid() == pid
    psutil.Process(pid).wait(WAIT_SECONDS)
    with host.open() as client:
        assert client.pid() != pid
    assert f"shard 0 (pid {pid}) is replaced: 1 abandoned call, running for" in host.log.read_text()


def test_a_shard_whose_sessions_are_starved_is_replaced_at_once(
    serve: StartHost, gate: Gate
) -> None:
    host = serve(shards=1, **SOON)
    with host.open() as client, host.open() as other:
        pid = other.pid()
        abandon(client, "wait_then_hold", gate)
        gate.open()
        answer, code = other.last_word()
        assert STARVED in answer["data"]["message"]
        assert code == 1011
    told = host.note_that_has("shard_exit")
    assert (told["pid"], told["replaced_for"], told["sessions"]) == (pid, STARVED, 1)
    reason = ExitReason.from_json(told["reason"])
    assert (reason.kind, reason.sentence()) == (ExitKind.STOPPED, STARVED)
    with host.open() as client:
        client.ask("reset")
        assert client.pid() != pid


@pytest.mark.parametrize("limit", [1.0, None])
def test_a_shard_that_a_step_blocks_is_replaced_when_its_time_is_over_or_no_client_is_left(
    serve: StartHost, limit: float | None
) -> None:
    """The step holds the interpreter: the shard itself notices neither."""
    host = serve(**{**SOON, "step_timeout_seconds": limit}, max_sessions=4)
    with host.open() as other, host.open() as client:
        pid = client.pid()
        client.send("step", {"what": "hold"})
        until(lambda: "has been blocked for" in host.log.read_text())
        why = (Replacement.OVERDUE if limit else Replacement.LEFT).value
        for each in (client, other):
            if limit:
                answer, code = each.last_word()
                assert (why in answer["data"]["message"], code) == (True, 1011)
            else:
                each.connection.socket.shutdown(socket.SHUT_RDWR)
        told = host.note_that_has("shard_exit")
        assert (told["pid"], told["replaced_for"]) == (pid, why)
    with host.open() as client:
        client.ask("reset")
        assert client.pid() != pid
    assert "in do_hold" in host.log.read_text()


@pytest.mark.parametrize("limit", [1.0, None])
def test_the_process_of_an_isolated_session_ends_when_its_step_does_not(
    serve: StartHost, limit: float | None
) -> None:
    host = serve(**{**SOON, "step_timeout_seconds": limit}, max_sessions=4, isolate=True)
    with host.open() as other, host.open() as client:
        others, process = other.pid(), psutil.Process(client.pid())
        client.send("step", {"what": "hold"})
        if limit:
            assert "did not finish within 1 s" in client.last_word()[0]["data"]["message"]
        else:
            client.connection.socket.shutdown(socket.SHUT_RDWR)
        wait_until_exited([process])
        assert other.pid() == others
    assert "in do_hold" in host.log.read_text()


def test_a_blocked_shard_is_replaced_for_those_that_wait_when_the_steps_client_has_left(
    serve: StartHost,
) -> None:
    host = serve(shards=1, max_sessions=4, env={"PATIENCE": "0.3"})
    with host.open() as other, host.open() as client:
        pid = other.pid()
        client.send("step", {"what": "hold"})
        until(lambda: "has been blocked for" in host.log.read_text())
        other.connection.ping()
        client.connection.socket.shutdown(socket.SHUT_RDWR)
        host.note_that_has("capacity")
        assert psutil.pid_exists(pid)  # nobody is kept waiting yet
        other.send("step", {"what": "count"})
        answer, code = other.last_word()
        assert (STARVED in answer["data"]["message"], code) == (True, 1011)


@pytest.mark.parametrize("what", ["wait", "wait_then_hold"])
def test_the_process_of_an_isolated_session_is_ended(
    serve: StartHost, gate: Gate, what: str
) -> None:
    host = serve("Single", max_sessions=2, **SOON)
    with host.open() as client, host.open() as other:
        process, others = psutil.Process(client.pid()), other.pid()
        abandon(client, what, gate)
        gate.open() if what == "wait_then_hold" else None
        process.wait(WAIT_SECONDS)
        assert other.pid() == others


def test_what_a_session_has_left_behind_is_named_until_it_ends(serve: StartHost) -> None:
    host = serve(shards=1)
    with host.open() as client:
        client.ask("reset")
        pid = int(client.ask("step", {"what": "leave"})["data"]["observation"]["text"])
    host.until(lambda capacity: bool(capacity["left"]))
    [left] = host.http("GET", "/capacity")[1]["left"]
    assert (left["pid"], left["bytes"] >= 24 << 20) == (pid, True)
    psutil.Process(pid).kill()
    host.until(lambda capacity: not capacity["left"])


SHORT = (
    " Memory was short: 250 MB were held together with other processes of the replica, of 300 MB."
)


@pytest.mark.parametrize(
    ("killed", "held", "expected"),
    [
        (0, 100, ""),
        (0, 250, SHORT),
        (1, 0, " Killed for memory meanwhile: 1 program that the environment had started."),
        (2, 0, " Killed for memory meanwhile: 2 programs that the environment had started."),
    ],
)  # fmt: skip
def test_a_client_whose_step_timed_out_is_told_what_memory_had_to_do_with_it(
    killed: int, held: int, expected: str
) -> None:
    assert memory_sentences(killed, held << 20, 300 << 20) == expected


def row(**values: int) -> Counters:
    counters = Counters(0, memoryview(bytearray(8 * 32)).cast("q"))
    for name, value in values.items():
        counters[Field[name]] = value
    return counters


LATE = int((PATIENCE_SECONDS + 1) * 1e6)


@pytest.mark.parametrize(
    ("since", "values", "is_exclusive", "wanted"),
    [
        (LATE, {"ABANDONED": 0}, False, Replacement.NONE),
        (LATE // 2, {"ABANDONED": 1}, False, Replacement.NONE),
        (LATE, {"ABANDONED": 1}, False, Replacement.WHEN_IDLE),
        (LATE, {"ABANDONED": 1, "SESSIONS": 1}, False, Replacement.NONE),
        (LATE, {"ABANDONED": 1, "SESSIONS": 1}, True, Replacement.WHEN_IDLE),
        (LATE, {"ABANDONED": 1, "ARRIVING": 1}, False, Replacement.NONE),
        (LATE, {"ABANDONED": 2, "SESSIONS": 1, "HEARTBEAT": 1}, False, Replacement.STARVED),
        (LATE, {"ABANDONED": 1, "HEARTBEAT": 1}, False, Replacement.LEFT),
    ],
)
def test_when_a_shard_is_replaced(
    since: int, values: dict[str, int], is_exclusive: bool, wanted: Replacement
) -> None:
    now = now_microseconds()
    known = {"PID": 5, "READY": 1, "HEARTBEAT": now, "ABANDONED_SINCE": now - since, **values}
    assert replacement_of(row(**known), now, None, 0, 0, is_exclusive=is_exclusive) is wanted


@pytest.mark.parametrize(
    ("blocked", "limited", "limit", "left", "waiting", "wanted"),
    [
        (60, 1, 59.0, 0, 0, Replacement.OVERDUE),
        (60, 1, 61.0, 0, 0, Replacement.NONE),  # it may take so long
        (60, 0, 59.0, 0, 0, Replacement.NONE),  # a constructor, which has no limit
        (9, 1, 1.0, 2, 0, Replacement.NONE),
        (60, 0, None, 1, 0, Replacement.NONE),
        (60, 0, None, 2, 0, Replacement.LEFT),
        (60, 0, None, 1, 1, Replacement.STARVED),
        (60, 0, None, 0, 1, Replacement.NONE),  # the client of the step waits for its answer
    ],
)
def test_when_a_shard_that_is_blocked_is_replaced(
    blocked: int, limited: int, limit: float | None, left: int, waiting: int, wanted: Replacement
) -> None:
    now = 100_000_000
    values = {"SESSIONS": 2, "LIMITED": limited, "HEARTBEAT": now - blocked * 1_000_000}
    blocked_row = row(PID=5, READY=1, **values)
    given = (blocked_row, now, limit, left, waiting)
    assert replacement_of(*given, is_exclusive=False) is wanted


def test_a_status_says_since_when_steps_go_on() -> None:
    shards = [
        {"index": 0, "abandoned": 1, "abandoned_seconds": 120.4},
        {"index": 1, "abandoned": 0, "abandoned_seconds": 0.0},
    ]
    assert abandoned_steps(shards, 1000.0) == [{"shard": 0, "count": 1, "since": 880}]


# Calls of one HTTP request that hang: answered in time, and their slots are free again


SLOTS = 2
LIMITS: dict[str, Any] = {"step_timeout_seconds": 0.2, "env": {"ONE_SHOT": str(SLOTS)}}
LIST_TOOLS = {"jsonrpc": "2.0", "method": "tools/list", "id": 7}


def step(host: Host, what: str, gate: str = "") -> tuple[int, Any]:
    return host.http("POST", "/step", {"action": {"what": what, "gate": gate}})


def test_steps_that_hang_are_answered_and_do_not_keep_others_out(
    serve: StartHost, tmp_path: Path
) -> None:
    """The environment of each is closed after it."""
    host = serve(**LIMITS)
    gates = [Gate(tmp_path, f"gate{number}") for number in range(SLOTS + 1)]
    for gate in gates:
        status, answer = step(host, "wait", gate.name)
        assert status == 504
        assert "The step did not finish within 0.2 s" in answer["detail"]
        assert "--step-timeout" in answer["detail"]
    closed = tmp_path / "closed.log"
    assert not closed.exists()
    assert step(host, "count")[0] == 200
    assert host.http("GET", "/state")[0] == 200
    before = closed.stat().st_size
    gates[0].reached()
    gates[0].open()
    until(lambda: closed.stat().st_size > before)
    assert "The step timed out after 0.2 s" in host.log.read_text()


def test_an_asynchronous_step_that_hangs_is_cancelled(serve: StartHost, tmp_path: Path) -> None:
    host = serve("Async", **LIMITS)
    for number in range(SLOTS + 1):
        cancelled = tmp_path / f"cancelled{number}"
        assert step(host, "forever", str(cancelled))[0] == 504
        until(cancelled.exists)
    assert step(host, "count")[0] == 200


def test_tools_that_hang_are_an_error_and_end_their_session(serve: StartHost) -> None:
    host = serve("SlowTools", **LIMITS)
    sentence = "tools/list did not finish within 0.2 s"
    session_id = host.create_session()
    of_session = {**LIST_TOOLS, "params": {"session_id": session_id}}
    for request in [LIST_TOOLS] * (SLOTS + 1) + [of_session]:
        status, answer = host.http("POST", "/mcp", request)
        assert (status, answer["id"], answer["error"]["code"]) == (200, 7, -32000)
        assert sentence in answer["error"]["message"]
    assert step(host, "count")[0] == 200
    host.emptied()
    assert "Unknown session_id" in host.http("POST", "/mcp", of_session)[1]["error"]["message"]
    for is_created in (False, True):
        with host.open(
            f"/ws?session_id={host.create_session()}" if is_created else "/ws"
        ) as client:
            answer = client.ask("mcp", LIST_TOOLS)
            assert answer["data"]["code"] == "SESSION_ERROR"
            assert sentence in answer["data"]["message"]
            host.emptied()


@pytest.mark.parametrize("what", ["cancel", "exit"])
def test_a_step_that_ends_itself_over_http_is_an_error_of_its_own(
    serve: StartHost, what: str
) -> None:
    host = serve("Async")
    for _ in range(2):
        assert step(host, what)[0] == 500
    assert step(host, "count")[0] == 200
