# SPDX-License-Identifier: Apache-2.0
"""The plugin of pytest, in a pytest of its own, on a real server."""

import subprocess
import sys
from pathlib import Path

from .conftest import Machine

ENVIRONMENT = """\
from openenvd.env_host.bundled.echo.environment import EchoAction, EchoEnvironment, EchoObservation


class Loud(EchoEnvironment):
    def step(self, action, timeout_s=None, **kwargs):
        print("stepped with", action.message, flush=True)
        return super().step(action)
"""
TESTS = """\
def test_holds(openenv_session):
    openenv_session.reset()
    assert openenv_session.step({"message": "hello"}).reward == 0.5

def test_fails(openenv_session, openenv_env):
    openenv_session.reset()
    assert openenv_env.state == "READY"
    assert openenv_session.step({"message": "zebra"}).reward == 7

def test_without_it():
    assert False
"""
TWO_INTERRUPTS = """\
import os, signal
from openenvd.client import Environment

down = Environment.down

def interrupted(self):
    Environment.down = down
    os.kill(os.getpid(), signal.SIGINT)

def test_it(openenv_session):
    Environment.down = interrupted
    os.kill(os.getpid(), signal.SIGINT)
"""


def run_pytest(machine: Machine, folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=machine.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_an_environment_is_tested_on_a_real_server(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "loud.py").write_text(ENVIRONMENT)
    (folder / "test_it.py").write_text(TESTS)
    code, text = run_pytest(machine, folder, "--openenv-source=loud:Loud")
    assert (code, "2 failed, 1 passed" in text) == (1, True), text
    assert "stepped with zebra" in text  # the log, with the test that failed
    assert text.count("openenv logs pytest-") == 1  # and with no other
    assert machine.status()["environments"] == []


def test_nothing_is_launched_without_a_source(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "test_it.py").write_text("def test_it(openenv_env):\n    pass\n")
    code, text = run_pytest(machine, folder)
    assert (code, "give --openenv-source=./my_env" in text) == (1, True), text
    assert "pytest_plugin.py" not in text  # no traceback
    assert not machine.home.exists()


def test_a_source_in_an_argument_of_its_own_is_refused(machine: Machine, tmp_path: Path) -> None:
    """Otherwise pytest would look for tests in the folder, and for its root folder elsewhere."""
    for name in ("project", "env"):
        (tmp_path / name).mkdir()
    (tmp_path / "project" / "test_it.py").write_text("def test_it(openenv_env):\n    pass\n")
    code, text = run_pytest(machine, tmp_path / "project", "--openenv-source", "../env")
    assert (code, "write --openenv-source=../env" in text) == (4, True), text
    assert not machine.home.exists()


def test_a_second_interrupt_leaves_no_environment(machine: Machine, tmp_path: Path) -> None:
    """The interrupt comes while the fixture takes its environment down."""
    (tmp_path / "test_it.py").write_text(TWO_INTERRUPTS)
    _, text = run_pytest(machine, tmp_path, "--openenv-source=echo")
    assert "KeyboardInterrupt" in text
    assert machine.status()["environments"] == []
