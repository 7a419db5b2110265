# SPDX-License-Identifier: Apache-2.0
"""`EngineReplica`: one replica of an engine, from its run file to its end.

    engine (looks, find) ──┐                            ┌──▶ status file ──▶ the next agent
    /health, /capacity  ───┼──▶ `../replica_state.py` ──┼──▶ status lines ──▶ daemon, launch
    start, stop, drain  ───┘                            └──▶ what the state makes due ──▶ engine

What is due in each state:

    starting            start the instance, and ask the server until it is ready
    ready               check that the instance still runs and is the same; ask how full it is
    draining            send SIGUSR1, once, to a server of ours (another would end at once); wait
                        until it has exited, or the time is over
    exited              nothing; at a request to start, remove the old instance first
    stopping            stop the instance, read the rest of its log, explain its end, remove it

The replica has exited when its instance has exited, is gone, or was refused; or when the instance
is silent, and the server does not answer repeated questions.

Each step is written to the status file before it is taken. An agent that is killed at any line
leaves a state from which the next one continues:

    starting, no instance     `start` is called (again); an instance that was created has its name
    ready, no instance        it was removed from outside: the replica has exited, as lost
    draining                  the sessions have the time that is left; the signal is sent again
    stopping, an instance     the instance has the grace that is left
    stopping, no instance     it was removed, and that was not reported yet: stopped
    stopping, never asked     the engine has nothing of the replica: stopped, whether it answers or
                              not

If the engine is gone or refuses for a while, the state stays, `problem` says why, and the step is
tried again. A replica is lost only if the engine answers that there is no such instance. It is
refused if the engine has never answered this agent for some seconds (`EngineWatch.reach`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time

from ...env_host.ipc.reports import summary_of
from ...schema.errors import NotAnswering
from ...schema.protocol import CONTAINER_PORT
from ...schema.replica import Process
from ...system.files.log_files import last_lines
from ...system.process.backoff import backoff_seconds
from ...system.process.process_identity import boot_seconds
from ...system.text.json_lines import Json
from .. import run_files
from ..engines import base
from ..replica_state import LEFT_GRACE_SECONDS, Action, Event, State
from ..run_files import RunFile
from ..shim.client import read_status_file
from ..shim.connections import read_operation
from ..shim.server_exit import exit_without_start
from .engine_watch import EngineWatch, exit_reason
from .instance import ReplicaInstance, ReplicaServer, exit_facts, ready_info
from .replica_status import EngineReplicaStatus, StatusServer

log = logging.getLogger(__name__)

LOG_TAIL_LINES = 20
FIRST_PROBE_SECONDS = 0.05  # between two questions whether it is ready; the pause grows
MAX_PROBE_SECONDS = 1.0
CAPACITY_SECONDS = 2.0  # between two questions how full it is
RETRY_SECONDS = 1.0  # after the engine did not answer
DRAIN_SIGNAL = signal.SIGUSR1


class EngineReplica:
    """One replica: its `run_file` and `status`. `run` is its task, which ends with the replica."""

    def __init__(self, run_file: RunFile, watch: EngineWatch, agent: Process) -> None:
        """Continue from an earlier agent's status file. `agent` is this process's identity."""
        self.run_file = run_file
        self.plan = base.ReplicaPlan.of(run_file.data)
        self.status = EngineReplicaStatus(read_status_file(run_file.run_dir))
        self._watch = watch
        self._engine = watch.engine
        self._instance = ReplicaInstance(run_file, watch)
        self._server = ReplicaServer(run_file, self.status)
        self._clients = StatusServer(run_file, self.status, agent, self._handle_command)
        self._due = asyncio.Event()  # something may have changed: `run` looks again
        self._start_is_requested = False
        self._probes = 0
        if self.status.host is None:
            self.status.host, self.status.port = self.plan.host, self.plan.port

    def open(self) -> None:
        """Write the status down, and open the socket for clients; raises `OSError`."""
        self._clients.publish()
        self._clients.open()

    async def close(self) -> None:
        """Close its sockets and its log; the instance keeps running."""
        self._instance.close()
        await self._clients.close()

    def observe(self, instance: base.Instance | None) -> None:
        """Record what a list shows of the instance; make `run` look again if that is new."""
        if self._instance.observe(instance):
            self._due.set()

    def note_problem(self, problem: str | None) -> None:
        """Record why the engine does not answer; None: it does."""
        self._clients.report_problem(problem)
        self._instance.doubt()
        self._due.set()

    def _handle_command(self, line: bytes) -> None:
        op, seconds = read_operation(line)
        match op:
            case "start":
                self._start_is_requested = self.status.life.is_at_rest
            case "stop":
                self._handle(Event.STOP, seconds)
            case "drain" | "leave":  # an instance has an address of its own
                self._handle(Event.DRAIN, seconds)
            case _:
                raise ValueError(f"unknown op: {op!r}")
        self._due.set()

    def _handle(self, event: Event, seconds: float = 0.0) -> None:
        """Record an event, and write the new state down; `run` takes the steps that follow."""
        before = self.status.life
        action = self.status.advance(event, boot_seconds(), seconds)
        if action is Action.DRAIN:  # an instance does not report that it drains
            has_sessions = self.status.life.state is not State.STARTING
            follows = Event.DRAINS if has_sessions else Event.STOP
            self.status.advance(follows, boot_seconds(), LEFT_GRACE_SECONDS)
        if self.status.life != before:
            self._clients.publish()

    async def run(self) -> None:
        """Bring the replica from its observed state to the wanted one, until it is stopped."""
        while self.status.life.state is not State.STOPPED:
            self._due.clear()
            seconds: float | None = RETRY_SECONDS
            try:
                seconds = await self._reconcile()
            except base.EngineGone as exc:
                known = self._instance.known if self.status.life.state is State.READY else None
                is_silent = known and await self._server.why_not_ready(self.plan, known)
                text = "; the replica does not answer either" if is_silent else ""
                self._clients.report_problem(f"{exc.message}{text}")
            except (base.EngineRefused, NotAnswering) as exc:  # at any step but the start
                self._clients.report_problem(exc.message)
            except Exception as exc:  # a defect, which must not end this task
                if self._clients.report_problem(f"{type(exc).__name__}: {exc}"):
                    log.exception("cannot reconcile %s", self.run_file.replica_id)
            else:
                # What keeps it from running is shown to clients that wait for it.
                known = self._instance.known
                waits = None if known is None or known.is_on_its_way else known.waiting
                self._clients.report_problem(self._watch.problem or waits)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), seconds)
        await self._clients.close()

    async def _reconcile(self) -> float | None:
        """Take the next step; return after how many seconds to look again, None: at an event."""
        steps = {
            State.STARTING: self._reconcile_starting,
            State.READY: self._reconcile_ready,
            State.DRAINING: self._drain,
            State.STOPPING: self._stop,
        }
        return await steps.get(self.status.life.state, self._await_start)()

    async def _reconcile_starting(self) -> float | None:
        try:
            if self._instance.known is None:
                await self._reach()
                self._note_instance(await self._instance.start(self.plan))
            instance = await self._find()
        except base.EngineRefused as exc:
            self.status.failed = exc.message if exc.hint is None else f"{exc.message} ({exc.hint})"
            self._note_exit(exit_without_start(self.status.failed))
            self._handle(Event.EXITED)
            return None
        if instance is None or instance.state is base.InstanceState.EXITED:
            return await self._report_exit(instance)
        if instance.state is base.InstanceState.STARTING:
            self._clients.report_waiting(instance.waiting)
            return MAX_PROBE_SECONDS
        why = await self._server.why_not_ready(self.plan, instance)
        if why is not None and await self._server.is_lost(self.plan, instance):
            return await self._report_exit(instance)
        found = await self._read_capacity() if why is None else None
        if why is None and found is None and self._server.has_capacity and instance.drains:  # ours
            why = f"nothing answers at {self._server.address}/capacity"
        if why is not None:
            if self.plan.image and not instance.drains:  # a foreign image, with its own server
                port = f"port {CONTAINER_PORT} or the one that its image exposes"
                why += f"; its server must listen on 0.0.0.0, {port}"
            self._clients.report_waiting(why)
            self._probes += 1
            first, longest = FIRST_PROBE_SECONDS, MAX_PROBE_SECONDS
            return backoff_seconds(self._probes, first=first, longest=longest)
        if self.status.life.state is State.STARTING:  # not to be stopped by now
            self.status.note_ready(ready_info(found))
            self._handle(Event.READY)
        return 0.0

    async def _reach(self) -> None:
        """Write down that the engine may be asked for a start, as soon as it answers at all."""
        if not self.status.is_asked:
            await self._watch.reach(self._engine.find, self.plan)
            self.status.is_asked = True
            self._clients.publish()

    async def _reconcile_ready(self) -> float | None:
        instance = await self._find()
        if instance is None or await self._has_ended(instance):
            return await self._report_exit(instance)
        if self._server.is_answering:
            await self._read_capacity()
        return CAPACITY_SECONDS if self._server.has_capacity or instance.is_silent else None

    async def _drain(self) -> float | None:
        instance = await self._find()
        if instance is None or await self._has_ended(instance):
            self._handle(Event.EXITED)
            return 0.0
        self._handle(Event.TIME)
        if self.status.life.state is not State.DRAINING:
            return 0.0
        if instance.drains:
            await self._instance.signal(instance, DRAIN_SIGNAL)
        await self._read_capacity()
        return min(self.status.life.seconds_left(boot_seconds()), CAPACITY_SECONDS)

    async def _await_start(self) -> float | None:
        if not self._start_is_requested:
            return None
        instance = await self._find()
        if instance is not None:
            await self._instance.remove(instance)
        self._start_is_requested = False
        if not self.status.life.is_at_rest:  # it is being stopped by now
            return 0.0
        if (now := run_files.read(self.run_file.run_dir)) is not None:
            self.plan = base.ReplicaPlan.of(now.data)  # its share of the sessions may have changed
        self._instance.known = None
        self._probes = 0
        self._server = ReplicaServer(self.run_file, self.status)  # drops earlier answers
        self.status.host, self.status.port = self.plan.host, self.plan.port
        self._handle(Event.START)
        return 0.0

    async def _stop(self) -> float | None:
        instance = await self._find_to_stop()
        if instance is not None:
            if instance.state is not base.InstanceState.EXITED:
                await self._instance.end(instance, lambda: self.status.life, self._due)
                instance = await self._find() or instance
            await self._instance.finish_log()
            if self.status.known["exit"] is None:  # otherwise it had ended before
                self._note_end(instance, stopped_by_us=True)
            await self._instance.remove(instance)
        self._handle(Event.GONE)
        return 0.0

    async def _find_to_stop(self) -> base.Instance | None:
        if self._watch.problem is not None and not self.status.is_asked:
            return None
        was_refused = self.status.instance is None and self.status.known["exit"] is not None
        try:
            return await self._find()
        except base.NameTaken:
            return None
        except base.EngineRefused:
            if was_refused:  # because the library is missing, say: there is no instance
                return None
            raise

    async def _find(self) -> base.Instance | None:
        instance = await self._instance.find(self.plan)
        if instance is not None:
            self._note_instance(instance)
        return instance

    def _note_instance(self, instance: base.Instance) -> None:
        if self.status.note_instance(instance):
            self._clients.publish()

    async def _has_ended(self, instance: base.Instance) -> bool:
        is_over = instance.state is base.InstanceState.EXITED
        return is_over or await self._server.is_lost(self.plan, instance)

    async def _report_exit(self, instance: base.Instance | None) -> float | None:
        await self._instance.finish_log()
        self._note_end(instance)
        self._handle(Event.EXITED)
        return None

    def _note_exit(self, reason: Json) -> None:
        tail = last_lines(self.run_file.log_path, LOG_TAIL_LINES)
        self.status.note_exit(reason, tail, time.time())

    def _note_end(self, instance: base.Instance | None, *, stopped_by_us: bool = False) -> None:
        reason = exit_reason(
            exit_facts(instance, self.status.instance, self.run_file.provider),
            pid=self.status.pid or 0,
            stopped_by_us=stopped_by_us,
            limit_bytes=self.plan.memory_bytes,
            oom_reported_at=self.status.oom_reported_at,
        )
        self._note_exit(reason.to_json())

    async def _read_capacity(self) -> Json | None:
        found = await self._server.read_capacity()
        if found is None or not self._server.has_capacity:
            return found
        served = {"sessions": int(found["sessions"]), "capacity": summary_of(found)}
        is_new = self.status.note_served({"sessions_fail": None, **found, **served})
        if self.status.note_reported(found.get("exits", [])):
            self._clients.publish()
        elif is_new:
            self._clients.send_status()
        return found
