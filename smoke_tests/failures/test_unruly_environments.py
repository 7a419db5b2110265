# SPDX-License-Identifier: Apache-2.0
"""Launches under bad conditions: the environment raises, or the parent process ignores signals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from ..conftest import Machine
from ..test_main_job import say_hello

RAISES = """
from openenvd.env_host.bundled.echo.environment import EchoEnvironment
class Sample(EchoEnvironment):
    def __init__(self):
        raise OSError("the licence has expired")
"""
SIGNALS_OF_THE_PARENT = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_what_started_the_command_may_ignore_and_block_signals(machine: Machine) -> None:
    below = replace(machine, command=sys.executable)
    answer = below.ok("-c", SIGNALS_OF_THE_PARENT, machine.command, "launch", "echo", "--json")
    say_hello(answer.json["environment"]["address"])
    machine.ok("down", "echo")
    machine.ok("stop")


def test_a_launch_whose_constructor_raises_fails_with_the_cause(
    machine: Machine, write_environment: Callable[[str], str]
) -> None:
    answer = machine.run("launch", write_environment(RAISES))
    assert answer.code == 1
    cause = "The sessions of this launch would fail: OSError: the licence has expired ("
    assert cause in answer.err
