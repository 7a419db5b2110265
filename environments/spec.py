# SPDX-License-Identifier: Apache-2.0
"""`EnvironmentSpec`: what a user asked for when launching an environment.

Plain data with a JSON form; it crosses the queue, the database and the worker's pipe. How a
source becomes something that runs stands in `sources.py`; who runs it, in `providers/`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..env_host.protocol import DEFAULT_ADMISSION_TIMEOUT_SECONDS


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What one replica may use; None means "not said".

    From `openenv.yaml`'s `validation.resources`, overridden by the command line.
    """

    cpu: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    gpus: int | None = None
    episode_timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """One environment as it is wanted.

    `source` is a bundled name, an absolute folder with `openenv.yaml`, or `module:Class`.
    """

    name: str
    source: str
    provider: str = "local"
    replicas: int = 1
    max_sessions: int | None = None  # per environment; None lets the class and the plan decide
    env: dict[str, str] = field(default_factory=dict)
    port: int | None = None  # None: the first free one of the environments' range
    host: str = "127.0.0.1"
    ready_timeout_seconds: float = 600.0
    step_timeout_seconds: float | None = None
    serve_as_is: bool = False
    resources: ResourceRequest = field(default_factory=ResourceRequest)
    shards: int | None = None  # processes of each replica; None: as many as it has cores
    admission_timeout_seconds: float = DEFAULT_ADMISSION_TIMEOUT_SECONDS
    isolate: bool | None = None  # a process for each session; None: where the class needs it
    session_memory_bytes: int | None = None  # of each isolated session

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EnvironmentSpec:
        """The spec that `to_json` wrote; unknown keys of a newer daemon are ignored."""
        known = {item.name for item in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        resources = values.pop("resources", None) or {}
        allowed = {item.name for item in fields(ResourceRequest)}
        picked = {key: value for key, value in resources.items() if key in allowed}
        return cls(resources=ResourceRequest(**picked), **values)
