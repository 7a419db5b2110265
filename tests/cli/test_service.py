# SPDX-License-Identifier: Apache-2.0
"""The daemon as a systemd service; only `systemctl` is a stand-in, as no systemd runs in tests."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openenvd.client.service import unit_text

from .conftest import PROGRAM

# Starts what the unit says, as systemd would, and ends it; `refuse` in its folder makes it fail.
SYSTEMCTL = f"""#!{sys.executable}
import os, re, shlex, signal, subprocess, sys
from pathlib import Path

here = Path(__file__).parent
_, verb, *rest = sys.argv[1:]  # after `--user`
if (here / "refuse").exists():
    sys.exit("Failed to connect to bus")
if verb in ("restart", "start"):
    text = (Path(os.environ["XDG_CONFIG_HOME"]) / "systemd" / "user" / rest[0]).read_text()
    given = dict(shlex.split(line.partition("=")[2])[0].split("=", 1)
                 for line in text.splitlines() if line.startswith("Environment="))
    command = shlex.split(re.search("ExecStart=(.*)", text)[1])
    process = subprocess.Popen(command, env=given, start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (here / "pid").write_text(str(process.pid))
if verb == "disable":
    os.kill(int((here / "pid").read_text()), signal.SIGTERM)
"""


def test_the_daemon_is_started_as_a_service_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.write_text(SYSTEMCTL)
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{systemctl.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("OPENENV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OPENENV_PORT", "0")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, check=False)

    try:
        assert "there is no service" in run("up", "--no-service").stderr
        (systemctl.parent / "refuse").touch()
        refused = run("up", "--service")
        assert (refused.returncode, "Failed to connect to bus" in refused.stderr) == (1, True)
        assert not list((tmp_path / "config").rglob("*.service"))
        assert run("up").returncode == 0
        before = json.loads(run("info", "--json").stdout)["daemon"]["pid"]
        run("up", "--service")  # stops nothing where there is no service manager
        assert json.loads(run("info", "--json").stdout)["daemon"]["pid"] == before
        (systemctl.parent / "refuse").unlink()
        started = run("up", "--service", "--max-long-workers", "3")
        assert started.returncode == 0, started.stderr
        [unit] = (tmp_path / "config").rglob("*.service")
        assert str(unit) in started.stderr
        assert unit.stat().st_mode & 0o077 == 0  # it has the variables
        assert (systemctl.parent / "pid").read_text() in started.stdout
        assert "bursting to 3 and" in started.stdout
        assert run("stop").returncode == 0
        again = json.loads(run("info", "--json").stdout)["daemon"]  # of the service, and no other
        assert str(again["pid"]) == (systemctl.parent / "pid").read_text()
        assert run("stop").returncode == 0
        (systemctl.parent / "refuse").touch()
        other = json.loads(run("info", "--json").stdout)["daemon"]
        assert str(other["pid"]) != (systemctl.parent / "pid").read_text()
        assert run("stop").returncode == 0
        (systemctl.parent / "refuse").unlink()
        assert run("up").returncode == 0
        assert run("up", "--no-service").returncode == 0
        assert not unit.exists()
    finally:
        run("stop")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit_whatever_the_paths_are(tmp_path: Path) -> None:
    program = tmp_path / 'a "b" %h $x'
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "openenvd.service"
    unit.write_text(unit_text([str(program), "-P"], {"OPENENV_HOME": '/x y/%t"$'}))
    command = ["systemd-analyze", "verify", "--user", str(unit)]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
