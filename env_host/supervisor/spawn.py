# SPDX-License-Identifier: Apache-2.0
"""`Spawner`: makes the supervisor's children, by forking itself or as new programs.

    shard ────▶ link, configuration ──fork──▶ leave the supervisor ──▶ serve (`shard/shard.py`)
    session ──▶ memory cgroup ────────┘└──new program, where no fork is safe
                                                               (`shard/session_process.py`)

If the machine has no room for one more process or descriptor,
nothing is left behind, and the caller gets `OSError`. Running children continue.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from ...schema.protocol import CHILD_CONFIG_VARIABLE, HOST_CONFIG_VARIABLE, HostConfig
from ...system.memory.cgroups import Cgroup, GroupsBelow
from ...system.process import forking
from ...system.process.descriptors import packet_pair
from ...system.process.prctl import set_thread_name
from ...system.process.proc import children_of, oom_score_adj, set_oom_score_adj
from ...system.text.units import plural
from ..ipc.scoreboard import Field, Scoreboard
from ..startup import HOME, ChildConfig, enter_group
from .children import Child
from .memory import CHECK_SECONDS, KillCount

if TYPE_CHECKING:
    from ..environment.plan import ServingPlan

# The kernel kills a worker of the executor first, then a child, and last the supervisor, which
# tells clients why their sessions have ended.
CHILD_OOM_SCORE_ADJ = 200
PROGRAM = Path(__file__).resolve().parent.parent / "__main__.py"
Serve = Callable[[ChildConfig, Scoreboard | None], Never]  # what a forked child does

log = logging.getLogger("openenvd.env_host")


@dataclass(eq=False)
class Spawner:
    """Makes shards and the processes of isolated sessions."""

    config: HostConfig
    plan: ServingPlan
    scoreboard: Scoreboard
    serve: Serve
    leave_supervisor: Callable[[], None]  # forgets what only the supervisor may do; called first
    imported_fds: Set[int]  # that the environment opened at its import; children keep them
    _groups: GroupsBelow | None = field(default=None, init=False)  # of isolated sessions
    _number: int = field(default=0, init=False)  # of the last cgroup
    can_fork: bool = field(default=False, init=False)  # set by `prepare`
    count_kills: Callable[[], int] = int  # by the kernel for memory, set by the context
    state_address: str | None = None  # of the state process, if sessions share a state
    _timers: dict[int, tuple[float, float]] = field(init=False)  # that the environment has set

    def __post_init__(self) -> None:
        """Prepare the inboxes of all shards."""
        self.inboxes = [packet_pair() for _ in range(self.plan.shards)]  # reading, writing
        self._oom_score_adj = min(1000, oom_score_adj() + CHILD_OOM_SCORE_ADJ)
        # The kernel closes the writing end when the supervisor exits; copies of sessions read.
        self._life_fd, _ = os.pipe()

    def prepare(self) -> None:
        """Freeze what all children share; once, before the first child."""
        if self.plan.isolates and self.config.session_memory_bytes:
            groups = GroupsBelow()
            if groups.available:
                self._groups = groups
            else:
                text = "no cgroups for isolated sessions (%s); their memory is checked each %g s"
                log.warning(text, groups.why_not, CHECK_SECONDS)
        obstacle = what_forbids_forking()
        self.can_fork = obstacle is None
        if obstacle is not None:
            log.warning("%s; each serving process imports the environment itself", obstacle)
        # A fork has no timers: each child sets them again. The supervisor wants none.
        self._timers = {timer: signal.setitimer(timer, 0) for timer in range(3)}
        set_thread_name(f"host {self.config.name}")
        gc.freeze()

    def shard(self, index: int) -> Child:
        """Start a shard. Raises `OSError`: no room."""
        counters = self.scoreboard[index]
        counters[Field.GENERATION] += 1
        link, childs_link = packet_pair()
        config = ChildConfig(
            index=index,
            generation=counters[Field.GENERATION],
            shards=self.plan.shards,
            max_sessions=self.plan.share(index),
            exclusive=self.plan.exclusive,
            scoreboard_fd=self.scoreboard.fd,
            link_fd=childs_link.fileno(),
            inbox_fd=self.inboxes[index][0].fileno(),
            inbox_fds=tuple(writing.fileno() for _, writing in self.inboxes),
            isolates=self.plan.isolates,
            has_template=self.can_fork and forking.CAN_FORK_SIBLINGS,
            state_address=self.state_address,
        )
        new = Child(0, config, link, time.monotonic(), kills_before=self.count_kills())
        with childs_link:
            try:
                self._start(new, config, childs_link)
            except OSError:
                link.close()
                raise
        return new

    def session(self, holder: Child, end: socket.socket, number: int) -> Child:
        """Start a session's process for the request `number` of a shard; raises `OSError`."""
        group = next(iter(self.session_groups(1)), None)
        new = self.session_child(holder, group)
        new.number = number
        config = ChildConfig(
            index=HOME,
            session_fd=end.fileno(),
            life_fd=self._life_fd if self.can_fork else None,
            imported_fds=tuple(self.imported_fds) if self.can_fork else (),
            state_address=self.state_address,
        )
        try:
            self._start(new, config, end)
        except OSError:
            if group is not None:
                group.remove()
            raise
        return new

    def session_child(self, holder: Child, group: Cgroup | None) -> Child:
        """Return the record of a session's process that will be started."""
        return Child(
            0,
            holder.config,
            None,
            time.monotonic(),
            holder,
            group=group,
            kills_before=self.count_kills(),
            kills=None if group is None else KillCount(group),
            cap_bytes=self.config.session_memory_bytes,
        )

    def session_groups(self, count: int) -> list[Cgroup]:
        """Make memory cgroups with the cap of a session, numbered one after another, or none."""
        limit, made = self.config.session_memory_bytes, list[Cgroup]()
        if self._groups is None or limit is None:
            return []
        try:
            for _ in range(count):
                self._number += 1
                made.append(self._groups.create(f"session-{os.getpid()}-{self._number}", limit))
        except OSError as exc:
            log.warning("no memory cgroup for an isolated session: %s", exc)
            for each in made:
                each.remove()
            return []
        return made

    def _start(self, new: Child, config: ChildConfig, end: socket.socket) -> None:
        parent = os.getpid()
        if not self.can_fork:
            new.pid = self.start_program(asdict(config), config.fds)
            enter_group(new.group, new.pid)
        elif (pid := os.fork()) == 0:
            end.detach()
            self._run_child(new, config, parent)
        else:
            new.pid = pid
        set_oom_score_adj(new.pid, self._oom_score_adj)

    def _run_child(self, new: Child, config: ChildConfig, parent: int) -> Never:
        """Close in the child all descriptors that are the supervisor's, and serve."""
        enter_group(new.group, os.getpid())
        self.leave_supervisor()
        if new.link is not None:
            new.link.detach()
        kind = "session" if new.is_isolated else f"shard {config.index}"
        kept = {*self.imported_fds, *config.fds}
        forking.leave_parent(parent, f"{kind} {self.config.name}", kept)
        for timer, seconds in self._timers.items():
            signal.setitimer(timer, *seconds)
        self.serve(config, None if new.is_isolated else self.scoreboard)

    def start_program(self, values: dict[str, Any], fds: tuple[int, ...]) -> int:
        """Start a child as a program, whose configuration is `values`, and return its pid."""
        environ = os.environ | {
            HOST_CONFIG_VARIABLE: json.dumps(self.config.to_json()),
            CHILD_CONFIG_VARIABLE: json.dumps(values),
        }
        process = subprocess.Popen([sys.executable, "-P", str(PROGRAM)], env=environ, pass_fds=fds)
        process.returncode = 0  # the supervisor waits for it
        return process.pid


def what_forbids_forking() -> str | None:
    """Return why this process cannot be forked safely; None when it can.

    A thread of Python may hold a lock during the fork. Threads of C libraries (BLAS) are not
    counted: these libraries prepare themselves for a fork (`pthread_atfork`).
    """
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if threads:
        return f"importing it left threads running ({', '.join(threads)})"
    if children := len(children_of(os.getpid())):
        return f"importing it left {plural(children, 'process', 'es')} running"
    return None
