# SPDX-License-Identifier: Apache-2.0
"""What others use is in `openenvd.rollouts`, and costs nothing until it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import openenvd.rollouts as rollouts


def test_every_public_name_can_be_imported() -> None:
    assert "RolloutCollector" in dir(rollouts)
    for name in dir(rollouts):
        assert getattr(rollouts, name).__name__ == name


def test_nothing_else_is_public() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Rollouts'"):
        _ = rollouts.Rollouts


def test_importing_the_package_imports_no_module_of_it() -> None:
    code = "import sys, openenvd.rollouts as r; print([n for n in sys.modules if r.__name__ in n])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "['openenvd.rollouts']"
