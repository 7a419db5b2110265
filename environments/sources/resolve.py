# SPDX-License-Identifier: Apache-2.0
"""Resolves a source, as the user wrote it, to the environment that it names.

    echo               a bundled name (it wins over a folder of that name, which is ./echo)
    my_env, ./my_env   a folder with `openenv.yaml`, or with an app
    module:Class       a class, found from the folder in which the user is
    docker://IMAGE     a container image, which an engine runs
    git+https://…      a folder of a git repository, and hf://ORG/NAME: `repository.py`

Nothing is imported or started here; `program.py` makes a program of a source.

The module also checks names of images, and makes tags for images that are built here.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...schema.errors import UnknownSource
from ...system.text.units import near_matches
from .app_place import App, choose_app
from .dockerfile import read_dockerfile, variables_here
from .manifest import MANIFEST_NAME, Manifest, is_reference, read_manifest
from .needs import Way, read_toml, table_in, ways_of
from .repository import is_repository, parse_repository

SCHEME = "docker://"
REPOSITORY = "openenvd"  # of images that are built here: openenvd/my-env:4f1d…
_DIGEST_LENGTH = 12
# distribution/reference: a registry with its port, a path, and a tag or a digest.
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REGISTRY = r"[A-Za-z0-9][A-Za-z0-9.-]*(?::[0-9]+)?"
_REFERENCE = re.compile(
    rf"(?:{_REGISTRY}/)?{_PART}(?:/{_PART})*(?::[\w][\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)


def image_of(source: str) -> str | None:
    """Return the image that a source names, or None; raises as `check_reference` does."""
    if not source.startswith(SCHEME):
        return None
    return check_reference(source.removeprefix(SCHEME))


def check_reference(image: str) -> str:
    """Return the name of an image if it is a possible one; raises `UnknownSource` otherwise."""
    if _REFERENCE.fullmatch(image) is None:
        raise UnknownSource(
            f"{image!r} cannot be the name of an image",
            "write docker://NAME:TAG or docker://REGISTRY/NAME:TAG, in lower case",
        )
    return image


def digest_in_repository(image: str, digests: Iterable[str]) -> str | None:
    """Return the digest of an image in the repository of its name; None: it has none there.

    `digests` are its names (`NAME@sha256:…`) in all repositories from which it was pulled, or to
    which it was pushed.
    """
    if "@" in image:
        return image
    own = _repository_of(image)
    return next((each for each in digests if _repository_of(each) == own), None)


def _repository_of(image: str) -> tuple[str, str]:
    """Return the registry and the path of an image's name, as Docker completes them."""
    from docker.auth import INDEX_NAME, resolve_repository_name  # the reference for names
    from docker.utils import parse_repository_tag

    registry, path = resolve_repository_name(parse_repository_tag(image)[0])
    is_official = registry == INDEX_NAME and "/" not in path
    return registry, f"library/{path}" if is_official else path


def tag_of(name: str, digest: str) -> str:
    """Return the name of an image that is built here; the same files have the same digest."""
    word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "env"
    return f"{REPOSITORY}/{word}:{digest[:_DIGEST_LENGTH]}"


BUNDLED_FOLDER = Path(__file__).resolve().parents[2] / "env_host" / "bundled"
# Folders in a project's folder that are not part of the project.
COPY_IGNORED = shutil.ignore_patterns(".git", ".venv", "venv", "__pycache__", "node_modules")
_UNKNOWN_SCHEMES = ("http://", "https://", "git+", "git://", "ssh://")


@dataclass(frozen=True, slots=True)
class Bundled:
    """An environment that comes with openenvd."""

    name: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Project:
    """A folder with `openenv.yaml`, or with an app."""

    folder: Path
    manifest: Manifest
    app: App = field(default_factory=App)
    dockerfile: str = ""  # its path in the folder
    # By which its Dockerfile configures its server
    variables: dict[str, str | None] = field(default_factory=dict)

    @property
    def ways(self) -> list[Way]:
        """Return the ways to install its needs; none: it needs only openenvd."""
        return ways_of(self.folder)

    def notes(self, given: Iterable[str] = ()) -> tuple[str, ...]:
        """Return sentences for the user, who has `given` some variables, about how it was read."""
        notes = [self.app.note] if self.app.note is not None else []
        own = [(name, value) for name, value in self.variables.items() if name not in given]
        if taken := ", ".join(name for name, value in own if value is not None):
            notes.append(f"{self.dockerfile} sets {taken} (-e NAME=VALUE overrides)")
        if lacking := [name for name, value in own if value is None]:
            why = "not passed on, as it is a path that is not here, or not known; give it with"
            options = " ".join(f"-e {each}=…" for each in lacking)
            notes.append(f"{', '.join(lacking)} of {self.dockerfile}: {why} {options}")
        warnings = (f"warning: {each}" for each in self.manifest.warnings)
        return (*warnings, *(f"note: {each}" for each in notes))


@dataclass(frozen=True, slots=True)
class ClassSource:
    """A class that is found from a folder."""

    reference: str  # `module:Class`
    folder: Path

    @property
    def module(self) -> str:
        """Return the first part of the module's dotted name."""
        return self.reference.partition(":")[0].partition(".")[0]


@dataclass(frozen=True, slots=True)
class Image:
    """A container image."""

    reference: str


ResolvedSource = Bundled | Project | ClassSource | Image


def describe(source: ResolvedSource) -> str:
    """Return a sentence about a source for the launch's log."""
    match source:
        case Bundled(name=name):
            return f"{name} comes with openenvd"
        case Project(folder=folder, manifest=manifest):
            return f"{manifest.name} is the project in {folder}"
        case ClassSource(reference=reference, folder=folder):
            return f"{reference} is imported from {folder}"
        case Image(reference=reference):
            return f"{reference} is an image"


