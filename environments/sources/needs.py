# SPDX-License-Identifier: Apache-2.0
"""Finds the ways to install what a project needs; each is used if those before it cannot be.

    uv.lock ─▶ pyproject.toml ─▶ requirements: those that the Dockerfile installs, else those in the
    project's folder ─▶ setup.py ─▶ the packages that the Dockerfile installs

Requirements, packages, extras and groups that the Dockerfile installs are added to those that
`uv.lock` or `pyproject.toml` names. If they cannot be installed together, those that
`pyproject.toml` names are installed alone.

The author's own set-up reads one of these files, and the others may be months old: often a lock
file is made once, and published with every later version. So each file is checked before anything
is installed. All functions depend on the files alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .dockerfile import find_file, read_dockerfile, read_text

_REQUIREMENTS = ("server/requirements.txt", "requirements.txt")
_BUILDS = ("setup.py", "setup.cfg")
_BY_SETUP: Mapping[str, Any] = {"build-system": {}}  # equivalent content of `pyproject.toml`
# Lines of a file of requirements that name another such file, or a folder here.
_NESTED = re.compile(r"(?m)^\s*(?:-r|-c|--requirement|--constraint)[\s=]*(\S+)")
_FOLDER = re.compile(r"(?m)^\s*(?:(?:-e|--editable)[\s=]+(?!\w+[+:])|\.{1,2}(?:/|\[|\s*$)|file:)")
# The settings of setuptools-scm, hatch-vcs and PDM that name a module which a build writes.
_WRITTEN = re.compile(r"""(?:write_to|version[_-]file)["']?\s*[:=]\s*["']?([^"'\n]+\.py)""")
_VERSION_TEXT = """\
__version__ = version = {version!r}
__version_tuple__ = version_tuple = {numbers!r}
"""
_FINDER = """\
import os, sys
from importlib.util import spec_from_file_location

def find_spec(name, path=None, target=None):
    for folder in path or sys.path:
        file = os.path.realpath(os.path.join(folder, name.rpartition(".")[2] + ".py"))
        tops = [file[: -len(each)] for each in {names} if file.endswith("/" + each)]
        if any(os.path.isfile(top + each) for top in tops for each in {roots}):
            return spec_from_file_location(name, __file__.removesuffix("finder.py") + "version.py")

