# SPDX-License-Identifier: Apache-2.0
"""`launch`: start the environment that a source names.

    clear what is left ─▶ resolve ─▶ prepare ─▶ start ─▶ wait until all are ready
                             the gateway, with --gateway ─┘ └─▶ and it has them

Left is what an earlier attempt started; of an environment that does not run, all that has its name.
An update (`replaces`) leaves the replicas alone that serve: its own start beside them, and take
over when the daemon has heard that they are ready.

What it prints is the request's log. It fails at once when a replica ends, and on any failure,
cancellation included, stops everything it started. Should its worker be killed, the daemon finds
what it started by the run files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from ...environments import run_files
from ...environments.engines.provider import StartedReplica
from ...environments.engines.providers import (
    check_options,
    check_provider,
    needs_gateway,
    provider_named,
)
from ...environments.engines.started_replicas import StartedReplicas
from ...environments.gateway import process as gateway_process
from ...environments.gateway.process import Gateway
from ...environments.preparation.prepare import prepare
from ...environments.sources.program import Prepared
from ...environments.sources.resolve import SCHEME, Bundled, Project, describe, resolve
from ...schema.errors import InvalidSpec, ReplicaFailed, UnknownProvider
from ...schema.layout import Layout
from ...schema.operation_options import DrainOptions
from ...schema.protocol import LOOPBACK
from ...schema.spec import (
    EnvironmentSpec,
    LaunchOptions,
    name_of_source,
    validate_name,
)
from ...system.net.access import is_loopback
from ...system.text.units import MB
from . import base
from .progress import Phases, ReplicasAwaited, plural

LEFTOVER_GRACE_SECONDS = 2.0
GATEWAY_SECONDS = 30.0  # for it to reach replicas that are ready


class LaunchPayload(base.payload_of(LaunchOptions, DrainOptions)):  # type: ignore[misc]  # made at run time
    """What is to be launched, and how."""

    source: str = Field(
        min_length=1,
        max_length=base.MAX_TEXT,
        description="A bundled name, a folder with openenv.yaml, module:Class, docker://IMAGE.",
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
        """An image is run by Docker, where no provider is named."""
        if isinstance(data, dict) and str(data.get("source")).startswith(SCHEME):
            return {"provider": "docker", **data}
        return data

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
        if self.gateway:
            self.host: str = _gateway_host(self.host)
        spec = self.spec()
        spec.check()
        check_options(spec)
        return self

    def spec(self) -> EnvironmentSpec:
        """The environment as it is wanted, before its source has been looked at."""
        not_of_spec = {"cwd", "update", "replaces", "drain_timeout_seconds"}
        return EnvironmentSpec(**self.model_dump(exclude=not_of_spec))


def _gateway_host(asked: str) -> str:
    """The address that an environment behind the gateway is reached at, as the settings say."""
    host = gateway_process.options_of_settings(os.environ).host
    if asked not in (LOOPBACK, host):
        raise ValueError("host: behind a gateway it is the gateway's (openenv up --gateway-host)")
    return host


class Launch(base.Operation):
    """Launches one environment."""

    name = "launch"
    summary = "Start an environment and wait until it answers."
    schedule = "LONG"
    idempotent = True  # it begins by clearing what an earlier attempt left
    expected_bytes = 60 * MB
    leaves_bytes = 40 * MB  # a server of its own Python, and its shim
    Payload = LaunchPayload

    @staticmethod
    def run(payload: LaunchPayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"environment": {"name", "state", "address", "has_token", …, "replicas": […]}}`.

        Raises:
            EnvironmentsError
        """
        return _Launching(payload, context).run()


