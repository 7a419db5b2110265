# SPDX-License-Identifier: Apache-2.0
"""`openenv status --watch`: on a terminal, and where the daemon goes and comes back."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openenvd.schema.settings import Paths

from ..client.fake_daemon import Call, FakeDaemon, new_environment, new_request, serving
from .conftest import PROGRAM, ROWS, Terminal

WATCH = [*PROGRAM, "status", "--watch"]
Start = Callable[..., Terminal]
DAEMON = {"version": "1", "address": "http://127.0.0.1:8585", "uptime_seconds": 5.0, "sessions": 0}


def scripted(fake: FakeDaemon, name: str = "trial", requests: int = 1) -> None:
    """Give it a status, and a stream that lasts as long as it."""

    def stream(call: Call) -> None:
        call.begin_stream()
        while fake.paths.daemon_file.exists():
            call.chunk(": still here\n\n")
            time.sleep(0.05)
        call.break_off()

    fake.get("/v1/health", {"status": "ok"})
    fake.get("/v1/events", stream)
    many = [new_request(label=f"launch env-{number}") for number in range(requests)]
    status: dict[str, Any] = {
        "daemon": DAEMON, "environments": [new_environment(name=name)], "requests": many,
    }  # fmt: skip
    fake.get("/v1/status", status)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.setenv("OPENENV_HOME", str(tmp_path))
    return Paths(tmp_path)


def test_the_screen_waits_for_a_daemon_that_is_lost_until_it_is_back(
    home: Paths, terminal: Start
) -> None:
    with serving(home) as first:
        scripted(first)
        screen = terminal(WATCH, **{**os.environ, "TERM": "xterm-256color"})
        assert screen.shows("trial")
    assert screen.shows("the daemon has exited; waiting for it to come back")
    assert screen.shows("trial"), "what was known last is still shown"
    with serving(home) as second:
        scripted(second, "another")
        assert screen.shows("another")
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(20) == 130


def test_the_oldest_requests_are_left_out_where_the_terminal_is_low(
    home: Paths, terminal: Start
) -> None:
    with serving(home) as fake:
        scripted(fake, requests=2 * ROWS)
        screen = terminal(WATCH, **{**os.environ, "TERM": "xterm-256color"})
        assert screen.shows(r"launch env-0\b")
        assert screen.shows(r"launch env-9\b")
        assert screen.shows("\x1b\\[H")  # the next picture
        assert f"launch env-{ROWS}" not in screen.text
        screen.process.send_signal(signal.SIGINT)
        screen.process.wait(20)


def test_the_screen_is_drawn_again_when_something_changes(home: Paths, terminal: Start) -> None:
    with serving(home) as fake:
        scripted(fake)
        changed = threading.Event()

        def stream(call: Call) -> None:
            call.begin_stream()
            changed.wait(30)
            call.event("5:0", "change", {"seq": 5})

        fake.get("/v1/events", stream)
        screen = terminal(WATCH, **{**os.environ, "TERM": "xterm-256color"})
        assert screen.shows("trial")
        scripted(fake, "another")
        changed.set()
        assert screen.shows("another")
        screen.process.send_signal(signal.SIGINT)
        screen.process.wait(20)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_it_needs_a_terminal(home: Paths, more: tuple[str, ...]) -> None:
    watch = subprocess.run([*WATCH, *more], capture_output=True, text=True, timeout=60)
    assert watch.returncode == 2
    assert "--watch needs a terminal" in watch.stderr
    assert not [*home.home.iterdir()], "no daemon is started for it"
