# SPDX-License-Identifier: Apache-2.0
"""What an environment class of your own is made of.

`from openenvd.envs import Action, Environment, Observation, State` are the base classes. The
bundled environments are in `env_host/bundled/`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..env_host.environment.interfaces import Action as Action
    from ..env_host.environment.interfaces import Environment as Environment
    from ..env_host.environment.interfaces import EnvironmentMetadata as EnvironmentMetadata
    from ..env_host.environment.interfaces import Observation as Observation
    from ..env_host.environment.interfaces import State as State

__all__ = ["Action", "Environment", "EnvironmentMetadata", "Observation", "State"]


def __getattr__(name: str) -> Any:  # on first use: pydantic takes a while
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("..env_host.environment.interfaces", __name__), name)
