# SPDX-License-Identifier: Apache-2.0
"""The virtual environment of an upstream project: made once by uv, found again by a key.

    key = the project's requirements, in each way of `sources/needs.py` + our Python
    venvs/<key>.lock     locked while it is made, so that two launches at once make it once
    venvs/<key>/         bin/, lib/, …; and `complete`, written last

Each use writes `used`; unused environments are removed after a time (`venv_cleanup.py`). A folder
without `complete` was left by a launch that failed or was killed: the next launch makes it again.
Of the project itself only the metadata are installed, as its folder is on the import path. Nothing
is written into its folder: no lock file, no egg-info, no byte code.

The ways are tried in order. A way that cannot be used (`Unusable`) is reported in one line, and the
next is tried; any other failure (the network, a disk, a file of another hash) ends the launch. With
a `uv.lock`, its versions are installed (`uv export`), from the user's own package index, and only
files that have the hashes in the lock. If the lock has wheels of a package, one of them must fit:
so a lock that was made for another Python does not cause a package to be compiled.

An environment may be laid over another one, to add packages (`launch --with`):

    venvs/<key>/    the further packages alone; those of the base, which is not changed, are found
                    after them, through a `.pth` file (uv's own `run --with` does the same)

Its key is made of the base and the packages. A package that both need keeps the version of the
base, unless it is among those named.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...schema.errors import PreparationFailed
from ...schema.layout import Layout, make_private
from ...schema.protocol import HOST_LIBRARIES
from ...system.process.process_identity import boot_seconds
from ...system.text.safe_text import hide_credentials
from ..shim.files import read_json
from ..sources.dockerfile import read_text
from ..sources.needs import Way, metadata_of, normalized, table_in
from ..sources.resolve import COPY_IGNORED, Project
from .uv import Say, Uv, UvFailed

COMPLETE = "complete"
CHECKOUT = "git-"  # the beginning of the name of a folder that has a repository's files instead
USED = "used"  # a file with the time in seconds since boot; its modification time is for people
KEY_VERSION = 3  # raise it, and every environment is made again

# The requirements of the env host; a project on upstream's package has all of them already.
HOST_REQUIREMENTS = ("uvicorn>=0.35", "websockets>=13", "pydantic>=2")
# They are faster, and not required if there is no wheel for the project's Python. The project does
# not see them (`env_host/preload.py`).
HOST_EXTRAS = ("uvloop", "httptools", "orjson")

_README = re.compile(r"""(?m)^readme\s*=\s*["']([\w.-]+)["']""")
_REMOVED = " - "  # the beginning of uv's line about a package that it removes


def project_python(project: Project, layout: Layout, say: Say) -> Path | None:
    """Return the Python of the project's own environment, which is made if there is none yet.

    None: it needs none, and our own Python serves it. Raises `PreparationFailed` with uv's words.
    """
    if not project.ways:
        return None
    venv = layout.venvs / venv_key(project)
    note = {"project": str(project.folder)}
    return make_once(venv, note, Builder(project, venv, say).build, say)


def make_once(
    venv: Path,
    note: dict[str, Any],
    build: Callable[[], None],
    say: Say,
    what: str = "dependencies installed",
) -> Path:
    """Return the Python of an environment, which `build` makes if there is none yet.

    The `note` is written to the file `complete`, and `what` was done to the log. Raises
    `PreparationFailed`.
    """
    from filelock import FileLock, Timeout

    make_private(venv.parent)
    if os.statvfs(venv.parent).f_flag & getattr(os, "ST_NOEXEC", 0):
        text = f"{venv.parent} is on a file system mounted noexec: no package can be loaded from it"
        raise PreparationFailed(text, "mount it otherwise; or openenv stop, and set OPENENV_HOME")
    if note_use(venv):
        return venv / "bin" / "python"
    lock = FileLock(venv.with_name(f"{venv.name}.lock"), mode=0o600)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        say("another launch is preparing the same; waiting for it")
        held = lock.acquire()
    with held:
        if note_use(venv):
            return venv / "bin" / "python"
        started = time.monotonic()
        shutil.rmtree(venv, ignore_errors=True)
        try:
            build()
        except BaseException:  # also when cancelled: an incomplete environment must not be used
            shutil.rmtree(venv, ignore_errors=True)
            raise
        seconds = time.monotonic() - started
        note = {**note, "made_at": time.time(), "seconds": round(seconds, 2)}
        (venv / COMPLETE).write_text(json.dumps(note))
        note_use(venv)
        say(f"{what} in {seconds:.1f} s; the next launch reuses them")
    return venv / "bin" / "python"


def note_use(venv: Path) -> bool:
    """Mark the environment as used, so that it is kept for now; return whether it is complete."""
    if is_complete(venv):
        with contextlib.suppress(OSError):  # it was just removed, or the disk cannot be written
            (venv / USED).write_text(repr(boot_seconds()))
    return is_complete(venv)


def noted_of(venv: Path) -> dict[str, Any]:
    """Return the notes about an environment; none if it is not complete.

    `project` is the folder it was made for; `base` is the environment that it is laid over.
    """
    return read_json(venv / COMPLETE) or {}


def venv_key(project: Project) -> str:
    """Return the key of the environment; projects with the same needs share one."""
    digest = hashlib.sha256()
    for part in _key_parts(project):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:20]


