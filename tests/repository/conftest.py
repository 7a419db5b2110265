# SPDX-License-Identifier: Apache-2.0
"""`smoke_tests` and `load_tests` are no part of the package: they are found at the root."""

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def root_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind everything else: the root has a folder `server`, as upstream's projects have."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
