# SPDX-License-Identifier: Apache-2.0
"""A project's own Python: made by the real uv from a folder of wheels, with no network."""

import io
import os
import re
import shutil
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from openenvd.environments.preparation import project_venv, uv
from openenvd.environments.preparation.project_venv import (
    is_complete,
    noted_of,
    overlay_python,
    project_python,
    venv_key,
)
from openenvd.environments.sources.resolve import Project, resolve
from openenvd.schema.errors import PreparationFailed
from openenvd.schema.layout import Layout

from ...disks import mounted

PYPROJECT = '[project]\nname = "sample"\nversion = "1"\n'
BACKEND = """
import pathlib


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    open("README.md").close()
    pathlib.Path("left-behind").touch()
    info = pathlib.Path(folder, "sample-1.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\\nName: sample\\nVersion: 1\\nRequires-Dist: thing==1.0\\n"
    )
    (info / "WHEEL").write_text("Wheel-Version: 1.0\\nTag: py3-none-any\\n")
    return info.name
"""


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where packages come from."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("COLUMNS", "40")  # as a shell may export it
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(project_venv, "HOST_REQUIREMENTS", ("thing",))
    monkeypatch.setattr(project_venv, "HOST_EXTRAS", ("thing",))
    make_wheel(folder, "thing", "1.0")
    make_wheel(folder, "thing", "2.0")
    return folder


class Index(SimpleHTTPRequestHandler):
    """A package index, which names the hashes of its files."""

    def do_GET(self) -> None:
        if not self.path.startswith("/simple/"):
            super().do_GET()
            return
        name = self.path.removeprefix("/simple/").strip("/")
        paths = Path(self.directory).glob(f"{name.replace('-', '_')}-*.*")
        links = [
            f'<a href="/{p.name}#sha256={sha256(p.read_bytes()).hexdigest()}">{p.name}</a>'
            for p in sorted(paths)
        ]
        self.send_response(200 if links else 404)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write("\n".join(links).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("UV_NO_INDEX")
    monkeypatch.delenv("UV_FIND_LINKS")
    monkeypatch.delenv("UV_OFFLINE", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Index, directory=str(wheels))) as server:
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{server.server_port}/simple")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield wheels
        server.shutdown()


def locked(folder: Path, requirement: str = "thing<2") -> Project:
    project = make_project(
        folder, 'requires-python = ">=3.11"', f'dependencies = ["{requirement}"]'
    )
    lock(project)
    return project


def make_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(
            f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )


def make_sdist(folder: Path, name: str, version: str) -> None:
    """Turn the wheel that lies in the folder into a source distribution, which builds to it."""
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    build = f"return shutil.copy({wheel.name!r}, folder).rpartition('/')[2]\n"
    texts = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "own"\n'
        f'backend-path = ["."]\n[project]\nname = "{name}"\nversion = "{version}"\n',
        "own.py": f"import shutil\n\ndef build_wheel(folder, *args, **named):\n    {build}",
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    }
    with tarfile.open(folder / f"{name}-{version}.tar.gz", "w:gz") as archive:
        archive.add(wheel, f"{name}-{version}/{wheel.name}")
        for path, text in texts.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    wheel.unlink()


def make_project(folder: Path, *lines: str, **files: str) -> Project:
    folder.mkdir(exist_ok=True)
    (folder / "openenv.yaml").write_text("name: sample\n")
    (folder / "pyproject.toml").write_text(PYPROJECT + "\n".join(lines))
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    found = resolve(str(folder), folder)
    assert isinstance(found, Project)
    return found


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def lock(project: Project, *options: str) -> Path:
    command = [uv.find_uv(), "lock", "--quiet", *options]
    subprocess.run(command, cwd=project.folder, check=True)
    return project.folder / "uv.lock"


def version_seen_by(python: Path | None, module: str = "thing") -> str:
    assert python is not None
    code = f"import {module}; print({module}.version)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_dependencies_are_installed_once_and_the_projects_folder_is_unchanged(
    tmp_path: Path, layout: Layout
) -> None:
    project = make_project(tmp_path / "p", 'dependencies = ["thing==1.0"]')
    before = listing(project.folder)
    said: list[str] = []
    first = project_python(project, layout, said.append)
    assert version_seen_by(first) == "1.0"
    assert listing(project.folder) == before
    assert any("dependencies installed" in line for line in said)
    said.clear()
    assert project_python(project, layout, said.append) == first
    assert said == []