def bundled() -> dict[str, Path]:
    """Return the folders of the environments that come with openenvd, by their names."""
    return {
        path.parent.name: path.parent for path in sorted(BUNDLED_FOLDER.glob(f"*/{MANIFEST_NAME}"))
    }


def resolve(source: str, cwd: Path) -> ResolvedSource:
    """Return the environment that a source names, for a user who is in the folder `cwd`.

    Raises:
        UnknownSource: It names none; the hint has near names, and what can be launched.
            A repository is fetched before (`preparation/checkout.py`).
        ManifestError: The folder's `openenv.yaml` is wrong.
    """
    if source.startswith(_UNKNOWN_SCHEMES):
        message = f"{source} cannot be launched: only git+https:// repositories are fetched"
        hint = f"write git+{source}" if source.startswith("https://") else "or launch a clone of it"
        raise UnknownSource(message, hint)
    if (image := image_of(source)) is not None:
        return Image(image)
    if (folder_of := bundled().get(source)) is not None:
        return Bundled(source, read_manifest(folder_of))
    try:
        folder = cwd / Path(source).expanduser()
        if folder.is_dir():
            return _project(folder.resolve())
        if is_reference(source):
            return ClassSource(source, cwd)
        raise _unknown(source, folder)
    except (OSError, RuntimeError) as exc:  # it is too long, unreadable, or an unknown user's `~`
        why = getattr(exc, "strerror", None) or exc
        message = f"{source!r} cannot be looked for: {why}"
        raise UnknownSource(message, f"launch {_what_can_be_launched()}") from exc


def check_source(payload: Mapping[str, Any]) -> None:
    """Raise `UnknownSource` if a request's source cannot be launched; no manifest is read."""
    source, cwd = payload["source"], Path(payload.get("cwd") or Path.cwd())
    # If so, a class may be in a further package, or in another folder.
    has_more = bool(payload.get("with_packages")) or "PYTHONPATH" in payload.get("env", {})
    with suppress(OSError, RuntimeError):  # `resolve` says why
        if (cwd / Path(source).expanduser() / MANIFEST_NAME).is_file():
            return
    if source in bundled():
        return
    if is_repository(source):
        parse_repository(source)
        return
    found = resolve(source, cwd)
    if not isinstance(found, ClassSource) or has_more:
        return
    importlib.invalidate_caches()  # folders may have changed
    name = found.module  # it is not imported
    is_beside = PathFinder.find_spec(name, [str(found.folder)]) is not None
    if not is_beside and name not in sys.modules and find_spec(name) is None:
        raise without_module(found)


def without_module(source: ClassSource) -> UnknownSource:
    """Return the error about a class whose module is missing."""
    return UnknownSource(
        f"{source.reference}: there is no module {source.module} in {source.folder}",
        "go to the folder that has it, or make a project: uvx openenv init NAME",
    )


def _project(folder: Path) -> Project:
    manifest = read_manifest(folder)
    dockerfile = read_dockerfile(folder)
    name, variables = dockerfile.name, variables_here(dockerfile)
    if manifest.env_class is not None:
        return Project(folder, manifest, dockerfile=name, variables=variables)
    is_named = manifest.path.exists()
    app = None
    if is_named or not any((parent / MANIFEST_NAME).is_file() for parent in folder.parents):
        scripts = table_in(read_toml(folder / "pyproject.toml"), "project", "scripts")
        app = choose_app(folder, manifest.app, manifest.app_place, scripts)
    if not is_named and app is None:
        message = f"{folder} has no {MANIFEST_NAME} and no app, so it is not an environment"
        raise UnknownSource(message, _hint_for_folder(folder))
    if manifest.fault is not None and app is None:
        raise manifest.fault
    manifest = manifest if is_named else replace(manifest, warnings=())
    app = app or App(place=manifest.app_place)
    return Project(folder, manifest, app, name, variables)


def _hint_for_folder(folder: Path) -> str:
    for inside in sorted(folder.glob(f"*/{MANIFEST_NAME}")):
        return f"there is one inside: openenv launch {inside.parent}"
    for parent in folder.parents:
        if (parent / MANIFEST_NAME).is_file():
            return f"there is one above: openenv launch {parent}"
    return f"launch {_what_can_be_launched()}; `uvx openenv init NAME` makes a new project"


def _unknown(source: str, path: Path) -> UnknownSource:
    module = path if path.suffix == ".py" else path.with_name(f"{path.name}.py")
    hint = f"launch {_what_can_be_launched()}"
    if path.name == MANIFEST_NAME:
        hint = f"launch its folder: openenv launch {path.parent}"
    elif module.is_file():
        hint = f"launch a class of it, in {path.parent}: openenv launch {path.stem}:CLASS"
    if path.is_file():
        return UnknownSource(f"{path} is a file", hint)
    if module.is_file():
        return UnknownSource(f"{source!r} is a module", hint)
    _, hint = near_matches(path.name.lower(), bundled(), "")
    return UnknownSource(
        f"there is no environment {source!r}: it is neither a bundled name nor a folder at {path}",
        f"{hint} You can launch {_what_can_be_launched()}".lstrip(),
    )


def _what_can_be_launched() -> str:
    names = ", ".join(bundled())
    return (
        f"a bundled name ({names}), a folder with {MANIFEST_NAME}, module:Class, docker://IMAGE, or"
        " git+https://HOST/PATH"
    )
