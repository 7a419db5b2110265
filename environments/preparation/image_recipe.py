# SPDX-License-Identifier: Apache-2.0
"""Writes the recipe of an image: its Dockerfile, as text. Pure functions.

    BASE ─┬─▶ build   uv, the dependencies' files, an installation ─▶ /opt/venv, /opt/openenvd
          └─▶ image   ◀── those two, and the project's files

Settings and certificates of the package index stay in the stage `build`, which is not part of the
image. It needs nothing that the classic builder lacks.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...schema.protocol import (
    CONTAINER_PORT,
    HOST_CONFIG_VARIABLE,
    HOST_LIBRARIES,
    LISTEN_ADDRESS_VARIABLE,
)
from ..engines.base import BUILT_LABEL, ENV_HOST_LABEL
from ..sources.needs import Way
from .project_venv import HOST_EXTRAS, HOST_REQUIREMENTS

PACKAGE_FOLDER = "/opt/openenvd"
PROJECTS_FOLDER = "/app"
VENV = "/opt/venv"
# Names of folders and files in the build context.
NEEDS, PACKAGE, PROJECT, CERTIFICATES = "needs", "openenvd", "project", "certificates.pem"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what an image is made of, but for the files.

    Attributes:
        base: The image that it is based on; it has a Python.
        config: The part of the env host's configuration that belongs to the program.
        folder: Where the project's files are in the image; None: it has none.
        workdir: Where it runs.
        way: How what it needs is installed, from files in the folder `needs`; None: it needs none.
        metadata: Of the project itself, as its installation would have them: texts by their paths.
        more: Packages to install beside what it needs.
        index: Variables of uv that say where packages come from. Not part of the digest.
        has_certificates: Whether the context has certificates for the package index.
    """

    base: str
    config: Mapping[str, Any]
    version: str
    folder: str | None = None
    workdir: str = PROJECTS_FOLDER
    way: Way | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    index: Mapping[str, str] = field(default_factory=dict)
    has_certificates: bool = False


# Writes the texts of a JSON object into the folder of the installed packages.
_WRITE = (
    "import json, pathlib, sys, sysconfig\n"
    "for name, text in json.loads(sys.argv[1]).items():\n"
    " path = pathlib.Path(sysconfig.get_path('purelib'), name)\n"
    " path.parent.mkdir(exist_ok=True)\n"
    " path.write_text(text)"
)


def dockerfile(recipe: Recipe) -> str:
    """Return the Dockerfile."""
    return "\n".join([*_build_stage(recipe), "", *_image_stage(recipe), ""])


def _build_stage(recipe: Recipe) -> Iterable[str]:
    yield f"FROM {recipe.base} AS build"
    yield f"LABEL {BUILT_LABEL}={_quoted(recipe.version)}"
    yield from (f"ARG {name}" for name in sorted(recipe.index))
    if recipe.has_certificates:
        yield f"COPY {CERTIFICATES} /{CERTIFICATES}"
        yield f"ENV SSL_CERT_FILE=/{CERTIFICATES} PIP_CERT=/{CERTIFICATES}"
    yield f"ENV VIRTUAL_ENV={VENV} UV_PYTHON_DOWNLOADS=never UV_COMPILE_BYTECODE=1"
    yield "RUN command -v uv >/dev/null || pip install --no-cache-dir uv"
    yield f"COPY {NEEDS} /{NEEDS}"
    yield f"WORKDIR /{NEEDS}"
    wanted = recipe.way.requires_python if recipe.way is not None else None
    wanted = f" --python {shlex.quote(wanted)}" if wanted else ""
    yield f"RUN uv venv --no-project{wanted} {VENV}"
    yield from (f"RUN {command}" for command in _installation(recipe))
    yield f"COPY {PACKAGE} {PACKAGE_FOLDER}"
    yield f"RUN {VENV}/bin/python -m compileall -q {PACKAGE_FOLDER}"


def _installation(recipe: Recipe) -> Iterable[str]:
    """Yield what `project_venv.py` does on this machine."""
    way = recipe.way or Way("", None)
    ours = shlex.join(HOST_REQUIREMENTS)
    beside = " ".join(f"-r {shlex.quote(str(p.relative_to(way.folder)))}" for p in way.beside)
    packages = shlex.join(["--", *way.packages]) if way.packages else ""
    more = " ".join(filter(None, [beside, ours, packages]))
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
    yield f"{install} {more}" + (f" || {install} {ours}" if way.has_more else "")
    if recipe.more:
        yield f"uv pip install --no-cache -- {shlex.join(recipe.more)}"
    extras = shlex.join(HOST_EXTRAS)
    libraries = f"{VENV}/{HOST_LIBRARIES}"
    install = f"uv pip install --no-cache --target {libraries} --only-binary :all: {extras}"
    yield f"mkdir {libraries} && {install} || echo continuing without {extras}"
    if recipe.metadata:
        program = f"exec({_WRITE!r})"  # on one line, as instructions are
        yield shlex.join([f"{VENV}/bin/python", "-c", program, json.dumps(dict(recipe.metadata))])


def _image_stage(recipe: Recipe) -> Iterable[str]:
    yield f"FROM {recipe.base}"
    yield f"COPY --from=build {VENV} {VENV}"
    yield f"COPY --from=build {PACKAGE_FOLDER} {PACKAGE_FOLDER}"
    if recipe.folder is not None:
        yield f"COPY {PROJECT} {recipe.folder}"
    yield f"WORKDIR {recipe.workdir}"
    yield f"ENV PATH={VENV}/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \\"
    yield f"    {LISTEN_ADDRESS_VARIABLE}=0.0.0.0:{CONTAINER_PORT} \\"
    config = json.dumps(dict(recipe.config), sort_keys=True)
    yield f"    {HOST_CONFIG_VARIABLE}={_quoted(config)}"
    yield f"LABEL {ENV_HOST_LABEL}={_quoted(recipe.version)}"
    yield f"EXPOSE {CONTAINER_PORT}"
    host = [f"{VENV}/bin/python", "-P", f"{PACKAGE_FOLDER}/env_host/__main__.py"]
    yield f"ENTRYPOINT {json.dumps(host)}"


def _quoted(text: str) -> str:
    """Return a value of ENV or LABEL, in which nothing is substituted."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'
