# SPDX-License-Identifier: Apache-2.0
"""Environments that misbehave, and input that cannot work: each gets what a user needs to know."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from ..conftest import Machine, eventually, new_machine

HEAD = """
import os, sys, time
from openenvd.env_host.bundled.echo.environment import EchoEnvironment

"""
RAISES_WHEN_TOLD = (
    HEAD
    + """
class Sample(EchoEnvironment):
    def __init__(self):
        super().__init__()
        if os.path.exists("is-broken"):
            raise OSError("the licence has expired")
"""
)


def ask(address: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    answers = []
    with connect(address.replace("http", "ws", 1) + "/ws") as socket:
        for message in messages:
            socket.send(json.dumps(message))
            answers.append(json.loads(socket.recv()))
    return answers


@pytest.mark.parametrize("how", [[], ["--isolate"]])
def test_a_constructor_that_raises_fails_a_launch_and_is_shown_until_one_succeeds(
    machine: Machine, write_environment: Callable[[str], str], tmp_path: Path, how: list[str]
) -> None:
    source = write_environment(RAISES_WHEN_TOLD)
    launch = ("launch", source, "--name", "sample", *how)
    broken = tmp_path / "is-broken"
    broken.touch()
    answer = machine.run(*launch)
    assert answer.code == 1
    cause = "OSError: the licence has expired ("
    assert f"The sessions of this launch would fail: {cause}" in answer.err
    broken.unlink()
    machine.ok(*launch)
    broken.touch()
    address = machine.environment("sample")["address"]
    for state in ("FAILING", "READY"):
        with contextlib.suppress(ConnectionClosed):  # before it was asked anything
            ask(address, {"type": "reset", "data": {}})
        eventually(partial(_is_in_state, machine, state))
        if state == "FAILING":
            found = machine.environment("sample")["sessions_fail"]
            assert found.startswith(cause)
            assert found.endswith(".py, line 10)")
            text = machine.ok("status").out
            assert f"sample: sessions fail: {found} (see openenv logs sample)" in text
        broken.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def misused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """One user, who makes all mistakes."""
    folder = tmp_path_factory.mktemp("misused")
    for name, manifest in (
        ("empty", None),
        ("broken", "name: x\n  bad: [indent\n"),
        ("nameless", "spec_version: 1\napp: server.app:app\n"),
    ):
        (folder / name).mkdir()
        if manifest is not None:
            (folder / name / "openenv.yaml").write_text(manifest)
    with new_machine(folder / "home") as made:
        yield made


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["launch", "ehco"], 2, ["ehco", "echo"]),
        (["launch", "./empty"], 2, ["openenv.yaml"]),
        (["launch", "./broken"], 1, ["openenv.yaml", "line 2"]),
        (["launch", "./nameless"], 1, ["openenv.yaml, line 2: app: ", "server"]),
        (["launch", "echo", "--name", "../escape"], 2, ["name"]),
        (["launch", "echo", "--replicas", "0"], 2, ["replicas"]),
        (["launch", "echo", "-e", "NOVALUE=", "--provider", "nowhere"], 2, ["nowhere", "local"]),
        (["lanuch", "echo"], 2, ["launch"]),
        (["down", "nobody"], 4, ["nobody"]),
        (["status", "nobody"], 4, ["nobody"]),
        (["logs", "nobody"], 4, ["nobody"]),
        (["wait", "ffffffffffffffff"], 4, ["ffffffffffffffff"]),
        (["cancel", "ffffffffffffffff"], 4, ["ffffffffffffffff"]),
    ],
)
def test_bad_input_gets_a_clear_line_and_leaves_nothing(
    misused: Machine, arguments: list[str], code: int, words: list[str]
) -> None:
    answer = misused.run(*arguments)
    assert answer.code == code, answer.text
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err, answer.text
    assert misused.status()["environments"] == []


def test_an_error_for_a_taken_name_has_its_address(machine: Machine) -> None:
    machine.ok("launch", "echo")
    answer = machine.run("launch", "echo", "--no-update")
    assert answer.code == 1, answer.text
    assert machine.environment("echo")["address"] in answer.err
    assert "openenv down echo" in answer.err


SIGNALS_OF_THE_PARENT = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_what_started_the_command_may_ignore_and_block_signals(machine: Machine) -> None:
    below = replace(machine, command=sys.executable)
    answer = below.ok("-c", SIGNALS_OF_THE_PARENT, machine.command, "launch", "echo", "--json")
    address = answer.json["environment"]["address"]
    reset = ask(address, {"type": "reset", "data": {}})
    assert reset[0]["type"] == "observation"
    machine.ok("down", "echo")
    machine.ok("stop")


def _is_in_state(machine: Machine, state: str) -> bool:
    return bool(machine.environment("sample")["state"] == state)