def is_complete(venv: Path) -> bool:
    """Return whether an environment was completed, and its Python has not been removed since."""
    has_python = venv.name.startswith(CHECKOUT) or (venv / "bin" / "python").exists()
    return has_python and (venv / COMPLETE).exists()


def _key_parts(project: Project) -> Iterator[bytes]:
    yield str(KEY_VERSION).encode()
    yield f"{sys.version_info[:3]} {sys.base_prefix} {sys.platform}".encode()
    yield " ".join((*HOST_REQUIREMENTS, *HOST_EXTRAS)).encode()
    yield repr(sorted(metadata_of(project.folder).items())).encode()
    for way in project.ways:
        for path in way.files:
            yield path.read_bytes()
        yield " ".join((*way.options, "--", *way.packages)).encode()
        uv = table_in(way.packaging, "tool", "uv")
        # The needs depend on the folder, by a path such as `../shared`, a workspace or `setup.py`.
        if "sources" in uv or "workspace" in uv or way.is_dynamic:
            yield os.fsencode(project.folder)


class Unusable(Exception):
    """A way to install a project's needs cannot be used; `failure` is raised for the last way."""

    def __init__(self, why: str, failure: PreparationFailed | None = None) -> None:
        super().__init__(why)
        self.failure = failure or PreparationFailed(why)


class Builder:
    """Makes one virtual environment."""

    def __init__(self, project: Project, venv: Path, say: Say) -> None:
        self._project = project
        self._name = project.manifest.name
        self._venv = venv
        self._say = say
        self._uv = Uv(project.folder, say)

    def build(self) -> None:
        """Make the environment, with all that the project needs; raises `PreparationFailed`."""
        self._say(f"installing the dependencies of {self._name}")
        ways = self._project.ways
        for way, following in itertools.zip_longest(ways, ways[1:]):
            try:
                self._install(way)
                break
            except Unusable as exc:
                if following is None:
                    raise exc.failure from exc
                if not self._venv.exists() and following.requires_python == way.requires_python:
                    continue  # which has no Python either
                self._say(f"{way.name} is not used: {exc}; installing from {following.name}")
        libraries = self._venv / HOST_LIBRARIES
        libraries.mkdir(exist_ok=True)
        options = ("--target", str(libraries), "--only-binary", ":all:")
        try:
            self._uv.install(self._venv, *options, *HOST_EXTRAS)
        except UvFailed as exc:
            self._say(f"continuing without {', '.join(HOST_EXTRAS)}: {exc.cause}")
        for name, text in metadata_of(self._project.folder).items():
            path = site_packages(self._venv) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def _install(self, way: Way) -> None:
        """Install the project's needs in one way, and the env host's beside them.

        Raises `Unusable`, or `PreparationFailed` where uv failed for another reason.
        """
        python = self._find_python(way)
        shutil.rmtree(self._venv, ignore_errors=True)
        try:
            self._uv.make_venv(python, self._venv)
            with tempfile.TemporaryDirectory(prefix="openenvd-") as scratch:
                if way.lock is not None:
                    self._install_locked(way, Path(scratch, "requirements.txt"))
                    return
                files = (way.file, *way.beside) if way.file is not None else ()
                listed = [f"-r{self._copied(each, way, Path(scratch))}" for each in files]
                options = (*listed, *way.options)
                self._install_with_ours(way.name, *options, "--", *way.packages)
        except UvFailed as exc:
            message = f"the dependencies of {self._name} cannot be installed"
            if way.lock is not None:
                message = f"the versions that {way.lock} names cannot be installed"
            place = way.lock or way.file or self._project.folder / way.name
            failure = exc.explained(message, f"look at {place}")
            if exc.is_of_the_way or way.has_more:
                raise Unusable(exc.cause, failure) from exc
            raise failure from exc

    def _install_with_ours(self, pinning: str, *arguments: str) -> None:
        """Install packages, and the env host's requirements, even if other versions are pinned."""
        try:
            self._uv.install(self._venv, *HOST_REQUIREMENTS, *arguments)
        except UvFailed as exc:
            if not any(each in line for line in exc.lines for each in HOST_REQUIREMENTS):
                raise
            self._uv.install(self._venv, *arguments)
            self._replace_pinned(pinning, "the env host", *HOST_REQUIREMENTS)

    def _replace_pinned(self, pinning: str, other: str, *arguments: str) -> None:
        for line in self._uv.install(self._venv, *arguments):
            if line.startswith(_REMOVED):
                pinned = line.removeprefix(_REMOVED)
                self._say(f"{pinned} of {pinning} was replaced: {other} needs another version")

    def _find_python(self, way: Way) -> str:
        """Return a Python that the project's `requires-python` allows: ours, or else another."""
        wanted = way.requires_python
        if not wanted:
            return sys.executable
        options = ("--no-project", "--python-preference", "system")
        try:
            return self._uv.run("python", "find", *options, wanted, quiet=True)[-1]
        except UvFailed as exc:  # there is none, or the search itself failed: the cause says which
            why = f"{self._name} needs Python {wanted}: {exc.cause}"
            install = f"uv python list shows what uv finds; uv python install '{wanted}'"
            place = self._project.folder / "pyproject.toml"
            hint = f"{install} installs one; or correct requires-python in {place}"
            raise Unusable(why, PreparationFailed(why, hint)) from exc

    def _install_locked(self, way: Way, exported: Path) -> None:
        known = read_text(self._venv / "pyvenv.cfg")
        found = re.search(r"(?m)^version(?:_info)?\s*=\s*([\d.]+)", known)
        version = found and tuple(map(int, found[1].strip(".").split(".")[:3]))
        if fault := way.fault(version or None):
            raise Unusable(fault)
        options = ("--quiet", "--frozen", "--no-dev", "--no-emit-project", *way.options)
        try:
            self._uv.run("export", *options, "--output-file", str(exported), quiet=True)
        except UvFailed as exc:
            raise Unusable("uv cannot read it") from exc
        wheels = [f"--only-binary={name}" for name in way.locked_wheels or ()]
        self._uv.install(self._venv, "--verify-hashes", "--no-deps", *wheels, "-r", str(exported))
        more = [f"-r{self._copied(each, way, exported.parent)}" for each in way.beside]
        other = "the Dockerfile or the env host" if way.has_more else "the env host"
        self._replace_pinned("uv.lock", other, *more, *HOST_REQUIREMENTS, "--", *way.packages)

    def _copied(self, file: Path, way: Way, scratch: Path) -> Path:
        """Return a file from which uv can install without writing into the project's folder."""
        if not way.is_dynamic:
            return file
        # The build system must be asked for the needs, and writes into the folder where it runs.
        copy = scratch / self._project.folder.name
        if not copy.exists():
            shutil.copytree(self._project.folder, copy, ignore=COPY_IGNORED, symlinks=True)
            for name in _README.findall(read_text(copy / "pyproject.toml")):
                (copy / name).touch()  # the build reads the README, which may not be published
        return copy / file.relative_to(way.folder)