@pytest.mark.parametrize("follows", ["pyproject.toml", "requirements.txt"])
def test_a_project_finds_its_own_version_and_entry_points(
    tmp_path: Path, layout: Layout, follows: str
) -> None:
    lines = ['dependencies = ["thing"]'] if follows == "pyproject.toml" else []
    lines += ['[project.entry-points."sample.plugins"]', 'own = "sample:plugin"']
    texts = {} if follows == "pyproject.toml" else {"requirements_txt": "thing\n"}
    python = project_python(make_project(tmp_path / "p", *lines, **texts), layout, lambda _: None)
    assert python is not None
    code = (
        "from importlib.metadata import entry_points, version\n"
        "print(version('sample'), *(each.value for each in entry_points(group='sample.plugins')))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 sample:plugin\n"


def test_a_lock_file_decides_the_versions_and_the_hashes_of_their_files(
    tmp_path: Path, layout: Layout, index: Path
) -> None:
    project = locked(tmp_path / "p")
    make_wheel(index, "thing", "1.5")
    before = listing(project.folder)
    assert version_seen_by(project_python(project, layout, lambda _: None)) == "1.0"
    assert listing(project.folder) == before
    path = project.folder / "uv.lock"
    text = path.read_text()
    found = re.search(r"sha256:(\w{64})", text)
    assert found is not None
    path.write_text(text.replace(found[1], "0" * 64))
    with pytest.raises(PreparationFailed) as caught:
        project_python(project, layout, lambda _: None)
    assert str(caught.value).startswith(f"the versions that {path} names cannot be installed")
    assert "Hash mismatch for `thing==1.0`" in str(caught.value).splitlines()[0]
    assert f"look at {path};" in str(caught.value.hint)


@pytest.mark.usefixtures("index")
def test_an_index_that_cannot_be_reached_is_no_fault_of_the_lock_file(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = locked(tmp_path / "p")
    text = (project.folder / "uv.lock").read_text()
    (project.folder / "uv.lock").write_text(re.sub(r"127.0.0.1:\d+", "127.0.0.1:9", text))
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(PreparationFailed) as caught:
        project_python(project, layout, lambda _: None)
    reached = "see whether http://127.0.0.1:9/simple, where packages come from, is reached"
    assert caught.value.hint == reached


def test_a_version_that_the_index_no_longer_has_is_named_and_another_is_installed(
    tmp_path: Path, layout: Layout, index: Path
) -> None:
    project = locked(tmp_path / "p", "thing")
    (index / "thing-2.0-py3-none-any.whl").unlink()
    said: list[str] = []
    assert version_seen_by(project_python(project, layout, said.append)) == "1.0"
    [told] = [line for line in said if "uv.lock" in line]
    assert told.startswith("uv.lock is not used: Because there is no version of thing==2.0")
    assert told.endswith("; installing from pyproject.toml")


LATER_LOCK = """version = 9
requires-python = ">=3.10"
[[package]]
name = "sample"
version = "1"
source = { virtual = "." }
[[package]]
name = "thing"
version = "1.0"
source = { registry = "wheels" }
"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("thing==1.0\n    # via -r pyproject.toml\n", "no lock file of uv"),
        (LATER_LOCK, "uv cannot read it"),
    ],
)
@pytest.mark.parametrize("follows", ["pyproject.toml", "requirements.txt", "Dockerfile"])
def test_a_lock_file_that_cannot_serve_is_named_in_one_line_and_not_used(
    tmp_path: Path, layout: Layout, text: str, why: str, follows: str
) -> None:
    """The other reasons are those of `test_needs.py`, which needs no uv."""
    wanted = "thing" if follows == "pyproject.toml" else "not-there"
    project = make_project(tmp_path / "p", f'dependencies = ["{wanted}"]')
    (project.folder / "uv.lock").write_text(text.replace("thing", wanted))
    if follows == "requirements.txt":
        (project.folder / follows).write_text("thing==2.0")
    else:
        (project.folder / "Dockerfile").write_text("FROM x\nRUN pip install thing==2.0\n")
    said: list[str] = []
    assert version_seen_by(project_python(project, layout, said.append)) == "2.0"
    [told] = [line for line in said if line.startswith("uv.lock")]
    assert why in told
    assert "; installing from pyproject.toml" in told
    assert not any("--frozen" in line for line in said)
    assert any(line.endswith(f"; installing from {follows}") for line in said)


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("has_lock", [True, False])
@pytest.mark.parametrize(
    "run", ["pip install more", "pip install -r needs.txt", "uv sync --extra x", "pip install .[x]"]
)
def test_what_the_dockerfile_installs_beside_the_project_is_there(
    tmp_path: Path, layout: Layout, wheels: Path, run: str, has_lock: bool
) -> None:
    make_wheel(wheels, "more", "1.0")
    extras = '[project.optional-dependencies]\nx = ["more"]'
    project = make_project(
        tmp_path / "p", 'requires-python = ">=3.11"', 'dependencies = ["thing"]', extras
    )
    (project.folder / "needs.txt").write_text("-r nested.txt\n")
    (project.folder / "nested.txt").write_text("more\n")
    (project.folder / "Dockerfile").write_text(f"FROM x\nRUN {run}\n")
    if has_lock:
        lock(project)
    python = project_python(project, layout, print)
    assert (version_seen_by(python), version_seen_by(python, "more")) == ("2.0", "1.0")
    before = venv_key(project)
    (project.folder / "nested.txt").write_text("other\n")
    assert (venv_key(project) != before) is ("-r" in run)


def test_where_what_the_dockerfile_installs_is_not_to_be_had_the_project_is_installed_alone(
    tmp_path: Path, layout: Layout
) -> None:
    project = make_project(tmp_path / "p", 'dependencies = ["thing"]')
    (project.folder / "Dockerfile").write_text("FROM x\nRUN pip install not-there\n")
    said: list[str] = []
    assert version_seen_by(project_python(project, layout, said.append)) == "2.0"
    [told] = [line for line in said if "is not used" in line]
    assert told.startswith("pyproject.toml and Dockerfile is not used: Because not-there")


@pytest.mark.usefixtures("index")
def test_nothing_is_compiled_without_a_word_and_never_for_the_sake_of_a_lock_file(
    tmp_path: Path, layout: Layout, wheels: Path
) -> None:
    make_wheel(wheels, "thing", "3.0")
    project = locked(tmp_path / "p", "thing")
    other = wheels / "thing-3.0-cp399-cp399-any.whl"
    shutil.copy(wheels / "thing-3.0-py3-none-any.whl", other)
    text = (project.folder / "uv.lock").read_text()
    (project.folder / "uv.lock").write_text(text.replace("3.0-py3-none", "3.0-cp399-cp399"))
    make_sdist(wheels, "thing", "3.0")
    said: list[str] = []
    assert version_seen_by(project_python(project, layout, said.append)) == "3.0"
    [told] = [line for line in said if line.startswith("uv.lock is not used")]
    assert "thing==3.0 has no" in told
    compiled = "building thing==3.0 from source, which may take minutes: no wheel fits this Python"
    assert said.index(told) < said.index(f"  uv: {compiled}")


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ('requires-python = ">=4.5"', "needs Python >=4.5: No interpreter found for Python"),
        ('requires-python = ">=abc"', "needs Python >=abc: No interpreter found for executable"),
        ('requires-python = "==3.98.*"', "needs Python ==3.98.*: Querying Python"),
        (
            '[tool.uv.sources]\nthing = { path = "../not-there" }',
            "Distribution not found at: file:",
        ),
    ],
)
def test_another_file_serves_where_what_pyproject_wants_is_not_found(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch, wanted: str, why: str
) -> None:
    broken = tmp_path / "python3.98"  # as pyenv has one for each version
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    project = make_project(
        tmp_path / "p",
        'dependencies = ["thing"]',
        wanted,
        requirements_txt="thing==1.0\n",
        uv_lock="version = 1\n",
    )
    said: list[str] = []
    assert version_seen_by(project_python(project, layout, said.append)) == "1.0"
    [told] = [line for line in said if line.startswith("pyproject.toml is not used")]
    assert why in told
    assert told.endswith("; installing from requirements.txt")
    is_lock_named = any(line.startswith("uv.lock is not used") for line in said)
    assert is_lock_named is ("Python" not in why)  # which is said once


@pytest.mark.usefixtures("index")
def test_what_the_host_needs_comes_beside_the_locked_versions(
    tmp_path: Path, layout: Layout, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(wheels, "needed", "1.0")
    monkeypatch.setattr(project_venv, "HOST_REQUIREMENTS", ("needed", "thing"))
    said: list[str] = []
    python = project_python(locked(tmp_path / "p"), layout, said.append)
    assert version_seen_by(python) == "1.0"
    assert version_seen_by(python, "needed") == "1.0"
    monkeypatch.setattr(project_venv, "HOST_REQUIREMENTS", ("needed", "thing>=2"))
    assert version_seen_by(project_python(locked(tmp_path / "p"), layout, said.append)) == "2.0"
    assert "thing==1.0 of uv.lock was replaced: the env host needs another version" in said


@pytest.mark.usefixtures("index")
def test_what_the_host_needs_takes_the_place_of_a_version_that_the_project_pins(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_venv, "HOST_REQUIREMENTS", ("thing>=2",))
    said: list[str] = []
    project = make_project(tmp_path / "p", 'dependencies = ["thing==1.0"]')
    assert version_seen_by(project_python(project, layout, said.append)) == "2.0"
    assert "thing==1.0 of pyproject.toml was replaced: the env host needs another version" in said


def test_a_build_writes_into_a_copy_of_the_project(tmp_path: Path, layout: Layout) -> None:
    build = ("[build-system]", "requires = []", 'build-backend = "backend"', 'backend-path = ["."]')
    lines = ('dynamic = ["dependencies"]', 'readme = "README.md"', *build)
    project = make_project(tmp_path / "p", *lines, backend_py=BACKEND)
    before = listing(project.folder)
    assert version_seen_by(project_python(project, layout, lambda _: None)) == "1.0"
    assert listing(project.folder) == before


def test_a_project_without_requirements_runs_in_our_own_python(
    tmp_path: Path, layout: Layout
) -> None:
    project = make_project(tmp_path / "p")
    (project.folder / "pyproject.toml").unlink()
    assert project_python(project, layout, lambda _: None) is None


def test_a_failure_shows_uvs_last_lines_and_does_not_prevent_a_retry(
    tmp_path: Path, layout: Layout
) -> None:
    project = make_project(tmp_path / "p", 'dependencies = ["other-thing"]')
    with pytest.raises(PreparationFailed) as caught:
        project_python(project, layout, lambda _: None)
    noted, *lines = str(caught.value).splitlines()
    assert "Because other-thing was not found" in noted
    assert any("other-thing was not found" in line for line in lines)
    assert "pyproject.toml" in str(caught.value.hint)
    assert not (layout.venvs / venv_key(project)).exists()
    make_wheel(tmp_path / "wheels", "other_thing", "1.0")
    assert project_python(project, layout, lambda _: None) is not None


@pytest.mark.parametrize("fault", ["half made", "its Python was removed"])
def test_an_environment_that_cannot_be_used_is_made_again(
    tmp_path: Path, layout: Layout, fault: str
) -> None:
    project = make_project(tmp_path / "p", 'dependencies = ["thing==1.0"]')
    python = layout.venvs / venv_key(project) / "bin" / "python"
    if fault == "half made":
        python.parent.mkdir(parents=True)
        python.write_text("half made")
        assert not is_complete(python.parents[1])
    else:
        assert project_python(project, layout, lambda _: None) == python
        python.unlink()
        python.symlink_to(tmp_path / "gone")
    assert version_seen_by(project_python(project, layout, lambda _: None)) == "1.0"


def test_a_home_where_no_program_runs_is_named(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", 'dependencies = ["thing"]')
    with mounted(tmp_path / "mounted", "noexec") as home:
        with pytest.raises(PreparationFailed, match="mounted noexec") as caught:
            project_python(project, Layout(home), lambda _: None)
        assert f"{home / 'venvs'} is on a file system" in str(caught.value)
        assert "OPENENV_HOME" in str(caught.value.hint)
        assert not any((home / "venvs").iterdir())


def test_concurrent_launches_make_one_environment(tmp_path: Path, layout: Layout) -> None:
    project = make_project(tmp_path / "p", 'dependencies = ["thing"]')
    said: list[str] = []
    found: list[Path | None] = []

    def launch() -> None:
        found.append(project_python(project, layout, said.append))

    launches = [threading.Thread(target=launch) for _ in range(4)]
    for thread in launches:
        thread.start()
    for thread in launches:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert sum("dependencies installed" in line for line in said) == 1


def test_a_cancelled_launch_leaves_no_uv_and_no_rubbish(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cancelled(BaseException):
        pass

    processes: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def noted(*args: object, **options: object) -> subprocess.Popen[str]:
        processes.append(real(*args, **options))  # type: ignore[call-overload]
        return processes[-1]

    def say(line: str) -> None:
        if "uv:" in line:
            raise Cancelled

    monkeypatch.setattr(subprocess, "Popen", noted)
    project = make_project(tmp_path / "p", 'dependencies = ["thing"]')
    with pytest.raises(Cancelled):
        project_python(project, layout, say)
    assert all(process.returncode is not None for process in processes)
    assert not (layout.venvs / venv_key(project)).exists()


def test_further_packages_are_laid_over_the_projects_environment(
    tmp_path: Path, layout: Layout, wheels: Path
) -> None:
    make_wheel(wheels, "more", "1.0")
    project = make_project(tmp_path / "p", 'dependencies = ["thing==1.0"]')
    base = project_python(project, layout, lambda _: None)
    said: list[str] = []
    for _ in range(2):
        python = overlay_python(base, ["more"], layout, tmp_path, said.append)
    assert sum("dependencies installed" in line for line in said) == 1
    assert version_seen_by(python, "more") == "1.0"
    assert version_seen_by(python) == "1.0"
    assert base is not None
    with pytest.raises(subprocess.CalledProcessError):
        version_seen_by(base, "more")
    # Which is how a cleanup knows that the project's is in use with it.
    assert noted_of(python.parent.parent)["base"] == str(base.parent.parent)


def test_a_further_package_may_be_another_version_of_one_that_the_project_has(
    tmp_path: Path, layout: Layout
) -> None:
    project = make_project(tmp_path / "p", 'dependencies = ["thing==1.0"]')
    base = project_python(project, layout, lambda _: None)
    assert version_seen_by(overlay_python(base, ["thing>1"], layout, tmp_path, print)) == "2.0"
    assert version_seen_by(base) == "1.0"


def test_a_further_package_that_does_not_exist_is_named(tmp_path: Path, layout: Layout) -> None:
    with pytest.raises(PreparationFailed, match="not-there cannot be installed beside"):
        overlay_python(None, ["not-there"], layout, tmp_path, lambda _: None)
    assert not any(layout.venvs.glob("*/"))


def test_extras_that_cannot_be_had_are_done_without(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_venv, "HOST_EXTRAS", ("not-there",))
    project = make_project(tmp_path / "p", 'dependencies = ["thing"]')
    said: list[str] = []
    assert project_python(project, layout, said.append) is not None
    [told] = [line for line in said if line.startswith("continuing")]
    assert told.startswith("continuing without not-there: Because not-there was not found")


def test_a_search_for_python_that_fails_is_not_taken_for_its_result(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "file" / "cache"))
    project = make_project(tmp_path / "p", 'requires-python = ">=3.11"', 'dependencies = ["thing"]')
    with pytest.raises(PreparationFailed, match=r"needs Python >=3\.11: failed to create"):
        project_python(project, layout, lambda _: None)


def test_the_key_depends_on_the_dependencies_and_not_on_the_folder(tmp_path: Path) -> None:
    one = make_project(tmp_path / "one", 'dependencies = ["thing"]')
    same = make_project(tmp_path / "same", 'dependencies = ["thing"]')
    other = make_project(tmp_path / "other", 'dependencies = ["thing==1.0"]')
    locked = make_project(tmp_path / "locked", 'dependencies = ["thing"]', uv_lock="version = 1\n")
    assert venv_key(one) == venv_key(same)
    assert len({venv_key(one), venv_key(other), venv_key(locked)}) == 3


def test_a_project_that_refers_to_folders_is_keyed_by_its_place(tmp_path: Path) -> None:
    text = ('dependencies = ["lib"]', '[tool.uv.sources]\nlib = { path = "../lib" }')
    one, other = (make_project(tmp_path / name, *text) for name in ("one", "other"))
    assert venv_key(one) != venv_key(other)


def test_passwords_of_an_index_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_NO_INDEX")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://me:secret@mirror.example/simple")
    assert "secret" not in uv.package_source()
    assert "mirror.example" in uv.package_source()
