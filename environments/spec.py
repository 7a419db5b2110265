# SPDX-License-Identifier: Apache-2.0
"""`EnvironmentSpec`: what a user asked for when launching an environment.

    ServeOptions (env_host.protocol)   how sessions are served
    └── LaunchOptions                  and how replicas are started: flags of `openenv launch`,
        │                              fields of the launch's payload
        └── EnvironmentSpec            and what is launched, under which name

How a source becomes something that runs stands in `sources/`; what runs it, in `providers/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..env_host.protocol import ServeOptions
from ..system.access_tokens import TOKEN_PATTERN, new_token
from ..system.options import option
from ..system.request_origin import is_loopback, read_origin
from ..system.units import MB

AUTO = "auto"  # instead of a token: make one


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What one replica may use, from `validation.resources` of `openenv.yaml`; None: not said."""

    cpu: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    gpus: int | None = None
    episode_timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions(ServeOptions):
    """How an environment is started. Each option is declared here and nowhere else."""

    provider: str = option("local", "Provider that runs the replicas.", metavar="NAME")
    replicas: int = option(1, "Number of env servers behind one address.", least=1, most=1000)
    env: dict[str, str] = option(  # noqa: RUF009  a field with a factory
        dict, "A variable for the environment; without a value, the one it has here. Repeatable."
    )
    with_packages: list[str] = option(  # noqa: RUF009  a field with a factory
        list,
        "Install this package as well, apart from the project's own environment. Repeatable.",
        flag="--with",
        metavar="PACKAGE",
    )
    port: int | None = option(
        None, "Port to listen on; by default a free one.", least=1, most=65535
    )
    memory_mb: int | None = option(
        None,
        "Memory limit of the launch, and of each replica: 512M, 2G.",
        least=32,  # the launch itself holds about 25
    )
    ready_timeout_seconds: float = option(600.0, "Fail when it is not ready by then.", above=0)

    def check(self) -> None:
        """Check the options against each other.

        Raises:
            ValueError: Two of them contradict each other.
        """
        if self.session_memory_mb is not None and self.isolate is False:
            raise ValueError("session_memory_mb is for isolated sessions, and isolate is false")
        if self.serve_as_is and (self.isolate or self.shards is not None):
            raise ValueError("serve_as_is runs the project's own server: one process, no shards")
        for package in self.with_packages:
            if not package.strip() or package.startswith("-") or not package.isprintable():
                raise ValueError(f"with_packages: {package!r} is not a package")
        for origin in self.allow_origin:
            read_origin(origin)
        if self.token is not None and not re.fullmatch(f"{AUTO}|{TOKEN_PATTERN}", self.token):
            raise ValueError("token: write `auto`, or 16 to 256 letters, digits and any of -._~")


@dataclass(frozen=True, slots=True)
class EnvironmentSpec(LaunchOptions):
    """One environment as it is wanted.

    Attributes:
        name: The environment's name; a path, a label and part of an address.
        source: A bundled name, an absolute folder with `openenv.yaml`, or `module:Class`.
    """

    name: str
    source: str

    def with_access(self) -> EnvironmentSpec:
        """This spec with a token, if it needs one, and origins as browsers spell them."""
        token = new_token() if self.token == AUTO else self.token
        if token is None and not is_loopback(self.host):
            token = new_token()
        origins = [read_origin(origin) for origin in self.allow_origin]
        return replace(self, token=token, allow_origin=origins)

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit of each replica."""
        return None if self.memory_mb is None else self.memory_mb * MB

    def with_manifest(self, asked: ResourceRequest) -> EnvironmentSpec:
        """This spec, with what its manifest asks for wherever the user said nothing."""
        return replace(
            self,
            gpus=asked.gpus if self.gpus is None else self.gpus,
            step_timeout_seconds=self.step_timeout_seconds or asked.episode_timeout_seconds,
        )
