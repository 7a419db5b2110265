# SPDX-License-Identifier: Apache-2.0
"""`openenv check --provider NAME`: its steps, and that it leaves nothing."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .background import title
from .conftest import Machine, eventually

NEVER_READY = "import threading\nprint('loading', flush=True)\nthreading.Event().wait()\n"
NO_SESSION = """
from openenvd.env_host.bundled.echo.environment import EchoEnvironment
class Sample(EchoEnvironment):
    def reset(self, **more): raise OSError("no licence")
"""


@pytest.fixture(autouse=True)
def nothing_left(machine: Machine) -> Iterator[None]:
    """Assert that no environment, replica or server is left, whether or not the check passed."""
    yield
    assert machine.status()["environments"] == []
    assert list((machine.home / "run").glob("*")) == []
    assert [each for each in machine.processes() if "openenvd: shim" in title(each)] == []


def steps(machine: Machine, *words: str, cwd: Path | None = None) -> dict[str, dict[str, Any]]:
    answer = machine.run("check", *words, "--json", cwd=cwd)
    taken = {step["step"]: step for step in answer.json["steps"]}
    is_good = all(step["problem"] is None for step in taken.values())
    assert answer.code == (0 if is_good else 1), answer.text
    return taken


def test_a_provider_that_works_has_a_replica_a_session_and_nothing_left(machine: Machine) -> None:
    text = machine.ok("check", "--provider", "local").out.splitlines()
    assert [line.split()[:2] for line in text] == [
        ["✓", "engine"],
        ["✓", "launch"],
        ["✓", "session"],
        ["✓", "down"],
    ]


def test_a_launch_that_fails_is_told_with_its_last_lines_and_taken_down(
    machine: Machine, write_environment: Callable[[str], str]
) -> None:
    source = write_environment("import a_module_that_nobody_has\n")
    answer = machine.run("check", source, "--provider", "local")
    assert answer.code == 1, answer.text
    assert "✗ launch   replica 0 of check-" in answer.out
    assert "a_module_that_nobody_has" in answer.out
    assert "✓ down" in answer.out


def test_a_replica_without_a_session_is_told_with_the_servers_word(
    machine: Machine, write_environment: Callable[[str], str]
) -> None:
    found = steps(machine, write_environment(NO_SESSION), "--provider", "local")
    assert list(found) == ["engine", "launch", "session", "down"]
    assert "no licence" in found["session"]["problem"]
    assert found["down"]["problem"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_check_that_is_interrupted_takes_down_what_it_has_launched(
    machine: Machine, write_environment: Callable[[str], str], number: signal.Signals
) -> None:
    machine.ok("up")
    check = machine.start("check", write_environment(NEVER_READY), "--provider", "local")
    eventually(lambda: "loading" in _logs(machine))
    check.send_signal(number)
    assert check.wait(60) == 130


def _logs(machine: Machine) -> str:
    [name] = [each["name"] for each in machine.status()["environments"]] or [""]
    return machine.run("logs", name).out if name else ""
