# SPDX-License-Identifier: Apache-2.0
"""`launch`: prepares the program or image that an environment's replicas run; `build_image`.

    clear what is left ─▶ resolve ─▶ prepare ─▶ the gateway, with --gateway
                                                 └─▶ the daemon starts them, until all are ready
                                                     (`server/reconcile/changes.py`)

If the environment is not running, every replica with its name is stopped first, since an earlier
attempt has left it. Replicas that an earlier attempt at an update (`replaces`) has left may serve
already, so the daemon decides about them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from ...environments import run_files
from ...environments.engines.registry import check_options, check_provider, needs_gateway
from ...environments.gateway import process as gateway_process
from ...environments.preparation.checkout import checkout, resolve_in_checkout
from ...environments.preparation.prepare import prepare
from ...environments.sources.repository import is_repository
from ...environments.sources.resolve import (
    SCHEME,
    Bundled,
    Project,
    ResolvedSource,
    describe,
    resolve,
)
from ...schema.errors import UnknownProvider
from ...schema.layout import Layout
from ...schema.operation_options import DrainOptions, ImageOptions
from ...schema.protocol import LOOPBACK
from ...schema.spec import EnvironmentSpec, LaunchOptions, name_of_source, validate_name
from ...system.text.units import MB, plural
from . import base

LEFTOVER_GRACE_SECONDS = 2.0


class LaunchPayload(base.payload_of(LaunchOptions, DrainOptions)):  # type: ignore[misc]  # made at run time
    """The source of a launch, and its options."""

    source: str = Field(
        min_length=1,
        max_length=base.MAX_TEXT,
        description="A bundled name, a folder with openenv.yaml, module:Class, docker://IMAGE,"
        " git+https://HOST/PATH@REF#subdirectory=FOLDER, or hf://ORG/NAME.",
    )
    name: str = Field("", description="The environment's name; by default made from the source.")
    update: bool | None = Field(
        None,
        description="Whether to update an environment of this name that runs; by default one that"
        " was launched from the same source.",
    )
    replaces: str | None = Field(
        None,
        max_length=base.MAX_TEXT,
        description="The launch that this one updates; the daemon says so itself.",
    )
    cwd: base.AbsolutePath | None = Field(
        None, description="The folder that a relative source refers to; an absolute path."
    )

    @model_validator(mode="before")
    @classmethod
    def _engine_of_image(cls, data: Any) -> Any:
        """Choose Docker for an image if no provider is named."""
        if isinstance(data, dict) and str(data.get("source")).startswith(SCHEME):
            return {"provider": "docker", **data}
        return data

    _spell = field_validator("max_surge", "max_unavailable", mode="before")(base.spell_number)

    @field_validator("provider")
    @classmethod
    def _known_provider(cls, value: str) -> str:
        try:
            return check_provider(value)
        except UnknownProvider as exc:
            raise ValueError(f"{exc.message}; {exc.hint}") from exc

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.name = self.name or name_of_source(self.source)
        self.gateway: bool = self.gateway or needs_gateway(self.spec())
        if self.gateway:  # whose address the environment is reached at, as the settings say
            host = gateway_process.options_of_settings(os.environ).host
            if self.host not in (LOOPBACK, host):
                raise ValueError(
                    "host: behind a gateway it is the gateway's (openenv up --gateway-host)"
                )
            self.host: str = host
        spec = self.spec()
        spec.check()
        check_options(spec)
        return self

    def spec(self) -> EnvironmentSpec:
        """The environment as it is wanted, before its source has been looked at."""
        not_of_spec = {"cwd", "update", "replaces", "drain_timeout_seconds"}
        return EnvironmentSpec(**self.model_dump(exclude=not_of_spec))


class Launch(base.Operation):
    """Prepares what one environment's replicas run; the daemon starts these (`reconcile`)."""

    name = "launch"
    summary = "Start an environment and wait until it answers."
    schedule = "LONG"
    expected_bytes = 60 * MB
    leaves_bytes = 40 * MB  # a server of its own Python, and its shim
    in_daemon = True
    Payload = LaunchPayload

    @staticmethod
    def run(payload: LaunchPayload, context: base.OperationContext) -> dict[str, Any]:
        """Return what the daemon should start: `{"spec", "prepared", "address"}`."""
        layout, cwd = Layout(context.home), Path(payload.cwd) if payload.cwd else Path.cwd()
        is_update = payload.replaces is not None
        # The token that clients of the replaced generation have already.
        serving = run_files.that_serves(layout.runs, payload.name) if is_update else None
        token = None if serving is None else serving.token
        spec = payload.spec().with_access(token).with_range()
        if serving is not None:
            running = run_files.of_environment(layout.runs, payload.name)
            for note in losses(spec, [e for e in running if e.request_id == serving.request_id]):
                base.say(note)
        validate_name(spec.name)
        stop = run_files.stop_environment
        if not is_update and (stopped := stop(layout.runs, spec.name, LEFTOVER_GRACE_SECONDS)):
            text = f"stopped replicas of an earlier attempt: {', '.join(stopped)}"
            context.enter_aloud("clearing", text)
        source = _resolve(spec.source, cwd, layout, context.relay)
        if isinstance(source, Bundled | Project):
            asked = source.manifest
            spec = spec.or_else(
                gpus=asked.gpus,
                step_timeout_seconds=asked.episode_timeout_seconds,
                max_surge=asked.max_surge,
                max_unavailable=asked.max_unavailable,
            )
            spec.check()
        context.enter_aloud("resolved", describe(source))
        for note in source.notes(spec.env) if isinstance(source, Project) else ():
            base.say(note)
        prepared, address = prepare(spec, source, context, layout, cwd), None
        if spec.gateway:
            wanted = gateway_process.options_of_settings(os.environ)
            options = gateway_process.ensure_running(layout, wanted).options
            # Replicas judge requests by the gateway's address.
            spec = replace(spec, host=options.host).with_access(token)
            context.enter_aloud("gateway", f"the gateway listens at {options.address}")
            address = options.address_of(spec.name)
        return {"spec": asdict(spec), "prepared": prepared.to_json(), "address": address}


def _resolve(source: str, cwd: Path, layout: Layout, say: Callable[[str], None]) -> ResolvedSource:
    """Return the environment that a source names; a repository is fetched."""
    if not is_repository(source):
        return resolve(source, cwd)
    return resolve_in_checkout(source, checkout(source, layout, say))


def losses(spec: EnvironmentSpec, serving: Sequence[run_files.RunFile]) -> Iterator[str]:
    """Yield a sentence for each of token, replicas and gateway that an update takes away."""
    if serving[0].token and not spec.token:
        yield "the new generation has no token: every user of this machine can connect (--token)"
    if spec.max_replicas is None and spec.replicas < len(serving):
        count = plural(spec.replicas, "replica")
        yield f"the new generation has {count}, not {len(serving)} (--replicas)"
    if serving[0].is_at_gateway and not spec.gateway:
        yield "the new generation is not behind the gateway, so its address changes (--gateway)"


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
        """`{"image": "openenvd/my-env:4f1d…"}`."""
        from ...environments.preparation.image_build import ensure_image

        context.enter("building", "building the image")
        cwd = Path(payload.cwd) if payload.cwd else Path.cwd()
        source = _resolve(payload.source, cwd, Layout(context.home), base.say)
        base.say(describe(source))
        more = payload.with_packages
        spec = EnvironmentSpec("image", payload.source, base=payload.base, with_packages=more)
        return {"image": ensure_image(spec, source, base.say, tag=payload.tag)}
