# SPDX-License-Identifier: Apache-2.0
"""The program of a replica: its Python, its folder, and the configuration of the env host.

It is decided once for each launch, and is the same for all replicas; `engines/` start it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ...schema.errors import InvalidSpec, UnknownSource
from ...schema.protocol import HostConfig, ServeOptions
from ...schema.spec import EnvironmentSpec
from ...system.text.json_lines import Json
from .app_place import stands_alone
from .needs import read_toml, table_in
from .resolve import Bundled, ClassSource, Image, Project, ResolvedSource

HOST_PROGRAM = Path(__file__).resolve().parents[2] / "env_host" / "__main__.py"
# The same program for a fork of our Python, without exec: its modules are imported already.
HOST_ENTRY = "openenvd.env_host.main:main"


@dataclass(frozen=True, slots=True)
class Program:
    """The program that serves one environment."""

    python: Path
    folder: Path  # the folder in which it runs
    config: HostConfig
    # Import names of folders that have other names: upstream's template maps the package `my_env`
    # to the project's own folder. A folder with a link for each name comes first in `sys.path`.
    links: dict[str, Path] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)  # variables; the user's and ours win

    @property
    def argv(self) -> tuple[str, ...]:
        """Return the command line; by `-P`, the working folder is not added to `sys.path`."""
        return (str(self.python), "-P", str(HOST_PROGRAM))

    @property
    def entry(self) -> str | None:
        """Return the function for a forked process; None: another Python must be started."""
        return HOST_ENTRY if str(self.python) == sys.executable else None

    def to_json(self) -> Json:
        """Return a JSON object that `prepared_from_json` can read."""
        links = {name: str(folder) for name, folder in self.links.items()}
        own = {"python": str(self.python), "folder": str(self.folder), "links": links}
        return own | {"config": self.config.to_json(), "env": self.env}


@dataclass(frozen=True, slots=True)
class ContainerImage:
    """An image that replicas run: its permanent reference, and its name."""

    reference: str
    name: str

    def to_json(self) -> Json:
        """Return a JSON object that `prepared_from_json` can read."""
        return asdict(self)


Prepared = Program | ContainerImage


def prepared_from_json(data: Json) -> Prepared:
    """Read a program or an image that `to_json` wrote."""
    if "reference" in data:
        return ContainerImage(**data)
    links = {name: Path(folder) for name, folder in data["links"].items()}
    config = HostConfig.from_json(data["config"])
    return Program(Path(data["python"]), Path(data["folder"]), config, links, data["env"])


def program_of(spec: EnvironmentSpec, source: ResolvedSource, python: Path | None) -> Program:
    """Return the program for a source; `python` is the project's own, None: ours.

    Raises `InvalidSpec` if the specification says `serve_as_is`, and the source has no app;
    `UnknownSource` if it is an image.
    """
    own = python or Path(sys.executable)
    links: dict[str, Path] = {}
    env: dict[str, str] = {}
    match source:
        case Bundled(manifest=manifest):
            folder = manifest.path.parent
            data = _plain(manifest.data)
            config = HostConfig(manifest.name, env_class=manifest.env_class, manifest=data)
        case ClassSource(reference=reference, folder=folder):
            config = HostConfig(spec.name, env_class=reference, import_paths=(str(folder),))
        case Project(folder=folder):
            config, links = _project_config(source, own)
            env = {name: text for name, text in source.variables.items() if text is not None}
            folder = source.app.cwd or folder
        case Image(reference=image):
            raise UnknownSource(f"{image} is an image already", "launch it as it is")
    if config.env_class is not None and spec.serve_as_is:
        message = f"{config.env_class} is a class: it has no app that could be served as it is"
        raise InvalidSpec(message, "leave out --set serve-as-is=yes")
    options = {item.name: getattr(spec, item.name) for item in fields(ServeOptions)}
    return Program(own, folder, replace(config, **options), links, env)


def package_of(project: Project) -> str | None:
    """Return the import name of an upstream project, by its packaging.

    Upstream's template has it twice: in the package that is mapped to the folder itself, and in the
    `server` script. Older projects have it only as their name, or their folder's.
    """
    packaging = read_toml(project.folder / "pyproject.toml")
    mapped = table_in(packaging, "tool", "setuptools", "package-dir")
    itself = [name for name, path in mapped.items() if name and path in (".", "./")]
    script = table_in(packaging, "project", "scripts").get("server", "")
    module, _, _ = str(script).partition(":")
    candidates = [
        *itself,
        module.partition(".server")[0] if ".server" in module else "",
        project.app.package or "",
        project.manifest.name.replace("-", "_"),
        project.folder.name.replace("-", "_"),
    ]
    return next((name for name in candidates if name.isidentifier() and name != "server"), None)


def app_candidates(package: str | None, app: str) -> tuple[str, ...]:
    """Return the references by which an app may be imported: in its package, then by its own name.

    Some projects can be imported only as part of their package, others only as top-level modules.
    """
    is_one = package is None or app.startswith(f"{package}.")
    return (app,) if is_one else (f"{package}.{app}", app)


def _project_config(project: Project, python: Path) -> tuple[HostConfig, dict[str, Path]]:
    """Return the env host's configuration for a project, and the symbolic links that it needs."""
    folder, manifest, app = project.folder, project.manifest, project.app
    paths = tuple(str(path) for path in (folder, folder / "src") if path.is_dir())
    config = HostConfig(manifest.name, import_paths=paths, manifest=_plain(manifest.data))
    if manifest.env_class is not None:
        return replace(config, env_class=manifest.env_class), {}
    package = package_of(project)
    candidates = app_candidates(package, app.reference)
    module = app.reference.partition(":")[0]
    # As the author's own server imports it: perhaps without the package's `__init__`.
    if app.package is None and stands_alone([*app.folders, *map(Path, paths)], module):
        candidates = candidates[::-1]
    usual = app_candidates(package, app.fallback)
    config = replace(
        config,
        app_candidates=candidates,
        app_fallbacks=tuple(app for app in usual if app not in candidates),
        app_place=app.place,
        venv=None if str(python) == sys.executable else str(python.parent.parent),
        import_paths=(*map(str, app.folders), *paths),
    )
    names = [each for each in (package, app.package) if each is not None and each.isidentifier()]
    return config, {
        name: folder for name in names if not any((Path(path) / name).is_dir() for path in paths)
    }


def _plain(value: Any) -> Any:
    """Return a value of YAML as one of JSON; dates, and numbers that JSON lacks, become text."""
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, int) and value.bit_length() > 63:
        return hex(value)  # as decimal it may exceed Python's limit on digits
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
