# SPDX-License-Identifier: Apache-2.0
"""`launch`: start the environment that a source names.

    clear what an earlier attempt left ─▶ resolve ─▶ prepare ─▶ start ─▶ wait until all are ready

What it prints is the request's log. It fails at once when a replica ends, and on any failure,
cancellation included, stops everything it started. Should its worker be killed, the daemon finds
what it started by the run files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from ..environments import run_files
from ..environments.errors import UnknownProvider
from ..environments.layout import Layout
from ..environments.names import name_of_source, validate_name
from ..environments.providers import check_provider, provider_named
from ..environments.providers.base import Replicas, StartedReplica
from ..environments.sources.program import program_of
from ..environments.sources.resolve import Project, ResolvedSource, resolve
from ..environments.spec import EnvironmentSpec, LaunchOptions
from ..environments.venv.overlay import overlay_python
from ..environments.venv.project_venv import project_python
from ..system.request_origin import is_loopback
from ..system.units import MB
from . import base

LEFTOVER_GRACE_SECONDS = 2.0


class LaunchPayload(base.payload_of(LaunchOptions)):  # type: ignore[misc]  # a class made at run time
    """What is to be launched, and how."""

    source: str = Field(
        min_length=1,
        max_length=base.MAX_TEXT,
        description="A bundled name, a folder with openenv.yaml, or module:Class.",
    )
    name: str = Field("", description="The environment's name; by default made from the source.")
    cwd: base.AbsolutePath | None = Field(
        None, description="The folder that a relative source refers to; an absolute path."
    )

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
        self.spec().check()
        return self

    def spec(self) -> EnvironmentSpec:
        """The environment as it is wanted, before its source has been looked at."""
        return EnvironmentSpec(**self.model_dump(exclude={"cwd"}))


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
        self._spec = payload.spec().with_access()
        self._cwd = Path(payload.cwd) if payload.cwd else Path.cwd()
        self._started_at = time.monotonic()

    def run(self) -> dict[str, Any]:
        validate_name(self._spec.name)
        name = self._spec.name
        left = run_files.stop_environment(self._layout.runs, name, LEFTOVER_GRACE_SECONDS)
        if left:
            self._say("clearing", f"stopped replicas of an earlier attempt: {', '.join(left)}")
        source = resolve(self._spec.source, self._cwd)
        self._spec = self._spec.with_manifest(source.resources)
        self._say("resolved", source.sentence)
        python = self._prepare(source)
        with self._started(source, python) as replicas:
            ready = replicas.wait_until_ready(self._spec.ready_timeout_seconds, self._on_ready)
            for note in _notes(ready):
                base.say(note)
            self._say("ready", f"{self._spec.name} is ready at {replicas.address}", timed=True)
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

    def _prepare(self, source: ResolvedSource) -> Path | None:
        more = self._spec.with_packages
        if not (isinstance(source, Project) or more):
            return None
        message = f"preparing the Python of {self._spec.name}"
        self._context.progress({"phase": "preparing", "message": message})
        python = None
        if isinstance(source, Project):
            python = project_python(source, self._layout, base.say)
        if more:
            return overlay_python(python, more, self._layout, self._cwd, base.say)
        return python

    @contextmanager
    def _started(self, source: ResolvedSource, python: Path | None) -> Iterator[Replicas]:
        """The replicas, which are stopped when the body fails, and go on when it does not."""
        provider = provider_named(self._spec.provider, self._context.home)
        replicas = provider.start(
            self._spec,
            program_of(self._spec, source, python),
            launch_id=self._context.request_id,
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

    def _say(self, phase: str, message: str, *, timed: bool = False) -> None:
        seconds = time.monotonic() - self._started_at
        base.say(f"{message} ({seconds:.1f} s)" if timed else message)
        self._context.progress({"phase": phase, "message": message})


def _notes(ready: list[StartedReplica]) -> Iterator[str]:
    """Yield what a user should know of the replicas, each once."""
    yield from dict.fromkeys(f"note: {note}" for replica in ready for note in replica.notes)
    for cause in dict.fromkeys(replica.sessions_fail for replica in ready):
        if cause is not None:
            yield f"warning: sessions fail: {cause}"


def _count(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"
