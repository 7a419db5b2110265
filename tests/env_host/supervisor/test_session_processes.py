# SPDX-License-Identifier: Apache-2.0
"""The processes of an isolated session: a group of their own, which ends with the session."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from websockets.exceptions import ConnectionClosed

from openenvd.env_host.supervisor import isolated_sessions
from openenvd.env_host.supervisor.children import Children
from openenvd.env_host.supervisor.isolated_sessions import Orphans
from openenvd.system.text.json_lines import Json

from ..conftest import StartHost
from ..hosts import wait_until_exited

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STARTERS = """
import os, signal, subprocess, sys
from plain import Bare, Seen

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
LEAVE = "import subprocess as s, sys; print(s.Popen(sys.argv[1:], stdout=s.DEVNULL).pid)"


class Starter(Bare):
    def reset(self, **kwargs):
        return Seen(pids=[os.getpid()])

    def step(self, action):
        if action.how == "child":
            return Seen(pids=[subprocess.Popen(SLEEP).pid])
        if action.how == "session":
            return Seen(pids=[subprocess.Popen(SLEEP, start_new_session=True).pid])
        if action.how in ("orphan", "daemon"):
            command = [sys.executable, "-c", LEAVE, *SLEEP]
            is_daemon = action.how == "daemon"
            done = subprocess.run(command, stdout=-1, start_new_session=is_daemon)
            return Seen(pids=[int(done.stdout)])
        if action.how.startswith("SIG"):
            os.killpg(os.getpgrp(), getattr(signal, action.how))
        if action.how == "abort":
            os.abort()
        return Seen(pids=[os.getpid()])
"""


def processes(answer: Json) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in answer["data"]["observation"]["pids"]]


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("how", ["child", "session", "orphan", "daemon"])
def test_what_an_isolated_session_has_started_ends_with_it(
    serve: StartHost, tmp_path: Path, how: str, is_killed: bool
) -> None:
    (tmp_path / "starters.py").write_text(STARTERS)
    host = serve("starters:Starter", isolate=True, max_sessions=2)
    _, answer = host.http("POST", "/step", {"action": {"how": "daemon"}})
    of_front = processes({"data": answer})
    with host.open() as bystander:
        bystander.ask("reset")
        left = processes(bystander.ask("step", {"how": how}))
        with host.open() as client:
            [session] = processes(client.ask("reset"))
            started = processes(client.ask("step", {"how": how}))
            if is_killed:
                session.kill()
                with pytest.raises(ConnectionClosed):
                    [client.receive() for _ in range(2)]  # the reason
        wait_until_exited(started)
        assert all(each.is_running() for each in left)
    wait_until_exited(left)
    assert all(each.is_running() for each in of_front)
    assert host.stop() == 0
    for each in of_front:
        each.kill()


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "abort"])
def test_a_signal_to_the_group_of_an_isolated_session_is_for_it_alone(
    serve: StartHost, tmp_path: Path, how: str
) -> None:
    (tmp_path / "starters.py").write_text(STARTERS)
    host = serve("starters:Starter", isolate=True, max_sessions=2)
    with host.open() as bystander, host.open() as client:
        before = bystander.ask("reset")
        client.ask("reset")
        started = processes(client.ask("step", {"how": "child"}))
        client.send("step", {"how": how})
        with pytest.raises(ConnectionClosed):
            [client.receive() for _ in range(3)]  # an answer, perhaps, and the reason
        wait_until_exited(started)
        assert bystander.ask("step", {})["data"]["observation"] == before["data"]["observation"]
    assert host.stop() == 0


def test_orphans_that_no_ended_session_can_have_started_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier = subprocess.Popen(SLEEP, start_new_session=True)
    since = time.monotonic()
    monkeypatch.setattr(isolated_sessions, "STARTED_SECONDS", 0.0)
    time.sleep(0.02)  # the kernel counts by hundredths
    of_group = subprocess.Popen(SLEEP)
    of_session = subprocess.Popen(SLEEP, start_new_session=True)
    orphans = [earlier, of_group, of_session]
    monkeypatch.setattr(isolated_sessions, "children_of", lambda _: [e.pid for e in orphans])
    try:
        Orphans(Children()).look(None, ended_since=since)
        assert of_session.wait(10.0) == -signal.SIGKILL
        assert earlier.poll() is None
        assert of_group.poll() is None
    finally:
        for each in orphans:
            each.kill()
            each.wait()
