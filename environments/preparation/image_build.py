# SPDX-License-Identifier: Apache-2.0
"""Builds a project's image, unless one of the same files exists; removes unused images.

    source ─▶ context ─▶ digest ─▶ openenvd/NAME:DIGEST ── exists ─────────▶ that
                                                       └─ does not exist ─▶ docker build ─▶ that

Nothing is written into the project's folder. The `docker` command builds images, because the
library supports neither BuildKit nor the user's context and credentials.

`prune_images` removes images that were built here and that nothing uses any more:

    of a stage         the classic builder leaves it without a name
    replaced           another image has its name by now
    earlier version    a newer image of the same repository, `openenvd/NAME`, is there

An image stays while a run file of this home names it; if any run file cannot be used, all stay.
Docker itself keeps the images of all containers, including those of other homes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import TimeoutExpired
from types import MappingProxyType
from typing import IO, Any

from ... import __version__
from ...schema import errors
from ...schema.layout import Layout
from ...schema.spec import EnvironmentSpec
from ...system.text.json_lines import Json
from ...system.text.safe_text import plain
from .. import run_files
from ..engines.base import BUILT_LABEL
from ..engines.docker.options import INSTALL, hint_on
from ..sources import resolve
from ..sources.program import program_of
from .image_context import context_of
from .uv import Say, run_command

# The build uses this machine's network: a package index may be reachable from here alone.
_NETWORK = ("--network", "host")
_OURS = ("--label", f"{BUILT_LABEL}={__version__}")
LAST_LINES = 20  # of Docker's output, in a failure
ASK_SECONDS = 20.0
_DEPRECATED = ("Install the buildx component", "https://docs.docker.com/go/buildx")
_TEDIOUS = ("--->", "Removing intermediate", "+ ", "Downloaded ", "DEPRECATED:", *_DEPRECATED)


def ensure_image(
    spec: EnvironmentSpec, source: resolve.ResolvedSource, say: Say, *, tag: str | None = None
) -> str:
    """Return the name of a source's image, which has our env host; it is built if it is missing.

    With a `tag`, it is built under that name, too, which is returned. `say` reports the progress.

    Raises:
        EngineFailed: Docker cannot be used.
        PreparationFailed: The image cannot be built.
        UnknownSource: The base or `tag` cannot be the name of an image.
    """
    resolve.check_reference(spec.base)
    program = program_of(spec, source, None)
    context = context_of(source, program, spec.base, spec.with_packages)
    own = resolve.tag_of(program.config.name, context.digest)
    tags = [own] if tag is None else [own, resolve.check_reference(tag)]
    docker = DockerCli(say)
    if tag is None and docker.id_of(own):
        return own
    started = time.monotonic()
    for note in context.notes:
        say(note)
    say(f"building the image {tags[-1]} on {spec.base}")
    options = [word for each in tags for word in ("--tag", each)]
    # Their values do not appear on the command line.
    index = context.index
    options += [word for name in sorted(index) for word in ("--build-arg", name)]
    with tempfile.TemporaryFile() as archive:
        context.write(archive)
        archive.seek(0)
        docker.run("build", *_OURS, *options, *_NETWORK, "-", stdin=archive, variables=index)
    say(f"built {tags[-1]} in {time.monotonic() - started:.1f} s")
    return tags[-1]


class DockerCli:
    """Runs `docker`, prints its output and explains its failures; `EngineFailed`: it is missing."""

    def __init__(self, say: Say) -> None:
        found = shutil.which("docker")
        if found is None:
            raise errors.EngineFailed("the command docker is not installed", INSTALL)
        self._docker = found
        self._say = say

    def id_of(self, image: str) -> str | None:
        """Return the id of an image, or None; raises `EngineFailed` if Docker cannot be asked."""
        return self._ask("inspect", "--format", "{{.Id}}", image)

    def digest_of(self, image: str) -> str | None:
        """Return an image's name with its registry's digest, or None; raises as `id_of` does."""
        found = self._ask("inspect", "--format", "{{json .RepoDigests}}", image)
        return resolve.digest_in_repository(image, json.loads(found or "null") or ())

    def fetch(self, image: str) -> None:
        """Pull an image from its registry, unless it is here; raises as `id_of` and `run` do."""
        if self.id_of(image) is None:
            self._say(f"getting the image {image}")
            self.run("pull", image)

    def images_built(self) -> list[dict[str, Any]]:
        """Return the descriptions (`docker image inspect`) of all images that were built here."""
        words = ("ls", "--quiet", "--no-trunc", "--filter", f"label={BUILT_LABEL}")
        ids = sorted(set((self._ask(*words) or "").split()))
        return json.loads(self._ask("inspect", *ids) or "[]") if ids else []

    def remove(self, image: str) -> bool:
        """Remove a name of an image, and with its last name the image, unless it is in use."""
        try:
            return self._ask("rm", image) is not None
        except (errors.EngineFailed, TimeoutExpired):
            return False

    def _ask(self, *words: str) -> str | None:
        """Return the output of `docker image`; None when there is no such image."""
        asked = subprocess.run(
            [self._docker, "image", *words],
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=False,
        )
        if asked.returncode != 0 and "no such image" not in asked.stderr.lower():
            said = asked.stderr.strip() or f"docker exited with code {asked.returncode}"
            raise errors.EngineFailed(f"Docker cannot be used: {said}", hint_on(said) or INSTALL)
        return asked.stdout.strip() if asked.returncode == 0 else None

    def run(
        self,
        what: str,
        *arguments: str,
        stdin: IO[bytes] | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Run one of its commands, `build` or `pull`, with `variables` beside our own.

        Raises `PreparationFailed` with the last lines of the command's output.
        """
        code, lines = run_command(
            [self._docker, what, *arguments],
            folder=Path("/"),
            environ={**os.environ, **variables, "BUILDKIT_PROGRESS": "plain"},
            on_line=self._relay,
            stdin=stdin,
        )
        if code != 0:
            end = list(filter(None, map(_readable, lines)))[-LAST_LINES:]
            text = f"docker {what} exited with code {code}; its last lines:"
            text = errors.with_last_lines(text, end)
            raise errors.PreparationFailed(text, hint_on("\n".join(end)))

    def _relay(self, line: str) -> None:
        text = _readable(line)
        if text and not text.lstrip().startswith(_TEDIOUS):
            self._say(f"  docker: {text}")


