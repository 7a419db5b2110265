# SPDX-License-Identifier: Apache-2.0
"""Frame for frame what upstream's own server answers: the env host's suite, upstream at hand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .conftest import REPOSITORY, UPSTREAM_REQUIREMENT, python_with

OLDER = ("openenv==0.3.1", "fastmcp>=3,<4")  # what most of upstream's environments lock


@pytest.mark.parametrize("requirements", [(UPSTREAM_REQUIREMENT,), OLDER], ids=" ".join)
def test_our_env_host_answers_as_upstreams_server_does(requirements: tuple[str, ...]) -> None:
    upstream = python_with(*requirements)
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
