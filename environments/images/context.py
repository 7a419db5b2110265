# SPDX-License-Identifier: Apache-2.0
"""The files that an image is built from, as the tar archive that the builder reads.

    Dockerfile
    needs/             what says which packages it needs: their layer stays while this does
    openenvd/          the env host, what it stands on, and the bundled environments
    project/           the project's files, but for those of version control, caches and
                       `.dockerignore`; of a class, its module alone
    certificates.pem   for the package index, where this machine has some of its own

Times and owners are left out, so that the same files make the same archive.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from ... import __version__
from ..errors import UnknownSource
from ..sources.content import files_below, hash_of, module_files
from ..sources.dockerfile import read_text
from ..sources.needs import Way, lock_fault, metadata_of, names_with_wheels, packaging_of
from ..sources.program import Program
from ..sources.resolve import Bundled, ClassSource, Image, Project, ResolvedSource
from ..venv.package_index import uv_variables
from . import recipe as recipes
from .recipe import Recipe

OWN_FOLDER = Path(__file__).resolve().parents[2]
OWN_PACKAGES = ("env_host", "system", "envs")  # what runs in other projects' Pythons
_CERTIFICATES_VARIABLE = "SSL_CERT_FILE"
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INSECURE_HOST", "UV_HTTP_TIMEOUT")

Buildable = Bundled | Project | ClassSource
Files = dict[str, Path]  # by their names in the archive


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that an image is built from."""

    recipe: Recipe
    files: Files
    certificates: Path | None
    variables: dict[str, str]  # for the command that builds
    notes: tuple[str, ...] = ()  # for the user

    @property
    def digest(self) -> str:
        """Tell apart images of other files, base or needs; wherever their packages come from."""
        plain = replace(self.recipe, index={}, has_certificates=False)
        digest = hashlib.sha256(recipes.dockerfile(plain).encode())
        for name, path in sorted(self.files.items()):
            digest.update(f"\0{name}\0{_mode_of(path)}\0".encode())
            digest.update(bytes(path.readlink()) if path.is_symlink() else hash_of(path))
        return digest.hexdigest()

    def write(self, archive: IO[bytes]) -> None:
        """Write the archive."""
        with tarfile.open(fileobj=archive, mode="w|") as tar:
            _add_text(tar, "Dockerfile", recipes.dockerfile(self.recipe))
            for folder in (recipes.NEEDS, recipes.PACKAGE, recipes.PROJECT):
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
            if self.certificates is not None:
                _add_file(tar, recipes.CERTIFICATES, self.certificates)
            for name, path in sorted(self.files.items()):
                _add_file(tar, name, path)


def context_of(
    source: ResolvedSource, program: Program, base: str, more: Iterable[str] = ()
) -> Context:
    """Collect what the image of a source is built from.

    Args:
        source: What is to be served.
        program: How it would be served on this machine.
        base: The image that it is based on.
        more: Packages to install beside what it needs.

    Raises:
        UnknownSource: It is an image, or the module of a class is not found.
    """
    if isinstance(source, Image):
        raise UnknownSource(f"{source.reference} is an image already", "launch it as it is")
    files = dict(_own_files())
    folder = _folder_in_image(source, program)
    project = source.folder if isinstance(source, Project) else None
    if project is not None:
        files |= {f"{recipes.PROJECT}/{name}": path for name, path in _project_files(project)}
    elif isinstance(source, ClassSource):
        files |= {f"{recipes.PROJECT}/{name}": path for name, path in _module_files(source).items()}
    way, why = way_in_image(source, base) if isinstance(source, Project) else (None, [])
    needs = _needs_of(way, files)
    files |= {f"{recipes.NEEDS}/{path.name}": path for path in needs}
    variables = {**uv_variables(), **os.environ}
    named = variables.get(_CERTIFICATES_VARIABLE)
    certificates = Path(named) if named and Path(named).is_file() else None
    index = {name: variables[name] for name in _INDEX_VARIABLES if name in variables}
    if "UV_DEFAULT_INDEX" in index:
        index["PIP_INDEX_URL"] = index["UV_DEFAULT_INDEX"]  # for uv itself
    made = Recipe(
        base=base,
        config=_config_in_image(source, program, folder),
        version=__version__,
        folder=folder,
        requirements=way.file.name if way is not None and way.file is not None else None,
        packages=() if way is None else way.packages,
        locked_wheels=None
        if way is None or way.lock is None
        else tuple(names_with_wheels(read_text(way.lock))),
        requires_python=None if way is None else way.requires_python,
        metadata={} if project is None else metadata_of(packaging_of(project)),
        more=tuple(more),
        index=index,
        has_certificates=certificates is not None,
    )
    return Context(made, files, certificates, index, tuple(why))


