# SPDX-License-Identifier: Apache-2.0
"""`launch`: from what a user wrote to an environment that answers.

    clear what an earlier attempt left ─▶ resolve ─▶ prepare ─▶ start ─▶ wait until all are ready

What it prints is the request's log. It fails at once when a replica ends, and on any failure,
cancellation included, stops everything it started. Should its worker be killed, the daemon finds
what it started by the run files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from ..env_host.protocol import DEFAULT_ADMISSION_TIMEOUT_SECONDS
from ..environments import run_files
from ..environments.errors import UnknownProvider
from ..environments.layout import Layout
from ..environments.names import name_of_source, validate_name
from ..environments.providers import check_provider, provider_named
from ..environments.providers.base import Replicas, StartedReplica
from ..environments.sources.program import program_of
from ..environments.sources.resolve import Project, ResolvedSource, resolve
from ..environments.spec import EnvironmentSpec, ResourceRequest
from ..environments.venv.project_venv import project_python
from ..system.units import MB
from . import base

MAX_REPLICAS = 1000
MAX_SESSIONS = 1_000_000
LEAST_MEMORY_MB = 32  # the launch itself holds about 25
MAX_MEMORY_MB = 2**30  # a petabyte: what is more was not meant
LEAST_SESSION_MEMORY_MB = 16  # a session's process holds about 14 before it has done anything
MAX_SHARDS = 256
MAX_GPUS = 64
LEFTOVER_GRACE_SECONDS = 2.0


class LaunchPayload(base.Payload):
    """What is to be launched, and how."""

    source: str = Field(
        min_length=1,
        max_length=base.MAX_TEXT,
        description="A bundled name, a folder with openenv.yaml, or module:Class.",
    )
    name: str = Field("", description="The environment's name; made from the source if left out.")
    cwd: str | None = Field(
        None,
        max_length=base.MAX_TEXT,
        description="The folder that a relative source is meant from; an absolute path.",
    )
    provider: str = Field("local", description="What runs the replicas.")
    replicas: int = Field(1, ge=1, le=MAX_REPLICAS, description="How many servers.")
    max_sessions: int | None = Field(
        None,
        ge=1,
        le=MAX_SESSIONS,
        description="Most sessions at once, all replicas together.",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the replicas."
    )
    host: str = Field("127.0.0.1", min_length=1, description="The address to listen on.")
    port: int | None = Field(
        None, ge=1, le=65535, description="The port to listen on; a free one if left out."
    )
    ready_timeout_seconds: float = Field(
        600.0, gt=0, le=base.MAX_SECONDS, description="How long the replicas may take to get ready."
    )
    step_timeout_seconds: float | None = Field(
        None,
        gt=0,
        le=base.MAX_SECONDS,
        description="Longest reset or step; past it the client gets an error.",
    )
    serve_as_is: bool = Field(False, description="Run the project's own app untouched.")
    memory_mb: int | None = Field(
        None,
        ge=LEAST_MEMORY_MB,
        le=MAX_MEMORY_MB,
        description="Memory limit of the launch, and of each replica, in MB.",
    )
    shards: int | None = Field(
        None,
        ge=1,
        le=MAX_SHARDS,
        description="Processes that serve each replica's sessions; one per core if left out.",
    )
    admission_timeout_seconds: float = Field(
        DEFAULT_ADMISSION_TIMEOUT_SECONDS,
        ge=0,
        le=base.MAX_SECONDS,
        description="How long a client waits for a slot when all are taken.",
    )
    isolate: bool | None = Field(
        None,
        description="A process for each session; where the class needs it, if left out.",
    )
    gpus: int | None = Field(
        None, ge=0, le=MAX_GPUS, description="GPUs of each replica, one per shard in turn."
    )
    session_memory_mb: int | None = Field(
        None,
        ge=LEAST_SESSION_MEMORY_MB,
        le=MAX_MEMORY_MB,
        description="Memory limit of one isolated session, in MB.",
    )

    @field_validator("provider")
    @classmethod
    def _known_provider(cls, value: str) -> str:
        try:
            return check_provider(value)
        except UnknownProvider as exc:
            raise ValueError(f"{exc.message}; {exc.hint}") from exc

    @field_validator("env")
    @classmethod
    def _possible_variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not name or "=" in name or "\0" in name + text:
                raise ValueError(f"{name!r} cannot be an environment variable")
        return value

    @field_validator("cwd")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).is_absolute():
            raise ValueError(f"{value!r} is not an absolute path")
        return value

    @model_validator(mode="after")
    def _named(self) -> Self:
        self.name = self.name or name_of_source(self.source)
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.session_memory_mb is not None and self.isolate is False:
            raise ValueError("session_memory_mb is for isolated sessions, and isolate is false")
        if self.serve_as_is and (self.isolate or self.shards is not None):
            raise ValueError("serve_as_is runs the project's own server: one process, no shards")
        return self

    def spec(self) -> EnvironmentSpec:
        """The environment as it is wanted, before its source has been looked at."""
        resources = ResourceRequest(memory_bytes=_megabytes(self.memory_mb), gpus=self.gpus)
        return EnvironmentSpec(
            name=self.name,
            source=self.source,
            provider=self.provider,
            replicas=self.replicas,
            max_sessions=self.max_sessions,
            env=self.env,
            port=self.port,
            host=self.host,
            ready_timeout_seconds=self.ready_timeout_seconds,
            step_timeout_seconds=self.step_timeout_seconds,
            serve_as_is=self.serve_as_is,
            resources=resources,
            shards=self.shards,
            admission_timeout_seconds=self.admission_timeout_seconds,
            isolate=self.isolate,
            session_memory_bytes=_megabytes(self.session_memory_mb),
        )


class Launch:
    """Launches one environment."""

    name: ClassVar[str] = "launch"
    summary: ClassVar[str] = "Start an environment and wait until it answers."
    schedule: ClassVar[str] = "LONG"
    idempotent: ClassVar[bool] = True  # it begins by clearing what an earlier attempt left
    max_attempts: ClassVar[int] = 3
    expected_bytes: ClassVar[int] = 60 * MB
    leaves_bytes: ClassVar[int] = 40 * MB  # a server of its own Python, and its shim
    Payload: ClassVar[type[base.Payload]] = LaunchPayload

    @staticmethod
    def run(payload: LaunchPayload, context: base.OperationContext) -> dict[str, Any]:
        """`{"environment": {"name", "state", "address", "replicas": […]}}`.

        Raises:
            EnvironmentsError
        """
        return _Launching(payload, context).run()


class _Launching:
    """One launch on its way."""

    def __init__(self, payload: LaunchPayload, context: base.OperationContext) -> None:
        self._payload = payload
        self._context = context
        self._layout = Layout(context.home)
        self._spec = payload.spec()
        self._started_at = time.monotonic()

    def run(self) -> dict[str, Any]:
        validate_name(self._spec.name)
        self._clear_leftovers()
        source = self._resolve()
        python = self._prepare(source)
        with self._started(source, python) as replicas:
            ready = replicas.wait_until_ready(self._spec.ready_timeout_seconds, self._on_ready)
            self._say("ready", f"{self._spec.name} is ready at {replicas.address}", timed=True)
            return {"environment": self._result(replicas.address, ready)}

    def _clear_leftovers(self) -> None:
        name = self._spec.name
        left = run_files.stop_environment(self._layout.runs, name, LEFTOVER_GRACE_SECONDS)
        if left:
            self._say("clearing", f"stopped what an earlier attempt had left: {', '.join(left)}")

    def _resolve(self) -> ResolvedSource:
        cwd = Path(self._payload.cwd) if self._payload.cwd else Path.cwd()
        source = resolve(self._spec.source, cwd)
        self._spec = replace(self._spec, resources=_merged(source.resources, self._spec.resources))
        self._say("resolved", source.sentence)
        return source

    def _prepare(self, source: ResolvedSource) -> Path | None:
        if not isinstance(source, Project):
            return None
        message = f"preparing the Python of {source.manifest.name}"
        self._context.progress({"phase": "preparing", "message": message})
        return project_python(source, self._layout, base.say)

    @contextmanager
    def _started(self, source: ResolvedSource, python: Path | None) -> Iterator[Replicas]:
        """The replicas, which are stopped when the body fails, and go on when it does not."""
        provider = provider_named(self._spec.provider, self._context.home)
        replicas = provider.start(
            self._spec,
            program_of(self._spec, source, python),
            launch_id=self._context.request_id,
            memory_limit_bytes=_megabytes(self._payload.memory_mb),
            on_started=self._on_started,
        )
        try:
            self._say("starting", f"{_count(self._spec.replicas)} starting at {replicas.address}")
            yield replicas
        except BaseException:  # cancelled, too
            replicas.stop()
            raise
        replicas.release()

    def _on_started(self, replica: StartedReplica) -> None:
        self._context.progress({"replica": replica.to_json()})

    def _on_ready(self, replica: StartedReplica) -> None:
        self._say("waiting", f"replica {replica.ordinal} (pid {replica.pid}) is ready", timed=True)

    def _result(self, address: str, replicas: list[StartedReplica]) -> dict[str, Any]:
        return {
            "name": self._spec.name,
            "state": "READY",
            "address": address,
            "replicas": [replica.to_json() for replica in replicas],
        }

    def _say(self, phase: str, message: str, *, timed: bool = False) -> None:
        seconds = time.monotonic() - self._started_at
        base.say(f"{message} ({seconds:.1f} s)" if timed else message)
        self._context.progress({"phase": phase, "message": message})


def _merged(of_source: ResourceRequest, of_user: ResourceRequest) -> ResourceRequest:
    """What the manifest asks for, overridden by what the user said."""
    return replace(
        of_source,
        memory_bytes=of_user.memory_bytes or of_source.memory_bytes,
        gpus=of_source.gpus if of_user.gpus is None else of_user.gpus,
    )


def _megabytes(count: int | None) -> int | None:
    return None if count is None else count * MB


def _count(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"
