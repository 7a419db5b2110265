# SPDX-License-Identifier: Apache-2.0
"""The programs in `examples/` run as they are shown."""

from __future__ import annotations

import subprocess
import sys

from .conftest import REPOSITORY, Machine

EXAMPLES = REPOSITORY / "examples"


def run(machine: Machine, program: str, *arguments: str) -> str:
    """What an example prints, run in its folder."""
    done = subprocess.run(
        [sys.executable, program, *arguments],
        cwd=EXAMPLES,
        env=machine.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_launch_and_wait_prints_the_address_of_a_ready_environment(machine: Machine) -> None:
    address = run(machine, "launch_and_wait.py", "echo").strip()
    assert address == machine.environment("echo")["address"]


def test_launch_and_wait_names_what_was_wrong(machine: Machine) -> None:
    done = subprocess.run(
        [sys.executable, "launch_and_wait.py", "nothing_of_that_name"],
        cwd=EXAMPLES,
        env=machine.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "nothing_of_that_name" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_class_is_launched_and_episodes_are_collected(machine: Machine) -> None:
    address = run(machine, "launch_and_wait.py", "counter_environment:Counter").strip()
    printed = run(machine, "collect_rollouts.py", address)
    assert printed.splitlines()[-1] == "32 episodes, mean reward 1.00"