sys.meta_path.append(sys.modules[__name__])
"""
_NAMED = re.compile(r"""(?m)^\s*(name|version)\s*=\s*["']?([\w.+!-]+)""")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to install what a project needs."""

    name: str  # its name in messages
    file: Path | None  # the file from which uv installs; None: there are only packages
    packages: tuple[str, ...] = ()  # packages beside, or instead of, those in the file
    lock: Path | None = None  # the lock file whose versions are installed
    # The content of the file, if it is the project's `pyproject.toml`
    packaging: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[Path, ...] = ()  # further files of requirements
    options: tuple[str, ...] = ()  # of uv, for extras and groups of the project
    folder: Path = Path()  # of the project

    @property
    def files(self) -> list[Path]:
        """Return all files that say what is installed, including those that others name."""
        own = [each for each in (self.lock, self.file, *self.beside) if each is not None]
        return list(dict.fromkeys(found for each in own for found in _with_nested(each)))

    @property
    def has_more(self) -> bool:
        """Return whether more packages are installed than the project itself names."""
        return bool(self.packaging and (self.packages or self.beside))

    @property
    def requires_python(self) -> str | None:
        """Return the versions of Python that the project supports, by its `pyproject.toml`."""
        wanted = table_in(self.packaging, "project").get("requires-python")
        return str(wanted) if wanted else None

    @property
    def is_dynamic(self) -> bool:
        """Return whether no file lists the needs, so that the build system must be asked."""
        project = table_in(self.packaging, "project")
        is_static = bool(project) and "dependencies" not in project.get("dynamic", ())
        names_folder = (_FOLDER.search(read_text(each)) for each in self.files if _is_list(each))
        return (bool(self.packaging) and not is_static) or any(names_folder)

    def fault(self, python: Sequence[int] | None) -> str | None:
        """Return why its lock file cannot be used on a version of Python; None: it can be used."""
        if self.lock is None:
            return None
        try:
            lock = parse_toml(read_text(self.lock))
        except ValueError as exc:
            return f"it is no lock file of uv: {exc}"
        packages = lock.get("package", [])
        if "version" not in lock or not all(isinstance(each, dict) for each in packages):
            return "it is no lock file of uv"
        wanted = str(lock.get("requires-python", ""))
        if python is not None and not allows_python(wanted, python):
            return f"it was made for Python {wanted}, and this is {'.'.join(map(str, python))}"
        if not packages:
            return "it has no packages"
        names = {normalized(str(each.get("name"))) for each in packages}
        project = table_in(self.packaging, "project")
        own = str(project.get("name", ""))
        if own and normalized(own) not in names:
            return f"it is of another project: {own} is not in it"
        everywhere = [str(each) for each in project.get("dependencies", ()) if ";" not in str(each)]
        lacking = [each for each in map(normalized, everywhere) if each and each not in names]
        if lacking:
            return f"it lacks {', '.join(lacking)}, which pyproject.toml names"
        # A folder or file that it names may not have been published.
        sources = [table_in(each, "source") for each in packages]
        places = (each.get(kind) for each in sources for kind in ("directory", "editable", "path"))
        absent = [each for each in places if each and not (self.lock.parent / each).exists()]
        return f"it names {absent[0]}, which is not there" if absent else None

    @property
    def locked_wheels(self) -> tuple[str, ...] | None:
        """Return the packages of which its lock file has wheels; None: there is no lock file."""
        if self.lock is None:
            return None
        packages = parse_toml(read_text(self.lock)).get("package", [])
        return tuple(str(each["name"]) for each in packages if each.get("wheels"))


def ways_of(folder: Path) -> list[Way]:
    """Return the ways for a project, the best first; none: it does not say what it needs."""
    path = folder / "pyproject.toml"
    by_project = Way(path.name, path, packaging=read_toml(path), folder=folder)
    ways = list(_ways(folder, by_project))
    return ways if ways or not path.is_file() else [by_project]


def _ways(folder: Path, by_project: Way) -> Iterator[Way]:
    lock = folder / "uv.lock"
    dockerfile = read_dockerfile(folder)
    packages = tuple(dict.fromkeys(dockerfile.packages))
    found = (find_file(each, folder) for each in dict.fromkeys(dockerfile.files))
    named = [path for path in found if path is not None and _is_list(path)]
    if _names_needs(by_project.packaging, folder):
        by_project = replace(by_project, options=tuple(_declared(dockerfile.options, by_project)))
        known = table_in(by_project.packaging, "project").get("dependencies", ())
        names = set(map(normalized, known)) if isinstance(known, list) else set()
        further = tuple(p for p in packages if "[" in p or normalized(p) not in names)
        with_more = replace(by_project, packages=further, beside=tuple(named))
        if lock.is_file():
            yield replace(with_more, name=lock.name, lock=lock)
        if with_more.has_more:
            yield replace(with_more, name=f"{by_project.name} and {dockerfile.name}")
        yield by_project
    lying = [path for name in _REQUIREMENTS if (path := folder / name).is_file()]
    for path in dict.fromkeys([*named, *lying]):
        beside = packages if path in named else ()
        yield Way(str(path.relative_to(folder)), path, beside, folder=folder)
    builds = [path for name in _BUILDS if (path := folder / name).is_file()]
    if builds and not by_project.packaging:
        yield replace(by_project, name=builds[0].name, file=builds[0], packaging=_BY_SETUP)
    if packages:
        yield Way(dockerfile.name, None, packages)


def _is_list(path: Path) -> bool:
    return path.suffix == ".txt"


def _with_nested(path: Path, depth: int = 0) -> Iterator[Path]:
    """Yield a file, and the further files of requirements that it names."""
    yield path
    for line in _NESTED.finditer(read_text(path) if _is_list(path) and depth < 5 else ""):
        if (nested := Path(os.path.normpath(path.parent / line[1]))).is_file():
            yield from _with_nested(nested, depth + 1)


def _declared(options: Sequence[str], way: Way) -> Iterator[str]:
    """Yield uv's options for extras and groups in a Dockerfile, if the project has these."""
    extras = table_in(way.packaging, "project", "optional-dependencies")
    groups = table_in(way.packaging, "dependency-groups")
    for option in options:
        kind, _, asked = option.partition(" ")
        there = extras if "extra" in kind else groups
        for name in there:
            if kind.startswith("--all") or normalized(name) == normalized(asked):
                yield from ("--extra" if there is extras else "--group", name)


