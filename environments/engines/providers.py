# SPDX-License-Identifier: Apache-2.0
"""Finds the provider that starts replicas: this machine, or an engine (`registry.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...schema.errors import UnknownProvider
from ...schema.spec import EnvironmentSpec
from ..run_files import LOCAL
from . import registry
from .base import EngineRefused

if TYPE_CHECKING:
    from .provider import Provider


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
    """Return whether its clients can only be given the gateway's address.

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
