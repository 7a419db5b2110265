# SPDX-License-Identifier: Apache-2.0
"""`load_tests` is no part of the installed package: it is found at the repository's root."""

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def load_tests_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind everything else: the root has a folder `server`, as upstream's projects have."""
    root = str(Path(__file__).parents[2])
    monkeypatch.setattr(sys, "path", [*sys.path, root])
    monkeypatch.setenv("PYTHONPATH", root)
