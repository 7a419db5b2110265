# SPDX-License-Identifier: Apache-2.0
"""The command line in this process (`command`) or as a process of its own (`process`)."""

import fcntl
import json
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from openenvd.cli import main
from openenvd.schema.settings import Paths

from ..client.fake_daemon import Call, FakeDaemon, serving

ROWS, COLUMNS = 20, 120
SECONDS = 30.0  # in which a program on a terminal writes what is awaited
PROGRAM = [sys.executable, "-P", "-c", "from openenvd.cli.entry import main; main()"]


@dataclass(frozen=True)
class Answer:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
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
    def run(*arguments: str) -> Answer:
        code = main.run(list(arguments))
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return run


class Cli:
    """The command line here, against a daemon that answers as scripted over a real socket."""

    def __init__(self, run: Command, fake: FakeDaemon) -> None:
        self.run, self.fake = run, fake
        self.get, self.post, self.ends = fake.get, fake.post, fake.ends

    def __call__(self, *arguments: str) -> Answer:
        return self.run(*arguments)

    def sent(self) -> list[dict[str, Any]]:
        return [body for method, _, body in self.fake.calls if method == "POST" and body]

    def accepts(self, request: dict[str, Any], *log: str) -> None:
        """Take a request, which prints and ends as given."""
        self.post("/v1/requests", (202, {"request_id": request["id"], "request": request}))
        self.ends(request, *(log or ("preparing\n", "ready\n")))

    def knows(self, environment: dict[str, Any], log: str = "", *requests: Any) -> None:
        path = f"/v1/environments/{environment['name']}"
        self.get(path, {"environment": environment})
        self.get(f"{path}/logs", text(log))
        self.get("/v1/requests", {"requests": requests})

    def has(self, *environments: Any, requests: Any = (), **more: Any) -> dict[str, Any]:
        told = {**self.fake.identity, "uptime_seconds": 5.0, "requests": {}, "sessions": 3}
        answer = {"daemon": told, "environments": environments, "requests": requests, **more}
        status: dict[str, Any] = json.loads(json.dumps(answer))
        self.get("/v1/status", status)
        return status

    def shows(self, *environments: Any, **more: Any) -> str:
        self.has(*environments, **more)
        return self("status").out


def text(printed: str) -> Callable[[Call], None]:
    def stream(call: Call) -> None:
        call.begin_stream("text/plain")
        call.chunk(printed)
        call.end_stream()

    return stream


@pytest.fixture
def cli(command: Command, fake: FakeDaemon) -> Cli:
    return Cli(command, fake)


class Terminal:
    """A program on a terminal of `ROWS` and `COLUMNS`."""

    def __init__(self, command: list[str], **environ: str) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        given: dict[str, Any] = {"stdin": slave, "stdout": slave, "stderr": slave}
        controlled = partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0)  # as an interactive shell needs
        self.process = subprocess.Popen(
            command, env=environ, start_new_session=True, preexec_fn=controlled, **given
        )
        os.close(slave)
        self.text = ""

    def shows(self, pattern: str) -> bool:
        """Read until this was written since the last call; False: not in time."""
        end = time.monotonic() + SECONDS
        while not (found := re.search(pattern, self.text)):
            if not select.select([self.master], [], [], max(0.0, end - time.monotonic()))[0]:
                return False
            self.text += os.read(self.master, 65536).decode(errors="replace")
        self.text = self.text[found.end() :]
        return True

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Starts a program on a terminal; none is left afterwards."""
    made: list[Terminal] = []

    def start(command: list[str], **environ: str) -> Terminal:
        made.append(Terminal(command, **environ))
        return made[-1]

    yield start
    for each in made:
        each.close()


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
