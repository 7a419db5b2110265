# SPDX-License-Identifier: Apache-2.0
"""The env host's suite of conformance, which compares each frame with upstream's own server."""

import os
import sys

import pytest

from ..conftest import REPOSITORY, UPSTREAM_REQUIREMENT, output_of, python_with

OLDER = ("openenv==0.3.1", "fastmcp>=3,<4")  # as most of upstream's environments lock them


@pytest.mark.timeout(600)  # it may install an environment, and import it for the first time
@pytest.mark.parametrize(
    ("variable", "requirements"),
    [
        ("OPENENVD_UPSTREAM_PYTHON", (UPSTREAM_REQUIREMENT,)),
        pytest.param("OPENENVD_OLDER_PYTHON", OLDER, marks=pytest.mark.long),
    ],
)
def test_our_env_host_answers_as_upstreams_server_does(
    variable: str, requirements: tuple[str, ...]
) -> None:
    suite = ["-m", "upstream", "-k", variable, "tests/env_host/serving/test_conformance.py"]
    environ = {**os.environ, variable: str(python_with(*requirements))}
    pytest_quietly = (sys.executable, "-m", "pytest", "-q", "-n", "0")
    printed = output_of(*pytest_quietly, *suite, cwd=REPOSITORY, env=environ, timeout=500)
    assert "1 passed" in printed, printed
