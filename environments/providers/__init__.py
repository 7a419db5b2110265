# SPDX-License-Identifier: Apache-2.0
"""The providers there are, and those there will be. To add one: a file here and a line below."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UnknownProvider

if TYPE_CHECKING:
    from .base import Provider

AVAILABLE = ("local",)
TO_COME = ("docker", "swarm", "slurm", "ray", "kubernetes")


def check_provider(name: str) -> str:
    """The name itself, when there is such a provider.

    Raises:
        UnknownProvider
    """
    if name in AVAILABLE:
        return name
    hint = f"use one of: {', '.join(AVAILABLE)}"
    if name in TO_COME:
        raise UnknownProvider(f"the provider {name!r} is not built yet", hint)
    raise UnknownProvider(f"there is no provider {name!r}", hint)


def provider_named(name: str, home: Path) -> Provider:
    """The provider of that name.

    Raises:
        UnknownProvider
    """
    check_provider(name)
    from .local import LocalProvider

    return LocalProvider(home)
