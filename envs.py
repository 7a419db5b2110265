# SPDX-License-Identifier: Apache-2.0
"""The base classes of environments, as a module that defines one can import them.

They are the same as those of `openenvd` itself: `from openenvd.envs import Environment`.
"""

from .env_host.environment.interfaces import (
    Action,
    Environment,
    EnvironmentMetadata,
    Observation,
    State,
)

__all__ = ["Action", "Environment", "EnvironmentMetadata", "Observation", "State"]
