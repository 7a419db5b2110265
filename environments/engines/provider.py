# SPDX-License-Identifier: Apache-2.0
"""The interface of a provider, which starts replicas, waits for them, and stops them.

A launch (in a worker) calls them in this order; the daemon's reconciler then takes over.

    start ──▶ StartedReplicas ──▶ wait_until_ready ──▶ release     the replicas continue
                              └─▶ stop                             on any failure
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ...schema.spec import EnvironmentSpec
from ..run_files import RunFile
from ..sources.program import Prepared

if TYPE_CHECKING:
    from .started_replicas import StartedReplicas


@dataclass(frozen=True, slots=True)
class StartedReplica:
    """One replica that has been started, and perhaps is ready."""

    id: str
    ordinal: int
    run_dir: str | None = None
    pid: int | None = None
    max_sessions: int | None = None
    memory_bytes: int | None = None  # what it holds, once it is ready
    notes: tuple[str, ...] = ()  # what a user should know of it
    sessions_fail: str | None = None  # why no environment could be created
    serving: str | None = None  # `env_host.protocol.Serving`
    route: str | None = None  # one to try, where there are no sessions: `POST /reset`

    def to_json(self) -> dict[str, Any]:
        """Return the replica as plain JSON."""
        return asdict(self)


OnReplica = Callable[[StartedReplica], None]
OnWaiting = Callable[[str], None]
OnLasting = Callable[[str, float], None]


class Provider(Protocol):
    """One way to run replicas."""

    @property
    def name(self) -> str:
        """What `--provider` calls it."""

    def start(
        self,
        spec: EnvironmentSpec,
        prepared: Prepared,
        *,
        launch_id: str,
        on_started: OnReplica,
        address: str | None = None,
        replaces: str | None = None,
    ) -> StartedReplicas:
        """Start all replicas; on a failure those that were started are stopped again.

        Each replica is recorded, where the daemon finds it, before it is started.

        Args:
            spec: The environment as it is wanted.
            prepared: What a replica runs.
            launch_id: The id of the launch's request, which is part of the replicas' ids.
            on_started: Called with each replica when it is started.
            address: The environment's, at the gateway; None: the replicas' own.
            replaces: The launch whose replicas serve the environment, and go on until the daemon
                has these take over. These have the same address, unless the spec says otherwise.

        Raises:
            EnvironmentsError: A replica cannot be started.
        """

    def add(
        self,
        like: RunFile,
        shares: Sequence[int | None],
        *,
        replicas: int,
        added_by: str,
        on_started: OnReplica,
    ) -> StartedReplicas:
        """Start further replicas of a running environment, where its clients find them.

        They have numbers that no replica of it has (`run_files.free_ordinals`).

        Args:
            like: One that it has.
            shares: For each new one, how many sessions it may have.
            replicas: How many the environment is to have then.
            added_by: The request that starts them, which their run files say (`added_by`)
                until it keeps them.
            on_started: Called with each replica when it is started.

        Raises:
            EnvironmentsError: A replica cannot be started.
        """
