# SPDX-License-Identifier: Apache-2.0
"""The context of which an image is built: a tar archive of its Dockerfile and files.

Dockerfile
needs/             the files that say which packages are needed: the layer of packages stays while
                   these are the same
openenvd/          the env host, the rooms that it imports, and the bundled environments
project/           the project's files, without those of version control, caches and
                   `.dockerignore`; of a class, its module and what it imports there
certificates.pem   for the package index, if this machine has its own

    BASE ─┬─▶ build   uv, the files in needs/, an installation ─▶ /opt/venv, /opt/openenvd
          └─▶ image   ◀── those two folders, and the project's files

Settings and certificates of the package index stay in the stage `build`. The Dockerfile uses no
feature that the classic builder lacks.
"""

from __future__ import annotations

import ast
import hashlib
import io
import itertools
import json
import os
import re
import shlex
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from ... import __version__
from ...schema import protocol
from ..engines.base import BUILT_LABEL, ENV_HOST_LABEL
from ..sources import resolve
from ..sources.needs import Way, allows_python, metadata_of
from ..sources.program import Program
from .project_venv import HOST_EXTRAS, HOST_REQUIREMENTS
from .uv import uv_variables

PACKAGE_FOLDER = "/opt/openenvd"
PROJECTS_FOLDER = "/app"
VENV = "/opt/venv"
# Names of folders and files in the build context.
NEEDS, PACKAGE, PROJECT, CERTIFICATES = "needs", "openenvd", "project", "certificates.pem"
OWN_FOLDER = Path(__file__).resolve().parents[2]
OWN_PACKAGES = ("env_host", "schema", "system")  # the rooms that run in projects' Pythons
_ANY_PATCH = 99  # stands for the patch version of a Python, which tags of images do not name
_CERTIFICATES_VARIABLE = "SSL_CERT_FILE"
_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INSECURE_HOST", "UV_HTTP_TIMEOUT")

# The fields of the env host's configuration that are the same in the image.
_KEPT_CONFIG = ("name", "app_candidates", "app_fallbacks", "env_class", "manifest")

Files = dict[str, Path]  # by their names in the archive


