# SPDX-License-Identifier: Apache-2.0
"""Frame for frame what upstream's own server answers: the env host's suite, upstream at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import REPOSITORY, python_with

OLDER = ("openenv==0.3.1", "fastmcp>=3,<4")  # what most of upstream's environments lock


@pytest.mark.timeout(600)  # it may install two environments, and import them for the first time
def test_our_env_host_answers_as_upstreams_server_does(upstream: Path) -> None:
    pythons = {
        "OPENENVD_UPSTREAM_PYTHON": str(upstream),
        "OPENENVD_OLDER_PYTHON": str(python_with(*OLDER)),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "upstream", "tests/env_host"],
        cwd=REPOSITORY,
        env={**os.environ, **pythons},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout
