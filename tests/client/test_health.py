# SPDX-License-Identifier: Apache-2.0
"""The probe of a daemon's pod: what it says of a daemon, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from openenvd.client import daemon
from openenvd.schema.settings import Paths

from .fake_daemon import FakeDaemon


def probe(paths: Paths) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "openenvd.client.daemon"]
    environ = {**os.environ, "OPENENV_HOME": str(paths.home)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_a_daemon_that_answers_is_healthy_also_of_another_version(fake: FakeDaemon) -> None:
    fake.write_identity(version="0.0.1")
    fake.get("/v1/health", {"status": "ok"})
    done = probe(fake.paths)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_daemon_that_answers_no_request_is_not_healthy(fake: FakeDaemon) -> None:
    fake.get("/v1/health", lambda call: call.break_off())
    done = probe(fake.paths)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_where_there_is_no_daemon_none_is_started(paths: Paths) -> None:
    done = probe(paths)
    assert (done.returncode, done.stderr) == (1, "no daemon answers\n")
    assert not daemon.is_running(paths)
    assert not paths.daemon_file.exists()
