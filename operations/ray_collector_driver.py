# SPDX-License-Identifier: Apache-2.0
"""What is asked of a Ray cluster for a rollout, in the process that is connected to it.

`RayCollectors` calls these functions through a `RayDriver`. The actors are not detached: they end
with this process, and their sessions with them.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import ray
from ray import cloudpickle
from ray.exceptions import (
    ActorUnschedulableError,
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..environments.engines.base import EngineRefused
from ..environments.engines.ray_actor import import_here
from ..environments.engines.ray_cluster import connect, nodes
from ..rollouts.episodes import Episode
from ..system.request_origin import is_loopback

__all__ = ["begin", "connect", "end", "nodes", "take"]

TAKE_SECONDS = 10.0
LOST = (RayActorError, ObjectLostError, OutOfMemoryError, ActorUnschedulableError)
PACKAGE = Path(__file__).resolve().parents[1]
_actors: dict[str, Any] = {}
_pending: dict[str, Any] = {}  # what has been asked of them and is not answered, by their names

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class CollectorActor:
    """A share of a rollout, sent to its node by value."""

    def __init__(self, package: str, told: bytes) -> None:
        module = import_here("rollouts.share", package)
        self._share = module.Share(**pickle.loads(told))  # noqa: S301  the worker's own

    async def take(self) -> Any:
        """Return episodes that have finished, and whether that is all."""
        return await self._share.take()


def begin(told: bytes, address: str) -> str:
    """Start a collector beside what it plays at; return its name.

    Args:
        told: The arguments of its `Share`, pickled.
        address: Of the replica.
    """
    host = urlsplit(address).hostname or ""
    own = ray.get_runtime_context().get_node_id()
    node = next((each["id"] for each in nodes() if each["address"] == host), own)
    beside = NodeAffinitySchedulingStrategy(node, soft=not is_loopback(host))
    name = uuid4().hex
    _actors[name] = (
        ray.remote(CollectorActor)
        .options(num_cpus=0, max_restarts=0, scheduling_strategy=beside)
        .remote(str(PACKAGE), told)
    )
    return name


def take(name: str) -> tuple[list[Episode], str | None]:
    """Return what a collector has finished, and how it has ended; None: it has not.

    Raises:
        EngineRefused: It has failed.
    """
    try:
        if name not in _pending:  # a second `take` beside it would lose what the first takes
            _pending[name] = _actors[name].take.remote()
        episodes, has_ended = ray.get(_pending[name], timeout=TAKE_SECONDS)
    except GetTimeoutError:
        return [], None
    except RayTaskError as exc:
        hint = getattr(exc.cause, "hint", None)
        raise EngineRefused(f"a collector has failed: {exc.cause}", hint) from exc
    except LOST as exc:
        return [], f"it was lost: {' '.join(str(exc).split())}"
    del _pending[name]
    return episodes, "it has played all" if has_ended else None


def end(name: str) -> None:
    """End a collector, whatever it plays."""
    _pending.pop(name, None)
    ray.kill(_actors.pop(name))
