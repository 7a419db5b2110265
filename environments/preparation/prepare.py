# SPDX-License-Identifier: Apache-2.0
"""Prepares the program or image that the replicas of a launch run, as their provider requires.

    resolve(source) ─▶ prepare(spec, source, report) ─▶ Program or ContainerImage ─▶ provider.start

    PROGRAM        a program of our Python, or of the project's virtual environment, which is made
                   once for all projects with the same needs; `--with` is laid over it
    IMAGE          an image in Docker here, by its id. It is pulled, or built with our env host,
                   unless there is one of the same files
    SHARED_IMAGE   the same, by its registry's digest, if it has one: other nodes pull it
    PULLED_IMAGE   an image that the engine's nodes pull by its name; nothing is done here

Failure cases

    the provider cannot run the source    `InvalidSpec` with the command that helps; nothing is done
    uv or Docker fails, or is missing     `PreparationFailed` or `EngineFailed`, with its last lines
    the worker is killed, or cancelled    a virtual environment without the file `complete` is made
                                          again by the next launch; Docker keeps the steps it built
    two launches prepare the same         the second waits for the virtual environment's lock; both
                                          build an image, of the same name and the same files
    a cleanup runs meanwhile              it keeps a virtual environment for a minute after its use,
                                          and the newest image of each name
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from ...schema.errors import EngineFailed, InvalidSpec
from ...schema.layout import Layout
from ...schema.spec import EnvironmentSpec, name_of_source
from ...system.files.installation import install_command
from ..engines.base import Preparation
from ..engines.registry import entry_of
from ..sources.program import ContainerImage, Prepared, Program, program_of
from ..sources.resolve import Image, Project, ResolvedSource
from .project_venv import overlay_python, project_python


class Report(Protocol):
    """Receives the progress."""

    def enter(self, phase: str, message: str) -> None:
        """Receive the beginning of a phase."""

    def relay(self, line: str) -> None:
        """Receive a line of uv's or Docker's output."""


def prepare(
    spec: EnvironmentSpec, source: ResolvedSource, report: Report, layout: Layout, cwd: Path
) -> Prepared:
    """Return the program or image that replicas run; `--with` has paths relative to `cwd`. Blocks.

    Raises:
        InvalidSpec: The provider cannot run this source.
        PreparationFailed: It cannot be installed, built or pulled.
        EngineFailed: Docker, or the library of the provider, cannot be used.
    """
    entry = entry_of(spec.provider)
    if entry.extra is not None and find_spec(entry.extra) is None:  # it has its library's name
        text = f"the library of {spec.provider} is not installed"
        hint = f"{install_command(entry.extra)}, then openenv stop: the next daemon has it"
        raise EngineFailed(text, hint)
    way = entry.preparation
    if way is Preparation.PROGRAM:
        return _prepare_program(spec, source, report, layout, cwd)
    if isinstance(source, Image) and spec.with_packages:
        text = f"nothing can be installed into the image {source.reference}"
        raise InvalidSpec(text, "build one that has it: openenv image build SOURCE --with …")
    if way is Preparation.PULLED_IMAGE and isinstance(source, Image):
        return ContainerImage(source.reference, source.reference)
    if way is Preparation.PULLED_IMAGE:
        image = f"REGISTRY/{name_of_source(spec.source).lower()}:1"
        text = f"{spec.provider} runs images that its nodes pull, and {spec.source} is none"
        build = f"openenv image build {spec.source} --tag {image}, docker push {image}"
        raise InvalidSpec(text, f"{build}, and name docker://{image} in its place")
    return _prepare_image(spec, source, report, is_shared=way is Preparation.SHARED_IMAGE)


def _prepare_program(
    spec: EnvironmentSpec, source: ResolvedSource, report: Report, layout: Layout, cwd: Path
) -> Program:
    if isinstance(source, Image):
        text = f"{source.reference} is an image, and {spec.provider} runs none"
        raise InvalidSpec(text, "name an engine that does: --provider docker")
    python, more = None, spec.with_packages
    if isinstance(source, Project) or more:
        report.enter("resolving", f"resolving what {spec.name} needs")
    if isinstance(source, Project):
        python = project_python(source, layout, report.relay)
    if more:
        python = overlay_python(python, more, layout, cwd, report.relay)
    return program_of(spec, source, python)


def _prepare_image(
    spec: EnvironmentSpec, source: ResolvedSource, report: Report, *, is_shared: bool
) -> ContainerImage:
    from . import image_build as build  # here: launches without images need less memory

    report.enter("building", f"preparing the image of {spec.name}")
    docker = build.DockerCli(report.relay)
    if isinstance(source, Image):
        name = source.reference
        docker.fetch(name)
    else:
        name = build.ensure_image(spec, source, report.relay)
    digest = docker.digest_of(name) if is_shared else None
    return ContainerImage(digest or docker.id_of(name) or name, name)
