# SPDX-License-Identifier: Apache-2.0
"""The objects that the classes of the supervisor share. They run in its one thread."""

from __future__ import annotations

import selectors
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schema.protocol import HostConfig
from ...system.process.backoff import RestartSchedule
from ..environment.plan import ServingPlan
from ..ipc.scoreboard import Field, Scoreboard
from ..shared_state.process import StateProcess
from ..startup import SPARE_FDS
from .acceptor import Backlog
from .children import Children
from .close_notices import SocketCopies
from .distributor import Distributor
from .memory import ProgramWatch
from .session_processes import SessionProcesses
from .shard_policies import Idleness
from .spawn import Spawner
from .status_reporter import StatusReporter

if TYPE_CHECKING:
    from ..ipc.reports import Notifier


@dataclass(eq=False)
class SupervisorContext:
    """The parts of one supervisor, and whether it is ready or stopping."""

    config: HostConfig
    spawner: Spawner
    backlog: Backlog
    scoreboard: Scoreboard
    notifier: Notifier
    max_fds: int
    state: StateProcess | None = None  # written by `ShardPool`, if sessions share a state
    is_ready: bool = False  # whether a shard has served; written by `ChildLinks`
    is_stopping: bool = False  # whether the end was requested; written by `Supervisor`

    def __post_init__(self) -> None:
        self.distributor = Distributor(
            self.backlog, self.scoreboard, self.spawner.inboxes, max_fds=self.max_fds
        )
        self.selector = selectors.DefaultSelector()
        self.children = Children()
        self.processes = SessionProcesses(self.children, self.spawner)
        self.reporter = StatusReporter(self.scoreboard, self.notifier)
        self.programs = ProgramWatch(self.config, self.children, self.reporter)
        self.spawner.count_kills = lambda: self.programs.kills.count()
        self.restarts = RestartSchedule()
        self.idleness = Idleness(self.config.sleep_after_seconds)
        max_copies = max(0, self.max_fds - 2 * SPARE_FDS - self.backlog.at_once)
        self.copies = SocketCopies(max_copies, self.children)
        self.share_sessions()

    @property
    def plan(self) -> ServingPlan:
        """Return how many shards and sessions there are now."""
        return self.spawner.plan

    @property
    def is_placing(self) -> bool:
        """Return whether connections are passed on to shards."""
        return self.is_ready and not self.is_stopping

    @property
    def state_pid(self) -> int | None:
        """The pid of the process with the shared state."""
        return None if self.state is None else self.state.pid

    def share_sessions(self) -> None:
        """Write how many sessions each shard may have."""
        for row in self.scoreboard:
            row[Field.MAX_SESSIONS] = self.plan.share(row.index)
