# SPDX-License-Identifier: Apache-2.0
"""The virtual environment of an upstream project: made once by uv, found again by a key.

    key = what the project says it needs (pyproject.toml, uv.lock, requirements) + our Python
    venvs/<key>.lock     held while it is made: two launches at once make it once
    venvs/<key>/         bin/, lib/, …; and `complete`, written last

Each use touches `complete`; unused environments are removed one day (`cleanup.py`). A folder
without `complete` was left by a launch that failed or was killed: the next launch starts afresh. The project itself is not installed (its folder is on the import path), and nothing is
written into its folder: no lock file, no egg-info, no byte code.

With a `uv.lock`, its versions are installed (`uv export`), from the user's own package index.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...processes.tree import stop_tree
from ...system.process_identity import ProcessIdentity
from ..errors import PreparationFailed, with_last_lines
from ..layout import Layout, make_private
from .package_index import uv_variables
from ..sources.resolve import Project

COMPLETE = "complete"
KEY_VERSION = 1  # a higher one makes every environment anew
LAST_LINES = 20  # of uv's output, in a failure
STOP_GRACE_SECONDS = 2.0

# What the env host itself needs; a project on upstream's package has all of it already.
HOST_REQUIREMENTS = ("uvicorn>=0.35", "websockets>=13", "pydantic>=2")
# Faster, and done without where there is no wheel for the project's Python.
HOST_EXTRAS = ("uvloop", "httptools", "orjson")

_COPY_IGNORED = shutil.ignore_patterns(".git", ".venv", "venv", "__pycache__", "node_modules")

_TEDIOUS = ("+ ", "Downloaded ", "Using Python ")  # a hundred packages, one line each

Say = Callable[[str], None]


def project_python(project: Project, layout: Layout, say: Say) -> Path | None:
    """Return the Python of the project's own environment, which is made if there is none yet.

    Returns:
        The interpreter; None when the project declares no dependencies: then our own serves it.

    Raises:
        PreparationFailed: uv failed; the message has its last lines.
    """
    if project.dependencies_file is None:
        return None
    make_private(layout.venvs)
    venv = layout.venvs / venv_key(project)
    if not note_use(venv):
        with _locked(venv, say):
            if not note_use(venv):
                _make(project, venv, say)
    return venv / "bin" / "python"


def note_use(venv: Path) -> bool:
    """Mark the environment as used, so that it is not removed for a while; whether it is complete."""
    with contextlib.suppress(OSError):  # not there; or a disk that cannot be written
        os.utime(venv / COMPLETE)
    return is_complete(venv)


def project_of(venv: Path) -> str | None:
    """Return the folder that the environment was made for; None when it is not complete."""
    try:
        return str(json.loads((venv / COMPLETE).read_bytes())["project"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def venv_key(project: Project) -> str:
    """Return the key of the environment; projects with the same needs share one."""
    digest = hashlib.sha256()
    for part in _key_parts(project):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:20]


def is_complete(venv: Path) -> bool:
    """Whether it was made to the end, and its Python has not been removed since."""
    return (venv / COMPLETE).exists() and (venv / "bin" / "python").exists()


def _key_parts(project: Project) -> Iterator[bytes]:
    yield str(KEY_VERSION).encode()
    yield f"{sys.version_info[:3]} {sys.base_prefix} {sys.platform}".encode()
    yield " ".join((*HOST_REQUIREMENTS, *HOST_EXTRAS)).encode()
    dependencies = project.dependencies_file
    assert dependencies is not None
    for path in (dependencies, project.folder / "uv.lock"):
        yield path.read_bytes() if path.is_file() else b""
    packaging = _packaging(dependencies)
    uv = packaging.get("tool", {}).get("uv", {})
    # What it needs depends on where it lies: `../shared`, a workspace, `setup.py`.
    if "sources" in uv or "workspace" in uv or _is_dynamic(packaging):
        yield os.fsencode(project.folder)


@contextlib.contextmanager
def _locked(venv: Path, say: Say) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(venv.with_name(f"{venv.name}.lock"), mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("another launch is installing the same dependencies; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(project: Project, venv: Path, say: Say) -> None:
    started = time.monotonic()
    shutil.rmtree(venv, ignore_errors=True)
    try:
        Builder(project, venv, say).build()
    except BaseException:  # cancelled, too: what is half made must not be taken for whole
        shutil.rmtree(venv, ignore_errors=True)
        raise
    seconds = time.monotonic() - started
    note = {"project": str(project.folder), "made_at": time.time(), "seconds": round(seconds, 2)}
    (venv / COMPLETE).write_text(json.dumps(note))
    say(f"dependencies installed in {seconds:.1f} s; the next launch reuses them")


class Builder:
    """Makes one virtual environment."""

    def __init__(self, project: Project, venv: Path, say: Say) -> None:
        self._project = project
        self._venv = venv
        self._say = say
        self._uv = find_uv()

    def build(self) -> None:
        """Make the environment, and install all that the project needs.

        Raises:
            PreparationFailed: uv failed; the message has its last lines.
        """
        python = self._find_python()
        self._say(f"installing the dependencies of {self._project.manifest.name} (first launch)")
        self._run("venv", "--quiet", "--no-project", "--python", python, str(self._venv))
        with tempfile.TemporaryDirectory(prefix="openenvd-") as scratch:
            self._install("-r", str(self._requirements(Path(scratch))), *HOST_REQUIREMENTS)
        try:
            self._install("--only-binary", ":all:", *HOST_EXTRAS)
        except PreparationFailed:
            self._say(f"continuing without {', '.join(HOST_EXTRAS)}")

    def _find_python(self) -> str:
        """Ours, when the project's `requires-python` allows it; otherwise another one that does."""
        packaging = _packaging(self._project.dependencies_file)
        wanted = packaging.get("project", {}).get("requires-python")
        if not wanted:
            return sys.executable
        options = ("--no-project", "--python-preference", "system")
        try:
            return self._run("python", "find", *options, str(wanted), quiet=True)[-1]
        except PreparationFailed as exc:
            raise PreparationFailed(
                f"{self._project.manifest.name} needs Python {wanted}; there is none on this "
                f"machine (this is {sys.version.split()[0]})",
                f"install one (uv python install '{wanted}'), or change requires-python in "
                f"{self._project.folder / 'pyproject.toml'}",
            ) from exc

    def _requirements(self, scratch: Path) -> Path:
        """A file that uv can install from without writing into the project's folder."""
        dependencies = self._project.dependencies_file
        assert dependencies is not None
        if (self._project.folder / "uv.lock").is_file() and dependencies.suffix == ".toml":
            exported = scratch / "requirements.txt"
            options = ("--quiet", "--frozen", "--no-dev", "--no-emit-project", "--no-hashes")
            self._run("export", *options, "--output-file", str(exported))
            return exported
        if _is_dynamic(_packaging(dependencies)):
            # Its build system must be asked what it needs, and leaves traces where it is asked.
            copy = scratch / self._project.folder.name
            shutil.copytree(self._project.folder, copy, ignore=_COPY_IGNORED, symlinks=True)
            return copy / dependencies.name
        return dependencies

    def _install(self, *arguments: str) -> None:
        python = str(self._venv / "bin" / "python")
        if uv_environment().get("UV_NO_INDEX"):  # uv has the option, but reads no such variable
            arguments = ("--no-index", *arguments)
        self._run("pip", "install", "--compile-bytecode", "--python", python, *arguments)

    def _run(self, *arguments: str, quiet: bool = False) -> list[str]:
        """uv's last lines; its output goes to the log as it comes.

        Raises:
            PreparationFailed
        """
        process = subprocess.Popen(
            [self._uv, "--color", "never", "--no-progress", *arguments],
            cwd=self._project.folder,
            env=uv_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        with process:
            try:
                assert process.stdout is not None
                said = filter(None, self._relay(process.stdout, quiet=quiet))
                lines = deque(said, maxlen=LAST_LINES)
                code = process.wait()
            except BaseException:  # uv, and the build it may be running, end with the launch
                if process.poll() is None:  # not collected, so that the pid is still its own
                    identity = ProcessIdentity.of(process.pid)
                    stop_tree(identity, grace_seconds=STOP_GRACE_SECONDS, session=False)
                raise
        if code != 0:
            raise self._failed(code, list(lines))
        return list(lines)

    def _relay(self, output: Iterator[str], *, quiet: bool) -> Iterator[str]:
        for line in map(str.rstrip, output):
            if not quiet and line and not line.lstrip().startswith(_TEDIOUS):
                self._say(f"  uv: {line}")
            yield line

    def _failed(self, code: int, lines: list[str]) -> PreparationFailed:
        source = self._project.dependencies_file
        return PreparationFailed(
            with_last_lines(
                f"the dependencies of {self._project.manifest.name} cannot be installed "
                f"(uv exited with code {code}); uv's last lines:",
                lines,
            ),
            f"look at {source}; packages come from {package_source()}",
        )


def find_uv() -> str:
    """The uv that we depend on; otherwise the user's.

    Raises:
        PreparationFailed: there is none.
    """
    beside = Path(sys.executable).with_name("uv")
    if os.access(beside, os.X_OK):  # nearly always; asking the package costs 2 MB and 20 ms
        return str(beside)
    try:
        from uv import find_uv_bin

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
    if found is None:
        raise PreparationFailed("uv, which installs projects, is not installed", "pip install uv")
    return found


def uv_environment() -> dict[str, str]:
    """The environment uv runs in: ours, with pip's package index, and nothing to lead it astray."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    # `uv python find` looks here first: our own Python, if the project can use it.
    environ |= uv_variables(environ) | {"VIRTUAL_ENV": sys.prefix}
    environ |= {"UV_PYTHON_DOWNLOADS": "never", "PYTHONDONTWRITEBYTECODE": "1"}
    environ.pop("UV_PROJECT_ENVIRONMENT", None)
    return environ


def package_source() -> str:
    """Where uv gets packages from, for people."""
    environ = uv_environment()
    index = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL") or "uv's own index"
    if environ.get("UV_NO_INDEX"):
        index = "no index"
    links = environ.get("UV_FIND_LINKS")
    return f"{_without_password(index)} and {links}" if links else _without_password(index)


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url


def _packaging(path: Path | None) -> dict[str, Any]:
    if path is None or path.suffix != ".toml":
        return {}
    import tomllib  # 2 MB that only projects need

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # uv says what is wrong with it


def _is_dynamic(packaging: dict[str, Any]) -> bool:
    project = packaging.get("project")
    if not packaging:
        return False
    return project is None or "dependencies" in project.get("dynamic", ())
