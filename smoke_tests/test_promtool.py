# SPDX-License-Identifier: Apache-2.0
"""Prometheus' own tool accepts the metrics of a real daemon and a real environment."""

import shutil
import subprocess
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from .conftest import Machine

promtool = shutil.which("promtool")


@pytest.mark.skipif(promtool is None, reason="no promtool: Debian's package prometheus has it")
def test_promtool_finds_nothing_wrong_with_the_metrics(machine: Machine, tmp_path: Path) -> None:
    machine.ok("launch", "echo")
    out = str(tmp_path / "out")
    machine.ok("rollout", "echo", "--episodes", "4", "--max-steps", "5", "--out", out)
    token = (machine.home / "token").read_text().strip()
    daemon = machine.status()["daemon"]["address"]
    environment = machine.environment("echo")["address"]
    for address, head in ((daemon, {"Authorization": f"Bearer {token}"}), (environment, {})):
        with urlopen(Request(f"{address}/metrics", headers=head), timeout=30) as answer:
            page = answer.read()
        assert page.count(b"# TYPE ") > 5
        command = [str(promtool), "check", "metrics"]
        done = subprocess.run(command, input=page, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), address
