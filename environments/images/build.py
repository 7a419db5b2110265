# SPDX-License-Identifier: Apache-2.0
"""Has an image built from a project, unless there is one of the same files already.

    source ─▶ context ─▶ digest ─▶ openenvd/NAME:DIGEST ── exists ──▶ that
                                                       └─ does not ─▶ docker build ─▶ that

Nothing is written into the project's folder.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable

from ..errors import InvalidSpec, ManifestError
from ..image_names import check_reference, tag_of
from ..sources.program import Program
from ..sources.resolve import Project, ResolvedSource
from ..spec import DEFAULT_BASE
from .context import context_of
from .docker_cli import DockerCli, Say

# The network of this machine while it builds: a package index may be reachable from here alone.
_NETWORK = ("--network", "host")


def ensure_image(
    source: ResolvedSource,
    program: Program,
    say: Say,
    *,
    base: str = DEFAULT_BASE,
    more: Iterable[str] = (),
    tag: str | None = None,
) -> str:
    """Return the image of a source, with our env host in it; it is built if there is none yet.

    Args:
        source: What is to be served.
        program: How it would be served on this machine.
        say: Gets lines about what happens.
        base: The image that it is based on.
        more: Packages to install beside what it needs.
        tag: What else it is to be called; it is returned then.

    Raises:
        EngineFailed: Docker cannot be used.
        PreparationFailed: The image cannot be built.
        UnknownSource: `base` or `tag` cannot be the name of an image.
    """
    check_reference(base)
    context = context_of(source, program, base, more)
    own = tag_of(program.config.name, context.digest)
    tags = [own] if tag is None else [own, check_reference(tag)]
    docker = DockerCli(say)
    if tag is None and docker.id_of(own):
        return own
    started = time.monotonic()
    for note in context.notes:
        say(note)
    say(f"building the image {tags[-1]} on {base}")
    with tempfile.TemporaryFile() as archive:
        context.write(archive)
        archive.seek(0)
        docker.build(tags, *_NETWORK, "-", stdin=archive, variables=context.variables)
    say(f"built {tags[-1]} in {time.monotonic() - started:.1f} s")
    return tags[-1]


def fetch_image(image: str, say: Say) -> None:
    """Get an image from its registry, unless the engine has it.

    Raises:
        EngineFailed: Docker cannot be used.
        PreparationFailed: The image cannot be had.
    """
    docker = DockerCli(say)
    if docker.id_of(image) is None:
        say(f"getting the image {image}")
        docker.pull(image)


def pinned(image: str, provider: str) -> str:
    """Return what names an image for a provider whatever its name stands for later.

    On Docker its id. A swarm's other nodes get an image from its registry, where it has a digest;
    one that is in no registry has to be on these nodes already, as the same.

    Raises:
        EngineFailed: Docker cannot be used.
    """
    docker = DockerCli(lambda _: None)
    found = docker.digest_of(image) if provider == "swarm" else None
    if found is None and provider in ("docker", "swarm"):
        found = docker.id_of(image)
    return found or image


def build_dockerfile(
    project: ResolvedSource, path: str, say: Say, *, tag: str | None = None
) -> str:
    """Build a project's own Dockerfile, which has a server of its own; returns the image.

    Raises:
        InvalidSpec: The source is no project.
        ManifestError: The project has no such file.
        EngineFailed, PreparationFailed, UnknownSource
    """
    if not isinstance(project, Project):
        raise InvalidSpec("only a project's folder has a Dockerfile", "leave out --dockerfile")
    file = project.folder / path
    if not file.is_file():
        raise ManifestError(project.manifest.path, f"there is no {path} beside it")
    named = check_reference(tag) if tag else tag_of(project.manifest.name, "latest")
    say(f"building {file} as {named}")
    docker = DockerCli(say)
    docker.build([named], "--file", str(file), str(project.folder), stdin=None, variables={})
    return named
