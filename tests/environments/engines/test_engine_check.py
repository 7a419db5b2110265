# SPDX-License-Identifier: Apache-2.0
"""Which engines work here is asked in a process of its own."""

import sys
from pathlib import Path

import pytest

from openenvd.environments.engines import registry
from openenvd.environments.engines.base import EngineEntry, Preparation
from openenvd.environments.engines.registry import check_provider
from openenvd.schema.errors import UnknownProvider
from openenvd.system.files.installation import install_command

from ..conftest import install_engines

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
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with engines, whose code only the process that is asked imports."""
    (tmp_path / "engines_of_test.py").write_text(ENGINES)
    names = ("good", "bad", "absent", "crashing", "hanging")
    install_engines(tmp_path, **{name: f"engines_of_test:{name.title()}" for name in names})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


def test_each_engine_tells_whether_it_works(engines: None) -> None:
    assert {"docker", "kubernetes", "ray", "slurm", "swarm", "good"} <= {*registry.names()}
    found = registry.check_engines("good", "bad", "absent")
    assert found["good"] == {"version": "1.2", "problem": None, "remedy": None, "notes": ["slow"]}
    assert found["bad"]["problem"] == "RuntimeError: it broke"
    assert "Absent" in found["absent"]["problem"]
    assert "engines_of_test" not in sys.modules


def test_an_engine_that_hangs_or_crashes_hides_none_before_it(
    engines: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = registry.check_engines("good", "crashing")
    assert found["good"]["problem"] is None
    assert found["crashing"]["problem"] == "asking it ended with code 3"
    monkeypatch.setattr(registry, "CHECK_SECONDS", 5.0)
    found = registry.check_engines("good", "hanging")
    assert found["good"]["problem"] is None
    assert found["hanging"]["problem"] == "does not answer within 5 s"


def test_a_library_that_is_missing_is_told_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = EngineEntry("no_such_library.engine:Engine", Preparation.IMAGE, extra="docker")
    monkeypatch.setattr(registry, "entry_of", lambda _: entry)
    found = registry.check_engine("trial")
    assert found.problem is not None
    assert found.remedy == install_command("docker")


def test_a_package_of_engines_that_cannot_be_imported_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engines(tmp_path, broken="nowhere:Engine")
    (tmp_path / "engines_broken.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownProvider, match="broken cannot be imported: No module named"):
        check_provider("broken")
