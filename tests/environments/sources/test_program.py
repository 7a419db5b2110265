# SPDX-License-Identifier: Apache-2.0
"""What a replica runs, and with which variables."""

import json
import sys
from pathlib import Path

import pytest

from openenvd.environments.engines.providers import child_environment
from openenvd.environments.sources.program import (
    app_candidates,
    package_of,
    prepared_from_json,
    program_of,
)
from openenvd.environments.sources.resolve import Project, resolve
from openenvd.schema.protocol import HostConfig
from openenvd.schema.spec import EnvironmentSpec

PYTHON = Path("/venvs/x/bin/python")
MAPPED = """
[project]
name = "openenv-thing"
[tool.setuptools.package-dir]
"the_thing" = "."
"the_thing.server" = "server"
"""
SCRIPT = """
[project]
name = "x"
[project.scripts]
server = "the_thing.server.app:main"
"""


def project(folder: Path, packaging: str = "", manifest: str = "name: my-env\n") -> Project:
    folder.mkdir(parents=True)
    (folder / "openenv.yaml").write_text(manifest)
    (folder / "pyproject.toml").write_text(packaging)
    found = resolve(str(folder), folder)
    assert isinstance(found, Project)
    return found


@pytest.mark.parametrize(
    ("packaging", "package"), [(MAPPED, "the_thing"), (SCRIPT, "the_thing"), ("", "my_env")]
)
def test_the_package_name_is_read_from_the_packaging(
    tmp_path: Path, packaging: str, package: str
) -> None:
    assert package_of(project(tmp_path / "p", packaging)) == package


def test_the_form_inside_the_package_is_tried_first() -> None:
    assert app_candidates("p", "server.app:app") == ("p.server.app:app", "server.app:app")
    assert app_candidates("p", "p.server.app:app") == ("p.server.app:app",)
    assert app_candidates(None, "server.app:app") == ("server.app:app",)


def test_an_app_is_also_looked_for_where_the_template_has_it(tmp_path: Path) -> None:
    source = project(tmp_path / "p", MAPPED, "name: x\napp: envs.the_thing.server.app:app\n")
    config = program_of(EnvironmentSpec("x", "p"), source, PYTHON).config
    assert config.app_candidates[-1] == "envs.the_thing.server.app:app"
    assert config.app_fallbacks == ("the_thing.server.app:app", "server.app:app")
    assert config.app_place == f"{source.folder / 'openenv.yaml'}, line 2"
    unnamed = project(tmp_path / "unnamed")
    assert program_of(EnvironmentSpec("x", "p"), unnamed, PYTHON).config.app_place == ""