def _readable(line: str) -> str:
    """Return a line of Docker's output; the classic builder shows the values of ENV."""
    return re.sub(r"( : ENV \w+=).*", r"\1…", plain(line).rstrip())


def prune_images(layout: Layout) -> list[str]:
    """Remove unused images, if Docker answers; return their names, or else ids. Blocks."""
    usable, aside = run_files.look(layout.runs)
    if aside:
        return []
    try:
        docker = DockerCli(lambda _: None)
        found = docker.images_built()
    except (errors.EngineFailed, TimeoutExpired):
        return []
    plans = (run_file.data.get("plan") or {} for run_file in usable)
    used = {name for plan in plans for name in (plan.get("image"), plan.get("image_name"))}
    return [name for name in unused(found, used) if docker.remove(name)]


def unused(images: list[Json], used: set[str | None]) -> list[str]:
    """Return the names, or ids, of images (`docker image inspect`) that nothing in `used` names."""
    found = []
    named: dict[str, list[tuple[str, str, Json]]] = {}
    for image in images:
        names = image["RepoTags"] or []
        if not names and image["Id"] not in used:
            found.append(image["Id"])
        for name in names:
            repository, _, _ = name.rpartition(":")
            if repository.startswith(f"{resolve.REPOSITORY}/"):
                named.setdefault(repository, []).append((image["Created"], name, image))
    for versions in named.values():
        _, *earlier = sorted(versions, key=lambda each: each[0], reverse=True)
        found += [name for _, name, image in earlier if not {name, image["Id"]} & used]
    return found
