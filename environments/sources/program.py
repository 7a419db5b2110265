# SPDX-License-Identifier: Apache-2.0
"""What a replica runs: which Python, which folder, and what the env host serves.

Decided once per launch, the same for all replicas; `providers/` turns it into processes.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...env_host.protocol import HostConfig, ServeOptions
from ..errors import InvalidSpec
from ..spec import EnvironmentSpec
from .manifest import Manifest
from .needs import packaging_of, table_in
from .resolve import Bundled, ClassSource, Image, Project, ResolvedSource

HOST_PROGRAM = Path(__file__).resolve().parents[2] / "env_host" / "__main__.py"
# The same without exec, where its modules have been imported: a host in our own Python.
HOST_ENTRY = "openenvd.env_host.main:main"
HOST_PRELOAD = (
    "openenvd.env_host.preload",
    "openenvd.env_host.bundled.echo.environment",
    "openenvd.env_host.bundled.benchmark.environment",
)


@dataclass(frozen=True, slots=True)
class Program:
    """How one environment is served."""

    python: Path
    folder: Path  # where it runs
    config: HostConfig
    # Import names that stand for a folder of another name: upstream's template maps the package
    # `my_env` to the project's own folder. A link per name is put in front of `sys.path`.
    links: dict[str, Path] = field(default_factory=dict)
    image: str | None = None  # what an engine runs instead of all that: `docker://…`
    image_name: str | None = None  # the name that it had, for messages
    command: tuple[str, ...] = ()  # in the image; empty: what it says itself

    @property
    def argv(self) -> tuple[str, ...]:
        """`-P`: the folder it runs in is on `sys.path` only where the configuration says so."""
        return (str(self.python), "-P", str(HOST_PROGRAM))

    @property
    def entry(self) -> str | None:
        """What to call in a process that was forked; None when another Python must run."""
        return HOST_ENTRY if str(self.python) == sys.executable else None


def program_of(spec: EnvironmentSpec, source: ResolvedSource, python: Path | None) -> Program:
    """What to run; `python` is the project's own, None for ours.

    Raises:
        InvalidSpec: `serve_as_is` for something that has no app.
    """
    own = python or Path(sys.executable)
    match source:
        case Bundled(manifest=manifest):
            config = _class_config(spec, str(manifest.env_class), (), manifest)
            return Program(own, manifest.path.parent, config)
        case ClassSource(reference=reference, folder=folder):
            return Program(own, folder, _class_config(spec, reference, (str(folder),), None))
        case Project(folder=folder, manifest=manifest) if manifest.env_class is not None:
            paths = _import_paths(folder)
            return Program(own, folder, _class_config(spec, manifest.env_class, paths, manifest))
        case Project():
            return _project_program(spec, source, own)
        case Image(reference=image):
            config = HostConfig(name=spec.name, **_serve_options(spec))
            return Program(own, Path("/"), config, image=image)


def package_of(project: Project) -> str | None:
    """The import name of an upstream project, from what its packaging says.

    Upstream's template says it twice: as the package that is mapped to the folder itself, and in
    the `server` script. Older projects say it only by their name, or by their folder's.
    """
    packaging = packaging_of(project.folder)
    mapped = table_in(packaging, "tool", "setuptools", "package-dir")
    itself = [name for name, path in mapped.items() if name and path in (".", "./")]
    script = table_in(packaging, "project", "scripts").get("server", "")
    module, _, _ = str(script).partition(":")
    candidates = [
        *itself,
        module.partition(".server")[0] if ".server" in module else "",
        project.manifest.name.replace("-", "_"),
        project.folder.name.replace("-", "_"),
    ]
    return next((name for name in candidates if name.isidentifier() and name != "server"), None)


def app_candidates(package: str | None, app: str) -> tuple[str, ...]:
    """List how an app may be imported, the likeliest first.

    Some projects can be imported only as part of their package, others only as top-level modules.
    """
    if package is None or app.startswith(f"{package}."):
        return (app,)
    return (f"{package}.{app}", app)


def _project_program(spec: EnvironmentSpec, project: Project, python: Path) -> Program:
    package = package_of(project)
    app = project.app
    paths = _import_paths(project.folder)
    is_importable = package is None or any((Path(path) / package).is_dir() for path in paths)
    if app.folder is not None:
        paths = (str(app.folder), *paths)
    candidates = app_candidates(package, app.reference)
    if app.is_own_form:
        candidates = tuple(dict.fromkeys([app.reference, *candidates]))
    usual = app_candidates(package, app.fallback)
    config = HostConfig(
        name=project.manifest.name,
        app_candidates=candidates,
        app_fallbacks=tuple(app for app in usual if app not in candidates),
        app_place=app.place,
        venv=None if str(python) == sys.executable else str(python.parent.parent),
        import_paths=paths,
        manifest=_plain(project.manifest.data),
        **_serve_options(spec),
    )
    links = {} if is_importable else {str(package): project.folder}
    return Program(python, project.folder, config, links)


def _class_config(
    spec: EnvironmentSpec, reference: str, paths: tuple[str, ...], manifest: Manifest | None
) -> HostConfig:
    if spec.serve_as_is:
        raise InvalidSpec(
            f"{reference} is a class: it has no app that could be served as it is",
            "leave out --set serve-as-is=yes",
        )
    return HostConfig(
        name=manifest.name if manifest is not None else spec.name,
        env_class=reference,
        import_paths=paths,
        manifest={} if manifest is None else _plain(manifest.data),
        **_serve_options(spec),
    )


def _serve_options(spec: EnvironmentSpec) -> dict[str, Any]:
    return {item.name: getattr(spec, item.name) for item in fields(ServeOptions)}


def _import_paths(folder: Path) -> tuple[str, ...]:
    return tuple(str(path) for path in (folder, folder / "src") if path.is_dir())


def _plain(value: Any) -> Any:
    """YAML's values as JSON's: dates become text, as do numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, int) and value.bit_length() > 63:
        return hex(value)  # its digits may be more than Python writes
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
