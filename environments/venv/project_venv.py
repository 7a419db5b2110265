# SPDX-License-Identifier: Apache-2.0
"""The virtual environment of an upstream project: made once by uv, found again by a key.

    key = what the project says it needs (pyproject.toml, uv.lock, requirements) + our Python
    venvs/<key>.lock     held while it is made: two launches at once make it once
    venvs/<key>/         bin/, lib/, …; and `complete`, written last

Each use writes `used`; unused environments are removed one day (`cleanup.py`). A folder without
`complete` was left by a launch that failed or was killed: the next launch starts afresh. The
project itself is not installed (its folder is on the import path), and nothing is written into its
folder: no lock file, no egg-info, no byte code.

With a `uv.lock`, its versions are installed (`uv export`), from the user's own package index, and
only files that have the hashes that stand there; what the env host needs comes beside them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ...system.process_identity import boot_seconds
from ..errors import PreparationFailed
from ..layout import Layout, make_private
from ..sources.content import COPY_IGNORED
from ..sources.resolve import Project
from .uv import Say, Uv, UvFailed

COMPLETE = "complete"
USED = "used"  # at which second of which boot; its own time is for people
KEY_VERSION = 2  # a higher one makes every environment anew

# What the env host itself needs; a project on upstream's package has all of it already.
HOST_REQUIREMENTS = ("uvicorn>=0.35", "websockets>=13", "pydantic>=2")
# Faster, and done without where there is no wheel for the project's Python.
HOST_EXTRAS = ("uvloop", "httptools", "orjson")

_PIN = re.compile(r"([\w.-]+)==([\w.+!]*\w)")  # in what uv says
_REMOVED = " - "  # begins uv's line about a package that it has taken away


def project_python(project: Project, layout: Layout, say: Say) -> Path | None:
    """Return the Python of the project's own environment, which is made if there is none yet.

    Returns:
        The interpreter; None when the project declares no dependencies: then our own serves it.

    Raises:
        PreparationFailed: uv failed; the message has its last lines.
    """
    if project.dependencies_file is None:
        return None
    venv = layout.venvs / venv_key(project)
    note = {"project": str(project.folder)}
    return make_once(venv, note, Builder(project, venv, say).build, say)


def make_once(venv: Path, note: dict[str, Any], build: Callable[[], None], say: Say) -> Path:
    """Return the environment's Python; it is made first if there is none yet.

    Args:
        venv: Where it is.
        note: What `complete` is to say about it.
        build: Makes it.
        say: Gets lines about what happens.

    Raises:
        PreparationFailed: it cannot be made.
    """
    make_private(venv.parent)
    if not note_use(venv):
        with _locked(venv, say):
            if not note_use(venv):
                _make(venv, note, build, say)
    return venv / "bin" / "python"


def note_use(venv: Path) -> bool:
    """Mark the environment as used, so that it is not removed for a while; whether it is complete."""
    if is_complete(venv):
        with contextlib.suppress(OSError):  # removed just now; or a disk that cannot be written
            (venv / USED).write_text(repr(boot_seconds()))
    return is_complete(venv)


def noted_of(venv: Path) -> dict[str, Any]:
    """Return what is noted about the environment; nothing when it is not complete.

    `project`: the folder it was made for; `base`: the environment that it is laid over.
    """
    try:
        return dict(json.loads((venv / COMPLETE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


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
    uv = _packaging(dependencies).get("tool", {}).get("uv", {})
    # What it needs depends on where it lies: `../shared`, a workspace, `setup.py`.
    if "sources" in uv or "workspace" in uv or is_dynamic(dependencies):
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


def _make(venv: Path, note: dict[str, Any], build: Callable[[], None], say: Say) -> None:
    started = time.monotonic()
    shutil.rmtree(venv, ignore_errors=True)
    try:
        build()
    except BaseException:  # cancelled, too: what is half made must not be taken for whole
        shutil.rmtree(venv, ignore_errors=True)
        raise
    seconds = time.monotonic() - started
    note = {**note, "made_at": time.time(), "seconds": round(seconds, 2)}
    (venv / COMPLETE).write_text(json.dumps(note))
    say(f"dependencies installed in {seconds:.1f} s; the next launch reuses them")


class Builder:
    """Makes one virtual environment."""

    def __init__(self, project: Project, venv: Path, say: Say) -> None:
        self._project = project
        self._venv = venv
        self._say = say
        self._uv = Uv(project.folder, say)

    def build(self) -> None:
        """Make the environment, and install all that the project needs.

        Raises:
            PreparationFailed: uv failed; the message has its last lines.
        """
        self._say(f"installing the dependencies of {self._project.manifest.name} (first launch)")
        try:
            self._uv.make_venv(self._find_python(), self._venv)
            with tempfile.TemporaryDirectory(prefix="openenvd-") as scratch:
                self._install(Path(scratch))
        except UvFailed as exc:
            message = f"the dependencies of {self._project.manifest.name} cannot be installed"
            raise exc.explained(message, f"look at {self._project.dependencies_file}") from exc
        try:
            self._uv.install(self._venv, "--only-binary", ":all:", *HOST_EXTRAS)
        except UvFailed as exc:
            self._say(f"continuing without {', '.join(HOST_EXTRAS)}: {exc.cause}")

    def _find_python(self) -> str:
        """Ours, when the project's `requires-python` allows it; otherwise another one that does."""
        wanted = requires_python(self._project.dependencies_file)
        if not wanted:
            return sys.executable
        options = ("--no-project", "--python-preference", "system")
        try:
            return self._uv.run("python", "find", *options, str(wanted), quiet=True)[-1]
        except UvFailed as exc:
            raise PreparationFailed(
                f"{self._project.manifest.name} needs Python {wanted}; there is none on this "
                f"machine (this is {sys.version.split()[0]})",
                f"install one (uv python install '{wanted}'), or change requires-python in "
                f"{self._project.folder / 'pyproject.toml'}",
            ) from exc

    def _install(self, scratch: Path) -> None:
        """Install what the project needs, and what the env host needs beside it."""
        dependencies = self._project.dependencies_file
        assert dependencies is not None
        lock = self._project.folder / "uv.lock"
        if not lock.is_file() or dependencies.suffix != ".toml":
            needed = self._requirements(dependencies, scratch)
            self._uv.install(self._venv, "-r", str(needed), *HOST_REQUIREMENTS)
            return
        exported = scratch / "requirements.txt"
        options = ("--quiet", "--frozen", "--no-dev", "--no-emit-project")
        try:
            self._uv.run("export", *options, "--output-file", str(exported))
            self._uv.install(self._venv, "--verify-hashes", "--no-deps", "-r", str(exported))
        except UvFailed as exc:
            message = f"the versions that {lock} names cannot be installed"
            raise exc.explained(message, f"look at {place_in_lock(lock, exc.lines)}") from exc
        for line in self._uv.install(self._venv, *HOST_REQUIREMENTS):
            if line.startswith(_REMOVED):
                pinned = line.removeprefix(_REMOVED)
                self._say(f"{pinned} of uv.lock is too old for the env host, and was replaced")

    def _requirements(self, dependencies: Path, scratch: Path) -> Path:
        """A file that uv can install from without writing into the project's folder."""
        if not is_dynamic(dependencies):
            return dependencies
        # Its build system must be asked what it needs, and leaves traces where it is asked.
        copy = scratch / self._project.folder.name
        shutil.copytree(self._project.folder, copy, ignore=COPY_IGNORED, symlinks=True)
        return copy / dependencies.name


def place_in_lock(lock: Path, lines: Iterable[str]) -> str:
    """Where the lock file pins the first package that uv names: `uv.lock, line 12: thing==1.0`."""
    try:
        text = lock.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return str(lock)
    for name, version in _PIN.findall(" ".join(lines)):
        at = text.find(f'name = "{name}"\nversion = "{version}"\n')
        if at >= 0:
            line = text.count("\n", 0, at) + 1
            return f"{lock}, line {line}: {name}=={version}"
    return str(lock)


def _packaging(path: Path | None) -> dict[str, Any]:
    if path is None or path.suffix != ".toml":
        return {}
    import tomllib  # 2 MB that only projects need

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # uv says what is wrong with it


def requires_python(dependencies: Path | None) -> str | None:
    """Return which versions of Python a project can run on, as its `pyproject.toml` spells them."""
    wanted = _packaging(dependencies).get("project", {}).get("requires-python")
    return str(wanted) if wanted else None


def is_dynamic(dependencies: Path) -> bool:
    """Whether what it needs stands in no file: its build system must be asked."""
    packaging = _packaging(dependencies)
    project = packaging.get("project")
    if not packaging:
        return False
    return project is None or "dependencies" in project.get("dynamic", ())
