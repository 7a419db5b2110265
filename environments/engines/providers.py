# SPDX-License-Identifier: Apache-2.0
"""What starts replicas: this machine, or an engine that is installed (`registry.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...schema.errors import InvalidSpec, UnknownProvider
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


def check_options(name: str, options: Mapping[str, str], *, sandbox: bool) -> None:
    """Refuse options that an engine would refuse, before anything is built or started.

    Raises:
        InvalidSpec
    """
    try:
        entry = registry.entry_of(name)
        if entry.check_options is not None:
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
