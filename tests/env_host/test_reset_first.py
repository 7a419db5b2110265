# SPDX-License-Identifier: Apache-2.0
"""A client that returns unawares to another environment is told so at its first step.

Upstream's clients connect again by themselves, in silence; the real one, whose shard is killed, is
in the smoke tests (`test_upstream.py`).
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from openenvd.env_host.protocol import LOST_SESSIONS_VARIABLE

from .conftest import StartHost
from .hosts import Host

CLASS = """
from samples import Counter

class Strict(Counter):
    RESET_FIRST = True

class Lenient(Counter):
    RESET_FIRST = False
"""


def lose_a_session(host: Host) -> None:
    """Kill the process of an idle session, whose client does not wait for anything."""
    with host.open() as client:
        client.ask("reset")
        pid = int(client.ask("step", {"what": "pid"})["data"]["observation"]["text"])
        host.note_that(sessions=1)
        os.kill(pid, signal.SIGKILL)
        host.note_that_has("shard_exit")


def first_step(host: Host, **data: Any) -> str:
    """The type or the error's code that a session's first step is answered with."""
    with host.open() as client:
        answer = client.ask("step", data)
        return str(answer["data"].get("code", answer["type"]))


@pytest.mark.parametrize("isolate", [False, True])
def test_each_lost_session_explains_one_that_begins_with_a_step(
    start: StartHost, isolate: bool
) -> None:
    host = start(isolate=isolate)
    host.ready()
    assert first_step(host) == "observation"
    lose_a_session(host)
    with host.open() as client:
        assert client.ask("step", {})["data"]["code"] == "SESSION_NOT_RESET"
        assert client.ask("state")["type"] == "state"
        assert client.ask("step", {})["data"]["code"] == "SESSION_NOT_RESET"
        assert client.ask("reset", {"episode_id": "next"})["type"] == "observation"
        assert client.ask("step", {})["data"]["observation"]["text"] == "1"
    assert first_step(host) == "observation"


def test_a_session_that_begins_with_a_reset_leaves_the_refusal_to_others(start: StartHost) -> None:
    host = start()
    host.ready()
    lose_a_session(host)
    with host.open() as client:
        client.ask("reset")
        assert client.ask("step", {})["type"] == "observation"
    assert first_step(host, type="list_tools") == "VALIDATION_ERROR"  # no tools here, but no step
    assert first_step(host) == "SESSION_NOT_RESET"


def test_an_idle_session_that_is_ended_is_lost(start: StartHost) -> None:
    host = start(idle_timeout_seconds=0.1)
    host.ready()
    with host.open() as client:
        client.ask("reset")
        assert client.receive()["data"]["code"] == "SESSION_ERROR"
    assert first_step(host) == "SESSION_NOT_RESET"


def test_the_sessions_of_an_earlier_server_are_lost(start: StartHost) -> None:
    host = start(env={LOST_SESSIONS_VARIABLE: "1"})
    host.ready()
    assert [first_step(host), first_step(host)] == ["SESSION_NOT_RESET", "observation"]


def test_sessions_that_have_returned_are_reported(start: StartHost) -> None:
    host = start(env={LOST_SESSIONS_VARIABLE: "2"})
    host.ready()
    assert first_step(host) == "SESSION_NOT_RESET"
    host.note_that(sessions=0, lost_sessions=1)
    lose_a_session(host)
    host.note_that(sessions=0, lost_sessions=2)


@pytest.mark.parametrize(
    ("name", "option", "answer"),
    [
        ("Strict", None, "SESSION_NOT_RESET"),
        ("Strict", False, "observation"),
        ("Lenient", None, "observation"),
        ("Lenient", True, "SESSION_NOT_RESET"),
    ],
)
def test_the_class_decides_and_the_launch_decides_over_it(
    start: StartHost, tmp_path: Any, name: str, option: bool | None, answer: str
) -> None:
    (tmp_path / "strictness.py").write_text(CLASS)
    host = start(
        f"strictness:{name}", reset_first=option, env={LOST_SESSIONS_VARIABLE: str(int(not option))}
    )
    host.ready()
    assert first_step(host) == answer


def test_a_session_that_was_begun_over_http_may_begin_with_a_step(start: StartHost) -> None:
    host = start(reset_first=True)
    host.ready()
    create = {"jsonrpc": "2.0", "method": "openenv/session/create", "id": 1}
    session = host.http("POST", "/mcp", create)[1]["result"]["session_id"]
    with host.open(f"/ws?session_id={session}") as client:
        assert client.ask("step", {})["type"] == "observation"
