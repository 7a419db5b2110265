# SPDX-License-Identifier: Apache-2.0
"""Which engines work here is asked in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from openenvd.environments.engines import check, registry
from openenvd.environments.engines.registry import MORE_VARIABLE
from openenvd.system.files.installation import install_command

ENGINES = """
import os, time
from openenvd.environments.engines.base import Check, EngineRefused

class Good:
    def check(self):
        return Check(version="1.2", notes=("slow",))

class Bad:
    def check(self):
        raise RuntimeError("it broke")

class Hanging:
    def check(self):
        time.sleep(600)

class Crashing:
    def check(self):
        os._exit(3)
"""


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A module with engines, which only the process that is asked can import."""
    (tmp_path / "engines_of_test.py").write_text(ENGINES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return monkeypatch


def declare(engines: pytest.MonkeyPatch, *names: str) -> None:
    given = ",".join(f"{name}=engines_of_test:{name.title()}" for name in names)
    engines.setenv(MORE_VARIABLE, given)


def test_each_engine_tells_whether_it_works(engines: pytest.MonkeyPatch) -> None:
    declare(engines, "good", "bad", "absent")
    found = check.check_engines()
    assert found["good"] == {"version": "1.2", "problem": None, "remedy": None, "notes": ["slow"]}
    assert found["bad"]["problem"] == "RuntimeError: it broke"
    assert "Absent" in found["absent"]["problem"]
    assert "engines_of_test" not in sys.modules


def test_an_engine_that_hangs_or_crashes_hides_none_before_it(
    engines: pytest.MonkeyPatch,
) -> None:
    declare(engines, "good", "crashing")
    found = check.check_engines()
    assert found["good"]["problem"] is None
    assert found["crashing"]["problem"] == "asking it ended with code 3"
    engines.setattr(check, "CHECK_SECONDS", 5.0)
    declare(engines, "good", "hanging")
    found = check.check_engines()
    assert found["good"]["problem"] is None
    assert found["hanging"]["problem"] == "does not answer within 5 s"


def test_a_library_that_is_missing_is_told_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = registry.EngineEntry("no_such_library.engine:Engine", extra="docker")
    monkeypatch.setitem(registry.ENGINES, "trial", entry)
    found = check.check_engine("trial")
    assert not found.works
    assert found.remedy == install_command("docker")