@dataclass(frozen=True, slots=True)
class Context:
    """The inputs of an image."""

    base: str  # the image that it is based on, which has a Python
    config: Mapping[str, Any]  # what the program needs of the env host's configuration
    env: Mapping[str, str] = field(default_factory=dict)  # of the project's own Dockerfile
    folder: str | None = None  # of the project's files in the image; None: there are none
    workdir: str = PROJECTS_FOLDER  # the folder in which the program runs
    way: Way | None = None  # to install the needed packages; None: there are none
    # The metadata that an installation of the project would have: texts by their paths
    metadata: Mapping[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()  # packages to install beside those that are needed
    # Variables of uv, and certificates, for the package index. They are not part of the digest.
    index: Mapping[str, str] = field(default_factory=dict)
    certificates: Path | None = None
    files: Files = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # for the user

    @property
    def digest(self) -> str:
        """Return a digest of all inputs, except where packages come from."""
        digest = hashlib.sha256()
        archive: Any = SimpleNamespace(write=digest.update)
        replace(self, index={}, certificates=None).write(archive)
        return digest.hexdigest()

    def write(self, archive: IO[bytes]) -> None:
        """Write the archive."""
        text = dockerfile(self).encode()
        with tarfile.open(fileobj=archive, mode="w|") as tar:
            entry = tarfile.TarInfo("Dockerfile")
            entry.size = len(text)
            tar.addfile(_reproducible(entry), io.BytesIO(text))
            for folder in (NEEDS, PACKAGE, PROJECT):
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
            files = sorted(self.files.items())
            if self.certificates is not None:
                files.insert(0, (CERTIFICATES, self.certificates.resolve()))
            for name, path in files:
                tar.add(path, name, recursive=False, filter=_reproducible)


def _reproducible(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return an entry without time and owner, so that the same files make the same archive."""
    mode = 0o755 if entry.mode & 0o100 else 0o644
    return entry.replace(deep=False, mtime=0, mode=mode, uid=0, gid=0, uname="", gname="")


def context_of(
    source: resolve.ResolvedSource, program: Program, base: str, more: Iterable[str] = ()
) -> Context:
    """Return the context of a source's image, with `more` packages than the source needs.

    `program` would serve the source here. Raises `UnknownSource`: a class has no module.
    """
    assert not isinstance(source, resolve.Image)  # `program_of` has refused it
    files = dict(_own_files())
    way: Way | None = None
    why: list[str] = []
    metadata: dict[str, str] = {}
    if isinstance(source, resolve.Project):
        ignored = _ignored_by_docker(source.folder)
        found = ((n, path) for n, path in _files_below(source.folder) if n not in ignored)
        files |= {f"{PROJECT}/{n}": path for n, path in found}
        way, why = _way_in_image(source, base)
        metadata = metadata_of(source.folder)
    elif isinstance(source, resolve.ClassSource):
        modules = _module_files(source)
        files |= {f"{PROJECT}/{name}": path for name, path in modules.items()}
        names = ", ".join(dict.fromkeys(name.partition("/")[0] for name in modules))
        why = [f"of {source.folder} the image has {names}; a project's folder is taken whole"]
    files |= _files_of_needs(way, files)
    variables = {**uv_variables(), **os.environ}
    named = variables.get(_CERTIFICATES_VARIABLE)
    certificates = Path(named) if named and Path(named).is_file() else None
    index = {name: variables[name] for name in _INDEX_VARIABLES if name in variables}
    if "UV_DEFAULT_INDEX" in index:
        index["PIP_INDEX_URL"] = index["UV_DEFAULT_INDEX"]  # for uv itself
    here, there = str(program.folder), PROJECTS_FOLDER
    if not isinstance(source, resolve.Bundled):  # the folder has the name of the project's imports
        here = str(source.folder)
        there = f"{PROJECTS_FOLDER}/{next(iter(program.links), 'project')}"
    return Context(
        base=base,
        config=_config_in_image(program, here, there),
        env={name: value.replace(here, there) for name, value in program.env.items()},
        folder=None if isinstance(source, resolve.Bundled) else there,
        workdir=str(program.folder).replace(here, there, 1),
        way=way,
        metadata=metadata,
        more=tuple(more),
        index=index,
        certificates=certificates,
        files=files,
        notes=tuple(why),
    )


def _config_in_image(program: Program, here: str, there: str) -> dict[str, Any]:
    """Return the env host's configuration in the image, where the folder `here` is `there`."""
    config = program.config
    paths = [path.replace(here, there, 1) for path in config.import_paths]
    if program.links:
        paths.insert(0, PROJECTS_FOLDER)
    kept = {name: getattr(config, name) for name in _KEPT_CONFIG}
    place = config.app_place.replace(f"{here}/", "")
    return kept | {"app_place": place, "import_paths": paths}


def _own_files() -> Iterator[tuple[str, Path]]:
    for name in ("__init__.py", "envs.py"):
        yield f"{PACKAGE}/{name}", OWN_FOLDER / name
    for package in OWN_PACKAGES:
        for path in (OWN_FOLDER / package).rglob("*"):
            if path.suffix in (".py", ".yaml") and path.is_file():
                yield f"{PACKAGE}/{path.relative_to(OWN_FOLDER)}", path


def _files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield a project's files by their relative paths, without version control and caches."""
    for parent, folders, names in os.walk(folder):
        skipped = resolve.COPY_IGNORED(parent, [*folders, *names])
        folders[:] = [each for each in folders if each not in skipped]
        for path in (Path(parent, name) for name in names if name not in skipped):
            if path.is_symlink() or path.is_file():
                yield str(path.relative_to(folder)), path


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


def _module_files(source: resolve.ClassSource) -> Files:
    """Return the files of the module or package that has the class, and of what they import."""
    found: Files = {}
    names = [source.module]
    for name in names:
        path = source.folder / f"{name}.py"
        own = {path.name: path} if path.is_file() else {}
        if not own and name not in sys.stdlib_module_names:
            own = {f"{name}/{n}": each for n, each in _files_below(source.folder / name)}
        found |= own
        imported = (top for each in own.values() if each.suffix == ".py" for top in _imports(each))
        names += dict.fromkeys(top for top in imported if top not in names)
    if found:
        return found
    raise resolve.without_module(source)


def _imports(path: Path) -> Iterator[str]:
    """Yield the top-level modules and packages that a module's import statements name."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _way_in_image(project: resolve.Project, base: str) -> tuple[Way | None, list[str]]:
    """Return the way to install a project's packages in an image, and why no better one is used."""
    found = re.search(r"python:(\d+)\.(\d+)", base)
    python = None if found is None else (int(found[1]), int(found[2]))
    why: list[str] = []
    ways = project.ways
    for way, following in itertools.zip_longest(ways, ways[1:]):
        fault, wanted = way.fault(python), way.requires_python or ""
        if following and python and not allows_python(wanted, (*python, _ANY_PATCH)):
            fault = fault or f"{project.manifest.name} needs Python {wanted}, and {base} has none"
        if fault is None:
            return way, why
        why.append(f"{way.name} is not used: {fault}")
    return None, why


def _files_of_needs(way: Way | None, files: Files) -> Files:
    """Return the files that say what a project needs."""
    if way is None:
        return {}
    found: Files = {}
    if way.is_dynamic:  # the build system is asked, and may read any of the project's files
        own = {name: path for name, path in files.items() if name.startswith(f"{PROJECT}/")}
        found = {name.replace(PROJECT, NEEDS, 1): path for name, path in own.items()}
    inside = (path for path in way.files if path.is_relative_to(way.folder))
    return found | {f"{NEEDS}/{path.relative_to(way.folder)}": path for path in inside}


# Writes the texts of a JSON object into the folder of the installed packages.
_WRITE = (
    "import json, pathlib, sys, sysconfig\n"
    "for name, text in json.loads(sys.argv[1]).items():\n"
    " path = pathlib.Path(sysconfig.get_path('purelib'), name)\n"
    " path.parent.mkdir(exist_ok=True)\n"
    " path.write_text(text)"
)


def dockerfile(context: Context) -> str:
    """Return the Dockerfile."""
    return "\n".join([*_build_stage(context), "", *_image_stage(context), ""])


def _build_stage(context: Context) -> Iterable[str]:
    yield f"FROM {context.base} AS build"
    yield f"LABEL {BUILT_LABEL}={_quoted(__version__)}"
    yield from (f"ARG {name}" for name in sorted(context.index))
    if context.certificates is not None:
        yield f"COPY {CERTIFICATES} /{CERTIFICATES}"
        yield f"ENV SSL_CERT_FILE=/{CERTIFICATES} PIP_CERT=/{CERTIFICATES}"
    yield f"ENV VIRTUAL_ENV={VENV} UV_PYTHON_DOWNLOADS=never UV_COMPILE_BYTECODE=1"
    yield "RUN command -v uv >/dev/null || pip install --no-cache-dir uv"
    yield f"COPY {NEEDS} /{NEEDS}"
    yield f"WORKDIR /{NEEDS}"
    wanted = context.way.requires_python if context.way is not None else None
    wanted = f" --python {shlex.quote(wanted)}" if wanted else ""
    yield f"RUN uv venv --no-project{wanted} {VENV}"
    yield from (f"RUN {command}" for command in _installation(context))
    yield f"COPY {PACKAGE} {PACKAGE_FOLDER}"
    yield f"RUN {VENV}/bin/python -m compileall -q {PACKAGE_FOLDER}"


def _installation(context: Context) -> Iterable[str]:
    """Yield commands that do the same as `project_venv.py` does on this machine."""
    way = context.way or Way("", None)
    ours = shlex.join(HOST_REQUIREMENTS)
    beside = " ".join(f"-r {shlex.quote(str(p.relative_to(way.folder)))}" for p in way.beside)
    packages = shlex.join(["--", *way.packages]) if way.packages else ""
    theirs = " ".join(filter(None, [beside, packages]))
    more = " ".join(filter(None, [beside, ours, packages]))
    pinned = ""  # a second attempt, in case the project pins another version of our packages
    options = "".join(f"{shlex.quote(each)} " for each in way.options)
    if way.locked_wheels is not None:
        locked = "/tmp/locked.txt"  # noqa: S108  in the image's build stage
        wheels = shlex.join(f"--only-binary={name}" for name in way.locked_wheels)
        yield (
            f"uv export --quiet --frozen --no-dev --no-emit-project {options}--output-file {locked}"
            f" && uv pip install --no-cache --verify-hashes --no-deps {wheels} -r {locked}"
        )
        install = "uv pip install --no-cache"
    else:
        file = way.file and f" -r {shlex.quote(str(way.file.relative_to(way.folder)))}"
        install = f"uv pip install --no-cache{file or ''} {options}".rstrip()
        if file or theirs:
            pinned = f" || {install} {theirs}".rstrip() + f" && uv pip install --no-cache {ours}"
    yield f"{install} {more}{pinned}" + (f" || {install} {ours}" if way.has_more else "")
    if context.more:
        yield f"uv pip install --no-cache -- {shlex.join(context.more)}"
    extras = shlex.join(HOST_EXTRAS)
    libraries = f"{VENV}/{protocol.HOST_LIBRARIES}"
    install = f"uv pip install --no-cache --target {libraries} --only-binary :all: {extras}"
    yield f"mkdir {libraries} && {install} || echo continuing without {extras}"
    if context.metadata:
        program = f"exec({_WRITE!r})"  # on one line, which instructions require
        yield shlex.join([f"{VENV}/bin/python", "-c", program, json.dumps(dict(context.metadata))])


def _image_stage(context: Context) -> Iterable[str]:
    yield f"FROM {context.base}"
    yield f"COPY --from=build {VENV} {VENV}"
    yield f"COPY --from=build {PACKAGE_FOLDER} {PACKAGE_FOLDER}"
    if context.folder is not None:
        yield f"COPY {PROJECT} {context.folder}"
    yield f"WORKDIR {context.workdir}"
    yield from (f"ENV {name}={_quoted(value)}" for name, value in context.env.items())
    yield f"ENV PATH={VENV}/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \\"
    yield f"    {protocol.LISTEN_ADDRESS_VARIABLE}=0.0.0.0:{protocol.CONTAINER_PORT} \\"
    config = json.dumps(dict(context.config), sort_keys=True)
    yield f"    {protocol.HOST_CONFIG_VARIABLE}={_quoted(config)}"
    yield f"LABEL {ENV_HOST_LABEL}={_quoted(__version__)}"
    yield f"EXPOSE {protocol.CONTAINER_PORT}"
    host = [f"{VENV}/bin/python", "-P", f"{PACKAGE_FOLDER}/env_host/__main__.py"]
    yield f"ENTRYPOINT {json.dumps(host)}"


def _quoted(text: str) -> str:
    """Return a value for ENV or LABEL, quoted so that nothing is substituted in it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'
