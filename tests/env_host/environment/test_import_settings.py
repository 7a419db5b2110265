# SPDX-License-Identifier: Apache-2.0
"""Signals and settings that a module sets when it is imported: sessions find them as they are.

The host needs some of them itself (SIGCHLD, SIGUSR1, descriptors), in other processes than those
that serve sessions, or until they serve.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ..conftest import StartHost

SETTINGS = """
import gc, os, resource, signal, socket, subprocess, sys, threading, time
from plain import Bare, Seen

heard = []

def hear(number, frame):
    heard.append(number)
    if number == signal.SIGTERM:
        with open(os.environ["FAREWELL"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        sys.exit(3)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, hear)
if "LEAVES_THREAD" in os.environ:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.setitimer(signal.ITIMER_VIRTUAL, 3600, 7)
gc.disable()
gc.set_threshold(123, 4, 5)
resource.setrlimit(resource.RLIMIT_NOFILE, (400, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
threading.stack_size(16 << 20)
socket.setdefaulttimeout(7)
sys.setrecursionlimit(3210)
os.umask(0o027)
os.chdir(os.environ["FOLDER"])


class Settings(Bare):
    def reset(self, **kwargs):
        umask = os.umask(0)
        os.umask(umask)
        return Seen(found={
            "pid": os.getpid(),
            "ignores": signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN,
            "collects": gc.isenabled(),
            "threshold": gc.get_threshold(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "stack": threading.stack_size(),
            "timeout": socket.getdefaulttimeout(),
            "recursion": sys.getrecursionlimit(),
            "umask": umask,
            "folder": os.getcwd(),
            "timer": signal.getitimer(signal.ITIMER_VIRTUAL)[1],
            "child": subprocess.run(["sh", "-c", "exit 3"]).returncode,
        })

    def step(self, action):
        heard.clear()
        for number in action.signals:
            os.kill(os.getpid(), number)
        deadline = time.monotonic() + 30
        while len(heard) < len(action.signals) and time.monotonic() < deadline:
            time.sleep(0.01)
        return Seen(found={"heard": sorted(heard)})
"""
OWN_SIGNALS = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT]


@pytest.mark.parametrize("kind", ["forked", "program"])
@pytest.mark.parametrize("isolate", [False, True], ids=["shared", "isolated"])
def test_sessions_find_what_the_import_has_set(
    serve: StartHost, tmp_path: Path, isolate: bool, kind: str
) -> None:
    (tmp_path / "settings.py").write_text(SETTINGS)
    folder, farewell = tmp_path / "elsewhere", tmp_path / "farewell"
    folder.mkdir()
    env = {"FAREWELL": str(farewell), "FOLDER": str(folder), "OPENENVD_TRIAL": "1"}
    if kind == "program":
        env["LEAVES_THREAD"] = "1"
    host = serve("settings:Settings", isolate=isolate, max_sessions=2, env=env)
    with host.open() as client:
        found = client.ask("reset")["data"]["observation"]["found"]
        pid = found.pop("pid")
        assert found == {
            "ignores": True,
            "collects": False,
            "threshold": [123, 4, 5],
            "files": 400,
            "stack": 16 << 20,
            "timeout": 7.0,
            "recursion": 3210,
            "umask": 0o027,
            "folder": str(folder),
            "timer": 7.0,
            "child": 0,  # as Python says it where SIGCHLD is ignored
        }
        signals = [int(number) for number in OWN_SIGNALS]
        answer = client.ask("step", {"signals": signals})
        assert answer["data"]["observation"]["found"] == {"heard": sorted(signals)}
        assert host.stop() == 0
    assert str(pid) in farewell.read_text().split()
