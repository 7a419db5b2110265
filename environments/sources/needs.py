# SPDX-License-Identifier: Apache-2.0
"""The ways to install what a project needs, in order; each where the ones before cannot be used.

    uv.lock ─▶ pyproject.toml ─▶ requirements: those that the Dockerfile installs, else those that
    lie in the project ─▶ the packages that the Dockerfile installs

The author's own set-up reads one of these files, and the others may be months old: above all a lock
file is made once, and published with every later version. So each is judged by what is in it before
anything is installed. Pure functions of the files.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .dockerfile import find_dockerfile, find_file, installed, read_text

_REQUIREMENTS = ("server/requirements.txt", "requirements.txt")
_BUILDS = ("setup.py", "setup.cfg")
_NAME = re.compile(r"\s*([A-Za-z0-9][\w.-]*)")
_CLAUSE = re.compile(r"(~=|===?|!=|<=|>=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?")
_COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """One way to install what a project needs.

    Attributes:
        name: What it is called in messages.
        file: The file that uv installs from; None: there are packages alone.
        packages: What is installed beside, or instead of, what the file names.
        lock: The lock file whose versions are installed.
    """

    name: str
    file: Path | None
    packages: tuple[str, ...] = ()
    lock: Path | None = None

    @property
    def requires_python(self) -> str | None:
        """The versions of Python that the project can run on, as its `pyproject.toml` has them."""
        wanted = table_in(self.packaging, "project").get("requires-python")
        return str(wanted) if wanted else None

    @property
    def is_dynamic(self) -> bool:
        """Whether what it needs stands in no file: its build system must be asked."""
        project = table_in(self.packaging, "project")
        is_static = bool(project) and "dependencies" not in project.get("dynamic", ())
        return bool(self.packaging) and not is_static

    @property
    def packaging(self) -> dict[str, Any]:
        """What its `pyproject.toml` says; nothing where it is another file."""
        is_project = self.file is not None and self.file.suffix == ".toml"
        return packaging_of(self.file.parent) if is_project and self.file is not None else {}


def ways_of(folder: Path) -> list[Way]:
    """Return the ways, the best first; none for a project that says nothing of what it needs."""
    return list(_ways(folder)) or [
        Way(path.name, path) for path in [folder / "pyproject.toml"] if path.is_file()
    ]


def _ways(folder: Path) -> Iterator[Way]:
    pyproject, lock = folder / "pyproject.toml", folder / "uv.lock"
    if _names_needs(packaging_of(folder), folder):
        if lock.is_file():
            yield Way("uv.lock", pyproject, lock=lock)
        yield Way("pyproject.toml", pyproject)
    dockerfile = find_dockerfile(folder)
    files, packages = installed("" if dockerfile is None else read_text(dockerfile))
    named = [found for each in files if (found := find_file(each, folder)) is not None]
    lying = [path for name in _REQUIREMENTS if (path := folder / name).is_file()]
    for path in dict.fromkeys([*(path for path in named if path.suffix == ".txt"), *lying]):
        beside = tuple(packages) if path in named else ()
        yield Way(str(path.relative_to(folder)), path, beside)
    if packages and dockerfile is not None:
        yield Way(str(dockerfile.relative_to(folder)), None, tuple(packages))


def _names_needs(packaging: Mapping[str, Any], folder: Path) -> bool:
    project = packaging.get("project")
    if isinstance(project, dict):
        return bool(project.get("dependencies")) or "dependencies" in project.get("dynamic", ())
    if not packaging:
        return False
    builds = any((folder / name).is_file() for name in _BUILDS)
    return builds or "build-system" in packaging or bool(table_in(packaging, "tool", "poetry"))


def lock_fault(text: str, packaging: Mapping[str, Any], python: Sequence[int] | None) -> str | None:
    """Say why the versions of a lock file cannot be installed for a project; None: they can.

    Args:
        text: The lock file.
        packaging: What the project's `pyproject.toml` says.
        python: The version of the Python that runs it; None: not known.
    """
    try:
        lock = parse_toml(text)
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
    names = {_normal(str(each.get("name"))) for each in packages}
    own = str(table_in(packaging, "project").get("name", ""))
    if own and _normal(own) not in names:
        return f"it is of another project: {own} is not in it"
    lacking = [name for name in _direct(packaging) if name not in names]
    return f"it lacks {', '.join(lacking)}, which pyproject.toml names" if lacking else None


def names_with_wheels(text: str) -> list[str]:
    """Return the packages of a lock file that it names wheels of."""
    packages = parse_toml(text).get("package", [])
    return [str(each["name"]) for each in packages if each.get("wheels")]


def allows_python(wanted: str, python: Sequence[int]) -> bool:
    """Tell whether a `requires-python` allows a version; what is not understood allows it."""
    return all(_allows(match, tuple(python)) for match in _CLAUSE.finditer(wanted))


def _allows(clause: re.Match[str], python: tuple[int, ...]) -> bool:
    sign, text, has_star = clause.groups()
    version = tuple(map(int, text.split(".")))
    length = len(version) - (1 if sign == "~=" else 0)
    begins = python[:length] == version[:length]
    if sign in ("==", "===", "!="):
        same = begins if has_star else _padded(python) == _padded(version)
        return same is (sign != "!=")
    if sign == "~=":
        return begins and python >= version
    return _COMPARED[sign](_padded(python), _padded(version))


def _padded(version: tuple[int, ...]) -> tuple[int, ...]:
    return (*version, 0, 0, 0)[: max(3, len(version))]


def _direct(packaging: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of what a project needs itself, on any machine."""
    for requirement in table_in(packaging, "project").get("dependencies", ()):
        found = _NAME.match(str(requirement))
        if found is not None and ";" not in requirement:
            yield _normal(found[1])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def metadata_of(packaging: Mapping[str, Any]) -> dict[str, str]:
    """Return the files by which `importlib.metadata` finds a project, by their paths; maybe none.

    The project is served from its folder, and is not installed. Its version and its entry points
    are known all the same, as they are where its author has installed it.
    """
    project = table_in(packaging, "project")
    name, version = str(project.get("name", "")), str(project.get("version", "0"))
    if not (re.fullmatch(r"[\w.-]+", name) and re.fullmatch(r"[\w.+!-]+", version)):
        return {}
    folder = f"{_normal(name).replace('-', '_')}-{version}.dist-info"
    groups = {"console_scripts": table_in(project, "scripts"), **table_in(project, "entry-points")}
    points = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
    ]
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{folder}/INSTALLER": "openenvd\n",
        f"{folder}/RECORD": "",
        f"{folder}/entry_points.txt": "\n".join([*points, ""]),
    }


def parse_toml(text: str) -> dict[str, Any]:
    """Return what a text in TOML says.

    Raises:
        ValueError: It is none.
    """
    import tomllib  # 2 MB that only projects need

    return tomllib.loads(text)


def packaging_of(folder: Path) -> dict[str, Any]:
    """Return what a folder's `pyproject.toml` says; nothing when it cannot be read."""
    try:
        return parse_toml((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # uv says what is wrong with it, with more care


def table_in(packaging: Any, *names: str) -> dict[str, Any]:
    """Return a table by the names on the way to it; nothing where there is none."""
    for name in names:
        packaging = packaging.get(name) if isinstance(packaging, dict) else None
    return packaging if isinstance(packaging, dict) else {}
