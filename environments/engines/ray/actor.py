# SPDX-License-Identifier: Apache-2.0
"""The actor of a replica: it is sent to its node by value, so that the cluster needs no openenvd.

It imports openenvd from the agent's folder, if the node sees that, or else from its runtime
environment; `replica.py` does the work. Before that, it imports the standard library alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


def import_here(module: str, folder: str | None) -> types.ModuleType:
    """Import a module of openenvd on this node, from the agent's `folder` if that is seen here.

    Raises `RuntimeError` if there is no openenvd here.
    """
    name = "openenvd"
    if folder is not None and (Path(folder) / "environments" / "shim" / "__main__.py").exists():
        package = types.ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
    elif importlib.util.find_spec(name) is None:
        where = "a file system that all nodes see, or into the runtime environment"
        raise RuntimeError(f"this node has neither {folder} nor openenvd: put it into {where}")
    return importlib.import_module(f"{name}.{module}")


class ReplicaActor:
    """One replica, to which the agent talks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        folder = None if settings["runtime_env"] else settings["package"]
        module = import_here("environments.engines.ray.replica", folder)
        self._replica = module.RayReplica(settings)

    def call(self, method: str, *arguments: Any) -> Any:
        """Return the answer of the replica to one of its calls."""
        return getattr(self._replica, method)(*arguments)
