# SPDX-License-Identifier: Apache-2.0
"""How a living worker is brought to its end.

    it runs a task ──stop_run──▶ SIGTERM ──grace──▶ kill
    it is idle ──dismiss_idle──▶ LEAVING ──┐
    its task is over, and it must go ──────┴─see_off──▶ end of its pipe ──LEAVE_SECONDS──▶ kill
    it must die ──kill──▶ SIGKILL to its whole tree

A grace that is over is a deadline of the worker's, on which the supervisor acts. How the death is
noticed, and what is done then, stands in `burials.py`.

The stage changes under the pools' lock, which `stop_run` finds taken (it is called on any thread)
and the others take; those are the supervisor thread's.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time

from ..spawning.source import signal_group
from . import process_trees
from .pool import PooledWorker, Pools, Run, Stage, StopReason
from .wakeup import Alarm

LEAVE_SECONDS = 1.0  # a worker that has nothing to do and is told to go


class Dismissals:
    """Ends workers, and the tasks in them."""

    def __init__(self, pools: Pools, alarm: Alarm) -> None:
        self._pools = pools
        self._alarm = alarm

    def stop_run(self, run: Run, reason: StopReason, grace_seconds: float) -> None:
        """Tell a running task to stop; it is killed after the grace. Any thread, under the lock."""
        worker = run.worker
        if worker is None or run.stop_reason is not None:
            return
        run.stop_reason = reason
        if worker.stage is not Stage.RUNNING:  # it is dying already
            return
        deadline = time.monotonic() + grace_seconds
        self._pools.of(worker).enter(worker, Stage.STOPPING, deadline=deadline)
        signal_group(worker.pid, worker.sentinel, signal.SIGTERM)
        self._alarm.set(deadline)

    def see_off(self, worker: PooledWorker) -> None:
        """Let a worker without a task go: it ends at the end of its pipe."""
        with contextlib.suppress(OSError):
            worker.pipe.shutdown(socket.SHUT_WR)
        worker.deadline = time.monotonic() + LEAVE_SECONDS
        self._alarm.set(worker.deadline)

    def dismiss_idle(self, worker: PooledWorker) -> None:
        """Let it go if it is idle."""
        with self._pools.lock:
            if worker.stage is not Stage.IDLE:  # a task was submitted just now
                return
            self._pools.of(worker).enter(worker, Stage.LEAVING)
        self.see_off(worker)

    def kill(self, worker: PooledWorker) -> None:
        """SIGKILL to the whole tree; its death is heard of as any other."""
        with self._pools.lock:
            self._pools.of(worker).enter(worker, Stage.KILLED)
        process_trees.kill_tree(worker)

    def stop_all(self, now: float, deadline: float) -> None:
        """Tell every task to stop by the deadline, and who has none to go."""
        grace_seconds = max(0.0, deadline - now)
        for worker in self._pools.workers():
            self.dismiss_idle(worker)
            with self._pools.lock:
                if worker.run is not None:
                    self.stop_run(worker.run, StopReason.SHUT_DOWN, grace_seconds)

    def kill_all(self) -> None:
        """Wait for nobody any more."""
        for worker in self._pools.workers():
            if worker.stage not in (Stage.KILLED, Stage.DEAD):
                self.kill(worker)