def site_packages(venv: Path) -> Path:
    """Return the folder of an environment's packages."""
    return next(venv.glob("lib/python*/site-packages"))


PTH = "openenvd-base.pth"


def overlay_python(
    base: Path | None, packages: Sequence[str], layout: Layout, folder: Path, say: Say
) -> Path:
    """Return the Python of an environment that has these packages, and all of the base's.

    The base is the interpreter of a project's environment; None: our own. Packages are written as
    for uv, with paths relative to the `folder`. Raises `PreparationFailed` with uv's last lines.
    """
    python = base or Path(sys.executable)
    below = python.parent.parent
    venv = layout.venvs / overlay_key(python, packages, folder)
    named = hide_credentials(", ".join(packages))

    def build() -> None:
        say(f"installing {named} beside the dependencies")
        try:
            _install(Uv(folder, say), python, packages, venv)
        except UvFailed as exc:
            message = f"{named} cannot be installed beside the dependencies"
            raise exc.explained(message, "look at --with") from exc
        if (below / HOST_LIBRARIES).is_dir():  # our own Python has them among its packages
            (venv / HOST_LIBRARIES).symlink_to(below / HOST_LIBRARIES)
        is_own = str(python) == sys.executable
        first = sysconfig.get_path("purelib") if is_own else str(site_packages(below))
        (site_packages(venv) / PTH).write_text(f"import site; site.addsitedir({first!r})\n")

    return make_once(venv, {"base": str(below)}, build, say)


def overlay_key(base: Path, packages: Sequence[str], folder: Path) -> str:
    """Return the key of the environment with these packages over that of the Python `base`."""
    parts = [str(KEY_VERSION), str(base), *sorted(packages)]
    if any("/" in package for package in packages):
        parts.append(str(folder))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _install(uv: Uv, base: Path, packages: Sequence[str], venv: Path) -> None:
    """Install packages, keeping the base's versions of all packages but those named."""
    uv.make_venv(str(base), venv)
    named = {normalized(package) for package in packages}
    had = uv.run("pip", "freeze", "--python", str(base), quiet=True)
    kept = [line for line in had if "==" in line and normalized(line) not in named]
    with tempfile.NamedTemporaryFile("w", prefix="openenvd-", suffix=".txt") as constraints:
        constraints.write("\n".join(kept))
        constraints.flush()
        uv.install(venv, "-c", constraints.name, "--", *packages)