def test_an_app_is_imported_first_as_the_dockerfile_does(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", MAPPED).folder
    (folder / "backend").mkdir()
    (folder / "backend" / "core.py").write_text("app = object()\n")
    (folder / "Dockerfile").write_text("CMD cd backend && uvicorn core:app\n")
    source = resolve(str(folder), folder)
    config = program_of(EnvironmentSpec("x", "p"), source, PYTHON).config
    assert config.app_candidates == ("core:app", "the_thing.core:app")
    assert config.import_paths == (str(folder / "backend"), str(folder))
    assert config.app_place == str(folder / "Dockerfile")


# The text of `server/app.py` and of `server/more.py`, and whether the package's form is first.
FORMS = {
    "alone": ("", "", False),
    "beside": ("from . import (\n    more as also,\n)", "import os, models", False),
    "above, by a module in brackets": ("from . import (\n    more,\n)", "from .. import x", True),
    "above": ("from ..models import size", "", True),
    "above, by another module": ("from .more import size", "from ..models import size", True),
    "above, by another's own name": ("import server.more", "from ... import models", True),
    "guarded": ("try:\n    from ..models import x\nexcept ImportError: import models", "", False),
}


@pytest.mark.parametrize(("app", "more", "is_packaged"), FORMS.values(), ids=FORMS)
def test_an_app_is_imported_in_its_package_first_where_it_cannot_be_without(
    tmp_path: Path, app: str, more: str, is_packaged: bool
) -> None:
    source = project(tmp_path / "p", MAPPED)
    server = source.folder / "server"
    server.mkdir(exist_ok=True)
    (server / "app.py").write_text(f"app = object()\n{app}\n")
    (server / "more.py").write_text(more)
    (source.folder / "models.py").touch()
    config = program_of(EnvironmentSpec("x", "p"), source, PYTHON).config
    forms = ("the_thing.server.app:app", "server.app:app")
    assert config.app_candidates == (forms if is_packaged else forms[::-1])


def test_the_program_has_the_variables_of_the_dockerfile(tmp_path: Path) -> None:
    folder = project(tmp_path / "p").folder
    (folder / "Dockerfile").write_text("WORKDIR /a\nCOPY . .\nENV DATA=/a/data\n")
    program = program_of(EnvironmentSpec("x", "p"), resolve(str(folder), folder), PYTHON)
    assert program.env == {"DATA": f"{folder}/data"}
    assert prepared_from_json(program.to_json()) == program


def test_a_package_that_is_the_folder_itself_gets_a_link_and_one_in_it_none(tmp_path: Path) -> None:
    source = project(tmp_path / "p", MAPPED)
    program = program_of(EnvironmentSpec("x", "p"), source, PYTHON)
    assert program.links == {"the_thing": source.folder}
    assert program.argv[0] == str(PYTHON)
    (source.folder / "src" / "the_thing").mkdir(parents=True)
    program = program_of(EnvironmentSpec("x", "p"), source, PYTHON)
    assert program.links == {}
    assert program.config.import_paths == (str(source.folder), str(source.folder / "src"))


def test_a_bundled_environment_and_a_class_run_in_our_own_python(tmp_path: Path) -> None:
    for source in ("echo", "module:Class"):
        program = program_of(EnvironmentSpec("x", source), resolve(source, tmp_path), None)
        assert program.python == Path(sys.executable)
        assert program.config.env_class is not None


def test_what_json_has_not_becomes_text(tmp_path: Path) -> None:
    large = f"0x{'f' * 9999}"
    manifest = f"name: x\nmade: 2026-01-02\na: [.inf, .nan, {large}]\n? {large}\n: 1\n"
    source = project(tmp_path / "p", manifest=manifest)
    data = program_of(EnvironmentSpec("x", "p"), source, PYTHON).config.manifest
    assert (data["made"], data["a"]) == ("2026-01-02", ["inf", "nan", large])
    json.dumps(data, allow_nan=False)


def test_a_replica_inherits_the_way_to_the_world_no_secrets_and_the_users_variables_win() -> None:
    inherited = {
        "PATH": "/bin", "https_proxy": "p", "CUDA_VISIBLE_DEVICES": "0", "LC_ALL": "C",
        "HF_TOKEN": "secret", "PYTHONPATH": "/x", "VIRTUAL_ENV": "/v", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    environ = child_environment(inherited, home="/h")
    assert set(inherited) & set(environ) == {
        "PATH", "https_proxy", "CUDA_VISIBLE_DEVICES", "LC_ALL",
    }  # fmt: skip
    assert "MAX_CONCURRENT_ENVS" not in environ
    assert child_environment({}, home="/h", max_sessions=4)["MAX_CONCURRENT_ENVS"] == "4"
    given = {"PATH": "/mine", "MAX_CONCURRENT_ENVS": "9"}
    theirs = {"A": "1", "PATH": "/theirs", "PYTHONFAULTHANDLER": "0", "MAX_CONCURRENT_ENVS": "1"}
    environ = child_environment({}, home="/h", max_sessions=4, given=given, program=theirs)
    assert environ.items() >= {"A": "1", "PYTHONFAULTHANDLER": "1", **given}.items()
    assert child_environment({"PATH": "/bin"}, home="/h", program=theirs)["PATH"] == "/bin"


def test_serve_options_reach_the_host_and_override_the_manifest(tmp_path: Path) -> None:
    said = EnvironmentSpec(
        "x", "echo", shards=3, admission_timeout_seconds=0.5, isolate=True, session_memory_mb=64
    )
    spec = said.or_else(gpus=2, step_timeout_seconds=7.0)
    sources: tuple[str | Project, ...] = ("echo", "module:Class", project(tmp_path / "p"))
    for source in sources:
        found = resolve(source, tmp_path) if isinstance(source, str) else source
        config = program_of(spec, found, None).config
        of_another_version = config.to_json() | {"of_another_version": None}
        assert HostConfig.from_json(of_another_version) == config
        assert (config.shards, config.gpus, config.isolate) == (3, 2, True)
        assert (config.admission_timeout_seconds, config.session_memory_bytes) == (0.5, 2**26)
        assert config.step_timeout_seconds == 7.0
    said = EnvironmentSpec("x", "echo", step_timeout_seconds=2.0)
    spec = said.or_else(gpus=None, step_timeout_seconds=7.0)
    assert program_of(spec, resolve("echo", Path()), None).config.step_timeout_seconds == 2.0
