# SPDX-License-Identifier: Apache-2.0
"""What starts replicas. To add a provider: a file here and its name below."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UnknownProvider

if TYPE_CHECKING:
    from .base import Provider

AVAILABLE = ("local",)


def check_provider(name: str) -> str:
    """The name itself, when there is such a provider.

    Raises:
        UnknownProvider
    """
    if name in AVAILABLE:
        return name
    raise UnknownProvider(f"there is no provider {name!r}", f"use one of: {', '.join(AVAILABLE)}")


def provider_named(name: str, home: Path) -> Provider:
    """The provider of that name.

    Raises:
        UnknownProvider
    """
    check_provider(name)
    from .local import LocalProvider

    return LocalProvider(home)
