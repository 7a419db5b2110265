# SPDX-License-Identifier: Apache-2.0
"""The actor of a replica: sent to its node by value, so that the cluster needs no openenvd.

It imports the package from where the agent has it, if the node sees that folder, too, or else the
one of its runtime environment; the work is done there (`replica.py`). It imports of ours only
then, and nothing but the standard library before.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


def import_here(module: str, folder: str | None) -> types.ModuleType:
    """Import a module of openenvd on this node.

    It is imported from the folder where the agent has the package, if there is one and it is seen
    here.

    Raises:
        RuntimeError: There is no openenvd here.
    """
    name = "openenvd"
    if folder is not None and (Path(folder) / "environments" / "shim" / "__main__.py").exists():
        package = types.ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
    elif importlib.util.find_spec(name) is None:
        raise RuntimeError(
            f"this node has neither {folder} nor openenvd in its Python: put it into "
            "a file system that all nodes see, or into the runtime environment"
        )
    return importlib.import_module(f"{name}.{module}")


class ReplicaActor:
    """One replica, as the agent talks to it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        folder = None if settings["runtime_env"] else settings["package"]
        module = import_here("environments.engines.ray.replica", folder)
        self._replica = module.RayReplica(settings)

    def read_log(self, offset: int) -> tuple[bytes, int, bool]:
        """Return what was printed after an offset, the offset after it, whether that is all."""
        found: tuple[bytes, int, bool] = self._replica.read_log(offset)
        return found

    def signal(self, number: int) -> None:
        """Send a signal to the server."""
        self._replica.signal(number)

    def stop(self, grace_seconds: float) -> None:
        """Begin to stop the server."""
        self._replica.stop(grace_seconds)

    def close(self) -> None:
        """Stop the server at once, and remove what is left of it on this node."""
        self._replica.close()
