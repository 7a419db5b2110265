# SPDX-License-Identifier: Apache-2.0
"""What starts replicas: this machine, or an engine of `engines/registry.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...schema.errors import InvalidSpec, UnknownProvider
from ..run_files import LOCAL
from .base import EngineRefused
from .registry import entries

if TYPE_CHECKING:
    from .provider import Provider


def available() -> tuple[str, ...]:
    """Return the names of all providers; whether an engine works here, its agent can tell."""
    return (LOCAL, *entries())


def check_provider(name: str) -> str:
    """The name itself, when there is such a provider.

    Raises:
        UnknownProvider
    """
    if name in available():
        return name
    names = ", ".join(available())
    raise UnknownProvider(f"there is no provider {name!r}", f"use one of: {names}")


def check_options(name: str, options: Mapping[str, str], *, sandbox: bool) -> None:
    """Refuse options that an engine would refuse, before anything is built or started.

    Raises:
        InvalidSpec
    """
    entry = entries().get(name)
    if entry is None or entry.check_options is None:
        return
    try:
        entry.check_options(options, sandbox=sandbox)
    except EngineRefused as exc:
        raise InvalidSpec(exc.message, exc.hint) from exc


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
