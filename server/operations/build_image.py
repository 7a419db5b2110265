# SPDX-License-Identifier: Apache-2.0
"""`build_image`: the container image of a project, for engines to start replicas from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from ...environments.sources.resolve import describe, resolve
from ...schema.operation_options import ImageOptions
from ...schema.spec import EnvironmentSpec
from ...system.text.units import MB
from . import base
from .progress import Phases


class BuildImagePayload(base.payload_of(ImageOptions)):  # type: ignore[misc]  # a class made at run time
    """The source of an image, and the options of its build."""

    source: str = Field(
        min_length=1,
        max_length=base.MAX_TEXT,
        description="A bundled name, a folder with openenv.yaml, or module:Class.",
    )
    cwd: base.AbsolutePath | None = Field(
        None, description="The folder that a relative source refers to; an absolute path."
    )


class BuildImage(base.Operation):
    """Builds one image."""

    name = "build_image"
    summary = "Build the container image of an environment."
    schedule = "LONG"
    expected_bytes = 40 * MB
    Payload = BuildImagePayload

    @staticmethod
    def run(payload: BuildImagePayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"image": "openenvd/my-env:4f1d…"}`.

        Raises:
            EnvironmentsError
        """
        from ...environments.preparation import image_build as build

        phases = Phases(context, f"image {payload.source}")
        phases.enter("building", "building the image")
        source = resolve(payload.source, Path(payload.cwd) if payload.cwd else Path.cwd())
        base.say(describe(source))
        if payload.dockerfile is not None:
            image = build.build_dockerfile(source, payload.dockerfile, base.say, tag=payload.tag)
        else:
            more = payload.with_packages
            spec = EnvironmentSpec("image", payload.source, base=payload.base, with_packages=more)
            image = build.ensure_image(spec, source, base.say, tag=payload.tag)
        phases.finish()
        return {"image": image}