def _folder_in_image(source: Buildable, program: Program) -> str | None:
    """Return where the project lies: under the name that it is imported by, where that matters."""
    if isinstance(source, Bundled):
        return None
    name = next(iter(program.links), "project")
    return f"{recipes.PROJECTS_FOLDER}/{name}"


def _config_in_image(source: Buildable, program: Program, folder: str | None) -> dict[str, Any]:
    """Return what the env host is to serve, with the paths that it has in the image."""
    config = program.config
    here = None if isinstance(source, Bundled) else str(source.folder)
    paths = [path.replace(here, str(folder), 1) for path in config.import_paths if here is not None]
    if program.links:
        paths.insert(0, recipes.PROJECTS_FOLDER)
    place = config.app_place.replace(f"{here}/", "") if here is not None else config.app_place
    return {
        "name": config.name,
        "app_candidates": list(config.app_candidates),
        "app_fallbacks": list(config.app_fallbacks),
        "app_place": place,
        "env_class": config.env_class,
        "import_paths": paths,
        "manifest": config.manifest,
    }


def _own_files() -> Iterator[tuple[str, Path]]:
    yield f"{recipes.PACKAGE}/__init__.py", OWN_FOLDER / "__init__.py"
    for package in OWN_PACKAGES:
        for path in (OWN_FOLDER / package).rglob("*"):
            if path.suffix in (".py", ".yaml") and path.is_file():
                yield f"{recipes.PACKAGE}/{path.relative_to(OWN_FOLDER)}", path


def _project_files(folder: Path) -> Iterator[tuple[str, Path]]:
    ignored = _ignored_by_docker(folder)
    for relative, path in files_below(folder):
        if relative not in ignored:
            yield relative, path


def _ignored_by_docker(folder: Path) -> set[str]:
    """Return the paths that the project's `.dockerignore` leaves out."""
    try:
        lines = (folder / ".dockerignore").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return set()
    from docker.utils.build import exclude_paths  # the reference for the file's patterns

    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    everything = exclude_paths(str(folder), [])
    return set(everything - exclude_paths(str(folder), patterns))


def _module_files(source: ClassSource) -> Files:
    if not (found := dict(module_files(source))):
        module = source.reference.partition(":")[0].partition(".")[0]
        raise UnknownSource(
            f"{source.reference}: there is no module {module} in {source.folder}",
            "go to the folder that has it, or make a project: openenv init NAME",
        )
    return found


def way_in_image(project: Project, base: str) -> tuple[Way | None, list[str]]:
    """Return how what a project needs is installed in an image, and why not in a better way."""
    found = re.search(r"python:(\d+)\.(\d+)", base)
    python = None if found is None else (int(found[1]), int(found[2]))
    why: list[str] = []
    for way in project.ways:
        text = None if way.lock is None else read_text(way.lock)
        fault = None if text is None else lock_fault(text, way.packaging, python)
        if fault is None:
            return way, why
        why.append(f"{way.name} is not used: {fault}")
    return None, why


def _needs_of(way: Way | None, files: Files) -> list[Path]:
    """Return the files that say what a project needs."""
    if way is None:
        return []
    if way.is_dynamic:  # its build system is asked, which may read any of its files
        prefix = f"{recipes.PROJECT}/"
        own = {name: path for name, path in files.items() if name.startswith(prefix)}
        files |= {f"{recipes.NEEDS}/{n.removeprefix(prefix)}": path for n, path in own.items()}
    return [path for path in (way.file, way.lock) if path is not None]


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    data = text.encode()
    entry.size, entry.mode = len(data), 0o644
    tar.addfile(entry, io.BytesIO(data))


def _add_file(tar: tarfile.TarFile, name: str, path: Path) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode = _mode_of(path)
    if path.is_symlink() and not name.startswith(recipes.CERTIFICATES):
        entry.type, entry.linkname = tarfile.SYMTYPE, str(path.readlink())
        tar.addfile(entry)
        return
    with path.open("rb") as file:
        entry.size = os.fstat(file.fileno()).st_size
        tar.addfile(entry, file)


def _mode_of(path: Path) -> int:
    return 0o755 if path.lstat().st_mode & 0o100 else 0o644
