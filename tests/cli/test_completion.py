# SPDX-License-Identifier: Apache-2.0
"""Completion: what is offered, and that real shells offer it."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ..client.fake_daemon import Call, FakeDaemon, new_environment, new_request
from .conftest import PROGRAM, SECONDS, Terminal

SHELLS = {
    "bash": ["bash", "--noprofile", "--norc", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}


def offered(*words: str) -> list[str]:
    """What click offers a shell after these words; the last one has been begun."""
    environ = {
        **os.environ,
        "_OPENENV_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(("openenv", *words)),
        "COMP_CWORD": str(len(words)),
    }
    code = PROGRAM[-1].replace("main()", "import sys; sys.argv = ['openenv']; main()")
    done = subprocess.run(
        [*PROGRAM[:-1], code], env=environ, capture_output=True, text=True, check=False
    )
    return done.stdout.split()


@pytest.fixture
def known(fake: FakeDaemon) -> FakeDaemon:
    names = [new_environment(name) for name in ("trial", "other")]
    queue = [
        new_request("aaaa1111bbbb", state="RUNNING"),
        new_request("aaaa2222bbbb", state="SUCCEEDED"),
    ]
    fake.answers["GET", "/v1/environments"] = {"environments": names}
    fake.answers["GET", "/v1/requests"] = {"requests": queue}
    return fake


def test_without_a_daemon_all_but_names_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENENV_HOME", str(tmp_path / "home"))
    assert offered("sta") == ["plain,status"]
    assert "plain,--gateway" in offered("launch", "--gat")
    for command in ("launch", "check"):
        assert offered(command, "--provider", "slu") == ["plain,slurm"]
        assert "plain,local" in offered(command, "--provider", "")
    assert offered("logs", "") == []
    assert not (tmp_path / "home").exists()


def test_what_failed_is_completed_where_it_is_of_use(fake: FakeDaemon) -> None:
    found = [new_environment("trial"), new_environment("act", state="FAILED")]
    fake.answers["GET", "/v1/environments"] = {"environments": found}
    assert offered("bench", "") == offered("rollout", "") == ["plain,trial"]
    assert offered("down", "") == ["plain,trial", "plain,act"]


@pytest.mark.usefixtures("known")
def test_names_and_ids_come_from_the_daemon() -> None:
    assert offered("scale", "") == ["plain,trial", "plain,other"]
    assert offered("down", "other", "t") == ["plain,trial"]
    assert offered("cancel", "") == ["plain,aaaa1111"]
    assert offered("logs", "aaaa") == ["plain,aaaa1111", "plain,aaaa2222"]
    assert offered("launch", "ec") == ["plain,echo"]
    assert offered("launch", "./my") == ["dir,./my"]


def test_a_daemon_that_hangs_is_asked_once_and_not_for_long(known: FakeDaemon) -> None:
    is_over = threading.Event()

    def hang(call: Call) -> None:
        is_over.wait(SECONDS)
        call.break_off()

    known.answers["GET", "/v1/environments"] = known.answers["GET", "/v1/requests"] = hang
    began = time.monotonic()
    assert offered("logs", "") == []
    assert time.monotonic() - began < SECONDS / 2
    is_over.set()
    assert len(known.calls) == 1


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("shell", SHELLS)
def test_a_real_shell_completes_a_name(
    shell: str, tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    command = tmp_path / "openenv"
    command.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c \'import sys; sys.argv[0] = "openenv"; '
        'from openenvd.cli.main import main; main()\' "$@"\n'
    )
    command.chmod(0o755)
    load = {
        "bash": 'eval "$(openenv completion bash)"',
        "zsh": 'autoload -Uz compinit; compinit -D -u; eval "$(openenv completion zsh)"',
        "fish": "openenv completion fish | source",
    }[shell]
    kept = {k: v for k, v in os.environ.items() if k not in ("ENV", "BASH_ENV", "ZDOTDIR")}
    environ = {**kept, "PATH": f"{tmp_path}:{kept['PATH']}", "TERM": "dumb", "HOME": str(tmp_path)}
    screen = terminal(SHELLS[shell], **environ)
    os.write(screen.master, f"{load}; echo rea''dy\n".encode())
    assert screen.shows("ready\r")
    os.write(screen.master, b"openenv scale tri\t")
    assert screen.shows("openenv scale trial")