def _names_needs(packaging: Mapping[str, Any], folder: Path) -> bool:
    project = packaging.get("project")
    if isinstance(project, dict):
        return bool(project.get("dependencies")) or "dependencies" in project.get("dynamic", ())
    builds = any((folder / name).is_file() for name in _BUILDS) or "build-system" in packaging
    return bool(packaging) and (builds or bool(table_in(packaging, "tool", "poetry")))


def allows_python(wanted: str, python: Sequence[int]) -> bool:
    """Return whether a `requires-python` allows a version, or is invalid."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # 2 MB, for lock files alone

    try:
        return SpecifierSet(wanted).contains(".".join(map(str, python)))
    except InvalidSpecifier:
        return True


def normalized(requirement: str) -> str:
    """Return the normalized name of a requirement's package, or an empty text."""
    found = re.match(r"\s*([A-Za-z0-9][\w.-]*)", requirement)
    return "" if found is None else re.sub(r"[-_.]+", "-", found[1]).lower()


def metadata_of(folder: Path) -> dict[str, str]:
    """Return by path, if there are any, the files with which `importlib.metadata` finds a project.

    The project is served from its folder, and is not installed. With these files, its version and
    its entry points are known as in an installation. A version that only a build knows is 0: with
    each change of it the virtual environment would be made again.
    """
    packaging = read_toml(folder / "pyproject.toml")
    project = table_in(packaging, "project") or table_in(packaging, "tool", "poetry")
    for build in _BUILDS:
        text = re.sub(r"([(,])", r"\1\n", read_text(folder / build))
        project = project or dict(_NAMED.findall(text))
    name = str(project.get("name", ""))
    version = str(project.get("version") or "0")
    if not (re.fullmatch(r"[\w.-]+", name) and re.fullmatch(r"[\w.+!-]+", version)):
        return {}
    info = f"{normalized(name).replace('-', '_')}-{version}.dist-info"
    groups = {"console_scripts": table_in(project, "scripts"), **table_in(project, "entry-points")}
    points: list[str] = []
    for group, entries in groups.items():
        points += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    return {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/INSTALLER": "openenvd\n",
        f"{info}/RECORD": "",
        f"{info}/entry_points.txt": "\n".join([*points, ""]),
        **_version_module(folder, version),
    }


def _version_module(folder: Path, version: str) -> dict[str, str]:
    """Return the module into which a build would write the version, and its import finder.

    The project's folder is not changed: an import of `my_env/_version.py` loads the module here.
    """
    texts = (read_text(folder / name) for name in ("pyproject.toml", *_BUILDS))
    named = [name for text in texts for name in _WRITTEN.findall(text)]
    if not named:
        return {}
    names = [*named, *(f"src/{each}" for each in named)]
    numbers = tuple(int(each) if each.isdecimal() else each for each in re.split(r"[.+]", version))
    return {
        "_openenvd_version.py": _VERSION_TEXT.format(version=version, numbers=numbers),
        "_openenvd_finder.py": _FINDER.format(names=names, roots=("pyproject.toml", *_BUILDS)),
        "_openenvd_finder.pth": "import _openenvd_finder\n",
    }


def parse_toml(text: str) -> dict[str, Any]:
    """Return the content of a TOML text; raises `ValueError`."""
    import tomllib  # 2 MB, for projects alone

    return tomllib.loads(text)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; empty if it cannot be read, since uv reports why."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def table_in(packaging: Any, *names: str) -> dict[str, Any]:
    """Return a nested table by the names that lead to it; empty if there is none."""
    for name in names:
        packaging = packaging.get(name) if isinstance(packaging, dict) else None
    return packaging if isinstance(packaging, dict) else {}
