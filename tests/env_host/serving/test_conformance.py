# SPDX-License-Identifier: Apache-2.0
"""Upstream's clients cannot tell our server from upstream's."""

import os
from pathlib import Path

import pytest

from ..conformance import differences

PYTHON_VARIABLE = "OPENENVD_UPSTREAM_PYTHON"
OLDER_VARIABLE = "OPENENVD_OLDER_PYTHON"  # has a version before 0.4.0


@pytest.mark.upstream
@pytest.mark.timeout(300)
@pytest.mark.parametrize("variable", [PYTHON_VARIABLE, OLDER_VARIABLE])
def test_every_conversation_is_answered_as_upstream_answers_it(
    tmp_path: Path, variable: str
) -> None:
    if not (python := os.environ.get(variable)):
        pytest.skip(f"{variable} names no interpreter that has upstream's openenv package")
    assert not differences(python, tmp_path, is_older=variable == OLDER_VARIABLE)
