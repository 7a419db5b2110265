# SPDX-License-Identifier: Apache-2.0
"""Resolves a source, as the user wrote it, to the environment it names.

    echo               a bundled name (wins over a folder of that name: write ./echo for that)
    my_env, ./my_env   a folder with `openenv.yaml`, or with an app
    module:Class       a class, found from the folder the user is in
    docker://IMAGE     a container image, which an engine runs

Nothing is imported and nothing is started here. How it becomes a process: `program.py`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import EnvironmentsError, UnknownSource, UnsupportedSource
from ..image_names import image_of
from ..spec import ResourceRequest
from .app_place import App, choose_app
from .manifest import MANIFEST_NAME, Manifest, is_reference, read_manifest
from .needs import Way, packaging_of, table_in, ways_of

BUNDLED_FOLDER = Path(__file__).resolve().parents[2] / "env_host" / "bundled"
MAX_NEAR = 3  # bundled names that look like an unknown one
WHAT_CAN_BE_LAUNCHED = (
    f"a bundled name ({{bundled}}), a folder with {MANIFEST_NAME}, module:Class, or docker://IMAGE"
)
_KINDS_TO_COME = ("http://", "https://", "hf://", "git+")


@dataclass(frozen=True, slots=True)
class Bundled:
    """An environment that comes with openenvd."""

    name: str
    manifest: Manifest

    @property
    def resources(self) -> ResourceRequest:
        """What the manifest asks for."""
        return self.manifest.resources

    @property
    def sentence(self) -> str:
        """The sentence about it in the launch's log."""
        return f"{self.name} comes with openenvd"


@dataclass(frozen=True, slots=True)
class Project:
    """A folder with `openenv.yaml`, or with an app."""

    folder: Path
    manifest: Manifest
    app: App = field(default_factory=App)

    @property
    def resources(self) -> ResourceRequest:
        """What the manifest asks for."""
        return self.manifest.resources

    @property
    def ways(self) -> list[Way]:
        """The ways to install what it needs; none when it needs nothing but openenvd."""
        return ways_of(self.folder)

    @property
    def sentence(self) -> str:
        """The sentence about it in the launch's log."""
        return f"{self.manifest.name} is the project in {self.folder}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how it was read."""
        chosen = () if self.app.note is None else (f"note: {self.app.note}",)
        return (*(f"warning: {each}" for each in self.manifest.warnings), *chosen)


@dataclass(frozen=True, slots=True)
class ClassSource:
    """A class that is found from a folder."""

    reference: str  # `module:Class`
    folder: Path

    @property
    def resources(self) -> ResourceRequest:
        """Nothing: a class has no manifest."""
        return ResourceRequest()

    @property
    def sentence(self) -> str:
        """The sentence about it in the launch's log."""
        return f"{self.reference} is imported from {self.folder}"


@dataclass(frozen=True, slots=True)
class Image:
    """A container image."""

    reference: str

    @property
    def resources(self) -> ResourceRequest:
        """Nothing: an image has no manifest."""
        return ResourceRequest()

    @property
    def sentence(self) -> str:
        """The sentence about it in the launch's log."""
        return f"{self.reference} is an image"


def bundled() -> dict[str, Path]:
    """Find the environments that come with openenvd: folder by name, for each with a manifest."""
    return {
        path.parent.name: path.parent for path in sorted(BUNDLED_FOLDER.glob(f"*/{MANIFEST_NAME}"))
    }


ResolvedSource = Bundled | Project | ClassSource | Image


def resolve(source: str, cwd: Path) -> ResolvedSource:
    """What `source` names, for a user who is in the folder `cwd`.

    Raises:
        UnknownSource: nothing does; says what is near, and what can be launched.
        UnsupportedSource: an address.
        ManifestError: the folder's `openenv.yaml` is wrong.
    """
    if source.startswith(_KINDS_TO_COME):
        raise UnsupportedSource(
            f"{source} cannot be launched: addresses are not supported yet",
            f"launch {_what_can_be_launched()}",
        )
    if (image := image_of(source)) is not None:
        return Image(image)
    if (folder_of := bundled().get(source)) is not None:
        return Bundled(source, read_manifest(folder_of))
    try:
        return _local(source, cwd)
    except (OSError, RuntimeError) as exc:  # too long, unreadable, or `~` of nobody
        why = getattr(exc, "strerror", None) or exc
        raise UnknownSource(
            f"{source!r} cannot be looked for: {why}", f"launch {_what_can_be_launched()}"
        ) from exc


def check_source(source: str, cwd: Path) -> None:
    """Refuse what names nothing that can be launched; a manifest is not read.

    Raises:
        UnknownSource, UnsupportedSource
    """
    with suppress(OSError, RuntimeError):  # `resolve` says why
        if (cwd / Path(source).expanduser() / MANIFEST_NAME).is_file():
            return
    if source not in bundled():
        resolve(source, cwd)


def _local(source: str, cwd: Path) -> ResolvedSource:
    folder = cwd / Path(source).expanduser()
    if folder.is_dir():
        return _project(folder.resolve())
    if is_reference(source):
        return ClassSource(source, cwd)
    raise _unknown(source, folder)


def _project(folder: Path) -> Project:
    manifest = read_manifest(folder)
    if manifest.env_class is not None:
        return Project(folder, manifest)
    is_named = manifest.path.exists()
    app = None
    if is_named or not any((parent / MANIFEST_NAME).is_file() for parent in folder.parents):
        scripts = table_in(packaging_of(folder), "project", "scripts")
        app = choose_app(folder, manifest.app, manifest.app_place, scripts)
    if not is_named and app is None:
        raise UnknownSource(
            f"{folder} has no {MANIFEST_NAME} and no app, so it is not an environment",
            _hint_for_folder(folder),
        )
    if manifest.fault is not None and app is None:
        raise manifest.fault
    manifest = manifest if is_named else replace(manifest, warnings=())
    return Project(folder, manifest, app or App(place=manifest.app_place))


def _hint_for_folder(folder: Path) -> str:
    inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST_NAME}"))
    if inside:
        return f"there is one inside: openenv launch {folder / inside[0]}"
    for parent in folder.parents:
        if (parent / MANIFEST_NAME).is_file():
            return f"there is one above: openenv launch {parent}"
    return f"launch {_what_can_be_launched()}; `openenv init NAME` makes a new project"


def _unknown(source: str, path: Path) -> EnvironmentsError:
    if path.is_file():
        message = f"{path} is a file"
        if path.name == MANIFEST_NAME:
            return UnknownSource(message, f"launch its folder: openenv launch {path.parent}")
        if path.suffix == ".py":
            return UnknownSource(message, _hint_for_module(path))
        return UnknownSource(message, f"launch {_what_can_be_launched()}")
    if path.with_name(f"{path.name}.py").is_file():
        return UnknownSource(f"{source!r} is a module", _hint_for_module(path))
    from difflib import get_close_matches  # when a source is wrong

    near = get_close_matches(source, list(bundled()), MAX_NEAR)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return UnknownSource(
        f"there is no environment {source!r}: it is neither a bundled name nor a folder at {path}",
        f"{hint}You can launch {_what_can_be_launched()}",
        near,
    )


def _hint_for_module(path: Path) -> str:
    return f"launch a class of it, in {path.parent}: openenv launch {path.stem}:CLASS"


def _what_can_be_launched() -> str:
    return WHAT_CAN_BE_LAUNCHED.format(bundled=", ".join(bundled()))
