# SPDX-License-Identifier: Apache-2.0
"""What an image is built from; `smoke_tests/engines/test_docker.py` builds one."""

import io
import json
import shlex
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from openenvd.environments.engines.docker.options import hint_on
from openenvd.environments.preparation.image_build import DockerCli
from openenvd.environments.preparation.image_context import Context, context_of, dockerfile
from openenvd.environments.sources.program import program_of
from openenvd.environments.sources.resolve import digest_in_repository, image_of, resolve, tag_of
from openenvd.schema.errors import EngineFailed, PreparationFailed, UnknownSource
from openenvd.schema.protocol import HostConfig
from openenvd.schema.spec import DEFAULT_BASE, EnvironmentSpec

PYPROJECT = """
[project]
name = "openenv-my_env"
requires-python = ">=3.11"
dependencies = ["openenv>=0.2"]
[tool.setuptools]
package-dir = { "my_env" = "." }
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "my_env"
    (folder / "server").mkdir(parents=True)
    (folder / "openenv.yaml").write_text("name: my_env\napp: server.app:app\n")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "server" / "app.py").write_text("app = None\n")
    return folder


def context(source: str, cwd: Path, base: str = DEFAULT_BASE, *more: str) -> Context:
    found = resolve(source, cwd)
    spec = EnvironmentSpec(name="any", source=source)
    return context_of(found, program_of(spec, found, None), base, more)


def text_of(project: Path, base: str = DEFAULT_BASE) -> str:
    return dockerfile(context(str(project), project, base))


def names(made: Context) -> set[str]:
    archive = io.BytesIO()
    made.write(archive)
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        return set(tar.getnames())


def own_names(made: Context) -> set[str]:
    return {name for name in names(made) if name.startswith("project/")}


def test_the_project_lies_under_the_name_that_it_is_imported_by(project: Path) -> None:
    made = context(str(project), project)
    assert made.folder == "/app/my_env"
    config = HostConfig.from_json(dict(made.config))
    assert config.import_paths == ("/app", "/app/my_env")
    assert config.app_candidates == ("server.app:app", "my_env.server.app:app")
    assert config.app_place == "openenv.yaml, line 2"
    assert str(project.parent) not in text_of(project)  # no path of this machine


def test_the_env_host_and_all_it_stands_on_are_in_the_archive(tmp_path: Path) -> None:
    made = context("echo", tmp_path)
    archive = io.BytesIO()
    made.write(archive)
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        tar.extractall(tmp_path, filter="data")
    found = names(made)
    assert {"Dockerfile", "openenvd/env_host/__main__.py"} <= found
    assert not any(name.startswith("openenvd/server") for name in found)
    folders = (str(tmp_path), sysconfig.get_path("purelib"))  # without `.pth`: ours is not there
    modules = ("main", "supervisor.supervisor", "shard.shard", "bundled.echo.environment")
    imports = "; ".join(f"import openenvd.env_host.{module}" for module in modules)
    code = f"import sys; sys.path += {folders!r}; {imports}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_caches_and_what_dockerignore_names_stay_out(project: Path) -> None:
    for name in (".git/HEAD", ".venv/x", "__pycache__/x.pyc", "data/big.bin", "kept.txt"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("x")
    (project / ".dockerignore").write_text("data\n*.md\n")
    (project / "README.md").write_text("x")
    assert own_names(context(str(project), project)) == {
        "project/.dockerignore",
        "project/kept.txt",
        "project/openenv.yaml",
        "project/pyproject.toml",
        "project/server/app.py",
    }


def test_of_a_class_its_module_is_copied_with_what_it_imports_there(tmp_path: Path) -> None:
    (tmp_path / "sample_env.py").write_text("import json, hogs\nclass Sample: pass\n")
    (tmp_path / "hogs.py").write_text("def late():\n    from pens.size import wide\n")
    (tmp_path / "pens").mkdir()
    (tmp_path / "pens" / "__init__.py").write_text("from . import size\n")
    (tmp_path / "pens" / "size.py").write_text("import sample_env, numpy\nwide = 1\n")
    (tmp_path / "json").mkdir()
    for name in ("secret.txt", "other.py", "json/data.txt"):
        (tmp_path / name).write_text("x")
    made = context("sample_env:Sample", tmp_path)
    files = ("sample_env.py", "hogs.py", "pens/__init__.py", "pens/size.py")
    assert own_names(made) == {f"project/{name}" for name in files}
    [note] = made.notes
    assert f"of {tmp_path} the image has sample_env.py, hogs.py, pens; a project" in note
    assert made.config["env_class"] == "sample_env:Sample"
    assert made.config["import_paths"] == ["/app/project"]


def test_the_digest_changes_with_files_base_and_packages_alone(project: Path) -> None:
    first = context(str(project), project).digest
    assert context(str(project), project).digest == first
    assert context(str(project), project, "python:3.12-slim").digest != first
    assert context(str(project), project, DEFAULT_BASE, "numpy").digest != first
    (project / "server" / "app.py").write_text("app = 1\n")
    assert context(str(project), project).digest != first


def test_where_packages_come_from_stays_in_the_stage_that_builds(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = tmp_path / "own.pem"
    certificates.write_text("x")
    before = context(str(project), project).digest
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://user:password@index.example/simple")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates))
    made = context(str(project), project)
    text = dockerfile(made)
    assert "password" not in text
    assert made.index["UV_DEFAULT_INDEX"].endswith("index.example/simple")
    build, image = text.split("\nFROM ")
    assert "ARG UV_DEFAULT_INDEX" in build
    assert "certificates.pem" in build
    assert "UV_DEFAULT_INDEX" not in image
    assert "certificates.pem" not in image
    assert made.digest == before


LOCK = """version = 1
requires-python = ">=3.11"
[[package]]
name = "openenv-my-env"
version = "1"
source = { virtual = "." }
[[package]]
name = "openenv"
version = "1"
source = { registry = "x" }
wheels = [{ url = "x" }]
"""


def test_a_locked_project_gets_the_versions_of_its_lock(project: Path) -> None:
    assert "uv export" not in text_of(project)
    (project / "uv.lock").write_text(LOCK)
    assert "uv export" in text_of(project)
    assert "--no-deps --only-binary=openenv -r" in text_of(project)


@pytest.mark.parametrize(
    ("text", "base", "why"),
    [
        (LOCK, "python:3.10-slim", "it was made for Python >=3.11, and this is 3.10"),
        (
            LOCK.replace('registry = "x"', 'directory = "../shared"'),
            DEFAULT_BASE,
            "it names ../shared, which is not there",
        ),
    ],
)
def test_a_lock_file_that_cannot_serve_in_the_image_is_named_and_not_used(
    project: Path, text: str, base: str, why: str
) -> None:
    (project / "uv.lock").write_text(text)
    made = context(str(project), project, base)
    assert made.notes == (f"uv.lock is not used: {why}",)
    assert "uv export" not in dockerfile(made)
    assert "-r pyproject.toml" in dockerfile(made)


def test_requirements_serve_where_the_image_has_not_the_python_that_pyproject_wants(
    project: Path,
) -> None:
    (project / "pyproject.toml").write_text(
        '[project]\nname = "openenv-my-env"\nversion = "1"\nrequires-python = ">=3.12"\n'
        'dependencies = ["openenv"]\n'
    )
    assert "-r pyproject.toml" in text_of(project)
    (project / "requirements.txt").write_text("openenv\n")
    made = context(str(project), project)
    [told] = made.notes
    assert told.startswith("pyproject.toml is not used: ")
    assert "needs Python >=3.12, and python:3.11-slim has none" in told
    assert "-r requirements.txt" in dockerfile(made)


def test_the_metadata_of_the_project_are_written_where_packages_are(
    project: Path, tmp_path: Path
) -> None:
    lines = text_of(project).splitlines()
    [line] = [each for each in lines if "METADATA" in each]
    program, texts = shlex.split(line.removeprefix("RUN "))[2:]
    patched = program.replace("sysconfig.get_path('purelib')", repr(str(tmp_path)))
    subprocess.run([sys.executable, "-c", patched, texts], check=True)
    [path] = tmp_path.glob("*.dist-info/METADATA")
    assert "Name: openenv-my_env\nVersion: 0\n" in path.read_text()


def test_a_pinned_version_of_what_the_host_needs_is_replaced_in_the_image(project: Path) -> None:
    (project / "pyproject.toml").unlink()
    (project / "requirements.txt").write_text("uvicorn==0.30.1\n")
    ours = "uv pip install --no-cache 'uvicorn>=0.35' "
    assert f" || uv pip install --no-cache -r requirements.txt && {ours}" in text_of(project)


def test_what_the_dockerfile_alone_names_is_installed_in_the_image(project: Path) -> None:
    (project / "pyproject.toml").unlink()
    lines = "FROM x\nRUN pip install 'thing>=1'\nWORKDIR /a\nCOPY . .\nENV A=1 DATA=/a/data\n"
    (project / "Dockerfile").write_text(lines)
    assert "-- 'thing>=1'" in text_of(project)
    assert '\nENV A="1"\nENV DATA="/app/my_env/data"\n' in text_of(project)


def test_nothing_is_substituted_in_the_configuration() -> None:
    made = Context(base="base", config={"name": 'a "$HOME" \\n'})
    [line] = [each for each in dockerfile(made).splitlines() if "HOST_CONFIG" in each]
    value = line.partition("=")[2][1:-1]
    read = value.replace("\\$", "$").replace('\\"', '"').replace("\\\\", "\\")
    assert json.loads(read) == made.config


@pytest.mark.parametrize(
    ("source", "image"),
    [
        ("docker://echo", "echo"),
        ("docker://ghcr.io/org/echo-env:latest", "ghcr.io/org/echo-env:latest"),
        (
            "docker://localhost:5000/echo@sha256:" + "a" * 64,
            "localhost:5000/echo@sha256:" + "a" * 64,
        ),
        ("echo", None),
    ],
)
def test_an_image_is_named_by_its_source(source: str, image: str | None) -> None:
    assert image_of(source) == image


@pytest.mark.parametrize(
    ("image", "digest"),
    [
        ("env:1", "env@sha256:1"),
        ("docker.io/library/env", "env@sha256:1"),
        ("index.docker.io/team/env:2", "team/env@sha256:2"),
        ("team/env", "team/env@sha256:2"),
        ("registry.example:5000/env:1", "registry.example:5000/env@sha256:3"),
        ("localhost/env", None),
        ("other/env:1", None),
        ("env@sha256:9", "env@sha256:9"),
    ],
)
def test_an_image_is_pinned_in_the_repository_that_it_was_named_from(
    image: str, digest: str | None
) -> None:
    names = ("other.example/env", "env", "team/env", "registry.example:5000/env")
    digests = [f"{name}@sha256:{number}" for number, name in enumerate(names)]
    assert digest_in_repository(image, digests) == digest


@pytest.mark.parametrize("text", ["", "Echo", "a b", "-x", "echo:", "echo:a/b", "--rm", "a//b"])
def test_what_cannot_be_an_image_is_refused(text: str) -> None:
    with pytest.raises(UnknownSource, match="cannot be the name of an image"):
        image_of(f"docker://{text}")


@pytest.mark.parametrize("name", ["my_env", "My.Env", "__", "a--b", "ünï"])
def test_what_is_built_has_a_name_that_docker_takes(name: str) -> None:
    tag = tag_of(name, "0123456789abcdef")
    assert image_of(f"docker://{tag}") == tag


def test_without_docker_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineFailed, match="not installed") as failed:
        DockerCli(print)
    assert "apt install docker.io" in str(failed.value.hint)


def test_values_of_variables_are_not_shown_of_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'Step 3/9 : ENV KEY=\"secret\"'\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    with pytest.raises(PreparationFailed, match="ENV KEY=…") as failed:
        DockerCli(said.append).run("build")
    assert "secret" not in f"{said} {failed.value}"


@pytest.mark.parametrize(
    ("said", "command"),
    [
        ("permission denied while trying to connect to the Docker daemon socket", "usermod"),
        ("Cannot connect to the Docker daemon at unix:///x. Is it running?", "systemctl start"),
        ("pull access denied for x, repository does not exist", "docker login"),
    ],
)
def test_what_docker_complains_about_is_mended_by_a_command(said: str, command: str) -> None:
    assert command in str(hint_on(said))


def test_without_an_answer_the_hint_says_which_variables_the_daemon_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the user's shell may be others."""
    said = "Cannot connect to the Docker daemon at unix:///x. Is it running?"
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    assert "The daemon has no DOCKER_HOST and no DOCKER_CONTEXT; " in str(hint_on(said))
    assert "openenv stop; openenv up" in str(hint_on(said))
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.5:2375")
    assert "The daemon has DOCKER_HOST=tcp://10.0.0.5:2375; " in str(hint_on(said))
