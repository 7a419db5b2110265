# SPDX-License-Identifier: Apache-2.0
"""What a provider is: it starts replicas, waits for them, and stops them.

A launch (in a worker) calls them in this order; the daemon's reconciler cares for what is running.

    start ──▶ a Replicas handle ──▶ wait_until_ready ──▶ release     the replicas go on
                                └─▶ stop                             on any failure
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ..sources.program import Program
from ..spec import EnvironmentSpec


@dataclass(frozen=True, slots=True)
class StartedReplica:
    """One replica that has been started, and perhaps is ready."""

    id: str
    ordinal: int
    run_dir: str | None = None
    pid: int | None = None
    max_sessions: int | None = None
    memory_bytes: int | None = None  # what it holds, once it is ready

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "ordinal": self.ordinal,
            "run_dir": self.run_dir,
            "pid": self.pid,
            "max_sessions": self.max_sessions,
            "memory_bytes": self.memory_bytes,
        }


OnReplica = Callable[[StartedReplica], None]


class Replicas(Protocol):
    """The replicas of one launch, until they are its environment's."""

    @property
    def address(self) -> str:
        """What goes into upstream's `base_url`."""

    def wait_until_ready(self, timeout_seconds: float, on_ready: OnReplica) -> list[StartedReplica]:
        """All of them, ready; `on_ready` hears of each as it comes.

        Raises:
            ReplicaFailed: at once when one ends.
            NotReady: when the time is over.
        """

    def stop(self) -> None:
        """Stop everything that was started; nothing is left when this returns."""

    def release(self) -> None:
        """Let go of them: from here on they live without us."""


class Provider(Protocol):
    """One way to run replicas."""

    name: ClassVar[str]

    def start(
        self,
        spec: EnvironmentSpec,
        program: Program,
        *,
        launch_id: str,
        on_started: OnReplica,
    ) -> Replicas:
        """Start all replicas; each is written down where the daemon finds it before it is started.

        On a failure everything that was started is stopped again.
        """
