# SPDX-License-Identifier: Apache-2.0
"""`openenv check --provider NAME`: each step of it, and that nothing of it is left."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import Machine, eventually

NEVER_READY = "import threading\nprint('loading', flush=True)\nthreading.Event().wait()\n"
NO_SESSION = """
from openenvd.envs.echo.environment import EchoEnvironment
class Sample(EchoEnvironment):
    def reset(self, **more): raise OSError("no licence")
"""


@pytest.fixture(autouse=True)
def nothing_left(machine: Machine) -> Iterator[None]:
    """No environment, no replica and no server, whatever became of the check."""
    yield
    assert machine.status()["environments"] == []
    assert list((machine.home / "run").glob("*")) == []
    assert [each for each in machine.processes() if "openenvd: shim" in _title(each)] == []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def steps(machine: Machine, *words: str, cwd: Path | None = None) -> dict[str, dict[str, Any]]:
    """The outcome of each step that was taken."""
    answer = machine.run("check", *words, "--json", cwd=cwd)
    taken = {step["step"]: step for step in answer.json["steps"]}
    is_good = all(step["problem"] is None for step in taken.values())
    assert answer.code == (0 if is_good else 1), answer.text
    return taken


def test_a_provider_that_works_has_a_replica_a_session_and_nothing_left(machine: Machine) -> None:
    told = machine.ok("check", "--provider", "local").out.splitlines()
    assert [line.split()[:2] for line in told] == [
        ["✓", "engine"],
        ["✓", "launch"],
        ["✓", "session"],
        ["✓", "down"],
    ]


def test_what_is_missing_is_told_before_anything_is_launched(machine: Machine) -> None:
    machine.environ["OPENENVD_ENGINES"] = "mine=openenvd.no_such_module:Engine"
    told = machine.run("check", "--provider", "mine")
    assert told.code == 1
    [line] = told.out.splitlines()
    assert line.startswith("  ✗ engine   the library of mine cannot be imported")


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


PRINTS_SECRETS = """
import os, sys
print("the key is", os.environ["API_KEY"], "and the place", os.environ["PLACE"], flush=True)
print("Authorization: Bearer planted-bearer-value", flush=True)
raise RuntimeError("cannot use " + os.environ["API_KEY"] + " at " + os.environ["PLACE"])
"""
SILENT = """
from openenvd.envs.echo.environment import EchoEnvironment
class Sample(EchoEnvironment):
    pass
"""


def test_a_report_has_what_helps_and_no_secret_that_was_planted(
    machine: Machine, tmp_path: Path
) -> None:
    planted = {
        "environment's key": "planted-api-key",
        "environment's plain variable": "planted-place",
        "environment's token": "planted-token-of-env",
        "password in an address": "planted-password",
        "parameter of an address": "planted-parameter",
        "daemon's variable": "planted-daemon-secret",
        "bearer": "planted-bearer-value",
        "well-known form": "hf_plantedplantedplanted",
    }
    machine.environ["MY_SECRET"] = planted["daemon's variable"]
    machine.environ["HTTPS_PROXY"] = "http://me:planted-password@127.0.0.1:1"
    (tmp_path / "bad_env.py").write_text(PRINTS_SECRETS)
    (tmp_path / "good_env.py").write_text(SILENT)
    variables = ["-e", "API_KEY=planted-api-key", "-e", "PLACE=planted-place"]
    failed = machine.run("launch", "bad_env:Sample", "--name", "bad", *variables, cwd=tmp_path)
    assert failed.code == 1
    good = ["--name", "good", "--token", "planted-token-of-env", "-e", "KEY2=planted-api-key"]
    machine.ok("launch", "good_env:Sample", *good, cwd=tmp_path)
    url = "http://me:planted-password@127.0.0.1:1/?token=planted-parameter"
    machine.run("rollout", url, "--out", "out", "--episodes", "1", "--retries", "0")
    with (machine.home / "daemon.log").open("a") as log:
        log.write("something with hf_plantedplantedplanted and planted-token-of-env\n")
        log.write("MY_SECRET=planted-daemon-secret API_KEY: planted-api-key\n")
    token = (machine.home / "token").read_text().strip()

    file = tmp_path / "report.txt"
    machine.ok("check", "--report", str(file))
    text = file.read_text()
    machine.ok("down", "--all")
    assert [what for what, secret in planted.items() if secret in text] == []
    assert token not in text
    for part in ("== versions", "== check", "== status", "== requests", "the daemon's log"):
        assert part in text
    assert "cannot use *** at ***" in text  # what helps: the failure itself
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_report_is_written_without_a_daemon_and_says_why_there_is_none(
    machine: Machine, tmp_path: Path
) -> None:
    (machine.home).mkdir()
    (machine.home / "config.toml").write_text("max-long-wokers = 2\n")
    file = tmp_path / "report.txt"
    answer = machine.run("check", "--report", str(file))
    assert answer.code == 0, answer.text
    assert "did you mean max_long_workers" in file.read_text()
    (machine.home / "config.toml").unlink()
