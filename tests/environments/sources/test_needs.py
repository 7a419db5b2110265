# SPDX-License-Identifier: Apache-2.0
"""How a project's dependencies are installed: which files count, and which lock file does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from openenvd.environments.sources.needs import Way, allows_python, metadata_of, ways_of

PROJECT = {"project": {"name": "My.Env", "dependencies": ["thing>=1", "win; os_name == 'nt'"]}}
OWN = '[[package]]\nname = "my-env"\nversion = "1"\nsource = { virtual = "." }\n'
THING = '[[package]]\nname = "thing"\nversion = "1"\nsource = { registry = "x" }\n'
HEAD = 'version = 1\nrequires-python = ">=3.10"\n'
TEXTS = {
    "pyproject.toml": '[project]\nname = "x"\ndependencies = ["thing"]\n',
    "uv.lock": HEAD,
    "requirements.txt": "thing\n",
    "server/requirements.txt": "thing\n",
    "setup.py": "setup(install_requires=['thing'])\n",
    "Dockerfile": "FROM python:3.11\nRUN pip install --no-cache-dir 'thing>=1' other[x]\n",
}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (HEAD + OWN + THING, None),
        (HEAD + OWN.replace("my-env", "old-name") + THING, "another project: My.Env is not in it"),
        (HEAD + OWN, "it lacks thing, which pyproject.toml names"),
        (HEAD, "it has no packages"),
        ("version = 1\npackage = []\n", "it has no packages"),
        (HEAD.replace("3.10", "3.13") + OWN + THING, "made for Python >=3.13, and this is 3.11.7"),
        ("thing==1.0\n    # via -r pyproject.toml\n", "it is no lock file of uv: "),
        ('{"version": 1}', "it is no lock file of uv: "),
        ("<<<<<<< HEAD\n" + HEAD, "it is no lock file of uv: "),
        ("", "it is no lock file of uv"),
        ('package = "thing"\n', "it is no lock file of uv"),
    ],
)
def test_a_lock_file_is_judged_before_anything_is_installed(
    tmp_path: Path, text: str, why: str | None
) -> None:
    lock = tmp_path / "uv.lock"
    lock.write_text(text)
    fault = Way(lock.name, None, packaging=PROJECT, lock=lock).fault((3, 11, 7))
    assert (fault is None) if why is None else (fault is not None and why in fault)


@pytest.mark.parametrize(
    ("wanted", "is_allowed"),
    [("", True), (">=3.10,<3.12", True), (">=3.11.8", False), ("~=3.12", False), ("x", True)],
)
def test_a_required_python_is_compared_with_the_one_that_is_there(
    wanted: str, is_allowed: bool
) -> None:
    assert allows_python(wanted, (3, 11, 7)) is is_allowed


@pytest.mark.parametrize(
    ("names", "ways"),
    [
        ("pyproject.toml uv.lock requirements.txt", "uv.lock pyproject.toml requirements.txt"),
        ("pyproject.toml", "pyproject.toml"),
        ("uv.lock requirements.txt", "requirements.txt"),
        ("requirements.txt server/requirements.txt", "server/requirements.txt requirements.txt"),
        ("Dockerfile", "Dockerfile"),
        ("Dockerfile requirements.txt", "requirements.txt Dockerfile"),
        ("setup.py", "setup.py"),
        ("", ""),
    ],
)
def test_each_way_is_for_where_those_before_it_cannot_be_used(
    tmp_path: Path, names: str, ways: str
) -> None:
    (tmp_path / "server").mkdir()
    for name in names.split():
        (tmp_path / name).write_text(TEXTS[name])
    assert " ".join(way.name for way in ways_of(tmp_path)) == ways


@pytest.mark.parametrize(
    ("pyproject", "is_used"),
    [
        ('[project]\nname = "x"\ndependencies = ["a"]\n', True),
        ('[project]\nname = "x"\ndynamic = ["dependencies"]\n', True),
        ('[build-system]\nrequires = ["hatchling"]\n', True),
        ("[tool.poetry]\nname = 'x'\n", True),
        ('[project]\nname = "x"\n', False),
        ("[tool.ruff]\nline-length = 100\n", False),
        ("project = 3\n", False),
        ("not toml [", False),
    ],
)
def test_a_pyproject_that_names_no_needs_gives_way_to_requirements(
    tmp_path: Path, pyproject: str, is_used: bool
) -> None:
    (tmp_path / "pyproject.toml").write_text(pyproject)
    assert [way.name for way in ways_of(tmp_path)] == ["pyproject.toml"]
    (tmp_path / "requirements.txt").write_text("a\n")
    assert ("pyproject.toml" in [way.name for way in ways_of(tmp_path)]) is is_used


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", "[tool.poetry]\nname = 'my-env'\nversion = '1.2'\n"),
        ("setup.cfg", "[metadata]\nname = my-env\nversion = 1.2\n"),
        ("setup.py", "setup(name='my-env', version=\"1.2\", packages=[])\n"),
    ],
)
def test_a_project_s_own_version_is_known_from_where_it_stands(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    metadata = metadata_of(tmp_path)["my_env-1.2.dist-info/METADATA"]
    assert "Name: my-env\nVersion: 1.2\n" in metadata


@pytest.mark.parametrize(
    "more",
    [
        "[build-system]\nrequires = ['setuptools-scm>=8']\n",
        "dynamic = ['version']\n[tool.hatch.version]\npath = 'my_env.py'\n",
    ],
)
def test_a_version_that_only_a_build_knows_is_0(tmp_path: Path, more: str) -> None:
    (tmp_path / "my_env.py").write_text("__version__ = '1.2'")
    (tmp_path / "pyproject.toml").write_text(f"[project]\nname = 'my-env'\n{more}")
    assert "my_env-0.dist-info/METADATA" in metadata_of(tmp_path)


def test_files_that_requirements_name_have_paths_that_an_image_may_have(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "requirements.txt").write_text("-r more/base.txt\n")
    (tmp_path / "more" / "base.txt").write_text("a\n-c ../limits.txt\n")
    (tmp_path / "limits.txt").write_text("a<2\n")
    [way] = ways_of(tmp_path)
    names = ["requirements.txt", "more/base.txt", "limits.txt"]
    assert way.files == [tmp_path / name for name in names]


@pytest.mark.parametrize("line", ["-e .", ".[x]", "./part", "--editable=sub"])
def test_requirements_that_name_a_folder_are_installed_from_a_copy(
    tmp_path: Path, line: str
) -> None:
    (tmp_path / "requirements.txt").write_text(f"a\n{line}\n")
    [way] = ways_of(tmp_path)
    assert way.is_dynamic


def test_the_requirements_that_the_dockerfile_installs_come_first(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("a\n")
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "needs.txt").write_text("b\n")
    (tmp_path / "Dockerfile").write_text(
        "FROM x\nCOPY . /app\nRUN python -m pip install -r /app/docker/needs.txt && \\\n"
        "    uv pip install --system c\n"
    )
    first, *others = ways_of(tmp_path)
    assert (first.name, first.packages) == ("docker/needs.txt", ("c",))
    assert [way.name for way in others] == ["requirements.txt", "Dockerfile"]


@pytest.mark.parametrize(
    ("tool", "written"),
    [
        ("setuptools_scm]\nwrite_to = 'src/my_env/_version.py'", "src/my_env/_version.py"),
        ("setuptools_scm]\nversion_file = 'my_env/_version.py'", "my_env/_version.py"),
        ("hatch.build.hooks.vcs]\nversion-file = 'my_env/_version.py'", "my_env/_version.py"),
        ("pdm.version]\nwrite_to = 'my_env/_version.py'", "src/my_env/_version.py"),
    ],
)
def test_a_module_that_the_build_writes_is_imported_and_not_written(
    tmp_path: Path, tool: str, written: str
) -> None:
    project, site = tmp_path / "project", tmp_path / "finder"
    (project / written).parent.mkdir(parents=True)
    (project / written).with_name("__init__.py").write_text("from ._version import version")
    (project / "pyproject.toml").write_text(
        f"[project]\nname = 'my-env'\nversion = '1.2.dev3'\n[tool.{tool}\n"
    )
    for name, text in metadata_of(project).items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    code = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.insert(0, sys.argv[1])\n"
    code += "import my_env, my_env._version as v; print(my_env.version, v.version_tuple)\n"
    code += "import json._version"
    command = [sys.executable, "-c", code, str((project / written).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "1.2.dev3 (1, 2, 'dev3')\n"
    assert "No module named 'json._version'" in done.stderr
    assert not (project / written).exists()
