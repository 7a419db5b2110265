# SPDX-License-Identifier: Apache-2.0
"""The command line in this process (`command`) or as a process of its own (`process`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from openenvd.cli import main
from openenvd.schema.settings import Paths

from ..client.fake_daemon import FakeDaemon, serving

PROGRAM = [sys.executable, "-P", "-c", "from openenvd.cli.entry import main; main()"]


@dataclass(frozen=True)
class Answer:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        import json

        return json.loads(self.out)


Command = Callable[..., Answer]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("OPENENV_HOME", str(home))
    with serving(Paths(home)) as made:
        yield made


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line here."""

    def run(*arguments: str) -> Answer:
        code = main.run(list(arguments))
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


@pytest.fixture
def process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command line as a process; none is left afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
        made = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )
        started.append(made)
        return made

    yield start
    for made in started:
        if made.poll() is None:
            made.kill()
        made.communicate()
