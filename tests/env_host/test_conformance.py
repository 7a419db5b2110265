# SPDX-License-Identifier: Apache-2.0
"""Upstream's clients cannot tell our server from upstream's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conformance import differences

PYTHON_VARIABLE = "OPENENVD_UPSTREAM_PYTHON"


@pytest.mark.upstream
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not os.environ.get(PYTHON_VARIABLE),
    reason=f"{PYTHON_VARIABLE} names no interpreter that has upstream's openenv package",
)
def test_every_conversation_is_answered_as_upstream_answers_it(tmp_path: Path) -> None:
    assert not differences(os.environ[PYTHON_VARIABLE], tmp_path)
