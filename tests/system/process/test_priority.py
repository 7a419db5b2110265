# SPDX-License-Identifier: Apache-2.0
"""The niceness of a session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from openenvd.system.process.proc import OWN_SESSION, prefer_own_session

SET_AND_SHOW = """
from openenvd.system.process.proc import OWN_SESSION, prefer_own_session
print(prefer_own_session(7), open(OWN_SESSION).read())
"""


@pytest.mark.skipif(not Path(OWN_SESSION).exists(), reason="this kernel has no autogroups")
def test_a_session_gets_the_niceness_asked_for() -> None:
    found = subprocess.run(
        [sys.executable, "-c", SET_AND_SHOW],
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert (found[0], found[-2:]) == ("True", ["nice", "7"])


def test_without_autogroups_nothing_happens(tmp_path: Path) -> None:
    assert prefer_own_session(-5, str(tmp_path / "none")) is False
    assert not (tmp_path / "none").exists()
