# SPDX-License-Identifier: Apache-2.0
"""Frame for frame what upstream's own server answers: the env host's suite, upstream at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .conftest import REPOSITORY


def test_our_env_host_answers_as_upstreams_server_does(upstream: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "upstream", "tests/env_host"],
        cwd=REPOSITORY,
        env={**os.environ, "OPENENVD_UPSTREAM_PYTHON": str(upstream)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout
