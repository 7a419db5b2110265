# SPDX-License-Identifier: Apache-2.0
"""Finds the provider that starts replicas: this machine, or an engine (`registry.py`).

The daemon calls it, in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ...schema.errors import UnknownProvider
from ...schema.spec import EnvironmentSpec
from ..run_files import LOCAL, RunFile
from ..sources.program import Prepared
from . import registry
from .base import EngineRefused


def check_provider(name: str) -> str:
    """The name itself, when there is such a provider; whether it works here, its agent can tell.

    Raises:
        UnknownProvider
    """
    try:
        registry.entry_of(name)
    except EngineRefused as exc:
        raise UnknownProvider(exc.message, exc.hint) from exc
    return name


def check_options(spec: EnvironmentSpec) -> None:
    """Refuse options that an engine would refuse, before anything is built or started.

    Raises:
        ValueError
    """
    try:
        entry = registry.entry_of(spec.provider)
        if entry.check_options is not None:
            entry.check_options(spec.options_of_engine, sandbox=spec.sandbox)
    except EngineRefused as exc:
        raise ValueError(f"engine_options: {exc.message}; {exc.hint}") from exc


def needs_gateway(spec: EnvironmentSpec) -> bool:
    """Whether its clients can only be given the gateway's address.

    Replicas of this machine share a listening socket; those of an engine have nothing in common.
    """
    most = max(spec.replicas, spec.max_replicas or 1)
    return spec.provider != LOCAL and (most > 1 or registry.entry_of(spec.provider).moves)


def provider_named(name: str, home: Path) -> Provider:
    """The provider of that name.

    Raises:
        UnknownProvider
    """
    if check_provider(name) != LOCAL:
        from .engine_provider import EngineProvider

        return EngineProvider(name, home)
    from .local.provider import LocalProvider

    return LocalProvider(home)


class Provider(Protocol):
    """One way to run replicas."""

    @property
    def name(self) -> str:
        """What `--provider` calls it."""

    def start(
        self,
        spec: EnvironmentSpec,
        prepared: Prepared,
        *,
        launch_id: str,
        address: str | None = None,
        replaces: str | None = None,
    ) -> list[RunFile]:
        """Start all replicas; on a failure those that were started are stopped again.

        Each replica is recorded, where the daemon finds it, before it is started.

        Args:
            spec: The environment as it is wanted.
            prepared: What a replica runs.
            launch_id: The id of the launch's request, which is part of the replicas' ids.
            address: The environment's, at the gateway; None: the replicas' own.
            replaces: The launch whose replicas serve the environment, and go on until the daemon
                has these take over. These have the same address, unless the spec says otherwise.

        Raises:
            EnvironmentsError: A replica cannot be started.
        """

    def add(
        self,
        like: RunFile,
        shares: Sequence[int | None],
        *,
        replicas: int,
        started_by: str,
    ) -> list[RunFile]:
        """Start further replicas of a running environment, where its clients find them.

        They have numbers that no replica of it has (`run_files.free_ordinals`).

        Args:
            like: One that it has.
            shares: For each new one, how many sessions it may have.
            replicas: How many the environment is to have then.
            started_by: The request that starts them, which their run files say.

        Raises:
            EnvironmentsError: A replica cannot be started.
        """