class _Launching:
    """One running launch."""

    def __init__(self, payload: LaunchPayload, context: base.OperationContext) -> None:
        self._payload = payload
        self._context = context
        self._layout = Layout(context.home)
        self._spec = payload.spec().with_access(self._token_in_use()).with_range()
        self._cwd = Path(payload.cwd) if payload.cwd else Path.cwd()
        self._started_at = time.monotonic()
        self._gateway: Gateway | None = None
        about = f"{payload.provider} {payload.replicas} {payload.source}"
        self._phases = Phases(context, about)

    def run(self) -> dict[str, Any]:
        validate_name(self._spec.name)
        # Of an update, what an earlier attempt at it has started: the others serve.
        left = [
            each
            for each in run_files.of_environment(self._layout.runs, self._spec.name)
            if self._payload.replaces is None or each.request_id == self._context.request_id
        ]
        if stopped := run_files.stop_all(left, LEFTOVER_GRACE_SECONDS):
            self._say("clearing", f"stopped replicas of an earlier attempt: {', '.join(stopped)}")
        source = resolve(self._spec.source, self._cwd)
        if isinstance(source, Bundled | Project):
            asked = source.manifest
            self._spec = self._spec.or_else(asked.gpus, asked.episode_timeout_seconds)
        self._say("resolved", describe(source))
        for note in source.notes if isinstance(source, Project) else ():
            base.say(note)
        prepared = prepare(self._spec, source, self._phases, self._layout, self._cwd)
        self._gateway = self._ensure_gateway()
        with self._started(prepared) as replicas:
            awaited = ReplicasAwaited(self._context, self._spec.replicas, offers_fewer=True)
            ready = replicas.wait_until_ready(
                self._spec.ready_timeout_seconds, awaited.on_ready, base.say, awaited.on_lasting
            )
            self._check_counts(ready)
            self._check_sessions(ready)
            self._wait_for_gateway()
            for note in dict.fromkeys(note for replica in ready for note in replica.notes):
                base.say(f"note: {note}")
            self._say("ready", f"{self._spec.name} is ready at {replicas.address}", timed=True)
            self._phases.finish()
            return {
                "environment": {
                    "name": self._spec.name,
                    "state": "READY",
                    "address": replicas.address,
                    "has_token": self._spec.token is not None,
                    "is_exposed": not is_loopback(self._spec.host),
                    "replicas": [replica.to_json() for replica in ready],
                }
            }

    def _token_in_use(self) -> str | None:
        """The token that clients have already, of what this replaces."""
        if self._payload.replaces is None:
            return None
        serving = run_files.that_serves(self._layout.runs, self._payload.name)
        return None if serving is None else serving.token

    def _ensure_gateway(self) -> Gateway | None:
        """Start the gateway where one is wanted; its replicas judge requests by its address."""
        if not self._spec.gateway:
            return None
        wanted = gateway_process.options_of_settings(os.environ)
        found = gateway_process.ensure_running(self._layout, wanted)
        spec = replace(self._spec, host=found.options.host)
        self._spec = spec.with_access(self._token_in_use())
        self._say("gateway", f"the gateway listens at {found.options.address}")
        return found

    def _check_counts(self, ready: list[StartedReplica]) -> None:
        """Refuse what follows the number of sessions, where a server of its own tells none.

        Raises:
            InvalidSpec
        """
        is_scaled = self._spec.max_replicas is not None
        if is_scaled and any(replica.max_sessions is None for replica in ready):
            raise InvalidSpec(
                f"the server in {self._spec.source} is its own, and does not say how many sessions"
                " it has: it would never be scaled (--max)",
                "leave that out; or build an image with our server: openenv image build",
            )

    def _check_sessions(self, ready: list[StartedReplica]) -> None:
        """Refuse what would fail each session.

        Raises:
            ReplicaFailed
        """
        cause = next((each.sessions_fail for each in ready if each.sessions_fail), None)
        if cause is not None:
            what = "launch" if self._payload.replaces is None else "update"
            raise ReplicaFailed(
                f"the sessions of this {what} would fail: {cause}",
                "mend the constructor, or what it needs, and launch again",
            )

    def _wait_for_gateway(self) -> None:
        """Wait until the daemon has told Envoy of the replicas, and Envoy has reached them.

        Not in an update: Envoy is told when they take over.
        """
        if self._gateway is None or self._payload.replaces is not None:
            return
        found = run_files.of_environment(self._layout.runs, self._spec.name)
        own = [r for r in found if r.request_id == self._context.request_id]
        addresses = ["{}:{}".format(*run_files.endpoint_of(each)) for each in own]
        seconds = min(GATEWAY_SECONDS, self._spec.ready_timeout_seconds)
        gateway_process.wait_until_serving(self._gateway, self._spec.name, addresses, seconds)

    @contextmanager
    def _started(self, prepared: Prepared) -> Iterator[StartedReplicas]:
        """The replicas, which are stopped when the body fails, and go on when it does not."""
        provider = provider_named(self._spec.provider, self._context.home)
        gateway = self._gateway
        replicas = provider.start(
            self._spec,
            prepared,
            launch_id=self._context.request_id,
            on_started=lambda started: self._context.progress({"replica": started.to_json()}),
            address=None if gateway is None else gateway.options.address_of(self._spec.name),
            replaces=self._payload.replaces,
        )
        try:
            where = f" at {replicas.address}" if replicas.is_address_known else ""
            self._say("starting", f"{plural(self._spec.replicas, 'replica')} starting{where}")
            yield replicas
        except BaseException:  # cancelled, too
            replicas.stop()
            raise
        replicas.release()

    def _say(self, phase: str, message: str, *, timed: bool = False) -> None:
        seconds = time.monotonic() - self._started_at
        base.say(f"{message} ({seconds:.1f} s)" if timed else message)
        self._phases.enter(phase, message)
